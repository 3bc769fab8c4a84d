"""Point mazes: a body moves in a plane among walls, to one goal or to any. `maze/medium`, `maze/medium-goals`.

    maze/umaze, maze/medium, maze/large                       one start and one goal; observes its position, `(2,)`
    maze/umaze-goals, maze/medium-goals, maze/large-goals     both drawn from the free cells, anew for each episode;
                                                              observes `(position, goal)`, each `(2,)`

    p' = slide(p + step_size * clip(a, -1, 1))
    r = 1 and the episode terminates where |p' - goal| <= success_radius, otherwise r = 0

Cells are squares of side 4, and the centre of row i, column j is at (x, y) = (4 (j - 1), 4 (i - 1)). The body is a
square of half-width 0.7. It moves first along x, then along y, each up to the face of the first wall in its way, and
so slides along walls: exact for moves of up to half a cell, the largest `step_size`. An episode that ends is followed
by a fresh start, drawn from the step's key: uniform within 1 of a cell's centre along each axis, as drawn goals are.

Maps, tasks and the two radii are those of OGBench's pointmaze (Park et al., ICLR 2025, ogbench/locomaze), whose
body is a sphere pushed out of walls by MuJoCo; the map and tasks of umaze are not in it (D4RL's U). Deviations: its
goals of fixed tasks are drawn within 1 of the centre too, ours are the centre; its time limit is 1,000 everywhere;
its `step_size` is 0.2, of which a route across takes 2.5 times as many: values then take that much longer to learn.

Parameters: `task`, 1 to 5 for a fixed pair of start and goal, -1 for all five, environment i having number
1 + i mod 5; 0, in `-goals` only and the default there, draws both. `episode_length`, `step_size`, `success_radius`, and
`noise`, the standard deviation of Gaussian noise on actions, 0.
"""

from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envs.params import convert
from envs.types import Mean, Spec, Transition, continuous_spec, episode_metrics, pytree, static

CELL = 4.0  # side of a cell
BODY = 0.7  # half-width of the body
STEP_SIZE = 0.5  # how far a full action moves the body along each axis
SKIN = 1e-4  # a body that overlaps a wall by less slides along it; more than rounding at coordinates below 50
SPREAD = 1.0  # starts and drawn goals are within this of their cell's centre, along each axis


class Layout(NamedTuple):
    rows: tuple[str, ...]  # "#" is a wall; the border is walls
    tasks: tuple  # five pairs of start and goal, ((row, column), (row, column))
    episode_length: int  # env steps


LAYOUTS = {
    "umaze": Layout(
        ("#####", "#...#", "###.#", "#...#", "#####"),
        (((1, 1), (3, 1)), ((3, 1), (1, 1)), ((1, 3), (3, 1)), ((2, 3), (1, 1)), ((3, 2), (1, 1))),
        300,
    ),
    "medium": Layout(
        ("########", "#..##..#", "#..#...#", "##...###", "#..#...#", "#.#..#.#", "#...#..#", "########"),
        (((1, 1), (6, 6)), ((6, 1), (1, 6)), ((5, 3), (4, 2)), ((6, 5), (6, 1)), ((2, 6), (1, 1))),
        600,
    ),
    "large": Layout(
        (
            "############",
            "#....#.....#",
            "#.##.#.#.#.#",
            "#......#...#",
            "#.####.###.#",
            "#..#.#.....#",
            "##.#.#.#.###",
            "#..#...#...#",
            "############",
        ),
        (((1, 1), (7, 10)), ((5, 4), (7, 1)), ((7, 4), (1, 10)), ((3, 8), (5, 4)), ((1, 1), (5, 4))),
        800,
    ),
}


def cell_of(x):
    """Row or column that a coordinate lies in. `(...)` to `(...)` int32."""
    return jnp.floor(x / CELL + 1.5).astype(jnp.int32)


def centre_of(cell):
    """Coordinate of a row's or column's centre. The inverse of `cell_of`."""
    return CELL * (cell - 1.0)


def slide(walls, position, move):
    """Where a body that moves by `move` among `walls` comes to lie.

    Args: walls `(H, W)` bool; position, move `(..., 2)`, move of at most CELL / 2 along each axis. Returns: `(..., 2)`.
    """
    x, y = position[..., 0], position[..., 1]
    x = _along(x, move[..., 0], y, lambda column, row: walls[row, column])
    y = _along(y, move[..., 1], x, lambda row, column: walls[row, column])
    return jnp.stack([x, y], -1)


def _along(x, move, y, is_wall):
    """`x` moved up to the first wall. Args: y, the other coordinate; is_wall(cell along x, cell along y) -> bool."""
    ahead = jnp.where(move < 0, -1.0, 1.0)
    x = x + move
    front = cell_of(x + ahead * BODY)  # the cell that the leading edge would enter
    blocked = is_wall(front, cell_of(y - BODY + SKIN)) | is_wall(front, cell_of(y + BODY - SKIN))
    return jnp.where(blocked, centre_of(front) - ahead * (CELL / 2 + BODY), x)


def distances(walls) -> np.ndarray:
    """Numbers of moves to a neighbouring cell between all cells, by breadth-first search from each.

    Args: walls `(H, W)` bool, border included. Returns: `(H W, H W)` int32, -1 where there is no way.
    """
    walls = np.asarray(walls)
    free, width = ~walls.ravel(), walls.shape[1]
    steps = np.full((walls.size, walls.size), -1, np.int32)
    for source in np.flatnonzero(free):
        steps[source, source] = 0
        queue = deque([source])
        while queue:
            cell = queue.popleft()
            for near in cell + _around(width):
                if free[near] and steps[source, near] < 0:
                    steps[source, near] = steps[source, cell] + 1
                    queue.append(near)
    return steps


def next_cells(walls) -> np.ndarray:
    """The neighbour that a shortest path goes to: `[goal, cell]`, `(H W, H W)` int32; the cell itself without a way."""
    steps, (num, width) = distances(walls), (np.size(walls), np.shape(walls)[1])
    table = np.tile(np.arange(num, dtype=np.int32), (num, 1))
    for cell in np.flatnonzero(~np.asarray(walls).ravel()):
        near = cell + _around(width)
        closer = (steps[:, near] >= 0) & (steps[:, near] < steps[:, [cell]])  # (H W, 4)
        table[:, cell] = np.where(closer.any(1), near[closer.argmax(1)], cell)
    return table


def _around(width: int) -> np.ndarray:
    return np.array([-width, -1, 1, width])


class EnvState(NamedTuple):
    obs: Any  # (num_envs, 2), the position; in `-goals` the pair of it and the goal, (num_envs, 2)
    episode_length: jax.Array  # (num_envs,) env steps so far in this episode


@pytree
class Maze:
    walls: jax.Array  # (H, W) bool
    rooms: jax.Array  # (F, 2) float32, centres of the free cells, row by row
    toward: jax.Array  # (H W, H W) int32, `next_cells`
    tasks: jax.Array | None  # (num_envs, 2, 2) float32, start and goal; None where they are drawn
    step_size: jax.Array  # (), length of a full action's move along each axis
    success_radius: jax.Array  # ()
    noise: jax.Array | None  # (), standard deviation; None without noise
    spec: Spec = static()
    num_envs: int = static(default=1)

    def reset(self, key) -> EnvState:
        """Fresh starts, and goals, for all environments."""
        return EnvState(self._observe(*self._begin(key)), jnp.zeros(self.num_envs, jnp.int32))

    def step(self, key, state: EnvState, action) -> tuple[EnvState, Transition, dict[str, Mean]]:
        """Moves every body; where an episode ended, another begins.

        Args: action `(num_envs, 2)` in [-1, 1], along x and y.
        Returns: the next state; the transition, with leading axis `num_envs`; and `episode_return`,
            `episode_length` and `episode_success` of the episodes that ended on this step, per environment.
        """
        begin_key, noise_key = jax.random.split(key)
        position, goal = self.where(state.obs)
        noisy = action if self.noise is None else action + self.noise * jax.random.normal(noise_key, action.shape)
        position = self.move(position, noisy)
        length = state.episode_length + 1
        terminated = self.reached(position, goal)
        truncated = length >= self.spec.max_episode_steps
        done = terminated | truncated
        reward = terminated.astype(jnp.float32)  # also the return: an episode ends with its first reward
        finished = dict(episode_metrics(reward, length, done), episode_success=Mean(reward * done, done))
        next_obs = self._observe(position, goal)
        transition = Transition(state.obs, action, reward, next_obs, terminated, truncated)
        start = self._observe(*self._begin(begin_key))
        obs = jax.tree.map(lambda new, old: jnp.where(done[:, None], new, old), start, next_obs)
        return EnvState(obs, length * ~done), transition, finished

    def move(self, position, action):
        """Where actions take bodies. Args: `(..., 2)`. Returns: `(..., 2)`."""
        return slide(self.walls, position, self.step_size * jnp.clip(action, -1, 1))

    def reached(self, position, goal):
        """Whether positions are at goals. Args: `(..., 2)`. Returns: `(...,)` bool."""
        return jnp.square(position - goal).sum(-1) <= jnp.square(self.success_radius)

    def where(self, obs):
        """Position and goal, both `(num_envs, 2)`, of an observation."""
        return (obs, self.tasks[:, 1]) if self.tasks is not None and not isinstance(obs, tuple) else obs

    def _observe(self, position, goal):
        return (position, goal) if isinstance(self.spec.obs, tuple) else position

    def _begin(self, key):
        """Positions and goals that episodes begin with, both `(num_envs, 2)`."""
        room_key, goal_key, spread_key = jax.random.split(key, 3)
        if self.tasks is not None:
            spread = jax.random.uniform(spread_key, (self.num_envs, 2), minval=-SPREAD, maxval=SPREAD)
            return self.tasks[:, 0] + spread, self.tasks[:, 1]
        num_rooms = self.rooms.shape[0]
        room = jax.random.randint(room_key, (self.num_envs,), 0, num_rooms)
        other = (room + jax.random.randint(goal_key, (self.num_envs,), 1, num_rooms)) % num_rooms
        spread = jax.random.uniform(spread_key, (2, self.num_envs, 2), minval=-SPREAD, maxval=SPREAD)
        return self.rooms[room] + spread[0], self.rooms[other] + spread[1]


def expert(env: Maze, position, goal):
    """Moves to the centre of the next cell of a shortest path and, in the goal's cell, to the goal.

    Args: position, goal `(..., 2)`. Returns: actions `(..., 2)` in [-1, 1].
    """
    flat = lambda p: cell_of(p[..., 1]) * env.walls.shape[1] + cell_of(p[..., 0])
    here, there = flat(position), flat(goal)
    row, column = jnp.divmod(env.toward[there, here], env.walls.shape[1])
    centre = jnp.stack([centre_of(column), centre_of(row)], -1)
    target = jnp.where((here == there)[..., None], goal, centre)
    return jnp.clip((target - position) / env.step_size, -1, 1)


def action_type(name: str) -> str:
    """`continuous`."""
    return "continuous"


def names() -> list[str]:
    return [*LAYOUTS, *(f"{name}-goals" for name in LAYOUTS)]


def make(name: str, num_envs: int, **params) -> Maze:
    """Builds `num_envs` copies of a maze. Args: params, those of the module's docstring.

    Raises: ValueError naming a parameter that a maze does not have, or a value out of its range.
    """
    return build(LAYOUTS[name.removesuffix("-goals")], name.endswith("-goals"), num_envs, f"maze/{name}", **params)


def build(layout: Layout, goals: bool, num_envs: int, name: str = "maze", **params) -> Maze:
    """A maze of any layout. Args: goals, whether it observes `(position, goal)`; name, for the messages."""
    defaults = dict(
        task=0 if goals else 1, episode_length=layout.episode_length, step_size=STEP_SIZE, success_radius=1.0, noise=0.0
    )
    p = defaults | convert(name, params, defaults, positive=("episode_length",))
    if not -1 <= p["task"] <= len(layout.tasks) or (p["task"] == 0 and not goals):
        raise ValueError(
            f"{name}: task {p['task']} must be from 1 to {len(layout.tasks)}, or -1 for all of them"
            + (", or 0 to draw them" if goals else "; 0, drawn goals, is for mazes that end in -goals")
        )
    for key, high in dict(step_size=CELL / 2, success_radius=np.inf).items():
        if not 0 < p[key] <= high:
            raise ValueError(f"{name}: {key} {p[key]} must be more than 0" + f" and at most {high:g}" * (high < np.inf))
    if not 0 <= p["noise"] < np.inf:
        raise ValueError(f"{name}: noise {p['noise']} must be at least 0 and finite")

    walls = np.array([[c == "#" for c in row] for row in layout.rows])
    centres = lambda cells: centre_of(np.asarray(cells, np.float32)[..., ::-1])  # (row, column) to (x, y)
    tasks = None
    if p["task"] != 0:
        chosen = np.arange(num_envs) % len(layout.tasks) if p["task"] < 0 else np.full(num_envs, p["task"] - 1)
        tasks = jnp.asarray(centres(layout.tasks)[chosen])  # (num_envs, 2, 2)
    position = jax.ShapeDtypeStruct((2,), jnp.float32)
    return Maze(
        jnp.asarray(walls),
        jnp.asarray(centres(np.argwhere(~walls))),
        jnp.asarray(next_cells(walls)),
        tasks,
        jnp.float32(p["step_size"]),
        jnp.float32(p["success_radius"]),
        jnp.float32(p["noise"]) if p["noise"] else None,
        continuous_spec((position, position) if goals else position, 2, int(p["episode_length"])),
        num_envs,
    )
