"""Distributional dynamic programming: the law of the return of every state and action, of a policy or of the best one.

    eta(s, a) <- Pi law(R + gamma X'),  X' ~ eta(S', A')        A' ~ pi(S'), or greedy
    one step:    Pi law(R + gamma V(S'))                        V(s) the mean of X: only the next step is random

Pi keeps a law to `num_atoms` numbers (networks/laws.py). In which metric the operator contracts, and by which factor:

    representation   a law is                                  mean       contracts by, in
    categorical      probabilities of an even grid             kept       sqrt(gamma), Cramer (one step: gamma, W_1)
    quantile         its quantiles at (i - 1/2) / N            not kept   gamma, W_inf
    segments         means of N equal parts of its quantiles   kept       gamma, every W_p
    two_atom         means of its worst alpha and of the rest  kept       gamma, every W_p
    particles        all its atoms, while they are at most N;  kept       gamma, every W_p, while exact
                     beyond that segments (`inexact` counts)

Control (`policy: greedy`) contracts too in its means and, with one step, in its laws. The full operator does not: where
actions tie, the law depends on how ties are broken. Once no greedy action changes it is the evaluation of a policy.

Two atoms (theta_1, theta_2) of weights (alpha, 1 - alpha) are the values of a robust MDP. Of outcomes x_k of
R + gamma X' with probabilities p_k

    theta_1 = min sum q_k x_k,  0 <= q_k <= p_k / alpha;    theta_2 = max sum q_k x_k,  0 <= q_k <= p_k / (1 - alpha)

with q summing to 1: nature moves adversely, or kindly. `attitude` breaks ties among the actions of greatest mean,
A*(s) = {a: Q(s, a) >= max Q(s, .) - tie_tolerance}:

    neutral   the first of A*
    safe      argmax_{A*} theta_1       restricted to A* a gamma-contraction in W_1; its fixed point has in every state
    risky     argmax_{A*} theta_2       the greatest theta_1 (theta_2) of all stationary policies on A*

Index mapping. Laws have axes `(T, S, A, N)`. An endless MDP has T = 1 and its laws are updated from themselves. With a
horizon H, T = H and slot h - 1 is of h steps to go, updated from the slot below it, slot 0 from a certain 0: after H
sweeps all is exact up to Pi. All laws begin as a certain 0.

Source: Achab & Neu 2021, "Robustness and risk management via distributional dynamic programming", arXiv 2112.15430 (two
atoms); Achab et al., TMLR 2023, arXiv 2304.14421 (one step); Bellemare, Dabney, Rowland, "Distributional Reinforcement
Learning", MIT Press 2023 (categorical, quantile).
Deviations: none known; the bodies of the first two could not be read, and their operators were derived anew from what
they state.

One `step` is one sweep over all times, states and actions; there are no environment or gradient steps.
"""

import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.types import Count, Example, Interval, NonNegative, Real, Spec, pytree, static
from networks import laws

ACTIONS = ("discrete",)
WORDS = dict(
    representation=("categorical", "quantile", "segments", "two_atom", "particles"),
    policy=("uniform", "greedy"),
    attitude=("neutral", "safe", "risky"),
)


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    alpha: Annotated[float, Interval(0, 1, True, True)] = 0.25  # two_atom: weight of the worst atom
    v_min: Real = -10.0  # categorical: least return of the grid; published -10 (C51, Atari)
    v_max: Real = 10.0  # categorical: greatest return of the grid; published 10
    # Actions this close in mean are equal. More than twice the error of the means, less than the gap to the next best
    # action; float32 rounds returns of tens to 1e-5.
    tie_tolerance: NonNegative = 1e-4  # return
    # Static: shape the program.
    representation: str = static(default="segments")  # a word of the table above
    policy: str = static(default="greedy")  # greedy: control; uniform: evaluation
    attitude: str = static(default="neutral")  # safe or risky: two_atom and greedy
    one_step: bool = static(default=False)  # only the next step is random
    num_atoms: Count = static(default=51)  # N, but of two_atom; published 51 (C51)


class Laws(NamedTuple):
    x: jax.Array  # (T, S, A, N) atoms
    p: jax.Array  # (T, S, A, N) their probabilities


class Params(NamedTuple):
    laws: Laws
    policy: jax.Array  # (T, S, A), action probabilities: evaluated, or greedy with respect to `laws`
    inexact: jax.Array | None  # particles: (T, S, A) bool, laws that needed more atoms, and those made of such


class State(NamedTuple):
    params: Params
    residual: jax.Array  # () of the last sweep
    changes: jax.Array  # () int32, of the greedy actions by the last sweep
    sweeps: jax.Array  # () int32


# --- formulas ---


def bellman(x, p, reward, probability, discount):
    """law(R + discount X').

    Args: x, p, the law of X' after each branch, `(..., B, n)`; reward, probability, discount `(..., B)`.
    Returns: atoms and probabilities `(..., B n)`.
    """
    atoms = reward[..., None] + discount[..., None] * x
    masses = jnp.broadcast_to(probability[..., None] * p, atoms.shape)
    flat = lambda v: v.reshape(*v.shape[:-2], -1)
    return flat(atoms), flat(masses)


def categorical_bellman(p, z, next_state, reward, probability, gamma, ended):
    """`laws.categorical` of `bellman` on an even grid, in an order that needs no array larger than its result.

    In units of the grid atom j of a branch lies at u_j = c + gamma j and grid point k gets sum_j p_j hat(u_j - k),
    hat(u) = max(0, 1 - |u|). Only atoms within 1 of k count, at most 2 / gamma of them, from j_0 = (k - 1 - c) / gamma
    on: k gathers these. Atoms beyond an end of the grid count wholly at that end.

    Args: p `(S, N)`, laws of the states; z `(N,)`, N >= 2; next_state, reward, probability `(M, B)`; gamma (); ended
        `(S,)` bool, states after which there is nothing.
    Returns: probabilities `(M, N)`, normalised, else float32 would lose mass sweep by sweep.
    """
    num_states, num = p.shape
    spacing = (z[-1] - z[0]) / (num - 1)
    gamma = jnp.maximum(gamma, jnp.finfo(p.dtype).tiny)
    # A certain 0, as atom 0 at gamma z_0 of one state more and a reward of less by that.
    p = jnp.concatenate([p, jnp.eye(1, num, dtype=p.dtype)])
    below = jnp.concatenate([jnp.zeros_like(p[:, :1]), jnp.cumsum(p, -1)], -1)  # (S + 1, N + 1), mass of j < m
    successor = jnp.where(ended[next_state], num_states, next_state)
    shifted = jnp.where(ended[next_state], reward - gamma * z[0], reward)
    c = (shifted - z[0] + gamma * z[0]) / spacing  # (M, B)
    width = jnp.minimum(jnp.ceil(2 / gamma), num).astype(jnp.int32)
    k = jnp.arange(num, dtype=p.dtype)
    first = lambda c, k: jnp.clip(jnp.ceil((k - 1 - c) / gamma), 0, num).astype(jnp.int32)

    def neighbours(w, total):
        for b in range(next_state.shape[-1]):
            at = c[:, b, None]
            j = first(at, k[None]) + w  # (M, N)
            u = jnp.clip(at + gamma * j, 0, num - 1)
            mass = p[successor[:, b, None], jnp.minimum(j, num - 1)]
            hat = jnp.where(j < num, jnp.maximum(0, 1 - jnp.abs(u - k[None])), 0)
            total = total + probability[:, b, None] * mass * hat
        return total

    total = jax.lax.fori_loop(0, width, neighbours, jnp.zeros((next_state.shape[0], num), p.dtype))
    low = below[successor, first(c, k[0])]  # (M, B)
    high = below[successor, -1] - below[successor, jnp.minimum(first(c, k[-1]) + width, num)]
    total = total.at[:, 0].add((probability * low).sum(-1)).at[:, -1].add((probability * high).sum(-1))
    return total / total.sum(-1, keepdims=True)


def particles(x, p, num: int):
    """The same law with equal atoms added up, or, where more than `num` differ, its `num` segment means.

    Atoms that differ by rounding, 8 machine epsilons of the largest, are equal; their mean stands for them.

    Args: x, p `(n,)`. Returns: atoms and probabilities `(num,)`, padded; () bool, whether it is the same law.
    """
    x, p = jax.lax.sort((jnp.where(p > 0, x, jnp.inf), p), num_keys=1)
    x = jnp.where(p > 0, x, x.max(where=p > 0, initial=-jnp.inf))  # padding: no mass at the largest atom
    new = jnp.diff(x) > 8 * jnp.finfo(x.dtype).eps * jnp.abs(x).max()
    rank = jnp.concatenate([jnp.zeros(1, int), jnp.cumsum(new)])
    mass, moment = (jax.ops.segment_sum(v, rank, num, indices_are_sorted=True) for v in (p, p * x))
    atoms, equal = moment / jnp.where(mass > 0, mass, 1), jnp.full(num, 1 / num, x.dtype)
    exact = rank[-1] < num
    return jnp.where(exact, atoms, laws.segment_means(x, p, equal)), jnp.where(exact, mass, equal), exact


def choose(q, preference, tolerance):
    """The action of greatest preference among those whose mean is within `tolerance` of the greatest; first of equals.

    Args: q, preference `(..., A)`. Returns: `(...)` int32.
    """
    optimal = q >= q.max(-1, keepdims=True) - tolerance
    return jnp.where(optimal, preference, -jnp.inf).argmax(-1).astype(jnp.int32)


def distance(config, new: Laws, old: Laws):
    """Between laws of one representation, in the metric in which it contracts. `(..., N)` to `(...)`."""
    gap = jnp.abs(new.x - old.x)
    match config.representation:
        case "categorical":
            spacing = jnp.diff(new.x)
            difference = jnp.cumsum(new.p - old.p, -1)[..., :-1]  # F - G from a grid point to the next
            if config.one_step:
                return (jnp.abs(difference) * spacing).sum(-1)  # W_1
            return jnp.sqrt((jnp.square(difference) * spacing).sum(-1))  # Cramer
        case "quantile":
            return gap.max(-1)  # W_inf
        case "segments" | "two_atom":
            return (gap * new.p).sum(-1)  # W_1: atoms are in order and have the same weights
    return laws.wasserstein(*new, *old)


def bound(config, gamma):
    """What a sweep's residual is at most, over that of the one before, where both are of one policy."""
    return jnp.sqrt(gamma) if config.representation == "categorical" and not config.one_step else gamma


def policy_value(mdp, policy):
    """The exact mean return of a policy at each time, by sweeps until nothing changes by more than rounding.

    Args: policy `(T, S, A)`. Returns: `(T, S)`.
    """

    def sweep(v, policy):
        ahead = jnp.where(mdp.terminal, 0, v)[mdp.next_state]  # (S, A, B)
        q = (mdp.probability * (mdp.reward + mdp.gamma * ahead)).sum(-1)
        return (policy * q).sum(-1)

    zero = jnp.zeros(mdp.num_states, mdp.reward.dtype)
    if mdp.horizon is not None:
        return jax.lax.scan(lambda v, policy: (sweep(v, policy),) * 2, zero, policy)[1]

    def moves(carry):
        v, before, i = carry
        return (i < 100_000) & (jnp.abs(v - before).max() > 2 * jnp.finfo(v.dtype).eps * jnp.abs(v).max())

    carry = sweep(zero, policy[0]), zero, jnp.int32(1)
    return jax.lax.while_loop(moves, lambda c: (sweep(c[0], policy[0]), c[0], c[2] + 1), carry)[0][None]


# --- laws of one time ---


def weights(config, dtype):
    """The probabilities of atoms that are segment means or quantiles, `(N,)`."""
    if config.representation == "two_atom":
        alpha = jnp.asarray(config.alpha, dtype)
        return jnp.stack([alpha, 1 - alpha])
    return jnp.full(config.num_atoms, 1 / config.num_atoms, dtype)


def grid(config, dtype):
    """The points of `categorical`, `(N,)`."""
    low, high = (jnp.asarray(v, dtype) for v in (config.v_min, config.v_max))
    return jnp.linspace(low, high, config.num_atoms, dtype=dtype)


def certain_zero(config, dtype) -> Laws:
    """`(N,)`."""
    match config.representation:
        case "categorical":
            z = grid(config, dtype)
            return Laws(z, laws.two_hot(jnp.zeros((), dtype), z))
        case "particles":
            return Laws(jnp.zeros(config.num_atoms, dtype), jnp.eye(1, config.num_atoms, dtype=dtype)[0])
    w = weights(config, dtype)
    return Laws(jnp.zeros_like(w), w)


def project(config, x, p):
    """Pi. Args: x, p `(..., n)`. Returns: laws `(..., N)`; for particles also whether they are exact `(...)`."""
    match config.representation:
        case "categorical":
            z = grid(config, x.dtype)
            x, p, exact = z, laws.categorical(x, p, z), None
        case "quantile":
            x, p, exact = laws.quantile_midpoints(x, p, config.num_atoms), weights(config, x.dtype), None
        case "segments" | "two_atom":
            w = weights(config, x.dtype)
            x, p, exact = laws.segment_means(x, p, w), w, None
        case "particles":
            of_each = jnp.vectorize(lambda x, p: particles(x, p, config.num_atoms), signature="(n),(n)->(m),(m),()")
            x, p, exact = of_each(*jnp.broadcast_arrays(x, p))
    shape = np.broadcast_shapes(x.shape, p.shape)
    return Laws(jnp.broadcast_to(x, shape), jnp.broadcast_to(p, shape)), exact


def greedy(config, eta: Laws):
    """Greedy action probabilities `(..., A)` of laws `(..., A, N)`."""
    q = laws.mean(*eta)
    preference = dict(neutral=jnp.zeros_like(q), safe=eta.x[..., 0], risky=eta.x[..., -1])
    action = choose(q, preference[config.attitude], config.tie_tolerance)
    return jax.nn.one_hot(action, q.shape[-1], dtype=q.dtype)


def of_states(config, eta: Laws, policy) -> Laws:
    """Laws of X ~ eta(s, A), A ~ pi(s). Args: eta `(S, A, N)`; policy `(S, A)`. Returns: `(S, N)`, or `(S, A N)`."""
    if config.policy == "greedy":
        action = policy.argmax(-1)[:, None, None]
        return Laws(*(jnp.take_along_axis(v, action, 1)[:, 0] for v in eta))
    if config.representation == "categorical":
        return Laws(eta.x[:, 0], jnp.einsum("sa,san->sn", policy, eta.p, precision="highest"))
    flat = lambda v: v.reshape(*v.shape[:-2], -1)
    return Laws(flat(eta.x), flat(policy[..., None] * eta.p))


def backup(config, mdp, eta: Laws, policy, inexact, goes_on):
    """The operator: laws of all states and actions from those of one step less.

    Args: eta `(S, A, N)`; policy `(S, A)`; inexact `(S, A)` or None; goes_on () bool, whether anything follows the
        next step. Returns: laws `(S, A, N)`; inexact.
    """
    ended = mdp.terminal | jnp.logical_not(goes_on)  # (S,)
    branches = mdp.next_state, mdp.reward, mdp.probability
    over_actions = lambda f: jax.vmap(f, in_axes=1, out_axes=1)(*branches)

    if config.one_step:
        q = laws.mean(*eta)  # (S, A)
        v = q.max(-1) if config.policy == "greedy" else (policy * q).sum(-1)
        x, p = v[:, None], jnp.ones_like(v)[:, None]
    else:
        x, p = of_states(config, eta, policy)

    if config.representation == "categorical" and not config.one_step:
        z = grid(config, p.dtype)
        p = over_actions(lambda *branches: categorical_bellman(p, z, *branches, mdp.gamma, ended))
        return Laws(jnp.broadcast_to(z, p.shape), p), None

    def of_action(next_state, reward, probability):
        discount = jnp.where(ended[next_state], 0, mdp.gamma)  # (S, B)
        return project(config, *bellman(x[next_state], p[next_state], reward, probability, discount))

    new, exact = over_actions(of_action)
    if inexact is None or config.one_step:  # means are kept, and one step needs no more
        return new, None if inexact is None else ~exact
    used = (inexact & (policy > 0)).any(-1) & ~ended  # (S,)
    return new, ~exact | (used[mdp.next_state] & (mdp.probability > 0)).any(-1)


# --- the algorithm ---


def period(config, mdp) -> int:
    """Sweeps that one `step` makes."""
    return 1


def return_range(mdp) -> tuple[float, float]:
    """Bounds of the returns of any number of steps, none included, from any state. Not for tracers."""
    successor, reward, p, terminal, gamma = (
        np.asarray(x) for x in (mdp.next_state, mdp.reward, mdp.probability, mdp.terminal, mdp.gamma)
    )
    low = high = np.zeros(mdp.num_states)
    if mdp.horizon is None and gamma < 1:  # bounds of returns that never end; a backup of bounds is one
        low, high = (low + bound / (1 - gamma) for bound in (min(reward[p > 0].min(), 0), max(reward[p > 0].max(), 0)))
        low, high = np.where(terminal, 0, low), np.where(terminal, 0, high)
    found = 0.0, 0.0
    for _ in range(mdp.horizon or 10_000):
        ahead = lambda v: reward + gamma * np.where(terminal, 0, v)[successor]
        before = low, high
        low = np.where(p > 0, ahead(low), np.inf).min((1, 2))
        high = np.where(p > 0, ahead(high), -np.inf).max((1, 2))
        found = min(found[0], low.min()), max(found[1], high.max())
        if max(np.abs(low - before[0]).max(), np.abs(high - before[1]).max()) <= 1e-6 * (found[1] - found[0]):
            break
    if mdp.horizon is None:
        found = min(0.0, low.min()), max(0.0, high.max())
    return float(found[0]), float(found[1])


def check(config, mdp):
    """What the words are, which go together, and that a grid holds all returns. Raises ValueError."""
    for name, words in WORDS.items():
        if getattr(config, name) not in words:
            raise ValueError(f"{name} {getattr(config, name)!r} must be one of {', '.join(words)}")
    if mdp.reward_size is not None:
        raise ValueError(
            f"{mdp.name}: rewards are vectors of {mdp.reward_size} and laws here are of numbers; use --algo stock_dp"
        )
    if config.attitude != "neutral" and (config.representation, config.policy) != ("two_atom", "greedy"):
        raise ValueError(
            f"attitude {config.attitude} compares worst and best atoms of optimal actions: it needs representation "
            f"two_atom and policy greedy, not {config.representation} and {config.policy}"
        )
    if config.representation == "categorical":
        if config.num_atoms < 2:
            raise ValueError(f"num_atoms {config.num_atoms} must be at least 2 with representation categorical")
        if not config.v_min < config.v_max:
            raise ValueError(f"v_min {config.v_min:g} must be less than v_max {config.v_max:g}")
        low, high = return_range(mdp)
        slack = 1e-6 * (config.v_max - config.v_min)
        if low < config.v_min - slack or high > config.v_max + slack:
            raise ValueError(
                f"v_min {config.v_min:g} and v_max {config.v_max:g} must hold all returns of {mdp.name}, "
                f"{low:.6g} to {high:.6g}, else means are wrong; set them to {math.floor(low)} and {math.ceil(high)}"
            )


def init(config, mdp, key, policy=None) -> State:
    """A certain 0 everywhere. Nothing is random.

    Args: policy, `(S, A)` or `(T, S, A)`, action probabilities to be evaluated by `policy: uniform` in place of the
        uniform ones.
    """
    del key
    times, (num_states, num_actions, _) = mdp.horizon or 1, mdp.next_state.shape
    dtype = mdp.reward.dtype
    zero = Laws(*(jnp.broadcast_to(v, (times, num_states, num_actions, *v.shape)) for v in certain_zero(config, dtype)))
    if config.policy == "greedy":
        policy = greedy(config, zero)
    elif policy is None:
        policy = jnp.full((times, num_states, num_actions), 1 / num_actions, dtype)
    else:
        policy = jnp.broadcast_to(jnp.asarray(policy, dtype), (times, num_states, num_actions))
    inexact = jnp.zeros(policy.shape, bool) if config.representation == "particles" else None
    return State(Params(zero, policy, inexact), jnp.zeros((), dtype), jnp.int32(0), jnp.int32(0))


def step(config, mdp, state: State) -> tuple[State, dict]:
    old, policy, inexact = state.params

    # Every time from the one below it.
    times = policy.shape[0]
    below = lambda x: x if mdp.horizon is None else jnp.concatenate([x[:1], x[:-1]])
    goes_on = jnp.arange(times) > 0 if mdp.horizon is not None else jnp.ones(1, bool)
    sweep = jax.vmap(lambda *args: backup(config, mdp, *args))
    new, inexact = sweep(*jax.tree.map(below, (old, policy, inexact)), goes_on)

    # The next policy.
    changes = jnp.int32(0)
    if config.policy == "greedy":
        before, policy = policy, greedy(config, new)
        changes = (policy != before).any(-1).sum(dtype=jnp.int32)

    # How fast it converges.
    residual = distance(config, new, old).max()
    rounding = 8 * jnp.finfo(residual.dtype).eps * jnp.abs(new.x).max()
    converging = state.residual > rounding
    contraction = jnp.where(converging, residual / jnp.where(converging, state.residual, 1), 0)
    metrics = dict(residual=residual, contraction=contraction, bound=bound(config, mdp.gamma))
    metrics["policy_changes"] = state.changes.astype(residual.dtype)  # before this sweep: `bound` is of none
    if inexact is not None:
        metrics["inexact"] = inexact.sum(dtype=residual.dtype)
    return State(Params(new, policy, inexact), residual, changes, state.sweeps + 1), metrics


def law(config, mdp, params: Params) -> Laws:
    """The law of the return from the MDP's start. `(n,)`."""
    last = jax.tree.map(lambda v: v[-1], params)
    x, p = of_states(config, last.laws, last.policy)
    return Laws(x.reshape(-1), (mdp.start[:, None] * p).reshape(-1))


def evaluate(config, mdp, params: Params) -> dict:
    """Figures of the policy at the start: `return` exact, the others of its law as it is represented."""
    x, p = law(config, mdp, params)
    return {
        "return": (mdp.start * policy_value(mdp, params.policy)[-1]).sum(),
        "law_mean": laws.mean(x, p),
        "law_std": jnp.sqrt(laws.variance(x, p)),
        "law_worst": laws.cvar(x, p, jnp.asarray(config.alpha, x.dtype)),  # of the worst alpha
        "law_best": laws.upper_cvar(x, p, 1 - jnp.asarray(config.alpha, x.dtype)),  # of the rest
    }


def act(config, spec: Spec, params: Params, obs, key):
    """The policy in the state and at the time that `obs` shows, `(B, S)`, with a horizon `(B, S + 1)`. `(B,)` int32."""
    times, num_states, _ = params.policy.shape
    index = obs[:, :num_states].argmax(-1)
    left = jnp.round(obs[:, -1] * times) if obs.shape[-1] > num_states else jnp.ones(obs.shape[0])  # steps
    slot = jnp.clip(left, 1, times).astype(jnp.int32) - 1
    return jax.random.categorical(key, jnp.log(params.policy[slot, index])).astype(jnp.int32)


EXAMPLE = Example(
    source="slippery",
    steps=16,
    eval_period=1,
    config=Config(representation="two_atom", attitude="safe"),
)
