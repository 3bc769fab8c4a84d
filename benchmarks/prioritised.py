"""Prioritised replay: the tree of sums against one cumulative sum, and both against uniform windows.

    python benchmarks/prioritised.py                          # some minutes: a table in Markdown
    python benchmarks/prioritised.py --fan-outs 4 8 16 32 64  # the tree alone, by fan-out

A step is a training loop's, without the learning: insert one row of one environment, draw 256
slots, take their windows of 5 steps, write 256 priorities. Each column is one compiled loop with
donated state that does only what its name says, on a full ring of CartPole's records. Times are us
of CPU for one step of all seeds, on one thread (a busy machine disturbs them less than wall clock),
medians of `repeats` turns; what is compared takes turns. Bytes are shares of the ring's: those of
the priorities and their sums, and the arguments and temporaries of the compiled whole step.

- tree: `replay.prioritised`.
- cumsum: one level of priorities, summed up anew for every draw, then a binary search.
- cumsum, kept: the same with the sum made once, before the loop: a burst of draws without updates.
- uniform: `ring.sample_windows` and `ring.insert`.
"""

import dataclasses
import functools
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from envs.types import Transition
from replay import prioritised, ring

BATCH, HORIZON, TURN = 256, 5, 0.2  # slots; steps; seconds of one measurement
COLUMNS = ("draw", "update", "insert", "whole")
METHODS = {"tree": COLUMNS, "cumsum": COLUMNS, "cumsum, kept": ("draw",), "uniform": ("draw", "insert", "whole")}
OBS = np.zeros(4, np.float32)
EXAMPLE = Transition(OBS, np.int32(0), np.float32(0), OBS, np.bool_(False), np.bool_(False))
ROW = jax.tree.map(lambda x: x[None], EXAMPLE)


@dataclasses.dataclass(frozen=True)
class Args:
    capacities: tuple[int, ...] = (10_000, 1_000_000)  # transitions
    seeds: tuple[int, ...] = (1, 8)  # how many are vmapped into one program
    repeats: int = 7  # turns after the warm-up
    fan_outs: tuple[int, ...] = ()  # compare trees of these instead


def full(method, capacity, key):
    """A full replay whose priorities are uniform in [1, 2), and the cumulative sum where it is kept."""
    replay = prioritised.create(capacity, 1, EXAMPLE, HORIZON)
    levels = replay.levels if method == "tree" else replay.levels[:1]
    priority = jax.random.uniform(key, capacity, minval=1.0, maxval=2.0)
    levels = prioritised.set_leaves(levels, jnp.arange(capacity), priority)
    rows = dataclasses.replace(replay.ring, inserted=jnp.int32(capacity))
    replay = dataclasses.replace(replay, ring=rows, levels=levels, age=replay.age + capacity)
    return replay, jnp.cumsum(levels[0]) if method == "cumsum, kept" else None


def draw(method, replay, kept, key):
    if method == "tree":
        return prioritised.sample(replay, key, BATCH)
    cumulative = jnp.cumsum(replay.levels[0]) if kept is None else kept
    drawn = jax.random.uniform(key, BATCH) * cumulative[-1]
    slot = jnp.searchsorted(cumulative, drawn, side="right", method="scan_unrolled")
    return jnp.minimum(slot, replay.ring.num_rows - 1)


def step(method, column, kept, i, carry):
    """One step, or the part of it that `column` names. `total` needs whatever was read, so that all of it is."""
    replay, key, total = carry
    key, draw_key = jax.random.split(key)
    if column in ("insert", "whole"):
        if method == "uniform":
            replay = dataclasses.replace(replay, ring=ring.insert(replay.ring, ROW))
        else:
            replay = prioritised.insert(replay, ROW)
    elif column == "draw":  # one priority changes, or the compiler would sum once for all steps
        leaves = replay.levels[0].at[i % replay.ring.num_rows].set(1.5)
        replay = dataclasses.replace(replay, levels=(leaves, *replay.levels[1:]))
    if method == "uniform":
        if column in ("draw", "whole"):
            window = ring.sample_windows(replay.ring, draw_key, BATCH, HORIZON)
            total += sum(x.astype(jnp.float32).sum() for x in window)
        return replay, key, total
    slot = (jnp.arange(BATCH) * 7919 + i * 31) % replay.ring.num_rows
    if column in ("draw", "whole"):
        slot = draw(method, replay, kept, draw_key)
        window = prioritised.windows(replay, slot, HORIZON)
        total += sum(x.astype(jnp.float32).sum() for x in window)
    if column in ("update", "whole"):
        replay = prioritised.update(replay, slot, 1.0 + (slot + i) % 7 / 7)
    return replay, key, total


class Case:
    """One column of one method for `seeds` seeds: compiled, its ring full."""

    def __init__(self, method, column, capacity, seeds, fan_out):
        prioritised.FAN_OUT = fan_out
        jax.clear_caches()  # programs traced with another fan-out

        def run(carry, kept, steps):
            one = lambda carry, kept: jax.lax.fori_loop(0, steps, functools.partial(step, method, column, kept), carry)
            return jax.vmap(one)(carry, kept)

        keys = jax.random.split(jax.random.key(0), seeds)
        replay, self.kept = jax.jit(jax.vmap(functools.partial(full, method, capacity)))(keys)
        self.carry = replay, keys, jnp.zeros(seeds)
        self.program = jax.jit(run, donate_argnums=0).lower(self.carry, self.kept, 1).compile()
        memory, ring_bytes = self.program.memory_analysis(), replay.ring.words.nbytes
        self.priorities = sum(level.nbytes for level in replay.levels) / ring_bytes
        self.share = (memory.temp_size_in_bytes + memory.argument_size_in_bytes) / ring_bytes
        self.turn(3)
        self.steps = max(3, round(TURN / self.turn(10)))

    def turn(self, steps=None):
        """CPU seconds per step."""
        start = time.process_time()
        self.carry = jax.block_until_ready(self.program(self.carry, self.kept, steps or self.steps))
        return (time.process_time() - start) / (steps or self.steps)


def main(args: Args):
    os.environ["PJRT_NPROC"] = "1"  # read when jax first computes
    print("| slots | seeds | method |", " | ".join(f"{c} us" for c in COLUMNS), "| priorities | program |")
    print("|---" * (5 + len(COLUMNS)) + "|")
    methods = [("tree", f) for f in args.fan_outs] or [(m, prioritised.FAN_OUT) for m in METHODS]
    for capacity, seeds in [(c, s) for c in args.capacities for s in args.seeds]:
        cells, cases = {m: [] for m in methods}, {}
        for column in COLUMNS:
            cases = {m: Case(m[0], column, capacity, seeds, m[1]) for m in methods if column in METHODS[m[0]]}
            turns = [{m: case.turn() for m, case in cases.items()} for _ in range(args.repeats)]
            for m in methods:
                cells[m].append(f"{statistics.median(t[m] for t in turns) * 1e6:.1f}" if m in cases else "")
        for m in methods:
            shares = [f"{cases[m].priorities:.3f}", f"{cases[m].share:.3f}"] if m in cases else ["", ""]
            name = f"{m[0]}, fan-out {m[1]}" if args.fan_outs else m[0]
            print("|", " | ".join([f"{capacity:,}", str(seeds), name, *cells[m], *shares]), "|", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
