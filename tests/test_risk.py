"""What scripts/evaluate.py says of a policy: tails, quantiles, whole episodes, and errors of one line."""

import importlib.util
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from launching import main

from envs.types import Mean, Transition, continuous_spec, pytree
from runner import risk
from runner.evaluate import episodes, evaluate

found = importlib.util.spec_from_file_location("evaluate", Path(__file__).parents[1] / "scripts" / "evaluate.py")
script = importlib.util.module_from_spec(found)
found.loader.exec_module(script)


def test_a_cvar_takes_of_the_episode_on_its_boundary_the_part_within():
    # Returns 4, 1, 3, 2, 10. tau = 0.3 of five is 1.5 episodes: (1 + 2 / 2) / 1.5 = 4/3, and (10 + 4 / 2) / 1.5 = 8.
    found = risk.statistics(np.array([4.0, 1, 3, 2, 10]), (0.3, 1.0))
    np.testing.assert_allclose([found["cvar"]["0.3"], found["upper_cvar"]["0.3"]], [4 / 3, 8], rtol=1e-12)
    np.testing.assert_allclose([found["cvar"]["1"], found["mean"]], [4, 4], rtol=1e-12)
    assert found["quantiles"]["0.5"] == 3 and found["quantiles"]["0.01"] == 1 and found["quantiles"]["0.99"] == 10


class Counter(NamedTuple):
    obs: jax.Array  # (num_envs, 1), the length of this episode
    time: jax.Array  # (num_envs,)


@pytree
class Lengths:
    """Environment i pays the action on each step of an episode of i + 1 steps, and then begins another."""

    num_envs = 3
    spec = continuous_spec(jax.ShapeDtypeStruct((1,), "float32"), 1, 3)

    def reset(self, key):
        return Counter(jnp.arange(1.0, 4)[:, None], jnp.zeros(3))

    def step(self, key, state, action):
        time = state.time + 1
        done = time >= state.obs[:, 0]
        reward = action[:, 0]
        transition = Transition(state.obs, action, reward, state.obs, done, done & False)
        finished = dict(episode_return=Mean(reward * time * done, done))
        return Counter(state.obs, time * ~done), transition, finished


class Constant:
    @staticmethod
    def act(config, spec, params, obs, key):
        return jnp.full((len(obs), 1), params)

    @staticmethod
    def measure(config, episodes):
        return dict(worst=episodes["episode_return"].min() + config)


def test_episodes_are_the_first_of_every_environment_and_measures_are_of_each_run():
    # Run 0 pays 1 a step, run 1 pays 2: returns 1, 2, 3 and 2, 4, 6; means 2 and 4; the worst plus 10 and 20.
    keys = jax.random.split(jax.random.key(0), 2)
    args = (Constant, jnp.array([10.0, 20.0]), Lengths(), jnp.array([1.0, 2.0]), keys)
    assert np.asarray(episodes(*args)["episode_return"]).tolist() == [[1, 2, 3], [2, 4, 6]]
    found = evaluate(*args)
    assert {k: np.asarray(v).tolist() for k, v in found.items()} == dict(eval_return=[2, 4], eval_worst=[11, 22])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("risk") / "run"
    line = "--algo iqn --steps 240 --eval-period 240 --num-envs 4 --seeds 5 3 --eval-episodes 2 --run-dir"
    tiny = "--config.hidden 8 --config.capacity 400 --config.prefill 80 --config.num-iterates 1 --config.train-period 4"
    assert main(*line.split(), folder, *tiny.split()) == 0
    return folder


def run_script(capsys, *words):
    code = script.main(list(map(str, words)))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_script_reports_every_seed_and_ends_in_the_middle_of_a_batch(trained, capsys):
    code, out, err = run_script(capsys, trained, "--episodes", 7, "--num-envs", 4, "--risk", 0.5)
    assert (code, err) == (0, "")
    report = json.loads((trained / "evaluation" / "risk.json").read_text())
    assert list(report) == ["5", "3"] and all(x["episodes"] == 7 for x in report.values())
    assert all(x["means"]["episode_length"] == x["mean"] for x in report.values())  # CartPole pays 1 a step
    assert all(x["cvar"]["0.5"] <= x["mean"] <= x["upper_cvar"]["0.5"] for x in report.values())
    assert (trained / "evaluation" / "risk.png").read_bytes()[:4] == b"\x89PNG"
    assert out.splitlines()[0].split() == ["seed", "mean", "std", "worst", "0.5", "best", "0.5"]
    one = run_script(capsys, trained, "--episodes", 7, "--num-envs", 4, "--runs", 1, "--out", trained / "b")
    assert one[0] == 0
    again = json.loads((trained / "b" / "risk.json").read_text())
    assert list(again) == ["3"] and again["3"]["mean"] == report["3"]["mean"]


WRONG = [
    (["--risk", "0"], "--risk 0 must be more than 0"),
    (["--episodes", "0"], "--episodes is 0"),
    (["--runs", "2"], "has runs 0 to 1, not 2"),
    (
        ["--env", "Acrobot-v1"],
        "is for observations (4,) float32 and 2 discrete actions; Acrobot-v1 has observations (6,)",
    ),
    (["--env", "CartPol-v1"], "closest: CartPole-v1"),
    (["--env-params.lenght", "1"], "did you mean 'length'"),
]


@pytest.mark.parametrize("words, says", WRONG, ids=[" ".join(w) for w, _ in WRONG])
def test_bad_input_is_one_line(trained, capsys, words, says):
    code, out, err = run_script(capsys, trained, *words)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1


def test_a_folder_without_a_policy_is_named(tmp_path, capsys):
    code, _, err = run_script(capsys, tmp_path)
    assert code == 2 and f"{tmp_path} is no policy file and no run directory" in err


def test_a_file_outside_a_run_directory_is_reported_beside_itself(trained, tmp_path, capsys):
    copy = tmp_path / "mine.msgpack"
    copy.write_bytes((trained / "policy" / "last.msgpack").read_bytes())
    assert run_script(capsys, copy, "--episodes", 2, "--num-envs", 2)[0] == 0
    assert (tmp_path / "evaluation" / "risk.json").exists()


def test_dynamic_programming_is_played_with_its_own_horizon_alone(tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert main("--algo", "distributional_dp", "--steps", 2, "--eval-period", 1, "--run-dir", run_dir) == 0
    capsys.readouterr()
    code, out, err = run_script(capsys, run_dir, "--episodes", 4, "--env-params.horizon", 24)
    assert (code, out) == (2, "") and "was solved for a horizon of 12; mdp/slippery has 24" in err
    assert run_script(capsys, run_dir, "--episodes", 4)[0] == 0
