"""QR-DQN: the quantile loss of the golden numbers, its target, acting on the mean and on the CVaR, exact quantiles."""

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

from algos import qrdqn
from envs import mdps
from envs.types import Transition
from runner import run

GOLDEN = Path(__file__).parent / "golden"
array = partial(np.asarray, dtype=np.float32)
close = partial(np.testing.assert_allclose, atol=1e-6)  # a few float32 roundings of numbers near one


def settings(**changes):
    """A small network that no period moves; a test names the fields that it depends on."""
    small = dict(hidden=(3,), num_quantiles=4, capacity=4_000, prefill=8, batch_size=4, train_period=4)
    return dataclasses.replace(qrdqn.Config(), **small | dict(target_period=10**6) | changes)


def world(num_envs=4, obs_shape=(2,)):
    """Two states that lead to each other, reward 1, for ever."""
    return table(np.zeros((2, *obs_shape)), [1, 0], [1, 0], 1, 0, num_envs=num_envs)


# --- the loss ---


def test_quantile_loss_of_the_golden_numbers():
    g = json.loads((GOLDEN / "c_g5_scalar_losses.json").read_text())["qr_huber"]
    q, target = array(g["src"]), array(g["target"])
    close(qrdqn.quantile_loss(q, target, 1.0), g["kappa1"])
    close(qrdqn.quantile_loss(q, target, 0.1), g["kappa0_1"])


def test_quantile_loss_by_hand():
    q, target = array([0, 1]), array([0.5, 3])
    # taus = [1/4, 3/4]; u = [[.5, 3], [-.5, 2]]; weights [[1/4, 1/4], [1/4, 3/4]]
    # kappa 0: mean(.125, .75) + mean(.125, 1.5) = .4375 + .8125
    assert qrdqn.quantile_loss(q, target, 0.0) == 1.25
    # kappa 2: Huber [[.125, 4], [.125, 2]]: mean(.03125, 1) + mean(.03125, 1.5) = .515625 + .765625
    assert qrdqn.quantile_loss(q, target, 2.0) == 1.28125
    # the targets are a law: their order does not matter
    assert qrdqn.quantile_loss(q, target[::-1], 2.0) == 1.28125


def test_gradient_is_the_clipped_error_weighed_by_the_side_and_none_flows_through_the_target():
    loss = partial(qrdqn.quantile_loss, kappa=1.0)
    of_q, of_target = jax.grad(loss, (0, 1))(array([0, 1]), array([0.5, 3]))
    # -mean_j weight clip(u, -1, 1): -(.25 .5 + .25 1) / 2 = -.1875; -(.25 (-.5) + .75 1) / 2 = -.3125
    close(of_q, [-0.1875, -0.3125])
    assert (of_target == 0).all()


# --- what actions are compared by ---


def test_score_is_the_mean_of_the_lowest_quantiles_with_the_one_on_the_boundary_split():
    q = jnp.array([[1.0, 2, 3, 6]])
    of = lambda risk_tau: float(qrdqn.scores(settings(risk_tau=risk_tau), q)[0])
    # 1: (1 + 2 + 3 + 6) / 4. 1/2: (1 + 2) / 2. 3/8: one and a half of four, (1 + 2/2) / 1.5. 1/10: within the first
    close([of(1.0), of(0.5), of(0.375), of(0.1)], [3, 1.5, 4 / 3, 1])


@pytest.mark.parametrize("risk_tau, best", [(1.0, [0, 0, 4, 8]), (0.5, [1, 1, 1, 1])])
def test_target_is_the_law_of_the_action_with_the_best_score(risk_tau, best, monkeypatch):
    # Means 3 and 1; of the lower half 0 and 1.
    next_q = jnp.array([[[0.0, 0, 4, 8], [1, 1, 1, 1]]] * 2)
    monkeypatch.setattr(qrdqn, "quantiles", lambda *args: next_q)
    batch = Transition(None, None, array([0.5, -1]), None, None, None)
    target = qrdqn.target_of(settings(risk_tau=risk_tau), None, None, batch, array([0.5, 0]))
    # r + discount q; where the MDP ended the reward alone
    close(target, [0.5 + 0.5 * array(best), [-1] * 4])


def test_quantiles_of_actions_are_not_mixed_up():
    config, env = settings(hidden=(5,), num_quantiles=3), world()
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes(config, env).params)
    params["params"]["layers_1"]["Dense_0"]["bias"] = np.arange(6, dtype=np.float32)
    close(qrdqn.quantiles(config, env.spec, params, np.ones((1, 2))), [[[0, 1, 2], [3, 4, 5]]])
    close(qrdqn.of_action(jnp.arange(12).reshape(2, 2, 3), jnp.array([1, 0])), [[3, 4, 5], [6, 7, 8]])
    assert qrdqn.act(config, env.spec, params, np.ones((2, 2)), None).tolist() == [1, 1]


# --- networks ---


def shapes(config, env):
    return jax.eval_shape(qrdqn.init, config, env, jax.random.key(0))


def test_atari_network_has_the_published_size():
    env = table(np.zeros((2, 84, 84, 4)), [1, 0], 0, 1, 0, num_actions=18, num_envs=4)
    params = shapes(dataclasses.replace(qrdqn.Config(), num_quantiles=200, capacity=80, prefill=20), env).params
    # conv 8x8x4x32 + 32, 4x4x32x64 + 64, 3x3x64x64 + 64; then 3136 x 512 + 512 and 512 x 3600 + 3600
    assert sum(x.size for x in jax.tree.leaves(params)) == 77_984 + 1_606_144 + 1_846_800


@pytest.mark.parametrize("shape", [(10, 10, 3), (84, 84, 4), (7,)], ids=str)
def test_vectors_and_pixels_have_quantiles_for_every_action(shape):
    env, config = world(obs_shape=shape), settings()
    params, obs = shapes(config, env).params, jax.ShapeDtypeStruct((5, *shape), jnp.float32)
    q = jax.eval_shape(partial(qrdqn.quantiles, config, env.spec), params, obs)
    assert q.shape == (5, 2, 4)


# --- a step ---


def test_target_is_copied_every_target_period_gradient_steps():
    config, env = settings(target_period=3), world(num_envs=8)  # two gradient steps in a step
    state = jax.jit(partial(qrdqn.init, config))(env, jax.random.key(0))
    assert tiny.same_bits(state.params, state.target_params)
    step, copied, targets = jax.jit(partial(qrdqn.step, config)), [], state.target_params
    for _ in range(6):
        state, _ = step(env, state)
        copied.append(not tiny.same_bits(state.target_params, targets))
        targets = state.target_params
        assert int(state.gradient_steps) % 3 or tiny.same_bits(state.params, targets)
    # after 2, 4, 6, 8, 10, 12 gradient steps; copies at 3, 6, 9, 12
    assert copied == [False, True, True, False, True, True]
    assert int(state.env_steps) == 8 + 6 * 8


def test_epsilon_by_hand():
    config = settings(epsilon_start=0.9, epsilon_end=0.1, epsilon_decay=100.0, prefill=40)
    # 0.9 at the end of the prefill, 0.9 - 0.8 * 25/100 = 0.7 after 25 more env steps, 0.1 from 140 on
    close([float(qrdqn.epsilon(config, t)) for t in (0, 40, 65, 140, 10_000)], [0.9, 0.9, 0.7, 0.1, 0.1])


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(capacity=1_001), "capacity 1001 must be a multiple of num_envs 4; 1000 is"),
        (dict(train_period=6), "train_period 6 and num_envs 4: one must be a multiple of the other"),
        (dict(train_period=8, prefill=12), "prefill 12 must be a multiple of 8"),
        (dict(prefill=8, n_step=3), "n_step 3 is longer than the 2 steps"),
        (dict(padding="same"), "padding 'same' must be SAME or VALID"),
    ],
)
def test_bad_settings_are_named_with_their_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        qrdqn.check(settings(**changes), world())
    qrdqn.check(settings(), world())


# --- learning, with dynamic programming as the oracle ---


def two_steps():
    """(0) -> +1 or -1 -> (1); there action 0 pays 0 or 2, action 1 pays 6 or -3, all with probability 1/2."""
    first = [(0.5, 1, 1.0), (0.5, 1, -1.0)]
    second = [[(0.5, 2, 0.0), (0.5, 2, 2.0)], [(0.5, 2, 6.0), (0.5, 2, -3.0)]]
    return mdps.tabulate("two_steps", [[first, first], second, [[], []]], gamma=0.5, terminal=(2,))


@cache
def learned():
    config = tiny.config(qrdqn, **tiny.LEARNING | dict(num_quantiles=4, gamma=0.5, kappa=0.05))
    env = mdps.env(two_steps(), 8)
    configs = run.broadcast(config, 2)  # the mean, and the CVaR
    configs = dataclasses.replace(configs, risk_tau=jnp.array([1.0, 0.5]))
    carry = run.init(qrdqn, configs, env, jax.random.split(jax.random.key(1), 2))
    carry = run.advance(qrdqn, configs, env, carry, 2 * tiny.LEARNING_STEPS)
    of = jax.vmap(lambda config, params: qrdqn.quantiles(config, env.spec, params, jnp.eye(3)[:2]))
    return np.asarray(of(configs, carry.states.params))  # (R, S, A, N)


@pytest.mark.parametrize("run, first", [(0, [-2.5, -0.5, 2, 4]), (1, [-1, 0, 1, 2])], ids=["mean", "cvar"])
def test_quantiles_are_those_of_dynamic_programming(run, first):
    # Quantiles at 1/8, 3/8, 5/8, 7/8. In state 1 action 0 has the mean 1 and the CVaR 0, action 1 has 1.5 and -3.
    # Of state 0, where the mean is best: +-1 + {-1.5, 3}; where the CVaR is: +-1 + {0, 1}.
    expected = [[first] * 2, [[0, 0, 2, 2], [-3, -3, 6, 6]]]
    # Huber's square and Adam move a quantile by a tenth or so; the nearest other atom is 1 away.
    np.testing.assert_allclose(learned()[run], expected, atol=0.3)
