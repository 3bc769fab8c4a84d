"""The host side of a launch: chunks on the device, and between them evaluation, files and progress.

A chunk is one evaluation period. It is run in slices of about a second, so that the bar moves and
Ctrl-C is answered; slices change nothing, as `runner.run.advance` is one program for every length.
"""

import dataclasses
import json
import math
import platform
import signal
import subprocess
import time
from datetime import datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from runner import check, checkpoint, progress, run, settings, wandb_log
from runner.check import BadInput
from runner.cli import Launch
from runner.evaluate import evaluate

EVAL = 0x6576616C  # folded into a seed's key, so that evaluation and training draw apart
SLICE_SECONDS = 1.0
CHECKPOINT_SECONDS = 60.0  # at least this between checkpoints, and 20 times what one takes
EXIT_DIVERGED = 3


class Stop:
    """Notes Ctrl-C, SIGTERM and the time limit; the loop looks at the end of a slice. A second Ctrl-C ends at once."""

    def __init__(self, time_limit: float | None):
        self.reason = None
        self.deadline = math.inf if time_limit is None else time.monotonic() + time_limit

    def __enter__(self):
        self.previous = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number, _):
        if self.reason is not None:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def asked(self) -> bool:
        if self.reason is None and time.monotonic() > self.deadline:
            self.reason = "time limit"
        return self.reason is not None


def describe(launch: Launch) -> dict:
    """Everything that decides what a launch computes, and what it was computed with: the content of config.json."""
    options = launch.options
    names = ("algo", "source", "steps", "seeds", "num_envs", "eval_period", "eval_episodes")
    described = {name: getattr(options, name) for name in names}
    described |= {"source_params": launch.source_params, "config": dataclasses.asdict(options.config)}
    from importlib.metadata import version

    packages = ("jax", "jaxlib", "flax", "optax", "gymnax", "brax", "orbax-checkpoint", "numpy")
    versions = {name: version(name) for name in packages} | {"python": platform.python_version()}
    device = jax.local_devices()[0]
    described |= {"versions": versions, "git": git_revision(), "device": f"{device.platform}: {device.device_kind}"}
    return described


def git_revision() -> dict | None:
    """The commit of the code, and whether files differ from it; None outside a git checkout."""
    git = lambda *words: subprocess.run(["git", *words], cwd=settings.ROOT, capture_output=True, text=True, check=True)
    try:
        return {
            "revision": git("rev-parse", "HEAD").stdout.strip(),
            "dirty": bool(git("status", "--porcelain").stdout.strip()),
        }
    except (OSError, subprocess.CalledProcessError):
        return None


def default_run_dir(options) -> Path:
    source = options.source.replace("/", "-")
    return Path("runs") / f"{options.algo}-{source}-{datetime.now():%Y%m%d-%H%M%S}"


def train(launch: Launch) -> int:
    """Runs a launch to its end, or as far as it is let. Returns the exit code. Raises BadInput before any compile."""
    algo, kind, options = launch.algo, launch.kind, launch.options
    console = progress.Console(highlight=False, soft_wrap=True)
    say = lambda text: console.print(text, markup=False)
    mode = wandb_log.mode_of(options.wandb)

    # The door: everything that can be refused is refused before anything compiles.
    source = kind.make(options.source, options.num_envs, **launch.source_params)
    eval_env = kind.make(options.source, options.eval_episodes, **launch.source_params)
    check.check(algo, options.config, source)
    check_lengths(algo, kind, options, source)
    wandb_log.check(mode)
    run_dir = Path(options.resume or options.run_dir or default_run_dir(options))
    if not options.resume and (run_dir / "config.json").exists():
        raise BadInput(
            f"{run_dir} already holds a run; choose another --run-dir, or continue it with --resume {run_dir}"
        )
    check.check_writable(run_dir)
    num_runs = len(options.seeds)
    configs = run.broadcast(options.config, num_runs)
    base_keys = jax.vmap(jax.random.key)(jnp.array(options.seeds))
    abstract = jax.eval_shape(lambda c, k: run.init(algo, c, source, k), configs, base_keys)
    memory = check.check_memory(abstract, num_runs)

    # The start: a checkpoint where there is one, else init.
    described = describe(launch)
    newest = checkpoint.latest(run_dir) if options.resume else None
    log = MetricsFile(run_dir / "metrics.jsonl")
    if newest is not None:
        carry, meta = checkpoint.restore(newest, abstract)
        log.rewind(meta["metrics_bytes"])
    else:
        meta = dict(chunk=1, metrics_bytes=0, diverged={}, best=[None] * num_runs)
        log.rewind(0)
    if not options.resume or options.steps != settings.read(run_dir)["steps"]:
        checkpoint.write_atomic(run_dir / "config.json", json.dumps(described, indent=2).encode())
    announce(say, launch, run_dir, memory, newest)
    if newest is None:
        carry = run.init(algo, configs, source, base_keys)

    eval_keys = jax.jit(
        lambda chunk: jax.vmap(lambda k: jax.random.fold_in(jax.random.fold_in(k, EVAL), chunk))(base_keys)
    )
    best = Best(run_dir / "policy" / "best.msgpack", abstract.states.params, meta["best"])
    diverged = {int(r): chunk for r, chunk in meta["diverged"].items()}
    chunk = meta["chunk"]
    wandb_logger = wandb_log.Logger(mode, options.wandb_project, described, run_dir)
    counter = lambda carry: int(getattr(carry.states, kind.counter)[0])
    step_size = algo.period(options.config, source)

    def save():
        began = time.monotonic()
        meta = dict(chunk=chunk, metrics_bytes=log.size, diverged=diverged, best=best.returns)
        extra = dict(chunk=chunk, eval_return=best.returns)
        checkpoint.save_policy(run_dir / "policy" / "last.msgpack", carry.states.params, described, dict(chunk=chunk))
        best.save(described, extra)
        checkpoint.save(run_dir, counter(carry), carry, meta)
        return time.monotonic(), time.monotonic() - began

    saved, save_seconds = time.monotonic(), 0.0
    reporter = progress.Reporter(options.steps, counter(carry), kind.unit, console)
    began, pace = time.perf_counter(), None
    with Stop(options.time_limit) as stop, reporter:
        while counter(carry) < options.steps and len(diverged) < num_runs and not stop.asked():
            # A chunk, in slices.
            target = chunk * options.eval_period
            chunk_began, chunk_first = time.perf_counter(), counter(carry)
            while (left := (target - counter(carry)) // step_size) > 0 and not stop.asked():
                length = min(left, max(1, left // 50) if pace is None else max(1, int(SLICE_SECONDS / pace)))
                slice_began = time.perf_counter()
                carry = jax.block_until_ready(run.advance(algo, configs, source, carry, length))
                seconds = time.perf_counter() - slice_began
                # The first slice compiles, so only later ones tell the pace.
                pace = seconds / length if pace is not None else SLICE_SECONDS / max(length, 1)
                reporter.advance(counter(carry), num_runs, step_size / pace)
            if counter(carry) < target:
                break

            # Evaluate, write, report.
            carry, lines = end_chunk(
                algo,
                configs,
                eval_env,
                carry,
                eval_keys(chunk),
                options.seeds,
                chunk,
                chunk_began,
                chunk_first,
                counter,
            )
            for r, line in enumerate(lines):
                if r not in diverged and not finite_loss(line):
                    diverged[r] = chunk
                    reporter.say(f"warning: seed {options.seeds[r]} diverged in chunk {chunk}: its loss is not finite")
            log.append(lines)
            best.update([line["eval_return"] for line in lines], carry.states.params)
            wandb_logger.log(lines)
            reporter.chunk(counter(carry), num_runs, lines[0]["steps_per_second"], lines)
            chunk += 1
            if checkpoint_due(options, target, saved, save_seconds):
                saved, save_seconds = save()
        if stop.reason or counter(carry) >= options.steps or len(diverged) == num_runs:
            save()

    # The end.
    lines = log.read()
    if lines:
        from runner import plots

        plots.curve(lines, run_dir / "curve.png", f"{options.algo} on {options.source}")
        progress.closing_table(console, lines, diverged)
    say(f"{time.perf_counter() - began:.0f} s; {run_dir}/curve.png, metrics.jsonl, policy/best.msgpack")
    code = EXIT_DIVERGED if len(diverged) == num_runs else 0
    if code:
        say(f"error: all {num_runs} runs diverged; lower --config.learning-rate")
    elif counter(carry) < options.steps:
        say(
            f"stopped ({stop.reason}) at {counter(carry):,} {kind.unit}; go on with: python scripts/train.py --resume {run_dir}"
        )
    wandb_logger.finish(code)
    return code


def end_chunk(algo, configs, eval_env, carry, keys, seeds, chunk, began, first, counter):
    """The metrics of a chunk and its evaluation, as one line per run, and the carry with fresh metrics."""
    measured = run.finish(carry.metrics)
    counters = {name: getattr(carry.states, name) for name in ("env_steps", "gradient_steps")}
    evaluated = evaluate(algo, configs, eval_env, carry.states.params, keys)
    counters, measured, evaluated = jax.device_get((counters, measured, evaluated))
    seconds = time.perf_counter() - began
    speed = (counter(carry) - first) / seconds
    lines = []
    for r, seed in enumerate(seeds):
        line = {"run": r, "seed": seed, "chunk": chunk, **{name: int(x[r]) for name, x in counters.items()}}
        line |= {name: number(x[r]) for name, x in {**evaluated, **measured}.items()}
        lines.append(line | {"seconds": round(seconds, 3), "steps_per_second": round(speed, 1)})
    return run.start_chunk(carry), lines


def number(x) -> float | None:
    """A JSON number: NaN and infinity, which JSON has not, are null."""
    return float(x) if np.isfinite(x) else None


def finite_loss(line: dict) -> bool:
    """Whether every loss of a line of metrics is a number."""
    return all(value is not None for name, value in line.items() if name == "loss" or name.endswith("_loss"))


def check_lengths(algo, kind, options, source):
    """Refuses lengths that do not fit into each other, naming both numbers."""
    step_size = algo.period(options.config, source)
    check.multiple("--eval-period", options.eval_period, "what one iteration makes,", step_size)
    check.multiple("--steps", options.steps, "--eval-period", options.eval_period)
    if options.checkpoint_period is not None:
        check.multiple("--checkpoint-period", options.checkpoint_period, "--eval-period", options.eval_period)
    if not options.seeds or min(options.seeds) < 0 or len(set(options.seeds)) < len(options.seeds):
        raise BadInput(f"--seeds {options.seeds} must be different non-negative whole numbers, at least one")
    for name in ("num_envs", "eval_episodes"):
        if getattr(options, name) < 1:
            raise BadInput(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    if options.time_limit is not None and not options.time_limit > 0:
        raise BadInput(f"--time-limit is {options.time_limit}; it must be a positive number of seconds")
    prefill = getattr(options.config, "prefill", 0)
    if prefill >= options.steps:
        raise BadInput(f"--steps {options.steps} must be more than --config.prefill {prefill}, which it includes")


def checkpoint_due(options, steps: int, saved: float, save_seconds: float) -> bool:
    """Every `--checkpoint-period`, or about once a minute, but never more than a twentieth of the time."""
    if options.checkpoint_period is not None:
        return steps % options.checkpoint_period == 0
    return time.monotonic() - saved > max(CHECKPOINT_SECONDS, 20 * save_seconds)


def announce(say, launch: Launch, run_dir: Path, memory: str, resumed_from):
    """Prints what is about to run, and every setting that is not the published default."""
    options = launch.options
    published = launch.algo.Config()
    source = f"{options.source} {launch.source_params or ''}".strip()
    say(
        f"{options.algo} on {source}: {options.steps:,} {launch.kind.unit}, {options.num_envs} envs, seeds {list(options.seeds)}"
    )
    say(f"  settings from {launch.origin} and the command line:")
    for field in dataclasses.fields(published):
        value, default = getattr(options.config, field.name), getattr(published, field.name)
        say(f"    {field.name:<18} {value}" + ("" if value == default else f"  (published: {default})"))
    say(f"  memory {memory}")
    say(f"  {run_dir}" + (f", from {resumed_from}" if resumed_from else ""))
    say("compiling (minutes for some environments; kept for next time)")


class MetricsFile:
    """`metrics.jsonl`, to which whole chunks are appended and which a resume rewinds."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def rewind(self, size: int):
        """Drops what was written after a checkpoint, and creates the file where it is not there."""
        if size and (not self.path.exists() or self.size < size):
            raise BadInput(f"{self.path} is shorter than at its checkpoint ({size} bytes); nothing was changed")
        with open(self.path, "ab") as file:
            file.truncate(size)

    def append(self, lines: list[dict]):
        with open(self.path, "a") as file:
            file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))

    def read(self) -> list[dict]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


class Best:
    """Each run's parameters at its best evaluation so far."""

    def __init__(self, path: Path, abstract_params, returns: list):
        self.path, self.returns, self.params = path, list(returns), None
        if any(r is not None for r in returns):
            self.params, _ = checkpoint.load_policy(path, abstract_params)

    def update(self, eval_returns: list, params):
        better = [
            new is not None and (old is None or new > old) for new, old in zip(eval_returns, self.returns, strict=True)
        ]
        if self.params is None:
            self.params = jax.tree.map(np.array, params)
        elif any(better):
            index = np.flatnonzero(better)
            jax.tree.map(lambda old, new: old.__setitem__(index, np.asarray(new)[index]), self.params, params)
        self.returns = [n if b else o for b, n, o in zip(better, eval_returns, self.returns, strict=True)]

    def save(self, described: dict, extra: dict):
        if self.params is not None:
            checkpoint.save_policy(self.path, self.params, described, extra)
