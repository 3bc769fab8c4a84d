"""Distributions over actions, read from a network's output, behind one small interface.

    num_outputs(size)         outputs of the network for `size` action dimensions (Categorical: actions)
    sample(outputs, key)      a draw
    log_prob(outputs, draw)   its log density or log probability, (...,)
    mode(outputs)             the likeliest draw (of the Gaussian: before its tanh)
    action(draw)              what the environment takes: (..., D) in [-1, 1], or (...,) int32
    entropy(outputs, key)     (...,), in nats
    kl(outputs, others)       KL(outputs || others), (...,), in nats
    mean(outputs)             Bernoulli and BangOffBang: E[a], (..., D)
    support(outputs)          Bernoulli and BangOffBang: all draws, (M, D), M = 2^D or 3^D

`outputs` are `(..., num_outputs)`. A *draw* is the action itself, but for the Gaussian, whose draw is the point
before the tanh: log_prob then needs no inverse of the tanh, which is lost where an action rounds to 1.

Continuous actions have three: Gaussian, Bernoulli on the two ends of each dimension, and BangOffBang, which adds
the middle. The last two (Seyde et al. 2021, "Is Bang-Bang Control All You Need?") are discrete: no Jacobian,
no standard deviation, and everything is exact.
"""

import itertools
import math

import jax
import jax.numpy as jnp

from envs.types import pytree


@pytree
class Gaussian:
    """Normal on R^D, squashed by tanh into (-1, 1)^D; outputs are D means and D log standard deviations."""

    min_log_std: float = -5.0
    max_log_std: float = 2.0

    def num_outputs(self, size: int) -> int:
        return 2 * size

    def _split(self, outputs):
        mean, log_std = jnp.split(outputs, 2, -1)
        return mean, jnp.clip(log_std, self.min_log_std, self.max_log_std)

    def sample(self, outputs, key):
        mean, log_std = self._split(outputs)
        return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)

    def log_prob(self, outputs, draw):
        """Of tanh(draw): the normal's log density less log |d tanh(u) / du|, summed over dimensions."""
        mean, log_std = self._split(outputs)
        normal = -0.5 * jnp.square((draw - mean) / jnp.exp(log_std)) - log_std - 0.5 * math.log(2 * math.pi)
        return (normal - log_slope(draw)).sum(-1)

    def mode(self, outputs):
        return self._split(outputs)[0]

    def action(self, draw):
        return jnp.tanh(draw)

    def entropy(self, outputs, key):
        """The normal's exactly; the mean of log |d tanh(u) / du|, which has no closed form, from one draw: unbiased."""
        log_std = self._split(outputs)[1]
        normal = log_std + 0.5 * math.log(2 * math.pi * math.e)
        return (normal + log_slope(self.sample(outputs, key))).sum(-1)

    def kl(self, outputs, others):
        """Of the normals, and so of their images under tanh."""
        (m0, s0), (m1, s1) = self._split(outputs), self._split(others)
        ratio = jnp.exp(2 * (s0 - s1))
        return 0.5 * (ratio + jnp.square((m0 - m1) / jnp.exp(s1)) - 1 - jnp.log(ratio)).sum(-1)


def log_slope(u):
    """log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), without cancellation."""
    return 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))


def grid(levels, size: int):
    """Every vector of `size` of the levels, `(len(levels)^size, size)`; the last entry changes first."""
    return jnp.array(list(itertools.product(levels, repeat=size)))


@pytree
class Bernoulli:
    """-1 or +1 in each dimension, P(a_i = +1) = sigmoid(z_i); outputs are D logits z."""

    def num_outputs(self, size: int) -> int:
        return size

    def sample(self, outputs, key):
        return jnp.where(jax.random.bernoulli(key, jax.nn.sigmoid(outputs)), 1.0, -1.0)

    def log_prob(self, outputs, draw):
        return jax.nn.log_sigmoid(draw * outputs).sum(-1)

    def mode(self, outputs):
        return jnp.where(outputs >= 0, 1.0, -1.0)

    def action(self, draw):
        return draw

    def mean(self, outputs):
        """E[a] = 2p - 1 = tanh(z / 2), `(..., D)`."""
        return jnp.tanh(outputs / 2)

    def support(self, outputs):
        return grid((-1.0, 1.0), outputs.shape[-1])

    def entropy(self, outputs, key=None):
        """Exact, at most D ln 2: log(1 + e^z) - p z in each dimension."""
        return (jax.nn.softplus(outputs) - jax.nn.sigmoid(outputs) * outputs).sum(-1)

    def kl(self, outputs, others):
        p = jax.nn.sigmoid(outputs)
        up = jax.nn.log_sigmoid(outputs) - jax.nn.log_sigmoid(others)
        down = jax.nn.log_sigmoid(-outputs) - jax.nn.log_sigmoid(-others)
        return (p * up + (1 - p) * down).sum(-1)


@pytree
class Categorical:
    """One of `size` actions, int32; outputs are their logits."""

    def num_outputs(self, size: int) -> int:
        return size

    def sample(self, outputs, key):
        return jax.random.categorical(key, outputs).astype(jnp.int32)

    def log_prob(self, outputs, draw):
        return jnp.take_along_axis(jax.nn.log_softmax(outputs), draw[..., None], -1)[..., 0]

    def mode(self, outputs):
        return outputs.argmax(-1).astype(jnp.int32)

    def action(self, draw):
        return draw

    def entropy(self, outputs, key=None):
        """Exact, at most ln A."""
        log_p = jax.nn.log_softmax(outputs)
        return -(jnp.exp(log_p) * log_p).sum(-1)

    def kl(self, outputs, others):
        log_p, log_q = jax.nn.log_softmax(outputs), jax.nn.log_softmax(others)
        return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


@pytree
class BangOffBang:
    """-1, 0 or +1 in each dimension, a Categorical each; outputs are 3 D logits, those of a dimension side by side."""

    def num_outputs(self, size: int) -> int:
        return 3 * size

    def _logits(self, outputs):
        return outputs.reshape(*outputs.shape[:-1], -1, 3)  # (..., D, 3)

    def sample(self, outputs, key):
        return Categorical().sample(self._logits(outputs), key) - 1.0

    def log_prob(self, outputs, draw):
        return Categorical().log_prob(self._logits(outputs), (draw + 1).astype(jnp.int32)).sum(-1)

    def mode(self, outputs):
        return Categorical().mode(self._logits(outputs)) - 1.0

    def action(self, draw):
        return draw

    def mean(self, outputs):
        """E[a], `(..., D)`."""
        p = jax.nn.softmax(self._logits(outputs))
        return p[..., 2] - p[..., 0]

    def support(self, outputs):
        return grid((-1.0, 0.0, 1.0), outputs.shape[-1] // 3)

    def entropy(self, outputs, key=None):
        """Exact, at most D ln 3."""
        return Categorical().entropy(self._logits(outputs)).sum(-1)

    def kl(self, outputs, others):
        return Categorical().kl(self._logits(outputs), self._logits(others)).sum(-1)


POLICIES = dict(gaussian=Gaussian(), bernoulli=Bernoulli(), bang_off_bang=BangOffBang(), categorical=Categorical())
