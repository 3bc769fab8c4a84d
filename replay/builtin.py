"""Datasets that need no download: made once by jitted code from fixed seeds, and kept in the user's cache folder.

Each is an entry of TABLE. A change to how one is made raises its version, and so makes it anew.
"""

import dataclasses
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

import envs
from envs.types import Transition
from replay import datasets, mazes


class Builtin(NamedTuple):
    about: str
    env: str
    make: Callable[[str], Transition]  # (env) -> host arrays, episodes one after another
    version: int = 1


def swing_up(params, obs, key):
    """Brings Pendulum-v1 up and holds it there: about -152 an episode.

    Far from the top the action pushes with the swing while the energy w^2 / 2 + 15 cos(theta) is below the 15 of
    resting on the top; near it a linear controller holds: torque -(8 theta + 2 w), of at most 2.
    """
    cos, sin, w = obs[..., 0], obs[..., 1], obs[..., 2]
    torque = -(8 * jnp.arctan2(sin, cos) + 2 * w)
    missing = 15 - (0.5 * jnp.square(w) + 15 * cos)
    pump = jnp.clip(missing, -1, 1) * jnp.where(w >= 0, 1, -1)
    hold = (jnp.abs(torque) < 4) & (cos > 0.5)
    return jnp.clip(jnp.where(hold, torque / 2, pump), -1, 1)[..., None]


def uniform(spec):
    """Random actions, uniform over what there is."""
    if spec.action_type == "discrete":
        return lambda params, obs, key: jax.random.randint(key, leading(spec, obs), 0, spec.num_actions)
    return lambda params, obs, key: jax.random.uniform(key, (*leading(spec, obs), spec.action_size), minval=-1)


def leading(spec, obs) -> tuple:
    first, shape = jax.tree.leaves(obs)[0], jax.tree.leaves(spec.obs)[0].shape
    return first.shape[: first.ndim - len(shape)]


def balance(params, obs, key):
    """Keeps CartPole-v1 up for its 500 steps: pushes to where the pole falls, and the cart back to the middle."""
    x, x_dot, theta, theta_dot = (obs[..., i] for i in range(4))
    return (theta + 0.3 * theta_dot + 0.05 * x + 0.1 * x_dot > 0).astype(jnp.int32)


def mixed_with(act, other, share: float):
    """Acts by `other` with probability `share`, anew for each environment on each step, else by `act`."""

    def mixture(params, obs, key):
        choice_key, act_key, other_key = jax.random.split(key, 3)
        first, second = act(params, obs, act_key), other(params, obs, other_key)
        swap = jax.random.bernoulli(choice_key, share, first.shape[:1])
        return jnp.where(swap.reshape(-1, *[1] * (first.ndim - 1)), second, first)

    return mixture


def acting(expert, noise: float, seed: int, num_envs: int, num_steps: int):
    """What `expert` does where a share `noise` of its actions are random ones."""

    def make(name):
        env = envs.make(name, num_envs)
        act = mixed_with(expert, uniform(env.spec), noise)
        return datasets.episodes(datasets.roll_out(env, act, (), jax.random.key(seed), num_steps))

    return make


def union(*makers):
    return lambda name: datasets.join([make(name) for make in makers])


def suite(prefix: str, env: str, expert, medium: float, about: str, num_envs: int, num_steps: int) -> dict:
    """`random`, `medium` (a share `medium` of random actions), `expert`, and `mixed`, the three one after another.

    The three are of one size where all episodes are of one length, and else differ by the unfinished ones left out.
    """
    shares_and_seeds = dict(random=(1.0, 2), medium=(medium, 3), expert=(0.0, 1))
    parts = {name: acting(expert, *pair, num_envs, num_steps) for name, pair in shares_and_seeds.items()}
    entries = dict(
        random=Builtin("uniformly random actions", env, parts["random"]),
        medium=Builtin(f"{about}; {medium:.0%} of actions are random", env, parts["medium"]),
        expert=Builtin(about, env, parts["expert"]),
        mixed=Builtin("random, medium and expert, one after another", env, union(*parts.values())),
    )
    return {f"{prefix}/{name}": entry for name, entry in entries.items()}


TABLE = {
    **suite("pendulum", "Pendulum-v1", swing_up, 0.7, "energy swing-up and a linear controller", 250, 200),
    **{name: Builtin(*entry) for name, entry in mazes.TABLE.items()},
    **suite("cartpole", "CartPole-v1", balance, 0.5, "a linear controller", 100, 600),
}


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "bellmax" / "data"


def load(name: str, say=print) -> datasets.Dataset:
    """The built-in dataset of this name, made and cached where it is not there."""
    entry = TABLE[name]
    path = cache_folder() / f"{name.replace('/', '-')}-{entry.version}.npz"
    if os.path.exists(path):  # not of the Path, which raises where it may not look
        try:
            return dataclasses.replace(datasets.read(path, say), name=name)
        except datasets.NoRoom:
            raise
        except datasets.BadInput as error:
            raise datasets.BadInput(f"{error}; delete it, and it is made anew") from None
    say(f"making dataset {name}")
    spec = envs.make(entry.env).spec
    dataset = datasets.admit(entry.make(entry.env), spec, name, entry.env, say=say)
    own = path.with_name(f"{path.stem}-{uuid.uuid4().hex}.npz")  # another launch may be making it too
    try:
        datasets.save(own, dataset, dict(builtin=name, version=entry.version, about=entry.about))
        own.replace(path)
    except OSError as error:
        say(f"dataset {name} cannot be kept in {path.parent} ({error.strerror}); it is made anew each time")
    return dataset
