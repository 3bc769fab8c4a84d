"""SAC with its three policies: gradient estimators against exact gradients, losses by hand, and the soft optimum."""

import dataclasses
import itertools
import json
import math
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from probes import table

from algos import bangbang_sac as sac
from envs.types import Transition, continuous_spec
from networks.policies import POLICIES, Bernoulli, Gaussian
from runner import run

GOLDEN = json.loads((Path(__file__).parent / "golden" / "bernoulli_policy.json").read_text())["estimators"]
CONTINUOUS = ["gaussian", "bernoulli", "bang_off_bang"]
close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # float32


# --- estimators of the gradient of E[Q] ---


def multilinear(a):
    return 1.5 * a[..., 0] - 0.5 * a[..., 1] + 0.8 * a[..., 0] * a[..., 1]


def quadratic(a):
    return -jnp.square(a[..., 0] - 0.3) - 2 * jnp.square(a[..., 1] + 0.1) + 0.8 * a[..., 0] * a[..., 1]


CASES = [pytest.param(multilinear, GOLDEN[0], id="multilinear"), pytest.param(quadratic, GOLDEN[1], id="quadratic")]
PAIRS = list(itertools.product((-1.0, 1.0), repeat=2))


class Drawn(Bernoulli):
    """A Bernoulli whose draw is known beforehand."""

    def __init__(self, draw):
        self.draw = draw

    def sample(self, outputs, key):
        return jnp.broadcast_to(jnp.array(self.draw), outputs.shape)


def gradient(policy, estimator, z, q_of, key=None, **options):
    """Of the estimate at one state, and the estimate."""
    estimate = lambda z: sac.expected_q(policy, estimator, z[None], q_of, key, **options)[0]
    value, grad = jax.value_and_grad(estimate)(z)
    return grad, value


@pytest.mark.parametrize("q_of, golden", CASES)
def test_enumeration_gives_the_exact_value_and_gradient(q_of, golden):
    grad, value = gradient(Bernoulli(), "enumerate", jnp.array(golden["z"]), q_of)
    close(value, golden["E_Q"])
    close(grad, golden["exact_grad_z (REINFORCE expectation)"])


@pytest.mark.parametrize("q_of, golden", CASES)
def test_straight_through_has_the_bias_of_the_golden_numbers(q_of, golden):
    z = jnp.array(golden["z"])
    probability = lambda a: float(jnp.exp(Bernoulli().log_prob(z, jnp.array(a))))
    expectation = sum(probability(a) * gradient(Drawn(a), "straight_through", z, q_of)[0] for a in PAIRS)
    close(expectation, golden["straight_through_expectation (a=2b-1, da/dz:=2p(1-p))"])
    exact = golden["exact_grad_z (REINFORCE expectation)"]
    if q_of is multilinear:  # unbiased
        close(expectation, exact)
    else:  # of the other sign, in both dimensions
        assert (np.sign(expectation) == -np.sign(exact)).all()


@pytest.mark.parametrize("name, num_draws", [("bernoulli", 2), ("bernoulli", 5), ("bang_off_bang", 2)])
@pytest.mark.parametrize("q_of", [multilinear, quadratic])
def test_reinforce_is_unbiased(name, num_draws, q_of):
    policy = POLICIES[name]
    z = jnp.array([0.4, -0.7] if name == "bernoulli" else [0.4, -0.7, 0.1, 1.0, 0.0, -0.5])
    exact, value = gradient(policy, "enumerate", z, q_of)
    one = lambda key: gradient(policy, "reinforce", z, q_of, key, num_draws=num_draws)
    grads, values = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 20_000))
    for samples, expected in ((grads, exact), (values, value)):
        error = samples.std(0) / math.sqrt(20_000)
        assert (jnp.abs(samples.mean(0) - expected) < 5 * error).all()  # five standard errors of the mean


def test_reinforce_by_hand():
    # Draws 1 and -1 with Q = 3 and 1: leave-one-out advantages 2 and -2. d log pi / dz = 1 - p and -p.
    # Their mean: (2 (1 - p) + 2 p) / 2 = 1. Two equal draws tell nothing.
    q_of = lambda a: 2 + a[..., 0]
    keys = jax.random.split(jax.random.key(1), 64)
    one = lambda key: gradient(Bernoulli(), "reinforce", jnp.array([0.3]), q_of, key)
    grads, values = jax.jit(jax.vmap(one))(keys)
    for value in (1, 2, 3):
        rows = np.asarray(values) == value
        assert rows.any()
        close(grads[rows], 1 if value == 2 else 0)


def test_enumeration_of_bang_off_bang_by_hand():
    # p = (1/2, 1/4, 1/4) of -1, 0, 1, Q = 0, 1, 3: E = 1/4 + 3/4 = 1; dE/dlogit_i = p_i (Q_i - E) = -1/2, 0, 1/2
    q_of = lambda a: 1.5 * a[..., 0] + 0.5 * jnp.square(a[..., 0]) + 1  # 0, 1, 3
    grad, value = gradient(POLICIES["bang_off_bang"], "enumerate", jnp.log(jnp.array([0.5, 0.25, 0.25])), q_of)
    close(value, 1), close(grad, [-0.5, 0, 0.5])


def test_support_holds_every_action_once():
    assert Bernoulli().support(jnp.zeros((5, 2))).tolist() == [[-1, -1], [-1, 1], [1, -1], [1, 1]]
    support = POLICIES["bang_off_bang"].support(jnp.zeros((5, 9)))
    assert support.shape == (27, 3) and len(np.unique(support, axis=0)) == 27


@pytest.mark.parametrize("name, action", [("bernoulli", {-1, 1}), ("bang_off_bang", {-1, 0, 1})])
def test_critic_sees_the_actions_themselves_under_straight_through(name, action):
    seen = []
    policy = POLICIES[name]
    z = jax.random.normal(jax.random.key(0), (64, policy.num_outputs(3)))
    sac.expected_q(policy, "straight_through", z, lambda a: seen.append(a) or a.sum(-1), jax.random.key(1))
    assert set(np.unique(seen[0]).tolist()) == action


def test_gaussian_gradient_goes_through_the_draw():
    # Q = 2 a, a = tanh(m + s e): dQ/dm = 2 (1 - a^2), dQ/dlog s = 2 (1 - a^2) s e
    z, key = jnp.array([0.3, -0.5]), jax.random.key(2)
    grad, value = gradient(Gaussian(), "pathwise", z, lambda a: 2 * a[..., 0], key)
    action = float(value) / 2
    noise = math.atanh(action) - 0.3  # s e
    close(grad, [2 * (1 - action**2), 2 * (1 - action**2) * noise], rtol=1e-5)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
@pytest.mark.parametrize("estimator", ["enumerate", "straight_through"])
def test_bandit_of_one_dimension_is_solved_by_the_sigmoid_of_the_difference_over_alpha(estimator, alpha):
    # Q(1) = 1, Q(-1) = 0: E[Q] + alpha H is largest at p = sigmoid((1 - 0) / alpha), that is, z = 1 / alpha.
    q_of = lambda a: (1 + a[..., 0]) / 2
    slope = lambda z: (
        gradient(Bernoulli(), estimator, z, q_of, jax.random.key(0))[0] + alpha * jax.grad(Bernoulli().entropy)(z)
    )
    close(slope(jnp.array([1 / alpha])), 0)
    assert slope(jnp.array([1 / alpha - 0.1])) > 0 > slope(jnp.array([1 / alpha + 0.1]))


# --- losses and one update ---


def test_losses_by_hand():
    # ((1 - 2)^2 + (3 - 4)^2) / 2 + ((2 - 2)^2 + (0 - 4)^2) / 2 = 1 + 8
    close(sac.value_loss(jnp.array([[1.0, 3.0], [2.0, 0.0]]), jnp.array([2.0, 4.0])), 9)
    # Entropies 1 and 2, target 2: the gradient is -1/2, and a step against it raises log alpha.
    close(jax.grad(sac.temperature_loss)(jnp.float32(0.3), jnp.array([1.0, 2.0]), 2.0), -0.5)


def spec_of(size):
    return continuous_spec(jax.ShapeDtypeStruct((3,), "float32"), size, 0)


def test_target_entropies_by_hand():
    target = lambda **changes: sac.target_entropy(sac.Config(**changes), spec_of(4))
    close(target(policy="gaussian"), -4)
    close(target(policy="bernoulli", target_entropy_share=0.25), math.log(2))
    close(target(policy="bang_off_bang", target_entropy_share=0.5), 2 * math.log(3))


@pytest.mark.parametrize("policy", CONTINUOUS)
def test_soft_value_takes_the_smaller_critic_and_adds_the_entropy(policy, monkeypatch):
    config = sac.Config(policy=policy, estimator="enumerate")
    # Critics 2 + 0 a and 1 + 0 a, whatever the state.
    monkeypatch.setattr(sac, "q_values", lambda *args: jnp.stack([2 + 0 * args[-1][..., 0], 1 + 0 * args[-1][..., 0]]))
    monkeypatch.setattr(sac, "policy_outputs", lambda *args: jnp.zeros((5, POLICIES[policy].num_outputs(1))))
    soft, entropy = sac.soft_value(config, spec_of(1), None, None, 0.5, jnp.zeros((5, 3)), jax.random.key(0))
    close(soft, 1 + 0.5 * entropy)
    if policy != "gaussian":
        close(entropy, math.log(sac.LEVELS[policy]))


UPDATE = tiny.config(sac, policy="bernoulli", estimator="enumerate", gamma=0.5, initial_temperature=1.0)
RATES = dict(policy_learning_rate=1e-3, value_learning_rate=1e-4, temperature_learning_rate=1e-2)


@cache
def first_state():
    """Its target networks give 0.25 more than the critics."""
    state = jax.jit(lambda key: sac.init(UPDATE, world(), key))(jax.random.key(0))
    last = lambda path, x: x + 0.25 * (jax.tree_util.keystr(path) == "['params']['Dense_1']['bias']")
    return state._replace(target_params=jax.tree_util.tree_map_with_path(last, state.target_params))


def ends(value_params):
    """Both critics at -1 and 1, `(2, 2)`; the policy's probability of 1; its entropy."""
    obs = jnp.ones((2, 1))
    q = sac.q_values(UPDATE, world().spec, value_params, obs, jnp.array([[-1.0], [1.0]]))
    p = float(jax.nn.sigmoid(sac.policy_outputs(UPDATE, world().spec, first_state().params.policy, obs)[0, 0]))
    return np.asarray(q, float), p, -p * math.log(p) - (1 - p) * math.log(1 - p)


@jax.jit
def update(config, state, batch):
    return sac.update(
        config, world().spec, state.params, state.target_params, state.opt_state, batch, jax.random.key(1)
    )


def updated(terminated, truncated=False, **changes):
    """The state before and all that one update gives, on one transition of reward 1, at gamma 1/2 and alpha 1."""
    flags = jnp.array([terminated]), jnp.array([truncated])
    batch = Transition(jnp.ones((1, 1)), jnp.ones((1, 1)), jnp.ones(1), jnp.ones((1, 1)), *flags)
    return first_state(), *update(dataclasses.replace(UPDATE, **changes), first_state(), batch)


def test_target_of_the_critics_is_read_from_the_target_networks():
    q, p, entropy = ends(first_state().params.value)
    low, high = q.min(0) + 0.25
    value = (1 - p) * low + p * high + entropy
    for flags, discount in (((False, False), 0.5), ((False, True), 0.5), ((True, False), 0), ((True, True), 0)):
        loss = updated(*flags)[-1]["value_loss"]
        close(loss, np.square(q[:, 1] - 1 - discount * value).sum(), rtol=1e-5)


def test_policy_is_improved_by_the_critics_after_their_step():
    _, params, _, _, metrics = updated(False, value_learning_rate=0.1)
    before, p, entropy = ends(first_state().params.value)
    after = ends(params.value)[0]
    soft = lambda q: (1 - p) * q.min(0)[0] + p * q.min(0)[1] + entropy
    assert abs(soft(after) - soft(before)) > 0.01
    close(metrics["policy_loss"], -soft(after), rtol=1e-5)


def test_temperature_goes_to_where_the_entropy_is_its_target():
    entropy = ends(first_state().params.value)[2]
    assert 0.5 * math.log(2) < entropy < math.log(2) - 1e-6
    for share, sign in ((0.5, -1), (1.0, 1)):  # more entropy than its target, and less
        state, params, *_ = updated(False, target_entropy_share=share, temperature_learning_rate=1e-2)
        close(params.log_temperature - state.params.log_temperature, sign * 1e-2, rtol=1e-2)  # Adam's first step


def test_targets_move_by_their_rate():
    state, params, target, *_ = updated(False, target_update_rate=0.25)
    moved = lambda new, old, out: close(out, 0.25 * new + 0.75 * old)
    jax.tree.map(moved, params.value, state.target_params, target)
    assert not tiny.same_bits(params.value, state.params.value)


def test_each_loss_has_its_own_learning_rate():
    # Adam's first step is the learning rate, whatever the gradient.
    state, params, *_ = updated(False, **RATES)
    steps = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params, state.params)
    np.testing.assert_allclose(max(jax.tree.leaves(steps.policy)), 1e-3, rtol=1e-3)
    np.testing.assert_allclose(max(jax.tree.leaves(steps.value)), 1e-4, rtol=1e-2)  # of numbers of order 1
    np.testing.assert_allclose(steps.log_temperature, 1e-2, rtol=1e-3)


# --- the whole agent ---


def world(**options):
    """One state that goes on for ever; the upper end pays 1, the lower -1, and in between it is linear."""
    return table([[1.0]], [1], [0], [[-1, 1]], 0, continuous=True, num_envs=4, **options)


@pytest.mark.parametrize("policy, possible", [("bernoulli", [-1, 1]), ("bang_off_bang", [-1, 0, 1])])
def test_agent_does_and_stores_what_the_policy_can_do_and_nothing_else(policy, possible):
    config, env = tiny.config(sac, policy=policy, capacity=80), world()
    state = jax.jit(lambda key: sac.init(config, env, key))(jax.random.key(0))
    values, counts = np.unique(state.replay.data.action, return_counts=True)
    assert values.tolist() == possible
    expected = 80 / len(possible)
    assert (np.abs(counts - expected) < 4 * math.sqrt(expected)).all()  # uniform, within four standard deviations
    obs = jnp.ones((200, 1))
    drawn = sac.explore(config, env.spec, state.params, obs, jax.random.key(1))
    assert np.unique(drawn).tolist() == possible
    assert len(np.unique(sac.act(config, env.spec, state.params, obs, jax.random.key(1)))) == 1


def test_gaussian_prefill_is_uniform_on_the_box():
    config, env = tiny.config(sac, policy="gaussian", prefill=4_000, capacity=4_000), world()
    action = jax.jit(lambda key: sac.init(config, env, key).replay.data.action)(jax.random.key(0))
    quarters = np.histogram(action, 4, (-1, 1))[0]
    assert (np.abs(quarters - 1000) < 4 * math.sqrt(750)).all()  # four standard deviations


@pytest.mark.parametrize("estimator", ["enumerate", pytest.param("reinforce", marks=pytest.mark.slow)])
def test_soft_values_of_one_state_are_the_soft_optimal_ones(estimator):
    # alpha = 1/2, gamma = 1/2: V = 1/2 log(e^{2 (1 + V/2)} + e^{2 (-1 + V/2)}) = V/2 + 1/2 log(2 cosh 2)
    # so V = log(2 cosh 2) = 2.0181, Q(+-1) = +-1 + V/2, and the logit is (Q(1) - Q(-1)) / alpha = 4.
    # Straight-through ends elsewhere: of the critic, only the values at the two ends are learned, not the slope there.
    settings = tiny.LEARNING | dict(gamma=0.5, initial_temperature=0.5, temperature_learning_rate=1e-9)
    config = tiny.config(sac, **settings, policy="bernoulli", estimator=estimator)
    env, configs = world(), run.broadcast(config, 1)
    carry = run.init(sac, configs, env, jax.random.split(jax.random.key(0), 1))
    carry = run.advance(sac, configs, env, carry, 2 * tiny.LEARNING_STEPS)
    params = tiny.run_of(carry.states.params, 0)
    q = sac.q_values(config, env.spec, params.value, jnp.ones((2, 1)), jnp.array([[-1.0], [1.0]]))
    value = math.log(2 * math.cosh(2))
    np.testing.assert_allclose(q, np.broadcast_to([-1 + value / 2, 1 + value / 2], (2, 2)), atol=0.05)
    logit = float(sac.policy_outputs(config, env.spec, params.policy, jnp.ones((1, 1)))[0, 0])
    np.testing.assert_allclose(1 / (1 + math.exp(-logit)), 1 / (1 + math.exp(-4)), atol=0.01)


@pytest.mark.parametrize(
    "changes, size, message",
    [
        (dict(estimator="enumerate"), 7, r"2\^7 actions: it takes at most 6 action dimensions, not 7; use .*reinforce"),
        (dict(policy="bang_off_bang", estimator="enumerate"), 8, r"3\^8 actions"),
        (dict(estimator="gumbel"), 1, "estimator 'gumbel' must be one of straight_through, reinforce, enumerate"),
        (dict(policy="categorical"), 1, "policy 'categorical' must be one of gaussian, bernoulli, bang_off_bang"),
        (dict(num_draws=1), 1, "num_draws 1 must be at least 2"),
        (dict(train_period=3), 1, "train_period 3 and num_envs 4"),
        (dict(prefill=81), 1, "prefill 81 must be a multiple of 4"),
    ],
)
def test_bad_settings_are_named(changes, size, message):
    env = dataclasses.replace(world(), spec=spec_of(size))
    defaults = dict(policy="bernoulli", estimator="reinforce", train_period=4)
    with pytest.raises(ValueError, match=message):
        sac.check(tiny.config(sac, **(defaults | changes)), env)


def test_gaussian_needs_no_estimator():
    env = dataclasses.replace(world(), spec=spec_of(20))
    sac.check(tiny.config(sac, policy="gaussian", estimator="enumerate", num_draws=1), env)
