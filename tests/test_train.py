"""Whole launches: what is written, that a killed run continues bit for bit, and how a launch ends."""

import json
import os
import shutil
import signal
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from launching import TINY, main, metrics, start, state_digest

from runner import checkpoint, files, policy, run, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted launch that the others are compared with."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert main(*TINY, "--run-dir", run_dir) == 0
    return run_dir


def same(run_dir, whole):
    assert metrics(run_dir) == metrics(whole)
    assert state_digest(run_dir) == state_digest(whole)
    for name in ("last", "best"):
        assert params(run_dir, name) == params(whole, name)


def params(run_dir, name):
    tree = policy.serialization.msgpack_restore((run_dir / "policy" / f"{name}.msgpack").read_bytes())
    return [x.tobytes() for x in jax.tree.leaves(tree["params"])]


def test_a_launch_writes_one_line_per_run_per_chunk(whole):
    lines = metrics(whole)
    assert [(x["chunk"], x["run"], x["seed"], x["env_steps"]) for x in lines] == [
        (c, r, r, 1000 * c) for c in (1, 2, 3) for r in (0, 1)
    ]
    # 400 of the first 1000 env steps are prefill; afterwards every 4 env steps make one gradient step.
    assert [x["gradient_steps"] for x in lines[::2]] == [150, 400, 650]
    assert all(np.isfinite(x["loss"]) and 1 <= x["eval_return"] <= 500 for x in lines)
    assert (whole / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_config_json_records_what_decides_the_numbers(whole):
    written = json.loads((whole / "config.json").read_text())
    assert written["config"]["n_step"] == 2 and written["config"]["hidden"] == [16]
    assert written["seeds"] == [0, 1] and written["num_envs"] == 4
    assert written["versions"]["jax"] == jax.__version__


def test_a_policy_file_acts_as_the_run_did(whole):
    algo, config, spec, parameters = policy.load(whole / "policy" / "last.msgpack", run=1)
    carry, _ = restored(whole)
    expected = jax.tree.map(lambda x: x[1], carry.states.params)
    obs = jax.random.normal(jax.random.key(0), (5, *spec.obs.shape))
    key = jax.random.key(1)
    np.testing.assert_array_equal(
        algo.act(config, spec, parameters, obs, key), algo.act(config, spec, expected, obs, key)
    )


def restored(run_dir):
    """The carry of a run's checkpoint, as `--resume` reads it."""
    from runner import cli

    launch = cli.parse(["--resume", str(run_dir)])
    training = train.Training(launch)
    return training.carry, training


def test_the_best_policy_is_each_runs_own_best(whole):
    lines = metrics(whole)
    header = json.loads(
        policy.serialization.msgpack_restore((whole / "policy" / "best.msgpack").read_bytes())["header"]
    )
    assert header["best"] == [max(x["eval_return"] for x in lines if x["run"] == r) for r in (0, 1)]


def test_a_run_killed_in_the_middle_of_a_checkpoint_continues_bit_for_bit(whole, tmp_path):
    folder = tmp_path / "run" / "checkpoint"
    process = start(*TINY, "--run-dir", tmp_path / "run", "--checkpoint-period", 1000)
    # The moment to kill: the first checkpoint is whole and the second one's temporary folder has appeared.
    while process.poll() is None and not ((folder / "1000").exists() and any(folder.glob("*tmp*"))):
        time.sleep(1e-4)
    process.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, output
    left = sorted(p.name for p in folder.iterdir())
    assert left[0] == "1000" and len(left) == 2, left  # a whole one, and the one cut short
    assert len(metrics(tmp_path / "run")) == 4  # two chunks were written, the second is past the checkpoint
    assert main("--resume", tmp_path / "run") == 0
    same(tmp_path / "run", whole)


def test_ctrl_c_stops_within_a_chunk_and_resume_continues_bit_for_bit(whole, tmp_path):
    # Slices of a thousandth of a second, each followed by a pause, so that the signal falls inside a chunk.
    code = """
import time
from runner import run, train
train.SLICE_SECONDS = 1e-3
advance = run.advance
run.advance = lambda *arguments: (time.sleep(0.05), advance(*arguments))[1]
"""
    code = f"import sys; sys.path.insert(0, {str(script_root())!r})" + code
    process = start(*TINY, "--run-dir", tmp_path / "run", code=code)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("compiled"):
            threading.Timer(0.5, lambda: process.send_signal(signal.SIGINT)).start()
    process.wait(timeout=60)
    output = "".join(lines)
    assert process.returncode == 0, output
    assert "stopped (SIGINT)" in output and f"--resume {tmp_path / 'run'}" in output
    carry, training = restored(tmp_path / "run")
    assert 0 < int(carry.done[0]) < 250, "the stop was to fall inside a chunk"
    assert main("--resume", tmp_path / "run") == 0
    same(tmp_path / "run", whole)


def script_root():
    from launching import ROOT

    return ROOT


def test_a_time_limit_writes_a_checkpoint_and_more_steps_prolong_a_run(whole, tmp_path):
    short = [*TINY]
    short[short.index("--steps") + 1] = "2000"
    assert main(*short, "--run-dir", tmp_path / "run", "--time-limit", 1e-3) == 0
    assert metrics(tmp_path / "run") == []
    assert main("--resume", tmp_path / "run") == 0
    assert len(metrics(tmp_path / "run")) == 4
    assert main("--resume", tmp_path / "run", "--steps", 3000) == 0
    same(tmp_path / "run", whole)


def test_how_often_one_evaluates_cannot_change_training(whole, tmp_path):
    often = [*TINY]
    often[often.index("--eval-period") + 1] = "500"
    assert main(*often, "--run-dir", tmp_path / "run") == 0
    ours, other = restored(whole)[0].states, restored(tmp_path / "run")[0].states
    assert checkpoint.digest(ours) == checkpoint.digest(other)


def test_one_diverged_run_of_two_is_a_warning_and_all_are_an_error(tmp_path, monkeypatch, capsys):
    broadcast = run.broadcast

    def sabotage(config, num_runs):
        configs = broadcast(config, num_runs)
        rates = configs.learning_rate.at[1:].set(1e30)
        return train.dataclasses.replace(configs, learning_rate=rates)

    monkeypatch.setattr(run, "broadcast", sabotage)
    assert main(*TINY, "--run-dir", tmp_path / "one") == 0
    output = capsys.readouterr().out
    assert "warning: seed 1 diverged in chunk 1" in output and "seed 0 diverged" not in output
    assert [x["loss"] is None for x in metrics(tmp_path / "one")] == [False, True] * 3
    monkeypatch.undo()
    code = main(*TINY, "--run-dir", tmp_path / "all", "--config.learning-rate", 1e30)
    assert code == train.EXIT_DIVERGED != 0
    assert "every run diverged" in capsys.readouterr().out
    assert len(metrics(tmp_path / "all")) == 2  # it ended after the first chunk


def test_divergence_is_laid_to_a_reward_that_was_not_finite():
    states = types.SimpleNamespace(nonfinite_reward=np.array([-1, 12]))
    assert train.cause_of_divergence(states, 0) == "its loss is not finite"
    assert train.cause_of_divergence(states, 1) == "the environment's reward at env step 12 was not a finite number"
    assert train.cause_of_divergence(types.SimpleNamespace(), 0) == "its loss is not finite"  # keeps no such record


def test_wandb_offline_receives_the_config_and_the_chunks(tmp_path, monkeypatch):
    import wandb

    logged, configs = [], []
    real_init = wandb.init

    def init(**arguments):
        started = real_init(**arguments)
        configs.append(arguments["config"])
        real_log = started.log
        started.log = lambda row: (logged.append(row), real_log(row))[1]
        return started

    monkeypatch.setattr(wandb, "init", init)
    assert main(*TINY, "--run-dir", tmp_path / "run", "--wandb", "offline") == 0
    assert configs[0]["config.n_step"] == 2 and configs[0]["algo"] == "iqn"
    assert [row["env_steps"] for row in logged] == [1000, 2000, 3000]
    first = [x["eval_return"] for x in metrics(tmp_path / "run")[:2]]
    assert logged[0]["eval_return"] == pytest.approx(sum(first) / 2)
    assert logged[0]["seed_1/eval_return"] == first[1]
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("damage", ["config", "checkpoint", "metrics", "policy"])
def test_resuming_a_damaged_run_names_the_file_and_changes_nothing(whole, tmp_path, damage, capsys):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    victim = {
        "config": run_dir / "config.json",
        "checkpoint": max((run_dir / "checkpoint").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0),
        "metrics": run_dir / "metrics.jsonl",
        "policy": run_dir / "policy" / "best.msgpack",
    }[damage]
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    before = snapshot(run_dir)
    assert main("--resume", run_dir, "--steps", 4000) == 2
    error = capsys.readouterr().err
    named = run_dir / "checkpoint" if damage == "checkpoint" else victim
    assert error.count("\n") == 1 and str(named) in error
    assert snapshot(run_dir) == before


def test_a_checkpoint_keeps_leaves_that_hold_no_numbers(tmp_path):
    carry = dict(key=jax.random.key(3), empty=jnp.zeros((2, 0)), x=jnp.arange(3))
    checkpoint.save(tmp_path, 7, carry, {})
    restored, _ = checkpoint.restore(tmp_path / "7", jax.eval_shape(lambda: carry))
    assert tiny.same_bits(restored, carry) and restored["empty"].shape == (2, 0)


def test_resuming_a_finished_run_leaves_its_checkpoint_alone(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / ".DS_Store").touch()  # a stray file is nobody's checkpoint
    before = snapshot(tmp_path / "run" / "checkpoint")
    folder = (tmp_path / "run" / "checkpoint" / "3000").stat().st_ino
    assert main("--resume", tmp_path / "run") == 0
    assert snapshot(tmp_path / "run" / "checkpoint") == before
    assert (tmp_path / "run" / "checkpoint" / "3000").stat().st_ino == folder
    assert main("--resume", tmp_path / "run", "--steps", 4000) == 0
    assert (tmp_path / "run" / "checkpoint" / "4000").exists()


def test_results_without_a_checkpoint_are_not_overwritten(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    before = snapshot(tmp_path / "run")
    assert main("--resume", tmp_path / "run") == 2
    assert "holds no whole checkpoint" in capsys.readouterr().err
    assert snapshot(tmp_path / "run") == before


def test_a_run_directory_belongs_to_one_launch_at_a_time(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    before = snapshot(tmp_path / "run")
    descriptor = files.lock(tmp_path / "run")
    assert main("--resume", tmp_path / "run", "--steps", 4000) == 2
    assert "another launch" in capsys.readouterr().err
    assert snapshot(tmp_path / "run") == before
    os.close(descriptor)


@pytest.mark.parametrize(
    "flags", [["--config.gamma", 0.5], ["--run-dir", "x"], ["--preset", "published"], ["--seeds", 5], ["--steps", 2000]]
)
def test_resume_refuses_what_would_change_the_run(whole, flags, capsys):
    assert main("--resume", whole, *flags) == 2
    assert flags[0].strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")


def test_other_versions_are_noted_beside_the_first(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    written["versions"]["jax"] = "0.0.1"
    (tmp_path / "run" / "config.json").write_text(json.dumps(written))
    assert main("--resume", tmp_path / "run") == 0
    assert "not bit-exact" in capsys.readouterr().out
    after = json.loads((tmp_path / "run" / "config.json").read_text())
    assert after["versions"]["jax"] == "0.0.1" and after["resumed_with"][0]["versions"]["jax"] == jax.__version__


def test_a_flipped_bit_in_the_replay_is_found(whole, tmp_path):
    carry, training = restored(whole)
    words = np.array(carry.states.replay.words)
    words.reshape(-1)[7] ^= 1
    flipped = carry._replace(
        states=carry.states._replace(replay=train.dataclasses.replace(carry.states.replay, words=words))
    )
    assert checkpoint.digest(flipped) != checkpoint.digest(carry)


def snapshot(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_checkpoints_wait_for_a_minute_or_twenty_times_their_cost():
    class Options:
        checkpoint_period = None

    training = object.__new__(train.Training)
    training.options = Options()
    now = time.monotonic()
    training.saved_at = None
    assert training.checkpoint_due()  # the first results are saved at once
    training.saved_at = 1000
    for since, cost, due in ((59, 0.1, False), (61, 0.1, True), (61, 4.0, False), (81, 4.0, True)):
        training.saved_time, training.save_seconds = now - since, cost
        assert training.checkpoint_due() is due
