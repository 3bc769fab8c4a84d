"""The device loop serves any algorithm and any source, and averages metrics as a reader would by hand."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs.types import Mean, pytree, static
from runner import run


@pytree
class Config:
    rate: float = 0.5
    batch_size: int = static(default=2)


def keys(num_runs):
    return jax.random.split(jax.random.key(0), num_runs)


class Learner:
    """Offline: moves an estimate towards batches of a dataset, an array of numbers."""

    class State(NamedTuple):
        params: jax.Array  # ()
        target_params: jax.Array  # ()
        gradient_steps: jax.Array
        key: jax.Array

    traces = 0

    @classmethod
    def init(cls, config, dataset, key):
        params = jnp.zeros(())
        return cls.State(params, params, jnp.int32(0), key)

    @classmethod
    def step(cls, config, dataset, state):
        cls.traces += 1
        key, sample_key = jax.random.split(state.key)
        index = jax.random.randint(sample_key, (config.batch_size,), 0, dataset.shape[0])
        loss = (dataset[index].mean() - state.params) ** 2
        params = state.params + config.rate * (dataset[index].mean() - state.params)
        return cls.State(params, state.params, state.gradient_steps + 1, key), dict(loss=loss)


@pytree
class MDP:
    transition: jax.Array  # (S, A, S)
    reward: jax.Array  # (S, A)


class ValueIteration:
    class State(NamedTuple):
        params: jax.Array  # (S, A)

    @classmethod
    def init(cls, config, mdp, key):
        return cls.State(jnp.zeros_like(mdp.reward))

    @classmethod
    def step(cls, config, mdp, state):
        q = mdp.reward + config.rate * mdp.transition @ state.params.max(-1)  # the rate is the discount
        return cls.State(q), dict(residual=jnp.abs(q - state.params).max())


class Clock:
    """Learns nothing; its metrics are simple functions of the step 1, 2, 3, ... of its life."""

    class State(NamedTuple):
        params: jax.Array

    @classmethod
    def init(cls, config, source, key):
        return cls.State(jnp.int32(0))

    @classmethod
    def step(cls, config, source, state):
        t = state.params + 1
        ended = jnp.stack([t % 2 == 0, t % 3 == 0])  # of two environments
        metrics = dict(
            t=t * config.rate,
            pair=jnp.stack([t, 3 * t]),
            constant=jnp.float32(0.1),
            episode=Mean(t * ended, ended),
            never=Mean(jnp.zeros(2), jnp.zeros(2, bool)),
        )
        return cls.State(t), metrics


def test_a_dataset_is_an_argument_and_not_part_of_the_program():
    configs, before = run.broadcast(Config(), 2), Learner.traces

    def learned(dataset):
        return run.advance(Learner, configs, dataset, run.init(Learner, configs, dataset, keys(2)), 20)

    ones, twos = learned(jnp.ones(5)), learned(2 * jnp.ones(5))
    assert Learner.traces - before == 2  # one in `init`, for the metrics' shapes, and one in `advance`
    # 1 - 2^-20 and 2 (1 - 2^-20): exact in float32's 24 bits
    assert ones.states.params.tolist() == [1 - 2**-20] * 2 and twos.states.params.tolist() == [2 - 2**-19] * 2
    assert ones.states.gradient_steps.tolist() == [20, 20]


def test_tabular_dynamic_programming_runs_in_the_same_loop():
    # State 0 goes to state 1 for nothing, or stays for 1; state 1 stays for 2.
    transition = jnp.array([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    mdp = MDP(transition, jnp.array([[0.0, 1.0], [2.0, 2.0]]))
    configs = run.broadcast(Config(rate=0.5), 1)
    carry = run.advance(ValueIteration, configs, mdp, run.init(ValueIteration, configs, mdp, keys(1)), 3)
    # v: (0, 0) -> (1, 2) -> (1.5, 3) -> (1.75, 3.5); q(0, go) = 0.5 * 3, q(0, stay) = 1 + 0.5 * 1.5
    assert carry.states.params.tolist() == [[[1.5, 1.75], [3.5, 3.5]]]
    # residuals 2, 1, 0.5
    np.testing.assert_allclose(carry.metrics["residual"], [3.5 / 3], rtol=1e-6)


@pytest.fixture(scope="module")
def clock():
    configs = run.broadcast(Config(), 2)
    configs = Config(jnp.array([1.0, 10.0]), configs.batch_size)
    return lambda carry, steps: run.advance(Clock, configs, (), carry, steps), run.init(Clock, configs, (), keys(2))


def copy(carry):
    return jax.tree.map(jnp.copy, carry)


def test_metrics_are_averaged_by_hand(clock):
    advance, carry = clock
    metrics = run.finish(advance(copy(carry), 4).metrics)
    # t = 1, 2, 3, 4: mean 2.5, times each run's own hyperparameter
    np.testing.assert_allclose(metrics["t"], [2.5, 25.0], rtol=1e-6)
    np.testing.assert_allclose(metrics["pair"], [5.0, 5.0], rtol=1e-6)  # (1 + 3) / 2 * 2.5
    # one environment's episodes end at t = 2, 4, the other's at 3: (2 + 4 + 3) / 3
    np.testing.assert_allclose(metrics["episode"], [3.0, 3.0], rtol=1e-6)
    assert np.isnan(metrics["never"]).all()


def test_mean_of_a_constant_is_exact_however_long_the_chunk(clock):
    advance, carry = clock
    metrics = advance(copy(carry), 100_000).metrics
    assert (metrics["constant"] == np.float32(0.1)).all()  # summing first gives 0.09998557
    np.testing.assert_allclose(metrics["t"][0], 50_000.5, rtol=1e-5)  # 1e5 float32 roundings of random sign


def test_a_new_chunk_starts_its_metrics_anew_and_keeps_the_state(clock):
    advance, carry = clock
    carry = run.start_chunk(advance(copy(carry), 4))
    assert carry.done.tolist() == [0, 0] and carry.states.params.tolist() == [4, 4]
    assert all((x == 0).all() for x in jax.tree.leaves(carry.metrics))
    metrics = run.finish(advance(carry, 2).metrics)
    np.testing.assert_allclose(metrics["t"], [5.5, 55.0], rtol=1e-6)  # t = 5, 6
    np.testing.assert_allclose(metrics["episode"], [6.0, 6.0], rtol=1e-6)  # both end at 6


def test_no_steps_change_nothing(clock):
    advance, carry = clock
    same = advance(copy(carry), 0)
    assert all((x == y).all() for x, y in zip(jax.tree.leaves(same), jax.tree.leaves(carry), strict=True))


def test_states_are_donated_although_the_algorithm_returns_one_array_twice():
    """`Learner.init` returns the parameters as their target too: outside of jit both would be one buffer."""
    configs, data = run.broadcast(Config(), 3), jnp.ones(5)
    carry = run.init(Learner, configs, data, keys(3))
    params = carry.states.params
    run.advance(Learner, configs, data, carry, 1)
    assert params.is_deleted()


def test_broadcast_gives_every_run_its_own_floats_and_all_runs_the_same_program():
    configs = run.broadcast(Config(rate=0.25, batch_size=7), 3)
    assert configs.rate.tolist() == [0.25] * 3 and configs.rate.dtype == jnp.float32 and configs.batch_size == 7
