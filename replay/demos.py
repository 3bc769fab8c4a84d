"""Demonstrations: whole episodes to be imitated, in a buffer beside the ring of all experience.

A buffer begins with the episodes of a dataset, which stay for good. Successful episodes of the ring are copied
behind them; once the buffer is full, over the oldest of their own kind.
"""

import jax
import jax.numpy as jnp

from envs.types import Transition, pytree, static
from replay import ring


@pytree
class Demos:
    words: jax.Array  # (capacity, num_words) uint32, episodes one after another, packed as in the ring
    kept: jax.Array  # () int32, transitions of the dataset, the first in `words`
    added: jax.Array  # () int32, transitions copied since, overwritten ones included
    layout: ring.Layout = static()

    @property
    def capacity(self) -> int:
        return self.words.shape[0]

    @property
    def stored(self) -> jax.Array:
        """Transitions that can be drawn, () int32."""
        return jnp.minimum(self.kept + self.added, self.capacity)


def create(capacity: int, transitions: Transition) -> Demos:
    """A buffer that holds a dataset. Args: transitions, leaves `(N, ...)`, the last of which ends an episode."""
    num = len(transitions.reward)
    layout = ring.layout(jax.tree.map(lambda x: x[0], transitions))
    words = jnp.zeros((capacity, layout.num_words), jnp.uint32).at[:num].set(ring.pack(layout, transitions))
    return Demos(words, jnp.int32(num), jnp.int32(0), layout)


def copy(demos: Demos, replay: ring.Replay, length, success, longest: int) -> Demos:
    """Adds the episodes that end in the newest row of `replay` where `success`.

    Args: length, success `(num_envs,)`, transitions of each episode up to that row and whether to add it; longest,
        episodes with more transitions than this, or than the ring has rows, lose their first ones.
    """
    longest = min(longest, replay.num_rows)
    length = jnp.where(success, jnp.minimum(length, longest), 0)
    ago = jnp.arange(longest)[:, None]  # rows before the newest
    slot = (replay.inserted - 1 - ago) % replay.num_rows * replay.num_envs + jnp.arange(replay.num_envs)[None]
    records = replay.words.reshape(-1, replay.words.shape[-1])[slot]  # one flat index, as in `ring.take`
    before = (jnp.cumsum(length) - length)[None]  # transitions of the environments before this one
    place = demos.added + before + length[None] - 1 - ago
    free = demos.capacity - demos.kept
    index = jnp.where(ago < length[None], demos.kept + place % free, demos.capacity)  # beyond the end: dropped
    words = demos.words.at[index].set(records, mode="drop")
    return Demos(words, demos.kept, demos.added + length.sum(), demos.layout)


def sample_n_step(
    demos: Demos, key, batch_size: int, n: int, gamma, always_bootstrap: bool = False
) -> tuple[Transition, jax.Array]:
    """Draws n-step transitions uniformly, as `ring.sample_n_step` does. No window leaves its episode."""
    index = jax.random.randint(key, (batch_size, 1), 0, demos.stored) + jnp.arange(n)[None]
    free = demos.capacity - demos.kept
    index = jnp.where(index < demos.capacity, index, demos.kept + (index - demos.capacity) % free)
    return ring.n_step(ring.unpack(demos.layout, demos.words[index]), gamma, always_bootstrap)
