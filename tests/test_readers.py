"""Datasets of other projects: the transitions that their own packages have, to the last one, and their faults named."""

import importlib
import json
import sys
from pathlib import Path

import gymnasium
import jax
import numpy as np
import pytest
import tiny
from gymnasium.envs.registration import EnvSpec

from envs.gym_env import GOAL
from envs.types import Transition, continuous_spec, discrete_spec
from replay import d4rl_scores, datasets, readers
from runner.check import BadInput

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures" / "ogbench"


def same(dataset, **expected):
    """Every field given, equal to the last number."""
    for key, x in expected.items():
        x = x if isinstance(x, tuple) else (x,)
        for mine, theirs in zip(jax.tree.leaves(getattr(dataset.transitions, key)), x, strict=True):
            np.testing.assert_array_equal(mine, np.asarray(theirs, mine.dtype), key)


# Minari


class Walk(gymnasium.Env):
    """A position x that the action moves; the reward is x, and the episode ends beyond 3."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-2, 2, (1,), np.float32)

    def __init__(self, speed=1.0, start=0.0, **_):
        self.speed, self.start = speed, start

    def obs(self):
        return np.array([self.x, self.start])

    def reset(self, *, seed=None, options=None):
        self.x = self.start
        return self.obs(), {}

    def step(self, action):
        self.x += self.speed * float(np.ravel(action)[0])
        return self.obs(), self.x, abs(self.x) > 3, False, {}


class Goals(Walk):
    """The same with discrete actions, 5 and 6, a step of 5 or 6, and a goal environment's observations."""

    box = gymnasium.spaces.Box(-99, 99, (1,), np.float32)
    observation_space = gymnasium.spaces.Dict(
        dict(observation=gymnasium.spaces.Box(-99, 99, (2,), np.float64), desired_goal=box, achieved_goal=box)
    )
    action_space = gymnasium.spaces.Discrete(2, start=5)

    def obs(self):
        achieved, desired = np.float32([self.x]), np.float32([7])
        return dict(observation=np.array([self.x, -self.x]), achieved_goal=achieved, desired_goal=desired)


@pytest.fixture
def minari(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    for name in ("Walk", "Goals"):
        spec = EnvSpec(f"{name}-v0", entry_point=f"{__name__}:{name}", max_episode_steps=4)
        monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    return pytest.importorskip("minari")


def collect(minari, name, episodes, data_format="hdf5", **kwargs):
    """A dataset that the real package wrote, of these actions."""
    env = minari.DataCollector(gymnasium.make(f"{name}-v0", **kwargs), data_format=data_format)
    for number, acts in enumerate(episodes):
        env.reset(seed=number)
        for action in acts:
            env.step(np.float32([action]) if name == "Walk" else np.int64(action))
    with pytest.warns(UserWarning):  # no author, no link
        env.create_dataset("tests/walk-v0", eval_env=None if kwargs else f"{name}-v0")
    env.close()


@pytest.mark.parametrize("where", ["tests/walk-v0", "folder", "data folder"])
def test_minari_has_every_transition_and_the_observation_after_the_last(minari, tmp_path, where):
    # One episode terminated, one cut by the limit of 4, one left open. Actions of [-2, 2] become half as large.
    collect(minari, "Walk", [[1, 2, 2], [0.5, -0.5, 1, -1], [2, -1]])
    given = {"folder": "/tests/walk-v0", "data folder": "/tests/walk-v0/data"}.get(where)
    dataset = readers.minari(f"minari:{str(tmp_path) + given if given else where}")
    x = np.array([[0, 1, 3, 0, 0.5, 0, 1, 0, 2], [1, 3, 5, 0.5, 0, 1, 0, 2, 1]])
    same(
        dataset,
        obs=np.stack([x[0], 0 * x[0]], 1),
        action=np.array([[0.5, 1, 1, 0.25, -0.25, 0.5, -0.5, 1, -0.5]]).T,
        reward=x[1],
        next_obs=np.stack([x[1], 0 * x[1]], 1),
        terminated=np.array([0, 0, 1, 0, 0, 0, 0, 0, 0]),
        truncated=np.array([0, 0, 0, 0, 0, 0, 1, 0, 1]),
    )
    assert dataset.spec == continuous_spec(jax.ShapeDtypeStruct((2,), "float32"), 1, 4)
    assert dataset.env == "gym/Walk-v0" and dataset.env_params == (("max_episode_steps", 4),)


def test_minari_datasets_in_arrow_files_are_the_same(minari):
    pytest.importorskip("pyarrow")
    collect(minari, "Walk", [[1, 2, 2], [0.5]], data_format="arrow")
    same(readers.minari("minari:tests/walk-v0"), reward=np.array([1, 3, 5, 0.5]), terminated=np.array([0, 0, 1, 0]))


def test_a_goal_environment_is_structured_or_by_name_one_vector(minari):
    collect(minari, "Goals", [[5], [6]])
    dataset = readers.minari("minari:tests/walk-v0")
    same(
        dataset,
        obs=(np.zeros((2, 2)), np.zeros((2, 1)), np.full((2, 1), 7)),
        action=np.array([0, 1]),
        next_obs=(np.array([[5, -5], [6, -6]]), np.array([[5], [6]]), np.full((2, 1), 7)),
        terminated=np.ones(2),
        truncated=np.zeros(2),
    )
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    assert dataset.spec == discrete_spec((struct(2), struct(1), struct(1)), 2, 4)
    datasets.spec_to_json(dataset.spec)  # a file can be made of it
    flat = readers.minari("minari-flat:tests/walk-v0")
    # Gymnasium's own order is the alphabet's: achieved_goal, desired_goal, observation.
    same(flat, obs=np.array([[0, 7, 0, 0], [0, 7, 0, 0]]), next_obs=np.array([[5, 7, 5, -5], [6, 7, 6, -6]]))
    row = {key: np.float64(x[0]) for key, x in zip(GOAL, dataset.transitions.next_obs, strict=True)}
    np.testing.assert_array_equal(
        flat.transitions.next_obs[0], gymnasium.spaces.flatten(Goals.observation_space, row).astype(np.float32)
    )


def test_the_environment_is_the_one_to_evaluate_in_with_its_parameters():
    spec = lambda name, **kwargs: json.dumps(dict(id=name, kwargs=kwargs, max_episode_steps=7))
    both = dict(env_spec=spec("A-v1"), eval_env_spec=spec("B-v1", maze=[[1, 0]], render_mode="human"))
    assert readers.environment(both) == ("gym/B-v1", dict(maze=[[1, 0]], max_episode_steps=7), 7)
    assert readers.environment(dict(env_spec=spec("A-v1"))) == ("gym/A-v1", dict(max_episode_steps=7), 7)
    assert readers.environment({}) == (None, {}, 0)


def test_of_the_environment_s_parameters_those_without_a_dict_are_kept(minari):
    kept, nested = dict(maze=[[1, 0]], names=["a", None]), dict(option={"a": 1}, options=[{"b": 2}, 3])
    collect(minari, "Walk", [[1]], **kept, **nested)
    said = []
    dataset = readers.minari("minari:tests/walk-v0", said.append)
    assert dict(dataset.env_params) == dict(max_episode_steps=4, maze=((1, 0),), names=("a", None))
    hash(dataset.env_params)
    assert said == [
        "dataset minari:tests/walk-v0: of its environment's parameters only numbers, words and lists of them are kept"
    ]


def test_integer_observations_stay_integers(minari):
    space = gymnasium.spaces.Box(0, 99, (2,), np.int64)
    write_minari(minari, obs=space, observations=np.array([[1, 2], [3, 4], [5, 6]]))
    dataset = readers.minari("minari:tests/bad-v0")
    assert dataset.spec.obs == jax.ShapeDtypeStruct((2,), "int32")
    same(dataset, obs=np.array([[1, 2], [3, 4]]), next_obs=np.array([[3, 4], [5, 6]]))


OURS = discrete_spec((jax.ShapeDtypeStruct((2,), "float32"), jax.ShapeDtypeStruct((1,), "bool")), 3, 5)


def ours(spec=OURS):
    """Episodes of 2 transitions, terminated, and of 1, truncated."""
    x = lambda *rows: (np.float32(rows)[:, None] + np.float32([[0, 0.5]]), np.array(rows)[:, None] > 1)
    action = np.int32([2, 0, 1]) if spec.action_type == "discrete" else np.float32([[0.1], [-1], [1]])
    flags = np.array([0, 1, 0], bool), np.array([0, 0, 1], bool)
    structured = Transition(x(0, 1, 5), action, np.float32([0.1, 0.2, 0.3]), x(1, 2, 6), *flags)
    return structured if spec is OURS else structured._replace(obs=structured.obs[0], next_obs=structured.next_obs[0])


@pytest.mark.parametrize("spec", [OURS, continuous_spec(OURS.obs[0], 1, 5)], ids=["structured", "continuous"])
def test_an_exported_dataset_comes_back_bit_for_bit_through_minari(minari, spec):
    dataset = datasets.admit(ours(spec), spec, "minari:tests/ours-v0", "Pendulum-v1", {"g": 9.0})
    readers.export_minari(dataset, "tests/ours-v0", dict(by="me"))
    assert tiny.same_bits(back := readers.minari("minari:tests/ours-v0"), dataset)
    assert (back.spec, back.env, back.env_params) == (spec, "Pendulum-v1", (("g", 9.0),))
    data = minari.load_dataset("tests/ours-v0")
    first, second = data.iterate_episodes()
    vectors = [e.observations[0] if spec is OURS else e.observations for e in (first, second)]
    assert [v.tolist() for v in vectors] == [[[0, 0.5], [1, 1.5], [2, 2.5]], [[5, 5.5], [6, 6.5]]]
    assert first.terminations.tolist() == [False, True] and second.truncations.tolist() == [True]
    assert data.storage.metadata["bellmax"]["provenance"] == dict(by="me")
    with pytest.raises(BadInput, match="tests/ours-v0 is there already"):
        readers.export_minari(dataset, "tests/ours-v0")
    for name in ("ours", "tests/ours", "../ours-v0"):
        with pytest.raises(BadInput, match=f"'{name}' must be like"):
            readers.export_minari(dataset, name)


def test_exported_images_lose_nothing(minari):
    spec = discrete_spec(jax.ShapeDtypeStruct((8, 8, 3), "uint8"), 3, 0)
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)  # noise, which JPEG would change
    dataset = datasets.admit(ours()._replace(obs=images[[0, 1, 2]], next_obs=images[[1, 2, 3]]), spec, "ours")
    readers.export_minari(dataset, "tests/ours-v0")
    same(readers.minari("minari:tests/ours-v0"), obs=images[[0, 1, 2]], next_obs=images[[1, 2, 3]])


def test_an_export_that_fails_leaves_nothing(minari, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(minari.MinariDataset, "__init__", fail)
    with pytest.raises(OSError, match="disk full"):
        readers.export_minari(datasets.admit(ours(), OURS, "ours"), "tests/ours-v0")
    assert not (tmp_path / "tests" / "ours-v0").exists()


box = lambda low, high, *shape: gymnasium.spaces.Box(low, high, shape, np.float32)


def write_minari(minari, action=None, obs=None, rows=3, **changes):
    """A dataset of one episode of two transitions, with what is wrong with it."""
    spaces = dict(action_space=action or gymnasium.spaces.Discrete(2), observation_space=obs or box(-1, 1, 2))
    columns = dict(observations=np.zeros((rows, 2)), actions=np.zeros(2, int), rewards=np.zeros(2))
    columns |= dict(terminations=np.zeros(2, bool), truncations=np.zeros(2, bool)) | changes
    buffer = [minari.data_collector.EpisodeBuffer(**columns)] if rows else []
    with pytest.warns(UserWarning):
        minari.create_dataset_from_buffers("tests/bad-v0", buffer, **spaces)


BAD_MINARI = {
    "nan": (dict(rewards=np.array([0, np.nan])), "reward is NaN or infinite at transition 1 of 2"),
    "rows": (dict(rows=2), "episode 0 has 2 observations and 2 rewards; it must have one more"),
    "actions": (dict(actions=np.zeros(1, int)), "episode 0 has 1 actions and 2 rewards"),
    "flags": (dict(truncations=np.zeros(3, bool)), "episode 0 has 3 truncations and 2 rewards"),
    "range": (dict(actions=np.array([0, 2])), "action is 2 at transition 1"),
    "unbounded": (dict(action=box(-np.inf, 1, 1), actions=np.zeros((2, 1))), "actions without bounds"),
    "many": (dict(action=gymnasium.spaces.MultiDiscrete([2, 2]), actions=np.zeros((2, 2), int)), "actions of MultiD"),
    "space": (dict(obs=gymnasium.spaces.Discrete(3), observations=np.zeros(3, int)), "observations of Discrete"),
    "shape": (dict(obs=box(-1, 1, 3)), r"shape \(2,\); its space says \(3,\)"),
    "empty": (dict(rows=0), "it is empty"),
}


@pytest.mark.parametrize("name", BAD_MINARI)
def test_a_bad_minari_dataset_is_one_line(minari, name):
    changes, message = BAD_MINARI[name]
    write_minari(minari, **changes)
    with pytest.raises(BadInput, match=f"^dataset minari:tests/bad-v0: .*{message}") as error:
        readers.minari("minari:tests/bad-v0")
    assert "\n" not in str(error.value)


def test_a_minari_dataset_that_is_not_here_or_damaged_is_named(minari, tmp_path):
    with pytest.raises(BadInput, match="minari:no/such-v0 is not on this machine; `minari download no/such-v0`"):
        readers.minari("minari:no/such-v0")
    write_minari(minari)
    for name in ("a/b", "/no/such/folder"):
        with pytest.raises(BadInput, match=f"minari:{name} is no folder of a Minari dataset, and an id must be like"):
            readers.minari(f"minari:{name}")
    (tmp_path / "tests" / "bad-v0" / "data" / "main_data.hdf5").write_bytes(b"nothing")
    with pytest.raises(BadInput, match="minari:tests/bad-v0 cannot be read"):
        readers.minari("minari:tests/bad-v0")


# OGBench


@pytest.mark.parametrize("part, suffix", [("train", ""), ("val", "-val")])
@pytest.mark.parametrize("prefix", ["ogbench:", ""])
def test_ogbench_is_what_its_own_loader_yields(part, suffix, prefix):
    golden, said = json.loads((HERE / "golden" / "ogbench_view.json").read_text())[part], []
    dataset = readers.ogbench(f"{prefix}{FIXTURES}/pointmaze-medium-navigate-v0{suffix}.npz", said.append)
    num = len(golden["terminals"])
    same(
        dataset,
        obs=golden["observations"],
        action=golden["actions"],
        reward=np.zeros(num),
        next_obs=golden["next_observations"],
        terminated=np.zeros(num),
        truncated=golden["terminals"],
    )
    assert dataset.spec == continuous_spec(jax.ShapeDtypeStruct((2,), "float32"), 2, 0) and dataset.env is None
    assert said == [f"dataset {dataset.name}: OGBench has no rewards; all are 0"]


def write_ogbench(path, **changes):
    """Trajectories of 3 states and 2; the first column of a state is its number."""
    arrays = dict(observations=np.arange(5)[:, None] / 8, actions=np.zeros((5, 1)), terminals=np.array([0, 0, 1, 0, 1]))
    np.savez_compressed(path, **{key: x for key, x in (arrays | changes).items() if x is not None})


def test_images_of_ogbench_stay_bytes(tmp_path):
    images = np.arange(5 * 2 * 2 * 3).reshape(5, 2, 2, 3).astype(np.uint8)
    write_ogbench(tmp_path / "visual.npz", observations=images)
    dataset = readers.ogbench(str(tmp_path / "visual.npz"))
    assert dataset.spec.obs == jax.ShapeDtypeStruct((2, 2, 3), "uint8")
    same(dataset, obs=images[[0, 1, 3]], next_obs=images[[1, 2, 4]], truncated=np.array([0, 1, 1]))


def test_rewards_in_an_ogbench_file_are_not_read_and_not_denied(tmp_path):
    write_ogbench(tmp_path / "play.npz", rewards=np.ones(5))
    dataset = readers.ogbench(str(tmp_path / "play.npz"), (said := []).append)
    assert not dataset.transitions.reward.any()
    assert said == [f"dataset {dataset.name}: its rewards are not read, which are of one task; all are 0"]


def test_a_home_folder_is_expanded_in_every_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_ogbench(tmp_path / "walk.npz")
    write_d4rl(tmp_path / "hopper.hdf5")
    for name, num in (("ogbench:~/walk.npz", 3), ("~/walk.npz", 3), ("~/hopper.hdf5", 7)):
        assert datasets.load(name).num_transitions == num


def test_an_ogbench_file_is_known_by_its_content(tmp_path):
    write_ogbench(tmp_path / "theirs.npz")
    datasets.save(tmp_path / "ours.npz", datasets.admit(ours(), OURS, "ours"))
    known = [readers.is_ogbench(np.load(tmp_path / f"{name}.npz")) for name in ("theirs", "ours")]
    assert known == [True, False]


BAD_OGBENCH = {
    "missing": (dict(actions=None), " has no actions; it has observations, terminals"),
    "lengths": (dict(actions=np.zeros((4, 1))), ": lengths differ: observations 5, actions 4, terminals 5"),
    "open": (dict(terminals=np.array([0, 0, 1, 0, 0])), ": its last row, 4, ends no trajectory"),
    "axes": (dict(terminals=np.zeros((5, 1))), r": terminals is \(5, 1\); it must have 1 axes"),
    "vector": (dict(actions=np.zeros(5)), r": actions is \(5,\); it must have 2 axes"),
    "flag": (dict(terminals=np.array([0, 2, 1, 0, 1])), ": terminals is 2 at row 1; it must be 0 or 1"),
    "nan flag": (dict(terminals=np.array([0, 0, 1, np.nan, 1])), ": terminals is nan at row 3; it must be 0 or 1"),
    "scalar": (dict(terminals=np.array(1)), ": terminals is a single value; it must have a row for each step"),
    "integers": (dict(actions=np.zeros((5, 1), int)), ": actions are int64; only continuous"),
    "nan": (dict(observations=np.full((5, 1), np.nan)), ": obs is NaN or infinite at transition 0 of 3"),
    "empty": (dict(terminals=np.ones(5)), ": it is empty"),
    "pickle": (dict(terminals=np.array([None] * 5)), r" cannot be read \(Object arrays cannot be loaded"),
}


@pytest.mark.parametrize("name", BAD_OGBENCH)
def test_a_bad_ogbench_file_is_one_line(tmp_path, name):
    changes, message = BAD_OGBENCH[name]
    write_ogbench(path := tmp_path / "bad.npz", **changes)
    with pytest.raises(BadInput, match=f"^dataset ogbench:{path}{message}"):
        readers.ogbench(f"ogbench:{path}")


def test_an_ogbench_file_that_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(BadInput, match="ogbench:nowhere.npz does not exist"):
        readers.ogbench("ogbench:nowhere.npz")
    with pytest.raises(BadInput, match=r"cannot be read \(.*File name too long"):
        readers.ogbench(f"ogbench:{'a' * 300}.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(BadInput, match=r"one.npy cannot be read \(it is a single array"):
        readers.ogbench(f"ogbench:{tmp_path / 'one.npy'}")
    write_ogbench(path := tmp_path / "bad.npz", observations=np.random.default_rng(0).normal(size=(5, 99)))
    path.write_bytes(path.read_bytes()[:900] + bytes(300) + path.read_bytes()[1200:])
    with pytest.raises(BadInput, match="bad.npz cannot be read"):
        readers.ogbench(str(path))


# D4RL


def write_d4rl(path, **changes):
    """Nine rows of three episodes: 0 to 2 terminated, 3 to 5 timed out, 6 to 8 cut by the end of the file."""
    rows = np.arange(9)
    arrays = dict(
        observations=np.stack([rows, rows / 8], 1),
        actions=rows[:, None] / 10,
        rewards=100.0 + rows,
        terminals=rows == 2,
        timeouts=rows == 5,
    )
    with pytest.importorskip("h5py").File(path, "w") as file:
        for key, x in (arrays | changes).items():
            if isinstance(x, dict):
                file.create_group(key).update(x)
            elif x is not None:
                file[key] = x
        file["infos/qpos"] = np.zeros((9, 3))
        file["metadata/algorithm"] = "SAC"


# Rows 5 (timed out) and 8 (the last) are dropped; what comes before them is truncated. The successor of 2 is 3.
VIEW = dict(
    obs=np.array([[i, i / 8] for i in (0, 1, 2, 3, 4, 6, 7)]),
    action=np.float32([[0], [0.1], [0.2], [0.3], [0.4], [0.6], [0.7]]),
    reward=np.array([100, 101, 102, 103, 104, 106, 107]),
    next_obs=np.array([[i, i / 8] for i in (1, 2, 3, 4, 5, 7, 8)]),
    terminated=np.array([0, 0, 1, 0, 0, 0, 0]),
    truncated=np.array([0, 0, 0, 0, 1, 0, 1]),
)


@pytest.mark.parametrize("form", ["plain", "columns", "numbers", "successors"])
def test_d4rl_is_its_q_learning_view(tmp_path, form):
    path, rows = tmp_path / "hopper_medium-v2.hdf5", np.arange(9)
    changes = dict(
        plain={},
        columns=dict(rewards=100.0 + rows[:, None], terminals=(rows == 2)[:, None], actions=rows / 10),
        numbers=dict(terminals=np.float32(rows == 2), timeouts=np.uint8(rows == 5)),
        successors=dict(next_observations=np.full((9, 2), 99.0)),  # its view does not read them
    )[form]
    write_d4rl(path, **changes)
    dataset = readers.d4rl(str(path))
    same(dataset, **VIEW)
    assert dataset.spec == continuous_spec(jax.ShapeDtypeStruct((2,), "float32"), 1, 1000) and dataset.env is None
    assert dataset.last.tolist() == [2, 2, 2, 4, 4, 6, 6]


def test_d4rl_without_timeouts_counts_to_the_limit(tmp_path, monkeypatch):
    # Limit 4: rows 0, 1, 2 are counted 0, 1, 2; after the terminal D4RL goes on from 1, so row 5 is its 3, the last.
    monkeypatch.setitem(readers.LIMITS, "tiny", 4)
    write_d4rl(tmp_path / "tiny.hdf5", timeouts=None)
    same(readers.d4rl(str(tmp_path / "tiny.hdf5")), **VIEW)
    # After a timeout it goes on from 0: with no terminal, of 9 rows the 3rd and 7th are cut, counted from 0.
    assert np.flatnonzero(readers.timeouts_of(np.zeros(9, bool), 4)).tolist() == [3, 7]


def test_a_timeout_goes_before_a_terminal_and_a_terminated_row_is_not_truncated(tmp_path):
    # Row 2 ends by both and is dropped, as in D4RL; row 4 is terminated and the row after it is dropped.
    rows = np.arange(9)
    path = tmp_path / "hopper.hdf5"
    write_d4rl(path, terminals=(rows == 2) | (rows == 4), timeouts=(rows == 2) | (rows == 5))
    terminated, truncated = np.array([0, 0, 0, 1, 0, 0]), np.array([0, 1, 0, 0, 0, 1])
    same(readers.d4rl(str(path)), reward=100 + rows[[0, 1, 3, 4, 6, 7]], terminated=terminated, truncated=truncated)


def test_limits_are_found_by_the_names_that_d4rl_gives_its_files():
    limits = dict(
        {"Ant_maze_u-maze_noisy_multistart_True_multigoal_True_sparse": 700, "antmaze-umaze-v0": 700},
        **{"Ant_maze_big-maze_noisy_multistart_True_multigoal_False_sparse": 1000, "antmaze-medium-play-v0": 1000},
        **{"mini_kitchen_microwave_kettle_light_slider-v0": 280, "walker_mixed": 1000, "ant_medium": 1000},
        **{"pen-v0_demos_clipped": 100, "door-v0_expert_clipped": 200, "maze2d-open-sparse": 0, "mine": 0},
    )
    assert {name: readers.limit_of(name) for name in limits} == limits


BAD_D4RL = {
    "missing": (dict(rewards=None, actions=None), " has no actions, rewards; it has infos, metadata, observations"),
    "lengths": (dict(actions=np.zeros((8, 1))), ": lengths differ: observations 9, actions 8, rewards 9"),
    "timeouts": (dict(timeouts=np.zeros(7)), ": lengths differ: .*timeouts 7"),
    "shape": (dict(rewards=np.zeros((9, 2))), r": rewards is \(9, 2\); it must be \(9,\)"),
    "integers": (dict(actions=np.zeros(9, int)), ": actions are int64; only continuous"),
    "matrices": (dict(actions=np.zeros((9, 2, 3))), r": actions is \(9, 2, 3\); it must have at most 2 axes"),
    "scalar": (dict(rewards=np.float32(1)), ": rewards is a single value; it must have a row for each step"),
    "group": (dict(rewards={"r": 1.0}), ": rewards is a group of r; only arrays are read"),
    "groups": (dict(timeouts={}), ": timeouts is a group of nothing; only arrays are read"),
    "flag": (
        dict(terminals=np.float32([0, 0, 0, 0, 0.5, 1, 0, 0, 1])),
        ": terminals is 0.5 at row 4; it must be 0 or 1",
    ),
    "nan flag": (
        dict(timeouts=np.where(np.arange(9) == 6, np.nan, 0)),
        ": timeouts is nan at row 6; it must be 0 or 1",
    ),
    "no ends": (dict(terminals=np.zeros(9), timeouts=np.zeros(9)), ": episode ends are missing: no row of 9 is"),
    "nan": (dict(actions=np.where(np.arange(9) == 6, np.nan, 0.0)), ": action is NaN or infinite at transition 5 of 7"),
    "no limit": (dict(timeouts=None), " has no timeouts, and its name does not say.*hopper-medium-v0.hdf5"),
    "empty": (dict(timeouts=np.ones(9)), ": it is empty"),
    "no rows": ({key: np.zeros((0, 1)) for key in (*readers.D4RL, "timeouts")}, ": it is empty"),
    "minari": (dict(episode_0=np.zeros(1)), " is a part of a Minari dataset; give its folder, as minari:FOLDER"),
}


@pytest.mark.parametrize("name", BAD_D4RL)
def test_a_bad_d4rl_file_is_one_line(tmp_path, name):
    changes, message = BAD_D4RL[name]
    write_d4rl(path := tmp_path / "bad.hdf5", **changes)
    with pytest.raises(BadInput, match=f"^dataset {path}{message}"):
        readers.d4rl(str(path))


def test_a_d4rl_file_that_is_missing_or_damaged_is_named(tmp_path):
    pytest.importorskip("h5py")
    with pytest.raises(BadInput, match="nowhere.hdf5 does not exist"):
        readers.d4rl("nowhere.hdf5")
    write_d4rl(path := tmp_path / "cut.hdf5")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(BadInput, match="cut.hdf5 cannot be read"):
        readers.d4rl(str(path))


def test_normalized_scores_are_d4rls():
    golden = json.loads((HERE / "golden" / "iql_d4rl_norm.json").read_text())
    for name, returns in golden["ref"].items():
        assert d4rl_scores.references(name) == (returns["min"], returns["max"])
    for example in golden["examples"]:
        score = d4rl_scores.normalized_score(example["env"], example["ret"])
        assert score == pytest.approx(example["score"], rel=2e-6)
    # (4 - 0) / 4 and (1 - 0) / 4, of kitchen's four subtasks
    assert d4rl_scores.normalized_score("kitchen-mixed-v0", np.array([4.0, 1.0])).tolist() == [100, 25]


@pytest.mark.parametrize("name", ["hopper", "hopper-medium-v5", "maze2d-umaze-dense-v1", "antmaze-umaze-play-v0"])
def test_a_task_without_a_reference_is_refused(name):
    with pytest.raises(BadInput, match=f"no reference returns are known for '{name}'.*halfcheetah, hopper"):
        d4rl_scores.references(name)


# All


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", ["minari", "ogbench", "d4rl"])
def test_a_file_that_is_read_keeps_its_bytes(kind, tmp_path, monkeypatch, request):
    if kind == "minari":
        collect(request.getfixturevalue("minari"), "Walk", [[1, 2, 2]])
        name = "minari:tests/walk-v0"
    else:
        name = str(tmp_path / ("hopper.hdf5" if kind == "d4rl" else "walk.npz"))
        (write_d4rl if kind == "d4rl" else write_ogbench)(name)
    before = contents(tmp_path)
    getattr(readers, kind)(name)
    assert contents(tmp_path) == before and before


@pytest.mark.parametrize("kind, module", [("minari", "minari"), ("d4rl", "h5py")])
def test_without_its_package_a_reader_names_the_extra(kind, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadInput, match=f"needs the extra `offline` .*{module}.*--extra offline") as error:
        getattr(readers, kind)("data")
    assert "\n" not in str(error.value)
    if module == "minari":
        with pytest.raises(BadInput, match="needs the extra `offline`"):
            readers.export_minari(None, "tests/ours-v0")


def test_readers_are_imported_without_the_packages(monkeypatch):
    for module in ("minari", "h5py", "ogbench", "d4rl"):
        monkeypatch.setitem(sys.modules, module, None)
    importlib.reload(readers)


# Bytes that must be free: rows and their successors, twice on the CPU.
#   minari   3 transitions of 2 x 8 of observations, 4, 4 and 2 flags: 78, twice
#   ogbench  3 arrays of 5 numbers of 8 with headers of 128: 504, four times
#   d4rl     9 rows of 16 of observations, 8 and 8 and a flag: 297, four times
NEEDS = dict(minari="156 B", ogbench="2.0 kB", d4rl="1.2 kB")


@pytest.mark.parametrize("kind", NEEDS)
def test_data_larger_than_the_memory_are_refused_with_both_numbers(kind, tmp_path, monkeypatch, request):
    if kind == "minari":
        collect(request.getfixturevalue("minari"), "Walk", [[1, 2, 2]])
        name = "minari:tests/walk-v0"
    else:
        name = str(tmp_path / ("hopper.hdf5" if kind == "d4rl" else "walk.npz"))
        (write_d4rl if kind == "d4rl" else write_ogbench)(name)
    monkeypatch.setattr(datasets.check, "available_memory", lambda: 100)
    with pytest.raises(datasets.NoRoom, match=f"needs {NEEDS[kind]} of memory; 100 B available"):
        getattr(readers, kind)(name)


def test_a_reader_is_registered_for_every_name():
    found = {key: reader.__name__ for key, reader in readers.READERS.items()}
    assert found == {"minari:": "minari", "minari-flat:": "minari", "ogbench:": "ogbench", ".hdf5": "d4rl"}
