"""Vectorised gymnax (>= 1.0) environments: every id that gymnax registers.

Auto-reset is gymnax's own: an episode that ends is followed by a fresh initial state drawn from
the step's key. `next_obs` is gymnax's `final_observation`, the observation before that reset.
Importing this file imports gymnax, which costs seconds: import it where an environment is made.
"""

import difflib
from typing import NamedTuple

import gymnax
import jax
import jax.numpy as jnp
import numpy as np

from envs.types import Mean, Spec, Transition, continuous_spec, discrete_spec, pytree, static


class EnvState(NamedTuple):
    """`num_envs` environments; every leaf has that leading axis."""

    inner: object
    obs: jax.Array  # (num_envs, *obs_shape), the observation to act on
    episode_return: jax.Array  # (num_envs,) reward so far in this episode
    episode_length: jax.Array  # (num_envs,) env steps so far in this episode


@pytree
class GymnaxEnv:
    params: object  # gymnax's own parameters: leaves, so a new value does not recompile
    action_low: jax.Array | None  # (action_size,) the env's own bounds; None where discrete
    action_high: jax.Array | None
    env: object = static()
    spec: Spec = static()
    num_envs: int = static(default=1)

    def reset(self, key) -> EnvState:
        """Fresh initial states for all environments."""
        obs, inner = jax.vmap(self.env.reset, (0, None))(jax.random.split(key, self.num_envs), self.params)
        return EnvState(inner, self._cast(obs), jnp.zeros(self.num_envs), jnp.zeros(self.num_envs, jnp.int32))

    def step(self, key, state: EnvState, action) -> tuple[EnvState, Transition, dict[str, Mean]]:
        """Steps every environment, resetting those whose episode ended.

        Args: action `(num_envs,)` int32, or `(num_envs, action_size)` in [-1, 1].
        Returns: the next state; the transition, with leading axis `num_envs`; and `episode_return`
            and `episode_length` of the episodes that ended on this step, per environment.
        """
        keys = jax.random.split(key, self.num_envs)
        obs, inner, reward, terminated, truncated, info = jax.vmap(self.env.step, (0, 0, 0, None))(
            keys, state.inner, self._env_action(action), self.params
        )
        done = terminated | truncated
        reward = reward.astype(jnp.float32)
        episode_return = state.episode_return + reward
        episode_length = state.episode_length + 1
        finished = dict(
            episode_return=Mean(episode_return * done, done),
            episode_length=Mean(episode_length * done, done),
        )
        transition = Transition(state.obs, action, reward, self._cast(info["final_observation"]), terminated, truncated)
        next_state = EnvState(inner, self._cast(obs), episode_return * ~done, episode_length * ~done)
        return next_state, transition, finished

    def _env_action(self, action):
        if self.action_low is None:
            return action
        action = self.action_low + (action + 1) / 2 * (self.action_high - self.action_low)
        return action.reshape(self.num_envs, *self.env.action_space(self.params).shape)

    def _cast(self, obs):
        return jax.tree.map(lambda x, s: x.astype(s.dtype), obs, self.spec.obs)


def action_type(name: str) -> str:
    """`discrete` or `continuous`, without building the environment's arrays."""
    env, params = gymnax.make(name)
    return "discrete" if hasattr(env.action_space(params), "n") else "continuous"


def names() -> list[str]:
    return list(gymnax.registered_envs)


def make(name: str, num_envs: int, **params) -> GymnaxEnv:
    """Builds `num_envs` copies of a registered gymnax environment.

    Args: params, gymnax parameters by name, for example `max_steps_in_episode=100`.
    Raises: ValueError naming a parameter the environment does not have and the closest it has.
    """
    try:
        env, defaults = gymnax.make(name)
    except OSError as error:  # MNISTBandit-bsuite fetches its images
        raise ValueError(f"{name} needs a download that failed ({error}); choose another environment") from None
    for key in params:
        if not hasattr(defaults, key):
            known = sorted(vars(defaults))
            close = difflib.get_close_matches(key, known, 1, 0)
            raise ValueError(f"{name} has no parameter {key!r}; did you mean {close[0]!r}? It has: {', '.join(known)}")
    env_params = defaults.replace(**params)

    obs, _ = jax.eval_shape(env.reset, jax.random.key(0), env_params)
    # Pixels and other flags keep their own dtype; python-float and integer rewards become float32.
    obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), obs)
    max_steps = int(env_params.max_steps_in_episode)
    space = env.action_space(env_params)
    if hasattr(space, "n"):
        return GymnaxEnv(env_params, None, None, env, discrete_spec(obs, int(space.n), max_steps), num_envs)
    shape = tuple(space.shape)
    low, high = (jnp.asarray(np.broadcast_to(b, shape), jnp.float32).reshape(-1) for b in (space.low, space.high))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(f"{name} has an unbounded action box [{low}, {high}]; Bellmax maps [-1, 1] to finite bounds")
    return GymnaxEnv(env_params, low, high, env, continuous_spec(obs, low.size, max_steps), num_envs)
