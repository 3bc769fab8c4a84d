"""Layer normalisation, ELU and the kernel's product: by-hand numbers, the plain formulas, and no loss of precision."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from networks import dense
from networks.norm import LayerNorm, elu, layer_norm

flax_norm = nn.LayerNorm(use_scale=False, use_bias=False, epsilon=1e-5)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def stack(norm, activation, dot_general, params, x, steps=2):
    """One Dense, norm and activation used `steps` times, as in backpropagation through time; then a weighted sum."""
    for _ in range(steps):
        x = activation(norm(nn.Dense(x.shape[-1], dot_general=dot_general).apply(params, x)))
    weights = jnp.arange(1.0, x.size + 1).reshape(x.shape) / x.size
    return jnp.sum(weights * x)


def ours(params, x):
    return stack(layer_norm, elu, dense.dot_general, params, x)


def plain(params, x):
    return stack(lambda x: flax_norm.apply({}, x), nn.elu, None, params, x)


def test_layer_norm_by_hand():
    # mean 4, deviations [-3, -1, 1, 3], variance (9 + 1 + 1 + 9) / 4 = 5, epsilon 4: divided by sqrt(9) = 3
    x = jnp.array([[1.0, 3.0, 5.0, 7.0]])
    np.testing.assert_allclose(layer_norm(x, 4.0), [[-1, -1 / 3, 1 / 3, 1]], rtol=1e-6)  # one rounding of float32


def test_layer_norms_gradient_by_hand():
    # x = [1, 3], epsilon 3: y = [-1, 1] / sqrt(1 + 3) = [-1/2, 1/2]. For g = [1, 0]: mean g = 1/2, mean g y = -1/4,
    # (g - 1/2 + y/4) / 2 = ([1, 0] - 1/2 + [-1/8, 1/8]) / 2 = [3/16, -3/16]
    gradient = jax.jit(jax.grad(lambda x: layer_norm(x, 3.0)[0]))(jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(gradient, [3 / 16, -3 / 16], rtol=1e-6)


def test_elu_by_hand():
    # exp(-ln 2) - 1 = -1/2 with slope 1/2; slope 1 at 0, where a tie would halve it; no overflow at 200
    x = jnp.array([-100.0, -np.log(2), 0.0, 3.0, 200.0])
    value, slope = jax.jit(jax.vmap(jax.value_and_grad(elu)))(x)
    np.testing.assert_allclose(value, [-1, -0.5, 0, 3, 200], rtol=1e-6)
    np.testing.assert_allclose(slope, [0, 0.5, 1, 1, 1], rtol=1e-6)


def test_a_constant_row_gives_zeros_and_no_gradient():
    # variance 0: y = 0 and elu's slope 1, so g = 1 and g - mean g = 0, however large 1 / sqrt(1e-5)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: elu(layer_norm(x)).sum()))(jnp.full((3, 4), 7.0))
    assert value == 0
    np.testing.assert_array_equal(gradient, jnp.zeros((3, 4)))


def test_layer_norm_keeps_its_precision_at_large_offsets():
    # float32 at 1e3 is spaced 6e-5, so the mean is known to about 1e-4; the plain mean of squares is wrong by 0.1.
    x = 1e3 + normal(0, 6, 512)
    exact = np.asarray(x, np.float64)
    exact -= exact.mean(-1, keepdims=True)
    exact /= np.sqrt(np.square(exact).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(layer_norm(x), exact, atol=3e-4)


def test_two_networks_used_twice_have_flaxs_values_and_gradients():
    x = normal(1, 3, 4, 8)  # two leading axes; the two networks, one vmap, share it
    params = {"params": {"kernel": normal(2, 2, 8, 8), "bias": normal(3, 2, 8)}}
    both = lambda f: jax.jit(jax.vmap(jax.value_and_grad(f, (0, 1)), (0, None)))(params, x)
    # Sums of some hundred terms of order 1 in another order: 1e-5 of the largest.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), both(ours), both(plain))


def test_the_module_has_flaxs_parameters_values_and_gradients():
    x, modules = normal(1, 3, 4, 8), (LayerNorm(), nn.LayerNorm(epsilon=1e-5))
    x = x * 10.0 ** jnp.arange(-3, 1)[None, :, None]  # rows of variance 1e-6, where epsilon decides, to 1
    begun = LayerNorm().init(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, begun) == {"params": {"scale": (8,), "bias": (8,)}}
    assert (begun["params"]["scale"] == 1).all() and not begun["params"]["bias"].any()
    params, weights = {"params": {"scale": normal(2, 8), "bias": normal(3, 8)}}, normal(4, 3, 4, 8)

    def both(module):
        total = lambda params, x: (y := module.apply(params, x), jnp.sum(weights * y))[::-1]
        return jax.jit(jax.value_and_grad(lambda *a: total(*a), (0, 1), has_aux=True))(params, x)

    (_, ours), our_grads = both(modules[0])
    (_, theirs), their_grads = both(modules[1])
    # A root of 3e-3 makes gradients of some hundred; float32 rounds the variance of the smallest rows
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), our_grads, their_grads)


def test_the_kernels_gradient_by_hand():
    # x = [[1, 2], [3, 4]], dL/dy = [[1], [10]]: x^T dy = [[1 + 30], [2 + 40]]; dL/dx = dy kernel^T
    x, kernel, g = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[5.0], [6.0]]), jnp.array([[1.0], [10.0]])
    y, vjp = jax.vjp(lambda x, kernel: dense.dot_general(x, kernel, (((1,), (0,)), ((), ()))), x, kernel)
    np.testing.assert_array_equal(y, [[17], [39]])
    x_grad, kernel_grad = vjp(g)
    np.testing.assert_array_equal(x_grad, [[5, 6], [50, 60]])
    np.testing.assert_array_equal(kernel_grad, [[31], [42]])


def test_another_contraction_is_refused():
    with pytest.raises(ValueError, match="last axis of x"):
        dense.dot_general(jnp.ones((2, 2)), jnp.ones((2, 2)), (((0,), (0,)), ((), ())))
