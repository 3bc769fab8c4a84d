"""PPO, with a Gaussian, a Bernoulli (bang-bang) or a bang-off-bang policy of continuous actions.

Proximal policy optimisation (Schulman et al. 2017) as it stands: the policy's distribution is the only
difference that Seyde et al. (2021) make. Gaussian is their control, and so this is also the repository's PPO; on
discrete actions the policy is a categorical.

    delta_t = r_t + gamma (1 - terminated_t) V(next_obs_t) - V(obs_t)
    A_t     = delta_t + gamma lambda (1 - terminated_t) (1 - truncated_t) A_{t+1}        (GAE)
    rho     = pi(a | s) / pi_old(a | s)
    L_pi    = -E[ min(rho A, clip(rho, 1 - clip_range, 1 + clip_range) A) ]              A normalised in each minibatch
    V_c     = V_old + clip(V - V_old, -value_clip_range, value_clip_range)
    L_V     = 1/2 E[ max( (V - (A + V_old))^2, (V_c - (A + V_old))^2 ) ]
    L       = L_pi + value_weight L_V - entropy_weight E[H(pi(. | s))]

The Bernoulli policy has one logit z_i for each action dimension, P(a_i = +1) = sigmoid(z_i), a_i in {-1, +1}:

    log pi(a | s) = sum_i log sigmoid(a_i z_i)       H = sum_i log(1 + e^z_i) - p_i z_i  <=  D ln 2

No standard deviation, no Jacobian; clipping and entropy bonus are unchanged (networks/policies.py).

Index mapping. A rollout is `(T, num_envs, ...)`, time first. `draw` is the action before the Gaussian's tanh, the
action itself otherwise: log pi is taken of it, and the tanh's Jacobian cancels in rho.

Source: Seyde, Gilitschenski, Schwarting, Stellato, Riedmiller, Wulfmeier, Rus, "Is Bang-Bang Control All You Need?
Solving Continuous Control with Bernoulli Policies", NeurIPS 2021 (arXiv 2111.02552); there is no official code. PPO:
Schulman et al. 2017 (arXiv 1707.06347); GAE: Schulman et al. 2016 (arXiv 1506.02438).

Deviations:
- The paper's body and hyperparameters could not be read; the defaults are those of purejaxrl's PPO on CartPole, but for
  a constant learning rate: how long a run is, only the command line knows (`anneal_steps`).
- The Gaussian is squashed by tanh; PPO's first code clips the action in the environment, so that
  probabilities are of actions never taken.
- At a time limit the value of the true successor is bootstrapped; PPO's first code treats it as an end.

One `step` is one rollout, `num_envs` x `rollout_length` env steps, and `num_epochs` x `num_minibatches` gradient steps.
"""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from envs.types import (
    EDGE,
    Count,
    Example,
    Fraction,
    NonNegative,
    Positive,
    Spec,
    Transition,
    Widths,
    pytree,
    static,
    zeros,
)
from networks import dense
from networks.conv import MinAtarTorso
from networks.orthogonal import orthogonal
from networks.policies import POLICIES

ACTIONS = ("continuous", "discrete")


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    learning_rate: Positive = 2.5e-4  # Adam's
    anneal_steps: NonNegative = 0.0  # env steps over which the learning rate falls to 0, linearly; 0: constant
    adam_epsilon: Positive = 1e-5  # added to Adam's root mean square
    gamma: Fraction = 0.99  # discount per env step
    gae_lambda: Fraction = 0.95  # of GAE
    clip_range: Positive = 0.2  # of the probability ratio
    entropy_weight: NonNegative = 0.01  # of the loss
    value_weight: NonNegative = 0.5  # of the loss
    max_grad_norm: Positive = 0.5  # global norm over policy and value
    value_clip_range: Positive = 0.2  # of the value, in units of return; large is none
    # Static: shape the program.
    policy: str = static(default="bernoulli")  # gaussian, bernoulli or bang_off_bang; discrete actions: categorical
    rollout_length: Count = static(default=128)  # env steps of each environment
    num_minibatches: Count = static(default=4)  # per epoch
    num_epochs: Count = static(default=4)  # over a rollout
    hidden: Widths = static(default=(64, 64))  # widths of the hidden layers, of policy and value each
    normalize_obs: bool = static(default=False)  # by running mean and std; not pixels


class Normalizer(NamedTuple):
    """Running mean and variance of each entry of the observation."""

    mean: jax.Array
    var: jax.Array
    count: jax.Array  # () float32


class Params(NamedTuple):
    policy: dict
    value: dict
    normalizer: Normalizer  # of observations, no gradient


class State(NamedTuple):
    params: Params
    opt_state: tuple  # over policy and value
    env_state: object
    env_steps: jax.Array  # () int32, over all envs
    gradient_steps: jax.Array  # () int32
    key: jax.Array


class Rollout(NamedTuple):
    """What acting gave, leaves `(T, num_envs, ...)`."""

    transition: Transition
    draw: jax.Array
    log_prob: jax.Array


class Network(nn.Module):
    """tanh layers on a flattened observation, or on MinAtar's convolution; orthogonal, as in PPO's first code.

    With `log_std` the outputs are followed by as many parameters that do not depend on the observation, at first 0.
    """

    obs: jax.ShapeDtypeStruct
    hidden: tuple[int, ...]
    num_outputs: int
    scale: float  # of the last layer's kernel
    log_std: bool = False

    @nn.compact
    def __call__(self, obs):
        if self.obs.shape[:2] == (10, 10):
            x = MinAtarTorso((), orthogonal(math.sqrt(2)))(obs)
        else:
            x = obs.astype(jnp.float32).reshape(*obs.shape[: obs.ndim - self.obs.ndim], -1)
        for size in self.hidden:
            x = nn.tanh(layer(size, math.sqrt(2))(x))
        outputs = layer(self.num_outputs, self.scale)(x)
        if not self.log_std:
            return outputs
        log_std = self.param("log_std", nn.initializers.zeros, (self.num_outputs,))
        return jnp.concatenate([outputs, jnp.broadcast_to(log_std, outputs.shape)], -1)


def layer(size: int, scale: float) -> nn.Dense:
    return nn.Dense(size, kernel_init=orthogonal(scale), dot_general=dense.dot_general)


def policy_of(config, spec: Spec):
    return POLICIES["categorical" if spec.action_type == "discrete" else config.policy]


def networks(config, spec: Spec) -> tuple[Network, Network]:
    """The policy's and the value's."""
    size, policy = spec.num_actions or spec.action_size, policy_of(config, spec)
    if policy == POLICIES["gaussian"]:
        first = Network(spec.obs, config.hidden, size, 0.01, log_std=True)
    else:
        first = Network(spec.obs, config.hidden, policy.num_outputs(size), 0.01)
    return first, Network(spec.obs, config.hidden, 1, 1.0)


def normalize(config, normalizer: Normalizer, obs):
    """Observations in standard deviations from the mean, within +-10; others than float32 as they are."""
    if not config.normalize_obs or obs.dtype != jnp.float32:
        return obs
    lead = obs.ndim - normalizer.mean.ndim
    mean, var = (x.reshape(*[1] * lead, *x.shape) for x in (normalizer.mean, normalizer.var))
    return jnp.clip((obs - mean) / jnp.sqrt(var + 1e-8), -10, 10)


def update_normalizer(normalizer: Normalizer, obs) -> Normalizer:
    """Mean and variance of all observations so far (Chan et al. 1979). Args: obs `(N, *obs_shape)`."""
    count = normalizer.count + obs.shape[0]
    delta = obs.mean(0) - normalizer.mean
    within = normalizer.var * normalizer.count + obs.var(0) * obs.shape[0]
    between = jnp.square(delta) * normalizer.count * obs.shape[0] / count
    return Normalizer(normalizer.mean + delta * obs.shape[0] / count, (within + between) / count, count)


def policy_outputs(config, spec, params: Params, obs):
    """What the policy's distribution is read from, of normalised observations."""
    return networks(config, spec)[0].apply(params.policy, obs)


def values(config, spec, params: Params, obs):
    """V of normalised observations, `(...,)`."""
    return networks(config, spec)[1].apply(params.value, obs)[..., 0]


def advantages(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """Generalised advantage estimates. All args `(T, num_envs)`; next_value is of the true successors."""
    delta = reward + gamma * (1 - terminated) * next_value - value
    carried = gamma * gae_lambda * (1 - (terminated | truncated))

    def back(advantage, x):
        delta, carried = x
        advantage = delta + carried * advantage
        return advantage, advantage

    return jax.lax.scan(back, jnp.zeros_like(delta[0]), (delta, carried), reverse=True)[1]


def clipped_loss(log_prob, old_log_prob, advantage, clip_range):
    """L_pi. Args `(B,)`."""
    ratio = jnp.exp(log_prob - old_log_prob)
    clipped = jnp.clip(ratio, 1 - clip_range, 1 + clip_range)
    return -jnp.minimum(ratio * advantage, clipped * advantage).mean()


def clipped_value_loss(value, old_value, target, clip_range):
    """L_V: no gradient for a value that has moved towards its target by more than the clip range. Args `(B,)`."""
    clipped = old_value + jnp.clip(value - old_value, -clip_range, clip_range)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped - target)).mean()


def loss(config, spec, params: Params, batch, key):
    """L on a minibatch, and its parts."""
    obs, draw, old_log_prob, old_value, advantage = batch
    policy = policy_of(config, spec)
    outputs = policy_outputs(config, spec, params, obs)
    log_prob = policy.log_prob(outputs, draw)
    entropy = policy.entropy(outputs, key).mean()
    normalized = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy_loss = clipped_loss(log_prob, old_log_prob, normalized, config.clip_range)
    value = values(config, spec, params, obs)
    value_loss = clipped_value_loss(value, old_value, old_value + advantage, config.value_clip_range)
    change = log_prob - old_log_prob
    metrics = dict(
        policy_loss=policy_loss,
        value_loss=value_loss,
        entropy=entropy,
        kl=(jnp.expm1(change) - change).mean(),  # KL(old || new), estimated without bias
        clip_fraction=(jnp.abs(jnp.expm1(change)) > config.clip_range).mean(),
    )
    total = policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy
    return total, dict(metrics, loss=total)


def shuffled(key, num: int):
    """A random order of 0..num - 1, `(num,)` int32, by sorting random words whose low bits are the index.

    A word has 32 - ceil(log2(num)) random bits; indices that draw the same stay in order. One sort instead of the
    several of `jax.random.permutation`, which were 7% of a step.
    """
    bits = (num - 1).bit_length()
    low = jnp.uint32(2**bits - 1)
    words = jax.random.bits(key, (num,)) & ~low | jnp.arange(num, dtype=jnp.uint32)
    return (jnp.sort(words) & low).astype(jnp.int32)


def optimizer(config, env_steps):
    """Adam with its gradient clipped; its learning rate is that of `env_steps`."""
    progress = jnp.where(config.anneal_steps > 0, env_steps / jnp.maximum(config.anneal_steps, 1.0), 0.0)
    learning_rate = config.learning_rate * jnp.clip(1 - progress, 0, 1)
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm), optax.adam(learning_rate, eps=config.adam_epsilon)
    )


def period(config, env) -> int:
    """Env steps that one `step` makes."""
    return env.num_envs * config.rollout_length


def check(config, env):
    """What `init` needs beyond the ranges in Config. Raises ValueError."""
    if period(config, env) % config.num_minibatches:
        raise ValueError(
            f"num_minibatches {config.num_minibatches} must divide the rollout of {period(config, env)} env steps "
            f"(num_envs {env.num_envs} x rollout_length {config.rollout_length})"
        )
    continuous = [name for name in POLICIES if name != "categorical"]
    if config.policy not in (continuous if env.spec.action_type == "continuous" else POLICIES):
        raise ValueError(f"policy {config.policy!r} must be one of {', '.join(continuous)}")
    if not hasattr(env.spec.obs, "shape"):
        raise ValueError("bangbang_ppo needs one array as its observation; this environment's is structured")


def init(config, env, key) -> State:
    key, policy_key, value_key, reset_key = jax.random.split(key, 4)
    policy, value = networks(config, env.spec)
    obs = zeros(env.spec.obs)
    shape = env.spec.obs.shape
    normalizer = Normalizer(jnp.zeros(shape), jnp.ones(shape), jnp.float32(0))
    params = Params(policy.init(policy_key, obs), value.init(value_key, obs), normalizer)
    opt_state = optimizer(config, 0).init(params[:2])
    return State(params, opt_state, env.reset(reset_key), jnp.int32(0), jnp.int32(0), key)


def act(config, spec, params: Params, obs, key):
    """The likeliest action; for the Gaussian tanh of its mean."""
    policy = policy_of(config, spec)
    obs = normalize(config, params.normalizer, obs)
    return policy.action(policy.mode(policy_outputs(config, spec, params, obs)))


def explore(config, spec, params: Params, obs, key):
    """An action drawn from the policy."""
    policy = policy_of(config, spec)
    obs = normalize(config, params.normalizer, obs)
    return policy.action(policy.sample(policy_outputs(config, spec, params, obs), key))


def step(config, env, state: State) -> tuple[State, dict]:
    key, act_key, learn_key = jax.random.split(state.key, 3)
    spec, policy = env.spec, policy_of(config, env.spec)
    params, normalizer = state.params, state.params.normalizer

    # Act: a rollout with the policy as it is.
    def collect(env_state, key):
        draw_key, env_key = jax.random.split(key)
        outputs = policy_outputs(config, spec, params, normalize(config, normalizer, env_state.obs))
        draw = policy.sample(outputs, draw_key)
        env_state, transition, finished = env.step(env_key, env_state, policy.action(draw))
        return env_state, (Rollout(transition, draw, policy.log_prob(outputs, draw)), finished)

    keys = jax.random.split(act_key, config.rollout_length)
    env_state, (rollout, finished) = jax.lax.scan(collect, state.env_state, keys)  # (T, num_envs, ...)

    # Advantages, bootstrapped at the true successors.
    t = rollout.transition
    obs = normalize(config, normalizer, t.obs)
    value = values(config, spec, params, obs)
    next_value = values(config, spec, params, normalize(config, normalizer, t.next_obs))
    advantage = advantages(t.reward, value, next_value, t.terminated, t.truncated, config.gamma, config.gae_lambda)

    # Learn: several epochs over the rollout in shuffled minibatches.
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    data = jax.tree.map(flat, (obs, rollout.draw, rollout.log_prob, value, advantage))

    def minibatch(carry, x):
        params, opt_state = carry
        batch, key = x
        loss_fn = lambda p: loss(config, spec, params._replace(policy=p[0], value=p[1]), batch, key)
        grads, metrics = jax.grad(loss_fn, has_aux=True)(params[:2])
        updates, opt_state = optimizer(config, state.env_steps).update(grads, opt_state)
        return (Params(*optax.apply_updates(params[:2], updates), params.normalizer), opt_state), metrics

    def epoch(carry, key):
        shuffle_key, loss_key = jax.random.split(key)
        order = shuffled(shuffle_key, period(config, env)).reshape(config.num_minibatches, -1)
        batches = jax.tree.map(lambda x: x[order], data)
        return jax.lax.scan(minibatch, carry, (batches, jax.random.split(loss_key, config.num_minibatches)))

    carry = (params, state.opt_state)
    (params, opt_state), metrics = jax.lax.scan(epoch, carry, jax.random.split(learn_key, config.num_epochs))

    # Observations are normalised by what was seen up to the last rollout.
    if config.normalize_obs and spec.obs.dtype == jnp.float32:
        params = params._replace(normalizer=update_normalizer(normalizer, flat(t.obs)))
    if spec.action_type == "continuous":
        metrics["at_bounds"] = (jnp.abs(t.action) >= 1 - EDGE).mean()
    updates = config.num_epochs * config.num_minibatches
    env_steps = state.env_steps + period(config, env)
    state = State(params, opt_state, env_state, env_steps, state.gradient_steps + updates, key)
    return state, dict(metrics, **finished)


EXAMPLE = Example(
    source="Pendulum-v1",
    steps=614_400,
    eval_period=30_720,
    num_envs=32,
    seeds=(0, 1, 2, 3, 4),
    config=Config(
        policy="bernoulli",
        learning_rate=1e-3,
        anneal_steps=614_400.0,
        gamma=0.9,
        rollout_length=64,
        num_minibatches=8,
        num_epochs=10,
        entropy_weight=0.0,
        value_clip_range=1e3,  # none
        normalize_obs=True,
    ),
)
