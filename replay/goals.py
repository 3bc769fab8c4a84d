"""Goals for learners that draw their own, from datasets and from rings. None lies beyond the end of an episode.

A goal is what some transition led to, its `next_obs`:

    random              of any transition, uniformly
    future_geometric    of the transition `offset - 1` steps further on: P(offset) ~ gamma^offset, offset = 1..horizon
    future_uniform      the same with offset uniform over 1..horizon

`horizon` counts the transitions from one to the last of its episode, itself included: an offset of 1 is its own
successor. The geometric law is cut off there and renormalised, so that no mass gathers at ends of episodes.

In a dataset `last` says where an episode ends. A `Replay` of this file is a ring (replay/ring.py) that knows it as
well, the newest transition standing for the end of what still goes on: two words more for each transition, and
nothing that grows with the capacity when inserting or drawing.
"""

from typing import Any

import jax
import jax.numpy as jnp

from envs.types import Transition, pytree
from replay import ring
from replay.datasets import Dataset

KINDS = ("random", "future_geometric", "future_uniform")


def geometric_offset(key, horizon, gamma):
    """Offsets from 1 to `horizon` with P(offset) ~ gamma^offset. Args: horizon `(B,)` int32; gamma in (0, 1).

    Inverts the distribution, (1 - gamma^offset) / (1 - gamma^horizon), at a uniform number.
    """
    log_gamma = jnp.log(gamma)
    u = jax.random.uniform(key, horizon.shape)
    steps = jnp.log1p(u * jnp.expm1(horizon * log_gamma)) / log_gamma  # in [0, horizon)
    return jnp.clip(steps.astype(jnp.int32) + 1, 1, horizon)  # float32 may round up to horizon


def uniform_offset(key, horizon):
    """Offsets from 1 to `horizon`, uniformly. Args: horizon `(B,)` int32."""
    return jax.random.randint(key, horizon.shape, 1, horizon + 1)


def offset(kind: str, key, horizon, gamma):
    return uniform_offset(key, horizon) if kind == "future_uniform" else geometric_offset(key, horizon, gamma)


def draw(kind: str, dataset: Dataset, key, index, gamma):
    """Of which transitions the successors are goals. Args: index `(B,)` of the transitions to have goals.

    Returns: `(B,)` int32, indices into the dataset.
    """
    if kind == "random":
        return jax.random.randint(key, index.shape, 0, dataset.num_transitions)
    return index + offset(kind, key, dataset.last[index] - index + 1, gamma) - 1


@pytree
class Replay:
    """A ring, and where its episodes end. Rows are counted from the first one ever inserted."""

    ring: ring.Replay
    episode: jax.Array  # (rows, num_envs) int32, number of each transition's episode within its environment
    last: jax.Array  # (rows, num_envs) int32; at (n mod rows, env) the newest row of the environment's episode n
    current: jax.Array  # (num_envs,) int32, number of the episode that goes on


def create(capacity: int, num_envs: int, example: Transition) -> Replay:
    """An empty one of `capacity` transitions, counted over all environments."""
    of = ring.create(capacity, num_envs, example)
    zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
    return Replay(of, zeros(of.num_rows, num_envs), zeros(of.num_rows, num_envs), zeros(num_envs))


def insert(replay: Replay, transition: Transition) -> Replay:
    """Overwrites the oldest row. Args: transition, leaves `(num_envs, ...)`."""
    row, num_rows = replay.ring.inserted, replay.ring.num_rows
    episode = jax.lax.dynamic_update_index_in_dim(replay.episode, replay.current, row % num_rows, 0)
    # The episodes of an environment that have transitions here are consecutive, and at most as many as there are rows.
    envs = jnp.arange(replay.ring.num_envs)
    last = replay.last.at[replay.current % num_rows, envs].set(row)
    current = replay.current + (transition.terminated | transition.truncated)
    return Replay(ring.insert(replay.ring, transition), episode, last, current)


def sample_rows(replay: Replay, key, batch_size: int):
    """Rows and environments of transitions drawn uniformly, with replacement, both `(batch_size,)` int32."""
    row_key, env_key = jax.random.split(key)
    row = jax.random.randint(row_key, (batch_size,), replay.ring.inserted - replay.ring.stored, replay.ring.inserted)
    return row, jax.random.randint(env_key, (batch_size,), 0, replay.ring.num_envs)


def horizon(replay: Replay, row, env):
    """Transitions from one to the last of its episode, `(B,)` int32; of one that goes on, to the newest."""
    num_rows = replay.ring.num_rows
    episode = replay.episode[row % num_rows, env]
    return replay.last[episode % num_rows, env] - row + 1


def take(replay: Replay, row, env) -> Transition:
    return ring.take(replay.ring, row % replay.ring.num_rows, env)


def draw_from_ring(kind: str, replay: Replay, key, row, env, gamma) -> Any:
    """Goals for the transitions at `row` and `env`, both `(B,)`: `next_obs` of others, leaves `(B, ...)`."""
    if kind == "random":
        row, env = sample_rows(replay, key, len(row))
    else:
        row = row + offset(kind, key, horizon(replay, row, env), gamma) - 1
    return take(replay, row, env).next_obs
