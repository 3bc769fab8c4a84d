"""Multilayer perceptron on the last axis."""

from collections.abc import Callable, Sequence

import flax.linen as nn


class MLP(nn.Module):
    """Maps `(..., in)` to `(..., sizes[-1])`.

    No activation after the last layer unless `activate_final`, which makes it a torso.
    """

    sizes: Sequence[int]
    activation: Callable = nn.relu
    activate_final: bool = False
    kernel_init: Callable = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x):
        for i, size in enumerate(self.sizes):
            x = nn.Dense(size, kernel_init=self.kernel_init)(x)
            if i + 1 < len(self.sizes) or self.activate_final:
                x = self.activation(x)
        return x
