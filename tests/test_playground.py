"""MuJoCo Playground's DM Control suite: its physics, our ends and restarts, and refusals of one line."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_envs import check_contract

import envs
from envs import playground_env
from envs.playground_env import AsBrax
from runner import run

ROOT = Path(__file__).parents[1]
TASK = "playground/PendulumSwingup"
LIMIT, STEPS, NUM_ENVS = 4, 24, 3
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes longer than running


@pytest.fixture(scope="module")
def playground():
    pytest.importorskip("mujoco_playground")
    return playground_env._playground()


@pytest.fixture(scope="module")
def env(playground):
    return envs.make(TASK, NUM_ENVS, episode_length=str(LIMIT), pool_size=5)


@partial(jax.jit, compiler_options=QUICK)
def walk(env, state, actions):
    """24 steps of `env`. Returns, with leading axis T, what to act on next, the transitions, and episodes finished."""

    def step(state, inputs):
        state, transition, finished = env.step(inputs[0], state, inputs[1])
        return state, (state.obs, transition, finished)

    return jax.lax.scan(step, state, (jax.random.split(jax.random.key(1), STEPS), actions))[1]


@pytest.fixture(scope="module")
def start(env):
    return jax.jit(env.reset, compiler_options=QUICK)(jax.random.key(0))


@pytest.fixture(scope="module")
def actions():
    return jax.random.uniform(jax.random.key(2), (STEPS, NUM_ENVS, 1), minval=-1, maxval=1)


@pytest.fixture(scope="module")
def walked(env, start, actions):
    return walk(env, start, actions)


def test_an_episode_is_playgrounds_own_steps_up_to_the_time_limit(playground, walked, actions):
    own = playground.registry.load("PendulumSwingup", config_overrides=dict(impl="jax"))

    @partial(jax.jit, compiler_options=QUICK)
    def episode(key, actions):  # of one environment, from the state that our reset gives it
        state = own.reset(key)

        def step(state, action):
            state = own.step(state, action)
            return state, (state.obs, state.reward)

        return state.obs, *jax.lax.scan(step, state, actions)[1]

    key = jax.random.split(jax.random.key(0), NUM_ENVS + 5)[0]
    with jax.numpy_rank_promotion("allow"):
        first, obs, reward = episode(key, actions[:LIMIT, 0])
    _, transition, _ = walked
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)  # another program: sums in another order
    close(transition.obs[0, 0], first)
    close(transition.next_obs[:LIMIT, 0], obs)  # the last too, which the restart does not touch
    close(transition.reward[:LIMIT, 0], reward)


def test_a_time_limit_truncates_and_does_not_terminate(walked):
    _, transition, finished = walked
    # 24 steps in episodes of 4.
    assert (transition.truncated == (np.arange(STEPS) % 4 == 3)[:, None]).all()
    assert not transition.terminated.any()
    assert (finished["episode_length"].total == 4 * transition.truncated).all()
    returns = transition.reward.reshape(6, LIMIT, NUM_ENVS).sum(1)
    np.testing.assert_allclose(finished["episode_return"].total[LIMIT - 1 :: LIMIT], returns, rtol=1e-6)  # four sums


def test_episodes_restart_from_the_pool_of_initial_states(start, walked):
    obs, transition, _ = walked
    pool = np.asarray(start.pool[1])
    assert len(np.unique(np.concatenate([pool, start.obs])[:, 0])) == 8  # 5 of the pool and 3 first states
    restarts = np.asarray(obs[LIMIT - 1 :: LIMIT]).reshape(-1, 3)  # 6 of 3 environments
    assert (restarts[:, None] == pool[None]).all(-1).any(-1).all()
    assert len(np.unique(restarts[:, 0])) > 2
    # Otherwise the next observation to act on is the successor.
    assert jnp.where(transition.truncated[..., None], True, obs == transition.next_obs).all()
    assert jnp.where(transition.truncated[..., None], obs != transition.next_obs, True).any(-1).all()


def test_an_action_is_the_actuators_own_torque(env, start):
    # A mass of 1 at 0.5 m, a sphere of 0.05 m: inertia 0.25 + 0.4 * 0.0025 = 0.251. Two substeps of 0.01 s:
    # torque u turns it by 2 * 0.01 u / 0.251 = 0.0797 u a second faster than none. Damping takes
    # 0.01 * 0.1 / 0.251 of the first half away, 1.6e-4 u; gravity adds at most 0.01 * 4.9 / 0.251 * 4e-4 = 0.8e-4 u.
    first = start._replace(inner=jax.tree.map(lambda x: x[jnp.array([0, 0, 0])], start.inner))
    torques = jnp.broadcast_to(jnp.array([1.0, 0.5, 0.0])[:, None], (STEPS, NUM_ENVS, 1))
    _, transition, _ = walk(env, first, torques)
    speed = transition.next_obs[0, :, 2]
    np.testing.assert_allclose(speed[:2] - speed[2], [0.0797, 0.0398], atol=3e-4)


def test_a_simulation_that_diverges_terminates_without_nan(env, start, walked, actions):
    lose = lambda x: x.at[1].set(jnp.nan) if x.dtype == jnp.float32 else x
    obs, transition, finished = walk(env, start._replace(inner=jax.tree.map(lose, start.inner)), actions)
    assert transition.terminated[0].tolist() == [False, True, False]
    assert not transition.terminated[1:].any()  # it goes on from the pool
    assert (transition.next_obs[0, 1] == 0).all() and transition.reward[0, 1] == 0
    assert all(np.isfinite(x).all() for x in (obs, transition.next_obs, transition.reward))
    assert finished["episode_length"].total[0].tolist() == [0, 1, 0]
    others = np.array([0, 2])  # are as if nothing had happened
    assert (obs[:, others] == walked[0][:, others]).all()


class Clock:
    """A Playground environment that counts its steps, pays the count, and diverges on the third."""

    action_size = 1

    def reset(self, key):
        return playground_env._playground().State(jnp.float32(0), jnp.zeros(1), jnp.float32(0), jnp.float32(0), {}, {})

    def step(self, state, action):
        time = state.data + 1
        done = jnp.where(time >= 3, 1.0, 0.0)
        return state.replace(data=time, obs=time[None], reward=jnp.where(done > 0, jnp.nan, time), done=done)


def test_a_repeated_action_sums_rewards_and_counts_against_the_limit(playground):
    clock = AsBrax(Clock(), action_repeat=2)
    first = clock.step(clock.reset(jax.random.key(0)), jnp.zeros(1))
    assert (first.obs.tolist(), float(first.reward), float(first.done)) == ([2], 3, 0)  # 1 + 2
    second = clock.step(first, jnp.zeros(1))  # the third count diverges
    assert (second.obs.tolist(), float(second.reward), float(second.done)) == ([0], 0, 1)
    # 10 of the task's steps are 3, 3, 3 and, as in Playground's wrapper, a last one over the limit.
    assert envs.make(TASK, episode_length=10, action_repeat=3).spec.max_episode_steps == 4


def test_ppo_trains_on_it_in_several_runs(env):
    algo = tiny.load("bangbang_ppo")
    configs, keys = run.broadcast(tiny.config(algo), 2), jax.random.split(jax.random.key(0), 2)
    init, advance = (
        f.lower(algo, configs, env, *rest).compile(compiler_options=QUICK)
        for f, rest in (
            (run.init, (keys,)),
            (run.advance, (jax.eval_shape(partial(run.init, algo), configs, env, keys), 1)),
        )
    )
    before = init(configs, env, keys)
    params = jax.tree.map(np.asarray, before.states.params)
    after = advance(configs, env, before, 3)
    assert after.states.env_steps.tolist() == [3 * algo.period(tiny.config(algo), env)] * 2
    changed = jax.tree.map(lambda a, b: np.isfinite(b).all() and (a != b).any(), params, after.states.params)
    assert all(jax.tree.leaves(changed))
    assert (after.states.env_state.obs[0] != after.states.env_state.obs[1]).any()


def test_the_environment_keeps_the_contract(env):
    check_contract(env)
    assert env.spec.obs.shape == (3,) and env.spec.action_size == 1
    assert envs.action_type(TASK) == env.spec.action_type


def test_a_state_has_no_empty_array(start):
    # Orbax refuses them, so the first checkpoint would fail.
    assert all(x.size for x in jax.tree.leaves(start))


def test_equal_settings_share_one_environment(env):
    # The environment is static: a second one would compile again.
    assert envs.make(TASK, 2, episode_length=LIMIT).env is env.env


def test_an_episode_has_the_length_that_playground_sets(playground):
    assert envs.make(TASK).spec.max_episode_steps == 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", playground_env.NAMES)
def test_every_task_keeps_the_contract_and_takes_actions_between_minus_one_and_one(playground, name):
    env = envs.make(f"playground/{name}", 2)
    check_contract(env)
    model = env.env.env.mj_model
    assert model.actuator_ctrllimited.all() and (model.actuator_ctrlrange == [-1, 1]).all()
    config = playground.registry.get_default_config(name)
    assert (config.episode_length, config.action_repeat) == (1000, 1)


def test_names_are_those_that_playground_registers(playground):
    assert set(playground_env.names()) == set(playground.dm_control_suite.ALL_ENVS)
    assert set(playground_env.REFUSED) == set(playground.locomotion.ALL_ENVS + playground.manipulation.ALL_ENVS)


def test_tasks_are_listed_without_the_package_and_load_quietly_and_offline(playground, tmp_path):
    code = """
import sys
import envs
assert envs.action_type("playground/CheetahRun") == "continuous"
assert sum(name.startswith("playground/") for name in envs.ids()) == 25
assert "mujoco_playground" not in sys.modules

def forbid(event, args):
    if event.startswith("socket.") or event == "os.system" or event == "subprocess.Popen" and args[0] != sys.executable:
        raise RuntimeError(f"{event}{args}")

sys.addaudithook(forbid)
envs.make("playground/CartpoleBalance")
envs.make("playground/CheetahRun")  # MuJoCo has a note on its XML
"""
    command = [sys.executable, "-W", "always::UserWarning", "-c", code]
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "", "HOME": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["Go1JoystickFlatTerrain", "PandaPickCube"])
def test_a_task_that_needs_a_download_is_refused(name):
    with pytest.raises(ValueError, match=f"^playground/{name} downloads .*, which Bellmax does not do; .* DM Control"):
        playground_env.make(name, 1)


def test_a_missing_package_names_the_extra_that_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco_playground", None)  # importing it then fails as if it were not there
    playground_env._playground.cache_clear()
    try:
        with pytest.raises(ValueError, match="^playground/ needs the extra `playground`.*--extra playground.*pip") as e:
            envs.make(TASK)
        assert "\n" not in str(e.value)
    finally:
        playground_env._playground.cache_clear()


@pytest.mark.parametrize("name", ["playground/CheetaRun", "cheetahrun", "playground/cheetah-run"])
def test_an_unknown_task_names_the_closest(name):
    with pytest.raises(ValueError, match=f"unknown environment '{name}'; closest: playground/CheetahRun"):
        envs.make(name)


@pytest.mark.parametrize(
    "params, words",
    [
        (dict(impl="warp"), ["'warp'", "choose jax"]),
        (
            dict(episode_lenght=5),
            ["'episode_lenght'", "did you mean 'episode_length'", "ctrl_dt, episode_length, impl"],
        ),
        (dict(episode_length=0), ["episode_length 0", "at least 1"]),
        (dict(action_repeat="1.5"), ["action_repeat", "an integer", "'1.5'"]),
        (dict(pool_size=0), ["pool_size 0", "at least 1"]),
        (dict(ctrl_dt="abc"), ["ctrl_dt", "a number"]),
        (dict(ctrl_dt=0.025), ["ctrl_dt 0.025", "multiple of sim_dt 0.01"]),
        (dict(ctrl_dt=0.004), ["ctrl_dt 0.004", "multiple of sim_dt 0.01"]),
        (dict(sim_dt=0), ["sim_dt 0.0", "positive"]),
    ],
)
def test_bad_parameters_are_one_line_that_says_what_to_do(playground, params, words):
    with pytest.raises(ValueError) as error:
        envs.make(TASK, 2, **params)
    message = str(error.value)
    assert "\n" not in message and TASK in message
    assert all(word in message for word in words), message
