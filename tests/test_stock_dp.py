"""Stock-augmented dynamic programming against golden optima and against every policy of histories on small MDPs."""

import dataclasses
import itertools
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from algos import stock_dp
from algos.stock_dp import Config
from envs import mdps
from runner.evaluate import episodes

golden = lambda name: json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())
close = partial(np.testing.assert_allclose, rtol=0, atol=1e-6)  # the bar; float64, ties taken within 1e-10
SMALL = dict(max_nodes=32, num_first_stocks=64, tie_tolerance=1e-10)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make(name, **params):
    with jax.enable_x64(True):
        return mdps.make(name, **params)


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # these programs compile longer than they run
def run(config, mdp, num):
    """Params after some steps, the last step's residual, what `evaluate` says, and the law of the return."""

    def one(_, carry):
        state, metrics = stock_dp.step(config, mdp, carry[0])
        return state, metrics["residual"]

    state = stock_dp.init(config, mdp, None), jnp.zeros(())
    state, residual = jax.lax.fori_loop(0, num, one, state)
    return state.params, residual, stock_dp.evaluate(config, mdp, state.params), stock_dp.law(config, mdp, state.params)


def solve(config, mdp, num=None):
    params, residual, found, law = run(config, mdp, num or mdp.horizon + 1)
    assert residual <= 1e-12 or num  # a horizon's values stand still after as many sweeps
    return params, {k: float(v) for k, v in found.items()}, atoms(*law)


def atoms(x, p):
    """{return: probability} of a law of numbers."""
    found = {}
    for value, mass in zip(np.round(x[:, 0], 9).tolist(), p.tolist(), strict=True):
        if mass > 0:
            found[value] = found.get(value, 0) + mass
    return found


def lower_cvar(law, tau):
    """The mean of the worst tau of {return: probability}, the last atom taken in part."""
    left, total = tau, 0.0
    for x in sorted(law):
        take = min(law[x], left)
        left, total = left - take, total + take * x
    return total / tau


upper_cvar = lambda law, tau: -lower_cvar({-x: p for x, p in law.items()}, tau)


# Golden optima


@pytest.mark.parametrize("name, gamma", [("gamma1", 1.0), ("gamma_half", 0.5)])
def test_gamble_at_every_tau(name, gamma):
    mdp = make("gamble", gamma=gamma)
    for row in golden("c_g1_stock_cvar_two_step")[name]["rows"]:
        params, found, law = solve(Config(tau=row["tau"], **SMALL), mdp)
        close([found["dual"], found["objective"], lower_cvar(law, row["tau"])], [row["optimal_cvar"]] * 3)
        close(params.first_stock, row["optimal_c0"])
        curve = dict(row["dual_curve_c_h"])  # of the best h at each c0
        h = -params.candidates[:, 0] + params.values[0, 0, :, 0] / row["tau"]
        for c0, value in zip(params.candidates[:, 0].tolist(), h.tolist(), strict=True):
            if c0 in curve:
                close(value, curve[c0])
        # After +2 and after -1 the stocks are (c0 + 2) / gamma and (c0 - 1) / gamma.
        second = params.nodes.stock[1, :, 0] + params.first_stock / gamma
        for paid, best in zip((2, -1), row["greedy_actions_at_c0"][0], strict=True):
            node = abs(second - (row["optimal_c0"][0] + paid) / gamma).argmin()
            assert ["safe", "risky"][int(params.policy[1, node].argmax())] in best


def test_upper_cvar_of_the_bandit_is_reached_by_randomising_alone():
    g, mdp = golden("c_g1b_optimistic_cvar_bandit"), make("bandit")
    params, found, law = solve(Config(objective="upper_cvar", tau=g["tau"], **SMALL), mdp)
    close([found["dual"], found["objective"]], [8 / 3, 8 / 3])
    close([found["first_stock"], params.policy[0, 0, 0]], [g["optimum"]["c0"], g["optimum"]["prob_A"]])
    close([law[0], law[2], law[4]], [1 / 2, 1 / 3, 1 / 6])
    close(upper_cvar(law, g["tau"]), 8 / 3)
    # tau = 1/4: all of the best quarter is 4 with arm B. tau = 1: the mean, 2 with arm A.
    for tau, value in ((0.25, 4), (1.0, 2)):
        found = solve(Config(objective="upper_cvar", tau=tau, **SMALL), mdp)[1]
        close([found["dual"], found["objective"]], [value] * 2)


def test_exponential_utility_with_discounting_is_refused_and_would_be_wrong():
    g, mdp = golden("c_g1c_exp_utility_not_gamma_indifferent"), make("exponential")
    config = Config(objective="exponential", **SMALL)
    with pytest.raises(ValueError, match="exponential is not indifferent to gamma 0.5"):
        stock_dp.check(config, mdp)
    params, found, _ = solve(config, mdp)
    close([found["dual"], found["objective"]], [g["dp_value_at_t0"]] * 2)
    assert params.policy[1, 0].argmax() == 0 and max(g["true_scores_at_t0"].values()) > found["objective"] + 0.009
    # Without discounting it is right: the gamble is worth -1.4145 and sure -1.
    found = solve(config, dataclasses.replace(mdp, gamma=jnp.ones(())))[1]
    close([found["dual"], found["objective"]], [-1, -1])


@pytest.mark.parametrize("name, menu, gamma", [("g1_T3", [0, 1, 3], 1.0), ("ghalf_T3", [0, 1, 1], 0.5)])
def test_desired_returns_of_the_menu(name, menu, gamma):
    mdp = make("menu", menu=menu, gamma=gamma)  # a third item that repeats the second changes nothing
    for row in golden("c_g1d_desired_return")[name]["rows"]:
        _, found, law = solve(Config(objective="desired_return", target=row["target"], **SMALL), mdp)
        close([found["dual"], found["objective"], found["first_stock"]], [row["value"], row["value"], row["c0"]])
        (attained,) = law
        close(abs(attained - row["target"]), row["abs_error"])  # of two as near, such as 7 and 9, the mean takes 9


PITS = range(-31, -20)  # returns of the slippery grid that end in a pit: -20 and at most 11 steps before it


def test_cvar_frontier_of_the_slippery_grid():
    g, mdp, pit = golden("c_g1e_grid_cvar"), make("slippery"), {}
    for row in g["results"]:
        tau = row["tau"]
        params, found, law = solve(Config(tau=tau, **SMALL), mdp)
        assert params.nodes.needed.max() == 11
        close([found["dual"], found["objective"]], [row["dual_value"], row["cvar_of_greedy_policy"]])
        close([lower_cvar(law, tau), found["return"]], [row["dual_value"], row["mean_of_greedy_policy"]])
        expected = {x: p for x, p in row["law_of_greedy_policy"]}
        pit[tau] = sum(law.get(x, 0) for x in PITS)
        if tau < 1:  # at 1 the risk-neutral optimum has ties of equal means
            close(found["first_stock"], row["c0"])
            assert law.keys() == expected.keys()
            close([law[x] for x in expected], list(expected.values()))
    close([pit[0.05], pit[1.0]], [0, 0.014255479])


def test_endless_gamble_on_a_grid():
    g, mdp = golden("c_g1g_discounted_infinite_horizon"), make("sure_or_gamble")
    for row in g["rows"]:
        config = Config(tau=row["tau"], nodes="grid", num_stocks=20_003, tie_tolerance=1e-10)
        params, found, law = solve(config, mdp, 40)
        # Theirs is a lower bound, by at most its 22 sweeps: 2^-22 times 2, over tau.
        assert abs(found["dual"] - row["optimal_cvar_lower_bound"]) < 1e-4
        # 2^-40 is left of the sweeps. Delta = 2 / 20000: U errs by Delta / 4 / (1 - gamma), c0 by Delta / 2 a slope.
        step, tau = 1e-4, row["tau"]
        close(found["grid_error"], step / 2 / tau + step / 2 * max(1, abs(1 / tau - 1)))
        lower = row["optimal_cvar_lower_bound"]
        assert lower - 1e-9 - found["grid_error"] <= found["dual"] <= lower + 2**-21 / tau + found["grid_error"]
        if tau < 0.8:
            close(found["dual"], 0.9)  # sure for ever
        # Splitting returns between points a step apart on each of 15 steps spreads the law by a few steps.
        assert abs(found["objective"] - found["dual"]) < 1e-3 and abs(sum(law.values()) - 1) < 1e-9
    assert abs(found["return"] - 1) < step  # at tau 1 all gamble: splitting keeps the mean, a step of it is left out
    points, u = params.nodes.stock[0, :, 0], params.values[0, :, 0, 0]
    for c, value in g["U_at"].items():  # theirs, after 22 sweeps, is within 2^-22 times 2
        assert abs(np.interp(float(c), points, u) - value) < step / 2 + 2**-21


# Every policy of histories


def laws_of_all_policies(mdp, s=0, steps=3):
    """The laws from s under every deterministic policy of histories: atoms `(P, n, D)`, probabilities `(P, n)`."""
    reward = np.asarray(mdp.reward if mdp.reward.ndim == 4 else mdp.reward[..., None])
    if steps == 0 or mdp.terminal[s]:
        return np.zeros((1, 1, reward.shape[-1])), np.ones((1, 1))
    atoms, mass = [], []
    for a in range(mdp.num_actions):
        branches = [b for b in range(mdp.num_branches) if mdp.probability[s, a, b] > 0]
        below = [laws_of_all_policies(mdp, int(mdp.next_state[s, a, b]), steps - 1) for b in branches]
        for plan in itertools.product(*(range(len(x)) for x, _ in below)):
            parts = list(zip(branches, plan, below, strict=True))
            atoms.append(np.concatenate([reward[s, a, b] + float(mdp.gamma) * x[i] for b, i, (x, _) in parts]))
            mass.append(np.concatenate([float(mdp.probability[s, a, b]) * p[i] for b, i, (_, p) in parts]))
    n = max(map(len, mass))
    fill = lambda v: np.concatenate([v, np.zeros((n - len(v), *v.shape[1:]))])
    return np.stack([fill(x) for x in atoms]), np.stack([fill(p) for p in mass])


def lower_cvars(x, p, tau):
    """`lower_cvar` of many laws `(P, n)`, `(P,)`."""
    order = x.argsort(-1)
    x, level = np.take_along_axis(x, order, -1), np.take_along_axis(p, order, -1).cumsum(-1)
    return (x * np.diff(np.minimum(level, tau), prepend=0)).sum(-1) / tau


def best_mixture(x, p, tau):
    """The least over c of the best -c + E (c + G)_+ / tau of laws: no mixture of them has a greater upper CVaR."""
    h = lambda c: (p * np.maximum(c + x, 0)).sum(-1).max() / tau - c  # convex
    return minimize_scalar(h, bounds=(-x.max() - 1, -x.min() + 1), method="bounded", options=dict(xatol=1e-9)).fun


def induction(mdp, f, c0, s=0, steps=3, total=0.0, discount=1.0):
    """max E f(c0 + G) by backward induction on the tree of histories, for several c0 at once `(F,)`."""
    if steps == 0 or mdp.terminal[s]:
        return f(c0 + total)
    of = []
    for a in range(mdp.num_actions):
        rows = zip(*(x[s, a].tolist() for x in (mdp.next_state, mdp.reward, mdp.probability)), strict=True)
        then = lambda n, r: induction(mdp, f, c0, n, steps - 1, total + discount * r, discount * float(mdp.gamma))
        of.append(sum(p * then(n, r) for n, r, p in rows if p > 0))
    return np.max(of, 0)


UTILITIES = dict(
    lower_cvar=lambda x: np.minimum(x, 0),
    upper_cvar=lambda x: np.maximum(x, 0),
    mean_cvar=lambda x: (0.4 / 0.3 + 0.6) * np.minimum(x, 0) + 0.6 * np.maximum(x, 0),  # weight .6, tau .3
    desired_return=lambda x: -abs(x),
    squared_error=lambda x: -(x**2),
    threshold=lambda x: (x >= 0) * 1.0,
    exponential=lambda x: -np.exp(-x),
)
TAU, WEIGHT, TARGET = 0.3, 0.6, 0.25


def garnet(seed, gamma):
    """A policy's tree of histories has 15 nodes: 1, 2, 4 and 8."""
    mdp = make("garnet", seed=seed, states=3, branches=2, reward_atoms=1, terminals=1, horizon=3)
    return dataclasses.replace(mdp, gamma=jnp.float64(gamma))


def of_laws(name, x, p, target=TARGET):
    """The best of an objective over laws `(P, n)`; of the upper CVaR over their mixtures."""
    f = UTILITIES[name]
    match name:
        case "lower_cvar":
            return lower_cvars(x, p, TAU).max()
        case "mean_cvar":
            return (WEIGHT * (x * p).sum(-1) + (1 - WEIGHT) * lower_cvars(x, p, TAU)).max()
        case "upper_cvar":
            return best_mixture(x, p, TAU)
        case "exponential":
            return (p * f(x)).sum(-1).max()
    return (p * f(x - target)).sum(-1).max()


FAST = ("lower_cvar", "upper_cvar", "desired_return")  # the others compile as many programs again


@pytest.mark.parametrize("name", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in UTILITIES])
def test_random_mdps_against_the_tree_of_histories_and_every_policy(name):
    config = Config(objective=name, tau=TAU, weight=WEIGHT, target=TARGET, max_nodes=64, num_first_stocks=128)
    config = dataclasses.replace(config, tie_tolerance=1e-10)

    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(st.integers(0, 10_000), st.sampled_from([1.0, 0.7]))
    def holds(seed, gamma):
        mdp = garnet(seed, 1.0 if name == "exponential" else gamma)
        params, found, law = solve(config, mdp)
        table = jax.tree.map(np.asarray, mdp)
        x, p = laws_of_all_policies(table)
        close([found["objective"], found["dual"]], [of_laws(name, x[..., 0], p)] * 2)
        u = induction(table, UTILITIES[name], np.asarray(params.candidates[:, 0]))
        close(params.values[0, 0, :, 0], u)
        # The law is one of the policies', or for the upper CVaR a mixture with the tail that h needs.
        assert abs(sum(law.values()) - 1) < 1e-9
        if name == "upper_cvar":
            above = sum(q for g, q in law.items() if g > -found["first_stock"] + 1e-7)
            at_least = sum(q for g, q in law.items() if g > -found["first_stock"] - 1e-7)
            assert above <= TAU + 1e-7 and at_least >= TAU - 1e-7
            close(upper_cvar(law, TAU), found["dual"])

    holds()


def test_vectors_of_stocks_against_every_policy():
    config = Config(objective="homeostatic", first_stock=(0.5, -0.25), max_nodes=64, tie_tolerance=1e-10)
    for seed in range(20):
        mdp = garnet(seed, 1.0 if seed % 2 else 0.7)
        reward = (
            np.random.default_rng(seed).normal(size=(*mdp.reward.shape, 2))
            * ~np.asarray(mdp.terminal)[:, None, None, None]
        )
        mdp = mdps.validate(dataclasses.replace(mdp, reward=jnp.asarray(reward)))
        x, p = laws_of_all_policies(jax.tree.map(np.asarray, mdp))
        best = (p * -np.linalg.norm(x + np.array([0.5, -0.25]), axis=-1)).sum(-1).max()
        _, _, found, (atom, mass) = run(config, mdp, 4)
        close([found["dual"], found["objective"], mass.sum()], [best, best, 1])
        close(found["return"], (mass @ np.asarray(atom)).sum())
        assert "first_stock" not in found


# The parts


def test_the_mean_is_ordinary_dynamic_programming_whatever_the_stock():
    mdp = make("slippery")
    config = Config(objective="mean", **SMALL)
    params, found, _ = solve(config, mdp)
    close([found["objective"], found["return"], found["first_stock"]], [-6.563145581480002, -6.563145581480002, 0])
    p, r = mdps.dense(mdp)
    value, best = np.zeros(12), []
    for _ in range(12):
        q = r + p @ value
        best.append(q >= q.max(1, keepdims=True) - 1e-9)
        value = q.max(1)
    for t, of_state in enumerate(best[::-1]):
        for node, s in enumerate(params.nodes.state[t].tolist()):
            if s >= 0 and not mdp.terminal[s]:
                assert of_state[s, int(params.policy[t, node].argmax())]
    # U(s, c) = c + V(s) at every node, on the first step and on the sixth
    for t in (0, 5):
        value = np.zeros(12)
        for _ in range(12 - t):
            value = (r + p @ value).max(1)
        state = np.asarray(params.nodes.state[t])
        inside = state >= 0
        close(params.values[t, inside, 0, 0], params.nodes.stock[t, inside, 0] + value[state[inside]])


def test_greedy_takes_the_larger_mean_of_what_is_equal_within_the_tolerance():
    q = jnp.array([[1.0, 5.0], [1.05, 2.0], [1.08, 3.0], [0.5, 9.0]])  # (U, mean)
    assert stock_dp.greedy(q, 0.0) == 2
    assert stock_dp.greedy(q, 0.04) == 2  # 1.05 and 1.08: means 2 and 3
    assert stock_dp.greedy(q, 0.1) == 0  # 1 too, of mean 5; .5 is not equal
    assert stock_dp.greedy(q, 0.1, by_mean=False) == 0 and stock_dp.greedy(q, 0.04, by_mean=False) == 1


def test_interpolation_by_hand_within_the_grid_and_beyond_it():
    points, values = jnp.array([-1.0, 0.0, 1.0]), jnp.array([-3.0, 0.0, 1.0])[:, None, None]
    slopes = jnp.array([[5.0], [2.0]])
    x = jnp.array([-1.0, -0.75, 0.5, 1.0, 3.0, -2.0])
    index, weight, beyond = stock_dp.place(x, points)
    close(index, [0, 0, 1, 1, 1, 0])
    close(weight, [0, 0.25, 0.5, 1, 1, 0])
    close(beyond, [0, 0, 0, 0, 2, -1])
    # -3 + .25 * 3; 0 + .5; at the end; 1 + 2 * 2; -3 - 5
    found = stock_dp.interpolate(values, index, weight, beyond, slopes)[:, 0, 0]
    close(found, [-3, -2.25, 0.5, 1, 5, -8])


def test_extremes_are_mixed_to_a_tail_of_tau():
    # lo has P(c + G >= 0) .25 and hi .75: a half of each has .5
    assert stock_dp.mixture(0.5, 0.25, 0.75) == 0.5
    assert stock_dp.mixture(0.2, 0.25, 0.75) == 0  # lo alone reaches it, with its atom at 0 in part
    assert stock_dp.mixture(0.5, 0.5, 0.5) == 0


def test_return_bounds_by_hand():
    close(stock_dp.return_bounds(make("sure_or_gamble")), [0, 2])
    close(stock_dp.return_bounds(make("gamble")), [-3, 5])
    close(stock_dp.return_bounds(make("menu", gamma=0.5)), [0, 5.25])  # 3 (1 + 1/2 + 1/4)
    close(stock_dp.return_bounds(make("slippery")), [-31, 0])  # eleven steps and a pit; no step at all
    close(stock_dp.return_bounds(make("three_state")), [-5, 10])  # staying in state 2: -1 or 2 for ever, over 1 - .8
    close(stock_dp.return_bounds(make("tie")), [-1, 1])  # from state 1; for ever is not possible


def test_pairs_that_differ_by_rounding_are_one():
    state = jnp.array([1, 0, 1, 1, 0, 2], jnp.int32)
    stock = jnp.array([0.1 + 0.2, 5.0, 0.3, 0.4, -5.0, 9.0])[:, None]
    alive = jnp.array([True, True, True, True, True, False])
    states, stocks, index, count = stock_dp.distinct(state, stock, alive, 5)
    assert (states.tolist(), int(count)) == ([0, 0, 1, 1, -1], 4)
    close(stocks[:4, 0], [-5, 5, 0.3, 0.4])
    assert index[:5].tolist() == [2, 1, 2, 3, 0]
    # No room for the last: it has the index that no node has, and the count says so.
    states, _, index, count = stock_dp.distinct(state, stock, alive, 3)
    assert (states.tolist(), index[:5].tolist(), int(count)) == ([0, 0, 1], [2, 1, 2, 3, 0], 4)


@pytest.mark.parametrize("name", ["slippery", "gamble", "two_stocks"])
def test_the_reachable_pairs_are_those_of_all_histories(name):
    mdp = make(name)
    nodes = jax.tree.map(np.asarray, jax.jit(stock_dp.reachable, static_argnums=1)(mdp, 64))
    mdp = jax.tree.map(np.asarray, mdp)
    reward = np.asarray(mdp.reward if mdp.reward.ndim == 4 else mdp.reward[..., None])
    pairs = {(int(np.argmax(mdp.start)), (0.0,) * reward.shape[-1])}
    for t in range(mdp.horizon + 1):
        state, found = np.asarray(nodes.state[t]), np.asarray(nodes.stock[t])
        assert {(int(n), tuple(c.tolist())) for n, c in zip(state, found, strict=True) if n >= 0} == pairs
        assert nodes.needed[t] == len(pairs) == (state >= 0).sum()
        if t < mdp.horizon:
            at = {pair: i for i, pair in enumerate(zip(state.tolist(), map(tuple, found.tolist()), strict=True))}
            then = set()
            for n, c in pairs:
                for a, b in np.argwhere((np.asarray(mdp.probability[n]) > 0) & ~np.asarray(mdp.terminal[n])):
                    pair = int(mdp.next_state[n, a, b]), tuple((np.array(c) + reward[n, a, b]).tolist())
                    child = int(nodes.child[t, at[n, c], a, b])
                    assert (int(nodes.state[t + 1, child]), tuple(nodes.stock[t + 1, child].tolist())) == pair
                    then.add(pair)
            pairs = then


def test_an_overflow_is_refused_and_never_silent():
    mdp = make("slippery")
    small = dataclasses.replace(Config(**SMALL), max_nodes=8)
    with pytest.raises(ValueError, match="slippery: at step 3 there are 10 pairs .* max_nodes is 8; raise it, or use"):
        stock_dp.check(small, mdp)
    params, _, found, _ = run(small, mdp, 13)
    assert params.nodes.needed.max() > 8 and all(np.isnan(v) for k, v in found.items() if k != "first_stock")
    few = dataclasses.replace(Config(**SMALL), num_first_stocks=16)
    with pytest.raises(ValueError, match="there are 21 returns to search c0 over, and num_first_stocks is 16"):
        stock_dp.check(few, mdp)
    assert np.isnan(jax.jit(stock_dp.init)(few, mdp, None).params.candidates).all()


@pytest.mark.parametrize("objective", ["lower_cvar", "upper_cvar", "desired_return"])
def test_the_grid_meets_exact_nodes_within_its_bound_and_does_not_see_its_ends(objective):
    mdp = make("gamble", gamma=0.5)
    config = Config(objective=objective, tau=0.6, target=0.5, nodes="grid", num_stocks=63, tie_tolerance=1e-10)
    params, found, _ = solve(config, mdp)
    # From far beyond either end, all of c0 + G has one sign and the greedy action is that of the grid's end: the law of
    # clipping. Left: f is its left slope times the mean. Right: its right one, where lower_cvar has 0 and all tie.
    left, right = stock_dp.objective_of(config).slopes
    f = lambda x: np.where(x < 0, left, right) * x
    c0 = np.linspace(-6, 4, 1_001)  # steps of .01, over which h changes by at most .01
    h = -c0 + np.array([best_of_gamble(f, c) for c in c0]) / 0.6
    exact = dict(lower_cvar=h.max(), upper_cvar=h.min(), desired_return=best_of_gamble(f, -0.5))[objective]
    assert abs(found["dual"] - exact) <= found["grid_error"] + 0.01 and found["grid_error"] < 0.5
    points, u = np.asarray(params.nodes.stock[0, :63, 0]), np.asarray(params.values[0, :63, 0, 0])
    slopes = stock_dp.end_slopes(config, jnp.float64)
    for c in (points[0] - 7, points[0], points[-1], points[-1] + 7, points[0] - 1e4):
        place = stock_dp.place(jnp.array([c]), jnp.asarray(points))
        ours = stock_dp.interpolate(params.values[0, :63], *place, slopes)[0, 0, 0]
        close(ours, best_of_gamble(f, c))
    slope = np.diff(u) / np.diff(points)
    assert (slope > min(left, right) - 1e-9).all() and (slope < max(left, right) + 1e-9).all()
    # The last choice, at both ends of the grid of state 1: the larger mean; of a falling f the smaller one.
    ends = params.policy[1].reshape(3, 63, 2)[1, [0, -1]].argmax(-1)
    assert ends.tolist() == [1, 0 if right < 0 else 1]


def best_of_gamble(f, c):
    """max E f(c + G) over the four policies of the gamble, whose laws do not depend on gamma."""
    laws = ({2: 0.5, -1: 0.5}, {2: 0.75, -3: 0.25}, {5: 0.25, 0: 0.25, -1: 0.5}, {5: 0.25, 0: 0.25, 2: 0.25, -3: 0.25})
    return max(sum(p * f(np.float64(c + x)) for x, p in law.items()) for law in laws)


@pytest.mark.parametrize("name, horizon", [("slippery", 13), ("sure_or_gamble", 0)])
def test_policy_iteration_ends_at_the_answer_of_value_iteration(name, horizon):
    mdp = make(name)
    sizes = SMALL if horizon else dict(nodes="grid", num_stocks=20_003, tie_tolerance=1e-10)
    by_values, a, _ = solve(Config(tau=0.9, **sizes), mdp, horizon or 40)
    by_policies, b, _ = solve(Config(tau=0.9, method="policy", **sizes), mdp, horizon or 4)
    close(by_policies.values[..., 0], by_values.values[..., 0])
    close([b["dual"], b["objective"]], [a["dual"], a["objective"]])


# At the door


@pytest.mark.parametrize(
    "config, name, message",
    [
        (Config(objective="cvar"), "slippery", "objective is 'cvar'; it must be one of mean, lower_cvar, "),
        (Config(nodes="tree"), "slippery", "nodes is 'tree'; it must be one of reachable, grid"),
        (Config(), "sure_or_gamble", "nodes: reachable needs a horizon and sure_or_gamble has none; .* nodes: grid"),
        (Config(objective="threshold", nodes="grid"), "sure_or_gamble", "threshold is not Lipschitz"),
        (Config(objective="squared_error", nodes="grid"), "slippery", "squared_error is not piecewise linear"),
        (Config(objective="homeostatic"), "slippery", "homeostatic on slippery, whose rewards are numbers: its stocks"),
        (Config(), "two_stocks", "lower_cvar on two_stocks, whose rewards are vectors: only homeostatic takes vectors"),
        (Config(objective="homeostatic", nodes="grid"), "two_stocks", "two_stocks has 2 stocks and nodes: grid takes"),
        (
            Config(objective="homeostatic", first_stock=(0.0, 1.0, 2.0)),
            "two_stocks",
            "first_stock has 3 numbers; give one, or one for each of 2",
        ),
        (Config(tau=0.0), "slippery", r"lower_cvar: tau is 0.0; it must be in \(0, 1\]"),
    ],
)
def test_what_is_refused_at_the_door(config, name, message):
    with pytest.raises(ValueError, match=message) as error:
        stock_dp.check(config, mdps.make(name))
    assert "\n" not in str(error.value)


def test_what_passes_at_the_door():
    stock_dp.check(stock_dp.EXAMPLE.config, mdps.make(stock_dp.EXAMPLE.source))
    stock_dp.check(Config(objective="homeostatic"), mdps.make("two_stocks"))
    stock_dp.check(Config(nodes="grid", objective="desired_return"), mdps.make("sure_or_gamble"))


# Played


@pytest.mark.parametrize("objective, tau", [("lower_cvar", 0.1), ("upper_cvar", 0.65)])
def test_episodes_on_the_sampler_have_the_law_that_is_computed(objective, tau):
    """With the stock carried along by envs/stock.py; the float32 table and float32 play."""
    with jax.enable_x64(False):
        mdp = mdps.make("slippery")
        config = Config(objective=objective, tau=tau, max_nodes=32, num_first_stocks=64)
        params, _, found, (x, p) = run(config, mdp, 12)
        env = stock_dp.wrap(mdps.env(mdp, 4000))
        one = lambda tree: jax.tree.map(lambda v: jnp.asarray(v)[None], tree)
        played = jax.jit(episodes, static_argnums=0)
        drawn = played(stock_dp, one(config), env, one(params), jax.random.split(jax.random.key(0), 1))
        returns = np.asarray(drawn["episode_discounted_return"][0], float)
        np.testing.assert_allclose(drawn["episode_stock"][0], returns + float(params.first_stock[0]), atol=1e-4)
        law = atoms(np.asarray(x, float).round(3), np.asarray(p, float))
        sign = 1 if objective == "lower_cvar" else -1
        if (
            objective == "upper_cvar"
        ):  # what is left when the tail is decided goes to the mean: first actions have -8.04
            assert found["return"] > -7.5 and 0 < sum(q * (1 - q) for q in np.ravel(params.policy).tolist())
        worst = np.sort(sign * returns)[: int(tau * 4000)]
        # A tail's mean has about the variance (Var of the tail + (1 - tau) (its edge - its mean)^2) / (tau n): 5 of it.
        edge = worst[-1]
        spread = np.sqrt((worst.var() + (1 - tau) * (edge - worst.mean()) ** 2) / len(worst))
        assert abs(sign * worst.mean() - float(found["objective"])) < 5 * spread
        for g, q in law.items():  # each frequency within five standard errors
            assert abs((returns.round(3) == g).mean() - q) < 5 * np.sqrt(q * (1 - q) / 4000) + 1e-4, g


def test_the_policy_of_an_endless_grid_is_played_at_any_stock():
    g, mdp = golden("c_g1g_discounted_infinite_horizon"), make("sure_or_gamble")
    config = Config(tau=0.9, nodes="grid", num_stocks=20_003, tie_tolerance=1e-10)
    params = solve(config, mdp, 40)[0]
    spec = stock_dp.wrap(mdp).spec
    at = lambda stocks: stock_dp.act(
        config, spec, params, (jnp.ones((len(stocks), 1)), jnp.array(stocks)), jax.random.key(0)
    )
    firm = {float(c): ["sure", "gamble"].index(a) for c, a in g["first_action_at"].items() if a != "tie"}
    assert at(list(firm)).tolist() == list(firm.values())
    assert at([-50.0, 50.0]).tolist() == [1, 1]  # beyond the ends the mean decides
    begun = stock_dp.begin(config, spec, params, stock_dp.wrap(mdps.env(mdp, 2, 3)).reset(jax.random.key(0)), None)
    close([*begun.obs[1], begun.gamma], [-1.45, -1.45, 0.5])


def test_the_policy_with_a_horizon_is_played_at_the_nearest_node():
    mdp = make("gamble")
    config = Config(tau=0.5, **SMALL)
    params = solve(config, mdp)[0]
    # c0 = -2: after +2 the stock is 0, safe; after -1 it is -3, risky. In state 1 half the time is left.
    obs = jnp.tile(jnp.array([[0.0, 1.0, 0.0, 0.5]]), (4, 1)), jnp.array([0.0, -3.0, 0.4, -2.9])
    assert stock_dp.act(config, None, params, obs, jax.random.key(0)).tolist() == [0, 1, 0, 1]


def test_policy_iteration_of_an_upper_cvar_does_not_wait_for_sweeps():
    # Three steps of nothing, then the choice of `bandit`: two improvements see all of it, 2 and 4 make 8/3.
    rows = [[[(1.0, s + 1, 0.0)]] * 2 for s in range(3)]
    choice = [[(1.0, 4, 2.0)], [(0.75, 4, 0.0), (0.25, 4, 4.0)]]
    with jax.enable_x64(True):
        late = mdps.tabulate("late", [*rows, choice, [[], []]], 1.0, 5, (4,))
    config = dataclasses.replace(Config(objective="upper_cvar", tau=0.5, method="policy"), **SMALL)
    _, found, _ = solve(config, late, 2)
    close([found["objective"], found["dual"]], [8 / 3] * 2)
