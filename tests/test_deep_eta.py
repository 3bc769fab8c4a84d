"""DηN: the golden targets, what a stock changes and what it does not, the search for c_0, QR-DQN as f(x) = x."""

import dataclasses
import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from probes import table

from algos import deep_eta, qrdqn
from envs import mdps, stock
from envs.types import Transition
from replay import ring
from runner import run

GOLDEN = json.loads((Path(__file__).parent / "golden" / "c_g1f_detan_target_loss.json").read_text())
array = partial(np.asarray, dtype=np.float32)
close = partial(np.testing.assert_allclose, atol=1e-6)  # a few float32 roundings of numbers near one


def settings(**changes):
    """A small network that no period moves; a test names the fields that it depends on."""
    small = dict(hidden=(3,), num_quantiles=4, capacity=4_000, prefill=8, batch_size=4, train_period=4)
    return dataclasses.replace(deep_eta.Config(), **small | dict(target_period=10**6) | changes)


def world(num_envs=4, obs_shape=(3,), wrap=stock.wrap):
    """Rewards 1, 2, 3 on the way through three states; then the end."""
    fields = ([1, 0, 0], [1, 2, 0], [1, 2, 3], [0, 0, 1])
    features = np.arange(3).reshape(3, *[1] * len(obs_shape)) * np.ones(obs_shape)
    return wrap(table(features, *fields, num_envs=num_envs))


def predicting(monkeypatch, q):
    """The network predicts `q`, `(A, N)`, whatever it sees."""
    q = jnp.asarray(q, jnp.float32)
    monkeypatch.setattr(deep_eta, "quantiles", lambda *args: jnp.broadcast_to(q, (len(args[3][1]), *q.shape)))


# --- score, target and loss ---


@pytest.mark.parametrize("row", range(3))
def test_next_stock_scores_target_and_loss_of_the_golden_numbers(row, monkeypatch):
    g, config = GOLDEN["rows"][row], settings(objective="lower_cvar")
    predicting(monkeypatch, GOLDEN["next_quantiles"])
    obs = jnp.zeros((1, 2)), array([9.0])  # a stock that is relabelled
    batch = Transition(obs, None, array([g["r"]]), obs, None, None)
    discount = array([g["gamma"]])
    batch = deep_eta.relabel(batch, discount, array([g["c"]]))
    assert batch.obs[1].tolist() == [g["c"]] and batch.next_obs[1].tolist() == [g["next_stock"]]
    close(deep_eta.scores(config, array(GOLDEN["next_quantiles"])[None], batch.next_obs[1])[0], g["scores"])
    target = deep_eta.target_of(config, None, None, batch, discount)
    close(target[0], g["target"])
    q = array(GOLDEN["pred_quantiles"])
    close(deep_eta.quantile_loss(q, target[0], 1.0), g["qr_huber_loss_kappa1"])
    close(deep_eta.quantile_loss(q, target[0], 0.0), g["qr_loss_kappa0"])
    action = deep_eta.act(config, None, None, (jnp.zeros((1, 2)), batch.next_obs[1]), None)
    assert action.tolist() == [g["greedy_action"]]
    at_the_end = deep_eta.target_of(config, None, None, batch, 0 * discount)
    assert at_the_end.tolist() == [[g["r"]] * 4]  # its terminal rule


@pytest.mark.parametrize(
    "name, expected",
    [
        # c + q = [-2, 0, 3, 7]
        ("mean", 2),  # 8 / 4
        ("lower_cvar", -0.5),  # -2 / 4
        ("upper_cvar", 2.5),  # (3 + 7) / 4
        ("mean_cvar", 0),  # slopes (1 - .5) / .25 + .5 = 2.5 and .5: (-5 + 1.5 + 3.5) / 4
        ("desired_return", -3),  # -(2 + 3 + 7) / 4
        ("squared_error", -15.5),  # -(4 + 9 + 49) / 4
        ("threshold", 0.75),
    ],
)
def test_score_is_the_mean_utility_of_stock_and_quantiles_together(name, expected):
    score = deep_eta.scores(settings(objective=name), array([[[-3, -1, 2, 6]]]), array([1.0]))
    close(score, [[expected]])


def test_objectives_take_their_numbers_from_the_config():
    config = settings(objective="mean_cvar", tau=0.1, weight=0.25)
    assert deep_eta.objective_of(config) == deep_eta.objectives.MeanCVaR(0.1, 0.25)


def test_quantile_loss_is_qrdqns():
    rng = np.random.default_rng(0)
    q, target = array(rng.normal(size=5)), array(rng.normal(size=5))
    for kappa in (0.0, 0.1, 1.0):
        assert deep_eta.quantile_loss(q, target, kappa) == qrdqn.quantile_loss(q, target, kappa)


# --- stocks ---


init, step = jax.jit(deep_eta.init), jax.jit(deep_eta.step)


@cache
def collected():
    """Settings, environment, and the state after some steps at gamma 1/2; its replay as transitions `(T, B)`."""
    config, env = settings(gamma=0.5, prefill=48, stock_low=-3.0, stock_high=5.0, target_period=2), world()
    state = init(config, env, jax.random.key(0))
    for _ in range(12):
        state, metrics = step(config, env, state)
    assert np.isfinite(metrics["loss"]) and int(state.env_steps) == 48 + 12 * 4
    return config, env, state, jax.tree.map(lambda x: np.asarray(x)[:24], state.replay.data)


def test_first_stocks_in_training_are_drawn_anew_for_every_episode_from_the_whole_range():
    *_, data = collected()
    first = data.obs[1][data.obs[0][..., 0] == 0]  # every episode begins in state 0
    assert len(first) == 4 * 8 and len(np.unique(first)) == 4 * 8
    assert first.min() >= -3 and first.max() <= 5
    assert first.min() < -1 and first.max() > 3  # of 32 draws from [-3, 5]: each bound misses with (3/4)^32 = 1e-4


def test_stored_stocks_follow_the_rewards():
    *_, state, data = collected()
    close(data.next_obs[1], (data.obs[1] + data.reward) / 0.5)
    going_on = ~data.terminated[:-1]
    assert (data.obs[1][1:][going_on] == data.next_obs[1][:-1][going_on]).all()
    assert state.env_state.gamma == 0.5


@pytest.mark.parametrize("n", [1, 2])
def test_relabelling_with_the_own_stock_changes_nothing_of_n_steps(n):
    *_, state, data = collected()
    sample = jax.jit(partial(ring.sample_n_step, batch_size=64, n=n, gamma=0.5))
    batch, discount = sample(state.replay, jax.random.key(0))
    same = deep_eta.relabel(batch, discount, batch.obs[1])
    going_on = np.asarray(discount) > 0
    assert 10 < going_on.sum() < 64
    # A stock is up to (5 + 1 + 2) * 4: rounding of 1e-5
    np.testing.assert_allclose(same.next_obs[1][going_on], batch.next_obs[1][going_on], atol=1e-5)
    assert np.isfinite(same.next_obs[1]).all()  # after the end too
    assert tiny.same_bits((same.obs, same.next_obs[0], same.reward), (batch.obs, batch.next_obs[0], batch.reward))


@pytest.mark.parametrize("n", [1, 2])
def test_relabelled_stocks_follow_the_n_steps_rewards(n):
    # Rewards 1 and 2 from c = 3 at gamma 1/2: (3 + 1) / .5 = 8, then (8 + 2) / .5 = 20
    window = Transition(
        (jnp.zeros((1, 2)), jnp.zeros((1, 2))), None, array([[1, 2]]), (jnp.zeros((1, 2)),) * 2, *[None] * 2
    )
    flag = jnp.zeros((1, 2), bool)
    window = window._replace(action=jnp.zeros((1, 2), int), terminated=flag, truncated=flag)
    batch, discount = ring.n_step(jax.tree.map(lambda x: x[:, :n], window), 0.5)
    assert deep_eta.relabel(batch, discount, array([3.0])).next_obs[1].tolist() == [{1: 8, 2: 20}[n]]


@pytest.mark.parametrize("probability, low, high", [(0.0, 0, 0), (0.5, 400, 600), (1.0, 1_000, 1_000)])
def test_as_many_stocks_are_drawn_as_asked_for(probability, low, high):
    config = settings(stock_low=-1.0, stock_high=3.0)
    c = deep_eta.draw_stocks(config, jax.random.key(0), probability, jnp.full(1_000, 50.0))
    drawn = np.asarray(c)[np.asarray(c) != 50]
    assert low <= len(drawn) <= high  # of 1,000 halves the standard deviation is 16
    assert ((drawn >= -1) & (drawn <= 3)).all()
    if len(drawn):
        assert abs(drawn.mean() - 1) < 0.25  # uniform: standard deviation 1.15 / 20 at the most


def test_a_step_learns_from_relabelled_stocks():
    """With every stock relabelled, those in the replay do not matter."""
    config, env, state, _ = collected()
    data = state.replay.data
    moved = data._replace(obs=(data.obs[0], data.obs[1] + 7), next_obs=(data.next_obs[0], data.next_obs[1] + 7))
    other = state._replace(replay=dataclasses.replace(state.replay, words=ring.pack(state.replay.layout, moved)))
    for fraction, same in ((1.0, True), (0.0, False)):
        config = dataclasses.replace(config, relabel_fraction=fraction)
        after = step(config, env, state)[0].params
        assert tiny.same_bits(after, step(config, env, other)[0].params) == same
        assert not tiny.same_bits(after, state.params)


# --- networks ---


def shapes(config, env):
    return jax.eval_shape(deep_eta.init, config, env, jax.random.key(0))


def random_params(config, env, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: array(rng.normal(size=x.shape)), shapes(config, env).params)


@pytest.mark.parametrize("shape", [(3,), (10, 10, 3)], ids=str)
def test_network_reads_the_stock_and_beyond_the_range_its_ends(shape):
    config, env = settings(hidden=(16,), stock_low=-2.0, stock_high=4.0, stock_scale=2.0), world(obs_shape=shape)
    params = random_params(config, env)
    stocks, obs = array([-2, -5, 4, 90, 1]), np.ones((5, *shape), np.float32)
    of = jax.jit(lambda obs: deep_eta.quantiles(config, env.spec, params, obs))
    q = np.asarray(of((obs, stocks)))
    assert q.shape == (5, 2, 4)
    assert (q[0] == q[1]).all() and (q[2] == q[3]).all()
    assert (q[0] != q[2]).any() and (q[4] != q[0]).any() and (q[4] != q[2]).any()


def test_network_of_a_vector_reads_the_stock_over_its_scale_beside_it():
    config, env = settings(stock_scale=4.0), world()
    params = random_params(config, env)
    obs, c = array([[1, 2, 3]]), array([6.0])
    first, last = params["params"]["torso"]["MLP_0"]["Dense_0"], params["params"]["head"]["Dense_0"]
    h = np.maximum(array([[1, 2, 3, 1.5]]) @ first["kernel"] + first["bias"], 0)  # 6 / 4 = 1.5
    expected = (h @ last["kernel"] + last["bias"]).reshape(1, 2, 4)
    np.testing.assert_allclose(deep_eta.quantiles(config, env.spec, params, (obs, c)), expected, rtol=1e-5)


# --- f(x) = x is QR-DQN ---


def test_with_the_mean_as_objective_it_is_qrdqn():
    """Networks that do not read the stock: equal actions and targets at every stock, equal gradients."""
    ours, env, plain = settings(objective="mean"), world(), world(wrap=lambda env: env)
    theirs = qrdqn.Config(
        **{f.name: getattr(ours, f.name) for f in dataclasses.fields(qrdqn.Config) if f.name != "risk_tau"}
    )
    params, target_params = (random_params(ours, env, seed) for seed in (0, 1))

    def without_stock(params, fill=None):
        torso, head = params["params"]["torso"]["MLP_0"]["Dense_0"], params["params"]["head"]["Dense_0"]
        layers = {
            "layers_0": {"MLP_0": {"Dense_0": dict(torso, kernel=torso["kernel"][:3])}},
            "layers_1": {"Dense_0": head},
        }
        return {"params": layers}

    for p in (params, target_params):
        p["params"]["torso"]["MLP_0"]["Dense_0"]["kernel"][3] = 0
    rng = np.random.default_rng(2)
    obs, next_obs = array(rng.normal(size=(2, 64, 3)))
    c, next_c = array(rng.uniform(-12, 12, size=(2, 64)))
    action, reward = rng.integers(0, 2, 64), array(rng.normal(size=64))
    discount = array(rng.choice([0, 0.99], 64))
    batch = Transition(obs, action, reward, next_obs, None, None)
    stocked = batch._replace(obs=(obs, c), next_obs=(next_obs, next_c))

    def of(algo, config, spec, params, target_params, batch):
        target = algo.target_of(config, spec, target_params, batch, discount)

        def loss(params):
            q = algo.of_action(algo.quantiles(config, spec, params, batch.obs), batch.action)
            return jax.vmap(algo.quantile_loss, (0, 0, None))(q, target, config.kappa).mean()

        return algo.act(config, spec, params, batch.obs, None), target, jax.grad(loss)(params)

    action, target, grads = jax.jit(partial(of, deep_eta, ours, env.spec))(params, target_params, stocked)
    expected = jax.jit(partial(of, qrdqn, theirs, plain.spec))(*map(without_stock, (params, target_params)), batch)
    assert action.tolist() == expected[0].tolist() and len(set(action.tolist())) == 2
    close(target, expected[1])
    jax.tree.map(close, without_stock(grads), expected[2])


# --- the first stock of an evaluation ---

FOUR = [[1, 2, 3, 4], [0, 0, 0, 0]]  # quantiles of the better action and of another


def first_stock(config, num_envs=3):
    return float(deep_eta.best_first_stock(config, None, None, jnp.zeros((num_envs, 2))))


@pytest.mark.parametrize(
    "changes, low, high",
    [
        # the best c_0 is minus any quantile at tau: at 1/2 from 2 to 3, at 1/8 it is 1
        (dict(objective="lower_cvar", tau=0.5), -3, -2),
        (dict(objective="lower_cvar", tau=0.125), -1, -1),
        # at 1 - tau: 3 to 4 at the best quarter
        (dict(objective="upper_cvar", tau=0.25), -4, -3),
        # the mean does not depend on c_0
        (dict(objective="mean_cvar", tau=0.125, weight=0.5), -1, -1),
        (dict(objective="desired_return", target=2.5), -2.5, -2.5),
        (dict(objective="mean"), 0, 0),
    ],
)
def test_best_first_stock_by_hand(changes, low, high, monkeypatch):
    predicting(monkeypatch, FOUR)
    config = settings(stock_low=-8.0, stock_high=8.0, num_stocks=161, **changes)
    assert low - 1e-5 <= first_stock(config) <= high + 1e-5  # a grid of steps 1/10


def test_first_stock_is_one_for_all_episodes_of_the_law_over_their_first_states(monkeypatch):
    # G is 0 from one state and 4 from the other; a quarter of both together reaches from 0 to 0: c_0 = 0.
    law = jnp.array([[[0.0] * 4], [[4.0] * 4]])
    monkeypatch.setattr(deep_eta, "quantiles", lambda *args: law)
    config = settings(objective="lower_cvar", tau=0.25, stock_low=-8.0, stock_high=8.0, num_stocks=161)
    np.testing.assert_allclose(first_stock(config, 2), 0, atol=1e-5)
    # of three quarters the quantile is 4
    np.testing.assert_allclose(first_stock(dataclasses.replace(config, tau=0.75), 2), -4, atol=1e-5)


def test_begin_puts_every_episode_at_the_best_stock_and_gamma(monkeypatch):
    predicting(monkeypatch, FOUR)
    config, env = settings(objective="desired_return", target=2.5, gamma=0.9), world()
    state = deep_eta.begin(config, env.spec, None, env.reset(jax.random.key(0)), jax.random.key(1))
    assert state.obs[1].tolist() == [-2.5] * 4 == state.first_stock.tolist() and state.gamma == np.float32(0.9)


def test_measure_by_hand():
    # G = 0, 1, 2, 3, 10 from c_0 = -2
    g = array([3, 0, 10, 1, 2])
    episodes = dict(episode_discounted_return=g, episode_stock=g - 2, episode_return=g)
    of = lambda **changes: {k: float(v) for k, v in deep_eta.measure(settings(**changes), episodes).items()}
    # the worst 3/10 are one and a half of five: (0 + 1/2) / 1.5
    found = of(objective="lower_cvar", tau=0.3)
    close([found["objective"], found["first_stock"]], [1 / 3, -2])
    assert found.keys() == {"objective", "first_stock"}
    close(of(objective="upper_cvar", tau=0.3)["objective"], (10 + 1.5) / 1.5)
    close(of(objective="mean_cvar", tau=0.3, weight=0.25)["objective"], 0.25 * 3.2 + 0.75 / 3)
    # |G - 2| = 2, 1, 0, 1, 8
    found = of(objective="desired_return", target=2.0)
    close([found["objective"], found["abs_stock"]], [-12 / 5, 12 / 5])
    close(of(objective="squared_error", target=2.0)["objective"], -(4 + 1 + 0 + 1 + 64) / 5)


# --- bad settings ---


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(objective="cvar"), "cvar of the return is not indifferent to mixtures"),
        (dict(objective="cvr"), "objective 'cvr' is none of mean, lower_cvar"),
        (dict(objective="homeostatic"), "homeostatic needs a vector of rewards; of one reward, desired_return"),
        (dict(objective="exponential", gamma=0.9), "exponential is not indifferent to gamma 0.9"),
        (dict(gamma=1.0), "a problem without end needs gamma < 1, not 1"),
        (dict(objective="threshold"), "threshold is not Lipschitz"),
        (dict(stock_low=3.0, stock_high=-3.0), "stock_low 3 must be less than stock_high -3"),
        (dict(capacity=1_001), "capacity 1001 must be a multiple of num_envs 4; 1000 is"),
        (dict(train_period=6), "train_period 6 and num_envs 4: one must be a multiple of the other"),
        (dict(prefill=8, n_step=3), "n_step 3 is longer than the 2 steps"),
        (dict(padding="same"), "padding 'same' must be SAME or VALID"),
    ],
)
def test_bad_settings_are_named_with_their_reason(changes, message):
    with pytest.raises(ValueError, match=message):
        deep_eta.check(settings(**changes), world())
    deep_eta.check(settings(), world())


def test_an_mdp_with_a_horizon_needs_neither_a_discount_nor_a_lipschitz_constant():
    env = stock.wrap(mdps.make_env("slippery", 4))
    for objective in ("lower_cvar", "threshold", "exponential"):
        deep_eta.check(settings(objective=objective, gamma=1.0), env)


# --- learning, with dynamic programming as the oracle ---


@cache
def gambler():
    """Learned on the gamble at tau = 1/2: +2 or -1, then 0 or a gamble for +3 and -2."""
    tuned = dict(objective="lower_cvar", tau=0.5, stock_low=-6.0, stock_high=4.0, stock_scale=2.0)
    sizes = dict(num_quantiles=8, kappa=0.1, gamma=1.0, hidden=(64,), adam_epsilon=1e-4)
    config = tiny.config(deep_eta, **tiny.LEARNING | tuned | sizes)
    env, configs = stock.wrap(mdps.make_env("gamble", 8)), run.broadcast(config, 1)
    carry = run.init(deep_eta, configs, env, jax.random.split(jax.random.key(1), 1))
    params = tiny.run_of(run.advance(deep_eta, configs, env, carry, 3 * tiny.LEARNING_STEPS).states.params, 0)
    return config, env, params


def test_the_second_choice_depends_on_what_the_first_step_paid():
    config, env, params = gambler()
    # c_0 = -2. In state 1, half of the time left, after +2 the stock is 0: safe; after -1 it is -3: risky.
    obs = jnp.tile(array([0, 1, 0, 0.5]), (2, 1)), array([0.0, -3.0])
    assert deep_eta.act(config, env.spec, params, obs, jax.random.key(0)).tolist() == [0, 1]


def test_learned_laws_and_the_best_first_stock_are_those_of_dynamic_programming():
    config, env, params = gambler()
    obs = jnp.tile(array([0, 1, 0, 0.5]), (3, 1)), array([-3.0, 0, 2])
    q = deep_eta.quantiles(config, env.spec, params, obs)
    # Whatever the stock: 0, and half -2, half 3.
    expected = np.tile(array([[0] * 8, [-2] * 4 + [3] * 4]), (3, 1, 1))
    np.testing.assert_allclose(q, expected, atol=0.3)  # Huber's square and Adam
    start = jnp.array([[1.0, 0, 0, 1]])
    best = deep_eta.best_first_stock(config, env.spec, params, start)
    law = deep_eta.quantiles(config, env.spec, params, (start, best[None]))
    dual = -best + deep_eta.scores(config, law, best[None]).max() / 0.5
    # The best c_0 is -2, the dual there the CVaR -1/2; with slopes 1 and -1/2 beside it.
    np.testing.assert_allclose([best, dual], [-2, -0.5], atol=0.4)


@pytest.mark.parametrize("objective, c", [("mean", 1e9), ("mean", -1e9), ("lower_cvar", -1e9), ("lower_cvar", -np.inf)])
def test_a_stock_beyond_float32s_digits_leaves_the_best_mean(objective, c):
    # c + 0.2 and c + 0.55 are one number in float32; f is linear there, so the best action is that of the mean, 2.
    config = dataclasses.replace(deep_eta.EXAMPLE.config, objective=objective)
    q = jnp.array([[[-0.1, 0.1], [0.1, 0.3], [0.5, 0.6]]])
    assert deep_eta.best_action(config, q, jnp.array([c])).tolist() == [2]


def test_within_the_law_the_best_action_is_that_of_the_score():
    # f(x) = min(x, 0) at c = -1: c + q is (-1, -1) and (-2, 3): scores -1 and -1; at c = 0 they are 0 and -1/2.
    config = dataclasses.replace(deep_eta.EXAMPLE.config, objective="lower_cvar")
    q = jnp.array([[[-1.0, 4.0], [0.0, 0.0]]])
    assert deep_eta.best_action(config, q, jnp.array([0.0])).tolist() == [1]
    assert deep_eta.best_action(config, q, jnp.array([-3.0])).tolist() == [0]  # (-4, 0 of 1): -2; -3
