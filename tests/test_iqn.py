"""i-QN: the authors' numbers, the window's schedule, DQN at K = 1, and value iteration as the oracle."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from probes import table
from scipy.stats import chi2_contingency, chisquare

from algos import iqn
from envs.types import Transition
from runner import run

GOLDEN = Path(__file__).parent / "golden"
golden = lambda name: json.loads((GOLDEN / f"{name}.json").read_text())
array = partial(np.asarray, dtype=np.float32)
flags = pytest.mark.parametrize("shared_torso", [False, True], ids=["independent", "shared_torso"])


def world(num_envs, num_actions=2):
    """Four states in a ring, one-hot observations; action 1 goes on, the others stay; an episode ends in the last."""
    next_state = [[s] + [(s + 1) % 4] * (num_actions - 1) for s in range(4)]
    return table(np.eye(4), [1, 1, 1, 1], next_state, 1, [0, 0, 0, 1], num_actions=num_actions, num_envs=num_envs)


def settings(**changes):
    """Small independent networks that no period moves; a test names the fields that it depends on."""
    small = dict(hidden=(3,), capacity=4_000, prefill=8, batch_size=4, num_iterates=3, train_period=4)
    still = dict(shared_torso=False, sync_period=10**6, window_period=10**6)
    return dataclasses.replace(iqn.Config(), **small | still | changes)


def shapes(config, env):
    return jax.eval_shape(iqn.init, config, env, jax.random.key(0))


def random_params(config, env):
    """Every leaf normal; as `init` draws them would cost a compile."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: array(rng.normal(size=x.shape)), shapes(config, env).params)


def fresh_state(config, env, params, target_params, env_steps):
    """A state with these parameters, a new optimiser, an empty replay, and environments in state 0."""
    state = shapes(config, env)._replace(key=(), params=(), target_params=())
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
    return state._replace(
        params=params, target_params=target_params, env_steps=np.int32(env_steps), key=jax.random.key(0)
    )


def play(config, env, state, num_steps):
    """The states after each of `num_steps` steps."""
    step = jax.jit(partial(iqn.step, config))  # a fresh function: traced as the test at hand has patched it
    for _ in range(num_steps):
        state, _ = step(env, state)
        yield state


# --- the loss ---


def test_td_loss_by_hand():
    q, q_next = jnp.array([[1.0, 5.0], [2.0, -1.0]]), jnp.array([[0.0, 4.0], [3.0, 1.0]])
    action, reward, discount = jnp.array([0, 1]), jnp.array([1.0, 0.5]), jnp.array([0.5, 0.0])
    # y = [1 + 0.5 * 4, 0.5 + 0] = [3, 0.5]; y - q = [3 - 1, 0.5 + 1] = [2, 1.5]
    assert iqn.td_loss(q, q_next, action, reward, discount) == (4 + 2.25) / 2
    # Huber, delta 1: |x| - 1/2 outside [-1, 1]
    assert iqn.td_loss(q, q_next, action, reward, discount, huber=True) == (1.5 + 1) / 2
    # inside: x = [0.5, 0], x^2 / 2
    assert iqn.td_loss(q, q_next, action, jnp.array([-0.5, -1.0]), discount, huber=True) == 0.125 / 2


def test_td_loss_sends_no_gradient_through_the_target():
    q = jnp.array([[1.0, 5.0]])
    grad = jax.grad(lambda q_next: iqn.td_loss(q, q_next, jnp.array([0]), jnp.ones(1), jnp.ones(1)))(q)
    assert (grad == 0).all()


GOLDEN_STEP = golden("idqn_learn_step")


@pytest.fixture
def golden_batch(monkeypatch):
    """Every batch that a step samples is the one of the official code. Returns its environment, batch and discount."""
    g = {name: array(x) for name, x in GOLDEN_STEP["batch"].items()}
    flag = np.zeros(4, bool)
    action = g["action"].astype(np.int32)
    batch = Transition(g["state"], action, g["reward"], g["next_state"], g["is_terminal"] > 0, flag)
    discount = GOLDEN_STEP["gamma"] * (1 - g["is_terminal"])
    monkeypatch.setattr(iqn.ring, "sample_n_step", lambda *args: jax.tree.map(jnp.asarray, (batch, discount)))
    return table(np.zeros((2, 2)), [1, 0], 0, 0, 0, num_envs=4), batch, discount


def test_learning_step_of_the_official_code(golden_batch):
    """The losses of three networks, one Adam step of each, and the losses after it."""
    g, (env, batch, discount) = GOLDEN_STEP, golden_batch
    config = settings(learning_rate=g["lr"], adam_epsilon=g["adam_eps"], num_iterates=g["K"])

    def params_of(tree):
        layers = jax.tree.map(array, tree["params"], is_leaf=lambda x: isinstance(x, list))
        torso = {"params": {"MLP_0": {"Dense_0": layers["Dense_0"]}}}
        return iqn.Params(torso, {"params": {"Dense_0": layers["Dense_1"]}}, ())

    params, target_params = params_of(g["params"]), params_of(g["target_params"])

    @jax.jit
    def outputs(params):
        q = iqn.q_values(config, env.spec, params, batch.obs)
        q_next = iqn.target_q_values(config, env.spec, target_params, batch.next_obs)
        return q, q_next, iqn.losses(config, env.spec, params, target_params, batch, discount)

    q, q_next, losses = outputs(params)
    state, metrics = jax.jit(partial(iqn.step, config))(env, fresh_state(config, env, params, target_params, 0))

    close = partial(np.testing.assert_allclose, atol=1e-6)  # a few float32 roundings of numbers below one
    close(q, g["online_q_state"])
    close(q_next, g["target_q_next"])
    close(losses, g["losses_per_network"])
    close(metrics["loss"], np.mean(g["losses_per_network"]))
    jax.tree.map(close, state.params, params_of(g["params_after_1"]))
    close(outputs(state.params)[2], g["losses_second"])
    assert tiny.same_bits(state.target_params, target_params)


@flags
def test_step_descends_the_sum_of_independent_losses_and_the_mean_of_shared_ones(
    shared_torso, golden_batch, monkeypatch
):
    """Adam hides a constant factor, but for its epsilon; plain gradient descent shows it."""
    monkeypatch.setattr(iqn, "optimizer", lambda config: optax.sgd(1.0))
    env, batch, discount = golden_batch
    config = settings(shared_torso=shared_torso)
    params = random_params(config, env)
    state, _ = jax.jit(partial(iqn.step, config))(env, fresh_state(config, env, params, params, 0))
    loss_fn = lambda p: iqn.losses(config, env.spec, p, params, batch, discount).sum()
    grads = jax.jit(jax.grad(loss_fn))(params)
    scale = 1 / 3 if shared_torso else 1
    expected = jax.tree.map(lambda p, g: p - scale * np.asarray(g), params, grads)
    # float32 sums of four terms of order ten, in another order
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), state.params, expected)


def test_four_iterates_of_a_table_follow_the_golden_ones():
    """i-FQI on states 0, 1 and a terminal one; left stays or returns to 0, right goes on, reward 1 at the end."""
    g = golden("ifqi_tabular")
    obs, action = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    next_obs, reward = np.array([0, 1, 0, 0]), array([0, 0, 0, 1])
    discount = array([0.9, 0.9, 0.9, 0])

    def loss_fn(tables, target_tables):  # (K, S, A)
        td_loss = lambda q, q_next: iqn.td_loss(q[obs], q_next[next_obs], action, reward, discount)
        return jax.vmap(td_loss)(tables, target_tables).sum()

    @jax.jit
    def update(tables, target_tables):
        # The gradient of a mean over four of a square is -2/4 (y - q): with rate 1 that is half of y - q.
        tables = tables - jax.grad(loss_fn)(tables, target_tables)
        return iqn.move_window(tables, target_tables, window_due=False, sync_due=True)

    tables = target_tables = jnp.zeros((4, 2, 2))
    expected = {x["iter"]: x["Q"] for x in g["iQN_K4_D1_lr0.5_full_batch_no_shift"]}
    for i in range(1, 41):
        tables, target_tables = update(tables, target_tables)
        if i in expected:
            assert (target_tables[0] == 0).all()  # Qbar_0 is never synced
            np.testing.assert_allclose(tables, expected[i][1:], atol=1e-6)  # float32 against float64
    np.testing.assert_allclose(tables, g["Bellman_iterates_from_zero"][1:5], atol=1e-5)  # 2^-40 from the limit


# --- the schedule: every leaf holds a label, and a gradient step adds 10 to it ---


@pytest.fixture
def labels_grow_by_ten(monkeypatch):
    grow = lambda grads, state, params=None: (jax.tree.map(lambda g: jnp.full_like(g, 10), grads), state)
    monkeypatch.setattr(iqn, "optimizer", lambda config: optax.GradientTransformation(lambda params: (), grow))


def filled_with(tree, labels):
    """Every leaf of `tree` filled with labels along its leading axis, or with the one label given."""
    labels = array(labels)
    fill = lambda x: np.broadcast_to(labels.reshape(labels.shape + (1,) * (x.ndim - labels.ndim)), x.shape)
    return jax.tree.map(fill, tree)


def labelled(config, env, labels):
    """Independent networks, one label each."""
    params = shapes(config, env).params
    return iqn.Params(filled_with(params.torso, labels), filled_with(params.head, labels), ())


def labels_of(tree, axis: bool):
    """The label of every network, or of the one network; all leaves must agree."""
    found = [np.asarray(x).reshape(len(x) if axis else 1, -1) for x in jax.tree.leaves(tree)]
    assert all((x == found[0][:, :1]).all() for x in found)
    return found[0][:, 0].tolist()


@pytest.mark.parametrize("num_envs", [1, 2])
def test_schedule_of_independent_networks_is_that_of_the_main_branch(num_envs, labels_grow_by_ten):
    """With two environments one step makes two gradient steps; the events fall on the right one."""
    g = golden("idqn_schedule_main")
    config, env = settings(train_period=1, window_period=6, sync_period=2), world(num_envs)
    params, target_params = (labelled(config, env, g[x]) for x in ("start_online", "start_target"))
    states = play(config, env, fresh_state(config, env, params, target_params, env_steps=0), 13 // num_envs)
    for entry, state in zip(g["trace"][num_envs - 1 :: num_envs], states, strict=True):
        assert state.env_steps == state.gradient_steps == entry["step"]
        for part in ("torso", "head"):
            assert labels_of(getattr(state.params, part), True) == entry["online"]
            assert labels_of(getattr(state.target_params, part), True) == entry["target"]


def test_schedule_of_a_shared_torso_is_that_of_the_experiments_branch(labels_grow_by_ten):
    """Read where a gradient step is made: it sees the online heads of the entry and the targets of the one before.

    The authors copy targets on any env step, between the gradient steps; which gradient step sees
    the copy is what counts, and here it is made at the end of the gradient step before.
    """
    g = golden("idqn_schedule_experiments")
    config = settings(shared_torso=True, window_period=g["T"], sync_period=g["D"], train_period=g["grad_period"])
    env = world(2)
    params = shapes(config, env).params
    params = iqn.Params(
        filled_with(params.torso, 7), filled_with(params.head, [1, 2, 3]), filled_with(params.frozen, 0)
    )
    # The authors' first env step is number 0, ours after the first gradient step is 4: start at -4.
    start = fresh_state(config, env, params, params, env_steps=-4)

    gradient_at = [i for i, entry in enumerate(g["trace"]) if "grad" in entry["events"]]
    torso, frozen_torso = 7, None
    states = play(config, env, start, len(gradient_at))
    for i, following, state in zip(gradient_at, gradient_at[1:] + [None], states, strict=True):
        entry, before_next = g["trace"][i], g["trace"][following - 1 if following else -1]
        heads = lambda params: labels_of(params.frozen[1], False) + labels_of(params.head, True)
        assert state.env_steps == entry["t"]
        assert heads(state.params) == entry["online"]
        assert heads(state.target_params) == before_next["target"]
        # The frozen torso is the online one as it was when the window moved, before the gradient step.
        frozen_torso = torso if "roll" in entry["events"] else frozen_torso
        torso += 10
        for params in (state.params, state.target_params):
            assert labels_of(params.torso, False) == [torso] and labels_of(params.frozen[0], False) == [frozen_torso]


def test_neither_period_restarts_at_the_other_s_event(labels_grow_by_ten):
    config, env = settings(train_period=1, window_period=10, sync_period=3), world(1)
    start = fresh_state(config, env, *(labelled(config, env, x) for x in ([1, 2, 3], [100, 101, 102])), env_steps=0)
    windows, syncs, before = [], [], [100, 101, 102]
    for state in play(config, env, start, 30):
        target = labels_of(state.target_params.head, True)
        if target[0] != before[0]:
            windows.append(int(state.env_steps))
        elif target[1] != before[1]:
            syncs.append(int(state.env_steps))
        before = target
    assert windows == [10, 20, 30]
    assert syncs == [3, 6, 9, 12, 15, 18, 21, 24, 27]  # at 30 the window leaves no room for it


def test_published_sync_period_falls_after_seven_or_eight_gradient_steps():
    # D = 30, a gradient step every 4: 30 / 4 = 7.5, so at env steps 32, 60, 92, 120
    before = 4 * np.arange(30)
    assert (np.flatnonzero(iqn.due(30, before, before + 4)) + 1).tolist() == [8, 15, 23, 30]
    # T = 6000: a window of 1500 gradient steps
    before = 4 * np.arange(4_500)
    assert (np.flatnonzero(iqn.due(6_000, before, before + 4)) + 1).tolist() == [1_500, 3_000, 4_500]


def test_shift_moves_every_network_down_and_keeps_the_last():
    assert iqn.shift({"w": jnp.array([1.0, 2.0, 3.0])})["w"].tolist() == [2.0, 3.0, 3.0]
    assert iqn.shift({"w": jnp.array([1.0])})["w"].tolist() == [1.0]


@flags
def test_forward_of_the_shifted_networks_is_the_forward_of_the_next_ones(shared_torso):
    config, env = settings(shared_torso=shared_torso), world(4)
    params = random_params(config, env)
    window_due = jnp.bool_(True)
    moved = iqn.roll_shared(params) if shared_torso else iqn.move_window(params, params, window_due, ~window_due)[0]
    q = lambda p: iqn.q_values(config, env.spec, p, env.features)
    np.testing.assert_allclose(q(moved)[:-1], q(params)[1:], atol=1e-6)  # the same sums, up to their order
    np.testing.assert_allclose(q(moved)[-1], q(params)[-1], atol=1e-6)
    assert np.abs(q(params)[1:] - q(params)[:-1]).max() > 0.1
    if shared_torso:
        np.testing.assert_allclose(iqn.frozen_q_values(config, env.spec, moved, env.features), q(params)[:1], atol=1e-6)


def test_targets_of_a_shared_torso_are_the_frozen_network_and_all_heads_but_the_last():
    config, env = settings(shared_torso=True), world(4)
    params = random_params(config, env)

    def forward(torso, head, k):  # one hidden layer of three, on one-hot observations
        first, second = torso["params"]["MLP_0"]["Dense_0"], head["params"]["Dense_0"]
        return np.maximum(first["kernel"] + first["bias"][None], 0) @ second["kernel"][k] + second["bias"][k][None]

    expected = [
        forward(*params.frozen, ...),
        forward(params.torso, params.head, 0),
        forward(params.torso, params.head, 1),
    ]
    q = iqn.target_q_values(config, env.spec, params, env.features)
    np.testing.assert_allclose(q, expected, atol=1e-5)  # float32 sums of four terms of order one


# --- K = 1 is DQN ---


def plain_dqn(layers, batches, learning_rate, epsilon, gamma, train_period, target_period, copy_first):
    """DQN on a perceptron of one hidden layer, by hand in NumPy. Returns the layers and each step's target layers.

    A target copy at the end of the step that it is due on: of the parameters as they are then, or,
    with `copy_first`, of those from before the step's update, as the `experiments` branch has it.
    """
    hidden_of = lambda w, x: np.maximum(x @ w["w0"] + w["b0"], 0)
    target, targets = layers, []
    first = second = {k: np.zeros_like(v) for k, v in layers.items()}
    for t, batch in enumerate(batches, 1):
        before = layers
        q_next = hidden_of(target, batch.next_obs) @ target["w1"] + target["b1"]
        y = batch.reward + gamma * (1 - batch.terminated) * q_next.max(1)
        hidden = hidden_of(layers, batch.obs)
        q = hidden @ layers["w1"] + layers["b1"]
        rows, dq = np.arange(len(y)), np.zeros_like(q)
        dq[rows, batch.action] = 2 * (q[rows, batch.action] - y) / len(y)
        dhidden = (dq @ layers["w1"].T) * (hidden > 0)
        grads = dict(w0=batch.obs.T @ dhidden, b0=dhidden.sum(0), w1=hidden.T @ dq, b1=dq.sum(0))
        first = {k: 0.9 * first[k] + 0.1 * g for k, g in grads.items()}
        second = {k: 0.999 * second[k] + 0.001 * g**2 for k, g in grads.items()}
        step = {k: first[k] / (1 - 0.9**t) / (np.sqrt(second[k] / (1 - 0.999**t)) + epsilon) for k in layers}
        layers = {k: v - learning_rate * step[k] for k, v in layers.items()}
        if t * train_period // target_period > (t - 1) * train_period // target_period:
            target = before if copy_first else layers
        targets.append(target)
    return layers, targets


@flags
def test_one_iterate_is_dqn(shared_torso, monkeypatch):
    """A hundred updates on fixed batches, D as it likes: parameters to 1e-5, target copies on the same steps."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    batches = Transition(
        normal(100, 16, 4), rng.integers(0, 2, (100, 16)), normal(100, 16), normal(100, 16, 4),
        rng.random((100, 16)) < 0.3, np.zeros((100, 16), bool),
    )  # fmt: skip
    config = settings(
        num_iterates=1, shared_torso=shared_torso, window_period=30, sync_period=7,
        hidden=(8,), learning_rate=1e-3, batch_size=16, n_step=2,
    )  # fmt: skip
    env = world(4)  # one row of the ring, and one gradient step, per step
    params = random_params(config, env)
    if shared_torso:  # Qbar_0 starts as Q_1
        params = iqn.roll_shared(params)
    start = fresh_state(config, env, params, params, env_steps=0)

    def fixed_batch(replay, key, batch_size, n, gamma):
        assert (batch_size, n) == (16, 2)
        batch = jax.tree.map(lambda x: jnp.asarray(x)[replay.inserted - 1], batches)
        return batch, gamma * (1 - batch.terminated)

    monkeypatch.setattr(iqn.ring, "sample_n_step", fixed_batch)

    def body(state, _):
        state, _ = iqn.step(config, env, state)
        return state, state.target_params

    final, target_params = jax.jit(lambda s: jax.lax.scan(body, s, length=100))(start)

    def layers_of(params, frozen, at=()):
        torso, head = params.frozen if frozen else (params.torso, params.head)
        first, second = torso["params"]["MLP_0"]["Dense_0"], head["params"]["Dense_0"]
        layers = dict(w0=first["kernel"], b0=first["bias"], w1=second["kernel"], b1=second["bias"])
        num_axes = dict(w0=2, b0=1, w1=2, b1=1)
        layers = {k: np.asarray(v)[at] for k, v in layers.items()}
        return {k: v[0] if v.ndim > num_axes[k] else v for k, v in layers.items()}  # without the axis K = 1

    expected, expected_targets = plain_dqn(
        layers_of(params, False),
        [Transition(*fields) for fields in zip(*batches, strict=True)],
        config.learning_rate, config.adam_epsilon, config.gamma,
        train_period=4, target_period=30, copy_first=shared_torso,
    )  # fmt: skip
    targets = [layers_of(target_params, shared_torso, at=i) for i in range(100)]
    changes = lambda targets: [t for t in range(1, 100) if (targets[t]["w0"] != targets[t - 1]["w0"]).any()]
    assert changes(targets) == changes(expected_targets) and len(changes(targets)) == 13  # floor(400 / 30)
    close = partial(np.testing.assert_allclose, atol=1e-5)  # the order of float32 sums, over a hundred updates
    final = layers_of(final.params, False)
    for name in expected:
        close(final[name], expected[name])
        close(targets[-1][name], expected_targets[-1][name])
    assert np.abs(final["w0"] - layers_of(params, False)["w0"]).max() > 0.01  # it did learn


# --- isolation ---


@flags
def test_loss_of_a_network_moves_no_other_network_and_no_target(shared_torso):
    config, env = settings(shared_torso=shared_torso), world(4)
    params, target_params = random_params(config, env), random_params(config, env)
    obs = jnp.concatenate([env.features, env.features])
    action = jnp.arange(8) // 4
    batch = Transition(obs, action, jnp.ones(8), obs[::-1], jnp.zeros(8, bool), jnp.zeros(8, bool))
    loss_fn = lambda p, t: iqn.losses(config, env.spec, p, t, batch, 0.9 * jnp.ones(8))
    online, target = jax.jit(jax.jacobian(loss_fn, (0, 1)))(params, target_params)
    assert all((x == 0).all() for x in jax.tree.leaves((target, online.frozen)))
    parts = [online.head] if shared_torso else [online.head, online.torso]
    for jacobian in jax.tree.leaves(parts):  # (K losses, K networks, ...)
        size = np.abs(np.asarray(jacobian)).reshape(3, 3, -1).max(-1)
        assert (np.diag(size) > 0).all() and (size[~np.eye(3, dtype=bool)] == 0).all()
    if shared_torso:  # moved by all
        assert all((np.abs(np.asarray(x)).reshape(3, -1).max(-1) > 0).all() for x in jax.tree.leaves(online.torso))


# --- acting ---


def preferring(config, env, actions, frozen_action=None):
    """Parameters under which network k always prefers `actions[k]`, whatever it sees."""
    zero = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes(config, env).params)
    zero.head["params"]["Dense_0"]["bias"] = np.eye(env.spec.num_actions, dtype=np.float32)[actions]
    if frozen_action is not None:
        zero.frozen[1]["params"]["Dense_0"]["bias"] = np.eye(env.spec.num_actions, dtype=np.float32)[frozen_action]
    return zero


def test_acting_network_is_drawn_uniformly_and_for_each_row():
    config, env = settings(), world(4, num_actions=3)
    params = preferring(config, env, [0, 1, 2])
    act = jax.jit(lambda key: iqn.act(config, env.spec, params, jnp.zeros((3_000, 4)), key))
    drawn = np.asarray(act(jax.random.key(0)))
    assert drawn.dtype == np.int32
    assert chisquare(np.bincount(drawn)).pvalue > 0.01  # a fixed seed; one in a hundred would fail
    again = np.asarray(act(jax.random.key(1)))
    for left, right in ((drawn[:-1], drawn[1:]), (drawn, again)):  # neighbouring rows, and two steps
        pairs = np.bincount(3 * left + right, minlength=9).reshape(3, 3)
        assert chi2_contingency(pairs).pvalue > 0.01


@pytest.mark.parametrize("frozen_head_acts", [False, True])
def test_frozen_network_acts_only_where_asked(frozen_head_acts):
    config = settings(shared_torso=True, num_iterates=2, frozen_head_acts=frozen_head_acts)
    env = world(4, num_actions=3)
    params = preferring(config, env, [0, 1], frozen_action=2)
    action = jax.jit(lambda obs, key: iqn.act(config, env.spec, params, obs, key))(
        np.zeros((3_000, 4)), jax.random.key(0)
    )
    counts = np.bincount(action, minlength=3)
    assert (counts[2] > 0) == frozen_head_acts
    assert chisquare(counts[counts > 0]).pvalue > 0.01


def test_act_is_greedy_and_takes_the_action_of_one_network():
    config, env = settings(num_iterates=1), world(4)
    params = random_params(config, env)
    of_obs = lambda obs, key: (
        iqn.q_values(config, env.spec, params, obs)[0],
        iqn.act(config, env.spec, params, obs, key),
    )
    q, action = map(np.asarray, jax.jit(of_obs)(env.features, jax.random.key(0)))
    assert action.tolist() == q.argmax(-1).tolist() and len(set(action.tolist())) == 2


def test_epsilon_by_hand():
    config = settings(epsilon_start=0.9, epsilon_end=0.1, epsilon_decay=100.0, prefill=40)
    at = lambda env_steps: float(iqn.epsilon(config, env_steps))
    # 0.9 at the end of the prefill, 0.9 - 0.8 * 25/100 = 0.7 after 25 more env steps, 0.1 from 140 on
    steps, expected = [0, 40, 65, 90, 140, 10_000], [0.9, 0.9, 0.7, 0.5, 0.1, 0.1]
    np.testing.assert_allclose([at(t) for t in steps], expected, atol=1e-6)  # one float32 rounding
    no_decay = dataclasses.replace(config, epsilon_decay=0.0)
    np.testing.assert_allclose(iqn.epsilon(no_decay, 41), 0.1, atol=1e-6)  # no division by zero


# --- the published network ---


def test_atari_network_has_the_published_sizes_and_runs():
    size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    env = table(np.zeros((2, 84, 84, 4)), [1, 0], 0, 1, 0, num_actions=18, num_envs=4)
    config = dataclasses.replace(iqn.Config(), capacity=80, prefill=20)
    params = shapes(config, env).params
    # conv 8x8x4x32 + 32, 4x4x32x64 + 64, 3x3x64x64 + 64; then 7744 x 512 + 512 and 512 x 18 + 18
    assert size(params.torso) == 8_224 + 32_832 + 36_928 == 77_984
    assert size(params.frozen[1]) == 3_965_440 + 9_234 == 3_974_674
    assert size(params) == 2 * 77_984 + 6 * 3_974_674  # two torsos, K + 1 heads
    features = jax.eval_shape(
        lambda p, x: iqn.networks(config, env.spec)[0].apply(p, x), params.torso, env.features[:1]
    )
    assert features.shape == (1, 7_744)

    config = dataclasses.replace(config, num_iterates=2, hidden=(16,))
    params = random_params(config, env)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 84, 84, 4), np.uint8)
    flag = np.zeros(4, bool)
    batch = Transition(pixels, jnp.arange(4), jnp.ones(4), pixels, flag, flag)
    losses = jax.jit(partial(iqn.losses, config, env.spec))(params, params, batch, 0.99 * jnp.ones(4))
    assert losses.shape == (2,) and np.isfinite(losses).all()


# --- bad settings ---


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(capacity=1_001), "capacity 1001 must be a multiple of num_envs 4; 1000 is"),
        (dict(train_period=6), "train_period 6 and num_envs 4: one must be a multiple of the other"),
        (dict(train_period=8, prefill=12), "prefill 12 must be a multiple of 8"),
        (dict(prefill=8, n_step=3), "n_step 3 is longer than the 2 steps"),
        (dict(capacity=8, prefill=80, n_step=3), "n_step 3 is longer than the 2 steps"),
        (dict(padding="same"), "padding 'same' must be SAME or VALID"),
    ],
)
def test_bad_settings_are_named_with_their_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        iqn.check(settings(**changes), world(4))
    iqn.check(settings(), world(4))


# --- learning, with value iteration as the oracle ---

# A chain with a tempting exit: leaving at once pays 0.3, walking to its end pays 1.
NEXT_STATE = np.array([[0, 1], [0, 2], [1, 3], [3, 3]])
REWARD = array([[0.3, 0], [0, 0], [0.1, 0], [0, 1.0]])
TERMINATED = np.array([[1, 0], [0, 0], [0, 0], [0, 1]])


class Chain:
    """One run on the chain; every test that learns on it goes through the same two programs."""

    def __init__(self, shared_torso):
        fields = (x.tolist() for x in (NEXT_STATE, REWARD, TERMINATED))
        self.env = table(np.eye(4), [1, 0, 0, 0], *fields, num_envs=8)
        self.config = tiny.config(iqn, **tiny.LEARNING, gamma=0.9, shared_torso=shared_torso)

    def init(self):
        return run.init(iqn, run.broadcast(self.config, 1), self.env, jax.random.split(jax.random.key(0), 1))

    def advance(self, carry, num_steps, **changes):
        configs = run.broadcast(dataclasses.replace(self.config, **changes), 1)
        return run.advance(iqn, configs, self.env, carry, num_steps)


def state_of(carry):
    """A copy: the carry itself is donated to the next step."""
    return jax.tree.map(jnp.copy, tiny.run_of(carry.states, 0))


@flags
def test_networks_start_from_independent_draws_and_targets_from_copies(shared_torso):
    state = state_of(Chain(shared_torso).init())
    assert tiny.same_bits(state.params, state.target_params)
    kernel_of = lambda head: np.asarray(head["params"]["Dense_0"]["kernel"])
    kernel = kernel_of(state.params.head)  # (K, 32, A)
    if shared_torso:  # the authors' first window has moved: Qbar_0 is the first draw, the last two are equal
        assert (kernel[-1] == kernel[-2]).all()
        kernel = np.concatenate([kernel_of(state.params.frozen[1])[None], kernel[:-1]])
    assert np.unique(kernel).size == kernel.size


def test_replay_starts_with_the_prefill_of_a_uniform_policy():
    state = state_of(Chain(False).init())
    assert state.env_steps == 800 and state.replay.inserted == 100 and state.gradient_steps == 0
    stored = jax.tree.map(lambda x: np.asarray(x)[:100].reshape(800, -1), state.replay.data)
    assert chisquare(np.bincount(stored.action[:, 0])).pvalue > 0.01
    at = stored.obs.argmax(1), stored.action[:, 0]
    assert (stored.next_obs.argmax(1) == NEXT_STATE[at]).all() and (stored.reward[:, 0] == REWARD[at]).all()


@flags
def test_all_iterates_meet_value_iteration(shared_torso):
    expected = np.zeros((4, 2))
    for _ in range(200):
        expected = REWARD + 0.9 * (1 - TERMINATED) * expected.max(1)[NEXT_STATE]
    assert expected[0, 1] > 0.6 > expected[0, 0] == REWARD[0, 0]  # it pays to walk

    chain = Chain(shared_torso)
    state = state_of(chain.advance(chain.init(), tiny.LEARNING_STEPS))
    q_of = jax.jit(lambda state: (
        iqn.q_values(chain.config, chain.env.spec, state.params, chain.env.features),
        iqn.target_q_values(chain.config, chain.env.spec, state.target_params, chain.env.features),
    ))  # fmt: skip
    for q in q_of(state):  # (K, S, A)
        # Within 0.001 for four seeds; an off-policy three-step return is wrong by 0.3.
        np.testing.assert_allclose(q, np.broadcast_to(expected, q.shape), atol=0.01)


def test_frozen_torso_and_head_keep_their_bits_until_a_window():
    chain = Chain(shared_torso=True)
    carry = chain.init()
    first = state_of(carry)
    carry = chain.advance(carry, 49)  # env step 800 + 8 * 49 = 1192, after nine syncs
    before = state_of(carry)
    after = state_of(chain.advance(carry, 1))  # env step 1200 = 3 T
    for part in ("torso", "head"):
        assert not tiny.same_bits(getattr(before.params, part), getattr(first.params, part))
    assert tiny.same_bits(before.params.frozen, first.params.frozen)
    assert tiny.same_bits(before.target_params.frozen, first.params.frozen)
    expected = before.params.torso, jax.tree.map(lambda p: p[0], before.params.head)
    assert tiny.same_bits(after.params.frozen, expected) and tiny.same_bits(after.target_params.frozen, expected)


def test_step_explores_with_probability_epsilon_and_stores_what_it_did():
    chain = Chain(shared_torso=False)
    carry = chain.init()
    prefer = lambda action: jax.tree.map(
        lambda p: jnp.asarray(p)[None], preferring(chain.config, chain.env, [action] * 3)
    )
    carry = carry._replace(states=carry.states._replace(params=prefer(0), target_params=prefer(1)))
    carry = chain.advance(carry, 200, learning_rate=0.0, epsilon_start=0.6, epsilon_end=0.6)
    state = state_of(carry)
    action = np.asarray(state.replay.data.action)[100:300].ravel()
    # explores with 0.6, half of it on each action: action 1 has 0.3
    assert chisquare(np.bincount(action), action.size * np.array([0.7, 0.3])).pvalue > 0.01
    assert state.env_steps == 800 + 8 * 200 and state.gradient_steps == 200
