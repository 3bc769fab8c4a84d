"""What to maximise over laws of returns by dynamic programming: E f(c + G), with c a stock that remembers the past.

The stock is C_{t+1} = (C_t + R_{t+1}) / gamma, so that c_0 + G_0 = gamma^t (C_t + G_t): what was collected is part of
the state, and the law of C_t + G_t is all that the future adds. Stock-augmented dynamic programming maximises an
objective K of laws exactly if K is

    1. indifferent to mixtures   what is no worse in every branch is no worse in the mixture
    2. indifferent to gamma      K(law of X) >= K(law of Y) implies the same of gamma X and gamma Y
    3. Lipschitz in W1           for problems without end; after n sweeps the error is at most L gamma^n D

where D bounds the W1 distance to the first guess. An expected utility K = E f has 1 always; 2 at gamma = 1, or where f
is positively homogeneous, f(a x) = a^k f(x) for a > 0 (`degree` k); 3 with f's own constant (`lipschitz`). A continuous
K with 1 orders laws as some expected utility does. Other objectives are reached by a search over the first stock:

    lower CVaR_tau(G) = max_c0 -c0 + E (c0 + G)_- / tau     best c0 = -F^-1(tau)
    upper CVaR_tau(G) = min_c0 -c0 + E (c0 + G)_+ / tau

`outer` says which search, `check` refuses what the theory does not cover, `table` shows both.

Source: Pires et al. 2025, "Optimizing Return Distributions with Distributional Dynamic Programming", arXiv 2501.13028;
the weights of `MeanCVaR` as in https://github.com/MehrdadMoghimi/RIGOR. Deviations: none known; the paper's body could
not be read, so its constants were derived anew.
"""

import dataclasses
import typing
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from envs.types import Fraction, Interval, Positive, Real, pytree, static

Tail = Annotated[float, Interval(0, 1, open_low=True)]  # a probability that is not 0


# Each objective has its name as a static field. jax 0.10.2 takes the tree structures of two dataclasses for equal if
# their fields are, and `jit` may then run on one the program that it compiled for the other.


# `slopes` of f below and above its kink at 0; an f without them is not piecewise linear.


class Kinked:
    """f(x) = left (x)_- + right (x)_+, of `slopes` (left, right); (x)_- = min(x, 0) and (x)_+ = max(x, 0)."""

    degree = 1

    def f(self, x):
        left, right = self.slopes
        return left * jnp.minimum(x, 0) + right * jnp.maximum(x, 0)

    @property
    def lipschitz(self):
        return max(self.slopes)


@pytree
class Mean:
    """E G, whatever the stock."""

    name: str = static(default="mean")
    formula, degree, lipschitz, slopes = "x", 1, 1.0, (1.0, 1.0)

    def f(self, x):
        return x


@pytree
class LowerCVaR(Kinked):
    """The mean of the worst fraction tau of returns; averse to risk."""

    tau: Tail = 0.25
    name: str = static(default="lower_cvar")
    formula, slopes = "(x)_-", (1.0, 0.0)


@pytree
class UpperCVaR(Kinked):
    """The mean of the best fraction tau of returns; seeks risk. Ties at the best c0 must be broken by randomising."""

    tau: Tail = 0.25
    name: str = static(default="upper_cvar")
    formula, slopes = "(x)_+", (0.0, 1.0)


@pytree
class MeanCVaR(Kinked):
    """weight E G + (1 - weight) lower CVaR_tau(G)."""

    tau: Tail = 0.25
    weight: Fraction = 0.5  # of the mean
    name: str = static(default="mean_cvar")
    formula = "w_l (x)_- + w_r (x)_+, w_l = (1 - weight) / tau + weight, w_r = weight"

    @property
    def slopes(self):
        return (1 - self.weight) / self.tau + self.weight, self.weight


@pytree
class DesiredReturn:
    """-E |G - target|."""

    target: Real = 0.0
    name: str = static(default="desired_return")
    formula, degree, lipschitz, slopes = "-abs(x)", 1, 1.0, (1.0, -1.0)

    def f(self, x):
        return -jnp.abs(x)


@pytree
class Homeostatic:
    """-E |c0 + G|, Euclidean, of a vector of stocks that rewards change: how far from 0 they end."""

    name: str = static(default="homeostatic")
    formula, degree, lipschitz = "-norm(x), x a vector", 1, 1.0
    vector = True

    def f(self, x):
        """`(..., D)` to `(...,)`."""
        return -jnp.sqrt(jnp.square(x).sum(-1))


@pytree
class SquaredError:
    """-E (G - target)^2. On |x| <= bound its Lipschitz constant is 2 bound; without bound it has none."""

    target: Real = 0.0
    name: str = static(default="squared_error")
    formula, degree, lipschitz = "-x^2", 2, None

    def f(self, x):
        return -jnp.square(x)


@pytree
class Threshold:
    """P(G >= target). Stocks are rounded: set the target between two returns, not on one."""

    target: Real = 0.0
    name: str = static(default="threshold")
    formula, degree, lipschitz = "1{x >= 0}", 0, None

    def f(self, x):
        return (x >= 0).astype(x.dtype)


@pytree
class Exponential:
    """-E exp(-rate G): only without discounting."""

    rate: Positive = 1.0
    name: str = static(default="exponential")
    formula, degree, lipschitz = "-exp(-rate x)", None, None

    def f(self, x):
        return -jnp.exp(-self.rate * x)


@pytree
class Direct:
    """A functional of the whole law that is no expected utility; `check` refuses it and names the way round."""

    name: str = static(default="cvar")  # a key of INSTEAD


INSTEAD = dict(
    cvar="use lower_cvar or upper_cvar, an expected utility of c0 + G with an outer search over c0",
    quantile="use an outer search over c0: the largest target that threshold reaches with the wanted probability",
    variance="use an outer search over c0: -Var(G) = max over targets of squared_error",
)
EXPECTED = (Mean, LowerCVaR, UpperCVaR, MeanCVaR, DesiredReturn, Homeostatic, SquaredError, Threshold, Exponential)
OBJECTIVES = {objective().name: objective for objective in EXPECTED}


def expected(objective, c, x, p):
    """K of c + G: E f(c + G).

    Args: c `(...)`; x, p the law of G `(..., n)`. For a vector of D stocks c `(..., D)`, x `(..., n, D)`.
    Returns: `(...)`.
    """
    f, p = jnp.broadcast_arrays(objective.f(jnp.expand_dims(c, -2 if is_vector(objective) else -1) + x), p)
    return (jnp.where(p > 0, f, 0) * p).sum(-1)


def parameters(objective) -> dict:
    """Its numbers by name."""
    return {
        field.name: getattr(objective, field.name) for field in dataclasses.fields(objective) if field.name != "name"
    }


def is_vector(objective) -> bool:
    """Whether f reads a vector of stocks, on its last axis."""
    return getattr(objective, "vector", False)


class Outer(NamedTuple):
    """How the first stock is chosen, and what the objective is worth there."""

    search: str  # "max" or "min" over c0; "fixed": at c0
    scale: Any = 1.0
    c0: Any = None  # where fixed; None: the task gives it

    def value(self, c0, u):
        """h(c0). Args: c0 `(...)`; u the best E f(c0 + G) over policies, same shape."""
        return u if self.search == "fixed" else -c0 + self.scale * u


def outer(objective) -> Outer:
    """The search over c0: the best objective is the maximum or minimum of h, or U(s0, c0) at the fixed c0."""
    match objective:
        case LowerCVaR(tau):
            return Outer("max", 1 / tau)
        case UpperCVaR(tau):
            return Outer("min", 1 / tau)
        case MeanCVaR():
            return Outer("max")
        case DesiredReturn(target) | SquaredError(target) | Threshold(target):
            return Outer("fixed", c0=-target)
        case Mean() | Exponential():
            return Outer("fixed", c0=0.0)
        case Homeostatic():
            return Outer("fixed")
    raise TypeError(f"{objective} has no outer search; check({objective}, gamma, horizon) says why")


def grid_error(objective, step):
    """How far the best of h on a grid of c0 may be from its best everywhere: step / 2 times h's steepest slope.

    h has slopes between scale left - 1 and scale right - 1, f's own being left and right. 0 where c0 is fixed.
    """
    search, scale, _ = outer(objective)
    if search == "fixed":
        return 0.0
    left, right = (jnp.abs(scale * slope - 1) for slope in objective.slopes)
    return step / 2 * jnp.maximum(left, right)


def check(objective, gamma: float, horizon: int | None):
    """Refuses what dynamic programming over stocks would get wrong.

    Args: gamma the discount factor; horizon in env steps, None in a problem without end.
    Raises: ValueError, one line, with the reason and the way round.
    """
    if isinstance(objective, Direct):
        raise ValueError(
            f"{objective.name} of the return is not indifferent to mixtures: better in every branch may be worse "
            f"altogether, so no dynamic programming maximises it; {INSTEAD[objective.name]}"
        )
    hints = typing.get_type_hints(type(objective), include_extras=True)
    for name, value in parameters(objective).items():
        interval = hints[name].__metadata__[0]
        if value not in interval:
            raise ValueError(f"{objective.name}: {name} is {value}; it must be {interval}")
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma is {gamma}; it must be in (0, 1]: stocks are divided by it")
    if horizon is not None and horizon < 1:
        raise ValueError(f"horizon is {horizon}; it must be at least 1, or None in a problem without end")
    if gamma < 1 and objective.degree is None:
        raise ValueError(
            f"{objective.name} is not indifferent to gamma {gamma}: f(gamma x) orders returns otherwise than f(x), so "
            "a later choice that is best from there on need not be best from the start; use gamma 1 and a horizon"
        )
    if horizon is None and gamma == 1:
        raise ValueError("a problem without end needs gamma < 1, not 1: sweeps need not converge; give a horizon")
    if horizon is None and objective.lipschitz is None:
        raise ValueError(
            f"{objective.name} is not Lipschitz: in a problem without end no number of sweeps bounds its error; "
            "give a horizon"
        )


HEADER = (
    "objective",
    "f(x)",
    "indifferent to mixtures",
    "indifferent to gamma < 1",
    "Lipschitz constant",
    "first stock c0",
    "horizon, gamma = 1",
    "horizon, gamma < 1",
    "no horizon, gamma < 1",
)


def table() -> list[tuple[str, ...]]:
    """A row of strings under HEADER for each objective at its default parameters, refused ones last."""
    rows = []
    for objective in (cls() for cls in EXPECTED):
        numbers = ", ".join(f"{k} {v:g}" for k, v in parameters(objective).items())
        search, _, c0 = outer(objective)
        if search == "fixed":
            search = "the task's" if c0 is None else "-target" if hasattr(objective, "target") else "0"
        row = (
            f"{objective.name} ({numbers})" if numbers else objective.name,
            objective.formula,
            "yes",
            "no" if objective.degree is None else f"yes, degree {objective.degree}",
            "none" if objective.lipschitz is None else f"{objective.lipschitz:g}",
            "min, ties randomised" if search == "min" else search,
            *("yes" if _passes(objective, *problem) else "no" for problem in ((1.0, 1), (0.9, 1), (0.9, None))),
        )
        rows.append(row)
    return rows + [(name, "none", "no", "-", "-", instead, "no", "no", "no") for name, instead in INSTEAD.items()]


def _passes(objective, gamma, horizon) -> bool:
    try:
        check(objective, gamma, horizon)
    except ValueError:
        return False
    return True
