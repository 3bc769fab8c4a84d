"""Files that a kill cannot leave half-written, and lines that a resume can take back.

A run directory:

    config.json            settings, versions, git revision
    metrics.jsonl          one line per run per chunk
    checkpoint/<steps>/    everything a launch continues from: states with replay and keys
    policy/last.msgpack    parameters and settings alone, to deploy or evaluate
    policy/best.msgpack    the same, each run at its best evaluation
    curve.png
"""

import json
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two launches in one folder are then not told apart
    fcntl = None

from runner.check import BadInput


def write(path: Path, data: bytes):
    """Writes a file beside its name and renames it into place: a kill leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def lock(folder: Path) -> int:
    """Takes `folder` for this process until the file descriptor that it returns is closed, or the process ends."""
    if fcntl is None:
        return os.open(os.devnull, os.O_RDONLY)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BadInput(f"{folder} is being written by another launch; nothing was changed") from None
    return descriptor


class MetricsFile:
    """`metrics.jsonl`, to which whole chunks are appended and which a resume rewinds."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def check(self, size: int):
        """Refuses a file that is shorter than when its checkpoint was written."""
        if self.size < size:
            raise BadInput(
                f"{self.path} is shorter ({self.size} bytes) than at its checkpoint ({size}); nothing was changed"
            )

    def rewind(self, size: int):
        """Drops what was written after a checkpoint, and creates the file where it is not there."""
        with open(self.path, "ab") as file:
            file.truncate(size)

    def append(self, lines: list[dict]):
        """Each line as JSON; NaN and infinity, which JSON has not, must be None."""
        with open(self.path, "a") as file:
            file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]
