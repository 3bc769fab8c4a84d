"""IQL from offline to online: the replay, rewards and bootstrap by hand, both ways to begin, whole launches."""

import dataclasses
import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from launching import main, metrics, state_digest
from probes import table

import envs
from algos import iql, iql_finetune
from envs.types import EnvAndData, Transition, continuous_spec
from replay import datasets, ring
from runner import cli, policy, run, train

SPEC = continuous_spec(jax.ShapeDtypeStruct((1,), "float32"), 1, 10)
OFFLINE = iql.State._fields[:-1]  # what both phases have, but the key


def data(reward, ends) -> datasets.Dataset:
    """Transitions of these rewards, observations 0, 1, ..., whose episodes end where `ends` says."""
    n = len(reward)
    obs, action = np.arange(n, dtype=np.float32)[:, None], np.linspace(-1, 1, n, dtype=np.float32)[:, None]
    ends = np.array(ends, bool)
    return datasets.admit(
        Transition(obs, action, np.array(reward, np.float32), obs + 1, np.zeros(n, bool), ends), SPEC, "by hand"
    )


def threes(num_envs=2, terminated=0) -> EnvAndData:
    """One state, observed as 9, of reward 3; every step ends an episode, by truncation where not `terminated`.

    Its data are two episodes of returns 200 + 300 and 0, so `return_range` is 1000 / 500 = 2.
    """
    env = table(
        [[9]], [1], 0, reward=3, terminated=terminated, truncated=1 - terminated, continuous=True, num_envs=num_envs
    )
    return EnvAndData(env, data([200, 300, 0, 0], [0, 1, 0, 1]))


# One program for all tests by hand: two steps of two environments, then one update.
CONFIG = iql_finetune.Config(
    learning_rate=1e-3,
    gamma=0.5,
    hidden=(4,),
    batch_size=8,
    rewards="return_range",
    offline_steps=0,
    capacity=10,
    train_period=4,
)
step = jax.jit(iql_finetune.step)


@pytest.fixture(scope="module")
def first() -> iql_finetune.State:
    return jax.jit(iql_finetune.init)(CONFIG, threes(), jax.random.key(0))


def step_by_hand(state, v=0.0, terminated=0, empty=True):
    """A step that can draw only what it did itself, with networks that answer 0, but V the number `v`."""
    zeros = state.params._replace(**{k: jax.tree.map(jnp.zeros_like, getattr(state.params, k)) for k in "vq"})
    zeros.v["params"]["Dense_1"]["bias"] += v
    stored = jnp.int32(0) if empty else state.replay.inserted
    replay = ring.Replay(state.replay.words, stored, state.replay.layout)
    state = state._replace(params=zeros, target_q=jax.tree.map(jnp.zeros_like, state.target_q), replay=replay)
    # A learning rate that moves nothing by a bit of float32, V's own update before the critics' target included
    return step(dataclasses.replace(CONFIG, learning_rate=1e-12), threes(terminated=terminated), state)


def test_the_replay_starts_with_the_dataset_and_what_happens_is_appended(first):
    after, _ = step(CONFIG, threes(), first)
    rows = lambda state, a, b: jax.tree.map(lambda x: x[a:b], state.replay.data)
    # of 4 transitions the first two are environment 0's
    old = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(2, 2, *x.shape[1:]), 0, 1), threes().dataset.transitions)
    for state in (first, after):
        assert tiny.same_bits(rows(state, 0, 2), old)
    # train_period 4 with 2 environments: two rows more, env steps 4, one update
    new = rows(after, 2, 4)
    assert (first.replay.inserted, after.replay.inserted, after.env_steps, after.gradient_steps) == (2, 4, 4, 1)
    assert (new.obs == 9).all() and (new.next_obs == 9).all() and (new.reward == 3).all()
    assert new.truncated.all() and not new.terminated.any()
    assert np.unique(new.action).size == 4 and (jnp.abs(new.action) <= 1).all()  # drawn, not the mean of the one state
    assert not rows(after, 4, 5).reward.any()


def test_batches_are_drawn_from_old_and_new_alike(first):
    # 8 draws of 8 stored: q_loss = 2/8 sum (2 r)^2, where r = 200 adds 160,000, 300 adds 360,000 and a new 3 adds 36
    new = 0
    for seed in range(8):
        _, measured = step_by_hand(first._replace(key=jax.random.key(seed)), empty=False)
        new += round(float(measured["q_loss"][0]) * 4 % 40_000 / 36)
    assert 16 < new < 48  # of 64, half; four standard deviations


@pytest.mark.parametrize("transform, loss", [((2, 0), 72), ((1, -1), 8), ((1, 0), 18)])
def test_new_rewards_are_transformed_as_the_old_ones_were(first, transform, loss):
    assert (first.reward_scale, first.reward_shift) == (2, 0)
    scale, shift = map(jnp.float32, transform)
    after, measured = step_by_hand(first._replace(reward_scale=scale, reward_shift=shift))
    # Two critics that answer 0 to a target of 2 * 3 = 6: 2 * 36; of 3 - 1: 2 * 4; of 3: 2 * 9
    np.testing.assert_allclose(measured["q_loss"], [loss], rtol=1e-6)  # float32
    assert (after.reward_scale, after.reward_shift) == transform
    assert (after.replay.data.reward[:2] == 3).all()  # stored as they came


@pytest.mark.parametrize("terminated, loss", [(0, 242), (1, 72)])
def test_truncation_still_bootstraps(first, terminated, loss):
    # V = 10: a target of 6 + 0.5 * 10 = 11 after a truncation, 2 * 121; of 6 where the MDP ended, 2 * 36
    _, measured = step_by_hand(first, v=10.0, terminated=terminated)
    np.testing.assert_allclose(measured["q_loss"], [loss], rtol=1e-6)  # float32


def test_the_policys_rate_does_not_fall(first):
    assert iql_finetune.Config().anneal_steps == iql_finetune.EXAMPLE.config.anneal_steps == 0
    counts = (jnp.int32(0), jnp.int32(10**7))
    early, late = (step(CONFIG, threes(), first._replace(gradient_steps=n))[0].params for n in counts)
    assert tiny.same_bits(early, late) and not tiny.same_bits(early.policy, first.params.policy)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(train_period=3), "train_period 3 and num_envs 4: one must be a multiple of the other"),
        (dict(capacity=6), "capacity 6 must be a multiple of num_envs 4; 4 is"),
        (dict(capacity=196), "dataset's 200 transitions must fill a row of num_envs 4 and fit into capacity 196"),
        (dict(rewards="scaled"), "rewards 'scaled' must be one of raw, return_range, minus_one"),
    ],
)
def test_bad_settings_are_named(changes, message):
    source = tiny.source(iql_finetune)
    iql_finetune.check(tiny.config(iql_finetune, capacity=200, train_period=8), source)
    with pytest.raises(ValueError, match=message):
        iql_finetune.check(tiny.config(iql_finetune, **(dict(train_period=4) | changes)), source)


def test_a_dataset_smaller_than_a_row_is_named():
    with pytest.raises(ValueError, match="dataset's 4 transitions must fill a row of num_envs 8 and fit into capacity"):
        iql_finetune.check(tiny.config(iql_finetune, train_period=8), threes(8))


# Launches, from a file.


SHARED = "--seeds 0 1 --eval-episodes 2 --config.hidden 16 --config.batch-size 16 --config.rewards return_range".split()
BEFORE = ["--algo", "iql", "--steps", 20, "--eval-period", 20, "--config.anneal-steps", 30, *SHARED]
TINY = ["--algo", "iql_finetune", *"--steps 40 --eval-period 20 --num-envs 2 --config.capacity 400".split(), *SHARED]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """`tiny`'s twenty episodes, said to be of Pendulum-v1; beside them others of two numbers an observation."""
    folder, params = tmp_path_factory.mktemp("data"), dict(max_steps_in_episode=10)
    dataset = dataclasses.replace(tiny.dataset(), env="Pendulum-v1", env_params=tuple(params.items()))
    datasets.save(folder / "walk.npz", dataset)
    spec = continuous_spec(jax.ShapeDtypeStruct((2,), "float32"), 1, 10)
    zeros = jax.tree.map(lambda s: np.zeros((4, *s.shape), s.dtype), datasets.one_of(spec))
    other = zeros._replace(reward=np.arange(4, dtype=np.float32), truncated=np.arange(4) % 2 == 1)
    datasets.save(folder / "car.npz", datasets.admit(other, spec, "car", "MountainCarContinuous-v0", {}))
    return folder / "walk.npz"


@pytest.fixture(scope="module")
def before(file, tmp_path_factory):
    """The run of `iql` that the others start from; beside it what none can start from."""
    run_dir = tmp_path_factory.mktemp("before") / "run"
    assert main(*BEFORE, "--dataset", file, "--run-dir", run_dir) == 0
    written = (run_dir / "config.json").read_text()
    for name, content in (("bc", written.replace('"algo": "iql"', '"algo": "bc"')), ("unsaved", written)):
        (run_dir.parent / name).mkdir()
        (run_dir.parent / name / "config.json").write_text(content)
    for name in ("diverged", "torn"):
        shutil.copytree(run_dir, run_dir.parent / name)
    meta = run_dir.parent / "diverged" / "checkpoint" / "20" / "meta" / "metadata"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | dict(diverged={"1": 1})))
    (run_dir.parent / "torn" / "config.json").write_text(json.dumps(json.loads(written) | dict(dataset={"spec": {}})))
    return run_dir


@pytest.fixture(scope="module")
def whole(file, before, tmp_path_factory):
    """The uninterrupted launch that starts from it."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert main(*TINY, "--dataset", file, "--init-from", before, "--run-dir", run_dir) == 0
    return run_dir


@pytest.fixture(scope="module")
def begun(file, before, tmp_path_factory):
    """The same, stopped before its first step."""
    run_dir = tmp_path_factory.mktemp("begun") / "run"
    assert main(*TINY, "--dataset", file, "--init-from", before, "--run-dir", run_dir, "--time-limit", 1e-3) == 0
    return run_dir


def states(run_dir):
    """What a run's checkpoint holds."""
    return train.Training(cli.parse(["--resume", str(run_dir)])).carry.states


def test_a_launch_goes_on_from_the_other_runs_last_update(whole, before):
    assert metrics(before)[-1]["gradient_steps"] == 20
    lines = metrics(whole)
    # One update per env step after the 20 offline ones; every 20 env steps an evaluation
    assert [(x["chunk"], x["run"], x["env_steps"], x["gradient_steps"]) for x in lines] == [
        (c, r, 20 * c, 20 + 20 * c) for c in (1, 2) for r in (0, 1)
    ]
    assert all(np.isfinite(x["loss"]) and x["eval_length"] == 10 and x["episode_length"] == 10 for x in lines)
    written = json.loads((whole / "config.json").read_text())
    assert (written["config"]["offline_steps"], written["config"]["anneal_steps"]) == (0, 0)
    assert written["init_from"] == str(before)


def test_the_offline_phase_is_a_run_of_iql(before):
    launch = cli.parse(["--resume", str(before)])  # the program of its launch is compiled
    source = EnvAndData(envs.make("Pendulum-v1", 2, max_steps_in_episode=10), train.Training(launch).source)
    theirs = dataclasses.replace(launch.options.config, anneal_steps=0.0)
    ours = iql_finetune.Config(**vars(theirs), offline_steps=5, capacity=400)
    ours, theirs = (run.broadcast(config, 2) for config in (ours, theirs))
    keys = jax.random.split(jax.random.key(3), 2)
    both = run.init(iql_finetune, ours, source, keys).states
    learner_keys = jax.vmap(lambda key: jax.random.split(key, 3)[1])(keys)
    alone = run.init(iql, theirs, source.dataset, learner_keys)
    alone = run.advance(iql, theirs, source.dataset, alone, 5).states
    # Another program may sum in another order: a few bits of float32 after five steps of Adam
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    for name in OFFLINE:
        jax.tree.map(close, getattr(both, name), getattr(alone, name))
    assert (both.gradient_steps == 5).all() and (both.env_steps == 0).all()


def test_what_the_other_run_learned_is_there_bit_for_bit_before_the_first_step(begun, before, file):
    assert metrics(begun) == []
    ours, theirs = states(begun), states(before)
    for name in OFFLINE:
        assert tiny.same_bits(getattr(ours, name), getattr(theirs, name)), name
    # return_range: 1000 / (highest - lowest return) of the file's episodes of ten
    returns = datasets.load(str(file)).transitions.reward.reshape(20, 10).sum(1)
    np.testing.assert_allclose(ours.reward_scale, [1000 / (returns.max() - returns.min())] * 2, rtol=1e-5)
    assert (ours.env_steps == 0).all() and (ours.replay.inserted == 100).all()  # 200 transitions in rows of 2


def test_a_resumed_launch_continues_bit_for_bit(file, before, whole, tmp_path):
    paths = ["--dataset", file, "--init-from", before, "--run-dir", tmp_path / "run"]
    assert main(*TINY, *paths, "--steps", 20) == 0
    assert main("--resume", tmp_path / "run", "--steps", 40) == 0
    assert metrics(tmp_path / "run") == metrics(whole) and state_digest(tmp_path / "run") == state_digest(whole)


def test_a_launch_killed_before_its_first_checkpoint_starts_from_the_other_run_again(begun, whole, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(begun / "config.json", tmp_path / "run")
    assert main("--resume", tmp_path / "run") == 0
    assert state_digest(tmp_path / "run") == state_digest(whole)


def test_a_policy_file_acts_without_the_dataset(whole, monkeypatch):
    monkeypatch.setattr(datasets, "load", None)
    algo, config, spec, params = policy.load(whole / "policy" / "last.msgpack", run=1)
    assert algo is iql_finetune and spec == envs.make("Pendulum-v1", max_steps_in_episode=10).spec
    assert algo.act(config, spec, params, jnp.zeros((5, 3)), jax.random.key(0)).shape == (5, 1)


BAD = {
    "another algorithm's run": ("--init-from {runs}/bc", ["is a run of bc", "iql_finetune starts from one of iql"]),
    "other seeds": ("--seeds 0 2", ["--seeds [0, 2]", "[0, 1]"]),
    "another network": ("--config.hidden 16 16", ["--config.hidden (16, 16)", "(16,)"]),
    "other rewards": ("--config.rewards raw", ["--config.rewards raw", "return_range"]),
    "another normaliser": ("--config.normalize-obs True", ["--config.normalize-obs True", "False"]),
    "other observations": ("--dataset {data}/car.npz", ["car.npz", "(2,)", "learned from", "(3,)"]),
    "no checkpoint": ("--init-from {runs}/unsaved", ["unsaved", "holds no whole checkpoint"]),
    "a diverged run": ("--init-from {runs}/diverged", ["diverged", "of its seeds 1 diverged"]),
    "a run without its data's shapes": ("--init-from {runs}/torn", ["torn/config.json", "what data it learned from"]),
    "a length of the phase it replaces": ("--config.offline-steps 5", ["--init-from", "leave --config.offline-steps"]),
    "no name": ("--init-from=", ["is not a run directory"]),
    "a file": ("--init-from {runs}/run/config.json", ["config.json", "is not a run directory"]),
    "an environment of the host": ("--eval-env gym/Pendulum-v1", ["gym/Pendulum-v1", "cannot be trained in"]),
    "no such folder": ("--init-from nowhere", ["nowhere", "is not a run directory"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_run_that_cannot_be_started_from_is_one_line_before_any_compile(
    name, file, before, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(run, "advance", None)
    given = BAD[name][0].format(runs=before.parent, data=file.parent).split()
    paths = ["--dataset", file, "--init-from", before, "--run-dir", tmp_path / "run"]
    assert main(*TINY, *paths, *given) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for word in BAD[name][1]:
        assert word in error, error


def test_only_what_goes_online_starts_from_another_run(before, file, capsys):
    assert main(*BEFORE, "--dataset", file, "--init-from", before) == 2
    assert "--init-from does not apply" in capsys.readouterr().err
