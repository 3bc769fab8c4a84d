"""Uniform replay: a ring of transitions that lives in the training state.

Laid out `(time, num_envs, record)`: row t holds what all environments did on one step, so an
environment's own history is a column, and n-step returns and windows are read down it. A record is
one whole transition, its fields side by side in 32-bit words, each in its own dtype's bits. Storing is
then one contiguous write and sampling one gather, each transition one or two cache lines, where six
separate arrays would cost six writes, six gathers and six cache misses.

Insert before you sample inside a scan body, and never pass the ring through `lax.cond`: XLA then
updates it in place, at a cost that does not grow with the capacity. The other way round it copies
the whole ring on every step (docs/protocol.md).
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from envs.types import Transition, pytree, static


@pytree
class Layout:
    """Where the fields of a record are: the example's structure, shapes and dtypes. Holds no arrays."""

    treedef: Any = static()
    fields: tuple = static()  # (shape, dtype) of each leaf of the example

    @property
    def num_words(self) -> int:
        words = sum(nbytes(field) for field in self.fields if not is_small(field)) // 4
        return words + -(-sum(nbytes(field) for field in self.fields if is_small(field)) // 4)

    @property
    def nbytes(self) -> int:
        return 4 * self.num_words


def nbytes(field) -> int:
    shape, dtype = field
    return prod(shape) * jnp.dtype(dtype).itemsize


def is_small(field) -> bool:
    """Whether elements are less than a word: bool, uint8, float16. These are packed together, byte by byte."""
    return jnp.dtype(field[1]).itemsize < 4


def layout(example) -> Layout:
    """Args: example, one transition (any pytree) of arrays or shape structs, without batch axes."""
    leaves, treedef = jax.tree.flatten(example)
    return Layout(treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves))


def pack(layout: Layout, tree) -> jax.Array:
    """Any leading batch axes `...` of the fields to records `(..., num_words)` uint32."""
    words, octets = [], []
    for x, field in zip(jax.tree.leaves(tree), layout.fields, strict=True):
        shape, dtype = field
        lead = x.shape[: x.ndim - len(shape)]
        flat = x.astype(dtype).reshape(*lead, prod(shape))
        if is_small(field):
            flat = flat.astype(jnp.uint8) if dtype == jnp.bool_ else flat
            octets.append(jax.lax.bitcast_convert_type(flat, jnp.uint8).reshape(*lead, nbytes(field)))
        else:
            words.append(jax.lax.bitcast_convert_type(flat, jnp.uint32).reshape(*lead, nbytes(field) // 4))
    if octets:
        octets = jnp.concatenate(octets, -1)
        octets = jnp.pad(octets, [(0, 0)] * len(lead) + [(0, -octets.shape[-1] % 4)])
        words.append(jax.lax.bitcast_convert_type(octets.reshape(*lead, octets.shape[-1] // 4, 4), jnp.uint32))
    return jnp.concatenate(words, -1)


def unpack(layout: Layout, words: jax.Array):
    """Records `(..., num_words)` to the example's structure, with leading axes `...`. Undoes `pack` bit for bit."""
    lead, start, leaves = words.shape[:-1], 0, {}
    for i, field in enumerate(layout.fields):
        if not is_small(field):
            stop = start + nbytes(field) // 4
            leaves[i] = words[..., start:stop]
            start = stop
    octets = jax.lax.bitcast_convert_type(words[..., start:], jnp.uint8).reshape(*lead, -1)
    start = 0
    for i, field in enumerate(layout.fields):
        if is_small(field):
            leaves[i] = octets[..., start : start + nbytes(field)]
            start += nbytes(field)

    def as_stored(bits, field):
        shape, dtype = field
        dtype = jnp.dtype(jnp.uint8 if dtype == jnp.bool_ else dtype)
        per_element = dtype.itemsize // bits.dtype.itemsize
        bits = bits.reshape(*lead, prod(shape), per_element) if per_element > 1 else bits
        return jax.lax.bitcast_convert_type(bits, dtype).reshape(*lead, *shape).astype(field[1])

    return jax.tree.unflatten(layout.treedef, [as_stored(leaves[i], field) for i, field in enumerate(layout.fields)])


@pytree
class Replay:
    words: jax.Array  # (rows, num_envs, num_words) uint32
    inserted: jax.Array  # () int32, every row written so far: vectorised steps
    layout: Layout

    @property
    def num_rows(self) -> int:
        return self.words.shape[0]

    @property
    def num_envs(self) -> int:
        return self.words.shape[1]

    @property
    def stored(self) -> jax.Array:
        """Rows that hold data, () int32."""
        return jnp.minimum(self.inserted, self.num_rows)

    @property
    def data(self) -> Transition:
        """The whole ring unpacked, leaves `(rows, num_envs, ...)`: for tests and inspection, not for a scan."""
        return unpack(self.layout, self.words)


def check(capacity: int, num_envs: int):
    """Raises a ValueError that names both numbers where `capacity` is not whole rows of `num_envs`, or past int32."""
    if capacity >= 2**31:
        raise ValueError(f"capacity {capacity} must be less than {2**31}; slots are counted in 32 bits")
    if capacity % num_envs or capacity < num_envs:
        near = max(capacity // num_envs, 1) * num_envs
        raise ValueError(f"capacity {capacity} must be a multiple of num_envs {num_envs}; {near} is")


def create(capacity: int, num_envs: int, example: Transition) -> Replay:
    """An empty ring of `capacity` transitions, counted over all `num_envs` environments.

    Args: example, one transition without batch axes; its dtypes are kept, pixels as they are.
    """
    check(capacity, num_envs)
    record = layout(example)
    words = jnp.zeros((capacity // num_envs, num_envs, record.num_words), jnp.uint32)
    return Replay(words, jnp.int32(0), record)


def insert(replay: Replay, transition: Transition) -> Replay:
    """Overwrites the oldest row with `transition`, whose leaves are `(num_envs, ...)`."""
    row = replay.inserted % replay.num_rows
    words = jax.lax.dynamic_update_index_in_dim(replay.words, pack(replay.layout, transition), row, 0)
    return Replay(words, replay.inserted + 1, replay.layout)


def fill(replay: Replay, transitions: Transition) -> Replay:
    """An empty ring with transitions in time order, leaves `(N, ...)`: a stretch of N // num_envs for each environment.

    Where a stretch stops within an episode, its last transition is truncated. Up to `num_envs - 1` at the end are left
    out. N may not be more than the ring's capacity.
    """
    rows = len(transitions.reward) // replay.num_envs
    columns = lambda x: jnp.swapaxes(x[: rows * replay.num_envs].reshape(replay.num_envs, rows, *x.shape[1:]), 0, 1)
    transitions = jax.tree.map(columns, transitions)
    transitions = transitions._replace(truncated=jnp.asarray(transitions.truncated).at[-1:].set(True))
    words = replay.words.at[:rows].set(pack(replay.layout, transitions))
    return Replay(words, jnp.int32(rows), replay.layout)


def take(replay: Replay, row, env) -> Transition:
    """The transitions at the given rows and environments, two int arrays of one shape `...`."""
    # One flat index: with two, XLA on a CPU fuses the gather with the write before it and copies the ring.
    records = replay.words.reshape(-1, replay.words.shape[-1])
    return unpack(replay.layout, records[row * replay.num_envs + env])


def sample(replay: Replay, key: jax.Array, batch_size: int) -> Transition:
    """Draws `batch_size` transitions uniformly, with replacement, from those stored."""
    # Until the ring is full the stored rows are 0..stored-1, afterwards all of them.
    index = jax.random.randint(key, (batch_size,), 0, replay.stored * replay.num_envs)
    return take(replay, index // replay.num_envs, index % replay.num_envs)


def sample_windows(replay: Replay, key: jax.Array, batch_size: int, length: int) -> Transition:
    """Draws `batch_size` windows of `length` successive steps of one environment each.

    No window crosses the write head, that is, joins the newest row to the oldest. Windows may hold
    the end of an episode: cut at `terminated | truncated`. At least `length` rows must be stored.

    Returns: a transition whose leaves are `(batch_size, length, ...)`, time second.
    """
    row_key, env_key = jax.random.split(key)
    oldest = replay.inserted - replay.stored
    start = oldest + jax.random.randint(row_key, (batch_size,), 0, replay.stored - length + 1)
    env = jax.random.randint(env_key, (batch_size,), 0, replay.num_envs)
    rows = (start[:, None] + jnp.arange(length)[None]) % replay.num_rows  # (B, length)
    return take(replay, rows, jnp.broadcast_to(env[:, None], rows.shape))


def n_step(window: Transition, gamma, always_bootstrap: bool = False) -> tuple[Transition, jax.Array]:
    """Sums a window of n steps into one transition from its first step.

    The sum stops at the first `terminated | truncated`, after m <= n steps:
    `reward` is sum_{i<m} gamma^i r_i, `next_obs` the true successor of step m - 1.

    Args: window, leaves `(B, n, ...)`; gamma, per step; always_bootstrap, as if nothing terminated.
    Returns: transitions with leaves `(B, ...)`, and the factor `(B,)` of their bootstrap value,
        gamma^m, zero where the MDP ended.
    """
    ended = window.terminated | window.truncated  # (B, n)
    alive = jnp.cumsum(ended, 1) - ended == 0  # no episode end strictly before step i
    steps = alive.sum(1)  # (B,) m
    powers = gamma ** jnp.arange(ended.shape[1])  # (n,)
    first = lambda x: x[:, 0]
    last = lambda x: jax.vmap(lambda column, m: column[m - 1])(x, steps)
    transition = Transition(
        obs=jax.tree.map(first, window.obs),
        action=jax.tree.map(first, window.action),
        reward=(window.reward * alive * powers[None]).sum(1),
        next_obs=jax.tree.map(last, window.next_obs),
        terminated=last(window.terminated),
        truncated=last(window.truncated),
    )
    return transition, gamma**steps * (1 if always_bootstrap else 1 - transition.terminated)


def sample_n_step(
    replay: Replay, key: jax.Array, batch_size: int, n: int, gamma, always_bootstrap: bool = False
) -> tuple[Transition, jax.Array]:
    """Draws `batch_size` n-step transitions; see `n_step`. At n = 1 they are those of `sample`."""
    if n > 1:
        return n_step(sample_windows(replay, key, batch_size, n), gamma, always_bootstrap)
    transition = sample(replay, key, batch_size)
    return transition, gamma * (jnp.ones(batch_size) if always_bootstrap else 1 - transition.terminated)
