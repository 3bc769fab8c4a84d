"""What a launch tells the person who watches: a bar in a terminal, plain lines elsewhere, a table at the end."""

import math
import time

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from runner.stats import interval, iqm

PLAIN_PERIOD = 10.0  # seconds between plain lines within a chunk


def console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def say(console: Console, text: str):
    console.print(text, markup=False)


class Reporter:
    """Shows how far a launch is. `with Reporter(...) as reporter:` around the loop."""

    def __init__(self, console: Console, total: int, done: int, unit: str):
        self.console, self.total, self.unit = console, total, unit
        self.results, self.speed, self.seconds_left = "", "", ""
        self.started, self.first = time.perf_counter(), done
        self.printed = -math.inf  # the first slice prints a line at once
        self.bar = None
        if console.is_terminal:
            count = TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit)
            self.bar = Progress(
                count, BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn(), console=console
            )
            self.task = self.bar.add_task("", total=total, completed=done, text="")

    def __enter__(self):
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_):
        if self.bar:
            self.bar.stop()

    def say(self, text: str):
        say(self.console, text)

    def advance(self, done: int, steps_per_second: float, within: bool):
        """After a slice. Args: steps so far of each run; steps per second of all runs together; whether the chunk
        goes on (where it does not, its own line follows)."""
        self.speed = f"{steps_per_second:,.0f} steps/s"
        self._show(done, within and time.perf_counter() - self.printed > PLAIN_PERIOD)

    def chunk(self, done: int, lines: list[dict]):
        """At the end of a chunk, with its lines of metrics: the interquartile mean over runs of the returns."""
        shown = []
        for key, label in (("episode_return", "return"), ("eval_return", "eval")):
            values = [line[key] for line in lines if line.get(key) is not None]
            shown += [f"{label} {iqm(values):.1f}"] if values else []
        self.results = "  ".join(shown)
        self._show(done, True)

    def _show(self, done: int, print_line: bool):
        if self.bar:
            self.bar.update(self.task, completed=done, text=f"{self.speed}  {self.results}")
        elif print_line:
            self.printed = time.perf_counter()
            left = (self.total - done) * (self.printed - self.started) / max(done - self.first, 1)
            share = f"{done:,}/{self.total:,} {self.unit} ({100 * done / self.total:.0f}%)"
            self.say(f"{share}  {self.results}  {self.speed}  {left:,.0f} s left")


def shown(x: float) -> str:
    """Nothing where there is no number: training returns of a run that learns from a dataset."""
    return f"{x:.1f}" if np.isfinite(x) else ""


def closing_table(console: Console, lines: list[dict], diverged: dict):
    """One row per seed and two for all: the last evaluation, the mean of the last three, the best, the training return.

    Args: lines, all of metrics.jsonl; diverged, run to the chunk in which its loss stopped being finite.
    """
    table = Table(
        "seed", title="Return: evaluation (last, mean of last 3, best), training episodes", title_justify="left"
    )
    for column in ("last", "last 3", "best", "training"):
        table.add_column(column, justify="right")
    rows = []
    for r in sorted({line["run"] for line in lines}):
        own = [line for line in lines if line["run"] == r]
        evals = np.array([line["eval_return"] for line in own], float)
        training = [line["episode_return"] for line in own if line.get("episode_return") is not None]
        rows.append((evals[-1], evals[-3:].mean(), evals.max(), training[-1] if training else np.nan))
        note = f" (diverged in chunk {diverged[r]})" if r in diverged else ""
        table.add_row(f"{own[0]['seed']}{note}", *map(shown, rows[-1]))
    if len(rows) > 1:
        columns = np.array(rows).T
        table.add_section()
        table.add_row("IQM", *(shown(iqm(column)) for column in columns))
        intervals = ("[{:.0f}, {:.0f}]".format(*interval(c)) if np.isfinite(c).all() else "" for c in columns)
        table.add_row("95% interval", *intervals)
    console.print(table)
