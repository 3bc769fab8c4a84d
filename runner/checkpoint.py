"""Run directories: what a launch writes, and how it is found again.

    config.json            settings, versions, git revision; written once, before anything runs
    metrics.jsonl          one line per run per chunk
    checkpoint/<steps>/    everything a launch continues from (orbax): states with replay and keys
    policy/last.msgpack    parameters and settings alone, to deploy or evaluate
    policy/best.msgpack    the same, each run at its best evaluation
    curve.png

Every file is written beside its name and renamed into place, so a kill leaves the old one or the
new one and never half of one.
"""

import json
import os
import shutil
import zlib
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import serialization

from runner.check import BadInput


def write_atomic(path: Path, data: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def digest(tree) -> int:
    """A checksum over every leaf, to tell a damaged checkpoint from a whole one."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        total = zlib.crc32(np.ascontiguousarray(leaf), total)
    return total


def folder(run_dir: Path) -> Path:
    return run_dir / "checkpoint"


def latest(run_dir: Path) -> Path | None:
    """The newest whole checkpoint; a half-written one has a name that is not a number."""
    steps = [p for p in folder(run_dir).glob("*") if p.name.isdigit()]
    return max(steps, key=lambda p: int(p.name), default=None)


def save(run_dir: Path, step: int, carry, meta: dict):
    """Writes `carry` and `meta` as the newest checkpoint, then removes older ones and what a kill left half-written.

    Args: step, the counter that names it; meta, small and json.
    """
    target = folder(run_dir) / str(step)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        items = ocp.args.Composite(
            carry=ocp.args.StandardSave(carry), meta=ocp.args.JsonSave({**meta, "digest": digest(carry)})
        )
        checkpointer.save(target.absolute(), items, force=True)  # writes a temporary folder and renames it
    for other in folder(run_dir).iterdir():
        if other != target:
            shutil.rmtree(other)


def restore(path: Path, abstract_carry) -> tuple:
    """The carry and meta of a checkpoint, bit for bit.

    Args: abstract_carry, shape structs of the carry.
    Raises: BadInput naming the folder where it is damaged or of another shape; nothing is changed.
    """
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding()), abstract_carry)
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            items = ocp.args.Composite(carry=ocp.args.StandardRestore(target), meta=ocp.args.JsonRestore())
            restored = checkpointer.restore(path.absolute(), items)
        carry, meta = restored["carry"], restored["meta"]
        whole = meta["digest"] == digest(carry)
    except Exception as error:  # orbax and tensorstore raise many kinds for a damaged folder
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise BadInput(f"checkpoint {path} is damaged or of another shape ({reason}); nothing was changed") from error
    if not whole:
        raise BadInput(f"checkpoint {path} is damaged (its checksum does not match); nothing was changed")
    return carry, meta


def _sharding():
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def save_policy(path: Path, params, settings: dict, extra: dict):
    """Writes parameters with leading axis R, the settings and `extra` (json) as one small file."""
    header = json.dumps({"settings": settings, **extra})
    tree = {"header": header, "params": serialization.to_state_dict(jax.device_get(params))}
    write_atomic(path, serialization.msgpack_serialize(tree))


def load_policy(path: Path, abstract_params) -> tuple:
    """Parameters as `abstract_params` is built, and the header. Raises BadInput naming the file where it is damaged."""
    try:
        tree = serialization.msgpack_restore(Path(path).read_bytes())
        template = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_params)
        return serialization.from_state_dict(template, tree["params"]), json.loads(tree["header"])
    except FileNotFoundError:
        raise BadInput(f"policy file {path} does not exist") from None
    except Exception as error:  # msgpack raises many kinds for a damaged file
        raise BadInput(f"policy file {path} is damaged or of another shape ({type(error).__name__})") from error
