"""Datasets of transitions to learn from offline: one type, one door, one file format.

    load(name)      a built-in name (replay/builtin.py) or a file (READERS), through the door
    admit(...)      the door: what every dataset is checked for, whatever it was read from
    sample(...)     a batch for one gradient step
    save(...)       our own format: a NumPy `.npz` that holds the fields of a Transition and a header in json
    roll_out(...)   what a policy does in an environment, and `episodes(...)`, that as a dataset's transitions

A dataset is an argument of the program that trains, stays on the device and is shared by all runs of a launch.
A file once written is never written to.
"""

import difflib
import io
import json
import os
import zipfile
import zlib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from envs.types import EDGE, Spec, Transition, continuous_spec, discrete_spec, example_transition, pytree, static
from runner import check, files
from runner.check import BadInput

GAP = 1e-4  # absolute and relative: further than this from the next observation, a successor is another one
VERSION = 1  # of the file format

# What reading a damaged file raises.
UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error)


class NoRoom(BadInput):
    """Data that are larger than the memory they go to; nothing is wrong with them."""


@pytree
class Dataset:
    """N transitions: episodes one after another, each in time order and whole."""

    transitions: Transition  # leaves (N, ...)
    last: jax.Array  # (N,) int32: index of the last transition of the episode that each is in
    spec: Spec = static()
    name: str = static(default="")  # what `load` found it by
    env: str | None = static(default=None)  # id of the environment that the data are of
    env_params: tuple = static(default=())  # its parameters, ((name, value), ...)

    @property
    def num_transitions(self) -> int:
        return self.last.shape[0]


def sample(dataset: Dataset, key, batch_size: int) -> Transition:
    """Transitions drawn uniformly, with replacement; leaves `(batch_size, ...)`."""
    index = jax.random.randint(key, (batch_size,), 0, dataset.num_transitions)
    return jax.tree.map(lambda x: x[index], dataset.transitions)


def load(name: str, say=print) -> Dataset:
    """The dataset of a built-in name or a file. Args: say, called with lines that the user should see.

    Raises: BadInput, one line, for whatever is wrong with it.
    """
    from replay import builtin, readers

    if name in builtin.TABLE:
        return builtin.load(name, say)
    name = os.path.expanduser(name)
    known = readers.READERS | READERS
    for key, reader in known.items():
        if name.startswith(key) if key.endswith(":") else name.endswith(key):
            return reader(name, say)
    if os.path.exists(name):  # not of a Path, which raises where a name is too long
        raise BadInput(
            f"dataset {name} must be a file whose name ends in one of: {', '.join(k for k in known if k[0] == '.')}"
        )
    close = difflib.get_close_matches(name, builtin.TABLE, 2, 0)
    raise BadInput(
        f"unknown dataset {name!r}; closest: {', '.join(close)} (--list shows all), or give a .npz or .hdf5 file"
    )


def admit(transitions: Transition, spec: Spec, name: str, env=None, env_params=(), say=print) -> Dataset:
    """The door. Puts host arrays on the device, actions clipped to [-1, 1].

    Args: transitions, NumPy leaves `(N, ...)` with the shapes and dtypes of `spec`.
    Raises: BadInput, naming the dataset and the field and transition that is wrong, or both sizes of memory.
    """

    def refuse(text):
        raise BadInput(f"dataset {name}: {text}")

    for field, x, s in zip(Transition._fields, transitions, one_of(spec), strict=True):
        mine, its = jax.tree.structure(x), jax.tree.structure(s)
        if mine != its:
            refuse(f"{field} is {str(mine)[:80]}; its spec says {its}")
    check_fits(name, check.tree_bytes(transitions))
    num = len(transitions.reward)
    for (field, x), (_, s) in zip(named(transitions), named(one_of(spec)), strict=True):
        if x.shape != (num, *s.shape) or x.dtype != s.dtype:
            refuse(f"{field} is {x.shape} {x.dtype}; its spec says {(num, *s.shape)} {s.dtype}")
    if num == 0:
        refuse("it is empty")
    for field, x in named(transitions):
        if x.dtype.kind == "f" and not (finite := np.isfinite(x.reshape(num, -1)).all(1)).all():
            refuse(f"{field} is NaN or infinite at transition {finite.argmin()} of {num}")

    ends = transitions.terminated | transitions.truncated
    if not ends.any():
        refuse("episode ends are missing: no transition is terminated or truncated")
    if not ends[-1]:
        refuse(f"its last transition, {num - 1}, ends no episode; where the data were cut it must be truncated")
    gap = gaps(transitions, ends)
    if gap.any():
        refuse(
            f"an episode end is missing at transition {gap.argmax()}: the next observation is not its successor "
            f"(so at {gap.sum()} of {num})"
        )

    action = transitions.action
    if spec.action_type == "discrete":
        outside = (action < 0) | (action >= spec.num_actions)
        if outside.any():
            i = outside.argmax()
            refuse(f"action is {action[i]} at transition {i}; it must be from 0 to {spec.num_actions - 1}")
    elif (outside := np.abs(action) > 1).any():
        say(f"dataset {name}: {outside.sum()} of {action.size} actions clipped to [-1, 1], from {np.abs(action).max()}")
        transitions = transitions._replace(action=action.clip(-1, 1))
    transitions = jax.tree.map(jnp.asarray, transitions)
    return Dataset(transitions, jnp.asarray(last_of(ends)), spec, name, env, hashable(env_params))


def named(transitions) -> list:
    """The leaves by name: obs, action, ...; those of a structured observation are obs[0], obs[1], ..."""
    return [(jax.tree_util.keystr(p).lstrip("."), x) for p, x in jax.tree_util.tree_leaves_with_path(transitions)]


def one_of(spec: Spec) -> Transition:
    """Shape structs of one transition."""
    return jax.eval_shape(lambda: example_transition(spec))


def check_fits(name: str, num_bytes: int, copies: int = 1):
    """Raises NoRoom naming both sizes. Args: copies, in main memory at once, of which a device holds one."""
    need, free = num_bytes * (copies if jax.default_backend() == "cpu" else 1), check.available_memory()
    if need > free:
        raise NoRoom(f"dataset {name} needs {check.size(need)} of memory; {check.size(free)} available")


def first_line(error: Exception) -> str:
    """What an error says, or its kind, in one line of at most 200 letters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def arrays_of(path):
    """An open `.npz`. Raises: ValueError where the file is a single array."""
    file = np.load(path, allow_pickle=False)
    if isinstance(file, np.ndarray):
        raise ValueError("it is a single array, which np.save writes; np.savez writes several")
    return file


def gaps(transitions: Transition, ends) -> np.ndarray:
    """`(N,)`, where no episode ends and yet the next observation is not the successor."""
    gap = np.zeros(len(ends), bool)
    for new, old in zip(jax.tree.leaves(transitions.obs), jax.tree.leaves(transitions.next_obs), strict=True):
        new, old = new[1:], old[:-1]
        differ = ~np.isclose(new, old, rtol=GAP, atol=GAP) if new.dtype.kind == "f" else new != old
        gap[:-1] |= differ.any(tuple(range(1, differ.ndim)))
    return gap & ~ends


def last_of(ends) -> np.ndarray:
    """Index of the last transition of each one's episode. Args: ends `(N,)` bool, true at the end. Returns int32."""
    stops = np.flatnonzero(ends)
    return stops[np.searchsorted(stops, np.arange(len(ends)))].astype(np.int32)


def hashable(params) -> tuple:
    """Parameters of an environment, as a dict or as pairs, made a static field's value."""
    plain = lambda x: tuple(plain(i) for i in x) if isinstance(x, list | tuple) else x
    return tuple((key, plain(value)) for key, value in dict(params).items())


def statistics(dataset: Dataset) -> dict:
    """Counts, returns of episodes and the fraction of actions at the bounds (None where discrete), for json."""
    reward, last = np.asarray(dataset.transitions.reward, np.float64), np.unique(dataset.last)
    returns = np.add.reduceat(reward, np.concatenate([[0], last[:-1] + 1]))
    continuous = dataset.spec.action_type == "continuous"
    at_bounds = float((np.abs(dataset.transitions.action) >= 1 - EDGE).mean()) if continuous else None
    return dict(
        transitions=dataset.num_transitions,
        episodes=len(last),
        return_mean=float(returns.mean()),
        return_min=float(returns.min()),
        return_max=float(returns.max()),
        at_bounds=at_bounds,
    )


def summary(s: dict) -> str:
    """What `statistics` found, in one line."""
    text = f"{s['transitions']:,} transitions, {s['episodes']:,} episodes, return {s['return_mean']:.1f} on average, "
    text += f"{s['return_min']:.1f} to {s['return_max']:.1f}"
    return text if s["at_bounds"] is None else f"{text}; {s['at_bounds']:.0%} of actions at the bounds"


def shapes(spec: Spec) -> str:
    """What observations and actions are, in words; two specs go together where these are the same."""
    obs = jax.tree.map(lambda s: f"{s.shape} {s.dtype}", spec.obs)
    return f"observations {obs} and {spec.num_actions or spec.action_size} {spec.action_type} actions"


def spec_to_json(spec: Spec) -> dict:
    """Raises BadInput for observations that are neither arrays nor plain tuples of them."""

    def encode(x):
        if type(x) is tuple:
            return [encode(i) for i in x]
        if not isinstance(x, jax.ShapeDtypeStruct):
            raise BadInput(f"a dataset's observations must be arrays or tuples of them, not {type(x).__name__}")
        return dict(shape=list(x.shape), dtype=str(x.dtype))

    return spec._asdict() | dict(obs=encode(spec.obs), action=encode(spec.action))


def spec_from_json(saved: dict) -> Spec:
    def decode(x):
        if isinstance(x, list):
            return tuple(decode(i) for i in x)
        return jax.ShapeDtypeStruct(tuple(x["shape"]), np.dtype(x["dtype"]))

    make = discrete_spec if saved["action_size"] is None else continuous_spec
    return make(decode(saved["obs"]), saved["num_actions"] or saved["action_size"], saved["max_episode_steps"])


def save(path, dataset: Dataset, provenance: dict | None = None, overwrite: bool = False):
    """Writes a dataset as `.npz`, whole or not at all. Args: provenance, where the data are from, json.

    Raises: BadInput where the file is there and `overwrite` is not set.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise BadInput(f"{path} is there already and is never written to; choose another name, or --overwrite")
    header = dict(
        format="bellmax",
        version=VERSION,
        spec=spec_to_json(dataset.spec),
        env=dataset.env,
        env_params=dict(dataset.env_params),
        provenance=provenance or {},
        statistics=statistics(dataset),
    )
    buffer = io.BytesIO()
    arrays = {field: np.asarray(x) for field, x in named(dataset.transitions)}
    np.savez(buffer, header=np.array(json.dumps(header)), **arrays)
    files.write(path, buffer.getvalue())


def read(path, say=print) -> Dataset:
    """A file that `save` wrote, through the door. Raises BadInput naming the file."""
    from replay import readers

    foreign = BadInput(f"dataset file {path} was not written by Bellmax: it has no header that we know")
    try:
        with arrays_of(path) as file:
            on_disk = sum(entry.file_size for entry in file.zip.infolist())
            check_fits(path, on_disk, copies=2)  # what was read and what `admit` makes of it
            if "header" not in file and readers.is_ogbench(file):
                return readers.ogbench(str(path), say)
            if "header" not in file:
                raise foreign
            header = json.loads(str(file["header"]))
            if (header.get("format"), header.get("version")) != ("bellmax", VERSION):
                raise foreign
            env, env_params = header["env"], hashable(header["env_params"])
            hash((env, env_params))
            if not isinstance(env, str | None):
                raise TypeError(f"env is {env!r}")
            spec = spec_from_json(header["spec"])
            template = one_of(spec)
            leaves = [file[field] for field, _ in named(template)]
        transitions = jax.tree.unflatten(jax.tree.structure(template), leaves)
    except BadInput:
        raise
    except FileNotFoundError:
        raise BadInput(f"dataset file {path} does not exist") from None
    except UNREADABLE as error:
        raise BadInput(f"dataset file {path} is damaged ({first_line(error)})") from None
    return admit(transitions, spec, str(path), env, env_params, say)


# What reads a dataset: by how its name ends or, with a colon, begins.
READERS = {".npz": read}


@partial(jax.jit, static_argnames=("act", "num_steps"))
def roll_out(env, act, params, key, num_steps: int) -> Transition:
    """Steps every environment `num_steps` times. Args: act(params, obs, key) -> action of all environments.

    Returns: leaves `(num_steps, num_envs, ...)`.
    """
    key, reset_key = jax.random.split(key)

    def step(env_state, key):
        act_key, env_key = jax.random.split(key)
        env_state, transition, _ = env.step(env_key, env_state, act(params, env_state.obs, act_key))
        return env_state, transition

    return jax.lax.scan(step, env.reset(reset_key), jax.random.split(key, num_steps))[1]


def episodes(transitions: Transition) -> Transition:
    """A roll-out, leaves `(T, num_envs, ...)`, as episodes one after another, host arrays `(N, ...)`.

    Each environment's stream is cut at its last finished episode, so that no return is of a part. A stream in
    which none finished is kept, and truncated where it stops.
    """
    streams = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), jax.device_get(transitions))  # (num_envs, T, ...)
    ends = streams.terminated | streams.truncated
    truncated = streams.truncated.copy()
    truncated[~ends.any(1), -1] = True
    streams, ends = streams._replace(truncated=truncated), streams.terminated | truncated
    keep = np.maximum.accumulate(ends[:, ::-1], 1)[:, ::-1]  # (num_envs, T), an end here or later
    return jax.tree.map(lambda x: x[keep], streams)


def join(parts: list[Transition]) -> Transition:
    """Transitions of several collections, one after another."""
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def zeros(spec: Spec) -> Dataset:
    """One transition of zeros: stands in for any dataset of `spec` where only shapes count."""
    transitions = jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), one_of(spec))
    return Dataset(transitions, jnp.zeros(1, jnp.int32), spec)
