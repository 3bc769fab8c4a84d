"""Speed and memory of the core: compile time, env steps/s, gradient updates/s, bytes of replay.

    python benchmarks/speed.py                  # tables, and speed.json
    python benchmarks/speed.py --peers --rejax-python PATH --ajax-python PATH

Whatever is compared is measured in turns (A, B, A, B, ...), so that a busy spell of the machine
falls on both. Numbers are medians over `repeats` turns after a warm-up; ratios are ratios of them.
A step is one vectorised step of 10 environments and one gradient step, of every seed.
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
TURN = 1.0  # seconds, of one measurement of ours
RING = {"1e4": 10_000, "1e6": 1_000_000}  # capacities, transitions
DQN = iqn.Config(
    learning_rate=1e-3,
    adam_epsilon=1e-8,
    num_iterates=1,
    sync_period=10,
    window_period=5_000,
    train_period=NUM_ENVS,
    batch_size=128,
    capacity=RING["1e4"],
    prefill=RING["1e4"],
    hidden=(120, 84),
    shared_torso=False,
)


@dataclasses.dataclass(frozen=True)
class Args:
    seeds: tuple[int, ...] = (1, 8)  # how many seeds are vmapped into one program
    repeats: int = 5  # turns after the warm-up
    groups: tuple[str, ...] = ("ring", "iterates")  # what to measure, peers apart
    threads: int | None = None  # of XLA on a CPU, for peers too; by default as many as there are cores
    out: Path = Path("speed.json")
    peers: bool = False  # also time other libraries' DQN, those whose interpreter is given
    rejax_python: Path | None = None  # of an environment with rejax 0.1.3
    ajax_python: Path | None = None  # of an environment with ajax-rl 0.4


make_env = functools.cache(lambda source: envs.make(source, NUM_ENVS))


class Case:
    """One i-QN setting for `seeds` seeds: compiled ahead of time, started, ring filled."""

    def __init__(self, name, seeds=1, source="CartPole-v1", **config):
        self.name, self.seeds = name, seeds
        env, configs = make_env(source), run.broadcast(dataclasses.replace(DQN, **config), seeds)
        keys = jax.random.split(jax.random.key(0), seeds)

        jax.clear_caches()  # an equal program compiled before would not be compiled again
        start = time.perf_counter()
        init = run.init.lower(iqn, configs, env, keys).compile()
        carry = jax.eval_shape(functools.partial(run.init, iqn), configs, env, keys)
        program = run.advance.lower(iqn, configs, env, carry, 1).compile()
        self.compile_seconds = time.perf_counter() - start

        before = reset_peak_rss()
        self.program, self.carry = functools.partial(program, configs, env), init(configs, env, keys)
        self.turn(10)  # warm-up
        self.bytes = dict(ring=self.carry.states.replay.words.nbytes, rss=peak_rss() - before)
        for part, compiled in (("init", init), ("step", program)):
            m = compiled.memory_analysis()
            arrays = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
            self.bytes[part] = arrays + m.temp_size_in_bytes
        self.steps = max(10, round(TURN / self.turn(100)[0]))

    def turn(self, steps=None):
        """Seconds per step: wall clock, and CPU time of this process."""
        steps = steps or self.steps
        wall, cpu = time.perf_counter(), time.process_time()
        self.carry = jax.block_until_ready(self.program(self.carry, steps))
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


class Peer:
    """Another library's DQN in a process of its own, which measures once for every line it is sent."""

    seeds, bytes = 1, {}

    def __init__(self, library, python, ring, updates):
        self.name = f"{library}, ring {ring}"
        script = REPOSITORY / "benchmarks" / "peers" / f"{library}_dqn.py"
        command = [python, script, "--capacity", RING[ring], "--updates", updates]
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
        return answer["seconds_per_update"], answer["cpu_seconds_per_update"]


def reset_peak_rss() -> int:
    """Bytes that this process holds; where the system allows it (Linux), the peak counts from here."""
    if lines_of("/proc/self/status"):
        Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def peak_rss() -> int:
    peaks = [line for line in lines_of("/proc/self/status") if line.startswith("VmHWM")]
    return int(peaks[0].split()[1]) * 1024 if peaks else psutil.Process().memory_info().rss


def lines_of(path) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def measure(cases, args) -> list[dict]:
    """Takes turns; a row of medians for each case."""
    turns = [[case.turn() for case in cases] for _ in range(args.repeats)]
    rows = []
    for case, samples in zip(cases, zip(*turns, strict=True), strict=True):
        wall, cpu = (statistics.median(s) for s in zip(*samples, strict=True))
        row = dict(name=case.name, seeds=case.seeds, compile_seconds=case.compile_seconds)
        row |= dict(us_per_step=1e6 * wall, cpu_us_per_step=1e6 * cpu)
        row |= dict(env_steps_per_second=case.seeds * NUM_ENVS / wall, updates_per_second=case.seeds / wall)
        rows.append(row | dict(bytes=case.bytes, us_per_step_turns=[1e6 * wall for wall, _ in samples]))
    return rows


def ring_group(seeds, args):
    """DQN at two capacities: neither the cost of a step nor the memory may grow beyond the ring itself."""
    large = dict(capacity=RING["1e6"])
    small = Case("ring 1e4, full", seeds)
    start = Case("ring 1e6, from 1% full", seeds, **large)
    full = Case("ring 1e6, full", seeds, **large, prefill=RING["1e6"])
    rows = measure([small, start, full], args)
    small_speed, start_speed, full_speed = (row["updates_per_second"] for row in rows)
    return rows, [
        ("updates/s, ring 1e6 from 1% full / 1e4", start_speed / small_speed, ">= 0.95"),
        ("updates/s, ring 1e6 full / 1e4", full_speed / small_speed, ">= 0.95"),
        ("bytes of the compiled step / ring 1e6", full.bytes["step"] / full.bytes["ring"], "<= 1.05"),
        ("bytes of the compiled init / ring 1e6", full.bytes["init"] / full.bytes["ring"], "<= 1.05"),
        ("growth of peak RSS / ring 1e6", full.bytes["rss"] / full.bytes["ring"], "<= 1.05"),
    ]


def iterates_group(seeds, args):
    """The price of K iterates learned at once."""
    cases, ratios = [], []
    breakout = dict(source="Breakout-MinAtar", hidden=(128,), batch_size=32)
    for name, task in (("CartPole", {}), ("Breakout", breakout)):
        cases.append(Case(f"{name}, shared torso, K=1", seeds, **task, shared_torso=True))
        cases.append(Case(f"{name}, shared torso, K=5", seeds, **task, shared_torso=True, num_iterates=5))
        cases.append(Case(f"{name}, independent, K=5", seeds, **task, num_iterates=5))
    rows = measure(cases, args)
    for i, name in ((0, "CartPole"), (3, "Breakout")):
        one, shared, independent = (row["us_per_step"] for row in rows[i : i + 3])
        ratios.append((f"time per update, {name}, shared torso, K=5 / K=1", shared / one, "<= 1.5"))
        ratios.append((f"time per update, {name}, independent K=5 / shared K=1", independent / one, ""))
    return rows, ratios


def peers_group(seeds, args):
    """Our DQN and other libraries' at equal settings, rings full, one seed."""
    all_rows, ratios = [], []
    for ring, capacity in RING.items():
        cases = [Case(f"bellmax, ring {ring}", capacity=capacity, prefill=capacity)]
        for library, python in (("rejax", args.rejax_python), ("ajax", args.ajax_python)):
            slow = library == "rejax" and ring == "1e6"
            cases += [Peer(library, python, ring, 100 if slow else 2_000)] if python else []
        rows = measure(cases, args)
        for peer, row in zip(cases[1:], rows[1:], strict=True):
            peer.process.communicate()
            bar = {"rejax, ring 1e4": ">= 1.5", "ajax, ring 1e4": ">= 1.0"}.get(peer.name, "")
            ratio = rows[0]["updates_per_second"] / row["updates_per_second"]
            ratios.append((f"updates/s, bellmax / {peer.name}", ratio, bar))
        all_rows += rows
    return all_rows, ratios


def show(console, title, rows, ratios):
    heads = "case", "compile s", "us/step", "CPU us/step", "env steps/s", "updates/s", "ring MB", "RSS MB"
    table = Table(*heads, title=title)
    for row in rows:
        keys = "us_per_step", "cpu_us_per_step", "env_steps_per_second", "updates_per_second"
        megabytes = (f"{row['bytes'][k] / 1e6:.1f}" if row["bytes"] else "" for k in ("ring", "rss"))
        table.add_row(row["name"], f"{row['compile_seconds']:.1f}", *(f"{row[k]:,.0f}" for k in keys), *megabytes)
    console.print(table)
    table = Table("ratio", "measured", "bar")
    for name, value, bar in ratios:
        table.add_row(name, f"{value:.3f}", bar)
    console.print(table)


def machine() -> dict:
    names = [line.partition(": ")[2] for line in lines_of("/proc/cpuinfo") if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    versions = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "gymnax")}
    versions["python"] = platform.python_version()
    threads, device = os.environ.get("PJRT_NPROC", "all"), jax.devices()[0].device_kind
    facts = dict(date=time.strftime("%Y-%m-%d"), cpu=cpu, cores=psutil.cpu_count(), threads=threads)
    return facts | dict(load_before=os.getloadavg(), device=device, versions=versions)


def main(args: Args):
    if args.threads:
        os.environ["PJRT_NPROC"] = str(args.threads)
    jax.config.update("jax_enable_compilation_cache", False)  # compile seconds are measured
    result = dict(machine=machine(), args=dataclasses.asdict(args), groups={})
    console = Console(width=130)
    console.print(result["machine"])
    groups = dict(ring=ring_group, iterates=iterates_group, peers=peers_group)
    for name, seeds in [(g, s) for g in args.groups for s in args.seeds] + [("peers", 1)] * args.peers:
        rows, ratios = groups[name](seeds, args)
        show(console, title := f"{name}, seeds {seeds}", rows, ratios)
        result["groups"][title] = dict(rows=rows, ratios=ratios)
        args.out.write_text(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
