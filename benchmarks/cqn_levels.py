"""How CQN zooms: its values at each level over two action dimensions, and the intervals that it chooses.

    python benchmarks/cqn_levels.py RUN/policy/best.msgpack --out docs/images/cqn_levels.png

One panel for each level, of one state after `--steps` of the policy's own steps. A square's colour is the mean of the
two dimensions' values there; lines bound what the level chose, which is all that the next panel shows.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import tyro

import envs
from runner import policy

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass(frozen=True)
class Options:
    """Draws the values of a trained CQN, level by level."""

    policy: tyro.conf.Positional[str]
    """Policy file of a run of cqn on an environment with at least two action dimensions."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE.png")] = "cqn_levels.png"
    """File to write."""
    run: int = 0
    """Which run, counted from 0, of the policy file."""
    steps: int = 0
    """Steps of the policy before the state that is drawn."""
    dimensions: tuple[int, int] = (0, 1)
    """Action dimensions across and up."""
    seed: int = 0
    """Of the episode's start."""


def state_after(algo, config, spec, params, env, steps: int, seed: int):
    """The observation, `(1, ...)`, after so many steps of the policy."""
    state = env.reset(jax.random.key(seed))
    for step in range(steps):
        act_key, env_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
        state, *_ = env.step(env_key, state, algo.act(config, spec, params, state.obs, act_key))
    return state.obs


def levels_of(algo, config, spec, params, obs) -> list[tuple]:
    """Of each level the values `(D, B)`, the intervals' bounds `(D,)` before it, and the bins `(D,)` that it chose."""
    critic = params.target if config.act_with_target else params.critic
    _, codes, midpoints = algo.greedy(config, spec, critic, obs, jax.random.key(0))
    q = algo.values(config, algo.all_levels(config, spec, critic, obs, midpoints))[0]  # (L, D, B)
    low, high = -jnp.ones(spec.action_size), jnp.ones(spec.action_size)
    found = []
    for level in range(config.levels):
        found.append(tuple(map(np.asarray, (q[level], low, high, codes[0, level]))))
        low, high = algo.zoom(low, high, codes[0, level], config.bins)
    return found


def draw(levels, dimensions, path: str):
    across, up = dimensions
    figure, axes = plt.subplots(1, len(levels), figsize=(4 * len(levels), 3.6), constrained_layout=True)
    for number, (axis, (q, low, high, chosen)) in enumerate(zip(np.atleast_1d(axes), levels, strict=True), 1):
        bins = q.shape[1]
        edges = [np.linspace(low[d], high[d], bins + 1) for d in (across, up)]
        image = axis.pcolormesh(*edges, (q[across][None, :] + q[up][:, None]) / 2, cmap="viridis")
        (left, bottom), (k, j) = [edges[0][chosen[across]], edges[1][chosen[up]]], (chosen[across], chosen[up])
        width, height = edges[0][k + 1] - left, edges[1][j + 1] - bottom
        axis.add_patch(plt.Rectangle((left, bottom), width, height, fill=False, edgecolor="white", linewidth=2.5))
        axis.set(title=f"level {number}", xlabel=f"action {across}", ylabel=f"action {up}" if number == 1 else "")
        figure.colorbar(image, ax=axis)
    figure.savefig(path, dpi=110)


def main(options: Options):
    algo, config, spec, params = policy.load(options.policy, options.run)
    name, env_params = policy.environment(options.policy)
    obs = state_after(algo, config, spec, params, envs.make(name, 1, **env_params), options.steps, options.seed)
    draw(levels_of(algo, config, spec, params, obs), options.dimensions, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
