"""Behaviour cloning: the policy that makes a dataset's actions likeliest, and the floor of offline learning.

    L(theta) = E_{(s, a) ~ data}[ l(pi_theta(. | s), a) ]

The policies are those of networks/policies.py. A Gaussian and, on discrete actions, a categorical take maximum
likelihood. The Bernoulli and bang-off-bang policies have only 2 or 3 actions in a dimension, and a continuous action
is a *label* for them, a distribution over theirs, whose cross entropy is the loss:

    gaussian         l = -log pi(a | s)          pi = tanh of a normal, a clipped to +-(1 - 1e-3), its Jacobian included
    categorical      l = -log pi(a | s)
    bernoulli        l = -sum_i y_i log p_i + (1 - y_i) log(1 - p_i)            p_i = P(a_i = +1) = sigmoid(z_i)
    bang_off_bang    l = -sum_i sum_k y_ik log p_ik                             k over -1, 0, 1

    soft labels      y_i = (1 + a_i) / 2           y_i(-1, 0, 1) = (max(-a_i, 0), 1 - |a_i|, max(a_i, 0))
    sign labels      y_i = 1 where a_i >= 0        y_i = 1 at the nearest of -1, 0, 1

Soft labels have the action as their mean, so the minimiser has the data's: p = (1 + E[a | s]) / 2 for the Bernoulli,
that is E_pi[a | s] = E[a | s] for both. `act` takes the likeliest action all the same, as PPO's evaluation does.

The likelihood of a squashed normal grows without bound where actions are at +-1, whose inverse tanh is infinite: the
clip puts these at +-3.8 before the tanh, and the policy's bounded standard deviation does the rest.

Source: Pomerleau, "Efficient Training of Artificial Neural Networks for Autonomous Navigation", Neural Computation
3(1), 1991. Between policies: Seyde et al., NeurIPS 2021 (arXiv 2111.02552), who clone trained agents to tell what a
policy can represent from how it explores; there is no official code.

Deviations: it could not be read whether Seyde et al. clone with soft or with sign labels, so both are here. Network,
optimiser and normalisation of observations by the dataset's mean and standard deviation are ours.

One `step` is one gradient step on one batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from envs.types import EDGE, Count, Example, Positive, Spec, Widths, pytree, static, zeros
from networks.policies import POLICIES
from networks.torso import flat, split_network
from replay.datasets import Dataset, sample

ACTIONS = ("continuous", "discrete")
CLIP = 1e-3  # actions are this far from -1 and 1 before the inverse of tanh
LABELS = ("soft", "sign")


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    learning_rate: Positive = 3e-4  # Adam's
    # Static: shape the program.
    policy: str = static(default="gaussian")  # gaussian, bernoulli or bang_off_bang; discrete actions: categorical
    label: str = static(default="soft")  # of bernoulli and bang_off_bang: soft or sign
    batch_size: Count = static(default=256)  # transitions
    hidden: Widths = static(default=(256, 256))  # widths of the hidden layers
    normalize_obs: bool = static(default=True)  # by the dataset's mean and std; not pixels


class Normalizer(NamedTuple):
    """Mean and standard deviation of each entry of the dataset's observations."""

    mean: jax.Array
    std: jax.Array  # and 1e-3: an entry that never changes stays small


class Params(NamedTuple):
    torso: dict
    head: dict
    normalizer: Normalizer  # no gradient


class State(NamedTuple):
    params: Params
    opt_state: tuple  # over torso and head
    gradient_steps: jax.Array  # () int32
    key: jax.Array


def policy_name(config, spec: Spec) -> str:
    return "categorical" if spec.action_type == "discrete" else config.policy


def networks(config, spec: Spec):
    """Torso and head, to what the policy's distribution is read from."""
    size = POLICIES[policy_name(config, spec)].num_outputs(spec.num_actions or spec.action_size)
    return split_network(array_struct(spec), config.hidden, size)


def array_struct(spec: Spec) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: as_array(spec, zeros(spec.obs)))


def as_array(spec: Spec, obs):
    """One array: vectors and pixels as they are, the leaves of a structured observation side by side."""
    return obs if hasattr(spec.obs, "shape") else flat(spec.obs, obs)


def normalize(config, normalizer: Normalizer, obs):
    """Observations in standard deviations from the mean; others than float32 as they are."""
    if not config.normalize_obs or obs.dtype != jnp.float32:
        return obs
    lead = obs.ndim - normalizer.mean.ndim
    mean, std = (x.reshape(*[1] * lead, *x.shape) for x in normalizer)
    return (obs - mean) / std


def policy_outputs(config, spec, params: Params, obs):
    """`(..., num_outputs)`, which networks/policies.py reads."""
    torso, head = networks(config, spec)
    x = normalize(config, params.normalizer, as_array(spec, obs))
    return head.apply(params.head, torso.apply(params.torso, x))


def gaussian_loss(outputs, action):
    """-log pi(a | s) of the squashed normal. Args: outputs `(B, 2 D)`, action `(B, D)`. Returns: `(B,)`."""
    draw = jnp.arctanh(jnp.clip(action, CLIP - 1, 1 - CLIP))
    return -POLICIES["gaussian"].log_prob(outputs, draw)


def bernoulli_loss(outputs, label):
    """Cross entropy: log(1 + e^z) - y z in each dimension. Args: outputs `(B, D)`, label `(B, D)`. Returns: `(B,)`."""
    return (jax.nn.softplus(outputs) - label * outputs).sum(-1)


def bang_off_bang_loss(outputs, label):
    """Cross entropy over -1, 0, 1. Args: outputs `(B, 3 D)`, label `(B, D, 3)`. Returns: `(B,)`."""
    return -(label * jax.nn.log_softmax(outputs.reshape(label.shape))).sum((-2, -1))


def bernoulli_label(action, label: str):
    """y, the probability of +1. Args: action `(B, D)` in [-1, 1]."""
    return (1 + action) / 2 if label == "soft" else (action >= 0).astype(action.dtype)


def bang_off_bang_label(action, label: str):
    """y over -1, 0, 1. Args: action `(B, D)` in [-1, 1]. Returns: `(B, D, 3)`."""
    action = action if label == "soft" else jnp.round(action)
    return jnp.stack([jnp.maximum(-action, 0), 1 - jnp.abs(action), jnp.maximum(action, 0)], -1)


def loss(config, spec, params: Params, obs, action, key):
    """L on a batch, and its metrics."""
    name = policy_name(config, spec)
    policy, outputs = POLICIES[name], policy_outputs(config, spec, params, obs)
    match name:
        case "gaussian":
            losses = gaussian_loss(outputs, action)
        case "bernoulli":
            losses = bernoulli_loss(outputs, bernoulli_label(action, config.label))
        case "bang_off_bang":
            losses = bang_off_bang_loss(outputs, bang_off_bang_label(action, config.label))
        case "categorical":
            losses = -policy.log_prob(outputs, action)
    metrics = dict(loss=losses.mean(), entropy=policy.entropy(outputs, key).mean())
    if spec.action_type == "continuous":
        metrics["at_bounds"] = (jnp.abs(policy.action(policy.mode(outputs))) >= 1 - EDGE).mean()
    return losses.mean(), metrics


def period(config, dataset) -> int:
    """Gradient steps that one `step` makes."""
    return 1


def check(config, dataset: Dataset):
    """What `init` needs beyond the ranges in Config. Raises ValueError."""
    continuous = [name for name in POLICIES if name != "categorical"]
    if config.policy not in continuous:
        raise ValueError(f"policy {config.policy!r} must be one of {', '.join(continuous)}")
    if config.label not in LABELS:
        raise ValueError(f"label {config.label!r} must be one of {', '.join(LABELS)}")


def init(config, dataset: Dataset, key) -> State:
    key, torso_key, head_key = jax.random.split(key, 3)
    torso, head = networks(config, dataset.spec)
    obs = as_array(dataset.spec, dataset.transitions.obs)
    obs = obs if obs.dtype == jnp.float32 else jnp.zeros((1, *obs.shape[1:]))  # pixels are taken as they are
    features, torso_params = torso.init_with_output(torso_key, zeros(array_struct(dataset.spec)))
    params = Params(torso_params, head.init(head_key, features), Normalizer(obs.mean(0), obs.std(0) + 1e-3))
    return State(params, optax.adam(config.learning_rate).init(params[:2]), jnp.int32(0), key)


def act(config, spec, params: Params, obs, key):
    """The likeliest action; for the Gaussian tanh of its mean."""
    policy = POLICIES[policy_name(config, spec)]
    return policy.action(policy.mode(policy_outputs(config, spec, params, obs)))


def explore(config, spec, params: Params, obs, key):
    """An action drawn from the policy."""
    policy = POLICIES[policy_name(config, spec)]
    return policy.action(policy.sample(policy_outputs(config, spec, params, obs), key))


def step(config, dataset: Dataset, state: State) -> tuple[State, dict]:
    key, sample_key, entropy_key = jax.random.split(state.key, 3)
    batch, params = sample(dataset, sample_key, config.batch_size), state.params

    # Learn: one step of Adam on the batch.
    loss_fn = lambda p: loss(config, dataset.spec, Params(*p, params.normalizer), batch.obs, batch.action, entropy_key)
    grads, metrics = jax.grad(loss_fn, has_aux=True)(params[:2])
    updates, opt_state = optax.adam(config.learning_rate).update(grads, state.opt_state)
    params = Params(*optax.apply_updates(params[:2], updates), params.normalizer)
    return State(params, opt_state, state.gradient_steps + 1, key), metrics


EXAMPLE = Example(
    source="pendulum/expert",
    steps=20_000,
    eval_period=2_000,
    seeds=(0, 1, 2, 3, 4),
    config=Config(learning_rate=1e-3, hidden=(64, 64)),
)
