"""DecQN: the authors' numbers, and that a maximum per dimension is the maximum over all joint actions."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from algos import decqn
from algos.decqn import Config, Params

GOLDEN = json.loads((Path(__file__).parent / "golden" / "decqn.json").read_text())
array = lambda name: jnp.array(GOLDEN[name], jnp.float32)


@pytest.fixture(scope="module")
def targets():
    """Of both critics, `(2, 1, 3)`."""
    target_next = jnp.stack([array("t1_next"), array("t2_next")])
    discount = jnp.array([GOLDEN["adder_discount(gamma^{n-1})"] * GOLDEN["gamma"]])
    reward = jnp.array([GOLDEN["n_step_reward"]])
    one = lambda name: decqn.target_of(array(name), target_next, reward, discount)
    return jnp.stack([one("q1_next"), one("q2_next")])


def test_targets_are_the_authors(targets):
    names = ("target_per_dim_using_q1_selector", "target_per_dim_using_q2_selector")
    np.testing.assert_allclose(targets, np.stack([GOLDEN[name] for name in names]), rtol=1e-6)


def test_errors_are_averaged_over_dimensions_before_the_loss(targets):
    error = decqn.td_errors(array("q1_state"), jnp.array(GOLDEN["action"]), targets[0])
    np.testing.assert_allclose(error, GOLDEN["td_error_q1_mean_over_dims"], rtol=1e-6)
    np.testing.assert_allclose(optax.huber_loss(error), GOLDEN["huber1"], rtol=1e-6)


def test_exploration_is_what_the_authors_probabilities_leave():
    np.testing.assert_allclose(decqn.dither(GOLDEN["eps"], 3), GOLDEN["effective_per_dim_epsilon"], rtol=1e-9)
    # Their normalised rows have epsilon' / 2 on each of two bins, and 1 - epsilon' more on the best.
    row = GOLDEN["normalised_probs"][0][0]
    np.testing.assert_allclose(min(row), decqn.dither(GOLDEN["eps"], 3) / 2, rtol=1e-12)
    assert [decqn.dither(*x) for x in ((0.3, 1), (1.0, 5), (0.0, 5))] == pytest.approx([0.3, 1, 0])


def test_the_best_bin_of_each_dimension_is_the_best_joint_action():
    q = np.random.default_rng(0).normal(size=(3, 4))  # D = 3, n = 4
    joint = {k: np.mean([q[j, k[j]] for j in range(3)]) for k in itertools.product(range(4), repeat=3)}
    assert tuple(q.argmax(-1)) == max(joint, key=joint.get)
    reward, discount = jnp.zeros(1), jnp.ones(1)
    target = decqn.target_of(jnp.asarray(q[None]), jnp.asarray(np.stack([q, q])[:, None]), reward, discount)
    np.testing.assert_allclose(target.mean(), max(joint.values()), rtol=1e-6)


def test_bins_are_evenly_spaced_and_actions_find_their_own_again():
    for bins, expected in ((2, [-1, 1]), (3, [-1, 0, 1]), (5, [-1, -0.5, 0, 0.5, 1])):
        actions = decqn.decode(jnp.arange(bins), bins)
        np.testing.assert_allclose(actions, expected, atol=1e-7)
        assert decqn.encode(actions, bins).tolist() == list(range(bins))
    many = decqn.decode(jnp.arange(125), 125)
    assert decqn.encode(many, 125).tolist() == list(range(125))


def test_importance_undoes_the_draw_and_is_at_most_one():
    # p = 1/8, 1/2; exponent 1: 8, 2 -> 1, 1/4. Exponent 1/2: 1, 1/2. Exponent 0: ones.
    p = jnp.array([0.125, 0.5])
    for exponent, expected in ((1.0, [1, 0.25]), (0.5, [1, 0.5]), (0.0, [1, 1])):
        np.testing.assert_allclose(decqn.importance(p, exponent), expected, rtol=1e-6)


SPEC = tiny.continuous_spec(jax.ShapeDtypeStruct((2,), "float32"), 3, 10)


@pytest.fixture(scope="module")
def updated():
    """One update of a batch of four, and what it was of."""
    config = Config(learning_rate=1e-3, bins=3, hidden_size=8)
    obs = jax.random.normal(jax.random.key(1), (4, 2))
    make = lambda key: Params(decqn.ensemble.init(decqn.network(config, SPEC), jax.random.key(key), 2, obs[0]))
    params, target_params = make(2), make(3)
    action = jnp.array([[-1.0, 0, 1], [1, 1, 1], [0, 0, -1], [-1, 1, 0]])
    batch = decqn.example_transition(SPEC)._replace(
        obs=obs, next_obs=obs[::-1], action=action, reward=jnp.array([1.0, 0, -1, 2])
    )
    discount, weight = jnp.array([0.9, 0, 0.5, 0.9]), jnp.array([1.0, 0.5, 0.25, 0.0])
    opt_state = decqn.optimizer(config).init(params)
    args = (params, target_params, opt_state, batch, discount, weight)
    return config, args, jax.jit(lambda *args: decqn.update(config, SPEC, *args))(*args)


def test_the_online_critic_chooses_and_the_mean_of_both_targets_values(updated):
    config, (params, target_params, _, batch, discount, weight), (_, _, td_error, metrics) = updated
    q, q_next, target_next = (
        np.asarray(decqn.q_values(config, SPEC, p, x))
        for p, x in ((params, batch.obs), (params, batch.next_obs), (target_params, batch.next_obs))
    )
    k, delta = np.asarray(batch.action).astype(int) + 1, np.zeros((2, 4))
    for i, b, j in itertools.product(range(2), range(4), range(3)):
        best = q_next[i, b, j].argmax()
        y = batch.reward[b] + discount[b] * (target_next[0, b, j, best] + target_next[1, b, j, best]) / 2
        delta[i, b] += (y - q[i, b, j, k[b, j]]) / 3
    np.testing.assert_allclose(td_error, np.abs(delta).mean(0), rtol=1e-5)
    huber = np.where(np.abs(delta) < 1, delta**2 / 2, np.abs(delta) - 0.5)
    np.testing.assert_allclose(metrics["loss"], (huber * np.asarray(weight)).mean(1).sum(), rtol=1e-5)


def test_a_sample_of_weight_zero_moves_nothing(updated):
    config, args, (params, *_) = updated
    changed = args[3]._replace(reward=args[3].reward.at[3].set(-50.0))
    other = jax.jit(lambda *args: decqn.update(config, SPEC, *args))(*args[:3], changed, *args[4:])[0]
    jax.tree.map(np.testing.assert_array_equal, params, other)


def test_the_target_is_copied_every_target_period_and_priorities_are_those_of_the_last_errors():
    config = tiny.config(decqn, target_period=3, train_period=4)
    env = tiny.source(decqn)
    state = jax.jit(lambda key: decqn.init(config, env, key))(jax.random.key(0))
    step = jax.jit(lambda state: decqn.step(config, env, state)[0])
    copied, first = [], state
    for _ in range(6):
        state = step(state)
        copied.append(tiny.same_bits(state.params, state.target_params))
    assert copied == [False, False, True, False, False, True]
    # All slots begin at 1. What was drawn has (|delta| + 1e-6)^alpha, another number.
    before, after = (np.unique(np.asarray(s.replay.priority)) for s in (first, state))
    assert set(before) == {0.0, 1.0} and len(after) > 10


def test_each_dimension_explores_by_itself_as_often_as_epsilon_says():
    config = Config(bins=5, hidden_size=8, epsilon=0.6)
    obs = jnp.zeros((20_000, 2))
    params = Params(decqn.ensemble.init(decqn.network(config, SPEC), jax.random.key(0), 2, obs[0]))
    best = decqn.act(config, SPEC, params, obs, jax.random.key(1))
    moved = np.asarray(decqn.explore(config, SPEC, params, obs, jax.random.key(2)) != best)
    # epsilon' = .2 / (.2 + .4) = 1/3, of which 4/5 are other bins; 5 standard deviations of 20,000 draws are 0.016.
    np.testing.assert_allclose(moved.mean(0), 4 / 15, atol=0.016)
    np.testing.assert_allclose((moved[:, 0] & moved[:, 1]).mean(), (4 / 15) ** 2, atol=0.01)


WRONG = [
    (dict(bins=1), "bins 1 must be at least 2"),
    (dict(prefill=12), "n_step 3 needs 4 steps of each of 4 environments before learning, not 3"),
    (dict(train_period=6), "train_period 6 and num_envs 4: one must be a multiple of the other"),
    (dict(prefill=10), "prefill 10 must be a multiple of 4"),
    (dict(capacity=8), "raise capacity to 16"),
]


@pytest.mark.parametrize("changes, says", WRONG, ids=lambda x: str(x)[:30])
def test_bad_input_is_named(changes, says):
    with pytest.raises(ValueError, match=says):
        decqn.check(tiny.config(decqn, **dict(n_step=3) | changes), tiny.source(decqn))
