"""What an observation calls for: one vector of its parts, or a torso that serves vectors and pixels alike."""

from collections.abc import Callable
from math import prod

import flax.linen as nn
import jax
import jax.numpy as jnp

from networks.conv import AtariTorso, MinAtarTorso
from networks.mlp import MLP

DEFAULT_INIT = nn.initializers.lecun_normal()


def vectors(struct, obs) -> list:
    """The leaves of an observation, each flattened: `(..., features)` float32.

    Args: struct, `jax.ShapeDtypeStruct` of one observation, or a pytree of them; obs, leaves `(..., *shape)`.
    """

    def vector(s, x):
        return x.astype(jnp.float32).reshape(*x.shape[: x.ndim - len(s.shape)], prod(s.shape))

    return jax.tree.leaves(jax.tree.map(vector, struct, obs))


def flat(struct, obs):
    """The leaves of an observation side by side, `(..., features)`; `(observation, goal)` becomes one vector."""
    return jnp.concatenate(vectors(struct, obs), -1)


class FlatMLP(nn.Module):
    """Hidden layers on an observation of `obs_ndim` axes, flattened: `(..., *obs_shape)` to `(..., sizes[-1])`."""

    sizes: tuple[int, ...]
    obs_ndim: int = 1
    kernel_init: Callable = DEFAULT_INIT

    @nn.compact
    def __call__(self, obs):
        lead = obs.shape[: obs.ndim - self.obs_ndim]
        flat = obs.astype(jnp.float32).reshape(*lead, prod(obs.shape[len(lead) :]))
        return MLP(self.sizes, activate_final=True, kernel_init=self.kernel_init)(flat)


def split_network(obs, hidden, num_outputs, padding="SAME", kernel_init=DEFAULT_INIT):
    """The torso and the head of a network from one observation to `num_outputs` numbers.

    Args:
        obs: `jax.ShapeDtypeStruct` of one observation.
        hidden: widths of the fully connected hidden layers. They belong to the torso, except on
            84x84 pixels, where they belong to the head as in Atari networks.
        padding: of the Atari torso.
    Returns: two modules, `(..., *obs_shape)` to `(..., features)` and `(..., features)` to `(..., num_outputs)`.
    """
    hidden = tuple(hidden)
    match obs.shape:
        case (84, 84, _):
            return AtariTorso(padding, kernel_init), MLP((*hidden, num_outputs), kernel_init=kernel_init)
        case (10, 10, _):
            torso = MinAtarTorso(hidden, kernel_init)
        case _:
            torso = FlatMLP(hidden, len(obs.shape), kernel_init)
    return torso, MLP((num_outputs,), kernel_init=kernel_init)
