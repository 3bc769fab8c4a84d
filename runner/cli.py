"""The command line of `scripts/train.py`, built by tyro from the algorithm's own Config.

Takes what people type (`--config.hidden 256 256`) and what W&B agents pass
(`--config.hidden=[256, 256]`, `--config.huber=False`, `--steps=1e6`).
"""

import argparse
import ast
import dataclasses
import math
import re
import sys
import types
import typing
from pathlib import Path
from typing import Annotated, Literal

import tyro

from runner import settings
from runner.check import BadInput

SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+|[+-]?\d+\.0+")
# Flags whose value is text: taken as it stands.
TEXT = (
    "--run-dir",
    "--resume",
    "--env",
    "--dataset",
    "--mdp",
    "--eval-env",
    "--demos",
    "--init-from",
    "--wandb-project",
)
WORDS = {"true": "True", "false": "False", "null": "None", "none": "None"}


def normalise(argv: list[str]) -> list[str]:
    """Brings every argument to the one form that tyro takes.

    `--a=b` becomes `--a b`; a list in brackets becomes its elements; `1e6` and `3.0` become whole
    numbers (which a float also accepts); `true`, `false` and `null` become Python's words.
    """
    tokens = []
    for token in argv:
        if token.startswith("--") and "=" in token:
            tokens += token.split("=", 1)
        elif tokens and not is_text(tokens[:-1]) and tokens[-1][:1] in ("[", "(") and tokens[-1][-1:] not in ("]", ")"):
            tokens[-1] += token  # a bracketed list that a shell split at its spaces
        else:
            tokens.append(token)
    return [v for i, token in enumerate(tokens) for v in ([token] if is_text(tokens[:i]) else expand(token))]


def is_text(before: list[str]) -> bool:
    """Whether what follows these arguments is the value of a flag that takes text, or an environment parameter."""
    flag = before[-1].replace("_", "-") if before else ""
    return flag in TEXT or flag.startswith("--env-params.")


def expand(token: str) -> list[str]:
    """One argument to its normal form, which is several for a bracketed list."""
    token = token.strip()
    if token[:1] in ("[", "(") and token[-1:] in ("]", ")"):
        return [value for item in re.split(r"[\s,]+", token[1:-1]) if item for value in expand(item.strip("'\""))]
    if SCIENTIFIC.fullmatch(token) and math.isfinite(float(token)) and float(token).is_integer():
        return [str(int(float(token)))]
    return [WORDS.get(token.lower(), token)]


def split_env_params(tokens: list[str]) -> tuple[list[str], dict]:
    """Takes `--env-params.NAME VALUE` out of the arguments; values are Python literals or else strings."""
    rest, params = [], {}
    tokens = iter(tokens)
    for token in tokens:
        if not token.startswith("--env-params."):
            rest.append(token)
            continue
        value = next(tokens, None)
        if value is None or value.startswith("--"):
            raise BadInput(f"{token} needs a value, for example {token} 0.7")
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            pass
        name = token.removeprefix("--env-params.").replace("-", "_")
        if name in ("name", "num_envs"):
            raise BadInput(f"{token} is not a parameter of the environment; use --env and --num-envs")
        params[name] = value
    return rest, params


def options(kind: settings.Kind, algo: types.ModuleType):
    """The dataclass that the flags fill, for one kind of source and one algorithm."""
    config_type, preset_name = algo.Config, Literal[settings.presets(algo)]
    fixed = tyro.conf.Fixed, tyro.conf.SuppressFixed
    own = lambda name, of_type: of_type if name in kind.own else Annotated[of_type | None, *fixed]

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Trains an algorithm, evaluates it and writes what it learned to a run directory.

        `--env-params.NAME VALUE` sets a parameter of the environment itself, for example length 0.7; of that to
        evaluate in where an algorithm learns from a dataset.
        """

        algo: str
        """File of algos/ to train."""
        source: Annotated[str, tyro.conf.arg(name=kind.flag)]
        """What it learns from; --list shows all."""
        steps: int
        """Length of training: env steps over all environments, prefill included; from a dataset, gradient steps; of
        dynamic programming, sweeps."""
        seeds: tuple[int, ...]
        """One run each, all trained at once."""
        num_envs: own("num_envs", int)
        """Environments stepped at once by each run."""
        eval_period: int
        """Steps between evaluations; a multiple of what one iteration of the algorithm makes."""
        config: config_type
        """The algorithm's own settings, each with its unit and published value."""
        eval_env: own("eval_env", str | None) = None
        """Environment to evaluate in, Gymnasium's too (gym/Hopper-v5); None: the dataset's own."""
        demos: own("demos", str | None) = None
        """Dataset of demonstrations in the same environment; None: learn without."""
        init_from: own("init_from", str | None) = None
        """Run directory whose networks to start from, in place of --config.offline-steps; same seeds and network."""
        eval_episodes: int = 16
        """Episodes averaged at each evaluation, played with `act`."""
        checkpoint_period: int | None = None
        """Steps between checkpoints, a multiple of eval-period; None: about once a minute. The end writes one too."""
        preset: preset_name = "tuned"
        """Defaults: tuned for this source where that exists (EXAMPLE, sweeps/), published, or the algorithm's own."""
        run_dir: str | None = None
        """Where to write; None: runs/ALGO-SOURCE-TIME in the current folder."""
        resume: str | None = None
        """Run directory to continue. Takes its settings from there; a larger --steps prolongs it."""
        time_limit: float | None = None
        """Seconds of wall clock after which to write a checkpoint and stop."""
        wandb: Literal["disabled", "offline", "online"] | None = None
        """Weights & Biases. None: disabled, but under a sweep agent online (or what WANDB_MODE says)."""
        wandb_project: str = "bellmax"
        """Project to log to; a sweep's own overrides it."""

    return Options


def overview() -> str:
    return (
        "usage: python scripts/train.py --algo NAME [--env ID | --dataset NAME | --mdp NAME] [--seeds 0 1 2] "
        "[--config.FIELD VALUE] ...\n\n"
        f"algorithms: {', '.join(settings.algorithms())}\n\n"
        "  --algo NAME                 trains NAME on its example task\n"
        "  --algo NAME --help          every setting of NAME, with unit and published value\n"
        "  --env-params.FIELD VALUE    a parameter of the environment itself, for example length 0.7\n"
        "  --resume RUN_DIR            continues a run, bit for bit\n"
        "  --dataset NAME_OR_FILE      what an offline algorithm learns from; --eval-env ID where it is evaluated\n"
        "  --list                      algorithms, environments and datasets with their action types"
    )


def known(tokens: list[str], *flags: str) -> argparse.Namespace:
    """The flags that decide what the other flags are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in flags:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", default=None)
    try:
        return parser.parse_known_args([t for t in tokens if t not in ("-h", "--help")])[0]
    except argparse.ArgumentError as error:
        raise BadInput(str(error)) from None


class Launch(typing.NamedTuple):
    """What a command line asks for."""

    algo: types.ModuleType
    kind: settings.Kind
    options: typing.Any
    source_params: dict
    origin: str  # where the defaults came from, in words


def parse(argv: list[str]) -> Launch:
    """Prints and exits where only help was asked for, or where tyro refuses an argument. Raises BadInput."""
    tokens, env_params = split_env_params(normalise(argv))
    first = known(tokens, "algo", "preset", "resume")
    if first.resume is not None:
        return parse_resume(tokens, env_params, Path(first.resume), first.algo)
    if first.algo is None:
        if tokens and not {"-h", "--help"} & set(tokens):
            raise BadInput(f"--algo is missing; one of: {', '.join(settings.algorithms())}")
        print(overview())
        sys.exit(0)
    algo = settings.load(first.algo)
    kind = settings.kind_of(algo)
    for name in (name for other in settings.KINDS.values() for name in (other.flag, *other.own)):
        flag = name.replace("_", "-")
        if name not in (kind.flag, *kind.own) and getattr(known(tokens, flag), name) is not None:
            raise BadInput(f"{first.algo} learns from a source given by --{kind.flag}; --{flag} does not apply to it")
    source = getattr(known(tokens, kind.flag), kind.flag) or algo.EXAMPLE.source
    values, origin = settings.defaults(algo, first.algo, source, first.preset or "tuned")
    env_params = values.pop("env_params", {}) | env_params
    options = fill(kind, algo, tokens, dict(algo=first.algo, **values))
    if options.init_from is not None:  # was learned already
        if getattr(known(tokens, "config.offline-steps"), "config.offline_steps") is not None:
            raise BadInput("--init-from takes the place of the offline phase; leave --config.offline-steps out")
        options = dataclasses.replace(options, config=dataclasses.replace(options.config, offline_steps=0))
    return Launch(algo, kind, options, env_params, origin)


# What may differ between a run and its continuation: how long, how it is watched and saved.
FREE_ON_RESUME = ("resume", "steps", "time_limit", "checkpoint_period", "wandb", "wandb_project")


def parse_resume(tokens, env_params, run_dir: Path, algo_name) -> Launch:
    """The launch that a run directory was written by, with the few flags that may change."""
    saved = settings.read(run_dir.expanduser())
    if known(tokens, "run-dir").run_dir is not None:
        raise BadInput("--resume writes to the directory it continues; leave --run-dir out")
    if known(tokens, "preset").preset is not None:
        raise BadInput(f"--resume takes its settings from {run_dir}; leave --preset out")
    if env_params or algo_name not in (None, saved["algo"]):
        raise BadInput(f"--resume takes the algorithm ({saved['algo']}) and environment from {run_dir}")
    algo = settings.load(saved["algo"])
    kind = settings.kind_of(algo)
    names = ("algo", "source", "steps", "num_envs", "eval_period", "eval_env", "demos", "init_from", "eval_episodes")
    values = {name: saved.get(name) for name in names}
    config = settings.replace(algo.Config(), saved["config"], str(run_dir / "config.json"))
    before = dict(**values, seeds=tuple(saved["seeds"]), config=config)
    options = fill(kind, algo, tokens, before)
    for field in dataclasses.fields(options):
        if field.name in before and field.name not in FREE_ON_RESUME:
            old, new = before[field.name], getattr(options, field.name)
            if field.name == "config":
                names = [f.name for f in dataclasses.fields(old) if getattr(old, f.name) != getattr(new, f.name)]
                if names:
                    raise BadInput(
                        f"--resume continues with --config.{names[0].replace('_', '-')} {getattr(old, names[0])}, "
                        f"not {getattr(new, names[0])}; start a new run to change it"
                    )
            elif old != new:
                raise BadInput(f"--resume continues with {field.name} {old}, not {new}; start a new run to change it")
    if options.steps < saved["steps"]:
        raise BadInput(f"--steps {options.steps} is less than the {saved['steps']} of {run_dir}; only more is possible")
    return Launch(algo, kind, options, saved["source_params"], str(run_dir / "config.json"))


def fill(kind, algo, tokens, values: dict):
    """The options: tyro's reading of the arguments over the default values, and checks on each alone."""
    options_type = options(kind, algo)
    config = (tyro.conf.FlagConversionOff,)
    filled = tyro.cli(options_type, args=tokens, default=options_type(**values), prog="train.py", config=config)
    seeds = set(filled.seeds)
    if not seeds or not 0 <= min(seeds) <= max(seeds) < 2**31 or len(seeds) < len(filled.seeds):
        raise BadInput(f"--seeds {filled.seeds} must be different whole numbers from 0 to 2^31 - 1, at least one")
    for name in ("num_envs", "eval_episodes", "time_limit"):
        value = getattr(filled, name)
        if value is not None and not value > 0:
            raise BadInput(f"--{name.replace('_', '-')} is {value}; it must be positive")
    return filled
