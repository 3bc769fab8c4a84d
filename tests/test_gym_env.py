"""Gymnasium's environments to evaluate in: the same numbers as Gymnasium's own loop, from keys alone."""

import json
import sys
import types

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from launching import main, metrics, state_digest

import envs
from algos import bc
from envs import gym_env
from envs.types import Transition, continuous_spec
from replay import datasets
from runner import policy, run, settings
from runner.check import BadInput
from runner.evaluate import evaluate

BOX = spaces.Box(-9, 9, (2,), np.float64)
GOALS = spaces.Dict(dict(achieved_goal=BOX, desired_goal=BOX, observation=spaces.Box(-9, 9, (3,), np.float64)))


class Count(gymnasium.Env):
    """Observes and pays the number of steps made. Keeps what it was given; success is in the middle of an episode."""

    given = []  # (seed, actions)

    def __init__(self, observation=BOX, action=None, word=None):
        self.observation_space, self.word = observation, word
        self.action_space = action or spaces.Box(np.float32([-1, 0]), np.float32([1, 4]))

    def obs(self):
        full = lambda space, x: np.full(space.shape, x + self.steps, space.dtype)
        if isinstance(self.observation_space, spaces.Box):
            return full(self.observation_space, 0)
        return {key: full(space, 10 * i) for i, (key, space) in enumerate(self.observation_space.items())}

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        Count.given.append((seed, []))
        self.actions = Count.given[-1][1]
        return self.obs(), {}

    def step(self, action):
        self.steps += 1
        self.actions.append(action)
        info = {self.word: self.steps == 2} if self.word else {}
        return self.obs(), float(self.steps), False, False, info


SPACES = {
    "Goals-v0": dict(observation=GOALS),
    "Start-v0": dict(action=spaces.Discrete(3, start=-1)),
    "Success-v0": dict(word="success"),
    "IsSuccess-v0": dict(word="is_success"),
    "Silent-v0": {},
    "Multi-v0": dict(action=spaces.MultiDiscrete([2, 3])),
    "Unbounded-v0": dict(action=spaces.Box(-np.inf, np.inf, (1,))),
    "Index-v0": dict(observation=spaces.Discrete(4)),
}


@pytest.fixture(autouse=True)
def count(monkeypatch):
    """Registers `Count` with every spaces above, episodes of three steps; and one without limit."""
    monkeypatch.setattr(Count, "given", [])
    for name, kwargs in SPACES.items():
        spec = EnvSpec(name, entry_point=Count, max_episode_steps=3, kwargs=kwargs)
        monkeypatch.setitem(gymnasium.registry, name, spec)
    monkeypatch.setitem(gymnasium.registry, "Endless-v0", EnvSpec("Endless-v0", entry_point=Count))


def algorithm(act):
    """Stands in for an algorithm: act(params, obs, key)."""
    return type("Algorithm", (), dict(act=staticmethod(lambda config, spec, params, obs, key: act(params, obs, key))))


# Full torque against the velocity, times the run's parameter: exact, so that runs and loops agree to the last bit.
AGAINST = algorithm(lambda params, obs, key: jnp.where(obs[:, 2:] > 0, -1.0, 1.0) * params)
CONSTANT = algorithm(lambda params, obs, key: jnp.tile(params, (obs.shape[0], 1)))
RANDOM = algorithm(lambda params, obs, key: jax.random.uniform(key, obs.shape, minval=-1))
keys_of = lambda *seeds: jax.vmap(jax.random.key)(jnp.array(seeds))


def play(algo, env, params, *seeds) -> dict:
    return evaluate(algo, None, env, jnp.asarray(params), keys_of(*seeds))


def test_returns_are_those_of_a_loop_over_gymnasium():
    env = envs.evaluation("gym/Pendulum-v1", 2, max_episode_steps=30, g=9.0)
    ours = play(AGAINST, env, [1.0, -0.5], 0, 1)
    seeds, _ = gym_env.draw(keys_of(0, 1), 2)
    theirs, real = np.zeros((2, 2)), gymnasium.make("Pendulum-v1", g=9.0)
    assert len(np.unique(seeds)) == 4
    for (r, n), seed in np.ndenumerate(np.asarray(seeds)):
        obs, _ = real.reset(seed=int(seed))
        for _ in range(30):
            # The torque's bounds are +-2: 2 times 1, 2 times -0.5.
            obs, reward, _, _, _ = real.step(np.float32([(2, -1)[r] * (-1 if obs[2] > 0 else 1)]))
            theirs[r, n] += reward
    np.testing.assert_array_equal(ours["eval_return"], theirs.mean(1))
    assert ours["eval_length"].tolist() == [30, 30] and set(ours) == {"eval_return", "eval_length"}


def test_episodes_end_by_themselves_and_are_averaged_over_their_own_lengths():
    env = envs.evaluation("gym/CartPole-v1", 3)
    push = algorithm(lambda params, obs, key: jnp.ones(obs.shape[0], jnp.int32) * params)
    ours = play(push, env, [1], 5)
    lengths, real = [], gymnasium.make("CartPole-v1")
    for seed in np.asarray(gym_env.draw(keys_of(5), 3)[0])[0]:
        real.reset(seed=int(seed))
        lengths.append(next(n for n in range(1, 500) if real.step(1)[2]))
    assert len(set(lengths)) > 1  # some instance rests while others go on
    np.testing.assert_allclose(ours["eval_length"], [np.mean(lengths)])
    np.testing.assert_allclose(ours["eval_return"], [np.mean(lengths)])  # 1 for each step


def test_the_same_keys_give_the_same_numbers_whatever_was_played_before_or_beside():
    env = envs.evaluation("gym/Pendulum-v1", 2, max_episode_steps=10)
    first = play(AGAINST, env, [1.0, 1.0], 0, 1)["eval_return"]
    assert first[0] != first[1]
    assert play(AGAINST, env, [1.0, 1.0], 1, 0)["eval_return"].tolist() == first[::-1].tolist()
    assert play(AGAINST, env, [1.0], 1)["eval_return"].tolist() == first[1:].tolist()


def test_every_step_and_run_and_episode_draws_its_own_action_from_the_keys():
    env = envs.evaluation("gym/Silent-v0", 2)
    drawn = []
    for _ in range(2):
        Count.given.clear()
        play(RANDOM, env, [0.0, 0.0], 0, 1)
        drawn.append(np.array([actions for _, actions in Count.given]))  # (4 instances, 3 steps, 2)
    assert drawn[0].shape == (4, 3, 2) and len(np.unique(drawn[0][..., 0])) == 12
    np.testing.assert_array_equal(drawn[0], drawn[1])


def test_actions_are_scaled_to_the_bounds_or_counted_from_the_first():
    one = lambda name, action: envs.evaluation(f"gym/{name}").env_action(np.asarray(action)).tolist()
    assert [one("Pendulum-v1", np.float32([a])) for a in (-1, 0.25, 1)] == [[-2], [0.5], [2]]
    # Bounds [-1, 1] and [0, 4]: -0.5 is a quarter of the way, 0.5 three quarters.
    assert one("Silent-v0", np.float32([-0.5, -0.5])) == [-0.5, 1]
    assert one("Silent-v0", np.float32([0.5, 0.5])) == [0.5, 3]
    assert [one("Start-v0", np.int32(a)) for a in (0, 2)] == [-1, 1]


def test_a_goal_environment_is_structured_or_flat_by_the_alphabet():
    env, flat = envs.evaluation("gym/Goals-v0"), envs.evaluation("gym/Goals-v0", flatten="true")
    assert [s.shape for s in env.spec.obs] == [(3,), (2,), (2,)] and flat.spec.obs.shape == (7,)
    assert {s.dtype for s in (*env.spec.obs, flat.spec.obs)} == {np.dtype("float32")}
    # At the first step achieved_goal is 0s, desired_goal 10s, observation 20s.
    seen = algorithm(lambda params, obs, key: jnp.stack([obs[0][:, 0], obs[1][:, 1]], 1) / 20)
    play(seen, env, [0.0], 0)
    # (20, 0) / 20 = (1, 0), which the bounds [-1, 1] and [0, 4] make (1, 2)
    assert Count.given[-1][1][0].tolist() == [1, 2]
    play(algorithm(lambda params, obs, key: obs[:, [2, 6]] / 20), flat, [0.0], 0)
    # Of (0, 0, 10, 10, 20, 20, 20) those at 2 and 6: (10, 20) / 20 = (0.5, 1)
    assert Count.given[-1][1][0].tolist() == [0.5, 4]


@pytest.mark.parametrize("name", ["Success-v0", "IsSuccess-v0"])
def test_success_at_any_step_counts(name):
    act = algorithm(lambda params, obs, key: jnp.zeros((obs.shape[0], 2)) + jnp.where(obs[:, :1] < 1, 0, params))
    # Run 1 acts NaN from its second step on, before the success that comes with it.
    result = play(act, envs.evaluation(f"gym/{name}", 2), [0.0, jnp.nan], 0, 1)
    assert result["eval_success"].tolist() == [1, 0]
    assert "eval_success" not in play(act, envs.evaluation("gym/Silent-v0", 2), [0.0], 0)


def test_a_diverged_run_ends_with_nan_and_leaves_the_others_alone():
    env = envs.evaluation("gym/Silent-v0", 2)
    result = play(CONSTANT, env, [[0.5, 0.5], [0.5, jnp.nan]], 0, 1)
    # Rewards 1, 2, 3 over the three steps
    np.testing.assert_array_equal(result["eval_return"], [6, np.nan])
    assert result["eval_length"].tolist() == [3, 0]
    assert all(np.isfinite(actions).all() for _, actions in Count.given)


def test_mujoco_reports_d4rls_score_and_neither_prints_nor_writes_a_file(tmp_path, monkeypatch, capfd):
    pytest.importorskip("mujoco")
    pytest.importorskip("imageio")
    monkeypatch.chdir(tmp_path)
    envs.evaluation("gym/HalfCheetah-v5")  # MuJoCo warns of its model
    result = play(CONSTANT, envs.evaluation("gym/Hopper-v5"), [[0.0, 0.0, 0.0]], 3)
    real, (seed,) = gymnasium.make("Hopper-v5"), np.asarray(gym_env.draw(keys_of(3), 1)[0])[0]
    real.reset(seed=int(seed))
    total, length, ended = 0.0, 0, False
    while not ended:
        _, reward, ended, _, _ = real.step(np.zeros(3, np.float32))
        total, length = total + reward, length + 1
    assert (result["eval_return"].tolist(), result["eval_length"].tolist()) == ([total], [length])
    # 0 at -20.272305, 100 at 3234.3
    np.testing.assert_allclose(result["eval_d4rl_score"], [100 * (total + 20.272305) / 3254.572305], rtol=1e-12)
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr().err == ""


# Returns of a random policy and of an expert in D4RL's tasks, as it publishes them.
SCORED = {
    "HalfCheetah-v5": (-280.178953, 12135.0),
    "Hopper-v4": (-20.272305, 3234.3),
    "Walker2d-v5": (1.629008, 4592.3),
    "Ant-v4": (-325.6, 3879.7),
    "AdroitHandPen-v1": (96.262799, 3076.8331017826877),
    "AdroitHandHammer-v1": (-274.856578, 12794.134825156867),
    "AdroitHandDoor-v1": (-56.512833, 2880.5693087298737),
    "AdroitHandRelocate-v1": (-6.425911, 4233.877797728884),
}


def test_every_task_of_d4rl_has_its_score_and_others_have_none(monkeypatch):
    # The numbers of our own environment under their names: 1 + 2 + 3 = 6.
    for name, (low, high) in SCORED.items():
        monkeypatch.setitem(gymnasium.registry, name, EnvSpec(name, entry_point=Count, max_episode_steps=3))
        result = play(CONSTANT, envs.evaluation(f"gym/{name}"), [[0.5, 0.5]], 0)
        np.testing.assert_allclose(result["eval_d4rl_score"], [100 * (6 - low) / (high - low)], rtol=1e-12)
    assert "eval_d4rl_score" not in play(CONSTANT, envs.evaluation("gym/Silent-v0"), [[0.5, 0.5]], 0)
    assert {name.rpartition("-v")[0] for name in SCORED} == set(gym_env.D4RL)


def test_truth_values_of_the_command_line_are_no_words():
    made = envs.evaluation("gym/Silent-v0", word="false").params, envs.evaluation("gym/Silent-v0", word="True").params
    assert [m["word"] for m in made] == [False, True]
    assert envs.evaluation("gym/Silent-v0", word="falsehood").params == dict(word="falsehood")


def test_any_environment_may_bring_its_own_evaluation():
    own = types.SimpleNamespace(evaluate=lambda algo, configs, params, keys: dict(eval_return=params + len(keys)))
    assert evaluate(None, None, own, np.ones(2), keys_of(0, 1)) == dict(eval_return=pytest.approx(np.full(2, 3.0)))


# Launches, from a file that says it is of Gymnasium's Pendulum, ten steps an episode.


TINY = """--algo bc --steps 30 --eval-period 10 --seeds 0 1 --eval-episodes 2
    --config.hidden 16 --config.batch-size 16 --config.policy gaussian""".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "random.npz"
    walk = rng.normal(size=(11, 3)).astype(np.float32)
    action, ends = rng.uniform(-1, 1, (10, 1)).astype(np.float32), np.arange(10) == 9
    t = Transition(walk[:-1], action, np.zeros(10, np.float32), walk[1:], np.zeros(10, bool), ends)
    spec = continuous_spec(jax.ShapeDtypeStruct((3,), "float32"), 1, 200)
    made = datasets.admit(t, spec, "random", "gym/Pendulum-v1", dict(max_episode_steps=10))
    datasets.save(path, made)
    return path


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert main(*TINY, "--dataset", data, "--run-dir", run_dir) == 0
    return run_dir


def test_a_dataset_is_evaluated_in_the_environment_of_gymnasium_that_it_names(whole):
    lines = metrics(whole)
    assert [x["eval_length"] for x in lines] == [10] * 6 and all(-170 < x["eval_return"] < 0 for x in lines)
    written = json.loads((whole / "config.json").read_text())
    assert (written["eval_env"], written["dataset"]["eval_env"]) == (None, "gym/Pendulum-v1")
    assert written["dataset"]["eval_env_params"] == dict(max_episode_steps=10)
    assert written["versions"]["gymnasium"] == gymnasium.__version__ and "mujoco" in written["versions"]
    assert policy.environment(whole / "policy" / "best.msgpack") == ("gym/Pendulum-v1", dict(max_episode_steps=10))


def test_a_resumed_launch_gets_the_same_evaluations_bit_for_bit(data, whole, tmp_path):
    arguments = [*TINY, "--dataset", data, "--run-dir", tmp_path / "run"]
    assert main(*arguments, "--time-limit", 1e-3) == 0
    assert main("--resume", tmp_path / "run") == 0
    assert metrics(tmp_path / "run") == metrics(whole) and state_digest(tmp_path / "run") == state_digest(whole)


def test_a_policy_file_acts_in_gymnasium(whole):
    algo, _, spec, _ = policy.load(whole / "policy" / "last.msgpack")
    env = envs.evaluation("gym/Pendulum-v1", 2, max_episode_steps=10)
    assert algo is bc and spec.obs == env.spec.obs and spec.action == env.spec.action
    runs = [policy.load(whole / "policy" / "last.msgpack", r) for r in (0, 1)]
    params = jax.tree.map(lambda *x: jnp.stack(x), *[p for *_, p in runs])
    # The keys of the last evaluation: chunk 3 of seeds 0 and 1, 0x6576616C apart from training
    keys = jax.vmap(lambda k: jax.random.fold_in(jax.random.fold_in(k, 0x6576616C), 3))(keys_of(0, 1))
    ours = evaluate(bc, run.broadcast(runs[0][1], 2), env, params, keys)["eval_return"]
    assert ours.tolist() == [x["eval_return"] for x in metrics(whole)[-2:]]


BAD = {
    "unknown id": ("--eval-env gym/Pendulm-v1", ["'gym/Pendulm-v1'", "gym/Pendulum-v1"]),
    "no version": ("--eval-env gym/Pendulum", ["'gym/Pendulum'", "gym/Pendulum-v1"]),
    "unknown package": ("--eval-env gym/nowhere_to_be_found:Pendulum-v1", ["nowhere_to_be_found"]),
    "another environment": ("--eval-env gym/CartPole-v1", ["(3,)", "(4,)", "gym/CartPole-v1", "--eval-env"]),
    "unknown parameter": ("--env-params.gravity 9", ["gym/Pendulum-v1", "gravity"]),
    "parameter's type": ("--env-params.g heavy", ["gym/Pendulum-v1", "heavy", "first step"]),
    "a wrapper of ours": ("--env-params.frame-stack 2", ["frame_stack"]),
    "flatten": ("--env-params.flatten 2", ["flatten", "true or false"]),
    "many discrete actions": ("--eval-env gym/Multi-v0", ["MultiDiscrete([2 3])", "Discrete ones and vectors"]),
    "unbounded actions": ("--eval-env gym/Unbounded-v0", ["without bounds", "inf"]),
    "observations": ("--eval-env gym/Index-v0", ["observations of Discrete"]),
    "no limit": ("--eval-env gym/Endless-v0", ["without limit", "--env-params.max-episode-steps"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_before_any_compile(name, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "advance", None)
    assert main(*TINY, "--dataset", data, "--run-dir", tmp_path / "run", *BAD[name][0].split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for word in BAD[name][1]:
        assert word in error, error


def test_an_online_algorithm_is_told_what_to_train_in(capsys):
    assert main("--algo", "iqn", "--env", "gym/CartPole-v1") == 2
    error = capsys.readouterr().err
    assert "gym/CartPole-v1 runs on the host" in error and "Instead: CartPole-v1" in error and error.count("\n") == 1


def test_an_environment_that_breaks_its_own_space_is_refused(monkeypatch):
    monkeypatch.setattr(Count, "obs", lambda self: np.zeros(3))
    with pytest.raises(ValueError, match=r"gym/Silent-v0 observes .*\(3,\).* its space says .*\(2,\)"):
        envs.evaluation("gym/Silent-v0")


@pytest.mark.parametrize("package", ["imageio", "mujoco"])
def test_a_missing_package_names_the_extra(package, monkeypatch):
    pytest.importorskip("mujoco")
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match="gym/Hopper-v5 cannot be made: .*needs the extra `offline`"):
        envs.evaluation("gym/Hopper-v5")


def test_a_flat_dataset_is_evaluated_in_flat_observations(data):
    def params(name, given, eval_env=None):
        dataset = types.SimpleNamespace(name=name, env="gym/Goals-v0", env_params=(("word", "success"),))
        return settings.evaluated_in(dataset, types.SimpleNamespace(eval_env=eval_env), given)

    assert params("minari-flat:a-v0", {}) == ("gym/Goals-v0", dict(word="success", flatten=True))
    assert params("minari-flat:a-v0", {}, "gym/Other-v0") == ("gym/Other-v0", dict(flatten=True))
    assert params("minari:a-v0", {}) == ("gym/Goals-v0", dict(word="success"))
    assert params("minari-flat:a-v0", {}, "Pendulum-v1") == ("Pendulum-v1", {})
    assert params("minari-flat:a-v0", dict(flatten="false"))[1]["flatten"] == "false"


def test_a_minari_dataset_runs_without_another_environment(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = minari.DataCollector(gymnasium.make("Pendulum-v1", g=9.0))
    env.reset(seed=0)
    for _ in range(200):
        env.step(np.float32([1.0]))
    with pytest.warns(UserWarning):  # it asks for authors and links
        env.create_dataset("pendulum/one-v0")
    options = types.SimpleNamespace(source="minari:pendulum/one-v0", eval_env=None, eval_episodes=3)
    dataset, made = settings.make_dataset(options, dict(max_episode_steps=7))
    assert (made.name, made.params, made.num_envs) == ("Pendulum-v1", dict(g=9.0, max_episode_steps=7), 3)
    assert dataset.transitions.action[0] == 0.5 and made.env_action(np.float32([0.5])) == 1
    with pytest.raises(BadInput, match="gym/CartPole-v1 has observations"):
        settings.make_dataset(types.SimpleNamespace(**vars(options) | dict(eval_env="gym/CartPole-v1")), {})
