"""Vectorised Brax environments, `brax/<name>`: Brax's physics and rewards in a loop of our own.

Brax's wrappers put an environment back into the same first state for ever, and overwrite the
observation that an episode ended with. Here `next_obs` is the true successor, `terminated` is the
environment's own end, `truncated` is the time limit `episode_length`, and the next episode starts
from an initial state drawn from a pool.

The pool holds `pool_size` initial states, drawn by `reset(key)`. Brax has no cheap reset: to start
afresh would set up the whole physics state for every environment on every step, and use one in
hundreds. Reading the pool is one gather (up to 8,192 states it does not show in a step's time). 256 states
take 0.1 to 1 MB per run under spring, and over a million steps of full-length episodes each is the
start of four; raise `pool_size` where episodes are short and the start matters.

`backend` is the physics: `spring` (the default), `generalized`, `positional` or `mjx`. Every
environment has spring, and it is the quickest (hopper, 64 environments, two CPU cores: half the
compile time of generalized and five times its steps per second). It is a physics of its own, with
its own time steps, gaits and returns: never compare returns across backends.

Actions are [-1, 1]: where an actuator's range is another, Brax's environment scales them itself.
"""

import contextlib
import inspect
import io
import warnings
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from envs.params import convert
from envs.types import Mean, Spec, Transition, continuous_spec, episode_metrics, pytree, static

# What Brax registers; tests/test_envs.py compares it with Brax's own registry.
NAMES = (
    *("ant", "fast", "halfcheetah", "hopper", "humanoid", "humanoidstandup", "inverted_pendulum"),
    *("inverted_double_pendulum", "pusher", "reacher", "swimmer", "walker2d"),
)
BACKENDS = ("spring", "generalized", "positional", "mjx")


class EnvState(NamedTuple):
    """`num_envs` environments; every leaf but the pool's has that leading axis."""

    inner: object  # Brax's physics states
    obs: jax.Array  # (num_envs, obs_size), the observation to act on
    episode_return: jax.Array  # (num_envs,) reward so far in this episode
    episode_length: jax.Array  # (num_envs,) env steps so far in this episode
    pool: tuple  # (inner, obs) of initial states, leading axis pool_size


@pytree
class BraxEnv:
    env: object = static()
    spec: Spec = static()
    num_envs: int = static(default=1)
    pool_size: int = static(default=256)

    def reset(self, key) -> EnvState:
        """Fresh initial states for all environments, and a fresh pool for the restarts that follow."""
        start = jax.vmap(partial(_start, self.env))(jax.random.split(key, self.num_envs + self.pool_size))
        inner, obs = jax.tree.map(lambda x: x[: self.num_envs], start)
        pool = jax.tree.map(lambda x: x[self.num_envs :], start)
        return EnvState(inner, obs, jnp.zeros(self.num_envs), jnp.zeros(self.num_envs, jnp.int32), pool)

    def step(self, key, state: EnvState, action) -> tuple[EnvState, Transition, dict[str, Mean]]:
        """Steps every environment, restarting those whose episode ended from a state of the pool.

        Args: action `(num_envs, action_size)` in [-1, 1].
        Returns: the next state; the transition, with leading axis `num_envs`; and `episode_return`
            and `episode_length` of the episodes that ended on this step, per environment.
        """
        inner, next_obs, reward, terminated = jax.vmap(partial(_physics, self.env))(state.inner, action)
        episode_return = state.episode_return + reward
        episode_length = state.episode_length + 1
        truncated = episode_length >= self.spec.max_episode_steps
        done = terminated | truncated
        finished = episode_metrics(episode_return, episode_length, done)
        transition = Transition(state.obs, action, reward, next_obs, terminated, truncated)

        def restart(done, row, current):  # of one environment
            return jax.tree.map(lambda pool, x: jnp.where(done, pool[row], x), state.pool, current)

        rows = jax.random.randint(key, (self.num_envs,), 0, self.pool_size)
        inner, obs = jax.vmap(restart)(done, rows, (inner, next_obs))
        return EnvState(inner, obs, episode_return * ~done, episode_length * ~done, state.pool), transition, finished


def _start(env, key):
    """An initial state of one environment, and its observation."""
    with lenient():
        state = env.reset(key)
    return state.pipeline_state, state.obs


def _physics(env, inner, action):
    """One step of one environment. Brax's metrics and info are made anew by every step, and dropped."""
    state = _brax().State(inner, None, jnp.float32(0), jnp.float32(0))
    with lenient():
        state = env.step(state, action)
    # Where a reward or an end is constant, Brax gives a Python number.
    return state.pipeline_state, state.obs, jnp.float32(state.reward), jnp.float32(state.done) > 0


def vectorise(env, episode_length: int, num_envs: int, pool_size: int) -> BraxEnv:
    """`num_envs` copies of one environment that has Brax's interface."""
    _, obs = jax.eval_shape(partial(_start, env), jax.random.key(0))
    obs = jax.ShapeDtypeStruct(obs.shape, obs.dtype)
    return BraxEnv(env, continuous_spec(obs, env.action_size, episode_length), num_envs, pool_size)


def action_type(name: str) -> str:
    """`continuous`, as all of Brax is."""
    return "continuous"


def names() -> list[str]:
    return list(NAMES)


@contextlib.contextmanager
def lenient():
    """For Brax's own code: it broadcasts across ranks, and warns each time that its parts are unmaintained."""
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        for message in ("Brax System", "JAXopt is no longer maintained", "Accessing `.*` directly from `Data`"):
            warnings.filterwarnings("ignore", message)
        yield


@contextlib.contextmanager
def no_log():
    """Drops MuJoCo's notes on a model's XML, which otherwise go to ./MUJOCO_LOG.TXT."""
    import mujoco

    mujoco.set_mju_user_warning(lambda text: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(None)


@cache
def _brax():
    """The module `brax.envs`, which takes seconds to import."""
    with lenient(), contextlib.redirect_stdout(io.StringIO()) as printed:
        from brax import envs
    for line in printed.getvalue().splitlines():
        if not line.startswith("Failed to import"):  # warp, which only GPUs use
            print(line)
    return envs


@cache  # one instance for equal settings: it is static, so another would compile again
def _create(name: str, backend: str, params: tuple):
    try:
        with lenient(), no_log():
            return _brax().get_environment(name, backend=backend, **dict(params))
    except (NotImplementedError, ValueError) as error:
        raise ValueError(f"brax/{name}: {error}") from None


def _defaults(name: str) -> dict:
    """The parameters of Brax's class that are numbers or tuples of numbers, with their defaults."""
    numbers = lambda x: all(isinstance(i, bool | int | float) for i in (x if isinstance(x, tuple) else (x,)))
    parameters = inspect.signature(_brax()._envs[name]).parameters.values()
    return {p.name: p.default for p in parameters if numbers(p.default)} | dict(n_frames=1, debug=False)


def make(
    name: str, num_envs: int, backend: str | None = None, episode_length: int = 1000, pool_size: int = 256, **params
) -> BraxEnv:
    """Builds `num_envs` copies of a Brax environment.

    Args: backend, the physics, by default spring; episode_length, the time limit in env steps;
        pool_size, initial states to restart from; params, arguments of Brax's class that are
        numbers, for example `ctrl_cost_weight=0.1`: constants of the compiled program.
    Raises: ValueError naming an unknown backend, a parameter that the environment does not have
        and the closest it has, or a value of the wrong type; and for swimmer.
    """
    if name == "swimmer":
        raise ValueError("brax/swimmer does not run on this jax: Brax calls jnp.clip(a_min=...), which jax removed")
    if backend not in (None, *BACKENDS):
        raise ValueError(f"brax/{name} has no backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    own = dict(episode_length=episode_length, pool_size=pool_size)
    known = dict(backend="spring", episode_length=1000, pool_size=256) | _defaults(name)
    given = convert(f"brax/{name}", own | params, known, positive=("episode_length", "pool_size", "n_frames"))
    given = {key: tuple(value) if value.ndim else value.item() for key, value in given.items()}
    episode_length, pool_size = given.pop("episode_length"), given.pop("pool_size")

    env = _create(name, backend or "spring", tuple(sorted(given.items())))
    return vectorise(env, episode_length, num_envs, pool_size)
