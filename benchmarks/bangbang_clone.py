"""Imitation between policies: clones trained Gaussian and Bernoulli agents into policies of each kind.

    python benchmarks/bangbang_study.py run --tasks Pendulum-v1       # trains the teachers
    python benchmarks/bangbang_clone.py --tasks Pendulum-v1           # about a minute a clone

Tells what a policy can represent from how it explores (Seyde et al. 2021). For each task and teacher, run 0's last
policy acts, by its likeliest action, for `transitions` env steps (`scripts/collect.py`), and `algos/bc.py` clones what
it did into each student, five seeds each. A clone is evaluated by its own likeliest action; its score is the IQM over
its seeds of the mean of the last three evaluations, the interval a 95% bootstrap. Writes clones.md and clones.json in
OUT/clones.
"""

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from bangbang_study import arguments_left

from runner import files, plots, settings
from runner.check import BadInput
from runner.stats import interval, iqm

Policy = Literal["gaussian", "bernoulli", "bang_off_bang"]


@dataclasses.dataclass(frozen=True)
class Args:
    tasks: tuple[str, ...] = ("Pendulum-v1",)  # folders of OUT/ALGO, for example brax-hopper
    algo: str = "bangbang_ppo"  # the teachers'
    teachers: tuple[Policy, ...] = ("gaussian", "bernoulli")
    students: tuple[Policy, ...] = ("gaussian", "bernoulli", "bang_off_bang")
    labels: tuple[str, ...] = ("soft", "sign")  # of the discrete students
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # of the clones
    transitions: int = 50_000
    steps: int = 20_000  # gradient steps
    out: Path = Path("runs/bangbang_study")  # where bangbang_study.py put the teachers


def script(name: str, *arguments):
    command = [sys.executable, str(settings.ROOT / "scripts" / name), *map(str, arguments)]
    if subprocess.call(command, stdout=subprocess.DEVNULL):
        sys.exit(f"error: {' '.join(command)}")


def clone(args: Args, task: str, teacher: str, student: str, label: str) -> dict:
    """Collects and clones what is not there yet; returns the row of the table."""
    folder = args.out / "clones" / args.algo / task / teacher
    data, run_dir = folder / f"data-{args.transitions}.npz", folder / f"{student}-{label}"
    policy = args.out / args.algo / task / teacher / "policy" / "last.msgpack"
    if not data.exists() or data.stat().st_mtime < policy.stat().st_mtime:
        script("collect.py", "--policy", policy, "--steps", args.transitions, "--out", data, "--overwrite")
    flags = ["--algo", "bc", "--dataset", data, "--config.policy", student, "--config.label", label]
    flags += ["--config.hidden", 64, 64, "--config.learning-rate", 1e-3, "--seeds", *args.seeds]
    flags += ["--steps", args.steps, "--eval-period", args.steps // 10, "--eval-episodes", 64]
    left = arguments_left(run_dir, list(map(str, flags)))
    if left is not None:
        script("train.py", *left)
    if arguments_left(run_dir, list(map(str, flags))) is not None:
        sys.exit(f"{run_dir} was stopped; the same command goes on")
    saved, lines = settings.read(run_dir), files.MetricsFile(run_dir / "metrics.jsonl").read()
    last = lambda key: plots.by_run(lines, key, "gradient_steps")[1][:, -3:].mean(1)
    scores, data = last("eval_return"), saved["dataset"]["statistics"]
    return dict(
        task=task,
        teacher=teacher,
        teacher_return=data["return_mean"],
        teacher_at_bounds=data["at_bounds"],
        student=student,
        label="" if student == "gaussian" else label,
        scores=scores.tolist(),
        score=float(iqm(scores)),
        interval=[float(x) for x in interval(scores)],
        at_bounds=float(last("at_bounds").mean()),
    )


def table(rows: list[dict]) -> str:
    """Markdown."""
    lines = [["task", "teacher", "its return", "at bounds", "student", "labels", "clone's return", "modes at bounds"]]
    lines.append(["---"] * len(lines[0]))
    for r in rows:
        score = f"{r['score']:.1f} [{r['interval'][0]:.1f}, {r['interval'][1]:.1f}]"
        lines.append([r["task"], r["teacher"], f"{r['teacher_return']:.1f}", f"{100 * r['teacher_at_bounds']:.0f}%"])
        lines[-1] += [r["student"], r["label"], score, f"{100 * r['at_bounds']:.0f}%"]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main():
    args, rows = tyro.cli(Args, description=__doc__), []
    for task, teacher, student in itertools.product(args.tasks, args.teachers, args.students):
        for label in args.labels[:1] if student == "gaussian" else args.labels:
            try:
                rows.append(clone(args, task, teacher, student, label))
            except BadInput as error:
                sys.exit(f"error: {error}")
            print(json.dumps(rows[-1]), flush=True)
    out = args.out / "clones"
    files.write(out / "clones.json", json.dumps(rows, indent=1).encode())
    files.write(out / "clones.md", table(rows).encode())
    print(table(rows))


if __name__ == "__main__":
    main()
