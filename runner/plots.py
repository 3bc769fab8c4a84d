"""The learning curve of a launch, drawn without a display."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from runner.stats import interval, iqm


def by_run(lines: list[dict], key: str, counter: str) -> tuple[np.ndarray, np.ndarray]:
    """Lines of metrics.jsonl to x `(points,)` and y `(R, points)`; null becomes NaN."""
    runs = sorted({line["run"] for line in lines})
    x = np.array([line[counter] for line in lines if line["run"] == runs[0]])
    value = lambda line: np.nan if line.get(key) is None else line[key]
    return x, np.array([[value(line) for line in lines if line["run"] == run] for run in runs], float)


def curve(lines: list[dict], path, title: str, counter="env_steps", key="eval_return"):
    """Draws IQM over seeds with its 95% bootstrap interval, and each seed thinly behind it, as a PNG."""
    x, y = by_run(lines, key, counter)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(x, y.T, color="tab:blue", alpha=0.25, linewidth=0.8)
    many = len(y) > 1
    axes.plot(x, iqm(y), color="tab:blue", linewidth=2, label=f"IQM of {len(y)} seeds" if many else "1 seed")
    if many:
        axes.fill_between(x, *interval(y), color="tab:blue", alpha=0.2, label="95% bootstrap interval")
    axes.set(xlabel=counter.replace("_", " "), ylabel=key.replace("_", " "), title=title)
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, format="png", dpi=140)
    plt.close(figure)
    temporary.replace(path)
