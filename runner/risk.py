"""What a policy's returns are like: their CVaRs, quantiles and histogram from many episodes (scripts/evaluate.py)."""

import io
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from networks import laws
from replay import datasets
from runner import files, policy, run, settings
from runner.check import BadInput
from runner.evaluate import episodes

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
TAILS = (("worst", "cvar"), ("best", "upper_cvar"))  # in words, and in the report


def check(num_episodes: int, num_envs: int, taus, seed: int):
    """Raises BadInput for numbers that cannot be."""
    for name, value in dict(episodes=num_episodes, num_envs=num_envs).items():
        if value < 1:
            raise BadInput(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    for tau in taus:
        if not 0 < tau <= 1:
            raise BadInput(f"--risk {tau:g} must be more than 0 and at most 1: a fraction of the episodes")
    if not 0 <= seed < 2**31:
        raise BadInput(f"--seed {seed} must be from 0 to 2^31 - 1")


def play(path: Path, runs, num_episodes: int, num_envs: int, seed: int, env_name, env_params: dict) -> tuple[dict, str]:
    """Plays a policy file's runs, each `num_episodes` episodes, the same starts and chances for every run.

    Args: runs, numbers of runs, None for all; num_envs, episodes at once; env_name and env_params, in place of the
        policy's own environment and beside its parameters.
    Returns: seed of training -> `(num_episodes,)` arrays by name (`episode_return`, ...); and what was played.
    Raises: BadInput naming what does not fit.
    """
    saved = policy.header(path)["settings"]
    runs = tuple(range(len(saved["seeds"]))) if runs is None else tuple(runs)
    loaded = [policy.load(path, r) for r in runs]
    if not loaded:
        raise BadInput("--runs names none; leave it out for all")
    algo, config, spec, _ = loaded[0]
    num_envs = min(num_envs, num_episodes)
    env, name = policy.own_environment(path, num_envs, env_name, env_params)
    if env.spec._replace(max_episode_steps=0) != spec._replace(max_episode_steps=0):
        ours, its = datasets.shapes(spec), datasets.shapes(env.spec)
        raise BadInput(f"{path} is for {ours}; {name} has {its}; choose another --env")
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(p for *_, p in loaded))
    configs, key = run.broadcast(config, len(runs)), jax.random.key(seed)
    if settings.kind_of(algo).flag == "mdp" and env.spec.max_episode_steps != spec.max_episode_steps != 0:
        raise BadInput(
            f"{path} was solved for a horizon of {spec.max_episode_steps}; {name} has {env.spec.max_episode_steps}"
        )
    parts = []
    for i in range(math.ceil(num_episodes / num_envs)):
        keys = jnp.broadcast_to(jax.random.fold_in(key, i), len(runs))
        parts.append(jax.device_get(episodes(algo, configs, env, params, keys)))
    joined = {x: np.concatenate([np.asarray(part[x], float) for part in parts], 1)[:, :num_episodes] for x in parts[0]}
    of_run = lambda r: {x: values[r] for x, values in joined.items()}
    finite = np.isfinite(joined["episode_return"]).all(1)
    if not finite.all():
        lost = runs[int(np.argmin(finite))]
        raise BadInput(f"{path}: run {lost} had a return that is not finite; choose others by --runs")
    return {saved["seeds"][number]: of_run(r) for r, number in enumerate(runs)}, f"{saved['algo']} on {name}"


def statistics(returns, taus) -> dict:
    """Of one law of returns `(N,)`: mean, standard deviation, CVaRs below and above, quantiles.

    A CVaR takes of the episode on its boundary the part within: of 10 returns the worst 0.25 are two and a half.
    """
    n = len(returns)
    with jax.enable_x64(True):
        x, p = jnp.asarray(returns, jnp.float64), jnp.full(n, 1 / n, jnp.float64)
        levels = jnp.asarray(QUANTILES, jnp.float64)
        return dict(
            episodes=n,
            mean=float(x.mean()),
            std=float(x.std()),
            cvar={f"{tau:g}": float(laws.cvar(x, p, tau)) for tau in taus},
            upper_cvar={f"{tau:g}": float(laws.upper_cvar(x, p, tau)) for tau in taus},
            quantiles={f"{q:g}": float(v) for q, v in zip(QUANTILES, laws.quantile(x, p, levels), strict=True)},
        )


def report(played: dict, taus) -> dict:
    """Statistics of the returns of every seed; of discounted ones too, where the environment reports them."""
    of = {}
    for seed, values in played.items():
        of[str(seed)] = statistics(values["episode_return"], taus)
        if "episode_discounted_return" in values:
            of[str(seed)]["discounted"] = statistics(values["episode_discounted_return"], taus)
        of[str(seed)]["means"] = {name: float(x.mean()) for name, x in values.items()}
    return of


def table(found: dict) -> str:
    """The report as two tables, of CVaRs and of quantiles, a row for each seed; discounted returns have their own."""
    rows = []
    for seed, one in found.items():
        rows.append((seed, one))
        if "discounted" in one:
            rows.append((f"{seed}, discounted", one["discounted"]))

    def lines(columns):
        """Args: columns, a row's statistics to names and numbers."""
        cells = [["seed", *columns(rows[0][1])]]
        cells += [[label, *(f"{v:.4g}" for v in columns(x).values())] for label, x in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in cells)

    def tails(x):
        worst, best = ({f"{name} {tau}": v for tau, v in x[key].items()} for name, key in TAILS)
        return dict(mean=x["mean"], std=x["std"]) | worst | best

    quantiles = lambda x: {f"quantile {q}": v for q, v in x["quantiles"].items()}
    return f"{lines(tails)}\n\n{lines(quantiles)}"


def plot(played: dict, path: Path, title: str):
    """Histogram of the returns of every seed, as a PNG."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    every = np.concatenate([values["episode_return"] for values in played.values()])
    bins = np.histogram_bin_edges(every[np.isfinite(every)], 50)
    for i, (seed, values) in enumerate(played.items()):
        axes.hist(values["episode_return"], bins, histtype="step", color=f"C{i % 10}", label=f"seed {seed}")
    axes.set(xlabel="return of an episode", ylabel="episodes", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=140)
    plt.close(figure)
    files.write(path, buffer.getvalue())
