"""MDPs: every builder against numbers worked by hand or proved elsewhere, the sampler's frequencies, and refusals."""

import dataclasses
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from test_envs import check_contract, rollout

from envs import mdps

close = lambda x, y, atol=1e-12: np.testing.assert_allclose(x, y, rtol=0, atol=atol)  # sums of a few float64


def exact(name, **params):
    """The MDP of a builder in float64."""
    with jax.enable_x64(True):
        return mdps.make(name, **params)


def outcomes(mdp, s, a):
    """{(successor, reward): probability} of the branches that can happen."""
    branches = zip(*(np.asarray(x)[s, a] for x in (mdp.next_state, mdp.reward, mdp.probability)), strict=True)
    number = lambda r: tuple(r.tolist()) if r.ndim else float(r)  # a vector of rewards is a tuple
    found = [((int(n), number(r)), float(p)) for n, r, p in branches if p > 0]
    assert len(dict(found)) == len(found)  # equal outcomes are one branch
    return dict(found)


def induction(mdp, horizon):
    """Optimal values `(S,)` and first-best actions `(horizon, S)` of a mean-maximising agent, by backward induction."""
    p, r = mdps.dense(mdp)
    value, actions = np.zeros(mdp.num_states), []
    for _ in range(horizon):
        q = r + float(mdp.gamma) * p @ value
        actions.append((q >= q.max(1, keepdims=True) - 1e-12).argmax(1))
        value = q.max(1)
    return value, np.array(actions[::-1])


def law(mdp, policy, s=0, rewards=(), discount=1.0, steps=2):
    """{return: probability} of a policy(state, rewards so far), by the whole tree of histories of `steps` steps."""
    if steps == 0 or mdp.terminal[s]:
        return {0.0: 1.0}
    total = defaultdict(float)
    for (successor, r), p in outcomes(mdp, s, policy(s, rewards)).items():
        for rest, q in law(mdp, policy, successor, (*rewards, r), discount * float(mdp.gamma), steps - 1).items():
            total[round(r + float(mdp.gamma) * rest, 9)] += p * q
    return dict(total)


# Builders

# name, (state, action) -> {(successor, reward): probability}, terminal states, gamma, horizon
BY_HAND = [
    (
        "chain",
        {
            (0, 0): {(1, 0): 0.8, (0, 2): 0.2},
            (0, 1): {(0, 2): 0.8, (1, 0): 0.2},
            (3, 0): {(4, 0): 0.8, (0, 2): 0.2},
            (4, 0): {(4, 10): 0.8, (0, 2): 0.2},
            (4, 1): {(0, 2): 0.8, (4, 10): 0.2},
        },
        (),
        0.99,
        None,
    ),
    ("two_state", {(0, 0): {(0, 1): 0.6, (1, 1): 0.4}, (1, 0): {(0, 0): 0.3, (1, 0): 0.7}}, (), 0.5, None),
    ("bernoulli", {(0, 0): {(0, 0): 0.5, (0, 1): 0.5}}, (), 0.5, None),
    (
        "gamble",
        {
            (0, 0): {(1, 2): 0.5, (1, -1): 0.5},
            (0, 1): {(1, 2): 0.5, (1, -1): 0.5},
            (1, 0): {(2, 0): 1},
            (1, 1): {(2, 3): 0.5, (2, -2): 0.5},
            (2, 0): {(2, 0): 1},
            (2, 1): {(2, 0): 1},
        },
        (2,),
        1.0,
        2,
    ),
    ("bandit", {(0, 0): {(1, 2): 1}, (0, 1): {(1, 0): 0.75, (1, 4): 0.25}}, (1,), 1.0, 1),
    ("menu", {(0, 0): {(0, 0): 1}, (0, 1): {(0, 1): 1}, (0, 2): {(0, 3): 1}}, (), 1.0, 3),
    (
        "two_stocks",
        {
            (0, 0): {(0, (2, -1)): 0.75, (0, (0, -1)): 0.25},
            (0, 1): {(1, (-1, -1)): 1},
            (1, 0): {(1, (-1, 2)): 1},
            (1, 1): {(0, (-1, -1)): 1},
        },
        (),
        1.0,
        6,
    ),
    (
        "exponential",
        {
            (0, 0): {(1, 0): 1},
            (0, 1): {(1, 0): 1},
            (1, 0): {(2, 0): 1},
            (1, 1): {(2, 2.2): 0.5, (2, -1): 0.5},
        },
        (2,),
        0.5,
        2,
    ),
    (
        "homeostat",
        {
            (0, 0): {(0, 0): 0.5, (0, -1): 0.5},
            (0, 1): {(1, -1): 1},
            (1, 0): {(1, 2): 0.75, (1, 0): 0.25},
            (1, 1): {(0, -1): 1},
        },
        (),
        1.0,
        10,
    ),
    ("sure_or_gamble", {(0, 0): {(0, 0.45): 1}, (0, 1): {(0, 0): 0.5, (0, 1): 0.5}}, (), 0.5, None),
    (
        "three_state",
        {
            (0, 0): {(0, 1): 0.5, (1, 1): 0.5},
            (0, 1): {(0, 0): 0.2, (1, 0): 0.3, (2, 0): 0.5},
            (1, 0): {(0, 0): 0.1, (1, 0): 0.6, (2, 0): 0.3},
            (1, 1): {(0, 0.5): 0.4, (1, 0.5): 0.4, (2, 0.5): 0.2},
            (2, 0): {(1, -1): 0.25, (2, -1): 0.75},
            (2, 1): {(0, 2): 0.5, (2, 2): 0.5},
        },
        (),
        0.8,
        None,
    ),
    (
        "all_optimal",
        {
            (0, 0): {(0, -0.6): 0.5, (1, -0.6): 0.5},
            (1, 1): {(0, 2.04): 0.4, (1, 2.04): 0.4, (2, 2.04): 0.2},
            (2, 1): {(0, -1.6): 0.5, (2, -1.6): 0.5},
        },
        (),
        0.8,
        None,
    ),
    (
        "safe_risky",
        {
            (0, 0): {(1, -1): 0.5, (1, 1): 0.5},
            (0, 1): {(1, -1): 0.5, (1, 1): 0.5},
            (1, 0): {(2, 1): 1},
            (1, 1): {(2, 0): 0.5, (2, 2): 0.5},
        },
        (2,),
        0.9,
        None,
    ),
    (
        "tie",
        {(0, 0): {(1, 0): 1}, (0, 1): {(1, 0): 1}, (1, 0): {(2, 0): 1}, (1, 1): {(2, -1): 0.5, (2, 1): 0.5}},
        (2,),
        0.9,
        None,
    ),
    (
        # Cells are 4 row + column; actions up, right, down, left; the start is 4, the goal 7, the pits 9 and 10.
        "slippery",
        {
            (4, 1): {(5, -1): 0.8, (0, -1): 0.1, (8, -1): 0.1},
            (8, 1): {(9, -20): 0.8, (4, -1): 0.1, (8, -1): 0.1},
            (0, 0): {(0, -1): 0.9, (1, -1): 0.1},  # up and its left side both meet the border
            (6, 1): {(7, -1): 0.8, (2, -1): 0.1, (10, -20): 0.1},
            (11, 3): {(10, -20): 0.8, (11, -1): 0.1, (7, -1): 0.1},
            (5, 2): {(9, -20): 0.8, (6, -1): 0.1, (4, -1): 0.1},
            (9, 0): {(9, 0): 1},
            (7, 3): {(7, 0): 1},
        },
        (7, 9, 10),
        1.0,
        12,
    ),
    (
        # Cells are 12 row + column; the start is 36, the goal 47, the edge 37 to 46.
        "cliff",
        {
            (36, 0): {(24, -1): 1},
            (36, 1): {(36, -100): 1},
            (36, 2): {(36, -1): 1},
            (30, 2): {(36, -100): 1},
            (30, 1): {(31, -1): 1},
            (35, 2): {(47, -1): 1},
            (47, 3): {(47, 0): 1},
        },
        (47,),
        1.0,
        100,
    ),
]


@pytest.mark.parametrize("name, rows, terminal, gamma, horizon", BY_HAND, ids=[x[0] for x in BY_HAND])
def test_builders_by_hand(name, rows, terminal, gamma, horizon):
    mdp = exact(name)
    for (s, a), expected in rows.items():
        found = outcomes(mdp, s, a)
        assert found.keys() == expected.keys(), (s, a)
        close([found[k] for k in expected], list(expected.values()))
    assert np.flatnonzero(mdp.terminal).tolist() == list(terminal)
    assert (float(mdp.gamma), mdp.horizon, mdp.name) == (gamma, horizon, name)
    first = dict(slippery=4, cliff=36).get(name, 0)
    assert mdp.start.tolist() == np.eye(mdp.num_states)[first].tolist()


def test_all_builders_but_the_random_one_are_worked_by_hand():
    assert {x[0] for x in BY_HAND} | {"garnet"} == set(mdps.names())


def test_shapes_and_types_follow_the_callers_precision():
    for mdp, dtype in ((mdps.make("slippery"), "float32"), (exact("slippery"), "float64")):
        assert (mdp.num_states, mdp.num_actions, mdp.num_branches) == (12, 4, 3)
        assert {x.dtype for x in (mdp.reward, mdp.probability, mdp.start, mdp.gamma)} == {np.dtype(dtype)}
        assert (mdp.next_state.dtype, mdp.terminal.dtype) == (np.int32, bool)
        assert len(jax.tree.leaves(mdp)) == 6


def test_dense_sums_the_branches_of_one_successor():
    # bernoulli: both branches lead to state 0, E[r] = 1/2. bandit: B pays 4 / 4 = 1; the end stays.
    p, r = mdps.dense(exact("bernoulli"))
    assert (p.tolist(), r.tolist()) == ([[[1.0]]], [[0.5]])
    p, r = mdps.dense(exact("bandit"))
    assert (p.tolist(), r.tolist()) == ([[[0, 1], [0, 1]], [[0, 1], [0, 1]]], [[2, 1], [0, 0]])
    p, r = mdps.dense(exact("three_state"))
    expected = [[[0.5, 0.5, 0], [0.2, 0.3, 0.5]], [[0.1, 0.6, 0.3], [0.4, 0.4, 0.2]], [[0, 0.25, 0.75], [0.5, 0, 0.5]]]
    close(p, expected)
    close(r, [[1, 0], [0, 0.5], [-1, 2]])


def test_two_state_has_its_known_values():
    # V = r + P V / 2: .7 V0 = 1 + .2 V1 and .65 V1 = .15 V0, so V0 = .65 / .425 = 26 / 17 and V1 = 6 / 17.
    p, r = mdps.dense(exact("two_state"))
    close(np.linalg.solve(np.eye(2) - 0.5 * p[:, 0], r[:, 0]), [26 / 17, 6 / 17])


def test_three_state_has_its_known_values():
    # Q of a fixed policy and Q*, from an independent solver.
    p, r = mdps.dense(exact("three_state"))
    pi = np.array([[0.5, 0.5], [0.25, 0.75], [1, 0]])
    value = np.linalg.solve(np.eye(3) - 0.8 * (pi[..., None] * p).sum(1), (pi * r).sum(1))
    q = [[0.8807531380753137, -1.100418410041841], [-0.7217573221757322, -0.010460251046025215]]
    close(r + 0.8 * p @ value, [*q, [-2.594142259414226, 0.9184100418410042]])
    value, _ = induction(exact("three_state"), 150)  # 0.8^150 = 3e-15
    close(value, [4.606741573033709, 4.410112359550563, 6.404494382022473])


def test_every_action_of_all_optimal_is_optimal():
    # State 0: -.6 + .8 (.5 1 + .5 3) = 1 and .92 + .8 (.2 1 + .3 3 - .5 2) = 1.
    p, r = mdps.dense(exact("all_optimal"))
    close(r + 0.8 * p @ np.array([1.0, 3.0, -2.0]), [[1, 1], [3, 3], [-2, -2]])


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_the_gambles_laws_are_those_of_the_four_policies_at_any_gamma(gamma):
    mdp = exact("gamble", gamma=gamma)
    policy = lambda up, down: lambda s, rewards: dict({2.0: up, -1.0: down}).get(rewards[0], 0) if rewards else 0
    # After +2 and after -1: safe 0, risky 1, which adds +3 or -2.
    assert law(mdp, policy(0, 0)) == {2: 0.5, -1: 0.5}
    assert law(mdp, policy(0, 1)) == {2: 0.75, -3: 0.25}
    assert law(mdp, policy(1, 0)) == {5: 0.25, 0: 0.25, -1: 0.5}
    assert law(mdp, policy(1, 1)) == {5: 0.25, 0: 0.25, 2: 0.25, -3: 0.25}


def test_laws_of_the_small_examples():
    always = lambda a: lambda s, rewards: a
    # gamma = .9: -1 or 1, plus .9 times 1, or .9 times 0 or 2.
    assert law(exact("safe_risky"), always(0)) == {-0.1: 0.5, 1.9: 0.5}
    assert law(exact("safe_risky"), always(1)) == {-1.0: 0.25, 0.8: 0.25, 1.0: 0.25, 2.8: 0.25}
    assert law(exact("tie"), always(0)) == {0.0: 1.0}
    assert law(exact("tie"), always(1)) == {-0.9: 0.5, 0.9: 0.5}
    assert law(exact("bandit"), always(1)) == {0.0: 0.75, 4.0: 0.25}
    assert law(exact("exponential"), always(1)) == {-0.5: 0.5, 1.1: 0.5}  # half of -1 and of 2.2


def test_the_menus_reachable_returns():
    def reachable(mdp):
        plans = np.stack(np.meshgrid(*[range(mdp.num_actions)] * 3), -1).reshape(-1, 3)
        laws = [law(mdp, lambda s, rewards, plan=plan: plan[len(rewards)], steps=3) for plan in plans]
        return sorted({g for found in laws for g in found})

    assert reachable(exact("menu")) == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert reachable(exact("menu", menu="[0, 1]", gamma=0.5)) == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]


def test_the_slippery_grids_optimum_is_the_known_one():
    mdp = exact("slippery")
    value, actions = induction(mdp, 12)
    close(value[4], -6.563145581480002)
    # The chance of a pit, from an independent solver's law of the return with the same ties: 0.014255479.
    p, _ = mdps.dense(mdp)
    at = np.asarray(mdp.start)
    for best in actions:
        at = at @ p[np.arange(12), best]
    close(at[[9, 10]].sum(), 0.014255479)


def test_the_cliffs_optimum_is_thirteen_steps():
    value, _ = induction(exact("cliff"), 100)
    assert value[36] == -13  # up, 11 to the right, down
    assert value[35] == -1 and value[47] == 0


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**31),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(0, 6),
    st.sampled_from([0, 3]),
)
def test_garnets_are_mdps(seed, states, actions, branches, atoms, terminals, horizon):
    branches, terminals = min(branches, states), min(terminals, states - 1)
    sizes = dict(states=states, actions=actions, branches=branches, reward_atoms=atoms, terminals=terminals)
    mdp = mdps.make("garnet", seed=seed, horizon=horizon, gamma=1.0 if horizon else 0.9, **sizes)  # which validates it
    assert mdp.next_state.shape == (states, actions, branches * atoms)
    assert np.flatnonzero(mdp.terminal).tolist() == list(range(states - terminals, states))
    assert mdp.horizon == (horizon or None)
    next_state = np.asarray(mdp.next_state)
    for s in range(states - terminals):
        for a in range(actions):
            successors, counts = np.unique(next_state[s, a], return_counts=True)
            assert len(successors) == branches and (counts == atoms).all()
            assert len(outcomes(mdp, s, a)) == branches * atoms  # as many different rewards as atoms


def test_garnets_differ_by_their_seed_and_only_by_it():
    first, again, other = (np.asarray(mdps.make("garnet", seed=seed).reward) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).all()


def test_garnets_probabilities_are_gaps_between_uniform_numbers():
    # One cut u of [0, 1]: the gap is uniform, of mean 1/2 and variance 1/12. Two cuts: mean 1/3, variance 1/18.
    for branches, mean, variance in ((2, 1 / 2, 1 / 12), (3, 1 / 3, 1 / 18)):
        mdp = mdps.make("garnet", states=400, actions=5, branches=branches, reward_atoms=1)
        p = np.asarray(mdp.probability)
        # 2,000 draws: four standard errors of the mean and about as many of the variance.
        assert abs(p[..., 0].mean() - mean) < 4 * np.sqrt(variance / 2000)
        assert abs(p.var((0, 1)) - variance).max() < 4 * variance * np.sqrt(2 / 2000)
        assert abs(np.asarray(mdp.reward).mean()) < 4 / np.sqrt(p.size)


# Sampler


def test_branches_are_drawn_with_their_probabilities_and_episodes_with_the_start():
    mdp = mdps.make("garnet", seed=3, states=4, branches=2, reward_atoms=2, terminals=1)
    mdp = dataclasses.replace(mdp, start=jnp.array([0.2, 0.5, 0.3, 0.0]))
    env = mdps.env(mdp, 64)
    assert env.spec.max_episode_steps == 0 and env.spec.obs.shape == (4,)  # endless: no limit, no time to observe
    actions = jax.random.randint(jax.random.key(1), (500, 64), 0, 2)
    start, obs, t, _ = jax.tree.map(np.asarray, rollout(env, jax.random.key(0), actions))
    s, successor = t.obs.argmax(-1), t.next_obs.argmax(-1)
    assert (s < 3).all() and (t.terminated == (successor == 3)).all() and not t.truncated.any()
    for state in range(3):
        for a in range(2):
            here = (s == state) & (t.action == a)
            branches = zip(np.asarray(mdp.next_state)[state, a], np.asarray(mdp.reward)[state, a], strict=True)
            drawn = [(here & (successor == n) & (t.reward == r)).sum() for n, r in branches]
            assert sum(drawn) == here.sum() > 500
            # Six tests at fixed seeds; a correct sampler fails one in a thousand.
            expected = np.float64(mdp.probability[state, a])
            assert stats.chisquare(drawn, here.sum() * expected / expected.sum()).pvalue > 1e-3
    began = np.concatenate([start.obs.argmax(-1), obs[t.terminated].argmax(-1)])
    drawn = np.bincount(began, minlength=4)
    assert drawn[3] == 0 and len(began) > 500
    assert stats.chisquare(drawn[:3], len(began) * np.array([0.2, 0.5, 0.3])).pvalue > 1e-3


@pytest.fixture(scope="module")
def on_ice():
    """The slippery grid, always to the right: 480 steps of 128 environments."""
    env = mdps.env(mdps.make("slippery"), 128)
    return env, *jax.tree.map(np.asarray, rollout(env, jax.random.key(0), jnp.ones((480, 128), jnp.int32)))


def test_returns_have_the_exact_expectation(on_ice):
    _, _, _, t, finished = on_ice
    p, r = mdps.dense(exact("slippery"))
    value, steps, alive = np.zeros(12), np.zeros(12), np.ones(12)
    alive[[7, 9, 10]] = 0
    for _ in range(12):
        value, steps = r[:, 1] + p[:, 1] @ value, alive * (1 + p[:, 1] @ steps)
    done = finished["episode_return"].count
    for name, expected in (("episode_return", value[4]), ("episode_length", steps[4])):
        # Each environment's first 40 episodes: with those cut off by the end, short ones would be counted too often.
        totals = np.concatenate([finished[name].total[:, i][done[:, i]][:40] for i in range(128)])
        assert len(totals) == 128 * 40
        assert abs(totals.mean() - expected) < 4 * totals.std() / np.sqrt(len(totals))


def test_the_horizon_terminates_and_time_left_is_observed(on_ice):
    env, start, obs, t, finished = on_ice
    assert env.spec.obs.shape == (13,) and env.spec.max_episode_steps == 12
    length = np.rint(12 * (1 - t.next_obs[..., -1]))  # steps so far
    at_end = np.isin(t.next_obs[..., :12].argmax(-1), (7, 9, 10))
    assert (t.terminated == (at_end | (length == 12))).all() and not t.truncated.any()
    assert ((length == 12) & ~at_end).sum() > 10  # some were still on their way
    assert (finished["episode_length"].total[t.terminated] == length[t.terminated]).all()
    close(t.obs[..., -1] - t.next_obs[..., -1], np.full(length.shape, 1 / 12), 1e-6)  # float32
    # What follows an end is the start, with all time left; what follows another step is its successor.
    fresh = np.eye(13)[4] + np.eye(13)[12]
    assert (start.obs == fresh).all() and (obs[t.terminated] == fresh).all()
    assert (obs[~t.terminated] == t.next_obs[~t.terminated]).all() and (t.obs[1:] == obs[:-1]).all()


def test_returns_add_up_and_start_again_with_every_episode(on_ice):
    _, _, _, t, finished = on_ice
    total = np.zeros(128)
    for reward, done, reported in zip(t.reward, t.terminated, finished["episode_return"].total, strict=True):
        total += reward
        assert (reported == total * done).all()  # integers, exact in float32
        total *= ~done


def test_padded_branches_are_never_drawn(on_ice):
    # To the right of the corner, 3, and above it there is the border: two outcomes and one padded branch, of reward 0.
    env, _, _, t, _ = on_ice
    assert sorted(np.asarray(env.mdp.probability[3, 1]).round(6).tolist()) == [
        0,
        np.float32(0.1).round(6),
        np.float32(0.9).round(6),
    ]
    assert (t.obs[..., 3] == 1).sum() > 100 and (t.reward < 0).all()


def test_an_episode_length_truncates_and_does_not_terminate():
    env = mdps.make_env("bernoulli", 2, episode_length=4)
    assert env.spec.max_episode_steps == 4 and env.spec.obs.shape == (1,)  # no horizon, no time in it
    *_, t, finished = rollout(env, jax.random.key(0), jnp.zeros((8, 2), jnp.int32))
    assert t.truncated[:, 0].tolist() == [False, False, False, True] * 2
    assert not t.terminated.any() and finished["episode_length"].count.sum() == 4
    # Where both come at once, the MDP ended and a limit was met: both flags, as docs/protocol.md has it.
    both = mdps.env(mdps.make("menu"), 1, episode_length=3)
    *_, t, _ = rollout(both, jax.random.key(0), jnp.zeros((3, 1), jnp.int32))
    assert t.terminated[:, 0].tolist() == t.truncated[:, 0].tolist() == [False, False, True]


@pytest.mark.parametrize("name", [n for n in mdps.names() if mdps.make(n).reward_size is None])
def test_every_sampler_keeps_the_contract(name):
    env = mdps.make_env(name, 3, episode_length=7)
    check_contract(env)
    assert mdps.action_type(name) == env.spec.action_type


def test_a_sampler_of_float64_table_plays_in_float32():
    check_contract(mdps.env(exact("slippery"), 2))
    check_contract(mdps.env(exact("three_state"), 2, episode_length=5))


# Vectors of rewards


def test_vectors_of_rewards_are_padded_and_summed_as_numbers_are():
    mdp = exact("two_stocks")
    assert (mdp.reward.shape, mdp.reward_size, exact("menu").reward_size) == ((2, 2, 2, 2), 2, None)
    assert mdp.reward[0, 1].tolist() == [[-1, -1], [0, 0]] and mdp.probability[0, 1].tolist() == [1, 0]
    # 3/4 (2, -1) + 1/4 (0, -1) = (1.5, -1)
    assert mdps.dense(mdp)[1].tolist() == [[[1.5, -1], [-1, -1]], [[-1, 2], [-1, -1]]]
    own = mdps.tabulate("own", [[[(0.5, 1, (1.0, 2.0)), (0.5, 1, (1.0, 2.0))]], [[]]], 0.9, terminal=(1,))
    assert outcomes(mdps.validate(own), 0, 0) == {(1, (1, 2)): 1} and outcomes(own, 1, 0) == {(1, (0, 0)): 1}


def test_vectors_of_rewards_are_not_played():
    with pytest.raises(ValueError, match="two_stocks: rewards are vectors of 2 and an environment's are numbers; "):
        mdps.make_env("two_stocks", 2)


# Refusals


def test_actions_that_need_never_end():
    # Of the chain 0 -> 1 -> end, action 1 stays in 1: from there one may stay, in 0 nobody can.
    rows = [[[(1.0, 1, 0.0)]] * 2, [[(1.0, 2, 0.0)], [(1.0, 1, 0.0)]], [[], []]]
    assert mdps.stays(mdps.tabulate("own", rows, 0.9, terminal=(2,))).tolist() == [
        [True, True],
        [False, True],
        [False] * 2,
    ]
    # With any chance of the end at every step, nobody stays.
    rows[1][1] = [(0.99, 1, 0.0), (0.01, 2, 0.0)]
    mdp = mdps.tabulate("own", rows, 1.0, terminal=(2,))
    assert not mdps.stays(mdp).any()
    assert mdps.validate(mdp) is mdp


def changed(name="three_state", **leaves):
    """An MDP with entries replaced: `field={index: value}`, or a whole new value."""
    mdp = mdps.make(name)
    for field, new in leaves.items():
        if isinstance(new, dict):
            (index, value), old = *new.items(), np.array(getattr(mdp, field))
            old[index] = value
            new = old
        mdp = dataclasses.replace(mdp, **{field: new})
    return mdp


@pytest.mark.parametrize(
    "mdp, message",
    [
        (
            changed(probability={(1, 0, 2): 0.2}),
            "three_state: state 1, action 0: probabilities sum to 0.9.* and must sum to 1 within 1e-06; divide",
        ),
        (changed(probability={(2, 1, 0): np.nan}), "state 2, action 1, branch 0: probability nan must be at least 0"),
        (changed(probability={(0, 1): (-0.5, 1, 0.5)}), "state 0, action 1, branch 0: probability -0.5 must be"),
        (changed(next_state={(1, 1, 2): 3}), "state 1, action 1, branch 2: next_state 3 must be from 0 to 2"),
        (changed(next_state={(0, 0, 0): -1}), "state 0, action 0, branch 0: next_state -1 must be from 0 to 2"),
        (changed(reward={(2, 0, 1): np.nan}), "state 2, action 0, branch 1: reward nan must be finite; give padded"),
        (changed(reward={(2, 0, 2): -np.inf}), "state 2, action 0, branch 2: reward -inf must be finite"),
        (
            changed("gamble", next_state={(2, 1, 0): 0}),
            "gamble: state 2, action 1, branch 0: a terminal state goes to 0 for reward 0 and must stay for 0",
        ),
        (changed("gamble", reward={(2, 0, 0): 5.0}), "state 2, .* goes to 2 for reward 5 and must stay"),
        (
            changed("gamble", reward=jnp.zeros((3, 2, 2, 2)).at[2, 0, 0, 1].set(5)),
            r"state 2, .* goes to 2 for reward \[0.0, 5.0\] and must stay for 0",
        ),
        (
            changed("two_stocks", reward={(1, 0, 0, 1): np.nan}),
            r"two_stocks: state 1, action 0, branch 0: reward \[-1.0, nan\] must be finite",
        ),
        (changed(reward=jnp.zeros((3, 2, 3, 0))), r"reward of shape \[3, 2, 3, 0\] must be \[3, 2, 3\]"),
        (changed(reward=jnp.zeros((3, 2, 2, 2))), r"reward of shape \[3, 2, 2, 2\] must be \[3, 2, 3, 2\]"),
        (changed(gamma=jnp.float32(1.5)), "gamma 1.5 must be from 0 to 1"),
        (changed(gamma=jnp.float32(np.nan)), "gamma nan must be from 0 to 1"),
        (changed(gamma=jnp.ones(2)), r"gamma of shape \[2\] must be \[\]"),
        (
            changed(gamma=jnp.float32(1)),
            "three_state: state 0, action 0: gamma is 1 and this action need never end.* give a horizon",
        ),
        (changed(horizon=0), "horizon 0 must be at least 1, or None"),
        (changed(start={0: 0.5}), "start sums to 0.5 and must sum to 1"),
        (changed(start=jnp.array([1.5, -0.5, 0])), "state 1: start -0.5 must be at least 0"),
        (changed(start=jnp.ones(2)), r"start of shape \[2\] must be \[3\]"),
        (changed(terminal=jnp.zeros(3)), "terminal of type float32 must be bool"),
        (changed(reward=jnp.zeros((3, 2))), r"reward of shape \[3, 2\] must be \[3, 2, 3\]"),
        (changed(next_state=jnp.zeros((3, 2, 3))), r"next_state float32\[3, 2, 3\] must be integers \[S, A, B\]"),
    ],
)
def test_a_table_that_is_no_mdp_is_refused_in_one_line(mdp, message):
    with pytest.raises(ValueError, match=message) as error:
        mdps.validate(mdp)
    assert "\n" not in str(error.value)


def test_padded_branches_may_lead_anywhere_within_the_table():
    mdps.validate(changed("gamble", next_state={(2, 0, 1): 0}))


@pytest.mark.parametrize(
    "name, params, message",
    [
        ("slipery", {}, "unknown MDP 'slipery'; closest: slippery, "),
        ("chain", dict(lenght=3), "chain has no parameter 'lenght'; did you mean 'length'"),
        ("chain", dict(length=0), "chain: length 0 must be at least 1"),
        ("chain", dict(gamma=1.0), "chain: state 0, action 0: gamma is 1 and this action need never end"),
        ("chain", dict(slip=1.2), "chain: slip 1.2 must be from 0 to 1"),
        ("slippery", dict(slip=-0.1), "slippery: slip -0.1 must be from 0 to 1"),
        ("slippery", dict(horizon=-1), "slippery: horizon -1 must be at least 0"),
        ("slippery", dict(pit_reward=np.inf), "slippery: state .* reward inf must be finite"),
        ("cliff", dict(horizon=0), "cliff: state 0, action 0: gamma is 1"),
        ("gamble", dict(gamma=0.0), "gamble: gamma 0 must be more than 0"),
        ("two_state", dict(gamma=-0.1), "two_state: gamma -0.1 must be from 0 to 1"),
        ("menu", dict(menu=[]), r"menu: menu must be a list of numbers, such as \[0, 1, 3\]; got \[\]"),
        ("menu", dict(menu="[0, one]"), "menu: menu must be a list of numbers"),
        ("menu", dict(menu=[[0.0, 1.0]]), "menu: menu must be a list of numbers"),
        ("garnet", dict(branches=6), "garnet: branches 6 must be at most states 5"),
        ("garnet", dict(terminals=5), "garnet: terminals 5 must be from 0 to 4"),
        ("garnet", dict(seed=-1), "garnet: seed -1 must be at least 0"),
        ("garnet", dict(states=2.5), "garnet: states must be an integer"),
    ],
)
def test_unknown_names_and_parameters_are_refused_with_the_closest(name, params, message):
    with pytest.raises(ValueError, match=message):
        mdps.make(name, **params)


def test_an_environment_that_an_evaluation_would_not_return_from_is_refused():
    with pytest.raises(ValueError, match="mdp/three_state may go on for ever.* give episode_length, such as 100$"):
        mdps.make_env("three_state", 2)
    with pytest.raises(ValueError, match="mdp/garnet may go on for ever.* or a horizon"):
        mdps.make_env("garnet", 2)
    with pytest.raises(ValueError, match="mdp/menu: episode_length 0 must be at least 1"):
        mdps.make_env("menu", 2, episode_length=0)
    assert mdps.make_env("garnet", 2, horizon="5").spec.max_episode_steps == 5
    assert mdps.make_env("tie", 2).spec.max_episode_steps == 0  # two steps, whatever one does
