"""Shared set-up: broadcasting across ranks is an error, compiled programs are kept between test runs."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

# `(B,) - (B, 1)` is a bug that only shows as a bad curve; here it is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")
