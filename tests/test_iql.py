"""IQL: the authors' numbers, formulas by hand, what the expectile does on a small MDP, and the reward transforms."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from scipy.optimize import brentq
from scipy.stats import norm

from algos import iql
from envs.types import Transition, continuous_spec, discrete_spec
from replay import datasets
from runner import run

GOLDEN = Path(__file__).parent / "golden"
golden = lambda name: json.loads((GOLDEN / f"{name}.json").read_text())
array = partial(np.asarray, dtype=np.float32)
close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # float32
struct = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")

# --- the authors' code ---

LOSSES = golden("iql_losses")
TWO = golden("iql_two_updates")
SPEC = continuous_spec(struct(3), 2, 0)


@pytest.mark.parametrize("expectile", LOSSES["expectile_loss_elementwise"])
def test_expectile_loss_is_the_authors(expectile):
    ours = iql.expectile_loss(array(LOSSES["diff"]), float(expectile))
    close(ours, LOSSES["expectile_loss_elementwise"][expectile])


@pytest.mark.parametrize("temperature", LOSSES["awr_weight"])
def test_weights_are_the_authors(temperature):
    ours = iql.clone_weight(array(LOSSES["adv"]), float(temperature), 100.0)
    close(ours, LOSSES["awr_weight"][temperature], rtol=2e-6)  # exp in float32


def test_policys_learning_rate_is_the_authors():
    for step, rate in LOSSES["actor_lr_schedule_cosine_3e4_1M"]["values"].items():
        close(iql.policy_rate(iql.Config(), int(step)), -rate, atol=1e-9)  # theirs keeps the sign of the step
    close(iql.policy_rate(iql.Config(anneal_steps=0.0), 10**6), 3e-4)


def mlp(tree):
    return {"params": jax.tree.map(array, tree["MLP_0"])}


def policy_of(tree):
    layers = {**tree["MLP_0"], f"Dense_{len(tree['MLP_0'])}": tree["Dense_0"]}
    return {"params": jax.tree.map(array, {**layers, "log_std": tree["log_stds"]}, is_leaf=lambda x: type(x) is list)}


def leaves(tree):
    return jax.tree.map(array, tree, is_leaf=lambda x: type(x) is list)


def q_of(tree):
    stack = lambda a, b: np.stack([array(a), array(b)])
    both = jax.tree.map(stack, *(tree[f"Critic_{k}"]["MLP_0"] for k in (0, 1)), is_leaf=lambda x: type(x) is list)
    return {"params": both}


def v_of(tree):
    return {"params": leaves(tree["MLP_0"])}


def test_two_updates_give_the_authors_parameters():
    hp, before = TWO["config"], TWO["params_before"]
    config = iql.Config(
        learning_rate=hp["lr"],
        anneal_steps=float(hp["max_steps"]),
        expectile=hp["expectile"],
        inverse_temperature=hp["temperature"],
        gamma=hp["discount"],
        target_update_rate=hp["tau"],
        hidden=tuple(hp["hidden_dims"]),
    )
    b = {k: array(v) for k, v in TWO["batch"].items()}
    batch = Transition(
        b["observations"], b["actions"], b["rewards"], b["next_observations"], b["masks"] == 0, np.zeros(4, bool)
    )
    normalizer = iql.Normalizer(jnp.zeros(3), jnp.ones(3))
    params = iql.Params(policy_of(before["actor"]), v_of(before["value"]), q_of(before["critic"]), normalizer)
    target_q = q_of(before["target_critic"])
    opt_state = tuple(optax.adam(1.0).init(p) for p in (params.policy, params.v, params.q))
    step = jax.jit(lambda *args: iql.update(config, SPEC, *args, jax.random.key(0)))
    for i, (info, after) in enumerate(zip(TWO["info"], TWO["params_after"], strict=True)):
        params, target_q, opt_state, metrics = step(params, target_q, opt_state, batch, jnp.int32(i))
        for name, ours in (("actor_loss", "policy_loss"), ("value_loss", "v_loss"), ("critic_loss", "q_loss")):
            np.testing.assert_allclose(metrics[ours], info[name], rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(metrics["advantage"], np.mean(info["adv"]), atol=2e-6)
        expected = (
            policy_of(after["actor"]),
            v_of(after["value"]),
            q_of(after["critic"]),
            q_of(after["target_critic"]),
        )
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=0, atol=2e-6),
            (params.policy, params.v, params.q, target_q),
            expected,
        )
    action = iql.act(config, SPEC, params, batch.obs, jax.random.key(0))
    np.testing.assert_allclose(action, TWO["deterministic_action_after_2"], atol=2e-6)


# --- by hand ---


def test_log_prob_is_that_of_a_plain_normal_and_finite_at_the_bounds():
    outputs = jnp.array([0.5, -1.0, math.log(0.5), 0.0])  # means 0.5 and -1, standard deviations 0.5 and 1
    expected = norm.logpdf(1, 0.5, 0.5) + norm.logpdf(-1, -1, 1)
    close(iql.log_prob(SPEC, outputs, jnp.array([1.0, -1.0])), expected)


def test_clip_of_weights_is_from_above_alone():
    # exp(3 * 2) = 403 is cut to 100; exp(3 * -2) stays
    close(iql.clone_weight(jnp.array([2.0, -2.0]), 3.0, 100.0), [100, math.exp(-6)])


def test_value_of_a_fixed_sample_converges_to_its_expectile():
    sample = jnp.array([0.0, 1.0, 2.0, 10.0])
    slope = jax.grad(lambda v, tau: iql.expectile_loss(sample - v, tau).mean())
    for tau, by_hand in ((0.5, 3.25), (0.9, None)):
        v = brentq(lambda v, tau=tau: float(slope(v, tau)), 0, 10)
        # An expectile balances: tau sum (x - v)+ = (1 - tau) sum (v - x)+
        above, below = np.clip(sample - v, 0, None).sum(), np.clip(v - sample, 0, None).sum()
        close(tau * above, (1 - tau) * below, rtol=1e-4)
        assert by_hand is None or abs(v - by_hand) < 1e-4  # at 1/2 the mean


def walk(rewards, ends):
    """A dataset of these rewards whose episodes end where `ends` says."""
    n = len(rewards)
    obs = jnp.arange(n, dtype=jnp.float32)[:, None]
    ends = np.asarray(ends, bool)
    transitions = Transition(obs, jnp.zeros((n, 1)), array(rewards), obs + 1, jnp.asarray(ends), jnp.zeros(n, bool))
    return datasets.Dataset(transitions, jnp.asarray(datasets.last_of(ends)), continuous_spec(struct(1), 1, 0))


def test_rewards_are_scaled_by_the_authors_return_range():
    toy = LOSSES["reward_norm_toy"]
    dataset = walk(toy["rewards"], toy["dones_float"])
    total, ends = iql.returns(dataset)
    close(total[ends], toy["returns"])
    scale, shift = iql.reward_transform("return_range", dataset)
    close(scale * array(toy["rewards"]) + shift, toy["normalised"])  # 1000 / (10 - 4)
    assert iql.reward_transform("minus_one", dataset) == (1, -1) and iql.reward_transform("raw", dataset) == (1, 0)


def test_equal_returns_have_no_range():
    with pytest.raises(ValueError, match="every episode of the data returns 2; use raw or minus_one"):
        iql.check(iql.Config(rewards="return_range"), walk([1, 1, 2], [0, 1, 1]))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(rewards="scaled"), "rewards 'scaled' must be one of raw, return_range, minus_one"),
        (dict(dropout=1.0), "dropout 1.0 must be less than 1"),
        (dict(expectile=1.0), "expectile 1.0 must be between 0 and 1, both excluded"),
        (dict(expectile=0.0), "expectile 0.0 must be between 0 and 1"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        iql.check(iql.Config(**changes), walk([1, 2], [0, 1]))


def test_dropout_is_of_the_policys_training_alone():
    config = iql.Config(hidden=(64, 64), dropout=0.5)
    policy = iql.policy_network(config, SPEC)
    x = jnp.ones((1, 3))
    params = policy.init(jax.random.key(0), x)
    train = lambda seed: policy.apply(params, x, train=True, rngs=dict(dropout=jax.random.key(seed)))
    assert not tiny.same_bits(train(0), train(1))
    full = iql.Params(params, {}, {}, iql.Normalizer(jnp.zeros(3), jnp.ones(3)))
    act = lambda seed: iql.act(config, SPEC, full, x, jax.random.key(seed))
    assert tiny.same_bits(act(0), act(1))
    assert not tiny.same_bits(*(iql.explore(config, SPEC, full, x, jax.random.key(seed)) for seed in (0, 1)))


def test_observation_and_goal_are_one_vector():
    spec = continuous_spec((struct(2), struct(1, 2)), 1, 0)
    obs = (jnp.ones((5, 2)), jnp.full((5, 1, 2), 2.0))
    assert iql.flat(spec.obs, obs).tolist() == [[1, 1, 2, 2]] * 5


# --- an oracle ---


def stitching():
    """Two behaviours, each right once, of an MDP of four states in a row; reward 1 at the end of the row.

    From state s action 1 goes to s + 1 and action 0 to s - 1 (from 0 to itself); entering state 3 pays 1 and ends.
    The behaviour goes either way with probability 1/2. gamma = 1/2. Optimal: V = 1/4, 1/2, 1 of states 0, 1, 2.
    The behaviour's own: V_2 = 1/2 (1 + V_1/2), V_1 = 1/2 (V_2/2 + V_0/2), V_0 = 1/2 (V_1/2 + V_0/2)
      so V_0 = V_1/3, V_1 = V_2/4 + V_1/12 = 3 V_2/11, V_2 = 1/2 + 3 V_2/44 = 22/41: V = 2/41, 6/41, 22/41.
    """
    state, action = np.meshgrid(np.arange(3), np.arange(2), indexing="ij")
    state, action = np.tile(state.ravel(), 20), np.tile(action.ravel(), 20)
    successor = np.where(action == 1, state + 1, np.maximum(state - 1, 0))
    one_hot = np.eye(4, dtype=np.float32)
    goal = successor == 3
    transitions = Transition(
        one_hot[state], action.astype(np.int32), goal.astype(np.float32), one_hot[successor], goal, ~goal
    )
    spec = discrete_spec(struct(4), 2, 0)
    return datasets.Dataset(jax.tree.map(jnp.asarray, transitions), jnp.arange(120), spec)


@pytest.mark.parametrize("expectile, values", [(0.5, [2 / 41, 6 / 41, 22 / 41]), (0.99, [0.25, 0.5, 1])])
def test_expectile_of_a_half_values_the_behaviour_and_one_near_one_stitches_the_best(expectile, values):
    config = iql.Config(
        learning_rate=1e-3,
        anneal_steps=0.0,
        expectile=expectile,
        gamma=0.5,
        inverse_temperature=10.0,
        target_update_rate=0.02,
        hidden=(32,),
        batch_size=64,
    )
    dataset, configs = stitching(), run.broadcast(config, 1)
    carry = run.init(iql, configs, dataset, jax.random.split(jax.random.key(0), 1))
    carry = run.advance(iql, configs, dataset, carry, 6_000)
    params = tiny.run_of(carry.states.params, 0)
    obs = jnp.eye(4)[:3]
    v = iql.v_values(config, params.v, iql.features(dataset.spec, params.normalizer, obs))
    # The smaller of two critics is a little low, and Adam keeps moving; the two answers differ by 0.2 to 0.46.
    np.testing.assert_allclose(v, values, atol=0.05)
    assert iql.act(config, dataset.spec, params, obs, jax.random.key(0)).tolist() == [1, 1, 1]


def test_update_uses_the_new_v_for_policy_and_critics():
    # A learning rate that moves V far: the policy's weight and the critics' target follow the V after its step.
    config = iql.Config(learning_rate=1.0, hidden=(8,), batch_size=4, anneal_steps=0.0)
    dataset = tiny.dataset()
    state = jax.jit(iql.init)(config, dataset, jax.random.key(0))
    batch = datasets.sample(dataset, jax.random.key(1), 4)
    args = state.params, state.target_q, state.opt_state, batch, state.gradient_steps, jax.random.key(2)
    params, target_q, _, metrics = jax.jit(lambda *args: iql.update(config, dataset.spec, *args))(*args)
    x = iql.features(dataset.spec, params.normalizer, batch.obs)
    target = iql.q_values(config, dataset.spec, state.target_q, x, batch.action).min(0)
    new, old = (target - iql.v_values(config, v, x) for v in (params.v, state.params.v))
    close(metrics["advantage"], new.mean(), rtol=1e-5, atol=1e-5)
    assert abs(float(metrics["advantage"] - old.mean())) > 1e-2
    moved = lambda new, old, out: close(out, 0.005 * new + 0.995 * old)
    jax.tree.map(moved, params.q, state.target_q, target_q)
    assert dataclasses.asdict(config)["target_update_rate"] == 5e-3


def one_update(config, dataset=None, seed=1, **changes):
    """A state of `init` with some fields changed, the state after one step on a batch, and the metrics."""
    dataset = tiny.dataset() if dataset is None else dataset
    state = jax.jit(iql.init)(config, dataset, jax.random.key(0))._replace(**changes)
    batch = datasets.sample(dataset, jax.random.key(seed), config.batch_size)
    learn = jax.jit(lambda *args: iql.learn(config, dataset.spec, *args))
    return state, batch, *learn(state, batch, jax.random.key(2))


def test_init_is_orthogonal_with_two_critics_of_their_own_and_targets_that_are_copies():
    config = iql.Config(hidden=(8,))
    state = jax.jit(iql.init)(config, tiny.dataset(), jax.random.key(0))
    for tree in (state.params.policy, state.params.v, tiny.run_of(state.params.q, 0), tiny.run_of(state.params.q, 1)):
        for i in (0, 1):
            w = np.asarray(tree["params"][f"Dense_{i}"]["kernel"])
            w = w if w.shape[0] <= w.shape[1] else w.T
            close(w @ w.T, 2 * np.eye(len(w)), atol=1e-5)  # gain sqrt 2, the last layer too
            assert not np.asarray(tree["params"][f"Dense_{i}"]["bias"]).any()
    q = state.params.q["params"]["Dense_0"]["kernel"]
    assert (q[0] != q[1]).any() and tiny.same_bits(state.target_q, state.params.q)
    assert not np.asarray(state.params.policy["params"]["log_std"]).any()  # standard deviation 1


def test_normalised_observations_have_mean_0_and_deviation_1():
    dataset = tiny.dataset()
    raw = np.asarray(dataset.transitions.obs)
    for on in (False, True):
        config = iql.Config(hidden=(8,), normalize_obs=on)
        normalizer = jax.jit(iql.init)(config, dataset, jax.random.key(0)).params.normalizer
        x = np.asarray(iql.features(dataset.spec, normalizer, dataset.transitions.obs))
        # 1e-3 is added to the deviation, which is 1 to 3 here
        np.testing.assert_allclose(x, (raw - raw.mean(0)) / raw.std(0) if on else raw, rtol=2e-3, atol=2e-3)


def test_weights_of_an_update_are_cut_and_dropout_reaches_its_loss():
    config = iql.Config(hidden=(8,), batch_size=4, inverse_temperature=1e-6, max_weight=0.5)
    plain = one_update(config)[3]
    assert plain["weight"] == 0.5  # exp of nearly 0 is 1
    dropped = one_update(dataclasses.replace(config, dropout=0.5))[3]
    assert dropped["policy_loss"] != plain["policy_loss"] and dropped["v_loss"] == plain["v_loss"]


def test_log_standard_deviation_is_between_minus_5_and_2_and_draws_have_it():
    config = iql.Config(hidden=(4,))
    policy = iql.policy_network(config, SPEC)
    params = jax.tree.map(jnp.zeros_like, policy.init(jax.random.key(0), jnp.ones(3)))  # means are 0
    for given, log_std in ((-9.0, -5.0), (-3.0, -3.0), (9.0, 2.0)):
        params["params"]["log_std"] = jnp.full(2, given)
        assert policy.apply(params, jnp.ones(3)).tolist() == [0, 0, log_std, log_std]
    params["params"]["log_std"] = jnp.full(2, -3.0)
    full = iql.Params(params, {}, {}, iql.Normalizer(jnp.zeros(3), jnp.ones(3)))
    drawn = iql.explore(config, SPEC, full, jnp.ones((2_000, 3)), jax.random.key(0))
    assert abs(float(drawn.std()) / math.exp(-3) - 1) < 0.1  # 4,000 draws: 1.1%


def test_discrete_actions_are_drawn_by_the_policy_and_taken_at_its_mode():
    spec = discrete_spec(struct(3), 2, 0)
    config = iql.Config(hidden=(4,))
    params = jax.tree.map(jnp.zeros_like, iql.policy_network(config, spec).init(jax.random.key(0), jnp.ones(3)))
    params["params"]["Dense_1"]["bias"] = jnp.log(jnp.array([0.25, 0.75]))
    full = iql.Params(params, {}, {}, iql.Normalizer(jnp.zeros(3), jnp.ones(3)))
    obs = jnp.ones((1_000, 3))
    assert (iql.act(config, spec, full, obs, jax.random.key(0)) == 1).all()
    assert abs(float(iql.explore(config, spec, full, obs, jax.random.key(0)).mean()) - 0.75) < 0.07  # 5 errors of 0.014
