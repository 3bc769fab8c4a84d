"""Policy files: the parameters of a launch with everything needed to act with them, small enough to copy about.

algo, config, spec, params = policy.load("runs/iqn-CartPole-v1-.../policy/best.msgpack", run=0)
action = algo.act(config, spec, params, obs[None], key)[0]
"""

import json
import types
from pathlib import Path

import jax
import numpy as np
from flax import serialization

from runner import check, files, settings
from runner.check import BadInput


def save(path: Path, params, described: dict, extra: dict):
    """Writes parameters with leading axis R, the content of config.json and `extra` (json) as one file, atomically."""
    tree = {
        "header": json.dumps({"settings": described, **extra}),
        "params": serialization.to_state_dict(jax.device_get(params)),
    }
    files.write(path, serialization.msgpack_serialize(tree))


def read(path: Path, abstract_params) -> tuple:
    """All runs' parameters, built as `abstract_params` is, and the header. Raises BadInput naming the file."""
    try:
        tree = serialization.msgpack_restore(Path(path).read_bytes())
        template = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_params)
        return serialization.from_state_dict(template, tree["params"]), json.loads(tree["header"])
    except FileNotFoundError:
        raise BadInput(f"policy file {path} does not exist") from None
    except Exception as error:  # msgpack raises many kinds for a damaged file
        raise BadInput(f"policy file {path} is damaged or of another shape ({type(error).__name__})") from error


def header(path: Path) -> dict:
    """What a policy file says beside its parameters: its settings. Raises BadInput naming the file."""
    try:
        return json.loads(serialization.msgpack_restore(Path(path).read_bytes())["header"])
    except Exception as error:
        raise BadInput(f"policy file {path} cannot be read ({type(error).__name__})") from error


def environment(path: Path) -> tuple[str, dict]:
    """Id and parameters of the environment that a policy was evaluated in."""
    saved = header(path)["settings"]
    if "dataset" in saved:
        return saved["dataset"]["eval_env"], saved["dataset"]["eval_env_params"]
    if settings.kind_of(settings.load(saved["algo"])).flag == "mdp":
        return f"mdp/{saved['source']}", saved["source_params"]
    return saved["source"], saved["source_params"]


def own_environment(path: Path, num_envs: int, name: str | None = None, params: dict = types.MappingProxyType({})):
    """`num_envs` copies of the environment that a policy was evaluated in, as its algorithm sees it, and its id.

    Args: name, another environment's id; params, in place of the environment's own. Raises BadInput.
    """
    import envs

    own_name, own_params = environment(path)
    params = (dict(own_params) if name in (None, own_name) else {}) | dict(params)
    name = name or own_name
    algo = settings.load(header(path)["settings"]["algo"])
    try:
        env = envs.evaluation(name, num_envs, **params)
    except ValueError as error:
        raise BadInput(str(error).splitlines()[0]) from None
    if hasattr(algo, "begin") and hasattr(env, "episodes"):
        raise BadInput(f"{check.name_of(algo)} begins each episode in its own way, which {name} cannot do")
    return (algo.wrap(env) if hasattr(algo, "wrap") else env), name


def find(path: Path) -> Path:
    """A policy file, or that of a run directory's best parameters. Raises BadInput where there is none."""
    path = Path(path).expanduser()
    found = path / "policy" / "best.msgpack" if path.is_dir() else path
    if not found.is_file():
        raise BadInput(f"{path} is no policy file and no run directory with policy/best.msgpack")
    return found


def load(path: Path, run: int = 0) -> tuple:
    """The algorithm's module, its Config, the Spec and one run's parameters: what `act` takes."""
    saved = header(path)["settings"]
    if not 0 <= run < len(saved["seeds"]):
        raise BadInput(f"policy file {path} has runs 0 to {len(saved['seeds']) - 1}, not {run}")
    algo = settings.load(saved["algo"])
    config = settings.replace(algo.Config(), saved["config"], str(path))
    source = settings.kind_of(algo).stand_in(saved)
    key = jax.eval_shape(jax.random.key, 0)
    abstract = jax.eval_shape(lambda key: algo.init(config, source, key), key).params
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(saved["seeds"]), *x.shape), x.dtype), abstract)
    params, _ = read(path, stacked)
    return algo, config, settings.spec_of(algo, source), jax.tree.map(lambda x: x[run], params)
