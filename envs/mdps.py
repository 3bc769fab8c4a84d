"""Small MDPs that dynamic programming solves exactly and that learners can be run on: tables, builders, a sampler.

    s' = next_state[s, a, b] and r = reward[s, a, b] with probability probability[s, a, b]

A branch b is one outcome of an action: a successor and one atom of the reward. A reward of finitely many atoms is
several branches; rows with fewer outcomes than the widest are padded with branches of probability 0. So a sweep over
an MDP of S states and A actions is a gather over (S, A, B), not a product with a matrix of S^2 A numbers.

A reward may be a vector of D numbers, `(S, A, B, D)`: changes of D stocks (networks/objectives.py, `homeostatic`). Such
an MDP is solved by `algos/stock_dp.py` alone, and not played: a learner's reward is one number.

An MDP ends in its terminal states, whose value is 0, and after `horizon` steps where it has one. Its `gamma` may be 1
where there is a horizon or where every policy is sure to reach a terminal state.

    mdps.make("slippery")              an MDP; `mdps.names()` lists them, each builder below says what it is
    mdps.env(mdp, num_envs)            an environment that plays it (docs/protocol.md)
    envs.make("mdp/slippery")          the two in one

The environment observes the one-hot vector of the state, `(S,)`. With a horizon H it appends the fraction of time that
is left, (H - t) / H, because the best action depends on it, and reaching the horizon is the end of the MDP: the episode
is `terminated`. Only the parameter `episode_length` makes `truncated`.
"""

import difflib
import inspect
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.params import convert
from envs.types import Mean, Spec, Transition, discrete_spec, episode_metrics, pytree, static

TOLERANCE = 1e-6  # of sums of probabilities: ten float32 roundings


@pytree
class MDP:
    """A finite MDP. Floats have one dtype, float32 unless it was built within `jax.enable_x64`."""

    next_state: jax.Array  # (S, A, B) int32, successor of each branch
    reward: jax.Array  # (S, A, B), or (S, A, B, D)
    probability: jax.Array  # (S, A, B), sums to one over B; 0 on padded branches
    terminal: jax.Array  # (S,) bool: absorbing, of value 0
    start: jax.Array  # (S,) distribution of the first state
    gamma: jax.Array  # () discount factor
    name: str = static()
    horizon: int | None = static(default=None)  # env steps; None: endless

    @property
    def num_states(self) -> int:
        return self.next_state.shape[-3]

    @property
    def num_actions(self) -> int:
        return self.next_state.shape[-2]

    @property
    def num_branches(self) -> int:
        return self.next_state.shape[-1]

    @property
    def reward_size(self) -> int | None:
        """D where rewards are vectors, None where they are numbers."""
        return self.reward.shape[-1] if self.reward.ndim > self.next_state.ndim else None

    @property
    def spec(self) -> Spec:
        """Of the environment that plays it without an `episode_length`."""
        obs = jax.ShapeDtypeStruct((self.num_states + (self.horizon is not None),), jnp.float32)
        return discrete_spec(obs, self.num_actions, self.horizon or 0)


def tabulate(name: str, outcomes, gamma: float, horizon: int = 0, terminal=(), start=0) -> MDP:
    """An MDP from lists. A terminal state's own list is not read: it stays, for a reward of 0.

    Args: outcomes, `outcomes[s][a]` a list of (probability, successor, reward), equal outcomes being added up, rewards
        being numbers or tuples of D; horizon, env steps, 0 for endless; terminal, numbers of states; start, the first
        state, or S probabilities.
    """
    rewards = [r for actions in outcomes for branches in actions for _, _, r in branches]
    nothing = 0.0 if not rewards or np.ndim(rewards[0]) == 0 else (0.0,) * len(rewards[0])
    merged = []
    for s, actions in enumerate(outcomes):
        for branches in actions:
            row = {}
            for p, successor, r in [(1.0, s, nothing)] if s in terminal else branches:
                row[successor, r] = row.get((successor, r), 0.0) + p
            merged.append([(p, *key) for key, p in row.items()])
    width = max(map(len, merged))
    num_states, num_actions = len(outcomes), len(outcomes[0])
    pad = lambda i, row: row + [(0.0, i // num_actions, nothing)] * (width - len(row))
    table = zip(*(branch for i, row in enumerate(merged) for branch in pad(i, row)), strict=True)
    p, successor, reward = (np.array(x).reshape(num_states, num_actions, width, *np.shape(x)[1:]) for x in table)
    start = np.eye(num_states)[start] if np.ndim(start) == 0 else np.asarray(start, float)
    return _mdp(name, successor, reward, p, terminal, start, gamma, horizon)


def _mdp(name, next_state, reward, probability, terminal, start, gamma, horizon) -> MDP:
    floats = lambda x: jnp.asarray(np.asarray(x, jax.dtypes.canonicalize_dtype(float)))  # cast by NumPy: no compile
    return MDP(
        next_state=jnp.asarray(np.asarray(next_state, np.int32)),
        reward=floats(reward),
        probability=floats(probability),
        terminal=jnp.asarray(np.isin(np.arange(len(start)), list(terminal))),
        start=floats(start),
        gamma=floats(gamma),
        name=name,
        horizon=horizon or None,
    )


def dense(mdp: MDP) -> tuple[np.ndarray, np.ndarray]:
    """The matrix of transitions, `(S, A, S)`, and the expected rewards, `(S, A)`, in its precision. Not for tracers.

    Of a vector of rewards `(S, A, D)`.
    """
    successor, reward, probability = (np.asarray(x) for x in (mdp.next_state, mdp.reward, mdp.probability))
    s, a, _ = np.indices(successor.shape)
    p = np.zeros((*successor.shape[:2], mdp.num_states), probability.dtype)
    np.add.at(p, (s, a, successor), probability)
    return p, (probability.reshape(*probability.shape, *[1] * (reward.ndim - 3)) * reward).sum(2)


# Checks


def validate(mdp: MDP) -> MDP:
    """The same MDP. Not for tracers.

    Raises: ValueError, one line that names the first state and action that are wrong, the value, what it must be and
        the fix, where a shape, a successor, a reward, a probability, a terminal state, the start, gamma or the horizon
        is wrong, or where gamma is 1 and an endless episode need not end.
    """
    successor, reward, p = (np.asarray(x) for x in (mdp.next_state, mdp.reward, mdp.probability))
    terminal, start, gamma = np.asarray(mdp.terminal), np.asarray(mdp.start), np.asarray(mdp.gamma)

    def refuse(what):
        raise ValueError(f"{mdp.name}: {what}")

    def rows(wrong, say):
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            where = ", ".join(f"{noun} {i}" for noun, i in zip(("state", "action", "branch"), at, strict=False))
            refuse(f"{where}: {say(at)}")

    num_states = successor.shape[0] if successor.ndim == 3 else 0
    sizes = reward.shape[3:] if reward.ndim == 4 and reward.shape[3] else ()  # (D,) where rewards are vectors
    if successor.ndim != 3 or 0 in successor.shape or successor.dtype.kind != "i":
        refuse(f"next_state {successor.dtype}{list(successor.shape)} must be integers [S, A, B], each at least 1")
    for name, x, shape in (
        ("reward", reward, successor.shape + sizes),
        ("probability", p, successor.shape),
        ("terminal", terminal, (num_states,)),
        ("start", start, (num_states,)),
        ("gamma", gamma, ()),
    ):
        if x.shape != shape:
            refuse(f"{name} of shape {list(x.shape)} must be {list(shape)}, as next_state {list(successor.shape)} is")
    if terminal.dtype != bool:
        refuse(f"terminal of type {terminal.dtype} must be bool, one for each state")

    rows(
        (successor < 0) | (successor >= num_states),
        lambda i: f"next_state {successor[i]} must be from 0 to {num_states - 1}, on padded branches too",
    )
    of_each = lambda wrong: wrong.any(-1) if sizes else wrong  # (S, A, B)
    show = lambda r: r.tolist() if sizes else f"{r:g}"
    rows(of_each(~np.isfinite(reward)), lambda i: f"reward {show(reward[i])} must be finite; give padded branches 0")
    rows(~(p >= 0), lambda i: f"probability {p[i]:g} must be at least 0; give padded branches 0")
    total = p.sum(-1, dtype=float)
    rows(
        ~(abs(total - 1) <= TOLERANCE),
        lambda i: f"probabilities sum to {total[i]:.9g} and must sum to 1 within {TOLERANCE:g}; divide them by the sum",
    )
    here = np.arange(num_states)[:, None, None]
    rows(
        terminal[:, None, None] & (p > 0) & ((successor != here) | of_each(reward != 0)),
        lambda i: (
            f"a terminal state goes to {successor[i]} for reward {show(reward[i])} and must stay for 0; "
            "pay the reward on the way in, or make it not terminal"
        ),
    )
    rows(~(start >= 0), lambda i: f"start {start[i]:g} must be at least 0")
    if not abs(start.sum(dtype=float) - 1) <= TOLERANCE:
        refuse(f"start sums to {start.sum(dtype=float):.9g} and must sum to 1 within {TOLERANCE:g}; divide it by that")
    if not 0 <= gamma <= 1:
        refuse(f"gamma {gamma:g} must be from 0 to 1")
    if mdp.horizon is not None and mdp.horizon < 1:
        refuse(f"horizon {mdp.horizon} must be at least 1, or None for endless")
    if gamma == 1 and mdp.horizon is None:
        staying = stays(mdp)
        rows(
            staying,
            lambda i: (
                "gamma is 1 and this action need never end, so returns may be infinite; "
                "give a horizon, or a gamma below 1, or let every action lead to a terminal state"
            ),
        )
    return mdp


def stays(mdp: MDP) -> np.ndarray:
    """The actions that a policy can go on with for ever, `(S, A)` bool: no such action, and every episode surely ends.

    They are those of the largest set of states, none terminal, in which each has an action that does not leave the set:
    what is left after striking out states without one until none is struck out.
    """
    successor, possible = np.asarray(mdp.next_state), np.asarray(mdp.probability) > 0
    inside = ~np.asarray(mdp.terminal)
    while True:
        within = (inside[successor] | ~possible).all(-1) & inside[:, None]  # (S, A)
        if (within.any(-1) == inside).all():
            return within
        inside = within.any(-1)


# Builders


def chain(length=5, slip=0.2, gamma=0.99, horizon=0) -> MDP:
    """A chain that is worth walking to its end, where a small reward lies at its start.

        (0) -0-> (1) -0-> (2) -0-> (3) -0-> (4) -10-> (4)     action 0, forward
        every state -2-> (0)                                  action 1, back

    With probability `slip` the other action happens. It tells whether an agent plans further than the next reward.
    Source: Strens, A Bayesian framework for reinforcement learning, ICML 2000; after Dearden et al., AAAI 1998.
    """
    _fraction("chain", "slip", slip)
    move = lambda s: ((min(s + 1, length - 1), 10.0 if s == length - 1 else 0.0), (0, 2.0))
    rows = [[[(1 - slip, *move(s)[a]), (slip, *move(s)[1 - a])] for a in (0, 1)] for s in range(length)]
    return tabulate("chain", rows, gamma, horizon)


def two_state(gamma=0.5) -> MDP:
    """One action, two states, reward 1 in state 0: its returns' means, variances and laws are known.

        (0) -> 0.6 (0), 0.4 (1)    reward 1
        (1) -> 0.3 (0), 0.7 (1)    reward 0

    gamma = 1/2: V = (26/17, 6/17) and Var = (.1092303, .0980080).
    """
    return tabulate("two_state", [[[(0.6, 0, 1.0), (0.4, 1, 1.0)]], [[(0.3, 0, 0.0), (0.7, 1, 0.0)]]], gamma)


def bernoulli(gamma=0.5) -> MDP:
    """One state, one action, reward 0 or 1 with probability 1/2 each, for ever.

    At gamma = 1/2 the rewards are the bits of a binary number, and the return is uniform on [0, 2]: its lower CVaR at
    tau is tau, its upper one 2 - tau.
    """
    return tabulate("bernoulli", [[[(0.5, 0, 0.0), (0.5, 0, 1.0)]]], gamma)


def gamble(gamma=1.0) -> MDP:
    """Two steps, where the best second one depends on what the first one paid, and the state does not tell it.

        (0) -> 1/2 +2, 1/2 -1, whatever the action -> (1)
        (1) action 0, safe: 0; action 1, risky: 1/2 +3/gamma, 1/2 -2/gamma -> end

    Dividing by gamma keeps the return's law. CVaR at tau = 1/2 is -1/2: safe after +2, risky after -1; no policy
    that forgets the first reward does better than -1. Source: our example of stock augmentation, for Pires et al.,
    JMLR 2025.
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"gamble: gamma {gamma:g} must be more than 0 and at most 1; its rewards are divided by it")
    first = [(0.5, 1, 2.0), (0.5, 1, -1.0)]
    second = [[(1.0, 2, 0.0)], [(0.5, 2, 3.0 / gamma), (0.5, 2, -2.0 / gamma)]]
    return tabulate("gamble", [[first, first], second, [[], []]], gamma, 2, (2,))


def bandit() -> MDP:
    """One choice: action 0 pays 2; action 1 pays 4 with probability 1/4 and otherwise 0.

    The upper CVaR at tau = 1/2 is 2 with either action and 8/3 with action 0 at probability 1/3: the optimist must
    randomise. Source: our example for Pires et al., JMLR 2025.
    """
    return tabulate("bandit", [[[(1.0, 1, 2.0)], [(0.75, 1, 0.0), (0.25, 1, 4.0)]], [[], []]], 1.0, 1, (1,))


def menu(menu=(0.0, 1.0, 3.0), horizon=3, gamma=1.0) -> MDP:
    """One state; action i pays the i-th reward of the menu. What matters is which returns can be reached.

        (0) -menu[i]-> (0)    `horizon` times

    With the defaults, every integer from 0 to 9 but 8. Source: our example of a desired return, for Pires et al.,
    JMLR 2025.
    """
    return tabulate("menu", [[[(1.0, 0, float(r))] for r in menu]], gamma, horizon)


def exponential(gamma=0.5) -> MDP:
    """Two steps on which dynamic programming is wrong for exponential utility, K = E[-exp(-G)].

        (0) -> 0 -> (1)
        (1) action 0, sure: 0; action 1, gamble: 1/2 +2.2, 1/2 -1 -> end

    Seen from state 1 the sure action is better, -1 against -1.4145; seen from state 0, where gamma halves the gamble,
    the gamble is, -0.9908 against -1. Source: our example of an objective that is not indifferent to gamma, for Pires
    et al., JMLR 2025.
    """
    second = [[(1.0, 2, 0.0)], [(0.5, 2, 2.2), (0.5, 2, -1.0)]]
    return tabulate("exponential", [[[(1.0, 1, 0.0)]] * 2, second, [[], []]], gamma, 2, (2,))


def homeostat(horizon=10, gamma=1.0) -> MDP:
    """Something to keep in balance: rewards are changes of a stock, such as food in the body.

        (0) hungry ground   action 0, rest: 1/2 0, 1/2 -1          action 1, forage -> (1): -1
        (1) feeding ground  action 0, eat: 3/4 +2, 1/4 0           action 1, leave -> (0): -1

    What it is worth to eat depends on the stock: nothing in the state tells it. The greatest mean is reached by eating
    to the end. Source: our example of homeostatic regulation, for Pires et al., JMLR 2025.
    """
    rows = [
        [[(0.5, 0, 0.0), (0.5, 0, -1.0)], [(1.0, 1, -1.0)]],
        [[(0.75, 1, 2.0), (0.25, 1, 0.0)], [(1.0, 0, -1.0)]],
    ]
    return tabulate("homeostat", rows, gamma, horizon)


def two_stocks(horizon=6, gamma=1.0) -> MDP:
    """Two stocks to keep in balance, food and water: a reward is the pair of their changes.

        (0) meadow   action 0, eat: 3/4 (+2, -1), 1/4 (0, -1)      action 1, walk -> (1): (-1, -1)
        (1) spring   action 0, drink: (-1, +2)                     action 1, walk -> (0): (-1, -1)

    Source: our example of homeostatic regulation of a vector, for Pires et al., JMLR 2025.
    """
    rows = [
        [[(0.75, 0, (2.0, -1.0)), (0.25, 0, (0.0, -1.0))], [(1.0, 1, (-1.0, -1.0))]],
        [[(1.0, 1, (-1.0, 2.0))], [(1.0, 0, (-1.0, -1.0))]],
    ]
    return tabulate("two_stocks", rows, gamma, horizon)


def sure_or_gamble(gamma=0.5) -> MDP:
    """One state for ever: action 0 pays 0.45, action 1 pays 0 or 1 with probability 1/2 each.

    At gamma = 1/2 and tau = 0.9 both, repeated, have the CVaR 0.9, and a policy with a stock has 0.9222.
    Source: our example of an endless problem, for Pires et al., JMLR 2025.
    """
    return tabulate("sure_or_gamble", [[[(1.0, 0, 0.45)], [(0.5, 0, 0.0), (0.5, 0, 1.0)]]], gamma)


THREE = (  # [s][a], probabilities of the successors 0, 1, 2
    ((0.5, 0.5, 0.0), (0.2, 0.3, 0.5)),
    ((0.1, 0.6, 0.3), (0.4, 0.4, 0.2)),
    ((0.0, 0.25, 0.75), (0.5, 0.0, 0.5)),
)


def _three(name, rewards, gamma) -> MDP:
    row = lambda s, a: [(p, successor, rewards[s][a]) for successor, p in enumerate(THREE[s][a]) if p]
    return tabulate(name, [[row(s, a) for a in (0, 1)] for s in range(3)], gamma)


def three_state(gamma=0.8) -> MDP:
    """Three states, two actions, no end: what distributional operators are compared on.

    Source: our example, for Achab & Neu 2021 (arXiv 2112.15430) and Achab et al., TMLR 2023 (arXiv 2304.14421).
    """
    return _three("three_state", ((1.0, 0.0), (0.0, 0.5), (-1.0, 2.0)), gamma)


def all_optimal() -> MDP:
    """The transitions of `three_state` with rewards V - gamma P V, V = (1, 3, -2): every action is optimal in the mean.

    What is left to choose is how safe or risky the return is. Source: our example, for Achab & Neu 2021.
    """
    return _three("all_optimal", ((-0.6, 0.92), (1.96, 2.04), (-1.4, -1.6)), 0.8)


def safe_risky(gamma=0.9) -> MDP:
    """Two steps and two ways of the same mean.

        (0) -> 1/2 -1, 1/2 +1, whatever the action -> (1)
        (1) action 0, safe: 1; action 1, risky: 1/2 0, 1/2 2 -> end

    Source: our example, for Achab & Neu 2021.
    """
    first = [(0.5, 1, -1.0), (0.5, 1, 1.0)]
    second = [[(1.0, 2, 1.0)], [(0.5, 2, 0.0), (0.5, 2, 2.0)]]
    return tabulate("safe_risky", [[first, first], second, [[], []]], gamma, terminal=(2,))


def tie(gamma=0.9) -> MDP:
    """Two actions of value 0 and different laws: the law of (0) under an optimal policy depends on how ties are broken.

        (0) -> 0 -> (1)
        (1) action 0: 0; action 1: 1/2 -1, 1/2 +1 -> end

    Source: our example, for Achab et al., TMLR 2023, whose one-step law of (0) does not depend on it.
    """
    second = [[(1.0, 2, 0.0)], [(0.5, 2, -1.0), (0.5, 2, 1.0)]]
    return tabulate("tie", [[[(1.0, 1, 0.0)]] * 2, second, [[], []]], gamma, terminal=(2,))


MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # actions of grids, up, right, down, left: rows and columns


def _grid(name, rows, slip, pit_reward, pit_ends, gamma, horizon) -> MDP:
    """A grid of cells, state r * width + c, and a reward of -1 a step.

    Args: rows, text: S start, G goal (terminal), P pit; slip, the probability of moving at right angles, half to each
        side; pit_ends, whether a pit is terminal, or leads back to the start.
    """
    _fraction(name, "slip", slip)
    height, width, cells = len(rows), len(rows[0]), "".join(rows)
    start, ends = cells.index("S"), "GP" if pit_ends else "G"

    def land(s, move):
        row, column = s // width + MOVES[move % 4][0], s % width + MOVES[move % 4][1]
        to = row * width + column if 0 <= row < height and 0 <= column < width else s
        return (to if pit_ends else start, pit_reward) if cells[to] == "P" else (to, -1.0)

    chances = [(p, turn) for p, turn in ((1 - slip, 0), (slip / 2, -1), (slip / 2, 1)) if p]
    outcomes = [[[(p, *land(s, a + turn)) for p, turn in chances] for a in range(4)] for s in range(len(cells))]
    return tabulate(name, outcomes, gamma, horizon, [s for s, c in enumerate(cells) if c in ends], start)


def slippery(slip=0.2, pit_reward=-20.0, horizon=12, gamma=1.0) -> MDP:
    """A short way past the pits and a longer one around them, on ice: -1 a step, -20 for a step into a pit.

        . . . .      actions: up, right, down, left
        S . . G      0.8 as intended, 0.1 to each side; at the border one stays
        . P P .      goal and pits end it, and so does step 12

    The best mean is -6.5631, with a pit in 1.4% of the episodes; the best CVaR at tau = 0.05 is -11.5994, with none.
    Source: our example of a CVaR frontier, for Pires et al., JMLR 2025.
    """
    return _grid("slippery", ("....", "S..G", ".PP."), slip, pit_reward, True, gamma, horizon)


def cliff(slip=0.0, gamma=1.0, horizon=100) -> MDP:
    """The cliff: -1 a step, -100 for a step over the edge, P, which leads back to the start.

        . . . . . . . . . . . .
        . . . . . . . . . . . .
        . . . . . . . . . . . .
        S P P P P P P P P P P G     actions: up, right, down, left

    The best return is -13, along the edge; the cells P are states that nothing reaches. Source: Sutton & Barto,
    Reinforcement Learning, 2nd edition, example 6.6. Deviation: the horizon, because gamma is 1 and a policy may walk
    into a wall for ever.
    """
    return _grid("cliff", ("." * 12,) * 3 + ("S" + "P" * 10 + "G",), slip, -100.0, False, gamma, horizon)


def garnet(seed=0, states=5, actions=2, branches=2, reward_atoms=2, terminals=0, gamma=0.9, horizon=0) -> MDP:
    """A random MDP without structure.

        (s, a) -> `branches` different successors, drawn uniformly; their probabilities are the gaps between
                  branches - 1 uniform numbers in [0, 1]
        (s, a, s') -> `reward_atoms` rewards, drawn from N(0, 1), with probabilities by the same rule

    It starts in state 0; the last `terminals` states are terminal. Source: Bhatnagar et al., Natural actor-critic
    algorithms, Automatica 2009, after Archibald et al. 1995. Deviation: rewards of finitely many
    values; theirs are Gaussian.
    """
    if branches > states:
        raise ValueError(f"garnet: branches {branches} must be at most states {states}; successors differ")
    if not 0 <= terminals < states:
        raise ValueError(f"garnet: terminals {terminals} must be from 0 to {states - 1}, one less than states")
    rng = np.random.default_rng(seed)

    def gaps(*shape, number):
        cuts = np.sort(rng.random((*shape, number - 1)))
        return np.diff(cuts, prepend=0.0, append=1.0)

    rows = (states, actions)
    successor = [rng.choice(states, branches, replace=False) for _ in range(states * actions)]
    successor = np.repeat(np.reshape(successor, (*rows, branches)), reward_atoms, -1)  # (S, A, B)
    probability = gaps(*rows, number=branches)[..., None] * gaps(*rows, branches, number=reward_atoms)
    probability = probability.reshape(successor.shape)
    reward = rng.normal(size=successor.shape)
    for s in range(states - terminals, states):
        successor[s], reward[s], probability[s] = s, 0.0, np.arange(successor.shape[-1]) == 0
    ends = range(states - terminals, states)
    return _mdp("garnet", successor, reward, probability, ends, np.eye(states)[0], gamma, horizon)


BUILDERS = {
    f.__name__: f
    for f in (
        *(chain, two_state, bernoulli, three_state, all_optimal, safe_risky, tie),
        *(gamble, bandit, menu, exponential, homeostat, two_stocks, sure_or_gamble),
        *(slippery, cliff, garnet),
    )
}
COUNTS = ("length", "states", "actions", "branches", "reward_atoms")  # at least 1


def names() -> list[str]:
    return list(BUILDERS)


def make(name: str, **params) -> MDP:
    """The MDP of a builder. Args: params, the builder's own, by name; horizon 0 is endless.

    Raises: ValueError naming the closest MDPs where `name` is unknown, a parameter that it does not have and the
        closest that it has, or a value out of range.
    """
    if name not in BUILDERS:
        close = difflib.get_close_matches(name, BUILDERS, 3, 0)
        raise ValueError(f"unknown MDP {name!r}; closest: {', '.join(close)}; all: {', '.join(BUILDERS)}")
    defaults = _defaults(name)
    listed = {k: _numbers(name, k, v) for k, v in params.items() if isinstance(defaults.get(k), tuple)}
    params = convert(name, {k: v for k, v in params.items() if k not in listed}, defaults, COUNTS)
    params = {k: v.item() for k, v in params.items()}
    for count in ("horizon", "seed"):
        if params.get(count, 0) < 0:
            raise ValueError(f"{name}: {count} {params[count]} must be at least 0")
    return validate(BUILDERS[name](**params, **listed))


def _defaults(name) -> dict:
    return {p.name: p.default for p in inspect.signature(BUILDERS[name]).parameters.values()}


def _fraction(name, key, value):
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: {key} {value:g} must be from 0 to 1; it is a probability")


def _numbers(name, key, value) -> tuple[float, ...]:
    """A list of any number of finite numbers; text is read as JSON."""
    try:
        array = np.asarray(json.loads(value) if isinstance(value, str) else value, float)
        fits = array.ndim == 1 and array.size > 0 and np.isfinite(array).all()
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"{name}: {key} must be a list of numbers, such as [0, 1, 3]; got {value!r}")
    return tuple(array.tolist())


# Sampler


class EnvState(NamedTuple):
    index: jax.Array  # (num_envs,) int32, the state
    obs: jax.Array  # (num_envs, S), or (num_envs, S + 1) with a horizon
    episode_return: jax.Array  # (num_envs,) undiscounted reward so far in this episode
    episode_length: jax.Array  # (num_envs,) int32, env steps so far in this episode


@pytree
class Sampler:
    """`num_envs` copies of an MDP to act in; an episode that ends starts again from the MDP's start."""

    mdp: MDP
    spec: Spec = static()
    num_envs: int = static(default=1)
    episode_length: int = static(default=0)  # env steps after which an episode is truncated; 0: never

    def reset(self, key) -> EnvState:
        """First states for all environments."""
        index, zero = self._begin(key), jnp.zeros(self.num_envs, jnp.int32)
        return EnvState(index, self._observe(index, zero), jnp.zeros(self.num_envs, jnp.float32), zero)

    def step(self, key, state: EnvState, action) -> tuple[EnvState, Transition, dict[str, Mean]]:
        """Draws a branch for every environment; where an episode ended, another begins.

        Args: action `(num_envs,)` int32.
        Returns: the next state; the transition, with leading axis `num_envs`; and `episode_return`, undiscounted, and
            `episode_length` of the episodes that ended on this step, per environment.
        """
        branch_key, begin_key = jax.random.split(key)
        logits = jnp.log(self.mdp.probability[state.index, action])  # (num_envs, B); padded branches are never drawn
        branch = jax.random.categorical(branch_key, logits)
        successor = self.mdp.next_state[state.index, action, branch]
        reward = self.mdp.reward[state.index, action, branch]
        length = state.episode_length + 1
        terminated = self.mdp.terminal[successor]
        if self.mdp.horizon is not None:
            terminated |= length >= self.mdp.horizon
        truncated = length >= self.episode_length if self.episode_length else jnp.zeros_like(terminated)
        done = terminated | truncated
        episode_return = state.episode_return + reward
        finished = episode_metrics(episode_return, length, done)
        next_obs = self._observe(successor, length)
        transition = Transition(state.obs, action, reward, next_obs, terminated, truncated)
        index, length = jnp.where(done, self._begin(begin_key), successor), length * ~done
        return EnvState(index, self._observe(index, length), episode_return * ~done, length), transition, finished

    def _begin(self, key):
        logits = jnp.log(self.mdp.start)
        return jax.random.categorical(key, logits, shape=(self.num_envs,)).astype(jnp.int32)

    def _observe(self, index, length):
        obs = jax.nn.one_hot(index, self.mdp.num_states, dtype=jnp.float32)
        if self.mdp.horizon is None:
            return obs
        left = (self.mdp.horizon - length).astype(jnp.float32) / self.mdp.horizon
        return jnp.concatenate([obs, left[:, None]], -1)


def env(mdp: MDP, num_envs: int = 1, episode_length: int = 0) -> Sampler:
    """`num_envs` copies of an MDP to act in.

    Args: episode_length, env steps after which an episode is truncated; 0: never.

    It draws and pays in float32, whatever the MDP's precision.
    Raises: ValueError where rewards are vectors.
    An endless MDP without an `episode_length` may never end an episode, and an evaluation of one would not return.
    """
    if mdp.reward_size is not None:
        raise ValueError(
            f"{mdp.name}: rewards are vectors of {mdp.reward_size} and an environment's are numbers; "
            "solve it by --algo stock_dp with the objective homeostatic, or give each branch one number"
        )
    narrow = lambda x: jnp.asarray(np.asarray(x, np.float32)) if x.dtype == np.float64 else x
    mdp = jax.tree.map(narrow, mdp)
    limits = [limit for limit in (mdp.horizon, episode_length) if limit]
    return Sampler(mdp, mdp.spec._replace(max_episode_steps=min(limits, default=0)), num_envs, episode_length)


def make_env(name: str, num_envs: int, **params) -> Sampler:
    """`env` of `make`, for `envs.make("mdp/NAME")`. Args: params, the builder's own, and `episode_length`.

    Raises: as `make`; ValueError where episodes might never end.
    """
    length = {k: params.pop(k) for k in ("episode_length",) if k in params}
    mdp = make(name, **params)
    length = int(convert(f"mdp/{name}", length, dict(episode_length=0), ("episode_length",)).get("episode_length", 0))
    if not length and mdp.horizon is None and stays(mdp).any():
        has_horizon = "horizon" in _defaults(name)
        raise ValueError(
            f"mdp/{name} may go on for ever, and an evaluation of it would; give episode_length, such as 100"
            + ", or a horizon" * has_horizon
        )
    return env(mdp, num_envs, length)


def action_type(name: str) -> str:
    """`discrete`."""
    return "discrete"
