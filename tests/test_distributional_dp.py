"""Distributional dynamic programming: golden fixed points, brute force, a linear programme, and every contraction."""

import dataclasses
import itertools
import json
import math
from collections import defaultdict
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.stats import wasserstein_distance

from algos import distributional_dp as dp
from envs import mdps
from networks import laws

golden = lambda name: json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())
close = partial(np.testing.assert_allclose, rtol=0, atol=1e-9)  # float64, after a few hundred roundings of 1e-15
RETURNS, TWO_ATOMS, ALL_OPTIMAL, ONE_STEP = map(
    golden,
    (
        "c_g2_exact_return_laws",
        "c_g3_two_atom_safe_risky",
        "c_g3b_safe_risky_all_optimal",
        "c_g4_one_step_distributional",
    ),
)
SWEEPS = 150  # gamma^150 of 0.8 is 3e-15
few = settings(max_examples=8, deadline=None)
seeds = st.integers(0, 10**6)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@jax.jit
def solved(config, mdp, num, policy=None):
    """The state and the metrics after `num` sweeps."""
    state = dp.init(config, mdp, None, policy)
    metrics = jax.eval_shape(partial(dp.step, config, mdp), state)[1]
    carry = state, jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), metrics)
    return jax.lax.fori_loop(0, num, lambda _, carry: dp.step(config, mdp, carry[0]), carry)


def named(mdp, **changes):
    """The MDP under a name that all share, and with it programs."""
    return dataclasses.replace(mdp, name="test", **changes)


def mean(eta):
    return (eta.x * eta.p).sum(-1)


def variance(eta):
    return (np.square(eta.x) * eta.p).sum(-1) - mean(eta) ** 2


def part(x, p, low, high):
    """The mean of F^-1 from `low` to `high`, of one law."""
    order = np.argsort(x)
    level = np.concatenate([[0], np.cumsum(p[order])])
    return np.diff(np.clip(level, low, high)) @ x[order] / (high - low)


def make(name, **params):
    return named(mdps.make(name, **params))


def fixed_point(mdp, pi=None, num=SWEEPS, **config):
    """Laws `(S, A, N)` and policy `(S, A)`."""
    params = solved(dp.Config(**config), mdp, num, pi)[0].params
    return jax.tree.map(lambda v: np.asarray(v[0]), params[:2])


# --- golden numbers ---


def test_discounted_coins_double_their_atoms_each_sweep():
    mdp, config = make("bernoulli"), dp.Config(representation="particles", policy="uniform", num_atoms=64)
    uniform = (np.arange(64) + 0.5) / 32  # means of the limit, uniform on [0, 2], over 64 equal parts
    for row in RETURNS["bernoulli_half"]["iterates_from_delta0"]:
        if row["atoms"] > 64:
            continue
        params = solved(config, mdp, row["n"])[0].params
        x, p = (np.asarray(v[0, 0, 0]) for v in params.laws)
        assert (p > 0).sum() == row["atoms"] and not params.inexact.any()
        close(x @ p, row["mean"])
        close(np.square(x) @ p - (x @ p) ** 2, row["var"])
        if row["atoms"] < 64:
            close(wasserstein_distance(x, uniform, p), row["W1_to_uniform02"])


def test_law_of_three_steps_of_the_two_state_chain_is_golden():
    eta, _ = fixed_point(make("two_state"), representation="particles", policy="uniform", num_atoms=8, num=3)
    for s, expected in enumerate(RETURNS["two_state_mrp"]["depth3_law"]):
        close([(x, p) for x, p in zip(eta.x[s, 0], eta.p[s, 0], strict=True) if p > 0], expected)


def test_law_of_fourteen_steps_lies_on_a_fine_grid_and_is_golden():
    # Returns of 14 steps at gamma = 1/2 are multiples of 2^-13, so a grid of that spacing represents them exactly.
    config = dict(representation="categorical", policy="uniform", num_atoms=2**14 + 1, v_min=0.0, v_max=2.0)
    eta, _ = fixed_point(make("two_state"), num=14, **config)
    eta = dp.Laws(eta.x[:, 0], np.where(eta.p[:, 0] > 1e-12, eta.p[:, 0], 0))  # rounding beside an atom
    exact, expected = RETURNS["two_state_mrp"], RETURNS["two_state_mrp"]["truncated"]["per_state"]
    close(mean(eta), [e["mean"] for e in expected])
    close(variance(eta), [e["var"] for e in expected])
    for x, p, e in zip(*eta, expected, strict=True):
        levels = np.cumsum(p) + 1e-12  # a level that is met counts as reached
        close([x[(levels >= float(t)).argmax()] for t in e["quantiles"]], list(e["quantiles"].values()))
        close([part(x, p, 0, float(t)) for t in e["lower_cvar"]], list(e["lower_cvar"].values()))
        close([part(x, p, 1 - float(t), 1) for t in e["upper_cvar"]], list(e["upper_cvar"].values()))
    close(mean(eta), exact["V"], atol=2**-13)  # what follows step 14
    close(variance(eta) + mean(eta) ** 2, exact["second_moment"], atol=2**-11)  # at most 2 max(G) times that


@pytest.mark.parametrize("num", [5, 11])
def test_categorical_fixed_point_of_the_two_state_chain_is_golden(num):
    grid = dict(representation="categorical", policy="uniform", num_atoms=num, v_min=0.0, v_max=2.0)
    eta, _ = fixed_point(make("two_state"), **grid)
    expected = RETURNS["two_state_mrp"]["categorical_dp_fixed_point"][f"K{num}"]
    close(eta.x[0, 0], expected["z"])
    close(eta.p[:, 0], expected["p"])
    close(mean(eta)[:, 0], RETURNS["two_state_mrp"]["V"])
    close(variance(eta)[:, 0], expected["var"])


@pytest.mark.parametrize("num", [4, 10])
def test_quantile_fixed_point_of_the_two_state_chain_is_golden(num):
    eta, _ = fixed_point(make("two_state"), representation="quantile", policy="uniform", num_atoms=num)
    expected = RETURNS["two_state_mrp"]["quantile_dp_fixed_point_midpoints"][f"N{num}"]
    close(eta.x[:, 0], expected["theta"])
    close(mean(eta)[:, 0], expected["mean"])


@pytest.mark.parametrize("one_step", [False, True])
@pytest.mark.parametrize("alpha", ["0.25", "0.5", "0.75"])
def test_two_atom_fixed_points_are_golden_and_have_the_mean_of_the_policy(alpha, one_step):
    config = dict(representation="two_atom", policy="uniform", alpha=float(alpha), one_step=one_step)
    eta, _ = fixed_point(make("three_state"), np.array(TWO_ATOMS["pi"]), **config)
    close(eta.x, TWO_ATOMS["fixed_points"][alpha]["one_step" if one_step else "full"])
    close(mean(eta), TWO_ATOMS["Q"])


def test_true_tails_are_golden_and_wider_than_two_atoms():
    grid = dict(representation="categorical", policy="uniform", num_atoms=4001, v_min=-8.0, v_max=12.0)
    eta, _ = fixed_point(make("three_state"), np.array(TWO_ATOMS["pi"]), num=80, **grid)
    true = np.array(TWO_ATOMS["true_return_avar_left_right_alpha0_25_rounded_law"])
    tails = [
        [(part(*law, 0, 0.25), part(*law, 0.25, 1)) for law in zip(x, p, strict=True)]
        for x, p in zip(*eta, strict=True)
    ]
    close(tails, true, atol=1e-5 + 2e-5)  # theirs is rounded; a grid of 1/200 adds 1/200^2 / 2 to the variance
    two = np.array(TWO_ATOMS["fixed_points"]["0.25"]["full"])
    assert (true[..., 0] < two[..., 0] - 0.2).all() and (true[..., 1] > two[..., 1] + 0.05).all()


@pytest.mark.parametrize("alpha", ["0.25", "0.5"])
@pytest.mark.parametrize("attitude", ["safe", "risky"])
def test_two_steps_safe_or_risky_are_golden(attitude, alpha):
    eta, policy = fixed_point(make("safe_risky"), representation="two_atom", attitude=attitude, alpha=float(alpha))
    expected = TWO_ATOMS["safe_risky_example"][attitude][alpha]
    close(eta.x[1], [expected["s1"]["0"], expected["s1"]["1"]])
    assert policy[1].argmax() == expected["chosen"] == (attitude == "risky")
    close(eta.x[0], [expected["s0"]] * 2)  # one half hides the difference a step upstream, a quarter shows it


@pytest.mark.parametrize("alpha", ["0.25", "0.5"])
@pytest.mark.parametrize("attitude", ["safe", "risky"])
def test_safe_and_risky_fixed_points_are_golden(attitude, alpha):
    config = dict(representation="two_atom", attitude=attitude, alpha=float(alpha))
    eta, policy = fixed_point(make("all_optimal"), **config)
    expected = ALL_OPTIMAL["results"][alpha][attitude]
    assert policy.argmax(-1).tolist() == expected["actions"]
    close((policy[..., None] * eta.x).sum(1), expected["theta"])
    close(mean(eta), np.repeat(np.array(ALL_OPTIMAL["V"])[:, None], 2, 1))


def test_one_step_control_is_golden_sweep_by_sweep_and_keeps_the_means_of_value_iteration():
    config = dict(representation="categorical", num_atoms=21, one_step=True)
    eta, policy = fixed_point(make("three_state"), **config)
    close(eta.x[0, 0], ONE_STEP["z"])
    close(eta.p, ONE_STEP["os_fixed_point_probs"])
    close(mean(eta), ONE_STEP["Qstar"])
    close(np.sqrt(variance(eta)), ONE_STEP["os_std"])
    assert policy.argmax(-1).tolist() == ONE_STEP["greedy"]
    for num, error, variation in ONE_STEP["os_dp_errors_iter_supQ_supTV2"]:
        iterate, _ = fixed_point(make("three_state"), num=num, **config)
        close(np.abs(mean(iterate) - np.array(ONE_STEP["Qstar"])).max(), error)
        close(np.abs(iterate.p - ONE_STEP["os_fixed_point_probs"]).sum(-1).max(), variation)


def test_full_categorical_control_is_golden_and_wider_than_one_step():
    eta, _ = fixed_point(make("three_state"), representation="categorical", num_atoms=21)
    close(mean(eta), ONE_STEP["c51_mean"])
    close(np.sqrt(variance(eta)), ONE_STEP["c51_std"])
    assert (np.sqrt(variance(eta)) > np.array(ONE_STEP["os_std"])).all()


def test_one_step_particles_are_the_randomness_of_the_next_step_alone():
    eta, _ = fixed_point(make("three_state"), representation="particles", num_atoms=3, one_step=True)
    close(np.sqrt(variance(eta)), ONE_STEP["os_true_onestep_std"])


def test_full_law_depends_on_the_tie_and_the_one_step_law_does_not():
    law_of = lambda action, **config: fixed_point(
        make("tie"), np.eye(2)[[action] * 3], representation="particles", policy="uniform", num_atoms=8, **config
    )[0]
    atoms = lambda eta: sorted((x, p) for x, p in zip(eta.x[0, 0], eta.p[0, 0], strict=True) if p > 0)
    expected = ONE_STEP["tie_example"]["full_law_s0"]
    for action in (0, 1):
        close(atoms(law_of(action)), expected[f"tie->a{action}"])
        close(atoms(law_of(action, one_step=True)), [(0, 1)])
    for attitude, spread in (("safe", 0.0), ("risky", 0.9)):
        eta, _ = fixed_point(make("tie"), representation="two_atom", alpha=0.5, attitude=attitude)
        close(eta.x[0, 0], [-spread, spread])


# --- the robust MDP, and brute force over policies ---


def robust(x, p, alpha):
    """The least mean under q <= p / alpha and the greatest under q <= p / (1 - alpha), by linear programmes."""
    solve = lambda sign, w: linprog(sign * x, A_eq=np.ones((1, len(x))), b_eq=[1], bounds=[(0, b / w) for b in p])
    worst, best = solve(1, alpha), solve(-1, 1 - alpha)
    close(alpha * worst.x + (1 - alpha) * best.x, p)  # nature's two answers share out the law
    return worst.fun, -best.fun


@settings(max_examples=5, deadline=None)
@given(seeds, st.sampled_from([0.1, 0.25, 0.5, 0.8]))
def test_two_atom_fixed_points_are_values_of_a_robust_mdp(seed, alpha):
    mdp = make("garnet", seed=seed, states=3, branches=3, reward_atoms=1, gamma=0.8)
    policy = np.random.default_rng(seed).dirichlet(np.ones(2), 3)
    eta, _ = fixed_point(mdp, policy, representation="two_atom", policy="uniform", alpha=alpha)
    successor, reward, probability = (np.asarray(v) for v in (mdp.next_state, mdp.reward, mdp.probability))
    for s, a in itertools.product(range(3), range(2)):
        outcomes = [
            (
                reward[s, a, b] + 0.8 * eta.x[successor[s, a, b], c, i],
                probability[s, a, b] * policy[successor[s, a, b], c] * w,
            )
            for b in range(3)
            for c in range(2)
            for i, w in enumerate((alpha, 1 - alpha))
        ]
        close(eta.x[s, a], robust(*map(np.array, zip(*outcomes, strict=True)), alpha), atol=1e-7)  # the solver's 1e-7


def all_optimal(seed):
    """A random MDP in which the mean return from a state is the same whatever one does."""
    rng = np.random.default_rng(seed)
    mdp = mdps.make("garnet", seed=seed, states=3, branches=3, reward_atoms=1, gamma=0.8)
    p, successor, v = np.asarray(mdp.probability), np.asarray(mdp.next_state), rng.normal(size=3)
    noise = rng.normal(size=p.shape)
    noise -= (p * noise).sum(-1, keepdims=True)
    return named(mdp, reward=jnp.asarray(v[:, None, None] - 0.8 * v[successor] + noise))


@few
@given(st.one_of(st.none(), seeds), st.sampled_from([0.25, 0.5, 0.7]))
def test_safe_and_risky_are_the_best_of_all_policies_in_every_state(seed, alpha):
    mdp = make("all_optimal") if seed is None else all_optimal(seed)
    two = dict(representation="two_atom", alpha=alpha)
    every = []
    for actions in itertools.product(range(2), repeat=3):
        eta, _ = fixed_point(mdp, np.eye(2)[list(actions)], policy="uniform", **two)
        every.append(eta.x[range(3), list(actions)])  # (S, 2)
    for attitude, atom in (("safe", 0), ("risky", 1)):
        eta, policy = fixed_point(mdp, attitude=attitude, **two)
        close((policy * eta.x[..., atom]).sum(-1), np.max(every, 0)[:, atom])


# --- contractions: random laws and policies on random MDPs ---

NUM, PAIRS = 5, 16


def random_laws(config, mdp, rng):
    """2 `PAIRS` times laws of all states and actions, of one representation; some close to others, some tied."""
    shape = (2 * PAIRS, mdp.num_states, mdp.num_actions)
    scale = 10.0 ** rng.integers(-2, 1, (2 * PAIRS, 1, 1, 1))
    if config.representation == "categorical":
        z = np.linspace(config.v_min, config.v_max, NUM)
        return dp.Laws(np.broadcast_to(z, (*shape, NUM)), rng.dirichlet(np.full(NUM, 0.3), shape))
    num = 2 if config.representation == "two_atom" else NUM
    x = np.sort(scale * rng.integers(-4, 5, (*shape, num)) + rng.normal(size=(*shape, num)) * 1e-3, -1)
    equal = [config.alpha, 1 - config.alpha] if num == 2 else np.full(NUM, 1 / NUM)
    if config.representation != "particles":
        return dp.Laws(x, np.broadcast_to(equal, x.shape))
    pad = [(0, 0)] * 3 + [(0, config.num_atoms - num)]  # room for every atom of a sweep
    return dp.Laws(np.pad(x, pad), np.pad(rng.dirichlet(np.ones(num), shape), pad))


@jax.jit
def swept(config, mdp, eta, policy):
    """What one sweep makes of each of many laws."""
    inexact = jnp.zeros(policy.shape, bool) if config.representation == "particles" else None

    def sweep(eta):
        pi = dp.greedy(config, eta) if config.policy == "greedy" else policy
        return dp.backup(config, mdp, eta, pi, inexact, True)[0]

    return jax.vmap(sweep)(eta)


def apart(metric, eta):
    """Largest distance over states and actions between law i and law i + PAIRS, `(PAIRS,)`, in NumPy."""
    (x, y), (p, q) = ((v[:PAIRS], v[PAIRS:]) for v in map(np.asarray, eta))
    between, cdfs = np.diff(x), np.cumsum(p - q, -1)[..., :-1]
    match metric:
        case "cramer":
            far = np.sqrt((np.square(cdfs) * between).sum(-1))
        case "grid_w1":
            far = (np.abs(cdfs) * between).sum(-1)
        case "any_w1":
            each = zip(*(v.reshape(-1, v.shape[-1]) for v in (x, y, p, q)), strict=True)
            far = np.array([wasserstein_distance(*e) for e in each]).reshape(x.shape[:-1])
        case "winf":
            far = np.abs(x - y).max(-1)
        case "w1" | "w2":
            order = int(metric[1])
            far = (p * np.abs(x - y) ** order).sum(-1) ** (1 / order)
    return far.max((1, 2))


CASES = [  # representation; metrics, its own first; config
    ("categorical", ("cramer",), {}),
    ("quantile", ("winf",), {}),
    ("segments", ("w1", "w2", "winf"), {}),
    ("two_atom", ("w1", "w2", "winf"), {}),
    ("particles", ("any_w1",), dict(num_atoms=4 * 2 * NUM)),
    ("categorical", ("grid_w1",), dict(one_step=True, policy="greedy")),
]


@pytest.mark.parametrize("representation, metrics, config", CASES, ids=str)
@few
@given(seed=seeds)
def test_operators_contract_as_theory_says(representation, metrics, config, seed):
    rng = np.random.default_rng(seed)
    mdp = make("garnet", seed=seed, states=3, terminals=1, gamma=float(rng.uniform(0.05, 1)))
    fields = dict(representation=representation, policy="uniform", num_atoms=NUM, v_min=-3.0, v_max=3.0)
    config = dp.Config(**(fields | config))
    before = random_laws(config, mdp, rng)
    after = swept(config, mdp, before, rng.dirichlet(np.ones(2), 3))
    for name in metrics:
        # 1e-7: a root of rounding
        assert (apart(name, after) <= dp.bound(config, mdp.gamma) * apart(name, before) + 1e-7).all(), name
    own = distance(config, *(dp.Laws(*(v[half] for v in before)) for half in (slice(PAIRS), slice(PAIRS, None))))
    close(own.max((1, 2)), apart(metrics[0], before), atol=1e-7)


distance = jax.jit(dp.distance)


@pytest.mark.parametrize("attitude", ["safe", "risky"])
@few
@given(seed=seeds)
def test_safe_and_risky_contract_on_laws_of_the_optimal_means(attitude, seed):
    rng, mdp = np.random.default_rng(seed), all_optimal(seed)
    config = dp.Config(representation="two_atom", attitude=attitude, alpha=float(rng.uniform(0.05, 0.95)))
    v = policy_means(mdp)[:, None]
    spread = rng.exponential(size=(2 * PAIRS, 3, 2))
    x = np.stack([v - (1 - config.alpha) * spread, v + config.alpha * spread], -1)
    before = dp.Laws(x, np.broadcast_to([config.alpha, 1 - config.alpha], x.shape))
    after = swept(config, mdp, before, np.full((3, 2), 0.5))
    assert (apart("w1", after) <= 0.8 * apart("w1", before) + 1e-9).all()


def policy_means(mdp):
    """Mean returns of the uniform policy, by a linear system."""
    p, r = mdps.dense(mdp)
    return np.linalg.solve(np.eye(mdp.num_states) - float(mdp.gamma) * p.mean(1), r.mean(1))


def test_the_full_control_operator_is_no_contraction():
    # State 1's second action has mean -+1e-3 and the first 0: laws 2e-3 apart send state 0 to 0, or to +-0.9.
    config = dp.Config(representation="two_atom", alpha=0.5, tie_tolerance=0.0)
    x = np.zeros((2, 3, 2, 2))
    x[:, 1, 1] = [[-1 - 1e-3, 1 - 1e-3], [-1 + 1e-3, 1 + 1e-3]]
    after = swept(config, make("tie"), dp.Laws(x, np.full_like(x, 0.5)), np.full((3, 2), 0.5))
    close(after.x[:, 0, 0], [[0, 0], [-0.9, 0.9]], atol=1e-3)


# --- particles against the tree of histories ---

STEPS = 3


@pytest.fixture(scope="module")
def garnet():
    """Rewards are halves, so that different histories have equal returns."""

    def build(seed, gamma):
        mdp = mdps.make("garnet", seed=seed, states=3, reward_atoms=1, terminals=1, gamma=gamma, horizon=STEPS)
        return named(mdp, reward=jnp.round(2 * mdp.reward) / 2)

    return build


def enumerated(mdp, policy):
    """{(h steps to go, s, a): {return: probability}} by the whole tree. Args: policy `(T, S, A)`, slot h - 1."""
    tables = [np.asarray(v) for v in (mdp.next_state, mdp.reward, mdp.probability)]
    gamma, terminal = float(mdp.gamma), np.asarray(mdp.terminal)

    def of_state(h, s):
        if h == 0 or terminal[s]:
            return {0.0: 1.0}
        total = defaultdict(float)
        for a, chance in enumerate(policy[h - 1, s]):
            for x, p in of_action(h, s, a).items():
                total[x] += chance * p
        return total

    def of_action(h, s, a):
        total = defaultdict(float)
        for to, r, p in zip(*(t[s, a] for t in tables), strict=True):
            for x, q in of_state(h - 1, to).items():
                total[round(r + gamma * x, 9)] += p * q
        return {x: p for x, p in total.items() if p > 0}

    pairs = itertools.product(range(1, mdp.horizon + 1), range(mdp.num_states), range(mdp.num_actions))
    return {(h, s, a): of_action(h, s, a) for h, s, a in pairs}


tasks = seeds, st.sampled_from([0.5, 0.9, 1.0])


@pytest.mark.parametrize("policy", ["uniform", "greedy"])
@few
@given(*tasks)
def test_particles_are_the_laws_of_all_histories(garnet, policy, seed, gamma):
    mdp, rng = garnet(seed, gamma), np.random.default_rng(seed)
    given_policy = rng.dirichlet(np.full(2, 0.5), (STEPS, 3)).round(1)  # some probabilities are 0
    config = dp.Config(representation="particles", policy=policy, num_atoms=64)
    params = solved(config, mdp, STEPS, given_policy)[0].params
    assert not params.inexact.any()
    tree = enumerated(mdp, np.asarray(params.policy))
    x, p = (np.asarray(v) for v in params.laws)
    for (h, s, a), law in tree.items():
        real = p[h - 1, s, a] > 0
        assert real.sum() == len(law)  # equal returns are one atom
        close(x[h - 1, s, a][real], sorted(law), atol=1e-8)  # the tree rounds to 1e-9
        close(p[h - 1, s, a][real], [law[r] for r in sorted(law)])
    if policy == "greedy":
        q = np.array([sum(r * m for r, m in law.items()) for law in tree.values()]).reshape(STEPS, 3, 2)
        assert (q.max(-1) - (np.asarray(params.policy) * q).sum(-1) <= 1e-4 + 1e-8).all()  # tie_tolerance


@few
@given(*tasks)
def test_too_many_particles_are_said_to_be_inexact_and_keep_the_mean(garnet, seed, gamma):
    mdp, room = garnet(seed, gamma), 3
    state, metrics = solved(dp.Config(representation="particles", policy="uniform", num_atoms=room), mdp, STEPS)
    tree, inexact = enumerated(mdp, np.asarray(state.params.policy)), np.asarray(state.params.inexact)
    assert metrics["inexact"] == inexact.sum()
    follows = lambda s, a: {int(to) for to in mdp.next_state[s, a] if not mdp.terminal[to]}
    for (h, s, a), law in tree.items():
        x, p = (np.asarray(v[h - 1, s, a]) for v in state.params.laws)
        made_of = h > 1 and inexact[h - 2][list(follows(s, a))].any()
        assert made_of <= inexact[h - 1, s, a] and (len(law) > room) <= inexact[h - 1, s, a]
        close(x @ p, sum(r * m for r, m in law.items()), atol=1e-8)
        if not inexact[h - 1, s, a]:
            close(x[p > 0], sorted(law), atol=1e-8)


def test_a_law_of_few_atoms_made_of_an_inexact_one_is_inexact():
    # room for one atom: of state 1 action 0 has one, action 1 has -1 and 1; state 0 leads to state 1 alone
    config = dp.Config(representation="particles", policy="uniform", num_atoms=1)
    inexact = solved(config, make("tie"), 3, np.full((3, 2), 0.5))[0].params.inexact[0]
    assert inexact.tolist() == [[True, True], [False, True], [False, False]]
    kept = solved(config, make("tie"), 3, np.eye(2)[[0, 0, 0]])[0].params.inexact[0]  # a policy that never takes it
    assert kept.tolist() == [[False, False], [False, True], [False, False]]


# --- a sweep ---


@settings(max_examples=25, deadline=None)
@given(
    seeds,
    st.one_of(st.sampled_from([0.0, 1e-9, 0.5, 1.0]), st.floats(0, 1)),
    st.sampled_from([(-1.0, 1.0), (-50.0, 30.0), (0.0, 2.0)]),
)
def test_the_categorical_sweep_is_the_projection_of_the_law_of_the_next_return(seed, gamma, ends):
    rng, num = np.random.default_rng(seed), 7
    p, successor = rng.dirichlet(np.full(num, 0.3), 4), rng.integers(0, 4, (6, 3))
    reward = rng.choice([0.0, 1.0, -2.0, *rng.normal(size=3)], (6, 3))  # some atoms on grid points
    probability, ended = rng.dirichlet(np.ones(3), 6), rng.random(4) < 0.3
    z = np.linspace(*ends, num)
    ours, theirs = both(p, z, successor, reward, probability, gamma, ended)
    close(ours, theirs)


@jax.jit
def both(p, z, successor, reward, probability, gamma, ended):
    discount = jnp.where(ended[successor], 0, gamma)
    x, mass = dp.bellman(z.reshape(1, 1, -1), p[successor], reward, probability, discount)
    ours = dp.categorical_bellman(p, z, successor, reward, probability, gamma, ended)
    return ours, laws.categorical(x, mass, z)


def test_law_of_reward_and_discounted_return_by_hand():
    # branch 0, probability 1/4: 1 + 0.5 {2: 1/2, 4: 1/2}; branch 1, which ends: 3 whatever follows
    atoms = np.array([[[2.0, 4.0], [7.0, 8.0]]])
    x, p = dp.bellman(atoms, np.full((1, 1, 2), 0.5), *np.array([[[1.0, 3.0]], [[0.25, 0.75]], [[0.5, 0.0]]]))
    assert x.tolist() == [[2, 3, 3, 3]] and p.tolist() == [[0.125, 0.125, 0.375, 0.375]]


def test_particles_add_up_equal_atoms_and_beyond_their_number_are_segment_means():
    x, p = np.array([3.0, 1.0, 3.0, 9.0, 1.0 + 1e-15]), np.array([0.25, 0.125, 0.25, 0.0, 0.375])
    add_up = jax.jit(dp.particles, static_argnums=2)
    atoms, masses, exact = add_up(x, p, 3)
    close(atoms[:2], [1, 3])
    assert masses.tolist() == [0.5, 0.5, 0] and exact
    atoms, masses, exact = add_up(x, p, 1)
    close(atoms, [2])
    assert masses.tolist() == [1] and not exact


def test_ties_go_by_preference_within_the_tolerance():
    q, preference = jnp.array([[1.0, 0.95, 0.5], [1.0, 0.8, 1.0]]), jnp.array([[0.0, 3.0, 9.0], [0.0, 9.0, 0.0]])
    assert dp.choose(q, preference, 0.1).tolist() == [1, 0]  # .95 is within .1 of 1, .8 is not; first of equals
    assert dp.choose(q, preference, 0.0).tolist() == [0, 0]


REPORTED = [  # builder; config; bound
    ("three_state", dict(representation="categorical", num_atoms=21), math.sqrt(0.8)),
    ("three_state", dict(representation="categorical", num_atoms=21, one_step=True), 0.8),
    ("three_state", dict(representation="two_atom", policy="uniform"), 0.8),
    ("two_state", dict(representation="quantile", policy="uniform", num_atoms=4), 0.5),
    ("two_state", dict(representation="particles", policy="uniform", num_atoms=8), 0.5),
]


@pytest.mark.parametrize("name, config, bound", REPORTED, ids=str)
def test_the_contraction_of_a_sweep_is_reported_and_within_its_bound_where_no_action_changed(name, config, bound):
    mdp, config = make(name), dp.Config(**config)
    pi = None if config.policy == "greedy" else np.full((mdp.num_states, mdp.num_actions), 1 / mdp.num_actions)
    before, checked = solved(config, mdp, 1, pi), 0
    for num in range(2, 16):
        state, metrics = solved(config, mdp, num, pi)
        close(metrics["residual"], distance(config, state.params.laws, before[0].params.laws).max())
        close(metrics["contraction"], metrics["residual"] / before[1]["residual"])
        close(metrics["bound"], bound)
        if metrics["policy_changes"] == metrics.get("inexact", 0) == 0:
            assert metrics["contraction"] <= bound + 1e-9
            checked += 1
        before = state, metrics
    # three_state's two actions change by the first sweep and never again; the chain's law of 3 steps has 4 atoms
    assert checked == dict(categorical=13, two_atom=14, quantile=14, particles=3)[config.representation]


def test_a_horizon_is_solved_in_as_many_sweeps_slot_by_slot():
    mdp = make("garnet", states=4, horizon=5, gamma=0.9)
    p, r = mdps.dense(mdp)
    config = dp.Config(representation="segments", num_atoms=3)
    state, q = solved(config, mdp, 5)[0], []
    for _ in range(5):
        q.append(r + 0.9 * p @ (q[-1].max(1) if q else np.zeros(4)))
    close(mean(state.params.laws), q)
    short = solved(config, mdp, 3)[0].params.laws
    close(short.x[:3], state.params.laws.x[:3])  # after three sweeps the laws of up to three steps to go
    assert np.abs(short.x[3] - state.params.laws.x[3]).max() > 0.01
    metrics = solved(config, mdp, 7)[1]  # nothing moves any more, and rounding is not compared with rounding
    assert metrics["residual"] < 1e-15 and metrics["contraction"] == metrics["policy_changes"] == 0


@pytest.mark.parametrize("horizon, policy", [(0, "uniform"), (3, "greedy")])
def test_evaluation_is_the_exact_mean_of_the_policy_and_the_tails_of_its_law(horizon, policy):
    mdp = make("garnet", states=4, gamma=0.9, horizon=horizon, terminals=1)
    mdp = named(mdp, start=jnp.array([0.5, 0.25, 0.25, 0.0]))
    config = dp.Config(representation="quantile", policy=policy, num_atoms=9, alpha=0.4)
    params = solved(config, mdp, 300)[0].params
    found = jax.jit(dp.evaluate)(config, mdp, params)
    (p, r), pi = mdps.dense(mdp), np.asarray(params.policy)
    if horizon:
        v = np.zeros(4)
        for now in pi:
            v = (now * (r + 0.9 * p @ v)).sum(1)
    else:
        of = lambda m: np.einsum("sa,sa...->s...", pi[0], m)
        v = np.linalg.solve(np.eye(4) - 0.9 * of(p), of(r))
    close(found["return"], v @ [0.5, 0.25, 0.25, 0.0])
    x, eta = np.asarray(params.laws.x[-1]), pi[-1][..., None] * np.array([0.5, 0.25, 0.25, 0.0])[:, None, None] / 9
    x, eta = x.reshape(-1), np.broadcast_to(eta, x.shape).reshape(-1)
    close(found["law_mean"], eta @ x)
    close(found["law_std"], np.sqrt(eta @ np.square(x) - (eta @ x) ** 2))
    close(found["law_worst"], part(x, eta, 0, 0.4))
    close(found["law_best"], part(x, eta, 0.4, 1))
    assert abs(found["law_mean"] - found["return"]) > 1e-3  # quantiles do not keep the mean


def test_actions_are_those_of_the_state_and_of_the_steps_that_are_left():
    best = np.random.default_rng(0).integers(0, 3, (4, 5))  # (T, S), slot h - 1 of h steps to go
    act = jax.jit(lambda policy, obs: dp.act(None, None, dp.Params(None, policy, None), obs, jax.random.key(0)))
    state, t = (v.reshape(-1) for v in np.meshgrid(range(5), range(4)))
    obs = np.concatenate([np.eye(5)[state], ((4 - t) / 4)[:, None]], -1).astype(np.float32)
    assert (act(np.eye(3)[best], obs) == best[4 - t - 1, state]).all()
    assert (act(np.eye(3)[best[:1]], obs[:, :5]) == best[0, state]).all()  # endless
    drawn = np.asarray(act(np.array([[[0.2, 0.0, 0.8]]]), np.ones((4000, 1), np.float32)))
    close(np.bincount(drawn, minlength=3) / 4000, [0.2, 0, 0.8], atol=0.025)  # four standard errors of 4,000 draws


# --- bad input ---

REFUSED = [
    (dict(representation="c51"), "representation 'c51' must be one of categorical, quantile"),
    (dict(policy="best"), "policy 'best' must be one of uniform, greedy"),
    (dict(attitude="bold"), "attitude 'bold' must be one of neutral, safe, risky"),
    (dict(attitude="safe"), "it needs representation two_atom and policy greedy, not segments and greedy"),
    (dict(attitude="risky", representation="two_atom", policy="uniform"), "not two_atom and uniform"),
    (dict(representation="categorical", num_atoms=1), "num_atoms 1 must be at least 2"),
    (dict(representation="categorical", v_min=1.0, v_max=1.0), "v_min 1 must be less than v_max 1"),
    (dict(representation="categorical"), r"must hold all returns of slippery, -31 to 0, .*set them to -31 and 0"),
]


@pytest.mark.parametrize("config, message", REFUSED, ids=str)
def test_settings_that_do_not_go_together_are_refused_in_one_line(config, message):
    with pytest.raises(ValueError, match=message) as error:
        dp.check(dp.Config(**config), mdps.make("slippery"))
    assert "\n" not in str(error.value)


def test_a_vector_of_rewards_is_refused():
    with pytest.raises(ValueError, match="rewards are vectors of 2 .*use --algo stock_dp"):
        dp.check(dp.Config(), mdps.make("two_stocks"))


def test_settings_that_fit_are_not_refused():
    dp.check(dp.EXAMPLE.config, mdps.make(dp.EXAMPLE.source))
    dp.check(dp.Config(representation="categorical", v_min=-31.0, v_max=0.0), mdps.make("slippery"))
    # returns come as near to 2 as one likes
    dp.check(dp.Config(representation="categorical", v_min=0.0, v_max=2.0), mdps.make("two_state"))
    with pytest.raises(ValueError, match="0 to 2"):
        dp.check(dp.Config(representation="categorical", v_min=0.0, v_max=1.9), mdps.make("two_state"))
