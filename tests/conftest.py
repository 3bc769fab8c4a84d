"""Shared set-up: tests run on the CPU, broadcasting across ranks is an error, and every program is compiled anew."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A program read back from the cache tells less about its memory, and proves less about resuming.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import pytest

# `(B,) - (B, 1)` is a bug that only shows as a bad curve; here it is an error.
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    """Tests that share compiled programs stay in one process of `-n`: those of a file, or of one algorithm in it."""
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")
        shared = item.path.stem in ("test_contract", "test_probes") and name
        item.add_marker(pytest.mark.xdist_group(shared or item.path.stem))
