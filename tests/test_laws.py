"""Laws of returns: golden numbers, cases by hand, and what each projection keeps and contracts, in float64."""

import json
import math
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.stats import energy_distance

from networks import laws as eager

golden = lambda name: json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())
close = partial(np.testing.assert_allclose, rtol=0, atol=1e-10)  # float64: the numbers are below 10, the sums short
array = partial(np.asarray, dtype=np.float64)
RETURNS, TWO_ATOMS, ONE_STEP = map(
    golden, ("c_g2_exact_return_laws", "c_g3_two_atom_safe_risky", "c_g4_one_step_distributional")
)
laws = SimpleNamespace(  # one program a shape, where each operation alone would be compiled
    **{f.__name__: jax.jit(f) for f in (eager.mean, eager.variance, eager.quantile, eager.two_hot)},
    **{f.__name__: jax.jit(f) for f in (eager.categorical, eager.segment_means)},
    wasserstein=jax.jit(eager.wasserstein, static_argnames="order"),
    quantile_midpoints=jax.jit(eager.quantile_midpoints, static_argnums=2),
)
few = settings(max_examples=30, deadline=None)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


# --- golden numbers ---


def after(deeper):
    """One Bellman step of the golden chain, gamma = 1/2, from a law of each state, equal atoms merged."""
    g = RETURNS["two_state_mrp"]
    new = []
    for state, reward in enumerate(g["r_of_state"]):
        atoms = np.concatenate([reward + g["gamma"] * x for x, _ in deeper])
        masses = np.concatenate([g["P"][state][s] * p for s, (_, p) in enumerate(deeper)])
        atoms, where = np.unique(atoms, return_inverse=True)
        new.append((atoms, np.bincount(where, masses)))
    return new


def test_returns_of_the_golden_chain_have_its_moments_quantiles_and_tails():
    chain = [(np.zeros(1), np.ones(1))] * 2
    for _ in range(RETURNS["two_state_mrp"]["truncated"]["depth"]):
        chain = after(chain)
    shared = np.union1d(chain[0][0], chain[1][0])  # both states on one array of atoms, the other's with probability 0
    p = np.zeros((2, len(shared)))
    for i, (atoms, masses) in enumerate(chain):
        p[i, np.searchsorted(shared, atoms)] = masses
    expected = RETURNS["two_state_mrp"]["truncated"]["per_state"]
    taus = [float(tau) for tau in expected[0]["lower_cvar"]]
    levels = array([float(t) for t in expected[0]["quantiles"]])

    @jax.jit
    def ours(x, p):
        tails = [jnp.stack([f(x, p, tau) for tau in taus], -1) for f in (eager.cvar, eager.upper_cvar)]
        return eager.mean(x, p), eager.variance(x, p), eager.quantile(x, p, levels), *tails

    for got, name in zip(ours(shared, p), ("mean", "var", "quantiles", "lower_cvar", "upper_cvar"), strict=True):
        close(got, [list(e[name].values()) if isinstance(e[name], dict) else e[name] for e in expected])


def test_discounted_coins_approach_the_uniform_law_by_half_a_step():
    uniform = (np.arange(64) + 0.5) / 32  # its means over 64 equal parts of [0, 2]
    x = np.zeros(1)
    for row in RETURNS["bernoulli_half"]["iterates_from_delta0"][:5]:
        atoms, p = padded(x, np.full(len(x), 1 / len(x)), 16)
        close(laws.wasserstein(atoms, p, uniform, np.full(64, 1 / 64)), row["W1_to_uniform02"])
        close(laws.variance(atoms, p), row["var"])
        x = np.concatenate([x / 2, 1 + x / 2])


def padded(x, p, num):
    """The same law on `num` atoms: one shape, one program."""
    return array([*x, *[9.0] * (num - len(x))]), array([*p, *[0.0] * (num - len(p))])


@pytest.mark.parametrize("name", ["K5", "K11"])
def test_golden_fixed_point_of_categorical_evaluation_stays(name):
    g, fixed = RETURNS["two_state_mrp"], RETURNS["two_state_mrp"]["categorical_dp_fixed_point"][name]
    z, p = array(fixed["z"]), array(fixed["p"])
    x = array(g["r_of_state"])[:, None] + g["gamma"] * z[None]
    close(laws.categorical(x, array(g["P"]) @ p, z), p)
    close(laws.mean(z, p), fixed["mean"])
    close(laws.variance(z, p), fixed["var"])


@pytest.mark.parametrize("num", [4, 10])  # in N10 a cumulated probability meets a midpoint
def test_golden_fixed_point_of_quantile_evaluation_stays(num):
    g = RETURNS["two_state_mrp"]
    theta = array(g["quantile_dp_fixed_point_midpoints"][f"N{num}"]["theta"])
    x = array(g["r_of_state"])[:, None] + g["gamma"] * theta.reshape(1, -1)
    p = np.repeat(array(g["P"]) / num, num, axis=1)
    close(laws.quantile_midpoints(x, p, num), theta)


@pytest.mark.parametrize("alpha", ["0.25", "0.5", "0.75"])
def test_golden_fixed_point_of_two_atom_evaluation_stays(alpha):
    g, w = TWO_ATOMS, array([float(alpha), 1 - float(alpha)])
    theta = array(g["fixed_points"][alpha]["full"])  # (S, A, 2)
    p = np.einsum("sat,tb,i->satbi", g["P"], g["pi"], w).reshape(3, 2, -1)
    x = array(g["R"])[:, :, None] + g["gamma"] * theta.reshape(1, 1, -1)
    x = np.broadcast_to(x, p.shape)
    close(laws.segment_means(x, p, w), theta)
    close(theta @ w, g["Q"])


def test_golden_segment_means():
    for case in TWO_ATOMS["projection_examples"]:
        w = array([case["alpha"], 1 - case["alpha"]])
        close(laws.segment_means(*padded(case["vals"], case["probs"], 5), w), case["out"])
    case = TWO_ATOMS["n_atom_avar"]
    x, p = padded(case["atoms"], case["probs"], 5)
    close(laws.segment_means(x, p, np.full(4, 1 / 4)), case["N4"])
    close(laws.segment_means(x, p, np.full(2, 1 / 2)), case["N2"])
    # four atoms of 0.2 and a certain 4 of 0.2: the first segment holds 0.2 of 0 and 0.05 of 1
    case = TWO_ATOMS["sad_mixture_update"]
    m = case["mixture_ratio"]
    x = array([*case["current"], case["onestep_target"]])
    close(laws.segment_means(x, array([(1 - m) / 4] * 4 + [m]), np.full(4, 1 / 4)), case["new"])


def test_golden_two_hots():
    case = ONE_STEP["sample_targets_twohot"]
    target = array([row["target"] for row in case["rows"]])
    close(laws.two_hot(target, array(case["support"])), [row["twohot"] for row in case["rows"]])
    v = array(ONE_STEP["Qstar"]).max(-1)
    targets = array(ONE_STEP["R"])[:, :, None] + ONE_STEP["gamma"] * v[None, None]
    p = laws.categorical(targets, array(ONE_STEP["P"]), array(ONE_STEP["z"]))
    close(p, ONE_STEP["os_fixed_point_probs"])


def test_golden_categorical_projections():
    for case in golden("c_g5_scalar_losses")["c51_projection"]:
        close(laws.categorical(*map(array, (case["atoms"], case["probs"], case["z"]))), case["proj"])


def test_categorical_with_shared_atoms_is_the_projection_of_cqn():
    for case in golden("cqn_c51_projection")["cases"]:
        z = jnp.linspace(case["v_min"], case["v_max"], case["atoms"])
        p = array(case["next_probs"])  # (B, L, D, K), atoms (B, 1, 1, K)
        x = array(case["reward"]) + array(case["discount"]) * z[None]
        x = x.reshape(len(x), *[1] * (p.ndim - 2), -1)
        theirs = array(case["projected"])
        np.testing.assert_allclose(laws.categorical(x, p, z), theirs, rtol=0, atol=1e-6)  # theirs are float32


# --- by hand ---

X, P = array([3.0, -1.0, 7.0, 0.0]), array([0.2, 0.3, 0.0, 0.5])  # -1: .3, 0: .5, 3: .2; 7 is padding


Y, Q = array([0.0, 1.0]), array([0.4, 0.6])


@jax.jit
def everything(x, p, y, q):
    z, t, at = jnp.linspace(-2, 2, 5), [0.0, 0.1, 0.3, 0.31, 0.8, 0.81, 1.0], [-1.1, -1.0, 0.0, 2.9, 3.0]
    dtype = lambda v: jnp.asarray(v, x.dtype)
    return dict(
        distances(x, p, y, q),
        mean=eager.mean(x, p),
        variance=eager.variance(x, p),
        cdf=eager.cdf(x, p, dtype(at)),
        quantile=eager.quantile(x, p, dtype(t)),
        cvar=eager.cvar(x, p, 0.4),
        upper_cvar=eager.upper_cvar(x, p, 0.6),
        categorical=eager.categorical(x, p, dtype(z)),
        midpoints=eager.quantile_midpoints(x, p, 2),
        segments=eager.segment_means(x, p, dtype([0.3, 0.6, 0.1])),
    )


@jax.jit
def distances(x, p, y, q):
    w = {f"w{order}": eager.wasserstein(x, p, y, q, order) for order in (1, 2, math.inf)}
    return dict(w, cramer=eager.cramer(x, p, y, q))


BY_HAND = dict(
    mean=0.3,  # -.3 + .6
    variance=2.01,  # .3 + 1.8 - .09
    cdf=[0, 0.3, 0.8, 0.8, 1],
    quantile=[-1, -1, -1, 0, 0, 3, 3],
    cvar=-0.75,  # (-.3 + .1 0) / .4
    upper_cvar=1,  # (.6 + .4 0) / .6
    categorical=[0, 0.3, 0.5, 0, 0.2],  # 3 to the end of the grid, 2
    midpoints=[-1, 0],  # at .25 and .75
    segments=[-1, 0.5, 3],  # .3 at -1; .5 at 0 and .1 at 3; .1 at 3
    # F^-1 - G^-1: -1 on (0, .3], 0 on (.3, .4], -1 on (.4, .8], 2 on (.8, 1]
    w1=1.1,  # .3 + .4 + .4
    w2=math.sqrt(1.5),  # .3 + .4 + .2 4
    winf=2,
    # F - G: .3 on [-1, 0), .4 on [0, 1), -.2 on [1, 3)
    cramer=math.sqrt(0.33),  # .09 + .16 + 2 .04
)


@pytest.mark.parametrize("pad", [7.0, -50.0, 0.5, -math.inf, math.inf])
def test_a_law_by_hand_whatever_its_padding_holds(pad):
    x = np.where(P > 0, X, pad)
    for name, got in everything(x, P, Y, Q).items():
        close(got, BY_HAND[name], err_msg=name)


def test_categorical_and_two_hot_by_hand_on_an_uneven_grid():
    z = array([-1.0, 0.0, 4.0])
    close(laws.two_hot(array([-2.0, -0.25, 1.0, 4.0, 9.0]), z)[:3], [[1, 0, 0], [0.25, 0.75, 0], [0, 0.75, 0.25]])
    close(laws.two_hot(array(9.0), z), [0, 0, 1])
    close(laws.categorical(X, P, z), [0.3, 0.55, 0.15])  # 3 is a quarter of 0, three quarters of 4


def test_midpoints_do_not_keep_the_mean_nor_contract_in_w1():
    x = array([0.0, 1.0])
    close(laws.quantile_midpoints(x, array([0.9, 0.1]), 2), [0, 0])  # mean .1 becomes 0
    # medians of two laws 0.02 apart are 1 apart
    p, q = array([0.51, 0.49]), array([0.49, 0.51])
    close(laws.wasserstein(x, p, x, q), 0.02)
    close(laws.quantile_midpoints(x, q, 1) - laws.quantile_midpoints(x, p, 1), [1])


def test_a_law_of_padding_is_a_certain_0():
    got = everything(X, P * 0, Y, array([1.0, 0.0]))
    assert got["mean"] == got["cvar"] == got["w1"] == 0 and got["segments"].tolist() == [0, 0, 0]


def test_float32_stays_and_a_probability_that_is_met_counts_as_reached():
    with jax.enable_x64(False):
        for name, got in everything(*map(np.float32, (X, P, Y, Q))).items():
            assert got.dtype == jnp.float32
            close(got, BY_HAND[name], atol=2e-6)
        x, p = np.arange(10, dtype=np.float32), np.full(10, 0.1, np.float32)
        tenths = np.arange(1, 11, dtype=np.float32) / 10  # cumulated in float32, .1 misses .3 and others by an ulp
        assert laws.quantile(x, p, tenths).tolist() == list(range(10))


def test_leading_axes_and_shared_atoms_are_those_of_each_law_alone():
    p = np.stack([P, P[::-1], np.eye(4)[0]]).reshape(3, 1, 4)

    @jax.jit
    def all_of(x, p):
        numbers = array([0.2, 0.9])
        return [
            eager.cvar(x, p, 0.4)[..., None],
            eager.variance(x, p)[..., None],
            eager.quantile(x, p, numbers),
            eager.cdf(x, p, numbers),
            eager.segment_means(x, p, array([0.3, 0.7])),
            eager.categorical(x, p, array([-1.0, 1.0, 3.0])),
        ]

    for i in range(3):
        for ours, alone in zip(all_of(X, p), all_of(X, p[i, 0]), strict=True):
            close(ours[i, 0], alone)


# --- laws: of 12 equal samples on 5 atoms of steps of 1/4, so that a sorted list is the oracle ---

TWELVE, Z, SKEW, TAUS = 12, np.linspace(-3, 3, 5), array([0.3, 0.7]), (1 / 12, 0.3, 0.5, 11 / 12)
samples = st.tuples(
    st.lists(st.integers(-16, 16).map(lambda i: i / 4), min_size=5, max_size=5),
    st.lists(st.integers(0, 4), min_size=TWELVE, max_size=TWELVE),
)


def law(drawn):
    """Atoms, some of them padding, and probabilities; the sorted samples."""
    atoms, indices = drawn
    p = np.bincount(indices, minlength=5) / TWELVE
    return array(atoms), p, np.sort([atoms[i] for i in indices])


@jax.jit
def described(x, p):
    fourths, num = jnp.full(4, 1 / 4), 8
    return dict(
        quantiles=eager.quantile(x, p, jnp.arange(1, 25) / 24),
        cvars=jnp.stack([eager.cvar(x, p, tau) for tau in TAUS]),
        uppers=jnp.stack([eager.upper_cvar(x, p, tau) for tau in TAUS]),
        mean=eager.mean(x, p),
        categorical=(jnp.asarray(Z), eager.categorical(x, p, Z)),
        midpoints=(eager.quantile_midpoints(x, p, num), jnp.full(num, 1 / num)),
        fourths=(eager.segment_means(x, p, fourths), fourths),
        skewed=(eager.segment_means(x, p, SKEW), jnp.asarray(SKEW)),
    )


@jax.jit
def distances_after(x, p, y, q):
    """Those in which each projection is not to move two laws apart."""
    ours, theirs = described(x, p), described(y, q)
    apart = lambda name, order: eager.wasserstein(*ours[name], *theirs[name], order)
    segments = {f"w{order}": [apart(n, order) for n in ("fourths", "skewed")] for order in (1, 2, math.inf)}
    cramer = eager.cramer(*ours["categorical"], *theirs["categorical"])
    return dict(cramer=[cramer], midpoints=apart("midpoints", math.inf), **segments)


def tail(ordered, tau):
    """The mean of the least 12 tau samples, the last of them in part."""
    share = np.clip(TWELVE * tau - np.arange(TWELVE), 0, 1)
    return share @ ordered / (TWELVE * tau)


@few
@given(samples)
def test_quantiles_and_tails_are_those_of_the_sorted_samples(drawn):
    x, p, ordered = law(drawn)
    ours = described(x, p)
    index = [math.ceil(Fraction(i, 24) * TWELVE) - 1 for i in range(1, 25)]
    close(ours["quantiles"], ordered[index])
    close(ours["cvars"], [tail(ordered, tau) for tau in TAUS])
    close(ours["uppers"], [-tail(-ordered[::-1], tau) for tau in TAUS])
    close(ours["mean"], ordered.mean())


@few
@given(samples, samples)
def test_distances_are_those_of_the_sorted_samples(first, second):
    (x, p, xs), (y, q, ys) = law(first), law(second)
    ours, gap = distances(x, p, y, q), np.abs(xs - ys)
    close(ours["w1"], gap.mean())
    close(ours["w2"], np.sqrt(np.square(gap).mean()), atol=1e-7)  # a root of rounding
    close(ours["winf"], gap.max())
    close(ours["cramer"], energy_distance(xs, ys) / math.sqrt(2), atol=1e-7)


@few
@given(samples, samples, samples)
def test_distances_are_metrics_of_laws(first, second, third):
    a, b, c = (law(drawn)[:2] for drawn in (first, second, third))
    ab, bc, ac, ba = distances(*a, *b), distances(*b, *c), distances(*a, *c), distances(*b, *a)
    same = distances(*a, a[0][::-1], a[1][::-1])
    for name in ab:
        assert ac[name] <= ab[name] + bc[name] + 1e-7
        close(ab[name], ba[name], atol=1e-7)
        close(same[name], 0, atol=1e-7)
    differ = not np.array_equal(law(first)[2], law(second)[2])
    assert all((d > 1e-3) == differ for d in ab.values())


@few
@given(samples)
def test_projections_keep_mass_and_those_that_say_so_the_mean(drawn):
    x, p, ordered = law(drawn)
    ours = described(x, p)
    z, probabilities = ours["categorical"]
    close(probabilities.sum(), 1)
    assert (probabilities >= 0).all()
    close(z @ probabilities, np.clip(ordered, -3, 3).mean())  # inside the grid the mean itself
    for name in ("fourths", "skewed"):
        atoms, weights = ours[name]
        close(atoms @ weights, ordered.mean())
        assert (np.diff(atoms) >= -1e-12).all()
    assert np.isin(ours["midpoints"][0], ordered).all()


@few
@given(samples, samples)
def test_projections_move_no_two_laws_apart(first, second):
    a, b = law(first)[:2], law(second)[:2]
    far, near = distances(*a, *b), distances_after(*a, *b)
    assert near.pop("midpoints") <= far["winf"] + 1e-9
    for name, each in near.items():
        assert max(each) <= far[name] + 1e-7  # of w2 and cramer, a root of rounding


def test_two_atoms_are_the_values_of_a_robust_mdp():
    rng = np.random.default_rng(0)
    for alpha in (0.25, 0.5, 0.75) * 3:
        x, p = rng.normal(size=6), rng.dirichlet(np.ones(6))
        solve = lambda sign, w, x=x, p=p: linprog(
            sign * x, A_eq=np.ones((1, 6)), b_eq=[1], bounds=[(0, b / w) for b in p]
        )
        worst, best = solve(1, alpha), solve(-1, 1 - alpha)
        close(laws.segment_means(x, p, array([alpha, 1 - alpha])), [worst.fun, -best.fun])
        close(alpha * worst.x + (1 - alpha) * best.x, p)
