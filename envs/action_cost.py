"""A cost of continuous actions: `envs.make(id, action_cost=0.1, action_change_cost=0.1)`.

    r'_t = r_t - c1 ||a_t||^2 - c2 ||a_t - a_{t-1}||^2

c1 is `action_cost`, c2 `action_change_cost`. Both norms are sums over the D dimensions of actions in [-1, 1], so c1 is
the cost of one dimension held at a bound for one step. An episode's first step has no a_{t-1} and pays for no change.

- Where c2 > 0 the reward depends on the last action, and the observation ends in it: a vector of size n becomes n + D,
  with zeros at an episode's start. `next_obs` ends in the action just taken.
- Agents learn from r'. `episode_return`, and so `eval_return`, is the task's own, the sum of r; beside it
  `episode_action_cost` is the sum of what was paid, the sum of r - r'.
- For actions in {-1, 1}^D the first cost is the constant c1 D per step. It leaves advantages as they are where no
  episode terminates: values fall by c1 D / (1 - gamma) everywhere. Where one can, ending it early becomes worth more.

Frames are stacked outside: each holds the last action of its step.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.types import Mean, Spec, Transition, pytree, static


class EnvState(NamedTuple):
    inner: Any  # state of the environment that is wrapped
    obs: Any  # (num_envs, *obs_shape), the observation to act on
    last_action: jax.Array  # (num_envs, D), zeros at an episode's start
    started: jax.Array  # (num_envs,) bool, whether this episode has a last action
    episode_action_cost: jax.Array  # (num_envs,) paid so far in this episode


def cost(action, last_action, started, weight, change_weight):
    """c1 ||a||^2 + c2 ||a - a_last||^2, the latter only where `started`.

    Args: action, last_action `(..., D)`; started `(...,)` bool; weight, change_weight, c1 and c2, scalars.
    Returns: `(...,)`.
    """
    change = jnp.square(action - last_action).sum(-1) * started
    return weight * jnp.square(action).sum(-1) + change_weight * change


@pytree
class ActionCost:
    """`env` with costs taken from its reward; ends and reported returns are its own."""

    env: Any
    weight: jax.Array  # c1, () float32; data, so a new value does not recompile
    change_weight: jax.Array  # c2
    appends: bool = static(default=False)  # the last action, to the observation

    @property
    def spec(self) -> Spec:
        spec = self.env.spec
        if not self.appends:
            return spec
        return spec._replace(obs=jax.ShapeDtypeStruct((spec.obs.shape[0] + spec.action_size,), spec.obs.dtype))

    @property
    def num_envs(self) -> int:
        return self.env.num_envs

    def reset(self, key) -> EnvState:
        inner = self.env.reset(key)
        last_action = jnp.zeros((self.num_envs, self.spec.action_size))
        started = jnp.zeros(self.num_envs, bool)
        return EnvState(inner, self._append(inner.obs, last_action), last_action, started, jnp.zeros(self.num_envs))

    def step(self, key, state: EnvState, action) -> tuple[EnvState, Transition, dict[str, Mean]]:
        """As the inner environment's `step`, less the costs, and `episode_action_cost` of the episodes that ended."""
        inner, transition, finished = self.env.step(key, state.inner, action)
        paid = cost(action, state.last_action, state.started, self.weight, self.change_weight)
        total = state.episode_action_cost + paid
        next_obs = self._append(transition.next_obs, action)
        transition = transition._replace(obs=state.obs, reward=transition.reward - paid, next_obs=next_obs)
        done = transition.terminated | transition.truncated
        finished = dict(finished, episode_action_cost=Mean(total * done, done))
        last_action = jnp.where(done[:, None], 0.0, action)
        next_state = EnvState(inner, self._append(inner.obs, last_action), last_action, ~done, total * ~done)
        return next_state, transition, finished

    def _append(self, obs, action):
        return jnp.concatenate([obs, action.astype(obs.dtype)], -1) if self.appends else obs


def wrap(env, action_cost: float, action_change_cost: float) -> ActionCost:
    """Raises: ValueError for a negative or infinite cost, discrete actions, or a last action with nowhere to go."""
    for name, value in dict(action_cost=action_cost, action_change_cost=action_change_cost).items():
        if not 0 <= np.float32(value) < math.inf:
            raise ValueError(f"{name} {value:g} must be at least 0 and finite")
    if env.spec.action_type == "discrete":
        raise ValueError("action_cost and action_change_cost need continuous actions; this environment's are discrete")
    obs = env.spec.obs
    if action_change_cost and not (hasattr(obs, "shape") and len(obs.shape) == 1 and obs.dtype.kind == "f"):
        raise ValueError(f"action_change_cost appends the last action to a vector of floats; observations are {obs}")
    return ActionCost(env, jnp.float32(action_cost), jnp.float32(action_change_cost), action_change_cost > 0)
