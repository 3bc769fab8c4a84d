"""Behaviour cloning: its losses by hand, what minimises them, and launches that learn from a dataset."""

import dataclasses
import json
import math
import shutil
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from launching import main, metrics, state_digest
from test_datasets import collect

import envs
from algos import bc
from networks.policies import POLICIES
from replay import builtin, datasets
from runner import policy, run, settings, train

close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # float32
CONTINUOUS = ("gaussian", "bernoulli", "bang_off_bang")


def test_bernoulli_loss_by_hand():
    # Labels (1 + [1, 0, -0.5]) / 2 = [1, 0.5, 0.25]; p = [3/4, 1/2, 1/5] are logits ln 3, 0, -ln 4.
    action = jnp.array([[1.0, 0.0, -0.5]])
    z = jnp.log(jnp.array([[3.0, 1.0, 0.25]]))
    label = bc.bernoulli_label(action, "soft")
    assert label.tolist() == [[1, 0.5, 0.25]]
    # -ln(3/4) - (1/2 ln 1/2 + 1/2 ln 1/2) - (1/4 ln 1/5 + 3/4 ln 4/5)
    expected = -math.log(3 / 4) - math.log(1 / 2) - (math.log(1 / 5) + 3 * math.log(4 / 5)) / 4
    close(bc.bernoulli_loss(z, label), [expected])
    # d/dz = p - y
    close(jax.grad(lambda z: bc.bernoulli_loss(z, label)[0])(z), [[-0.25, 0, -0.05]])
    assert bc.bernoulli_label(action, "sign").tolist() == [[1, 1, 0]]


def test_bang_off_bang_loss_by_hand():
    action = jnp.array([[0.25, -1.0, -0.75]])
    label = bc.bang_off_bang_label(action, "soft")
    assert label.tolist() == [[[0, 0.75, 0.25], [1, 0, 0], [0.75, 0.25, 0]]]
    # p = [1/2, 1/4, 1/4] in each dimension, -ln p is [1, 2, 2] ln 2: (0.75 * 2 + 0.25 * 2) + 1 + (0.75 + 0.5) = 4.25
    outputs = jnp.log(jnp.tile(jnp.array([[0.5, 0.25, 0.25]]), 3))
    close(bc.bang_off_bang_loss(outputs, label), [4.25 * math.log(2)])
    assert bc.bang_off_bang_label(action, "sign").tolist() == [[[0, 1, 0], [1, 0, 0], [1, 0, 0]]]


def test_gaussian_loss_is_the_policys_own_likelihood():
    rng = np.random.default_rng(0)
    outputs, draw = jnp.float32(rng.normal(size=(5, 4))), jnp.float32(rng.normal(size=(5, 2)))
    gaussian = POLICIES["gaussian"]
    # The inverse of tanh loses a few bits of float32 where |a| is near 1.
    close(bc.gaussian_loss(outputs, jnp.tanh(draw)), -gaussian.log_prob(outputs, draw), rtol=1e-4)
    # Mean 0, std 1, a = 1 taken as 0.999: u = 1/2 ln(1.999 / 0.001) = 3.80020, 1 - tanh(u)^2 = 0.001999
    expected = 3.800201**2 / 2 + 0.9189385 + math.log(0.001999)
    close(bc.gaussian_loss(jnp.zeros((1, 2)), jnp.array([[1.0]])), [expected], rtol=1e-4)
    assert np.isfinite(jax.grad(lambda z: bc.gaussian_loss(z, jnp.array([[-1.0]]))[0])(jnp.zeros((1, 2)))).all()


@pytest.mark.parametrize("name", ["bernoulli", "bang_off_bang"])
def test_soft_labels_are_minimised_by_the_datas_mean_action(name):
    action = jnp.array([[-1.0], [0.5], [0.75], [0.95]])  # all in one state, mean 0.3
    loss, label = getattr(bc, f"{name}_loss"), getattr(bc, f"{name}_label")(action, "soft")
    outputs = jnp.zeros((1, POLICIES[name].num_outputs(1)))
    grad = jax.jit(jax.grad(lambda z: loss(jnp.tile(z, (4, 1)), label).mean()))
    for _ in range(300):
        outputs = outputs - 4 * grad(outputs)
    # p = (1 + 0.3) / 2 = 0.65; over -1, 0, 1: (1/4, (0.5 + 0.25 + 0.05) / 4, 2.2 / 4) = (0.25, 0.2, 0.55)
    expected = [0.65] if name == "bernoulli" else [0.25, 0.2, 0.55]
    ours = jax.nn.sigmoid(outputs[0]) if name == "bernoulli" else jax.nn.softmax(outputs[0])
    close(ours, expected, atol=1e-5)
    close(POLICIES[name].mean(outputs), [[0.3]], atol=1e-5)


def test_observations_are_in_standard_deviations_of_the_dataset():
    dataset, config = tiny.dataset(), tiny.config(bc)
    normalizer = jax.jit(lambda key: bc.init(config, dataset, key))(jax.random.key(0)).params.normalizer
    obs = np.asarray(dataset.transitions.obs)
    np.testing.assert_allclose(normalizer.mean, obs.mean(0), rtol=1e-4, atol=1e-5)  # float32 sums of 200
    np.testing.assert_allclose(normalizer.std, obs.std(0) + 1e-3, rtol=1e-4)
    out = bc.normalize(config, normalizer, jnp.asarray(obs))
    np.testing.assert_allclose(out, (obs - obs.mean(0)) / obs.std(0), rtol=5e-3, atol=1e-3)  # 1e-3 is added to std
    assert bc.normalize(dataclasses.replace(config, normalize_obs=False), normalizer, obs) is obs
    assert bc.normalize(config, normalizer, obs > 0).dtype == bool  # MinAtar's pixels


@pytest.mark.parametrize("name", [*CONTINUOUS, "categorical"])
def test_each_policy_comes_to_act_as_the_data_do(name):
    dataset = tiny.dataset("discrete" if name == "categorical" else "continuous")
    config = tiny.config(bc, policy=name, hidden=(32,), batch_size=64, learning_rate=1e-2)
    t = dataset.transitions

    @jax.jit
    def learned(dataset, key, draw_key):
        step = lambda state, _: bc.step(config, dataset, state)
        state, metrics = jax.lax.scan(step, bc.init(config, dataset, key), length=500)
        actions = [f(config, dataset.spec, state.params, t.obs, draw_key) for f in (bc.act, bc.explore)]
        return *actions, jax.tree.map(lambda x: x[-1], metrics)

    action, drawn, last = learned(dataset, jax.random.key(0), jax.random.key(1))
    a = np.asarray(t.action)
    if name == "categorical":
        assert (action == a).mean() > 0.95 and (drawn == a).mean() > 0.9
    elif name == "gaussian":
        assert np.abs(action - a).mean() < 0.05
        assert np.abs(drawn - a).mean() < 0.2 and (drawn != action).all()
    else:
        nearest = np.where(a >= 0, 1, -1) if name == "bernoulli" else np.round(a)
        assert (np.asarray(action) == nearest).mean() > 0.9
        # Drawn actions have the data's mean; 200 draws of standard deviation below 1, five of their errors
        assert set(np.unique(drawn)) == ({-1, 1} if name == "bernoulli" else {-1, 0, 1})
        assert abs(float(drawn.mean()) - a.mean()) < 0.35
    at_bounds = last.get("at_bounds")
    assert at_bounds is None if name == "categorical" else (at_bounds == 1) == (name == "bernoulli")


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(policy="beta"), "policy 'beta' must be one of gaussian, bernoulli, bang_off_bang"),
        (dict(policy="categorical"), "policy 'categorical' must be one of"),
        (dict(label="hard"), "label 'hard' must be one of soft, sign"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        bc.check(tiny.config(bc, **changes), tiny.dataset())


# Launches, from a file of random actions.


TINY = """--algo bc --steps 30 --eval-period 10 --seeds 0 1 --eval-episodes 2
    --config.hidden 16 --config.batch-size 16 --config.policy gaussian""".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Eight random episodes of ten steps of Pendulum-v1."""
    env = envs.make("Pendulum-v1", 8, max_steps_in_episode=10)
    made = datasets.roll_out(env, builtin.uniform(env.spec), (), jax.random.key(0), 10)
    params = dict(max_steps_in_episode=10)
    dataset = datasets.admit(datasets.episodes(made), env.spec, "random", "Pendulum-v1", params)
    folder = tmp_path_factory.mktemp("data")
    datasets.save(folder / "random.npz", dataset)
    datasets.save(folder / "nameless.npz", dataclasses.replace(dataset, env=None))
    return folder / "random.npz"


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert main(*TINY, "--dataset", data, "--run-dir", run_dir) == 0
    return run_dir


def test_a_launch_counts_gradient_steps_and_evaluates_in_the_datasets_own_environment(whole, capsys):
    lines = metrics(whole)
    assert [(x["chunk"], x["run"], x["gradient_steps"]) for x in lines] == [
        (c, r, 10 * c) for c in (1, 2, 3) for r in (0, 1)
    ]
    assert all(np.isfinite(x["loss"]) and x["eval_length"] == 10 and "env_steps" not in x for x in lines)
    written = json.loads((whole / "config.json").read_text())
    assert written["dataset"]["statistics"]["transitions"] == 80 and written["num_envs"] is None
    assert written["dataset"]["eval_env_params"] == dict(max_steps_in_episode=10)


def test_a_resumed_launch_continues_bit_for_bit(data, whole, tmp_path):
    arguments = [*TINY, "--dataset", data, "--run-dir", tmp_path / "run"]
    assert main(*arguments, "--time-limit", 1e-3) == 0
    assert metrics(tmp_path / "run") == []
    assert main("--resume", tmp_path / "run") == 0
    assert metrics(tmp_path / "run") == metrics(whole) and state_digest(tmp_path / "run") == state_digest(whole)


def test_resuming_on_other_data_is_refused(data, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace(str(data), str(tmp_path / "other.npz")))
    other = datasets.load(str(data))
    t = other.transitions._replace(reward=other.transitions.reward.at[3].add(1))
    datasets.save(tmp_path / "other.npz", dataclasses.replace(other, transitions=t))
    assert main("--resume", tmp_path / "run", "--steps", 40) == 2
    assert "other.npz is not the one that" in capsys.readouterr().err


def test_a_policy_file_acts_and_collects_without_the_dataset(data, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datasets, "load", None)
    path = whole / "policy" / "last.msgpack"
    algo, config, spec, params = policy.load(path, run=1)
    assert algo is bc and spec == envs.make("Pendulum-v1", max_steps_in_episode=10).spec
    out = tmp_path / "clone.npz"
    arguments = ["--policy", path, "--run", 1, "--steps", 20, "--num-envs", 2, "--out", out]
    assert collect.main([str(a) for a in arguments]) == 0
    assert collect.main([str(a) for a in [*arguments, "--sample", "--overwrite"]]) == 0
    monkeypatch.undo()
    drawn = datasets.load(str(out))
    assert (drawn.env, dict(drawn.env_params)) == ("Pendulum-v1", dict(max_steps_in_episode=10))
    t = drawn.transitions
    mode = bc.act(config, spec, params, t.obs, jax.random.key(0))
    assert (np.abs(t.action - mode) > 1e-3).all()  # --sample drew it
    monkeypatch.delattr(bc, "explore")
    assert collect.main([str(a) for a in [*arguments, "--sample", "--overwrite"]]) == 2
    assert "bc has no explore" in capsys.readouterr().err
    assert collect.main([str(a) for a in [*arguments, "--run", 2, "--overwrite"]]) == 2
    assert "runs 0 to 1, not 2" in capsys.readouterr().err


BAD = {
    "another kind's source": ("--env Pendulum-v1", ["--env", "--dataset"]),
    "another kind's flag": ("--num-envs 4", ["--num-envs", "does not apply"]),
    "missing file": ("--dataset nowhere.npz", ["nowhere.npz does not exist"]),
    "unknown name": ("--dataset pendulum/exprt", ["'pendulum/exprt'", "pendulum/expert"]),
    "another environment": ("--eval-env CartPole-v1", ["(3,)", "(4,)", "continuous", "discrete", "--eval-env"]),
    "unknown environment": ("--eval-env Pendulum-v2", ["Pendulum-v1"]),
    "no environment": ("--dataset {folder}/nameless.npz", ["--eval-env"]),
    "unknown parameter": ("--env-params.max-steps 5", ["max_steps", "max_steps_in_episode"]),
    "policy": ("--config.policy beta", ["'beta'", "gaussian"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_before_any_compile(name, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "advance", None)
    given = BAD[name][0].format(folder=data.parent).split()
    assert main(*TINY, "--dataset", data, "--run-dir", tmp_path / "run", *given) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for word in BAD[name][1]:
        assert word in error, error


def test_an_online_algorithm_takes_no_dataset(capsys):
    assert main("--algo", "iqn", "--dataset", "pendulum/expert") == 2
    assert "--dataset does not apply" in capsys.readouterr().err


def test_an_algorithm_refuses_the_other_kind_of_action(monkeypatch, data, capsys):
    monkeypatch.setattr(bc, "ACTIONS", ("discrete",))
    assert main(*TINY, "--dataset", data, "--run-dir", data.parent / "run") == 2
    assert "bc needs discrete actions, this source has continuous ones" in capsys.readouterr().err


def test_parameters_of_the_evaluation_come_from_the_data_then_the_command_line(data):
    params = lambda options, given: settings.evaluated_in(datasets.load(str(data)), options, given)
    own, other = types.SimpleNamespace(eval_env=None), types.SimpleNamespace(eval_env="brax/hopper")
    assert params(own, dict(g=9.0)) == ("Pendulum-v1", dict(max_steps_in_episode=10, g=9.0))
    assert params(other, dict(backend="mjx")) == ("brax/hopper", dict(backend="mjx"))


@pytest.mark.parametrize("source, word", [("{data}", "bc-random-2"), ("pendulum/expert", "bc-pendulum-expert-2")])
def test_a_run_folder_is_one_folder_whatever_the_source_is_called(source, word, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = train.default_run_dir(types.SimpleNamespace(algo="bc", source=source.format(data=data)))
    assert folder.parent.name == "runs" and folder.name.startswith(word)
    assert settings.preset_path("bc", "minari:D4RL/door:human-v2").parent == settings.ROOT / "sweeps" / "bc"


def test_list_and_help_cover_datasets(capsys):
    assert main("--list") == 0
    shown = capsys.readouterr().out
    assert "--dataset" in shown and any(x.split()[:2] == ["pendulum/expert", "continuous"] for x in shown.splitlines())
    with pytest.raises(SystemExit):
        main("--algo", "bc", "--help")
    shown = capsys.readouterr().out
    assert "--dataset" in shown and "--eval-env" in shown and "--num-envs" not in shown


@pytest.mark.slow
def test_bc_swings_the_pendulum_up_at_its_example_settings(tmp_path):
    assert main("--algo", "bc", "--run-dir", tmp_path / "run") == 0
    lines = metrics(tmp_path / "run")
    final = np.array([[x["eval_return"] for x in lines if x["run"] == r] for r in range(5)])[:, -3:].mean(1)
    assert np.median(final) > -200, final  # random actions get -1,200, the data -156


@pytest.mark.parametrize(
    "name, label, slope",
    [
        # Networks that answer 0 say 1/2, or 1/3 each; the slope is p - y, on average of a = 0.75 and -0.8
        ("bernoulli", "soft", [0.5 - (0.875 + 0.1) / 2]),
        ("bernoulli", "sign", [0.5 - (1 + 0) / 2]),
        ("bang_off_bang", "soft", [1 / 3 - 0.8 / 2, 1 / 3 - (0.25 + 0.2) / 2, 1 / 3 - 0.75 / 2]),
        ("bang_off_bang", "sign", [1 / 3 - 1 / 2, 1 / 3, 1 / 3 - 1 / 2]),
    ],
)
def test_the_label_is_that_of_the_settings(name, label, slope):
    config, spec = tiny.config(bc, policy=name, label=label), tiny.dataset().spec
    params = jax.tree.map(jnp.zeros_like, bc.init(config, tiny.dataset(), jax.random.key(0)).params)
    params = params._replace(normalizer=bc.Normalizer(jnp.zeros(3), jnp.ones(3)))
    loss = lambda head: bc.loss(
        config, spec, params._replace(head=head), jnp.zeros((2, 3)), jnp.array([[0.75], [-0.8]]), jax.random.key(0)
    )[0]
    close(jax.grad(loss)(params.head)["params"]["Dense_0"]["bias"], slope)


def test_the_first_step_of_adam_is_as_long_as_the_learning_rate():
    config = tiny.config(bc, learning_rate=3e-3)
    state = jax.jit(bc.init)(config, tiny.dataset(), jax.random.key(0))
    after, _ = jax.jit(bc.step)(config, tiny.dataset(), state)
    moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), after.params.head, state.params.head)
    np.testing.assert_allclose(jax.tree.leaves(moved), 3e-3, rtol=1e-2)  # Adam's epsilon
