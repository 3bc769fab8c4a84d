"""Speed and memory of the core: compile time, env steps/s, gradient updates/s, replay memory.

    python benchmarks/speed.py                           # a table, and speed.json
    python benchmarks/speed.py --peers --rejax-python PATH --ajax-python PATH

Whatever is compared is measured in turns (A, B, A, B, ...), so that a busy spell of the machine
falls on both; numbers are medians over `repeats` turns after a warm-up, ratios are ratios of them.
One step is one vectorised step of 10 environments and one gradient step, in every run.
benchmarks/README.md explains the columns and how to make the peers' environments.
"""

import dataclasses
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import jax
import psutil
import tyro
from rich.console import Console
from rich.table import Table

import envs
from algos import iqn
from runner import run

NUM_ENVS = 10
DQN = iqn.Config(
    learning_rate=1e-3,
    adam_epsilon=1e-8,
    num_iterates=1,
    sync_period=10,
    window_period=5_000,
    train_period=NUM_ENVS,
    batch_size=128,
    capacity=10_000,
    prefill=10_000,
    hidden=(120, 84),
    shared_torso=False,
)
SMALL, LARGE = 10_000, 1_000_000  # ring capacities, transitions


@dataclasses.dataclass(frozen=True)
class Args:
    seeds: tuple[int, ...] = (1, 8)  # how many runs are vmapped into one program
    repeats: int = 5  # turns after the warm-up; the median is reported
    seconds: float = 1.0  # wall time of one turn
    groups: tuple[str, ...] = ("ring", "iterates")  # what to measure of our own
    out: Path = Path("speed.json")
    peers: bool = False  # also time other libraries' DQN, where an interpreter is given
    rejax_python: Path | None = None  # interpreter of an environment with rejax 0.1.3
    ajax_python: Path | None = None  # interpreter of an environment with ajax-rl 0.4


class Case:
    """`runs` runs of one i-QN setting, compiled ahead of time. Starting it fills the ring."""

    library = "bellmax"

    def __init__(self, name, runs=1, source="CartPole-v1", **config):
        self.name, self.runs = name, runs
        self.env = make_env(source)
        self.config = dataclasses.replace(DQN, **config)
        self.configs = run.broadcast(self.config, runs)
        keys = jax.random.split(jax.random.key(0), runs)

        start = time.perf_counter()
        init = run.init.lower(iqn, self.configs, self.env, keys).compile()
        carry = jax.eval_shape(functools.partial(run.init, iqn), self.configs, self.env, keys)
        self.program = run.advance.lower(iqn, self.configs, self.env, carry, 1).compile()
        self.compile_seconds = time.perf_counter() - start

        before = reset_peak_rss()
        self.carry = init(self.configs, self.env, keys)
        self.advance(10)
        self.memory = dict(ring=self.carry.states.replay.words.nbytes, rss=peak_rss() - before)
        for name, program in (("init", init), ("program", self.program)):
            m = program.memory_analysis()
            held = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
            self.memory[name] = held + m.temp_size_in_bytes

    def advance(self, steps):
        """Seconds per step, wall clock and CPU time of this process."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.carry = jax.block_until_ready(self.program(self.configs, self.env, self.carry, steps))
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps

    def warm_up(self, seconds):
        self.steps = max(10, round(seconds / self.advance(200)[0]))

    def turn(self):
        return self.advance(self.steps)


class Peer:
    """Another library's DQN in a process of its own, which makes one measurement per line that it is sent."""

    runs, memory = 1, {}

    def __init__(self, library, python, capacity, updates):
        self.library, self.name = library, f"{library}, ring {capacity:.0e}"
        command = [python, REPOSITORY / "benchmarks" / "peers" / f"{library}_dqn.py"]
        command += ["--capacity", str(capacity), "--updates", str(updates)]
        environ = dict(os.environ, JAX_PLATFORMS=jax.default_backend(), PYTHONWARNINGS="ignore")
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        self.process = subprocess.Popen(list(map(str, command)), **pipes)
        self.compile_seconds = self.answer()["compile_seconds"]

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.library} ended with code {self.process.wait()} before it answered")

    def warm_up(self, seconds):
        pass  # done before its first line

    def turn(self):
        print(file=self.process.stdin, flush=True)
        answer = self.answer()
        return answer["seconds_per_update"], answer["cpu_seconds_per_update"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


make_env = functools.cache(lambda source: envs.make(source, NUM_ENVS))


def reset_peak_rss() -> int:
    """The memory held now, in bytes; the peak counts from here where the system allows it (Linux)."""
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def peak_rss() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return psutil.Process().memory_info().rss
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(cases, args) -> dict[str, dict]:
    """Takes turns; a row of medians for each case, by name."""
    for case in cases:
        case.warm_up(args.seconds)
    turns = [[case.turn() for case in cases] for _ in range(args.repeats)]
    rows = {}
    for case, samples in zip(cases, zip(*turns, strict=True), strict=True):
        wall, cpu = (statistics.median(s) for s in zip(*samples, strict=True))
        rows[case.name] = dict(
            library=case.library,
            seeds=case.runs,
            compile_seconds=case.compile_seconds,
            us_per_step=1e6 * wall,
            cpu_us_per_step=1e6 * cpu,
            env_steps_per_second=case.runs * NUM_ENVS / wall,
            updates_per_second=case.runs / wall,
            us_per_step_turns=[1e6 * wall for wall, _ in samples],
            bytes=case.memory,
        )
    return rows


def ring_group(seeds, args):
    """DQN at two ring capacities: the cost of a step and the memory must not grow with the ring."""
    cases = [
        Case("dqn, ring 1e4", seeds),
        Case("dqn, ring 1e6, 1% full", seeds, capacity=LARGE),
        Case("dqn, ring 1e6, full", seeds, capacity=LARGE, prefill=LARGE),
    ]
    rows = measure(cases, args)
    small, start, full = rows.values()
    ring = full["bytes"]["ring"]
    return rows, [
        (
            "updates/s, ring 1e6 starting / ring 1e4",
            start["updates_per_second"] / small["updates_per_second"],
            ">= 0.95",
        ),
        ("updates/s, ring 1e6 full / ring 1e4", full["updates_per_second"] / small["updates_per_second"], ">= 0.95"),
        ("bytes the compiled step needs / ring 1e6", full["bytes"]["program"] / ring, "<= 1.05"),
        ("bytes the compiled init needs / ring 1e6", full["bytes"]["init"] / ring, "<= 1.05"),
        ("growth of peak RSS / ring 1e6", full["bytes"]["rss"] / ring, "<= 1.05"),
    ]


def iterates_group(seeds, args):
    """The price of learning K iterates at once."""
    breakout = dict(source="Breakout-MinAtar", hidden=(128,), batch_size=32, shared_torso=True)
    rows = measure(
        [
            Case("CartPole, shared, K=1", seeds, shared_torso=True),
            Case("CartPole, shared, K=5", seeds, shared_torso=True, num_iterates=5),
            Case("CartPole, independent, K=5", seeds, num_iterates=5),
            Case("Breakout, shared, K=1", seeds, **breakout),
            Case("Breakout, shared, K=5", seeds, **breakout, num_iterates=5),
            Case("Breakout, independent, K=5", seeds, **breakout | dict(shared_torso=False), num_iterates=5),
        ],
        args,
    )
    cart1, cart5, cart5_independent, out1, out5, out5_independent = (r["us_per_step"] for r in rows.values())
    return rows, [
        ("time per update, CartPole, shared, K=5 / K=1", cart5 / cart1, "<= 1.5"),
        ("time per update, Breakout, shared, K=5 / K=1", out5 / out1, "<= 1.5"),
        ("time per update, CartPole, independent K=5 / K=1", cart5_independent / cart1, ""),
        ("time per update, Breakout, independent K=5 / K=1", out5_independent / out1, ""),
    ]


def peers_group(seeds, args):
    """Our DQN and other libraries' at equal settings, both rings full; one seed."""
    rows, ratios = {}, []
    for capacity in (SMALL, LARGE):
        ours = Case(f"bellmax, ring {capacity:.0e}", capacity=capacity, prefill=capacity)
        peers = []
        if args.rejax_python:
            peers.append(Peer("rejax", args.rejax_python, capacity, 2_000 if capacity == SMALL else 100))
        if args.ajax_python:
            peers.append(Peer("ajax", args.ajax_python, capacity, 2_000))
        measured = measure([ours, *peers], args)
        for peer in peers:
            peer.close()
            ratio = measured[ours.name]["updates_per_second"] / measured[peer.name]["updates_per_second"]
            bar = {"rejax": ">= 1.5", "ajax": ">= 1.0"}[peer.library] if capacity == SMALL else ""
            ratios.append((f"updates/s, bellmax / {peer.name}", ratio, bar))
        rows |= measured
    return rows, ratios


GROUPS = dict(ring=ring_group, iterates=iterates_group, peers=peers_group)


def show(console, title, rows, ratios):
    columns = "case", "seeds", "compile s", "us/step", "CPU us/step", "env steps/s", "updates/s", "ring MB", "RSS MB"
    table = Table(*columns, title=title)
    for name, row in rows.items():
        numbers = (row[k] for k in ("us_per_step", "cpu_us_per_step", "env_steps_per_second", "updates_per_second"))
        memory = (f"{row['bytes'][k] / 1e6:.1f}" if row["bytes"] else "" for k in ("ring", "rss"))
        cells = f"{row['compile_seconds']:.1f}", *(f"{x:,.0f}" for x in numbers), *memory
        table.add_row(name, str(row["seeds"]), *cells)
    console.print(table)
    table = Table("ratio of medians", "measured", "bar")
    for name, value, bar in ratios:
        table.add_row(name, f"{value:.3f}", bar)
    console.print(table)


def machine() -> dict:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return dict(
        date=time.strftime("%Y-%m-%d"),
        cpu=names[0] if names else platform.processor(),
        cores=psutil.cpu_count(),
        load=os.getloadavg(),  # 1, 5, 15 minutes; this process itself makes about 1
        device=jax.devices()[0].device_kind,
        python=platform.python_version(),
        versions={name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "gymnax")},
    )


def main(args: Args):
    jax.config.update("jax_enable_compilation_cache", False)  # compile seconds are measured
    console = Console(width=150)
    result = dict(machine=machine(), args=dataclasses.asdict(args), groups={})
    groups = [(name, seeds) for name in args.groups for seeds in args.seeds] + [("peers", 1)] * args.peers
    for name, seeds in groups:
        title = f"{name}, seeds {seeds}"
        rows, ratios = GROUPS[name](seeds, args)
        show(console, title, rows, ratios)
        result["groups"][title] = dict(rows=rows, ratios=ratios)
        args.out.write_text(json.dumps(result, indent=1, default=str))
    console.print(result["machine"], f"written to {args.out}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
