"""The speed of PPO and SAC beside other libraries', at equal settings and in one run.

    python benchmarks/bangbang_speed.py --threads 1 --rejax-python PATH --ajax-python PATH --purejaxrl CHECKOUT

PPO on CartPole-v1 at purejaxrl's settings: a step is a rollout of 4 x 128 env steps and 4 epochs of 4 minibatches,
of every seed. SAC (Gaussian, 256-256, batch 256) on one Pendulum-v1: a step is one env step and one gradient step
each of critics, policy and temperature, the replay full. What is compared takes turns (A, B, ..., A, B, ...), ours
and the peers' the same number of steps; numbers are medians of the turns after a warm-up, by wall clock and by CPU
time of the process that learns. Compiling is not in them. `benchmarks/peers/` says what is equal, what is not, and
which packages a peer needs.
"""

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import tyro
from mrq_speed import table
from speed import machine

import envs
from algos import bangbang_ppo, bangbang_sac
from runner import run


@dataclasses.dataclass(frozen=True)
class Args:
    algos: tuple[str, ...] = ("ppo", "sac")
    seeds: tuple[int, ...] = (1, 8)  # how many are vmapped into one program; ajax is timed with one alone
    threads: int | None = None  # of XLA on a CPU, for peers too; by default as many as there are cores
    repeats: int = 5  # turns after the warm-up
    capacity: int = 100_000  # of SAC's replay, transitions
    rejax_python: Path | None = None  # of an environment with rejax 0.1.3
    ajax_python: Path | None = None  # of an environment with ajax-rl 0.4
    purejaxrl: Path | None = None  # a checkout; run by rejax's interpreter
    out: Path = Path("runs/bangbang_speed")  # folder of bangbang_speed.json and bangbang_speed.md


@dataclasses.dataclass(frozen=True)
class Task:
    algo: object
    source: str
    num_envs: int
    config: object
    steps: int  # of a turn of one seed: about a second
    env_steps: int  # of a step
    updates: int  # gradient steps of a step
    bars: dict[str, float]  # what this repository promises: ours / the peer's


def task(name, args) -> Task:
    if name == "ppo":
        # Annealed as purejaxrl's is, but over so many env steps that no turn is without learning.
        config = bangbang_ppo.Config(anneal_steps=1e9)
        bars = dict(purejaxrl=1.0, rejax=1.0, ajax=1.0)
        return Task(bangbang_ppo, "CartPole-v1", 4, config, 300, 512, 16, bars)
    config = bangbang_sac.Config(policy="gaussian", capacity=args.capacity, prefill=args.capacity)
    return Task(bangbang_sac, "Pendulum-v1", 1, config, 150, 1, 1, dict(rejax=1.2, ajax=1.0))


class Ours:
    """Compiled ahead of time, started and warmed up."""

    name = "bellmax"

    def __init__(self, task, seeds, steps):
        env, configs = envs.make(task.source, task.num_envs), run.broadcast(task.config, seeds)
        keys = jax.random.split(jax.random.key(0), seeds)
        carry = run.init(task.algo, configs, env, keys)
        start = time.perf_counter()
        program = run.advance.lower(task.algo, configs, env, carry, 1).compile()
        self.compile_seconds = time.perf_counter() - start
        self.program, self.carry, self.steps = functools.partial(program, configs, env), carry, steps
        self.turn()

    def turn(self):
        """Seconds per step: wall clock, and CPU time of this process."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.carry = jax.block_until_ready(self.program(self.carry, self.steps))
        return (time.perf_counter() - wall) / self.steps, (time.process_time() - cpu) / self.steps


class Peer:
    """Another library in a process of its own, which measures once for every line it is sent."""

    def __init__(self, name, python, algo, seeds, steps, args):
        self.name = name
        script = Path(__file__).resolve().parent / "peers" / f"{name}_{algo}.py"
        command = [python, script, "--steps", steps, "--seeds", seeds, "--capacity", args.capacity]
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
    found = dict(rejax=args.rejax_python)
    if algo == "ppo" and args.purejaxrl:
        if args.rejax_python is None:
            raise SystemExit("--purejaxrl needs --rejax-python: its packages are rejax's")
        found["purejaxrl"] = args.rejax_python
    if seeds == 1:
        found["ajax"] = args.ajax_python
    return {name: python for name, python in found.items() if python}


def measure(algo, seeds, args) -> list[dict]:
    """Takes turns; a row for us and for each peer, times in seconds per step of all seeds."""
    spec = task(algo, args)
    steps = max(1, spec.steps // seeds)
    peers = [Peer(name, python, algo, seeds, steps, args) for name, python in pythons(algo, seeds, args).items()]
    cases = [Ours(spec, seeds, steps), *peers]
    turns = [[case.turn() for case in cases] for _ in range(args.repeats)]
    for peer in peers:
        peer.process.communicate()
    rows = []
    for case, samples in zip(cases, zip(*turns, strict=True), strict=True):
        wall, cpu = (statistics.median(s) for s in zip(*samples, strict=True))
        row = dict(algo=algo, seeds=seeds, name=case.name, compile_seconds=case.compile_seconds, wall=wall, cpu=cpu)
        row |= dict(env_steps_per_second=seeds * spec.env_steps / wall, updates_per_second=seeds * spec.updates / wall)
        row |= dict(ratio_wall=wall / rows[0]["wall"] if rows else 1.0, ratio_cpu=cpu / rows[0]["cpu"] if rows else 1.0)
        rows.append(row | dict(bar=spec.bars.get(case.name), turns=samples))
    return rows


def report(rows) -> str:
    heads = "algo", "seeds", "library", "compile s", "ms/step", "CPU ms/step", "env steps/s", "updates/s"
    heads += "bellmax / it, wall", "bellmax / it, CPU", "bar"
    cells = []
    for row in rows:
        speeds = (f"{row[k]:,.0f}" for k in ("env_steps_per_second", "updates_per_second"))
        first = row["algo"], row["seeds"], row["name"], f"{row['compile_seconds']:.1f}"
        ratios = row["ratio_wall"], row["ratio_cpu"], f">= {row['bar']}" if row["bar"] else ""
        cells.append((*first, 1e3 * row["wall"], 1e3 * row["cpu"], *speeds, *ratios))
    return table(heads, *cells)


def main(args: Args):
    if args.threads:
        os.environ["PJRT_NPROC"] = str(args.threads)  # read when jax first computes
    jax.config.update("jax_enable_compilation_cache", False)  # compile seconds are measured
    rows, facts = [], machine()
    args.out.mkdir(parents=True, exist_ok=True)
    for algo, seeds in [(a, s) for a in args.algos for s in args.seeds]:
        rows += measure(algo, seeds, args)
        result = dict(machine=facts, args=dataclasses.asdict(args), rows=rows)
        (args.out / "bangbang_speed.json").write_text(json.dumps(result, indent=1, default=str))
        (args.out / "bangbang_speed.md").write_text(text := f"{facts}\n\n{report(rows)}\n")
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
