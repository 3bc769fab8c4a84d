"""Runs any algorithm on the device, many runs at once, for as many steps as the host asks.

A run is one (hyperparameters, seed) pair. `configs` and `states` carry a leading axis R of runs on
every leaf; `source`, what the runs learn from, is shared. An algorithm knows nothing of this axis.

The number of steps is an argument of the compiled program, not part of it. One program therefore
serves every length: a chunk cut short by Ctrl-C, run in slices for a progress bar, or continued
from a checkpoint goes through the very same machine code, which is why resuming is bit-exact.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from envs.types import Mean

is_mean = lambda x: isinstance(x, Mean)


class Carry(NamedTuple):
    """Everything that a run continues from; what a checkpoint holds. Leading axis R on every leaf."""

    states: object
    metrics: dict  # running means of the chunk so far
    done: jax.Array  # (R,) int32, steps of the chunk so far


@partial(jax.jit, static_argnames="algo")
def init(algo, configs, source, keys):
    """The carry before the first step. Jitted, so that no two of its leaves share a buffer."""

    def one(config, key):
        state = algo.init(config, source, key)
        _, metrics = jax.eval_shape(lambda c, s: algo.step(c, source, s), config, state)
        zero = jax.tree.map(lambda _: jnp.float32(0), metrics)
        return Carry(state, zero, jnp.int32(0))

    return jax.vmap(one)(configs, keys)


@partial(jax.jit, static_argnames="algo", donate_argnames="carry")
def advance(algo, configs, source, carry: Carry, num_steps) -> Carry:
    """Calls `algo.step` `num_steps` times (a traced int) on every run, and folds the metrics into running means."""

    def one_step(config, run: Carry) -> Carry:
        state, metrics = algo.step(config, source, run.states)
        done = run.done + 1
        # A running mean, not a sum: exact for constants, and float32 does not drown the small terms.
        fold = lambda mean, x: mean + (jnp.mean(x, dtype=jnp.float32) - mean) / done
        return Carry(state, jax.tree.map(fold, run.metrics, metrics), done)

    return jax.lax.fori_loop(0, num_steps, lambda _, carry: jax.vmap(one_step)(configs, carry), carry)


def broadcast(config, num_runs: int):
    """The same hyperparameters for every run: every float becomes `(num_runs,)` float32."""
    return jax.tree.map(lambda x: jnp.full(num_runs, x, jnp.float32), config)


def finish(metrics: dict) -> dict:
    """Running means of a chunk to its metrics; a `Mean` becomes total / count, NaN where nothing was counted."""
    return {name: m.total / m.count if is_mean(m) else m for name, m in metrics.items()}


@partial(jax.jit, donate_argnames="carry")
def start_chunk(carry: Carry) -> Carry:
    """Zeroes the metrics."""
    return Carry(carry.states, *jax.tree.map(jnp.zeros_like, (carry.metrics, carry.done)))
