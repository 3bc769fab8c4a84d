"""Every algorithm at a size that compiles and runs in seconds. A new file in `algos/` is found by listing it."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import jax
import numpy as np

from envs.types import EnvAndData, Transition, continuous_spec, discrete_spec

NAMES = sorted(p.stem for p in Path(__file__).parents[1].glob("algos/*.py") if p.stem != "__init__")

# Fields that many algorithms have, and what they are here; an algorithm takes those that it has.
# Every event happens within the first hundred steps.
SIZES = dict(
    hidden=(16,),
    hidden_size=16,
    zs_size=16,
    za_size=8,
    zsa_size=16,
    num_bins=9,
    batch_size=8,
    capacity=20_000,
    prefill=80,
    n_step=1,
    encoder_horizon=3,
    num_iterates=3,
    train_period=4,
    sync_period=20,
    window_period=100,
    target_period=4,
    rollout_length=8,
    num_minibatches=2,
    num_epochs=2,
    offline_steps=3,
    levels=2,
    bins=3,
    num_atoms=5,
    num_quantiles=5,
    num_stocks=11,
    max_nodes=512,
    first_stocks="grid",
    num_first_stocks=8,
    demo_capacity=2_000,
    encoder_hidden=(16,),
    latent_size=16,
    projector_hidden=(16,),
    num_components=4,
    component_size=4,
    dynamics_hidden=(16,),
    actor_hidden=(16,),
    mode_samples=4,
)

# Settings that solve worlds of four states in `LEARNING_STEPS` steps. Tests that keep the static
# ones share a compiled program. One-step returns: actions are uniform, and longer ones would follow them.
LEARNING_STEPS = 1_000
LEARNING = dict(
    hidden=(32,),
    hidden_size=32,
    zs_size=32,
    za_size=16,
    zsa_size=32,
    num_bins=33,
    learning_rate=3e-3,
    encoder_learning_rate=3e-4,
    value_learning_rate=5e-4,
    policy_learning_rate=1e-3,
    weight_decay=0.0,
    adam_epsilon=1e-2,  # with a small one Adam wanders where the gradient is nearly zero
    epsilon_start=1.0,
    epsilon_end=1.0,
    exploration_noise=2.0,  # wider than the actions are: nearly uniform
    target_noise=0.0,
    truncated_tails=True,  # episodes are shorter than an unroll
    capacity=8_000,
    prefill=800,
    batch_size=32,
    train_period=8,
    sync_period=40,
    window_period=400,
    target_period=10,
    entropy_weight=0.0,
    anneal_steps=64_000.0,
    normalize_obs=False,
    rollout_length=8,
    num_minibatches=2,
    num_epochs=4,
    value_clip_range=10.0,
    initial_temperature=1e-2,
    temperature_learning_rate=1e-9,
    target_update_rate=0.05,
    num_atoms=21,
    num_quantiles=5,
    kappa=1.0,
    objective="mean",
    stock_low=-1.0,
    stock_high=1.0,
    stock_scale=1.0,
    v_min=-2.0,
    v_max=2.0,
)


def load(name: str):
    return importlib.import_module(f"algos.{name}")


def kind(algo) -> str:
    """`env`, `dataset`, `mdp`, ...: the name of `init`'s second parameter says what it learns from."""
    return list(inspect.signature(algo.init).parameters)[1]


def config(algo, **changes):
    """The algorithm's example settings, made tiny; `changes` that it has no field for are left out."""
    settings = algo.EXAMPLE.config
    fields = {f.name for f in dataclasses.fields(settings)}
    return dataclasses.replace(settings, **{k: v for k, v in (SIZES | changes).items() if k in fields})


def source(algo):
    """A small world that the algorithm can learn from, as it sees it."""
    wrap = getattr(algo, "wrap", lambda env: env)
    match kind(algo), algo.ACTIONS:
        case "env", ("discrete", *_):
            return wrap(_gymnax("CartPole-v1"))
        case "env", _:
            return wrap(_gymnax("Pendulum-v1"))
        case "dataset", (action_type, *_):
            return dataset(action_type, getattr(algo, "GOAL_CONDITIONED", False))
        case "env_and_data" | "env_and_demos", (action_type, *_):
            world = _gymnax("Pendulum-v1" if action_type == "continuous" else "CartPole-v1")
            return EnvAndData(world, dataset(action_type))
        case "mdp", _:
            from envs import mdps

            return mdps.make("garnet", states=4, terminals=1, horizon=3)
    raise LookupError(f"tests/tiny.py has no source of kind {kind(algo)!r}: add a small one")


def _gymnax(name):
    from envs import gymnax_env  # costs seconds

    return gymnax_env.make(name, num_envs=4)


def dataset(action_type="continuous", goal_conditioned=False):
    """Twenty episodes of ten transitions of a random walk; actions follow the first observation."""
    from replay import datasets

    rng = np.random.default_rng(0)
    walk = rng.normal(size=(20, 11, 3)).cumsum(1).astype(np.float32)
    rows = lambda x: x.reshape(200, *x.shape[2:])
    obs, ends = rows(walk[:, :-1]), rows(np.broadcast_to(np.arange(10) == 9, (20, 10)))
    spec, action = continuous_spec(jax.ShapeDtypeStruct((3,), "float32"), 1, 10), np.tanh(obs[:, :1])
    if action_type == "discrete":
        spec, action = discrete_spec(spec.obs, 2, 10), (obs[:, 0] > 0).astype(np.int32)
    reward = rng.normal(size=200).astype(np.float32)
    next_obs = rows(walk[:, 1:])
    if goal_conditioned:  # (observation, goal); the goal is where the episode ends
        goal = rows(np.broadcast_to(walk[:, -1:], (20, 10, 3)))
        spec, obs, next_obs = spec._replace(obs=(spec.obs, spec.obs)), (obs, goal), (next_obs, goal)
    t = Transition(obs, action, reward, next_obs, np.zeros(200, bool), ends)
    return datasets.admit(t, spec, f"tiny {action_type}")


def raw(leaf) -> np.ndarray:
    """An array's own numbers, also of a typed key."""
    leaf = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(leaf)


def same_bits(a, b) -> bool:
    """Whether two pytrees have one structure and the same bits, NaN included."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        raw(x).tobytes() == raw(y).tobytes() for x, y in pairs
    )


def run_of(tree, i: int):
    """Run `i` of a pytree whose leaves lead with the axis of runs."""
    return jax.tree.map(lambda x: x[i], tree)


def copies_as_large_as(size: int, compiled) -> list[str]:
    """The copies and selects in a compiled program of arrays of `size` numbers or more."""
    found = []
    for line in compiled.as_text().splitlines():
        op = re.search(r"= \w+\[([\d,]+)\]\S* (copy|select)\(", line)
        if op and np.prod([int(n) for n in op[1].split(",")]) >= size:
            found.append(line.strip())
    return found
