"""What a launch is: the algorithm, its source, its settings, and where each setting came from.

Order of precedence, later wins: the Config's published defaults; where the source is the
algorithm's EXAMPLE, the EXAMPLE; else the fixed `value:` entries of `sweeps/<algo>/<env>.yaml`;
the command line. `--preset published` skips the middle; a preset that the algorithm names in `PRESETS`
(`--preset small`) comes after it.
"""

import dataclasses
import difflib
import importlib
import inspect
import json
import os
import re
import types
import typing
from pathlib import Path

from runner.check import BadInput

ROOT = Path(__file__).parents[1]


class Kind(typing.NamedTuple):
    """What an algorithm learns from: the name of `init`'s second parameter."""

    flag: str  # --env
    counter: str  # the field of State that `--steps` counts
    unit: str
    own: tuple[str, ...]  # options that not every kind has
    make: typing.Callable  # (options, source_params) -> (source, environment to evaluate in)
    record: typing.Callable  # (source, options, source_params) -> what config.json keeps of the source itself
    stand_in: typing.Callable  # (content of config.json) -> a source with the shapes of the one it tells of


def make_envs(options, params: dict):
    """The environments to train in and, an instance of their own, to evaluate in."""
    sizes = (options.num_envs, options.eval_episodes)
    return tuple(environment(options.algo, options.source, n, params) for n in sizes)


def one_env(saved: dict):
    return environment(saved["algo"], saved["source"], saved["num_envs"], saved["source_params"])


def environment(algo_name: str, name: str, num_envs: int, params: dict):
    """An environment as the algorithm sees it: through its own `wrap`, where it has one."""
    import envs

    env, algo = envs.make(name, num_envs, **params), load(algo_name)
    return algo.wrap(env) if hasattr(algo, "wrap") else env


def make_mdp(options, params: dict):
    """The MDP, and itself again to be evaluated in exactly."""
    from envs import mdps
    from runner.evaluate import Exact

    mdp = mdps.make(options.source, **params)
    return mdp, Exact(mdp)


def one_mdp(saved: dict):
    from envs import mdps

    return mdps.make(saved["source"], **saved["source_params"])


def make_dataset(options, params: dict):
    """The dataset, and the environments to evaluate in: its own unless `--eval-env` says another."""
    import envs
    from replay import datasets

    dataset = datasets.load(options.source)
    name, params = evaluated_in(dataset, options, params)
    env = envs.evaluation(name, options.eval_episodes, **params)
    ours, its = (datasets.shapes(s) for s in (dataset.spec, env.spec))
    if ours != its:
        raise BadInput(f"dataset {dataset.name} has {ours}; {name} has {its}; choose another --eval-env")
    return dataset, env


def evaluated_in(dataset, options, params: dict) -> tuple[str, dict]:
    """Id and parameters of the environment that what is learned from `dataset` is evaluated in."""
    name = options.eval_env or dataset.env
    if name is None:
        raise BadInput(f"dataset {dataset.name} does not say which environment it is of; choose one by --eval-env")
    own = dict(dataset.env_params) if name == dataset.env else {}
    if name.startswith("gym/") and dataset.name.startswith("minari-flat:"):
        own["flatten"] = True
    return name, own | params


def record_dataset(dataset, options, params: dict) -> dict:
    from replay import datasets
    from runner.checkpoint import digest

    name, params = evaluated_in(dataset, options, params)
    return {
        "dataset": {
            "eval_env": name,
            "eval_env_params": params,
            "spec": datasets.spec_to_json(dataset.spec),
            "statistics": datasets.statistics(dataset),
            "digest": digest(dataset.transitions),
        }
    }


def make_env_and_data(options, params: dict):
    """The dataset and the environment to go on in, its own unless `--eval-env` says another; and one to evaluate in."""
    import envs
    from envs.types import EnvAndData

    dataset, eval_env = make_dataset(options, params)
    name, params = evaluated_in(dataset, options, params)
    if name.startswith("gym/"):
        raise BadInput(f"{name} runs on the host and cannot be trained in; choose another --eval-env")
    return EnvAndData(envs.make(name, options.num_envs, **params), dataset), eval_env


def make_env_and_demos(options, params: dict):
    """The environment and, where `--demos` names some, demonstrations of it; and an environment to evaluate in."""
    from envs.types import EnvAndData
    from replay import datasets

    env, eval_env = make_envs(options, params)
    if options.demos is None:
        return EnvAndData(env, None), eval_env
    dataset = datasets.load(options.demos)
    ours, its = (datasets.shapes(s) for s in (dataset.spec, env.spec))
    if ours != its:
        raise BadInput(f"demos {dataset.name} have {ours}; {options.source} has {its}; choose others by --demos")
    if dataset.env not in (None, options.source):
        raise BadInput(f"demos {dataset.name} are of {dataset.env}, not of {options.source}; choose others by --demos")
    return EnvAndData(env, dataset), eval_env


def record_demos(source, options, params: dict) -> dict:
    from replay import datasets
    from runner.checkpoint import digest

    if source.dataset is None:
        return {}
    found = dict(statistics=datasets.statistics(source.dataset), digest=digest(source.dataset.transitions))
    return {"demonstrations": found}


def env_without_demos(saved: dict):
    from envs.types import EnvAndData

    return EnvAndData(one_env(saved), None)


def env_and_zeros(saved: dict):
    import envs
    from envs.types import EnvAndData

    data = saved["dataset"]
    return EnvAndData(
        envs.make(data["eval_env"], saved["num_envs"], **data["eval_env_params"]), dataset_of_zeros(saved)
    )


def dataset_of_zeros(saved: dict):
    from replay import datasets

    return datasets.zeros(datasets.spec_from_json(saved["dataset"]["spec"]))


KINDS = {
    "env": Kind(
        flag="env",
        counter="env_steps",
        unit="env steps",
        own=("num_envs",),
        make=make_envs,
        record=lambda *_: {},
        stand_in=one_env,
    ),
    "dataset": Kind(
        flag="dataset",
        counter="gradient_steps",
        unit="gradient steps",
        own=("eval_env",),
        make=make_dataset,
        record=record_dataset,
        stand_in=dataset_of_zeros,
    ),
    "env_and_data": Kind(
        flag="dataset",
        counter="env_steps",
        unit="env steps",
        own=("num_envs", "eval_env", "init_from"),
        make=make_env_and_data,
        record=lambda source, options, params: record_dataset(source.dataset, options, params),
        stand_in=env_and_zeros,
    ),
    "env_and_demos": Kind(
        flag="env",
        counter="env_steps",
        unit="env steps",
        own=("num_envs", "demos"),
        make=make_env_and_demos,
        record=record_demos,
        stand_in=env_without_demos,
    ),
    "mdp": Kind(
        flag="mdp",
        counter="sweeps",
        unit="sweeps",
        own=(),
        make=make_mdp,
        record=lambda *_: {},
        stand_in=one_mdp,
    ),
}


def algorithms() -> list[str]:
    """The names that `--algo` takes: the files of `algos/`."""
    return sorted(p.stem for p in (ROOT / "algos").glob("*.py") if p.stem != "__init__")


def spec_of(algo, source):
    """The Spec that `act` takes. An algorithm's own `wrap` is around an environment already, but not around an MDP."""
    wrapped = kind_of(algo).flag == "mdp" and hasattr(algo, "wrap")
    return algo.wrap(source).spec if wrapped else source.spec


def load(name: str) -> types.ModuleType:
    if name not in algorithms():
        close = difflib.get_close_matches(name, algorithms(), 3, 0)
        raise BadInput(f"unknown algorithm {name!r}; closest: {', '.join(close)}")
    return importlib.import_module(f"algos.{name}")


def kind_of(algo) -> Kind:
    """By the name of the second parameter of the algorithm's `init`."""
    return KINDS[list(inspect.signature(algo.init).parameters)[1]]


def short(source: str) -> str:
    """What a source is called in the names of other files: itself, or its stem where it is a file."""
    return Path(source).stem if os.path.isfile(os.path.expanduser(source)) else source


def preset_path(algo_name: str, source: str) -> Path:
    """The sweep file whose fixed values tune `algo_name` on `source`: `Breakout-MinAtar` is `minatar_breakout.yaml`."""
    suite, _, name = short(source).lower().rpartition("/")
    name = re.sub(r"-v\d+$", "", name)
    name, _, family = name.partition("-")
    parts = [part for part in (suite, family, name) if part]
    return ROOT / "sweeps" / algo_name / f"{'_'.join(parts).replace('/', '_').replace('-', '_')}.yaml"


def preset(path: Path) -> dict:
    """The fixed `value:` entries of a W&B sweep file, by their names there (`config.learning_rate`)."""
    import yaml

    parameters = yaml.safe_load(path.read_text())["parameters"]
    return {name: entry["value"] for name, entry in parameters.items() if "value" in entry}


def coerce(value, annotation, name: str):
    """A value from YAML or JSON as a field's type: lists to tuples, `1e-3` (a string in YAML) to a float."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    try:
        if typing.get_origin(annotation) is tuple:
            return tuple(coerce(x, typing.get_args(annotation)[0], name) for x in value)
        if annotation is bool and not isinstance(value, bool):
            raise ValueError
        if annotation is int and int(value) != float(value):
            raise ValueError
        return annotation(value) if annotation in (int, float, bool, str) else value
    except (TypeError, ValueError):
        wanted = getattr(annotation, "__name__", annotation)
        raise BadInput(f"{name} is {value!r}; it must be of type {wanted}") from None


def replace(config, values: dict, origin: str):
    """`config` with some fields replaced by name, each as its own type. Raises BadInput for an unknown field."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for name in values:
        if name not in hints:
            close = difflib.get_close_matches(name, hints, 1, 0)
            raise BadInput(f"{origin}: no setting {name!r}; did you mean {close[0]!r}?")
    return dataclasses.replace(config, **{k: coerce(v, hints[k], f"{origin}: {k}") for k, v in values.items()})


def presets(algo) -> tuple[str, ...]:
    """What `--preset` takes for this algorithm."""
    return ("tuned", "published", *getattr(algo, "PRESETS", {}))


def defaults(algo, algo_name: str, source: str, preset_name: str = "tuned") -> tuple[dict, str]:
    """What the flags default to for this algorithm on this source, and where that came from, in words."""
    if preset_name not in presets(algo):
        raise BadInput(f"{algo_name} has no --preset {preset_name}; choose one of {', '.join(presets(algo))}")
    values, origin = tuned(algo, algo_name, source, preset_name != "published")
    if preset_name in ("tuned", "published"):
        return values, origin
    changed = dataclasses.replace(values["config"], **algo.PRESETS[preset_name])
    return values | dict(config=changed), f"{origin}, then the preset {preset_name}"


def tuned(algo, algo_name: str, source: str, use_preset: bool) -> tuple[dict, str]:
    """The defaults without a preset of the algorithm's own."""
    example = algo.EXAMPLE
    values = dict(
        source=source,
        steps=example.steps,
        num_envs=example.num_envs if "num_envs" in kind_of(algo).own else None,
        eval_period=example.eval_period,
        seeds=example.seeds,
        config=algo.Config(),
    )
    if not use_preset:
        return values, "published defaults"
    if source == example.source:
        return values | dict(config=example.config), "the algorithm's EXAMPLE"
    path = preset_path(algo_name, source)
    if not path.exists():
        return values, f"published defaults (no {path.relative_to(ROOT)})"
    fixed = {name.replace("-", "_"): value for name, value in preset(path).items()}
    origin = str(path.relative_to(ROOT))
    named = lambda prefix: {k.removeprefix(prefix): v for k, v in fixed.items() if k.startswith(prefix)}
    config, values["env_params"] = named("config."), named("env_params.")
    known = ("algo", kind_of(algo).flag, "steps", "seeds", "num_envs", "eval_period", "eval_env", "demos")
    for name in fixed:
        if name not in known and not name.startswith(("config.", "env_params.")):
            raise BadInput(f"{origin}: no setting {name!r}; there are {', '.join(known)}, config.* and env_params.*")
    values["config"] = replace(algo.Config(), config, origin)
    for name in ("steps", "num_envs", "eval_period"):
        if name in fixed and values[name] is not None:
            values[name] = coerce(fixed[name], int, f"{origin}: {name}")
    for name in ("eval_env", "demos"):
        if name in fixed:
            values[name] = fixed[name]
    if "seeds" in fixed:
        values["seeds"] = coerce(fixed["seeds"], tuple[int, ...], f"{origin}: seeds")
    return values, origin


# What a resume reads of config.json.
WRITTEN = ("algo", "source", "source_params", "seeds", "config", "steps", "num_envs", "eval_period", "eval_episodes")


def read(run_dir: Path) -> dict:
    """The settings in `config.json`. Raises BadInput naming the file where they are not there or not whole."""
    path = run_dir / "config.json"
    try:
        settings = json.loads(path.read_text())
        missing = [key for key in WRITTEN if key not in settings]
        if not missing:
            for name in ("steps", "num_envs", "eval_period", "eval_episodes"):
                if (name, settings[name]) != ("num_envs", None):  # as it is where the source is a dataset
                    coerce(settings[name], int, name)
            coerce(settings["seeds"], tuple[int, ...], "seeds")
            dict(**settings["config"], **settings["source_params"])
    except (FileNotFoundError, NotADirectoryError):
        raise BadInput(f"{path} does not exist: {run_dir} is not a run directory") from None
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path} cannot be read ({error}); nothing was changed") from None
    if missing:
        raise BadInput(f"{path} lacks {', '.join(missing)}: not a Bellmax run directory; nothing was changed")
    return settings
