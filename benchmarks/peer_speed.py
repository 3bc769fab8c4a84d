"""The speed of PPO, SAC and IQL beside other libraries', at equal settings and in one run.

    python benchmarks/peer_speed.py --threads 1 --rejax-python PATH --ajax-python PATH --purejaxrl CHECKOUT

PPO on CartPole-v1 at purejaxrl's settings: a step is a rollout of 4 x 128 env steps and 4 epochs of 4 minibatches,
of every seed. SAC (Gaussian, 256-256, batch 256) on one Pendulum-v1: a step is one env step and one gradient step
each of critics, policy and temperature, the replay full. IQL (256-256, batch 256) on pendulum/mixed: a step is one
gradient step each of V, policy and critics. What is compared takes turns (A, B, ..., A, B, ...), ours and the peers'
the same number of steps; numbers are medians of the turns after a warm-up, by wall clock and by CPU time of the
process that learns. Compiling is not in them. `benchmarks/peers/` says what is equal, what is not, and which packages
a peer needs.

Of IQL, also the share of the machine's own rate of matrix products: the work that `iql_multiply_adds` counts, over
time, over the rate of plain products of (256, w) and (w, w), w the width, which take turns with the rest.
"""

import dataclasses
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import tyro
from mrq_speed import table
from speed import machine

import envs
from algos import bangbang_ppo, bangbang_sac, iql
from replay import datasets
from runner import run

PEERS = Path(__file__).resolve().parent / "peers"


@dataclasses.dataclass(frozen=True)
class Args:
    algos: tuple[Literal["ppo", "sac", "iql"], ...] = ("ppo", "sac", "iql")
    seeds: tuple[int, ...] = (1, 8)  # how many are vmapped into one program; ajax is timed with one alone
    threads: int | None = None  # of XLA on a CPU, for peers too; by default as many as there are cores
    repeats: int = 5  # turns after the warm-up
    capacity: int = 100_000  # of SAC's replay, transitions
    rejax_python: Path | None = None  # of an environment with rejax 0.1.3
    ajax_python: Path | None = None  # of an environment with ajax-rl 0.4
    purejaxrl: Path | None = None  # a checkout; run by rejax's interpreter
    out: Path = Path("runs/peer_speed")  # folder of peer_speed.json and peer_speed.md


@dataclasses.dataclass(frozen=True)
class Task:
    algo: object
    source: object  # what it learns from: environments or a dataset
    config: object
    transitions: int  # that it draws batches from
    steps: int  # of a turn of one seed: about a second
    env_steps: int  # of a step
    updates: int  # gradient steps of a step
    bars: dict[str, float]  # what this repository promises: ours / the peer's
    multiply_adds: int | None = None  # of a step, where its share of the machine's rate is reported


def iql_multiply_adds(config, spec) -> int:
    """Of the Dense layers' products in one update; continuous actions.

    A layer has up to three products of one size: forward, gradient of its kernel, gradient of its input, which the
    first layer does without.
    """
    dense = lambda *sizes: sum(a * b for a, b in pairwise(sizes))  # of a row, forward
    obs, action, first = math.prod(spec.obs.shape), spec.action_size, config.hidden[0]
    pi, v, q = (dense(n, *config.hidden, m) for n, m in ((obs, action), (obs, 1), (obs + action, 1)))
    rows = dict(
        v=3 * v - obs * first + 2 * v,  # and the new V forward, at s for the advantage and at s' for the target
        policy=3 * pi - obs * first,
        q=2 * (3 * q - (obs + action) * first + q),  # two critics, and their targets forward
    )
    return config.batch_size * sum(rows.values())


def task(name, args) -> Task:
    if name == "ppo":
        # Annealed as purejaxrl's is, but over so many env steps that no turn is without learning.
        config = bangbang_ppo.Config(anneal_steps=1e9)
        bars = dict(purejaxrl=1.0, rejax=1.0, ajax=1.0)
        return Task(bangbang_ppo, envs.make("CartPole-v1", 4), config, 0, 300, 512, 16, bars)
    if name == "sac":
        config = bangbang_sac.Config(policy="gaussian", capacity=args.capacity, prefill=args.capacity)
        bars = dict(rejax=1.2, ajax=1.0)
        return Task(bangbang_sac, envs.make("Pendulum-v1", 1), config, args.capacity, 150, 1, 1, bars)
    dataset, config = datasets.load("pendulum/mixed"), iql.Config(anneal_steps=1e9)
    work = iql_multiply_adds(config, dataset.spec)
    return Task(iql, dataset, config, dataset.num_transitions, 150, 0, 1, dict(ajax=1.0), work)


class Loop:
    """A compiled `program(carry, count) -> carry`, warmed up; a turn runs it with `count`, which makes `steps`."""

    def __init__(self, name, program, carry, count, steps, compile_seconds):
        self.name, self.program, self.carry, self.count = name, program, carry, count
        self.steps, self.compile_seconds = steps, compile_seconds
        self.turn()

    def turn(self):
        """Seconds per step: wall clock, and CPU time of this process."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.carry = jax.block_until_ready(self.program(self.carry, self.count))
        return (time.perf_counter() - wall) / self.steps, (time.process_time() - cpu) / self.steps


def ours(task, seeds, steps) -> Loop:
    configs, keys = run.broadcast(task.config, seeds), jax.random.split(jax.random.key(0), seeds)
    carry = run.init(task.algo, configs, task.source, keys)
    start = time.perf_counter()
    program = run.advance.lower(task.algo, configs, task.source, carry, 1).compile()
    seconds = time.perf_counter() - start
    return Loop("bellmax", functools.partial(program, configs, task.source), carry, steps, steps, seconds)


def products(task, seeds, steps) -> Loop:
    """Plain products one after another, those of all seeds side by side; a step is as much work as `task`'s."""
    batch, width = task.config.batch_size, task.config.hidden[0]
    kernel = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (seeds, width, width)))[0]  # keeps the size of x
    x, count = jnp.ones((seeds, batch, width)), round(steps * task.multiply_adds / (batch * width**2))
    loop = jax.jit(lambda kernel, x, count: jax.lax.fori_loop(0, count, lambda _, x: x @ kernel, x))
    program = loop.lower(kernel, x, 1).compile()
    return Loop("products", functools.partial(program, kernel), x, count, steps, None)


class Peer:
    """Another library in a process of its own, which measures once for every line it is sent."""

    def __init__(self, name, python, algo, transitions, seeds, steps, args):
        self.name, script = name, PEERS / f"{name}_{algo}.py"
        command = [python, script, "--steps", steps, "--seeds", seeds, "--capacity", transitions]
        command += ["--source", args.purejaxrl] if name == "purejaxrl" else []
        environ = dict(os.environ, JAX_PLATFORMS=jax.default_backend(), PYTHONWARNINGS="ignore")
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        self.process = subprocess.Popen([str(word) for word in command], **pipes)
        self.compile_seconds = self.answer()["compile_seconds"]

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.name}: ended with code {self.process.wait()}, see its message above")

    def turn(self):
        print(file=self.process.stdin, flush=True)
        answer = self.answer()
        return answer["seconds_per_step"], answer["cpu_seconds_per_step"]


def pythons(algo, seeds, args) -> dict:
    """The peers that are timed, and what runs each."""
    if args.purejaxrl and args.rejax_python is None:
        raise SystemExit("--purejaxrl needs --rejax-python: its packages are rejax's")
    found = dict(rejax=args.rejax_python, purejaxrl=args.purejaxrl and args.rejax_python)
    if seeds == 1:
        found["ajax"] = args.ajax_python
    return {name: python for name, python in found.items() if python and (PEERS / f"{name}_{algo}.py").exists()}


def measure(algo, seeds, args) -> list[dict]:
    """Takes turns; a row for us and for each peer, times in seconds per step of all seeds."""
    spec = task(algo, args)
    steps = max(1, spec.steps // seeds)
    found = pythons(algo, seeds, args).items()
    peers = [Peer(name, python, algo, spec.transitions, seeds, steps, args) for name, python in found]
    cases = [ours(spec, seeds, steps), *peers] + ([products(spec, seeds, steps)] if spec.multiply_adds else [])
    turns = [[case.turn() for case in cases] for _ in range(args.repeats)]
    for peer in peers:
        peer.process.communicate()
    medians = [[statistics.median(s) for s in zip(*samples, strict=True)] for samples in zip(*turns, strict=True)]
    rows = []
    for i, case in enumerate(cases):
        row = dict(algo=algo, seeds=seeds, name=case.name, compile_seconds=case.compile_seconds)
        wall, cpu = medians[i]
        row |= dict(wall=wall, cpu=cpu, turns=[turn[i] for turn in turns])
        if case.name != "products":
            row |= dict(env_steps_per_second=seeds * spec.env_steps / wall)
            row |= dict(updates_per_second=seeds * spec.updates / wall, bar=spec.bars.get(case.name))
            row |= dict(ratio_wall=wall / medians[0][0], ratio_cpu=cpu / medians[0][1])
        if spec.multiply_adds:
            flop = 2 * seeds * spec.multiply_adds
            row |= dict(flop=flop, share_wall=medians[-1][0] / wall, share_cpu=medians[-1][1] / cpu)
        rows.append(row)
    return rows


def report(rows) -> str:
    """A table of the libraries, and the work and rate behind each share."""
    heads = "algo", "seeds", "library", "compile s", "ms/step", "CPU ms/step", "env steps/s", "updates/s"
    heads += "bellmax / it, wall", "bellmax / it, CPU", "bar", "share, wall", "share, CPU"
    cells, lines = [], []
    for row in rows:
        if row["name"] == "products":
            flop, *rates = (row["flop"] / 1e9 / x for x in (1, row["wall"], row["cpu"]))
            text = f"{flop:.3f} GFLOP a step; plain products: {rates[0]:.1f} GFLOP/s, {rates[1]:.1f} by CPU time"
            lines.append(f"- {row['algo']}, seeds {row['seeds']}: {text}")
            continue
        speeds = (f"{row[k]:,.0f}" if row[k] else "" for k in ("env_steps_per_second", "updates_per_second"))
        first = row["algo"], row["seeds"], row["name"], f"{row['compile_seconds']:.1f}"
        ratios = row["ratio_wall"], row["ratio_cpu"], f">= {row['bar']}" if row["bar"] else ""
        shares = (row.get(key, "") for key in ("share_wall", "share_cpu"))
        cells.append((*first, 1e3 * row["wall"], 1e3 * row["cpu"], *speeds, *ratios, *shares))
    return "\n\n".join([table(heads, *cells), *lines])


def main(args: Args):
    if args.threads:
        os.environ["PJRT_NPROC"] = str(args.threads)  # read when jax first computes
    jax.config.update("jax_enable_compilation_cache", False)  # compile seconds are measured
    rows, facts = [], machine()
    args.out.mkdir(parents=True, exist_ok=True)
    for algo, seeds in [(a, s) for a in args.algos for s in args.seeds]:
        rows += measure(algo, seeds, args)
        result = dict(machine=facts, args=dataclasses.asdict(args), rows=rows)
        (args.out / "peer_speed.json").write_text(json.dumps(result, indent=1, default=str))
        (args.out / "peer_speed.md").write_text(text := f"{facts}\n\n{report(rows)}\n")
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
