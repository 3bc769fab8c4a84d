"""CQN with 20 demonstrations of a sparse task, beside CQN alone, SAC with them in its replay, and their cloning.

    python benchmarks/cqn_demos.py                          # maze/umaze-goals, five seeds
    python benchmarks/cqn_demos.py --arms cqn_demos sac_demos --seeds 10 --steps 10000

Every arm has the same seeds, network widths and number of env steps; cloning makes as many gradient steps as CQN. SAC
is Gaussian; its replay begins with the demonstrations as CQN's does. Writes cqn_demos.json, .md and .png into --out.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import tyro

import envs
from algos import bangbang_sac, bc, cqn, iql
from envs.types import EnvAndData
from replay import datasets, ring
from runner import files, run, settings
from runner.evaluate import evaluate
from runner.stats import interval, iqm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LABELS = dict(
    cqn_demos="CQN, 20 demonstrations",
    cqn="CQN alone",
    sac_demos="SAC, demonstrations in its replay",
    bc="behaviour cloning, squashed normal",
    bc_plain="behaviour cloning, plain normal",
)


@dataclass(frozen=True)
class Options:
    """Trains the arms one after another and reports their success."""

    env: str = "maze/umaze-goals"
    """Environment id; its settings are those of sweeps/cqn/."""
    demos: str | None = None
    """Dataset; None: that of the sweep file."""
    arms: tuple[str, ...] = tuple(LABELS)
    """Of cqn_demos, cqn, sac_demos, bc, bc_plain."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """All of an arm are trained at once."""
    steps: int | None = None
    """Env steps; None: those of the sweep file."""
    eval_period: int = 2_000
    """Env steps between evaluations."""
    eval_episodes: int = 100
    """Episodes averaged for each seed at each evaluation."""
    out: Path = Path("runs/cqn_demos")
    """Folder to write to."""


class Sac:
    """SAC whose replay begins with the demonstrations instead of a uniform policy's steps."""

    act = staticmethod(bangbang_sac.act)

    @staticmethod
    def init(config, source: EnvAndData, key):
        state = bangbang_sac.init(config, source.env, key)
        return state._replace(replay=ring.fill(state.replay, source.dataset.transitions))

    @staticmethod
    def step(config, source: EnvAndData, state):
        return bangbang_sac.step(config, source.env, state)

    @staticmethod
    def period(config, source: EnvAndData) -> int:
        return bangbang_sac.period(config, source.env)


def arm(name: str, config: cqn.Config, source: EnvAndData, steps: int) -> tuple:
    """The algorithm, its settings, its source and env steps per gradient step of one arm; `config` is CQN's."""
    updates = (steps - config.prefill) // config.train_period
    match name:
        case "cqn_demos":
            return cqn, config, source, 1
        case "cqn":
            prefill = config.prefill or 1_000
            return cqn, dataclasses.replace(config, prefill=prefill), EnvAndData(source.env, None), 1
        case "sac_demos":
            shared = {n: getattr(config, n) for n in ("gamma", "train_period", "batch_size", "capacity", "hidden")}
            rates = {f"{n}_learning_rate": config.learning_rate for n in ("policy", "value", "temperature")}
            sac = bangbang_sac.Config(policy="gaussian", initial_temperature=0.01, prefill=0, **shared, **rates)
            return Sac, sac, source, 1
        case "bc":
            sizes = dict(hidden=config.hidden, batch_size=config.batch_size, learning_rate=config.learning_rate)
            return bc, bc.Config(**sizes), source.dataset, steps // updates
        case "bc_plain":  # IQL's policy where no action weighs more than another
            sizes = dict(hidden=config.hidden, batch_size=config.batch_size, learning_rate=1e-3, normalize_obs=True)
            return iql, iql.Config(inverse_temperature=0.0, anneal_steps=0.0, **sizes), source.dataset, steps // updates
    raise ValueError(f"no arm {name!r}; there are {', '.join(LABELS)}")


def curve(name: str, config, source, eval_env, options: Options, steps: int) -> list[dict]:
    """Success and length of evaluation episodes, a list over evaluations of `(R,)` lists."""
    algo, config, source, steps_per_update = arm(name, config, source, steps)
    configs, keys = run.broadcast(config, len(options.seeds)), jax.vmap(jax.random.key)(jnp.array(options.seeds))
    carry, points = run.init(algo, configs, source, keys), []
    begun = getattr(config, "prefill", 0)  # env steps of the first period that `init` has made
    for chunk in range(1, steps // options.eval_period + 1):
        length = (options.eval_period - begun * (chunk == 1)) // steps_per_update // algo.period(config, source)
        carry = run.advance(algo, configs, source, run.start_chunk(carry), length)
        eval_keys = jax.vmap(lambda key: jax.random.fold_in(key, 1_000 + chunk))(keys)  # noqa: B023
        found = jax.device_get(evaluate(algo, configs, eval_env, carry.states.params, eval_keys))
        points.append(dict(env_steps=chunk * options.eval_period, success=found["eval_success"].tolist()))
        print(f"{name} {points[-1]['env_steps']:,}: {np.round(points[-1]['success'], 2)}", flush=True)
    return points


def scores(points: list[dict]) -> np.ndarray:
    """The mean of the last three evaluations, `(R,)`."""
    return np.mean([p["success"] for p in points[-3:]], 0)


def report(found: dict, options: Options, title: str):
    """Writes the table and the curves of what was found."""
    lines = [f"| {title} | success, IQM of the seeds | mean | by seed |", "|---|---|---|---|"]
    figure, axis = plt.subplots(figsize=(6.5, 4), constrained_layout=True)
    for name, points in found.items():
        score = scores(points)
        low, high = interval(score)
        by_seed = ", ".join(f"{s:.2f}" for s in score)
        lines.append(f"| {LABELS[name]} | {iqm(score):.2f} [{low:.2f}, {high:.2f}] | {score.mean():.2f} | {by_seed} |")
        steps, success = [p["env_steps"] for p in points], np.array([p["success"] for p in points])
        axis.plot(steps, success.mean(1), label=LABELS[name], linestyle="--" if name.startswith("bc") else "-")
        axis.fill_between(steps, success.min(1), success.max(1), alpha=0.15)
    axis.set(xlabel="env steps", ylabel="success: mean, and range of seeds", ylim=(-0.02, 1.02), title=title)
    axis.legend(loc="lower right")
    figure.savefig(options.out / "cqn_demos.png", dpi=110)
    files.write(options.out / "cqn_demos.md", "\n".join(lines).encode())
    print("\n".join(lines))


def main(options: Options):
    values, origin = settings.defaults(cqn, "cqn", options.env)
    demos, steps = options.demos or values.get("demos"), options.steps or values["steps"]
    if demos is None:
        raise SystemExit(f"error: {origin} names no demonstrations; give them by --demos")
    options.out.mkdir(parents=True, exist_ok=True)
    dataset = datasets.load(demos)
    source = EnvAndData(envs.make(options.env, values["num_envs"]), dataset)
    eval_env = envs.make(options.env, options.eval_episodes)
    path = options.out / "cqn_demos.json"
    of = dict(env=options.env, demos=demos, seeds=list(options.seeds), steps=steps)
    of |= dict(eval_period=options.eval_period, eval_episodes=options.eval_episodes)
    saved = json.loads(path.read_text()) if path.exists() else dict(of=of, arms={})
    if saved["of"] != of:
        raise SystemExit(f"error: {path} holds {saved['of']}, not {of}; choose another --out")
    found = saved["arms"]
    for name in options.arms:
        if name not in found:
            found[name] = curve(name, values["config"], source, eval_env, options, steps)
            files.write(path, json.dumps(saved, indent=1).encode())
    report({name: found[name] for name in LABELS if name in found}, options, options.env)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
