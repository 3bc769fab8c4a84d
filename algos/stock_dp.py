"""Stock-augmented dynamic programming: exact optima of CVaR and other objectives of the whole return.

The stock C_{t+1} = (C_t + R_{t+1}) / gamma remembers what was collected, and neither successors nor rewards depend on
it. For an expected utility K = E f of degree k (networks/objectives.py; k is 0 where gamma is 1 and f has none)

    U_t(s, c) = max_a E[gamma^k U_{t+1}(S', (c + R) / gamma)]       U = f(c) where the MDP has ended
    W_t(s, c) = the same of E[c + G], f(x) = x, under the policy that U chooses

is the best E f(c + G) from (s, c): a stock-augmented MDP is an ordinary one over nodes (s, c). Greedy is the action of
largest W among those of largest U. What the whole is worth is a search over the first stock,

    h(c0) = -c0 + scale U_0(s0, c0)        the best is max h (lower CVaR, mean_cvar) or min h (upper CVaR),
                                           or U_0 at a fixed c0

`nodes: reachable` (a horizon): the distinct pairs that first stock 0 leads to, step by step. Exact. Another first stock
    c0 moves all stocks of step t by c0 / gamma^t and leaves successors as they are, so one table of nodes serves all F
    of them: node n at step t has the stock stock[t, n] + candidates[f] / gamma^t. The maximum of h is at minus a
    return, where one of the policies' h bends, so that `first_stocks: returns` finds it exactly.
`nodes: grid` (endless, or too many pairs): states x a grid of stocks from -Gmax to -Gmin and a point beyond each, with
    two-point interpolation between. Below -Gmax and above -Gmin c + G has one sign, so U continues with f's own slope
    there, exactly, and stays greedy for the same actions: no clipping is seen. U has slopes between f's, so that
    interpolating it errs by at most Delta (right - left) / 4, and U on the grid by 1 / (1 - gamma) times that
    (H + 1 times that with a horizon); `grid_error` is its sum with what a grid of c0 may miss.

`method: value` is value iteration: one sweep updates all times at once from the values before it. `method: policy` is
greedy improvement, then sweeps of that policy until its values stand still.

The law of the return under the greedy policy from c0 is an exact forward pass over nodes; on a grid, one of returns so
far that are split between two grid points (which keeps the mean). All figures of `evaluate` but `dual` are of this law.

Upper CVaR: h is convex with its minimum where two policies' lines cross, between returns. Supporting lines of h are
followed to the crossing c*, where the two extreme greedy policies, of least P(c* + G > 0) and of greatest
P(c* + G >= 0), are mixed so that the tail has mass tau: their occupancies are averaged, which makes one policy of
action probabilities. Only `reachable` does this; on a grid the best c0 is played as it is, and `objective` may be below
`dual`.

Index mapping. `values[t, n, f]` is (U_t, W_t) with t steps taken, t = 0..H, `values[H]` being f; endless MDPs have one
slot, that of every step, updated from itself. `policy[t, n]` are the action probabilities from `first_stock`. One c0 is
chosen for all first states of the MDP.

Source: Pires et al. 2025, "Optimizing Return Distributions with Distributional Dynamic Programming", arXiv 2501.13028;
Baeuerle & Ott 2011 for the search over c0.
Deviations: the paper's body could not be read, so this follows its abstract and our derivations.
- Expected utilities and means are iterated in place of whole laws: the same for K = E f, and it needs no atoms.
- Ties are broken by the mean, and at the best c0 of the upper CVaR by randomising.

One `step` is one sweep, or one improvement and its evaluation; there are no environment or gradient steps.
"""

import math
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from envs import stock
from envs.types import Count, Example, Fraction, Interval, NonNegative, Positive, Real, Spec, pytree, static
from networks import laws, objectives
from networks.objectives import Tail

ACTIONS = ("discrete",)
wrap = stock.wrap
WORDS = dict(
    objective=tuple(objectives.OBJECTIVES),
    method=("value", "policy"),
    nodes=("reachable", "grid"),
    first_stocks=("returns", "grid"),
    tie_break=("mean", "first"),
)


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    tau: Tail = 0.25  # tail of the CVaR objectives
    weight: Fraction = 0.5  # of the mean in mean_cvar
    target: Real = 0.0  # return, of desired_return, squared_error and threshold
    rate: Positive = 1.0  # per return, of exponential
    tie_tolerance: NonNegative = (
        1e-5  # return; values this close are equal: float32 rounds those of tens to 1e-6 a step
    )
    # Static: shape the program.
    objective: str = static(default="lower_cvar")  # a name of networks/objectives.py
    method: str = static(default="value")  # value or policy iteration
    nodes: str = static(default="reachable")  # or grid
    max_nodes: Count = static(default=1024)  # reachable: (state, stock) pairs in a step
    first_stocks: str = static(default="returns")  # reachable: c0 searched over minus all returns, or an even grid
    num_first_stocks: Count = static(default=256)  # reachable: how many of them at most
    num_stocks: Annotated[int, Interval(4, math.inf)] = static(default=1001)  # grid: points
    tie_break: str = static(default="mean")  # of equal actions the one of larger mean, or the first
    first_stock: Annotated[tuple[float, ...], Interval(-math.inf, math.inf, True, True)] = static(
        default=(0.0,)
    )  # c0 of homeostatic, one number for all stocks or one each


class Nodes(NamedTuple):
    """L is H + 1 for reachable ones and T is H; on a grid both are 1, the table being that of every step."""

    state: jax.Array  # (L, N) int32; -1 is padding
    stock: jax.Array  # (L, N, D), of first stock 0
    child: jax.Array  # (T, N, A, B) int32, the node of each branch at the next step; N where there was no room
    needed: jax.Array  # (L,) int32, distinct pairs: more than N is an overflow
    weight: Any = None  # grid: (1, N, A, B), what the next node after `child` weighs
    beyond: Any = None  # grid: (1, N, A, B), stock beyond the end of the grid, 0 within


class Params(NamedTuple):
    nodes: Nodes
    candidates: jax.Array  # (F, D), first stocks that are searched
    values: jax.Array  # (L, N, F, 2), U and W; on a grid (H + 1 or 1, N, 1, 2)
    policy: jax.Array  # (T, N, A), action probabilities from `first_stock`; T is H, or 1
    first_stock: jax.Array  # (D,), the best c0
    dual: jax.Array  # (), the objective by the values: h at the best c0
    gamma: jax.Array  # (), of the MDP, for the stock


class State(NamedTuple):
    params: Params
    sweeps: jax.Array  # () int32


def objective_of(config):
    """The objective that a Config names, with its numbers."""
    kind = objectives.OBJECTIVES[config.objective]
    return kind(**{name: getattr(config, name) for name in objectives.parameters(kind())})


# Formulas


def utility(objective, x):
    """f of final stocks: `(..., D)` to `(...,)`."""
    return objective.f(x if objectives.is_vector(objective) else x[..., 0])


def ends(objective, x):
    """(f(x), x) of final stocks, what U and W are where nothing follows: `(..., D)` to `(..., 2)`."""
    return jnp.stack([utility(objective, x), x.sum(-1)], -1)


def greedy(q, tolerance, by_mean=True):
    """The action of largest mean among those whose U is within `tolerance` of the largest; or the first of them.

    Args: q `(..., A, 2)`, (U, W) of each action. Returns: `(...)` int32.
    """
    u, mean = q[..., 0], q[..., 1]
    best = u >= u.max(-1, keepdims=True) - tolerance
    return jnp.where(best, mean if by_mean else 0, -jnp.inf).argmax(-1).astype(jnp.int32)


def pick(config, q):
    """`greedy` as the Config has it."""
    return greedy(q, config.tie_tolerance, config.tie_break == "mean")


def backup(then, probability, child, scale):
    """sum_b p gamma^k V(child): the values of actions from those of the nodes that they lead to.

    Args: then `(N, F, K)`; probability, child `(N, A, B)`; scale `(K,)`. Returns: `(N, A, F, K)`.
    """
    v = then.at[child].get(mode="fill", fill_value=jnp.nan)  # (N, A, B, F, K)
    return scale.reshape(1, 1, 1, -1) * jnp.einsum("nab,nabfk->nafk", probability, v, precision="highest")


def interpolate(values, index, weight, beyond, slopes):
    """Values between two points of a grid, and past its ends by their slopes.

    Args: values `(N, F, K)`; index `(...)` of the lower point; weight `(...)` of the upper one; beyond `(...)`, how far
        past an end, negative at the lower; slopes `(2, K)`, below and above. Returns: `(..., F, K)`.
    """
    low, high = values[index], values[index + 1]
    row = lambda x: x[..., None, None]
    left, right = (row(beyond) * s.reshape(*[1] * (low.ndim - 1), -1) for s in slopes)
    return low + row(weight) * (high - low) + jnp.where(row(beyond) < 0, left, right)


def place(x, points):
    """Where numbers lie on an even grid: the lower point `(...)` int32, the upper one's weight, how far past an end."""
    spacing = points[1] - points[0]
    u = (x - points[0]) / spacing
    index = jnp.clip(jnp.floor(u), 0, points.shape[0] - 2)
    return index.astype(jnp.int32), jnp.clip(u - index, 0, 1), x - jnp.clip(x, points[0], points[-1])


def mixture(tau, lo, hi):
    """What the policy of the greater tail weighs, so that P(c + G > 0) <= tau <= P(c + G >= 0).

    Args: lo, hi, P(c + G >= 0) of the policies of the least and of the greatest tail.
    """
    return jnp.where(hi > lo, jnp.clip((tau - lo) / jnp.where(hi > lo, hi - lo, 1), 0, 1), 0.0)


def return_bounds(mdp):
    """The least and the greatest discounted return of any number of steps, none included, from any state. `(2,)`."""
    possible = mdp.probability > 0
    none = jnp.array([jnp.inf, -jnp.inf], mdp.reward.dtype).reshape(2, 1, 1, 1)
    if mdp.horizon is None:  # these hold for ever, so each backup is a bound too, and a tighter one
        spread = jnp.stack([mdp.reward.min(where=possible, initial=0), mdp.reward.max(where=possible, initial=0)])
        bounds = jnp.broadcast_to((spread / (1 - mdp.gamma))[:, None], (2, mdp.num_states))
    else:
        bounds = jnp.zeros((2, mdp.num_states), mdp.reward.dtype)

    def once(_, bounds):
        ahead = jnp.where(possible[None], mdp.reward[None] + mdp.gamma * bounds[:, mdp.next_state], none)
        ahead = jnp.stack([jnp.minimum(ahead[0].min((1, 2)), 0), jnp.maximum(ahead[1].max((1, 2)), 0)])
        return jnp.where(mdp.terminal[None], 0, ahead)

    low, high = jax.lax.fori_loop(0, mdp.horizon or 100, once, bounds)
    return jnp.stack([low.min(), high.max()])


# Reachable nodes


def distinct(state, stock, alive, size: int):
    """The distinct pairs among M, sorted, stocks ascending within a state.

    Stocks that differ by rounding, 8 machine epsilons of the largest, are one, unless a bin's edge lies between.

    Args: state, alive `(M,)`; stock `(M, D)`.
    Returns: state `(size,)`, -1 from the last pair on; stock `(size, D)`; the place of each of the M among them `(M,)`,
        `size` where there was no room; () int32, how many there are.
    """
    unit = 8 * jnp.finfo(stock.dtype).eps * jnp.abs(stock).max(initial=0, where=alive[:, None])
    keys = jnp.round(stock / jnp.where(unit > 0, unit, 1))
    state = jnp.where(alive, state, jnp.iinfo(jnp.int32).max)
    order = jnp.arange(state.shape[0], dtype=jnp.int32)
    *keys, order = jax.lax.sort((state, *keys.T, order), num_keys=1 + stock.shape[1])
    differs = jnp.stack([k[1:] != k[:-1] for k in keys]).any(0)
    new = jnp.concatenate([jnp.ones(1, bool), differs]) & alive[order]
    rank = jnp.minimum(jnp.cumsum(new, dtype=jnp.int32) - 1, size)
    at = jnp.where(new, rank, size)
    states = jnp.full(size, -1, jnp.int32).at[at].set(state[order], mode="drop")
    stocks = jnp.zeros((size, stock.shape[1]), stock.dtype).at[at].set(stock[order], mode="drop")
    return states, stocks, jnp.zeros_like(order).at[order].set(rank), new.sum(dtype=jnp.int32)


def columns(mdp):
    """Rewards with an axis of D stocks: `(S, A, B, D)`."""
    return mdp.reward if mdp.reward_size is not None else mdp.reward[..., None]


def reachable(mdp, size: int) -> Nodes:
    """The pairs that first stock 0 leads to at each step, up to `size` of them."""
    reward = columns(mdp)
    first_state = jnp.nonzero(mdp.start > 0, size=size, fill_value=-1)[0].astype(jnp.int32)
    first_stock = jnp.zeros((size, reward.shape[-1]), reward.dtype)
    first_count = (mdp.start > 0).sum(dtype=jnp.int32)

    def forward(carry, _):
        state, stock = carry
        goes_on = (state >= 0) & ~mdp.terminal[state]
        possible = goes_on[:, None, None] & (mdp.probability[state] > 0)  # (N, A, B)
        then = (stock[:, None, None] + reward[state]) / mdp.gamma  # (N, A, B, D)
        successor = mdp.next_state[state]
        flat = successor.reshape(-1), then.reshape(-1, then.shape[-1]), possible.reshape(-1)
        state, stock, index, count = distinct(*flat, size)
        child = jnp.where(possible, index.reshape(possible.shape), 0)
        return (state, stock), (state, stock, child, count)

    _, (state, stock, child, count) = jax.lax.scan(forward, (first_state, first_stock), None, mdp.horizon)
    join = lambda first, rest: jnp.concatenate([first[None], rest])
    return Nodes(join(first_state, state), join(first_stock, stock), child, join(first_count, count))


def powers(mdp, num: int):
    """gamma^t, t = 0..num - 1."""
    return mdp.gamma ** jnp.arange(num, dtype=mdp.reward.dtype)


def leaves(mdp, nodes: Nodes):
    """Where episodes end, `(L, N)` bool, and the returns there, `(L, N, D)`: gamma^t C_t of first stock 0."""
    at_end = (nodes.state >= 0) & mdp.terminal[nodes.state]
    at_end = at_end.at[-1].set(nodes.state[-1] >= 0)
    return at_end, powers(mdp, nodes.state.shape[0])[:, None, None] * nodes.stock


def search_points(config, mdp, nodes: Nodes):
    """First stocks to search over: `(F, D)`, and how many distinct ones there are, () int32."""
    objective, size = objective_of(config), nodes.stock.shape[-1]
    search, _, c0 = objectives.outer(objective)
    if search == "fixed":
        c0 = jnp.asarray(config.first_stock if c0 is None else c0, nodes.stock.dtype)
        return jnp.broadcast_to(c0.reshape(1, -1), (1, size)), jnp.int32(1)
    num = config.num_first_stocks
    at_end, returns = leaves(mdp, nodes)
    at_end, c0 = at_end.reshape(-1), -returns.reshape(-1, 1)
    if config.first_stocks == "grid":
        low, high = c0.min(where=at_end[:, None], initial=jnp.inf), c0.max(where=at_end[:, None], initial=-jnp.inf)
        return jnp.linspace(low, high, num)[:, None], jnp.int32(num)
    state, c0, _, count = distinct(jnp.zeros(c0.shape[0], jnp.int32), c0, at_end, num)
    c0 = jnp.where(state[:, None] < 0, c0[:1], c0)  # what is left over repeats the first
    return jnp.where(count > num, jnp.nan, c0), count


def lost(nodes: Nodes):
    """Whether there was no room for some node: () bool."""
    return (nodes.needed > nodes.state.shape[1]).any()


def start_weights(mdp, nodes: Nodes):
    """Probabilities of the first nodes, `(N,)`."""
    return jnp.where(nodes.state[0] >= 0, mdp.start[nodes.state[0]], 0)


def occupancy(mdp, nodes: Nodes, policy):
    """How likely each node is: policy `(H, N, A)` to `(H + 1, N)`. NaN where there was no room for some node."""
    probability, terminal = mdp.probability[nodes.state], mdp.terminal[nodes.state]  # (L, N, A, B), (L, N)
    first = jnp.where(lost(nodes), jnp.nan, start_weights(mdp, nodes))

    def forward(mass, at):
        policy, probability, child, terminal = at
        flow = (mass * ~terminal)[:, None, None] * policy[..., None] * probability
        mass = jnp.zeros_like(mass).at[child].add(flow, mode="drop")
        return mass, mass

    _, rest = jax.lax.scan(forward, first, (policy, probability[:-1], nodes.child, terminal[:-1]))
    return jnp.concatenate([first[None], rest])


# Upper CVaR: the crossing of lines


class Extremes(NamedTuple):
    """The best from one first stock, by two greedy policies: of the least tail, lo, and of the greatest, hi."""

    utility: jax.Array  # (), E (c0 + G)_+
    lo: jax.Array  # (2,), P(c0 + G > 0) and P(c0 + G >= 0)
    hi: jax.Array  # (2,)
    actions: tuple  # lo and hi, (H, N) each


def extremes(config, mdp, nodes: Nodes, c0, steps) -> Extremes:
    """Backward induction from c0, `(1,)`, of the problem that is cut after `steps` steps."""
    objective = objective_of(config)
    x = nodes.stock + c0.reshape(1, 1, 1) / powers(mdp, nodes.state.shape[0])[:, None, None]  # (L, N, 1)
    zero = 64 * jnp.finfo(x.dtype).eps * jnp.abs(x).max()  # rounding of stocks
    of_policy = [(x[..., 0] > zero).astype(x.dtype), (x[..., 0] >= -zero).astype(x.dtype), x[..., 0]]
    end = jnp.stack([utility(objective, x), *of_policy, *of_policy], -1)  # (L, N, 7)
    scale = jnp.array([1.0, 0, 0, 1, 0, 0, 1], x.dtype) * (mdp.gamma - 1) + 1  # probabilities do not scale
    over = mdp.terminal[nodes.state] | (nodes.state < 0) | (jnp.arange(x.shape[0])[:, None] >= steps)

    def backward(then, at):
        probability, child, end, over = at
        q = backup(then[:, None], probability, child, scale)[:, :, 0]  # (N, A, 7)
        tied = q[..., 0] >= q[..., 0].max(-1, keepdims=True) - config.tie_tolerance
        most = lambda x, mean: pick(config, jnp.stack([jnp.where(tied, x, -jnp.inf), mean], -1))
        lo, hi = most(-q[..., 1], q[..., 3]), most(q[..., 5], q[..., 6])
        of = lambda action: jnp.take_along_axis(q, action[:, None, None], 1)[:, 0]  # (N, 7)
        now = jnp.concatenate([q[..., :1].max(1), of(lo)[:, 1:4], of(hi)[:, 4:]], -1)
        return jnp.where(over[:, None], end, now), (lo, hi)

    tables = mdp.probability[nodes.state[:-1]], nodes.child, end[:-1], over[:-1]
    first, actions = jax.lax.scan(backward, end[-1], tables, reverse=True)
    best = start_weights(mdp, nodes) @ first
    return Extremes(best[0], best[1:3], best[4:6], actions)


def randomise(config, mdp, nodes: Nodes, c0, steps):
    """The first stock where h is least, h there, and the mixture of extreme policies whose upper CVaR is h.

    From the best candidate c0 on, two supporting lines of h, one falling and one rising, are kept, and the next c0 is
    where they meet: each round that does not end it finds a line above the one before.

    Args: c0 `(1,)`. Returns: c0 `(1,)`; h (); policy `(H, N, A)`.
    """
    tau = config.tau
    lowest = jnp.min(leaves(mdp, nodes)[1], where=leaves(mdp, nodes)[0][..., None], initial=jnp.inf)
    zero = 64 * jnp.finfo(nodes.stock.dtype).eps / tau  # rounding of slopes
    h = lambda c, u: objectives.outer(objective_of(config)).value(c[0], u)

    def slopes(best):
        return best.lo[0] / tau - 1, best.hi[1] / tau - 1

    def searching(carry):
        i, _, _, _, best = carry
        falling, rising = slopes(best)
        return (i < 64) & ~((falling <= zero) & (rising >= -zero))

    def narrow(carry):
        i, c, left, right, best = carry
        falling, rising = slopes(best)
        line = lambda slope: jnp.stack([slope, h(c, best.utility) - slope * c[0]])
        left = jnp.where(rising < 0, line(rising), left)
        right = jnp.where(rising < 0, right, line(falling))
        c = ((right[1] - left[1]) / (left[0] - right[0]))[None]
        return i + 1, c, left, right, extremes(config, mdp, nodes, c, steps)

    # (x)_+ >= 0 and (x)_+ >= x: lines of slope -1 and 1 / tau - 1 that h is never below.
    dtype = nodes.stock.dtype
    left = jnp.array([-1.0, 0.0], dtype)
    right = jnp.stack([1 / tau - 1, lowest / tau]).astype(dtype)
    carry = (jnp.int32(0), c0, left, right, extremes(config, mdp, nodes, c0, steps))
    _, c0, _, _, best = jax.lax.while_loop(searching, narrow, carry)

    weight = mixture(tau, best.lo[1], best.hi[1])
    one_hot = lambda action: jax.nn.one_hot(action, mdp.num_actions, dtype=dtype)
    lo, hi = map(one_hot, best.actions)
    visits = lambda policy: occupancy(mdp, nodes, policy)[:-1, :, None] * policy  # (H, N, A)
    both = (1 - weight) * visits(lo) + weight * visits(hi)
    total = both.sum(-1, keepdims=True)
    return c0, h(c0, best.utility), jnp.where(total > 0, both / jnp.where(total > 0, total, 1), lo)


# Grids of stocks


def grid_points(config, mdp):
    """`(C,)`, even, from one point below -Gmax to one above -Gmin."""
    low, high = return_bounds(mdp)
    spacing = jnp.where(high > low, high - low, 1) / (config.num_stocks - 3)
    return -high + spacing * (jnp.arange(config.num_stocks) - 1)


def grid(config, mdp) -> Nodes:
    """States x grid points: node s * C + j."""
    points = grid_points(config, mdp)
    size = points.shape[0]
    then = (points[None, :, None, None] + mdp.reward[:, None]) / mdp.gamma  # (S, C, A, B)
    index, weight, beyond = place(then, points)
    flat = lambda x: x.reshape(1, mdp.num_states * size, *x.shape[2:])
    state = jnp.repeat(jnp.arange(mdp.num_states, dtype=jnp.int32), size)[None]
    stocks = jnp.tile(points, mdp.num_states)[None, :, None]
    child = mdp.next_state[:, None] * size + index
    return Nodes(state, stocks, flat(child), jnp.full(1, state.size, jnp.int32), flat(weight), flat(beyond))


def end_slopes(config, dtype):
    """Slopes of U and W below and above the grid: `(2, 2)`."""
    left, right = objective_of(config).slopes
    return jnp.stack([jnp.stack([left, 1.0]), jnp.stack([right, 1.0])]).astype(dtype)


def grid_error(config, mdp):
    """How far the best objective on the grid may be from the true one, () float; not what sweeps still change."""
    objective = objective_of(config)
    points = grid_points(config, mdp)
    spacing = points[1] - points[0]
    left, right = objective.slopes
    times = 1 / (1 - mdp.gamma) if mdp.horizon is None else powers(mdp, mdp.horizon + 1).sum()
    return objectives.outer(objective).scale * times * spacing * jnp.abs(
        jnp.asarray(right - left, spacing.dtype)
    ) / 4 + objectives.grid_error(objective, spacing)


def grid_law(config, mdp, params: Params):
    """Atoms `(S C, 1)` and probabilities `(S C,)` of the return on a grid, each return so far split between two points.

    It ends after the horizon, or when all that may follow is less than the grid's spacing.
    """
    low, high = return_bounds(mdp)
    size, num_states = config.num_stocks, mdp.num_states
    returns = jnp.linspace(low, jnp.where(high > low, high, low + 1), size)
    stocks = params.nodes.stock[0, :size, 0]
    spacing = stocks[1] - stocks[0]
    index, weight, _ = place(jnp.zeros((), returns.dtype), returns)
    mass = jnp.zeros(size, returns.dtype).at[index].add(1 - weight).at[index + 1].add(weight)
    mass = mdp.start[:, None] * mass[None]  # (S, C)
    policies = params.policy.reshape(-1, num_states, size, mdp.num_actions)

    def forward(carry):
        t, discount, mass = carry
        stock = (params.first_stock + returns) / discount
        nearest = jnp.clip(jnp.round((stock - stocks[0]) / spacing), 0, size - 1).astype(jnp.int32)
        policy = policies[jnp.minimum(t, policies.shape[0] - 1)][:, nearest]  # (S, C, A)
        flow = mass[..., None, None] * policy[..., None] * mdp.probability[:, None]  # (S, C, A, B)
        index, weight, _ = place(returns[None, :, None, None] + discount * mdp.reward[:, None], returns)
        index = mdp.next_state[:, None] * size + index
        moved = jnp.zeros(num_states * size, mass.dtype)
        moved = moved.at[index].add(flow * (1 - weight)).at[index + 1].add(flow * weight)
        return t + 1, discount * mdp.gamma, moved.reshape(num_states, size)

    def goes_on(carry):
        t, discount, _ = carry
        return t < mdp.horizon if mdp.horizon else discount * (high - low) > spacing

    _, _, mass = jax.lax.while_loop(goes_on, forward, (jnp.int32(0), jnp.ones((), returns.dtype), mass))
    return jnp.tile(returns, num_states)[:, None], mass.reshape(-1)


# The algorithm


def q_values(config, mdp, nodes: Nodes, values):
    """(U, W) of every action at every time: `(L, N, F, 2)` to `(T, N, A, F, 2)`."""
    then = values[1:] if mdp.horizon else values
    degree = objective_of(config).degree or 0
    scale = jnp.stack([mdp.gamma**degree, mdp.gamma])
    if config.nodes == "reachable":
        return jax.vmap(partial(backup, scale=scale))(then, mdp.probability[nodes.state[:-1]], nodes.child)
    where = nodes.child[0], nodes.weight[0], nodes.beyond[0]
    probability, slopes = mdp.probability[nodes.state[0]], end_slopes(config, values.dtype)
    mean = lambda v: jnp.einsum("nab,nabfk->nafk", probability, interpolate(v, *where, slopes), precision="highest")
    return scale.reshape(1, 1, 1, 1, -1) * jax.vmap(mean)(then)


def keep_ends(mdp, nodes: Nodes, values, new):
    """New values `(T, N, F, 2)` of the nodes that go on, among the old `(L, N, F, 2)`."""
    over = (nodes.state < 0) | mdp.terminal[nodes.state]
    over = over[: new.shape[0], :, None, None]
    return jnp.concatenate([jnp.where(over, values[: new.shape[0]], new), values[new.shape[0] :]])


def chosen(q, action):
    """(U, W) of the chosen actions: q `(T, N, A, F, 2)`, action `(T, N, F)` to `(T, N, F, 2)`."""
    return jnp.take_along_axis(q, action[:, :, None, :, None], 2)[:, :, 0]


def at_start(config, mdp, nodes: Nodes, candidates, values):
    """(U, W) from the MDP's start at each candidate c0: `(F, 2)`."""
    if config.nodes == "reachable":
        return jnp.einsum("n,nfk->fk", start_weights(mdp, nodes), values[0], precision="highest")
    size = config.num_stocks
    index, weight, beyond = place(candidates[:, 0], nodes.stock[0, :size, 0])  # (F,)
    slopes = end_slopes(config, values.dtype)
    of_state = lambda v: interpolate(v, index, weight, beyond, slopes)[:, 0]  # (F, 2)
    each = jax.vmap(of_state)(values[0].reshape(mdp.num_states, size, 1, 2))
    return jnp.einsum("s,sfk->fk", mdp.start, each, precision="highest")


def settle(config, mdp, params: Params, steps) -> Params:
    """The first stock, what it is worth, and the policy from it, of the current values."""
    nodes, outer = params.nodes, objectives.outer(objective_of(config))
    u, mean = at_start(config, mdp, nodes, params.candidates, params.values).T
    h = outer.value(params.candidates.sum(-1), u)
    score = jnp.stack([-h if outer.search == "min" else h, mean - params.candidates.sum(-1)], -1)
    best = pick(config, score)
    first_stock, dual = params.candidates[best], h[best]
    if outer.search == "min" and config.nodes == "reachable":
        first_stock, dual, policy = randomise(config, mdp, nodes, first_stock, steps)
    else:
        q = q_values(config, mdp, nodes, params.values)
        q = jnp.take(q, best if config.nodes == "reachable" else 0, axis=3)  # (T, N, A, 2)
        policy = jax.nn.one_hot(pick(config, q), mdp.num_actions, dtype=q.dtype)
    dual = jnp.where(lost(nodes), jnp.nan, dual)
    return params._replace(first_stock=first_stock, dual=dual, policy=policy)


def period(config, mdp) -> int:
    """Sweeps that one `step` makes."""
    return 1


def check(config, mdp):
    """Refuses what dynamic programming over stocks would get wrong, with the reason. Raises ValueError."""
    for name, words in WORDS.items():
        if getattr(config, name) not in words:
            raise ValueError(f"{name} is {getattr(config, name)!r}; it must be one of {', '.join(words)}")
    objective, size = objective_of(config), mdp.reward_size
    objectives.check(objective, round(float(mdp.gamma), 6), mdp.horizon)  # float32 is shown as it was given
    if objectives.is_vector(objective) != (size is not None):
        fix = "its stocks need vectors" if size is None else "only homeostatic takes vectors"
        raise ValueError(
            f"{objective.name} on {mdp.name}, whose rewards are {'numbers' if size is None else 'vectors'}: {fix}"
        )
    if len(config.first_stock) not in (1, size):
        each = "" if size is None else f", or one for each of {size}"
        raise ValueError(f"first_stock has {len(config.first_stock)} numbers; give one{each}")
    if config.nodes == "grid":
        if size is not None:
            raise ValueError(f"{mdp.name} has {size} stocks and nodes: grid takes one; use nodes: reachable")
        if not hasattr(objective, "slopes"):
            raise ValueError(f"{objective.name} is not piecewise linear, so no grid of stocks; use nodes: reachable")
        return
    if mdp.horizon is None:
        raise ValueError(f"nodes: reachable needs a horizon and {mdp.name} has none; give one, or use nodes: grid")
    needed, count = jax.device_get(_counts(config, mdp))
    over = [(t, n) for t, n in enumerate(needed.tolist()) if n > config.max_nodes]
    if over:
        raise ValueError(
            f"{mdp.name}: at step {over[0][0]} there are {over[0][1]} pairs of state and stock, and max_nodes is "
            f"{config.max_nodes}; raise it" + ", or use nodes: grid" * hasattr(objective, "slopes")
        )
    if count > config.num_first_stocks:
        raise ValueError(
            f"{mdp.name}: there are {count} returns to search c0 over, and num_first_stocks is "
            f"{config.num_first_stocks}; raise it, or use first_stocks: grid"
        )


@jax.jit
def _counts(config, mdp):
    """Distinct pairs at each step `(H + 1,)`, and first stocks to search over."""
    nodes = reachable(mdp, config.max_nodes)
    return nodes.needed, search_points(config, mdp, nodes)[1]


def init(config, mdp, key) -> State:
    """Values as if everything ended at once; until the first sweep the policy is uniform. Args: key, not used."""
    objective = objective_of(config)
    num_levels, steps = (1, 1) if mdp.horizon is None else (mdp.horizon + 1, mdp.horizon)
    if config.nodes == "reachable":
        nodes = reachable(mdp, config.max_nodes)
        candidates, _ = search_points(config, mdp, nodes)
        shift = candidates[None] / powers(mdp, num_levels)[:, None, None]  # (L, F, D)
        x = nodes.stock[:, :, None] + shift[:, None]  # (L, N, F, D)
    else:
        nodes = grid(config, mdp)
        search, _, c0 = objectives.outer(objective)
        points = nodes.stock[0, : config.num_stocks]
        candidates = jnp.asarray(c0, points.dtype).reshape(1, 1) if search == "fixed" else points
        x = jnp.broadcast_to(nodes.stock[:, :, None], (num_levels, nodes.stock.shape[1], 1, 1))
    policy = jnp.full((steps, x.shape[1], mdp.num_actions), 1 / mdp.num_actions, x.dtype)
    unknown = jnp.full((), jnp.nan, x.dtype)
    params = Params(nodes, candidates, ends(objective, x), policy, candidates[0], unknown, mdp.gamma)
    return State(params, jnp.int32(0))


def step(config, mdp, state: State) -> tuple[State, dict]:
    params, sweeps = state.params, state.sweeps + 1
    nodes, values = params.nodes, params.values

    # Greedy with respect to the values before.
    q = q_values(config, mdp, nodes, values)
    action = pick(config, jnp.moveaxis(q, 2, -2))  # (T, N, F)
    if config.method == "value":
        of_policy = chosen(q, action)
        new = keep_ends(mdp, nodes, values, of_policy.at[..., 0].set(q[..., 0].max(2)))
    else:
        new = evaluate_policy(config, mdp, nodes, values, action)
    residual = jnp.abs(new - values)[..., 0].max()

    # The best first stock and the policy from it.
    steps = mdp.horizon if config.method == "policy" and mdp.horizon else sweeps  # that the values look ahead
    params = settle(config, mdp, params._replace(values=new), steps)
    metrics = dict(residual=residual, dual=params.dual, nodes=nodes.needed.max().astype(jnp.float32))
    return State(params, sweeps), metrics


def evaluate_policy(config, mdp, nodes: Nodes, values, action):
    """Sweeps of one policy until nothing changes by more than rounding; with a horizon, H of them."""
    sweep = lambda v: keep_ends(mdp, nodes, v, chosen(q_values(config, mdp, nodes, v), action))

    def moves(carry):
        v, before, i = carry
        rounding = 4 * jnp.finfo(v.dtype).eps * jnp.abs(v).max()
        return (i < 10_000) & (jnp.abs(v - before).max() > rounding)

    carry = sweep(values), values, jnp.int32(1)
    return jax.lax.while_loop(moves, lambda c: (sweep(c[0]), c[0], c[2] + 1), carry)[0]


def law(config, mdp, params: Params):
    """The law of the discounted return under the policy from its first stock: atoms `(n, D)`, probabilities `(n,)`."""
    if config.nodes == "grid":
        return grid_law(config, mdp, params)
    at_end, returns = leaves(mdp, params.nodes)
    mass = jnp.where(at_end, occupancy(mdp, params.nodes, params.policy), 0)
    return returns.reshape(-1, returns.shape[-1]), mass.reshape(-1)


def evaluate(config, mdp, params: Params) -> dict:
    """Exact figures of the policy, from the law of its return; `dual` is the objective by the values."""
    objective = objective_of(config)
    x, p = law(config, mdp, params)
    x = jnp.where(jnp.isnan(p).any(), jnp.nan, x)
    mean = laws.mean(x.sum(-1), p)
    found = {"return": mean, "dual": params.dual}
    if mdp.reward_size is None:
        found["first_stock"] = params.first_stock[0]
    if hasattr(objective, "tau"):
        found["lower_cvar"] = laws.cvar(x[:, 0], p, objective.tau)
        found["upper_cvar"] = laws.upper_cvar(x[:, 0], p, objective.tau)
    match objective:
        case objectives.LowerCVaR() | objectives.UpperCVaR():
            value = found[objective.name]
        case objectives.MeanCVaR():
            value = objective.weight * mean + (1 - objective.weight) * found["lower_cvar"]
        case _:
            value = (p * utility(objective, params.first_stock[None] + x)).sum()
    found["objective"] = value
    if config.nodes == "grid":
        found["grid_error"] = grid_error(config, mdp)
    return found


def begin(config, spec: Spec, params: Params, env_state, key):
    """The best first stock, before an evaluation."""
    return stock.start(env_state, params.first_stock[0], params.gamma)


def act(config, spec: Spec, params: Params, obs, key):
    """The policy at the nearest node of the state and the time. Args: obs, `(B, S)` or `(B, S + 1)`, and stock `(B,)`.

    Returns: `(B,)` int32.
    """
    seen, stocks = obs
    nodes, steps = params.nodes, params.policy.shape[0]
    if config.nodes == "reachable":
        num_states, has_time = seen.shape[-1] - 1, True
    else:
        num_states = nodes.state.shape[1] // config.num_stocks
        has_time = seen.shape[-1] > num_states
    state = seen[:, :num_states].argmax(-1)
    taken = jnp.round((1 - seen[:, -1]) * steps) if has_time else jnp.zeros_like(stocks)
    t = jnp.clip(taken, 0, steps - 1).astype(jnp.int32)
    if config.nodes == "reachable":
        shift = params.first_stock[None] / params.gamma ** t[:, None]  # (B, 1)
        distance = jnp.abs(nodes.stock[t, :, 0] + shift - stocks[:, None])
        node = jnp.where(nodes.state[t] == state[:, None], distance, jnp.inf).argmin(-1)
    else:
        points = nodes.stock[0, : config.num_stocks, 0]
        nearest = jnp.round((stocks - points[0]) / (points[1] - points[0]))
        node = state * config.num_stocks + jnp.clip(nearest, 0, config.num_stocks - 1).astype(jnp.int32)
    return jax.random.categorical(key, jnp.log(params.policy[t, node])).astype(jnp.int32)


EXAMPLE = Example(
    source="slippery",
    steps=16,
    eval_period=1,
    config=Config(objective="lower_cvar", tau=0.1, max_nodes=32, num_first_stocks=64),
)
