"""Datasets that need no download: made once by jitted code from fixed seeds, and kept in the user's cache folder.

Each is an entry of TABLE. A change to how one is made raises its version, and so makes it anew.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

import envs
from envs.types import Transition
from replay import datasets


class Builtin(NamedTuple):
    about: str
    env: str
    make: Callable[[str], Transition]  # (env) -> host arrays, episodes one after another
    version: int = 1


def swing_up(params, obs, key):
    """Brings Pendulum-v1 up and holds it there: about -141 an episode.

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


def pendulum(act=None, seed=0, num_envs=250):
    """Episodes of 200 steps, one in each of `num_envs` environments. Args: act, by default random."""

    def make(name):
        env = envs.make(name, num_envs)
        behaviour = act or uniform(env.spec)
        return datasets.episodes(datasets.roll_out(env, behaviour, (), jax.random.key(seed), 200))

    return make


TABLE = {
    "pendulum/expert": Builtin("energy swing-up and a linear controller", "Pendulum-v1", pendulum(swing_up, seed=1)),
    "pendulum/random": Builtin("uniformly random actions", "Pendulum-v1", pendulum(seed=2)),
}


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "bellmax" / "data"


def load(name: str, say=print) -> datasets.Dataset:
    """The built-in dataset of this name, made and cached where it is not there."""
    entry = TABLE[name]
    path = cache_folder() / f"{name.replace('/', '-')}-{entry.version}.npz"
    if path.exists():
        try:
            return dataclasses.replace(datasets.read(path, say), name=name)
        except datasets.BadInput as error:
            raise datasets.BadInput(f"{error}; delete it, and it is made anew") from None
    say(f"making dataset {name}")
    spec = envs.make(entry.env).spec
    dataset = datasets.admit(entry.make(entry.env), spec, name, entry.env, say=say)
    own = path.with_name(f"{path.stem}-{os.getpid()}.npz")  # another launch may be making it too
    try:
        datasets.save(own, dataset, dict(builtin=name, version=entry.version, about=entry.about))
        own.replace(path)
    except OSError as error:
        say(f"dataset {name} cannot be kept in {path.parent} ({error.strerror}); it is made anew each time")
    return dataset
