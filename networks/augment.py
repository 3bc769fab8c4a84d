"""Augmentation of pixels: the random shift of DrQ.

Source: Kostrikov et al. 2021 (DrQ), with the pad of 4 pixels on 84x84 that Yarats et al. 2021
(DrQ-v2) and MR.Q keep. DrQ-v2's code interpolates between pixels at offsets that are whole numbers;
here the offsets are indices, and the pixels keep their dtype.
"""

import jax
import jax.numpy as jnp


def shift(pixels, offset_y, offset_x, pad: int):
    """Each image padded by `pad` copies of its edge on every side, then cropped at its offset to its old size.

    The padded image is never built: out[i, j] = image[clip(i + y - pad), clip(j + x - pad)].

    Args: pixels `(..., height, width, channels)`; offset_y and offset_x `(...)` integers in
        [0, 2 pad], where `pad` leaves the image as it is.
    """

    def clipped(size, offset):  # the rows or columns to read, (..., size)
        lead = (1,) * offset.ndim
        return jnp.clip(jnp.arange(size).reshape(*lead, size) + offset[..., None] - pad, 0, size - 1)

    rows = clipped(pixels.shape[-3], offset_y)[..., :, None, None]
    columns = clipped(pixels.shape[-2], offset_x)[..., None, :, None]
    pixels = jnp.take_along_axis(pixels, rows, -3, mode="promise_in_bounds")
    return jnp.take_along_axis(pixels, columns, -2, mode="promise_in_bounds")


def random_shift(key, pixels, pad: int = 4):
    """Shifts each image by up to `pad` pixels either way, y and x drawn uniformly and independently.

    Args: pixels `(..., height, width, channels)` of any dtype. Every leading index has a shift of its own.
    """
    offset_y, offset_x = jax.random.randint(key, (2, *pixels.shape[:-3]), 0, 2 * pad + 1)
    return shift(pixels, offset_y, offset_x, pad)
