"""What an agent acts in. `envs.make(id, num_envs)` builds any environment by its id.

    CartPole-v1, Breakout-MinAtar, ...   gymnax
    brax/hopper, brax/ant, ...           Brax (`backend`: spring, generalized, positional, mjx)

An environment has `spec`, `num_envs`, `reset(key) -> state` and `step(key, state, action) ->
(state, transition, finished)`; `state.obs` is what to act on (docs/protocol.md).
"""

import difflib
import importlib

# Prefix of an id -> module that makes it. Modules are imported when asked for: gymnax costs seconds.
SUITES = {"": "envs.gymnax_env", "brax": "envs.brax_env"}


def _suite(name: str):
    prefix, _, rest = name.rpartition("/")
    return SUITES.get(prefix), rest


def make(name: str, num_envs: int = 1, **params):
    """Builds `num_envs` vectorised copies of the environment `name`.

    Args: params, the environment's own parameters, for example `length=0.7` or `backend="spring"`.
    Raises: ValueError naming the closest known ids where `name` is unknown, or the closest
        parameter where one is.
    """
    module_name, rest = _suite(name)
    if module_name is None:
        prefix = name.rpartition("/")[0]
        known = ", ".join(f"{p}/" for p in SUITES if p)
        raise ValueError(
            f"unknown environment {name!r}: no suite {prefix + '/'!r}; suites are {known} and gymnax's plain ids"
        )
    module = importlib.import_module(module_name)
    if rest not in module.names():
        raise ValueError(f"unknown environment {name!r}; closest: {', '.join(closest(name))} (--list shows all)")
    return module.make(rest, num_envs, **params)


def ids() -> list[str]:
    """Every id that `make` takes."""
    return [
        f"{prefix}/{name}" if prefix else name
        for prefix, module in SUITES.items()
        for name in importlib.import_module(module).names()
    ]


def closest(name: str, number: int = 3) -> list[str]:
    """The known ids nearest to `name`, ignoring case, version suffix and suite."""
    plain = lambda s: s.lower().rpartition("/")[2].partition("-")[0]
    everything = ids()
    exact = [i for i in everything if plain(i) == plain(name)]
    near = difflib.get_close_matches(name.lower(), [i.lower() for i in everything], number, 0)
    by_lower = {i.lower(): i for i in everything}
    return list(dict.fromkeys(exact + [by_lower[n] for n in near]))[:number]


def action_type(name: str) -> str:
    """`discrete` or `continuous`."""
    module_name, rest = _suite(name)
    return importlib.import_module(module_name).action_type(rest)
