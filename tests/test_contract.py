"""What every algorithm promises the runner. A file in `algos/` is held to all of it without being named here."""

import dataclasses
import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from envs.types import Example
from runner import run, settings

each = pytest.mark.parametrize("name", tiny.NAMES)
REPLAYS = [name for name in tiny.NAMES if "replay" in tiny.load(name).State._fields]
NUM_STEPS = 240
BOTH = ("env_steps", "gradient_steps")
COUNTERS = dict(env=BOTH, env_and_data=BOTH, env_and_demos=BOTH, dataset=("gradient_steps",), mdp=("sweeps",))


class Counted:
    """An algorithm that counts how often its step is traced."""

    def __init__(self, algo):
        self.algo, self.traces = algo, 0

    def __getattr__(self, name):
        return getattr(self.algo, name)

    def step(self, *args):
        self.traces += 1
        return self.algo.step(*args)


class Launch:
    """A tiny algorithm at `num_runs` runs; its programs compile once, whatever the tests ask of them."""

    def __init__(self, name, num_runs=2, **changes):
        self.algo = Counted(tiny.load(name))
        self.source = tiny.source(self.algo.algo)
        self.config = tiny.config(self.algo.algo, **changes)
        self.configs = run.broadcast(self.config, num_runs)
        self.keys = jax.random.split(jax.random.key(0), num_runs)

    def init(self, configs=None, keys=None):
        keys = self.keys if keys is None else keys
        return run.init(self.algo, configs or self.configs, self.source, keys)

    def advance(self, carry, *lengths, configs=None):
        for length in lengths:
            carry = run.advance(self.algo, configs or self.configs, self.source, carry, length)
        return carry

    def compiled(self, carry):
        return run.advance.lower(self.algo, self.configs, self.source, carry, 1).compile()


@cache
def launch(name, **changes) -> Launch:
    return Launch(name, **changes)


@cache
def whole(name):
    """The carry after one chunk of all the steps."""
    return launch(name).advance(launch(name).init(), NUM_STEPS)


@each
@pytest.mark.parametrize("lengths", [(60, 60, 60, 60), (1, 239)], ids=str)
def test_chunks_equal_one_run_bit_for_bit(name, lengths):
    assert sum(lengths) == NUM_STEPS
    assert tiny.same_bits(whole(name), launch(name).advance(launch(name).init(), *lengths))


@each
def test_run_does_not_depend_on_its_neighbour_by_a_single_bit(name):
    ours = launch(name)
    keys = jnp.stack([ours.keys[0], jax.random.key(99)])
    configs = jax.tree.map(lambda x: x.at[1].multiply(0.5), ours.configs)
    carry = ours.advance(ours.init(configs, keys), NUM_STEPS, configs=configs)
    assert tiny.same_bits(tiny.run_of(carry, 0), tiny.run_of(whole(name), 0))
    assert not tiny.same_bits(tiny.run_of(carry, 1), tiny.run_of(whole(name), 1))


@each
@pytest.mark.parametrize("when", ["at_first", "after_learning"])
def test_seeds_differ_in_every_random_leaf(name, when):
    """Every leaf but counters: keys, replays, and floats that are not one constant."""
    if tiny.kind(tiny.load(name)) == "mdp":
        return  # nothing is random
    carry, checked = launch(name).init() if when == "at_first" else whole(name), []
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry.states):
        x = tiny.raw(leaf)
        if when == "at_first" and "levels" in jax.tree_util.keystr(path):
            continue  # every priority is 1 at first
        data = ["normalizer", "demos"] + ["replay"] * (when == "at_first")  # what the data decide, not the seed
        if tiny.kind(tiny.load(name)) != "env" and any(part in jax.tree_util.keystr(path) for part in data):
            continue
        if x.dtype not in (np.int32, bool) and np.unique(x).size > 1:
            checked.append(jax.tree_util.keystr(path))
            assert (x[0] != x[1]).any(), f"{checked[-1]} is the same in both runs"
    assert any("params" in path for path in checked)


@pytest.mark.parametrize("name", [n for n in REPLAYS if tiny.kind(tiny.load(n)) == "env"])
def test_seeds_begin_in_different_states(name):
    replay = launch(name).init().states.replay
    obs = jax.tree.leaves(jax.vmap(lambda replay: replay.data.obs)(replay))[0]  # not the stock beside it
    oldest = obs[:, 0]  # (R, num_envs, ...), as the first reset left them
    assert (oldest[0] != oldest[1]).any()
    assert (oldest[0, 0] != oldest[0, 1]).any()  # nor do environments begin alike


@each
def test_one_program_serves_every_length(name):
    ours = launch(name)
    carry = ours.advance(run.start_chunk(ours.advance(ours.init(), 1, 2)), 3)
    assert (carry.done == 3).all()
    assert ours.algo.traces == 2  # one for the metrics' shapes in `init`, one in `advance`


LAUNCHES = [(name, {}) for name in REPLAYS] + [(name, dict(num_runs=1)) for name in REPLAYS]
LAUNCHES += [(name, dict(n_step=3)) for name in REPLAYS if hasattr(tiny.load(name).Config(), "n_step")]


@pytest.mark.parametrize("name, changes", LAUNCHES, ids=str)
def test_no_second_copy_of_the_replay(name, changes):
    ours = launch(name, **changes)
    # The launch of the other tests has compiled already; shapes are enough for the others.
    carry = ours.init() if ours is launch(name) else jax.eval_shape(ours.init)
    compiled = ours.compiled(carry)
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(carry.states.replay))
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 0.2 * nbytes
    assert memory.alias_size_in_bytes >= nbytes  # written where the donated one was
    assert not tiny.copies_as_large_as(ours.config.capacity, compiled)  # nor of the priorities


@each
def test_metrics_are_one_finite_float32_for_each_run(name):
    metrics = whole(name).metrics
    assert all(x.shape == (2,) and x.dtype == jnp.float32 for x in jax.tree.leaves(metrics))
    finite = {key: np.isfinite(x).all() for key, x in metrics.items() if not run.is_mean(x)}
    assert finite and all(finite.values()), finite


@each
def test_state_holds_what_the_runner_reads(name):
    states = whole(name).states
    assert states.params is not None
    for counter in COUNTERS[tiny.kind(tiny.load(name))]:
        steps = getattr(states, counter)
        assert steps.dtype == jnp.int32 and steps.shape == (2,) and (steps >= NUM_STEPS).all()
    if tiny.kind(tiny.load(name)) != "mdp":
        assert jax.dtypes.issubdtype(states.key.dtype, jax.dtypes.prng_key)


@each
def test_act_draws_for_each_row_and_returns_what_the_spec_says(name):
    ours = launch(name)
    spec, params = settings.spec_of(ours.algo, ours.source), tiny.run_of(ours.init().states.params, 0)
    # 16 observations, each on 8 rows
    rng = np.random.default_rng(0)
    obs = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=(16, *s.shape)), s.dtype), spec.obs)
    rows = jax.tree.map(lambda x: jnp.repeat(x, 8, 0), obs)
    act = jax.jit(lambda obs, key: ours.algo.act(ours.config, spec, params, obs, key))
    action = act(rows, jax.random.key(0))
    assert action.shape == (128, *spec.action.shape) and action.dtype == spec.action.dtype
    if spec.action_type == "discrete":
        assert ((action >= 0) & (action < spec.num_actions)).all()
    else:
        assert (jnp.abs(action) <= 1).all()
    assert (act(rows, jax.random.key(0)) == action).all()
    changed = jax.tree.map(lambda x: x.at[1:].set(x[0]), rows)  # the other rows see something else
    np.testing.assert_array_equal(act(changed, jax.random.key(0))[0], action[0])
    of_keys = np.stack([act(rows, jax.random.key(k)) for k in range(8)]).reshape(8, 16, 8, -1)
    varies = (of_keys != of_keys[:1]).any((0, 2, 3))  # (16,) whether chance decides at this observation
    rows_differ = (of_keys != of_keys[:, :, :1]).any((0, 2, 3))
    assert (varies == rows_differ).all()


@each
def test_defaults_are_finite_and_the_example_runs_as_it_stands(name):
    algo = tiny.load(name)
    assert isinstance(algo.EXAMPLE, Example) and isinstance(algo.EXAMPLE.config, algo.Config)
    for config in (algo.Config(), algo.EXAMPLE.config):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            assert not isinstance(value, float) or math.isfinite(value), field.name
    # Floats are traced and may differ between runs; all else shapes the program.
    assert all(isinstance(x, float) for x in jax.tree.leaves(algo.Config()))


@each
def test_docstring_names_its_source_and_its_deviations(name):
    doc = tiny.load(name).__doc__
    assert doc.splitlines()[0].endswith(".") and "\nSource: " in doc and "\nDeviations:" in doc
    assert "step`" in doc  # what one step is
