"""C51: DQN that learns the law of returns as probabilities of fixed atoms; or, with `one_step`, of one step only.

    z_k       = v_min + k (v_max - v_min) / (N - 1)                        k = 0..N-1
    C51       m = projection of r + (1 - terminated) gamma^n Z,            Z ~ pbar(s', a*)
    one_step  m = projection of r + (1 - terminated) gamma^n Score(pbar(s', a*))
              r the sum of n discounted rewards (fewer where the episode ends), no off-policy correction
    L         = -sum_k m_k log p_k(s, a)
    Score(p)  = sum_k z_k p_k                                              a* = argmax_a Score(pbar(s', a))

The projection splits an atom between the two z beside it and so keeps its mean; outside it takes the nearest end
(`networks/laws.py`). `logits(...)[..., k]` is log p_k but for a constant.

The one-step agent forgets all randomness but that of the next reward and successor. Its law is no law of returns, but
its means follow Q-learning's, and unlike C51's its operator contracts in control too, ties included. The scalar is
clipped after averaging, where C51 clips each atom before.

Source: Bellemare, Dabney, Munos, "A Distributional Perspective on Reinforcement Learning", ICML 2017 (arXiv
1707.06887), algorithm 1; code: google-deepmind/dqn_zoo, c51. One step: Achab, Alami, Djilali, Fedyanin, Moulines,
"One-Step Distributional Reinforcement Learning", TMLR 2023 (arXiv 2304.14421); code: mastane/cleanrl, os_c51.

Deviations:
- No bound on the gradient's norm, as in the paper; dqn_zoo has 10.
- log p is a log-softmax; os_c51 takes the logarithm of probabilities clipped to [1e-5, 1 - 1e-5].
- Kernels start as lecun_normal, biases as 0; theirs are uniform.
- Evaluation is without epsilon; theirs keeps 0.001. Rewards are not clipped; clip in the environment.

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
    Real,
    Spec,
    Widths,
    example_transition,
    pytree,
    static,
    zeros,
)
from networks import laws
from networks.torso import split_network
from replay import ring

ACTIONS = ("discrete",)


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    learning_rate: Positive = 2.5e-4  # Adam's; published 2.5e-4 (Atari)
    adam_epsilon: Positive = 3.125e-4  # added to Adam's root mean square; published 0.01/32
    gamma: Fraction = 0.99  # discount per env step; published 0.99
    epsilon_start: Fraction = 1.0  # exploration after the prefill; published 1.0
    epsilon_end: Fraction = 0.01  # exploration from epsilon_decay on; published 0.01
    epsilon_decay: NonNegative = 1_000_000.0  # env steps after the prefill, linear; published 1M
    v_min: Real = -10.0  # the least atom, return; published -10
    v_max: Real = 10.0  # the greatest; published 10
    anneal_steps: NonNegative = 0.0  # env steps over which the learning rate falls to 0, linearly; 0: constant
    # Static: shape the program.
    num_atoms: Count = static(default=51)  # N; published 51
    target_period: Count = static(default=2_500)  # gradient steps between copies of the target; published 10k env steps
    train_period: Count = static(default=4)  # env steps per gradient step; published 4
    n_step: Count = static(default=1)  # env steps in a return; published 1
    batch_size: Count = static(default=32)  # transitions; published 32
    capacity: Count = static(default=1_000_000)  # transitions over all envs; published 1e6
    prefill: Count = static(default=50_000)  # env steps by a uniform policy; published 50k
    hidden: Widths = static(default=(512,))  # widths of the dense layers; published (512,)
    padding: str = static(default="VALID")  # of the 84x84 torso, SAME or VALID; published VALID
    one_step: bool = static(default=False)  # keep the randomness of one step only


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
    torso, head = split_network(spec.obs, config.hidden, spec.num_actions * config.num_atoms, config.padding)
    return nn.Sequential([torso, head])


def logits(config, spec, params, obs):
    """log p, but for a constant, of a batch of observations, `(B, A, N)`."""
    logits = network(config, spec).apply(params, obs)  # (B, A N)
    return logits.reshape(-1, spec.num_actions, config.num_atoms)


def support(config):
    """z, `(N,)`."""
    return jnp.linspace(config.v_min, config.v_max, config.num_atoms)


def scores(config, logits):
    """What actions are compared by: the means of their laws. `(..., A, N)` to `(..., A)`."""
    return jnp.dot(jax.nn.softmax(logits), support(config), precision="highest")


def target_of(config, spec, target_params, batch, discount):
    """m, `(B, N)`. Args: batch `(B, ...)`, of n steps; discount `(B,)`, gamma^n (1 - terminated)."""
    next_logits = logits(config, spec, target_params, batch.next_obs)  # (B, A, N)
    score, z = scores(config, next_logits), support(config)
    if config.one_step:
        return laws.two_hot(batch.reward + discount * score.max(-1), z)
    best = jax.nn.softmax(of_action(next_logits, score.argmax(-1)))
    return laws.categorical(batch.reward[:, None] + discount[:, None] * z[None], best, z)


def of_action(logits, action):
    """`(B, A, N)` and `(B,)` to `(B, N)`."""
    return jnp.take_along_axis(logits, action[:, None, None], 1)[:, 0]


def cross_entropy(logits, target):
    """L, of one law or of many. Args: logits, target `(..., N)`. Returns: `(...)`, nats."""
    return -(jax.lax.stop_gradient(target) * jax.nn.log_softmax(logits)).sum(-1)


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
        raise ValueError("c51 needs one array as its observation; this environment's is structured")
    if config.padding not in ("SAME", "VALID"):
        raise ValueError(f"padding {config.padding!r} must be SAME or VALID")
    if config.num_atoms < 2:
        raise ValueError(f"num_atoms {config.num_atoms} must be at least 2")
    if config.v_min >= config.v_max:
        raise ValueError(f"v_min {config.v_min:g} must be less than v_max {config.v_max:g}")


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
    return scores(config, logits(config, spec, params, obs)).argmax(-1).astype(jnp.int32)


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
            predicted = of_action(logits(config, env.spec, params, batch.obs), batch.action)  # (B, N)
            return cross_entropy(predicted, target).mean()

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
    steps=100_000,
    eval_period=5_000,
    num_envs=8,
    seeds=(0, 1, 2, 3, 4),
    config=Config(
        learning_rate=5e-4,
        adam_epsilon=1e-8,
        epsilon_end=0.05,
        epsilon_decay=30_000.0,
        v_min=0.0,
        v_max=100.0,
        num_atoms=51,
        target_period=100,
        train_period=8,
        n_step=5,
        batch_size=64,
        capacity=100_000,
        prefill=1_000,
        hidden=(120, 84),
    ),
)
