"""Offline data of the point mazes (envs/maze.py), after OGBench's three kinds: `maze/medium-stitch`, ...

    navigate   trajectories of 1,000 steps to goals in random free cells, one after another
    stitch     trajectories to a goal four cells away, or as far as it goes from where that is nearer; they end within
               0.5 of it, at the latest after 200 steps: none crosses the maze
    explore    trajectories of 500 steps in random directions, drawn anew every 10 steps

Each begins in a random free cell. The first two follow `maze.expert` with Gaussian noise of 0.5 on each action, the
third adds 1.0 to a unit vector. Source: OGBench's generate_locomaze and its pointmaze commands (Park et al., ICLR
2025). Deviations: its expert moves at speed 1, ours at up to 1 along each axis; its navigate excludes corridors as
goals; its stitch stays at the goal for the rest of 200 steps, which here would be three transitions in five; the length
and noise of explore are those of its antmaze as we recall them; it has 1,000,000 transitions, two to ten times as many.

Two datasets are made of one roll-out, the same bits from the same seed:

`maze/medium-goals-stitch` observes `(position, goal)`, the goal that the behaviour seeks at that step, where explore
heeds none. The reward is 1 where it is reached, which terminates nothing: the behaviour goes on. Learners that draw
their own goals take positions from it and leave goals and rewards alone.

`maze/medium-stitch` observes positions, and is relabelled for the goal of the maze's task 1: each transition is what
the maze's own step makes of that position and action, reward 1 and terminated where it ends within the goal. What a
trajectory does after that is another episode: one of a single transition for each further step within it.

`maze/medium-demos` and `maze/medium-goals-demos` are demonstrations: 20 episodes of the maze itself by `maze.expert`,
without noise.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import envs
from envs import maze
from envs.types import Transition
from replay import datasets


class Kind(NamedTuple):
    about: str
    length: int  # env steps of a trajectory, at most
    noise: float  # standard deviation added to each action
    seed: int


KINDS = {
    "navigate": Kind("a noisy expert goes to random goals one after another", 1_000, 0.5, 0),
    "stitch": Kind("a noisy expert goes to a goal at most four cells away", 200, 0.5, 1),
    "explore": Kind("random directions, held for ten steps, and much noise", 500, 1.0, 2),
}
NEAR = 4  # cells between start and goal of stitch
ARRIVAL = 0.5  # distance to its goal at which stitch ends; smaller than the goals, so that it also goes into them
HOLD = 10  # env steps that explore holds a direction
NUM_STEPS = 2_000  # of each environment: whole trajectories of navigate and explore
NUM_ENVS = {"umaze": 50, "medium": 125, "large": 250}  # 100k, 250k and 500k transitions


class Behaviour(NamedTuple):
    """What `num_envs` behaviours carry; every leaf has that leading axis."""

    position: jax.Array  # (num_envs, 2)
    goal: jax.Array  # (num_envs, 2)
    direction: jax.Array  # (num_envs, 2), a unit vector; explore alone follows it
    age: jax.Array  # (num_envs,) env steps since the trajectory began


def goal_rooms(env, kind: str) -> np.ndarray:
    """Whether the cell in a column is a goal from that in a row: `(F, F)` bool, cells as in `env.rooms`."""
    free = np.flatnonzero(~np.asarray(env.walls).ravel())
    steps = maze.distances(env.walls)[np.ix_(free, free)]
    return steps == np.minimum(steps.max(1, keepdims=True), NEAR) if kind == "stitch" else steps > 0


@partial(jax.jit, static_argnames=("kind", "num_steps"))
def roll_out(env, kind: str, candidates, key, num_steps: int) -> Transition:
    """What the behaviour `kind` does. Args: env, of those with goals; candidates, what `goal_rooms` returns.

    Returns: leaves `(num_steps, num_envs, ...)`; trajectories end as `truncated`, the last of each may be open.
    """
    _, length, noise, _ = KINDS[kind]
    num_envs, num_rooms = env.num_envs, env.rooms.shape[0]

    def begin(key) -> Behaviour:
        room_key, goal_key, spread_key, angle_key = jax.random.split(key, 4)
        room = jax.random.randint(room_key, (num_envs,), 0, num_rooms)
        score = jax.random.uniform(goal_key, (num_envs, num_rooms))
        goal_room = jnp.where(candidates[room], score, -1.0).argmax(1)  # uniform over the candidates
        spread = jax.random.uniform(spread_key, (2, num_envs, 2), minval=-maze.SPREAD, maxval=maze.SPREAD)
        angle = jax.random.uniform(angle_key, (num_envs,), maxval=2 * jnp.pi)
        direction = jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1)
        position, goal = env.rooms[room] + spread[0], env.rooms[goal_room] + spread[1]
        return Behaviour(position, goal, direction, jnp.zeros(num_envs, jnp.int32))

    def step(now: Behaviour, key):
        noise_key, fresh_key = jax.random.split(key)
        fresh = begin(fresh_key)

        action = now.direction if kind == "explore" else maze.expert(env, now.position, now.goal)
        action = jnp.clip(action + noise * jax.random.normal(noise_key, action.shape), -1, 1)
        position, age = env.move(now.position, action), now.age + 1
        reached = env.reached(position, now.goal)
        arrived = jnp.linalg.norm(position - now.goal, axis=1) <= ARRIVAL
        end = (age >= length) | (arrived & (kind == "stitch"))

        goal = select(reached & (kind == "navigate"), fresh.goal, now.goal)
        direction = select(age % HOLD == 0, fresh.direction, now.direction)
        transition = Transition(
            obs=(now.position, now.goal),
            action=action,
            reward=reached.astype(jnp.float32),
            next_obs=(position, goal),
            terminated=jnp.zeros(num_envs, bool),
            truncated=end,
        )
        return select(end, fresh, Behaviour(position, goal, direction, age)), transition

    key, begin_key = jax.random.split(key)
    return jax.lax.scan(step, begin(begin_key), jax.random.split(key, num_steps))[1]


def select(where, new, old):
    """`new` in the environments of `where`, elsewhere `old`: pytrees with leading axis `num_envs`."""
    return jax.tree.map(lambda a, b: jax.vmap(jnp.where)(where, a, b), new, old)


def one_goal(transitions: Transition, goal, success_radius) -> Transition:
    """Relabelled for one goal: positions as observations, reward 1 and terminated where it is reached.

    Args: transitions, those of `(position, goal)`, NumPy leaves `(N, ...)`; goal `(2,)`.
    """
    position, next_position = transitions.obs[0], transitions.next_obs[0]
    reached = np.square(next_position - goal[None]).sum(-1) <= success_radius**2
    return transitions._replace(
        obs=position, next_obs=next_position, reward=reached.astype(np.float32), terminated=reached
    )


def make(name: str, kind: str, num_envs: int | None = None, num_steps: int = NUM_STEPS) -> Transition:
    """The data of `kind` of the environment `name`: host arrays, episodes one after another.

    Args: num_envs, by default NUM_ENVS of the maze; num_steps, of each of them.
    """
    layout = name.removeprefix("maze/").removesuffix("-goals")
    env = envs.make(f"maze/{layout}-goals", num_envs or NUM_ENVS[layout])
    key = jax.random.key(KINDS[kind].seed)
    transitions = datasets.episodes(roll_out(env, kind, jnp.asarray(goal_rooms(env, kind)), key, num_steps))
    if name.endswith("-goals"):
        return transitions
    env = envs.make(name)
    return one_goal(transitions, np.asarray(env.tasks[0, 1]), float(env.success_radius))


NUM_DEMOS = 20


def demonstrate(name: str, num: int = NUM_DEMOS, seed: int = 3) -> Transition:
    """`num` episodes of the environment `name` by `maze.expert`: host arrays, episodes one after another."""
    env = envs.make(name, num)

    def act(params, obs, key):
        return maze.expert(env, *env.where(obs))

    played = datasets.roll_out(env, act, (), jax.random.key(seed), env.spec.max_episode_steps)
    streams = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), jax.device_get(played))  # (num, T, ...)
    ends = streams.terminated | streams.truncated
    first = np.cumsum(ends, 1) - ends == 0  # (num, T), the first episode of each
    return jax.tree.map(lambda x: x[first], streams)


# Name of the dataset -> what it is, its environment, and what makes it from that.
TABLE = {
    f"maze/{name}-{kind}": (KINDS[kind].about, f"maze/{name}", partial(make, kind=kind))
    for name in maze.names()
    for kind in KINDS
} | {
    f"maze/{name}-demos": (f"{NUM_DEMOS} episodes of an expert without noise", f"maze/{name}", demonstrate)
    for name in maze.names()
}
