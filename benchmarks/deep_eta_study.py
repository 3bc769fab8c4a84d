"""DηN where the answer is known: CVaR on the slippery grid, and a stock to keep near 0, beside QR-DQN.

    python benchmarks/deep_eta_study.py                             # both tasks, five seeds
    python benchmarks/deep_eta_study.py --tasks slippery --seeds 10 11 --steps 40000

slippery    DηN maximises CVaR_tau from the c_0 that it finds; QR-DQN maximises the mean, or acts on the CVaR of the law
            that it predicts at every step (`risk_tau`), in training too or at the end only.
homeostat   DηN maximises -E|c_0 + G| for every c_0 of a range; QR-DQN maximises the mean.

Nothing is sampled to score an agent: both MDPs have a horizon and gamma 1, so that all pairs of a state and what was
collected can be listed, the agent's action asked at each, and the law of its return pushed forward; the optimum is
backward induction on the same list. `closed` is how much of the way from the risk-neutral optimum's CVaR to the best
possible an agent goes. Writes deep_eta_study.json, .md and two pictures into --out.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import tyro

from algos import deep_eta, qrdqn
from envs import mdps
from networks import laws
from runner import files, run, settings

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LABELS = dict(
    deep_eta="DηN",
    neutral="QR-DQN, the mean",
    per_step="QR-DQN, per-step CVaR",
    at_the_end="QR-DQN, the mean; per-step CVaR at the end",
)
FRONTIER = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)  # taus that DηN is asked for, those of --taus among them


@dataclass(frozen=True)
class Options:
    """Trains the agents of both tasks and reports what their policies are worth, exactly."""

    tasks: tuple[str, ...] = ("slippery", "homeostat")
    """Of slippery, homeostat."""
    taus: tuple[float, ...] = (0.1, 0.25)
    """Of QR-DQN's CVaRs on the slippery grid, of 0.05, 0.1, 0.25, 0.5, 0.75, 1."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """All runs of an algorithm are trained at once."""
    steps: int | None = None
    """Env steps of every agent; None: those of deep_eta's EXAMPLE and sweep files."""
    out: Path = Path("runs/deep_eta_study")
    """Folder to write to."""


class Layer(NamedTuple):
    """What a policy may meet after t steps: n pairs of a state and the reward collected so far."""

    state: np.ndarray  # (n,) int
    total: np.ndarray  # (n,)
    child: np.ndarray  # (n, A, B) int, into the next layer; empty in the last
    probability: np.ndarray  # (n, A, B)


def layers(mdp) -> list[Layer]:
    """All that can happen, H + 1 layers. Terminal states go on for a reward of 0, so returns are the last totals."""
    successor, reward, p = (np.asarray(x) for x in (mdp.next_state, mdp.reward, mdp.probability))
    found, pairs = [], [(int(s), 0.0) for s in np.flatnonzero(np.asarray(mdp.start))]
    for _ in range(mdp.horizon):
        number, child = {}, np.zeros((len(pairs), *p.shape[1:]), int)
        for i, (s, total) in enumerate(pairs):
            for a, b in np.ndindex(*p.shape[1:]):
                if p[s, a, b] > 0:
                    pair = int(successor[s, a, b]), round(total + float(reward[s, a, b]), 9)
                    child[i, a, b] = number.setdefault(pair, len(number))
        state, total = (np.array(x) for x in zip(*pairs, strict=True))
        found.append(Layer(state, total, child, p[state].astype(float)))
        pairs = list(number)
    state, total = (np.array(x) for x in zip(*pairs, strict=True))
    return [*found, Layer(state, total, np.zeros(0, int), np.zeros(0))]


def law(mdp, tree, actions) -> tuple[np.ndarray, np.ndarray]:
    """Returns and their probabilities under a policy, `(n,)` twice. Args: actions, `(n,)` int of each layer."""
    mass = np.asarray(mdp.start, float)[tree[0].state]
    for layer, action, after in zip(tree, actions, tree[1:], strict=False):
        rows = np.arange(len(action)), action
        moved = np.zeros(len(after.state))
        np.add.at(moved, layer.child[rows], mass[:, None] * layer.probability[rows])
        mass = moved
    totals, where = np.unique(tree[-1].total, return_inverse=True)
    return totals, np.bincount(where, mass)


def best_actions(tree, f) -> list[np.ndarray]:
    """Maximises E f(G), by backward induction; the first of equal actions."""
    u, actions = f(tree[-1].total), []
    for layer in tree[-2::-1]:
        q = (layer.probability * u[layer.child]).sum(-1)  # (n, A)
        actions.append((q > q.max(-1, keepdims=True) - 1e-9).argmax(-1))
        u = q.max(-1)
    return actions[::-1]


def cvar(law, tau) -> float:
    with jax.enable_x64(True):
        return float(laws.cvar(*(jnp.asarray(x) for x in law), tau))


def best_cvar_law(mdp, tree, tau):
    """The law of the greatest CVaR. The best c_0 is minus a return, as there h's slope may change from + to -."""
    candidates = [law(mdp, tree, best_actions(tree, lambda g, c=c: np.minimum(g - c, 0))) for c in returns(tree)]
    return max(candidates, key=lambda x: cvar(x, tau))


def returns(tree) -> np.ndarray:
    return np.unique(tree[-1].total)


class Policy(NamedTuple):
    """An algorithm and what it learned, leading axis R."""

    algo: object
    configs: object
    params: object
    spec: object


def ask(policy: Policy, mdp, tree, first_stocks) -> list:
    """The action at every pair of every layer, for every run: `[R][H]` of `(n,)`. Args: first_stocks `(R,)`."""
    state = np.concatenate([layer.state for layer in tree[:-1]])
    total = np.concatenate([layer.total for layer in tree[:-1]])
    sizes = [len(layer.state) for layer in tree[:-1]]
    left = np.repeat((mdp.horizon - np.arange(mdp.horizon)) / mdp.horizon, sizes)
    obs = np.concatenate([np.eye(mdp.num_states)[state], left[:, None]], -1).astype(np.float32)

    @jax.jit
    def act(configs, params, first_stocks):
        def one(config, params, c):
            seen = (obs, (c + total).astype(jnp.float32)) if policy.algo is deep_eta else obs
            return policy.algo.act(config, policy.spec, params, seen, None)

        return jax.vmap(one)(configs, params, first_stocks)

    action = np.asarray(act(policy.configs, policy.params, jnp.asarray(first_stocks)))
    return [np.split(row, np.cumsum(sizes)[:-1]) for row in action]


def laws_of(policy: Policy, mdp, tree, first_stocks) -> list:
    """The law of every run's return, `[R]`."""
    return [law(mdp, tree, actions) for actions in ask(policy, mdp, tree, first_stocks)]


def train(name: str, source: str, configs, seeds, config, num_envs: int, steps: int) -> Policy:
    """Args: configs, leading axis R, whose static fields are `config`'s; seeds `[R]`."""
    algo = settings.load(name)
    env = settings.environment(name, source, num_envs, {})
    algo.check(config, env)
    carry = run.init(algo, configs, env, jax.vmap(jax.random.key)(jnp.array(seeds)))
    length = (steps - config.prefill) // algo.period(config, env)
    carry = run.advance(algo, configs, env, carry, length)
    return Policy(algo, configs, jax.block_until_ready(carry.states.params), env.spec)


def settings_of(source: str, options: Options):
    """deep_eta's settings on a task, and QR-DQN's: the same as far as it has them."""
    values, _ = settings.defaults(deep_eta, "deep_eta", source)
    config, names = values["config"], {field.name for field in dataclasses.fields(qrdqn.Config)}
    same = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return config, qrdqn.Config(**same), values["num_envs"], options.steps or values["steps"]


def repeated(config, num_seeds: int, **columns):
    """Configs of every setting x seed, leading axis R. Args: columns, a list of one field's values by its name."""
    num_settings = len(next(iter(columns.values()), [0]))
    configs = run.broadcast(config, num_settings * num_seeds)
    repeat = lambda values: jnp.repeat(jnp.array(values, jnp.float32), num_seeds)
    return dataclasses.replace(configs, **{name: repeat(values) for name, values in columns.items()})


def slippery(options: Options) -> dict:
    """Laws of returns: of the risk-neutral optimum, and by tau of the optimum and of every agent's seeds.

    The lower CVaR's f does not depend on tau, so one DηN serves all of them; tau only decides where it begins.
    """
    source, mdp, n = "mdp/slippery", mdps.make("slippery"), len(options.seeds)
    tree = layers(mdp)
    config, plain, num_envs, steps = settings_of(source, options)
    ours = train("deep_eta", source, repeated(config, n), options.seeds, config, num_envs, steps)
    risk_taus = (1.0, *options.taus)  # the first maximises the mean
    configs = repeated(plain, n, risk_tau=risk_taus)
    theirs = train("qrdqn", source, configs, options.seeds * len(risk_taus), plain, num_envs, steps)
    of_theirs = laws_of(theirs, mdp, tree, np.zeros(len(risk_taus) * n))

    obs = mdps.env(mdp).reset(jax.random.key(0)).obs
    first = jax.jit(jax.vmap(lambda config, params: deep_eta.best_first_stock(config, ours.spec, params, obs)))
    found = dict(exact_neutral=law(mdp, tree, best_actions(tree, lambda g: g)), first_stock={}, exact={})
    found |= {name: {} for name in LABELS}
    for tau in FRONTIER:
        key, at_tau = f"{tau:g}", repeated(config, n, tau=[tau])
        first_stocks = np.asarray(first(at_tau, ours.params))
        found["exact"][key] = best_cvar_law(mdp, tree, tau)
        found["first_stock"][key] = first_stocks.tolist()
        found["deep_eta"][key] = laws_of(ours._replace(configs=at_tau), mdp, tree, first_stocks)
    for i, tau in enumerate(options.taus, start=1):
        key, rows = f"{tau:g}", slice(i * n, (i + 1) * n)
        found["neutral"][key], found["per_step"][key] = of_theirs[:n], of_theirs[rows]
        params = jax.tree.map(lambda x: x[:n], theirs.params)
        late = Policy(qrdqn, repeated(plain, n, risk_tau=[tau]), params, theirs.spec)
        found["at_the_end"][key] = laws_of(late, mdp, tree, np.zeros(n))
    return found


def homeostat(options: Options) -> dict:
    """Mean abs(c_0 + G) at every c_0: the optimum's `(C,)`, the agents' `(R, C)`."""
    source, mdp, n = "mdp/homeostat", mdps.make("homeostat"), len(options.seeds)
    tree, first_stocks = layers(mdp), np.linspace(-10, 10, 41)
    config, plain, num_envs, steps = settings_of(source, options)
    distance = lambda law, c: float((np.abs(c + law[0]) * law[1]).sum())
    best = lambda c: distance(law(mdp, tree, best_actions(tree, lambda g: -np.abs(c + g))), c)
    found = dict(first_stocks=first_stocks.tolist(), exact=[best(c) for c in first_stocks])
    for name, its in (("deep_eta", config), ("qrdqn", plain)):
        policy = train(name, source, repeated(its, n), options.seeds, its, num_envs, steps)
        of_stock = lambda c, policy=policy: [
            distance(x, c) for x in laws_of(policy, mdp, tree, np.full(n, c, np.float32))
        ]
        found[name] = np.transpose([of_stock(c) for c in first_stocks]).tolist()
    return found


def closed(found: dict, tau: str, name: str) -> np.ndarray:
    """The part of the way from the risk-neutral optimum's CVaR to the best one, `(R,)`."""
    start, end = (cvar(x, float(tau)) for x in (found["exact_neutral"], found["exact"][tau]))
    return (np.array([cvar(x, float(tau)) for x in found[name][tau]]) - start) / (end - start)


def tables(found: dict) -> str:
    lines = []
    if "slippery" in found:
        its = found["slippery"]
        lines += ["| slippery | tau | CVaR, mean of the seeds | by seed | mean return | closed, mean | least |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for tau in its["per_step"]:
            exact = its["exact"][tau]
            for label, x in (("the optimum", exact), ("the risk-neutral optimum", its["exact_neutral"])):
                mean = np.dot(*x)
                end = "1 | |" if x is exact else "0 | |"
                lines.append(f"| {label} | {tau} | {cvar(x, float(tau)):.3f} | | {mean:.3f} | {end}")
            for name, label in LABELS.items():
                values = [cvar(x, float(tau)) for x in its[name][tau]]
                mean, part = np.mean([np.dot(*x) for x in its[name][tau]]), closed(its, tau, name)
                by_seed = ", ".join(f"{v:.2f}" for v in values)
                lines.append(
                    f"| {label} | {tau} | {np.mean(values):.3f} | {by_seed} | {mean:.3f} | {part.mean():.2f} | "
                    f"{part.min():.2f} |"
                )
        lines += ["", "| slippery, tau | the optimum | the risk-neutral optimum | DηN, mean | least | first stocks |"]
        lines += ["|---|---|---|---|---|---|"]
        for tau, exact in its["exact"].items():
            values = [cvar(x, float(tau)) for x in its["deep_eta"][tau]]
            both = f"{cvar(exact, float(tau)):.3f} | {cvar(its['exact_neutral'], float(tau)):.3f}"
            stocks = ", ".join(f"{c:.1f}" for c in its["first_stock"][tau])
            lines.append(f"| {tau} | {both} | {np.mean(values):.3f} | {min(values):.3f} | {stocks} |")
        lines.append("")
    if "homeostat" in found:
        its = found["homeostat"]
        lines += ["| homeostat | mean abs(c_0 + G), c_0 from -10 to 10 | by seed |", "|---|---|---|"]
        lines.append(f"| the optimum | {np.mean(its['exact']):.3f} | |")
        for name, label in (("deep_eta", LABELS["deep_eta"]), ("qrdqn", LABELS["neutral"])):
            values = np.mean(its[name], 1)
            lines.append(f"| {label} | {values.mean():.3f} | {', '.join(f'{v:.2f}' for v in values)} |")
    return "\n".join(lines)


def draw_slippery(its: dict, path: Path):
    """Distribution functions of the learned and the exact returns at each tau; and the frontier over tau."""
    taus = list(its["per_step"])
    figure, axes = plt.subplots(1, len(taus) + 1, figsize=(5 * len(taus) + 4, 4.2), layout="constrained")
    for axis, tau in zip(axes, taus, strict=False):

        def step(law, axis=axis, **style):
            axis.step([*law[0], 0], np.cumsum([*law[1], 0]), where="post", **style)

        for name, color in (("per_step", "tab:orange"), ("deep_eta", "tab:blue")):
            for i, x in enumerate(its[name][tau]):
                step(x, color=color, alpha=0.5, linewidth=1, label=f"{LABELS[name]}, each seed" if i == 0 else None)
        step(its["exact_neutral"], color="tab:gray", linewidth=2, label="risk-neutral optimum, exact")
        step(its["exact"][tau], color="black", linewidth=2, linestyle="--", label="best CVaR, exact")
        axis.axhline(float(tau), color="tab:red", linewidth=0.8, label="tau")
        axis.set(yscale="log", ylim=(5e-4, 1.2), xlim=(-32, 0), xlabel="return", title=f"tau = {tau}")
    axes[0].set_ylabel("probability of at most this return")
    axes[0].legend(loc="upper left", frameon=False, fontsize=8)

    frontier = [float(tau) for tau in its["exact"]]
    learned = np.transpose([[cvar(x, float(tau)) for x in its["deep_eta"][tau]] for tau in its["exact"]])
    axes[-1].plot(frontier, learned.T, color="tab:blue", alpha=0.5, linewidth=1)
    for tau in taus:
        values = [cvar(x, float(tau)) for x in its["per_step"][tau]]
        axes[-1].plot([float(tau)] * len(values), values, ".", color="tab:orange", alpha=0.6)
    neutral = [cvar(its["exact_neutral"], tau) for tau in frontier]
    axes[-1].plot(frontier, neutral, color="tab:gray", linewidth=2)
    best = [cvar(x, float(tau)) for tau, x in its["exact"].items()]
    axes[-1].plot(frontier, best, color="black", linewidth=2, linestyle="--")
    axes[-1].set(xlabel="tau", ylabel="CVaR of the return", title="over tau")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_homeostat(its: dict, path: Path):
    """Final distance from 0 over first stocks."""
    figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for name, label, color in (
        ("qrdqn", LABELS["neutral"], "tab:orange"),
        ("deep_eta", LABELS["deep_eta"], "tab:blue"),
    ):
        axis.plot(its["first_stocks"], np.transpose(its[name]), color=color, alpha=0.5, linewidth=1)
        axis.plot([], [], color=color, label=f"{label}, each seed")
    axis.plot(its["first_stocks"], its["exact"], color="black", linestyle="--", label="the optimum, exact")
    axis.set(xlabel="first stock", ylabel="mean final abs(stock)", ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(options: Options):
    if not set(options.taus) <= set(FRONTIER):
        raise SystemExit(f"error: --taus {options.taus} must be among {FRONTIER}")
    if unknown := set(options.tasks) - {"slippery", "homeostat"}:
        raise SystemExit(f"error: --tasks {', '.join(unknown)} must be among slippery, homeostat")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "deep_eta_study.json"
    of = dict(taus=list(options.taus), seeds=list(options.seeds), steps=options.steps)
    found = json.loads(path.read_text()) if path.exists() else dict(of=of)
    if found["of"] != of:
        raise SystemExit(f"error: {path} holds {found['of']}, not {of}; choose another --out")
    plain = lambda x: x.tolist() if isinstance(x, np.ndarray | np.generic) else x
    for name, study in (("slippery", slippery), ("homeostat", homeostat)):
        if name in options.tasks and name not in found:
            found[name] = study(options)
            found = json.loads(json.dumps(found, default=plain))
            files.write(path, json.dumps(found).encode())
    if "slippery" in found:
        draw_slippery(found["slippery"], options.out / "deep_eta_slippery.png")
    if "homeostat" in found:
        draw_homeostat(found["homeostat"], options.out / "deep_eta_homeostat.png")
    files.write(options.out / "deep_eta_study.md", tables(found).encode())
    print(tables(found))


if __name__ == "__main__":
    main(tyro.cli(Options))
