"""DecQN, decoupled Q-learning: value-based control of continuous actions as a team of discrete ones.

Every dimension of the action is cut into n bins by itself; the value of an action is the mean over its D dimensions:

    Q(s, a)  = 1/D sum_j Q_j(s, a_j)           D n numbers instead of n^D; the maximum is taken dimension by dimension

Two critics i = 1, 2. The online one chooses, and the two target critics' average values:

    y_ij     = R + gamma^m (1 - terminated) 1/2 (Qbar^1_j + Qbar^2_j)(s', argmax_k Q^i_j(s', k))
               R the sum of m <= n_step discounted rewards
    delta_i  = 1/D sum_j (y_ij - Q^i_j(s, a_j))                    the mean over dimensions comes before the loss
    L        = sum_i mean_b w_b Huber(delta_i)
    w_b      = (1 / p_b)^beta / max_b (1 / p_b)^beta               p_b the probability that b was drawn with
    priority = (1/2 sum_i |delta_i|)^alpha

Two bins are bang-bang control. Acting: epsilon-greedy in every dimension by itself on max(Q^1, Q^2). The authors' code
draws an action from probabilities that do not sum to one, which leaves in each dimension

    epsilon' = (epsilon/D) / (epsilon/D + 1 - epsilon)

of a uniformly drawn bin: epsilon 0.1 is 0.036 in three dimensions.

Index mapping. Critics have a leading axis of 2. Q is `(2, B, D, n)`; bin k of n is the action -1 + 2 k / (n - 1).

Source: Seyde, Werner, Schwarting, Gilitschenski, Riedmiller, Rus, Wulfmeier, "Solving Continuous Control via
Q-learning", ICLR 2023 (arXiv 2210.12566); https://github.com/tseyde/decqn at 2309e0b. Networks are those of Acme.

Deviations:
- Bins are the same in every dimension, -1 to 1; the code's wrapper reads those of the first one for all.
- A new transition has the largest priority so far, as theirs has; ours enters as soon as its n steps are known.
- 1e-6 is added to the error of a priority, so that none is 0 for ever.
- Steps per gradient step are fixed; theirs follow from samples per insert, on average.
- Evaluation is greedy on max(Q^1, Q^2), as theirs. Pixels are not supported.

One `step` is `max(num_envs, train_period)` env steps, and one gradient step per `train_period` of them.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from envs.types import Count, Example, Fraction, Positive, Spec, example_transition, pytree, static, zeros
from networks import dense, ensemble
from networks.norm import LayerNorm
from networks.torso import flat
from replay import prioritised, ring

ACTIONS = ("continuous",)
SMALLEST = 1e-6  # added to the errors that priorities are made of


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    learning_rate: Positive = 1e-4  # Adam's; published 1e-4
    gamma: Fraction = 0.99  # discount per env step; published 0.99
    epsilon: Fraction = 0.1  # exploration, of which epsilon' is left per dimension; published 0.1
    max_grad_norm: Positive = 40.0  # global norm that gradients are cut to; published 40
    priority_exponent: Fraction = 0.6  # alpha, 0 draws uniformly; published 0.6
    importance_exponent: Fraction = 0.2  # beta; published 0.2
    # Static: shape the program.
    bins: Count = static(default=2)  # n, of each dimension; published 2
    n_step: Count = static(default=3)  # env steps in a return; published 3
    train_period: Count = static(default=8)  # env steps per gradient step; published 8 (32 samples per insert of 256)
    target_period: Count = static(default=100)  # gradient steps between copies to the target; published 100
    batch_size: Count = static(default=256)  # transitions; published 256
    capacity: Count = static(default=1_000_000)  # transitions over all envs; published 1e6
    prefill: Count = static(default=1_000)  # env steps by a uniform policy over the bins; published 1000
    hidden_size: Count = static(default=512)  # of every layer; published 512
    num_blocks: Count = static(default=1)  # residual blocks; published 1


class Params(NamedTuple):
    critics: dict  # leading axis 2


class State(NamedTuple):
    params: Params
    target_params: Params
    opt_state: tuple
    replay: prioritised.Replay
    env_state: object
    env_steps: jax.Array  # () int32, over all envs, prefill included
    gradient_steps: jax.Array  # () int32
    key: jax.Array


class Critic(nn.Module):
    """Values of all bins, `(..., D, n)`, of a vector: a layer, residual blocks of two, ELU, and the last layer."""

    hidden_size: int
    num_blocks: int
    size: int  # D
    bins: int

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.variance_scaling(1 / 3, "fan_out", "uniform")
        layer = lambda size: nn.Dense(size, kernel_init=init, dot_general=dense.dot_general)
        x = layer(self.hidden_size)(x)
        for _ in range(self.num_blocks):
            x = LayerNorm()(x + layer(self.hidden_size)(nn.relu(layer(self.hidden_size)(x))))
        return layer(self.size * self.bins)(nn.elu(x)).reshape(*x.shape[:-1], self.size, self.bins)


def network(config, spec: Spec) -> Critic:
    return Critic(config.hidden_size, config.num_blocks, spec.action_size, config.bins)


def q_values(config, spec, params: Params, obs):
    """Q^1 and Q^2 of a batch of observations, `(2, B, D, n)`."""
    return ensemble.apply(network(config, spec), params.critics, flat(spec.obs, obs))


def encode(action, bins: int):
    """The bins nearest to actions in [-1, 1], `(..., D)` int32."""
    return jnp.round((action + 1) / 2 * (bins - 1)).astype(jnp.int32)


def decode(k, bins: int):
    """Actions of bins `(..., D)`, evenly spaced from -1 to 1."""
    return k.astype(jnp.float32) * (2 / (bins - 1)) - 1


def at(q, k):
    """Those of the chosen bins: `(..., D, n)` and `(..., D)` to `(..., D)`."""
    return jnp.take_along_axis(q, k[..., None], -1)[..., 0]


def target_of(q_next, target_next, reward, discount):
    """y_i of one critic, `(B, D)`.

    Args: q_next, the critic's own values `(B, D, n)`; target_next, both target critics' `(2, B, D, n)`; reward `(B,)`,
        the n-step sum; discount `(B,)`, gamma^m (1 - terminated).
    """
    valued = at(target_next.mean(0), q_next.argmax(-1))
    return reward[:, None] + discount[:, None] * valued


def td_errors(q, k, target):
    """delta of one critic, `(B,)`: the mean over dimensions. Args: q `(B, D, n)`; k, target `(B, D)`."""
    return (target - at(q, k)).mean(-1)


def importance(probability, exponent):
    """Weights `(B,)` that undo how often each was drawn, the largest being 1. Args: probability `(B,)`."""
    weight = probability**-exponent
    return weight / weight.max()


def dither(epsilon, size: int):
    """epsilon', the probability with which each of `size` dimensions draws its bin uniformly."""
    share = epsilon / size
    return share / (share + 1 - epsilon)


def optimizer(config):
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(config.learning_rate))


def update(config, spec, params: Params, target_params: Params, opt_state, batch, discount, weight):
    """One gradient step of both critics. Args: batch, n-step transitions, leaves `(B, ...)`; discount, weight `(B,)`.

    Returns: params, opt_state, 1/2 sum_i |delta_i| `(B,)`, metrics.
    """
    q_next = q_values(config, spec, params, batch.next_obs)  # (2, B, D, n)
    target_next = q_values(config, spec, target_params, batch.next_obs)
    target = jax.vmap(target_of, in_axes=(0, None, None, None))(q_next, target_next, batch.reward, discount)
    target = jax.lax.stop_gradient(target)  # (2, B, D)
    k = encode(batch.action, config.bins)

    def loss_fn(params):
        q = q_values(config, spec, params, batch.obs)
        td_error = jax.vmap(td_errors, in_axes=(0, None, 0))(q, k, target)  # (2, B)
        loss = (weight[None] * optax.huber_loss(td_error)).mean(1).sum()
        return loss, (td_error, at(q, k[None]).mean())

    (loss, (td_error, q_mean)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = optimizer(config).update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, jnp.abs(td_error).mean(0), dict(loss=loss, q_mean=q_mean)


def period(config, env) -> int:
    """Env steps that one `step` makes."""
    return max(env.num_envs, config.train_period)


def check(config, env):
    """What `init` needs beyond the ranges in Config. Raises ValueError."""
    prioritised.check(config.capacity, env.num_envs, config.n_step)
    if config.bins < 2:
        raise ValueError(f"bins {config.bins} must be at least 2: the two ends of every dimension")
    small, large = sorted((env.num_envs, config.train_period))
    if large % small:
        raise ValueError(
            f"train_period {config.train_period} and num_envs {env.num_envs}: one must be a multiple of the other"
        )
    if config.prefill % large:
        raise ValueError(
            f"prefill {config.prefill} must be a multiple of {large}, the larger of num_envs and train_period"
        )
    rows = min(config.prefill, config.capacity) // env.num_envs
    if rows <= config.n_step:
        raise ValueError(
            f"n_step {config.n_step} needs {config.n_step + 1} steps of each of {env.num_envs} environments before "
            f"learning, not {rows}: raise prefill {config.prefill} and capacity {config.capacity}"
        )
    if any(len(s.shape) > 1 for s in jax.tree.leaves(env.spec.obs)):
        raise ValueError(f"decqn reads vectors; this environment's observations are {env.spec.obs}")


def init(config, env, key) -> State:
    key, critic_key, reset_key, prefill_key = jax.random.split(key, 4)
    spec = env.spec

    # Networks; the targets start as copies.
    critics = ensemble.init(network(config, spec), critic_key, 2, flat(spec.obs, zeros(spec.obs)))
    params = Params(critics)

    # Replay, prefilled by a uniform policy.
    env_state = env.reset(reset_key)
    replay = prioritised.create(config.capacity, env.num_envs, example_transition(spec), config.n_step, True)

    def collect(carry, key):
        env_state, replay = carry
        action_key, env_key = jax.random.split(key)
        k = jax.random.randint(action_key, (env.num_envs, spec.action_size), 0, config.bins)
        env_state, transition, _ = env.step(env_key, env_state, decode(k, config.bins))
        return (env_state, prioritised.insert(replay, transition)), None

    keys = jax.random.split(prefill_key, config.prefill // env.num_envs)
    (env_state, replay), _ = jax.lax.scan(collect, (env_state, replay), keys)
    opt_state = optimizer(config).init(params)
    return State(params, params, opt_state, replay, env_state, jnp.int32(config.prefill), jnp.int32(0), key)


def greedy(config, spec, params: Params, obs):
    """The best bin of every dimension by max(Q^1, Q^2), `(B, D)`."""
    return q_values(config, spec, params, obs).max(0).argmax(-1)


def act(config, spec, params: Params, obs, key):
    """The best action, dimension by dimension."""
    return decode(greedy(config, spec, params, obs), config.bins)


def explore(config, spec, params: Params, obs, key):
    """The best action, each dimension with probability epsilon' a uniformly drawn bin instead."""
    drawn_key, uniform_key = jax.random.split(key)
    k = greedy(config, spec, params, obs)
    drawn = jax.random.uniform(drawn_key, k.shape) < dither(config.epsilon, spec.action_size)
    return decode(jnp.where(drawn, jax.random.randint(uniform_key, k.shape, 0, config.bins), k), config.bins)


def step(config, env, state: State) -> tuple[State, dict]:
    key, act_key, learn_key = jax.random.split(state.key, 3)
    spec = env.spec

    # Act and store.
    def act_and_store(carry, key):
        env_state, replay = carry
        action_key, env_key = jax.random.split(key)
        action = explore(config, spec, state.params, env_state.obs, action_key)
        env_state, transition, finished = env.step(env_key, env_state, action)
        return (env_state, prioritised.insert(replay, transition)), finished

    vector_steps = period(config, env) // env.num_envs
    (env_state, replay), finished = jax.lax.scan(
        act_and_store, (state.env_state, state.replay), jax.random.split(act_key, vector_steps)
    )

    # Learn.
    def learn(carry, key):
        params, target_params, opt_state, replay, gradient_steps = carry
        slot, probability = prioritised.draw(replay, key, config.batch_size)
        batch, discount = ring.n_step(prioritised.windows(replay, slot, config.n_step), config.gamma)
        weight = importance(probability, config.importance_exponent)
        params, opt_state, td_error, metrics = update(
            config, spec, params, target_params, opt_state, batch, discount, weight
        )
        replay = prioritised.update(replay, slot, (td_error + SMALLEST) ** config.priority_exponent)
        due = (gradient_steps + 1) % config.target_period == 0
        target_params = jax.tree.map(lambda p, t: jnp.where(due, p, t), params, target_params)
        return (params, target_params, opt_state, replay, gradient_steps + 1), metrics

    updates = period(config, env) // config.train_period
    carry = (state.params, state.target_params, state.opt_state, replay, state.gradient_steps)
    (params, target_params, opt_state, replay, gradient_steps), metrics = jax.lax.scan(
        learn, carry, jax.random.split(learn_key, updates)
    )

    env_steps = state.env_steps + period(config, env)
    state = State(params, target_params, opt_state, replay, env_state, env_steps, gradient_steps, key)
    return state, dict(metrics, **finished)


EXAMPLE = Example(
    source="Pendulum-v1",
    steps=20_000,
    eval_period=1_000,
    num_envs=1,
    seeds=(0, 1, 2),
    config=Config(
        learning_rate=1e-3,
        bins=3,
        train_period=2,
        batch_size=128,
        capacity=20_000,
        hidden_size=64,
    ),
)
