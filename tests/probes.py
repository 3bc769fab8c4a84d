"""Tiny worlds, each isolating one way in which an agent can be wrong, in one class: a table.

A state has an observation, and every (state, action) pair a reward and one successor. The six
probes differ in their tables only, so one compiled program serves all of them. Each comes in
discrete and in continuous actions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.types import Mean, Spec, Transition, continuous_spec, discrete_spec, pytree, static


class TableState(NamedTuple):
    index: jax.Array  # (num_envs,) int32, the state
    obs: jax.Array  # (num_envs, features)
    episode_return: jax.Array  # (num_envs,)
    episode_length: jax.Array  # (num_envs,) int32


@pytree
class Table:
    """`num_envs` copies of a deterministic MDP; an episode that ends starts again from `start`.

    A continuous action a in [-1, 1] has the two columns at its ends: the reward is linear in a, and
    the successor is that of the nearer end.
    """

    features: jax.Array  # (S, features) float32, the observation of each state
    start: jax.Array  # (S,) probabilities
    next_state: jax.Array  # (S, A) int32
    reward: jax.Array  # (S, A) float32
    terminated: jax.Array  # (S, A) bool
    truncated: jax.Array  # (S, A) bool
    spec: Spec = static()
    num_envs: int = static(default=1)

    def reset(self, key) -> TableState:
        index = jax.random.categorical(key, jnp.log(self.start), shape=(self.num_envs,))
        zero = jnp.zeros(self.num_envs)
        return TableState(index, self.features[index], zero, zero.astype(jnp.int32))

    def step(self, key, state: TableState, action):
        choice, weight = action, 1.0
        if self.spec.action_type == "continuous":
            choice = (action[:, 0] > 0).astype(jnp.int32)
            weight = (1 + jnp.abs(action[:, 0])) / 2
        at = (state.index, choice)
        # With two actions `1 - choice` is the other end of the interval.
        reward = weight * self.reward[at] + (1 - weight) * self.reward[state.index, 1 - choice]
        terminated, truncated = self.terminated[at], self.truncated[at]
        done = terminated | truncated
        episode_return, episode_length = state.episode_return + reward, state.episode_length + 1
        finished = dict(
            episode_return=Mean(episode_return * done, done), episode_length=Mean(episode_length * done, done)
        )
        successor, first = self.next_state[at], self.reset(key).index
        next_obs = self.features[successor]  # before the reset
        index = jnp.where(done, first, successor)
        transition = Transition(state.obs, action, reward, next_obs, terminated, truncated)
        next_state = TableState(index, self.features[index], episode_return * ~done, episode_length * ~done)
        return next_state, transition, finished


def table(features, start, next_state, reward, terminated, truncated=0, num_actions=2, **options) -> Table:
    """A `Table` from lists of one entry per state: a list over the actions, or one number for all of them.

    Args: options, `continuous` and `num_envs`.
    """
    num_states = len(features)

    def each(column, dtype):
        column = column if isinstance(column, list) else [column] * num_states
        return jnp.asarray([np.broadcast_to(x, num_actions) for x in column], dtype)

    obs = jax.ShapeDtypeStruct(np.shape(features)[1:], "float32")
    continuous = options.pop("continuous", False)
    return Table(
        features=jnp.asarray(features, jnp.float32),
        start=jnp.asarray(start, jnp.float32) / np.sum(start),
        next_state=each(next_state, jnp.int32),
        reward=each(reward, jnp.float32),
        terminated=each(terminated, bool),
        truncated=each(truncated, bool),
        spec=continuous_spec(obs, 1, 10) if continuous else discrete_spec(obs, num_actions, 10),
        **options,
    )


class Probe(NamedTuple):
    """Lists of one entry per state, of four at most; see `table`. `q` are the optimal values of the visited states."""

    q: list  # of [Q(s, 0), Q(s, 1)]
    gamma: float
    features: list
    start: list
    next_state: list
    reward: list
    terminated: list
    truncated: list

    def env(self, continuous=False, num_envs=8) -> Table:
        """Padded to four states and four features, so that all probes are one program."""
        rows = lambda x, fill: x + [fill] * (4 - len(x))
        features = rows([rows(x, 0) for x in self.features], [0] * 4)
        fields = (rows(x, x[-1]) for x in (self.next_state, self.reward, self.terminated, self.truncated))
        return table(features, rows(self.start, 0), *fields, continuous=continuous, num_envs=num_envs)


PROBES = {
    # One state, reward 1, the end. Wrong: the loss, the reward, or the optimiser.
    "loss": Probe(
        q=[[1, 1]],
        gamma=1.0,
        features=[[0, 0]],
        start=[1],
        next_state=[0],
        reward=[1],
        terminated=[1],
        truncated=[0],
    ),
    # The first observation tells the reward of the second step. Wrong: targets and observations are misaligned.
    "bootstrap": Probe(
        q=[[-1, -1], [1, 1], [-1, -1], [1, 1]],
        gamma=1.0,
        features=[[-1, 0], [1, 0], [-1, 1], [1, 1]],
        start=[1, 1, 0, 0],
        next_state=[2, 3, 0, 0],
        reward=[0, 0, -1, 1],
        terminated=[0, 0, 1, 1],
        truncated=[0, 0, 0, 0],
    ),
    # Reward 1 on the second of two steps: 1/2 on the first. Wrong: the discount.
    "discount": Probe(
        q=[[0.5, 0.5], [1, 1]],
        gamma=0.5,
        features=[[0, 0], [0, 1]],
        start=[1, 0],
        next_state=[1, 0],
        reward=[0, 1],
        terminated=[0, 1],
        truncated=[0, 0],
    ),
    # The action decides the reward. Wrong: actions are not stored, or not improved.
    "policy": Probe(
        q=[[-1, 1]],
        gamma=1.0,
        features=[[0, 0]],
        start=[1],
        next_state=[0],
        reward=[[-1, 1]],
        terminated=[1],
        truncated=[0],
    ),
    # The best action depends on the observation. Wrong: rows of observations and actions are mixed up.
    "policy_of_obs": Probe(
        q=[[1, -1], [-1, 1]],
        gamma=1.0,
        features=[[-1, 0], [1, 0]],
        start=[1, 1],
        next_state=[0, 0],
        reward=[[1, -1], [-1, 1]],
        terminated=[1, 1],
        truncated=[0, 0],
    ),
    # The first state is cut off one step before the reward: worth 1/2 * 1. A truncation taken for a
    # termination gives 0; the observation after the reset instead of the true successor gives
    # v = 1/2 (v + 1) / 2 = 1/3.
    "truncation": Probe(
        q=[[0.5, 0.5], [1, 1]],
        gamma=0.5,
        features=[[-1, 0], [1, 0]],
        start=[1, 1],
        next_state=[1, 0],
        reward=[0, 1],
        terminated=[0, 1],
        truncated=[1, 0],
    ),
}
