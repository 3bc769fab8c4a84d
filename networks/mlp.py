"""Multilayer perceptron on the last axis."""

from collections.abc import Callable, Sequence

import flax.linen as nn

from networks.norm import layer_norm


class MLP(nn.Module):
    """Maps `(..., in)` to `(..., sizes[-1])`.

    No activation after the last layer unless `activate_final`, which makes it a torso. With
    `normalize` every activation is preceded by a layer normalisation without parameters.
    """

    sizes: Sequence[int]
    activation: Callable = nn.relu
    activate_final: bool = False
    kernel_init: Callable = nn.initializers.lecun_normal()
    normalize: bool = False
    dot_general: Callable | None = None  # of the Dense layers; see networks/dense.py

    @nn.compact
    def __call__(self, x):
        for i, size in enumerate(self.sizes):
            x = nn.Dense(size, kernel_init=self.kernel_init, dot_general=self.dot_general)(x)
            if i + 1 < len(self.sizes) or self.activate_final:
                x = self.activation(layer_norm(x) if self.normalize else x)
        return x
