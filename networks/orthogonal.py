"""Orthogonal initialisation without LAPACK, as `nn.initializers.orthogonal` in law."""

from math import prod

import jax
import jax.numpy as jnp


def orthogonal(scale=1.0):
    """An initialiser of kernels `(..., in, out)`: orthonormal columns, or rows where those are fewer, times `scale`.

    Uniform over such matrices: the product of Householder reflections of normal vectors, each one dimension shorter
    (Stewart, SIAM J. Numer. Anal. 17(3), 1980), which is Q of a normal matrix's QR with a positive diagonal of R.
    flax calls LAPACK's QR: several at once, and XLA on a CPU of two threads may wait for ever (jax 0.10.2).
    """

    def init(key, shape, dtype=jnp.float32):
        rows, columns = prod(shape[:-1]), shape[-1]
        long, short = max(rows, columns), min(rows, columns)
        x = jnp.tril(jax.random.normal(key, (long, short), dtype))  # vector j begins at entry j
        sign = jnp.where(jnp.diagonal(x) < 0, -1.0, 1.0).astype(dtype)  # (short,)
        v = x + jnp.eye(long, short, dtype=dtype) * (sign * jnp.linalg.norm(x, axis=0))[None]
        v = v / jnp.linalg.norm(v, axis=0, keepdims=True)

        def reflect(i, q):
            u = v[:, short - 1 - i]
            return q - 2 * jnp.outer(u, jnp.dot(u, q, precision="highest"))

        q = jax.lax.fori_loop(0, short, reflect, jnp.eye(long, short, dtype=dtype)) * -sign[None]
        return scale * (q if rows >= columns else q.T).reshape(shape)

    return init
