"""What a launch tells the person who watches: a bar in a terminal, plain lines elsewhere, a table at the end."""

import time

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from runner.stats import interval, iqm

PLAIN_PERIOD = 10.0  # seconds between plain lines within a chunk


class Reporter:
    """Shows how far a launch is. `with Reporter(...) as report:` around the loop."""

    def __init__(self, total: int, done: int, unit: str, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.total, self.unit = total, unit
        self.first, self.started, self.printed = done, time.perf_counter(), time.perf_counter()
        self.rate, self.results = "", ""
        columns = (
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console) if self.console.is_terminal else None

    def __enter__(self):
        if self.bar:
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total, completed=self.first, text="compiling")
        return self

    def __exit__(self, *_):
        if self.bar:
            self.bar.stop()

    def say(self, text: str):
        self.console.print(text, markup=False)

    def advance(self, done: int, num_runs: int, steps_per_second: float):
        """After a slice. Args: steps so far of each run; steps per second of one run."""
        self.rate = f"{steps_per_second * num_runs:,.0f} steps/s"
        if self.bar:
            self.bar.update(self.task, completed=done, text=f"{self.rate} {self.results}")
        elif time.perf_counter() - self.printed > PLAIN_PERIOD:
            self._line(done, steps_per_second)

    def chunk(self, done: int, num_runs: int, steps_per_second: float, lines: list[dict]):
        """At the end of a chunk, with its lines of metrics."""
        shown = []
        for key, label in (("episode_return", "return"), ("eval_return", "eval")):
            values = [line[key] for line in lines if line.get(key) is not None]
            if values:
                shown.append(f"{label} {iqm(values):.1f}")
        self.results = "  ".join(shown)
        self.advance(done, num_runs, steps_per_second)
        if not self.bar:
            self._line(done, steps_per_second)

    def _line(self, done: int, steps_per_second: float):
        self.printed = time.perf_counter()
        left = (self.total - done) / max(steps_per_second, 1e-9)
        percent = 100 * done / self.total
        self.say(
            f"{done:>11,}/{self.total:,} {self.unit} {percent:3.0f}%  {self.results}  {self.rate}  {left:,.0f} s left"
        )


def closing_table(console: Console, lines: list[dict], diverged: dict):
    """One row per seed and one for all: the last evaluation, the mean of the last three, the best.

    Args: lines, all of metrics.jsonl; diverged, run to the chunk in which its loss stopped being finite.
    """
    runs = sorted({line["run"] for line in lines})
    table = Table("seed", "last eval", "last three", "best", "training return", title="eval_return: greedy episodes")
    rows = []
    for run in runs:
        own = [line for line in lines if line["run"] == run]
        evals = np.array([np.nan if line["eval_return"] is None else line["eval_return"] for line in own], float)
        training = next(
            (line["episode_return"] for line in own[::-1] if line.get("episode_return") is not None), np.nan
        )
        rows.append((evals[-1], evals[-3:].mean(), evals.max(), training))
        note = f" diverged in chunk {diverged[run]}" if run in diverged else ""
        table.add_row(f"{own[0]['seed']}{note}", *(f"{x:.1f}" for x in rows[-1]))
    if len(rows) > 1:
        cells = []
        for column in np.array(rows).T:
            low, high = interval(column)
            cells.append(f"{iqm(column):.1f} [{low:.1f}, {high:.1f}]")
        table.add_section()
        table.add_row("IQM [95%]", *cells)
    console.print(table)
