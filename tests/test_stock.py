"""The stock beside the observation: its arithmetic, and that the environment within is left as it is."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from probes import table

from envs import stock

NUM_STEPS = 12


def world(num_envs=3):
    """Rewards 1, 2, 3 on the way through three states; action 1 truncates in the second."""
    return table(np.eye(3), [1, 0, 0], [1, 2, 0], [1, 2, 3], [0, 0, 1], [0, [0, 1], 0], num_envs=num_envs)


@cache
def played():
    """`NUM_STEPS` steps of three environments from the stocks -1, 0, 4 at gamma 1/2; numbers 1 and 2 truncate.

    Returns: states before each step, transitions and finished episodes, leading axis of steps; and the last state.
    """
    env = stock.wrap(world())

    @jax.jit
    def play(key):
        state = stock.start(env.reset(key), jnp.array([-1.0, 0.0, 4.0]), 0.5)

        def one(state, key):
            after, transition, finished = env.step(key, state, jnp.array([0, 1, 1]))
            return after, (state, transition, finished)

        last, (states, transitions, finished) = jax.lax.scan(one, state, jax.random.split(key, NUM_STEPS))
        return states, transitions, finished, last

    return jax.tree.map(np.asarray, play(jax.random.key(0)))


def test_stock_after_a_reward_by_hand():
    assert stock.update(1.0, 2.0, 0.5) == 6  # (1 + 2) / (1/2)
    assert stock.update(-3.0, 1.0, 1.0) == -2


rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=30)


@given(rewards, st.floats(-10, 10), st.floats(0.5, 1))
def test_first_stock_and_return_are_the_last_stock_discounted(rewards, c0, gamma):
    c, total = np.float64(c0), 0.0
    for t, r in enumerate(rewards):
        c, total = stock.update(c, r, gamma), total + gamma**t * r
    # rounding of 30 float64 steps, of stocks up to 2^30 times the rewards
    np.testing.assert_allclose(c0 + total, gamma ** len(rewards) * c, atol=1e-9)


def test_stocks_of_an_episode_by_hand():
    states, transitions, _, _ = played()
    # From -1 on rewards 1, 2, 3: (-1 + 1) / .5 = 0, (0 + 2) / .5 = 4, (4 + 3) / .5 = 14; then again from -1.
    assert states.obs[1][:4, 0].tolist() == [-1, 0, 4, -1]
    assert transitions.obs[1][:4, 0].tolist() == [-1, 0, 4, -1]
    assert transitions.next_obs[1][:4, 0].tolist() == [0, 4, 14, 0]  # the true successor, before the reset
    # From 4 on rewards 1, 2, cut off there: 10, 24
    assert states.obs[1][:3, 2].tolist() == [4, 10, 4]
    assert transitions.next_obs[1][:3, 2].tolist() == [10, 24, 10]


def test_finished_episodes_report_discounted_return_and_final_stock():
    _, transitions, finished, _ = played()
    done = transitions.terminated | transitions.truncated
    discounted, final = finished["episode_discounted_return"], finished["episode_stock"]
    assert (discounted.count == done).all() and (final.count == done).all()
    assert done[:, 0].tolist() == [False, False, True] * 4 and done[:, 1].tolist() == [False, True] * 6
    # 1 + 2/2 + 3/4 = 2.75, and from -1 that is 1.75; 1 + 2/2 = 2, from 0 and from 4
    assert discounted.total[done].reshape(-1).max() == 2.75
    assert (discounted.total[done[:, 0], 0] == 2.75).all() and (final.total[done[:, 0], 0] == 1.75).all()
    assert (discounted.total[done[:, 2], 2] == 2).all() and (final.total[done[:, 2], 2] == 6).all()
    assert (discounted.total[~done] == 0).all() and (final.total[~done] == 0).all()
    assert (finished["episode_return"].total[done[:, 0], 0] == 6).all()  # the environment's own


def test_the_environment_within_is_left_as_it_is():
    env, inner = stock.wrap(world()), world()
    assert env.num_envs == 3
    assert env.spec == inner.spec._replace(obs=(inner.spec.obs, jax.ShapeDtypeStruct((), jnp.float32)))
    key, action = jax.random.key(3), jnp.array([0, 1, 0])
    ours, theirs = env.reset(key), inner.reset(key)
    assert (ours.obs[0] == theirs.obs).all() and (ours.obs[1] == 0).all()
    (_, ours, finished), (_, theirs, reported) = env.step(key, ours, action), inner.step(key, theirs, action)
    assert (ours.obs[0] == theirs.obs).all() and (ours.next_obs[0] == theirs.next_obs).all()
    for name in ("action", "reward", "terminated", "truncated"):
        assert (getattr(ours, name) == getattr(theirs, name)).all()
    assert all((finished[name].total == reported[name].total).all() for name in reported)
    assert (ours.next_obs[1] == ours.reward).all()  # until `start`, stocks are 0 and gamma is 1


@pytest.mark.parametrize("first_stock", [2.0, [2.0, 3.0, 4.0]], ids=["one", "each"])
def test_start_sets_every_stock_and_gamma(first_stock):
    state = stock.start(stock.wrap(world()).reset(jax.random.key(0)), first_stock, 0.9)
    expected = np.broadcast_to(first_stock, 3)
    assert (state.obs[1] == expected).all() and (state.first_stock == expected).all()
    assert state.gamma == np.float32(0.9) and state.gamma.dtype == jnp.float32


def test_restart_moves_only_the_episodes_that_have_just_begun():
    _, _, _, last = played()
    after = stock.restart(last, jnp.array([True, False, True]), jnp.array([7.0, 8.0, 9.0]))
    assert after.obs[1].tolist() == [7, last.obs[1][1], 9]
    assert after.first_stock.tolist() == [7, 0, 9]
    assert (after.obs[0] == last.obs[0]).all() and after.gamma == 0.5
