"""CQN's speed: milliseconds of a gradient step, and its share of the machine's own rate of matrix products.

    python benchmarks/cqn_speed.py --threads 1      # minutes: runs/cqn_speed/cqn_speed.md and .json

A case is the width of both hidden layers, the batch, whether as many demonstrations are added, and the dimensions of
the action; all else is published. The work of a gradient step is what `multiply_adds` counts: the products of its
Dense layers and nothing else. The rate is that of plain products of (rows, w) and (w, w), rows the whole batch and w
the width, one after the other. Share = work / time / rate. Both take turns; numbers are medians of the turns after a
warm-up, those of the share of each turn's own, by wall clock and by CPU time of this process.
"""

import dataclasses
import functools
import json
import os
import statistics
import sys
from itertools import pairwise, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import tyro
from mrq_speed import Timed, table
from speed import machine

from algos import cqn
from envs.types import Transition, continuous_spec
from runner import run

SHARE = 0.55  # what this repository promises at width 512


@dataclasses.dataclass(frozen=True)
class Args:
    cases: tuple[tuple[int, int], ...] = ((512, 256), (128, 128))  # width and batch
    demos: tuple[int, ...] = (0, 1)  # without, and with as many demonstrations again
    actions: tuple[int, ...] = (1, 6)  # D
    obs_size: int = 24  # of the observations, vectors
    seeds: int = 1  # how many are vmapped into one program
    threads: int | None = None  # of XLA on a CPU; by default as many as there are cores
    repeats: int = 5  # turns after the warm-up
    turn: float = 1.0  # seconds of a turn, about
    out: Path = Path("runs/cqn_speed")  # folder of cqn_speed.json and cqn_speed.md


def multiply_adds(config, spec, rows) -> int:
    """Of the Dense layers' products in one gradient step on `rows` samples. Observations are one vector.

    Every level is passed three times: by the online critic to choose, by the target critic, and by the online critic
    to learn, which adds two products of a layer's size: the gradient of its kernel and, but for the first, its input.
    """
    outputs = spec.action_size * (config.num_atoms if config.distributional else 1)
    read = spec.obs.shape[0] + spec.action_size + config.levels  # beside the midpoints, the one-hot of the level
    streams = [outputs * config.bins, outputs] if config.dueling else [outputs * config.bins]
    forward = sum(a * b for n in streams for a, b in pairwise((read, *config.hidden, n)))
    first = len(streams) * read * config.hidden[0]  # whose inputs have no gradient
    return rows * config.levels * (5 * forward - first)


def gradient_steps(spec, num_demos, configs, batch, discount, carry, steps):
    """`steps` updates of every seed, on one batch."""

    def body(config, batch, discount, params, opt_state, count, key):
        key, update_key = jax.random.split(key)
        before = params, opt_state, batch, discount, num_demos, count, update_key
        params, opt_state, _ = cqn.update(config, spec, *before)
        return params, opt_state, count + 1, key

    update = functools.partial(jax.vmap(body), configs, batch, discount)
    return jax.lax.fori_loop(0, steps, lambda _, carry: update(*carry), carry)


def begin(config, spec, rows, key):
    """A batch, its discounts, and what training carries. Returns are of the order of the atoms."""
    obs_key, next_key, action_key, reward_key, critic_key, key = jax.random.split(key, 6)
    obs, next_obs = (jax.random.normal(k, (rows, *spec.obs.shape)) for k in (obs_key, next_key))
    action = cqn.quantise(config, jax.random.uniform(action_key, (rows, spec.action_size), minval=-1, maxval=1))
    flags, reward = jnp.zeros(rows, bool), jax.random.normal(reward_key, (rows,))
    batch = Transition(obs, action, reward, next_obs, flags, flags)
    critic = cqn.network(config, spec).init(critic_key, *cqn.inputs(config, spec, obs[:1], action[:1], 0))
    carry = cqn.Params(critic, critic), cqn.optimizer(config).init(critic), jnp.int32(0), key
    return batch, jnp.full(rows, 0.99), carry


def plain_products(seeds, rows, width, seconds) -> Timed:
    kernel = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (seeds, width, width)))[0]  # keeps the size of x
    loop = jax.jit(lambda kernel, x, steps: jax.lax.fori_loop(0, steps, lambda _, x: x @ kernel, x))
    x = jnp.ones((seeds, rows, width))
    return Timed(functools.partial(loop.lower(kernel, x, 1).compile(), kernel), x, seconds)


def measure(width, batch_size, demos, size, args) -> dict:
    """One case. Seconds and FLOP are of one gradient step of every seed."""
    config = cqn.Config(hidden=(width, width), batch_size=batch_size)
    spec, rows = continuous_spec(jax.ShapeDtypeStruct((args.obs_size,), "float32"), size, 0), batch_size * (1 + demos)
    configs, keys = run.broadcast(config, args.seeds), jax.random.split(jax.random.key(0), args.seeds)
    batch, discount, carry = jax.jit(jax.vmap(functools.partial(begin, spec=spec, rows=rows)))(configs, key=keys)
    update = functools.partial(gradient_steps, spec, batch_size * demos)
    update = jax.jit(update, donate_argnames="carry").lower(configs, batch, discount, carry, 1).compile()
    cases = dict(
        update=Timed(functools.partial(update, configs, batch, discount), carry, args.turn),
        product=plain_products(args.seeds, rows, width, args.turn),
    )
    turns = [{name: case.turn() for name, case in cases.items()} for _ in range(args.repeats)]
    work, plain = (2 * args.seeds * n for n in (multiply_adds(config, spec, rows), rows * width**2))
    row = dict(width=width, batch=batch_size, demos=batch_size * demos, actions=size, flop=work, turns=turns)
    for i, clock in enumerate(("wall", "cpu")):
        t = {name: statistics.median(turn[name][i] for turn in turns) for name in cases}
        shares = [(work / turn["update"][i]) / (plain / turn["product"][i]) for turn in turns]
        row[clock] = t | dict(rate=plain / t["product"], share=statistics.median(shares))
    return row


def report(rows) -> str:
    """The table and the bar in Markdown."""
    heads = "width", "batch", "demos", "D", "clock", "ms", "GFLOP", "GFLOP/s", "GFLOP/s of plain products", "share"
    cells = [heads]
    for row in rows:
        for clock in ("wall", "cpu"):
            t, case = row[clock], [row[name] for name in ("width", "batch", "demos", "actions")]
            gflop = row["flop"] / 1e9
            cells.append((*case, clock, 1e3 * t["update"], gflop, gflop / t["update"], t["rate"] / 1e9, t["share"]))
    bars = []
    for clock in ("wall", "cpu"):
        shares = [row[clock]["share"] for row in rows if row["width"] == 512]
        bars += [f"- least share at width 512, {clock}: {min(shares):.3f}, bar >= {SHARE}"] if shares else []
    return "\n".join([table(*cells), "", *bars])


def main(args: Args):
    if args.threads:
        os.environ["PJRT_NPROC"] = str(args.threads)  # read when jax first computes
    rows, facts = [], machine()
    args.out.mkdir(parents=True, exist_ok=True)
    for (width, batch), demos, size in product(args.cases, args.demos, args.actions):
        rows.append(measure(width, batch, demos, size, args))
        result = dict(machine=facts, args=dataclasses.asdict(args), rows=rows)
        (args.out / "cqn_speed.json").write_text(json.dumps(result, indent=1, default=str))
        (args.out / "cqn_speed.md").write_text(text := f"{facts}\n\n{report(rows)}\n")
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
