"""The pictures of docs/stock_dp.md and the numbers in its tables: frontiers, laws and policies, all exact.

    python benchmarks/stock_pictures.py --out docs/images

stock_dp_frontier.png    CVaRs on the slippery grid over tau, of the best for each tau and of the best mean, and laws
stock_dp_policies.png    where policies on that grid go and what they do there
stock_dp_desired.png     how near a wanted return can be kept in `homeostat`, and laws
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import matplotlib
import numpy as np
import tyro

from algos import stock_dp
from algos.stock_dp import Config
from envs import mdps
from networks import laws

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TAUS = (0.02, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.65, 0.75, 0.9, 1.0)
PITS = (9, 10)  # cells of the slippery grid
NEUTRAL, AVERSE, SEEKING, FOURTH = "#555555", "#1f77b4", "#d62728", "#2ca02c"


@dataclass(frozen=True)
class Options:
    """Solves the examples exactly and draws them."""

    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = "docs/images"
    """Folder to write to."""


@jax.jit
def optimum(config, mdp):
    """Params, figures, law `(n,)` twice, and visits `(H + 1, N)` of the best policy."""
    state = stock_dp.init(config, mdp, None)
    state = jax.lax.fori_loop(0, mdp.horizon + 1, lambda _, s: stock_dp.step(config, mdp, s)[0], state)
    x, p = stock_dp.law(config, mdp, state.params)
    visits = stock_dp.occupancy(mdp, state.params.nodes, state.params.policy)
    return state.params, stock_dp.evaluate(config, mdp, state.params), (x[:, 0], p), visits


def solve(mdp, **changes):
    config = Config(max_nodes=64, num_first_stocks=64, tie_tolerance=1e-10, **changes)
    stock_dp.check(config, mdp)
    return jax.device_get(optimum(config, mdp))


def atoms(law):
    """Returns, ascending, and their probabilities."""
    x, p = law
    values = np.unique(x[p > 0].round(9))
    return values, np.array([p[abs(x - v) < 1e-6].sum() for v in values])


def in_pit(found) -> float:
    """The chance that an episode ends in a pit."""
    params, _, _, visits = found
    return visits[np.isin(params.nodes.state, PITS)].sum()


def steps(ax, law, **style):
    """A distribution function, from below its least atom to above its greatest."""
    x, p = atoms(law)
    ax.step([x[0] - 1, *x, x[-1] + 1], [0, *np.cumsum(p), 1], where="post", **style)


def frontier(mdp, neutral):
    lower = {tau: solve(mdp, tau=tau) for tau in TAUS}
    upper = {tau: solve(mdp, tau=tau, objective="upper_cvar") for tau in TAUS}
    of_neutral = lambda f: [f(*neutral[2], tau) for tau in TAUS]
    print("tau    lower CVaR: best  neutral   c0  mean     P(pit)    upper CVaR: best  neutral  mean")
    for tau, low, high in zip(TAUS, of_neutral(laws.cvar), of_neutral(laws.upper_cvar), strict=True):
        a, s = lower[tau][1], upper[tau][1]
        print(
            f"{tau:<5}  {a['objective']:15.4f} {low:9.4f} {a['first_stock']:4.0f} {a['return']:8.4f} "
            f"{in_pit(lower[tau]):.6f} {s['objective']:19.4f} {high:8.4f} {s['return']:8.4f}"
        )

    fig, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for ax, name, found, colour, f in (
        (axes[0], "lower", lower, AVERSE, laws.cvar),
        (axes[1], "upper", upper, SEEKING, laws.upper_cvar),
    ):
        ax.plot(TAUS, [found[tau][1]["objective"] for tau in TAUS], "o-", color=colour, label="best for this tau")
        ax.plot(TAUS, of_neutral(f), "s--", color=NEUTRAL, label="best mean")
        ax.set(xscale="log", xlabel="tau", ylabel=f"{name} CVaR of the return", title=f"{name} CVaR")
        ax.legend()
    for label, found, colour in (
        ("averse, tau 0.05", lower[0.05], AVERSE),
        ("averse, tau 0.25", lower[0.25], FOURTH),
        ("neutral", neutral, NEUTRAL),
        ("seeking, tau 0.5", upper[0.5], SEEKING),
    ):
        steps(axes[2], found[2], color=colour, label=label)
    axes[2].set(xlabel="return", ylabel="distribution function", title="laws of the return", xlim=(-30, -1))
    axes[2].legend()
    return fig, lower, upper


MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # up, right, down, left, with rows downwards


def policies(found: dict):
    """One panel each: cells as dark as they are visited, an arrow as long as its action's share of the visits."""
    fig, axes = plt.subplots(1, len(found), figsize=(3.3 * len(found), 3.2), layout="constrained")
    for ax, (label, (params, figures, _, visits)) in zip(axes, found.items(), strict=True):
        taken = np.zeros((12, 4))
        np.add.at(taken, params.nodes.state[:-1].clip(0), visits[:-1, :, None] * params.policy)
        total = np.zeros(12)
        np.add.at(total, params.nodes.state.clip(0), visits)
        ax.imshow(total.reshape(3, 4).clip(0, 1.5), cmap="Greys", vmin=0, vmax=3)
        for s in range(12):
            if s in (*PITS, 7):
                ax.text(s % 4, s // 4, f"{'goal' if s == 7 else 'pit'}\n{total[s]:.2%}", ha="center", va="center")
                continue
            for a, share in enumerate(taken[s] / max(taken[s].sum(), 1e-12)):
                if share > 0.01:
                    dx, dy = MOVES[a]
                    ax.annotate(
                        "",
                        (s % 4 + 0.47 * dx * share, s // 4 + 0.47 * dy * share),
                        (s % 4, s // 4),
                        arrowprops=dict(arrowstyle="-|>", color=AVERSE, lw=1.8, shrinkA=0, shrinkB=0),
                    )
        ax.set_title(f"{label}\nmean {figures['return']:.3f}", fontsize=10)
        ax.set(xticks=[], yticks=[])
    return fig


def desired(mdp):
    targets = np.arange(-10.0, 15.0)
    found = {t: solve(mdp, objective="desired_return", target=float(t)) for t in targets}
    mean = solve(mdp, objective="mean")
    error = lambda law, t: (law[1] * abs(law[0] - t)).sum()
    print("target  E|G - target|: best  of the best mean")
    for t in targets[::2]:
        print(f"{t:6.0f} {error(found[t][2], t):19.4f} {error(mean[2], t):17.4f}")
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    axes[0].plot(targets, [error(found[t][2], t) for t in targets], "o-", color=AVERSE, label="desired return")
    axes[0].plot(targets, [error(mean[2], t) for t in targets], "s--", color=NEUTRAL, label="best mean")
    axes[0].set(xlabel="target", ylabel="E|G - target|", title="distance from the wanted return")
    width = 0.28
    laws_of = (("target 0", found[0.0], AVERSE), ("target 6", found[6.0], FOURTH), ("best mean", mean, NEUTRAL))
    for i, (label, of, colour) in enumerate(laws_of):
        x, p = atoms(of[2])
        axes[1].bar(x + (i - 1) * width, p, width, color=colour, label=label)
    axes[1].set(xlabel="return", ylabel="probability", title="laws of the return")
    for ax in axes:
        ax.legend()
    return fig


def main(options: Options):
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    with jax.enable_x64(True):
        mdp = mdps.make("slippery")
        neutral = solve(mdp, objective="mean")
        fig, lower, upper = frontier(mdp, neutral)
        drawn = {
            "averse, tau 0.05": lower[0.05],
            "averse, tau 0.25": lower[0.25],
            "neutral": neutral,
            "seeking, tau 0.5": upper[0.5],
        }
        figures = dict(frontier=fig, policies=policies(drawn), desired=desired(mdps.make("homeostat")))
    for name, fig in figures.items():
        fig.savefig(folder / f"stock_dp_{name}.png", dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Options))
