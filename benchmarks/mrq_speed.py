"""MR.Q's speed: env steps/s, their share of the machine's own rate of matrix products, and what takes how long.

    python benchmarks/mrq_speed.py --threads 1                              # minutes: mrq_speed.md and .json
    python benchmarks/mrq_speed.py --widths 512 --seeds 1 8 32 --no-parts   # as benchmarks/gpu_mrq.sh

An env step is one update each of encoder, value and policy, at the published batch of 256. Its work is what
`multiply_adds` counts: the products of its Dense layers and nothing else. The rate is that of plain products of
(256, w) and (w, w), w the width, one after the other. Share = work / time / rate. What is compared takes turns;
numbers are medians of the turns after a warm-up, by wall clock and by CPU time of this process.
"""

import dataclasses
import functools
import json
import math
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import tyro
from speed import machine

import envs
from algos import mrq
from replay import prioritised, ring
from runner import run

SHARE = 0.65  # what this repository promises at width 512
PYTORCH = 27.0  # env steps/s of the authors' code at width 128 on one thread of such a machine; promised: 1.5 times


@dataclasses.dataclass(frozen=True)
class Args:
    widths: tuple[int, ...] = (128, 512)  # of all layers; at 512, the published network, za_size is 256
    seeds: tuple[int, ...] = (1,)  # how many are vmapped into one program
    threads: int | None = None  # of XLA on a CPU; by default as many as there are cores
    source: str = "Pendulum-v1"  # observations must be vectors
    period: int = 10  # env steps between syncs; published 250, which would make a turn last a minute
    repeats: int = 5  # turns after the warm-up
    turn: float = 1.0  # seconds of a turn, about
    parts: bool = True  # also time the parts of an env step, and compare the count of work with XLA's
    out: Path = Path("runs/mrq_speed")  # folder of mrq_speed.json and mrq_speed.md


def multiply_adds(config, spec) -> dict:
    """Of the Dense layers' products in one env step, by part. For vectors, num_envs 1 and train_period 1.

    A layer has up to three products of one size: forward, gradient of its kernel, gradient of its input.
    """
    dense = lambda *sizes: sum(a * b for a, b in pairwise(sizes))  # of a row, forward
    obs, action, hidden = math.prod(spec.obs.shape), spec.num_actions or spec.action_size, config.hidden_size
    zs, za, zsa = config.zs_size, config.za_size, config.zsa_size
    f, a, g = dense(obs, hidden, hidden, zs), dense(action, za), dense(zs + za, hidden, hidden, zsa)
    m, pi, q = dense(zsa, 1 + zs + config.num_bins), dense(zs, hidden, hidden, action), 2 * dense(zsa, *[hidden] * 3, 1)
    rows = dict(  # inputs without a gradient are subtracted
        encoder=3 * f - dense(obs, hidden) + config.encoder_horizon * (2 * a + 3 * (g + m)),  # observation; action
        target_encoder=config.encoder_horizon * f,  # forward only, as all targets
        value_target=f + pi + a + g + q,
        value=f + a + g + 3 * q - 2 * dense(zsa, hidden),  # f and g forward only: z_sa
        # z_s is the value's. g and Q have gradients of inputs only, g's first layer of its action half only.
        policy=3 * pi - dense(zs, hidden) + 2 * (a + g + q) - dense(zs, hidden),
    )
    return {name: config.batch_size * n for name, n in rows.items()} | dict(acting=f + pi)


def draw(config, replay, key):
    """A batch for the encoder; one for value and policy, with its discount; the slots of the latter."""
    slots = [prioritised.sample(replay, k, config.batch_size) for k in jax.random.split(key)]
    n_step = ring.n_step(prioritised.windows(replay, slots[1], config.n_step), config.gamma)
    return prioritised.windows(replay, slots[0], config.encoder_horizon), n_step, slots[1]


def encoder(config, env, state, key):
    params, opt_state, window = state.params, state.opt_state, draw(config, state.replay, key)[0]
    new, new_opt_state, _ = mrq.update_encoder(
        config, env.spec, params, state.target_params, opt_state.encoder, window, state.terminates
    )
    opt_state = opt_state._replace(encoder=new_opt_state)
    return state._replace(params=params._replace(encoder=new), opt_state=opt_state), 0.0


def value_and_policy(config, env, state, key):
    before = state.params, state.target_params, state.opt_state
    _, n_step, _ = draw(config, state.replay, key)
    params, opt_state, td_error, _ = mrq.update_value_and_policy(config, env.spec, *before, *n_step, key)
    return state._replace(params=params, opt_state=opt_state), td_error.sum()


def sampling(config, env, state, key):
    """Both batches, and the priorities written back."""
    window, n_step, slot = draw(config, state.replay, key)
    priority = prioritised.lap_priority(n_step[0].reward, config.priority_exponent, config.min_priority)
    read = sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves((window, n_step)))
    return state._replace(replay=prioritised.update(state.replay, slot, priority)), read


def acting(config, env, state, key):
    """The policy, the environment and the insertion."""
    collected = mrq.Collected(*(getattr(state, name) for name in mrq.Collected._fields))
    action = mrq.explore(config, env.spec, state.params, state.env_state.obs, key)
    return state._replace(**mrq.store(env, collected, action, key)[0]._asdict()), 0.0


PARTS = dict(encoder=encoder, value_and_policy=value_and_policy, sampling=sampling, acting=acting)


def repeat(part, env, configs, carry, steps):
    """`part` alone, `steps` times. The carry ends in a sum of what was read, so that all of it is."""

    def body(config, state, key, total):
        key, part_key = jax.random.split(key)
        state, read = part(config, env, state, part_key)
        return state, key, total + read

    return jax.lax.fori_loop(0, steps, lambda _, carry: jax.vmap(body)(configs, *carry), carry)


class Timed:
    """A compiled loop `program(carry, steps) -> carry`, each step of which is `size` of what is timed."""

    def __init__(self, program, carry, seconds, size=1):
        self.program, self.carry, self.size, self.steps = program, carry, size, 1
        self.turn()  # warm-up
        while (once := self.turn()[0] * self.steps * size) < seconds / 8:
            self.steps *= 8
        self.steps = max(1, round(self.steps * seconds / once))

    def turn(self):
        """Seconds of one: wall clock, and CPU time of this process."""
        wall, cpu, count = time.perf_counter(), time.process_time(), self.steps * self.size
        self.carry = jax.block_until_ready(self.program(self.carry, self.steps))
        return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def measure(width, seeds, env, args) -> dict:
    """One width at one number of seeds. Seconds and FLOP are of one env step of every seed."""
    sizes = {} if width == 512 else dict.fromkeys(mrq.PRESETS["small"], width)
    config = mrq.Config(target_period=args.period, capacity=10_000, prefill=1_000, **sizes)
    configs, keys = run.broadcast(config, seeds), jax.random.split(jax.random.key(0), seeds)
    work = {name: 2 * seeds * n for name, n in multiply_adds(config, env.spec).items()}

    start = time.perf_counter()
    init = run.init.lower(mrq, configs, env, keys).compile()
    carry = jax.eval_shape(functools.partial(run.init, mrq), configs, env, keys)
    train = run.advance.lower(mrq, configs, env, carry, 1).compile()
    row = dict(width=width, seeds=seeds, compile_seconds=time.perf_counter() - start, flop=work, xla_flop={})
    cases, carry, zeros = {}, init(configs, env, keys), jnp.zeros(seeds)
    for name, part in PARTS.items() if args.parts else ():
        loop, start = functools.partial(repeat, part, env), jax.tree.map(jnp.copy, (carry.states, keys, zeros))
        loop = jax.jit(loop, donate_argnames="carry").lower(configs, start, 1).compile()
        row["xla_flop"][name] = loop.cost_analysis()["flops"]  # of one pass
        cases[name] = Timed(functools.partial(loop, configs), start, args.turn)
    cases["train"] = Timed(functools.partial(train, configs, env), carry, args.turn, args.period)
    kernel = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (seeds, width, width)))[0]  # keeps the size of x
    x = jnp.ones((seeds, config.batch_size, width))
    product = jax.jit(lambda kernel, x, steps: jax.lax.fori_loop(0, steps, lambda _, x: x @ kernel, x))
    cases["product"] = Timed(functools.partial(product.lower(kernel, x, 1).compile(), kernel), x, args.turn)

    turns = [{name: case.turn() for name, case in cases.items()} for _ in range(args.repeats)]
    for i, clock in enumerate(("wall", "cpu")):
        row[clock] = {name: statistics.median(turn[name][i] for turn in turns) for name in cases}
        rate, train = 2 * x.size * width / row[clock]["product"], row[clock]["train"]
        row[clock] |= dict(steps_per_second=seeds / train, rate=rate, share=sum(work.values()) / train / rate)
    return row | dict(turns=turns)


def table(*rows) -> str:
    cells = [[f"{x:,.3f}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (cells[0], ["---"] * len(cells[0]), *cells[1:]))


def report(rows, facts) -> str:
    """Tables and bars in Markdown; times in ms."""
    speeds, times, counts, bars = [], [], [], []
    for row in rows:
        case, work, xla = (row["width"], row["seeds"]), row["flop"], row["xla_flop"]
        for clock in ("wall", "cpu"):
            t = row[clock]
            ms, rate = {name: 1e3 * t[name] for name in ("train", *PARTS) if name in t}, t["rate"] / 1e9
            speeds.append((*case, clock, t["steps_per_second"], ms["train"], t["share"] * rate, rate, t["share"]))
            if xla:
                rest = ms["train"] - ms["encoder"] - ms["value_and_policy"] - ms["acting"]
                times.append((*case, clock, *(ms[name] for name in PARTS), rest))
            if facts["device"] == "cpu" and case == (512, 1):
                bars.append(f"share at width 512, {clock}: {t['share']:.3f}, bar >= {SHARE}")
            if facts["threads"] == "1" and case == (128, 1):
                bars.append(f"env steps/s at width 128, {clock}: {t['steps_per_second']:.1f}, bar >= {1.5 * PYTORCH}")
        ours = work["encoder"] + work["target_encoder"], work["value_target"] + work["value"] + work["policy"]
        ratios = [xla[name] / n if xla else "" for name, n in zip(("encoder", "value_and_policy"), ours, strict=True)]
        total = sum(work.values())
        counts.append((*case, *(x / case[1] / 1e9 for x in (*work.values(), total)), *ratios, row["compile_seconds"]))
    heads = "width", "seeds"
    names = "env steps/s = updates/s", "ms", "GFLOP/s", "GFLOP/s of plain products", "share"
    tables = [table((*heads, "clock", *names), *speeds)]
    if times:
        tables.append(
            table((*heads, "clock", "encoder", "value and policy", "of both, sampling", "acting", "rest"), *times)
        )
    names = "GFLOP, total", "XLA's count / ours, encoder", "XLA's, value and policy", "compile s"
    tables.append(table((*heads, *(f"GFLOP, {name.replace('_', ' ')}" for name in rows[0]["flop"]), *names), *counts))
    return "\n\n".join([*tables, "\n".join(f"- {bar}" for bar in bars)])


def main(args: Args):
    if args.threads:
        os.environ["PJRT_NPROC"] = str(args.threads)  # read when jax first computes
    jax.config.update("jax_enable_compilation_cache", False)  # compile seconds are measured
    env, rows, facts = envs.make(args.source), [], machine()
    args.out.mkdir(parents=True, exist_ok=True)
    for width, seeds in [(w, s) for w in args.widths for s in args.seeds]:
        rows.append(measure(width, seeds, env, args))
        result = dict(machine=facts, args=dataclasses.asdict(args), rows=rows)
        (args.out / "mrq_speed.json").write_text(json.dumps(result, indent=1, default=str))
        (args.out / "mrq_speed.md").write_text(text := f"{facts}\n\n{report(rows, facts)}\n")
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
