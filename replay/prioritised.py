"""Prioritised replay of windows: a ring, and a tree of sums over the priority of each of its slots.

A *slot* is the first step of a window of `horizon` steps of one environment. It can be drawn once
the window is known to lie within one episode:

- when the step `horizon` steps after it is stored, in the same episode;
- when the episode terminates: its last `horizon` slots then can be, with windows that run past the
  end, to be masked after `terminated` (`ring.n_step` does so by itself);
- the last `horizon` slots of a truncated episode never, unless `truncated_tails`.

A slot enters with the largest priority stored so far, leaves when its step is overwritten, and is
drawn with probability priority / sum, with replacement.

The tree has fan-out 8: level 0 holds the priorities, zero where a slot cannot be drawn, and each
number of a level above is the sum of 8 below. Drawing from 1e6 slots goes down seven levels where
a cumulative sum reads all of them: insert, draw 256 windows and update took 33 us against 134 us
at 1e4 slots, and 0.1 ms against 4.7 at 1e6 (benchmarks/prioritised.py). A sum is computed anew from its 8 terms
whenever one changes, so rounding never accumulates, as it does along a float32 cumulative sum of
1e6 terms.
"""

from itertools import accumulate

import jax
import jax.numpy as jnp

from envs.types import Transition, pytree, static
from replay import ring

FAN_OUT = 8


@pytree
class Replay:
    ring: ring.Replay
    levels: tuple  # of (size,) float32; sizes are multiples of FAN_OUT, the last is FAN_OUT
    max_priority: jax.Array  # () float32, the largest ever stored, at first 1
    age: jax.Array  # (num_envs,) int32, steps that each environment's episode has had
    horizon: int = static()
    truncated_tails: bool = static(default=False)

    @property
    def data(self) -> Transition:
        """The whole ring unpacked, as `ring.Replay.data`."""
        return self.ring.data

    @property
    def priority(self) -> jax.Array:
        """The priority of each slot, `(rows, num_envs)`, zero where it cannot be drawn."""
        rows, num_envs = self.ring.num_rows, self.ring.num_envs
        return self.levels[0][: rows * num_envs].reshape(rows, num_envs)


def lap_priority(td_error, exponent, min_priority=1.0):
    """Loss-adjusted priority (Fujimoto et al. 2020): max(|td_error|, min_priority)^exponent.

    Args: td_error `(...)`, the largest over the critics where there are several.
    """
    return jnp.maximum(jnp.abs(td_error), min_priority) ** exponent


def check(capacity: int, num_envs: int, horizon: int):
    """Raises a ValueError that names the numbers where the ring is not whole rows or too short for a window."""
    ring.check(capacity, num_envs)
    if capacity // num_envs <= horizon:
        raise ValueError(
            f"capacity {capacity} holds {capacity // num_envs} steps of each of {num_envs} environments; "
            f"windows of horizon {horizon} need at least {horizon + 1}: raise capacity to {(horizon + 1) * num_envs}"
        )


def create(capacity: int, num_envs: int, example: Transition, horizon: int, truncated_tails=False) -> Replay:
    """An empty replay of `capacity` transitions over all `num_envs` environments.

    Args: example, one transition without batch axes; horizon, steps of the longest window to be taken.
    """
    check(capacity, num_envs, horizon)
    sizes = [-(-capacity // FAN_OUT) * FAN_OUT]
    while sizes[-1] > FAN_OUT:
        sizes.append(-(-sizes[-1] // FAN_OUT**2) * FAN_OUT)
    levels = tuple(jnp.zeros(size) for size in sizes)
    age = jnp.zeros(num_envs, jnp.int32)
    return Replay(
        ring.create(capacity, num_envs, example), levels, jnp.float32(1), age, int(horizon), bool(truncated_tails)
    )


def set_leaves(levels: tuple, slot, priority) -> tuple:
    """Writes priorities `(N,)` at the slots `(N,)`, and the sums above. Of a slot named twice the larger stays."""
    return raise_leaves((levels[0].at[slot].set(0.0), *levels[1:]), slot, priority)


def raise_leaves(levels: tuple, slot, priority) -> tuple:
    """As `set_leaves`, but a slot whose priority is already larger keeps it."""
    # A maximum does not depend on the order of writes, which a GPU leaves open.
    level = levels[0].at[slot].max(priority)
    written, index = [level], slot
    for above in levels[1:]:
        index = index // FAN_OUT
        level = above.at[index].set(level.reshape(-1, FAN_OUT)[index].sum(-1))
        written.append(level)
    return tuple(written)


def insert(replay: Replay, transition: Transition) -> Replay:
    """Overwrites the oldest row with `transition`, leaves `(num_envs, ...)`, and opens the slots it completes."""
    num_rows, num_envs, horizon = replay.ring.num_rows, replay.ring.num_envs, replay.horizon
    row = replay.ring.inserted % num_rows
    ended = transition.terminated | transition.truncated
    opening = ended if replay.truncated_tails else transition.terminated  # ends whose last slots can be drawn

    back = jnp.arange(horizon + 1)[:, None]  # (horizon + 1, 1), steps before the new one
    slot = (row - back) % num_rows * num_envs + jnp.arange(num_envs)[None]  # (horizon + 1, num_envs)
    age = replay.age[None]
    opens = (back <= age) & ((back == horizon) | opening[None])
    # The overwritten row leaves. A slot that opens was closed, at zero, so it need only be raised:
    # reading the others here, to write them back, would make XLA copy the level on every insert.
    leaves = replay.levels[0].at[slot[0]].set(0.0)
    priority = jnp.where(opens, replay.max_priority, 0.0)
    levels = raise_leaves((leaves, *replay.levels[1:]), slot.reshape(-1), priority.reshape(-1))

    return Replay(
        ring.insert(replay.ring, transition),
        levels,
        replay.max_priority,
        jnp.where(ended, 0, replay.age + 1),
        horizon,
        replay.truncated_tails,
    )


def sample(replay: Replay, key: jax.Array, batch_size: int) -> jax.Array:
    """Draws `batch_size` slots, `(batch_size,)` int32, each in proportion to its priority, with replacement."""
    return draw(replay, key, batch_size)[0]


def draw(replay: Replay, key: jax.Array, batch_size: int) -> tuple[jax.Array, jax.Array]:
    """Slots as of `sample`, and the probability that each was drawn with, both `(batch_size,)`.

    A child is drawn at every level by a number of its own, so that 23 random bits are enough at any
    capacity. Where no slot can be drawn yet the result is meaningless.
    """
    index = jnp.zeros(batch_size, jnp.int32)
    uniform = jax.random.uniform(key, (len(replay.levels), batch_size))
    total = replay.levels[-1].sum()
    for level, u in zip(replay.levels[::-1], uniform, strict=True):
        children = level.reshape(-1, FAN_OUT)[index]  # (B, FAN_OUT)
        cumulative = jnp.stack(list(accumulate(children.T)))  # (FAN_OUT, B); one after the other: it never falls
        drawn = u * cumulative[-1]  # u <= 1 - 2^-23: u x total rounds to less than the total
        child = (cumulative[:-1] <= drawn[None]).sum(0, dtype=jnp.int32)
        index = index * FAN_OUT + child
    return index, jnp.take_along_axis(children, child[:, None], 1)[:, 0] / total


def windows(replay: Replay, slot, length: int) -> Transition:
    """The windows of `length <= horizon` steps from the slots `(B,)`: leaves `(B, length, ...)`, time second."""
    if length > replay.horizon:
        raise ValueError(f"windows of {length} steps: this replay was created for horizon {replay.horizon}")
    row, env = slot // replay.ring.num_envs, slot % replay.ring.num_envs
    rows = (row[:, None] + jnp.arange(length)[None]) % replay.ring.num_rows
    return ring.take(replay.ring, rows, jnp.broadcast_to(env[:, None], rows.shape))


def update(replay: Replay, slot, priority) -> Replay:
    """Gives the slots `(B,)`, which must be ones that can be drawn, the priorities `(B,)`."""
    return Replay(
        replay.ring,
        set_leaves(replay.levels, slot, priority),
        jnp.maximum(replay.max_priority, priority.max()),
        replay.age,
        replay.horizon,
        replay.truncated_tails,
    )
