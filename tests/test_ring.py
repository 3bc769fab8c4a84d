"""The ring gives back what was put in: ids written are ids read, bit for bit, and no window joins old to new."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from envs.types import Transition
from replay import ring

# Examples are few because each new shape compiles; derandomize makes every run the same.
few = settings(max_examples=12, deadline=None, derandomize=True)
# Compiled once for each shape: one operation at a time, the compiles would take most of the time.
insert, take, n_step = jax.jit(ring.insert), jax.jit(ring.take), jax.jit(ring.n_step)
sample, sample_windows = jax.jit(ring.sample, static_argnums=2), jax.jit(ring.sample_windows, static_argnums=(2, 3))
sample_n_step = jax.jit(ring.sample_n_step, static_argnums=(2, 3))


def row(t, num_envs, terminated=False, truncated=False):
    """What `num_envs` environments do on step t: environment e sees the id (t, e), then (t + 1, e)."""
    ids = np.stack([np.full(num_envs, t), np.arange(num_envs)], -1).astype(np.int32)
    reward, flags = np.float32(0.5 * ids[:, 0]), np.broadcast_to([[terminated], [truncated]], (2, num_envs))
    return Transition(ids, 10 * ids[:, 0] + ids[:, 1], reward, ids + np.int32([1, 0]), *flags)


def filled(num_rows, num_envs, inserts, **flags):
    replay = ring.create(num_rows * num_envs, num_envs, jax.tree.map(lambda x: x[0], row(0, num_envs)))
    for t in range(inserts):
        replay = insert(replay, row(t, num_envs, **flags))
    return replay


@few
@given(st.sampled_from([1, 2, 5]), st.sampled_from([1, 3]), st.integers(0, 13))
def test_ring_holds_the_newest_rows_each_in_its_place(num_rows, num_envs, inserts):
    replay = filled(num_rows, num_envs, inserts)
    stored = min(inserts, num_rows)
    assert replay.stored == stored and replay.inserted == inserts
    every_row, every_env = np.mgrid[:num_rows, :num_envs]
    read = jax.tree.map(np.asarray, take(replay, every_row, every_env))
    for t in range(inserts - stored, inserts):
        for x, y in zip(read, row(t, num_envs), strict=True):
            assert (x[t % num_rows] == y).all()


DTYPES = ["bool", "uint8", "int8", "float16", "bfloat16", "int16", "int32", "uint32", "float32"]


@few
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from([(), (3,), (2, 3)])), min_size=1, max_size=4))
def test_every_dtype_survives_packing_bit_for_bit(fields):
    rng = np.random.default_rng(len(fields))

    def random_bits(dtype, shape):  # NaNs and denormals among them
        size = jnp.dtype(dtype).itemsize
        data = rng.integers(0, 2 if dtype == "bool" else 256, (5, *shape, size), np.uint8)
        return data.view(jnp.dtype(dtype))[..., 0]

    tree = {"goal": [random_bits(*field) for field in fields[1:]], "state": random_bits(*fields[0])}
    layout = ring.layout(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree))
    words = ring.pack(layout, jax.tree.map(jnp.asarray, tree))
    assert words.shape == (5, layout.num_words) and words.dtype == jnp.uint32
    back = ring.unpack(layout, words)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == np.asarray(y).tobytes()
    assert jax.tree.structure(tree) == jax.tree.structure(back)


def test_structured_observations_are_stored_and_sampled_as_they_are():
    pixels, goal = np.arange(2 * 100, dtype=np.uint8).reshape(2, 10, 10, 1), np.array([[0.5], [-0.0]], np.float32)
    obs = {"pixels": jnp.asarray(pixels) > 3, "goal": (jnp.asarray(goal), jnp.asarray(pixels))}
    flags = jnp.array([True, False])
    transition = Transition(obs, jnp.arange(2), jnp.ones(2), obs, flags, ~flags)
    replay = ring.create(6, 2, jax.tree.map(lambda x: x[0], transition))
    replay = insert(insert(replay, transition), transition)
    batch = sample(replay, jax.random.key(0), 16)
    expected = jax.tree.map(lambda x: x[batch.action], transition)  # the action is the environment's number
    for x, y in zip(jax.tree.leaves(batch), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_bytes_of_a_cartpole_record():
    obs = jnp.zeros(4)
    example = Transition(obs, jnp.int32(0), jnp.float32(0), obs, jnp.bool_(False), jnp.bool_(False))
    # obs 4 x 4, action 4, reward 4, next_obs 4 x 4, and the two flags together in one word
    assert ring.layout(example).nbytes == 16 + 4 + 4 + 16 + 4
    # Pixels: 2 x 10 x 10 x 4 flags kept as 400 bytes each, action, reward, 2 bytes of flags and 2 to fill a word
    pixels = jnp.zeros((10, 10, 4), bool)
    assert ring.layout(example._replace(obs=pixels, next_obs=pixels)).nbytes == 2 * 400 + 4 + 4 + 2 + 2


@pytest.mark.parametrize("inserts", [3, 5, 12], ids=["half_full", "just_full", "wrapped"])
def test_uniform_sampling_covers_exactly_the_stored_ids(inserts):
    replay = filled(5, 3, inserts)
    obs = np.asarray(sample(replay, jax.random.key(0), 6_000).obs)
    ids, counts = np.unique(obs, axis=0, return_counts=True)
    stored = [[t, e] for t in range(max(inserts - 5, 0), inserts) for e in range(3)]
    assert ids.tolist() == stored
    assert chisquare(counts).pvalue > 0.01  # a fixed seed; one in a hundred seeds would fail


@pytest.mark.parametrize("inserts", [4, 5, 12, 13], ids=["half_full", "just_full", "wrapped", "wrapped_further"])
@pytest.mark.parametrize("length", [2, 3, 4])
def test_windows_are_successive_steps_of_one_environment(inserts, length):
    replay = filled(5, 3, inserts)
    obs = np.asarray(sample_windows(replay, jax.random.key(0), 3_000, length).obs)  # (B, length, 2)
    assert (np.diff(obs[..., 0], axis=1) == 1).all()  # so none crosses the write head
    assert (obs[..., 1] == obs[:, :1, 1]).all()
    starts, counts = np.unique(obs[:, 0], axis=0, return_counts=True)
    oldest = max(inserts - 5, 0)
    assert starts.tolist() == [[t, e] for t in range(oldest, inserts - length + 1) for e in range(3)]
    assert chisquare(counts).pvalue > 0.01  # all windows are equally likely


def window(reward, terminated, truncated):
    """A window of one row whose observation ids count from 0."""
    n = len(reward)
    obs = jnp.arange(n)[None]
    return Transition(obs, obs, jnp.array([reward]), obs + 1, jnp.array([terminated]) > 0, jnp.array([truncated]) > 0)


@pytest.mark.parametrize(
    "terminated, truncated, reward, next_obs, discount",
    [
        # gamma = 1/2, rewards [1, 2, 4]
        ([0, 0, 0], [0, 0, 0], 3.0, 3, 0.125),  # 1 + 2/2 + 4/4; gamma^3
        ([0, 0, 1], [0, 0, 0], 3.0, 3, 0.0),  # all three, the MDP ended with the last
        ([0, 1, 0], [0, 0, 0], 2.0, 2, 0.0),  # 1 + 2/2, then the end
        ([0, 0, 0], [0, 1, 0], 2.0, 2, 0.25),  # 1 + 2/2, bootstrapped from the second successor: gamma^2
        ([0, 0, 0], [1, 0, 0], 1.0, 1, 0.5),
        ([1, 1, 1], [0, 0, 0], 1.0, 1, 0.0),
        ([0, 1, 0], [0, 1, 0], 2.0, 2, 0.0),  # both flags: the MDP ended
        ([0, 0, 1], [1, 0, 0], 1.0, 1, 0.5),  # the end after the cut belongs to another episode
    ],
)
def test_n_step_return_by_hand(terminated, truncated, reward, next_obs, discount):
    transition, factor = n_step(window([1.0, 2.0, 4.0], terminated, truncated), 0.5)
    assert transition.reward.tolist() == [reward] and factor.tolist() == [discount]
    assert transition.obs.tolist() == [0] and transition.action.tolist() == [0]
    assert transition.next_obs.tolist() == [next_obs]
    assert transition.terminated.tolist() == [bool(terminated[next_obs - 1])]
    assert transition.truncated.tolist() == [bool(truncated[next_obs - 1])]


@few
@given(st.integers(0, 2**32 - 1), st.floats(0, 1, width=32), st.sampled_from([0.1, 0.5]))
def test_n_step_return_is_the_sum_along_the_window(seed, gamma, end_probability):
    rng = np.random.default_rng(seed)
    reward = rng.normal(size=(8, 4)).astype(np.float32)
    terminated, truncated = rng.random((2, 8, 4)) < end_probability
    ids = np.arange(32).reshape(8, 4)
    transition, factor = n_step(Transition(ids, ids, reward, ids + 1, terminated, truncated), np.float32(gamma))
    for b in range(8):
        total, weight, last = 0.0, 1.0, 0
        for i in range(4):
            total, weight, last = total + weight * reward[b, i], weight * gamma, i
            if terminated[b, i] or truncated[b, i]:
                break
        assert transition.next_obs[b] == ids[b, last] + 1 and transition.obs[b] == ids[b, 0]
        # float32 sums of four terms of order one
        np.testing.assert_allclose(transition.reward[b], total, atol=1e-5)
        np.testing.assert_allclose(factor[b], 0 if terminated[b, last] else weight, atol=1e-6)


def test_one_step_is_plain_sampling():
    replay = insert(filled(5, 3, 4), row(4, 3, terminated=True))
    key = jax.random.key(2)
    transition, discount = sample_n_step(replay, key, 64, 1, 0.9)
    plain = sample(replay, key, 64)
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), transition, plain))
    assert plain.terminated.any() and not plain.terminated.all()
    assert (discount == jnp.where(plain.terminated, 0.0, 0.9)).all()
    same, same_discount = n_step(jax.tree.map(lambda x: x[:, None], plain), 0.9)
    assert (same.next_obs == plain.next_obs).all() and (same_discount == discount).all()


@pytest.mark.parametrize("n", [1, 3])
def test_truncation_still_bootstraps(n):
    replay = filled(5, 3, 5, truncated=True)
    transition, discount = sample_n_step(replay, jax.random.key(0), 32, n, 0.5)
    assert (discount == 0.5).all() and (transition.next_obs[:, 0] == transition.obs[:, 0] + 1).all()


@pytest.mark.parametrize("capacity, num_envs, fit", [(1000, 48, 960), (3, 4, 4), (0, 4, 4)])
def test_capacity_that_is_not_whole_rows_names_both_numbers_and_one_that_fits(capacity, num_envs, fit):
    with pytest.raises(ValueError, match=f"capacity {capacity} .* num_envs {num_envs}; {fit} is"):
        ring.create(capacity, num_envs, jax.tree.map(lambda x: x[0], row(0, 1)))
    ring.check(fit, num_envs)


@pytest.mark.parametrize("n", [1, 3])
def test_a_scan_that_inserts_then_samples_updates_the_ring_in_place(n):
    constant = row(1, 4)

    @partial(jax.jit, donate_argnums=0)
    def fill(replay, key):
        def body(replay, key):
            replay = ring.insert(replay, constant._replace(reward=constant.reward + replay.inserted))
            batch, _ = ring.sample_n_step(replay, key, 8, n, 0.9)
            return replay, batch.reward.sum()

        return jax.lax.scan(body, replay, jax.random.split(key, 50))

    replay = filled(5_000, 4, 3)
    compiled = fill.lower(replay, jax.random.key(0)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= replay.words.nbytes
    assert memory.temp_size_in_bytes < 0.2 * replay.words.nbytes
    assert not tiny.copies_as_large_as(replay.words.size, compiled)


def test_filled_ring_gives_each_environment_a_stretch_in_time_order():
    # 7 transitions for 3 environments: two each, and one left out; the episode of five steps is cut at the seams.
    t = np.arange(7, dtype=np.float32)
    seven = Transition(t, t.astype(np.int32), t, t + 1, t == 4, t == 6)
    replay = jax.jit(ring.fill)(ring.create(12, 3, jax.tree.map(lambda x: x[0], seven)), seven)
    assert replay.data.reward[:2].tolist() == replay.data.obs[:2].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert replay.data.truncated[:2].tolist() == [[False] * 3, [True] * 3]
    assert replay.data.terminated[:2].tolist() == [[False, False, True], [False] * 3]
    assert (replay.inserted, replay.stored) == (2, 2) and not replay.data.reward[2:].any()
