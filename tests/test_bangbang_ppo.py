"""PPO with its three policies: advantages, loss and normaliser by hand, and what makes one policy another."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from probes import table
from scipy.stats import chisquare

from algos import bangbang_ppo as ppo
from networks.policies import POLICIES
from runner import run

CONTINUOUS = ["gaussian", "bernoulli", "bang_off_bang"]
close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # float32


def estimates(terminated, truncated):
    column = lambda *x: jnp.array(x, jnp.float32)[:, None]
    flags = (jnp.array(x, bool)[:, None] for x in (terminated, truncated))
    out = ppo.advantages(column(1, 1, 1), column(0.5, 0.5, 0.5), column(0.5, 0.5, 2), *flags, 0.5, 0.5)
    return out[:, 0].tolist()


def test_advantages_by_hand():
    # delta = [1 + .25 - .5, 1 + .25 - .5, 1 + 1 - .5] = [.75, .75, 1.5]; gamma lambda = .25
    # A_2 = 1.5, A_1 = .75 + .25 * 1.5 = 1.125, A_0 = .75 + .25 * 1.125 = 1.03125
    assert estimates([0, 0, 0], [0, 0, 0]) == [1.03125, 1.125, 1.5]
    # The second step terminates: delta_1 = 1 - .5, nothing is carried over it; A_0 = .75 + .25 * .5
    assert estimates([0, 1, 0], [0, 0, 0]) == [0.875, 0.5, 1.5]
    # It is cut by a time limit: delta_1 keeps its bootstrap; A_0 = .75 + .25 * .75
    assert estimates([0, 0, 0], [0, 1, 0]) == [0.9375, 0.75, 1.5]
    # Both: the MDP ended.
    assert estimates([0, 1, 0], [0, 1, 0]) == [0.875, 0.5, 1.5]


def test_clipped_loss_by_hand():
    ratio, advantage = jnp.array([2.0, 0.5, 2.0, 0.5]), jnp.array([1.0, 1.0, -1.0, -1.0])
    loss = lambda log_ratio: ppo.clipped_loss(log_ratio, jnp.zeros(4), advantage, 0.2)
    # min(2, 1.2), min(.5, .8), min(-2, -1.2), min(-.5, -.8) = 1.2, .5, -2, -.8
    close(loss(jnp.log(ratio)), -(1.2 + 0.5 - 2 - 0.8) / 4)
    # No gradient where clipping has made it worse: the first and the last.
    assert (jax.grad(loss)(jnp.log(ratio)) != 0).tolist() == [False, True, True, False]


def test_normaliser_is_the_mean_and_variance_of_all_that_was_seen():
    seen = np.random.default_rng(0).normal(5, 3, size=(60, 2)).astype(np.float32)
    normalizer = ppo.Normalizer(jnp.zeros(2), jnp.ones(2), jnp.float32(0))
    for part in (seen[:10], seen[10:11], seen[11:]):
        normalizer = ppo.update_normalizer(normalizer, part)
    np.testing.assert_allclose(normalizer.mean, seen.mean(0), rtol=1e-5)  # float32 sums of 60 terms
    np.testing.assert_allclose(normalizer.var, seen.var(0), rtol=1e-5)
    assert normalizer.count == 60
    obs = jnp.array([[5.0, 5.0], [1e6, -1e6]])
    out = ppo.normalize(ppo.Config(normalize_obs=True), normalizer, obs)
    close(out[0], (5 - seen.mean(0)) / seen.std(0), rtol=1e-4)
    assert out[1].tolist() == [10, -10]
    assert ppo.normalize(ppo.Config(normalize_obs=False), normalizer, obs) is obs
    assert ppo.normalize(ppo.Config(normalize_obs=True), normalizer, obs > 0).dtype == bool  # MinAtar's pixels


def world(continuous=True):
    """One state that goes on for ever; the second action, or the upper end, pays 1, the other -1."""
    return table([[1.0]], [1], [0], [[-1, 1]], 0, continuous=continuous, num_envs=4)


@pytest.mark.parametrize("policy", CONTINUOUS)
def test_actions_are_where_the_policy_puts_them(policy):
    config = tiny.config(ppo, policy=policy)
    env = world()
    state, metrics = jax.jit(lambda key: ppo.step(config, env, ppo.init(config, env, key)))(jax.random.key(0))
    at_bounds = float(metrics["at_bounds"])
    if policy == "gaussian":
        assert 0 < at_bounds < 0.2  # |N(0, 1)| > artanh(0.98) = 2.3 has probability 0.02; 32 draws
    else:
        assert at_bounds == 1.0 if policy == "bernoulli" else 0.4 < at_bounds < 0.95  # two of three
    assert state.env_steps == 32 and state.gradient_steps == 4
    policy_params = jax.tree.leaves(state.params.policy)
    outputs = dict(gaussian=2, bernoulli=1, bang_off_bang=3)[policy]
    assert POLICIES[policy].num_outputs(1) == outputs
    assert any("log_std" in str(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params.policy)) == (
        policy == "gaussian"
    )
    assert all(np.isfinite(x).all() for x in policy_params)


def test_first_minibatch_has_a_ratio_of_one_and_a_rate_annealed_to_zero_moves_nothing():
    config = tiny.config(ppo, num_epochs=1, num_minibatches=1, anneal_steps=32.0)
    env = world()
    step = jax.jit(lambda state: ppo.step(config, env, state))
    state = jax.jit(lambda key: ppo.init(config, env, key))(jax.random.key(0))
    after, metrics = step(state)
    close(metrics["kl"], 0), close(metrics["clip_fraction"], 0)
    assert not tiny.same_bits(after.params.policy, state.params.policy)
    last, _ = step(after)  # env_steps is 32 now: the learning rate is 0
    assert tiny.same_bits(last.params[:2], after.params[:2])


def test_clipped_value_loss_by_hand():
    value, old = jnp.array([1.0, 1.0, 3.0]), jnp.array([0.0, 2.0, 3.1])
    loss = lambda value: ppo.clipped_value_loss(value, old, jnp.array([2.0, 0.0, 3.0]), 0.5)
    # Clipped values 0.5, 1.5, 3: squares (1, 2.25), (1, 2.25), (0, 0); the larger of each
    close(loss(value), 0.5 * (2.25 + 2.25 + 0) / 3)
    # Towards the target by more than 0.5: no gradient. Away from it, as with target -1 for the first, there is.
    assert jax.grad(loss)(value).tolist() == [0, 0, 0]
    away = jax.grad(lambda v: ppo.clipped_value_loss(v, old[:1], jnp.array([-1.0]), 0.5))(value[:1])
    close(away, [2.0])  # V - target = 2


def test_gradient_norm_of_policy_and_value_together_is_clipped():
    config = dataclasses.replace(ppo.Config(), max_grad_norm=1.0)
    optimizer = ppo.optimizer(config, 0)
    grads = (jnp.array([3.0]), jnp.array([4.0]))
    moments = optax.tree.get(optimizer.update(grads, optimizer.init(grads))[1], "mu")
    close(jnp.concatenate(moments), [0.06, 0.08])  # a tenth of (3, 4) / 5


@pytest.mark.parametrize("num", [1, 2, 5, 512, 6000])
def test_shuffled_is_a_permutation(num):
    orders = jax.jit(jax.vmap(lambda key: ppo.shuffled(key, num)))(jax.random.split(jax.random.key(0), 20))
    assert (np.sort(orders) == np.arange(num)).all()


def test_every_order_is_as_likely_as_another():
    orders = jax.jit(jax.vmap(lambda key: ppo.shuffled(key, 3)))(jax.random.split(jax.random.key(0), 6_000))
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 6 and chisquare(counts).pvalue > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("policy", CONTINUOUS)
def test_each_policy_learns_the_better_end(policy):
    config = tiny.config(ppo, **tiny.LEARNING, policy=policy, gamma=0.5)
    env, configs = world(), run.broadcast(config, 1)
    carry = run.init(ppo, configs, env, jax.random.split(jax.random.key(0), 1))
    carry = run.advance(ppo, configs, env, carry, tiny.LEARNING_STEPS)
    params = tiny.run_of(carry.states.params, 0)
    action = ppo.act(config, env.spec, params, jnp.ones((1, 1)), jax.random.key(0))
    assert float(action[0, 0]) > 0.9
    # Worth 1 / (1 - 1/2) of always taking it; a Gaussian stays a little inside.
    value = ppo.values(config, env.spec, params, jnp.ones((1, 1)))
    np.testing.assert_allclose(value, 2, atol=0.2)


@pytest.mark.parametrize(
    "changes, continuous, message",
    [
        (
            dict(num_minibatches=5),
            True,
            "num_minibatches 5 must divide the rollout of 32 .*num_envs 4 x rollout_length 8",
        ),
        (dict(policy="beta"), True, "policy 'beta' must be one of gaussian, bernoulli, bang_off_bang"),
        (dict(policy="categorical"), True, "policy 'categorical' must be one of"),
        (dict(policy="beta"), False, "policy 'beta' must be one of"),
    ],
)
def test_bad_settings_are_named(changes, continuous, message):
    with pytest.raises(ValueError, match=message):
        ppo.check(tiny.config(ppo, **changes), world(continuous))


def test_discrete_actions_take_a_categorical_whatever_policy_says():
    env = world(continuous=False)
    config = tiny.config(ppo)
    ppo.check(config, env)
    assert ppo.policy_of(config, env.spec) is POLICIES["categorical"]
