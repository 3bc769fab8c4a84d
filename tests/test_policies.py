"""Policies: exact numbers for the discrete ones, a density that integrates to one for the Gaussian, one interface."""

import json
import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate
from scipy.stats import chisquare

from networks.policies import POLICIES, Bernoulli, Categorical, Gaussian, log_slope

GOLDEN = json.loads((Path(__file__).parent / "golden" / "bernoulli_policy.json").read_text())
array = partial(np.asarray, dtype=np.float32)
close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # float32 against float64
each = pytest.mark.parametrize("name", POLICIES)
SIZE = 2


def outputs(name, seed=0):
    return jnp.float32(np.random.default_rng(seed).normal(size=POLICIES[name].num_outputs(SIZE)))


def test_bernoulli_is_the_golden_one():
    policy, z, a = Bernoulli(), array(GOLDEN["z"]), array(GOLDEN["a"])
    close(policy.log_prob(z, a), GOLDEN["log_prob"])
    close(policy.entropy(z), GOLDEN["entropy"])
    close(policy.mean(z), GOLDEN["mean_action_tanh_half_z"])
    close(policy.mode(z), GOLDEN["mode"])
    close(policy.kl(array(GOLDEN["z_old"]), z), GOLDEN["KL_old_new"])
    close(jnp.exp(policy.log_prob(z, a) - policy.log_prob(array(GOLDEN["z_old"]), a)), GOLDEN["ppo_ratio_for_a"])
    close(jax.grad(policy.log_prob)(z, a), GOLDEN["score_dlogpi_dz"])
    close(policy.entropy(jnp.zeros(3)), GOLDEN["max_entropy"])  # 3 ln 2, the largest


def test_bang_off_bang_is_the_golden_one():
    policy, g = POLICIES["bang_off_bang"], GOLDEN["bang_off_bang"]
    z = array(g["logits"]).reshape(-1)
    close(policy.log_prob(z, jnp.array([1.0, 0.0])), g["log_prob_of_[+1,0]"])
    close(policy.entropy(z), g["entropy"])
    close(policy.mean(z), g["mean_action"])
    close(policy.entropy(jnp.zeros(6)), g["max_entropy_2dims"])  # 2 ln 3
    assert policy.mode(z).tolist() == [1, -1]  # the largest of [.1, -.3, .6] and of [1, 0, -1]


def test_categorical_by_hand():
    policy, z = Categorical(), jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    close(policy.log_prob(z, jnp.array([1, 1])), np.log([0.25, 0.8]))
    # 1/2 ln 2 + 2 * 1/4 ln 4 = 1.5 ln 2
    close(policy.entropy(z)[0], 1.5 * math.log(2))
    # KL(first || second) = 1/2 ln 5 + 1/4 ln(.25 / .8) + 1/4 ln 2.5
    close(policy.kl(z[0], z[1]), 0.5 * math.log(5) + 0.25 * math.log(0.3125) + 0.25 * math.log(2.5))
    assert policy.mode(z).tolist() == [0, 1]


def test_gaussian_density_of_the_action_integrates_to_one():
    policy, z = Gaussian(), jnp.array([0.4, -0.3])  # mean 0.4, std exp(-0.3)
    density = lambda u: math.exp(policy.log_prob(z, jnp.array([u]))) * (1 - math.tanh(u) ** 2)  # da = (1 - a^2) du
    # A quadrature over the draw, the action's density times da / du. 8 standard deviations hold all of it.
    total = integrate.fixed_quad(np.vectorize(density), -6, 7, n=80)[0]
    np.testing.assert_allclose(total, 1, atol=1e-4)


def test_gaussian_log_prob_by_hand():
    # u = 1, mean 0, std 1: -1/2 - ln(2 pi) / 2 - ln(1 - tanh(1)^2), and 1 - tanh(1)^2 = 0.41997434
    expected = -0.5 - 0.9189385332 - math.log(0.4199743416)
    close(Gaussian().log_prob(jnp.zeros(2), jnp.ones(1)), expected)
    # Where tanh(u) rounds to 1: log(1 - tanh(u)^2) = 2 ln 2 - 2 u
    close(log_slope(jnp.float32(40)), 2 * math.log(2) - 80)


def test_gaussian_kl_by_hand():
    # N(1, 1) to N(0, 2^2): ln 2 + (1 + 1) / 8 - 1/2
    close(Gaussian().kl(jnp.array([1.0, 0.0]), jnp.array([0.0, math.log(2)])), math.log(2) + 0.25 - 0.5)


@each
def test_kl_and_entropy_are_means_over_draws(name):
    policy, p, q = POLICIES[name], outputs(name), outputs(name, seed=1)
    keys = jax.random.split(jax.random.key(0), 20_000)
    draws = jax.vmap(lambda key: policy.sample(p, key))(keys)
    log_p, log_q = (jax.vmap(lambda draw, z=z: policy.log_prob(z, draw))(draws) for z in (p, q))
    entropy = jax.vmap(lambda key: policy.entropy(p, key))(keys)
    # Five standard errors of the mean over draws.
    for ours, samples in ((policy.kl(p, q), log_p - log_q), (entropy.mean(), -log_p)):
        assert abs(float(ours - samples.mean())) < 5 * float(samples.std()) / math.sqrt(20_000)
    close(policy.kl(p, p), 0)


@pytest.mark.parametrize("name", ["bernoulli", "bang_off_bang", "categorical"])
def test_draws_have_the_probabilities_that_log_prob_gives(name):
    policy, z = POLICIES[name], outputs(name)
    draws = jax.vmap(lambda key: policy.sample(z, key))(jax.random.split(jax.random.key(0), 20_000))
    values, counts = np.unique(np.asarray(draws).reshape(20_000, -1), axis=0, return_counts=True)
    values = jnp.asarray(values[:, 0] if name == "categorical" else values)
    expected = np.exp(jax.vmap(lambda draw: policy.log_prob(z, draw))(values)).astype(float)
    np.testing.assert_allclose(expected.sum(), 1, atol=1e-5)  # every action was drawn
    assert chisquare(counts, 20_000 * expected / expected.sum()).pvalue > 0.01
    mode = np.asarray(policy.mode(z))
    assert (np.asarray(values)[expected.argmax()] == mode).all()


@each
def test_leading_axes_pass_through(name):
    policy = POLICIES[name]
    z = jnp.stack([outputs(name, seed) for seed in range(6)]).reshape(2, 3, -1)
    draw = policy.sample(z, jax.random.key(0))
    action = policy.action(draw)
    assert action.shape == ((2, 3) if name == "categorical" else (2, 3, SIZE))
    assert (np.abs(action) <= 1).all()
    one = lambda x: x[1, 2]
    for of in (policy.log_prob(z, draw), policy.entropy(z, jax.random.key(0)), policy.kl(z, z[::-1])):
        assert of.shape == (2, 3)
    close(one(policy.log_prob(z, draw)), policy.log_prob(one(z), one(draw)))
    close(one(policy.kl(z, z[::-1])), policy.kl(one(z), z[0, 2]))
    close(one(policy.mode(z)), policy.mode(one(z)))
