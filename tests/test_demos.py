"""Demonstrations: what is copied and where, that no window leaves its episode, and `--demos` on the command line."""

import dataclasses
import json
from functools import partial

import jax
import numpy as np
import pytest
import tiny
from launching import main
from scipy.stats import chisquare

from algos import cqn
from envs.types import Transition, continuous_spec
from replay import datasets, demos, ring
from runner import cli, policy, run, settings, train
from runner.check import BadInput

key = jax.random.key
KEPT = 4  # transitions of the dataset: two episodes, of one and of three


def ids(t, e, ends=False):
    """Transitions of environments `e` on steps `t`, int arrays of one shape: the ids (t, e), then (t + 1, e)."""
    obs = np.stack([t, e], -1).astype(np.int32)
    ends = np.broadcast_to(ends, t.shape)
    return Transition(obs, obs[..., 0], np.ones(t.shape, np.float32), obs + np.int32([1, 0]), ends, ~ends & False)


def dataset():
    return ids(np.array([0, 5, 6, 7]), np.full(KEPT, -1), np.array([True, False, False, True]))


@partial(jax.jit, static_argnums=(0, 1, 2))
def collected(num_rows, capacity, longest, transitions, length, success):
    """The ring and the demonstrations after steps of which each inserts a row and then copies what succeeded."""
    num_envs = transitions.reward.shape[1]
    example = jax.tree.map(lambda x: x[0, 0], transitions)
    begun = demos.create(capacity, dataset()), ring.create(num_rows * num_envs, num_envs, example)

    def body(both, now):
        transition, length, success = now
        replay = ring.insert(both[1], transition)
        return (demos.copy(both[0], replay, length, success, longest), replay), None

    return jax.lax.scan(body, begun, (transitions, length, success))[0][0]


unpack = jax.jit(ring.unpack, static_argnums=0)


def played(num_steps, num_envs, seed):
    """Random episodes: transitions `(T, num_envs, ...)`, the length up to each, and which ends are a success."""
    rng = np.random.default_rng(seed)
    ends = rng.random((num_steps, num_envs)) < 0.3
    success = ends & (rng.random(ends.shape) < 0.7)
    length, n = np.zeros(ends.shape, np.int32), np.zeros(num_envs, np.int32)
    for t in range(num_steps):
        n += 1
        length[t], n = n, np.where(ends[t], 0, n)
    return ids(*np.mgrid[:num_steps, :num_envs], ends), length, success


def expected(num_rows, longest, length, success):
    """Ids of all transitions copied, in order: step by step, environment by environment, each episode in time order."""
    copied = []
    for t, e in zip(*np.nonzero(success), strict=True):
        n = min(length[t, e], longest, num_rows)
        copied += [[s, e] for s in range(t - n + 1, t + 1)]
    return copied


SHAPES = [
    # rows, environments, capacity, longest
    pytest.param(40, 3, 100, 40, id="room for all"),
    pytest.param(40, 3, KEPT + 31, 10, id="over the oldest copies"),
    pytest.param(6, 2, KEPT + 13, 40, id="a ring shorter than episodes"),
    pytest.param(40, 1, KEPT + 3, 3, id="the longest fills it"),
]


@pytest.mark.parametrize("num_rows, num_envs, capacity, longest", SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_successful_episodes_are_copied_whole_and_in_order_and_never_over_the_dataset(
    num_rows, num_envs, capacity, longest, seed
):
    transitions, length, success = played(40, num_envs, seed)
    ours = collected(num_rows, capacity, longest, transitions, length, success)
    copied = expected(num_rows, longest, length, success)
    assert (ours.added, ours.kept) == (len(copied), KEPT)
    assert ours.stored == min(KEPT + len(copied), capacity)
    held = jax.tree.map(np.asarray, unpack(ours.layout, ours.words))
    want, free = np.zeros((capacity, 2), int), capacity - KEPT
    want[:KEPT] = dataset().obs
    for i, (t, e) in enumerate(copied):
        want[KEPT + i % free] = t, e
    np.testing.assert_array_equal(held.obs, want)
    assert (held.terminated[:KEPT] == dataset().terminated).all()
    stored = slice(KEPT, int(ours.stored))
    at = tuple(want[stored].T)
    for field in ("action", "reward", "next_obs", "terminated", "truncated"):  # the whole record, not the ids alone
        np.testing.assert_array_equal(getattr(held, field)[stored], getattr(transitions, field)[at])


def test_two_successes_by_hand():
    # Environment 1 fails on step 1; on step 2 both succeed, after 3 and 1 steps: 0, 1, 2 and 2
    length, success = np.array([[1, 1], [2, 2], [3, 1]]), np.array([[0, 0], [0, 0], [1, 1]], bool)
    transitions = ids(*np.mgrid[:3, :2], np.array([[0, 0], [0, 1], [1, 1]], bool))
    ours = collected(5, 20, 3, transitions, length, success)
    assert ours.stored == KEPT + 4
    assert unpack(ours.layout, ours.words).obs[KEPT : KEPT + 4].tolist() == [[0, 0], [1, 0], [2, 0], [2, 1]]


@jax.jit
def draw(ours, key):
    """4,000 transitions of one step and of three."""
    return {n: demos.sample_n_step(ours, key, 4_000, n, 0.5) for n in (1, 3)}


@pytest.mark.parametrize("num_rows, num_envs, capacity, longest", SHAPES[:2])
@pytest.mark.parametrize("n", [1, 3])
def test_windows_are_uniform_and_never_leave_their_episode(num_rows, num_envs, capacity, longest, n):
    transitions, length, success = played(40, num_envs, 0)
    ours = collected(num_rows, capacity, longest, transitions, length, success)
    held = jax.tree.map(np.asarray, unpack(ours.layout, ours.words))
    batch, discount = jax.tree.map(np.asarray, draw(ours, key(1))[n])
    # All rewards are 1: 1, 3/2 and 7/4 are sums of one, two and three steps
    steps = np.select([batch.reward == 1.0, batch.reward == 1.5, batch.reward == 1.75], [1, 2, 3])
    assert (steps > 0).all() and steps.max() == n
    np.testing.assert_array_equal(batch.next_obs - batch.obs, steps[:, None] * np.array([[1, 0]]))
    assert (batch.terminated | (steps == n)).all()  # the end alone cuts a window
    # Which steps end an episode is known: none but the last of a window does
    ends = {tuple(x) for x in np.asarray(held.obs[: ours.stored])[np.asarray(held.terminated[: ours.stored])].tolist()}
    for (t, e), m, ended in zip(batch.obs.tolist(), steps, batch.terminated, strict=True):
        assert [(t + i, e) in ends for i in range(m)] == [False] * (m - 1) + [bool(ended)]
    np.testing.assert_array_equal(discount, np.where(batch.terminated, 0, 0.5**steps))
    stored, counts = np.unique(held.obs[: ours.stored], axis=0, return_counts=True)
    drawn, times = np.unique(batch.obs, axis=0, return_counts=True)
    np.testing.assert_array_equal(drawn, stored)
    assert (counts == 1).all() and chisquare(times).pvalue > 0.01  # a fixed seed


def test_where_bootstrapping_never_stops_the_factor_is_gamma_to_the_steps_taken():
    # gamma = 1/2; ends after step 1 by termination, 2 by truncation, 3 by both, and none
    ends = np.array([[[1, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0]], [[0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]], bool)
    window = ids(*np.mgrid[:4, :3])._replace(terminated=ends[0], truncated=ends[1])
    transition, factor = jax.jit(ring.n_step, static_argnums=2)(window, 0.5, True)
    assert factor.tolist() == [0.5, 0.25, 0.125, 0.125] and transition.terminated.tolist() == [True, False, True, False]
    assert jax.jit(ring.n_step)(window, 0.5)[1].tolist() == [0, 0.25, 0, 0.125]


def test_ring_and_demonstrations_pass_on_whether_to_bootstrap_always():
    ended = ids(np.zeros(4, int), np.arange(4), np.ones(4, bool))

    @jax.jit
    def drawn(key):
        replay = ring.create(8, 4, jax.tree.map(lambda x: x[0], ended))
        replay = ring.insert(ring.insert(replay, ended), ended)
        held = ((ring.sample_n_step, replay), (demos.sample_n_step, demos.create(6, ended)))
        draw = lambda sample, x, n: [sample(x, key, 3, n, 0.5, always) for always in (False, True)]
        return [draw(*each, n) for each in held for n in (1, 2)]

    for stopping, always in drawn(key(0)):
        assert stopping[1].tolist() == [0] * 3 and always[1].tolist() == [0.5] * 3
        assert stopping[0].terminated.all() and tiny.same_bits(stopping[0], always[0])


# Launches, with demonstrations from a file.

PENDULUM = "--algo cqn --env Pendulum-v1 --env-params.max-steps-in-episode 10".split()
SMALL = """--steps 40 --eval-period 20 --num-envs 2 --seeds 0 1 --eval-episodes 2 --config.hidden 16 --config.levels 2
    --config.bins 3 --config.num-atoms 5 --config.batch-size 8 --config.prefill 4 --config.capacity 400
    --config.demo-capacity 400""".split()
TINY = [*PENDULUM, *SMALL]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`tiny`'s twenty episodes of ten transitions, others of two numbers an observation, and of other rewards."""
    folder, walk = tmp_path_factory.mktemp("data"), tiny.dataset()
    datasets.save(folder / "walk.npz", walk)
    t = jax.tree.map(np.asarray, walk.transitions)
    datasets.save(folder / "other.npz", datasets.admit(t._replace(reward=t.reward + 1), walk.spec, "other"))
    spec = continuous_spec(jax.ShapeDtypeStruct((2,), "float32"), 1, 10)
    zeros = jax.tree.map(lambda s: np.zeros((4, *s.shape), s.dtype), datasets.one_of(spec))
    datasets.save(folder / "car.npz", datasets.admit(zeros._replace(truncated=np.arange(4) % 2 == 1), spec, "car"))
    return folder


BAD = {
    "unknown dataset": ("--demos walkk", ["unknown dataset 'walkk'", "closest"]),
    "no such file": ("--demos {folder}/none.npz", ["none.npz does not exist"]),
    "other shapes": ("--demos {folder}/car.npz", ["car.npz", "(2,)", "Pendulum-v1 has", "(3,)", "by --demos"]),
    "an algorithm that takes none": ("--algo iqn --demos {folder}/walk.npz", ["iqn", "--demos does not apply"]),
    "offline": ("--algo bc --demos {folder}/walk.npz", ["bc", "--demos does not apply"]),
    "what it does not take": ("--dataset {folder}/walk.npz", ["cqn", "--env; --dataset does not apply"]),
    # 200 and one episode of ten of each of two environments
    "small demo_capacity": (
        "--demos {folder}/walk.npz --config.demo-capacity 219",
        ["demo_capacity 219", "200 transitions", "20 of", "raise it to 220"],
    ),
    "values the wrong way round": ("--config.v-min 2 --config.v-max=-2", ["v_min 2.0", "v_max -2.0"]),
    "too few steps stored": ("--config.n-step 4", ["n_step 4", "not 3", "prefill 4"]),
    "discrete actions": ("--env CartPole-v1", ["cqn", "continuous", "discrete"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_before_any_compile(name, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "advance", None)
    given = BAD[name][0].format(folder=folder).split()
    base = [] if "--algo" in given else SMALL if "--env" in given else TINY
    base = ["--algo", "cqn", *base] if "--env" in given else base
    assert main(*base, "--run-dir", tmp_path / "run", *given) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for word in BAD[name][1]:
        assert word in error, error


def written(tmp_path, *flags):
    """The content of the config.json that a launch writes, and the run directory that holds it."""
    launch = cli.parse([str(word) for word in (*TINY, "--run-dir", tmp_path / "run", *flags)])
    described = train.Training(launch).described
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps(described))
    return described, tmp_path / "run"


def test_a_launch_tells_of_its_demonstrations_and_resumes_with_the_same_alone(folder, tmp_path, capsys):
    file = tmp_path / "mine.npz"
    file.write_bytes((folder / "walk.npz").read_bytes())
    described, run_dir = written(tmp_path, "--demos", file)
    assert f"demonstrations {file}: 200 transitions, 20 episodes" in capsys.readouterr().out
    assert described["demos"] == str(file) and described["demonstrations"]["statistics"]["episodes"] == 20
    assert "dataset" not in described
    resumed = train.Training(cli.parse(["--resume", str(run_dir)]))
    assert tiny.same_bits(resumed.source.dataset.transitions, datasets.load(str(file)).transitions)
    assert resumed.source.env.num_envs == 2 and resumed.eval_env.num_envs == 2
    with pytest.raises(BadInput, match=f"continues with demos {file}, not {folder}/other.npz"):
        cli.parse(["--resume", str(run_dir), "--demos", f"{folder}/other.npz"])
    file.write_bytes((folder / "other.npz").read_bytes())
    with pytest.raises(BadInput, match=f"dataset {file} is not the one that .*run was trained on"):
        train.Training(cli.parse(["--resume", str(run_dir)]))


def test_a_policy_file_acts_without_the_demonstrations(folder, tmp_path, monkeypatch):
    described, _ = written(tmp_path, "--demos", folder / "walk.npz")
    launch = cli.parse([*TINY, "--demos", f"{folder}/walk.npz"])
    source, _ = launch.kind.make(launch.options, launch.source_params)
    shapes = jax.eval_shape(lambda: cqn.init(launch.options.config, source, key(0)).params)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=(2, *x.shape)).astype(x.dtype), shapes)
    policy.save(tmp_path / "best.msgpack", params, described, {})
    monkeypatch.setattr(datasets, "load", None)
    algo, config, spec, loaded = policy.load(tmp_path / "best.msgpack", run=1)
    assert algo is cqn and config == launch.options.config and spec == source.env.spec
    assert tiny.same_bits(loaded, tiny.run_of(params, 1))


def test_without_demos_there_are_none(tmp_path, capsys):
    described, _ = written(tmp_path)
    assert described["demos"] is None and "demonstrations" not in described
    assert "demonstrations" not in capsys.readouterr().out
    launch = cli.parse(TINY)
    assert launch.kind.make(launch.options, launch.source_params)[0].dataset is None


def test_a_sweep_file_may_name_the_demonstrations(tmp_path, monkeypatch):
    (tmp_path / "sweeps" / "cqn").mkdir(parents=True)
    (tmp_path / "algos").symlink_to(settings.ROOT / "algos")
    sweep = tmp_path / "sweeps" / "cqn" / "mountaincarcontinuous.yaml"
    sweep.write_text("parameters:\n  demos: {value: a.npz}\n  config.v_min: {value: -100}\n")
    monkeypatch.setattr(settings, "ROOT", tmp_path)
    options = cli.parse(["--algo", "cqn", "--env", "MountainCarContinuous-v0"]).options
    assert options.demos == "a.npz" and options.config == dataclasses.replace(cqn.Config(), v_min=-100.0)
    assert cli.parse(["--algo", "cqn", "--env", "MountainCarContinuous-v0", "--demos", "1e3"]).options.demos == "1e3"
