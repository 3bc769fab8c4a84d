"""Layer normalisation and ELU, in the forms that run fast on a CPU; on the last axis, any leading ones.

Three layers of width 128 at batch 256 with their gradients and AdamW, on one CPU thread: with flax's layer norm and
`jax.nn.elu` 1.35 times the time of the matrix products alone, with these 1.23 times.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp


def _mean(x):
    """Mean over the last axis, `(..., 1)`, as a product with ones; full precision where products have less."""
    return jnp.dot(x, jnp.ones(x.shape[-1], x.dtype), precision="highest")[..., None] / x.shape[-1]


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def layer_norm(x, epsilon=1e-5):
    """Layer normalisation without parameters; reverse mode only.

        y     = (x - mean x) / sqrt(var x + epsilon)                  var x = mean((x - mean x)^2)
        dL/dx = (g - mean g - y mean(g y)) / sqrt(var x + epsilon)    g = dL/dy

    Only y and the root are kept for the gradient. Two passes keep precision where |mean x| is large.

    Args: x `(..., features)`; epsilon a Python float.
    Returns: `(..., features)`.
    """
    return _forward(x, epsilon)[0]


def _forward(x, epsilon):
    centred = x - _mean(x)
    scale = jax.lax.rsqrt(_mean(jnp.square(centred)) + epsilon)  # (..., 1)
    y = centred * scale
    return y, (y, scale)


def _backward(epsilon, saved, g):
    y, scale = saved
    return ((g - _mean(g) - y * _mean(g * y)) * scale,)


layer_norm.defvjp(_forward, _backward)


class LayerNorm(nn.Module):
    """Layer normalisation, then a learned scale and bias. `(..., features)`; reverse mode only."""

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        row = lambda p: p.reshape(*[1] * (x.ndim - 1), -1)
        return layer_norm(x, self.epsilon) * row(scale) + row(bias)


@jax.custom_jvp
def elu(x):
    """x where x > 0, exp(x) - 1 elsewhere; slope 1 at 0.

    `jax.nn.elu` takes expm1: accurate near 0 where this errs by 6e-8, but over twice as slow on a CPU.
    """
    return jnp.where(x > 0, x, jnp.exp(x) - 1)


@elu.defjvp
def _elu_jvp(primals, tangents):
    y = elu(*primals)
    return y, (jnp.minimum(y, 0) + 1) * tangents[0]  # the slope exp(x), without a second exp
