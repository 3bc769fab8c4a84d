"""Gaussian against Bernoulli and bang-off-bang policies: trains, and then reports scores, curves and action histograms.

    python benchmarks/bangbang_study.py run --tasks Pendulum-v1 brax/hopper    launches what is not done yet
    python benchmarks/bangbang_study.py run --extra "--env-params.action-cost 0.1" --tag cost0.1
    python benchmarks/bangbang_study.py report                                 of all runs under --out

`run` is `scripts/train.py --algo A --env T --config.policy P` for each combination, with the settings of
sweeps/A/ or of the algorithm's EXAMPLE, into OUT/A/T+TAG/P. Stopped, the same command goes on where it was.

`report` writes study.md, study.json, curves.png and histograms.png. A seed's score is the mean of its last three
evaluations, of the task's own return; intervals are 95% bootstraps over seeds. Actions are those of every seed's last
policy, by `act` (evaluated) and by `explore` (sampled), for an episode's length in each environment, with restarts.
"""

import dataclasses
import itertools
import json
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tyro

import envs
from envs.types import EDGE
from runner import checkpoint, cli, files, plots, policy, settings, train
from runner.check import BadInput
from runner.stats import interval, iqm

COLORS = dict(gaussian="tab:blue", bernoulli="tab:orange", bang_off_bang="tab:green")  # in the order of the report
STATISTICS = dict(iqm=iqm, mean=partial(np.mean, axis=0))
BINS = 41  # of a histogram, the first and last around the bounds


@dataclasses.dataclass(frozen=True)
class Run:
    """Trains every combination that is not done yet, one after the other."""

    algos: tuple[str, ...] = ("bangbang_ppo",)
    tasks: tuple[str, ...] = ("Pendulum-v1",)  # ids of environments
    policies: tuple[Literal["gaussian", "bernoulli", "bang_off_bang"], ...] = tuple(COLORS)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    extra: str = ""  # flags of scripts/train.py that are passed on, in quotes
    tag: str = ""  # tells runs of one task apart: added to the name of its folder
    out: Path = Path("runs/bangbang_study")


@dataclasses.dataclass(frozen=True)
class Report:
    """Tables and pictures of the runs found, finished or not."""

    out: Path = Path("runs/bangbang_study")
    statistic: Literal["iqm", "mean"] = "iqm"  # over seeds
    episodes: int = 16  # environments played for the histograms by each of `act` and `explore`; 0: none


def arguments_left(run_dir: Path, flags: list[str]) -> list[str] | None:
    """What to call scripts/train.py with, None where the run is done. Raises BadInput where another is there."""
    launch = cli.parse(flags)
    if not (run_dir / "config.json").exists():
        return [*flags, "--run-dir", str(run_dir)]
    saved, options = settings.read(run_dir), launch.options
    names = ("seeds", "num_envs", "eval_period", "eval_episodes")
    there = {n: saved[n] for n in names} | saved["config"] | saved["source_params"]
    asked = {n: getattr(options, n) for n in names} | dataclasses.asdict(options.config) | launch.source_params
    asked = json.loads(json.dumps(asked))
    for n, old, new in ((n, there.get(n), asked.get(n)) for n in there | asked):
        if old != new:
            raise BadInput(f"{run_dir} holds a run with {n} {old}, not {new}; choose another --tag or --out")
    newest, steps = checkpoint.latest(run_dir / "checkpoint"), max(saved["steps"], options.steps)
    done = newest is not None and int(newest.name) >= steps  # a checkpoint is named by its env steps
    return None if done else ["--resume", str(run_dir), "--steps", str(steps)]


def run(args: Run):
    launches, failed, stopped = [], [], []
    for algo, task, name in itertools.product(args.algos, args.tasks, args.policies):
        run_dir = args.out / algo / (task.replace("/", "-") + (f"+{args.tag}" if args.tag else "")) / name
        flags = ["--algo", algo, "--env", task, "--config.policy", name, "--seeds", *map(str, args.seeds)]
        launches.append((run_dir, arguments_left(run_dir, flags + shlex.split(args.extra))))
    signal.signal(signal.SIGINT, lambda *_: stopped.append(True))  # left to the launch, which writes a checkpoint
    for number, (run_dir, arguments) in enumerate(launches, 1):
        print(f"[{number}/{len(launches)}] {run_dir}{': done' if arguments is None else ''}", flush=True)
        if arguments is not None:
            code = subprocess.call([sys.executable, str(settings.ROOT / "scripts" / "train.py"), *arguments])
            if stopped:
                sys.exit("stopped; the same command goes on")
            failed += [str(run_dir)] * bool(code)  # it said why
    if failed:
        sys.exit(f"error: {len(failed)} of {len(launches)} launches failed: {', '.join(failed)}")


class Result(NamedTuple):
    algo: str
    task: str  # with the tag
    policy: str
    saved: dict  # config.json
    lines: list[dict]  # metrics.jsonl
    actions: dict | None  # by evaluated and sampled: histogram, at_bounds


def find(args: Report) -> list[Result]:
    """All runs that have been evaluated, by algorithm, task and policy."""
    results = []
    for path in args.out.glob("*/*/*/metrics.jsonl"):
        run_dir, (algo, folder, name, _) = path.parent, path.parts[-4:]
        if name in COLORS and (lines := files.MetricsFile(path).read()):
            saved = settings.read(run_dir)
            task = saved["source"] + folder[len(saved["source"]) :]
            results.append(Result(algo, task, name, saved, lines, actions(run_dir, saved, args.episodes)))
    return sorted(results, key=lambda r: (r.algo, r.task, list(COLORS).index(r.policy)))


@partial(jax.jit, static_argnames=("algo", "steps"))
def play(algo, config, env, params, keys, steps: int):
    """Actions `(R, steps, num_envs, D)`: half of the environments act by `act`, the others by `explore`."""
    evaluated = jnp.arange(env.num_envs)[:, None] < env.num_envs // 2

    def one(params, key):
        def step(state, key):
            act_key, explore_key, env_key = jax.random.split(key, 3)
            mode = algo.act(config, env.spec, params, state.obs, act_key)
            draw = algo.explore(config, env.spec, params, state.obs, explore_key)
            action = jnp.where(evaluated, mode, draw)
            return env.step(env_key, state, action)[0], action

        reset_key, key = jax.random.split(key)
        return jax.lax.scan(step, env.reset(reset_key), jax.random.split(key, steps))[1]

    return jax.vmap(one)(params, keys)


def histogram(actions, num_bins=BINS) -> dict:
    """Shares of `num_bins` bins centred from -1 to 1 over all seeds, and each seed's share within EDGE of a bound.

    Args: actions `(R, ...)`. A seed whose actions are not finite has no share, None.
    """
    finite = [x[np.isfinite(x)] for x in actions]
    bins = np.round((np.concatenate(finite) + 1) / 2 * (num_bins - 1)).astype(int)
    counts = np.bincount(bins, minlength=num_bins)
    at_bounds = [float((np.abs(x) >= 1 - EDGE).mean()) if x.size else None for x in finite]
    return dict(histogram=(counts / max(counts.sum(), 1)).tolist(), at_bounds=at_bounds)


def actions(run_dir: Path, saved: dict, episodes: int) -> dict | None:
    """Histograms of what the last policies do, kept in actions.json; None where there is nothing to play."""
    path, cache = run_dir / "policy" / "last.msgpack", run_dir / "actions.json"
    if not episodes or not path.exists():
        return None
    made_of = dict(episodes=episodes, policy=path.stat().st_mtime_ns)
    if cache.exists() and (kept := json.loads(cache.read_text()))["made_of"] == made_of:
        return kept
    algo, config, spec, params = policy.load(path)
    if not hasattr(algo, "explore") or spec.action_type == "discrete":
        return None
    env = envs.make(saved["source"], 2 * episodes, **saved["source_params"])
    keys = jax.random.split(jax.random.key(0), len(saved["seeds"]))
    params, _ = policy.read(
        path, jax.tree.map(lambda x: jax.ShapeDtypeStruct((*keys.shape, *x.shape), x.dtype), params)
    )
    played = np.asarray(play(algo, config, env, params, keys, spec.max_episode_steps or 1000))
    evaluated, sampled = np.split(played, 2, 2)
    kept = dict(made_of=made_of, evaluated=histogram(evaluated), sampled=histogram(sampled))
    files.write(cache, json.dumps(kept).encode())
    return kept


def row(r: Result, statistic) -> dict:
    """The numbers of one run. Where a seed has diverged there is no score, which would be one of the survivors."""
    last = lambda key: plots.by_run(r.lines, key, "env_steps")[1][:, -3:].mean(1)  # (R,)
    scores = last("eval_return")
    # Asked, as an IQM may drop what is not finite, and a discrete policy acts on even where its network is not.
    finite = [all(train.finite_loss(line) for line in r.lines if line["run"] == i) for i in range(len(scores))]
    scores = np.where(finite, scores, np.nan)
    known = np.isfinite(scores).all()
    score, low, high = (statistic(scores), *interval(scores, statistic)) if known else [np.nan] * 3
    numbers = dict(score=score, low=low, high=high, action_cost=last("eval_action_cost").mean())
    numbers["env_steps_per_second"] = np.median([line["steps_per_second"] for line in r.lines]) * len(scores)
    numbers = {name: train.number(x) for name, x in numbers.items()}
    shares = {f"at_bounds_{way}": r.actions and r.actions[way]["at_bounds"] for way in ("sampled", "evaluated")}
    named = dict(algo=r.algo, task=r.task, policy=r.policy, seeds=r.saved["seeds"], steps=r.saved["steps"])
    named |= dict(env_steps=r.lines[-1]["env_steps"], scores=[train.number(x) for x in scores])
    return named | numbers | shares


def verdict(row: dict, gaussian: dict | None) -> str:
    """Where a score lies against Gaussian's interval: above, within or below; empty where either is not known."""
    if not gaussian or row is gaussian or None in (row["score"], gaussian["score"]) or len(gaussian["seeds"]) == 1:
        return ""
    return "above" if row["score"] > gaussian["high"] else "within" if row["score"] >= gaussian["low"] else "below"


def table(rows: list[dict], statistic: str) -> str:
    """Markdown."""
    show = lambda x: f"{x:.{2 if abs(x) < 10 else 1 if abs(x) < 1000 else 0}f}"
    costly = any(r["action_cost"] is not None for r in rows)
    head = ["algorithm", "task", "policy", "seeds", "env steps", f"return, {statistic} [95%]"]
    head += ["action cost"] * costly + ["at bounds: sampled", "evaluated", "env steps/s, all seeds", "against Gaussian"]
    lines = [head, ["---"] * len(head)]
    for r in rows:
        seeds, steps = len(r["seeds"]), f"{r['env_steps']:,}" + f" of {r['steps']:,}" * (r["env_steps"] < r["steps"])
        score = f"{r['scores'].count(None)} of {seeds} seeds diverged"
        if r["score"] is not None:
            score = show(r["score"]) + (f" [{show(r['low'])}, {show(r['high'])}]" if seeds > 1 else "")
        cells = [r["algo"], r["task"], r["policy"], seeds, steps, score]
        cells += ["" if r["action_cost"] is None else show(r["action_cost"])] * costly
        cells += [percent(r["at_bounds_sampled"]), percent(r["at_bounds_evaluated"])]
        lines.append([*cells, f"{r['env_steps_per_second']:,.0f}", r["verdict"]])
    judged = [r["verdict"] for r in rows if r["policy"] == "bernoulli" and r["verdict"]]
    closing = f"Bernoulli within Gaussian's interval or above: {len(judged) - judged.count('below')} of {len(judged)}"
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + f"\n\n{closing}\n"


def percent(shares: list | None) -> str:
    """Mean over seeds, and in brackets the least and the most of one."""
    known = [100 * s for s in shares or () if s is not None]
    low, high = (f"{end(known, default=0):.0f}" for end in (min, max))
    return f"{np.mean(known):.0f}%" + f" ({low} to {high})" * (low != high) if known else ""


def draw_curves(path: Path, results: list[Result], statistic: str):
    """One panel for each algorithm and task, one curve for each policy."""
    panels = list(dict.fromkeys((r.algo, r.task) for r in results))
    rows, columns = -(-len(panels) // 3), min(3, len(panels))
    figure, axes = plt.subplots(rows, columns, figsize=(4.8 * columns, 3.6 * rows), layout="constrained", squeeze=False)
    for panel in axes.flat[len(panels) :]:
        panel.set_axis_off()
    for r in results:
        panel = axes.flat[panels.index((r.algo, r.task))]
        x, y = plots.by_run(r.lines, "eval_return", "env_steps")
        diverged = np.isnan(y[:, -1]).sum()
        label = f"{r.policy}, {len(y)} seed{'s' * (len(y) > 1)}" + f", {diverged} diverged" * bool(diverged)
        panel.plot(x, STATISTICS[statistic](y), color=COLORS[r.policy], label=label)
        panel.fill_between(x, *interval(y, STATISTICS[statistic]), alpha=0.2, color=COLORS[r.policy], linewidth=0)
        panel.set(xlabel="env steps", ylabel=f"eval return: {statistic}, 95% interval", title=f"{r.algo}\n{r.task}")
        panel.xaxis.set_major_formatter(plots.matplotlib.ticker.EngFormatter(sep=""))
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)


def draw_histograms(path: Path, results: list[Result]):
    """One row for each algorithm and task, one column for each policy: shares of actions, pooled over dimensions."""
    rows = list(dict.fromkeys((r.algo, r.task) for r in results))
    looks = dict(figsize=(11.4, 0.6 + 2.4 * len(rows)), layout="constrained", sharex=True, sharey="row")
    figure, axes = plt.subplots(len(rows), len(COLORS), squeeze=False, **looks)
    edges = (np.arange(BINS + 1) - BINS / 2) * 2 / (BINS - 1)
    for (i, (algo, task)), (j, name) in itertools.product(enumerate(rows), enumerate(COLORS)):
        panel = axes[i, j]
        found = next((r.actions for r in results if (r.algo, r.task, r.policy) == (algo, task, name)), None)
        panel.set_title(name if found else f"{name}: no run", fontsize=9)
        panel.set_ylabel(f"{algo}\n{task.replace('+', chr(10))}\nshare of actions", fontsize=8)
        looks = dict(sampled=dict(color=COLORS[name], alpha=0.4, fill=True), evaluated=dict(color="k"))
        for way in looks if found else ():
            label = f"{way}, at bounds: {percent(found[way]['at_bounds']) or 'not finite'}"
            panel.stairs(found[way]["histogram"], edges, label=label, **looks[way])
            panel.legend(frameon=False, fontsize=7, loc="upper center")
    for panel in axes.flat:
        panel.set(ymargin=0.35, xlabel="action")
        panel.set_ylim(bottom=0)
        panel.label_outer()
    figure.savefig(path, dpi=140)


def report(args: Report):
    results = find(args)
    if not results:
        raise BadInput(f"no evaluated runs under {args.out}; `run` makes them")
    rows = [row(r, STATISTICS[args.statistic]) for r in results]
    gaussian = {(r["algo"], r["task"]): r for r in rows if r["policy"] == "gaussian"}
    for r in rows:
        r["verdict"] = verdict(r, gaussian.get((r["algo"], r["task"])))
    text = table(rows, args.statistic)
    files.write(args.out / "study.md", text.encode())
    files.write(args.out / "study.json", json.dumps(rows, indent=1).encode())
    draw_curves(args.out / "curves.png", results, args.statistic)
    if played := [r for r in results if r.actions]:
        draw_histograms(args.out / "histograms.png", played)
    print(f"{text}\nin {args.out}: study.md, study.json, curves.png" + ", histograms.png" * bool(played))


def main():
    joined = shlex.join(sys.argv[1:]).replace("--extra ", "--extra=")  # else tyro takes its value for a flag
    args = tyro.cli(Run | Report, description=__doc__, args=shlex.split(joined))
    try:
        run(args) if isinstance(args, Run) else report(args)
    except BadInput as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
