"""Weights & Biases: one W&B run per launch, seeds aggregated as mean and IQM, and each seed's own curve."""

import os
import uuid

import numpy as np

from runner.check import BadInput
from runner.stats import iqm

# Columns of metrics.jsonl that name a line rather than measure something.
COUNTERS = ("env_steps", "gradient_steps", "sweeps")  # the first that an algorithm has is the x axis
KEYS = ("run", "seed", "chunk", *COUNTERS)


def mode_of(option: str | None) -> str:
    """What `--wandb` means here: disabled by default, on under a sweep agent."""
    if option is None and "WANDB_SWEEP_ID" in os.environ:
        return os.environ.get("WANDB_MODE", "online")
    return option or "disabled"


def check(mode: str):
    """Refuses online logging without a login, which would otherwise wait for one."""
    if mode != "online":
        return
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise BadInput("--wandb online needs a login; run `wandb login`, set WANDB_API_KEY, or use --wandb offline")


def flatten(settings: dict, prefix="") -> dict:
    """Nested settings by dotted names, as sweep files name them: `config.learning_rate`."""
    flat = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def aggregate(lines: list[dict]) -> dict:
    """The lines of one chunk, one per run, to what W&B logs: `x` (mean), `x_iqm`, and `seed_3/x`."""
    logged = {name: lines[0][name] for name in ("chunk", *COUNTERS) if name in lines[0]}
    for name in (name for name in lines[0] if name not in KEYS):
        values = [line[name] for line in lines]
        if None not in values:  # a mean over the runs that are left would flatter the setting
            logged |= {name: float(np.mean(values)), f"{name}_iqm": float(iqm(values))}
        logged |= {f"seed_{line['seed']}/{name}": line[name] for line in lines if line[name] is not None}
    return logged


class Logger:
    """Logs chunks to W&B, or nothing where it is disabled."""

    def __init__(self, mode: str, project: str, settings: dict, run_dir):
        self.run = None
        if mode == "disabled":
            return
        import wandb

        # Resuming goes on in the same W&B run, whose id the run directory keeps.
        id_file = run_dir / "wandb-id.txt"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        self.run = wandb.init(
            project=project,
            config=flatten(settings),
            dir=str(run_dir),
            mode=mode,
            name=run_dir.resolve().name,
            id=None if "WANDB_SWEEP_ID" in os.environ else id_file.read_text(),
            resume=None if "WANDB_SWEEP_ID" in os.environ else "allow",
        )

    def log(self, lines: list[dict]):
        if self.run is not None:
            logged = aggregate(lines)
            self.run.define_metric("*", step_metric=next(name for name in COUNTERS if name in logged))
            self.run.log(logged)

    def finish(self, exit_code: int):
        if self.run is not None:
            self.run.finish(exit_code=exit_code)
