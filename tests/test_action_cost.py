"""The cost of actions: by hand across episode ends, what it changes for each kind of policy, and bad input."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from algos.bangbang_ppo import advantages
from envs.action_cost import ActionCost, cost, wrap
from envs.frame_stack import FrameStack
from envs.types import Transition, continuous_spec, episode_metrics, example_transition, pytree
from runner.evaluate import evaluate

close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # float32 against sums by hand


class ClockState(NamedTuple):
    obs: jax.Array


@pytree
class Clock:
    """Two environments that observe the time and give 1 a step: the first terminates at 3, the second is cut at 2."""

    num_envs = 2
    spec = continuous_spec(jax.ShapeDtypeStruct((1,), jnp.float32), 2, max_episode_steps=3)

    def reset(self, key):
        return ClockState(jnp.zeros((2, 1)))

    def step(self, key, state, action):
        now = state.obs + 1
        terminated, truncated = now[:, 0] == jnp.array([3, 9]), now[:, 0] == jnp.array([9, 2])
        done = terminated | truncated
        transition = Transition(state.obs, action, jnp.ones(2), now, terminated, truncated)
        return ClockState(now * ~done[:, None]), transition, episode_metrics(now[:, 0], now[:, 0], done)


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling takes longer than running
def rollout(env, key, actions):
    """Steps `env` through `actions`, `(T, num_envs, D)`. Returns what was acted on, the transitions, the episodes."""

    def step(state, inputs):
        next_state, transition, finished = env.step(inputs[0], state, inputs[1])
        return next_state, (state.obs, transition, finished)

    return jax.lax.scan(step, env.reset(key), (jax.random.split(key, len(actions)), actions))[1]


def signs(seed, *shape):
    return jnp.float32(np.random.default_rng(seed).choice([-1, 1], shape))


def test_cost_by_hand():
    # 2 (0.25 + 1) = 2.5;  ||(0.5, -1) - (1, 1)||^2 = 0.25 + 4 = 4.25, times 0.1
    action, last = jnp.array([[0.5, -1], [0.5, -1]]), jnp.ones((2, 2))
    close(cost(action, last, jnp.array([True, False]), 2.0, 0.1), [2.5 + 0.425, 2.5])


# Both environments act alike; c1 = 1, c2 = 10.
ACTIONS = np.float32([[1, 0], [1, 0], [0, -1], [0.5, 0.5]])
MAGNITUDES = [1, 1, 1, 0.5]
# ||(0, -1) - (1, 0)||^2 = 2; ||(.5, .5) - (0, -1)||^2 = 0.25 + 2.25 = 2.5. The first environment starts afresh at
# step 3, the second at step 2.
CHANGES = np.array([[0, 0], [0, 0], [2, 0], [0, 2.5]])


@pytest.fixture(scope="module")
def clock():
    actions = jnp.broadcast_to(ACTIONS[:, None], (4, 2, 2))
    return rollout(ActionCost(Clock(), jnp.float32(1), jnp.float32(10), True), jax.random.key(0), actions)


def test_rewards_and_reported_episodes_across_ends_by_hand(clock):
    _, transition, finished = clock
    close(transition.reward, 1 - np.array(MAGNITUDES)[:, None] - 10 * CHANGES)
    ends = np.array([[0, 0], [0, 1], [1, 0], [0, 1]])
    np.testing.assert_array_equal(transition.terminated | transition.truncated, ends)
    # First environment: 1 + 1 + (1 + 20) = 23. Second: 1 + 1 = 2, and then 1 + (0.5 + 25) = 26.5.
    close(finished["episode_action_cost"].total, [[0, 0], [0, 2], [23, 0], [0, 26.5]])
    np.testing.assert_array_equal(finished["episode_action_cost"].count, ends)
    close(finished["episode_return"].total, [[0, 0], [0, 2], [3, 0], [0, 2]])  # the task's own, without costs


def test_observations_end_in_the_last_action_and_successors_in_the_one_just_taken(clock):
    acted_on, transition, _ = clock
    np.testing.assert_array_equal(transition.obs, acted_on)
    np.testing.assert_array_equal(transition.next_obs[..., 1:], transition.action)  # also where an episode ends
    np.testing.assert_array_equal(transition.next_obs[..., 0], [[1, 1], [2, 2], [3, 1], [1, 2]])
    # Zeros at each start: step 0, and 3 of the first environment, 2 of the second.
    zero, a = [0, 0], ACTIONS.tolist()
    np.testing.assert_array_equal(transition.obs[:, 0, 1:], [zero, a[0], a[1], zero])
    np.testing.assert_array_equal(transition.obs[:, 1, 1:], [zero, a[0], zero, a[2]])
    np.testing.assert_array_equal(transition.obs[..., 0], [[0, 0], [1, 1], [2, 0], [0, 1]])


@pytest.fixture(scope="module")
def pendulum():
    """By weights, a rollout of 40 steps at random signs. Pendulum never terminates; here it is cut every 15 steps."""
    actions = signs(0, 40, 3, 1)
    make = partial(envs.make, "Pendulum-v1", 3, max_steps_in_episode=15)
    weights = {"free": {}, "magnitude": dict(action_cost=0.5), "change": dict(action_change_cost=0.25)}
    return actions, {name: rollout(make(**w), jax.random.key(1), actions) for name, w in weights.items()}


def test_magnitude_of_bang_bang_actions_costs_the_same_on_every_step(pendulum):
    _, runs = pendulum
    free, charged = runs["free"][1], runs["magnitude"][1]
    # c1 D = 0.5; rewards are up to 16, so a float32 keeps 2e-6 of them.
    close(free.reward - charged.reward, np.full((40, 3), 0.5), atol=4e-6)
    for name in ("obs", "action", "next_obs", "terminated", "truncated"):  # nothing else
        np.testing.assert_array_equal(getattr(free, name), getattr(charged, name))
    for name, mean in runs["free"][2].items():
        np.testing.assert_array_equal(mean.total, runs["magnitude"][2][name].total)
    paid = runs["magnitude"][2]["episode_action_cost"]
    assert paid.count.sum() == 6  # three environments, cut at 15 and 30
    close(paid.total.sum() / paid.count.sum(), 15 * 0.5)


def test_a_constant_cost_leaves_advantages_as_they_are_where_nothing_terminates(pendulum):
    _, runs = pendulum
    free, charged = runs["free"][1], runs["magnitude"][1]
    assert not free.terminated.any() and free.truncated.any()
    value, next_value = np.random.default_rng(2).normal(size=(2, 40, 3)).astype(np.float32)
    of = lambda t, v, v_next, lam: advantages(t.reward, v, v_next, t.terminated, t.truncated, 0.9, lam)
    # Values are those of the charged rewards: lower by c1 D / (1 - gamma) = 0.5 / 0.1 in every state.
    same = of(charged, value - 5, next_value - 5, 0.95)
    close(same, of(free, value, next_value, 0.95), atol=1e-4)  # sums of up to 15 terms of size 16
    # With values as they were (a network not trained on the cost yet) one-step advantages all fall by 0.5, and
    # so are equal once normalised.
    close(of(free, value, next_value, 0.0) - of(charged, value, next_value, 0.0), np.full((40, 3), 0.5), atol=4e-6)


def test_a_constant_cost_favours_an_early_end_where_one_can_come():
    # Without costs: reward 1, V = 0 in both states, delta = 1 whether the episode terminates or not. A cost of 0.1 a
    # step lowers V by 0.1 / (1 - 0.9) = 1: delta = 0.9 - (-1) = 1.9 with a termination, 0.9 - 0.9 - (-1) = 1 without.
    reward, value, next_value = jnp.full((1, 2), 0.9), jnp.full((1, 2), -1.0), jnp.full((1, 2), -1.0)
    terminated = jnp.array([[True, False]])
    close(advantages(reward, value, next_value, terminated, ~terminated, 0.9, 0.95), [[1.9, 1.0]])


def test_policies_that_can_rest_see_another_reward():
    # Per dimension: bang-bang always 1; bang-off-bang 0 or 1; a Gaussian's tanh anything between.
    rng, zero = np.random.default_rng(0), jnp.zeros((100, 2))
    started = jnp.zeros(100, bool)
    draws = (signs(0, 100, 2), rng.choice([-1.0, 0, 1], (100, 2)), np.tanh(rng.normal(size=(100, 2))))
    paid = [np.asarray(cost(jnp.float32(a), zero, started, 1.0, 0.0)) for a in draws]
    assert set(paid[0].tolist()) == {2} and set(paid[1].tolist()) == {0, 1, 2} and len(set(paid[2].tolist())) == 100


def test_changing_sides_costs_and_staying_does_not(pendulum):
    actions, runs = pendulum
    free, charged = runs["free"][1], runs["change"][1]
    fresh = np.zeros((40, 3), bool)
    fresh[[0, 15, 30]] = True
    moved = np.concatenate([np.zeros((1, 3)), np.diff(actions[..., 0], axis=0)]) != 0
    assert (moved & fresh).any() and (moved & ~fresh).any() and (~moved & ~fresh).any()
    # (1 - (-1))^2 = 4, times 0.25
    close(free.reward - charged.reward, moved & ~fresh, atol=4e-6)


def test_a_new_weight_does_not_compile_again_and_the_contract_is_kept():
    traces = []

    @jax.jit
    def first(env, key):
        traces.append(1)
        state = env.reset(key)
        return env.step(key, state, jnp.ones((2, 1)))[1].reward

    make = partial(envs.make, "Pendulum-v1", 2)
    rewards = [first(make(action_cost=c, action_change_cost=0.1), jax.random.key(0)) for c in (0.25, 1)]
    close(rewards[0] - rewards[1], [0.75, 0.75])
    assert len(traces) == 1

    env, key = make(action_cost=0.1, action_change_cost=0.1, frame_stack=3), jax.random.key(0)
    assert isinstance(env, FrameStack) and isinstance(env.env, ActionCost)
    assert env.spec.obs.shape == (3 * (3 + 1),) and env.num_envs == 2  # the stack is outside
    assert make(action_cost=0.1).spec == make().spec == make(action_cost=0, action_change_cost=0.0).spec
    assert not isinstance(make(action_cost=0), ActionCost)
    signature = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
    state = jax.eval_shape(env.reset, key)
    next_state, transition, _ = jax.eval_shape(env.step, key, state, jax.ShapeDtypeStruct((2, 1), jnp.float32))
    assert signature(next_state) == signature(state)  # else a scan fails
    batched = jax.tree.map(lambda x: ((2, *x.shape), x.dtype), jax.eval_shape(lambda: example_transition(env.spec)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), transition) == batched
    hash(env.spec)


class Push:
    """Acts with 1, whatever it sees."""

    def act(self, config, spec, params, obs, key):
        return jnp.ones((len(obs), spec.action_size))


def test_evaluation_reports_the_tasks_return_and_the_cost_beside_it():
    evaluated = evaluate(Push(), None, wrap(Clock(), 0.1, 0.3), jnp.zeros(1), jax.random.split(jax.random.key(0), 1))
    # Episodes of 3 and 2 steps of reward 1, each of which pays 0.1 (1 + 1); it never changes sides.
    expected = dict(eval_return=2.5, eval_length=2.5, eval_action_cost=0.2 * 2.5)
    assert set(evaluated) == set(expected)
    for name, value in expected.items():
        close(evaluated[name], [value])


@pytest.mark.parametrize(
    "name, params, message",
    [
        ("Pendulum-v1", dict(action_cost=-0.5), "action_cost -0.5 must be at least 0 and finite"),
        ("Pendulum-v1", dict(action_change_cost="-1"), "action_change_cost -1 must be at least 0 and finite"),
        ("Pendulum-v1", dict(action_cost=float("inf")), "action_cost inf must be at least 0 and finite"),
        ("Pendulum-v1", dict(action_cost=float("nan")), "action_cost must be a number, such as 0.0; got nan"),
        ("Pendulum-v1", dict(action_cost="much"), "action_cost must be a number, such as 0.0; got 'much'"),
        ("CartPole-v1", dict(action_cost=0.1), "need continuous actions; this environment's are discrete"),
    ],
)
def test_bad_costs_are_refused_in_one_line(name, params, message):
    with pytest.raises(ValueError) as error:
        envs.make(name, 2, **params)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_last_action_needs_a_vector_to_end_in():
    class Pixels(Clock):
        spec = continuous_spec(jax.ShapeDtypeStruct((10, 10, 3), jnp.bool_), 2, 3)

    with pytest.raises(ValueError, match="action_change_cost appends the last action to a vector of floats"):
        wrap(Pixels(), 0.0, 0.1)
    assert wrap(Pixels(), 0.1, 0.0).spec.obs.shape == (10, 10, 3)
