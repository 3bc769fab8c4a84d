"""Gymnasium's environments, `gym/<id>`, to evaluate in: stepped on the host between two chunks, never trained in.

Any id that Gymnasium has registered: `gym/Hopper-v5` (extra `offline`), `gym/CartPole-v1`; after a colon, those that
importing a package registers: `gym/gymnasium_robotics:PointMaze_UMaze-v3`. Parameters are keyword arguments of
`gymnasium.make`, `max_episode_steps` among them. `flatten` makes a structured observation one vector, by Gymnasium's
FlattenObservation.

Observations and actions are what replay/readers.py makes of a Minari dataset of the same environment: floats are
float32, a goal environment's observation is `(observation, achieved_goal, desired_goal)`, any other Dict's parts are in
the order of the alphabet, continuous actions are in [-1, 1] and scaled to their bounds, discrete ones count from 0.

Every episode is played in an instance of its own, made anew and seeded from the run's key, so that an evaluation
depends on keys and parameters alone.
"""

import contextlib
import dataclasses
import difflib
import importlib
import itertools
import warnings
from functools import partial

import gymnasium
import jax
import numpy as np
from gymnasium import spaces

from envs.params import convert
from envs.types import Spec, continuous_spec, discrete_spec
from replay import d4rl_scores
from replay.datasets import first_line

GOAL = ("observation", "achieved_goal", "desired_goal")
SUCCESS = ("success", "is_success")  # what an environment's `info` calls it

# Name without version -> a D4RL task that shares its reference returns. D4RL's are of MuJoCo's versions v2.
D4RL = {
    "HalfCheetah": "halfcheetah-medium-v2",
    "Hopper": "hopper-medium-v2",
    "Walker2d": "walker2d-medium-v2",
    "Ant": "ant-medium-v2",
    "AdroitHandPen": "pen-human-v1",
    "AdroitHandHammer": "hammer-human-v1",
    "AdroitHandDoor": "door-human-v1",
    "AdroitHandRelocate": "relocate-human-v1",
}


@contextlib.contextmanager
def quiet():
    """Without Gymnasium's warnings of newer versions, and MuJoCo's, which it also writes to a file where one works."""
    try:
        import mujoco
    except ImportError:
        mujoco = None
    try:
        if mujoco:
            mujoco.set_mju_user_warning(lambda text: None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="gymnasium")
            yield
    finally:
        if mujoco:
            mujoco.set_mju_user_warning(None)


@partial(jax.jit, static_argnames="num_envs")
def draw(keys, num_envs: int):
    """Seeds of resets `(R, num_envs)` int32 and keys of acting `(R,)`, from keys `(R,)`."""

    def one(key):
        seed_key, act_key = jax.random.split(key)
        return jax.random.randint(seed_key, (num_envs,), 0, 2**31 - 1), act_key

    return jax.vmap(one)(keys)


@partial(jax.jit, static_argnames=("algo", "spec"))
def act(algo, spec, configs, params, obs, keys, step):
    """Actions `(R, num_envs, ...)` at one step. Args: obs, leaves `(R, num_envs, ...)`; keys `(R,)`; step, from 0."""
    one = lambda config, params, obs, key: algo.act(config, spec, params, obs, jax.random.fold_in(key, step))
    return jax.vmap(one)(configs, params, obs, keys)


@dataclasses.dataclass(frozen=True)
class GymEnv:
    """An environment that only evaluates: it has `spec`, `num_envs` and `episodes`, but no `reset` and `step`."""

    name: str  # as Gymnasium has it
    params: dict  # keyword arguments of `create`
    observation_space: spaces.Space
    action_space: spaces.Space
    spec: Spec
    num_envs: int

    @quiet()
    def episodes(self, algo, configs, params, keys) -> dict:
        """Plays `num_envs` episodes of every run. Args as of runner.evaluate.evaluate.

        Returns: `(R, num_envs)` by name. `episode_success` is whether an episode has a step whose `info` says so, where
            any says anything. An episode ends where an action is not finite, and its return is then NaN.
        """
        if hasattr(algo, "begin"):
            raise ValueError(f"{algo.__name__} begins each episode in its own way, which gym/ cannot do")
        seeds, keys = draw(keys, self.num_envs)
        seeds = np.asarray(seeds)
        obs = jax.tree.map(lambda s: np.zeros((*seeds.shape, *s.shape), s.dtype), self.spec.obs)
        returns, lengths, success = (np.zeros(seeds.shape) for _ in range(3))  # (R, num_envs)
        said = False
        with contextlib.ExitStack() as stack:
            playing = {}  # (run, episode) -> instance
            for at in np.ndindex(seeds.shape):
                playing[at] = stack.enter_context(create(self.name, **self.params))
                self._put(obs, at, playing[at].reset(seed=int(seeds[at]))[0])
            for step in itertools.count():
                if not playing:
                    break
                actions = np.asarray(act(algo, self.spec, configs, params, obs, keys, step))
                for at, env in list(playing.items()):
                    if not np.isfinite(actions[at]).all():  # such as a diverged run's
                        returns[at] = np.nan
                        del playing[at]
                        continue
                    new_obs, reward, terminated, truncated, info = env.step(self.env_action(actions[at]))
                    self._put(obs, at, new_obs)
                    returns[at] += reward
                    lengths[at] += 1
                    for word in SUCCESS:
                        if word in info:
                            said, success[at] = True, max(success[at], bool(info[word]))
                    if terminated or truncated:
                        del playing[at]
        result = dict(episode_return=returns, episode_length=lengths)
        if said:
            result["episode_success"] = success
        if (family := self.name.rpartition("-v")[0]) in D4RL:
            result["episode_d4rl_score"] = d4rl_scores.normalized_score(D4RL[family], returns)
        return result

    def env_action(self, action: np.ndarray):
        """The environment's own action of ours: its bounds at -1 and 1, or counted from where its numbers start."""
        space = self.action_space
        if self.spec.action_type == "discrete":
            return space.dtype.type(action + space.start)
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        return (low + (action.astype(np.float64) + 1) / 2 * (high - low)).astype(space.dtype)

    def _put(self, obs, at: tuple, value):
        """Writes one instance's observation to its place in `obs`, leaves `(R, num_envs, ...)`."""
        for leaf, x in zip(jax.tree.leaves(obs), jax.tree.leaves(observe(self.observation_space, value)), strict=True):
            leaf[at] = x


def observe(space, value, alphabet: bool = False):
    """Observations of a Gymnasium space, one or a batch, as an array or tuples of them.

    Args: alphabet, the order of a goal environment's parts too. Raises: ValueError for other spaces.
    """
    if isinstance(space, spaces.Box):
        x = np.asarray(value)
        return x.astype(dict(f="float32").get(x.dtype.kind, {"int64": "int32"}.get(x.dtype.name, x.dtype)), copy=False)
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        raise ValueError(f"has observations of {type(space).__name__}; Box, and Dict or Tuple of it, are read")
    keys = sorted(space.keys()) if isinstance(space, spaces.Dict) else range(len(space))
    keys = GOAL if set(keys) == set(GOAL) and not alphabet else keys
    return tuple(observe(space[key], value[key], alphabet) for key in keys)


def shapes(value):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), value)


def spec_of(env: gymnasium.Env) -> Spec:
    """Raises: ValueError for spaces that have no place in a Spec, and for episodes without limit."""
    limit, space = env.spec.max_episode_steps, env.action_space
    if limit is None or limit < 1:
        raise ValueError("has episodes without limit; set --env-params.max-episode-steps")
    obs = shapes(observe(env.observation_space, env.observation_space.sample()))
    if isinstance(space, spaces.Discrete):
        return discrete_spec(obs, int(space.n), limit)
    if not isinstance(space, spaces.Box) or len(space.shape) != 1 or space.dtype.kind != "f":
        raise ValueError(f"has actions of {space}; Discrete ones and vectors of real numbers are possible")
    if not space.is_bounded():
        raise ValueError(f"has actions without bounds, {space}; they cannot be scaled from [-1, 1]")
    return continuous_spec(obs, space.shape[0], limit)


def create(name: str, flatten: bool = False, **params) -> gymnasium.Env:
    """One instance. Args: name, without `gym/`; params, keyword arguments of `gymnasium.make`."""
    env = gymnasium.make(name, **dict(disable_env_checker=True) | params)
    return gymnasium.wrappers.FlattenObservation(env) if flatten else env


@quiet()
def make(name: str, num_envs: int, flatten: bool = False, **params) -> GymEnv:
    """An environment to evaluate in. Steps one instance once, so that what is wrong with it is known at the door.

    Args: name, without `gym/`; num_envs, episodes of an evaluation; params, as of `create`.
    Raises: ValueError, one line, naming the closest ids of an unknown one, or the package that is not installed, or
        the parameters that do not fit, or the space that has no place in a Spec.
    """
    env_id = f"gym/{name}"
    if num_envs < 1:
        raise ValueError(f"num_envs {num_envs} must be at least 1")
    flatten = bool(convert(env_id, dict(flatten=flatten), dict(flatten=False))["flatten"])
    truth = lambda x: dict(true=True, false=False).get(x.lower(), x) if isinstance(x, str) else x
    params = {key: truth(x) for key, x in params.items()} | (dict(flatten=True) if flatten else {})
    given = f" with {params}" if params else ""
    module, _, name = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        if name in gymnasium.registry:
            env = create(name, **params)
    except Exception as error:  # an environment's constructor may raise anything
        raise ValueError(f"{env_id} cannot be made{given}: {first_line(error)}{remedy(error)}") from None
    if name not in gymnasium.registry:
        close = ", ".join(f"gym/{x}" for x in difflib.get_close_matches(name, gymnasium.registry, 3, 0))
        raise ValueError(f"unknown environment {env_id!r}; closest: {close}; of another package: gym/PACKAGE:ID")

    with env:
        try:
            made = GymEnv(name, params, env.observation_space, env.action_space, spec_of(env), num_envs)
        except ValueError as error:
            raise ValueError(f"{env_id} {first_line(error)}") from None
        try:
            env.reset(seed=0)
            middle = np.zeros(made.spec.action.shape, made.spec.action.dtype)
            obs = shapes(observe(env.observation_space, env.step(made.env_action(middle))[0]))
        except Exception as error:
            raise ValueError(f"{env_id}{given} fails at its first step: {first_line(error)}") from None
        if obs != made.spec.obs:
            raise ValueError(f"{env_id} observes {obs}, its space says {made.spec.obs}")
    return made


def remedy(error: Exception) -> str:
    """What to install, where the extra `offline` has it."""
    if not isinstance(error, ImportError | gymnasium.error.DependencyNotInstalled):
        return ""
    if not any(word in str(error) for word in ("gymnasium[mujoco]", "imageio")):
        return ""
    return "; needs the extra `offline`: `uv run --extra offline ...`, or `pip install -e '.[offline]'`"
