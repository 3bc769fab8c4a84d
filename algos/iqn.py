"""Iterated Q-network (i-DQN): K consecutive Bellman iterates learned at once.

`iqn` is the *iterated* Q-network of Vincent et al. (2024), for discrete actions. It is not the
implicit quantile network, which shares the acronym.

DQN learns one projected Bellman iterate at a time: it regresses Q_1 on the backup of a frozen
Q_0, then freezes Q_1, and so on. i-DQN keeps a window of K online networks Q_1..Q_K and trains
them all, each on the backup of the one before it:

    y_k = r + (1 - terminated) gamma^n max_a' Qbar_{k-1}(s', a')                  k = 1..K
          r the sum of n discounted rewards (fewer where the episode ends), no off-policy correction
    L   = sum_k E[(y_k - Q_k(s, a))^2]                                   (sum of K DQN losses)

    sync,   every D env steps:  Qbar_k <- Q_k                            for k = 1..K-1
    window, every T env steps:  Qbar_k <- Q_{k+1}                        for k = 0..K-1
                                Q_k    <- Q_{k+1}                        for k = 1..K-1, Q_K stays

With K = 1 the sync does nothing and the window is DQN's hard target update: this file is DQN. (With
`shared_torso` the copy is of the parameters before the window's gradient step, as in the authors' order.)

Index mapping. Independent networks: `params[k]` is Q_{k+1} and `target_params[k]` is Qbar_k, both
for k = 0..K-1. Shared torso: `params.head[k]` is the head of Q_{k+1} on `params.torso`;
`target_params.frozen` (equal to `params.frozen` between steps) is the torso and head of Qbar_0, and
targets 1..K-1 are `target_params.head[:-1]` on `target_params.torso`.

D and T count env steps, over all environments, as in the authors' code. A gradient step is made
every `train_period` env steps, so a window holds T / train_period gradient steps (published:
6000 / 4 = 1500) and a sync falls after every 7 or 8 of them (30 / 4). A period fires on the
gradient step during which floor(env_steps / period) increases.

Acting: epsilon-greedy on one online network, drawn uniformly for each environment on each step.
Evaluation draws it the same way, without epsilon.

Source: Vincent, Palenicek, Belousov, Peters, D'Eramo, "Iterated Q-Network: Beyond One-Step Bellman
Updates in Deep Reinforcement Learning", TMLR 2025 (arXiv 2403.02107). Code: theovincent/i-DQN,
branch `main` (c615a2d, independent networks: window after the gradient step, loss summed over
networks) and branch `experiments` (d92ed3d, the paper's Atari runs, `shared_torso`: window before
the gradient step, loss averaged over heads, the whole target copied on a sync).

Deviations:
- `shared_torso` draws the acting head from the K online heads; the Atari code draws from K + 1,
  the frozen Qbar_0 among them. Set `frozen_head_acts` for theirs. Reason: K = 1 is then DQN.
- `shared_torso`, on 84x84 pixels, shares the convolutions as the authors do. For vectors and MinAtar
  it shares every hidden layer: their code has no such network.
- `main` counts its periods from its first random sample, `experiments` from 0 after the last; both
  count from the first here, as the counter is `env_steps`, so events fall up to one period apart.
- An event between two gradient steps takes effect with the later one, up to train_period - 1 env
  steps after the authors': an iteration acts first and then learns, so that it compiles to one body.
- `experiments` makes its first gradient step with the targets from before the first window; here the
  first window comes before the targets are copied, so that targets are targets from the start.
- Every network starts from the Atari initialisation; `main` has lecun_normal for its dense layers and
  xavier_uniform for its convolutions. One initialisation leaves K and the torso the only differences.
- The last transition of a terminated episode is stored; the replay of `main` loses it, a bug.
- Evaluation is without epsilon, as for every algorithm here; the authors report training episodes.
- Rewards are not clipped; MinAtar's and CartPole's are at most 1. Clip in the environment.

One `step` is `max(num_envs, train_period)` env steps and one gradient step for every `train_period`
of them. For `num_envs <= train_period` that is one gradient step.
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
from networks import ensemble
from networks.torso import split_network
from replay import ring

ACTIONS = ("discrete",)


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    learning_rate: Positive = 6.25e-5  # Adam's; published 6.25e-5 (Atari)
    adam_epsilon: Positive = 1.5e-4  # added to Adam's root mean square; published 1.5e-4
    gamma: Fraction = 0.99  # discount per env step; published 0.99
    epsilon_start: Fraction = 1.0  # exploration after the prefill; published 1.0
    epsilon_end: Fraction = 0.01  # exploration from epsilon_decay on; published 0.01
    epsilon_decay: NonNegative = 250_000.0  # env steps after the prefill, linear; published 250k
    # Static: shape the program.
    num_iterates: Count = static(default=5)  # K, networks; published 5 (1 is DQN)
    sync_period: Count = static(default=30)  # D, env steps; published 30
    window_period: Count = static(default=6_000)  # T, env steps; published 6k (DQN: 8k)
    train_period: Count = static(default=4)  # env steps per gradient step; published 4
    n_step: Count = static(default=1)  # env steps in a return; published 1
    batch_size: Count = static(default=32)  # transitions; published 32
    capacity: Count = static(default=1_000_000)  # transitions over all envs; published 1e6
    prefill: Count = static(default=20_000)  # env steps by a uniform policy; published 20k
    hidden: Widths = static(default=(512,))  # widths of the dense layers; published (512,)
    shared_torso: bool = static(default=True)  # one torso under K heads; published True
    frozen_head_acts: bool = static(default=False)  # draw Qbar_0 too when acting (shared_torso); published True
    huber: bool = static(default=False)  # Huber loss (delta 1) instead of the square; published False
    padding: str = static(default="SAME")  # of the 84x84 torso, SAME or VALID; published SAME


class Params(NamedTuple):
    torso: dict  # leading axis K, or none where the torso is shared
    head: dict  # leading axis K
    frozen: tuple  # (torso, head) of Qbar_0 where the torso is shared, else ()


class State(NamedTuple):
    params: Params  # Q_1..Q_K
    target_params: Params  # Qbar_0..Qbar_{K-1}
    opt_state: tuple  # over torso and head; never shifted, as in the authors' code
    replay: ring.Replay
    env_state: object
    env_steps: jax.Array  # () int32, over all envs, prefill included
    gradient_steps: jax.Array  # () int32
    key: jax.Array


def networks(config, spec: Spec) -> tuple[nn.Module, nn.Module]:
    """Torso and head of one Q-network; initialised as the authors' Atari networks."""
    kernel_init = nn.initializers.variance_scaling(1.0, "fan_avg", "truncated_normal")
    return split_network(spec.obs, config.hidden, spec.num_actions, config.padding, kernel_init)


def q_values(config, spec, params: Params, obs):
    """Q_1..Q_K of a batch of observations, `(K, B, A)`."""
    torso, head = networks(config, spec)
    if config.shared_torso:
        return ensemble.apply(head, params.head, torso.apply(params.torso, obs))
    one = lambda torso_params, head_params: head.apply(head_params, torso.apply(torso_params, obs))
    return jax.vmap(one)(params.torso, params.head)


def frozen_q_values(config, spec, params: Params, obs):
    """Qbar_0 of a batch of observations where the torso is shared, `(1, B, A)`."""
    torso, head = networks(config, spec)
    frozen_torso, frozen_head = params.frozen
    return head.apply(frozen_head, torso.apply(frozen_torso, obs))[None]


def target_q_values(config, spec, target_params: Params, obs):
    """Qbar_0..Qbar_{K-1} of a batch of observations, `(K, B, A)`."""
    if not config.shared_torso:
        return q_values(config, spec, target_params, obs)
    first = frozen_q_values(config, spec, target_params, obs)
    if config.num_iterates == 1:
        return first
    but_last = target_params._replace(head=jax.tree.map(lambda p: p[:-1], target_params.head))
    return jnp.concatenate([first, q_values(config, spec, but_last, obs)])


def td_loss(q, q_next, action, reward, discount, huber=False):
    """TD loss of one network, mean over the batch.

    Args: q, q_next `(B, A)`; action `(B,)` int; reward `(B,)`, the n-step sum; discount `(B,)`,
        gamma^n (1 - terminated).
    Returns: () float32.
    """
    target = jax.lax.stop_gradient(reward + discount * q_next.max(-1))
    td_error = target - jnp.take_along_axis(q, action[:, None], -1)[:, 0]
    return jnp.mean(optax.huber_loss(td_error) if huber else jnp.square(td_error))


def losses(config, spec, params: Params, target_params: Params, batch, discount):
    """The K losses, `(K,)`: network k against target k - 1."""
    q = q_values(config, spec, params, batch.obs)  # (K, B, A)
    q_next = target_q_values(config, spec, target_params, batch.next_obs)  # (K, B, A)
    per_network = lambda q, q_next: td_loss(q, q_next, batch.action, batch.reward, discount, config.huber)
    return jax.vmap(per_network)(q, q_next)


def shift(tree):
    """Q_k <- Q_{k+1} on every leaf's leading axis; the last stays, so the last two are equal."""
    return jax.tree.map(lambda p: jnp.concatenate([p[1:], p[-1:]]), tree)


def move_window(params, target_params, window_due, sync_due):
    """Independent networks, after the gradient step (branch `main`). A window leaves no room for a sync."""
    synced = jax.tree.map(lambda p, t: jnp.concatenate([t[:1], p[:-1]]), params, target_params)
    target_params = select(window_due, params, select(sync_due, synced, target_params))
    return select(window_due, shift(params), params), target_params


def roll_shared(params: Params):
    """Shared torso, before the gradient step (branch `experiments`): Q_1 becomes the frozen Qbar_0."""
    first = jax.tree.map(lambda p: p[0], params.head)
    return Params(params.torso, shift(params.head), (params.torso, first))


def due(period, before, after):
    """Whether floor(env_steps / period) increases between two counts of env steps."""
    return after // period > before // period


def select(flag, new, old):
    """`new` where the () bool `flag` holds, else `old`, leaf by leaf: cheaper than a cond under vmap."""
    return jax.tree.map(lambda n, o: jnp.where(flag, n, o), new, old)


def epsilon(config, env_steps):
    """Linear from epsilon_start at the end of the prefill to epsilon_end `epsilon_decay` env steps later."""
    progress = (env_steps - config.prefill) / jnp.maximum(config.epsilon_decay, 1.0)
    return config.epsilon_start + jnp.clip(progress, 0, 1) * (config.epsilon_end - config.epsilon_start)


def optimizer(config):
    return optax.adam(config.learning_rate, eps=config.adam_epsilon)


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
    if config.frozen_head_acts and not config.shared_torso:
        raise ValueError("frozen_head_acts needs shared_torso: independent networks have no frozen head")
    if not hasattr(env.spec.obs, "shape"):
        raise ValueError("iqn needs one array as its observation; this environment's is structured")
    if config.padding not in ("SAME", "VALID"):
        raise ValueError(f"padding {config.padding!r} must be SAME or VALID")


def init(config, env, key) -> State:
    key, torso_key, head_key, reset_key, prefill_key = jax.random.split(key, 5)

    # Networks: K drawn independently; the targets start as copies.
    torso, head = networks(config, env.spec)
    obs = zeros(env.spec.obs)
    if config.shared_torso:
        torso_params = torso.init(torso_key, obs)
        features = torso.apply(torso_params, obs)
        head_params = ensemble.init(head, head_key, config.num_iterates, features)
        # The authors' first env step is a window: Qbar_0 starts as the first head drawn, the last two heads as equals.
        params = roll_shared(Params(torso_params, head_params, ()))
    else:
        torso_params = ensemble.init(torso, torso_key, config.num_iterates, obs)
        features = torso.apply(jax.tree.map(lambda p: p[0], torso_params), obs)
        params = Params(torso_params, ensemble.init(head, head_key, config.num_iterates, features), ())
    opt_state = optimizer(config).init((params.torso, params.head))

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
    env_steps = jnp.int32(config.prefill)
    return State(params, params, opt_state, replay, env_state, env_steps, jnp.int32(0), key)


def act(config, spec, params: Params, obs, key):
    """Greedy with respect to one of the K networks, drawn uniformly for each row of `obs`. `(B,)` int32.

    All K are evaluated, and one is used for each row.
    """
    q = q_values(config, spec, params, obs)  # (K, B, A)
    if config.shared_torso and config.frozen_head_acts:
        q = jnp.concatenate([frozen_q_values(config, spec, params, obs), q])
    drawn = jax.random.randint(key, (q.shape[1],), 0, q.shape[0])
    greedy = q.argmax(-1)  # (K, B)
    return jnp.take_along_axis(greedy, drawn[None], 0)[0].astype(jnp.int32)


def step(config, env, state: State) -> tuple[State, dict]:
    key, act_key, learn_key = jax.random.split(state.key, 3)

    # Act and store, epsilon-greedily.
    def act_and_store(carry, key):
        env_state, replay, env_steps = carry
        head_key, uniform_key, explore_key, env_key = jax.random.split(key, 4)
        greedy = act(config, env.spec, state.params, env_state.obs, head_key)
        uniform = jax.random.randint(uniform_key, greedy.shape, 0, env.spec.num_actions)
        explore = jax.random.uniform(explore_key, greedy.shape) < epsilon(config, env_steps)
        action = jnp.where(explore, uniform, greedy)
        env_state, transition, finished = env.step(env_key, env_state, action)
        return (env_state, ring.insert(replay, transition), env_steps + env.num_envs), finished

    # Learn: one gradient step of all K networks for every `train_period` env steps.
    def learn(carry, key):
        params, target_params, opt_state, before = carry
        after = before + config.train_period
        window_due = due(config.window_period, before, after)
        sync_due = due(config.sync_period, before, after)
        batch, discount = ring.sample_n_step(replay, key, config.batch_size, config.n_step, config.gamma)

        if config.shared_torso:
            params = select(window_due, roll_shared(params), params)

        def loss_fn(online):
            online_params = params._replace(torso=online[0], head=online[1])
            loss = losses(config, env.spec, online_params, target_params, batch, discount)
            # The mean over heads shares one torso as `experiments` does; the sum keeps K problems apart.
            return loss.mean() if config.shared_torso else loss.sum(), loss

        grads, loss = jax.grad(loss_fn, has_aux=True)((params.torso, params.head))
        updates, opt_state = optimizer(config).update(grads, opt_state)
        online = optax.apply_updates((params.torso, params.head), updates)
        params = params._replace(torso=online[0], head=online[1])

        if config.shared_torso:
            target_params = select(window_due | sync_due, params, target_params)
        else:
            params, target_params = move_window(params, target_params, window_due, sync_due)
        return (params, target_params, opt_state, after), loss.mean()

    vector_steps = period(config, env) // env.num_envs
    carry = (state.env_state, state.replay, state.env_steps)
    (env_state, replay, env_steps), finished = jax.lax.scan(
        act_and_store, carry, jax.random.split(act_key, vector_steps)
    )
    updates = period(config, env) // config.train_period
    carry = (state.params, state.target_params, state.opt_state, state.env_steps)
    (params, target_params, opt_state, _), loss = jax.lax.scan(learn, carry, jax.random.split(learn_key, updates))

    state = State(params, target_params, opt_state, replay, env_state, env_steps, state.gradient_steps + updates, key)
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
        num_iterates=3,
        sync_period=80,
        window_period=800,
        train_period=8,
        n_step=5,
        batch_size=64,
        capacity=100_000,
        prefill=1_000,
        hidden=(120, 84),
        shared_torso=False,
    ),
)
