"""Datasets: the door refuses what cannot be learned from, a file comes back bit for bit, sampling is uniform."""

import dataclasses
import importlib.util
import json
import sys
import types
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from probes import table

from envs.types import Transition, continuous_spec, discrete_spec
from replay import builtin, datasets
from runner.check import BadInput

script = importlib.util.spec_from_file_location("collect", Path(__file__).parents[1] / "scripts" / "collect.py")
collect = importlib.util.module_from_spec(script)
script.loader.exec_module(collect)

SPEC = continuous_spec(jax.ShapeDtypeStruct((2,), "float32"), 1, 3)
STRUCTURED = discrete_spec((jax.ShapeDtypeStruct((2,), "float32"), jax.ShapeDtypeStruct((1, 2), "uint8")), 4, 0)


def transitions(spec=SPEC) -> Transition:
    """Three episodes of 2, 3 and 1 transitions: terminated, truncated, both. Row i's numbers are its own."""
    ids = np.arange(6)
    obs = lambda i: jax.tree.map(lambda s: np.broadcast_to(i.reshape(-1, *[1] * len(s.shape)), (6, *s.shape)), spec.obs)
    typed = lambda x: jax.tree.map(lambda s, x: x.astype(s.dtype), spec.obs, x)
    action = ids % 4 if spec.action_type == "discrete" else (ids[:, None] - 2.5) / 10
    return Transition(
        obs=typed(obs(10 * ids)),
        action=action.astype(spec.action.dtype),
        reward=np.float32([1, 2, 3, 4, 5, 6]),
        next_obs=typed(obs(np.array([10, 15, 30, 40, 45, 55]))),
        terminated=np.array([0, 1, 0, 0, 0, 1], bool),
        truncated=np.array([0, 0, 0, 0, 1, 1], bool),
    )


def admit(spec=SPEC, say=print, **changes):
    return datasets.admit(transitions(spec)._replace(**changes), spec, "ours", "Pendulum-v1", {"g": 9.0}, say)


def at(field, index, value, spec=SPEC):
    """The field with one entry changed."""
    x = getattr(transitions(spec), field).copy()
    x[index] = value
    return {field: x}


def test_each_transition_knows_the_last_of_its_episode():
    assert admit().last.tolist() == [1, 1, 4, 4, 4, 5]


def test_statistics_by_hand():
    # returns 1 + 2, 3 + 4 + 5, 6: mean 7; one action of six, 0.99, is within 0.02 of a bound
    s = datasets.statistics(admit(**at("action", 0, 0.99)))
    assert s == dict(
        transitions=6, episodes=3, return_mean=7, return_min=3, return_max=12, at_bounds=pytest.approx(1 / 6)
    )
    assert datasets.statistics(admit(STRUCTURED))["at_bounds"] is None


@pytest.mark.parametrize("spec", [SPEC, STRUCTURED], ids=["continuous", "structured"])
def test_a_file_comes_back_bit_for_bit(tmp_path, spec):
    dataset, path = admit(spec), tmp_path / "deep" / "ours.npz"
    datasets.save(path, dataset, dict(where="here"))
    loaded = datasets.load(str(path))
    assert tiny.same_bits(loaded, dataclasses.replace(dataset, name=str(path)))
    assert loaded.spec == spec and loaded.env == "Pendulum-v1" and dict(loaded.env_params) == {"g": 9.0}
    header = json.loads(str(np.load(path)["header"]))
    assert header["provenance"] == dict(where="here") and header["statistics"]["episodes"] == 3


def test_a_file_is_never_written_to(tmp_path):
    path = tmp_path / "ours.npz"
    datasets.save(path, admit())
    before = path.read_bytes()
    datasets.load(str(path))
    with pytest.raises(BadInput, match="is there already"):
        datasets.save(path, admit(reward=np.zeros(6, np.float32)))
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["ours.npz"]
    datasets.save(path, admit(reward=np.zeros(6, np.float32)), overwrite=True)
    assert path.read_bytes() != before


def frame(index, value):
    """The structured observations' second part with one entry of its successors changed."""
    vector, image = transitions(STRUCTURED).next_obs
    image = image.copy()
    image[index] = value
    return dict(next_obs=(vector, image))


# Data that the door refuses, and what its line must say.
BAD = {
    "nan": (SPEC, at("reward", 4, np.nan), "reward is NaN or infinite at transition 4 of 6"),
    "infinite": (SPEC, at("obs", (3, 1), -np.inf), "obs is NaN or infinite at transition 3 of 6"),
    "no ends": (SPEC, dict(terminated=np.zeros(6, bool), truncated=np.zeros(6, bool)), "episode ends are missing"),
    "open end": (SPEC, at("terminated", 5, False) | at("truncated", 5, False), "last transition, 5, ends no episode"),
    "an end missing": (SPEC, at("terminated", 1, False), r"end is missing at transition 1.*\(so at 1 of 6\)"),
    "nan in a successor": (SPEC, at("next_obs", (5, 0), np.nan), "next_obs is NaN or infinite at transition 5 of 6"),
    "nan action": (SPEC, at("action", 1, np.nan), "action is NaN or infinite at transition 1 of 6"),
    "other image": (STRUCTURED, frame((2, 0, 1), 31), r"end is missing at transition 2.*\(so at 1 of 6\)"),
    "other structure": (SPEC, dict(obs=(np.zeros((6, 2)),) * 2), "obs is PyTreeDef.*its spec says PyTreeDef"),
    "no observations": (STRUCTURED, dict(next_obs=None), "next_obs is PyTreeDef.*its spec says PyTreeDef"),
    "action too large": (STRUCTURED, at("action", 2, 4, STRUCTURED), "action is 4 at transition 2.*from 0 to 3"),
    "action negative": (STRUCTURED, at("action", 3, -1, STRUCTURED), "action is -1 at transition 3"),
    "other size": (SPEC, dict(action=np.zeros((6, 2), np.float32)), r"action is \(6, 2\) float32.*\(6, 1\) float32"),
    "other type": (SPEC, dict(reward=np.zeros(6)), r"reward is \(6,\) float64"),
    "fewer": (SPEC, dict(truncated=np.ones(5, bool)), r"truncated is \(5,\) bool; its spec says \(6,\) bool"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_one_line_at_the_door(name):
    spec, changes, message = BAD[name]
    with pytest.raises(BadInput, match=f"^dataset ours: .*{message}") as error:
        admit(spec, **changes)
    assert "\n" not in str(error.value)


def test_a_successor_may_differ_by_rounding():
    # 10 may differ by 1e-4 + 1e-4 x 10 = 0.0011.
    assert admit(**at("next_obs", (0, 0), 10.001)).num_transitions == 6
    with pytest.raises(BadInput, match="end is missing at transition 0"):
        admit(**at("next_obs", (0, 0), 10.0013))


def test_parameters_of_an_environment_are_hashable():
    dataset = datasets.admit(transitions(), SPEC, "ours", "x", dict(maze=[[1, 0], [0, 1]], words=["a"]))
    assert dataset.env_params == (("maze", ((1, 0), (0, 1))), ("words", ("a",)))
    hash(dataset.env_params)


def test_specs_of_other_types_or_actions_are_told_apart():
    struct = lambda dtype: jax.ShapeDtypeStruct((2,), dtype)
    specs = [continuous_spec(struct(d), n, 0) for d in ("float32", "uint8") for n in (1, 2)]
    specs.append(discrete_spec(struct("float32"), 2, 0))
    assert len({datasets.shapes(spec) for spec in specs}) == 5
    assert datasets.shapes(specs[0]) == datasets.shapes(specs[0]._replace(max_episode_steps=9))


def test_an_empty_dataset_is_refused():
    empty = jax.tree.map(lambda x: x[:0], transitions())
    with pytest.raises(BadInput, match="dataset ours: it is empty"):
        datasets.admit(empty, SPEC, "ours")


def test_actions_outside_the_box_are_clipped_and_counted():
    said = []
    dataset = admit(say=said.append, **at("action", [1, 4], [[1.5], [-3.0]]))
    assert dataset.transitions.action[:, 0].tolist() == np.float32([-0.25, 1, -0.05, 0.05, -1, 0.25]).tolist()
    assert len(said) == 1 and "2 of 6 actions clipped to [-1, 1], from 3.0" in said[0]


@pytest.mark.parametrize("moment", ["reading", "admitting"])
def test_data_larger_than_the_memory_are_refused_with_both_numbers(moment, tmp_path, monkeypatch):
    path = str(tmp_path / "ours.npz")
    datasets.save(path, admit())
    monkeypatch.setattr(datasets.check, "available_memory", lambda: 150)
    if moment == "admitting":
        # A transition is 2 x 8 bytes of observations, 4 of action, 4 of reward, 2 flags: 26, and six of them 156.
        need = "156 B"
    else:  # the file's arrays, headers included, as read and as admitted
        need = f"{2 * sum(x.file_size for x in zipfile.ZipFile(path).infolist()) / 1000:.1f} kB"
    with pytest.raises(datasets.NoRoom, match=f"needs {need} of memory; 150 B"):
        admit() if moment == "admitting" else datasets.load(path)


def test_copies_count_in_main_memory_and_not_on_a_device(monkeypatch):
    monkeypatch.setattr(datasets.check, "available_memory", lambda: 100)
    datasets.check_fits("ours", 50, copies=2)
    with pytest.raises(datasets.NoRoom, match="dataset ours needs 102 B"):
        datasets.check_fits("ours", 51, copies=2)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    datasets.check_fits("ours", 100, copies=2)


# Of headers: `None` where the entry is left out.
BAD_HEADER = {
    "no env": dict(env=None),
    "env": dict(env=5),
    "no parameters": dict(env_params=None),
    "null parameters": dict(env_params="null"),
    "parameters": dict(env_params=[1, 2]),
    "nested parameters": dict(env_params=dict(maze=[{"a": 1}])),
}


@pytest.mark.parametrize("name", BAD_HEADER)
def test_a_damaged_header_is_one_line(name, tmp_path):
    path = tmp_path / "ours.npz"
    datasets.save(path, admit())
    arrays = dict(np.load(path))
    header = json.loads(str(arrays.pop("header"))) | BAD_HEADER[name]
    header = {k: None if x == "null" else x for k, x in header.items() if x is not None}
    np.savez(path, header=np.array(json.dumps(header)), **arrays)
    with pytest.raises(BadInput, match="^dataset file .*ours.npz is damaged") as error:
        datasets.load(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["cut", "flipped", "packed", "text", "foreign", "pickle", "array", "field", "newer"])
def test_a_damaged_file_is_named(damage, tmp_path):
    path = tmp_path / "ours.npz"
    datasets.save(path, admit())
    data, arrays = path.read_bytes(), dict(np.load(path))
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        i = data.index(np.float32([1, 2, 3, 4, 5, 6]).tobytes())
        path.write_bytes(data[:i] + b"\xff" + data[i + 1 :])
    elif damage == "packed":
        np.savez_compressed(path, **arrays)
        data = path.read_bytes()
        i = data.index(b"obs.npy") + len("obs.npy") + 20  # after 20 bytes of sizes; no stream begins with 255
        path.write_bytes(data[:i] + b"\xff" + data[i + 1 :])
    elif damage == "array":
        with open(path, "wb") as file:
            np.save(file, np.zeros(3))
    elif damage == "text":
        path.write_text("reward: 1")
    elif damage == "pickle":
        np.savez(path, header=np.array({"format": "bellmax"}, object))
    elif damage == "newer":
        header = json.loads(str(arrays.pop("header"))) | dict(version=datasets.VERSION + 1)
        np.savez(path, header=np.array(json.dumps(header)), **arrays)
    else:
        del arrays["header" if damage == "foreign" else "next_obs"]
        np.savez(path, **arrays)
    reasons = dict(array="is damaged .it is a single array", packed="is damaged .Error -3")
    reasons |= dict.fromkeys(("foreign", "newer"), "was not written by Bellmax")
    message = reasons.get(damage, "is damaged")
    with pytest.raises(BadInput, match=f"^dataset file .*ours.npz {message}") as error:
        datasets.load(str(path))
    assert "\n" not in str(error.value)


def test_a_name_that_is_neither_built_in_nor_a_file_is_named_with_the_closest(tmp_path):
    with pytest.raises(BadInput, match="unknown dataset 'pendulum/exprt'; closest: pendulum/expert"):
        datasets.load("pendulum/exprt")
    with pytest.raises(BadInput, match="nowhere.npz does not exist"):
        datasets.load("nowhere.npz")
    # Longer than a file's name may be.
    for name in ("a" * 300, "a" * 300 + ".npz"):
        with pytest.raises(BadInput, match="unknown dataset 'aaa|File name too long") as error:
            datasets.load(name)
        assert "\n" not in str(error.value)
    (tmp_path / "data.csv").touch()
    with pytest.raises(BadInput, match="ends in one of: .hdf5, .npz"):
        datasets.load(str(tmp_path / "data.csv"))


def test_a_reader_is_found_by_how_a_name_begins_or_ends(monkeypatch):
    for key in ("other:", ".other"):
        monkeypatch.setitem(datasets.READERS, key, lambda name, say: name.upper())
    assert datasets.load("other:door/human") == "OTHER:DOOR/HUMAN"
    assert datasets.load("door/human.other") == "DOOR/HUMAN.OTHER"


def test_batches_are_whole_rows_and_all_rows_are_drawn_alike():
    dataset, num = admit(), 60_000
    batch = jax.jit(datasets.sample, static_argnums=2)(dataset, jax.random.key(0), num)
    row = np.asarray(batch.reward).astype(int) - 1
    for field, x in datasets.named(transitions()):
        np.testing.assert_array_equal(x[row], dict(datasets.named(batch))[field])
    # Each of six rows 10,000 times; five standard deviations of sqrt(60,000 * 5 / 36) = 91.
    assert np.abs(np.bincount(row, minlength=6) - 10_000).max() < 460


def test_runs_share_one_dataset_without_a_copy():
    one = datasets.zeros(SPEC)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((100_000, *x.shape[1:]), x.dtype), one)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    draw = lambda dataset, keys: jax.vmap(lambda key: datasets.sample(dataset, key, 16))(keys)
    memory = jax.jit(draw).lower(structs, keys).compile().memory_analysis()
    assert memory.argument_size_in_bytes > 26 * 100_000 and memory.temp_size_in_bytes < 26 * 10_000


def test_a_roll_out_becomes_episodes_one_after_another():
    # Environment 0's episode ends at its second step and another one is under way; environment 1 ends nothing.
    t, e = np.meshgrid(np.arange(3), np.arange(2), indexing="ij")
    x = (10 * e + t).astype(np.float32)
    no = np.zeros((3, 2), bool)
    terminated = no.copy()
    terminated[1, 0] = True
    made = datasets.episodes(Transition(x[..., None], x[..., None], x, x[..., None], terminated, no))
    assert made.reward.tolist() == [0, 1, 10, 11, 12]
    assert made.terminated.tolist() == [0, 1, 0, 0, 0] and made.truncated.tolist() == [0, 0, 0, 0, 1]
    assert made.obs[:, 0].tolist() == made.reward.tolist()
    assert datasets.join([made, made]).reward.tolist() == 2 * [0, 1, 10, 11, 12]


def chain(num_envs):
    """Three states in a row, from the first; action 1 goes on and pays the number of the state, action 0 stays."""
    nexts, rewards = [[0, 1], [1, 2], [2, 2]], [[0, 1], [0, 2], [0, 3]]
    ends = [[0, 0], [0, 0], [0, 1]]
    return table([[0.0], [1.0], [2.0]], [1, 0, 0], nexts, rewards, ends, num_envs=num_envs)


def test_a_roll_out_is_what_the_policy_did_in_the_environment():
    env, num_steps = chain(2), 30
    act = lambda params, obs, key: (jax.random.uniform(key, obs.shape[:1]) < params).astype(jnp.int32)
    made = datasets.roll_out(env, act, 0.5, jax.random.key(3), num_steps)
    state, was = np.asarray(made.obs)[..., 0], np.asarray(made.action)
    assert 15 < was.sum() < 45  # 60 fair coins: mean 30, standard deviation 3.9
    np.testing.assert_array_equal(made.reward, was * (state + 1))
    np.testing.assert_array_equal(made.next_obs[..., 0], np.minimum(state + was, 2))
    np.testing.assert_array_equal(made.terminated, (state == 2) & (was == 1))
    dataset = datasets.admit(datasets.episodes(made), env.spec, "chain")
    # Whole episodes return 1 + 2 + 3, however long they took.
    s = datasets.statistics(dataset)
    assert s["return_min"] == s["return_max"] == 6 and s["episodes"] == np.asarray(made.terminated).sum()


def test_built_in_data_are_made_once_and_are_what_they_say(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = datasets.load("pendulum/expert", say=lambda _: None)
    s = datasets.statistics(made)
    assert (s["transitions"], s["episodes"]) == (50_000, 250)
    # Of 4,000 episodes the mean is -152. Here it is of 250 whose standard deviation is 100: three standard errors of 6.
    assert s["return_mean"] == pytest.approx(-152, abs=20)
    assert [p.name for p in builtin.cache_folder().iterdir()] == ["pendulum-expert-1.npz"]
    monkeypatch.setitem(builtin.TABLE, "pendulum/expert", builtin.TABLE["pendulum/expert"]._replace(make=None))
    assert tiny.same_bits(datasets.load("pendulum/expert"), made)
    (builtin.cache_folder() / "pendulum-expert-1.npz").write_bytes(b"")
    with pytest.raises(BadInput, match="damaged.*delete it, and it is made anew"):
        datasets.load("pendulum/expert")


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A built-in dataset of two transitions, in a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    obs, ends = np.float32([[1, 0, 0], [0, 1, 0], [0, 0, 1]]), np.array([False, True])
    made = Transition(obs[:2], np.zeros((2, 1), np.float32), np.zeros(2, np.float32), obs[1:], ~ends & False, ends)
    entry = builtin.Builtin("two transitions", "Pendulum-v1", lambda name: made)
    monkeypatch.setitem(builtin.TABLE, "pendulum/two", entry)
    return tmp_path


def test_low_memory_is_no_reason_to_delete_the_cached_file(cached, monkeypatch):
    datasets.load("pendulum/two", lambda _: None)
    monkeypatch.setattr(datasets.check, "available_memory", lambda: 9)
    with pytest.raises(datasets.NoRoom, match="of memory; 9 B available$"):
        datasets.load("pendulum/two")


def test_without_a_cache_folder_data_are_made_and_it_is_said(cached, monkeypatch):
    (cached / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cached / "file"))
    assert datasets.load("pendulum/two", (said := []).append).num_transitions == 2
    assert said[0] == "making dataset pendulum/two" and len(said) == 2 and "\n" not in said[1]
    assert "pendulum/two cannot be kept in " in said[1] and "it is made anew each time" in said[1]


def test_two_launches_that_make_the_same_data_write_different_files(cached, monkeypatch):
    written = []
    save = datasets.save
    monkeypatch.setattr(datasets, "save", lambda path, *rest: (written.append(path.name), save(path, *rest)))
    for _ in range(2):  # of one process, whose number cannot tell them apart: so it is in containers
        datasets.load("pendulum/two", lambda _: None)
        (builtin.cache_folder() / "pendulum-two-1.npz").unlink()
    assert len(set(written)) == 2 and list(builtin.cache_folder().iterdir()) == []


def test_random_actions_are_uniform_over_all_there_are():
    obs, image = jnp.zeros((20_000, 2)), jnp.zeros((20_000, 1, 2), jnp.uint8)
    action = np.asarray(builtin.uniform(SPEC)((), obs, jax.random.key(0)))
    # Quarters of [-1, 1] have 5,000 each; five standard deviations of sqrt(20,000 x 3 / 16) = 61.
    assert action.shape == (20_000, 1)
    assert np.abs(np.histogram(action, 4, (-1, 1))[0] - 5_000).max() < 310
    action = builtin.uniform(STRUCTURED)((), (obs, image), jax.random.key(0))
    assert action.shape == (20_000,) and np.abs(np.bincount(action, minlength=4) - 5_000).max() < 310


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_actions_is_the_other_s(share):
    one = lambda x: lambda params, obs, key: jnp.full((*obs.shape[:1], 2), x)
    act = builtin.mixed_with(one(0.0), one(1.0), share)
    action = np.asarray(act((), jnp.zeros((20_000, 3)), jax.random.key(0)))
    assert (action[:, 0] == action[:, 1]).all()
    # Five standard deviations of sqrt(0.3 x 0.7 / 20,000) = 0.0032; none at 0 and 1.
    assert action.mean() == pytest.approx(share, abs=0.016 * (0 < share < 1))


def test_a_suite_is_three_shares_of_random_actions_and_the_three_in_a_row(monkeypatch):
    asked = []

    def acting(expert, noise, seed, num_envs, num_steps):
        asked.append((expert, seed, num_envs, num_steps))
        return lambda name: transitions()._replace(reward=np.full(6, noise, np.float32))

    monkeypatch.setattr(builtin, "acting", acting)
    entries = builtin.suite("x", "Pendulum-v1", "expert", 0.5, "about", 7, 9)
    rewards = {name: entry.make("Pendulum-v1").reward.tolist() for name, entry in entries.items()}
    assert rewards == {
        "x/random": [1] * 6,
        "x/medium": [0.5] * 6,
        "x/expert": [0] * 6,
        "x/mixed": [1] * 6 + [0.5] * 6 + [0] * 6,
    }
    assert {(expert, *rest) for expert, _, *rest in asked} == {("expert", 7, 9)}
    assert len({seed for _, seed, *_ in asked}) == 3


def test_the_expert_of_cartpole_keeps_it_up_and_random_actions_do_not():
    made = builtin.acting(builtin.balance, 0.0, 0, 4, 500)("CartPole-v1")
    # Four episodes to the limit of 500 steps
    assert np.flatnonzero(made.truncated).tolist() == [499, 999, 1499, 1999] and not made.terminated.any()
    made = builtin.acting(builtin.balance, 1.0, 0, 4, 500)("CartPole-v1")
    # About 22 steps an episode: 90 in 2,000 steps
    assert 60 < made.terminated.sum() < 130


def test_the_controller_pushes_with_the_swing_and_holds_the_top():
    obs = lambda theta, w: jnp.array([[np.cos(theta), np.sin(theta), w]], jnp.float32)
    act = lambda theta, w: float(builtin.swing_up((), obs(theta, w), None)[0, 0])
    # At the bottom the energy is -15 + w^2 / 2, less than 15: push with the swing.
    assert (act(np.pi, 1.0), act(np.pi, -1.0)) == (1, -1)
    # Level, w = 6: energy 18, three too much: push against it.
    assert act(np.pi / 2, 6.0) == -1
    # Near the top: torque -(8 * 0.1 + 2 * -0.5) = 0.2, of 2
    np.testing.assert_allclose(act(0.1, -0.5), 0.1, rtol=1e-5)


def test_collect_writes_what_the_environment_did(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(collect.envs, "make", lambda name, num_envs, **params: chain(num_envs))
    path = tmp_path / "chain.npz"
    arguments = ["--policy", "random", "random", "--env", "chain", "--steps", 200, "--num-envs", 4, "--seed", 7]
    assert collect.main([str(a) for a in [*arguments, "--out", path]]) == 0
    assert "chain.npz" in capsys.readouterr().out
    dataset = datasets.load(str(path))
    ours = jax.device_get(dataset.transitions)
    header = json.loads(str(np.load(path)["header"]))
    sizes = header["provenance"]["transitions"]
    assert sum(sizes) == dataset.num_transitions <= 200 and header["provenance"]["seed"] == 7

    # Again, from the keys that the script says it takes: the i-th policy's is fold_in(key(seed), i).
    env, expected = chain(4), []
    step = jax.jit(lambda key, state, action: env.step(key, state, action)[:2])
    for i, size in enumerate(sizes):
        key, reset_key = jax.random.split(jax.random.fold_in(jax.random.key(7), i))
        state, streams = env.reset(reset_key), []
        for step_key in jax.random.split(key, 25):
            act_key, env_key = jax.random.split(step_key)
            state, transition = step(env_key, state, jax.random.randint(act_key, (4,), 0, 2))
            streams.append(transition)
        # Environment by environment, each up to its last finished episode.
        finished = [[t for t in range(25) if streams[t].terminated[e]][-1] + 1 for e in range(4)]
        assert sum(finished) == size
        expected += [jax.tree.map(lambda x, e=e: x[e], streams[t]) for e in range(4) for t in range(finished[e])]
    assert tiny.same_bits(jax.tree.map(lambda *x: np.stack(x), *expected), ours)


POLICY = types.SimpleNamespace(__name__="algos.stand_in", act=lambda config, spec, params, obs, key: obs[..., :1] * 0)
BEGINS = types.SimpleNamespace(**vars(POLICY), begin=None)
ANY = "--policy random --env Pendulum-v1"

BAD_ARGUMENTS = {
    "no environment": ("--policy random", "--policy random needs --env"),
    "environment": ("--policy random --env Pendulum-v2", "Pendulum-v1"),
    "no policy file": ("--policy none.msgpack", "none.msgpack cannot be read"),
    "no policy": ("--policy --env Pendulum-v1", "--policy names nothing"),
    "steps": (f"{ANY} --steps 0", "--steps is 0"),
    "seed": (f"{ANY} --seed {2**70}", f"--seed {2**70} must be from 0 to 2^31 - 1"),
    "negative seed": (f"{ANY} --seed -1", "--seed -1 must be from 0"),
    "suffix": (f"{ANY} --out x.csv", "x.csv must end in .npz"),
    "there already": (f"{ANY} --out {{tmp}}/is.npz", "--overwrite"),
    "under a file": (f"{ANY} --out {{tmp}}/is.npz/new.npz", "new.npz cannot be written"),
    "folder": (f"{ANY} --overwrite --out {{tmp}}/folder.npz", "folder.npz cannot be written"),
    "too large": (f"{ANY} --steps {10**12} --num-envs 1", "GB available"),
    "minari id": (f"{ANY} --minari nowhere", "Minari id 'nowhere' must be like"),
    "minari there already": (f"{ANY} --minari tests/is-v0", "tests/is-v0 is there already"),
    "two environments": ("--policy pendulum.msgpack cartpole.msgpack", "of several environments"),
    "second policy's shapes": (
        "--policy pendulum.msgpack cartpole.msgpack --env Pendulum-v1",
        "cartpole.msgpack is for",
    ),
    "second policy's type": ("--policy random uint8.msgpack --env Pendulum-v1", "uint8.msgpack is for observations"),
    "begin": ("--policy begins.msgpack", "stand_in begins each episode in its own way"),
    "sample": ("--policy pendulum.msgpack --sample", "stand_in has no explore"),
}


@pytest.fixture
def policies(monkeypatch):
    """Stand-ins for policy files, by their names."""
    struct = lambda size, dtype: jax.ShapeDtypeStruct((size,), dtype)
    pendulum, params = continuous_spec(struct(3, "float32"), 1, 200), dict(g=9.0)
    known = {
        "pendulum.msgpack": (POLICY, pendulum, ("Pendulum-v1", params)),
        "begins.msgpack": (BEGINS, pendulum, ("Pendulum-v1", params)),
        "uint8.msgpack": (POLICY, continuous_spec(struct(3, "uint8"), 1, 200), ("Pendulum-v1", params)),
        "cartpole.msgpack": (POLICY, discrete_spec(struct(4, "float32"), 2, 500), ("CartPole-v1", {})),
    }
    environment, load = collect.policy.environment, collect.policy.load
    own = lambda path, run: (known[path][0], None, known[path][1], ()) if path in known else load(path, run)
    monkeypatch.setattr(collect.policy, "load", own)
    monkeypatch.setattr(collect.policy, "environment", lambda x: known[x][2] if x in known else environment(x))


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_collect_refuses_in_one_line_before_it_acts(name, policies, tmp_path, capsys, monkeypatch):
    arguments, message = BAD_ARGUMENTS[name]
    if "minari" in name:
        pytest.importorskip("minari")
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr(datasets, "roll_out", None)
    (tmp_path / "is.npz").touch()
    for folder in ("folder.npz", "tests/is-v0"):
        (tmp_path / folder).mkdir(parents=True)
    out = "" if "--out" in arguments else " --out {tmp}/new/new.npz"
    assert collect.main((arguments + out).format(tmp=tmp_path).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error
    assert not (tmp_path / "new").exists()


def test_without_minari_collect_does_not_act(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    monkeypatch.setattr(datasets, "roll_out", None)
    assert collect.main(f"{ANY} --minari tests/new-v0 --out {tmp_path}/new.npz".split()) == 2
    assert "needs the extra `offline`" in capsys.readouterr().err


@pytest.mark.parametrize("given, g", [("", 9.0), ("--env-params.g 8", 8.0)])
def test_collect_acts_in_the_environment_of_the_policy_with_what_is_given_over_it(
    policies, tmp_path, monkeypatch, given, g
):
    one = datasets.zeros(continuous_spec(jax.ShapeDtypeStruct((3,), "float32"), 1, 200)).transitions
    episode = jax.tree.map(lambda x: np.asarray(x)[None], one)  # one step of one environment
    asked, make = [], collect.envs.make
    monkeypatch.setattr(collect.envs, "make", lambda *a, **params: asked.append(params) or make(*a, **params))
    monkeypatch.setattr(datasets, "roll_out", lambda *_: episode)
    exported = []
    monkeypatch.setattr(collect.readers, "check_minari", lambda name: None)
    monkeypatch.setattr(collect.readers, "export_minari", lambda *x: exported.append(x))
    path = tmp_path / "new.npz"
    arguments = f"--policy pendulum.msgpack --steps 1 --num-envs 1 --minari tests/new-v0 --out {path} {given}"
    assert collect.main(arguments.split()) == 0
    dataset = datasets.load(str(path))
    assert dataset.env == "Pendulum-v1" and dict(dataset.env_params).keys() == {"g"}
    assert float(dict(dataset.env_params)["g"]) == float(asked[0]["g"]) == g
    ((mine, name, provenance),) = exported
    assert (mine.num_transitions, name, provenance["policy"]) == (1, "tests/new-v0", ("pendulum.msgpack",))


@pytest.mark.parametrize("prefix", ["", "ogbench:"])
def test_an_npz_of_ogbench_is_told_from_our_own(prefix):
    path = Path(__file__).parent / "fixtures" / "ogbench" / "pointmaze-medium-navigate-v0.npz"
    assert datasets.load(f"{prefix}{path}").num_transitions == 10


def test_a_dataset_may_hold_one_transition():
    one = jax.tree.map(lambda x: np.asarray(x)[-1:], tiny.dataset().transitions)
    assert datasets.admit(one, tiny.dataset().spec, "one").last.tolist() == [0]
