"""Success as the only reward: by hand on a line, where Brax's observations hold the distance, and bad input."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import brax_env, success
from envs.action_cost import ActionCost
from envs.action_cost import wrap as wrap_cost
from envs.brax_env import BraxEnv
from envs.frame_stack import FrameStack
from envs.success import TASKS, Success, distance
from envs.types import continuous_spec, example_transition
from runner.evaluate import evaluate

compile_fast = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling outweighs running


class Line:
    """A Brax environment 3 from its goal, which the action's value moves away; it pays 7 a step and never ends.

    Observes a number drawn for the episode, seven zeros, and the vector to the goal, where reacher has its own.
    """

    action_size = 1

    def reset(self, key):
        drawn = jax.random.uniform(key)
        return brax_env._brax().State((drawn, jnp.float32(3)), self.observe(drawn, 3.0), jnp.float32(0), jnp.float32(0))

    def step(self, state, action):
        drawn, position = state.pipeline_state
        position = position + action[0]
        return state.replace(pipeline_state=(drawn, position), obs=self.observe(drawn, position), reward=7.0)

    def observe(self, drawn, position):
        return jnp.zeros(11).at[0].set(drawn).at[8].set(position)


LINE = Line()
SPEC = continuous_spec(jax.ShapeDtypeStruct((11,), "float32"), 1, max_episode_steps=4)


def lines(num_envs=3, success_distance=1.0):
    return success.wrap(BraxEnv(LINE, SPEC, num_envs, pool_size=64), "brax/reacher", success_distance)


@compile_fast
def rollout(env, key, actions):
    """Steps `env` through `actions`, `(T, num_envs, D)`. Returns its start, what to act on next, transitions, ends."""

    def step(state, inputs):
        state, transition, finished = env.step(inputs[0], state, inputs[1])
        return state, (state.obs, transition, finished)

    start = env.reset(key)
    return start, *jax.lax.scan(step, start, (jax.random.split(key, len(actions)), actions))[1]


# The first goes straight there, twice over; the second stays; the third arrives on the last step of its time.
ACTIONS = -np.float32([[1, 0, 0], [1, 0, 0], [1, 0, 1], [1, 0, 1], [0, 0, 1], [0, 0, 1]])[..., None]
POSITIONS = [[2, 3, 3], [1, 3, 3], [2, 3, 2], [1, 3, 1], [3, 3, 2], [3, 3, 1]]
# 1 is reached on steps 2 and 4 by the first, on 4 and 6 by the third, whose second episode began at 3 on step 5.
REACHED = np.array([[0, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 1], [0, 0, 0], [0, 0, 1]])
CUT = np.array([[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0], [0, 0, 0]])
LENGTHS = [[0, 0, 0], [2, 0, 0], [0, 0, 0], [2, 4, 4], [0, 0, 0], [0, 0, 2]]


@pytest.fixture(scope="module")
def line():
    return rollout(lines(), jax.random.key(0), ACTIONS)


def test_distance_by_hand():
    # reacher: (2, 3, 6) has length 7; pusher: (5, 6) - (2, 2) = (3, 4) has length 5, whatever the heights.
    obs = jnp.zeros((2, 23)).at[:, 8:11].set(jnp.array([2.0, 3, 6]))
    obs = obs.at[0, 17:].set(jnp.array([5.0, 6, 9, 2, 2, -9])).at[1, 17:].set(1)
    np.testing.assert_array_equal(distance(obs, TASKS["brax/reacher"]), [7, 7])
    np.testing.assert_array_equal(distance(obs, TASKS["brax/pusher"]), [5, 0])


def test_success_pays_one_and_terminates_and_a_time_limit_truncates(line):
    _, _, transition, _ = line
    np.testing.assert_array_equal(transition.next_obs[..., 8], POSITIONS)
    np.testing.assert_array_equal(transition.reward, REACHED)  # of Brax's 7 nothing is left
    np.testing.assert_array_equal(transition.terminated, REACHED)
    np.testing.assert_array_equal(transition.truncated, CUT)  # the third: both on one step
    assert transition.reward.dtype == jnp.float32


def test_reported_episodes_are_those_of_the_sparse_task(line):
    *_, finished = line
    assert set(finished) == {"episode_return", "episode_length", "episode_success"}
    for mean in finished.values():
        np.testing.assert_array_equal(mean.count, REACHED | CUT)
    np.testing.assert_array_equal(finished["episode_success"].total, REACHED)
    np.testing.assert_array_equal(finished["episode_return"].total, REACHED)
    np.testing.assert_array_equal(finished["episode_length"].total, LENGTHS)


def test_a_success_is_followed_by_a_fresh_start(line):
    start, obs, transition, _ = line
    np.testing.assert_array_equal(obs[..., 8], np.where(REACHED | CUT, 3, POSITIONS))
    np.testing.assert_array_equal(transition.obs[1:], obs[:-1])
    drawn = obs[..., 0]  # of the episodes: the first's begin on steps 2 and 4
    assert set(np.asarray(drawn)[(REACHED | CUT) == 1].tolist()) <= set(np.asarray(start.pool[1])[:, 0].tolist())
    assert len({float(start.obs[0, 0]), float(drawn[1, 0]), float(drawn[3, 0])}) == 3
    np.testing.assert_array_equal(transition.next_obs[1, 0, 0], start.obs[0, 0])  # the successor is the old episode's


def test_the_contract_is_kept():
    signature = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
    env, key = lines(2), jax.random.key(0)
    assert env.spec == SPEC and env.num_envs == 2
    state = jax.eval_shape(env.reset, key)
    next_state, transition, _ = jax.eval_shape(env.step, key, state, jax.ShapeDtypeStruct((2, 1), jnp.float32))
    assert signature(next_state) == signature(state)  # else a scan fails
    batched = jax.tree.map(lambda x: ((2, *x.shape), x.dtype), jax.eval_shape(lambda: example_transition(SPEC)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), transition) == batched


def test_costs_and_stacks_come_outside():
    env = envs.make("brax/reacher", 2, success_distance="0.05", action_cost=0.1, frame_stack=2)
    assert [type(e) for e in (env, env.env, env.env.env)] == [FrameStack, ActionCost, Success]
    assert env.env.env.success_distance == np.float32(0.05)
    assert isinstance(envs.make("brax/reacher", 2), BraxEnv)


class Approach:
    """Moves by -1, whatever it sees."""

    def act(self, config, spec, params, obs, key):
        return -jnp.ones((len(obs), spec.action_size))


def test_evaluation_reports_success_and_the_cost_beside_it():
    env, keys = wrap_cost(lines(2), 0.1, 0.0), jax.random.split(jax.random.key(0), 2)
    evaluated = evaluate(Approach(), None, env, jnp.zeros(2), keys)  # two runs
    expected = dict(eval_return=1, eval_length=2, eval_success=1, eval_action_cost=0.2)
    assert set(evaluated) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(evaluated[name], [value, value], rtol=1e-6)  # float32 of 0.1 + 0.1


@pytest.mark.parametrize(
    "name, links, places",
    [
        # The fingertip is 0.11 from the elbow, at (0.21, 0): (0.21, 0) - (0.18, 0.04) = (0.03, -0.04), of length 0.05.
        ("brax/reacher", ("body1", "target"), ((0.1, 0, 0.01), (0.18, 0.04, 0.01))),
        # (0.45, 0.06) - (0.42, 0.02) = (0.03, 0.04), of length 0.05
        ("brax/pusher", ("object", "goal"), ((0.45, 0.06, -0.275), (0.42, 0.02, -0.323))),
    ],
)
def test_braxs_observations_hold_the_distance(name, links, places):
    from brax.base import Motion, Transform

    env = envs.make(name).env
    at = np.array([env.sys.link_names.index(link) for link in links])

    @compile_fast
    def observe(places):
        still = jnp.zeros((len(env.sys.link_names), 3))
        turn = jnp.zeros((len(still), 4)).at[:, 0].set(1)  # none
        x, xd = Transform(still.at[at].set(places), turn), Motion(still, still)
        q, qd = jnp.zeros(env.sys.q_size()), jnp.zeros(env.sys.qd_size())
        with brax_env.lenient():
            return env._get_obs(SimpleNamespace(x=x, xd=xd, q=q, qd=qd))

    obs = observe(jnp.array(places))
    np.testing.assert_allclose(distance(obs, TASKS[name]), 0.05, atol=1e-7)  # float32 keeps 3e-8 of 0.45


@pytest.mark.slow
def test_reachers_fingertip_meets_its_target():
    # The second joint at a right angle: the fingertip is at (0.1, 0.11). Targets 0.03 and 0.2 below it.
    q = jnp.array([[0, np.pi / 2, 0.1, 0.08], [0, np.pi / 2, 0.1, -0.09]])
    traces = []

    @compile_fast
    def first_step(env, key):
        traces.append(1)
        state = env.reset(key)
        with brax_env.lenient():
            inner = jax.vmap(env.env.env.pipeline_init)(q, jnp.zeros((2, 4)))
        return state, env.step(key, state._replace(inner=inner), jnp.zeros((2, 2)))

    make = partial(envs.make, "brax/reacher", 2, pool_size=3)
    start, (state, transition, finished) = first_step(make(success_distance=0.05), jax.random.key(0))
    np.testing.assert_allclose(distance(transition.next_obs, TASKS["brax/reacher"]), [0.03, 0.2], atol=2e-3)  # springs
    assert transition.terminated.tolist() == [True, False] and transition.reward.tolist() == [1, 0]
    assert finished["episode_success"].total.tolist() == [1, 0] and not transition.truncated.any()
    assert state.obs[0].tolist() in start.pool[1].tolist()
    assert state.obs[1].tolist() == transition.next_obs[1].tolist()
    # 0.01 is closer than both; a new distance is data and compiles nothing.
    _, (_, transition, _) = first_step(make(success_distance=0.01), jax.random.key(0))
    assert not transition.terminated.any() and not transition.reward.any() and len(traces) == 1


@pytest.mark.parametrize(
    "name, given, message",
    [
        ("brax/reacher", 0, "brax/reacher: success_distance 0 must be more than 0 and less than 0.41, as far as"),
        ("brax/reacher", -0.05, "success_distance -0.05 must be more than 0"),
        ("brax/reacher", 0.41, "success_distance 0.41 must be more than 0 and less than 0.41"),
        ("brax/reacher", float("inf"), "success_distance inf must be more than 0"),
        ("brax/reacher", float("nan"), "success_distance must be a number, such as 0.05; got nan"),
        ("brax/reacher", "near", "success_distance must be a number, such as 0.05; got 'near'"),
        ("brax/pusher", 0.17, "success_distance 0.17 must be more than 0 and less than 0.17, where episodes begin"),
        (
            "brax/ant",
            0.05,
            "brax/ant has no parameter 'success_distance'; those that have it: brax/reacher, brax/pusher",
        ),
        ("maze/umaze", 0.05, "maze/umaze has no parameter 'success_distance'"),
        ("CartPole-v1", 0.05, "CartPole-v1 has no parameter 'success_distance'"),
        ("brax/reecher", 0.05, "unknown environment 'brax/reecher'; closest: brax/reacher"),
    ],
)
def test_bad_input_is_one_line(name, given, message):
    with pytest.raises(ValueError) as error:
        envs.make(name, 2, success_distance=given)
    assert message in str(error.value) and "\n" not in str(error.value)
