"""Prioritised replay: which slots can be drawn, how often each is, and what their windows hold."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy.stats import chisquare

from envs.types import Transition
from replay import prioritised, ring

GOLDEN = Path(__file__).parent / "golden"
HORIZON = 5
# Compiled once for each shape: one operation at a time, the compiles would take most of the time.
insert, update, set_leaves = map(jax.jit, (prioritised.insert, prioritised.update, prioritised.set_leaves))
windows = jax.jit(prioritised.windows, static_argnums=2)
sample = jax.jit(prioritised.sample, static_argnums=2)


def row(t, terminated, truncated):
    """What all environments do on step t: environment e sees the id (t, e), then (t + 1, e)."""
    num_envs = len(terminated)
    ids = np.stack([np.full(num_envs, t), np.arange(num_envs)], -1).astype(np.int32)
    return Transition(ids, ids[:, 1], np.float32(ids[:, 0]), ids + np.int32([1, 0]), terminated, truncated)


def create(capacity, num_envs, horizon, **options):
    example = jax.tree.map(lambda x: x[0], row(0, np.zeros(1, bool), np.zeros(1, bool)))
    return prioritised.create(capacity, num_envs, example, horizon, **options)


def filled(capacity, priority):
    """A replay of one environment and horizon 1 with the given priorities `(capacity,)`."""
    replay = create(capacity, 1, 1)
    levels = set_leaves(replay.levels, np.arange(capacity), np.asarray(priority, np.float32))
    return dataclasses.replace(replay, levels=levels)


# Lengths and ends of the golden episodes; the authors' buffer puts one filler slot after each that ends.
@pytest.mark.parametrize(
    "key, capacity, episodes, fillers",
    [
        # Episodes at 0..6, 8..11, 13..20 and, unfinished, 22..24.
        (None, 40, [(7, "terminated"), (4, "truncated"), (8, "truncated"), (3, "")], [7, 12, 21]),
        # 15 slots: the third episode at 0..8 and its filler at 9 overwrite all of the first and two steps of the
        # second, whose last 4 are at 10..13, before its filler at 14. Our ring of 15 - 2 fillers holds the same 9 + 4.
        ("wrap", 13, [(7, "terminated"), (6, "truncated"), (9, "terminated")], [9, 14]),
    ],
    ids=["plain", "wrap"],
)
def test_masks_are_the_authors_without_their_filler_slots(key, capacity, episodes, fillers):
    golden = json.loads((GOLDEN / "mrq_buffer.json").read_text())
    mask = np.delete((golden[key] if key else golden)["mask"], fillers)
    replay, t = create(capacity, 1, HORIZON), 0
    for length, end in episodes:
        for i in range(length):
            last = i == length - 1
            flags = np.array([last and end == "terminated"]), np.array([last and end == "truncated"])
            replay, t = insert(replay, row(t, *flags)), t + 1
    ours = replay.priority[:, 0]
    assert ours[: mask.size].tolist() == mask.tolist()  # every priority is still the first, 1
    assert not ours[mask.size :].any()


def test_lap_priority_is_the_authors():
    golden = json.loads((GOLDEN / "mrq_lap.json").read_text())
    td_error = (np.array(golden["Q"]) - np.array(golden["Q_target"])).astype(np.float32)  # (4, 2), of both signs
    largest = np.abs(td_error).max(1) * np.float32([1, -1, 1, -1])
    priority = prioritised.lap_priority(largest, golden["alpha"], golden["min_priority"])
    np.testing.assert_allclose(priority, golden["priority"], rtol=1e-6)  # one power in float32


def can_be_drawn(t, now, terminated, truncated, horizon, truncated_tails):
    """Whether the slot of step t of one environment is open when the steps before `now` are stored, by definition."""
    for i in range(t, now):
        if i == t + horizon:
            return True
        if terminated[i] or truncated[i]:
            return bool(terminated[i] or truncated_tails)
    return False


@pytest.mark.parametrize("truncated_tails", [False, True])
def test_every_window_lies_in_one_episode_of_one_environment(truncated_tails):
    num_rows, num_envs, horizon, steps = 9, 3, 4, 150
    terminated, truncated = np.random.default_rng(0).random((2, steps, num_envs)) < 0.08
    replay = create(num_rows * num_envs, num_envs, horizon, truncated_tails=truncated_tails)
    every_slot, tails = jnp.arange(num_rows * num_envs), 0
    for now in range(1, steps + 1):
        replay = insert(replay, row(now - 1, terminated[now - 1], truncated[now - 1]))
        expected = np.zeros((num_rows, num_envs))
        for t in range(max(0, now - num_rows), now):
            for e in range(num_envs):
                flags = terminated[:, e], truncated[:, e]
                expected[t % num_rows, e] = can_be_drawn(t, now, *flags, horizon, truncated_tails)
        assert np.array_equal(replay.priority, expected)

        window = jax.tree.map(np.asarray, windows(replay, every_slot, horizon))
        for slot in np.flatnonzero(expected):
            ends = np.flatnonzero(window.terminated[slot] | window.truncated[slot])
            length = ends[0] + 1 if ends.size else horizon
            obs, next_obs = window.obs[slot, :length], window.next_obs[slot, :length]
            assert (obs[1:] == next_obs[:-1]).all() and (obs[:, 1] == slot % num_envs).all()
            assert obs[0, 0] % num_rows == slot // num_envs and obs[0, 0] >= now - num_rows
            assert obs[-1, 0] < now  # nothing older than its first step: the write head is not crossed
            assert truncated_tails or length == horizon or window.terminated[slot, length - 1]
            tails += length < horizon
    assert tails > 100


def test_slots_are_drawn_in_proportion_to_their_priority():
    # 1/8, 2/8, 0 and 5/8 of 80,000
    counts = np.bincount(sample(filled(4, [1, 2, 0, 5]), jax.random.key(0), 80_000), minlength=4)
    assert counts[2] == 0 and chisquare(counts[[0, 1, 3]], [10_000, 20_000, 50_000]).pvalue > 0.01  # a fixed seed


def test_the_probability_of_a_draw_is_its_priority_over_the_sum():
    priority = np.random.default_rng(0).uniform(1, 3, 5_000).astype(np.float32)
    slot, probability = prioritised.draw(filled(5_000, priority), jax.random.key(2), 1_000)
    expected = priority[np.asarray(slot)] / priority.sum(dtype=np.float64)
    np.testing.assert_allclose(probability, expected, rtol=1e-5)  # 5,000 float32 terms in a tree


def test_slots_of_a_deep_tree_are_drawn_in_proportion_to_their_priority():
    rng = np.random.default_rng(0)
    priority = rng.uniform(1, 3, 5_000).astype(np.float32) * (rng.random(5_000) < 0.7)
    priority[1_000:2_000] = 0  # whole branches
    replay = filled(5_000, priority)
    assert len(replay.levels) >= 3
    counts = np.bincount(sample(replay, jax.random.key(1), 100_000), minlength=5_000)
    some = priority > 0
    assert counts.size == 5_000 and not counts[~some].any()
    expected = priority[some] / priority[some].sum(dtype=np.float64) * 100_000  # at least 12 of each
    assert chisquare(counts[some], expected, sum_check=False).pvalue > 0.01


@pytest.mark.parametrize("u, slot", [(0.0, 1_300), (1 - 2.0**-23, 3_700)], ids=["zero", "largest_below_one"])
def test_the_extreme_uniform_numbers_draw_the_first_and_last_open_slots(monkeypatch, u, slot):
    priority = np.zeros(5_000)
    priority[[1_300, 2_000, 3_700]] = 1.1, 1.7, 1.3
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape: jnp.full(shape, u, jnp.float32))
    patched = jax.jit(lambda replay: prioritised.sample(replay, None, 3))
    assert patched(filled(5_000, priority)).tolist() == [slot] * 3


def test_a_slot_written_twice_keeps_the_larger_priority_in_either_order():
    replay = filled(20, np.ones(20))
    for priority in ([2.0, 3.0, 1.5], [3.0, 2.0, 1.5]):
        after = update(replay, np.array([17, 17, 4]), np.float32(priority))
        assert after.priority[[17, 4, 5], 0].tolist() == [3, 1.5, 1]
        assert after.levels[-1].sum() == 18 + 3 + 1.5


def test_a_smaller_priority_replaces_a_larger_one():
    replay = update(filled(20, np.full(20, 4.0)), np.array([17]), np.float32([1]))
    assert replay.priority[17, 0] == 1 and replay.levels[-1].sum() == 19 * 4 + 1


def test_new_slots_enter_with_the_largest_priority_ever_stored():
    no, replay, largest = np.zeros(1, bool), create(8, 1, 2), 1.0
    for t, priority in enumerate([0, 0, 1.0, 3.0, 2.0, 1.0, 1.0, 5.0, 1.0, 1.0]):
        replay = insert(replay, row(t, no, no))
        if t >= 2:
            opened = (t - 2) % 8
            assert replay.priority[opened, 0] == largest
            replay = update(replay, np.array([opened]), np.float32([priority]))
            largest = max(largest, priority)
        assert replay.max_priority == largest
    # Steps 2..7 remain of those opened, at what they were given; the newest two are closed.
    assert replay.priority[:, 0].tolist() == [0, 0, 2, 1, 1, 5, 1, 1]


def step(replay, terminated, key):
    """One step of a training loop. Priorities are multiples of 1/4, so that their sums are exact in float32."""
    replay = prioritised.insert(replay, row(1, terminated, ~terminated & False))
    slot = prioritised.sample(replay, key, 8)
    window = prioritised.windows(replay, slot, replay.horizon)
    priority = 1 + (slot + replay.ring.inserted) % 9 / 4
    return prioritised.update(replay, slot, priority), window.obs.sum((1, 2))


def scanned(replay, terminated, key):
    return jax.lax.scan(lambda r, x: step(r, *x), replay, (terminated, jax.random.split(key, len(terminated))))


def test_every_sum_equals_its_terms_and_vmapped_seeds_equal_each_alone():
    keys, replay = jax.random.split(jax.random.key(0)), create(600, 2, 3)
    # From the first step on something can be drawn: the first episodes end at once.
    terminated = jnp.asarray((np.random.default_rng(0).random((2, 900, 2)) < 0.1) | (np.arange(900)[:, None] == 0))
    together = jax.jit(jax.vmap(scanned, (None, 0, 0)))(replay, terminated, keys)
    alone = jax.jit(scanned)
    for i in range(2):
        one = alone(replay, terminated[i], keys[i])
        assert tiny.same_bits(tiny.run_of(together, i), one)
        levels = [np.asarray(level) for level in one[0].levels]
        assert len(levels) >= 3 and len(np.unique(levels[0])) > 5
        for below, above in zip(levels, levels[1:], strict=False):
            sums = below.reshape(-1, prioritised.FAN_OUT).sum(1)
            assert np.array_equal(above[: sums.size], sums) and not above[sums.size :].any()


def test_a_loop_that_inserts_draws_and_updates_does_so_in_place():
    @partial(jax.jit, donate_argnums=0)
    def loop(carry):
        def body(_, carry):
            replay, key, total = carry
            key, sample_key = jax.random.split(key)
            replay, seen = step(replay, jnp.zeros(1, bool), sample_key)
            return replay, key, total + seen.sum()

        return jax.lax.fori_loop(0, 50, body, carry)

    replay = create(50_000, 1, HORIZON)
    compiled = loop.lower((replay, jax.random.key(0), jnp.int32(0))).compile()
    memory, ring_bytes = compiled.memory_analysis(), replay.ring.words.nbytes
    assert memory.alias_size_in_bytes >= ring_bytes + sum(level.nbytes for level in replay.levels)
    assert memory.temp_size_in_bytes < 0.2 * ring_bytes
    assert not tiny.copies_as_large_as(50_000, compiled)  # neither of the ring nor of the priorities


def test_a_horizon_longer_than_the_ring_names_both_numbers_and_a_capacity_that_fits():
    with pytest.raises(ValueError, match=r"capacity 15 holds 5 steps .* 3 environments.* horizon 5 .* capacity to 18"):
        create(15, 3, 5)
    assert create(18, 3, 5).ring.num_rows == 6
    with pytest.raises(ValueError, match="capacity 16 must be a multiple of num_envs 3"):
        create(16, 3, 2)
    with pytest.raises(ValueError, match="windows of 6 steps: .* horizon 5"):
        prioritised.windows(create(18, 3, 5), jnp.array([0]), 6)


def test_windows_of_a_terminated_tail_end_in_its_n_step_return():
    # Rewards are the step ids; the episode ends with step 3, and the next one follows it in the ring.
    replay = create(8, 1, 3)
    for t in range(7):
        replay = insert(replay, row(t, np.array([t == 3]), np.array([False])))
    transition, discount = ring.n_step(windows(replay, jnp.array([0, 2, 3]), 3), 0.5)
    # 0 + 1/2 + 2/4; 2 + 3/2, ended; 3, ended
    assert transition.reward.tolist() == [1.0, 3.5, 3.0] and discount.tolist() == [0.125, 0, 0]
