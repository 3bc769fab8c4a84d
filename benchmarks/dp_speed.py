"""One sweep of distributional dynamic programming on an MDP of 10^4 states: ours against the same in NumPy.

    python benchmarks/dp_speed.py --threads 1        # and again with 2

Categorical control, `algos/distributional_dp.py`: the greedy law of every state, the Bellman operator on (S, A, B)
branches, its projection on the grid, the greedy policy of the result. NumPy does it in two ways, and the faster one
counts: `bincount`, which scatters both halves of every atom, and `gather`, our own order of summation. All are measured
in turns (A, B, C, A, ...), so that a busy spell of the machine falls on all. Seconds are medians over turns; wall clock
and CPU time of the process. `--threads` are XLA's and the BLAS's; NumPy's own loops have one.
"""

import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro


@dataclass(frozen=True)
class Options:
    """Times one sweep."""

    threads: int = 1
    """Of XLA and the BLAS."""
    states: int = 10_000
    """States of the garnet."""
    actions: int = 8
    """Actions of each state."""
    branches: int = 5
    """Outcomes of each action."""
    atoms: int = 51
    """Points of the grid."""
    turns: int = 7
    """Turns of all, after one that does not count."""
    gamma: float = 0.9
    """Discount factor."""


def expected(p, z):
    """Means of the laws, `(S, A)`."""
    return p @ z


def of_greedy(p, action):
    """Laws of the states under their greedy actions, `(S, N)`."""
    return p[np.arange(len(p)), action]


def numpy_bincount(tables, z, gamma, p, action):
    """Every atom's two halves scattered to its two neighbours."""
    successor, reward, probability = tables
    (num_states, num_actions, num_branches), num = successor.shape, len(z)
    v, total = of_greedy(p, action), np.zeros(num_states * num_actions * num)
    start = np.arange(num_states * num_actions).reshape(num_states, num_actions, 1) * num
    for b in range(num_branches):
        u = (np.clip(reward[:, :, b, None] + gamma * z, z[0], z[-1]) - z[0]) / (z[1] - z[0])
        lower = np.minimum(u.astype(np.int32), num - 2)
        mass = probability[:, :, b, None] * v[successor[:, :, b]]
        upper = mass * (u - lower)
        at = (start + lower).reshape(-1)
        total += np.bincount(at, (mass - upper).reshape(-1), len(total))
        total += np.bincount(at + 1, upper.reshape(-1), len(total))
    p = total.reshape(p.shape).astype(p.dtype)
    return p, expected(p, z).argmax(-1)


def numpy_gather(tables, z, gamma, p, action):
    """Every grid point gathers the atoms within one spacing of it, and the ends all beyond."""
    successor, reward, probability = tables
    num, k = len(z), np.arange(len(z), dtype=p.dtype)
    v = of_greedy(p, action)
    below = np.concatenate([np.zeros_like(v[:, :1]), np.cumsum(v, -1)], -1)
    width, total = min(int(np.ceil(2 / gamma)), num), np.zeros_like(p)
    for b in range(successor.shape[-1]):
        s, mass = successor[:, :, b], probability[:, :, b, None]
        c = ((reward[:, :, b] + gamma * z[0] - z[0]) / (z[1] - z[0]))[..., None]
        first = np.clip(np.ceil((k - 1 - c) / gamma), 0, num).astype(np.int32)
        for w in range(width):
            j = first + w
            near = np.where(j < num, v[s[..., None], np.minimum(j, num - 1)], 0)
            total += mass * near * np.maximum(0, 1 - np.abs(np.clip(c + gamma * j, 0, num - 1) - k))
        total[..., :1] += mass * below[s[..., None], first[..., :1]]
        last = np.minimum(first[..., -1:] + width, num)
        total[..., -1:] += mass * (1 - below[s[..., None], last])
    return total, expected(total, z).argmax(-1)


def main(options: Options):
    config = distributional_dp.Config(
        representation="categorical", num_atoms=options.atoms, v_min=-100.0, v_max=100.0, tie_tolerance=0.0
    )
    mdp = mdps.make(
        "garnet",
        states=options.states,
        actions=options.actions,
        branches=options.branches,
        reward_atoms=1,
        gamma=options.gamma,
    )
    z = np.asarray(distributional_dp.grid(config, jnp.float32))
    tables = tuple(np.asarray(x) for x in (mdp.next_state, mdp.reward, mdp.probability))

    @jax.jit
    def sweep(config, mdp, laws, policy):
        laws, _ = distributional_dp.backup(config, mdp, laws, policy, None, True)
        return laws, distributional_dp.greedy(config, laws)

    # Laws of some sweeps in, ours; the first turn compiles and compares.
    state = distributional_dp.init(config, mdp, None)
    laws, policy = jax.tree.map(lambda x: x[0], state.params[:2])
    for _ in range(5):
        laws, policy = sweep(config, mdp, laws, policy)
    p, action = np.asarray(laws.p), np.asarray(policy).argmax(-1)
    gamma = np.float32(options.gamma)
    cases = dict(
        bellmax=lambda: jax.block_until_ready(sweep(config, mdp, laws, policy)),
        numpy_bincount=lambda: numpy_bincount(tables, z, gamma, p, action),
        numpy_gather=lambda: numpy_gather(tables, z, gamma, p, action),
    )
    ours = np.asarray(cases["bellmax"]()[0].p)
    for name in ("numpy_bincount", "numpy_gather"):
        error = np.abs(cases[name]()[0] - ours).max()
        print(f"{name}: probabilities differ by at most {error:.1e}")
        assert error < 1e-4, name  # float32 places an atom on the grid to 1e-5 of a spacing

    times = {name: [] for name in cases}
    for _ in range(options.turns):
        for name, case in cases.items():
            wall, cpu = time.perf_counter(), time.process_time()
            case()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    print(f"{options}\n{'':16}wall s   CPU s")
    median = {name: [statistics.median(x) for x in zip(*pairs, strict=True)] for name, pairs in times.items()}
    for name, (wall, cpu) in median.items():
        print(f"{name:16}{wall:.4f}   {cpu:.4f}")
    best = [min(median[name][i] for name in cases if name != "bellmax") for i in (0, 1)]
    ratios = [b / x for b, x in zip(best, median["bellmax"], strict=True)]
    print(f"NumPy's best / bellmax: wall {ratios[0]:.2f}, CPU {ratios[1]:.2f}")
    memory = sweep.lower(config, mdp, laws, policy).compile().memory_analysis()
    print(f"XLA: {memory.temp_size_in_bytes / 1e6:.1f} MB of temporaries, laws are {laws.p.nbytes / 1e6:.1f} MB")


if __name__ == "__main__":
    options = tyro.cli(Options)
    for name in ("PJRT_NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # read when the libraries load
        os.environ[name] = str(options.threads)
    import jax
    import jax.numpy as jnp
    import numpy as np

    from algos import distributional_dp
    from envs import mdps

    main(options)
