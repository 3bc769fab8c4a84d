"""Pictures of distributional dynamic programming: return laws beside the exact ones, safe against risky policies.

    python benchmarks/dp_pictures.py --out docs/images

`distributional_dp_laws.png`: the law of the return from state 0 of `two_state`, as each representation has it, full and
one-step, beside the exact one. `distributional_dp_safe_risky.png`: the grid `slippery` without a horizon, where one
reward of a pit gives the way past the pits and the way around them the same mean at the start. It is found by bisection
and printed.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import matplotlib
import numpy as np
import tyro

from algos import distributional_dp
from envs import mdps

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROWS = ("....", "S..G", ".PP.")  # the grid of `slippery`
START, UP, RIGHT = 4, 0, 1


@dataclass(frozen=True)
class Options:
    """Draws the pictures of docs/distributional_dp.md."""

    out: Path = Path("docs/images")
    """Folder to write into."""
    gamma: float = 0.9
    """Discount factor of the grid."""
    slip: float = 0.2
    """Probability of slipping on the grid."""
    alpha: float = 0.25
    """Weight of the worst atom on the grid."""


@jax.jit
def solve(config, mdp, num, policy=None):
    """Parameters after `num` sweeps."""
    state = distributional_dp.init(config, mdp, None, policy)
    return jax.lax.fori_loop(0, num, lambda _, s: distributional_dp.step(config, mdp, s)[0], state).params


def steps(x, p):
    """A distribution function as a line."""
    order = np.argsort(x)
    return np.concatenate([[0.9], x[order], [2.1]]), np.concatenate([[0], np.cumsum(p[order]), [1]])


def draw_laws(path):
    mdp = mdps.make("two_state")
    config = lambda **k: distributional_dp.Config(policy="uniform", v_min=0.0, v_max=2.0, **k)
    exact = solve(config(representation="particles", num_atoms=1024), mdp, 11)  # 2^10 atoms: W_1 error 2^-11
    assert not exact.inexact.any()
    panels = [("categorical", 11), ("quantile", 8), ("segments", 8), ("two_atom", 2)]
    figure, axes = plt.subplots(1, 4, figsize=(12, 3), sharey=True, layout="constrained")
    for axis, (name, num) in zip(axes, panels, strict=True):
        axis.step(*steps(*(np.asarray(v[0, 0, 0]) for v in exact.laws)), where="post", color="0.6", lw=3, label="exact")
        for one_step, style in ((False, "-"), (True, ":")):
            laws = solve(config(representation=name, num_atoms=num, one_step=one_step), mdp, 100).laws
            label = "one step" if one_step else "full"
            axis.step(*steps(*(np.asarray(v[0, 0, 0]) for v in laws)), style, where="post", color="C0", label=label)
        axis.set(title=f"{name}, N = {num}", xlabel="return from state 0", xlim=(0.9, 2.1))
    axes[0].set_ylabel("distribution function")
    axes[-1].legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=110)


def grid(options, pit_reward):
    return mdps.make("slippery", slip=options.slip, pit_reward=pit_reward, gamma=options.gamma, horizon=0)


def equal_pit_reward(options):
    """The reward of a pit at which going up and going right from the start are best and have the same mean."""
    (p, free), (_, unit) = (mdps.dense(grid(options, r)) for r in (0.0, -1.0))
    go_on = ~np.asarray(grid(options, 0.0).terminal)

    def gap(pit_reward):
        q = np.zeros(free.shape)
        for _ in range(1_000):
            q = free + pit_reward * (free - unit) + options.gamma * p @ (go_on * q.max(1))
        return q[START, UP] - q[START, RIGHT]

    low, high = -30.0, -5.0
    if gap(low) < 0 or gap(high) > 0:
        raise ValueError(f"no reward of a pit from {low} to {high} makes both ways equal; choose another --slip")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gap(middle) > 0 else (low, middle)
    return low


def draw_grid(axis, mdp, params, title, color):
    policy, laws = np.asarray(params.policy[0]), params.laws
    height, width = len(ROWS), len(ROWS[0])
    for s, cell in enumerate("".join(ROWS)):
        row, column = divmod(s, width)
        face = {"P": "#d9a0a0", "G": "#a8d5a8"}.get(cell, "white")
        axis.add_patch(plt.Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=face, edgecolor="0.7"))
        if cell in "PG":
            axis.text(column, row, {"P": "pit", "G": "goal"}[cell], ha="center", va="center")
            continue
        action = policy[s].argmax()
        dy, dx = mdps.MOVES[action]
        tip, tail = ((column + sign * 0.3 * dx, row - 0.1 + sign * 0.22 * dy) for sign in (1, -1))
        axis.annotate("", tip, tail, arrowprops=dict(arrowstyle="-|>", color=color, lw=2))
        worst, best = (float(laws.x[0, s, action, i]) for i in (0, 1))
        axis.text(column, row + 0.44, f"{worst:.2f}, {best:.2f}", ha="center", va="bottom", fontsize=7, color="0.3")
    axis.set(title=title, xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xticks=[], yticks=[], aspect="equal")


def draw_safe_risky(path, options):
    mdp = grid(options, equal_pit_reward(options))
    reward = float(np.asarray(mdp.reward).min())
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), width_ratios=(4, 4, 3.5), layout="constrained")
    for axis, attitude, color in zip(axes, ("safe", "risky"), ("C0", "C1"), strict=False):
        two = distributional_dp.Config(representation="two_atom", attitude=attitude, alpha=options.alpha)
        params = solve(two, mdp, 400)
        draw_grid(axis, mdp, params, attitude, color)
        found = distributional_dp.evaluate(two, mdp, params)
        # The law of that policy, closely.
        fine = distributional_dp.Config(representation="segments", policy="uniform", num_atoms=200, alpha=options.alpha)
        params = solve(fine, mdp, 200, params.policy)
        x, p = (np.asarray(v) for v in distributional_dp.law(fine, mdp, params))
        exact = distributional_dp.evaluate(fine, mdp, params)
        atoms = f"two atoms {found['law_worst']:.4f}, {found['law_best']:.4f}"
        tails = f"CVaR {exact['law_worst']:.3f}, rest {exact['law_best']:.3f}"
        print(
            f"pit {reward:.9f}, {attitude}: mean {exact['return']:.6f}, {atoms}; {tails} of {fine.num_atoms} segments"
        )
        order = np.argsort(x)
        axes[2].step(x[order], np.cumsum(p[order]), where="post", color=color, label=attitude)
    axes[2].set(title="return from the start", xlabel="discounted return", ylabel="distribution function", ylim=(0, 1))
    axes[2].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main(options: Options):
    options.out.mkdir(parents=True, exist_ok=True)
    with jax.enable_x64(True):
        draw_laws(options.out / "distributional_dp_laws.png")
        draw_safe_risky(options.out / "distributional_dp_safe_risky.png", options)


if __name__ == "__main__":
    main(tyro.cli(Options))
