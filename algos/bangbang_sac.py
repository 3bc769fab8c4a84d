"""SAC, with a Gaussian, a Bernoulli (bang-bang) or a bang-off-bang policy of continuous actions.

Soft actor-critic (Haarnoja et al. 2018b): two critics, a policy that is paid for its entropy H, and a temperature
alpha that holds H at a target. The policy's distribution is the only difference that Seyde et al. (2021) make.
Gaussian is their control, and so this is also the repository's SAC.

    V(s')   = E_{a' ~ pi(. | s')}[ min_k Qbar_k(s', a') ] + alpha H(pi(. | s'))
    L_Q     = sum_k E[ (Q_k(s, a) - r - gamma (1 - terminated) V(s'))^2 ]
    L_pi    = -E_s[ E_{a ~ pi(. | s)}[ min_k Q_k(s, a) ] + alpha H(pi(. | s)) ]
    L_alpha = log alpha E_s[ H(pi(. | s)) - H_target ]

The Gaussian's E_a[Q] is differentiated through its draw, a = tanh(mean + std noise). A draw from {-1, +1}^D has no
such path, and `estimator` chooses what stands in for it:

    straight_through   a = draw + E[a] - sg(E[a]); for the Bernoulli dE[a_i]/dz_i = 2 p_i (1 - p_i)
    reinforce          (Q(a) - mean of the other draws' Q) d log pi(a), over num_draws draws; unbiased
    enumerate          sum over all 2^D (3^D) actions of Q(a) d pi(a); exact, for D <= 6

Straight-through reads the slope of Q at the end where it should read the difference between the ends. It is exact
where Q is linear in each a_i (all products a_i a_j included) and biased otherwise, even in sign: with Q = -(a - 0.3)^2
the upper end is better, by 1.2, and the slope there is -1.4. The critic, which only sees the ends, may have any slope.

Index mapping. `params.value[k]` is Q_k, k = 0, 1, and `target_params[k]` is Qbar_k. A *draw* is the action, or for the
Gaussian the point before its tanh (networks/policies.py).

Source: Seyde et al., "Is Bang-Bang Control All You Need?", NeurIPS 2021 (arXiv 2111.02552); there is no official code.
SAC: Haarnoja et al. 2018 (arXiv 1812.05905).

Deviations:
- The paper's body could not be read: its estimator and its H_target for Bernoulli are unknown. Ours is a share of the
  largest entropy, D ln 2 or D ln 3: SAC's -D is below what a discrete policy can reach, and alpha would fall to 0.
- H is exact for the discrete policies, and for the Gaussian exact but for the tanh's part, which is of one draw. SAC's
  code takes -log pi(a) of the draw, which has the same expectation and gradient; its noise is smaller than ours at
  standard deviations near 1 and larger at small ones.
- Before learning a discrete policy draws from its own actions, uniformly: its critics never see others.

One `step` is `max(num_envs, train_period)` env steps, and one gradient step of each loss per `train_period` of them.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from envs.types import (
    EDGE,
    Count,
    Example,
    Fraction,
    Positive,
    Real,
    Spec,
    Widths,
    example_transition,
    pytree,
    static,
    zeros,
)
from networks import dense, ensemble
from networks.mlp import MLP
from networks.policies import POLICIES
from networks.torso import flat
from replay import ring

ACTIONS = ("continuous",)
LEVELS = dict(bernoulli=2, bang_off_bang=3)  # actions of one dimension
ESTIMATORS = ("straight_through", "reinforce", "enumerate")
MOST_ENUMERATED = 6  # action dimensions


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    policy_learning_rate: Positive = 3e-4  # Adam's; published 3e-4, as the next two
    value_learning_rate: Positive = 3e-4
    temperature_learning_rate: Positive = 3e-4
    initial_temperature: Positive = 1.0  # alpha at first
    gamma: Fraction = 0.99  # discount per env step; published 0.99
    target_update_rate: Fraction = 5e-3  # target += rate (online - target); published 0.005
    target_entropy: Real = -1.0  # of the Gaussian: nats per action dimension; published -1
    target_entropy_share: Fraction = 0.5  # of the discrete policies: share of their largest entropy
    # Static: shape the program.
    policy: str = static(default="bernoulli")  # gaussian, bernoulli or bang_off_bang
    estimator: str = static(default="reinforce")  # of the discrete policies: straight_through, reinforce or enumerate
    num_draws: Count = static(default=2)  # actions per state that reinforce draws
    train_period: Count = static(default=1)  # env steps per gradient step; published 1
    batch_size: Count = static(default=256)  # transitions; published 256
    capacity: Count = static(default=1_000_000)  # transitions over all envs; published 1e6
    prefill: Count = static(default=1_000)  # env steps by a uniform policy
    hidden: Widths = static(default=(256, 256))  # of policy and critics; published (256, 256)


class Params(NamedTuple):
    policy: dict
    value: dict  # leading axis 2
    log_temperature: jax.Array  # () float32


class State(NamedTuple):
    params: Params
    target_params: dict  # of the critics, leading axis 2
    opt_state: Params
    replay: ring.Replay
    env_state: object
    env_steps: jax.Array  # () int32, over all envs, prefill included
    gradient_steps: jax.Array  # () int32
    key: jax.Array


def policy_outputs(config, spec: Spec, params, obs):
    """What the policy's distribution is read from, `(..., num_outputs)`."""
    return policy_network(config, spec).apply(params, flat(spec.obs, obs))


def q_values(config, spec: Spec, params, obs, action):
    """Both critics, `(2, ...)`. Args: obs, leaves `(..., *shape)`; action `(..., D)`."""
    inputs = jnp.concatenate([flat(spec.obs, obs), action], -1)
    return ensemble.apply(value_network(config), params, inputs)[..., 0]


def policy_network(config, spec: Spec) -> MLP:
    outputs = POLICIES[config.policy].num_outputs(spec.action_size)
    return MLP((*config.hidden, outputs), dot_general=dense.dot_general)


def value_network(config) -> MLP:
    return MLP((*config.hidden, 1), dot_general=dense.dot_general)


def expected_q(policy, estimator, outputs, q_of, key, num_draws=2):
    """E_{a ~ pi}[Q(s, a)], estimated, and differentiable: its gradient estimates the expectation's.

    Args: policy, of networks.policies; estimator, `pathwise` or one of ESTIMATORS; outputs `(B, num_outputs)`;
        q_of, from actions `(..., B, D)` to `(..., B)`; num_draws, of reinforce, at least 2.
    Returns: `(B,)`.
    """
    if estimator == "pathwise":
        return q_of(policy.action(policy.sample(outputs, key)))

    if estimator == "straight_through":
        mean = policy.mean(outputs)
        draw = policy.sample(outputs, key)
        return q_of(draw + (mean - jax.lax.stop_gradient(mean)))  # exactly the draw, with the mean's gradient

    if estimator == "reinforce":
        draws = jax.vmap(lambda key: policy.sample(outputs, key))(jax.random.split(key, num_draws))  # (draws, B, D)
        q = jax.lax.stop_gradient(q_of(draws))  # (draws, B)
        others = (q.sum(0, keepdims=True) - q) / (num_draws - 1)
        score = ((q - others) * jax.vmap(policy.log_prob, (None, 0))(outputs, draws)).mean(0)
        return q.mean(0) + score - jax.lax.stop_gradient(score)

    support = policy.support(outputs)  # (M, D), enumerate
    actions = jnp.broadcast_to(support[:, None], (len(support), len(outputs), support.shape[-1]))  # (M, B, D)
    probabilities = jnp.exp(jax.vmap(policy.log_prob, (None, 0))(outputs, actions))  # (M, B)
    return (probabilities * q_of(actions)).sum(0)


def estimator_of(config) -> str:
    return "pathwise" if config.policy == "gaussian" else config.estimator


def target_entropy(config, spec: Spec):
    """H_target in nats, summed over action dimensions."""
    if config.policy == "gaussian":
        return config.target_entropy * spec.action_size
    return config.target_entropy_share * spec.action_size * math.log(LEVELS[config.policy])


def soft_value(config, spec: Spec, policy_params, value_params, temperature, obs, key):
    """V of a batch of observations, `(B,)`, and the policy's entropy there, `(B,)`."""
    policy = POLICIES[config.policy]
    outputs = policy_outputs(config, spec, policy_params, obs)

    def q_of(action):  # (..., B, D) to (..., B)
        lead = action.shape[: action.ndim - 2]
        same_obs = jax.tree.map(lambda x: jnp.broadcast_to(x, (*lead, *x.shape)), obs)
        return q_values(config, spec, value_params, same_obs, action).min(0)

    q = expected_q(policy, estimator_of(config), outputs, q_of, key, config.num_draws)
    entropy = policy.entropy(outputs, key)  # of the very draw that Q was read at, for the Gaussian
    return q + temperature * entropy, entropy


def value_loss(q, target):
    """L_Q. Args: q `(2, B)`; target `(B,)`."""
    return jnp.square(q - target[None]).mean(1).sum()


def temperature_loss(log_temperature, entropy, target_entropy):
    """L_alpha, which raises alpha where the entropy is below its target. Args: entropy `(B,)`."""
    return log_temperature * (entropy - target_entropy).mean()


def optimizers(config) -> Params:
    return Params(
        optax.adam(config.policy_learning_rate),
        optax.adam(config.value_learning_rate),
        optax.adam(config.temperature_learning_rate),
    )


def update(config, spec: Spec, params: Params, target_params, opt_state: Params, batch, key):
    """One gradient step of the critics, then of the policy, then of the temperature, and the targets'.

    Returns: params, target_params, opt_state, metrics.
    """
    next_key, policy_key = jax.random.split(key)
    temperature = jnp.exp(params.log_temperature)
    optimizer = optimizers(config)

    # Critics.
    next_value, _ = soft_value(config, spec, params.policy, target_params, temperature, batch.next_obs, next_key)
    target = batch.reward + config.gamma * (1 - batch.terminated) * next_value

    def value_loss_fn(value):
        q = q_values(config, spec, value, batch.obs, batch.action)
        return value_loss(q, target), q.mean()

    (loss_q, q_mean), grads = jax.value_and_grad(value_loss_fn, has_aux=True)(params.value)
    updates, value_opt_state = optimizer.value.update(grads, opt_state.value)
    value = optax.apply_updates(params.value, updates)

    # Policy.
    def policy_loss_fn(policy):
        soft, entropy = soft_value(config, spec, policy, value, temperature, batch.obs, policy_key)
        return -soft.mean(), entropy

    (loss_pi, entropy), grads = jax.value_and_grad(policy_loss_fn, has_aux=True)(params.policy)
    updates, policy_opt_state = optimizer.policy.update(grads, opt_state.policy)
    policy = optax.apply_updates(params.policy, updates)

    # Temperature, by the entropy before the policy's step.
    loss_fn = lambda log_temperature: temperature_loss(log_temperature, entropy, target_entropy(config, spec))
    grads = jax.grad(loss_fn)(params.log_temperature)
    updates, temperature_opt_state = optimizer.log_temperature.update(grads, opt_state.log_temperature)
    log_temperature = optax.apply_updates(params.log_temperature, updates)

    # Targets.
    target_params = optax.incremental_update(value, target_params, config.target_update_rate)
    params = Params(policy, value, log_temperature)
    opt_state = Params(policy_opt_state, value_opt_state, temperature_opt_state)
    metrics = dict(
        loss=loss_q + loss_pi,
        value_loss=loss_q,
        policy_loss=loss_pi,
        q_mean=q_mean,
        entropy=entropy.mean(),
        temperature=temperature,
    )
    return params, target_params, opt_state, metrics


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
    policies = ("gaussian", *LEVELS)
    if config.policy not in policies:
        raise ValueError(f"policy {config.policy!r} must be one of {', '.join(policies)}")
    if config.estimator not in ESTIMATORS:
        raise ValueError(f"estimator {config.estimator!r} must be one of {', '.join(ESTIMATORS)}")
    size = env.spec.action_size
    if estimator_of(config) == "enumerate" and size > MOST_ENUMERATED:
        raise ValueError(
            f"estimator enumerate would go through {LEVELS[config.policy]}^{size} actions: it takes at most "
            f"{MOST_ENUMERATED} action dimensions, not {size}; use estimator reinforce (unbiased) or straight_through"
        )
    if estimator_of(config) == "reinforce" and config.num_draws < 2:
        raise ValueError(f"num_draws {config.num_draws} must be at least 2: each draw is compared with the others")


def init(config, env, key) -> State:
    key, policy_key, value_key, reset_key, prefill_key = jax.random.split(key, 5)

    # Networks: two critics drawn independently; the targets start as copies.
    obs = flat(env.spec.obs, zeros(env.spec.obs))
    inputs = jnp.concatenate([obs, zeros(env.spec.action)])
    policy = policy_network(config, env.spec).init(policy_key, obs)
    value = ensemble.init(value_network(config), value_key, 2, inputs)
    params = Params(policy, value, jnp.log(config.initial_temperature))
    opt_state = Params(*(o.init(p) for o, p in zip(optimizers(config), params, strict=True)))

    # Replay, prefilled by a uniform policy.
    env_state = env.reset(reset_key)
    replay = ring.create(config.capacity, env.num_envs, example_transition(env.spec))

    def collect(carry, key):
        env_state, replay = carry
        action_key, env_key = jax.random.split(key)
        action = uniform_actions(config, env.spec, action_key, env.num_envs)
        env_state, transition, _ = env.step(env_key, env_state, action)
        return (env_state, ring.insert(replay, transition)), None

    keys = jax.random.split(prefill_key, config.prefill // env.num_envs)
    (env_state, replay), _ = jax.lax.scan(collect, (env_state, replay), keys)
    env_steps = jnp.int32(config.prefill)
    return State(params, value, opt_state, replay, env_state, env_steps, jnp.int32(0), key)


def uniform_actions(config, spec: Spec, key, num: int):
    """Uniform on all that the policy can do, `(num, D)`."""
    policy = POLICIES[config.policy]
    if config.policy == "gaussian":
        return jax.random.uniform(key, (num, spec.action_size), minval=-1, maxval=1)
    return policy.action(policy.sample(jnp.zeros((num, policy.num_outputs(spec.action_size))), key))


def act(config, spec, params: Params, obs, key):
    """The likeliest action; for the Gaussian tanh of its mean."""
    policy = POLICIES[config.policy]
    return policy.action(policy.mode(policy_outputs(config, spec, params.policy, obs)))


def explore(config, spec, params: Params, obs, key):
    """An action drawn from the policy."""
    policy = POLICIES[config.policy]
    return policy.action(policy.sample(policy_outputs(config, spec, params.policy, obs), key))


def step(config, env, state: State) -> tuple[State, dict]:
    key, act_key, learn_key = jax.random.split(state.key, 3)

    # Act and store.
    def act_and_store(carry, key):
        env_state, replay = carry
        action_key, env_key = jax.random.split(key)
        action = explore(config, env.spec, state.params, env_state.obs, action_key)
        env_state, transition, finished = env.step(env_key, env_state, action)
        at_bounds = (jnp.abs(action) >= 1 - EDGE).mean()
        return (env_state, ring.insert(replay, transition)), dict(finished, at_bounds=at_bounds)

    vector_steps = period(config, env) // env.num_envs
    (env_state, replay), acted = jax.lax.scan(
        act_and_store, (state.env_state, state.replay), jax.random.split(act_key, vector_steps)
    )

    # Learn.
    def learn(carry, key):
        sample_key, update_key = jax.random.split(key)
        batch = ring.sample(replay, sample_key, config.batch_size)
        *carry, metrics = update(config, env.spec, *carry, batch, update_key)
        return tuple(carry), metrics

    updates = period(config, env) // config.train_period
    carry = (state.params, state.target_params, state.opt_state)
    (params, target_params, opt_state), metrics = jax.lax.scan(learn, carry, jax.random.split(learn_key, updates))

    env_steps = state.env_steps + period(config, env)
    gradient_steps = state.gradient_steps + updates
    state = State(params, target_params, opt_state, replay, env_state, env_steps, gradient_steps, key)
    return state, dict(metrics, **acted)


EXAMPLE = Example(
    source="Pendulum-v1",
    steps=15_000,
    eval_period=1_500,
    num_envs=1,
    seeds=(0, 1, 2, 3, 4),
    config=Config(capacity=20_000, hidden=(64, 64)),
)
