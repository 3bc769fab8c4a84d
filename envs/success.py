"""Success as the only reward of reaching and pushing: `envs.make("brax/reacher", success_distance=0.05)`.

    r = 1 and the episode terminates where distance <= success_distance, otherwise r = 0

`success_distance` is in metres, and the distance is read from the observation that a step leads to:

    brax/reacher   ||obs[8:11]||                fingertip to target, as Brax's `reward_dist`
    brax/pusher    ||obs[17:19] - obs[20:22]||  object to goal in the plane that the object slides in

Source: `_get_obs` of brax/envs/reacher.py and pusher.py. Deviations from their `reward_dist`: pusher's is of the state
before the step, ours of the one after; and it includes the height, of which object and goal keep 0.048 between them, so
that hardly a position would be within 0.05.

An episode ends with its first reward, so `episode_return` is 1 or 0 and `episode_success` equals it. A success restarts
from the pool as any end does (envs/brax_env.py); the time limit still truncates, and both can come on one step. Of
reacher's starts 1.2% are within 0.05 of the target, 6% within 0.1; pusher's are no nearer than 0.17. Action costs and
stacks of frames come outside.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.brax_env import BraxEnv, EnvState
from envs.params import convert
from envs.types import Mean, Spec, Transition, pytree, static


class Task(NamedTuple):
    start: int  # where the observation holds the point to bring
    goal: int | None  # where it holds the goal; None where `start` already holds the vector between them
    size: int  # dimensions of the distance
    below: float  # success distances that make a task, in metres
    why: str


TASKS = {
    "brax/reacher": Task(8, None, 3, 0.41, "as far as a fingertip can be from a target"),
    "brax/pusher": Task(17, 20, 2, 0.17, "where episodes begin"),
}


def distance(obs, task: Task):
    """How far an observation is from success, in metres. Args: obs `(..., obs_size)`. Returns: `(...,)`."""
    vector = obs[..., task.start : task.start + task.size]
    if task.goal is not None:
        vector = vector - obs[..., task.goal : task.goal + task.size]
    return jnp.linalg.norm(vector, axis=-1)


class _Sparse(NamedTuple):
    """One Brax environment that pays 1 for success, and ends there."""

    env: object
    task: Task
    success_distance: jax.Array

    def reset(self, key):
        return self.env.reset(key)

    def step(self, state, action):
        state = self.env.step(state, action)
        success = jnp.float32(distance(state.obs, self.task) <= self.success_distance)
        return state.replace(reward=success, done=success)


@pytree
class Success:
    """`env` with success for its reward and its end."""

    env: BraxEnv
    success_distance: jax.Array  # () float32, metres; data, so a new value does not recompile
    task: Task = static()

    @property
    def spec(self) -> Spec:
        return self.env.spec

    @property
    def num_envs(self) -> int:
        return self.env.num_envs

    def reset(self, key) -> EnvState:
        return self.env.reset(key)

    def step(self, key, state: EnvState, action) -> tuple[EnvState, Transition, dict[str, Mean]]:
        """As BraxEnv's `step` on the sparse task, and `episode_success` of the episodes that ended."""
        sparse = dataclasses.replace(self.env, env=_Sparse(self.env.env, self.task, self.success_distance))
        state, transition, finished = sparse.step(key, state, action)
        return state, transition, dict(finished, episode_success=finished["episode_return"])


def check(name: str, success_distance) -> float:
    """The distance as a number. Raises: ValueError for an environment without one, or one that makes no task."""
    if name not in TASKS:
        raise ValueError(f"{name} has no parameter 'success_distance'; those that have it: {', '.join(TASKS)}")
    given = convert(name, dict(success_distance=success_distance), dict(success_distance=0.05))["success_distance"]
    below, why = TASKS[name].below, TASKS[name].why
    if not 0 < np.float32(given) < below:
        raise ValueError(f"{name}: success_distance {given:g} must be more than 0 and less than {below}, {why}")
    return float(given)


def wrap(env: BraxEnv, name: str, success_distance: float) -> Success:
    return Success(env, jnp.float32(success_distance), TASKS[name])
