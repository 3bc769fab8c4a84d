"""Datasets of other projects, read from their own files, which are never written to.

    minari:ID or minari:FOLDER       Minari, through its package
    minari-flat:...                  the same, a structured observation made one vector
    ogbench:FILE.npz or FILE.npz     OGBench: what its own loader yields
    FILE.hdf5                        D4RL: what its `qlearning_dataset` yields

What their words mean here:

    Minari    terminations, truncations   terminated, truncated; an episode that ends with neither is truncated
    OGBench   terminals                   truncated: trajectories are cut, no MDP ends
    D4RL      terminals, timeouts         terminated, truncated

Each goes through the door, `datasets.admit`. `export_minari` writes any dataset as a Minari one.
Packages are imported where they are needed: Minari and h5py are in the extra `offline`, OGBench and d4rl are not used.
"""

import importlib
import json
import re
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path

import gymnasium
import jax
import numpy as np
from gymnasium import spaces

from envs.gym_env import observe
from envs.types import Spec, Transition, continuous_spec, discrete_spec
from replay import datasets
from replay.datasets import arrays_of, check_fits, first_line
from runner.check import BadInput, tree_bytes

# D4RL's limits of episodes, in env steps, by what the name of a file has in it; the first that fits.
LIMITS = {
    r"ant_?maze.*u-?maze": 700,
    r"ant_?maze": 1000,
    r"kitchen": 280,
    r"^pen": 100,
    r"^(hammer|door|relocate)": 200,
    r"^(halfcheetah|hopper|walker|ant)": 1000,
}

UNREADABLE = (*datasets.UNREADABLE, ImportError, AssertionError, gymnasium.error.Error)


def package(name: str):
    """An optional package. Raises BadInput naming the extra that has it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadInput(
            f"this dataset needs the extra `offline` ({error}): "
            "`uv run --extra offline ...`, or `pip install -e '.[offline]'`"
        ) from None


@contextmanager
def reading(name: str):
    """Whatever is wrong with the files of a dataset becomes one line that names it."""
    try:
        yield
    except BadInput:
        raise
    except FileNotFoundError:
        raise BadInput(f"dataset {name} does not exist") from None
    except UNREADABLE as error:
        raise BadInput(f"dataset {name} cannot be read ({first_line(error)})") from None


def columns(name: str, file, needed: tuple, optional: tuple = ()) -> dict:
    """Arrays of an open file, all of one length. Raises BadInput naming those missing, or the lengths."""
    missing = [key for key in needed if key not in file]
    if missing:
        raise BadInput(f"dataset {name} has no {', '.join(missing)}; it has {', '.join(sorted(file)[:9]) or 'nothing'}")
    given = {key: file[key] for key in (*needed, *optional) if key in file}
    for key, x in given.items():
        if hasattr(x, "keys"):
            raise BadInput(f"dataset {name}: {key} is a group of {', '.join(x) or 'nothing'}; only arrays are read")
        if x.ndim == 0:
            raise BadInput(f"dataset {name}: {key} is a single value; it must have a row for each step")
    arrays = {key: x[()] for key, x in given.items()}
    lengths = {key: len(x) for key, x in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise BadInput(f"dataset {name}: lengths differ: {', '.join(f'{key} {n}' for key, n in lengths.items())}")
    if not np.issubdtype(arrays["actions"].dtype, np.floating):
        raise BadInput(f"dataset {name}: actions are {arrays['actions'].dtype}; only continuous ones are read")
    return arrays


def flags(name: str, key: str, values) -> np.ndarray:
    """A column of 0 and 1 as `(N,)` bool. Raises BadInput naming the first row that is neither."""
    values = values.reshape(len(values))
    wrong = ~np.isin(values, (0, 1))
    if wrong.any():
        raise BadInput(f"dataset {name}: {key} is {values[wrong.argmax()]} at row {wrong.argmax()}; it must be 0 or 1")
    return values.astype(bool)


def minari(name: str, say=print) -> datasets.Dataset:
    """A Minari dataset: every transition, the last observation of an episode included.

    A Dict or Tuple observation becomes a tuple: of a goal environment (observation, achieved_goal, desired_goal), else
    by the alphabet. By `minari-flat:` it becomes a vector, by the alphabet: that of Gymnasium's FlattenObservation.
    Continuous actions are scaled from the action space's bounds to [-1, 1], discrete ones counted from 0. The
    environment is `gym/` and the id of the one that the dataset says to evaluate in.
    """
    library = package("minari")
    prefix, _, given = name.partition(":")
    with reading(name):
        folders = (Path(given).expanduser(), Path(given).expanduser() / "data")
        folder = next((f for f in folders if (f / "metadata.json").is_file()), None)
        try:
            data = library.load_dataset(given) if folder is None else library.MinariDataset(folder)
        except FileNotFoundError:
            if not is_id(given):
                raise BadInput(f"dataset {name} is no folder of a Minari dataset, and an id {ID}") from None
            raise BadInput(f"dataset {name} is not on this machine; `minari download {given}` fetches it") from None
        metadata = data.storage.metadata
        env, params, limit = environment(metadata)
        plain = {key: x for key, x in params.items() if is_plain(x)}
        if len(plain) < len(params):
            say(f"dataset {name}: of its environment's parameters only numbers, words and lists of them are kept")
        parts = []
        for number, episode in enumerate(data.iterate_episodes()):
            part = one_episode(f"dataset {name}: episode {number}", data, episode, prefix == "minari-flat")
            if not parts:
                check_fits(name, data.total_steps * tree_bytes(part) // max(len(part.reward), 1), copies=2)
            parts.append(part)
        if not parts:
            raise BadInput(f"dataset {name}: it is empty")
        transitions = datasets.join(parts)
    obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), transitions.obs)
    if isinstance(data.action_space, spaces.Discrete):
        spec = discrete_spec(obs, int(data.action_space.n), limit)
    else:
        spec = continuous_spec(obs, transitions.action.shape[1], limit)
    return datasets.admit(transitions, spec, name, env, plain, say)


ID = "must be like pendulum/expert-v0: names, the last with a version"


def is_id(text: str) -> bool:
    """Whether a Minari dataset can be called this."""
    from minari.dataset.minari_dataset import parse_dataset_id

    try:
        parse_dataset_id(text)
    except (ValueError, TypeError):  # the latter where there is no version
        return False
    return True


def is_plain(value) -> bool:
    """Whether a parameter can be a static field's: numbers, words and lists of them, no dict in any of them."""
    try:
        hash(datasets.hashable(dict(value=value)))
    except TypeError:
        return False
    return True


def environment(metadata: dict) -> tuple[str | None, dict, int]:
    """Id, parameters and limit of episodes (0: none) of the environment that a Minari dataset says to evaluate in."""
    if "bellmax" in metadata:  # `export_minari` wrote it
        ours = metadata["bellmax"]
        return ours["env"], ours["env_params"], ours["max_episode_steps"]
    saved = metadata.get("eval_env_spec") or metadata.get("env_spec")
    if saved is None:
        return None, {}, 0
    env = json.loads(saved)
    params = {key: x for key, x in (env.get("kwargs") or {}).items() if key != "render_mode"}
    if env.get("max_episode_steps"):
        params.setdefault("max_episode_steps", env["max_episode_steps"])
    return f"gym/{env['id']}", params, env.get("max_episode_steps") or 0


def one_episode(where: str, data, episode, flat: bool) -> Transition:
    """Transitions `(T, ...)` of one Minari episode of T + 1 observations, ended where it stops."""
    num = len(episode.rewards)
    obs = observations(where, data.observation_space, episode.observations, flat)
    for x in jax.tree.leaves(obs):
        if len(x) != num + 1:
            raise BadInput(f"{where} has {len(x)} observations and {num} rewards; it must have one more of the first")
    terminated, truncated = (np.array(x, bool) for x in (episode.terminations, episode.truncations))
    action = actions(where, data.action_space, episode.actions)
    for key, x in dict(actions=action, terminations=terminated, truncations=truncated).items():
        if len(x) != num:
            raise BadInput(f"{where} has {len(x)} {key} and {num} rewards")
    truncated[-1:] |= ~terminated[-1:]
    first, second = (jax.tree.map(lambda x, rows=rows: x[rows], obs) for rows in (slice(0, num), slice(1, None)))
    return Transition(first, action, np.asarray(episode.rewards, np.float32), second, terminated, truncated)


def observations(where: str, space, value, flat: bool):
    """Observations `(T + 1, ...)` of a Gymnasium space, as an array or tuples of them, or flat, `(T + 1, size)`."""
    try:
        obs, one = observe(space, value, alphabet=flat), observe(space, space.sample(), alphabet=flat)
    except ValueError as error:
        raise BadInput(f"{where} {first_line(error)}") from None
    for x, its in zip(jax.tree.leaves(obs), jax.tree.leaves(one), strict=True):
        if x.shape[1:] != its.shape:
            raise BadInput(f"{where} has observations of shape {x.shape[1:]}; its space says {its.shape}")
    if not (flat and isinstance(obs, tuple)):
        return obs
    return np.concatenate([x.reshape(len(x), -1).astype(np.float32) for x in jax.tree.leaves(obs)], 1)


def actions(where: str, space, value) -> np.ndarray:
    """Actions of a Gymnasium space as ours: `(T,)` int32 from 0, or `(T, D)` float32, its bounds at -1 and 1."""
    if isinstance(space, spaces.Discrete):
        return (np.asarray(value) - space.start).astype(np.int32)
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise BadInput(f"{where} has actions of {space}; Discrete ones and vectors are read")
    if not space.is_bounded():
        raise BadInput(f"{where} has actions without bounds, {space}; they cannot be scaled to [-1, 1]")
    x = np.asarray(value).reshape(-1, *space.shape)
    if (space.low == -1).all() and (space.high == 1).all():
        return x.astype(np.float32)
    low, high = space.low.astype(np.float64)[None], space.high.astype(np.float64)[None]
    return (2 * (x - low) / (high - low) - 1).astype(np.float32)


def check_minari(dataset_id: str) -> Path:
    """The folder that a new Minari dataset goes to. Raises BadInput where the id is none, or there already."""
    package("minari")
    from minari.storage.datasets_root_dir import get_dataset_path

    if not is_id(dataset_id):
        raise BadInput(f"Minari id {dataset_id!r} {ID}")
    folder = get_dataset_path(dataset_id)
    if folder.exists():
        raise BadInput(f"Minari dataset {dataset_id} is there already, in {folder}, and is never written to")
    return folder


def export_minari(dataset: datasets.Dataset, dataset_id: str, provenance: dict | None = None):
    """Writes a dataset as a Minari one, in Minari's folder (`MINARI_DATASETS_PATH`).

    Its metadata have an entry `bellmax`: the environment, its parameters and limit, and `provenance`, where the data
    are from, json. An episode's observations are the `obs` of its transitions and the last `next_obs`.
    Raises: BadInput where the id is none, or there already.
    """
    library = package("minari")
    from minari.data_collector import EpisodeBuffer

    folder = check_minari(dataset_id)
    spec, transitions = dataset.spec, jax.tree.map(np.asarray, dataset.transitions)
    buffers, start = [], 0
    for last in np.unique(dataset.last):
        one = jax.tree.map(lambda x, a=start, b=last + 1: x[a:b], transitions)
        start = last + 1
        obs = jax.tree.map(lambda x, y: np.concatenate([x, y[-1:]]), one.obs, one.next_obs)
        buffers.append(EpisodeBuffer(None, None, None, obs, one.action, one.reward, one.terminated, one.truncated))
    origin = dict(
        env=dataset.env,
        env_params=dict(dataset.env_params),
        max_episode_steps=spec.max_episode_steps,
        provenance=provenance or {},
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Minari asks for authors and links
            data = library.create_dataset_from_buffers(
                dataset_id,
                buffers,
                observation_space=space_of(spec.obs),
                action_space=action_space_of(spec),
                jpeg_encoding=False,
            )
        data.storage.update_metadata({"bellmax": origin})
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def space_of(obs):
    """The Gymnasium space of a spec's observations."""
    if isinstance(obs, tuple):
        return spaces.Tuple([space_of(x) for x in obs])
    if obs.dtype.kind in "fb":
        low, high = (-np.inf, np.inf) if obs.dtype.kind == "f" else (0, 1)
    else:
        low, high = np.iinfo(obs.dtype).min, np.iinfo(obs.dtype).max
    return spaces.Box(low, high, obs.shape, obs.dtype)


def action_space_of(spec: Spec):
    if spec.action_type == "discrete":
        return spaces.Discrete(spec.num_actions)
    return spaces.Box(-1, 1, (spec.action_size,), np.float32)


OGBENCH = ("observations", "actions", "terminals")


def is_ogbench(file) -> bool:
    """Whether an open `.npz` is of OGBench's layout."""
    return all(key in file for key in OGBENCH)


def ogbench(name: str, say=print) -> datasets.Dataset:
    """An OGBench file; its `-val` sibling is another dataset, by its own name.

    The rows are states: the successor of each is the next row, and the last row of a trajectory, which has none, is
    dropped. There are no rewards, they are 0, and no environment: goals and tasks are the reader's to choose.
    """
    path = Path(name.removeprefix("ogbench:")).expanduser()
    with reading(name), arrays_of(path) as file:
        on_disk = sum(x.file_size for x in file.zip.infolist() if x.filename.removesuffix(".npy") in OGBENCH)
        check_fits(name, 2 * on_disk, copies=2)  # rows and their successors
        data = columns(name, file, OGBENCH)
        for key, axes in dict(terminals=1, actions=2).items():
            if data[key].ndim != axes:
                raise BadInput(f"dataset {name}: {key} is {data[key].shape}; it must have {axes} axes")
        ends = flags(name, "terminals", data["terminals"])
        if len(ends) and not ends[-1]:
            raise BadInput(f"dataset {name}: its last row, {len(ends) - 1}, ends no trajectory")
        rows = np.flatnonzero(~ends)
        obs = data["observations"]
        obs = obs if obs.dtype == np.uint8 else obs.astype(np.float32, copy=False)
        none = np.zeros(len(rows))
        transitions = Transition(
            obs=obs[rows],
            action=data["actions"][rows].astype(np.float32),
            reward=none.astype(np.float32),
            next_obs=obs[rows + 1],
            terminated=none.astype(bool),
            truncated=ends[rows + 1],
        )
        has_rewards = "rewards" in file
    what = "its rewards are not read, which are of one task" if has_rewards else "OGBench has no rewards"
    say(f"dataset {name}: {what}; all are 0")
    spec = continuous_spec(jax.ShapeDtypeStruct(obs.shape[1:], obs.dtype), transitions.action.shape[-1], 0)
    return datasets.admit(transitions, spec, name, say=say)


D4RL = ("observations", "actions", "rewards", "terminals")


def d4rl(name: str, say=print) -> datasets.Dataset:
    """A D4RL file, as D4RL's q-learning view has it.

    The successor of a row is the next row. Rows that a timeout ended, which have none, and the last row are dropped,
    and what comes before them is truncated. The successor of a terminated row is another episode's first: nothing may
    bootstrap from it. Files of the first versions have no `timeouts`: the limit is found by their name.
    """
    h5py = package("h5py")
    with reading(name), h5py.File(name, "r") as file:
        if "episode_0" in file:
            raise BadInput(f"dataset {name} is a part of a Minari dataset; give its folder, as minari:FOLDER")
        on_disk = sum(getattr(file[key], "nbytes", 0) for key in D4RL if key in file)
        check_fits(name, 2 * on_disk, copies=2)  # rows and their successors
        data = columns(name, file, D4RL, ("timeouts",))
        num, limit = len(data["rewards"]), limit_of(Path(name).stem)
        for key in ("rewards", "terminals", "timeouts"):
            if key in data and data[key].size != num:
                raise BadInput(f"dataset {name}: {key} is {data[key].shape}; it must be ({num},)")
        if data["actions"].ndim > 2:
            raise BadInput(f"dataset {name}: actions is {data['actions'].shape}; it must have at most 2 axes")
        if num == 0:
            raise BadInput(f"dataset {name}: it is empty")
        terminals = flags(name, "terminals", data["terminals"])
        if "timeouts" in data:
            timeouts = flags(name, "timeouts", data["timeouts"])
        elif limit:
            timeouts = timeouts_of(terminals, limit)
        else:
            raise BadInput(
                f"dataset {name} has no timeouts, and its name does not say of which task it is; call it, for example, "
                "hopper-medium-v0.hdf5"
            )
        if not (terminals | timeouts).any():
            raise BadInput(f"dataset {name}: episode ends are missing: no row of {num} is a terminal or timeout")
        rows = np.flatnonzero(~timeouts[:-1])
        obs = data["observations"].astype(np.float32, copy=False)
        cut = np.append(np.diff(rows) > 1, True)[: len(rows)]  # where the next row was dropped
        transitions = Transition(
            obs=obs[rows],
            action=data["actions"].reshape(num, -1)[rows].astype(np.float32),
            reward=data["rewards"].reshape(num)[rows].astype(np.float32),
            next_obs=obs[rows + 1],
            terminated=terminals[rows],
            truncated=cut & ~terminals[rows],
        )
    spec = continuous_spec(jax.ShapeDtypeStruct(obs.shape[1:], "float32"), transitions.action.shape[1], limit)
    return datasets.admit(transitions, spec, name, say=say)


def limit_of(stem: str) -> int:
    """Env steps after which D4RL ends an episode, by the name of the file; 0 where it does not say."""
    return next((limit for pattern, limit in LIMITS.items() if re.search(pattern, stem.lower())), 0)


def timeouts_of(terminals, limit: int) -> np.ndarray:
    """Rows that D4RL takes to be cut by the limit in a file without `timeouts`.

    It counts an episode's rows from 0 after a timeout, yet from 1 after a terminal, and so does this.
    """
    cut, step = np.zeros(len(terminals), bool), 0
    for i, terminal in enumerate(terminals):
        cut[i] = step == limit - 1
        step = 0 if cut[i] else 1 if terminal else step + 1
    return cut


# What reads a dataset: by how its name begins, with a colon, or ends. An OGBench .npz is known by its content.
READERS = {"minari:": minari, "minari-flat:": minari, "ogbench:": ogbench, ".hdf5": d4rl}
