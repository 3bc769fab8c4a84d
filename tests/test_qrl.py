"""QRL: the authors' and OGBench's numbers, formulas by hand, what an update sees, and rings of known distances."""

import dataclasses
import json
import math
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from algos import qrl
from envs.types import Transition, continuous_spec, discrete_spec
from replay import datasets
from runner import check, run, settings

GOLDEN = Path(__file__).parent / "golden"
golden = lambda name: json.loads((GOLDEN / f"{name}.json").read_text())
array = partial(np.asarray, dtype=np.float32)
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
struct = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
pair = lambda *shape: (struct(*shape), struct(*shape))

# --- the authors' code ---

UPDATE = golden("qrl_critic_update")
ACTION = golden("qrl_action")
SPEC = continuous_spec(pair(3), 2, 0)
TINY = dict(
    encoder_hidden=(4,),
    latent_size=3,
    projector_hidden=(4,),
    num_components=2,
    component_size=4,
    dynamics_hidden=(4,),
    actor_hidden=(4,),
)
# The numbers are of the online settings; their critics' losses are the offline ones with other constants.
CONFIG = qrl.Config(
    **TINY,
    num_critics=1,
    batch_size=4,
    critic_learning_rate=1e-4,
    push_beta=0.1,
    push_offset=15.0,
    dynamics_weight=0.1,
    bc_goals="rolled",
)
KEY = jax.random.key(0)


def network_of(tree, prefix):
    """Two layers of torch, whose weights are (out, in)."""
    layer = lambda i: {"kernel": array(tree[f"{prefix}.{i}.weight"]).T, "bias": array(tree[f"{prefix}.{i}.bias"])}
    return {"params": {"Dense_0": layer(0), "Dense_1": layer(2)}}


def critic_of(tree):
    return qrl.Critic(
        network_of(tree, "encoder.encoder.module"),
        network_of(tree, "quasimetric_model.projector.module"),
        {"params": {"raw": array(tree["quasimetric_model.quasimetric_head.reduction.raw_alpha"])}},
        network_of(tree, "latent_dynamics.module"),
    )


def batch_of(given, **goals):
    none = dict(push_goal=None, actor_goal=None, bc_goal=None)
    return qrl.Batch(*(array(given[name]) for name in ("obs", "action", "next_obs")), **none | goals)


stacked = lambda tree: jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
raw_lambda = jnp.full(1, UPDATE["raw_lagrange_init"])
critic_loss = jax.jit(jax.value_and_grad(partial(qrl.critic_loss, CONFIG, SPEC), (0, 1), has_aux=True))
update, actor_loss = (jax.jit(f, static_argnums=1) for f in (qrl.update, qrl.actor_loss))  # of config, spec, ...
of_one = lambda tree, k: jax.tree.map(lambda x: x[k], tree)


def test_critics_losses_all_their_gradients_and_lambdas_are_the_authors():
    batch, critic = batch_of(UPDATE["inputs"]), critic_of(UPDATE["params_before"])
    (loss, (z, next_z, metrics)), grads = critic_loss(critic, raw_lambda[0], batch)
    close(z, UPDATE["zx"])
    close(next_z, UPDATE["zy"])
    close(qrl.project(CONFIG, critic, z), UPDATE["proj_zx"])
    close(metrics["push_loss"], UPDATE["loss_global_push"])
    close(metrics["violation"], UPDATE["violation"])
    close(metrics["lambda"] * metrics["violation"], UPDATE["loss_local_constraint"])
    close(0.1 * metrics["dynamics_loss"], UPDATE["loss_latent_dynamics"])
    close(metrics["local_distance"], np.mean(UPDATE["d_local"]))
    close(metrics["push_distance"], np.mean(UPDATE["d_global_rolled"]))
    # Ours is the sum of two terms of lambda that cancel.
    close(loss, UPDATE["total_loss"] - UPDATE["loss_local_constraint"])
    jax.tree.map(close, grads[0], critic_of(UPDATE["grads"]))
    close(grads[1], UPDATE["grad_raw_lagrange"])


def test_predicted_latents_and_distances_are_the_authors_in_both_directions():
    batch, critic = batch_of(UPDATE["inputs"]), critic_of(UPDATE["params_before"])
    z, next_z = array(UPDATE["zx"]), array(UPDATE["zy"])
    predicted = qrl.predict(CONFIG, SPEC, critic, z, batch.action)
    close(predicted, UPDATE["pred_zy"])
    both = [qrl.distance(CONFIG, critic, *latents) for latents in ((predicted, next_z), (next_z, predicted))]
    close(np.stack(both, 1), UPDATE["d_dynamics_bidirectional"])
    close(qrl.distance(CONFIG, critic, z, next_z), UPDATE["d_local"])


def test_an_update_of_critics_and_lambda_gives_the_authors_parameters():
    actor = qrl.actor_network(CONFIG, SPEC).init(KEY, jnp.ones(6))
    critics = stacked(critic_of(UPDATE["params_before"]))
    opt_state = tuple(optax.adam(1.0).init(p) for p in (critics, raw_lambda, actor))
    params = qrl.Params(critics, actor, qrl.Normalizer(jnp.zeros(3), jnp.ones(3)))
    new, new_lambda, _, _ = update(CONFIG, SPEC, params, raw_lambda, opt_state, batch_of(UPDATE["inputs"]), KEY)
    # A step is 1e-4, 1e-6 a hundredth of it. Where a gradient is 0 but for rounding, the first step of Adam is chance.
    for after, theirs, grad in zip(
        *map(jax.tree.leaves, (new.critics, critic_of(UPDATE["params_after"]), critic_of(UPDATE["grads"]))), strict=True
    ):
        certain = np.abs(grad) > 1e-6
        np.testing.assert_allclose(np.asarray(after[0])[certain], theirs[certain], rtol=0, atol=1e-6)
    np.testing.assert_allclose(new_lambda, [UPDATE["raw_lagrange_after"]], rtol=0, atol=1e-6)
    close(qrl.raw_multiplier(CONFIG), UPDATE["raw_lagrange_init"])


def test_values_of_actions_are_the_authors():
    given, critic = UPDATE["inputs"], critic_of(UPDATE["params_after"])
    z, next_z = (qrl.encode(CONFIG, critic, array(given[name])) for name in ("obs", "next_obs"))
    after = qrl.predict(CONFIG, SPEC, critic, z, array(given["action"]))
    goal_z = jnp.roll(next_z, 1, 0)  # which its name does not say
    close(qrl.distance(CONFIG, critic, after, goal_z), UPDATE["q_interface_d(obs->next via action)"])


@pytest.mark.parametrize(
    "name, beta, offset", [("online_beta0p1_off15", 0.1, 15), ("offline_beta0p01_off500", 0.01, 500)]
)
def test_push_is_the_authors_softplus(name, beta, offset):
    table = UPDATE["softplus_table"]
    # Their software switches to a straight line where beta x > 20, ours does not: less than 1e-6 apart.
    close(qrl.push_loss(array(table["d"]), beta, offset), table[name])
    close(qrl.push_loss(array([0.0, 900.0]), 10.0, 500.0), [500, 0])  # exp(5000) is not formed


def test_log_density_of_actions_is_the_authors_in_the_tails_too():
    outputs, high = array(ACTION["feature"]), array(ACTION["high"])
    close(qrl.split_outputs(outputs)[1], ACTION["std"])
    ours = qrl.log_prob(outputs, array(ACTION["action"]) / high[None]) - np.log(high).sum()
    # Theirs forms log(1 - a^2) at the clip in float32: 2e-5 of 128.
    np.testing.assert_allclose(ours, ACTION["log_prob"], rtol=2e-5, atol=1e-5)


def test_discrete_actions_lead_to_the_authors_distances_and_the_nearest_is_taken():
    given = ACTION["discrete"]
    spec, critic = discrete_spec(pair(2), 3, 0), critic_of(given["params"])
    params = qrl.Params(stacked(critic), (), qrl.Normalizer(jnp.zeros(2), jnp.ones(2)))
    obs = array(given["s"]), array(given["g"])
    close(qrl.distance(CONFIG, critic, *(qrl.encode(CONFIG, critic, o) for o in obs)), given["d_sg"])
    close(qrl.distances_after(CONFIG, spec, params, obs), given["d_after_action"])
    assert qrl.act(CONFIG, spec, params, obs, KEY).tolist() == given["greedy"]


# --- OGBench's code ---


def ogbench(name):
    """Settings, parameters, batch and the rest of a stored update of OGBench's agent."""
    stored = golden(f"qrl_ogbench_agent_{name}")
    leaves = lambda tree: jax.tree.map(array, tree, is_leaf=lambda x: type(x) is list)
    hp, b = stored["config"], stored["batch"]
    config = qrl.Config(
        **TINY | dict(latent_size=16, component_size=8),
        num_critics=1,
        critic_learning_rate=hp["lr"],
        actor_learning_rate=hp["lr"],
        lambda_learning_rate=hp["lr"],
        epsilon=math.sqrt(hp["eps"]),
        bc_weight=hp["alpha"],
        initial_lambda=1.0,
        variant="ogbench",
    )

    def parts(tree):
        value = tree["modules_value"]
        critic = qrl.Critic(
            {"params": leaves(value["phi"])},
            (),
            {"params": {"alpha": array(value["alpha"]["value"])}},
            {"params": leaves(tree.get("modules_dynamics", {}))},
        )
        actor = {"Dense_0": tree["modules_actor"]["actor_net"]["Dense_0"], "Dense_1": tree["modules_actor"]["mean_net"]}
        return critic, {"params": leaves(actor)}

    goals = {f"{k}_goal": array(b[f"{v}_goals"]) for k, v in dict(push="value", actor="actor").items()}
    names = dict(obs="observations", action="actions", next_obs="next_observations")
    batch = batch_of({ours: b[theirs] for ours, theirs in names.items()}, **goals)
    return config, parts, batch, stored


def test_losses_and_an_update_of_ogbenchs_agent_are_the_authors():
    config, parts, batch, stored = ogbench("ddpgbc")
    critic, actor = parts(stored["params_before"])
    critics, raw = stacked(critic), jnp.zeros(1)
    params = qrl.Params(critics, actor, qrl.Normalizer(jnp.zeros(3), jnp.ones(3)))
    opt_state = tuple(optax.adam(1.0).init(p) for p in (critics, raw, actor))
    new, new_raw, _, metrics = update(config, SPEC, params, raw, opt_state, batch, KEY)
    info = stored["info"]
    close(metrics["push_loss"], info["value/d_neg_loss"])
    close(metrics["push_distance"], info["value/d_neg_mean"])
    close(metrics["violation"], info["value/d_pos_loss"] - config.epsilon**2)
    close(metrics["local_distance"], info["value/d_pos_mean"])
    close(metrics["dynamics_loss"], info["dynamics/dynamics_loss"])
    close(metrics["actor_distance"], -info["actor/q_mean"])
    close(metrics["bc_loss"], -info["actor/bc_log_prob"])
    close(metrics["lambda"], info["value/lam"])
    # A step is 3e-4. Where a gradient is nearly 0, Adam's first one depends on its rounding: a thirtieth.
    step = partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    jax.tree.map(step, (jax.tree.map(lambda x: x[0], new.critics), new.actor), parts(stored["params_after"]))
    step(new_raw[0], stored["lam_log_value_after"])
    z = jax.vmap(lambda critic: qrl.encode(config, critic, batch.x))(critics)
    goal_z = jax.vmap(lambda critic: qrl.encode(config, critic, batch.actor_goal))(critics)
    loss, _ = actor_loss(config, SPEC, actor, critics, z, goal_z, batch, KEY)
    close(loss, info["actor/actor_loss"])


def test_values_of_ogbenchs_agent_that_clones_by_advantage_are_the_authors():
    # Its actor is not here: its critic's losses are, and the advantage d(s, g) - d(s', g).
    config, parts, batch, stored = ogbench("awr")
    critic, info = parts(stored["params_before"])[0], stored["info"]
    z, next_z, push_z, goal_z = (
        qrl.encode(config, critic, x) for x in (batch.x, batch.next_x, batch.push_goal, batch.actor_goal)
    )
    push = qrl.push_loss(qrl.distance(config, critic, z, push_z), config.push_beta, config.push_offset)
    close(push.mean(), info["value/d_neg_loss"])
    excess = qrl.violation(qrl.distance(config, critic, z, next_z), config.epsilon)
    close(excess, info["value/d_pos_loss"] - config.epsilon**2)
    advantage = qrl.distance(config, critic, z, goal_z) - qrl.distance(config, critic, next_z, goal_z)
    close(advantage.mean(), info["actor/adv"])


# --- by hand ---


def test_violation_is_of_steps_longer_than_one_against_epsilon_squared():
    # relu([0.5, 1, 3] - 1)^2 = [0, 0, 4]; epsilon^2 = 1/16
    close(qrl.violation(jnp.array([0.5, 1.0, 3.0]), 0.25), 4 / 3 - 1 / 16)


@pytest.mark.parametrize("violation", [2.0, -2.0])
def test_critic_descends_lambda_times_violation_and_lambda_ascends_it(violation):
    by_lambda, by_violation = jax.grad(qrl.constraint_loss, (0, 1))(3.0, violation)
    assert by_lambda == -violation and by_violation == 3


def test_dynamics_loss_is_the_mean_over_both_directions():
    forward, backward = jnp.array([1.0, 3.0]), jnp.array([0.0, 2.0])
    assert qrl.dynamics_loss(forward, backward, True) == 3.5  # (1 + 9 + 0 + 4) / 4
    assert qrl.dynamics_loss(forward, backward, False) == 1.5  # (1 + 3 + 0 + 2) / 4


def test_lambda_starts_at_its_initial_value():
    for variant in qrl.VARIANTS:
        config = qrl.Config(initial_lambda=0.3, variant=variant)
        close(qrl.multiplier(config, qrl.raw_multiplier(config)), 0.3)


def line(length=20, episodes=5):
    """Episodes of a walk along a line, of positions 100 e to 100 e + length; the data's own goals are all -1."""
    here = (100 * np.arange(episodes)[:, None] + np.arange(length + 1)).astype(np.float32)
    rows = lambda x: np.ascontiguousarray(x).reshape(-1, 1)
    obs, successor = rows(here[:, :-1]), rows(here[:, 1:])
    ends = np.tile(np.arange(length) == length - 1, episodes)
    own = np.full_like(obs, -1)
    t = Transition((obs, own), np.zeros_like(obs), np.zeros(len(obs), np.float32), (successor, own), ends & False, ends)
    return datasets.admit(t, continuous_spec(pair(1), 1, 0), "line")


@pytest.mark.parametrize("variant", qrl.VARIANTS)
def test_a_batch_has_the_goals_that_the_settings_say_and_never_the_datas_own(variant):
    config = qrl.Config(batch_size=512, actor_goals="future_uniform", bc_goals="future_geometric", variant=variant)
    normalizer = qrl.Normalizer(jnp.zeros(1), jnp.ones(1))
    batch = jax.tree.map(np.asarray, qrl.sample(config, line(), normalizer, KEY))
    assert (batch.next_x == batch.x + 1).all() and len(np.unique(batch.x)) > 90
    steps = batch.actor_goal - batch.x
    assert steps.min() == 1 and steps.max() > 15 and (batch.actor_goal % 100 <= 20).all()
    assert (batch.actor_goal // 100 == batch.x // 100).all()
    if variant == "authors":
        assert batch.push_goal is None and (batch.bc_goal // 100 == batch.x // 100).all()
        assert (batch.bc_goal != batch.actor_goal).any()
    else:
        assert (batch.push_goal // 100 != batch.x // 100).mean() > 0.7 and batch.bc_goal is None
    rolled = dataclasses.replace(config, actor_goals="rolled", bc_goals="rolled")
    assert qrl.sample(rolled, line(), normalizer, KEY).actor_goal is None


SMALL = qrl.Config(**TINY, batch_size=8, critic_learning_rate=0.1)


@cache
def started(seed=1):
    """A state whose networks are drawn anew, so that no layer is zero, and a batch of random numbers."""
    rng = np.random.default_rng(seed)
    numbers = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    dataset = datasets.Dataset(
        Transition((numbers(8, 3),) * 2, jnp.tanh(numbers(8, 2)), numbers(8), (numbers(8, 3),) * 2, None, None),
        jnp.arange(8),
        SPEC,
    )
    state = jax.jit(qrl.init)(SMALL, dataset, KEY)
    drawn = jax.tree.map(lambda x: x + 0.5 * rng.normal(size=x.shape).astype("f"), state.params)
    drawn = drawn._replace(normalizer=state.params.normalizer)
    batch = qrl.Batch(
        numbers(8, 3), dataset.transitions.action, numbers(8, 3), None, actor_goal=None, bc_goal=numbers(8, 3)
    )
    return state, drawn, batch


def after_update(params):
    """Parameters and metrics after one update of the started state with these parameters."""
    state, _, batch = started()
    new, _, _, metrics = update(SMALL, SPEC, params, state.raw_lambda, state.opt_state, batch, KEY)
    return new, metrics


@jax.jit
def distance_by(critic, latents_of, x, action, goal):
    """d(T(z, a), z_g) through one critic, of another's latents."""
    z, goal_z = (qrl.encode(SMALL, latents_of, o) for o in (x, goal))
    return qrl.distance(SMALL, critic, qrl.predict(SMALL, SPEC, critic, z, action), goal_z)


def test_actor_goes_to_the_nearest_by_the_worst_critic_through_new_critics_from_old_latents():
    _, params, batch = started()
    new_params, metrics = after_update(params)
    goal = jnp.roll(batch.next_x, 1, 0)  # a transition's goal is the successor of the one before it
    outputs = qrl.actor_network(SMALL, SPEC).apply(params.actor, jnp.concatenate([batch.x, goal], -1))
    action = qrl.draw(outputs, KEY)

    def mean_distance(through, latents_of, worst):
        by = [distance_by(of_one(through, k), of_one(latents_of, k), batch.x, action, goal) for k in (0, 1)]
        return float(worst(np.stack(by), 0).mean())

    old, new = params.critics, new_params.critics
    right = mean_distance(new, old, np.max)
    close(metrics["actor_distance"], right, rtol=1e-4)
    others = mean_distance(old, old, np.max), mean_distance(new, new, np.max), mean_distance(new, old, np.min)
    assert min(abs(right - other) for other in others) > 1e-2 * right


def test_actors_loss_is_its_distance_and_the_weighted_cloning_of_the_datas_actions():
    _, params, batch = started()
    z = jnp.ones((2, 8, SMALL.latent_size))
    batch = batch._replace(actor_goal=batch.next_x)
    loss = lambda weight: actor_loss(
        dataclasses.replace(SMALL, bc_weight=weight), SPEC, params.actor, params.critics, z, -z, batch, KEY
    )
    (plain, metrics), (weighted, _) = loss(0.0), loss(2.0)
    close(plain, metrics["actor_distance"])
    close(weighted, metrics["actor_distance"] + 2 * metrics["bc_loss"])
    outputs = qrl.actor_network(SMALL, SPEC).apply(params.actor, jnp.concatenate([batch.x, batch.bc_goal], -1))
    close(metrics["bc_loss"], -qrl.log_prob(outputs, batch.action).mean())


def test_critics_are_drawn_and_learn_independently():
    state, params, _ = started()
    kernel = state.params.critics.encoder["params"]["Dense_0"]["kernel"]
    assert (kernel[0] != kernel[1]).all()
    changed = params._replace(critics=jax.tree.map(lambda x: x.at[1].add(0.1), params.critics))
    one, other = (after_update(p)[0].critics for p in (params, changed))
    assert tiny.same_bits(of_one(one, 0), of_one(other, 0)) and not tiny.same_bits(of_one(one, 1), of_one(other, 1))


# --- acting ---


def policy_params(mean, raw, config=SMALL):
    params = jax.tree.map(jnp.zeros_like, qrl.actor_network(config, SPEC).init(KEY, jnp.ones(6)))
    params["params"]["Dense_1"]["bias"] = jnp.array([*mean, *raw])
    return qrl.Params((), params, qrl.Normalizer(jnp.zeros(3), jnp.ones(3)))


def test_evaluation_takes_the_likeliest_of_a_hundred_draws_and_training_one():
    params, obs = policy_params([0.2, -0.2], [-1.0, -1.0]), (jnp.ones((400, 3)), jnp.ones((400, 3)))
    best, one = qrl.act(SMALL, SPEC, params, obs, KEY), qrl.explore(SMALL, SPEC, params, obs, KEY)
    # std = softplus(-1) = 0.313. The density of tanh(u) has its mode at u = m + 2 s^2 tanh(u), 0.247 for m = 0.2.
    np.testing.assert_allclose(best.mean(0), np.tanh([0.247, -0.247]), atol=0.02)
    assert (best.std(0) < 0.5 * one.std(0)).all()
    assert np.abs(np.arctanh(one).std(0) - 0.3134).max() < 0.05  # 4 errors of 0.011
    assert (best[0] != best[1]).all()  # each row has its own draws
    exact = qrl.act(dataclasses.replace(SMALL, mode_samples=0), SPEC, params, obs, KEY)
    close(exact[0], np.tanh([0.2, -0.2]))


def test_policy_reads_the_observation_and_then_the_goal_as_in_training():
    _, params, batch = started()
    config, inputs = dataclasses.replace(SMALL, mode_samples=0), jnp.concatenate([batch.x, batch.bc_goal], -1)
    mean = qrl.split_outputs(qrl.actor_network(SMALL, SPEC).apply(params.actor, inputs))[0]
    close(qrl.act(config, SPEC, params, (batch.x, batch.bc_goal), KEY), np.tanh(mean))


def test_ogbenchs_actor_takes_its_mean_clipped():
    config = qrl.Config(**TINY, variant="ogbench")
    params = policy_params([0.5, -3.0], [], config)
    obs = (jnp.ones((400, 3)), jnp.ones((400, 3)))
    assert qrl.act(config, SPEC, params, obs, KEY)[0].tolist() == [0.5, -1]
    drawn = qrl.explore(config, SPEC, params, obs, KEY)
    assert (jnp.abs(drawn) <= 1).all() and abs(float((drawn[:, 0] >= 1).mean()) - 0.31) < 0.12  # P(N > 0.5) = 0.31


def test_normalised_observations_and_goals_share_the_datas_mean_and_deviation():
    positions = np.asarray(line().transitions.obs[0])
    config = dataclasses.replace(SMALL, normalize_obs=True)
    found = qrl.features(line().spec, jax.jit(qrl.init)(config, line(), KEY).params.normalizer, positions)
    # 1e-3 is added to a deviation of 142
    np.testing.assert_allclose(found, (positions - positions.mean()) / positions.std(), rtol=1e-4, atol=1e-4)
    raw = started()[0].params.normalizer
    assert not raw.mean.any() and (raw.std == 1).all()


# --- at the door ---


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(variant="paper"), "variant 'paper' must be one of authors, ogbench"),
        (
            dict(actor_goals="near"),
            "actor_goals 'near' must be one of rolled, random, future_geometric, future_uniform",
        ),
        (dict(bc_goals="near"), "bc_goals 'near' must be one of"),
        (dict(future_gamma=1.0), "future_gamma 1.0 must be between 0 and 1, both excluded"),
        (dict(variant="ogbench"), "latent_size 256 must be num_components x component_size, 64 x 32 = 2048"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        qrl.check(qrl.Config(**changes), line())


@pytest.mark.parametrize("obs", [struct(2), (struct(2), struct(3)), (struct(2),) * 3], ids=str)
def test_observations_that_are_no_pair_of_one_shape_are_refused(obs):
    with pytest.raises(ValueError, match=r"qrl needs observations \(observation, goal\), two arrays of one shape"):
        qrl.check(qrl.Config(), datasets.zeros(continuous_spec(obs, 1, 0)))


def test_ogbenchs_variant_refuses_discrete_actions():
    config = qrl.Config(variant="ogbench", latent_size=2048)
    with pytest.raises(ValueError, match="variant ogbench needs continuous actions"):
        qrl.check(config, datasets.zeros(discrete_spec(pair(2), 3, 0)))


@pytest.mark.parametrize("preset", settings.presets(qrl))
def test_presets_pass_the_check(preset):
    values, _ = settings.defaults(qrl, "qrl", "a/dataset", preset)
    check.check(qrl, values["config"], line())
    assert values["config"].variant == ("ogbench" if preset == "ogbench" else "authors")


# --- oracles ---


def ring(num_states, moves):
    """Every transition of a ring of one-hot states; action a goes on by moves[a]."""
    state, action = (x.ravel() for x in np.meshgrid(np.arange(num_states), np.arange(len(moves)), indexing="ij"))
    eye = jnp.eye(num_states)
    here, there = eye[state], eye[(state + np.array(moves)[action]) % num_states]
    zero = jnp.zeros(len(state))
    transitions = Transition((here, here), jnp.asarray(action, jnp.int32), zero, (there, there), zero > 0, zero == 0)
    return datasets.Dataset(transitions, jnp.arange(len(state)), discrete_spec(pair(num_states), len(moves), 0))


def trained(config, dataset, steps):
    """Parameters after `steps`, and distances between all states, `(S, S)`, the mean over critics."""
    configs = run.broadcast(config, 1)
    carry = run.init(qrl, configs, dataset, jax.random.split(jax.random.key(0), 1))
    carry = run.advance(qrl, configs, dataset, carry, steps)
    params = jax.tree.map(lambda x: x[0], carry.states.params)
    eye = jnp.eye(dataset.spec.obs[0].shape[0])

    def of_one(critic):
        z = qrl.encode(config, critic, eye)
        grid = jnp.broadcast_to(z[:, None], (len(z), *z.shape))
        return qrl.distance(config, critic, grid, jnp.swapaxes(grid, 0, 1))

    return params, np.asarray(jax.vmap(of_one)(params.critics).mean(0))


ONLINE = dict(push_beta=0.1, push_offset=15.0, dynamics_weight=0.1)


def test_on_a_ring_distances_are_the_way_round_and_the_nearer_action_is_taken():
    # Action 0 goes on by one, action 1 by two: from i to j it takes ceil(((j - i) mod 6) / 2) steps.
    config = qrl.Config(
        **ONLINE,
        critic_learning_rate=2e-3,
        lambda_learning_rate=0.05,
        initial_lambda=1.0,
        num_critics=1,
        batch_size=32,
        encoder_hidden=(32,),
        latent_size=16,
        projector_hidden=(32,),
        num_components=8,
        component_size=4,
        dynamics_hidden=(32,),
    )
    params, d = trained(config, ring(6, (1, 2)), 2_000)
    i, j = np.indices((6, 6))
    gap = (j - i) % 6
    truth = np.ceil(gap / 2)
    assert np.corrcoef(d[i != j], truth[i != j])[0, 1] > 0.95
    # 1 + epsilon is 1.25; further ones may be shorter than the shortest path, and a little longer than 1.25 times it.
    assert (d[truth == 1] > 0.9).all() and (d[i != j] < 1.45 * truth[i != j]).all() and not d[i == j].any()
    obs = tuple(jnp.eye(6)[x.ravel()] for x in (i, j))
    action = np.asarray(qrl.act(config, ring(6, (1, 2)).spec, params, obs, KEY)).reshape(6, 6)
    assert (action[gap == 1] == 0).all() and (action[(gap == 2) | (gap == 4)] == 1).all()


@pytest.mark.slow
def test_ring_of_sixteen_states_is_learned_as_by_the_authors_code():
    # Theirs after 10,000 steps, two seeds: one-step mean 1.253 and 1.254, correlation 0.943 and 0.933.
    config = qrl.Config(
        **ONLINE,
        num_critics=1,
        batch_size=64,
        encoder_hidden=(128, 128),
        latent_size=32,
        projector_hidden=(128,),
        num_components=16,
        component_size=16,
        dynamics_hidden=(128,),
    )
    _, d = trained(config, ring(16, (1,)), 10_000)
    i, j = np.indices((16, 16))
    truth = (j - i) % 16
    one_step = d[truth == 1].mean()
    correlation = np.corrcoef(d[truth > 0], truth[truth > 0])[0, 1]
    print(f"one-step mean {one_step:.4f}, largest {d[truth == 1].max():.4f}, correlation {correlation:.4f}")
    assert 1.18 <= one_step <= 1.32 and correlation >= 0.9 and not d[truth == 0].any()
