"""The words every algorithm, environment and runner shares: transitions, specs, configs, examples."""

import dataclasses
import math
from typing import Annotated, Any, NamedTuple

import jax
from jax.tree import static  # noqa: F401  re-exported: the static fields of a `pytree`


def pytree(cls):
    """Frozen dataclass registered as a pytree; fields made by `static` are aux data, compared by ==."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


class Spec(NamedTuple):
    """What networks are sized from. Exactly one of `num_actions` and `action_size` is set.

    `obs` keeps its structure: an array, or for example `(observation, goal)`, as a pytree of
    `jax.ShapeDtypeStruct` without batch axes. Hashable as long as the pytree is made of tuples.
    """

    obs: Any
    action: jax.ShapeDtypeStruct  # () int32 where discrete, (action_size,) float32 where continuous
    num_actions: int | None = None  # discrete actions, in [0, num_actions)
    action_size: int | None = None  # continuous actions, in [-1, 1]^action_size
    max_episode_steps: int = 0  # env steps; 0 where episodes have no limit

    @property
    def action_type(self) -> str:
        return "continuous" if self.num_actions is None else "discrete"


def discrete_spec(obs, num_actions: int, max_episode_steps: int) -> Spec:
    return Spec(obs, jax.ShapeDtypeStruct((), "int32"), num_actions, None, max_episode_steps)


def continuous_spec(obs, action_size: int, max_episode_steps: int) -> Spec:
    return Spec(obs, jax.ShapeDtypeStruct((action_size,), "float32"), None, action_size, max_episode_steps)


def zeros(spec):
    """Zeros of the shapes and dtypes in a pytree of `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), spec)


class Transition(NamedTuple):
    """One environment transition; every field may have leading batch axes `...`.

    `next_obs` is the true successor of `obs`: on the last step of an episode it is the observation
    before the automatic reset. Bootstrap with `1 - terminated`; cut multi-step windows at
    `terminated | truncated`. Both flags can be true on one step: then the MDP ended.
    """

    obs: Any  # (..., *obs_shape)
    action: Any  # (...,) int32, or (..., action_size) float32 in [-1, 1]
    reward: Any  # (...,) float32
    next_obs: Any  # (..., *obs_shape)
    terminated: Any  # (...,) bool: the MDP ended
    truncated: Any  # (...,) bool: a time limit cut the episode


def example_transition(spec: Spec) -> Transition:
    """A transition of zeros without batch axes, to size a replay from."""
    obs = zeros(spec.obs)
    return Transition(
        obs, zeros(spec.action), jax.numpy.float32(0), obs, jax.numpy.bool_(False), jax.numpy.bool_(False)
    )


class EnvAndData(NamedTuple):
    """What an algorithm learns from that has a dataset and acts in an environment."""

    env: Any
    dataset: Any  # replay.datasets.Dataset; None where demonstrations are left out

    @property
    def spec(self) -> Spec:
        return self.env.spec


class Mean(NamedTuple):
    """A metric whose average over a chunk is `sum(total) / sum(count)`, NaN where nothing was counted."""

    total: Any
    count: Any


def episode_metrics(episode_return, episode_length, done) -> dict[str, Mean]:
    """What an environment reports of the episodes that end on a step. Args: all `(num_envs,)`."""
    return dict(
        episode_return=Mean(episode_return * done, done),
        episode_length=Mean(episode_length * done, done),
    )


# The kinds of number a Config holds. `runner.check` refuses a value outside its interval before
# anything compiles, so a typo in a sweep costs one line and no machine time.
class Interval(NamedTuple):
    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, x) -> bool:
        above = x > self.low if self.open_low else x >= self.low
        below = x < self.high if self.open_high else x <= self.high
        return bool(above and below)

    def __str__(self):
        if self.high < math.inf:
            return f"in {'(['[not self.open_low]}{self.low:g}, {self.high:g}{')]'[not self.open_high]}"
        bound = "" if self.low == -math.inf else f"{'more than' if self.open_low else 'at least'} {self.low:g}"
        return " and ".join(filter(None, [bound, "finite" if self.open_high else ""]))


Real = Annotated[float, Interval(-math.inf, math.inf, True, True)]
Positive = Annotated[float, Interval(0, math.inf, True, True)]
NonNegative = Annotated[float, Interval(0, math.inf, False, True)]
Fraction = Annotated[float, Interval(0, 1)]
Count = Annotated[int, Interval(1, math.inf)]  # at least one
Natural = Annotated[int, Interval(0, math.inf)]  # zero allowed
Widths = Annotated[tuple[int, ...], Interval(1, math.inf)]  # of hidden layers, first to last


EDGE = 0.02  # a continuous action counts as at the bounds within 2% of them: |a| >= 0.98


class Example(NamedTuple):
    """The task that `scripts/train.py --algo NAME` alone trains on; its flags' defaults."""

    source: str  # what --env, --dataset or --mdp defaults to
    steps: int  # env steps (online, prefill included), gradient steps (offline) or sweeps (dynamic programming)
    eval_period: int  # in the units of `steps`
    config: Any
    num_envs: int = 1
    seeds: tuple[int, ...] = (0,)
