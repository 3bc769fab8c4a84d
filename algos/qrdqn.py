"""QR-DQN: DQN that learns the law of returns as N quantiles.

    taus_i    = (i + 1/2) / N                                              i = 0..N-1
    y_j       = r + (1 - terminated) gamma^n qbar_j(s', a*)                a* = argmax_a Score(qbar(s', a))
                r the sum of n discounted rewards (fewer where the episode ends), no off-policy correction
    L         = sum_i mean_j |taus_i - 1{u_ij < 0}| Huber_kappa(u_ij),     u_ij = y_j - q_i(s, a)
    Score(q)  = mean_i q_i

`quantiles(...)[..., i]` is q_i, the quantile of the return at taus_i.

`risk_tau` below 1 replaces the mean by the CVaR of the predicted law, the mean of the lowest risk_tau N quantiles, for
acting and for a*. This is what agents averse to risk often do, and it does not maximise the CVaR of the whole return:
what was collected before is forgotten at every step. `deep_eta` does maximise it; its page compares the two.

Source: Dabney, Rowland, Bellemare, Munos, "Distributional Reinforcement Learning with Quantile Regression", AAAI 2018
(arXiv 1710.10044), algorithm 1. Code: google-deepmind/dqn_zoo, qrdqn. Per-step CVaR: Dabney, Ostrovski, Silver, Munos,
"Implicit Quantile Networks", ICML 2018 (arXiv 1806.06923).

Deviations:
- Huber_kappa is not divided by kappa, as in the paper (its kappa is 1) and in dqn_zoo; some code divides.
- No bound on the gradient's norm, as in the paper; dqn_zoo has 10.
- N = 201 as in dqn_zoo; the paper has 200.
- Kernels start as lecun_normal, biases as 0; theirs are uniform.
- Evaluation is without epsilon; theirs keeps 0.001. Rewards are not clipped; clip in the environment.
- Where quantiles cross, the CVaR takes them in the order of i, not of size.

One `step` is `max(num_envs, train_period)` env steps and one gradient step for every `train_period` of them.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from envs.types import (
    Count,
    Example,
    Fraction,
    NonNegative,
    Positive,
    Spec,
    Widths,
    example_transition,
    pytree,
    static,
    zeros,
)
from networks.objectives import Tail
from networks.torso import split_network
from replay import ring

ACTIONS = ("discrete",)


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    learning_rate: Positive = 5e-5  # Adam's; published 5e-5 (Atari)
    adam_epsilon: Positive = 3.125e-4  # added to Adam's root mean square; published 0.01/32
    gamma: Fraction = 0.99  # discount per env step; published 0.99
    epsilon_start: Fraction = 1.0  # exploration after the prefill; published 1.0
    epsilon_end: Fraction = 0.01  # exploration from epsilon_decay on; published 0.01
    epsilon_decay: NonNegative = 1_000_000.0  # env steps after the prefill, linear; published 1M
    kappa: NonNegative = 1.0  # where Huber's square turns into a line, return; 0: the plain quantile loss; published 1
    risk_tau: Tail = 1.0  # fraction of the law acted on; 1: its mean
    anneal_steps: NonNegative = 0.0  # env steps over which the learning rate falls to 0, linearly; 0: constant
    # Static: shape the program.
    num_quantiles: Count = static(default=201)  # N; published 200 (dqn_zoo 201)
    target_period: Count = static(default=2_500)  # gradient steps between copies of the target; published 10k env steps
    train_period: Count = static(default=4)  # env steps per gradient step; published 4
    n_step: Count = static(default=1)  # env steps in a return; published 1
    batch_size: Count = static(default=32)  # transitions; published 32
    capacity: Count = static(default=1_000_000)  # transitions over all envs; published 1e6
    prefill: Count = static(default=50_000)  # env steps by a uniform policy; published 50k
    hidden: Widths = static(default=(512,))  # widths of the dense layers; published (512,)
    padding: str = static(default="VALID")  # of the 84x84 torso, SAME or VALID; published VALID


class State(NamedTuple):
    params: dict
    target_params: dict
    opt_state: tuple
    replay: ring.Replay
    env_state: object
    env_steps: jax.Array  # () int32, over all envs, prefill included
    gradient_steps: jax.Array  # () int32
    key: jax.Array


def network(config, spec: Spec) -> nn.Module:
    torso, head = split_network(spec.obs, config.hidden, spec.num_actions * config.num_quantiles, config.padding)
    return nn.Sequential([torso, head])


def quantiles(config, spec, params, obs):
    """q of a batch of observations, `(B, A, N)`."""
    q = network(config, spec).apply(params, obs)  # (B, A N)
    return q.reshape(-1, spec.num_actions, config.num_quantiles)


def scores(config, q):
    """What actions are compared by: the CVaR of their laws at risk_tau. `(..., A, N)` to `(..., A)`."""
    n = config.num_quantiles
    weights = jnp.clip(config.risk_tau * n - jnp.arange(n), 0, 1) / (config.risk_tau * n)  # (N,)
    return jnp.dot(q, weights, precision="highest")


def target_of(config, spec, target_params, batch, discount):
    """y, `(B, N)`. Args: batch `(B, ...)`, of n steps; discount `(B,)`, gamma^n (1 - terminated)."""
    q = quantiles(config, spec, target_params, batch.next_obs)  # (B, A, N)
    best = of_action(q, scores(config, q).argmax(-1))
    return batch.reward[:, None] + discount[:, None] * best


def of_action(q, action):
    """`(B, A, N)` and `(B,)` to `(B, N)`."""
    return jnp.take_along_axis(q, action[:, None, None], 1)[:, 0]


def quantile_loss(q, target, kappa):
    """L, of one law. Args: q, target `(N,)`, any number of each; kappa (), 0 for absolute errors. Returns: ()."""
    taus = (jnp.arange(q.shape[0]) + 0.5) / q.shape[0]
    u = jax.lax.stop_gradient(target)[None, :] - q[:, None]  # (i, j)
    inner = jnp.minimum(jnp.abs(u), kappa)
    huber = jnp.where(kappa > 0, inner * (jnp.abs(u) - inner / 2), jnp.abs(u))
    return (jnp.abs(taus[:, None] - (u < 0)) * huber).mean(1).sum()


def epsilon(config, env_steps):
    """Linear from epsilon_start at the end of the prefill to epsilon_end `epsilon_decay` env steps later."""
    progress = (env_steps - config.prefill) / jnp.maximum(config.epsilon_decay, 1.0)
    return config.epsilon_start + jnp.clip(progress, 0, 1) * (config.epsilon_end - config.epsilon_start)


def optimizer(config, env_steps):
    """Adam with the learning rate of `env_steps`."""
    progress = jnp.where(config.anneal_steps > 0, env_steps / jnp.maximum(config.anneal_steps, 1.0), 0.0)
    return optax.adam(config.learning_rate * jnp.clip(1 - progress, 0, 1), eps=config.adam_epsilon)


def period(config, env) -> int:
    """Env steps that one `step` makes."""
    return max(env.num_envs, config.train_period)


def check(config, env):
    """What `init` needs beyond the ranges in Config. Raises ValueError."""
    ring.check(config.capacity, env.num_envs)
    small, large = sorted((env.num_envs, config.train_period))
    if large % small:
        raise ValueError(
            f"train_period {config.train_period} and num_envs {env.num_envs}: one must be a multiple of the other"
        )
    if config.prefill % period(config, env):
        raise ValueError(
            f"prefill {config.prefill} must be a multiple of {period(config, env)}, "
            "the larger of num_envs and train_period"
        )
    rows = min(config.prefill, config.capacity) // env.num_envs
    if rows < config.n_step:
        raise ValueError(
            f"n_step {config.n_step} is longer than the {rows} steps an environment stores before learning; "
            "raise prefill and capacity"
        )
    if not hasattr(env.spec.obs, "shape"):
        raise ValueError("qrdqn needs one array as its observation; this environment's is structured")
    if config.padding not in ("SAME", "VALID"):
        raise ValueError(f"padding {config.padding!r} must be SAME or VALID")


def init(config, env, key) -> State:
    key, params_key, reset_key, prefill_key = jax.random.split(key, 4)
    params = network(config, env.spec).init(params_key, zeros(env.spec.obs))

    # Replay, prefilled by a uniform policy.
    env_state = env.reset(reset_key)
    replay = ring.create(config.capacity, env.num_envs, example_transition(env.spec))

    def collect(carry, key):
        env_state, replay = carry
        action_key, env_key = jax.random.split(key)
        action = jax.random.randint(action_key, (env.num_envs,), 0, env.spec.num_actions)
        env_state, transition, _ = env.step(env_key, env_state, action)
        return (env_state, ring.insert(replay, transition)), None

    keys = jax.random.split(prefill_key, config.prefill // env.num_envs)
    (env_state, replay), _ = jax.lax.scan(collect, (env_state, replay), keys)
    opt_state, env_steps = optimizer(config, 0).init(params), jnp.int32(config.prefill)
    return State(params, params, opt_state, replay, env_state, env_steps, jnp.int32(0), key)


def act(config, spec, params, obs, key):
    """Greedy with respect to `scores`, `(B,)` int32."""
    return scores(config, quantiles(config, spec, params, obs)).argmax(-1).astype(jnp.int32)


def step(config, env, state: State) -> tuple[State, dict]:
    key, act_key, learn_key = jax.random.split(state.key, 3)

    # Act and store, epsilon-greedily.
    def act_and_store(carry, key):
        env_state, replay, env_steps = carry
        greedy_key, uniform_key, explore_key, env_key = jax.random.split(key, 4)
        greedy = act(config, env.spec, state.params, env_state.obs, greedy_key)
        uniform = jax.random.randint(uniform_key, greedy.shape, 0, env.spec.num_actions)
        explore = jax.random.uniform(explore_key, greedy.shape) < epsilon(config, env_steps)
        action = jnp.where(explore, uniform, greedy)
        env_state, transition, finished = env.step(env_key, env_state, action)
        return (env_state, ring.insert(replay, transition), env_steps + env.num_envs), finished

    # Learn: one gradient step for every `train_period` env steps.
    def learn(carry, key):
        params, target_params, opt_state, gradient_steps = carry
        batch, discount = ring.sample_n_step(replay, key, config.batch_size, config.n_step, config.gamma)
        target = target_of(config, env.spec, target_params, batch, discount)

        def loss_fn(params):
            q = of_action(quantiles(config, env.spec, params, batch.obs), batch.action)  # (B, N)
            return jax.vmap(quantile_loss, (0, 0, None))(q, target, config.kappa).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer(config, state.env_steps).update(grads, opt_state)
        params = optax.apply_updates(params, updates)

        gradient_steps += 1
        due = gradient_steps % config.target_period == 0
        target_params = jax.tree.map(lambda p, t: jnp.where(due, p, t), params, target_params)
        return (params, target_params, opt_state, gradient_steps), loss

    carry = (state.env_state, state.replay, state.env_steps)
    keys = jax.random.split(act_key, period(config, env) // env.num_envs)
    (env_state, replay, env_steps), finished = jax.lax.scan(act_and_store, carry, keys)
    carry = (state.params, state.target_params, state.opt_state, state.gradient_steps)
    keys = jax.random.split(learn_key, period(config, env) // config.train_period)
    learned, loss = jax.lax.scan(learn, carry, keys)
    params, target_params, opt_state, gradient_steps = learned

    state = State(params, target_params, opt_state, replay, env_state, env_steps, gradient_steps, key)
    return state, dict(loss=loss, epsilon=epsilon(config, env_steps), **finished)


EXAMPLE = Example(
    source="CartPole-v1",
    steps=200_000,
    eval_period=10_000,
    num_envs=8,
    seeds=(0, 1, 2, 3, 4),
    config=Config(
        learning_rate=5e-4,
        adam_epsilon=1e-8,
        epsilon_end=0.05,
        epsilon_decay=30_000.0,
        num_quantiles=32,
        target_period=100,
        train_period=8,
        n_step=5,
        batch_size=64,
        capacity=100_000,
        prefill=1_000,
        hidden=(120, 84),
    ),
)
