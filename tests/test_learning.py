"""Learning, at fixed seeds and the settings that `--algo NAME` alone uses. Slow: `pytest -m slow`."""

import numpy as np
import pytest
from launching import main, metrics

from runner.stats import iqm


@pytest.mark.slow
def test_iqn_solves_cartpole_at_its_example_settings(tmp_path):
    assert main("--algo", "iqn", "--run-dir", tmp_path / "run") == 0
    lines = metrics(tmp_path / "run")
    runs = [[x["eval_return"] for x in lines if x["run"] == r] for r in range(5)]
    final = np.array(runs)[:, -3:].mean(1)  # (5,) mean of the last three greedy evaluations
    assert iqm(final) >= 475, final
    assert (final < 300).sum() <= 1, final
