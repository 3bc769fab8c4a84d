"""Checks at the door: one clear line about bad input, before anything compiles."""

import dataclasses
import math
import os
import typing
from pathlib import Path

import jax
import psutil

from envs.types import Interval


class BadInput(ValueError):
    """What the user can mend: printed as one line, without a traceback."""


def flag(name: str) -> str:
    return f"--config.{name.replace('_', '-')}"


def check(algo, config, source):
    """Refuses values outside their intervals, the wrong kind of action, and what `algo.check` refuses."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        interval = next((m for m in getattr(hints[field.name], "__metadata__", ()) if isinstance(m, Interval)), None)
        value = getattr(config, field.name)
        for x in value if isinstance(value, tuple) else (value,):
            if interval is not None and x not in interval:
                raise BadInput(f"{flag(field.name)} is {x}; it must be {interval}")
    spec = getattr(source, "spec", None)
    if spec is not None and spec.action_type not in algo.ACTIONS:
        raise BadInput(
            f"{name_of(algo)} needs {' or '.join(algo.ACTIONS)} actions, this source has {spec.action_type} ones; "
            "--list shows which go together"
        )
    if hasattr(algo, "check"):
        algo.check(config, source)


def name_of(algo) -> str:
    return algo.__name__.rpartition(".")[2]


def multiple(name: str, value: int, of: str, unit: int):
    """Raises a BadInput that names both numbers and the nearest that fits."""
    if value <= 0 or value % unit:
        fit = max(round(value / unit), 1) * unit
        raise BadInput(f"{name} {value} must be a positive multiple of {of} {unit}; {fit} is")


def tree_bytes(tree) -> int:
    """Bytes of a pytree of arrays or shape structs; a typed key counts as its words."""
    size = lambda x: (
        math.prod(x.shape) * (8 if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize)
    )
    return sum(size(x) for x in jax.tree.leaves(tree))


def available_memory() -> int:
    """Bytes that a new array may take: of the device where it reports them, else free main memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    free = psutil.virtual_memory().available
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's own limit, where there is one
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        free = min(free, max(int(text) - psutil.Process().memory_info().rss, 0))
    return free


def check_memory(carry, num_runs: int) -> str:
    """Refuses a launch that cannot fit, naming both numbers. Returns the line to print otherwise.

    Args: carry, the shape structs of everything the launch keeps on the device.
    """
    need, free = tree_bytes(carry), available_memory()
    text = f"{size(need)} for {num_runs} run{'s' * (num_runs > 1)} of {size(need / num_runs)}"
    if jax.default_backend() == "cpu":  # a checkpoint holds a second copy while it is written or read
        need *= 2
        text += ", twice that while a checkpoint is written"
    text += f"; {size(free)} available"
    if need > free:
        raise BadInput(
            f"replay and networks need {text}; lower --config.capacity, if it has one, or the number of --seeds"
        )
    return text


def size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def check_writable(folder: Path):
    """Creates `folder`, or says in one line why it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(
            f"run directory {folder} cannot be written: {error.strerror}; choose another --run-dir"
        ) from None
