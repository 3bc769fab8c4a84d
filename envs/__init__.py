"""What an agent acts in. `envs.make(id, num_envs)` builds any environment by its id.

    CartPole-v1, Breakout-MinAtar, ...   gymnax
    brax/hopper, brax/ant, ...           Brax (`backend`: spring, generalized, positional, mjx)
    playground/CheetahRun, ...           MuJoCo Playground's DM Control suite (extra `playground`)
    maze/medium, maze/medium-goals, ...  point mazes with one goal, or with a goal drawn for each episode
    mdp/slippery, mdp/chain, ...         small MDPs that dynamic programming solves exactly

An environment has `spec`, `num_envs`, `reset(key) -> state` and `step(key, state, action) ->
(state, transition, finished)`; `state.obs` is what to act on (docs/protocol.md). Any of them takes the
parameters `frame_stack` (envs/frame_stack.py), `action_cost` and `action_change_cost` (envs/action_cost.py);
brax/reacher and brax/pusher take `success_distance` (envs/success.py).

`envs.evaluation` builds one to evaluate in, which may also be Gymnasium's, `gym/<id>` (envs/gym_env.py).
"""

import difflib
import importlib

from envs.params import convert

# Prefix of an id -> module that makes it. The modules import the libraries only to make one.
SUITES = {
    "": "envs.gymnax_env",
    "brax": "envs.brax_env",
    "playground": "envs.playground_env",
    "maze": "envs.maze",
    "mdp": "envs.mdps",
}


def _suite(name: str):
    """The module and the name within it of a known id. Raises: ValueError naming the closest ids."""
    if name.startswith("gym/"):
        raise ValueError(
            f"{name} runs on the host and cannot be compiled into a program; it is to evaluate in, by --eval-env, what "
            f"is learned from a dataset. Instead: {', '.join(closest(name))}"
        )
    prefix, _, rest = name.rpartition("/")
    if prefix in SUITES and not name.startswith("/"):
        module = importlib.import_module(SUITES[prefix])
        if rest in (*module.names(), *getattr(module, "REFUSED", ())):  # `make` says why it refuses
            return module, rest
    raise ValueError(f"unknown environment {name!r}; closest: {', '.join(closest(name))} (--list shows all)")


def make(
    name: str,
    num_envs: int = 1,
    frame_stack: int = 1,
    action_cost: float = 0.0,
    action_change_cost: float = 0.0,
    success_distance: float | None = None,
    **params,
):
    """Builds `num_envs` vectorised copies of the environment `name`.

    Args: frame_stack, observations that one is made of: the current one and those before it;
        action_cost and action_change_cost, weights of costs taken from the reward (envs/action_cost.py);
        success_distance, where given, makes success the only reward (envs/success.py);
        params, the environment's own parameters, for example `length=0.7` or `backend="spring"`.
    Raises: ValueError naming the closest known ids where `name` is unknown, or the closest
        parameter where one is.
    """
    module, rest = _suite(name)
    if num_envs < 1:
        raise ValueError(f"num_envs {num_envs} must be at least 1")
    given = dict(frame_stack=frame_stack, action_cost=action_cost, action_change_cost=action_change_cost)
    given = convert(name, given, dict(frame_stack=1, action_cost=0.0, action_change_cost=0.0), ("frame_stack",))
    if success_distance is not None:
        from envs import success

        success_distance = success.check(name, success_distance)
    env = getattr(module, "make_env", module.make)(rest, num_envs, **params)
    if success_distance is not None:
        env = success.wrap(env, name, success_distance)
    if given["action_cost"] or given["action_change_cost"]:
        from envs.action_cost import wrap

        env = wrap(env, float(given["action_cost"]), float(given["action_change_cost"]))
    if given["frame_stack"] == 1:
        return env
    from envs.frame_stack import wrap

    return wrap(env, int(given["frame_stack"]))


def evaluation(name: str, num_envs: int = 1, **params):
    """An environment to evaluate in: any that `make` builds, or one of Gymnasium's, `gym/<id>`.

    Args: num_envs, episodes of an evaluation; params, as of `make`, or keyword arguments of `gymnasium.make`.
    """
    if not name.startswith("gym/"):
        return make(name, num_envs, **params)
    from envs import gym_env

    return gym_env.make(name.removeprefix("gym/"), num_envs, **params)


def ids() -> list[str]:
    """Every known id that is compiled."""
    return [
        f"{prefix}/{name}" if prefix else name
        for prefix, module in SUITES.items()
        for name in importlib.import_module(module).names()
    ]


def closest(name: str, number: int = 3) -> list[str]:
    """The known ids nearest to `name`, ignoring case, version suffix and suite."""
    plain = lambda s: s.lower().rpartition("/")[2].partition("-")[0]
    ratio = lambda a, b: difflib.SequenceMatcher(None, a, b).ratio()
    likeness = lambda i: (ratio(plain(i), plain(name)), ratio(i.lower(), name.lower()))
    return sorted(ids(), key=likeness, reverse=True)[:number]


def action_type(name: str) -> str:
    """`discrete` or `continuous`. Raises: ValueError naming the closest ids where `name` is unknown."""
    module, rest = _suite(name)
    return module.action_type(rest)
