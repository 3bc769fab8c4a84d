"""C51 and its one-step relative: golden targets, what is clipped when, and dynamic programming as the oracle."""

import dataclasses
import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from probes import table

from algos import c51
from envs import mdps
from envs.types import Transition
from runner import run

GOLDEN = Path(__file__).parent / "golden"
golden = lambda name: json.loads((GOLDEN / f"{name}.json").read_text())
array = partial(np.asarray, dtype=np.float32)
close = partial(np.testing.assert_allclose, atol=1e-6)  # a few float32 roundings of numbers near one
each = pytest.mark.parametrize("one_step", [False, True], ids=["c51", "one_step"])


def settings(**changes):
    """Atoms -2, -1, 0, 1, 2 and a small network that no period moves."""
    small = dict(hidden=(3,), capacity=4_000, prefill=8, batch_size=4, train_period=4, target_period=10**6)
    return dataclasses.replace(c51.Config(), **small | dict(v_min=-2.0, v_max=2.0, num_atoms=5) | changes)


def world(num_envs=4):
    """Two states that lead to each other, reward 1, for ever."""
    return table(np.zeros((2, 2)), [1, 0], [1, 0], 1, 0, num_envs=num_envs)


def target_of(monkeypatch, config, next_p, reward, discount):
    """The target where the target network gives the laws `next_p`, `(A, N)`, at every successor."""
    reward, discount = np.atleast_1d(array(reward)), np.atleast_1d(array(discount))
    next_logits = jnp.log(jnp.maximum(jnp.asarray(next_p, jnp.float32), 1e-30))
    monkeypatch.setattr(c51, "logits", lambda *args: jnp.broadcast_to(next_logits, (len(reward), *next_logits.shape)))
    batch = Transition(None, None, reward, None, None, None)
    return c51.target_of(config, None, None, batch, discount)


# --- formulas ---


def test_support_scores_and_loss_by_hand():
    assert c51.support(settings()).tolist() == [-2, -1, 0, 1, 2]
    p = array([[0.5, 0, 0, 0, 0.5], [0, 0, 0.25, 0.75, 0]])
    # 0, and .75; a constant added to logits changes nothing
    close(c51.scores(settings(), jnp.log(jnp.maximum(p, 1e-30)) + 3), [0, 0.75])
    # -(1/4 log 1/2 + 3/4 log 1/4) = (1/4 + 3/2) log 2
    loss = c51.cross_entropy(jnp.log(array([0.5, 0.25, 0.25])) + 3, array([0.25, 0.75, 0]))
    close(loss, 1.75 * np.log(2))


def test_gradient_is_predicted_minus_target_and_none_flows_through_the_target():
    p, m = array([0.5, 0.25, 0.25]), array([0.25, 0.75, 0])
    of_logits, of_target = jax.grad(c51.cross_entropy, (0, 1))(jnp.log(p), m)
    close(of_logits, p - m)
    assert (of_target == 0).all()


def test_projected_target_of_the_golden_numbers(monkeypatch):
    cases = golden("c_g5_scalar_losses")["c51_projection"]
    # atoms 1 and 1.5 of probabilities .4 and .6: 1 + z/2 of z = 0 and 1
    target = target_of(monkeypatch, settings(), [[0, 0, 0.4, 0.6, 0]], 1.0, 0.5)
    assert cases[1]["atoms"] == [1.0, 1.5] and cases[1]["probs"] == [0.4, 0.6]
    close(target[0], cases[1]["proj"])
    # both atoms 0: an episode that ended with reward 0
    target = target_of(monkeypatch, settings(), [[0, 0, 0.5, 0.5, 0]], 0.0, 0.0)
    assert cases[2]["atoms"] == [0.0, 0.0]
    close(target[0], cases[2]["proj"])


def test_one_step_target_of_the_golden_numbers(monkeypatch):
    g = golden("c_g4_one_step_distributional")["sample_targets_twohot"]
    assert len(g["rows"]) == 4 and g["support"] == c51.support(settings()).tolist()
    for row in g["rows"][:3]:
        # A law with the mean q_next_max, on -2 and 2, and an action that is worse.
        high = (min(row["q_next_max"], 2) + 2) / 4
        next_p = [[1, 0, 0, 0, 0], [1 - high, 0, 0, 0, high]]
        discount = g["gamma"] * (1 - row["done"])
        target = target_of(monkeypatch, settings(one_step=True), next_p, row["r"], discount)
        close(target[0], row["twohot"])
    last = g["rows"][3]  # the end: the reward alone, whatever is predicted after it
    target = target_of(monkeypatch, settings(one_step=True), [[0, 0, 0, 0, 1]], last["r"], 0.0)
    assert last["done"] == 1
    close(target[0], last["twohot"])


@each
def test_atoms_are_clipped_one_by_one_and_the_one_step_scalar_after_averaging(one_step, monkeypatch):
    target = target_of(monkeypatch, settings(one_step=one_step), [[0.5, 0, 0, 0, 0.5]], 1.0, 1.0)
    # 1 - 2 = -1 and 1 + 2 = 3, which becomes 2; their mean before that is 1
    close(target[0], [0, 0, 0, 1, 0] if one_step else [0, 0.5, 0, 0, 0.5])


@each
def test_target_is_of_the_action_with_the_best_mean(one_step, monkeypatch):
    next_p = [[0, 1, 0, 0, 0], [0, 0, 0, 1, 0], [0.5, 0, 0, 0, 0.5]]  # means -1, 1, 0
    target = target_of(monkeypatch, settings(one_step=one_step), next_p, [0.5, 0, 1.5], [0.5, 1, 0.25])
    # 0.5 + 0.5 and 0 + 1 are 1; 1.5 + 0.25 = 1.75
    close(target, [[0, 0, 0, 1, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0.25, 0.75]])


def test_logits_of_actions_are_not_mixed_up():
    config, env = settings(num_atoms=3), world()
    params = jax.eval_shape(c51.init, config, env, jax.random.key(0)).params
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), params)
    params["params"]["layers_1"]["Dense_0"]["bias"] = array([0, 0, 9, 9, 0, 0])
    close(c51.logits(config, env.spec, params, np.ones((1, 2))), [[[0, 0, 9], [9, 0, 0]]])
    assert c51.act(config, env.spec, params, np.ones((2, 2)), None).tolist() == [0, 0]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(v_min=3.0), "v_min 3 must be less than v_max 2"),
        (dict(num_atoms=1), "num_atoms 1 must be at least 2"),
        (dict(capacity=1_001), "capacity 1001 must be a multiple of num_envs 4; 1000 is"),
        (dict(train_period=6), "train_period 6 and num_envs 4: one must be a multiple of the other"),
        (dict(prefill=8, n_step=3), "n_step 3 is longer than the 2 steps"),
        (dict(padding="same"), "padding 'same' must be SAME or VALID"),
    ],
)
def test_bad_settings_are_named_with_their_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        c51.check(settings(**changes), world())
    c51.check(settings(), world())


# --- learning, with dynamic programming as the oracle ---


@cache
def learned(one_step):
    """Of the MDP (0) -> +-1 -> (1), where action 0 pays 0 or 2, action 1 pays 1 or -3, all with probability 1/2."""
    first = [(0.5, 1, 1.0), (0.5, 1, -1.0)]
    second = [[(0.5, 2, 0.0), (0.5, 2, 2.0)], [(0.5, 2, 1.0), (0.5, 2, -3.0)]]
    mdp = mdps.tabulate("two_steps", [[first, first], second, [[], []]], gamma=1.0, terminal=(2,))
    grid = dict(num_atoms=9, v_min=-4.0, v_max=4.0, adam_epsilon=1e-4)
    config = tiny.config(c51, **tiny.LEARNING | dict(gamma=1.0, one_step=one_step) | grid)
    env, configs = mdps.env(mdp, 8), run.broadcast(config, 1)
    carry = run.init(c51, configs, env, jax.random.split(jax.random.key(1), 1))
    params = tiny.run_of(run.advance(c51, configs, env, carry, 2 * tiny.LEARNING_STEPS).states.params, 0)
    return np.asarray(jax.nn.softmax(c51.logits(config, env.spec, params, jnp.eye(3)[:2])))  # (S, A, N)


@each
def test_probabilities_are_those_of_dynamic_programming(one_step):
    law = lambda *atoms: np.isin(np.arange(-4, 5), atoms) / len(atoms)
    # C51: +-1 + {0, 2} is -1, 1, 1, 3. One step: +-1 + 1, the mean of {0, 2}.
    first = law(0, 2) if one_step else (law(-1, 1) + law(1, 3)) / 2
    expected = [[first, first], [law(0, 2), law(1, -3)]]
    # A probability is estimated from the last few hundred samples of 32: 0.02 is a standard deviation or two.
    np.testing.assert_allclose(learned(one_step), expected, atol=0.08)
