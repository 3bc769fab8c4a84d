"""The host side of a launch: chunks on the device, and between them evaluation, files and progress.

A chunk is one evaluation period. It is run in slices of about a second, so that the bar moves and
Ctrl-C is answered; slices change nothing, as `runner.run.advance` is one program for every length.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import time
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from replay import datasets
from runner import check, checkpoint, files, plots, policy, progress, run, settings, wandb_log, warm
from runner.check import BadInput
from runner.cli import Launch
from runner.evaluate import evaluate

EVAL = 0x6576616C  # folded into a seed's key, so that evaluation and training draw apart
SLICE_SECONDS = 1.0
CHECKPOINT_SECONDS = 60.0  # at least this between checkpoints, and 20 times what one takes
EXIT_DIVERGED = 3


def train(launch: Launch) -> int:
    """Runs a launch to its end, or as far as it is let. Returns the exit code.

    Raises: BadInput, before anything compiles and before anything in an existing run is changed; or where the
        device runs out of memory, which only the compiled program can tell.
    """
    try:
        return run_to_the_end(launch)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise BadInput(f"{reason} Lower --config.batch-size, --config.capacity or the number of --seeds") from error


def run_to_the_end(launch: Launch) -> int:
    """The launch itself: the door, the loop over chunks, the last checkpoint, the closing report."""
    began = time.perf_counter()
    training = Training(launch)
    with Stop(launch.options.time_limit) as stop:
        training.start()
        reporter = progress.Reporter(training.console, launch.options.steps, training.count, launch.kind.unit)
        with reporter:
            while not training.finished and stop.reason is None:
                training.chunk(stop, reporter)
        training.save()
    return training.close(stop.reason, time.perf_counter() - began)


class Stop:
    """Notes Ctrl-C, SIGTERM and the time limit; the loop looks at the end of a slice. A second Ctrl-C ends at once."""

    def __init__(self, time_limit: float | None):
        self.signal = None
        self.deadline = math.inf if time_limit is None else time.monotonic() + time_limit

    def __enter__(self):
        self.previous = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number, _):
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name

    @property
    def reason(self) -> str | None:
        return self.signal or ("time limit" if time.monotonic() > self.deadline else None)


class Training:
    """A launch under way. The constructor is the door: all that can be refused is refused there."""

    def __init__(self, launch: Launch):
        self.algo, self.kind, self.options = launch.algo, launch.kind, launch.options
        options = self.options
        self.console = progress.console()
        with refusing():
            self.source, self.eval_env = self.kind.make(options, launch.source_params)
            check.check(self.algo, options.config, self.source)
        check_lengths(self.algo, options, self.source)
        self.wandb_mode = wandb_log.mode_of(options.wandb)
        wandb_log.check(self.wandb_mode)

        self.num_runs = len(options.seeds)
        self.configs = run.broadcast(options.config, self.num_runs)
        self.keys = jax.vmap(jax.random.key)(jnp.array(options.seeds))
        init = lambda configs, keys: run.init(self.algo, configs, self.source, keys)
        with refusing(OverflowError):  # a size past 64 bits; anything else is a bug, and shows its traceback
            self.abstract = jax.eval_shape(init, self.configs, self.keys)
        memory = check.check_memory(self.abstract, self.num_runs)
        saved = options.resume and checkpoint.latest(Path(options.resume).expanduser() / "checkpoint")
        self.begun = warm.states(launch, self.source) if options.init_from is not None and not saved else None

        if options.resume or options.run_dir:
            self.run_dir = Path(options.resume or options.run_dir).expanduser()
        else:
            self.run_dir = default_run_dir(options)
        if not options.resume and (self.run_dir / "config.json").exists():
            raise BadInput(f"{self.run_dir} holds a run; choose another --run-dir, or --resume {self.run_dir}")
        check.check_writable(self.run_dir)
        self.described = describe(launch, self.source)
        for part, name in dict(dataset=options.source, demonstrations=options.demos).items():
            if options.resume and part in self.described:
                before = settings.read(self.run_dir).get(part, {})
                if before.get("digest") != self.described[part]["digest"]:
                    raise BadInput(f"dataset {name} is not the one that {self.run_dir} was trained on")
        self.log = files.MetricsFile(self.run_dir / "metrics.jsonl")

        # Of a resumed run everything is read and checked before anything is written.
        self.carry, meta = None, dict(chunk=1, metrics_bytes=0, diverged={}, best=[None] * self.num_runs)
        newest = checkpoint.latest(self.run_dir / "checkpoint") if options.resume else None
        if newest is not None:
            self.carry, meta = checkpoint.restore(newest, self.abstract)
        elif options.resume and self.log.size:
            raise BadInput(
                f"{self.run_dir / 'checkpoint'} holds no whole checkpoint, though {self.log.path} holds results; "
                "nothing was changed (delete that file to start this run over)"
            )
        self.log.check(meta["metrics_bytes"])
        self.metrics_bytes = meta["metrics_bytes"]
        self.next_chunk, self.newest = meta["chunk"], newest
        self.diverged = {int(r): chunk for r, chunk in meta["diverged"].items()}  # run -> chunk
        best = self.run_dir / "policy" / "best.msgpack"
        self.best = Best(best, self.abstract.states.params, meta["best"], latest=self.kind.flag == "mdp")
        announce(self.console, launch, self.described, self.run_dir, memory, newest)
        if self.begun is not None:
            steps = int(self.begun.gradient_steps[0])
            progress.say(self.console, f"starting from {options.init_from} after its {steps:,} gradient steps")

    def start(self):
        """Writes the settings, compiles, and makes the first state where no checkpoint held one."""
        self.lock = files.lock(self.run_dir)
        if self.options.resume and checkpoint.latest(self.run_dir / "checkpoint") != self.newest:
            raise BadInput(f"{self.run_dir} was written to by another launch just now; resume it again")
        if self.options.resume:
            self.described = self.continued()
        files.write(self.run_dir / "config.json", json.dumps(self.described, indent=2).encode())
        self.log.rewind(self.metrics_bytes)
        self.wandb = wandb_log.Logger(self.wandb_mode, self.options.wandb_project, self.described, self.run_dir)
        began = time.perf_counter()
        if self.carry is None:
            if steps := getattr(self.options.config, "offline_steps", 0):
                say = f"first {steps:,} offline steps in one piece: Ctrl-C and --time-limit wait for their end"
                progress.say(self.console, say)
            self.carry = run.init(self.algo, self.configs, self.source, self.keys)
            if self.begun is not None:
                self.carry = warm.start(self.algo, self.configs, self.source, self.carry, self.begun)
            self.next_chunk = self.count // self.options.eval_period + 1  # the prefill may be longer than a chunk
        self.carry = self.advance(0)  # compiles the program that every later slice runs
        progress.say(self.console, f"compiled in {time.perf_counter() - began:.1f} s")
        self.pace = None  # seconds per step of the algorithm
        # What was just read need not be written again: orbax would first remove the only whole checkpoint.
        self.saved_at = self.count if self.newest else None
        self.saved_time, self.save_seconds = time.monotonic(), 0.0

    def continued(self) -> dict:
        """What config.json says after a resume: as it was, with its new length, and other versions noted beside."""
        saved = settings.read(self.run_dir) | dict(steps=self.described["steps"])
        now = {name: self.described[name] for name in ("versions", "git", "device")}
        if now != {name: saved.get(name) for name in now}:
            progress.say(self.console, "warning: other versions or device than before: not bit-exact, see config.json")
            saved["resumed_with"] = [*saved.get("resumed_with", []), now]
        return saved

    def advance(self, num_steps: int) -> run.Carry:
        return jax.block_until_ready(run.advance(self.algo, self.configs, self.source, self.carry, num_steps))

    @property
    def count(self) -> int:
        """Steps made so far, in the unit of `--steps`; the same for every run."""
        return int(getattr(self.carry.states, self.kind.counter)[0])

    @property
    def finished(self) -> bool:
        return self.count >= self.options.steps or len(self.diverged) == self.num_runs

    def chunk(self, stop: Stop, reporter: progress.Reporter):
        """Trains to the end of the next evaluation period, in slices, and then evaluates; or stops where asked to."""
        began, first, target = time.perf_counter(), self.count, self.next_chunk * self.options.eval_period
        step_size = self.algo.period(self.options.config, self.source)
        while (left := (target - self.count) // step_size) > 0:
            if stop.reason:
                return
            length = 1 + left // 100 if self.pace is None else max(1, int(SLICE_SECONDS / self.pace))
            length = min(left, length)
            slice_began = time.perf_counter()
            self.carry = self.advance(length)
            self.pace = (time.perf_counter() - slice_began) / length
            reporter.advance(self.count, self.num_runs * step_size / self.pace, within=self.count < target)
        speed = (self.count - first) / (time.perf_counter() - began)

        lines = self.measure(speed, began)
        for r, line in enumerate(lines):
            if r not in self.diverged and not finite_loss(line):
                self.diverged[r] = self.next_chunk
                seed = self.options.seeds[r]
                cause = cause_of_divergence(self.carry.states, r)
                reporter.say(f"warning: seed {seed} diverged in chunk {self.next_chunk}: {cause}")
        self.log.append(lines)
        self.wandb.log(lines)
        scores = [line.get("eval_objective", line["eval_return"]) for line in lines]
        self.best.update(scores, self.carry.states.params)
        reporter.chunk(self.count, lines)
        self.next_chunk += 1
        if self.checkpoint_due():
            self.save()

    def measure(self, speed: float, began: float) -> list[dict]:
        """Evaluates, and takes the metrics of the chunk: one line per run. Starts the next chunk's metrics."""
        states = self.carry.states
        chunk_keys = jax.vmap(lambda k: jax.random.fold_in(jax.random.fold_in(k, EVAL), self.next_chunk))(self.keys)
        evaluated = evaluate(self.algo, self.configs, self.eval_env, states.params, chunk_keys)
        counters = {n: getattr(states, n) for n in ("env_steps", "gradient_steps", "sweeps") if hasattr(states, n)}
        counters, measured = jax.device_get((counters, {**evaluated, **run.finish(self.carry.metrics)}))
        self.carry = run.start_chunk(self.carry)
        lines = []
        for r, seed in enumerate(self.options.seeds):
            line = {"run": r, "seed": seed, "chunk": self.next_chunk}
            line |= {name: int(x[r]) for name, x in counters.items()} | {n: number(x[r]) for n, x in measured.items()}
            lines.append(line | dict(seconds=round(time.perf_counter() - began, 3), steps_per_second=round(speed, 1)))
        return lines

    def checkpoint_due(self) -> bool:
        """Every `--checkpoint-period`, or about once a minute, but never more than a twentieth of the time."""
        if self.saved_at is None:  # results are never without a checkpoint to go on from
            return True
        if self.options.checkpoint_period is not None:
            return self.count % self.options.checkpoint_period == 0
        return time.monotonic() - self.saved_time > max(CHECKPOINT_SECONDS, 20 * self.save_seconds)

    def save(self):
        """Writes the policies, then the checkpoint that makes them count. Nothing where nothing happened since."""
        if self.saved_at == self.count:
            return
        began = time.monotonic()
        meta = dict(chunk=self.next_chunk, metrics_bytes=self.log.size, diverged=self.diverged, best=self.best.returns)
        last = self.run_dir / "policy" / "last.msgpack"
        policy.save(last, self.carry.states.params, self.described, dict(chunk=self.next_chunk - 1))
        self.best.save(self.described)
        checkpoint.save(self.run_dir / "checkpoint", self.count, self.carry, meta)
        self.saved_at, self.saved_time = self.count, time.monotonic()
        self.save_seconds = self.saved_time - began

    def close(self, stopped: str | None, seconds: float) -> int:
        """Draws the curve, prints the closing table and what to do next. Returns the exit code."""
        say = lambda text: progress.say(self.console, text)
        lines = self.log.read()
        if lines:
            title = f"{self.options.algo} on {self.options.source}"
            plots.curve(lines, self.run_dir / "curve.png", title, self.kind.counter)
            progress.closing_table(self.console, lines, self.diverged)
        all_diverged = len(self.diverged) == self.num_runs
        if all_diverged:
            say(f"error: every run diverged ({self.num_runs}); see the warnings above")
        elif not self.finished:
            say(f"stopped ({stopped}) at {self.count:,} {self.kind.unit}; to go on:")
            script = os.path.relpath(settings.ROOT / "scripts" / "train.py")
            say(f"  python {shlex.quote(script)} --resume {shlex.quote(str(self.run_dir))}")
        names = ("curve.png", "metrics.jsonl", "policy/best.msgpack", "policy/last.msgpack")
        written = [name for name in names if (self.run_dir / name).exists()]
        say(f"{seconds:.0f} s in all; written to {self.run_dir}: {', '.join(written)}")
        code = EXIT_DIVERGED if all_diverged else 0
        self.wandb.finish(code)
        os.close(self.lock)
        return code


@contextlib.contextmanager
def refusing(kind=ValueError):
    """An error of this kind raised inside is the user's to mend: shown as one line."""
    try:
        yield
    except kind as error:
        raise BadInput(str(error).splitlines()[0]) from None


def check_lengths(algo, options, source):
    """Refuses lengths that do not fit into each other, naming both numbers."""
    step_size = algo.period(options.config, source)
    check.multiple("--eval-period", options.eval_period, "the length of one iteration,", step_size)
    check.multiple("--steps", options.steps, "--eval-period", options.eval_period)
    if options.checkpoint_period is not None:
        check.multiple("--checkpoint-period", options.checkpoint_period, "--eval-period", options.eval_period)
    if options.steps >= 2**31:
        raise BadInput(f"--steps {options.steps} must be less than {2**31}; steps are counted in 32 bits")
    prefill = getattr(options.config, "prefill", 0)
    if prefill >= options.steps:
        raise BadInput(f"--steps {options.steps} must be more than --config.prefill {prefill}, which it includes")


def describe(launch: Launch, source) -> dict:
    """What decides the numbers of a launch, and what they were computed with: the content of config.json."""
    options = launch.options
    names = ("algo", "source", "steps", "seeds", "num_envs", "eval_period", "eval_episodes")
    names += ("eval_env", "demos", "init_from")
    described = {name: getattr(options, name) for name in names}
    described |= launch.kind.record(source, options, launch.source_params)
    packages = ["jax", "jaxlib", "flax", "optax", "gymnax", "brax", "orbax-checkpoint", "numpy"]
    if described.get("dataset", {}).get("eval_env", "").startswith("gym/"):
        packages += ["gymnasium", "mujoco"]
    device = jax.local_devices()[0]
    return described | {
        "source_params": launch.source_params,
        "config": dataclasses.asdict(options.config),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "git": git_revision(),
        "device": f"{device.platform} {device.device_kind}",
    }


def git_revision() -> dict | None:
    """The commit of the code, and whether files differ from it; None outside a git checkout."""
    git = lambda *words: subprocess.run(["git", *words], cwd=settings.ROOT, capture_output=True, text=True, check=True)
    try:
        changed = git("status", "--porcelain").stdout.strip()
        return {"revision": git("rev-parse", "HEAD").stdout.strip(), "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return None


def default_run_dir(options) -> Path:
    """A new folder under `runs/`, named after the time; sweep agents that start in one second get one each."""
    source = re.sub(r"[^\w.-]+", "-", settings.short(options.source))
    base = f"{options.algo}-{source}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        folder = Path("runs") / (base if number == 1 else f"{base}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if folder.exists():
                continue
        except OSError:  # the check that follows says why
            pass
        return folder


def announce(console, launch: Launch, described: dict, run_dir: Path, memory: str, resumed_from: Path | None):
    """Prints what is about to run, and every setting with its published value where that differs."""
    options, say = launch.options, lambda text: progress.say(console, text)
    with_params = lambda name, params: " ".join([name, *(f"{k}={v}" for k, v in params.items())])
    length = f"{options.steps:,} {launch.kind.unit}"
    if "dataset" in described:
        dataset = described["dataset"]
        say(f"{options.algo} on {options.source}: {length}")
        say(f"dataset: {datasets.summary(dataset['statistics'])}")
        say(f"evaluated in {with_params(dataset['eval_env'], dataset['eval_env_params'])}")
    else:
        source = with_params(options.source, launch.source_params)
        num_envs = f", {options.num_envs} environments" if options.num_envs else ""
        say(f"{options.algo} on {source}: {length}{num_envs}")
    if "demonstrations" in described:
        say(f"demonstrations {options.demos}: {datasets.summary(described['demonstrations']['statistics'])}")
    say(f"seeds {', '.join(map(str, options.seeds))}; settings: {launch.origin}, then the command line")
    published = launch.algo.Config()
    width = max(len(field.name) for field in dataclasses.fields(published))
    for field in dataclasses.fields(published):
        value, default = getattr(options.config, field.name), getattr(published, field.name)
        say(f"  {field.name:<{width}} {value}" + ("" if value == default else f"  (published {default})"))
    anneal_steps = getattr(options.config, "anneal_steps", 0)
    if 0 < anneal_steps < options.steps and "init_from" not in launch.kind.own:  # there it counts another unit
        say(f"warning: an annealed rate is 0 after anneal_steps {anneal_steps:g}, before the {length} are over")
    say(f"memory: {memory}")
    say(f"run directory: {run_dir}" + (f", going on from {resumed_from.name}" if resumed_from else ""))
    say("compiling")


def number(x) -> float | None:
    """A JSON number: NaN and infinity, which JSON has not, are null."""
    return float(x) if np.isfinite(x) else None


def finite_loss(line: dict) -> bool:
    """Whether every loss of a line of metrics is a number."""
    return all(value is not None for name, value in line.items() if name == "loss" or name.endswith("_loss"))


def cause_of_divergence(states, r: int) -> str:
    """Why the loss of run `r` is not a number, as far as its state tells."""
    env_step = getattr(states, "nonfinite_reward", None)
    if env_step is None or env_step[r] < 0:
        return "its loss is not finite"
    return f"the environment's reward at env step {env_step[r]} was not a finite number"


class Best:
    """Each run's parameters at its best evaluation so far, on the host: of greatest `eval_objective` where an algorithm
    has one, else of greatest `eval_return`; of equals the first, or the `latest`."""

    def __init__(self, path: Path, abstract_params, returns: list, latest=False):
        self.path, self.returns, self.params, self.latest = path, list(returns), None, latest
        if any(r is not None for r in returns):
            # The file may be from after the checkpoint: parameters and returns are taken together.
            self.params, header = policy.read(path, abstract_params)
            self.returns = header["best"] if "best" in header else header["eval_return"]

    def update(self, eval_returns: list, params):
        old = np.array([-np.inf if r is None else r for r in self.returns])
        new = np.array(eval_returns, float)
        better = new >= old if self.latest else new > old  # (R,)
        if self.params is None:
            self.params = jax.tree.map(np.array, params)  # copies: the device's own are donated later
        elif better.any():
            choose = lambda new, kept: np.where(better.reshape(-1, *[1] * (kept.ndim - 1)), new, kept)
            self.params = jax.tree.map(choose, jax.device_get(params), self.params)
        self.returns = [new if b else r for b, new, r in zip(better, eval_returns, self.returns, strict=True)]

    def save(self, described: dict):
        if self.params is not None:
            policy.save(self.path, self.params, described, dict(best=self.returns))
