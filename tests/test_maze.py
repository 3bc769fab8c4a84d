"""Point mazes: walls by hand, no way through them, ends, shortest paths, and what their offline data hold."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_envs import rollout, signature

import envs
from envs import maze
from envs.types import example_transition
from replay import datasets, mazes
from runner.evaluate import evaluate

close = partial(np.testing.assert_allclose, rtol=0, atol=1e-6)  # float32 at coordinates below 30
ROOM = maze.Layout(("###", "#.#", "###"), (((1, 1), (1, 1)),), 5)
CORNER = maze.Layout(("####", "#..#", "#.##", "####"), (((1, 2), (2, 1)),), 5)
MAZES = tuple(maze.LAYOUTS)


def walls(layout) -> np.ndarray:
    return np.array([[c == "#" for c in row] for row in layout.rows])


def slide(layout, position, move):
    return np.asarray(maze.slide(jnp.asarray(walls(layout)), jnp.float32(position), jnp.float32(move)))


def cells(p) -> np.ndarray:
    """(row, column) of positions `(..., 2)`: cell 1 is centred at 0 and 4 wide."""
    return np.floor(np.asarray(p)[..., ::-1] / 4 + 1.5).astype(int)


# Walls


@pytest.mark.parametrize(
    "position, move, expected",
    [
        # The cell's faces are at -2 and 2, the body reaches 0.7 around its centre: 1.3 is the furthest.
        ((0, 0), (0.2, -0.1), (0.2, -0.1)),
        ((1.2, 0), (0.2, 0.1), (1.3, 0.1)),
        ((-1.2, 0), (-0.2, 0.1), (-1.3, 0.1)),
        ((0, 1.25), (0.2, 0.2), (0.2, 1.3)),
        ((0, -1.25), (0.2, -0.2), (0.2, -1.3)),
        ((1.3, 1.3), (0.2, 0.2), (1.3, 1.3)),
        ((1.3, 0), (0, 0), (1.3, 0)),
        ((1.3, -1.3), (-0.2, 0.2), (1.1, -1.1)),
        ((-0.7, 0.7), (2, -2), (1.3, -1.3)),
    ],
)
def test_walls_stop_the_body_and_it_slides_along_them(position, move, expected):
    close(slide(ROOM, position, move), expected)


def test_a_body_passes_a_corner_only_where_all_of_it_fits():
    # Row 1 has cells 1 and 2, row 2 has cell 1; the wall in row 2, column 2 begins at x = 2 and y = 2.
    close(slide(CORNER, (1.5, 0), (0.4, 0)), (1.9, 0))  # from cell 1 into cell 2
    close(slide(CORNER, (1.5, 1.2), (0, 0.2)), (1.5, 1.3))  # its right side, at 2.2, meets the wall below
    close(slide(CORNER, (1.3, 1.2), (0, 0.2)), (1.3, 1.4))  # touches the wall's face and slides past
    close(slide(CORNER, (1.2, 1.4), (0.4, 0)), (1.3, 1.4))  # its lower side, at 2.1, meets the wall beside
    # x first: along a diagonal into the wall's corner it slides on below row 1, not into the wall.
    close(slide(CORNER, (1.3, 1.3), (0.1, 0.1)), (1.4, 1.3))


@pytest.mark.parametrize("name", MAZES)
def test_no_action_leads_into_or_through_a_wall(name):
    # 10,000 steps of 16 bodies at 0.2, 0.5, 1 and 2 a step, in directions held for a while; no goal, so no reset.
    layout = maze.LAYOUTS[name]
    rng = np.random.default_rng(0)
    held, noise = rng.uniform(-2, 2, (500, 1, 16, 2)), rng.uniform(-1, 1, (500, 20, 16, 2))
    moves = np.tile([0.2, 0.5, 1, 2], 4)[:, None] * (held + noise).clip(-1, 1)
    start = rng.permutation(np.asarray(envs.make(f"maze/{name}").rooms))[rng.integers(0, 7, 16)]

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling takes longer than running
    def path(start, moves):
        step = lambda p, move: (maze.slide(jnp.asarray(walls(layout)), p, move),) * 2
        return jax.lax.scan(step, start, moves)[1]

    p = np.asarray(path(start, moves.reshape(10_000, 16, 2).astype(np.float32)))
    row, column = np.moveaxis(cells(p), -1, 0)
    for corner in ((-1, -1), (-1, 1), (1, -1), (1, 1)):
        # Two opposite sides may overlap a wall's corner by 1e-4, `SKIN`, and a rounding.
        r, c = np.moveaxis(cells(p + (0.7 - 1.1e-4) * np.array(corner)), -1, 0)
        assert not walls(layout)[r, c].any()
    # One step along x, one along y: at most two cells further, by a way around the walls.
    flat = row * walls(layout).shape[1] + column
    assert maze.distances(walls(layout))[flat[:-1], flat[1:]].max() == 2
    assert len(np.unique(flat)) == (~walls(layout)).sum()  # and they went everywhere


# Shortest paths


def test_distances_by_hand():
    # Cells of the corner are, row by row, 5 and 6, then 9; 6 - 5 - 9 is the way.
    steps = maze.distances(walls(CORNER))
    assert steps[np.ix_([5, 6, 9], [5, 6, 9])].tolist() == [[0, 1, 1], [1, 0, 2], [1, 2, 0]]
    assert (steps[0] == -1).all() and (steps >= 0).sum() == 9
    # Umaze's seven cells are one corridor, from (1, 1), number 6, around to (3, 1), number 16.
    corridor = [6, 7, 8, 13, 18, 17, 16]
    assert maze.distances(walls(maze.LAYOUTS["umaze"]))[6, corridor].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_the_next_cell_is_a_neighbour_that_is_nearer():
    table = maze.next_cells(walls(CORNER))
    assert [table[9, 6], table[9, 5], table[9, 9], table[6, 9], table[9, 0]] == [5, 9, 9, 5, 0]
    for layout in maze.LAYOUTS.values():
        steps, table = maze.distances(walls(layout)), maze.next_cells(walls(layout))
        goal, cell = np.nonzero(steps > 0)
        assert (steps[goal, table[goal, cell]] == steps[goal, cell] - 1).all()
        assert (steps[table[goal, cell], cell] == 1).all()


@pytest.mark.parametrize("name, longest", [("umaze", 6), ("medium", 11), ("large", 19)])
def test_the_expert_reaches_every_cell_from_every_cell(name, longest):
    env = envs.make(f"maze/{name}-goals", 1)
    pairs = np.stack(np.meshgrid(*[np.arange(len(env.rooms))] * 2), -1).reshape(-1, 2)
    start, goal = env.rooms[pairs[:, 0]] + 1.0, env.rooms[pairs[:, 1]] - 1.0  # within their cells, off the centres

    @jax.jit
    def arrival(start, goal):
        def step(carry, _):
            position, arrived, time = carry
            arrived = arrived | env.reached(position, goal)
            return (env.move(position, maze.expert(env, position, goal)), arrived, time + ~arrived), None

        carry = (start, jnp.zeros(len(start), bool), jnp.zeros(len(start), jnp.int32))
        return jax.lax.scan(step, carry, length=450)[0][1:]

    arrived, time = arrival(start, goal)
    assert arrived.all()
    cell = lambda p: (cells(p) * [walls(maze.LAYOUTS[name]).shape[1], 1]).sum(-1)
    steps = maze.distances(walls(maze.LAYOUTS[name]))[cell(start), cell(goal)]
    assert steps.max() == longest
    # A cell is 4 / 0.5 = 8 steps; up to 1 of way, 2 steps, to and from the centres on each side, along both axes.
    assert (time <= 8 * steps + 10).all()


# Episodes


def at(env, position, length=0):
    """`env` with all its bodies at `position`, `length` steps into their episodes."""
    state = env.reset(jax.random.key(0))
    position = jnp.broadcast_to(jnp.float32(position), (env.num_envs, 2))
    obs = (position, state.obs[1]) if isinstance(state.obs, tuple) else position
    return state._replace(obs=obs, episode_length=jnp.full_like(state.episode_length, length))


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def step(env, key, state, action):
    return env.step(key, state, action)


def test_success_is_within_the_radius_and_terminates():
    # Umaze's first task: from (1, 1) at (0, 0) to (3, 1) at (0, 8). Up to 0.5 nearer: 1.6 - 0.5 = 1.1, 1.4 - 0.5 = 0.9.
    env = envs.make("maze/umaze", 2)
    left = jnp.float32([[-1, 0], [-1, 0]])
    for x, success in ((1.6, False), (1.4, True)):
        _, transition, finished = step(env, jax.random.key(1), at(env, (x, 8)), left)
        close(transition.next_obs, [[x - 0.5, 8]] * 2)
        assert transition.terminated.tolist() == [success] * 2 and not transition.truncated.any()
        assert transition.reward.tolist() == [success] * 2
        assert finished["episode_success"].total.tolist() == finished["episode_return"].total.tolist() == [success] * 2
        assert finished["episode_success"].count.tolist() == [success] * 2
    wide = envs.make("maze/umaze", 2, success_radius=1.2)
    assert step(wide, jax.random.key(1), at(wide, (1.6, 8)), left)[1].terminated.all()


def test_a_time_limit_truncates_also_where_the_goal_is_reached():
    env = envs.make("maze/umaze", 2, episode_length=3)
    stay = jnp.zeros((2, 2))
    _, transition, finished = step(env, jax.random.key(1), at(env, (0, 0), length=1), stay)
    assert not (transition.terminated | transition.truncated).any()
    _, transition, finished = step(env, jax.random.key(1), at(env, (0, 0), length=2), stay)
    assert transition.truncated.all() and not transition.terminated.any()
    assert finished["episode_length"].total.tolist() == [3, 3]
    assert finished["episode_success"].count.all() and not finished["episode_success"].total.any()
    _, transition, finished = step(env, jax.random.key(1), at(env, (0, 8), length=2), stay)
    assert transition.truncated.all() and transition.terminated.all()
    assert finished["episode_success"].total.tolist() == [1, 1]
    assert (env.spec.max_episode_steps, envs.make("maze/large").spec.max_episode_steps) == (3, 800)


@pytest.fixture(scope="module")
def short():
    """Medium with drawn goals, cut after 4 steps to the right: 12 steps of 64 environments."""
    env = envs.make("maze/medium-goals", 64, episode_length=4)
    return env, *rollout(env, jax.random.key(0), jnp.broadcast_to(jnp.float32([1, 0]), (12, 64, 2)))


def test_an_episode_that_ends_is_followed_by_a_fresh_start_and_goal(short):
    env, start, obs, transition, finished = short
    ended = np.asarray(transition.terminated | transition.truncated)
    assert (ended == np.isin(np.arange(12), (3, 7, 11))[:, None]).mean() > 0.9  # a few reach a goal earlier
    # next_obs is where the move led, with the goal sought; what to act on next is that, or a new start and goal.
    close(transition.next_obs[1][ended], transition.obs[1][ended])
    same = lambda a, b: (np.asarray(a) == np.asarray(b)).all(-1)
    for new, old in zip(obs, transition.next_obs, strict=True):
        assert (same(new, old) == ~ended).all()
    moved = np.asarray(env.move(transition.obs[0], transition.action))
    close(transition.next_obs[0], moved)
    starts = np.concatenate([np.asarray(x)[ended] for x in obs], 1)  # (episodes, 4)
    assert len(np.unique(starts, axis=0)) == len(starts)


def test_drawn_starts_and_goals_are_in_all_cells_and_never_in_the_same(short):
    env, start, obs, transition, _ = short
    ended = np.asarray(transition.truncated | transition.terminated)
    start_cells, goal_cells = (cells(np.asarray(x)[ended]) for x in obs)
    assert (start_cells != goal_cells).any(-1).all()
    free = {tuple(c) for c in np.argwhere(~walls(maze.LAYOUTS["medium"]))}
    # 192 draws of 26 cells miss one with probability below 26 (25/26)^192 = 0.014; the seed is fixed.
    assert {tuple(c) for c in start_cells} == {tuple(c) for c in goal_cells} == free
    offset = np.abs(np.asarray(obs[0])[ended] - 4.0 * (start_cells[:, ::-1] - 1))
    assert 0.9 < offset.max() <= 1  # within 1 of the centre


@pytest.mark.parametrize("name", maze.names())
def test_every_maze_keeps_the_contract(name):
    env = envs.make(f"maze/{name}", 3)
    key = jax.random.key(0)
    state = jax.eval_shape(env.reset, key)
    next_state, transition, finished = jax.eval_shape(env.step, key, state, jax.ShapeDtypeStruct((3, 2), "float32"))
    assert signature(next_state) == signature(state)
    batched = jax.tree.map(lambda x: ((3, *x.shape), x.dtype), jax.eval_shape(lambda: example_transition(env.spec)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), transition) == batched
    assert set(finished) == {"episode_return", "episode_length", "episode_success"}
    hash(env.spec)
    # Every task begins and ends in a free cell; two cells at least are between them.
    layout = maze.LAYOUTS[name.removesuffix("-goals")]
    width = len(layout.rows[0])
    steps = maze.distances(walls(layout))
    assert len(layout.tasks) == 5
    assert all(steps[a * width + b, c * width + d] > 2 for (a, b), (c, d) in layout.tasks)


def test_tasks_are_fixed_starts_and_goals():
    # Task 2 of medium: (6, 1) to (1, 6), so x = 0, y = 20 to x = 20, y = 0.
    env = envs.make("maze/medium", 50, task="2")
    assert env.tasks[0].tolist() == [[0, 20], [20, 0]]
    start = np.asarray(env.reset(jax.random.key(0)).obs)
    assert (np.abs(start - [[0, 20]]) <= 1).all() and len(np.unique(start)) == 100
    position, goal = envs.make("maze/medium-goals", 7, task=-1).reset(jax.random.key(0)).obs
    expected = [[20, 20], [20, 0], [4, 12], [0, 20], [0, 0], [20, 20], [20, 0]]  # the goals of tasks 1 to 5, 1, 2
    assert goal.tolist() == expected and cells(position)[3].tolist() == [6, 5]


def test_noise_moves_a_body_that_stays():
    still, noisy = envs.make("maze/umaze", 500), envs.make("maze/umaze", 500, noise=0.1)
    moved = lambda env: np.asarray(step(env, jax.random.key(0), at(env, (0, 0)), jnp.zeros((500, 2)))[1].next_obs)
    assert (moved(still) == 0).all()
    # 0.5 x 0.1; the standard deviation of 1,000 draws is within 10%, four of its own.
    assert moved(noisy).std() == pytest.approx(0.05, rel=0.1)


class Expert:
    """The controller as an algorithm."""

    @staticmethod
    def act(config, spec, params, obs, key):
        return maze.expert(params, *obs)


def test_evaluation_reports_the_expert_s_success():
    env = envs.make("maze/medium-goals", 5, task=-1)
    params = jax.tree.map(lambda x: x[None], envs.make("maze/medium-goals", 5))  # one run
    result = evaluate(Expert, jnp.zeros(1), env, params, jax.random.split(jax.random.key(0), 1))
    assert result["eval_success"].tolist() == result["eval_return"].tolist() == [1]
    # Tasks are 12, 12, 4, 7 and 9 cells long, each 8 steps less some that corners save.
    assert 40 < result["eval_length"][0] < 8 * 44 / 5


@pytest.mark.parametrize(
    "name, params, words",
    [
        ("maze/medum", {}, ["'maze/medum'", "maze/medium"]),
        ("maze/medium", dict(task=0), ["maze/medium", "task 0", "from 1 to 5", "-goals"]),
        ("maze/medium-goals", dict(task=6), ["task 6", "from 1 to 5", "0 to draw"]),
        ("maze/medium", dict(episode_length=0), ["episode_length 0", "at least 1"]),
        ("maze/medium", dict(step_size=2.5), ["step_size 2.5", "at most 2"]),
        ("maze/medium", dict(success_radius=0), ["success_radius 0", "more than 0"]),
        ("maze/medium", dict(noise=-1), ["noise -1", "at least 0"]),
        ("maze/medium", dict(steps=1), ["'steps'", "step_size"]),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(name, params, words):
    with pytest.raises(ValueError) as error:
        envs.make(name, 2, **params)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


# Offline data


quick_roll_out = jax.jit(
    mazes.roll_out.__wrapped__,
    static_argnames=("kind", "num_steps"),
    compiler_options={"xla_backend_optimization_level": 0},  # compiling takes longer than running
)


@pytest.fixture(scope="module")
def data():
    """By kind: 2,000 steps of 20 environments in umaze, with the goals that were sought and for its task 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mazes, "roll_out", quick_roll_out)
        make = lambda kind, name: mazes.make(name, kind, 20)
        made = {kind: (make(kind, "maze/umaze-goals"), make(kind, "maze/umaze")) for kind in mazes.KINDS}
        assert tiny.same_bits(make("stitch", "maze/umaze-goals"), made["stitch"][0])  # from the same seed
        return made


@pytest.mark.parametrize("kind, longest", [("navigate", 1_000), ("stitch", 200), ("explore", 500)])
def test_data_are_whole_trajectories_that_pass_the_door(data, kind, longest):
    for name, t in zip(("maze/umaze-goals", "maze/umaze"), data[kind], strict=True):
        length = np.diff(np.flatnonzero(t.truncated), prepend=-1)
        assert length.max() <= longest and (kind == "stitch" or length.min() == longest)
        datasets.admit(t, envs.make(name).spec, name, name)
    assert len(np.unique(cells(data[kind][0].obs[0]), axis=0)) == 7  # all free cells


@pytest.mark.parametrize("kind", mazes.KINDS)
def test_data_for_one_goal_are_what_the_maze_s_own_step_makes_of_them(data, kind):
    t = data[kind][1]
    env = envs.make("maze/umaze", len(t.reward))
    state = maze.EnvState(jnp.asarray(t.obs), jnp.zeros(len(t.reward), jnp.int32))
    _, own, _ = step(env, jax.random.key(0), state, jnp.asarray(t.action))
    assert (np.asarray(own.reward) == t.reward).all() and (np.asarray(own.terminated) == t.terminated).all()
    close(own.next_obs, t.next_obs)
    assert 100 < t.terminated.sum() < 0.1 * len(t.reward)


@pytest.mark.parametrize("kind", mazes.KINDS)
def test_data_with_goals_reward_the_goal_that_is_sought(data, kind):
    t = data[kind][0]
    distance = np.linalg.norm(t.next_obs[0] - t.obs[1], axis=1)
    sure = np.abs(distance - 1) > 1e-5  # further from the radius than rounding
    assert ((distance <= 1) == t.reward)[sure].all() and not t.terminated.any()
    changes = (t.obs[1] != t.next_obs[1]).any(1)
    assert (changes == ((t.reward == 1) & (kind == "navigate"))).all()


def test_no_trajectory_of_stitch_crosses_the_maze(data):
    t = data["stitch"][0]
    corridor = {(1, 1): 0, (1, 2): 1, (1, 3): 2, (2, 3): 3, (3, 3): 4, (3, 2): 5, (3, 1): 6}
    number = np.array([corridor[tuple(c)] for c in cells(t.next_obs[0])])
    first = np.concatenate([[0], np.flatnonzero(t.truncated)[:-1] + 1])
    low, high = np.minimum.reduceat(number, first), np.maximum.reduceat(number, first)
    assert (high - low).max() == 4  # of the six between start and goal
    assert ((low == 0) & (high == 4)).any() and ((low == 2) & (high == 6)).any()  # the two that meet
    # They end at their goals, before their 200 steps are over: 4 cells are 32 at full speed, 40 at the four fifths
    # of it that noise of 0.5 leaves of a clipped action of 1, 64 at half speed.
    ends = t.truncated
    assert np.diff(np.flatnonzero(ends)).max() < 60
    assert (np.linalg.norm(t.next_obs[0][ends] - t.obs[1][ends], axis=1) <= 0.5 + 1e-5).all()
    # In every maze the longest of them is shorter than task 1.
    for name, layout in maze.LAYOUTS.items():
        candidates = mazes.goal_rooms(envs.make(f"maze/{name}-goals"), "stitch")
        free = np.flatnonzero(~walls(layout).ravel())
        steps, width = maze.distances(walls(layout)), len(layout.rows[0])
        assert steps[np.ix_(free, free)][candidates].max() == 4 and candidates.any(1).all()
        ((a, b), (c, d)), *_ = layout.tasks
        assert steps[a * width + b, c * width + d] > 5


def test_a_trajectory_of_navigate_reaches_one_goal_after_another(data):
    reached = data["navigate"][0].reward.reshape(-1, 1_000).sum(1)
    # Goals are 16/7 = 2.3 cells apart on average, 18 steps at full speed: about 55 in 1,000 steps.
    assert reached.min() >= 25 and 35 < reached.mean() < 75


def test_explore_holds_a_direction_for_ten_steps(data):
    action = data["explore"][0].action.reshape(-1, 500, 2)
    mean = action.reshape(-1, 50, 10, 2).mean(2)  # of each direction
    shifted = action[:, 5:-5].reshape(-1, 49, 10, 2).mean(2)  # half of one, half of the next
    # Means of ten: noise is independent, so what a direction adds to the variance halves where two are mixed.
    assert mean.var() > 1.5 * shifted.var() and np.abs(mean.mean()) < 0.05


def test_the_expert_s_noise_is_a_half(data):
    env, expert = envs.make("maze/umaze-goals"), jax.jit(maze.expert)
    for kind in ("navigate", "stitch"):
        t = jax.tree.map(lambda x: x[:39_000], data[kind][0])  # one shape, one program
        action = np.asarray(expert(env, *t.obs))
        inside = np.abs(action) <= 0.7  # where noise of up to 0.25 is not clipped
        # A standard normal is within 1/2 with probability 0.383; five standard errors of 27,000 draws are 0.015.
        share = (np.abs(t.action - action) <= 0.25)[inside].mean()
        assert inside.sum() > 20_000 and share == pytest.approx(0.383, abs=0.015)


def test_explore_s_noise_is_one(data):
    # |cos(angle) + n| >= 1 has probability 0.424 over angles, 0.396 and 0.452 with noise of 0.9 and 1.1.
    at_bounds = (np.abs(data["explore"][0].action) == 1).mean()
    # Five standard errors: of 4,000 directions that differ by at most 0.2, 0.016 at most; they differ by less.
    assert at_bounds == pytest.approx(0.424, abs=0.012)


def test_a_trajectory_of_stitch_that_does_not_arrive_ends_after_200_steps(data):
    env = envs.make("maze/umaze-goals", 20)
    slow = dataclasses.replace(env, step_size=jnp.float32(1e-3))  # the program is that of `data`
    candidates = jnp.asarray(mazes.goal_rooms(env, "stitch"))
    t = quick_roll_out(slow, "stitch", candidates, jax.random.key(0), 2_000)
    assert (np.asarray(t.truncated) == (np.arange(2_000) % 200 == 199)[:, None]).all()


@pytest.mark.parametrize("name, number", [("umaze", 100_000), ("medium-goals", 250_000), ("large", 500_000)])
def test_each_maze_has_its_number_of_transitions(name, number, monkeypatch):
    asked = []

    def roll_out(env, kind, candidates, key, num_steps):
        asked.append(env.num_envs * num_steps)
        raise InterruptedError

    monkeypatch.setattr(mazes, "roll_out", roll_out)
    for kind in mazes.KINDS:
        _, env, make = mazes.TABLE[f"maze/{name}-{kind}"]
        with pytest.raises(InterruptedError):
            make(env)
    assert asked == [number] * 3


def test_every_dataset_has_its_maze():
    assert len(mazes.TABLE) == 24  # six mazes, each with navigate, stitch, explore and demos
    about, env, make = mazes.TABLE["maze/medium-goals-stitch"]
    assert env == "maze/medium-goals" and "four cells" in about and make.keywords == dict(kind="stitch")
    assert {env for _, env, _ in mazes.TABLE.values()} == {f"maze/{name}" for name in maze.names()}


def test_demonstrations_are_twenty_whole_episodes_that_each_reach_the_goal():
    t = mazes.demonstrate("maze/umaze-goals")
    ends = np.flatnonzero(t.terminated)
    assert len(ends) == 20 and ends[-1] == len(t.reward) - 1 and not t.truncated.any()
    assert t.reward.sum() == 20 and (t.reward == t.terminated).all()
    assert (np.linalg.norm(t.next_obs[0][ends] - t.next_obs[1][ends], axis=1) <= 1).all()  # the success radius
    start = np.concatenate([[0], ends[:-1] + 1])
    assert len(np.unique(t.obs[1][start], axis=0)) == 20  # goals of their own
    inside = np.setdiff1d(np.arange(len(t.reward)), ends)
    assert (t.obs[0][inside + 1] == t.next_obs[0][inside]).all()
