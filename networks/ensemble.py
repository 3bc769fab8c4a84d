"""K networks of one architecture: parameters with a leading axis K, applied by vmap."""

import jax


def init(module, key, num, *inputs):
    """Independent parameters for `num` networks; every leaf has leading axis `num`."""
    return jax.vmap(lambda k: module.init(k, *inputs))(jax.random.split(key, num))


def apply(module, params, *inputs):
    """The same inputs through every network: `(B, ...)` to `(K, B, ...)`."""
    return jax.vmap(lambda p: module.apply(p, *inputs))(params)
