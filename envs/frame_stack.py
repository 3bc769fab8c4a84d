"""Observations of several steps side by side, so that a network sees motion: `envs.make(id, frame_stack=4)`.

The last `num_frames` observations, oldest first, concatenated on their last axis: 84x84x1 pixels become
84x84x4, a vector of 3 becomes one of 12. Before an episode's first observation stand copies of it. A structured
observation is stacked leaf by leaf. Mnih et al. 2015 stack 4 frames.

A replay then stores whole stacks, `obs` and `next_obs` both, `num_frames` times the memory of single
frames: 56 kB for a transition of 84x84x4 uint8 pixels, 56 GB for a million.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envs.types import Mean, Spec, Transition, pytree, static


class EnvState(NamedTuple):
    inner: Any  # state of the environment that is wrapped
    obs: Any  # (num_envs, ..., num_frames * channels), the stack to act on


def repeat(frame, num_frames: int):
    """The stack at an episode's start. `(..., C)` to `(..., num_frames C)`."""
    return jnp.tile(frame, num_frames)


def push(stack, frame):
    """Drops the oldest frame and appends `frame`. Args: `(..., N C)` and `(..., C)`. Returns: `(..., N C)`."""
    return jnp.concatenate([stack[..., frame.shape[-1] :], frame], -1)


@pytree
class FrameStack:
    """`env` with stacked observations; rewards, ends and reported episodes are its own."""

    env: Any
    num_frames: int = static(default=4)

    @property
    def spec(self) -> Spec:
        frames = lambda s: jax.ShapeDtypeStruct((*s.shape[:-1], self.num_frames * s.shape[-1]), s.dtype)
        return self.env.spec._replace(obs=jax.tree.map(frames, self.env.spec.obs))

    @property
    def num_envs(self) -> int:
        return self.env.num_envs

    def reset(self, key) -> EnvState:
        inner = self.env.reset(key)
        return EnvState(inner, self._first(inner.obs))

    def step(self, key, state: EnvState, action) -> tuple[EnvState, Transition, dict[str, Mean]]:
        """As the inner environment's `step`, with stacks for `obs` and `next_obs`.

        On the last step of an episode `next_obs` ends in the true successor; the stack to act on
        next is copies of the new episode's first observation.
        """
        inner, transition, finished = self.env.step(key, state.inner, action)
        next_obs = jax.tree.map(push, state.obs, transition.next_obs)
        restart = jax.vmap(lambda done, new, old: jax.tree.map(lambda a, b: jnp.where(done, a, b), new, old))
        obs = restart(transition.terminated | transition.truncated, self._first(inner.obs), next_obs)
        return EnvState(inner, obs), transition._replace(obs=state.obs, next_obs=next_obs), finished

    def _first(self, obs):
        return jax.tree.map(lambda x: repeat(x, self.num_frames), obs)


def wrap(env, num_frames: int) -> FrameStack:
    """Raises: ValueError where an observation is a scalar, which has no axis to stack on."""
    if any(leaf.shape == () for leaf in jax.tree.leaves(env.spec.obs)):
        raise ValueError(f"frame_stack {num_frames} needs observations with at least one axis, not {env.spec.obs}")
    return FrameStack(env, num_frames)
