"""Writes a dataset of what policies do in their environment: `python scripts/collect.py --policy FILE --out FILE.npz`.

`--policy random --env ID` acts at random; several policies share the transitions equally, `random` among them.
"""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import tyro

import envs
from replay import builtin, datasets, readers
from runner import check, cli, policy
from runner.check import BadInput


@dataclass(frozen=True)
class Options:
    """Writes what policies do in their environment as a dataset, a .npz file.

    `--env-params.NAME VALUE` sets a parameter of the environment; without, it is as in the policies' training.
    """

    policy: tuple[str, ...]
    """Files that training wrote (policy/best.msgpack), or `random`; each makes an equal part."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE.npz")]
    """File to write."""
    steps: int = 100_000
    """Transitions in all; what follows an environment's last finished episode is left out."""
    run: int = 0
    """Which run, counted from 0, of a policy file."""
    num_envs: int = 16
    """Environments stepped at once."""
    seed: int = 0
    """All randomness comes from it."""
    sample: bool = False
    """Draw from the policy (`explore`) instead of its likeliest action (`act`)."""
    env: str | None = None
    """Environment id; None: that of the policies."""
    minari: str | None = None
    """Also write a Minari dataset of this id (extra `offline`)."""
    overwrite: bool = False
    """Replace a file that is there."""


def environment(options: Options, env_params: dict) -> tuple[str, dict]:
    """Id and parameters of the one environment to act in."""
    known = [policy.environment(path) for path in options.policy if path != "random"]
    if options.env is None and not known:
        raise BadInput("--policy random needs --env")
    if options.env is None and any(k != known[0] for k in known):
        raise BadInput(f"these policies are of several environments, {known}; choose one by --env")
    name = options.env or known[0][0]
    return name, dict(known).get(name, {}) | env_params


def behaviour(path: str, options: Options, spec):
    """A function act(params, obs, key) -> action, and the params."""
    if path == "random":
        return builtin.uniform(spec), ()
    algo, config, own_spec, params = policy.load(path, options.run)
    if hasattr(algo, "begin"):
        raise BadInput(f"{check.name_of(algo)} begins each episode in its own way, which --policy does not do yet")
    own, its = datasets.shapes(own_spec), datasets.shapes(spec)
    if own != its:
        raise BadInput(f"{path} is for {own}; the environment has {its}")
    name = "explore" if options.sample else "act"
    if not hasattr(algo, name):
        raise BadInput(f"{check.name_of(algo)} has no {name}; leave --sample out, for its likeliest action")
    return lambda params, obs, key: getattr(algo, name)(config, spec, params, obs, key), params


def check_writable(path: Path):
    """Creates the folder of `path`. Raises BadInput where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {path} cannot be written: {error.strerror}; choose another") from None
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise BadInput(f"--out {path} cannot be written; choose another")


def collect(options: Options, env_params: dict) -> datasets.Dataset:
    """Acts, and writes the file. Raises BadInput."""
    if Path(options.out).suffix != ".npz":
        raise BadInput(f"--out {options.out} must end in .npz")
    if Path(options.out).exists() and not options.overwrite:
        raise BadInput(f"{options.out} is there already; choose another --out, or --overwrite")
    if not options.policy:
        raise BadInput("--policy names nothing; give policy files, or random")
    if not 0 <= options.seed < 2**31:
        raise BadInput(f"--seed {options.seed} must be from 0 to 2^31 - 1")
    if options.steps < 1:
        raise BadInput(f"--steps is {options.steps}; it must be at least 1")
    if options.minari:
        readers.check_minari(options.minari)
    name, params = environment(options, env_params)
    try:
        env = envs.make(name, options.num_envs, **params)
    except ValueError as error:
        raise BadInput(str(error).splitlines()[0]) from None
    length = math.ceil(options.steps / (len(options.policy) * options.num_envs))
    num_transitions = len(options.policy) * options.num_envs * length
    # What the roll-outs were and what they are joined to.
    datasets.check_fits(options.out, num_transitions * check.tree_bytes(datasets.one_of(env.spec)), copies=2)
    behaviours = [behaviour(path, options, env.spec) for path in options.policy]
    check_writable(Path(options.out))

    parts = []
    for i, (act, act_params) in enumerate(behaviours):
        key = jax.random.fold_in(jax.random.key(options.seed), i)
        parts.append(datasets.episodes(datasets.roll_out(env, act, act_params, key, length)))
    dataset = datasets.admit(datasets.join(parts), env.spec, options.out, name, params)
    provenance = dict(vars(options), transitions=[len(part.reward) for part in parts])
    datasets.save(options.out, dataset, provenance, options.overwrite)
    if options.minari:
        readers.export_minari(dataset, options.minari, provenance)
    return dataset


def main(argv: list[str]) -> int:
    try:
        tokens, env_params = cli.split_env_params(cli.normalise(argv))
        options = tyro.cli(Options, args=tokens, prog="collect.py")
        dataset = collect(options, env_params)
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {datasets.summary(datasets.statistics(dataset))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
