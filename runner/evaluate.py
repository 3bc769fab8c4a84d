"""Evaluation: N episodes for every run. On the device all at once, compiled once, over when the last one ends."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs.types import pytree


def evaluate(algo, configs, env, params, keys) -> dict:
    """What each run's policy is worth in `env`: one episode in each of `env.num_envs` environments.

    Args: configs and params, leading axis R on every leaf; keys `(R,)`, from which all randomness comes, so that
        evaluating more or less often cannot change training.
    Returns: `(R,)` arrays by name, `eval_return` among them: means of what the environment reports at the end of an
        episode, `episode_return` as `eval_return`, `episode_success` as `eval_success`; and what the algorithm's own
        `measure(config, episodes)` makes of the episodes, where it has one.

    What is not played at all, such as an MDP that is solved exactly, has `evaluate(algo, configs, params, keys)` with
    the same returns.
    """
    if hasattr(env, "evaluate"):
        return env.evaluate(algo, configs, params, keys)
    played = episodes(algo, configs, env, params, keys)
    values = {name: np.mean(x, 1) for name, x in played.items()}
    if hasattr(algo, "measure"):
        values |= measure(algo, configs, played)
    return {f"eval_{name.removeprefix('episode_')}": x for name, x in values.items()}


def episodes(algo, configs, env, params, keys) -> dict:
    """What each of `env.num_envs` episodes of every run came to: `(R, num_envs)` by name. Args: as of `evaluate`.

    An environment that is not played on the device has `episodes(algo, configs, params, keys)` with the same returns.
    """
    if hasattr(env, "episodes"):
        return env.episodes(algo, configs, params, keys)
    return play(algo, configs, env, params, keys)


@partial(jax.jit, static_argnames="algo")
def play(algo, configs, env, params, keys) -> dict:
    """`episodes` on the device."""

    def reset(config, params, key):
        key, reset_key, begin_key = jax.random.split(key, 3)
        env_state = env.reset(reset_key)
        if hasattr(algo, "begin"):  # for example DηN chooses its initial stock here
            env_state = algo.begin(config, env.spec, params, env_state, begin_key)
        return env_state, key

    def one_step(config, params, run):
        env_state, key, totals, alive = run
        key, act_key, env_key = jax.random.split(key, 3)
        action = algo.act(config, env.spec, params, env_state.obs, act_key)
        env_state, transition, finished = env.step(env_key, env_state, action)
        first = {name: jnp.where(alive, m.total, 0.0) for name, m in finished.items()}
        totals = {name: totals[name] + first[name] for name in totals}
        return env_state, key, totals, alive & ~(transition.terminated | transition.truncated)

    env_states, keys = jax.vmap(reset)(configs, params, keys)
    action = jax.tree.map(lambda s: jax.ShapeDtypeStruct((env.num_envs, *s.shape), s.dtype), env.spec.action)
    one_state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), env_states)
    names = jax.eval_shape(env.step, jax.ShapeDtypeStruct((), keys.dtype), one_state, action)[2]
    shape = (keys.shape[0], env.num_envs)
    runs = (env_states, keys, {name: jnp.zeros(shape) for name in names}, jnp.ones(shape, bool))
    # One unbatched predicate for all runs: under vmap it would become a select of every state.
    runs = jax.lax.while_loop(lambda r: r[3].any(), lambda r: jax.vmap(one_step)(configs, params, r), runs)
    return runs[2]


@partial(jax.jit, static_argnames="algo")
def measure(algo, configs, played) -> dict:
    return jax.vmap(algo.measure)(configs, played)


@pytree
class Exact:
    """What dynamic programming is evaluated in: its own MDP, exactly, by `algo.evaluate(config, mdp, params)`."""

    mdp: Any

    def evaluate(self, algo, configs, params, keys) -> dict:
        return solve(algo, configs, self.mdp, params)


@partial(jax.jit, static_argnames="algo")
def solve(algo, configs, mdp, params) -> dict:
    values = jax.vmap(algo.evaluate, in_axes=(0, None, 0))(configs, mdp, params)
    return {f"eval_{name}": x for name, x in values.items()}
