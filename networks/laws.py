"""Laws of returns as atoms and their probabilities: what they are worth, how far apart they are, how to represent them.

A law is two arrays, atoms x and probabilities p `(..., n)`, in any order, p summing to 1 over the last axis. Either may
be shared by leading axes, `(n,)`. F is its distribution function, F^-1(t) = inf{x: F(x) >= t} its quantile.

    mean, variance, cdf, quantile
    cvar            tau^-1 int_0^tau F^-1           the mean of the worst tau
    upper_cvar      tau^-1 int_{1-tau}^1 F^-1       the mean of the best tau
    wasserstein     W_p = (int_0^1 |F^-1 - G^-1|^p)^(1/p),  W_inf = sup |F^-1 - G^-1|
    cramer          (int |F - G|^2)^(1/2)

    projection          on                             keeps the mean      never moves two laws apart in
    categorical         probabilities of a grid z      inside the grid     Cramer
    quantile_midpoints  F^-1((i - 1/2) / N)            no                  W_inf
    segment_means       means of F^-1 over segments    yes                 every W_p

An atom of probability 0 is padding: it changes nothing, whatever number it holds, infinities included. A law that is
all padding reads as a certain 0.

Cumulated probabilities that differ by less than 8 machine epsilons (1e-6 in float32) count as equal. Else rounding
would decide on which side of an atom a quantile falls, when a probability is met exactly.

Source: Bellemare, Dabney, Rowland, "Distributional Reinforcement Learning", MIT Press 2023 (the projections); Achab and
Neu 2021, arXiv 2112.15430 (two segments); Rockafellar and Uryasev 2000 (the mean of a tail). Deviations: none.
"""

import math

import jax
import jax.numpy as jnp

# --- the law itself ---


def mean(x, p):
    """`(..., n)` twice, to `(...,)`."""
    x, p = jnp.broadcast_arrays(x, p)
    return (jnp.where(p > 0, x, 0) * p).sum(-1)


def variance(x, p):
    """`(..., n)` twice, to `(...,)`."""
    x, p = jnp.broadcast_arrays(x, p)
    return mean(jnp.square(x - mean(x, p)[..., None]), p)


def cdf(x, p, at):
    """F at some numbers. Args: x, p `(..., n)`; at `(m,)` or `(..., m)`. Returns: `(..., m)`."""
    x, p = jnp.broadcast_arrays(x, p)
    at = jnp.broadcast_to(at, (*x.shape[:-1], jnp.shape(at)[-1]))
    return jnp.where(x[..., None, :] <= at[..., :, None], p[..., None, :], 0).sum(-1)


def quantile(x, p, t):
    """F^-1; at 0 the least atom. Args: x, p `(..., n)`; t `(m,)` or `(..., m)`, in [0, 1]. Returns: `(..., m)`."""
    x, level = _ordered(x, p)
    t = jnp.broadcast_to(t, (*x.shape[:-1], jnp.shape(t)[-1]))
    passed = level[..., None, 1:-1] < t[..., :, None] - _rounding(level)  # (..., m, n - 1): F(x_j) < t
    return jnp.take_along_axis(x, passed.sum(-1), -1)


def cvar(x, p, tau):
    """Lower CVaR, of the atom on the boundary only the part within. Args: x, p `(..., n)`; tau () in (0, 1]."""
    x, level = _ordered(x, p)
    return (x * jnp.diff(jnp.minimum(level, tau))).sum(-1) / tau


def upper_cvar(x, p, tau):
    """Upper CVaR. Args: x, p `(..., n)`; tau () in (0, 1]. Returns: `(...,)`."""
    return -cvar(-x, p, tau)


# --- distances ---


def wasserstein(x, p, y, q, order=1):
    """W_order between two laws. Args: x, p `(..., n)`; y, q `(..., m)`; order a Python number >= 1 or math.inf."""
    x, x_level = _ordered(x, p)
    y, y_level = _ordered(y, q)
    # Both quantile functions are constant between neighbours of the merged levels.
    level = jnp.concatenate([x_level[..., 1:], y_level[..., 1:]], -1)  # (..., n + m)
    of_x = jnp.concatenate([jnp.ones(x.shape, int), jnp.zeros(y.shape, int)], -1)
    level, of_x = jax.lax.sort((level, of_x), num_keys=1)
    passed = lambda of: jnp.cumsum(of, -1) - of
    width = level - jnp.concatenate([jnp.zeros_like(level[..., :1]), level[..., :-1]], -1)
    width = jnp.where(width > _rounding(level), width, 0)
    x = jnp.take_along_axis(x, jnp.minimum(passed(of_x), x.shape[-1] - 1), -1)
    y = jnp.take_along_axis(y, jnp.minimum(passed(1 - of_x), y.shape[-1] - 1), -1)
    gap = jnp.abs(x - y)
    if order == math.inf:
        return jnp.where(width > 0, gap, 0).max(-1)
    return (width * gap**order).sum(-1) ** (1 / order)


def cramer(x, p, y, q):
    """Cramer distance, the root included. Args: x, p `(..., n)`; y, q `(..., m)`. Returns: `(...,)`."""
    x, x_level = _ordered(x, p)
    y, y_level = _ordered(y, q)
    mass = jnp.concatenate([jnp.diff(x_level), -jnp.diff(y_level)], -1)
    atoms, mass = jax.lax.sort((jnp.concatenate([x, y], -1), mass), num_keys=1)
    difference = jnp.cumsum(mass, -1)[..., :-1]  # F - G from each atom to the next
    return jnp.sqrt((jnp.square(difference) * jnp.diff(atoms)).sum(-1))


# --- projections ---


def two_hot(x, z):
    """A number as probabilities of the two grid points beside it, with itself as mean; outside, of the nearest end.

        w_k = F_k - F_{k-1},  F_k = clip((z_{k+1} - x) / (z_{k+1} - z_k), 0, 1),  F_0 = 0, F_K = 1

    F_k is the average of 1{x <= u} for u from z_k to z_{k+1}.

    Args: x `(...)`; z `(K,)`, ascending, even or not, K >= 2. Returns: `(..., K)`.
    """
    row = lambda v: v.reshape(*[1] * x.ndim, -1)
    below = jnp.clip((row(z[1:]) - x[..., None]) / row(jnp.diff(z)), 0, 1)  # (..., K - 1)
    end = jnp.zeros_like(below[..., :1])
    return jnp.diff(jnp.concatenate([end, below, end + 1], -1))


def categorical(x, p, z):
    """The law on the grid z that is nearest in Cramer distance: each atom's probability, two-hot.

    The Bellman case r + gamma Z, Z ~ p on z itself, is `x = r[..., None] + gamma[..., None] * z`. Leading axes of size
    1 in x are shared: their weights are computed once.

    Args: x, p `(..., n)`; z `(K,)`, ascending. Returns: probabilities `(..., K)`.
    """
    return jnp.einsum("...n,...nk->...k", p, two_hot(x, z), precision="highest")


def quantile_midpoints(x, p, num: int):
    """F^-1((i - 1/2) / num), i = 1..num. Args: x, p `(..., n)`. Returns: atoms `(..., num)` of probability 1 / num."""
    return quantile(x, p, (jnp.arange(num, dtype=x.dtype) + 0.5) / num)


def segment_means(x, p, weights):
    """The mean of F^-1 over each of successive segments of [0, 1]; an atom on a boundary is split.

    `jnp.full(N, 1 / N)` gives the means over [(i - 1) / N, i / N]; (alpha, 1 - alpha) the lower CVaR at alpha and the
    upper one at 1 - alpha. The latter are also the least and the greatest mean under any q with q_j <= p_j / weight.

    Args: x, p `(..., n)`; weights `(N,)`, positive, their sum 1. Returns: atoms `(..., N)` of probabilities `weights`.
    """
    x, level = _ordered(x, p)
    edges = _levels(weights)
    column = lambda v: v.reshape(*[1] * (x.ndim - 1), -1, 1)  # (1, ..., N, 1)
    low, high = column(edges[:-1]), column(edges[1:])
    mass = jnp.diff(jnp.clip(level[..., None, :], low, high))  # (..., N, n)
    return (mass * x[..., None, :]).sum(-1) / (high - low)[..., 0]


def _levels(p):
    """0, p_1, p_1 + p_2, ..., 1: `(..., n)` to `(..., n + 1)`; the last atom takes what rounding leaves."""
    inner = jnp.minimum(jnp.cumsum(p, -1)[..., :-1], 1)
    end = jnp.zeros_like(p[..., :1])
    return jnp.concatenate([end, inner, end + 1], -1)


def _ordered(x, p):
    """Atoms in ascending order `(..., n)`, padding moved onto the largest; their levels `(..., n + 1)`."""
    x, p = jnp.broadcast_arrays(x, p)
    top = jnp.max(x, -1, keepdims=True, where=p > 0, initial=-math.inf)
    x = jnp.where(p > 0, x, jnp.where(top > -math.inf, top, 0))
    x, p = jax.lax.sort((x, p), num_keys=1)
    return x, _levels(p)


def _rounding(level):
    return 8 * jnp.finfo(level.dtype).eps
