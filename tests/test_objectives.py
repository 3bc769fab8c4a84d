"""Objectives of returns: golden searches over the first stock, each claimed fact, and what is refused and why."""

import json
import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks import laws, objectives
from networks.objectives import (
    OBJECTIVES,
    Direct,
    Exponential,
    LowerCVaR,
    MeanCVaR,
    SquaredError,
    Threshold,
    UpperCVaR,
    check,
    expected,
    grid_error,
    outer,
)

golden = lambda name: json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())
close = partial(np.testing.assert_allclose, rtol=0, atol=1e-10)  # float64: small numbers, short sums
array = partial(np.asarray, dtype=np.float64)
every = pytest.mark.parametrize("objective", [cls() for cls in OBJECTIVES.values()], ids=list(OBJECTIVES))
few = settings(max_examples=40, deadline=None)
lower, upper, variance, quantile = map(jax.jit, (laws.cvar, laws.upper_cvar, laws.variance, laws.quantile))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def law(pairs, num=4):
    """Atoms and probabilities of [[atom, probability], ...], padded to `num`."""
    return array([*pairs, *[[0, 0]] * (num - len(pairs))]).T


@jax.jit
def utilities(objective, c, x, p):
    """E f(c + G) for each stock `(M,)` and each law `(L, n)`: `(L, M)`."""
    return jax.vmap(lambda x, p: jax.vmap(lambda c: expected(objective, c, x, p))(c))(x, p)


# --- the search over the first stock ---

TWO_STEPS = golden("c_g1_stock_cvar_two_step")


@pytest.mark.parametrize("gamble", ["gamma1", "gamma_half"])
def test_lower_cvars_of_the_golden_policies_and_the_search_that_finds_the_best(gamble):
    g = TWO_STEPS[gamble]
    x, p = np.stack([law(policy["dist"]) for policy in g["policies"].values()], 1)
    for row in g["rows"]:
        objective = LowerCVaR(row["tau"])
        cvars = dict(zip(g["policies"], lower(x, p, row["tau"]), strict=True))
        best = max(cvars.values())
        close(best, row["optimal_cvar"])
        assert {k for k, v in cvars.items() if v > best - 1e-9} == set(row["optimal_policies_after_plus_minus"])
        # Four deterministic policies are all there are, so their best at each c0 is U(c0).
        c0, h = array(row["dual_curve_c_h"]).T
        ours = outer(objective).value(c0, utilities(objective, c0, x, p).max(0))
        close(ours, h)
        close(ours.max(), row["optimal_cvar"])
        # A grid of steps 3 that misses the best c0 loses no more than the bound.
        assert best - ours[::6].max() <= grid_error(objective, 3.0) + 1e-9


def test_optimistic_cvar_of_the_golden_bandit_needs_a_mixture():
    g = golden("c_g1b_optimistic_cvar_bandit")
    a, b = law(g["A"], 2), law(g["B"], 2)
    number = lambda fraction: float(np.divide(*map(float, (fraction + "/1").split("/")[:2])))
    x = np.concatenate([a[0], b[0]])
    for share, value in g["ocvar_of_mixture_by_prob_of_A"].items():
        w = number(share)
        close(upper(x, np.concatenate([w * a[1], (1 - w) * b[1]]), g["tau"]), value)
    objective = UpperCVaR(g["tau"])
    c0 = array([number(c) for c in g["dual_min_over_c0_of_max_over_pi"]])
    arms = utilities(objective, c0, *np.stack([a, b], 1))
    h = outer(objective).value(c0, arms.max(0))
    close(h, list(g["dual_min_over_c0_of_max_over_pi"].values()))
    assert outer(objective).search == "min"
    best = int(h.argmin())
    close([h[best], c0[best]], [g["optimum"]["value"], g["optimum"]["c0"]])
    close(*arms[:, best])  # where the arms tie, and only a mixture of them is worth h


@few
@given(
    st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=5, max_size=5),
    st.lists(st.integers(0, 4), min_size=12, max_size=12),
    st.sampled_from([1 / 12, 0.3, 0.5, 1.0]),
)
def test_cvars_are_the_best_of_h_over_minus_the_atoms(atoms, indices, tau):
    x, p = array(atoms), np.bincount(indices, minlength=5) / 12
    c0 = -x[p > 0]
    c0 = np.concatenate([c0, np.repeat(c0[:1], 5 - len(c0))])
    h = lambda objective: outer(objective).value(c0, utilities(objective, c0, x[None], p[None])[0])
    low = lower(x, p, tau)
    close(h(LowerCVaR(tau)).max(), low)
    close(h(UpperCVaR(tau)).min(), upper(x, p, tau))
    close(h(MeanCVaR(tau, 0.25)).max(), 0.25 * (x @ p) + 0.75 * low)


def test_f_by_hand():
    x, value = array([-2.0, 0.0, 3.0]), lambda name, **kw: OBJECTIVES[name](**kw).f(x)
    close(value("mean"), x)
    close(value("lower_cvar"), [-2, 0, 0])
    close(value("upper_cvar"), [0, 0, 3])
    close(value("mean_cvar", tau=0.25, weight=0.2), [-6.8, 0, 0.6])  # w_l = .8 / .25 + .2 = 3.4, w_r = .2
    close(value("desired_return"), [-2, 0, -3])
    close(value("squared_error"), [-4, 0, -9])
    close(value("threshold"), [0, 1, 1])
    close(value("exponential", rate=0.5), [-math.e, -1, -math.exp(-1.5)])
    close(OBJECTIVES["homeostatic"]().f(array([[3.0, -4.0], [0.0, 0.0]])), [-5, 0])


def test_the_stock_is_added_to_the_return_and_a_target_is_its_negative():
    x, p = array([[1.0, 4.0, 99.0]]), array([[0.75, 0.25, 0.0]])
    for name, value in dict(desired_return=-1.25, squared_error=-1.75, threshold=0.25).items():
        objective = OBJECTIVES[name](target=2.0)  # |G - 2| is 1 or 2
        search, _, c0 = outer(objective)
        u = utilities(objective, array([c0]), x, p)
        assert (search, c0) == ("fixed", -2)
        close(outer(objective).value(array([c0]), u), [[value]])
    # vectors: c0 = (1, 1), G = (-1, -1) or (2, 3): norms 0 and 5
    x = array([[-1.0, -1.0], [2.0, 3.0]])
    close(expected(OBJECTIVES["homeostatic"](), array([1.0, 1.0]), x, array([0.2, 0.8])), -4)
    assert outer(OBJECTIVES["homeostatic"]()) == ("fixed", 1.0, None)
    assert outer(OBJECTIVES["mean"]()).c0 == outer(Exponential()).c0 == 0


def test_grid_error_by_hand():
    # slopes of h: -1 and 1 / .1 - 1 = 9; -1 and 0; weight .2 and tau .5: w_l - 1 = .8 and w_r - 1 = -.8
    for objective, error in ((LowerCVaR(0.1), 4.5), (UpperCVaR(1.0), 0.5), (MeanCVaR(0.5, 0.2), 0.4)):
        close(grid_error(objective, 1.0), error)
    assert grid_error(Threshold(), 1.0) == 0


def test_parameters_of_an_objective_may_be_swept_by_vmap():
    tau = jnp.array([0.25, 0.5])
    value = jax.vmap(lambda t: expected(MeanCVaR(t), 0.0, array([-1.0, 2.0]), array([0.5, 0.5])))(tau)
    close(value, [-0.75, -0.25])  # w_l 2.5 and 1.5, w_r .5: -w_l / 2 + .5


def test_no_two_objectives_have_one_tree_structure():
    # jit finds programs by it: were two the same, one objective would now and then be answered by the other's program
    structures = [jax.tree.structure(cls()) for cls in OBJECTIVES.values()]
    assert [a == b for a in structures for b in structures] == np.eye(len(structures), dtype=bool).ravel().tolist()


# --- the facts ---

numbers = st.floats(-5, 5, width=32)


@every
@few
@given(st.tuples(numbers, numbers), st.tuples(numbers, numbers), st.floats(0.125, 8))
def test_degrees_and_lipschitz_constants_are_those_of_f(objective, first, second, scale):
    vector = objectives.is_vector(objective)
    x, y = (array(v) if vector else array(v[0]) for v in (first, second))
    f = lambda v: np.asarray(objective.f(v))
    if objective.degree is not None:
        np.testing.assert_allclose(f(scale * x), scale**objective.degree * f(x), rtol=1e-9, atol=1e-12)
    if objective.lipschitz is not None:
        assert abs(f(x) - f(y)) <= objective.lipschitz * np.linalg.norm(x - y) + 1e-9


@every
@few
@given(numbers)
def test_slopes_are_those_of_f_and_only_kinked_ones_have_them(objective, x):
    kinked = objective.name in ("mean", "lower_cvar", "upper_cvar", "mean_cvar", "desired_return")
    assert hasattr(objective, "slopes") == kinked
    if kinked:
        left, right = objective.slopes
        close(objective.f(array(x)), (left if x < 0 else right) * x)


@every
def test_where_no_constant_is_claimed_there_is_none_and_a_claimed_one_is_the_least(objective):
    if objectives.is_vector(objective):
        steepest = abs(objective.f(array([3.0, 4.0])) - objective.f(array([6.0, 8.0]))) / 5
    else:
        ends = array([[-20.0, -19.0], [-1e-9, 0.0], [1.0, 2.0]])  # far out, over the kink, beyond it
        steepest = np.max(np.abs(np.diff(objective.f(ends)))[:, 0] / np.diff(ends)[:, 0])
    assert steepest > 38 if objective.lipschitz is None else abs(steepest - objective.lipschitz) < 1e-6


def test_exponential_utility_is_not_indifferent_to_gamma_as_in_the_golden_choice():
    g = golden("c_g1c_exp_utility_not_gamma_indifferent")
    sure, gamble = law([[g["option_sure"], 1]], 2), law(g["option_gamble"], 2)
    x, p = np.stack([sure, gamble], 1)
    score = lambda scale: utilities(Exponential(), array([g["c0"]]), scale * x, p)[:, 0]
    close(score(1.0), list(g["stage1_greedy_scores"].values()))
    close(score(g["gamma"]), list(g["true_scores_at_t0"].values()))
    assert score(1.0).argmax() == 0 and score(g["gamma"]).argmax() == 1  # later sure, at the start the gamble
    with pytest.raises(ValueError, match="exponential is not indifferent to gamma 0.5.*use gamma 1 and a horizon"):
        check(Exponential(), g["gamma"], 2)
    check(Exponential(), 1.0, 2)


def test_variance_quantile_and_cvar_are_not_indifferent_to_mixtures():
    def alone_and_mixed(k, pairs, other):
        """K of a branch, and of its equal mixture with another branch that is the same for all."""
        return k(*law(pairs)), k(*law([[other, 0.5], *[[x, p / 2] for x, p in pairs]]))

    half = jnp.array([0.5])
    steady = lambda x, p: -variance(x, p)
    # a sure 10, variance 0, against 0 or 2, variance 1; mixed with 0: 25 against .25 4 - .5^2
    close(alone_and_mixed(steady, [[10, 1]], 0), [0, -25])
    close(alone_and_mixed(steady, [[0, 0.5], [2, 0.5]], 0), [-1, -0.75])
    # a sure 1 against 0 or 5; mixed with 9 the lower half is 1 against 0 and 5
    for k, mixed in ((lambda x, p: quantile(x, p, half)[0], 5), (lambda x, p: lower(x, p, 0.5), 2.5)):
        close(alone_and_mixed(k, [[1, 1]], 9), [1, 1])
        close(alone_and_mixed(k, [[0, 0.5], [5, 0.5]], 9), [0, mixed])


# --- at the door ---

ENDLESS = ("mean", "lower_cvar", "upper_cvar", "mean_cvar", "desired_return", "homeostatic")


@every
def test_what_the_theory_covers_passes_and_nothing_else(objective):
    check(objective, 1.0, 5)
    for gamma, horizon, passes in (
        (0.9, 5, objective.name != "exponential"),
        (0.9, None, objective.name in ENDLESS),
        (1.0, None, False),
    ):
        if passes:
            check(objective, gamma, horizon)
        else:
            with pytest.raises(ValueError) as error:
                check(objective, gamma, horizon)
            assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "objective, gamma, horizon, message",
    [
        (Threshold(), 0.9, None, "threshold is not Lipschitz: in a problem without end .* give a horizon"),
        (SquaredError(), 0.9, None, "squared_error is not Lipschitz"),
        (Exponential(), 0.99, None, "exponential is not indifferent to gamma 0.99"),
        (OBJECTIVES["mean"](), 1.0, None, "without end needs gamma < 1, not 1.*give a horizon"),
        (Direct("variance"), 1.0, 5, "variance .* not indifferent to mixtures.*outer search .*squared_error"),
        (Direct("quantile"), 1.0, 5, "quantile .* not indifferent to mixtures.*outer search .*threshold"),
        (Direct("cvar"), 0.9, None, "cvar .* not indifferent to mixtures.*use lower_cvar or upper_cvar.*outer search"),
        (LowerCVaR(0.0), 0.9, None, r"lower_cvar: tau is 0.0; it must be in \(0, 1\]"),
        (MeanCVaR(0.5, 1.5), 0.9, None, r"mean_cvar: weight is 1.5; it must be in \[0, 1\]"),
        (Exponential(-1.0), 1.0, 5, "exponential: rate is -1.0; it must be more than 0"),
        (LowerCVaR(), 0.0, None, r"gamma is 0.0; it must be in \(0, 1\]"),
        (LowerCVaR(), 1.0, 0, "horizon is 0; it must be at least 1"),
    ],
    ids=lambda v: v if isinstance(v, str) and " " not in v else None,
)
def test_refusals_name_the_reason_and_the_way_round(objective, gamma, horizon, message):
    with pytest.raises(ValueError, match=message):
        check(objective, gamma, horizon)


def test_what_is_refused_has_no_search():
    with pytest.raises(TypeError, match="no outer search"):
        outer(Direct("variance"))


def test_the_table_has_a_row_of_cells_for_every_objective():
    rows = {row[0].split(" ")[0]: row for row in objectives.table()}
    assert list(rows) == [*OBJECTIVES, "cvar", "quantile", "variance"]
    assert all(len(row) == len(objectives.HEADER) and all(row) for row in rows.values())
    assert rows["upper_cvar"][1:] == ("(x)_+", "yes", "yes, degree 1", "1", "min, ties randomised", "yes", "yes", "yes")
    assert rows["exponential"][0] == "exponential (rate 1)"
    assert rows["exponential"][2:] == ("yes", "no", "none", "0", "yes", "no", "no")
    assert rows["threshold"][2:] == ("yes", "yes, degree 0", "none", "-target", "yes", "yes", "no")
    assert rows["homeostatic"][5] == "the task's"
    assert rows["variance"][2] == "no" and rows["variance"][6:] == ("no", "no", "no")
