"""Checkpoints: the whole state of a launch, replay and keys included, written by orbax and read back bit for bit."""

import shutil
import zlib
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from runner.check import BadInput


def digest(tree) -> int:
    """A checksum over every leaf, to tell a damaged checkpoint from a whole one."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        total = zlib.crc32(np.ascontiguousarray(leaf), total)
    return total


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint; one that a kill left half-written has a name that is not a number."""
    return max((p for p in folder.glob("*") if p.name.isdecimal()), key=lambda p: int(p.name), default=None)


def without_empty(tree):
    """Leaves that hold no numbers, which orbax refuses to write, as one zero."""
    return jax.tree.map(lambda x: x if x.size else np.zeros(1, x.dtype), tree)


def save(folder: Path, step: int, carry, meta: dict):
    """Writes `carry` and `meta` as `folder/<step>`, then removes older ones and what a kill left half-written.

    Args: step, the counter that names it; meta, small and json.
    """
    target = folder / str(step)
    items = ocp.args.Composite(
        carry=ocp.args.StandardSave(without_empty(carry)), meta=ocp.args.JsonSave({**meta, "digest": digest(carry)})
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(target.absolute(), items)  # a temporary folder, renamed when whole
    for other in folder.iterdir():
        if other != target and other.is_dir():
            shutil.rmtree(other)


def restore(path: Path, abstract_carry) -> tuple:
    """The carry and meta of a checkpoint, bit for bit.

    Args: abstract_carry, shape structs of the carry.
    Raises: BadInput naming the folder where it is damaged or of another shape; nothing is changed.
    """
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shape = lambda x: x.shape if x.size else (1,)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape(x), x.dtype, sharding=sharding), abstract_carry)
    items = ocp.args.Composite(carry=ocp.args.StandardRestore(target), meta=ocp.args.JsonRestore())
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(path.absolute(), items)
        empty = lambda x, wanted: x if wanted.size else jax.numpy.zeros(wanted.shape, wanted.dtype)
        carry, meta = jax.tree.map(empty, restored["carry"], abstract_carry), restored["meta"]
        whole = meta["digest"] == digest(carry)
    except Exception as error:  # orbax and tensorstore raise many kinds for a damaged folder
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise BadInput(f"checkpoint {path} is damaged or of another shape ({reason}); nothing was changed") from error
    if not whole:
        raise BadInput(f"checkpoint {path} is damaged (its checksum does not match); nothing was changed")
    return carry, meta
