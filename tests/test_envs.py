"""Environments: ends told apart, true successors, fresh starts, the agent's units, and errors of one line."""

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import brax_env, gymnax_env
from envs.brax_env import BraxEnv
from envs.types import continuous_spec, example_transition

ROOT = Path(__file__).parents[1]
SLOW = pytest.mark.slow
CHEAP = ("CartPole-v1", "Pendulum-v1", "Breakout-MinAtar", "FrozenLake-misc")  # stepped by the fast tests


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling takes longer than running
def rollout(env, key, actions):
    """Steps `env` through `actions`, `(T, num_envs, ...)`. Returns the initial state and, with leading
    axis T, the observations to act on next, the transitions, and the episodes finished."""

    def step(state, inputs):
        state, transition, finished = env.step(inputs[0], state, inputs[1])
        return state, (state.obs, transition, finished)

    start = env.reset(key)
    return start, *jax.lax.scan(step, start, (jax.random.split(key, len(actions)), actions))[1]


def always(action, steps, num_envs=2):
    return jnp.broadcast_to(jnp.asarray(action), (steps, num_envs, *np.shape(action)))


def signature(tree):
    """All that decides whether a jitted function compiles again: structure, shapes, dtypes, weak types."""
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


def check_contract(env):
    """What every algorithm relies on, by shapes alone: nothing is compiled."""
    key = jax.random.key(0)
    state = jax.eval_shape(env.reset, key)
    action = jax.ShapeDtypeStruct((env.num_envs, *env.spec.action.shape), env.spec.action.dtype)
    next_state, transition, finished = jax.eval_shape(env.step, key, state, action)
    assert signature(next_state) == signature(state)  # else a chunk compiles again, or its scan fails
    example = jax.eval_shape(lambda: example_transition(env.spec))
    batched = jax.tree.map(lambda x: ((env.num_envs, *x.shape), x.dtype), example)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), transition) == batched
    assert jax.tree.map(lambda x, s: (x.shape, x.dtype) == ((env.num_envs, *s.shape), s.dtype), state.obs, env.spec.obs)
    assert set(finished) == {"episode_return", "episode_length"}
    assert all(m.total.shape == m.count.shape == (env.num_envs,) for m in finished.values())
    assert env.spec.max_episode_steps > 0
    hash(env.spec)


# gymnax


@pytest.fixture(scope="module")
def short_cartpole():
    """CartPole cut after 5 steps, pushed left and right in turn: 12 steps of 2 environments."""
    env = envs.make("CartPole-v1", 2, max_steps_in_episode=5)
    actions = jnp.tile(jnp.arange(12)[:, None] % 2, (1, 2))
    return env, *rollout(env, jax.random.key(0), actions)


def test_a_time_limit_truncates_and_does_not_terminate(short_cartpole):
    _, _, _, transition, _ = short_cartpole
    # Steps 5 and 10 of 12, zero-based 4 and 9, in both environments.
    expected = np.isin(np.arange(12), (4, 9))
    assert (transition.truncated == expected[:, None]).all()
    assert not transition.terminated.any()


def test_a_fallen_pole_terminates_and_does_not_truncate():
    # An angle limit of zero: the first step ends every episode, long before step 5.
    env = envs.make("CartPole-v1", 2, max_steps_in_episode=5, theta_threshold_radians=0.0)
    *_, transition, finished = rollout(env, jax.random.key(0), always(1, 12))
    assert transition.terminated.all()
    assert not transition.truncated.any()
    assert (finished["episode_length"].total == 1).all()


def test_an_episode_can_terminate_on_its_last_allowed_step(short_cartpole):
    # Push each pole the way it leans, right where the angle is negative, so that the angle grows;
    # then limit it to between the first environment's after 4 and after 5 pushes.
    env, start, *_ = short_cartpole
    push = jnp.tile((start.obs[None, :, 2] < 0).astype(int), (12, 1))
    *_, transition, _ = rollout(env, jax.random.key(0), push)
    angle = jnp.abs(transition.next_obs[:5, 0, 2])
    assert angle[4] > angle[:4].max()
    limit = float(angle[3] + angle[4]) / 2
    env = envs.make("CartPole-v1", 2, max_steps_in_episode=5, theta_threshold_radians=limit)
    *_, transition, finished = rollout(env, jax.random.key(0), push)
    assert transition.terminated[:5, 0].tolist() == [False, False, False, False, True]
    assert transition.truncated[:5, 0].tolist() == [False, False, False, False, True]
    assert finished["episode_length"].count[:5, 0].sum() == 1  # one end, not two


def test_next_obs_is_the_true_successor_on_the_last_step_too(short_cartpole):
    _, start, obs, transition, _ = short_cartpole
    # CartPole moves by x + 0.02 x' and angle + 0.02 angle' (Euler, tau = 0.02).
    x, speed, angle, turning = jnp.moveaxis(transition.obs, -1, 0)
    np.testing.assert_allclose(transition.next_obs[..., 0], x + 0.02 * speed, atol=1e-6)  # one float32 rounding
    np.testing.assert_allclose(transition.next_obs[..., 2], angle + 0.02 * turning, atol=1e-6)
    # The next observation to act on is that successor, except after an end, where it is a new start.
    ended = transition.truncated[..., None]
    assert jnp.where(ended, True, obs == transition.next_obs).all()
    assert jnp.where(ended, (obs != transition.next_obs) & (jnp.abs(obs) <= 0.05), True).all()
    assert (transition.obs[0] == start.obs).all() and (transition.obs[1:] == obs[:-1]).all()


def test_every_episode_starts_afresh(short_cartpole):
    _, start, obs, _, _ = short_cartpole
    starts = np.concatenate([start.obs, obs[4], obs[9]])  # 3 starts of 2 environments
    assert len(np.unique(starts[:, 0])) == 6


def test_finished_episodes_report_return_and_length():
    # Torque 1 on a pendulum cut after 3 steps: the return is the sum of three rewards, none of them 1.
    env = envs.make("Pendulum-v1", 2, max_steps_in_episode=3)
    *_, transition, finished = rollout(env, jax.random.key(0), always([0.5], 7))
    expected = np.zeros((7, 2), np.float32)
    expected[2] = transition.reward[:3].sum(0)
    expected[5] = transition.reward[3:6].sum(0)
    assert (transition.reward < 0).all()
    # The same three float32 sums.
    np.testing.assert_allclose(finished["episode_return"].total, expected, rtol=1e-6)
    assert finished["episode_length"].total.tolist() == [[0, 0], [0, 0], [3, 3]] * 2 + [[0, 0]]
    for metric in finished.values():
        assert metric.count.tolist() == [[0, 0], [0, 0], [1, 1]] * 2 + [[0, 0]]


def test_actions_fill_the_box_of_the_environment():
    # Pendulum's torque is in [-2, 2]: 1 -> 2, -1 -> -2, 0.5 -> 1.
    env = envs.make("Pendulum-v1", 3)
    assert env._env_action(jnp.array([[1.0], [-1.0], [0.5]])).tolist() == [[2], [-2], [1]]
    # Torque turns a pendulum by 3 / (m l^2) * torque * dt = 0.15 torque a step; 0.5 of 2 is 1.
    env = envs.make("Pendulum-v1", 2, max_steps_in_episode=3)
    half, zero = (rollout(env, jax.random.key(0), always([a], 7))[2].next_obs[0, :, 2] for a in (0.5, 0.0))
    np.testing.assert_allclose(half - zero, [0.15, 0.15], atol=1e-6)  # the difference of two float32 near 1


def test_each_dimension_of_an_action_has_its_own_bounds():
    env = envs.make("PointRobot-misc", 2)
    assert env._env_action(jnp.array([[1.0, -1.0], [0.0, 0.5]])) == pytest.approx(np.array([[0.1, -0.1], [0.0, 0.05]]))
    # Bounds [0, 3] and [-2, 2]: (1, -1) -> (3, -2) and (0, 0.5) -> (1.5, 1).
    env = dataclasses.replace(env, action_low=jnp.array([0.0, -2.0]), action_high=jnp.array([3.0, 2.0]))
    assert env._env_action(jnp.array([[1.0, -1.0], [0.0, 0.5]])).tolist() == [[3, -2], [1.5, 1]]


def test_bounds_follow_the_parameters():
    env = envs.make("Pendulum-v1", 1, max_torque=3)
    assert env._env_action(jnp.ones((1, 1))).tolist() == [[3]]


def test_a_new_parameter_value_does_not_compile_again(short_cartpole):
    _, start, _, transition, _ = short_cartpole
    compiled = rollout._cache_size()
    env = envs.make("CartPole-v1", 2, max_steps_in_episode=5, gravity="20")
    *_, other, _ = rollout(env, jax.random.key(0), jnp.tile(jnp.arange(12)[:, None] % 2, (1, 2)))
    assert rollout._cache_size() == compiled
    # Euler: the first step moves by the old speeds, and gravity shows in the new ones.
    assert ((other.next_obs[0] == transition.next_obs[0]) == np.array([[True, False, True, False]])).all()


def test_a_longer_pole_is_heavier_on_its_cart_too():
    # gymnax keeps masspole * length = 0.1 * 0.7 and masscart + masspole = 2 + 0.1 beside their factors.
    params = envs.make("CartPole-v1", length=0.7, masscart=2).params
    assert float(params.polemass_length) == pytest.approx(0.07)
    assert float(params.total_mass) == pytest.approx(2.1)
    assert float(envs.make("CartPole-v1", length=0.7, polemass_length=1.0).params.polemass_length) == 1


def test_a_scalar_observation_becomes_one_hot():
    env = envs.make("FrozenLake-misc", 2)
    assert env.spec.obs == jax.ShapeDtypeStruct((16,), jnp.float32)
    start, _, transition, _ = rollout(env, jax.random.key(0), always(2, 5))
    assert start.obs.tolist() == [[1] + [0] * 15] * 2  # the upper left corner of 4 x 4 is cell 0
    assert (transition.next_obs.sum(-1) == 1).all()
    assert len(np.unique(transition.next_obs.argmax(-1))) > 1


def test_observations_keep_their_dtype():
    assert envs.make("Breakout-MinAtar").spec.obs == jax.ShapeDtypeStruct((10, 10, 4), jnp.bool_)
    assert envs.make("FourRooms-misc").spec.obs == jax.ShapeDtypeStruct((4,), jnp.int32)
    assert envs.make("CartPole-v1").spec.obs == jax.ShapeDtypeStruct((4,), jnp.float32)


@pytest.mark.parametrize(
    "name", [n if n in CHEAP else pytest.param(n, marks=SLOW) for n in gymnax_env.names() if "MinAtar" in n]
)
def test_minatar_observations_are_zeros_and_ones(name):
    # Or storing them as bool would lose something. Random play, 1,000 steps of 2 environments.
    env = envs.make(name, 2)
    actions = jax.random.randint(jax.random.key(0), (1000, 2), 0, env.spec.num_actions)

    @jax.jit
    def others(key):
        step = lambda inner, x: env.env.step(x[0], inner, x[1], env.params)[:2][::-1]

        def body(inner, inputs):
            key, action = inputs
            inner, obs = jax.vmap(step)(inner, (jax.random.split(key, 2), action))
            return inner, ((obs != 0) & (obs != 1)).sum()

        _, inner = jax.vmap(env.env.reset, (0, None))(jax.random.split(key, 2), env.params)
        return jax.lax.scan(body, inner, (jax.random.split(key, 1000), actions))[1].sum()

    assert others(jax.random.key(0)) == 0


@pytest.mark.parametrize("name", [n for n in gymnax_env.names() if n != "MNISTBandit-bsuite"])
def test_every_gymnax_environment_keeps_the_contract(name):
    env = envs.make(name, 2)
    check_contract(env)
    assert envs.action_type(name) == env.spec.action_type


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=SLOW) for n in gymnax_env.names() if n not in (*CHEAP, "MNISTBandit-bsuite")]
)
def test_every_gymnax_environment_runs(name):
    env = envs.make(name, 2)
    key = jax.random.key(0)
    if env.spec.num_actions:
        actions = jax.random.randint(key, (500, 2), 0, env.spec.num_actions)
    else:
        actions = jax.random.uniform(key, (500, 2, env.spec.action_size), minval=-1, maxval=1)
    _, obs, transition, _ = rollout(env, key, actions)
    assert np.isfinite(transition.reward).all()
    assert all(np.isfinite(x.astype(jnp.float32)).all() for x in (obs, transition.next_obs))


def test_names_and_action_types_are_those_that_gymnax_registers():
    import gymnax

    assert set(gymnax_env.DISCRETE + gymnax_env.CONTINUOUS) == set(gymnax.registered_envs)


def test_an_environment_that_the_program_registers_can_be_made():
    import gymnax
    from gymnax.environments.classic_control.cartpole import CartPole

    if "Mine-v0" not in gymnax.registered_envs:
        gymnax.register("Mine-v0", CartPole)
    assert envs.action_type("Mine-v0") == "discrete"
    assert envs.make("Mine-v0", 2).num_envs == 2


# Brax


class Clock:
    """A Brax environment that counts its steps from a random tenth; it ends, and pays 2, on the third."""

    action_size = 1

    def reset(self, key):
        start = jax.random.uniform(key) / 10
        return brax_env._brax().State(start, start[None], jnp.float32(0), jnp.float32(0), {"unused": jnp.float32(0)})

    def step(self, state, action):
        time = state.pipeline_state + 1
        state.metrics.update(unused=time)  # as Brax's environments do
        done = jnp.where(time >= 3, 1.0, 0.0)
        return state.replace(pipeline_state=time, obs=time[None], reward=2, done=done)


CLOCK = Clock()


def clocks(limit):
    """3 clocks with a pool of 4 initial states."""
    return BraxEnv(CLOCK, continuous_spec(jax.ShapeDtypeStruct((1,), "float32"), 1, limit), 3, 4)


def run_clocks(limit):
    return rollout(clocks(limit), jax.random.key(0), always([0.0], 90, num_envs=3))


@pytest.mark.parametrize("limit, terminated, truncated", [(3, "..x..x", "..x..x"), (2, "......", ".x.x.x")])
def test_brax_episodes_can_terminate_and_be_truncated_on_one_step(limit, terminated, truncated):
    # A clock ends by itself on its third step, unless the limit has cut it before.
    *_, transition, finished = run_clocks(limit)
    assert (transition.terminated[:6] == np.array([c == "x" for c in terminated])[:, None]).all()
    assert (transition.truncated[:6] == np.array([c == "x" for c in truncated])[:, None]).all()
    ends = finished["episode_length"].count
    assert (ends == (transition.terminated | transition.truncated)).all()
    assert (finished["episode_length"].total == limit * ends).all()
    assert (finished["episode_return"].total == 2 * limit * ends).all()  # each step pays 2, a Python number


def test_brax_episodes_restart_from_the_pool_of_initial_states():
    start, obs, transition, _ = run_clocks(limit=3)
    first, pool = np.asarray(start.obs)[:, 0], np.asarray(start.pool[1])[:, 0]
    assert len(np.unique(np.concatenate([first, pool]))) == 7  # 3 first states and 4 of the pool
    # The first episode: the start and 1, 2, 3 more; its successors are not the states after the reset.
    expected = (first[None] + np.float32([[1], [2], [3]]))[..., None]
    np.testing.assert_allclose(transition.next_obs[:3], expected, rtol=1e-6)  # one float32 addition a step
    # 90 restarts miss one of 4 states with probability under 4 * 0.75^90 = 2e-11.
    restarts = np.asarray(obs)[2::3, :, 0]  # (30, 3)
    assert set(restarts.ravel()) == set(pool)
    # Drawn for each environment by itself, and anew each time.
    assert (restarts[:, 0] != restarts[:, 1]).any() and (restarts[1:] != restarts[:-1]).any()


def test_brax_fast_by_hand():
    # speed + 0.02 per step, position + 0.02 speed: 0.0004, 0.0012, 0.0024, and the reward is the position.
    env = envs.make("brax/fast", 2, episode_length="3", pool_size=2)
    start, obs, transition, finished = rollout(env, jax.random.key(0), always([1.0], 7))
    path = np.array([[0.0004, 0.02], [0.0012, 0.04], [0.0024, 0.06]])
    for env_index in range(2):
        np.testing.assert_allclose(transition.next_obs[:6, env_index], np.tile(path, (2, 1)), atol=1e-7)  # float32
        np.testing.assert_allclose(transition.reward[:6, env_index], np.tile(path[:, 0], 2), atol=1e-7)
    assert (obs[2] == 0).all()  # while next_obs was [0.0024, 0.06]
    assert (transition.truncated == np.isin(np.arange(7), (2, 5))[:, None]).all()
    assert not transition.terminated.any()
    np.testing.assert_allclose(finished["episode_return"].total[2], [0.004, 0.004], atol=1e-7)  # the three rewards
    assert finished["episode_length"].total[2].tolist() == [3, 3]


@pytest.fixture(scope="module")
def pendulum():
    """Brax's inverted pendulum, limit 12: environment 0 is pushed over, environment 1 left alone. 30 steps."""
    env = envs.make("brax/inverted_pendulum", 2, episode_length=12, pool_size=16)
    return env, *rollout(env, jax.random.key(0), always(jnp.array([[1.0], [0.0]]), 30, num_envs=1)[:, 0])


def test_brax_tells_a_fall_from_a_time_limit(pendulum):
    _, _, _, transition, finished = pendulum
    fallen = jnp.abs(transition.next_obs[..., 1]) > 0.2  # the angle that ends an episode
    assert (transition.terminated == fallen).all()
    assert transition.terminated[:, 0].sum() >= 2 and not transition.truncated[:, 0].any()
    assert not transition.terminated[:, 1].any()
    assert np.flatnonzero(transition.truncated[:, 1]).tolist() == [11, 23]
    # One point for every step; the limit cuts at 12.
    assert finished["episode_return"].total[:, 1].tolist() == [12.0 * (t in (11, 23)) for t in range(30)]


def test_brax_next_obs_is_the_true_successor(pendulum):
    _, start, obs, transition, _ = pendulum
    done = (transition.terminated | transition.truncated)[..., None]
    assert jnp.where(done, True, obs == transition.next_obs).all()
    # Starts are within 0.01 of upright and at rest; a state that fell is beyond 0.2.
    assert jnp.where(done, jnp.abs(obs) <= 0.01, True).all()
    assert (transition.obs[0] == start.obs).all() and (transition.obs[1:] == obs[:-1]).all()


def test_brax_starts_differ(pendulum):
    _, start, obs, transition, _ = pendulum
    done = np.asarray(transition.terminated | transition.truncated)
    starts = np.concatenate([start.obs, start.pool[1]])
    assert len(np.unique(starts[:, 0])) == 18  # 2 first states and 16 of the pool
    assert len(np.unique(np.asarray(obs)[done][:, 0])) > 2  # and episodes begin from several of them


def test_brax_environments_keep_the_contract(pendulum):
    check_contract(pendulum[0])
    check_contract(envs.make("brax/fast", 3))
    check_contract(clocks(limit=3))


def test_equal_settings_share_one_brax_environment():
    # The environment is static: a second one would compile again.
    assert envs.make("brax/fast", 2).env is envs.make("brax/fast", 3).env


def test_names_are_those_that_brax_registers():
    assert set(brax_env.names()) == set(brax_env._brax()._envs)


@SLOW
@pytest.mark.parametrize("name", [n for n in brax_env.names() if n != "swimmer"])
def test_every_brax_environment_keeps_the_contract(name):
    check_contract(envs.make(f"brax/{name}", 2))


@SLOW
@pytest.mark.parametrize("name", ["hopper", "ant"])
def test_brax_locomotion_runs_and_restarts(name):
    env = envs.make(f"brax/{name}", 4, episode_length=150)
    actions = jax.random.uniform(jax.random.key(0), (400, 4, env.spec.action_size), minval=-1, maxval=1)
    _, obs, transition, finished = rollout(env, jax.random.key(0), actions)
    assert np.isfinite(obs).all() and np.isfinite(transition.reward).all()
    assert (finished["episode_length"].total <= 150).all()
    assert finished["episode_length"].count.sum() >= 8  # 400 steps of 4 environments, at most 150 each


@SLOW
def test_a_backend_can_be_chosen():
    spring, generalized = (envs.make("brax/inverted_pendulum", 1, backend=b) for b in (None, "generalized"))
    assert (spring.env.backend, generalized.env.backend) == ("spring", "generalized")


# Ids and errors


def test_ids_need_neither_gymnax_nor_brax_and_brax_starts_quietly(tmp_path):
    code = """
import sys
import envs
assert {"CartPole-v1", "brax/ant", "maze/large-goals", "mdp/slippery"} < set(envs.ids())
assert envs.action_type("Pendulum-v1") == "continuous"
assert not {"gymnax", "brax"} & set(sys.modules)
envs.make("brax/halfcheetah")
"""
    command = [sys.executable, "-W", "always::UserWarning", "-c", code]
    run = partial(subprocess.run, command, capture_output=True, text=True, cwd=tmp_path)
    result = run(env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": ""})
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())  # MuJoCo writes a log where it starts


@pytest.mark.parametrize(
    "name, params, words",
    [
        ("Cartpole", {}, ["'Cartpole'", "CartPole-v1"]),
        ("cartpole-v0", {}, ["CartPole-v1"]),
        ("brax/hoper", {}, ["brax/hopper"]),
        ("hopper", {}, ["brax/hopper"]),
        ("foo/bar", {}, ["'foo/bar'", "closest:"]),
        ("CartPole-v1", dict(lenght=1), ["'lenght'", "did you mean 'length'"]),
        ("CartPole-v1", dict(length="abc"), ["length", "a number", "'abc'"]),
        ("CartPole-v1", dict(length=float("nan")), ["length", "a number", "nan"]),
        ("CartPole-v1", dict(length=None), ["length", "a number", "None"]),
        ("CartPole-v1", dict(max_steps_in_episode=2.5), ["max_steps_in_episode", "an integer", "2.5"]),
        ("CartPole-v1", dict(max_steps_in_episode=0), ["max_steps_in_episode 0", "at least 1"]),
        ("FourRooms-misc", dict(resample_init_pos=1), ["resample_init_pos", "true or false"]),
        ("Acrobot-v1", dict(available_torque=[1, 0]), ["available_torque", "3 numbers", "[1, 0]"]),
        ("brax/swimmer", {}, ["brax/swimmer", "jax"]),
        ("brax/ant", dict(backend="mujoco"), ["'mujoco'", "spring, generalized, positional, mjx"]),
        ("brax/ant", dict(bakend="mjx"), ["'bakend'", "did you mean 'backend'"]),
        ("brax/ant", dict(ctrl_cost_weight="abc"), ["ctrl_cost_weight", "a number"]),
        ("brax/ant", dict(episode_length=0), ["episode_length 0", "at least 1"]),
        ("brax/ant", dict(use_contact_forces=True), ["brax/ant", "use_contact_forces"]),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(name, params, words):
    with pytest.raises(ValueError) as error:
        envs.make(name, 2, **params)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_bandit_that_cannot_download_says_so(monkeypatch):
    import gymnax

    def offline(name):
        raise OSError("no route to host")

    monkeypatch.setattr(gymnax, "make", offline)
    gymnax_env._create.cache_clear()
    with pytest.raises(ValueError, match="MNISTBandit-bsuite downloads its images, and that failed .no route to host."):
        envs.make("MNISTBandit-bsuite")


def test_a_number_of_environments_is_at_least_one():
    with pytest.raises(ValueError, match="num_envs 0 must be at least 1"):
        envs.make("CartPole-v1", 0)


def test_an_unbounded_action_box_is_refused(monkeypatch):
    from gymnax.environments.spaces import Box

    env, _ = gymnax_env._create("Pendulum-v1")
    monkeypatch.setattr(type(env), "action_space", lambda self, params: Box(-1, np.inf, (1,)))
    with pytest.raises(ValueError, match="Pendulum-v1 has an unbounded action box"):
        gymnax_env.make("Pendulum-v1", 2)
