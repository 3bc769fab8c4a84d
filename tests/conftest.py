"""Shared set-up: tests run on the CPU, broadcasting across ranks is an error, and every program is compiled anew."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A program read back from the cache tells less about its memory, and proves less about resuming.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax

# `(B,) - (B, 1)` is a bug that only shows as a bad curve; here it is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")
