"""CQN: the authors' numbers, each formula by hand, laws of the zoom, and a bandit solved to one final cell."""

import dataclasses
import json
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from probes import table
from scipy.stats import chisquare, norm

from algos import cqn
from envs.types import EnvAndData, Transition, continuous_spec, pytree, static, zeros
from replay import datasets, demos, ring
from runner import run

golden = lambda name: json.loads((Path(__file__).parent / "golden" / f"cqn_{name}.json").read_text())
array = partial(np.asarray, dtype=np.float32)
close = partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)  # float32, sums in another order
struct = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
key = jax.random.key
CODES = golden("encode_decode")
EVERY_CODE = np.stack(np.unravel_index(np.arange(125), (5, 5, 5)), -1)[..., None]  # (125, 3, 1)
ways = pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])

# --- zoom ---


@ways
@pytest.mark.parametrize("case", CODES["cases"], ids=lambda c: f"L{c['levels']}_B{c['bins']}")
def test_codes_intervals_and_actions_are_the_authors(case, way):
    levels, bins = case["levels"], case["bins"]

    def path(action):
        codes, midpoints = cqn.encode(action, levels, bins)
        intervals = [(-jnp.ones((9, 2)), jnp.ones((9, 2)))]
        for level in range(levels):
            intervals.append(cqn.zoom(*intervals[-1], codes[:, level], bins))
        return codes, midpoints, intervals[1:], cqn.decode(codes, bins)

    codes, midpoints, intervals, action = way(path)(array(case["action"]))
    assert codes.dtype == jnp.int32 and codes.tolist() == case["discrete"]
    for level, (ours, theirs) in enumerate(zip(intervals, case["intervals_per_level"], strict=True)):
        close(midpoints[:, level], theirs["prev_center"])
        close(ours[0], theirs["low"]), close(ours[1], theirs["high"])
    close(action, case["decoded"])


@ways
def test_each_of_125_codes_is_its_own_action(way):
    action = way(lambda codes: cqn.decode(codes, 5))(EVERY_CODE)
    close(action[:, 0], CODES["exhaustive_L3_B5_1d"]["decoded"])
    codes, _ = way(lambda action: cqn.encode(action, 3, 5))(action)
    np.testing.assert_array_equal(codes, EVERY_CODE)
    close([action.min(), action.max()], [-0.992, 0.992])  # 1 - half of the final cell 2 / 5^3 = 0.016


@ways
def test_edges_of_the_first_level_are_the_authors(way):
    edges = CODES["level0_edges"]
    codes, _ = way(lambda action: cqn.encode(action, 1, 5))(array(edges["action"])[:, None])
    assert codes[:, 0, 0].tolist() == edges["level0_bin"]


def test_intervals_stay_within_the_box():
    # Halves of [-3/2, -1/2] and [1/2, 3/2]: [-3/2, -1] and [1, 3/2], cut to the bounds
    low, high = cqn.zoom(jnp.array([-1.5, 0.5]), jnp.array([-0.5, 1.5]), jnp.array([0, 1]), 2)
    assert low.tolist() == [-1, 1] and high.tolist() == [-1, 1]


def test_no_gradient_flows_through_codes_or_midpoints():
    def path(action):
        codes, midpoints = cqn.encode(action, 3, 5)
        return midpoints.sum() + cqn.decode(codes, 5).sum()

    assert not jax.jit(jax.grad(path))(jnp.linspace(-1.5, 1.5, 7)[:, None]).any()


# --- networks of numbers that can be read ---

CONFIG = cqn.Config(levels=2, bins=3, num_atoms=3, v_min=-1.0, v_max=1.0, hidden=(), dueling=False, batch_size=4)
SCALAR = dataclasses.replace(CONFIG, distributional=False, tie_tolerance=0.0)
ONE = continuous_spec(struct(1), 1, 5)


def linear(obs=0.0, midpoint=0.0, first=0.0, second=0.0):
    """A critic without hidden layers: what one unit of each input adds to the outputs, `(B K,)`."""
    size = max(map(np.size, (obs, midpoint, first, second)))
    kernel = np.stack([np.broadcast_to(array(x).ravel(), size) for x in (obs, midpoint, first, second)])
    return {"params": {"Stream_0": {"Dense_0": {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(size)}}}}


def moved(reward, next_obs=1.0, obs=0.0, action=0.0) -> Transition:
    """Transitions of one dimension from `obs` to `next_obs`; flags are not read."""
    reward = array(reward)
    column = lambda x: jnp.full((len(reward), 1), x)
    flags = jnp.zeros(len(reward), bool)
    return Transition(column(obs), column(action), jnp.asarray(reward), column(next_obs), flags, flags)


# At s = 1 [1, 0, 2] and [3, 0, 2]: the last bin of three, then the first: [1/3, 1], then [1/3, 5/9], midpoint 4/9.
# At s = 0 it takes the first at both levels.
ONLINE = dict(obs=[0, 0, 2], first=[1, 0, 0], second=[3, 0, 0])


def test_target_is_the_target_critics_value_on_the_online_critics_path():
    # Qbar = 100 s' + 3 midpoint + [10, 20, 30] at level 1, + [40, 50, 60] at level 2, where the midpoint is 2/3.
    # On the path: 100 + 0 + 30 = 130 and 100 + 2 + 40 = 142. r = 1, discounts 1/2 and 0: 66, 72 and 1, 1.
    target = linear([100] * 3, [3] * 3, [10, 20, 30], [40, 50, 60])
    params, batch = cqn.Params(linear(**ONLINE), target), moved([1, 1])
    target = jax.jit(cqn.target_of, static_argnums=1)(SCALAR, ONE, params, batch, jnp.array([0.5, 0.0]), key(0))
    close(target[:, :, 0, 0], [[66, 72], [1, 1]])


def test_target_distribution_is_the_target_critics_on_the_online_critics_path():
    # Atoms [-1, 0, 1]. The online critic's best bin puts its mass on 1, the others on -1. The target critic puts that
    # of bin k on atom k: on the path 1 and -1. r = 1/4, discount 1/2: 3/4 and -1/4, a quarter from the nearest atom.
    on = lambda *atoms: 50.0 * np.eye(3)[list(atoms)]  # e^-50 elsewhere: nothing
    target = linear([0] * 9, [0] * 9, on(0, 1, 2), on(0, 1, 2))
    params = cqn.Params(linear(first=on(0, 0, 2), second=on(2, 0, 0)), target)
    target = jax.jit(cqn.target_of, static_argnums=1)(CONFIG, ONE, params, moved([0.25]), jnp.array([0.5]), key(0))
    close(target[0, :, 0], [[0, 0.25, 0.75], [0.25, 0.75, 0]])


@pytest.mark.parametrize("act_with_target, action", [(False, 4 / 9), (True, -4 / 9)])
def test_the_chosen_critic_acts(act_with_target, action):
    config = dataclasses.replace(SCALAR, act_with_target=act_with_target)
    params = cqn.Params(linear(**ONLINE), linear(first=[1, 0, 0], second=[0, 0, 1]))
    close(jax.jit(cqn.act, static_argnums=1)(config, ONE, params, jnp.ones((2, 1)), key(0)), [[action]] * 2)


def test_no_gradient_flows_through_the_greedy_path():
    chosen = lambda critic: sum(x.sum() for x in cqn.greedy(SCALAR, ONE, critic, jnp.ones((2, 1)), key(0))[::2])
    grads = jax.jit(jax.grad(chosen))(linear(**ONLINE))
    assert not any(x.any() for x in jax.tree.leaves(grads))


@cache
def updated():
    """Online critics and targets, as vectors, of an update at each of the gradient steps 0..2 from the same state.

    Of a target that follows at every step, and of one that is copied every second.
    """
    params = cqn.Params(linear(**ONLINE), linear(first=[1, 2, 3]))
    flat = lambda critic: critic["params"]["Stream_0"]["Dense_0"]["kernel"].ravel()

    def after(rate, target_period, gradient_steps):
        config = dataclasses.replace(SCALAR, target_update_rate=rate, target_period=target_period, learning_rate=0.5)
        opt_state = cqn.optimizer(config).init(params.critic)
        arguments = (params, opt_state, moved([1.0] * 4), jnp.zeros(4), 0, gradient_steps, key(0))
        new = cqn.update(config, ONE, *arguments)[0]
        return flat(new.critic), flat(new.target), flat(params.target)

    both = lambda steps: [jax.vmap(partial(after, *case))(steps) for case in ((0.02, 1), (1.0, 2))]
    return jax.jit(both)(jnp.arange(3))


def test_the_target_follows_the_new_critic_at_every_step():
    tau = golden("misc")["soft_update"]
    assert tau["new"] == tau["tau"] == 0.02 == cqn.Config().target_update_rate  # from 0 to 1 by 0.02
    new, target, old = updated()[0]
    close(target, old + 0.02 * (new - old))


def test_the_target_is_copied_once_a_period():
    new, target, old = map(np.asarray, updated()[1])
    # Gradient steps are counted from 0: the second one, 1, completes a period of two.
    np.testing.assert_array_equal(target[1], new[1])
    np.testing.assert_array_equal(target[[0, 2]], old[[0, 2]])


def test_all_levels_is_one_level_after_another():
    critic = linear([1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12])
    obs, midpoints = jnp.array([[1.0], [2.0]]), jnp.array([[[0.0], [0.5]], [[0.0], [-0.5]]])
    logits = all_levels(SCALAR, ONE, critic, obs, midpoints)
    # s = 1, midpoint 0, level 1: [1 + 7, 2 + 8, 3 + 9]; midpoint 1/2, level 2: [1 + 2 + 10, 2 + 2.5 + 11, 3 + 3 + 12]
    close(logits[0, :, 0, :, 0], [[8, 10, 12], [13, 15.5, 18]])
    # s = 2: [2 + 7, 4 + 8, 6 + 9] and [2 - 2 + 10, 4 - 2.5 + 11, 6 - 3 + 12]
    close(logits[1, :, 0, :, 0], [[9, 12, 15], [10, 12.5, 15]])


# --- the authors' networks ---


def stream(p, encoders, net, head):
    """Parameters of one stream from a dump: Dense and normalisation in turn, weights transposed, the head last."""
    dense = lambda name: {
        k: array(p[f"{name}.{n}"]).T for k, n in (("kernel", "weight"), ("bias", "bias")) if f"{name}.{n}" in p
    }
    norm = lambda name: {"scale": array(p[f"{name}.weight"]), "bias": array(p[f"{name}.bias"])}
    pairs = [(f"{e}.0", f"{e}.1") for e in encoders] + [(f"{net}.{i}", f"{net}.{i + 1}") for i in (0, 3)]
    layers = {}
    for i, (first, second) in enumerate(pairs):
        layers |= {f"Dense_{i}": dense(first), f"LayerNorm_{i}": norm(second)}
    return layers | {f"Dense_{len(pairs)}": dense(head)}


TINY = golden("tiny_network")
TINY_CONFIG = cqn.Config(bottleneck=2, hidden=(4, 4), levels=3, bins=5, num_atoms=3, v_min=-1.0, v_max=1.0)
TINY_SPEC = continuous_spec((struct(3), struct(2)), 2, 0)
tiled = lambda x: np.tile(array(x), (250, 1))  # 500 rows, as many as other tests draw: one program for all
TINY_OBS = (tiled(TINY["rgb"]), tiled(TINY["low_dim"]))
TINY_CRITIC = {
    "params": {
        f"Stream_{i}": stream(
            TINY["params"], [f"{name}_rgb_encoder", f"{name}_low_dim_encoder"], f"{name}_net", f"{name}_head"
        )
        for i, name in enumerate(("adv", "value"))
    }
}
all_levels = jax.jit(cqn.all_levels, static_argnums=1)
greedy, encode = jax.jit(cqn.greedy, static_argnums=1), jax.jit(cqn.encode, static_argnums=(1, 2))
decode = jax.jit(cqn.decode, static_argnums=1)
initialise = lambda config, spec, key: cqn.network(config, spec).init(
    key, *cqn.inputs(config, spec, zeros(spec.obs), zeros(spec.action), 0)
)
tiny_shapes = cache(lambda: jax.eval_shape(partial(initialise, TINY_CONFIG, TINY_SPEC), key(0)))


def test_the_dueling_network_gives_the_authors_logits_values_and_actions():
    assert jax.tree.map(jnp.shape, TINY_CRITIC) == jax.tree.map(jnp.shape, tiny_shapes())  # of the same names too
    codes, midpoints = encode(tiled(TINY["action"]), 3, 5)
    logits = all_levels(TINY_CONFIG, TINY_SPEC, TINY_CRITIC, TINY_OBS, midpoints)[:2]
    # Norms of two features: theirs and ours are 2e-6 each from what float64 gives
    close(logits[:, 0], TINY["logits_level0_prev0"], atol=4e-6)
    q = cqn.values(TINY_CONFIG, logits)
    close(q, TINY["q_values"])
    close(cqn.at(q[..., None], codes[:2])[..., 0], TINY["q_values_at_action"])
    close(greedy(TINY_CONFIG, TINY_SPEC, TINY_CRITIC, TINY_OBS, key(0))[0][:2], TINY["greedy_action"])


def test_a_constant_added_to_all_bins_advantages_changes_nothing():
    added = np.broadcast_to(np.random.default_rng(0).normal(size=(2, 1, 3)).astype(np.float32), (2, 5, 3)).ravel()
    other = jax.tree.map(jnp.asarray, TINY_CRITIC)
    other["params"]["Stream_0"]["Dense_4"]["bias"] += added
    midpoints = encode(tiled(TINY["action"]), 3, 5)[1]
    ours, its = (all_levels(TINY_CONFIG, TINY_SPEC, c, TINY_OBS, midpoints) for c in (TINY_CRITIC, other))
    close(ours, its)


def test_zero_heads_are_uniform_at_every_level_and_all_bins_tie():
    @jax.jit
    def begun(key):
        """The kernel of a hidden layer and the critic with heads as they begin; other layers do not matter to them."""
        streams = initialise(TINY_CONFIG, TINY_SPEC, key)["params"]
        given = TINY_CRITIC["params"]
        heads = {name: given[name] | {"Dense_4": streams[name]["Dense_4"]} for name in given}
        return streams["Stream_0"]["Dense_3"]["kernel"], {"params": heads}

    kernel, critic = begun(key(1))
    close(np.asarray(kernel) @ np.asarray(kernel).T, np.eye(4))  # orthogonal, gain 1
    rng = np.random.default_rng(2)
    obs = tuple(array(rng.normal(size=(500, n))) for n in (3, 2))
    action, codes, midpoints = greedy(TINY_CONFIG, TINY_SPEC, critic, obs, key(3))
    logits = all_levels(TINY_CONFIG, TINY_SPEC, critic, obs, midpoints)
    np.testing.assert_array_equal(logits, np.zeros(logits.shape))
    codes = np.asarray(codes)
    for level in range(3):
        for d in range(2):
            assert chisquare(np.bincount(codes[:, level, d], minlength=5)).pvalue > 0.01  # a fixed seed
    # levels and dimensions are drawn each for itself: 5^6 paths, of which 500 draws repeat few
    assert len(np.unique(codes.reshape(500, 6), axis=0)) > 450
    close(decode(codes, 5), action)


def test_weight_decay_finds_only_the_networks_weights():
    paths = jax.tree_util.tree_leaves_with_path(tiny_shapes())
    assert {path[-1].key for path, _ in paths} == {"kernel", "bias", "scale"}  # neither atoms nor bounds of the box


def test_ties_are_the_authors():
    tie = golden("misc")["tie"]
    assert cqn.Config().tie_tolerance == 1e-4
    # and one of ours: 1.8e-4 from the largest to the smallest, though no more than 0.6e-4 to the mean
    q = np.concatenate([array(tie["q"]), array([[[0, 9e-5, 9e-5, 9e-5, -9e-5]]])], 1)
    argmax, keys = [*tie["argmax"][0], 1], jax.random.split(key(0), 200)
    chosen = jax.jit(jax.vmap(cqn.choose, (None, None, 0)))
    drawn = chosen(q, 1e-4, keys)[:, 0]  # (200, 5)
    for d, tied in enumerate([*tie["random_mask"][0], False]):
        assert set(drawn[:, d].tolist()) == (set(range(5)) if tied else {argmax[d]})
    # Without a tolerance nothing is drawn, not even where all are equal: the scalar agent's rule
    assert (chosen(q, 0.0, keys)[:, 0] == jnp.array([argmax])).all()


STATE = golden("state_update")
STATE_CONFIG = cqn.Config(
    **dict(distributional=False, dueling=False, hidden=(4, 4), levels=3, bins=5, tie_tolerance=0.0, td_weight=1.0),
    **dict(learning_rate=STATE["config"]["lr"], weight_decay=STATE["config"]["weight_decay"]),
)
STATE_SPEC = continuous_spec(struct(3), 2, 0)
critic_of = lambda p: {"params": {"Stream_0": stream(p, [], "network.net", "network.head")}}


def test_one_update_of_the_scalar_agent_is_the_authors():
    config, spec = STATE_CONFIG, STATE_SPEC
    params = cqn.Params(critic_of(STATE["critic_before"]), critic_of(STATE["critic_target"]))
    shapes = jax.eval_shape(partial(initialise, config, spec), key(0))
    assert jax.tree.map(jnp.shape, params.critic) == jax.tree.map(jnp.shape, shapes)
    reward, discount = array(STATE["reward"])[:, 0], array(STATE["discount"])[:, 0]
    obs, action, next_obs = (array(STATE[name]) for name in ("obs", "action", "next_obs"))
    batch = Transition(obs, action, reward, next_obs, discount == 0, np.zeros(3, bool))

    @jax.jit
    def both(params):
        opt_state = cqn.optimizer(config).init(params.critic)
        target = cqn.target_of(config, spec, params, batch, discount, key(0))
        return target, *cqn.update(config, spec, params, opt_state, batch, discount, 0, 0, key(0))

    target, after, _, metrics = both(params)
    close(target[..., 0], STATE["target_q"])
    assert set(metrics) == {"loss", "td_loss", "q_mean"}
    close([metrics["loss"], metrics["td_loss"]], [STATE["critic_loss"]] * 2)
    close(metrics["q_mean"], np.mean(STATE["q_at_action"]))
    # A parameter moves by the learning rate, 1e-4, and decays by 1e-5 of itself
    near = partial(np.testing.assert_allclose, rtol=0, atol=3e-7)
    jax.tree.map(near, after.critic, critic_of(STATE["critic_after_one_step"]))


# --- losses ---


@pytest.mark.parametrize("case", golden("c51_projection")["cases"], ids=lambda c: f"{c['atoms']}_atoms")
def test_projections_are_the_authors(case):
    config = cqn.Config(v_min=case["v_min"], v_max=case["v_max"], num_atoms=case["atoms"])
    reward, discount = (array(case[name])[:, 0] for name in ("reward", "discount"))
    project = jax.jit(lambda *arguments: cqn.project(*arguments, cqn.support(config)))
    projected = np.asarray(project(array(case["next_probs"]), reward, discount))
    close(projected, case["projected"])
    close(projected.sum(-1), np.ones(projected.shape[:-1]))


PROJECT = jax.jit(cqn.project)
fractions = hnp.arrays(np.float32, 2, elements=st.floats(0, 1, width=32))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(hnp.arrays(np.float32, (2, 3, 7), elements=st.floats(0.0625, 1, width=32)), fractions, fractions)
def test_projection_keeps_mass_and_where_nothing_is_clipped_the_mean(mass, place, discount):
    z = np.linspace(-3, 5, 7, dtype=np.float32)
    p = mass / mass.sum(-1, keepdims=True)
    reward = -3 + 3 * discount + place * 8 * (1 - discount)  # r + g z runs from there to r + 5 g <= 5
    projected = PROJECT(p, reward, discount, z)
    np.testing.assert_allclose(projected.sum(-1), 1, rtol=1e-5)  # seven terms of float32
    assert (projected >= 0).all()
    mean = lambda p: np.sum(np.float64(p) * z, -1)
    # weights 1 - |x - z| / dz are rounded at 1e-7 of numbers up to 8
    np.testing.assert_allclose(mean(projected), reward[:, None] + discount[:, None] * mean(p), atol=1e-5)


def test_projection_by_hand():
    # z = [-1, 0, 1], p = [1/2, 0, 1/2]. r = 0, g = 1/2: -1/2 and 1/2, each halved. r = 1, g = 1: 0 and 2, clipped to 1.
    # g = 0: all on r = 1/4. r = -9: all on -1.
    p = jnp.tile(jnp.array([0.5, 0.0, 0.5]), (4, 1))
    projected = PROJECT(p, jnp.array([0, 1, 0.25, -9]), jnp.array([0.5, 1, 0, 1]), jnp.array([-1.0, 0, 1]))
    close(projected, [[0.25, 0.5, 0.25], [0, 0.5, 0.5], [0, 0.75, 0.25], [1, 0, 0]])


total = lambda logits, config, *rest: cqn.losses(config, logits, *rest)
losses = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=4)


@pytest.mark.parametrize("case", golden("losses")["cases"], ids=lambda c: f"demos_{c['demos']}_{c['bc_margin']}")
def test_losses_and_their_gradients_are_the_authors(case):
    config = cqn.Config(
        **dict(v_min=case["v_min"], v_max=case["v_max"], num_atoms=4, margin=case["bc_margin"]),
        **dict(td_weight=case["critic_lambda"], imitation_weight=case["bc_lambda"]),
    )
    last = np.argsort(case["demos"], kind="stable")  # demonstrations behind the others
    rows = lambda name, dtype=np.float32: np.asarray(case[name], dtype)[last]
    arguments = (config, rows("action_bins", np.int32), rows("target_probs"), sum(case["demos"]))
    (loss, parts), grad = losses(rows("logits"), *arguments)
    close(cqn.values(config, rows("logits")), rows("q_values"))
    close(loss, case["total_loss"])
    expected = dict(td_loss="q_critic_loss", dominance_loss="bc_fosd_loss", margin_loss="bc_margin_loss")
    expected = {ours: case[theirs] for ours, theirs in expected.items() if case[theirs] is not None}
    for name, value in expected.items():
        close(parts[name], value)
    assert set(parts) == {*expected, "q_mean"}
    close(grad, rows("grad_logits"))


def test_imitation_losses_by_hand():
    # Values 0 and 0.3, k = 0, margin 0.1: max(0.1 - 0, 0) = 0.1 of k itself and 0.1 + 0.3, the mean 0.25. k = 1: 0.05
    q, codes = jnp.tile(jnp.array([0.0, 0.3]), (2, 1, 1, 1)), jnp.array([[[0]], [[1]]])
    close(jax.jit(cqn.margin_loss)(q, codes, 0.1), [0.25, 0.05])
    # p = [1/2, 1/2, 0] and [0, 1/2, 1/2]: CDFs [1/2, 1, 1] and [0, 1/2, 1]. k = 0 exceeds by 1/2 + 1/2, itself by 0
    p = jnp.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    logits = jnp.tile(jnp.log(jnp.maximum(p, 1e-30)), (2, 1, 1, 1, 1))
    close(jax.jit(cqn.dominance_loss)(logits, codes), [0.5, 0])


def test_only_the_last_samples_are_imitated_and_by_the_margin_alone_where_values_are_learned():
    config = dataclasses.replace(SCALAR, td_weight=0.0, imitation_weight=2.0, margin=3.0)
    logits = jax.random.normal(key(0), (6, 2, 1, 3, 1))
    codes, target = jnp.ones((6, 2, 1), jnp.int32), jnp.zeros((6, 2, 1, 1))
    (loss, parts), grad = losses(logits, config, codes, target, 2)
    assert (jnp.abs(grad).sum((1, 2, 3, 4)) > 0).tolist() == [False] * 4 + [True] * 2
    assert set(parts) == {"td_loss", "q_mean", "margin_loss"}
    close(loss, 2 * parts["margin_loss"])
    (loss, parts), grad = losses(logits, config, codes, target, 0)
    assert loss == 0 and not grad.any() and set(parts) == {"td_loss", "q_mean"}  # nor NaN, nothing to imitate


# --- acting ---


def test_executed_actions_are_fixed_points_and_leave_their_cell_as_often_as_the_noise_says():
    config = dataclasses.replace(SCALAR, levels=3, bins=5)
    spec = continuous_spec(struct(1), 3, 0)
    # Dimensions prefer the bins 0, 2 and 4 at all levels: -0.992, 0, 0.992
    bias = np.zeros((3, 5), np.float32)
    bias[[0, 1, 2], [0, 2, 4]] = 1
    layer = {"kernel": jnp.zeros((1 + 3 + 3, 15)), "bias": jnp.asarray(bias.ravel())}
    params, obs = cqn.Params({"params": {"Stream_0": {"Dense_0": layer}}}, None), jnp.zeros((2_000, 1))

    @jax.jit
    def explore(noise, key):
        action = cqn.explore(dataclasses.replace(config, exploration_noise=noise), spec, params, obs, key)
        return action, cqn.quantise(config, action)

    centre = jnp.array([-0.992, 0, 0.992])
    for noise in (0.0, 0.01, 0.5):
        action, again = explore(noise, key(1))
        np.testing.assert_allclose(again, action, rtol=0, atol=1e-7)  # XLA fuses, and so rounds, each in its own way
        assert jnp.abs(action).max() <= 0.992 + 1e-6
        left = (jnp.abs(action - centre[None]) > 0.008).mean(0)
        # Half a cell is 0.008; at the bounds only one side is open
        two_sides = 2 * norm.sf(0.008 / noise) if noise else 0.0
        expected = two_sides * np.array([0.5, 1, 0.5])
        assert (np.abs(left - expected) <= 5 * np.sqrt(expected / 2_000) + 1e-9).all()  # five standard errors
    clamp = golden("misc")["trunc_normal_mean_clamp"]
    close(np.clip([-2, -1, 0, 1, 2], -cqn.INSIDE, cqn.INSIDE), clamp["clamped"], rtol=0, atol=1e-7)


# --- data ---


def test_a_batch_is_half_demonstrations():
    config = dataclasses.replace(CONFIG, gamma=0.5, n_step=2)
    t = moved([0.0] * 2)._replace(terminated=jnp.ones(2, bool))
    replay = ring.create(4, 2, jax.tree.map(lambda x: x[0], t))
    replay = ring.insert(ring.insert(replay, t), t)
    ours = demos.create(6, t._replace(reward=jnp.ones(2)))

    @jax.jit
    def draw(replay, ours, key):
        return [cqn.draw(dataclasses.replace(config, always_bootstrap=x), replay, ours, key) for x in (False, True)]

    for (batch, discount), factor in zip(draw(replay, ours, key(0)), (0.0, 0.5), strict=True):
        assert batch.reward.tolist() == [0] * 4 + [1] * 4 and discount.tolist() == [factor] * 8


def test_both_halves_of_a_batch_are_of_n_steps():
    # Three rows of rewards 2, and of 1 in the demonstrations: gamma 1/2, two steps: 2 + 1, and 1 + 1/2.
    config = dataclasses.replace(CONFIG, gamma=0.5, n_step=2)
    t = moved([0.0] * 3)
    replay = ring.create(6, 2, jax.tree.map(lambda x: x[0], t))
    for _ in range(3):
        replay = ring.insert(replay, jax.tree.map(lambda x: x[:2], t._replace(reward=jnp.full(3, 2.0))))
    ours = demos.create(6, t._replace(reward=jnp.ones(3), truncated=jnp.array([False, False, True])))
    batch, discount = jax.jit(lambda *args: cqn.draw(config, *args))(replay, ours, key(0))
    assert batch.reward[:4].tolist() == [3] * 4 and discount[:4].tolist() == [0.25] * 4
    assert set(batch.reward[4:].tolist()) <= {1.5, 1.0}  # the last one's window ends with the episode
    assert 1.5 in batch.reward[4:].tolist()


@pytest.fixture(scope="module")
def stepped():
    """States before and after one step of 2 rows of 16 environments and an update, with a replay that holds these rows
    alone, whose rewards were not numbers before; at first and with a critic without ties."""
    from envs import gymnax_env

    source = EnvAndData(gymnax_env.make("Pendulum-v1", num_envs=16), None)
    config = tiny.config(cqn, exploration_noise=0.5, capacity=32, prefill=32, train_period=32)
    first = jax.jit(lambda key: cqn.init(config, source, key))(key(0))
    poisoned = first.replay.data._replace(reward=jnp.full((2, 16), jnp.nan))
    replay = dataclasses.replace(first.replay, words=ring.pack(first.replay.layout, poisoned))
    leaves, tree = jax.tree.flatten(first.params.critic)
    keys = jax.random.split(key(1), len(leaves))
    critic = jax.tree.unflatten(tree, [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])
    step = jax.jit(lambda state: cqn.step(config, source, state))
    starts = [first._replace(replay=replay, params=cqn.Params(p, p)) for p in (first.params.critic, critic)]
    return config, source, [(start, *step(start)) for start in starts]


def test_a_step_explores_with_keys_of_its_own_and_learns_from_what_it_just_stored(stepped):
    config, source, ((_, tied, _), (start, after, metrics)) = stepped
    assert not tiny.same_bits(start.key, after.key)
    # While all bins tie, actions are draws: two rows by one key would be equal.
    action = np.asarray(tied.replay.data.action)  # (2, 16, 1)
    assert (action[0] != action[1]).mean() > 0.5
    # A critic without ties acts by what it sees: what differs is noise.
    replay = after.replay.data
    greedy = jax.jit(lambda obs: cqn.act(config, source.spec, start.params, obs, key(2)))(replay.obs.reshape(32, 3))
    assert (np.abs(greedy.reshape(2, 16, 1) - replay.action) > 1e-3).mean() > 0.3
    # Rewards that are not numbers are gone before the update samples.
    assert np.isfinite(metrics["loss"]).all()


class Scripted:
    """Environments whose transitions are known beforehand: of step t, leaves `(T, num_envs, ...)`; the state is t."""

    def __init__(self, transitions, max_episode_steps=0):
        self.transitions, self.num_envs = transitions, transitions.reward.shape[1]
        self.spec = continuous_spec(struct(1), 1, max_episode_steps)

    def step(self, key, t, action):
        return t + 1, jax.tree.map(lambda x: x[t], self.transitions), {}


def test_only_an_episode_that_terminates_with_the_reward_of_success_becomes_a_demonstration():
    # Environment 0: 0, 1 a success of two steps, 2, 3 terminated too low, 4 a success of one step; environment 1: 0
    # rewarded in the middle, 1 truncated with the reward of success, 2, 3, 4 a success of three steps.
    reward = array([[0, 1], [1, 1], [0, 0], [0.9, 0], [1.5, 1]])
    terminated = np.array([[0, 0], [1, 0], [0, 0], [1, 0], [1, 1]], bool)
    truncated = np.array([[0, 0], [0, 1], [0, 0], [0, 0], [0, 0]], bool)
    ids = np.arange(5, dtype=np.float32)[:, None, None] + [[0.0], [100.0]]  # (5, 2, 1)
    ids = array(ids)
    env = Scripted(jax.tree.map(jnp.asarray, Transition(ids, ids, reward, ids + 1, terminated, truncated)), 5)
    given = moved([7.0])._replace(truncated=jnp.ones(1, bool))
    replay = ring.create(20, 2, jax.tree.map(lambda x: x[0], given))
    state = cqn.Collected(replay, demos.create(16, given), jnp.int32(0), jnp.zeros(2, jnp.int32))
    config = dataclasses.replace(CONFIG, capacity=20)
    body = lambda state, _: cqn.store(config, env, state, jnp.zeros((2, 1)), key(0))
    state, _ = jax.lax.scan(body, state, None, 5)
    held = ring.unpack(state.demos.layout, state.demos.words)
    assert state.demos.stored == 7
    assert held.obs[1:7, 0].tolist() == [0, 1, 4, 102, 103, 104] and held.reward[:7].tolist() == [7, 0, 1, 1.5, 0, 0, 1]
    assert state.episode_length.tolist() == [0, 0] and state.replay.inserted == 5
    # Without demonstrations none are kept
    none, _ = jax.lax.scan(body, cqn.Collected(replay, None, jnp.int32(0), jnp.zeros(2, jnp.int32)), None, 5)
    assert none.demos is None and tiny.same_bits(none.replay, state.replay)


@pytest.mark.parametrize("limit, capacity, expected", [(5, 100, 5), (0, 10_000, 1_000), (50, 20, 10)])
def test_a_kept_episode_is_as_long_as_the_environment_and_the_ring_allow(limit, capacity, expected):
    env = SimpleNamespace(num_envs=2, spec=ONE._replace(max_episode_steps=limit))
    assert cqn.longest(dataclasses.replace(CONFIG, capacity=capacity), env) == expected


# --- whole steps ---

SMALL = dataclasses.replace(CONFIG, capacity=40, demo_capacity=40, prefill=4, train_period=1, exploration_noise=0.5)


def two_steps(terminated=1, num_envs=2, reward=1.0):
    """Two states, observed as 1 and 2; the second step ends the episode with the reward 1."""
    ends = dict(terminated=[0, terminated], truncated=[0, 1 - terminated])
    return table([[1], [2]], [1, 0], [1, 0], [0, reward], continuous=True, num_envs=num_envs, **ends)


def given_demos():
    """One episode of three steps, observed as 7, 8, 9."""
    obs = array([[7], [8], [9]])
    ends = np.array([0, 0, 1], bool)
    t = Transition(obs, obs - 8, ends.astype(np.float32), obs + 1, ends, np.zeros(3, bool))
    return datasets.admit(t, two_steps().spec, "by hand")


init, step = jax.jit(cqn.init), jax.jit(cqn.step)


@cache
def begun():
    return EnvAndData(two_steps(), given_demos()), init(SMALL, EnvAndData(two_steps(), given_demos()), key(0))


def test_the_replay_starts_with_the_demonstrations_and_goes_on_with_uniform_actions():
    source, state = begun()
    # Three transitions make one row of two environments; two rows of prefill follow
    assert (state.replay.inserted, state.env_steps, state.gradient_steps) == (3, 4, 0)
    data = state.replay.data
    assert data.obs[:3, :, 0].tolist() == [[7, 8], [1, 1], [2, 2]]
    assert tiny.same_bits(state.params.critic, state.params.target)
    # Both environments' two steps were a success: 3 + 2 * 2, environment 0 first
    held = ring.unpack(state.demos.layout, state.demos.words)
    assert state.demos.stored == 7 and held.obs[:7, 0].tolist() == [7, 8, 9, 1, 2, 1, 2]
    np.testing.assert_array_equal(held.action[3:7], jnp.swapaxes(data.action[1:3], 0, 1).reshape(4, 1))


def test_a_step_acts_in_every_environment_and_learns_once_per_train_period():
    source, state = begun()
    after, metrics = step(SMALL, source, state)
    # Two environments and a train_period of 1: one row, two updates; the episodes end with the next
    assert (after.env_steps, after.gradient_steps, after.replay.inserted) == (6, 2, 4)
    assert metrics["loss"].shape == (2,) and metrics["demos"] == after.demos.stored == 7
    assert after.episode_length.tolist() == [1, 1]
    after, metrics = step(SMALL, source, after)
    assert metrics["demos"] == after.demos.stored == 11 and after.episode_length.tolist() == [0, 0]
    assert not tiny.same_bits(after.params.critic, after.params.target)
    new = after.replay.data.action[3:5]
    close(cqn.quantise(SMALL, new), new)
    assert {"td_loss", "margin_loss", "dominance_loss", "q_mean", "episode_return", "episode_length"} <= set(metrics)


def test_without_demonstrations_uniform_cells_and_more_steps_for_one_update_where_the_period_is_longer():
    source = EnvAndData(two_steps(num_envs=50), None)
    config = dataclasses.replace(SMALL, capacity=3_000, prefill=2_000, train_period=100)
    state = init(config, source, key(0))
    assert state.demos is None and state.replay.inserted == 40
    ninths = 9 * np.asarray(state.replay.data.action[:40])
    cells, counts = np.unique(np.round(ninths), return_counts=True)
    close(ninths, np.round(ninths), atol=9 * 2e-6)
    assert cells.tolist() == list(range(-8, 9, 2))  # ninths: the middles of 3^2 cells
    assert chisquare(counts).pvalue > 0.01  # a fixed seed
    _, metrics = jax.eval_shape(cqn.step, config, source, state)

    @jax.jit
    def counts_after(state):  # alone: the rest of the step is that of the test above, and would be compiled again
        after, _ = cqn.step(config, source, state)
        return after.env_steps, after.gradient_steps, after.replay.inserted

    assert counts_after(state) == (2_100, 1, 42)
    assert cqn.period(config, source) == 100 and cqn.period(SMALL, source) == 50
    assert metrics["loss"].shape == (1,) and not {"demos", "margin_loss", "dominance_loss"} & set(metrics)


BAD = [
    (dict(train_period=3), "train_period 3 and num_envs 2: one must be a multiple of the other"),
    (dict(prefill=5), "prefill 5 must be a multiple of 2, the larger of num_envs and train_period"),
    (dict(capacity=41), "capacity 41 must be a multiple of num_envs 2; 40 is"),
    (dict(v_min=1.0), "v_min 1.0 must be less than v_max 1.0"),
    (dict(bins=1), "bins 1 and num_atoms 3 must be at least 2"),
    (dict(num_atoms=1), "bins 3 and num_atoms 1 must be at least 2"),
    # 3 // 2 rows of demonstrations, 2 of prefill and 1 of the first step
    (dict(n_step=5), "n_step 5 needs as many steps of each of 2 environments before learning, not 4: raise prefill 4"),
    (dict(n_step=5, capacity=8, prefill=20), "n_step 5 .*, not 4: raise prefill 20 or capacity 8"),
    # 3 given and two episodes of at most 10
    (dict(demo_capacity=22), "demo_capacity 22 must hold the 3 transitions .* and 20 of .*: raise it to 23"),
    (dict(capacity=2, n_step=1), "demonstrations' 3 transitions must fill a row of num_envs 2 and fit into capacity 2"),
]


@pytest.mark.parametrize("changes, message", BAD, ids=lambda x: str(x)[:30])
def test_bad_settings_are_named(changes, message):
    source = EnvAndData(two_steps(), given_demos())
    cqn.check(dataclasses.replace(SMALL, n_step=4, demo_capacity=23), source)
    cqn.check(dataclasses.replace(SMALL, n_step=1, num_atoms=1, distributional=False), source)
    with pytest.raises(ValueError, match=message):
        cqn.check(dataclasses.replace(SMALL, **changes), source)


def test_without_demonstrations_nothing_must_hold_them():
    source = EnvAndData(two_steps(), None)
    cqn.check(dataclasses.replace(SMALL, demo_capacity=1, n_step=3), source)
    with pytest.raises(ValueError, match="n_step 4 .*, not 3: raise prefill 4"):
        cqn.check(dataclasses.replace(SMALL, n_step=4), source)


def test_fewer_demonstrations_than_environments_and_pixels_are_named():
    with pytest.raises(ValueError, match="demonstrations' 3 transitions must fill a row of num_envs 4"):
        cqn.check(dataclasses.replace(SMALL, demo_capacity=100), EnvAndData(two_steps(num_envs=4), given_demos()))
    pixels = SimpleNamespace(num_envs=2, spec=continuous_spec((struct(3), struct(8, 8, 1)), 1, 5))
    with pytest.raises(ValueError, match=r"cqn reads vectors; .*\(8, 8, 1\)"):
        cqn.check(SMALL, EnvAndData(pixels, None))


# --- a bandit ---


class Seen(NamedTuple):
    obs: jax.Array


@pytree
class Bandit:
    """Episodes of one step, of reward -(a - 0.37)^2."""

    spec: object = static(default=ONE)
    num_envs: int = static(default=8)

    def reset(self, key):
        return Seen(jnp.ones((self.num_envs, 1)))

    def step(self, key, state, action):
        ends = jnp.ones(self.num_envs, bool)
        reward = -jnp.square(action[:, 0] - 0.37)
        return state, Transition(state.obs, action, reward, state.obs, ends, ~ends), {}


@pytest.mark.slow
def test_greedy_action_of_a_bandit_is_within_one_final_cell_of_the_best():
    config = cqn.Config(
        **dict(learning_rate=3e-3, weight_decay=0.0, td_weight=1.0, v_min=-0.25, v_max=0.0, num_atoms=26),
        **dict(exploration_noise=0.2, batch_size=64, capacity=8_000, prefill=800, train_period=8, hidden=(32,)),
    )
    source = EnvAndData(Bandit(), None)
    configs = run.broadcast(config, 3)
    carry = run.init(cqn, configs, source, jax.random.split(key(0), 3))
    carry = run.advance(cqn, configs, source, carry, 1_000)
    act = lambda params: cqn.act(config, ONE, params, jnp.ones((1, 1)), key(1))[0, 0]
    assert (jnp.abs(jax.vmap(act)(carry.states.params) - 0.37) < 0.016).all()
