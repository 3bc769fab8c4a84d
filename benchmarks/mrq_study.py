"""MR.Q's learning curves at small widths: trains, evaluates, draws the curve and prints a table (docs/mrq.md).

    python benchmarks/mrq_study.py --task pendulum     5 seeds, 15k env steps, about 9 minutes on one core
    python benchmarks/mrq_study.py --task cartpole     5 seeds, 40k env steps, about 55 minutes
    python benchmarks/mrq_study.py --task breakout     3 seeds, 50k env steps, about 85 minutes

Settings are those of `scripts/train.py --algo mrq --env ENV`: published, but for widths of 128. A
policy of discrete actions is evaluated twice at each point, by the authors' draw from the policy and by
its likeliest action: one launch of scripts/train.py does one of them. The evaluations change nothing in training.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import tyro

import envs
from algos import mrq
from runner import check, files, run, settings, train
from runner.evaluate import evaluate
from runner.stats import interval, iqm

TASKS = dict(pendulum="Pendulum-v1", cartpole="CartPole-v1", breakout="Breakout-MinAtar")
SEEDS = dict(pendulum=(0, 1, 2, 3, 4), cartpole=(0, 1, 2, 3, 4), breakout=(0, 1, 2))


@dataclasses.dataclass(frozen=True)
class Args:
    task: Literal["pendulum", "cartpole", "breakout"]
    seeds: tuple[int, ...] | None = None  # by default 5, on Breakout 3
    steps: int | None = None  # env steps, by default the task's own
    eval_period: int | None = None  # env steps
    eval_episodes: int = 16
    out: Path = Path("runs/mrq_study")  # folder of TASK.jsonl and TASK.png


def policies(config, spec) -> dict:
    """The ways to act that are evaluated, by name."""
    if spec.action_type == "continuous":
        return dict(mean=config)
    return {name: dataclasses.replace(config, greedy=name == "greedy") for name in ("stochastic", "greedy")}


def study(args, lines: files.MetricsFile):
    """Trains all seeds at once, and writes one line for each seed at each evaluation."""
    source = TASKS[args.task]
    values, _ = settings.defaults(mrq, "mrq", source)
    seeds, config = args.seeds or SEEDS[args.task], values["config"]
    steps, eval_period = args.steps or values["steps"], args.eval_period or values["eval_period"]
    env, eval_env = envs.make(source, values["num_envs"]), envs.make(source, args.eval_episodes)
    keys = jax.vmap(jax.random.key)(jnp.array(seeds))
    check.multiple("--eval-period", eval_period, "one step,", mrq.period(config, env))
    check.multiple("--steps", steps, "--eval-period", eval_period)
    if steps <= config.prefill:
        raise check.BadInput(f"--steps {steps} must be more than the {config.prefill} random ones")
    eval_keys = jax.vmap(lambda key: jax.random.fold_in(key, train.EVAL))(keys)
    to_evaluate = {name: run.broadcast(c, len(seeds)) for name, c in policies(config, env.spec).items()}
    configs = run.broadcast(config, len(seeds))
    carry = run.init(mrq, configs, env, keys)
    started = time.perf_counter()
    while (env_steps := int(carry.states.env_steps[0])) < steps:
        carry = run.advance(mrq, configs, env, run.start_chunk(carry), eval_period // mrq.period(config, env))
        env_steps = int(carry.states.env_steps[0])
        at = jax.vmap(lambda key, n=env_steps: jax.random.fold_in(key, n))(eval_keys)
        play = lambda c, at=at, params=carry.states.params: evaluate(mrq, c, eval_env, params, at)["eval_return"]
        returns = {name: play(c) for name, c in to_evaluate.items()}
        training = run.finish(carry.metrics)["episode_return"]
        seconds = round(time.perf_counter() - started, 1)
        lines.append(
            [
                dict(seed=seed, env_steps=env_steps, seconds=seconds, training=number(training[r]))
                | {name: number(x[r]) for name, x in returns.items()}
                for r, seed in enumerate(seeds)
            ]
        )
        scores = ", ".join(f"{name} {iqm(x):.1f}" for name, x in returns.items())
        print(f"{env_steps:,} env steps, {seconds:.0f} s: {scores}", flush=True)


def number(x):
    return float(x) if np.isfinite(x) else None


def curves(lines: list[dict]) -> tuple[np.ndarray, dict]:
    """x `(points,)`, and by name of the policy y `(seeds, points)`."""
    seeds = list(dict.fromkeys(line["seed"] for line in lines))
    x = np.array([line["env_steps"] for line in lines if line["seed"] == seeds[0]])
    names = [name for name in lines[0] if name in ("mean", "stochastic", "greedy")]
    return x, {n: np.array([[line[n] for line in lines if line["seed"] == s] for s in seeds], float) for n in names}


def draw(path: Path, task: str, lines: list[dict]):
    x, y_of = curves(lines)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, y in y_of.items():
        (line,) = axes.plot(x, iqm(y), linewidth=2, label=f"{name}: IQM of {len(y)} seeds, 95% interval")
        axes.fill_between(x, *interval(y), color=line.get_color(), alpha=0.2, linewidth=0)
        axes.plot(x, y.T, color=line.get_color(), alpha=0.25, linewidth=0.7)
    axes.set(xlabel="env steps", ylabel="eval return", title=f"MR.Q, widths of 128, on {TASKS[task]}")
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=140)


def table(lines: list[dict]) -> str:
    """IQM over seeds [95% interval] at eight points, as markdown."""
    x, y_of = curves(lines)
    rows = [f"| env steps | {' | '.join(y_of)} |", "|---" * (1 + len(y_of)) + "|"]
    for i in np.unique(np.linspace(0, len(x) - 1, 8).round().astype(int)):
        cell = lambda y, i=i: "{:.1f} [{:.1f}, {:.1f}]".format(iqm(y[:, i]), *interval(y[:, i]))
        rows.append(f"| {x[i]:,} | {' | '.join(cell(y) for y in y_of.values())} |")
    final = {name: [round(float(v), 1) for v in y[:, -1]] for name, y in y_of.items()}
    return "\n".join(rows) + f"\n\nlast evaluation, each seed: {json.dumps(final)}"


def main():
    args = tyro.cli(Args, description=__doc__)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.task}.jsonl"
    path.unlink(missing_ok=True)
    lines = files.MetricsFile(path)
    study(args, lines)
    draw(path.with_suffix(".png"), args.task, lines.read())
    print(table(lines.read()))


if __name__ == "__main__":
    main()
