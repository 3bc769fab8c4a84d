"""The forms of IQE's unions of intervals (networks/quasimetric.py), forward and backward.

    python benchmarks/iqe.py            # a minute or two: a table in Markdown
    python benchmarks/iqe.py --repeats 3

Times are ms of CPU for one value and gradient, on one thread (a busy machine disturbs them less than wall clock),
least of `repeats`; the forms take turns. Pairs are those of QRL's update at batch 256 and two critics, vmapped: four
distances for each transition in the critics' loss, whose gradient goes to both sides, and one in the actor's, whose
gradient goes to one.
"""

import dataclasses
import os
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("PJRT_NPROC", "1")

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from networks.quasimetric import FORMS, iqe_components, maxmean

SIZES = ((16, 8), (64, 32))  # components x intervals in each
CRITICS, BATCH = 2, 256
PAIRS = {"critics": (4 * BATCH, (0, 1)), "actor": (BATCH, 0)}  # pairs of a critic, sides that have a gradient


@dataclasses.dataclass(frozen=True)
class Args:
    repeats: int = 7


def cases():
    """Compiled functions without arguments, and what they measure."""
    for size in SIZES:
        for name, (pairs, sides) in PAIRS.items():
            numbers = np.random.default_rng(0).normal(size=(2, CRITICS, pairs, size[0] * size[1]))
            x, y = jnp.asarray(numbers, jnp.float32)
            for form in FORMS:

                def mean(x, y, form=form, size=size):
                    return jax.vmap(lambda x, y: maxmean(iqe_components(x, y, size[0], form), -1.0).mean())(x, y).sum()

                program = jax.jit(jax.value_and_grad(mean, sides)).lower(x, y).compile()
                yield (size, name, form), partial(program, x, y)


def main(args: Args):
    programs = dict(cases())
    spent = {key: [] for key in programs}
    for _ in range(args.repeats + 1):
        for key, program in programs.items():
            start = time.process_time()
            jax.block_until_ready(program())
            spent[key].append(time.process_time() - start)
    columns = [(size, name) for size in SIZES for name in PAIRS]
    heads = [f"{c} x {k}, {CRITICS} x {PAIRS[name][0]:,} ({name})" for (c, k), name in columns]
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, ms of CPU\n")
    print(f"| form | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for form in FORMS:
        print(f"| {form} | {' | '.join(f'{1e3 * min(spent[*column, form][1:]):.1f}' for column in columns)} |")


if __name__ == "__main__":
    main(tyro.cli(Args))
