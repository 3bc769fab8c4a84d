"""Pixels: the strided torso, the random shift, stacks of frames across automatic resets."""

import types
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs.frame_stack import FrameStack, wrap
from envs.types import Transition, discrete_spec, episode_metrics, example_transition
from networks.augment import random_shift, shift
from networks.conv import StridedTorso
from runner import cli, settings

# The torso


def test_strided_torso_has_the_published_features_and_parameters():
    # 84 -> (84 - 3)//2 + 1 = 41 -> 20 -> 9 -> 9 - 2 = 7, and 7 * 7 * 32 = 1568; stride 1 anywhere else ends at 8 or 9.
    # (9 * 4 + 1) * 32 + 3 * (9 * 32 + 1) * 32 = 1,184 + 27,744 = 28,928. Leading axes (2, 3) pass through.
    pixels = jax.ShapeDtypeStruct((2, 3, 84, 84, 4), jnp.uint8)
    out, variables = jax.eval_shape(StridedTorso().init_with_output, jax.random.key(0), pixels)
    assert (out.shape, out.dtype) == ((2, 3, 1568), jnp.float32)
    assert sum(p.size for p in jax.tree.leaves(variables)) == 28_928


def test_strided_torso_by_hand():
    # 31 -> 15 -> 7 -> 3 -> 1. Every weight 1: a layer sums 9 pixels, then 9 * 32 = 288 features three times.
    # White is 1/2: 288^3 * 9/2 = 107,495,424 = 9^4 * 2^14, exact in float32.
    # Black is -1/2: -4.5, and ELU makes it exp(-4.5) - 1 = -0.989; 288 times that is -284.8, and ELU makes it -1.
    # Without ELU, the same sums as white's, negative.
    torso = StridedTorso(kernel_init=nn.initializers.ones)
    pixels = jnp.stack([jnp.full((31, 31, 1), 255, jnp.uint8), jnp.zeros((31, 31, 1), jnp.uint8)])
    variables = torso.init(jax.random.key(0), pixels)
    assert torso.apply(variables, pixels).tolist() == [[107_495_424] * 32, [-1] * 32]
    linear = StridedTorso(lambda x: x)
    assert linear.apply(variables, pixels).tolist() == [[107_495_424] * 32, [-107_495_424] * 32]


def test_strided_torso_refuses_pixels_it_would_shrink_to_nothing():
    with pytest.raises(ValueError, match="40x30 are too few; 31x31"):
        jax.eval_shape(StridedTorso().init, jax.random.key(0), jax.ShapeDtypeStruct((40, 30, 1), jnp.uint8))


# The random shift


def test_a_shift_by_hand():
    # [1 2]  with one pixel of edge all round:  1 1 2 2   offset (0, 0) keeps its rows 0, 1 and columns 0, 1,
    # [3 4]                                     1 1 2 2   (1, 1) is the image, (2, 0) keeps rows 2, 3 and
    #                                           3 3 4 4   columns 0, 1, and (1, 2) keeps rows 1, 2 and columns 2, 3.
    #                                           3 3 4 4
    image = jnp.uint8([[1, 2], [3, 4]])[..., None]
    y, x = jnp.array([0, 1, 2, 1]), jnp.array([0, 1, 0, 2])
    out = shift(jnp.stack([image] * 4), y, x, pad=1)
    assert out.dtype == jnp.uint8
    assert out[..., 0].tolist() == [[[1, 1], [1, 1]], [[1, 2], [3, 4]], [[3, 3], [3, 3]], [[2, 2], [4, 4]]]


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float32])
def test_a_shift_is_a_crop_of_the_padded_image_at_every_offset(dtype):
    y, x = (offsets.ravel() for offsets in np.mgrid[:9, :9])  # all 81
    images = (
        np.random.default_rng(0).integers(0, 256, (81, 6, 7, 2)).astype(dtype)
    )  # neither square nor wider than 2 pad
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)), mode="edge")
    out = shift(jnp.asarray(images), jnp.asarray(y), jnp.asarray(x), 4)
    assert out.dtype == dtype
    for i in range(81):
        assert (out[i] == padded[i, y[i] : y[i] + 6, x[i] : x[i] + 7]).all()
    assert (out[40] == images[40]).all()  # offset (4, 4) is the identity


def test_random_shifts_take_every_offset_in_y_and_x_independently_for_every_image():
    # Pixel (i, j) is (i, j), so that pixel (4, 4) of a shifted image tells its offset: (y, x), from 0 to 8.
    image = jnp.stack(jnp.meshgrid(jnp.arange(9), jnp.arange(9), indexing="ij"), -1)
    images = jnp.broadcast_to(image, (20, 50, 9, 9, 2))
    out = jax.jit(random_shift)(jax.random.key(0), images)
    assert out.shape == images.shape and out.dtype == images.dtype
    offsets = np.asarray(out[:, :, 4, 4]).reshape(1000, 2)
    # 1,000 draws miss one of 81 pairs with probability under 81 * (80/81)^1000 = 3e-4, at a fixed key.
    assert {tuple(o) for o in offsets.tolist()} == {(y, x) for y in range(9) for x in range(9)}
    # Uniform: each of 9 is drawn 111 +- 10 times, and 50 is 5 standard deviations.
    assert all(abs(np.bincount(offsets[:, axis], minlength=9) - 111).max() < 50 for axis in (0, 1))


# Stacks of frames


class TickState(NamedTuple):
    obs: tuple


class Ticks:
    """One environment that observes the index of its step: the first episode terminates at 7, the second is cut at 12.

    As in a replay where the last observation of an episode has an index too, the next episode
    starts one later: 0..7, 8..12, 13... The observation is a pair, an index and 1x2x1 pixels of it.
    """

    num_envs = 1
    spec = discrete_spec(
        (jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1, 2, 1), jnp.uint8)), 2, max_episode_steps=7
    )

    def observe(self, index):
        return index, jnp.broadcast_to(index[..., None, None], (1, 1, 2, 1)).astype(jnp.uint8)

    def reset(self, key):
        return TickState(self.observe(jnp.zeros((1, 1), jnp.int32)))

    def step(self, key, state, action):
        index = state.obs[0] + 1
        terminated, truncated = index[:, 0] == 7, index[:, 0] == 12
        reward = jnp.ones(1)
        transition = Transition(state.obs, action, reward, self.observe(index), terminated, truncated)
        finished = episode_metrics(reward, index[:, 0], terminated | truncated)
        return TickState(self.observe(index + (terminated | truncated)[:, None])), transition, finished


# The indices that MR.Q's replay stacks with a history of 4, by step: 7 of the first episode, 5 of the second.
OBS_INDICES = [
    *([0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]),
    *([8, 8, 8, 8], [8, 8, 8, 9], [8, 8, 9, 10], [8, 9, 10, 11], [13, 13, 13, 13]),
]
NEXT_INDICES = [
    *([0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 7]),
    *([8, 8, 8, 9], [8, 8, 9, 10], [8, 9, 10, 11], [9, 10, 11, 12], [13, 13, 13, 14]),
]


def test_stacks_are_those_of_the_published_replay_in_every_leaf():
    env = FrameStack(Ticks(), 4)
    key, action = jax.random.key(0), jnp.zeros(1, jnp.int32)
    state, transitions = env.reset(key), []
    for _ in range(12):
        acted_on = state.obs
        state, transition, finished = env.step(key, state, action)
        assert (acted_on[0] == transition.obs[0]).all() and (acted_on[1] == transition.obs[1]).all()
        transitions.append(transition)
    for field, indices in (("obs", OBS_INDICES), ("next_obs", NEXT_INDICES)):
        index, pixels = (np.stack(x)[:, 0] for x in zip(*[getattr(t, field) for t in transitions], strict=True))
        assert index.tolist() == indices
        assert (pixels == np.array(indices)[:, None, None, :]).all() and pixels.shape == (12, 1, 2, 4)
        assert pixels.dtype == np.uint8
    assert [i for i, t in enumerate(transitions) if t.terminated[0] or t.truncated[0]] == [6, 10]


def test_stacks_are_right_across_the_resets_of_each_environment():
    # The same keys and actions with and without stacks. At 0.06 rad a pole at random falls about every 10 steps.
    params = dict(num_envs=2, theta_threshold_radians=0.06)
    plain, stacked = envs.make("CartPole-v1", **params), envs.make("CartPole-v1", frame_stack=3, **params)
    actions = jax.random.randint(jax.random.key(1), (40, 2), 0, 2)

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling takes longer than running
    def play(key):
        def step(states, inputs):
            key, action = inputs
            one, *single = plain.step(key, states[0], action)
            two, *stack = stacked.step(key, states[1], action)
            return (one, two), (single, stack, two.obs)

        starts = plain.reset(key), stacked.reset(key)
        return starts[1].obs, *jax.lax.scan(step, starts, (jax.random.split(key, 40), actions))[1]

    start, (single, reported), (stack, also_reported), acted_on = jax.tree.map(np.asarray, play(jax.random.key(0)))
    done = single.terminated | single.truncated
    assert done[:-1].sum(0).min() >= 2 and (done[:, 0] != done[:, 1]).any()  # resets, not all at once
    for e in range(2):
        window = [single.obs[0, e]] * 3
        for t in range(40):
            assert (stack.obs[t, e] == np.concatenate(window)).all()
            window = [*window[1:], single.next_obs[t, e]]
            assert (stack.next_obs[t, e] == np.concatenate(window)).all()
            if done[t, e] and t < 39:
                window = [single.obs[t + 1, e]] * 3
    assert (start == stack.obs[0]).all() and (acted_on[:-1] == stack.obs[1:]).all()
    # All else is the environment's own.
    own = lambda t, metrics: jax.tree.leaves((t.action, t.reward, t.terminated, t.truncated, metrics))
    for a, b in zip(own(single, reported), own(stack, also_reported), strict=True):
        assert (a == b).all()


@pytest.mark.parametrize(
    "name, shape, dtype",
    [("Breakout-MinAtar", (10, 10, 12), jnp.bool_), ("Catch-bsuite", (10, 15), jnp.float32)],
)
def test_stacked_environments_keep_the_contract_and_the_dtype(name, shape, dtype):
    env = envs.make(name, 2, frame_stack=3)
    assert env.spec.obs == jax.ShapeDtypeStruct(shape, dtype) and env.num_envs == 2
    key, action = jax.random.key(0), jax.ShapeDtypeStruct((2,), jnp.int32)
    state = jax.eval_shape(env.reset, key)
    next_state, transition, _ = jax.eval_shape(env.step, key, state, action)
    signature = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
    assert signature(next_state) == signature(state)  # else a scan fails
    batched = jax.tree.map(lambda x: ((2, *x.shape), x.dtype), jax.eval_shape(lambda: example_transition(env.spec)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), transition) == batched
    hash(env.spec)


def test_frame_stack_is_a_parameter_of_every_environment_on_the_command_line():
    _, params = cli.split_env_params(["--env-params.frame-stack", "4", "--env-params.length", "0.7"])
    options = types.SimpleNamespace(algo="iqn", source="CartPole-v1", num_envs=2, eval_episodes=3)
    train, evaluation = settings.make_envs(options, params)
    assert [(e.spec.obs.shape, e.num_envs) for e in (train, evaluation)] == [((16,), 2), ((16,), 3)]
    assert float(train.env.params.length) == pytest.approx(0.7)


def test_one_frame_is_no_stack():
    assert not any(
        isinstance(env, FrameStack) for env in (envs.make("CartPole-v1", frame_stack=1), envs.make("CartPole-v1"))
    )


@pytest.mark.parametrize(
    "value, message",
    [
        (0, "CartPole-v1: frame_stack 0 must be at least 1"),
        (-2, "frame_stack -2 must be at least 1"),
        (2.5, "frame_stack must be an integer, such as 1; got 2.5"),
        (True, "frame_stack must be an integer, such as 1; got True"),
        ("four", "frame_stack must be an integer, such as 1; got 'four'"),
        ([2, 3], "frame_stack must be an integer"),
        (None, "frame_stack must be an integer, such as 1; got None"),
    ],
)
def test_a_frame_stack_that_is_not_a_count_is_refused(value, message):
    with pytest.raises(ValueError) as error:
        envs.make("CartPole-v1", frame_stack=value)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_scalar_observations_cannot_be_stacked():
    scalar = types.SimpleNamespace(spec=discrete_spec(jax.ShapeDtypeStruct((), jnp.float32), 2, 5))
    with pytest.raises(ValueError, match="frame_stack 4 needs observations with at least one axis"):
        wrap(scalar, 4)
