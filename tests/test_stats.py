"""Statistics over seeds, worked by hand, and what W&B and the curve make of the lines."""

import numpy as np
import pytest

from runner import plots, stats, wandb_log


def test_iqm_drops_a_quarter_at_each_end():
    # 5 values: floor(5/4) = 1 dropped at each end, (2 + 3 + 10) / 3 = 5.
    assert stats.iqm([100.0, 3.0, 2.0, 10.0, -50.0]) == 5.0
    # 3 values: floor(3/4) = 0, the plain mean.
    assert stats.iqm([1.0, 2.0, 6.0]) == 3.0


def test_the_interval_holds_the_value_narrows_with_agreement_and_repeats():
    values = np.array([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0], [4.0, 5.0], [10.0, 5.0]])
    low, high = stats.interval(values)
    assert low[0] < stats.iqm(values)[0] < high[0]
    assert low[1] == high[1] == 5.0
    np.testing.assert_array_equal(stats.interval(values), (low, high))


def test_the_interval_covers_the_mean_of_a_normal_about_as_often_as_it_says():
    # Percentile bootstrap of the IQM over 10 seeds, nominal 95%: known to fall a little short in small samples.
    draws = np.random.default_rng(1).normal(3.0, 1.0, (10, 400))
    low, high = stats.interval(draws, resamples=500)
    assert 0.85 <= np.mean((low < 3.0) & (3.0 < high)) <= 0.97


def test_one_seed_has_no_interval():
    assert stats.interval(np.array([[4.0]])) == (4.0, 4.0)


LINES = [
    {
        "run": r,
        "seed": s,
        "chunk": c,
        "env_steps": 10 * c,
        "gradient_steps": c,
        "eval_return": v,
        "episode_return": None,
    }
    for c, values in ((1, (1.0, 3.0)), (2, (5.0, None)))
    for (r, s), v in zip(((0, 7), (1, 9)), values, strict=True)
]


def test_lines_become_one_row_per_run():
    x, y = plots.by_run(LINES, "eval_return", "env_steps")
    assert x.tolist() == [10, 20]
    np.testing.assert_array_equal(y, [[1.0, 5.0], [3.0, np.nan]])


def test_wandb_gets_mean_iqm_and_each_seed_and_no_null():
    logged = wandb_log.aggregate(LINES[:2])
    assert logged["eval_return"] == 2.0 and logged["eval_return_iqm"] == 2.0
    assert logged["seed_7/eval_return"] == 1.0 and logged["seed_9/eval_return"] == 3.0
    assert "episode_return" not in logged and logged["env_steps"] == 10
    # Chunk 2: seed 9 has no number, so no mean over the rest is made up.
    logged = wandb_log.aggregate(LINES[2:])
    assert "eval_return" not in logged and logged["seed_7/eval_return"] == 5.0


def test_nested_settings_take_the_names_that_sweep_files_use():
    assert wandb_log.flatten({"algo": "iqn", "config": {"gamma": 0.9}}) == {"algo": "iqn", "config.gamma": 0.9}


@pytest.mark.parametrize(("option", "sweep", "mode"), [(None, False, "disabled"), ("offline", False, "offline")])
def test_wandb_is_disabled_by_default(option, sweep, mode, monkeypatch):
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    assert wandb_log.mode_of(option) == mode


def test_under_a_sweep_agent_wandb_is_on(monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "x")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert wandb_log.mode_of(None) == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_log.mode_of(None) == "offline"
