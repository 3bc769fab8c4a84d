"""The study of bang-bang policies: scores, shares at the bounds and verdicts by hand, and who acts in a rollout."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import envs

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import bangbang_study as study


def result(returns, policy="bernoulli", actions=None):
    """A run whose seed r was evaluated as `returns[r]` says."""
    lines = [
        dict(run=r, env_steps=100 * (i + 1), eval_return=value, steps_per_second=10.0)
        for i in range(len(returns[0]))
        for r, value in enumerate(row[i] for row in returns)
    ]
    saved = dict(seeds=list(range(len(returns))), steps=400)
    return study.Result("bangbang_ppo", "Pendulum-v1", policy, saved, lines, actions)


def test_a_score_is_the_mean_of_the_last_three_evaluations():
    # (2 + 3 + 4) / 3 = 3, (6 + 6 + 9) / 3 = 7; mean 5; resampling two seeds gives 3, 5 or 7, its ends with 1/4 each.
    row = study.row(result([[-99, 2, 3, 4], [-99, 6, 6, 9]]), study.STATISTICS["mean"])
    assert row["scores"] == [3, 7]
    assert [row[name] for name in ("score", "low", "high")] == [5, 3, 7]
    assert row["env_steps"] == 400 and row["env_steps_per_second"] == 20  # both seeds together


def test_where_a_seed_diverged_there_is_no_score():
    # Trimming one of four at each end would drop the NaN and leave a number.
    returns = [[1.0] * 3, [1.0] * 3, [1.0] * 3, [1.0, 1.0, None]]
    rows = [study.row(result(returns, policy), study.iqm) for policy in ("gaussian", "bernoulli")]
    assert [row["score"] for row in rows] == [None, None]
    for row in rows:
        row["verdict"] = study.verdict(row, rows[0])
    text = study.table(rows, "iqm")
    assert text.count("1 of 4 seeds diverged") == 2 and "300 of 400" in text and "above: 0 of 0" in text


def test_a_seed_whose_loss_is_no_number_has_diverged_whatever_it_returned():
    r = result([[1.0] * 3, [2.0] * 3], "bernoulli")
    assert study.row(r, study.iqm)["score"] == 1.5
    r.lines[0]["policy_loss"] = None
    assert study.row(r, study.iqm)["scores"] == [None, 2.0]
    assert study.row(r, study.iqm)["score"] is None


def test_verdicts_are_against_gaussians_interval():
    gaussian = dict(score=5.0, low=4.0, high=6.0, seeds=[0, 1])
    of = lambda score, other=gaussian: study.verdict(dict(score=score), other)
    assert [of(x) for x in (3.9, 4.0, 6.0, 6.1)] == ["below", "within", "within", "above"]
    assert (
        of(5.0, None) == of(None) == of(5.0, gaussian | dict(seeds=[0])) == of(5.0, gaussian | dict(score=None)) == ""
    )


def test_histogram_by_hand():
    # Five bins around -1, -0.5, 0, 0.5, 1. 0.99 and -0.98 are within 0.02 of a bound; 0.97 is in the last bin, but not.
    actions = np.float32([[-1, -0.98, 0.1, 0.97], [0.99, 1, 0.4, np.nan], [np.nan] * 4])
    of = study.histogram(actions, num_bins=5)
    np.testing.assert_allclose(of["histogram"], np.array([2, 0, 1, 1, 3]) / 7)
    assert of["at_bounds"] == [2 / 4, 2 / 3, None]
    assert study.percent(of["at_bounds"]) == "58% (50 to 67)"
    assert study.percent([1.0, 1.0]) == "100%" and study.percent([None]) == study.percent(None) == ""


class Halves:
    """Acts with its parameter, explores with a coin."""

    def act(self, config, spec, params, obs, key):
        return jnp.full((len(obs), 1), params)

    def explore(self, config, spec, params, obs, key):
        return jax.random.rademacher(key, (len(obs), 1), jnp.float32)


def test_half_of_the_environments_act_and_half_explore():
    env, keys = envs.make("Pendulum-v1", 6), jax.random.split(jax.random.key(0), 2)
    played = np.asarray(study.play(Halves(), None, env, jnp.array([0.25, 0.5]), keys, 8))
    assert played.shape == (2, 8, 6, 1)
    assert (played[0, :, :3] == 0.25).all() and (played[1, :, :3] == 0.5).all()
    assert set(played[:, :, 3:].ravel()) == {-1, 1}  # 48 coins
    assert (played[0, :, 3:] != played[1, :, 3:]).any()
