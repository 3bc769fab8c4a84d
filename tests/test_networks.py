"""Networks: the convolution written as patches, published sizes, where hidden layers go, K-way application."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from networks import ensemble
from networks.conv import AtariTorso, MinAtarTorso, PatchConv
from networks.mlp import MLP
from networks.torso import FlatMLP, split_network


def shapes(module, *inputs):
    """Output shape and the parameters' shapes, without computing anything."""
    variables = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return jax.eval_shape(module.apply, variables, *inputs).shape, variables["params"]


def random_variables(module, *inputs):
    """Parameters of the right shapes, drawn by NumPy: flax's initialisers take longer to compile than a test to run."""
    draw = np.random.default_rng(0).normal
    return jax.tree.map(
        lambda p: jnp.float32(draw(size=p.shape)), jax.eval_shape(module.init, jax.random.key(0), *inputs)
    )


def normal(*shape):
    return jnp.float32(np.random.default_rng(1).normal(size=shape))


def count(params):
    return sum(int(np.prod(p.shape)) for p in jax.tree.leaves(params))


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_patch_conv_is_a_3x3_convolution_with_a_reshaped_kernel():
    pixels = normal(2, 5, 6, 3)
    patches = PatchConv(4)
    variables = random_variables(patches, pixels)
    dense = variables["params"]["Dense_0"]
    kernel = dense["kernel"].reshape(3, 3, 3, 4)  # (9 C, F) to (height, width, C, F)
    conv = nn.Conv(4, (3, 3), padding="VALID")
    expected = conv.apply({"params": dict(kernel=kernel, bias=dense["bias"])}, pixels)
    out = patches.apply(variables, pixels)
    assert out.shape == (2, 3, 4, 4)
    # The same 27 products and a bias, summed in another order.
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_a_patch_is_read_row_by_row():
    # Pixel (i, j) is 10 i + j. A kernel that keeps only patch entry (1, 2) reads pixel (i + 1, j + 2).
    pixels = (10 * jnp.arange(4.0)[:, None] + jnp.arange(5.0)[None])[..., None]
    kernel = jnp.zeros((3, 3, 1, 1)).at[1, 2].set(1.0).reshape(9, 1)
    out = PatchConv(1).apply({"params": {"Dense_0": dict(kernel=kernel, bias=jnp.zeros(1))}}, pixels)
    assert out[..., 0].tolist() == [[12, 13, 14], [22, 23, 24]]


def test_atari_torso_has_the_published_features_and_parameters():
    # SAME: 84 -> 84/4 = 21 -> ceil(21/2) = 11 -> 11, and 11 * 11 * 64 = 7744.
    # VALID: 84 -> (84 - 8)/4 + 1 = 20 -> (20 - 4)/2 + 1 = 9 -> 9 - 2 = 7, and 7 * 7 * 64 = 3136.
    # (8*8*4 + 1) * 32 + (4*4*32 + 1) * 64 + (3*3*64 + 1) * 64 = 8,224 + 32,832 + 36,928 = 77,984.
    pixels = struct(2, 84, 84, 4, dtype=jnp.uint8)
    for padding, features in (("SAME", 7744), ("VALID", 3136)):
        out, params = shapes(AtariTorso(padding), pixels)
        assert out == (2, features)
        assert count(params) == 77_984


def test_atari_head_has_the_published_parameters():
    # (7744 + 1) * 512 + (512 + 1) * 18 = 3,965,440 + 9,234 = 3,974,674.
    torso, head = split_network(struct(84, 84, 4, dtype=jnp.uint8), (512,), 18)
    features, _ = shapes(torso, struct(1, 84, 84, 4, dtype=jnp.uint8))
    out, params = shapes(head, struct(*features))
    assert out == (1, 18)
    assert count(params) == 3_974_674


def test_padding_reaches_the_atari_torso():
    torso, _ = split_network(struct(84, 84, 4), (512,), 18, padding="VALID")
    assert shapes(torso, struct(84, 84, 4))[0] == (3136,)


def test_atari_pixels_are_divided_by_255():
    # White is 1. With every weight 1 and no bias: 1 * (8*8*1) = 64, 64 * (4*4*32) = 32,768 and
    # 32,768 * (3*3*64) = 18,874,368 = 9 * 2^21, all exact in float32.
    torso = AtariTorso("VALID")
    white = jnp.full((36, 36, 1), 255, jnp.uint8)  # the smallest image of which VALID leaves one position
    variables = jax.eval_shape(torso.init, jax.random.key(0), white)
    variables = jax.tree.map(lambda p: jnp.ones(p.shape) if len(p.shape) > 1 else jnp.zeros(p.shape), variables)
    assert torso.apply(variables, white).tolist() == [18_874_368] * 64


@pytest.mark.parametrize(
    "obs, torso_kernels, head_kernels",
    [
        # A vector: every hidden layer in the torso, one linear layer in the head.
        (struct(4), [(4, 7), (7, 5)], [(5, 3)]),
        # Any other array is flattened: 2 * 6 = 12.
        (struct(2, 6), [(12, 7), (7, 5)], [(5, 3)]),
        # MinAtar: 9 patches of 4 channels to 16 features; 8 * 8 * 16 = 1024.
        (struct(10, 10, 4, dtype=jnp.bool_), [(36, 16), (1024, 7), (7, 5)], [(5, 3)]),
        # Atari: the convolutions in the torso, the hidden layers in the head.
        (
            struct(84, 84, 4, dtype=jnp.uint8),
            [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64)],
            [(7744, 7), (7, 5), (5, 3)],
        ),
    ],
)
def test_hidden_layers_are_in_the_torso_except_on_atari(obs, torso_kernels, head_kernels):
    torso, head = split_network(obs, (7, 5), 3)
    features, torso_params = shapes(torso, obs)
    out, head_params = shapes(head, struct(*features))
    kernels = lambda params: sorted(p.shape for p in jax.tree.leaves(params) if len(p.shape) > 1)
    assert kernels(torso_params) == sorted(torso_kernels)
    assert kernels(head_params) == sorted(head_kernels)
    assert out == (3,)


def test_minatar_torso_without_hidden_layers_gives_1024_features():
    assert shapes(MinAtarTorso(()), struct(3, 10, 10, 6, dtype=jnp.bool_))[0] == (3, 1024)


def test_leading_axes_pass_through_a_flattening_torso():
    obs = normal(2, 3, 4, 5)  # a (2, 3) batch of (4, 5) observations
    torso = FlatMLP((6,), obs_ndim=2)
    variables = random_variables(torso, obs[0, 0])
    out = torso.apply(variables, obs)
    assert out.shape == (2, 3, 6)
    # One row of a batched product against a product of its own.
    np.testing.assert_allclose(out[1, 2], torso.apply(variables, obs[1, 2]), atol=1e-6)


def test_an_mlp_ends_in_a_linear_layer_unless_it_is_a_torso():
    # x = 1 through kernels of -1: -1 -> relu 0 -> 0 + bias -2 in the end.
    params = {"params": {f"Dense_{i}": dict(kernel=jnp.full((1, 1), -1.0), bias=jnp.zeros(1)) for i in range(2)}}
    params["params"]["Dense_1"]["bias"] = jnp.full(1, -2.0)
    assert MLP((1, 1)).apply(params, jnp.ones(1)).tolist() == [-2]
    assert MLP((1, 1), activate_final=True).apply(params, jnp.ones(1)).tolist() == [0]


def test_an_ensemble_is_each_network_applied_alone():
    network = MLP((5, 2))
    x = normal(4, 3)  # (B, in)
    params = jax.jit(lambda key: ensemble.init(network, key, 3, x))(jax.random.key(0))
    alone = jnp.stack([network.apply(jax.tree.map(lambda p, k=k: p[k], params), x) for k in range(3)])
    # The same products batched over K.
    np.testing.assert_allclose(ensemble.apply(network, params, x), alone, atol=1e-6)
    assert not np.allclose(alone[0], alone[1]) and not np.allclose(alone[1], alone[2])  # drawn independently


def test_patch_conv_starts_as_a_convolution_does():
    # fan_in 9 x 4 = 36, fan_out 9 x 16 = 144, so fan_avg gives a variance of 1 / 90.
    init = nn.initializers.variance_scaling(1.0, "fan_avg", "truncated_normal")
    key, pixels = jax.random.key(0), jnp.zeros((10, 10, 4))
    ours = PatchConv(16, init).init(key, pixels)["params"]["Dense_0"]["kernel"]
    assert ours.shape == (36, 16)
    # 576 draws: the sample's variance is within a fifth of the true one at 3 standard errors.
    assert abs(float(ours.var()) * 90 - 1) < 0.2
