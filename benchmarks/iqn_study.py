"""i-QN with K = 5 against K = 1 (DQN) on MinAtar: trains both, draws both curves and prints a table.

    python benchmarks/iqn_study.py             Breakout and Asterix, 5 seeds, 1M env steps
    python benchmarks/iqn_study.py --quick     Breakout, 3 seeds, 100k gradient steps

Equal for every K: env steps, gradient steps, batch, replay, exploration, optimiser, torso, D, seeds and
evaluation, all from sweeps/iqn/minatar_<game>.yaml. Not equal, as in the paper's comparison on Atari:

- T. DQN copies its target every 8,000 env steps there and i-DQN shifts its window every 6,000: each has
  the period its authors chose for it. Here K > 1 has the file's T and K = 1 has 8,000 / 6,000 of it.
- Parameters and time. K heads share one torso; the table gives the time of an update.

Stopped by Ctrl-C or killed, the same command goes on where it was.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from algos import iqn
from runner import files, plots, settings
from runner.stats import interval, iqm

TARGET_RATIO = 8_000 / 6_000  # DQN's target period over i-DQN's window, published
GAMES = ["Breakout", "Asterix"]  # those with a sweep file
QUICK = dict(games=["Breakout"], updates=100_000, seeds=[0, 1, 2], out="runs/iqn_study_quick")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", choices=GAMES, default=GAMES)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="env steps, prefill included (default 1M)")
    length.add_argument("--updates", type=int, help="gradient steps, instead of --steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--iterates", type=int, nargs="+", default=[1, 5], help="values of K")
    parser.add_argument("--out", default="runs/iqn_study", help="folder of the run directories and the picture")
    parser.add_argument("--quick", action="store_true", help="defaults of the short version")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args()
    if args.steps:
        args.updates = None  # --quick's default
    return args


def launch(args, game: str, k: int) -> tuple[Path, int, list[str]]:
    """Run directory, length in env steps and flags of one game and K."""
    values, _ = settings.defaults(iqn, "iqn", f"{game}-MinAtar")
    config = values["config"]
    steps = args.steps or (config.prefill + args.updates * config.train_period if args.updates else 1_000_000)
    unit = max(values["num_envs"], config.train_period)  # env steps of one iteration
    fits = lambda n: steps % (n * unit) == 0 and steps > n * config.prefill
    points = next(filter(fits, range(40, 0, -1)), None)  # evaluations
    if points is None:
        sys.exit(f"error: --steps {steps} must be a multiple of {unit} and more than the prefill {config.prefill}")
    window = config.window_period if k > 1 else round(config.window_period * TARGET_RATIO)
    flags = {
        "--algo": ["iqn"],
        "--env": [f"{game}-MinAtar"],
        "--seeds": args.seeds,
        "--steps": [steps],
        "--eval-period": [steps // points],
        "--config.num-iterates": [k],
        "--config.window-period": [window],
    }
    return Path(args.out) / f"{game}-K{k}", steps, [str(x) for flag, v in flags.items() for x in (flag, *v)]


def train(run_dir: Path, steps: int, flags: list[str]):
    """Trains to the end, or goes on with what is there. Exits where training was stopped or refused."""
    done = run_dir / "checkpoint" / str(steps)  # the last checkpoint is named by its env steps
    if done.exists():
        return
    where = "--resume" if (run_dir / "config.json").exists() else "--run-dir"
    command = [sys.executable, str(settings.ROOT / "scripts" / "train.py"), *flags, where, str(run_dir)]
    code = subprocess.Popen(command).wait()
    if code or not done.exists():
        sys.exit(code or f"stopped; the same command goes on with {run_dir}")


class Result(NamedTuple):
    game: str
    k: int
    settings: dict  # config.json
    lines: list[dict]  # metrics.jsonl


def draw(path: Path, results: list[Result]):
    """One panel for each game: IQM over seeds with its 95% bootstrap interval, one curve for each K."""
    games = list(dict.fromkeys(result.game for result in results))
    figure, axes = plt.subplots(1, len(games), figsize=(5.5 * len(games), 4), layout="constrained", squeeze=False)
    for panel, game in zip(axes[0], games, strict=True):
        for result in (r for r in results if r.game == game):
            x, y = plots.by_run(result.lines, "eval_return", "env_steps")
            (curve,) = panel.plot(x, iqm(y), label=f"K = {result.k}" + " (DQN)" * (result.k == 1))
            panel.fill_between(x, *interval(y), alpha=0.2, color=curve.get_color(), linewidth=0)
        title = f"{game}-MinAtar: IQM of {len(y)} seeds, 95% interval"
        panel.set(xlabel="env steps", ylabel="eval return", title=title)
        panel.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    figure.savefig(path, dpi=140)


def table(results: list[Result]) -> str:
    """IQM over seeds [95% interval] of the mean over the last three chunks, as markdown."""
    rows = ["| game | K | T | seeds | updates | eval return [95%] | training return [95%] | ms per update, all seeds |"]
    rows += ["|---|---|---|---|---|---|---|---|"]
    for game, k, saved, lines in results:
        config, returns = saved["config"], []
        for key in ("eval_return", "episode_return"):
            values = plots.by_run(lines, key, "env_steps")[1][:, -3:].mean(1)
            returns.append("{:.2f} [{:.2f}, {:.2f}]".format(iqm(values), *interval(values)))
        speed = np.median([line["steps_per_second"] for line in lines])  # env steps of each seed
        ms = f"{1000 * config['train_period'] / speed:.2f}"
        cells = (game, k, config["window_period"], len(saved["seeds"]), lines[-1]["gradient_steps"], *returns, ms)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def main():
    args, results = arguments(), []
    signal.signal(signal.SIGINT, lambda *_: None)  # left to the launch under way, which writes a checkpoint
    for game in args.games:
        for k in args.iterates:
            run_dir, steps, flags = launch(args, game, k)
            train(run_dir, steps, flags)
            lines = files.MetricsFile(run_dir / "metrics.jsonl").read()
            results.append(Result(game, k, settings.read(run_dir), lines))
    picture = Path(args.out) / "iqn_study.png"
    draw(picture, results)
    print(f"{table(results)}\n\nIQM over seeds of the mean of the last three evaluations; {picture}")


if __name__ == "__main__":
    main()
