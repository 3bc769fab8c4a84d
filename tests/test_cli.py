"""The command line: the forms that people and W&B agents pass, and one clear line for every bad input."""

import dataclasses
import subprocess
import sys

import pytest
from launching import SCRIPT, TINY, main

from algos import iqn, mrq
from runner import cli, settings
from runner.check import BadInput


def options(*arguments):
    return cli.parse([str(a) for a in arguments]).options


def test_algo_alone_is_the_example():
    parsed = options("--algo", "iqn")
    example = iqn.EXAMPLE
    assert (parsed.source, parsed.steps, parsed.num_envs) == (example.source, example.steps, example.num_envs)
    assert parsed.config == example.config and parsed.seeds == example.seeds


def test_the_published_preset_is_the_configs_own_defaults():
    assert options("--algo", "iqn", "--preset", "published").config == iqn.Config()


def test_an_algorithms_own_preset_changes_what_it_names_and_nothing_else():
    narrow = dict(zs_size=128, za_size=128, zsa_size=128, hidden_size=128)
    # Tuned, as the sweep file has it, then the preset, then the command line.
    tuned, small = (options("--algo", "mrq", "--env", "brax/hopper", *flags) for flags in ([], ["--preset", "small"]))
    assert vars(tuned) | dict(config=small.config, preset="small") == vars(small)
    assert small.config == dataclasses.replace(tuned.config, **narrow)
    wide = options("--algo", "mrq", "--env", "Acrobot-v1", "--preset", "small", "--config.hidden-size", 64).config
    assert wide == dataclasses.replace(mrq.Config(), **narrow | dict(hidden_size=64))


@pytest.mark.parametrize(
    "arguments",
    [
        "--algo iqn --seeds 0 1 2 --config.hidden 256 256 --config.huber True --steps 1000000".split(),
        ["--algo=iqn", "--seeds=[0, 1, 2]", "--config.hidden=[256, 256]", "--config.huber=true", "--steps=1e6"],
        ["--algo=iqn", "--seeds=[0,1,2]", "--config.hidden=(256,256)", "--config.huber=True", "--steps=1000000.0"],
        ["--algo=iqn", "--seeds=[0,", "1,", "2]", "--config.hidden=[256,256]", "--config.huber=True", "--steps=1E6"],
    ],
    ids=["typed", "agent", "agent-compact", "unquoted"],
)
def test_people_and_agents_say_the_same(arguments):
    parsed = options(*arguments)
    assert parsed.seeds == (0, 1, 2) and parsed.steps == 1_000_000
    assert parsed.config.hidden == (256, 256) and parsed.config.huber is True


def test_underscores_and_false_are_taken_as_agents_pass_them():
    parsed = options("--algo=iqn", "--num_envs=4", "--config.shared_torso=False", "--config.learning_rate=1e-3")
    assert parsed.num_envs == 4 and parsed.config.shared_torso is False and parsed.config.learning_rate == 1e-3


def test_text_is_taken_as_it_stands():
    parsed = options("--algo=iqn", "--run-dir=1e3", "--wandb-project", "2024.0")
    assert parsed.run_dir == "1e3" and parsed.wandb_project == "2024.0"
    assert options("--algo=iqn", "--run-dir", "(old) x", "--steps", "10000").steps == 10_000
    launch = cli.parse(["--algo=iqn", "--env-params.bounds=[0.2, 1.0]"])
    assert launch.source_params == {"bounds": [0.2, 1.0]}


def test_no_hidden_layer_is_a_linear_network():
    assert options("--algo=iqn", "--config.hidden=[]").config.hidden == ()


def test_environment_parameters_are_taken_out_by_name():
    launch = cli.parse(["--algo=iqn", "--env-params.length=0.7", "--env-params.max-steps-in-episode", "100"])
    assert launch.source_params == {"length": 0.7, "max_steps_in_episode": 100}


def test_settings_come_from_the_example_then_the_sweep_file_then_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "sweeps" / "iqn").mkdir(parents=True)
    (tmp_path / "algos").symlink_to(settings.ROOT / "algos")
    (tmp_path / "sweeps" / "iqn" / "acrobot.yaml").write_text(
        "parameters:\n  env: {value: Acrobot-v1}\n  num-envs: {value: 2}\n  config.learning_rate: {value: 1e-4}\n"
        "  config.hidden: {value: [32]}\n  config.gamma: {values: [0.9, 0.99]}\n"
    )
    monkeypatch.setattr(settings, "ROOT", tmp_path)
    parsed = options("--algo", "iqn", "--env", "Acrobot-v1", "--config.batch-size", 7)
    assert (parsed.num_envs, parsed.config.learning_rate, parsed.config.hidden) == (2, 1e-4, (32,))
    assert parsed.config.batch_size == 7 and parsed.config.gamma == iqn.Config().gamma


@pytest.fixture
def sweep_of_acrobot(tmp_path, monkeypatch):
    """Writes the parameters of `sweeps/iqn/acrobot.yaml`."""
    (tmp_path / "sweeps" / "iqn").mkdir(parents=True)
    (tmp_path / "algos").symlink_to(settings.ROOT / "algos")
    monkeypatch.setattr(settings, "ROOT", tmp_path)
    return lambda text: (tmp_path / "sweeps" / "iqn" / "acrobot.yaml").write_text(f"parameters:\n  {text}\n")


def test_a_sweep_files_environment_parameters_count_and_the_command_line_wins(sweep_of_acrobot):
    sweep_of_acrobot("env-params.max_steps_in_episode: {value: 100}\n  env-params.gravity: {value: 9.0}")
    launch = cli.parse(["--algo", "iqn", "--env", "Acrobot-v1", "--env-params.gravity", "1.0"])
    assert launch.source_params == dict(max_steps_in_episode=100, gravity=1.0)


def test_an_entry_of_a_sweep_file_that_is_no_setting_is_refused(sweep_of_acrobot):
    sweep_of_acrobot("eval_periods: {value: 5}")
    with pytest.raises(BadInput, match="acrobot.yaml: no setting 'eval_periods'; there are algo, env, steps"):
        cli.parse(["--algo", "iqn", "--env", "Acrobot-v1"])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("Breakout-MinAtar", "minatar_breakout"),
        ("CartPole-v1", "cartpole"),
        ("brax/hopper", "brax_hopper"),
        ("MountainCar-v0", "mountaincar"),
        ("maze/medium", "maze_medium"),
    ],
)
def test_a_sweep_file_is_named_after_its_environment(source, name):
    assert settings.preset_path("iqn", source).stem == name


# Each bad input, and what its one line must say: the value, what was expected, the fix.
BAD = {
    "unknown algorithm": ("--algo iqm", ["'iqm'", "iqn"]),
    "no algorithm": ("--seeds 0", ["--algo is missing", "iqn"]),
    "another algorithm's preset": ("--preset small", ["iqn has no --preset small", "tuned, published"]),
    "unknown preset": ("--algo mrq --preset tiny", ["mrq has no --preset tiny", "tuned, published, small"]),
    "unknown environment": ("--env Cartpole-v0", ["'Cartpole-v0'", "CartPole-v1"]),
    "unknown suite": ("--env bracks/hopper", ["bracks", "brax"]),
    "continuous environment": ("--env Pendulum-v1", ["iqn", "discrete", "continuous"]),
    "steps not a multiple": ("--steps 3100", ["3100", "1000"]),
    "period not a multiple": ("--eval-period 1001 --steps 2002", ["1001", "4"]),
    "capacity not a multiple": ("--config.capacity 2001", ["2001", "4"]),
    "prefill past the end": ("--config.prefill 4000", ["3000", "4000"]),
    "negative": ("--config.learning-rate=-1e-3", ["learning-rate", "-0.001", "more than 0"]),
    "not a number": ("--config.gamma nan", ["gamma", "nan", "[0, 1]"]),
    "zero width": ("--config.hidden 0", ["hidden", "0", "at least 1"]),
    "more than memory": ("--config.capacity 2000000000", ["GB", "capacity"]),
    "same seed twice": ("--seeds 1 1", ["--seeds", "(1, 1)"]),
    "seed past 31 bits": ("--seeds 2147483648", ["--seeds", "2^31"]),
    "steps past 31 bits": ("--steps 1e12 --eval-period 1000", ["1000000000000", "2147483648"]),
    "size past 64 bits": ("--config.num-iterates 1e20", ["100000000000000000000"]),
    "leading slash": ("--env /CartPole-v1", ["'/CartPole-v1'", "CartPole-v1"]),
    "frozen head without one": ("--config.frozen-head-acts True --config.shared-torso False", ["frozen_head_acts"]),
    "unknown environment parameter": ("--env-params.lenght 0.7", ["'lenght'", "'length'"]),
    "reserved environment parameter": ("--env-params.num-envs 3", ["--env-params.num-envs", "--num-envs"]),
    "environment parameter of another type": ("--env-params.length long", ["length", "long"]),
    "run directory under a file": ("--run-dir {file}/run", ["cannot be written", "--run-dir"]),
    "foreign run directory": ("--resume {folder}", ["config.json", "not a run directory"]),
    "other algorithm's file": ("--resume {foreign}", ["config.json", "lacks"]),
    "negative time limit": ("--time-limit -1", ["--time-limit", "-1"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_before_any_compile(name, tmp_path, capsys, monkeypatch):
    from runner import run

    def compiled(*_):
        raise AssertionError("it compiled")

    monkeypatch.setattr(run, "advance", compiled)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"learning_rate": 1}')
    places = {name: tmp_path / name for name in ("file", "folder", "foreign")}
    given = [word.format(**places) for word in BAD[name][0].split()]
    base = [] if "--resume" in given else ["--run-dir", str(tmp_path / "run"), *TINY]
    if name == "no algorithm":
        base = []
    # The later flag wins, so the bad one goes last.
    assert main(*merge(base, given)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
    for word in BAD[name][1]:
        assert word in captured.err, captured.err


def merge(base, given):
    """`base` without the flags that `given` sets, and then `given`."""
    names = {word.partition("=")[0] for word in given if word.startswith("--")}
    kept, keep = [], True
    for word in base:
        if word.startswith("--"):
            keep = word not in names
        if keep:
            kept.append(word)
    return kept + given


def test_wandb_online_without_a_login_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(*TINY, "--run-dir", tmp_path / "run", "--wandb", "online") == 2
    assert "wandb login" in capsys.readouterr().err


def test_a_run_directory_in_use_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(*TINY, "--run-dir", tmp_path) == 2
    assert "--resume" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "{}"


def test_help_names_every_field_with_unit_and_published_value_without_importing_gymnax():
    code = f"""
import runpy, sys
sys.argv = ["train.py", "--algo", "iqn", "--help"]
try:
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
finally:
    print("gymnax" in sys.modules)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip().endswith("False")
    for field in iqn.Config.__dataclass_fields__:
        assert f"--config.{field.replace('_', '-')}" in shown
    assert "published 6.25e-5" in shown and "env steps" in shown


def test_list_shows_algorithms_and_environments_with_their_action_types(capsys):
    assert main("--list") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    kinds = {words[0]: words[1] for words in lines}
    assert kinds["iqn"] == "discrete" and kinds["CartPole-v1"] == "discrete"
    assert kinds["Pendulum-v1"] == "continuous" and kinds["brax/hopper"] == "continuous"
