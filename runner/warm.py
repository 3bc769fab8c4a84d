"""Starting from what another algorithm's run learned: `--init-from RUN`.

An algorithm that can has STARTS_FROM, the name of the other, and `warm_start(config, source, state, other_state)`,
which returns the state to go on from.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from replay import datasets
from runner import checkpoint, run, settings
from runner.check import BadInput


def states(launch, source):
    """The other run's states, leading axis R. Raises BadInput where it is not one that `launch` can start from."""
    options, run_dir = launch.options, Path(launch.options.init_from).expanduser()
    saved, wanted = settings.read(run_dir), launch.algo.STARTS_FROM
    if saved["algo"] != wanted:
        raise BadInput(f"--init-from {run_dir} is a run of {saved['algo']}; {options.algo} starts from one of {wanted}")
    if list(options.seeds) != saved["seeds"]:
        raise BadInput(f"--seeds {list(options.seeds)} must be those of --init-from {run_dir}, {saved['seeds']}")
    other = settings.load(wanted)
    config = settings.replace(other.Config(), saved["config"], str(run_dir / "config.json"))
    for name in ("hidden", "rewards", "normalize_obs"):
        ours, theirs = getattr(options.config, name), getattr(config, name)
        if ours != theirs:
            flag = f"--config.{name.replace('_', '-')}"
            raise BadInput(f"{flag} {ours} must be that of --init-from {run_dir}, {theirs}")
    try:
        learned_from = datasets.spec_from_json(saved["dataset"]["spec"])
    except (KeyError, TypeError):
        raise BadInput(f"{run_dir / 'config.json'} does not say what data it learned from") from None
    ours, theirs = (datasets.shapes(s) for s in (source.spec, learned_from))
    if ours != theirs:
        raise BadInput(f"dataset {options.source} has {ours}; --init-from {run_dir} learned from {theirs}")
    newest = checkpoint.latest(run_dir / "checkpoint")
    if newest is None:
        raise BadInput(f"--init-from {run_dir} holds no whole checkpoint")
    configs, keys = run.broadcast(config, len(options.seeds)), jax.vmap(jax.random.key)(jnp.array(options.seeds))
    abstract = jax.eval_shape(lambda configs, keys: run.init(other, configs, source.dataset, keys), configs, keys)
    carry, meta = checkpoint.restore(newest, abstract)
    if meta["diverged"]:
        lost = ", ".join(str(saved["seeds"][int(r)]) for r in meta["diverged"])
        raise BadInput(f"--init-from {run_dir}: of its seeds {lost} diverged; choose a run whose losses stayed finite")
    return carry.states


@partial(jax.jit, static_argnames="algo", donate_argnames="carry")
def start(algo, configs, source, carry: run.Carry, other_states) -> run.Carry:
    """The carry before the first step, begun where the other run ended."""
    begin = lambda config, state, other: algo.warm_start(config, source, state, other)
    return carry._replace(states=jax.vmap(begin)(configs, carry.states, other_states))
