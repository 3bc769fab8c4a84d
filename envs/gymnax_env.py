"""Vectorised gymnax (>= 1.0) environments: every id that gymnax registers.

Auto-reset is gymnax's own: an episode that ends is followed by a fresh initial state drawn from
the step's key. `next_obs` is gymnax's `final_observation`, the observation before that reset.

Observations keep gymnax's dtype, with two exceptions. MinAtar's are zeros and ones in float32 and
become bool, a quarter of the replay memory. A scalar index (FrozenLake) becomes a one-hot float32
vector, which a network can learn from.

Importing gymnax costs seconds, so `make` does it; names and action types are known without.
"""

import sys
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.params import convert
from envs.types import Mean, Spec, Transition, continuous_spec, discrete_spec, episode_metrics, pytree, static

# What gymnax registers; tests/test_envs.py compares it with gymnax's own registry.
DISCRETE = (
    *("CartPole-v1", "Acrobot-v1", "MountainCar-v0"),
    *("Asterix-MinAtar", "Breakout-MinAtar", "Freeway-MinAtar", "Seaquest-MinAtar", "SpaceInvaders-MinAtar"),
    *("Catch-bsuite", "DeepSea-bsuite", "MemoryChain-bsuite", "UmbrellaChain-bsuite", "DiscountingChain-bsuite"),
    *("MNISTBandit-bsuite", "SimpleBandit-bsuite", "BernoulliBandit-misc", "GaussianBandit-misc"),
    *("FourRooms-misc", "MetaMaze-misc", "Pong-misc", "FrozenLake-misc"),
)
CONTINUOUS = ("Pendulum-v1", "MountainCarContinuous-v0", "PointRobot-misc", "Reacher-misc", "Swimmer-misc")


class EnvState(NamedTuple):
    """`num_envs` environments; every leaf has that leading axis."""

    inner: object
    obs: jax.Array  # (num_envs, *obs_shape), the observation to act on
    episode_return: jax.Array  # (num_envs,) reward so far in this episode
    episode_length: jax.Array  # (num_envs,) env steps so far in this episode


@pytree
class GymnaxEnv:
    params: object  # gymnax's own parameters: arrays, so a new value does not recompile
    action_low: jax.Array | None  # (action_size,) the env's own bounds; None where discrete
    action_high: jax.Array | None
    env: object = static()
    spec: Spec = static()
    num_envs: int = static(default=1)

    def reset(self, key) -> EnvState:
        """Fresh initial states for all environments."""
        keys = jax.random.split(key, self.num_envs)
        with jax.numpy_rank_promotion("allow"):  # gymnax's Swimmer needs it; our own code does not
            obs, inner = jax.vmap(self.env.reset, (0, None))(keys, self.params)
        # gymnax begins with weakly typed zeros; a state whose types change would compile every chunk twice.
        inner = jax.tree.map(lambda x: x.astype(x.dtype), inner)
        return EnvState(inner, self._encode(obs), jnp.zeros(self.num_envs), jnp.zeros(self.num_envs, jnp.int32))

    def step(self, key, state: EnvState, action) -> tuple[EnvState, Transition, dict[str, Mean]]:
        """Steps every environment, resetting those whose episode ended.

        Args: action `(num_envs,)` int32, or `(num_envs, action_size)` in [-1, 1].
        Returns: the next state; the transition, with leading axis `num_envs`; and `episode_return`
            and `episode_length` of the episodes that ended on this step, per environment.
        """
        keys = jax.random.split(key, self.num_envs)
        env_action = self._env_action(action)
        with jax.numpy_rank_promotion("allow"):
            obs, inner, reward, terminated, truncated, info = jax.vmap(self.env.step, (0, 0, 0, None))(
                keys, state.inner, env_action, self.params
            )
        inner = jax.tree.map(lambda new, old: new.astype(old.dtype), inner, state.inner)
        next_obs = self._encode(info["final_observation"])
        reward = reward.astype(jnp.float32)
        done = terminated | truncated
        episode_return = state.episode_return + reward
        episode_length = state.episode_length + 1
        finished = episode_metrics(episode_return, episode_length, done)
        transition = Transition(state.obs, action, reward, next_obs, terminated, truncated)
        next_state = EnvState(inner, self._encode(obs), episode_return * ~done, episode_length * ~done)
        return next_state, transition, finished

    def _env_action(self, action):
        if self.action_low is None:
            return action
        low, high = self.action_low[None], self.action_high[None]
        action = low + (action + 1) / 2 * (high - low)
        return action.reshape(self.num_envs, *self.env.action_space(self.params).shape)

    def _encode(self, obs):
        """gymnax's observations `(num_envs, ...)` as `spec.obs` says."""
        one_hot = lambda x, s: jax.nn.one_hot(x, *s.shape, dtype=s.dtype)
        return jax.tree.map(
            lambda x, s: x.astype(s.dtype) if x.ndim > len(s.shape) else one_hot(x, s), obs, self.spec.obs
        )


def action_type(name: str) -> str:
    """`discrete` or `continuous`."""
    if name in DISCRETE + CONTINUOUS:
        return "discrete" if name in DISCRETE else "continuous"
    return make(name, 1).spec.action_type


def names() -> list[str]:
    """gymnax's own ids, and those that this program has given to `gymnax.register`."""
    gymnax = sys.modules.get("gymnax")  # where it is not imported, nothing was registered
    return list(dict.fromkeys(DISCRETE + CONTINUOUS + tuple(gymnax.registered_envs if gymnax else ())))


@cache  # one instance for each id: it is a static argument of gymnax's jitted functions
def _create(name: str):
    import gymnax

    try:
        return gymnax.make(name)
    except OSError as error:
        raise ValueError(
            f"{name} downloads its images, and that failed ({error}); choose another environment"
        ) from None


def make(name: str, num_envs: int, **params) -> GymnaxEnv:
    """Builds `num_envs` copies of a registered gymnax environment.

    Args: params, gymnax parameters by name, for example `max_steps_in_episode=100`. CartPole's
        `total_mass` and `polemass_length` follow its masses and length unless given.
    Raises: ValueError naming a parameter the environment does not have and the closest it has, or
        a value of the wrong type.
    """
    env, defaults = _create(name)
    given = convert(name, params, vars(defaults), positive=("max_steps_in_episode",))
    if name == "CartPole-v1":  # gymnax stores the products beside their factors, and steps by both
        p = vars(defaults) | given
        derived = dict(total_mass=p["masscart"] + p["masspole"], polemass_length=p["masspole"] * p["length"])
        given = derived | given
    # Through NumPy, so that a default and a given value have one type: Python numbers are weakly typed.
    env_params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), defaults.replace(**given))

    obs, _ = jax.eval_shape(env.reset, jax.random.key(0), env_params)
    observation_space = env.observation_space(env_params)
    if name.endswith("-MinAtar"):
        obs = jax.ShapeDtypeStruct(obs.shape, jnp.bool_)
    elif hasattr(observation_space, "n"):
        obs = jax.ShapeDtypeStruct((int(observation_space.n),), jnp.float32)
    else:
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
