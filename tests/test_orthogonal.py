"""Orthogonal kernels are orthogonal, and uniform over what is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from networks.orthogonal import orthogonal


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (3, 3, 2, 8)], ids=str)
def test_the_fewer_of_rows_and_columns_are_orthonormal_times_the_scale(shape):
    q = np.asarray(orthogonal(2.0)(jax.random.key(0), shape)).reshape(-1, shape[-1])
    gram = q.T @ q if q.shape[0] >= q.shape[1] else q @ q.T
    np.testing.assert_allclose(gram, 4 * np.eye(min(q.shape)), atol=1e-5)  # float32


def test_it_is_q_of_the_normal_matrixs_qr_where_one_column_is_left():
    # One column: the vector itself, at length 1
    x = jax.random.normal(jax.random.key(3), (6, 1))
    np.testing.assert_allclose(orthogonal()(jax.random.key(3), (6, 1)), x / jnp.linalg.norm(x), atol=1e-6)


def test_rotations_and_reflections_are_drawn_alike():
    q = jax.jit(jax.vmap(lambda key: orthogonal()(key, (2, 2))))(jax.random.split(jax.random.key(0), 4_000))
    angle = np.arctan2(q[:, 1, 0], q[:, 0, 0])  # of the first column: uniform
    counts = np.histogram(angle, 8, (-np.pi, np.pi))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 24.3  # chi-square of 7 degrees of freedom at 0.1%
    assert abs((np.linalg.det(q) > 0).mean() - 0.5) < 0.03  # 3.8 standard deviations


def test_entries_of_a_tall_kernel_have_the_moments_of_the_uniform_law():
    q = jax.jit(jax.vmap(lambda key: orthogonal()(key, (4, 2))))(jax.random.split(jax.random.key(1), 8_000))
    # An entry of a random unit vector of n = 4: E q^2 = 1/n, E q^4 = 3 / (n (n + 2)) = 1/8; 5 standard errors are 0.01.
    np.testing.assert_allclose((q**2).mean(0), np.full((4, 2), 0.25), atol=0.013)
    np.testing.assert_allclose((q**4).mean(0), np.full((4, 2), 0.125), atol=0.011)
