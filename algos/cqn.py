"""CQN, the coarse-to-fine Q-network: value-based control of continuous actions by zooming into the action space.

The box [-1, 1]^D is refined L times. At each level every dimension is cut into A equal bins of its interval there, one
is chosen by Q, and becomes the interval of the next level: A^L actions per dimension from L choices among A.

    level l:   Q_l(s, a_{l-1}, k, d),  k = 0..A-1   one critic for all levels, told apart by a one-hot
    a_l        midpoints of the intervals chosen at level l;  a_0 = 0
    zoom       low' = low + w k,  high' = low' + w,  w = (high - low) / A

Each level and dimension learns a distribution of returns on N atoms z of its own, towards

    k*         = argmax_k Q_l(s', a*_{l-1}, k, d), level by level, by the online critic
    target     = projection of r + gamma^n z, z ~ Qbar_l(s', a*_{l-1}, k*, d), by the target critic
    L_td       = -mean_{l, d} sum_j target_j log p_l(s, a_{l-1}, k, d)_j,  k the bins of the replayed action

With demonstrations half of every batch is drawn from them. These samples are also imitated: at every
level and dimension the bin of the demonstrated action, k, shall be no worse than any other, j,

    L_fosd     = mean_{l, d, j} sum_z max(CDF_k(z) - CDF_j(z), 0)          first-order stochastic dominance
    L_margin   = mean_{l, d, j} max(margin - (Q_k - Q_j), 0)               k itself counts as an alternative
    L          = td_weight L_td + imitation_weight (L_fosd + L_margin)

An episode that ends in success is a demonstration from then on. `distributional: false` learns expected values by
squared errors instead, and L_fosd is left out.

Index mapping. `codes[..., l, d]` is k of level l + 1 and `midpoints[..., l, d]` the entering a_l, l = 0..L-1. Logits
are `(..., D, A, N)`, those of all levels `(B, L, D, A, N)`.

Source: Seo, Uruc, James, "Continuous Control with Coarse-to-fine Reinforcement Learning", CoRL 2024 (arXiv 2407.07787);
https://github.com/younggyoseo/CQN at 1932a05; for vectors younggyoseo/CQN-AS at 8cf806e and robobase-org/robobase at
411b7c7. The paper's own text could not be read: names and equations are ours.

Deviations:
- A termination is one. The code of 1932a05 bootstraps from it in online episodes; `always_bootstrap` does so, in
  demonstrations too.
- Batches are uniform over transitions; the code's are uniform over episodes, then over time.
- Demonstrations of the dataset are never overwritten; the code's buffer forgets its oldest.
- Imitated are the samples of the demonstrations' half. The code also imitates those of the other half that stem from
  demonstrations, all that this half holds too.
- Pixels are not supported.
- Published defaults are those of RLBench, but for `bottleneck`, which there reduces features of pixels, and
  `act_with_target`: the online critic acts, as in DMC.

One `step` is `max(num_envs, train_period)` env steps, and one gradient step per `train_period` of them.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from envs.types import (
    Count,
    EnvAndData,
    Example,
    Fraction,
    Natural,
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
from networks import dense
from networks.norm import LayerNorm
from networks.orthogonal import orthogonal
from networks.torso import vectors
from replay import demos as demonstrations
from replay import ring

ACTIONS = ("continuous",)
INSIDE = 1 - 1e-6  # noisy actions are clipped to +-INSIDE before they are rounded to a bin
MAX_CELLS = 2**23  # per dimension; codes are fixed points of float32 up to here
LONGEST = 1_000  # transitions that are kept of a successful episode where episodes have no limit


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    learning_rate: Positive = 5e-5  # AdamW's; published 5e-5 (RLBench), 1e-4 (DMC)
    weight_decay: NonNegative = 0.1  # AdamW's, of all parameters; published 0.1, 0 (DMC, RoboBase)
    gamma: Fraction = 0.99  # discount per env step; published 0.99
    v_min: Real = -2.0  # the first atom; published -2 (RLBench), 0 (DMC)
    v_max: Real = 2.0  # the last atom; published 2 (RLBench), 200 (DMC)
    target_update_rate: Fraction = 0.02  # target += rate (online - target); published 0.02; 1: a copy
    exploration_noise: NonNegative = 0.01  # std added to actions; published 0.01 (RLBench), 0.1 (DMC)
    tie_tolerance: NonNegative = 1e-4  # bins whose values all lie closer are drawn from; published 1e-4, 0 (scalar)
    td_weight: NonNegative = 0.1  # of the loss; published 0.1 (RLBench), 1 (DMC)
    imitation_weight: NonNegative = 1.0  # of the loss on demonstrations; published 1
    margin: NonNegative = 0.01  # by which a demonstrated bin's value shall lead; published 0.01, 0 (RoboBase)
    success_reward: Real = 1.0  # an episode that terminates with at least this reward is a demonstration; published 1
    # Static: shape the program.
    levels: Count = static(default=3)  # L; published 3
    bins: Count = static(default=5)  # A, of each interval; published 5
    distributional: bool = static(default=True)  # atoms, or one expected value
    num_atoms: Count = static(default=51)  # N; published 51
    dueling: bool = static(default=True)  # a stream for what all bins share; published True, False (DMC states)
    n_step: Count = static(default=1)  # env steps in a return; published 1 (RLBench), 3 (DMC)
    target_period: Count = static(default=1)  # gradient steps between updates of the target; published 1, 100 (scalar)
    act_with_target: bool = static(default=False)  # by the target critic; published True (RLBench), False (DMC)
    always_bootstrap: bool = static(default=False)  # terminations too
    train_period: Count = static(default=1)  # env steps per gradient step; published 1 (RLBench), 2 (DMC pixels)
    batch_size: Count = static(default=256)  # transitions, and as many of demonstrations; published 256
    capacity: Count = static(default=1_000_000)  # transitions over all envs; published 1e6
    demo_capacity: Count = static(default=100_000)  # transitions of demonstrations
    prefill: Natural = static(default=0)  # env steps by a uniform policy; published 0 (RLBench), 2k-4k (DMC)
    hidden: Widths = static(default=(512, 512))  # of each stream; published (512, 512)
    bottleneck: Natural = static(default=0)  # width of each part of an observation before that; 0: as it is


class Params(NamedTuple):
    critic: dict
    target: dict  # the target critic


class State(NamedTuple):
    params: Params
    opt_state: tuple
    replay: ring.Replay
    demos: demonstrations.Demos | None  # None without demonstrations
    env_state: object
    episode_length: jax.Array  # (num_envs,) int32, transitions of the episode so far
    env_steps: jax.Array  # () int32, over all envs, prefill included
    gradient_steps: jax.Array  # () int32
    key: jax.Array


def zoom(low, high, k, bins):
    """The k-th of `bins` equal parts of the interval [low, high], within [-1, 1]. All of one shape."""
    width = (high - low) / bins
    low = low + width * k
    return jnp.maximum(low, -1.0), jnp.minimum(low + width, 1.0)


def encode(action, levels, bins):
    """The bins that an action lies in, `codes` int32, and the midpoints that enter each level; both `(..., L, D)`."""
    low, high = -jnp.ones_like(action), jnp.ones_like(action)
    codes, midpoints = [], []
    for _ in range(levels):
        midpoints.append((low + high) / 2)
        k = jnp.clip(jnp.floor((action - low) / ((high - low) / bins)), 0, bins - 1)
        codes.append(k.astype(jnp.int32))
        low, high = zoom(low, high, k, bins)
    return jnp.stack(codes, -2), jnp.stack(midpoints, -2)


def decode(codes, bins):
    """The midpoint of the last interval, `(..., D)`, of codes `(..., L, D)`."""
    low, high = -jnp.ones_like(codes[..., 0, :], jnp.float32), jnp.ones_like(codes[..., 0, :], jnp.float32)
    for level in range(codes.shape[-2]):
        low, high = zoom(low, high, codes[..., level, :], bins)
    return (low + high) / 2


def quantise(config, action):
    """The nearest action that the agent can choose: it is its own."""
    return decode(encode(action, config.levels, config.bins)[0], config.bins)


class Stream(nn.Module):
    """Hidden layers on parts of an observation, `(..., n)` each, and `(..., m)` more; a last layer of zeros."""

    hidden: tuple[int, ...]
    bottleneck: int
    num_outputs: int
    use_bias: bool

    @nn.compact
    def __call__(self, parts, more):
        layer = dict(kernel_init=orthogonal(), dot_general=dense.dot_general)
        if self.bottleneck:
            parts = [nn.tanh(LayerNorm()(nn.Dense(self.bottleneck, use_bias=False, **layer)(x))) for x in parts]
        x = jnp.concatenate([*parts, more], -1)
        for size in self.hidden:
            x = nn.silu(LayerNorm()(nn.Dense(size, use_bias=self.use_bias, **layer)(x)))
        return nn.Dense(self.num_outputs, kernel_init=nn.initializers.zeros, dot_general=dense.dot_general)(x)


class Critic(nn.Module):
    """Logits of all bins, `(..., D, A, N)`; N = 1 is the value itself."""

    size: int  # D
    bins: int
    num_atoms: int
    dueling: bool
    hidden: tuple[int, ...]
    bottleneck: int
    use_bias: bool

    @nn.compact
    def __call__(self, parts, more):
        stream = lambda bins: Stream(self.hidden, self.bottleneck, self.size * bins * self.num_atoms, self.use_bias)
        shape = lambda x: x.reshape(*x.shape[:-1], self.size, -1, self.num_atoms)
        advantage = shape(stream(self.bins)(parts, more))
        if not self.dueling:
            return advantage
        value = shape(stream(1)(parts, more))
        return value + advantage - advantage.mean(-2, keepdims=True)


def network(config, spec: Spec) -> Critic:
    num_atoms = config.num_atoms if config.distributional else 1
    shape = (spec.action_size, config.bins, num_atoms, config.dueling)
    return Critic(*shape, config.hidden, config.bottleneck, use_bias=not config.distributional)


def logits_of(config, spec: Spec, critic, obs, midpoints, level):
    """Logits of all bins, `(..., D, A, N)`. Args: obs, leaves `(..., *shape)`; midpoints `(..., D)`; level `(...,)`."""
    return network(config, spec).apply(critic, *inputs(config, spec, obs, midpoints, level))


def inputs(config, spec: Spec, obs, midpoints, level):
    """What the network reads: the parts of the observation, and the entering midpoints beside the level's one-hot."""
    lead = midpoints.shape[:-1]
    parts = [jnp.broadcast_to(x, (*lead, x.shape[-1])) for x in vectors(spec.obs, obs)]
    level = jnp.broadcast_to(jax.nn.one_hot(level, config.levels), (*lead, config.levels))
    return parts, jnp.concatenate([midpoints, level], -1)


def all_levels(config, spec: Spec, critic, obs, midpoints):
    """Logits along a path, `(B, L, D, A, N)`. Args: obs, leaves `(B, *shape)`; midpoints `(B, L, D)`."""
    obs = jax.tree.map(lambda x: x[:, None], obs)  # one for all levels
    return logits_of(config, spec, critic, obs, midpoints, jnp.arange(config.levels)[None])


def support(config):
    """The atoms z, `(N,)`, evenly spaced from v_min to v_max."""
    return jnp.linspace(config.v_min, config.v_max, config.num_atoms)


def values(config, logits):
    """Q: the mean of the distribution on the atoms, or the one number. `(..., N)` to `(...,)`."""
    if not config.distributional:
        return logits[..., 0]
    return jnp.dot(jax.nn.softmax(logits), support(config), precision="highest")


def choose(q, tolerance, key):
    """The bins of the largest values, drawn where all lie within `tolerance`. `(..., D, A)` to `(..., D)` int32."""
    tied = q.max(-1) - q.min(-1) < tolerance
    drawn = jax.random.randint(key, tied.shape, 0, q.shape[-1])
    return jnp.where(tied, drawn, q.argmax(-1).astype(jnp.int32))


def greedy(config, spec: Spec, critic, obs, key):
    """The best action level by level, `(B, D)`, and its codes and midpoints, both `(B, L, D)`.

    Args: obs, leaves `(B, *shape)`; key, of ties.
    """
    shape = (jax.tree.leaves(obs)[0].shape[0], spec.action_size)
    low, high = -jnp.ones(shape), jnp.ones(shape)
    codes, midpoints = [], []
    for level, level_key in enumerate(jax.random.split(key, config.levels)):
        midpoints.append((low + high) / 2)
        q = values(config, logits_of(config, spec, critic, obs, midpoints[-1], jnp.int32(level)))
        codes.append(choose(q, config.tie_tolerance, level_key))
        low, high = zoom(low, high, codes[-1], config.bins)
    return (low + high) / 2, jnp.stack(codes, 1), jnp.stack(midpoints, 1)


def at(logits, codes):
    """Those of the chosen bins: `(..., A, N)` and `(...,)` to `(..., N)`."""
    return jnp.take_along_axis(logits, codes[..., None, None], -2)[..., 0, :]


def project(probabilities, reward, discount, z):
    """The law of r + discount Z on the atoms: each atom's mass, clipped to the ends, on its two neighbours.

    Args: probabilities of Z `(B, ..., N)`; reward, discount `(B,)`; z `(N,)`, evenly spaced. Returns: `(B, ..., N)`.
    """
    moved = jnp.clip(reward[:, None] + discount[:, None] * z[None], z[0], z[-1])  # (B, N)
    distance = jnp.abs(moved[:, :, None] - z[None, None]) / (z[1] - z[0])  # (B, N, N), in atoms
    return jnp.einsum("b...k,bkj->b...j", probabilities, jnp.clip(1 - distance, 0, 1), precision="highest")


def cross_entropy(target, logits):
    """-sum_j target_j log p_j: `(..., N)` both, to `(...,)`."""
    return -(target * jax.nn.log_softmax(logits)).sum(-1)


def dominance_loss(logits, codes):
    """L_fosd of each sample, `(B,)`. Args: logits `(B, L, D, A, N)`; codes `(B, L, D)`."""
    cdf = jnp.cumsum(jax.nn.softmax(logits), -1)
    excess = jax.nn.relu(at(cdf, codes)[..., None, :] - cdf).sum(-1)  # (B, L, D, A)
    return excess.mean((1, 2, 3))


def margin_loss(q, codes, margin):
    """L_margin of each sample, `(B,)`. Args: q `(B, L, D, A)`; codes `(B, L, D)`."""
    chosen = at(q[..., None], codes)  # (B, L, D, 1)
    return jax.nn.relu(margin - (chosen - q)).mean((1, 2, 3))


def losses(config, logits, codes, target, num_demos: int):
    """L of a batch whose last `num_demos` samples are demonstrations, and its parts.

    Args: logits of all bins `(B, L, D, A, N)`; codes of the replayed actions `(B, L, D)`; target, the projected
        distributions or values, `(B, L, D, N)`.
    """
    chosen = at(logits, codes)
    error = cross_entropy(target, chosen) if config.distributional else jnp.square(target - chosen)[..., 0]
    td_loss = error.mean()
    loss, parts = config.td_weight * td_loss, dict(td_loss=td_loss, q_mean=values(config, chosen).mean())
    if num_demos:
        logits, codes = logits[-num_demos:], codes[-num_demos:]
        parts["margin_loss"] = margin_loss(values(config, logits), codes, config.margin).mean()
        if config.distributional:
            parts["dominance_loss"] = dominance_loss(logits, codes).mean()
        loss += config.imitation_weight * (parts["margin_loss"] + parts.get("dominance_loss", 0.0))
    return loss, parts


def target_of(config, spec: Spec, params: Params, batch, discount, key):
    """What each level and dimension learns towards, `(B, L, D, N)`: the online critic's choice, the target's value.

    Args: batch, n-step transitions, leaves `(B, ...)`; discount `(B,)`, of their bootstrap value.
    """
    _, codes, midpoints = greedy(config, spec, params.critic, batch.next_obs, key)
    next_logits = at(all_levels(config, spec, params.target, batch.next_obs, midpoints), codes)  # (B, L, D, N)
    if config.distributional:
        return project(jax.nn.softmax(next_logits), batch.reward, discount, support(config))
    return batch.reward[:, None, None, None] + discount[:, None, None, None] * next_logits


def update(config, spec: Spec, params: Params, opt_state, batch, discount, num_demos: int, gradient_steps, key):
    """One gradient step, and the target's. Args: batch, its last `num_demos` demonstrations, leaves `(B, ...)`.

    Returns: params, opt_state, metrics.
    """
    target = target_of(config, spec, params, batch, discount, key)
    codes, midpoints = encode(batch.action, config.levels, config.bins)

    def loss_fn(critic):
        logits = all_levels(config, spec, critic, batch.obs, midpoints)
        return losses(config, logits, codes, target, num_demos)

    (loss, parts), grads = jax.value_and_grad(loss_fn, has_aux=True)(params.critic)
    updates, opt_state = optimizer(config).update(grads, opt_state, params.critic)
    critic = optax.apply_updates(params.critic, updates)
    rate = jnp.where((gradient_steps + 1) % config.target_period == 0, config.target_update_rate, 0.0)
    return Params(critic, optax.incremental_update(critic, params.target, rate)), opt_state, dict(parts, loss=loss)


def optimizer(config):
    return optax.adamw(config.learning_rate, weight_decay=config.weight_decay)


def period(config, source: EnvAndData) -> int:
    """Env steps that one `step` makes."""
    return max(source.env.num_envs, config.train_period)


def check(config, source: EnvAndData):
    """What `init` needs beyond the ranges in Config. Raises ValueError."""
    env, dataset = source
    ring.check(config.capacity, env.num_envs)
    small, large = sorted((env.num_envs, config.train_period))
    if large % small:
        raise ValueError(
            f"train_period {config.train_period} and num_envs {env.num_envs}: one must be a multiple of the other"
        )
    if config.prefill % large:
        raise ValueError(
            f"prefill {config.prefill} must be a multiple of {large}, the larger of num_envs and train_period"
        )
    if config.bins < 2 or (config.distributional and config.num_atoms < 2):
        raise ValueError(f"bins {config.bins} and num_atoms {config.num_atoms} must be at least 2")
    if config.bins**config.levels > MAX_CELLS:
        raise ValueError(
            f"bins {config.bins} to the power of levels {config.levels} must be at most {MAX_CELLS}: float32 tells no "
            "finer actions apart"
        )
    if config.distributional:
        if not config.v_min < config.v_max:
            raise ValueError(f"v_min {config.v_min} must be less than v_max {config.v_max}")
        largest, float32 = max(abs(config.v_min), abs(config.v_max)), np.finfo(np.float32)
        spacing = (config.v_max - config.v_min) / (config.num_atoms - 1)
        if not (largest < float32.max / 4 and spacing > max(largest * float32.eps, float32.tiny)):
            raise ValueError(
                f"v_min {config.v_min} and v_max {config.v_max}: float32 cannot tell num_atoms {config.num_atoms} "
                "between them apart; move them, or take fewer"
            )
    if any(len(s.shape) > 1 for s in jax.tree.leaves(env.spec.obs)):
        raise ValueError(f"cqn reads vectors; this environment's observations are {env.spec.obs}")
    num_demos = dataset.num_transitions if dataset else 0
    rows = num_demos // env.num_envs + (config.prefill + large) // env.num_envs
    rows = min(rows, config.capacity // env.num_envs)
    if rows < config.n_step:
        raise ValueError(
            f"n_step {config.n_step} needs as many steps of each of {env.num_envs} environments before learning, not "
            f"{rows}: raise prefill {config.prefill} or capacity {config.capacity}"
        )
    if dataset is None:
        return
    room = longest(config, env) * env.num_envs  # for what may end at once
    if config.demo_capacity >= 2**31:
        raise ValueError(
            f"demo_capacity {config.demo_capacity} must be less than {2**31}; slots are counted in 32 bits"
        )
    if num_demos + room > config.demo_capacity:
        raise ValueError(
            f"demo_capacity {config.demo_capacity} must hold the {num_demos} transitions of the demonstrations and "
            f"{room} of one successful episode of each environment: raise it to {num_demos + room}"
        )
    if not env.num_envs <= num_demos <= config.capacity:
        raise ValueError(
            f"the demonstrations' {num_demos} transitions must fill a row of num_envs {env.num_envs} and fit into "
            f"capacity {config.capacity}"
        )


def longest(config, env) -> int:
    """Transitions of a successful episode that are kept."""
    return min(env.spec.max_episode_steps or LONGEST, config.capacity // env.num_envs)


class Collected(NamedTuple):
    """The part of the state that acting changes."""

    replay: ring.Replay
    demos: demonstrations.Demos | None
    env_state: object
    episode_length: jax.Array


def store(config, env, collected: Collected, action, key):
    """Steps every environment and inserts the transitions; an episode that ends in success becomes a demonstration."""
    env_state, transition, finished = env.step(key, collected.env_state, action)
    replay = ring.insert(collected.replay, transition)
    length = collected.episode_length + 1
    demos = collected.demos
    if demos is not None:
        success = transition.terminated & (transition.reward >= config.success_reward)
        demos = demonstrations.copy(demos, replay, length, success, longest(config, env))
    length = jnp.where(transition.terminated | transition.truncated, 0, length)
    return Collected(replay, demos, env_state, length), finished


def init(config, env_and_demos: EnvAndData, key) -> State:
    key, critic_key, reset_key, prefill_key = jax.random.split(key, 4)
    env, dataset = env_and_demos

    # Networks; the target starts as a copy.
    read = inputs(config, env.spec, zeros(env.spec.obs), zeros(env.spec.action), 0)
    critic = network(config, env.spec).init(critic_key, *read)

    # The replay starts with the demonstrations, and goes on with a uniform policy.
    replay, demos = ring.create(config.capacity, env.num_envs, example_transition(env.spec)), None
    if dataset is not None:
        replay = ring.fill(replay, dataset.transitions)
        demos = demonstrations.create(config.demo_capacity, dataset.transitions)

    def collect(collected, key):
        action_key, env_key = jax.random.split(key)
        action = jax.random.uniform(action_key, (env.num_envs, env.spec.action_size), minval=-1, maxval=1)
        return store(config, env, collected, quantise(config, action), env_key)[0], None

    collected = Collected(replay, demos, env.reset(reset_key), jnp.zeros(env.num_envs, jnp.int32))
    collected, _ = jax.lax.scan(collect, collected, jax.random.split(prefill_key, config.prefill // env.num_envs))
    params = Params(critic, critic)
    return State(params, optimizer(config).init(critic), *collected, jnp.int32(config.prefill), jnp.int32(0), key)


def act(config, spec, params: Params, obs, key):
    """The best action level by level."""
    return greedy(config, spec, params.target if config.act_with_target else params.critic, obs, key)[0]


def explore(config, spec, params: Params, obs, key):
    """The best action with Gaussian noise, moved to the nearest that the agent can choose."""
    act_key, noise_key = jax.random.split(key)
    action = act(config, spec, params, obs, act_key)
    noisy = action + config.exploration_noise * jax.random.normal(noise_key, action.shape)
    return quantise(config, jnp.clip(noisy, -INSIDE, INSIDE))


def draw(config, replay, demos, key):
    """A batch of n-step transitions, the second half of demonstrations where there are any, and their discounts."""
    key, demo_key = jax.random.split(key)
    batch = ring.sample_n_step(replay, key, config.batch_size, config.n_step, config.gamma, config.always_bootstrap)
    if demos is None:
        return batch
    half = demonstrations.sample_n_step(
        demos, demo_key, config.batch_size, config.n_step, config.gamma, config.always_bootstrap
    )
    return jax.tree.map(lambda *x: jnp.concatenate(x), batch, half)


def step(config, env_and_demos: EnvAndData, state: State) -> tuple[State, dict]:
    key, act_key, learn_key = jax.random.split(state.key, 3)
    env = env_and_demos.env

    # Act and store.
    def act_and_store(collected, key):
        action_key, env_key = jax.random.split(key)
        action = explore(config, env.spec, state.params, collected.env_state.obs, action_key)
        return store(config, env, collected, action, env_key)

    vector_steps = period(config, env_and_demos) // env.num_envs
    collected = Collected(*(getattr(state, name) for name in Collected._fields))
    collected, finished = jax.lax.scan(act_and_store, collected, jax.random.split(act_key, vector_steps))

    # Learn.
    def learn(carry, key):
        params, opt_state, gradient_steps = carry
        sample_key, update_key = jax.random.split(key)
        batch, discount = draw(config, collected.replay, collected.demos, sample_key)
        num_demos = 0 if collected.demos is None else config.batch_size
        params, opt_state, metrics = update(
            config, env.spec, params, opt_state, batch, discount, num_demos, gradient_steps, update_key
        )
        return (params, opt_state, gradient_steps + 1), metrics

    updates = period(config, env_and_demos) // config.train_period
    carry = (state.params, state.opt_state, state.gradient_steps)
    (params, opt_state, gradient_steps), metrics = jax.lax.scan(learn, carry, jax.random.split(learn_key, updates))

    env_steps = state.env_steps + period(config, env_and_demos)
    state = State(params, opt_state, *collected, env_steps, gradient_steps, key)
    if state.demos is not None:
        metrics["demos"] = state.demos.stored
    return state, dict(metrics, **finished)


EXAMPLE = Example(
    source="Pendulum-v1",
    steps=20_000,
    eval_period=2_000,
    num_envs=1,
    seeds=(0, 1),
    config=Config(
        learning_rate=3e-4,
        weight_decay=0.0,
        v_min=-400.0,
        v_max=0.0,
        exploration_noise=0.1,
        td_weight=1.0,
        train_period=2,
        batch_size=128,
        capacity=20_000,
        prefill=1_000,
        hidden=(128, 128),
    ),
)
