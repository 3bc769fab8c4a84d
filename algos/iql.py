"""IQL, implicit Q-learning: offline RL that never asks for the value of an action outside the data.

    u       = min_k Qbar_k(s, a) - V(s)
    L_V     = E[ |expectile - 1(u < 0)| u^2 ]                                                (5)
    L_Q     = sum_k E[ (r + gamma (1 - terminated) V(s') - Q_k(s, a))^2 ]                    (6)
    L_pi    = -E[ min(exp(inverse_temperature (min_k Qbar_k(s, a) - V(s))), max_weight) log pi(a | s) ]   (7)

V(s) is an expectile of Q(s, a) over the actions that the data hold: at 1/2 the mean, which values the behaviour;
towards 1 the best action seen. The policy is cloned from the data, each action weighted by its advantage.

Index mapping. `params.q[k]` is Q_k, k = 0, 1, and `target_q[k]` is Qbar_k. The paper's tau is `expectile`, its beta
`inverse_temperature`.

One update, in the authors' order: V against the target critics; the policy, whose advantage takes the *new* V; the
critics, whose target takes the *new* V; the target critics. One batch for all.

The policy is a plain normal around tanh of the network's output, with a standard deviation that does not depend on
the state; no Jacobian. Its samples are clipped to [-1, 1].

Source: Kostrikov, Nair, Levine, "Offline Reinforcement Learning with Implicit Q-Learning", ICLR 2022 (arXiv
2110.06169); https://github.com/ikostrikov/implicit_q_learning at 09d7002. Equation numbers as we recall them.

Deviations:
- `normalize_obs` is not the authors' (others standardise observations); off by default.
- Discrete actions are an extension: Q has one output per action, the policy is a categorical, everything else is as is.
- Actions are as the data hold them, within [-1, 1]; the authors clip them to 1 - 1e-5, which a plain normal needs not.

One `step` is one gradient step of each loss.
"""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from envs.types import Count, Example, Fraction, NonNegative, Positive, Spec, Widths, pytree, static, zeros
from networks import dense, ensemble
from networks.mlp import MLP
from networks.orthogonal import orthogonal
from networks.policies import Categorical
from networks.torso import flat
from replay import datasets

ACTIONS = ("continuous", "discrete")
REWARDS = ("raw", "return_range", "minus_one")
INIT = orthogonal(math.sqrt(2))  # of every layer, the last too


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    learning_rate: Positive = 3e-4  # Adam's, of all networks; published 3e-4
    anneal_steps: NonNegative = 1e6  # until the policy's rate is 0, a cosine; 0: constant; published --steps, 1e6
    expectile: Fraction = 0.7  # published 0.7 (locomotion, kitchen, adroit), 0.9 (antmaze)
    inverse_temperature: NonNegative = 3.0  # published 3 (locomotion), 10 (antmaze), 0.5 (kitchen, adroit)
    max_weight: Positive = 100.0  # of a cloned action; published 100
    gamma: Fraction = 0.99  # discount per env step; published 0.99
    target_update_rate: Fraction = 5e-3  # target += rate (online - target); published 0.005
    # Static: shape the program.
    batch_size: Count = static(default=256)  # transitions; published 256
    hidden: Widths = static(default=(256, 256))  # widths of the hidden layers of all networks; published (256, 256)
    dropout: Fraction = static(default=0.0)  # of the policy's hidden layers; published 0, 0.1 (kitchen, adroit)
    rewards: str = static(default="raw")  # raw; return_range: times 1000 / range of returns; minus_one: less 1
    normalize_obs: bool = static(default=False)  # by the data's mean and standard deviation


class Normalizer(NamedTuple):
    """Mean and standard deviation of each entry of the flattened observation."""

    mean: jax.Array
    std: jax.Array


class Params(NamedTuple):
    policy: dict
    v: dict
    q: dict  # leading axis 2
    normalizer: Normalizer  # of observations, no gradient


class State(NamedTuple):
    params: Params
    target_q: dict  # leading axis 2
    opt_state: tuple  # of policy, v, q
    reward_scale: jax.Array  # () float32; a reward is reward_scale r + reward_shift
    reward_shift: jax.Array  # () float32
    gradient_steps: jax.Array  # () int32
    key: jax.Array


class Policy(nn.Module):
    """Mean and log standard deviation, `(..., 2 D)`, or the logits of discrete actions, `(..., A)`."""

    hidden: tuple[int, ...]
    num_outputs: int
    dropout: float
    discrete: bool

    @nn.compact
    def __call__(self, x, train=False):
        for size in self.hidden:
            x = nn.relu(nn.Dense(size, kernel_init=INIT, dot_general=dense.dot_general)(x))
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        x = nn.Dense(self.num_outputs, kernel_init=INIT)(x)
        if self.discrete:
            return x
        log_std = jnp.clip(self.param("log_std", nn.initializers.zeros, (self.num_outputs,)), -5, 2)
        return jnp.concatenate([jnp.tanh(x), jnp.broadcast_to(log_std, x.shape)], -1)


def policy_network(config, spec: Spec) -> Policy:
    size = spec.num_actions or spec.action_size
    return Policy(config.hidden, size, config.dropout, spec.action_type == "discrete")


def v_network(config) -> MLP:
    return MLP((*config.hidden, 1), kernel_init=INIT, dot_general=dense.dot_general)


def q_network(config, spec: Spec) -> MLP:
    return MLP((*config.hidden, spec.num_actions or 1), kernel_init=INIT, dot_general=dense.dot_general)


def features(spec: Spec, normalizer: Normalizer, obs):
    """An observation's leaves side by side, in standard deviations from the mean. `(..., features)` float32."""
    x = flat(spec.obs, obs)
    mean, std = (jnp.broadcast_to(row, x.shape) for row in normalizer)
    return (x - mean) / std


def v_values(config, params, x):
    """V of features `(..., features)`: `(...,)`."""
    return v_network(config).apply(params, x)[..., 0]


def q_values(config, spec: Spec, params, x, action):
    """Both critics, `(2, ...)`. Args: x `(..., features)`; action `(..., D)` float32 or `(...,)` int32."""
    if spec.action_type == "continuous":
        return ensemble.apply(q_network(config, spec), params, jnp.concatenate([x, action], -1))[..., 0]
    q = ensemble.apply(q_network(config, spec), params, x)  # (2, ..., A)
    return jnp.take_along_axis(q, action[None, ..., None], -1)[..., 0]


def log_prob(spec: Spec, outputs, action):
    """log pi(a | s), `(...,)`: a plain normal around the squashed mean, or a categorical."""
    if spec.action_type == "discrete":
        return Categorical().log_prob(outputs, action)
    mean, log_std = jnp.split(outputs, 2, -1)
    normal = -0.5 * jnp.square((action - mean) / jnp.exp(log_std)) - log_std - 0.5 * math.log(2 * math.pi)
    return normal.sum(-1)


def expectile_loss(u, expectile):
    """|expectile - 1(u < 0)| u^2, elementwise; Eq. (5). At 1/2 half the square."""
    return jnp.where(u > 0, expectile, 1 - expectile) * jnp.square(u)


def clone_weight(advantage, inverse_temperature, max_weight):
    """Weight of an action in Eq. (7): clipped from above alone."""
    return jnp.minimum(jnp.exp(inverse_temperature * advantage), max_weight)


def policy_rate(config, gradient_steps):
    """The policy's learning rate: the full one at first, 0 after `anneal_steps`, a half cosine between."""
    progress = jnp.where(config.anneal_steps > 0, gradient_steps / jnp.maximum(config.anneal_steps, 1.0), 0.0)
    return config.learning_rate * 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0, 1)))


def update(config, spec: Spec, params: Params, target_q, opt_state, batch, gradient_steps, key):
    """One gradient step of V, then of the policy, then of the critics, and the targets'.

    Args: batch, a Transition of transformed rewards, leaves `(B, ...)`; key, of dropout.
    Returns: params, target_q, opt_state, metrics.
    """
    x, next_x = (features(spec, params.normalizer, obs) for obs in (batch.obs, batch.next_obs))
    target = q_values(config, spec, target_q, x, batch.action).min(0)  # (B,)
    policy_opt_state, v_opt_state, q_opt_state = opt_state
    adam = optax.adam(config.learning_rate)

    # V, Eq. (5).
    v_loss, grads = jax.value_and_grad(
        lambda v: expectile_loss(target - v_values(config, v, x), config.expectile).mean()
    )(params.v)
    updates, v_opt_state = adam.update(grads, v_opt_state)
    v = optax.apply_updates(params.v, updates)

    # Policy, Eq. (7).
    advantage = target - v_values(config, v, x)
    weight = clone_weight(advantage, config.inverse_temperature, config.max_weight)

    def policy_loss_fn(policy):
        outputs = policy_network(config, spec).apply(policy, x, train=True, rngs=dict(dropout=key))
        return -(weight * log_prob(spec, outputs, batch.action)).mean()

    policy_loss, grads = jax.value_and_grad(policy_loss_fn)(params.policy)
    updates, policy_opt_state = optax.adam(policy_rate(config, gradient_steps)).update(grads, policy_opt_state)
    policy = optax.apply_updates(params.policy, updates)

    # Critics, Eq. (6).
    q_target = batch.reward + config.gamma * (1 - batch.terminated) * v_values(config, v, next_x)

    def q_loss_fn(q):
        q = q_values(config, spec, q, x, batch.action)
        return jnp.square(q - q_target[None]).mean(1).sum(), q.mean()

    (q_loss, q_mean), grads = jax.value_and_grad(q_loss_fn, has_aux=True)(params.q)
    updates, q_opt_state = adam.update(grads, q_opt_state)
    q = optax.apply_updates(params.q, updates)

    # Targets.
    target_q = optax.incremental_update(q, target_q, config.target_update_rate)
    metrics = dict(
        loss=v_loss + policy_loss + q_loss,
        v_loss=v_loss,
        policy_loss=policy_loss,
        q_loss=q_loss,
        q_mean=q_mean,
        advantage=advantage.mean(),
        weight=weight.mean(),
    )
    params = params._replace(policy=policy, v=v, q=q)
    return params, target_q, (policy_opt_state, v_opt_state, q_opt_state), metrics


def returns(dataset: datasets.Dataset):
    """Undiscounted returns of the episodes, `(N,)`, each at its last transition, and the `(N,)` mask of these."""
    num = dataset.num_transitions
    total = jnp.zeros(num).at[dataset.last].add(dataset.transitions.reward)
    return total, dataset.last == jnp.arange(num)


def reward_transform(kind: str, dataset: datasets.Dataset):
    """Scale and shift of the rewards, two () float32; `return_range` is that of the episodes in the data."""
    if kind == "minus_one":
        return jnp.float32(1), jnp.float32(-1)
    if kind == "raw":
        return jnp.float32(1), jnp.float32(0)
    total, ends = returns(dataset)
    low, high = jnp.where(ends, total, jnp.inf).min(), jnp.where(ends, total, -jnp.inf).max()
    return jnp.float32(1000) / (high - low), jnp.float32(0)


def period(config, dataset) -> int:
    """Gradient steps that one `step` makes."""
    return 1


def check(config, dataset):
    """What `init` needs beyond the ranges in Config. Raises ValueError."""
    if config.rewards not in REWARDS:
        raise ValueError(f"rewards {config.rewards!r} must be one of {', '.join(REWARDS)}")
    if not 0 < config.expectile < 1:
        raise ValueError(f"expectile {config.expectile} must be between 0 and 1, both excluded")
    if config.dropout >= 1:
        raise ValueError(f"dropout {config.dropout} must be less than 1")
    if config.rewards == "return_range":
        total, ends = returns(dataset)
        low, high = float(total[ends].min()), float(total[ends].max())
        if low == high:
            raise ValueError(f"rewards return_range: every episode of the data returns {low:g}; use raw or minus_one")


def init(config, dataset, key) -> State:
    key, policy_key, v_key, q_key = jax.random.split(key, 4)
    spec = dataset.spec

    # Observations' statistics.
    x = flat(spec.obs, dataset.transitions.obs)
    normalizer = Normalizer(jnp.zeros(x.shape[1]), jnp.ones(x.shape[1]))
    if config.normalize_obs:
        normalizer = Normalizer(x.mean(0), x.std(0) + 1e-3)

    # Networks; the target critics start as copies.
    policy = policy_network(config, spec).init(policy_key, x[0])
    v = v_network(config).init(v_key, x[0])
    inputs = x[0] if spec.action_type == "discrete" else jnp.concatenate([x[0], zeros(spec.action)])
    q = ensemble.init(q_network(config, spec), q_key, 2, inputs)
    opt_state = tuple(optax.adam(config.learning_rate).init(p) for p in (policy, v, q))
    scale, shift = reward_transform(config.rewards, dataset)
    return State(Params(policy, v, q, normalizer), q, opt_state, scale, shift, jnp.int32(0), key)


def act(config, spec, params: Params, obs, key):
    """The mean action, or the likeliest."""
    outputs = policy_network(config, spec).apply(params.policy, features(spec, params.normalizer, obs))
    if spec.action_type == "discrete":
        return Categorical().mode(outputs)
    return jnp.split(outputs, 2, -1)[0]


def explore(config, spec, params: Params, obs, key):
    """An action drawn from the policy, clipped to [-1, 1]."""
    outputs = policy_network(config, spec).apply(params.policy, features(spec, params.normalizer, obs))
    if spec.action_type == "discrete":
        return Categorical().sample(outputs, key)
    mean, log_std = jnp.split(outputs, 2, -1)
    return jnp.clip(mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape), -1, 1)


def learn(config, spec: Spec, state, batch, key):
    """One update of any state that has the fields of `State`, with the batch's rewards transformed."""
    batch = batch._replace(reward=state.reward_scale * batch.reward + state.reward_shift)
    params, target_q, opt_state, metrics = update(
        config, spec, state.params, state.target_q, state.opt_state, batch, state.gradient_steps, key
    )
    gradient_steps = state.gradient_steps + 1
    return state._replace(params=params, target_q=target_q, opt_state=opt_state, gradient_steps=gradient_steps), metrics


def step(config, dataset, state: State) -> tuple[State, dict]:
    key, sample_key, dropout_key = jax.random.split(state.key, 3)
    batch = datasets.sample(dataset, sample_key, config.batch_size)
    return learn(config, dataset.spec, state._replace(key=key), batch, dropout_key)


EXAMPLE = Example(
    source="pendulum/mixed",
    steps=20_000,
    eval_period=2_000,
    seeds=(0, 1, 2, 3, 4),
    config=Config(
        learning_rate=1e-3,
        anneal_steps=20_000.0,
        expectile=0.9,
        inverse_temperature=1.0,
        gamma=0.95,
        hidden=(64, 64),
    ),
)
