"""Distances that are quasimetrics by construction: d(x, x) = 0 and the triangle inequality hold, symmetry need not.

Interval quasimetric embedding (IQE). A vector of C k numbers is C components of k, and component c of a pair (x, y) is
the length of a union of intervals on the line:

    d_c(x, y) = | union over j of [x_cj, y_cj] |              an interval with y_cj <= x_cj is empty
    d(x, y)   = (1 - a) mean_c d_c + a max_c d_c              a = sigmoid(raw), raw = -1 at first: a = 0.269

OGBench's head has a = sigmoid(-alpha) with alpha = 0 at first: the same family of distances, the sign turned round.

Three forms of d_c, equal up to rounding (`python benchmarks/iqe.py` measures them):

    sort        sorts all 2 k ends and sums the gaps in which some interval is open
    ordered     orders the k intervals by left end: d_c = sum_i max(0, y_i - max(x_i, max of the earlier y))
    pairwise    the same sum without an order: compares every interval with every other. Several times faster on a CPU,
                the default; reverse mode only

Source: Wang, Isola, "Improved Representation of Asymmetrical Distances with Interval Quasimetric Embeddings" (arXiv
2211.15120); quasimetric-learning/torch-quasimetric at 0365394; seohongpark/ogbench at 1d41409, impls/utils/networks.py.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from networks import dense
from networks.norm import LayerNorm

REDUCTIONS = ("maxmean", "ogbench")


def union_by_sorting(x, y):
    """Length of the union of the intervals [x_j, y_j]. Args: x, y `(..., k)`. Returns: `(...,)`."""
    valid = (x < y).astype(jnp.int32)
    ends, opens = jax.lax.sort(
        (jnp.concatenate([x, y], -1), jnp.concatenate([valid, -valid], -1)), dimension=-1, num_keys=1
    )
    is_open = jnp.cumsum(opens, -1)[..., :-1] > 0
    return ((ends[..., 1:] - ends[..., :-1]) * is_open).sum(-1)


def union_by_order(x, y):
    """The same, the intervals ordered by their left ends."""
    x, y = jax.lax.sort((x, y), dimension=-1, num_keys=1)
    earlier = jax.lax.cummax(y, axis=y.ndim - 1)[..., :-1]
    earlier = jnp.concatenate([jnp.full_like(x[..., :1], -jnp.inf), earlier], -1)
    return jnp.maximum(y - jnp.maximum(x, earlier), 0).sum(-1)


def reach(x, y):
    """How far the intervals that begin before each one extend: `max y_j` over `x_j < x_i`, of equal ones the former.

    Args: x, y `(k, ...)`. Returns: `(k, ...)`, -inf where none begins before.
    """
    k = x.shape[0]
    if k == 1:
        return jnp.full_like(x, -jnp.inf)
    # In halves, so that which of two equal ones is the former needs no masks, which are slow.
    half = k // 2
    x1, y1, x2, y2 = x[:half], y[:half], x[half:], y[half:]
    first, second = reach(x1, y1), reach(x2, y2)
    for j in range(k - half):
        first = jnp.maximum(first, jnp.where(x2[j][None] < x1, y2[j][None], -jnp.inf))
    for j in range(half):
        second = jnp.maximum(second, jnp.where(x1[j][None] <= x2, y1[j][None], -jnp.inf))
    return jnp.concatenate([first, second])


@jax.custom_vjp
def union_of_rows(x, y):
    """Length of the union of the intervals, which lie along the *first* axis: `(k, ...)` to `(...)`.

    The gradient is -1 at each left end of the union and +1 at each right end, g = dL/dlength:

        dL/dx_i = -g where x_i begins a piece      nothing that begins before reaches beyond x_i
        dL/dy_i = +g where y_i ends one            nothing that ends after it begins before y_i
    """
    return _forward(x, y)[0]


def _forward(x, y):
    earlier = reach(x, y)
    return jnp.maximum(y - jnp.maximum(x, earlier), 0).sum(0), (x, y, earlier)


def _backward(saved, g):
    x, y, earlier = saved
    later = -reach(-y, -x)  # min x_j over y_j > y_i: `reach` of the mirrored line
    begins, ends = (x < y) & (earlier <= x), (x < y) & (later >= y)
    return jnp.where(begins, -g[None], 0), jnp.where(ends, g[None], 0)


union_of_rows.defvjp(_forward, _backward)


def union_by_pairs(x, y):
    """Length of the union of the intervals [x_j, y_j]. Args: x, y `(..., k)`. Returns: `(...,)`; reverse mode only."""
    return union_of_rows(jnp.moveaxis(x, -1, 0), jnp.moveaxis(y, -1, 0))


FORMS = dict(sort=union_by_sorting, ordered=union_by_order, pairwise=union_by_pairs)


def iqe_components(x, y, num_components: int, form: str = "pairwise"):
    """d_c of all components. Args: x, y `(..., C k)`, a component's k numbers side by side. Returns: `(..., C)`."""
    split = lambda p: p.reshape(*p.shape[:-1], num_components, p.shape[-1] // num_components)
    return FORMS[form](split(x), split(y))


def maxmean(components, raw):
    """(1 - a) mean + a max over components, a = sigmoid(raw). Args: `(..., C)`; raw (). Returns: `(...,)`."""
    a = jax.nn.sigmoid(raw)
    return (1 - a) * components.mean(-1) + a * components.max(-1)


class IQE(nn.Module):
    """d(x, y) of vectors `(..., C k)`: `(...,)`. The one parameter is `raw`, or OGBench's `alpha`."""

    num_components: int
    reduction: str = "maxmean"  # or ogbench
    form: str = "pairwise"

    @nn.compact
    def __call__(self, x, y):
        if self.reduction == "ogbench":
            raw = -self.param("alpha", nn.initializers.zeros, ())
        else:
            raw = self.param("raw", nn.initializers.constant(-1.0), ())
        return maxmean(iqe_components(x, y, self.num_components, self.form), raw)


class Network(nn.Module):
    """An MLP as quasimetric agents have it, `(..., in)` to `(..., sizes[-1])`; Glorot-uniform kernels, zero biases.

    Hidden layers are followed by ReLU, GELU (`gelu`), or GELU and then a layer norm (`gelu_norm`, OGBench's).
    """

    sizes: Sequence[int]
    activation: str = "relu"
    zero_final: bool = False  # whether it starts as zero

    @nn.compact
    def __call__(self, x):
        for i, size in enumerate(self.sizes):
            is_final = i + 1 == len(self.sizes)
            zero = self.zero_final and is_final
            kernel_init = nn.initializers.zeros if zero else nn.initializers.glorot_uniform()
            x = nn.Dense(size, kernel_init=kernel_init, dot_general=dense.dot_general)(x)
            if not is_final:
                x = nn.relu(x) if self.activation == "relu" else nn.gelu(x)
                x = LayerNorm(1e-6)(x) if self.activation == "gelu_norm" else x
        return x
