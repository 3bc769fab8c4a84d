"""Drawn goals: their laws, and that none lies beyond the end of an episode, in datasets and in rings that wrapped."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from envs.types import Transition, continuous_spec
from replay import datasets, goals

FUTURE = ("future_geometric", "future_uniform")
N = 20_000  # draws; five standard errors of a frequency are at most 0.018
SPREAD = 0.018


def frequencies(offsets, high):
    return np.bincount(offsets, minlength=high + 1)[: high + 1] / len(offsets)


# --- offsets ---

geometric = jax.jit(goals.geometric_offset)


def test_geometric_offsets_are_cut_at_the_horizon_and_renormalised():
    # gamma = 1/2 and horizon 3: 1/2, 1/4, 1/8 of a total of 7/8
    offsets = geometric(jax.random.key(0), jnp.full(N, 3), 0.5)
    np.testing.assert_allclose(frequencies(offsets, 3), [0, 4 / 7, 2 / 7, 1 / 7], atol=SPREAD)
    # gamma = 0.9 and a horizon of 1,000: untouched by it, a mean of 1 / (1 - 0.9)
    offsets = geometric(jax.random.key(1), jnp.full(N, 1_000), 0.9)
    assert abs(float(offsets.mean()) - 10) < 0.34  # five errors of sqrt(0.9) / 0.1 / sqrt(N)


def test_uniform_offsets_are_equally_likely():
    offsets = goals.uniform_offset(jax.random.key(0), jnp.full(N, 4))
    np.testing.assert_allclose(frequencies(offsets, 4), [0, 1 / 4, 1 / 4, 1 / 4, 1 / 4], atol=SPREAD)


@pytest.mark.parametrize("gamma", [1e-3, 0.99, 0.999999])
def test_offsets_stay_between_one_and_the_horizon_at_any_gamma(gamma):
    horizon = jnp.tile(jnp.array([1, 2, 1_000, 1_000_000]), N // 4)
    offsets = geometric(jax.random.key(0), horizon, gamma)
    assert (offsets >= 1).all() and (offsets <= horizon).all()
    assert (goals.uniform_offset(jax.random.key(0), horizon) <= horizon).all()
    if gamma == 0.999999:  # nearly uniform over a thousand
        assert abs(float(offsets[2::4].mean()) - 500.5) < 21  # five errors of 289 / sqrt(5,000)


# --- datasets ---


def three_episodes():
    """Episodes of transitions 0 to 3, 4 alone, and 5 to 9; what transition i leads to is i + 1."""
    n = np.arange(10, dtype=np.float32)[:, None]
    ends = np.isin(np.arange(10), [3, 4, 9])
    obs = np.where(np.isin(n, [4, 5]), n + 0.5, n)  # not the successors of what came before
    transitions = Transition(obs, n, n[:, 0], n + 1, np.zeros(10, bool), ends)
    return datasets.admit(transitions, continuous_spec(jax.ShapeDtypeStruct((1,), "float32"), 1, 0), "three")


LAST = np.array([3, 3, 3, 3, 4, 9, 9, 9, 9, 9])


@pytest.mark.parametrize("kind", FUTURE)
def test_future_goals_of_a_dataset_are_all_of_the_same_episode_from_the_own_successor_on(kind):
    index = jnp.repeat(jnp.arange(10), 500)
    drawn = goals.draw(kind, three_episodes(), jax.random.key(0), index, 0.9)
    for i in range(10):
        assert set(np.asarray(drawn[index == i])) == set(range(i, LAST[i] + 1))


def test_future_goals_of_a_dataset_follow_their_law():
    index = jnp.full(N, 7)  # horizon 3
    dataset = three_episodes()
    drawn = [goals.draw(kind, dataset, jax.random.key(2), index, 0.5) - 6 for kind in FUTURE]
    np.testing.assert_allclose(frequencies(drawn[0], 3), [0, 4 / 7, 2 / 7, 1 / 7], atol=SPREAD)
    np.testing.assert_allclose(frequencies(drawn[1], 3), [0, 1 / 3, 1 / 3, 1 / 3], atol=SPREAD)


def test_random_goals_of_a_dataset_are_of_any_transition():
    drawn = goals.draw("random", three_episodes(), jax.random.key(0), jnp.zeros(N, jnp.int32), 0.9)
    np.testing.assert_allclose(frequencies(drawn, 9), np.full(10, 0.1), atol=SPREAD)


# --- rings ---

ROWS, ENVS, TIME = 6, 3, 40
PERIODS = (10_000, 1, 4)  # an episode of environment e ends after so many steps: never, on each, on every fourth


def row(t, envs=ENVS, periods=PERIODS):
    """What all environments do at time t: transition t of environment e leads to 1000 e + t + 1."""
    here = 1000.0 * jnp.arange(envs, dtype=jnp.float32) + t
    ends = (t + 1) % jnp.array(periods) == 0
    terminated = jnp.arange(envs) == 1  # environment 1 terminates, the others are truncated
    return Transition(
        here[:, None], jnp.zeros((envs, 1)), here, here[:, None] + 1, ends & terminated, ends & ~terminated
    )


@cache
def rings():
    """The ring after 1, 2, ..., TIME rows."""
    insert = jax.jit(lambda replay, t: goals.insert(replay, row(t)))
    replay = goals.create(ROWS * ENVS, ENVS, jax.tree.map(lambda x: x[0], row(0)))
    out = []
    for t in range(TIME):
        replay = insert(replay, t)
        out.append(replay)
    return out


@jax.jit
def horizons(replay):
    """`(ROWS, ENVS)`, of the rows from the newest back."""
    rows = jnp.broadcast_to(replay.ring.inserted - 1 - jnp.arange(ROWS)[:, None], (ROWS, ENVS))
    return goals.horizon(replay, rows.ravel(), jnp.tile(jnp.arange(ENVS), ROWS)).reshape(ROWS, ENVS)


def test_horizons_of_a_ring_end_with_the_episode_or_with_the_newest_row_however_often_it_wrapped():
    for t, replay in enumerate(rings()):
        found = np.asarray(horizons(replay))
        for back in range(min(t + 1, ROWS)):
            start = t - back
            for env, period in enumerate(PERIODS):
                end = start
                while end < t and (end + 1) % period:
                    end += 1
                assert found[back, env] == end - start + 1, (t, back, env)


draw_from_ring = jax.jit(goals.draw_from_ring, static_argnums=0)


@pytest.mark.parametrize("kind", FUTURE)
@pytest.mark.parametrize("t", [2, 5, 6, 38])
def test_goals_of_a_ring_are_what_some_step_of_the_same_episode_led_to(kind, t):
    rows, envs = (x.ravel() for x in np.meshgrid(range(max(t - ROWS + 1, 0), t + 1), range(ENVS), indexing="ij"))
    rows, envs = np.repeat(rows, 200), np.repeat(envs, 200)
    goal = np.asarray(draw_from_ring(kind, rings()[t], jax.random.key(t), rows, envs, 0.9))[:, 0]
    for start in range(max(t - ROWS + 1, 0), t + 1):
        for env, period in enumerate(PERIODS):
            end = min(t, start + (-start - 1) % period)
            expected = {1000 * env + s + 1 for s in range(start, end + 1)}
            assert set(goal[(rows == start) & (envs == env)]) == expected


def test_transitions_and_random_goals_of_a_ring_are_any_that_it_holds():
    replay = rings()[20]
    rows, envs = goals.sample_rows(replay, jax.random.key(0), N)
    np.testing.assert_allclose(frequencies(rows - 15, 5), np.full(6, 1 / 6), atol=SPREAD)
    np.testing.assert_allclose(frequencies(envs, 2), np.full(3, 1 / 3), atol=SPREAD)
    assert (goals.take(replay, rows, envs).reward == 1000 * envs + rows).all()
    goal = np.asarray(draw_from_ring("random", replay, jax.random.key(1), rows, envs, 0.9))[:, 0]
    held = {1000 * env + t + 1 for env in range(ENVS) for t in range(15, 21)}
    values, counts = np.unique(goal, return_counts=True)
    assert set(values) == held
    np.testing.assert_allclose(counts / N, np.full(18, 1 / 18), atol=SPREAD)
    other = np.corrcoef(np.asarray(rows), goal % 1000)[0, 1]
    assert abs(other) < 0.04  # not that of the transition itself: five errors of 1 / sqrt(N)


def test_a_loop_that_inserts_and_draws_updates_the_ring_in_place():
    constant = row(0, 4, (10, 3, 5, 7))

    @partial(jax.jit, donate_argnums=0)
    def fill(replay, key):
        def body(replay, key):
            row_key, goal_key = jax.random.split(key)
            replay = goals.insert(replay, constant._replace(truncated=replay.ring.inserted % jnp.arange(3, 7) == 0))
            rows, envs = goals.sample_rows(replay, row_key, 8)
            goal = goals.draw_from_ring("future_geometric", replay, goal_key, rows, envs, 0.9)
            return replay, goals.take(replay, rows, envs).reward.sum() + goal.sum()

        return jax.lax.scan(body, replay, jax.random.split(key, 50))

    replay = goals.create(20_000, 4, jax.tree.map(lambda x: x[0], constant))
    compiled = fill.lower(replay, jax.random.key(0)).compile()
    memory = compiled.memory_analysis()
    nbytes = replay.ring.words.nbytes + replay.episode.nbytes + replay.last.nbytes
    assert memory.alias_size_in_bytes >= nbytes
    assert memory.temp_size_in_bytes < 0.1 * nbytes
    assert not tiny.copies_as_large_as(20_000, compiled)
