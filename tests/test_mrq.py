"""MR.Q: the authors' numbers, formulas by hand, the order of a period, and what a termination hides."""

import dataclasses
import json
import types
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from probes import table
from scipy.stats import chisquare

from algos import mrq
from envs.types import Transition, continuous_spec, discrete_spec, example_transition
from replay import prioritised, ring
from runner import run

GOLDEN = Path(__file__).parent / "golden"
golden = lambda name: json.loads((GOLDEN / f"{name}.json").read_text())
array = partial(np.asarray, dtype=np.float32)
struct = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype)


# --- the official code's encoder, value and policy step, with its own weights ---

STEP = golden("mrq_step_small")
HP = STEP["hp"]
SPEC = continuous_spec(struct(3), 2, 0)
CONFIG = mrq.Config(
    zs_size=HP["zs_dim"],
    za_size=HP["za_dim"],
    zsa_size=HP["zsa_dim"],
    hidden_size=HP["enc_hdim"],
    num_bins=HP["num_bins"],
    reward_range=float(HP["upper"]),
    encoder_horizon=HP["enc_horizon"],
    n_step=HP["Q_horizon"],
    target_noise=HP["target_policy_noise"],
    batch_size=HP["batch_size"],
)
CLOSE = dict(atol=2e-5, rtol=0)  # float32 of two libraries, numbers of order 1


def dense(tree, name):
    """torch keeps `(out, in)`, flax `(in, out)`."""
    return dict(kernel=array(tree[f"{name}.weight"]).T, bias=array(tree[f"{name}.bias"]))


def mlp(tree, *names):
    return {f"Dense_{i}": dense(tree, name) for i, name in enumerate(names)}


def encoder_of(tree):
    layers = lambda name: mlp(tree, *(f"{name}.l{i}" for i in (1, 2, 3)))
    parts = dict(zs=layers("zs_mlp"), za=dense(tree, "za"), zsa=layers("zsa"), model=dense(tree, "model"))
    return {"params": parts}


def policy_of(tree):
    return {"params": mlp(tree, *(f"policy.l{i}" for i in (1, 2, 3)))}


def value_of(tree):
    one = lambda q: mlp(tree, *(f"{q}.q1.l{i}" for i in (1, 2, 3)), f"{q}.q2")
    return jax.tree.map(lambda *x: np.stack(x), {"params": one("q1")}, {"params": one("q2")})


def params_of(suffix, reward_scale):
    init = STEP["init"]
    parts = (init[f"{part}{suffix}"] for part in ("encoder", "policy", "value"))
    parts = (f(x) for f, x in zip((encoder_of, policy_of, value_of), parts, strict=True))
    return jax.tree.map(jnp.asarray, mrq.Params(*parts, reward_scale))


PARAMS = params_of("", np.float32(STEP["rl_inputs"]["reward_scale"]))
TARGET = params_of("_target", np.float32(STEP["rl_inputs"]["target_reward_scale"]))
OPT_STATE = mrq.OptState(*(o.init(p) for o, p in zip(mrq.optimizers(CONFIG), PARAMS[:3], strict=True)))


def window():
    """The golden windows, `(4, 3, ...)`."""
    b = {name: array(x) for name, x in STEP["batch"].items()}
    terminated = b["not_done"][..., 0] == 0
    flags = terminated, np.zeros_like(terminated)
    return Transition(b["state"], b["action"], b["reward"][..., 0], b["next_state"], *flags)


def n_step_batch():
    """The golden one-step view of the windows, its reward the one that the official code summed, and its discount."""
    g = {name: array(x) for name, x in STEP["rl_inputs"].items()}
    flag = np.zeros(4, bool)
    batch = Transition(g["state"], g["action"], g["n_step_reward_HEAD"][:, 0], g["next_state"], flag, flag)
    return batch, g["not_done_prod"][:, 0] * g["gamma_pow_H"]


def same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **CLOSE), ours, theirs)


def test_embeddings_predictions_values_and_actions_of_the_official_code():
    nets, g, w = mrq.networks(CONFIG, SPEC), STEP["forward"], window()

    @jax.jit
    def forward(params, target):
        zs = mrq.embed_state(nets, params.encoder, w.obs[:, 0])
        zsa = mrq.embed_pair(nets, params.encoder, zs, w.action[:, 0])
        done, next_zs, logits = mrq.unroll(nets, params.encoder, zs, w.action)
        z = nets.policy.apply(params.policy, zs)
        bins = mrq.symexp_bins(CONFIG.num_bins, CONFIG.reward_range)
        return dict(
            zs=zs,
            zsa=zsa,
            pred_done=done[:, :1],
            pred_next_zs=next_zs[:, 0],
            reward_logits=logits[:, 0],
            Q=mrq.twin_values(nets, params.value, zsa).T,
            policy_pre_activ=z,
            policy_action=mrq.act(CONFIG, SPEC, params, w.obs[:, 0], jax.random.key(0)),
            reward_decoded=jax.nn.softmax(logits[:, 0]) @ bins[:, None],
            encoder_target_zs_of_next=mrq.embed_state(nets, target.encoder, w.next_obs),
        )

    same(forward(PARAMS, TARGET), {name: array(x) for name, x in g.items()})


def test_encoder_losses_and_update_of_the_official_code():
    per_step = STEP["encoder_loss_components_per_step"]
    totals = {name: sum(step[name] for step in per_step) for name in ("dyn", "reward", "done")}

    @jax.jit
    def update(params, opt_state, terminates):
        return (
            mrq.encoder_loss(CONFIG, SPEC, params.encoder, TARGET.encoder, window(), terminates)[0],
            mrq.update_encoder(CONFIG, SPEC, params, TARGET, opt_state.encoder, window(), terminates),
        )

    total, (encoder, _, parts) = update(PARAMS, OPT_STATE, True)
    np.testing.assert_allclose(total, STEP["encoder_loss_total_env_terminates_true"], **CLOSE)
    np.testing.assert_allclose(parts["dynamics_loss"], totals["dyn"], **CLOSE)
    np.testing.assert_allclose(parts["reward_loss"], totals["reward"], **CLOSE)
    np.testing.assert_allclose(parts["termination_loss"], totals["done"], **CLOSE)
    same(encoder, encoder_of(STEP["after_one_encoder_step"]["encoder"]))
    # Until a termination was stored its loss does not count.
    np.testing.assert_allclose(
        update(PARAMS, OPT_STATE, False)[0], STEP["encoder_loss_total_env_terminates_false"], **CLOSE
    )


def test_encoder_losses_of_each_step_of_the_official_code():
    # The first T steps of the windows hold the first T terms of the sum over time.
    nets, bins = mrq.networks(CONFIG, SPEC), mrq.symexp_bins(CONFIG.num_bins, CONFIG.reward_range)

    @jax.jit
    def losses():
        w = window()
        done, zs, logits = mrq.unroll(
            nets, PARAMS.encoder, mrq.embed_state(nets, PARAMS.encoder, w.obs[:, 0]), w.action
        )
        target = mrq.embed_state(nets, TARGET.encoder, w.next_obs)
        args = zs, target, logits, mrq.two_hot(w.reward, bins), done, w.terminated, mrq.alive_mask(w.terminated)
        return [mrq.encoder_losses(*(x[:, :steps] for x in args)) for steps in (1, 2, 3)]

    each_step = np.diff(np.array(losses()), axis=0, prepend=0)
    expected = [[step[name] for name in ("dyn", "reward", "done")] for step in STEP["encoder_loss_components_per_step"]]
    np.testing.assert_allclose(each_step, expected, **CLOSE)


def test_value_and_policy_update_of_the_official_code():
    batch, discount = n_step_batch()
    g, after = STEP["rl_outputs"], STEP["after_one_rl_step"]
    q, target = array(g["Q"]), array(g["Q_target"])

    @jax.jit
    def update(params, opt_state):
        return mrq.update_value_and_policy(CONFIG, SPEC, params, TARGET, opt_state, batch, discount, jax.random.key(0))

    params, _, td_error, metrics = update(PARAMS, OPT_STATE)
    np.testing.assert_allclose(td_error, np.abs(q - target).max(1), **CLOSE)  # so Q and y agree, before the step
    np.testing.assert_allclose(metrics["loss"], g["value_loss"], **CLOSE)
    np.testing.assert_allclose(metrics["policy_loss"], g["policy_loss_with_updated_value"], **CLOSE)
    same(params.value, value_of(after["value"]))
    same(params.policy, policy_of(after["policy"]))
    same(params.encoder, PARAMS.encoder)  # the value trains no encoder


def test_value_target_of_the_official_code():
    g = {name: array(x) for name, x in STEP["rl_inputs"].items()}
    next_q = array(STEP["rl_forward"]["target_Q_both"]).T
    y = mrq.value_target(
        g["n_step_reward_HEAD"][:, 0],
        g["not_done_prod"][:, 0] * g["gamma_pow_H"],
        next_q,
        g["reward_scale"],
        g["target_reward_scale"],
    )
    np.testing.assert_allclose(y, array(STEP["rl_outputs"]["Q_target"])[:, 0], **CLOSE)


@jax.jit
def encoder_gradient(params, window):
    """L_enc and its gradient."""
    return jax.value_and_grad(lambda p: mrq.encoder_loss(CONFIG, SPEC, p, TARGET.encoder, window, True)[0])(params)


@pytest.mark.parametrize("part", ["encoder", "value", "policy"])
def test_gradients_are_the_slopes_of_the_losses(part):
    # One Adam step hides a constant factor: a slope along a random direction does not.
    nets, rng = mrq.networks(CONFIG, SPEC), np.random.default_rng(0)
    normal = lambda tree: jax.tree.map(lambda p: jnp.float32(rng.normal(size=p.shape)), tree)
    params, target = normal(PARAMS), jnp.float32(rng.normal(size=4))
    zs, zsa = (jnp.float32(rng.normal(size=(4, 4))) for _ in range(2))
    gradient = dict(
        encoder=lambda p: encoder_gradient(p, window()),
        value=jax.jit(jax.value_and_grad(lambda p: mrq.value_loss(nets, p, zsa, target)[0])),
        policy=jax.jit(jax.value_and_grad(lambda p: mrq.policy_loss(CONFIG, SPEC, params, p, zs, jax.random.key(0)))),
    )[part]
    here = getattr(params, part)
    direction = normal(here)
    along = lambda size: float(gradient(jax.tree.map(lambda p, d: p + size * d, here, direction))[0])
    central_difference = (along(1e-3) - along(-1e-3)) / 2e-3
    product = jax.tree.map(lambda g, d: np.vdot(g, d), gradient(here)[1], direction)
    slope = sum(jax.tree.leaves(product))
    assert abs(slope) > 0.1  # so that a wrong factor would show
    # float32 leaves about 1e-7 * loss / 2e-3 of noise in the difference, its third derivative 1e-6.
    np.testing.assert_allclose(slope, central_difference, rtol=1e-2)


# --- formulas ---


def test_two_hot_of_the_official_code():
    g = golden("mrq_twohot")
    bins = mrq.symexp_bins(g["num_bins"], float(g["upper"]))
    np.testing.assert_allclose(bins, g["bins"], rtol=1e-6)
    np.testing.assert_allclose(mrq.symexp_bins(9, 3.0), g["bins_9_m3_3"], rtol=1e-6)
    for case in g["transform"] + g["exact_bin"]:
        weights = mrq.two_hot(jnp.float32(case["x"]), bins)
        expected = np.zeros(65)
        for index, weight in case["nonzero"].items():
            expected[int(index)] = weight
        # A weight is a difference of numbers as large as x over the gap to the next bin, about x / 3.
        np.testing.assert_allclose(weights, expected, atol=2e-6)
    logits = jnp.sin(0.7 * jnp.arange(65))
    for case in g["cross_entropy"]:
        ce = mrq.cross_entropy(logits, mrq.two_hot(jnp.float32(case["x"]), bins))
        np.testing.assert_allclose(ce, case["ce"], rtol=1e-6)
    uniform = mrq.cross_entropy(jnp.zeros(65), mrq.two_hot(jnp.float32(1), bins))
    np.testing.assert_allclose(uniform, g["cross_entropy_uniform_logits"], rtol=1e-6)  # ln 65


n_step = jax.jit(partial(ring.n_step, gamma=0.99))


def test_n_step_return_counts_the_terminating_reward_and_nothing_after():
    for case in golden("mrq_nstep")["cases"]:
        reward, terminated = array(case["r"]), array(case["not_done"]) == 0
        obs = np.zeros((1, 3, 1), np.float32)
        w = Transition(obs, obs, reward[None], obs, terminated[None], np.zeros((1, 3), bool))
        batch, discount = n_step(w)
        np.testing.assert_allclose(batch.reward[0], case["masked_after_termination(recommended)"], rtol=1e-6)
        np.testing.assert_allclose(discount[0], case["recommended_bootstrap_discount"], rtol=1e-6)


@pytest.mark.parametrize("case", golden("mrq_param_counts"))
def test_parameter_counts_of_the_official_code(case):
    expected = golden("mrq_param_counts")[case]
    obs_action = {
        "HalfCheetah-v4 (17 obs, 6 act)": continuous_spec(struct(17), 6, 0),
        "Ant-v4 (27 obs, 8 act)": continuous_spec(struct(27), 8, 0),
        "Humanoid-v4 (376 obs, 17 act)": continuous_spec(struct(376), 17, 0),
        "Hopper-v4(11,3)": continuous_spec(struct(11), 3, 0),
        "Walker2d-v4 (17,6)": continuous_spec(struct(17), 6, 0),
        "Atari 4x84x84, 18 act": discrete_spec(struct(84, 84, 4, dtype="uint8"), 18, 0),
        "DMC visual 9x84x84, 6 act": continuous_spec(struct(84, 84, 9, dtype="uint8"), 6, 0),
    }[case]
    nets, config = mrq.networks(mrq.Config(), obs_action), mrq.Config()
    key = jax.eval_shape(jax.random.key, 0)
    size = lambda init, *inputs: sum(x.size for x in jax.tree.leaves(jax.eval_shape(init, key, *inputs)))
    action = struct(obs_action.num_actions or obs_action.action_size)
    assert size(nets.encoder.init, obs_action.obs, action) == expected["encoder"]
    assert size(nets.policy.init, struct(config.zs_size)) == expected["policy"]
    assert 2 * size(nets.value.init, struct(config.zsa_size)) == expected["value_twin"]


def test_mean_of_the_bins_under_two_hot_weights_is_the_number_itself_up_to_the_outer_bins():
    bins = mrq.symexp_bins(9, 3.0)  # +-19.1, +-8.5, +-3.5, +-1.1, 0
    x = jnp.linspace(-25.0, 25.0, 2_001)
    weights = mrq.two_hot(x, bins)
    # float32 errors of weights, below 1e-6, times the bins
    np.testing.assert_allclose(weights @ bins, np.clip(x, bins[0], bins[-1]), atol=2e-5)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    first, some = np.argmax(weights > 0, -1), np.asarray(weights > 0)
    assert (weights >= 0).all() and (some.sum(-1) <= 2).all()
    two = some.sum(-1) == 2
    assert some[two, first[two] + 1].all()  # neighbours
    assert weights[0].tolist() == [1] + [0] * 8 and weights[-1].tolist() == [0] * 8 + [1]


def test_alive_mask_by_hand():
    ended = jnp.array([[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]], bool)
    # The step that ends the episode counts; a later end brings nothing back.
    assert mrq.alive_mask(ended).tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_encoder_losses_by_hand_with_dead_rows_in_the_denominator():
    zs = jnp.array([[[1.0, 3.0], [2.0, 2.0]], [[0.0, 2.0], [9.0, 9.0]]])  # (B, T, zs_size) = (2, 2, 2)
    logits, weights = jnp.zeros((2, 2, 2)), jnp.ones((2, 2, 2)) / 2
    done, terminated = jnp.array([[0.5, 1.0], [0.0, 7.0]]), jnp.array([[0, 0], [1, 0]], bool)
    args = zs, jnp.zeros_like(zs), logits, weights, done, terminated
    dynamics, reward, termination = mrq.encoder_losses(*args, mrq.alive_mask(terminated))
    # t = 1: ((1 + 9)/2 + (0 + 4)/2) / 2 = 3.5; t = 2: (4 + 0)/2 = 2, the dead row counts as nothing
    assert dynamics == 5.5
    np.testing.assert_allclose(reward, np.log(2) + np.log(2) / 2, rtol=1e-6)  # one float32 rounding
    # t = 1: (0.25 + 1)/2 = 0.625; t = 2: (1 + 0)/2 = 0.5
    assert termination == 1.125


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_what_follows_the_end_of_an_episode_changes_no_loss_no_gradient_and_no_return(end):
    """Windows run past a termination as published, and with `truncated_tails` past a truncation."""
    rng, flags = np.random.default_rng(0), np.zeros((3, 2, 4, 3), bool)
    draw = lambda *shape: rng.normal(size=(2, 4, 3, *shape)).astype(np.float32)  # two versions of each
    obs, action, reward, next_obs = draw(3), np.tanh(draw(2)), draw(), draw(3)
    flags[0, :, 0, 0] = flags[0, :, 1, 1] = flags[0, :, 2, 2] = True  # row 3 does not end
    flags[1:] = rng.random(flags[1:].shape) < 0.5
    ended = np.cumsum(flags[0, 0], 1) - flags[0, 0] > 0  # (B, T)
    obs, action, reward, next_obs, others, more = (
        np.where(ended.reshape(4, 3, *[1] * (x.ndim - 3)), x, x[:1])
        for x in (obs, action, reward, next_obs, flags[1] & ended[None], flags[2] & ended[None])
    )
    first, second = (flags[0] | others, more) if end == "terminated" else (more, flags[0] | others)
    fields = obs, action, reward, next_obs, first, second
    versions = [Transition(*(jnp.asarray(x[i]) for x in fields)) for i in (0, 1)]
    assert (versions[0].reward != versions[1].reward).sum() == 3
    of = lambda w: (*encoder_gradient(PARAMS.encoder, w), n_step(w))
    loss, grads, returns = of(versions[0])
    assert tiny.same_bits((loss, grads, returns), of(versions[1]))
    # The step that ends does count.
    at = np.nonzero(flags[0, 0])
    changed = versions[0]._replace(reward=versions[0].reward.at[at].add(1), next_obs=versions[0].next_obs.at[at].add(1))
    other_loss, other_grads, other_returns = of(changed)
    assert other_loss != loss and not tiny.same_bits(other_grads, grads)
    assert (other_returns[0].reward[:3] != returns[0].reward[:3]).all()


def test_value_target_by_hand():
    next_q = jnp.array([[1.0, 4.0, 9.0], [3.0, 2.0, -9.0]])
    reward, discount = jnp.array([1.0, 0.0, 5.0]), jnp.array([0.5, 1.0, 0.0])
    # rbar = 2, rbar' = 3: (1 + 0.5 * 3 * 1) / 2, (0 + 3 * 2) / 2, and (5 + 0) / 2 where the episode ended
    assert mrq.value_target(reward, discount, next_q, 2.0, 3.0).tolist() == [1.25, 3.0, 2.5]


def test_value_loss_is_the_mean_huber_loss_of_both_critics(monkeypatch):
    monkeypatch.setattr(mrq, "twin_values", lambda nets, q, zsa: q)
    q, target = jnp.array([[1.0, 5.0], [2.5, -1.0]]), jnp.array([2.0, 0.0])
    # Q - y = [[-1, 5], [0.5, -1]]: huber 1/2, 5 - 1/2, 1/8, 1/2, and slopes clipped to [-1, 1], over four numbers
    (loss, _), grads = jax.value_and_grad(lambda q: mrq.value_loss((), q, (), target), has_aux=True)(q)
    assert loss == (0.5 + 4.5 + 0.125 + 0.5) / 4
    assert grads.tolist() == [[-0.25, 0.25], [0.125, -0.25]]


def test_norm_of_both_critics_together_is_clipped_at_twenty_and_nothing_else_is():
    optimizer = mrq.optimizers(mrq.Config())
    params, grads = jnp.zeros((2, 1)), jnp.array([[30.0], [40.0]])
    moment = lambda o: optax.tree.get(o.update(grads, o.init(params), params)[1], "mu").ravel()
    # |(30, 40)| = 50: times 20/50 is (12, 16), of which Adam's first moment takes a tenth
    np.testing.assert_allclose(moment(optimizer.value), [1.2, 1.6], rtol=1e-6)  # float32
    np.testing.assert_allclose(moment(optimizer.encoder), [3, 4], rtol=1e-6)
    np.testing.assert_allclose(moment(optimizer.policy), [3, 4], rtol=1e-6)


def test_reward_scale_is_the_mean_over_stored_transitions_half_full_and_wrapped():
    replay = prioritised.create(6, 2, example_transition(SPEC), 1)
    insert = jax.jit(prioritised.insert)
    flags = np.zeros(2, bool)
    scales = []
    for reward in ([1.0, -3.0], [-2.0, 0.0], [4.0, 2.0], [-10.0, 10.0]):
        obs, action = np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float32)
        replay = insert(replay, Transition(obs, action, array(reward), obs, flags, flags))
        scales.append(float(mrq.mean_abs_reward(replay)))
    # 4/2, 6/4, 12/6; then the first row is overwritten: (2 + 6 + 20)/6
    np.testing.assert_allclose(scales, [2, 1.5, 2, 28 / 6], rtol=1e-6)  # float32


def test_reward_scale_of_the_official_buffer_without_its_fillers():
    g = golden("mrq_buffer")
    rewards = array(g["reward_col"])
    rewards = rewards[rewards != 0]
    replay = prioritised.create(40, 1, example_transition(discrete_spec(struct(1), 2, 0)), 5)

    def body(replay, reward):
        obs, flag = jnp.zeros((1, 1)), jnp.zeros(1, bool)
        return prioritised.insert(replay, Transition(obs, jnp.zeros(1, jnp.int32), reward, obs, flag, flag)), None

    replay, _ = jax.jit(lambda r: jax.lax.scan(body, r, rewards[:, None]))(replay)
    # 22 rewards of sum 253; the official 253/25 = 10.12 counts the slot of zero after each of three episodes, too.
    np.testing.assert_allclose(mrq.mean_abs_reward(replay), 253 / 22, rtol=1e-6)  # float32
    np.testing.assert_allclose(g["reward_scale"], 253 / 25, rtol=1e-6)


# --- actions ---

DISCRETE, THREE = discrete_spec(struct(3), 2, 0), discrete_spec(struct(3), 3, 0)


def preferring(spec, z):
    """Parameters under which the policy before its activation is `z`, whatever it sees."""
    nets = mrq.networks(CONFIG, spec)
    inputs = struct(*spec.obs.shape), struct(spec.num_actions or spec.action_size)
    key = jax.eval_shape(jax.random.key, 0)
    shapes = jax.eval_shape(nets.encoder.init, key, *inputs), jax.eval_shape(nets.policy.init, key, struct(4))
    encoder, policy = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    policy["params"]["Dense_2"]["bias"] = array(z)
    return mrq.Params(encoder, policy, {}, 1.0)


@partial(jax.jit, static_argnums=0)
def act(spec, config, params, obs, key):
    return mrq.act(config, spec, params, obs, key)


@pytest.mark.parametrize("temperature", [1.0, 10.0])
def test_discrete_actions_are_drawn_from_the_softmax_whatever_the_temperature(temperature):
    config = dataclasses.replace(CONFIG, temperature=temperature)
    action = act(THREE, config, preferring(THREE, [0.0, np.log(2), np.log(3)]), np.zeros((6_000, 3)), jax.random.key(0))
    # e^z = 1, 2, 3: sixths; a fixed seed, of which one in a hundred would fail
    assert chisquare(np.bincount(action), [1_000, 2_000, 3_000]).pvalue > 0.01


@pytest.mark.parametrize("z", [[0.1, 0.2, 0.0], [15.0, 20.0, 10.0]], ids=["flat", "where_tanh_is_one"])
def test_greedy_evaluation_always_takes_the_likeliest_action(z):
    config = dataclasses.replace(CONFIG, greedy=True)
    assert (act(THREE, config, preferring(THREE, z), np.zeros((50, 3)), jax.random.key(0)) == 1).all()


def test_gumbel_softmax_is_on_the_simplex_and_tanh_in_the_box():
    z = jnp.float32(np.random.default_rng(0).normal(size=(200, 3))) * 30
    soft = mrq.activate(THREE, z, 10.0, jax.random.key(0))
    assert (soft >= 0).all() and ((soft > 0.05).sum(-1) > 1).any()  # a point inside, not a corner
    np.testing.assert_allclose(soft.sum(-1), 1, atol=1e-6)  # float32
    assert mrq.activate(SPEC, jnp.array([[0.0, 50.0]]), 10.0, None).tolist() == [[0, 1]]


def test_noise_by_hand(monkeypatch):
    monkeypatch.setattr(jax.random, "normal", lambda key, shape: jnp.broadcast_to(normals, shape))
    close = partial(np.testing.assert_allclose, atol=1e-6)  # float32
    # Continuous: 0.2 times the normals, clipped to +-0.3, and the sum to [-1, 1]
    normals = jnp.array([1.0, -9.0, 9.0])
    action = jnp.array([[0.5, 0.5, 0.9]])
    close(mrq.perturb(SPEC, action, None, 0.2, 0.3), [[0.7, 0.2, 1.0]])
    close(mrq.perturb(SPEC, action, None, 0.2), [[0.7, -1.0, 1.0]])
    # Discrete: 0.2 is halved, so that 0.1 times 1.9 does not lift 0.4 over 0.6 and 0.1 times 2.1 does.
    for size, expected in ((1.9, [1, 0]), (2.1, [0, 1])):
        normals = jnp.array([0.0, size])
        assert mrq.perturb(DISCRETE, jnp.array([[0.6, 0.4]]), None, 0.2).tolist() == [expected]
    # The bound is halved: 0.15 lifts 0.43 over 0.57, not 0.42 over 0.58.
    normals = jnp.array([0.0, 9.0])
    assert mrq.perturb(DISCRETE, jnp.array([[0.57, 0.43], [0.58, 0.42]]), None, 0.2, 0.3).tolist() == [[0, 1], [1, 0]]


def test_exploration_adds_its_noise_and_target_actions_theirs_with_a_bound(monkeypatch):
    monkeypatch.setattr(jax.random, "normal", lambda key, shape: jnp.full(shape, 9.0))
    config = dataclasses.replace(CONFIG, exploration_noise=0.1, target_noise=0.25, target_noise_clip=0.75)
    explore = jax.jit(lambda p: mrq.explore(config, SPEC, p, jnp.zeros((1, 3)), jax.random.key(0)))
    action = explore(preferring(SPEC, np.arctanh([-0.5, -0.95])))
    np.testing.assert_allclose(action, [[0.4, -0.05]], atol=1e-6)  # 9 x 0.1 = 0.9, without a bound
    seen = []
    monkeypatch.setattr(mrq, "perturb", lambda spec, action, key, *noise: (seen.append(noise), action)[1])
    args = PARAMS, TARGET, OPT_STATE, *n_step_batch(), jax.random.key(0)
    jax.eval_shape(partial(mrq.update_value_and_policy, config, SPEC), *args)
    assert seen == [(0.25, 0.75)]


def test_actions_as_the_environment_and_as_networks_take_them():
    action = jnp.array([2, 0, 1], jnp.int32)
    vector = mrq.as_vector(THREE, action)
    assert vector.tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    back = mrq.as_action(THREE, vector)
    assert back.tolist() == [2, 0, 1] and back.dtype == jnp.int32
    box = jnp.array([[0.5, -1.0]])
    assert mrq.as_action(SPEC, mrq.as_vector(SPEC, box)) is box


# --- the order of a period: every number of a network is a label, and an update adds one to it ---

SMALL = dict(zs_size=2, za_size=2, zsa_size=2, hidden_size=2, num_bins=3, batch_size=8)
SMALL |= dict(encoder_horizon=3, n_step=2, target_period=4, capacity=40, prefill=16)
REWARD = [1, -2, 3, -4, 5, -6, 7, -8, 9, -10, 11, -12]


def walk(reward=REWARD, terminated=11, truncated=None, num_envs=2):
    """Twelve states in a row, from the first to the last, where the episode ends; environments go in step."""
    ends = [int(s == terminated) for s in range(12)], [int(s == truncated) for s in range(12)]
    successor = [min(s + 1, 11) for s in range(12)]
    return table(np.eye(12), [1] + [0] * 11, successor, list(reward), *ends, num_envs=num_envs)


def label(tree):
    return jax.tree.leaves(tree)[0].ravel()[0]


def add_one(tree):
    return jax.tree.map(lambda p: p + 1, tree)


def labelling_encoder(config, spec, params, target_params, opt_state, window, terminates):
    assert window.reward.shape == (8, 3)  # encoder_horizon
    seen = dict(encoder=label(params.encoder), target_encoder=label(target_params.encoder), gate=terminates)
    return add_one(params.encoder), opt_state, seen


def labelling_value_and_policy(config, spec, params, target_params, opt_state, batch, discount, key):
    seen = {f"rl_{name}": label(x) for name, x in params._asdict().items()}
    seen |= {f"rl_target_{name}": label(x) for name, x in target_params._asdict().items()}
    seen["discount"] = discount
    params = params._replace(value=add_one(params.value), policy=add_one(params.policy))
    return params, opt_state, jnp.full(8, 3.0), seen


init = jax.jit(mrq.init)


@cache
def stepping(**changes):
    """A tiny configuration and its step with labels for updates; environments of one shape share the program."""
    config, jitted = mrq.Config(**SMALL | changes), jax.jit(lambda *args: mrq.step(*args))

    def step(env, state, **floats):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mrq, "update_encoder", labelling_encoder)
            patch.setattr(mrq, "update_value_and_policy", labelling_value_and_policy)
            return jitted(dataclasses.replace(config, **floats), env, state)

    return config, step


def labelled(state):
    """Encoder 0, policy 100, value 200; all targets -1, which the first sync must replace."""
    fill = lambda tree, x: jax.tree.map(lambda p: jnp.full_like(p, x), tree)
    params = [fill(x, i * 100) for i, x in enumerate(state.params[:3])]
    target = fill(state.params, -1)
    return state._replace(params=mrq.Params(*params, state.params.reward_scale), target_params=target)


def test_a_period_syncs_then_trains_the_encoder_then_acts_and_trains_value_and_policy():
    config, step = stepping()
    env = walk()
    state = labelled(init(config, env, jax.random.key(0)))
    assert state.env_steps == 16 and state.gradient_steps == 0 and state.params.reward_scale == 1
    # Both environments walk in step; 8 rows of prefill, then 2 rows in each period: |r| = 1..8, 1..10 and 1..12.
    scales = [1, 4.5, 5.5, 6.5]
    for n in range(3):
        before = state
        state, seen = step(env, state)
        seen = jax.tree.map(lambda x: np.asarray(x).tolist(), seen)
        # Four encoder updates in a row towards the encoder from before them ...
        assert seen["encoder"] == [4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3]
        assert seen["target_encoder"] == [4 * n] * 4
        # ... then it stands still: two steps of both environments, each followed by two updates.
        assert seen["rl_encoder"] == [[4 * n + 4] * 2] * 2 and seen["rl_target_encoder"] == [[4 * n] * 2] * 2
        for name, start in (("policy", 100), ("value", 200)):
            assert seen[f"rl_{name}"] == [[start + 4 * n, start + 4 * n + 1], [start + 4 * n + 2, start + 4 * n + 3]]
            assert seen[f"rl_target_{name}"] == [[start + 4 * n] * 2] * 2
        assert seen["rl_reward_scale"] == [[scales[n + 1]] * 2] * 2
        assert seen["rl_target_reward_scale"] == [[scales[n]] * 2] * 2  # at first 1, then the one before
        assert seen["reward_scale"] == scales[n + 1]
        assert tiny.same_bits(state.target_params, before.params)
        assert state.env_steps == 16 + 4 * (n + 1) and state.gradient_steps == 4 * (n + 1)
        assert state.replay.ring.inserted == 8 + 2 * (n + 1)


@pytest.mark.parametrize(
    "num_envs, train_period, iterations, updates, vector_steps",
    # Of 4 updates; with 4 environments and an update every 2 env steps a vectorised step is followed by two.
    [(1, 1, 4, 1, 1), (4, 1, 1, 4, 1), (2, 4, 4, 1, 2), (4, 2, 2, 2, 1)],
)
def test_ratio_of_updates_to_env_steps_is_as_told(num_envs, train_period, iterations, updates, vector_steps):
    config, step = stepping(train_period=train_period)
    env = walk(num_envs=num_envs)
    mrq.check(config, env)
    start = jax.eval_shape(mrq.init, config, env, jax.random.key(0))
    _, seen = jax.eval_shape(partial(step, env), start)
    assert seen["rl_value"].shape == (iterations, updates) and seen["encoder"].shape == (4,)
    assert seen["episode_return"].count.shape == (iterations, vector_steps, num_envs)
    assert mrq.period(config, env) == iterations * vector_steps * num_envs == 4 * train_period


def test_termination_loss_counts_from_the_first_stored_termination_on_for_ever():
    config, step = stepping()
    env = walk()
    state = init(config, env, jax.random.key(0))
    gates, known = [], [bool(state.terminates)]
    for n in range(15):  # 30 rows: the terminated one, row 12, is long overwritten in a ring of 20
        state, seen = step(env if n < 2 else walk(terminated=None), state)
        gates.append(set(np.asarray(seen["gate"]).tolist()))
        known.append(bool(state.terminates))
    # Rows 11 and 12 come in the second period, after its encoder updates.
    assert known == [False, False] + [True] * 14
    assert gates == [{False}] * 2 + [{True}] * 13
    assert not state.replay.data.terminated.any()
    assert init(config, walk(terminated=7), jax.random.key(0)).terminates  # in the last row of the prefill
    assert not init(config, walk(terminated=None, truncated=7), jax.random.key(0)).terminates


@pytest.mark.parametrize(
    "bad, env_step",
    [((), -1), ((7,), 16), ((5, 9), 12), ((9, 10), 20)],
    ids=["none", "last_of_prefill", "first_counts", "later"],
)
def test_first_reward_that_is_not_a_number_is_remembered_by_its_env_step(bad, env_step):
    config, step = stepping()
    # State s is left on vectorised step s + 1, with which the two environments have made 2 (s + 1) env steps.
    env = walk([np.nan if s in bad else r for s, r in enumerate(REWARD)])
    state = init(config, env, jax.random.key(0))
    assert state.nonfinite_reward == (env_step if env_step <= 16 else -1)
    for _ in range(2):
        state, _ = step(env, state)
    assert state.nonfinite_reward == env_step


def test_infinite_reward_of_one_environment_is_remembered_too():
    obs, action, flags = jnp.zeros((2, 3)), jnp.zeros((2, 2)), jnp.zeros(2, bool)
    transition = Transition(obs, action, jnp.array([1.0, -jnp.inf]), obs, flags, flags)
    env = types.SimpleNamespace(num_envs=2, step=lambda key, state, action: (state, transition, {}))
    replay = prioritised.create(6, 2, example_transition(SPEC), 1)
    collected = mrq.Collected((), replay, jnp.bool_(False), jnp.int32(-1), jnp.int32(6))
    assert jax.jit(lambda c: mrq.store(env, c, action, None)[0])(collected).nonfinite_reward == 8


def test_rewards_beyond_the_outer_bins_are_counted():
    config, step = stepping()
    # The outer bins are at +-(e - 1) = +-1.718.
    for reward, low, high in (([1.7] * 12, 0, 0), ([-1.8] * 12, 1, 1), ([1.7, 1.8] * 6, 0.2, 0.8)):
        env = walk(reward)
        _, seen = step(env, init(config, env, jax.random.key(0)), reward_range=1.0)
        clipped = seen["clipped_rewards"].mean()
        assert low <= clipped <= high  # of 96 rewards, half in expectation


def test_priorities_are_written_and_new_slots_enter_with_the_largest():
    config, step = stepping()
    env = walk(terminated=None)
    state = init(config, env, jax.random.key(0))
    # Rows 0..4 have their window of three steps; all at priority 1.
    assert state.replay.priority[:, 0].tolist() == [1] * 5 + [0] * 15
    state, seen = step(env, state, gamma=0.5, priority_exponent=2.0)
    priority = state.replay.priority[:7]
    assert set(np.unique(priority)) == {1, 9}  # the label's error is 3, and 3^2 = 9
    assert state.replay.max_priority == 9 and (priority == 9).sum() >= 4
    assert (seen["discount"] == 0.25).all()  # 0.5^n_step
    # The slots that open next enter at 9, and leave it for 3 where they are sampled.
    state, _ = step(env, state, gamma=0.5, priority_exponent=1.0)
    assert set(np.unique(state.replay.priority[7:9])) <= {3, 9} and state.replay.max_priority == 9


# --- pixels ---


def test_every_image_is_shifted_by_a_draw_of_its_own():
    # Pixel (i, j) is 84 i + j, so that pixel (42, 42) tells both offsets.
    image = jnp.arange(84 * 84, dtype=jnp.int32).reshape(84, 84, 1)
    pixels = jnp.broadcast_to(image, (4, 6, 84, 84, 1))
    out = jax.jit(partial(mrq.augment, discrete_spec(struct(84, 84, 1), 2, 0)))(pixels, jax.random.key(0))
    assert out.shape == pixels.shape
    assert len(np.unique(out[:, :, 42, 42, 0])) > 15  # 24 draws of 81 offsets: 21 different ones in expectation


def test_observations_and_successors_are_shifted_by_different_draws_in_both_phases(monkeypatch):
    keys = []

    def augment(spec, x, key):
        keys.append(key)
        return x.astype(jnp.float16)  # a mark

    def update_encoder(config, spec, params, target_params, opt_state, window, terminates):
        assert window.obs.dtype == window.next_obs.dtype == jnp.float16
        return params.encoder, opt_state, {}

    def update_value_and_policy(config, spec, params, target_params, opt_state, batch, discount, key):
        assert batch.obs.dtype == batch.next_obs.dtype == jnp.float16
        keys.append(key)
        return params, opt_state, jnp.ones(8), {}

    for function in (augment, update_encoder, update_value_and_policy):
        monkeypatch.setattr(mrq, function.__name__, function)
    config, env = mrq.Config(**SMALL), walk()
    jax.eval_shape(lambda key: mrq.step(config, env, mrq.init(config, env, key)), jax.random.key(0))
    assert len(keys) >= 5 and len({id(key) for key in keys}) == len(keys)


def test_other_observations_are_never_shifted():
    for shape in ((3,), (10, 10, 4)):
        x = jnp.ones((2, *shape))
        assert mrq.augment(discrete_spec(struct(*shape), 2, 0), x, None) is x


@pytest.mark.parametrize(
    "shape, dtype, weights",
    [
        # conv 3x3: (9 + 1) 32, three of (288 + 1) 32; 1568 features and a bias to z_s
        ((84, 84, 1), "uint8", 320 + 3 * 9_248 + 1_569 * 4),
        # conv 3x3 of 4 channels: (36 + 1) 16; 8 x 8 x 16 = 1024 features and a bias
        ((10, 10, 4), "bool", 592 + 1_025 * 4),
    ],
)
def test_pixels_embed_to_the_same_width_and_have_a_loss(shape, dtype, weights):
    spec = discrete_spec(struct(*shape, dtype=dtype), 3, 0)
    nets = mrq.networks(CONFIG, spec)
    pixels, flags = struct(2, 2, *shape, dtype=dtype), struct(2, 2, dtype="bool")
    w = Transition(pixels, struct(2, 2, dtype="int32"), struct(2, 2), pixels, flags, flags)

    def loss(key, w):
        params = nets.encoder.init(key, w.obs[0, 0], jnp.zeros(3))
        sizes = jax.tree.map(lambda p: p.size, [params["params"][name] for name in ("torso", "zs")])
        assert sum(jax.tree.leaves(sizes)) == weights
        assert mrq.embed_state(nets, params, w.obs).shape == (2, 2, CONFIG.zs_size)
        return mrq.encoder_loss(CONFIG, spec, params, params, w, True)[0]

    assert jax.eval_shape(loss, jax.random.key(0), w).shape == ()


# --- bad settings ---


def short_episodes(limit):
    env = walk()
    return dataclasses.replace(env, spec=env.spec._replace(max_episode_steps=limit))


def structured():
    env = walk()
    return dataclasses.replace(env, spec=env.spec._replace(obs=(struct(3), struct(2))))


@pytest.mark.parametrize(
    "changes, env, message",
    [
        (dict(capacity=41), walk(), "capacity 41 must be a multiple of num_envs 2; 40 is"),
        (dict(capacity=10, encoder_horizon=5), walk(), "capacity 10 .* horizon 5 .* raise capacity to 12"),
        (dict(capacity=10, n_step=5), walk(), "capacity 10 .* horizon 5 .* raise capacity to 12"),
        (dict(train_period=3), walk(), "train_period 3 and num_envs 2: one must be a multiple of the other"),
        (dict(target_period=5), walk(), "target_period 5 x train_period 1 .* num_envs 2; choose .* divides 5"),
        (dict(prefill=15), walk(), "prefill 15 must be a multiple of num_envs 2"),
        (dict(prefill=6), walk(), "prefill 6 gives each of 2 .* 3 steps; .* horizon 3 .* 4: raise prefill to 8"),
        (dict(prefill=18), walk(), "prefill 18 must be a multiple of the 4 env steps of one step"),
        (dict(capacity=12), walk(), "capacity 12 holds 6 steps .* horizon 3 need 7: raise capacity to 14"),
        (dict(), short_episodes(3), "at most 3 env steps .* horizon 3: set truncated_tails, or shorten"),
        (dict(num_bins=1), walk(), "num_bins 1 must be at least 2"),
        (dict(), structured(), "one array as its observation; .* structured"),
    ],
)
def test_bad_settings_are_named_with_their_numbers(changes, env, message):
    with pytest.raises(ValueError, match=message):
        mrq.check(mrq.Config(**SMALL | changes), env)


@pytest.mark.parametrize(
    "changes, env",
    [({}, walk()), (dict(truncated_tails=True), short_episodes(3)), (dict(prefill=8), short_episodes(4))],
)
def test_settings_at_the_edge_of_what_is_allowed_pass(changes, env):
    mrq.check(mrq.Config(**SMALL | changes), env)


# --- learning, with value iteration as the oracle ---


@pytest.mark.slow
def test_values_meet_value_iteration_and_chunks_equal_one_run_with_discrete_actions():
    """A chain with a tempting exit: leaving at once pays 0.3, walking to its end pays 1."""
    next_state = np.array([[0, 1], [0, 2], [1, 3], [3, 3]])
    reward = array([[0.3, 0], [0, 0], [0.1, 0], [0, 1.0]])
    terminated = np.array([[1, 0], [0, 0], [0, 0], [0, 1]])
    expected = np.zeros((4, 2))
    for _ in range(200):
        expected = reward + 0.9 * (1 - terminated) * expected.max(1)[next_state]

    env = table(np.eye(4), [1, 0, 0, 0], *(x.tolist() for x in (next_state, reward, terminated)), num_envs=8)
    config = tiny.config(mrq, **tiny.LEARNING, gamma=0.9)
    configs = run.broadcast(config, 1)
    start = lambda: run.init(mrq, configs, env, jax.random.split(jax.random.key(0), 1))
    advance = lambda carry, steps: run.advance(mrq, configs, env, carry, steps)
    carry = advance(start(), tiny.LEARNING_STEPS)
    params = tiny.run_of(carry.states.params, 0)
    q = mrq.q_values(config, env.spec, params, env.features)
    # Adam moves them by 0.02 after they have settled; an off-policy three-step return is wrong by 0.3.
    np.testing.assert_allclose(q, np.broadcast_to(expected, q.shape), atol=0.05)
    assert tiny.same_bits(carry, advance(advance(start(), 1), tiny.LEARNING_STEPS - 1))
