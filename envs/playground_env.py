"""MuJoCo Playground's DM Control suite, `playground/<name>`: its tasks in the loop of envs/brax_env.py.

What that loop promises holds here too: `next_obs` is the true successor, `truncated` is the time limit, and
episodes restart from a pool of initial states. Needs the extra `playground` (docs/install.md).

These tasks end by themselves only where the simulation diverges to NaN. That step is `terminated`, and its
reward and `next_obs` are 0, because NaN would survive a multiplication by `1 - terminated`.

Playground leaves its setting `action_repeat` to a wrapper. Here it is applied as that wrapper does: the action is
taken `action_repeat` times, the rewards are summed, and `episode_length` counts the steps within, so an episode
has `episode_length / action_repeat` steps of the agent. Every task sets it to 1.

Actions are [-1, 1], the range of every actuator of the suite. The physics is MJX's own, `impl=jax`; Playground's
default, Warp, keeps the contacts of all environments in one buffer, from which one of them cannot be restarted.
Playground's locomotion and manipulation tasks are refused: they download their robots.
"""

import math
from functools import cache

import jax
import jax.numpy as jnp

from envs.brax_env import BraxEnv, _brax, lenient, no_log, vectorise
from envs.params import convert

# The suite as Playground registers it; tests/test_playground.py compares both tuples with its registry.
NAMES = (
    *("AcrobotSwingup", "AcrobotSwingupSparse", "BallInCup", "CartpoleBalance", "CartpoleBalanceSparse"),
    *("CartpoleSwingup", "CartpoleSwingupSparse", "CheetahRun", "FingerSpin", "FingerTurnEasy", "FingerTurnHard"),
    *("FishSwim", "HopperHop", "HopperStand", "HumanoidRun", "HumanoidStand", "HumanoidWalk", "PendulumSwingup"),
    *("PointMass", "ReacherEasy", "ReacherHard", "SwimmerSwimmer6", "WalkerRun", "WalkerStand", "WalkerWalk"),
)
REFUSED = (
    *("AeroCubeRotateZAxis", "AlohaHandOver", "AlohaSinglePegInsertion", "ApolloJoystickFlatTerrain"),
    *("BarkourJoystick", "BerkeleyHumanoidJoystickFlatTerrain", "BerkeleyHumanoidJoystickRoughTerrain"),
    *("G1JoystickFlatTerrain", "G1JoystickRoughTerrain", "Go1Footstand", "Go1Getup", "Go1Handstand"),
    *("Go1JoystickFlatTerrain", "Go1JoystickRoughTerrain", "H1InplaceGaitTracking", "H1JoystickGaitTracking"),
    *("LeapCubeReorient", "LeapCubeRotateZAxis", "Op3Joystick", "PandaOpenCabinet", "PandaPickCube"),
    *("PandaPickCubeCartesian", "PandaPickCubeOrientation", "PandaRobotiqPushCube", "SpotFlatTerrainJoystick"),
    *("SpotGetup", "SpotJoystickGaitTracking", "T1JoystickFlatTerrain", "T1JoystickRoughTerrain"),
)


class AsBrax:
    """One Playground environment under the names that Brax's have.

    `pipeline_state` is a tuple of the arrays of MJX's data but the empty ones (a model without tendons has several),
    which a checkpoint cannot hold. The suite's info and metrics decide nothing, and are dropped.
    """

    def __init__(self, env, action_repeat: int):
        self.env, self.action_repeat = env, action_repeat
        self.action_size = env.action_size
        self.data = jax.eval_shape(env.reset, jax.random.key(0)).data  # shapes

    def _pack(self, data) -> tuple:
        strong = lambda x: jnp.asarray(x, jnp.result_type(x))  # CheetahRun's time is weakly typed
        return tuple(strong(x) for x in jax.tree.leaves(data) if jnp.size(x))

    def _unpack(self, arrays: tuple):
        arrays = iter(arrays)
        return jax.tree.map(lambda s: next(arrays) if s.size else jnp.zeros(s.shape, s.dtype), self.data)

    def reset(self, key):
        state = self.env.reset(key)
        return _brax().State(self._pack(state.data), state.obs, state.reward, state.done)

    def step(self, state, action):
        def once(arrays, _):
            inner = _playground().State(self._unpack(arrays), None, None, None, {}, {})
            inner = self.env.step(inner, action)
            return self._pack(inner.data), (inner.obs, inner.reward, inner.done)

        arrays, (obs, reward, done) = jax.lax.scan(once, state.pipeline_state, length=self.action_repeat)
        done = done[-1]
        obs, reward = (jnp.where(done > 0, 0, x) for x in (obs[-1], reward.sum()))
        return state.replace(pipeline_state=arrays, obs=obs, reward=reward, done=done)


def action_type(name: str) -> str:
    """`continuous`, as the whole suite is."""
    return "continuous"


def names() -> list[str]:
    return list(NAMES)


@cache
def _playground():
    """The module `mujoco_playground`, which takes seconds to import. Raises: ValueError where it is not installed."""
    try:
        with lenient():
            import mujoco_playground
    except ModuleNotFoundError as error:
        raise ValueError(
            f"playground/ needs the extra `playground` ({error}): "
            "`uv run --extra playground ...`, or `pip install -e '.[playground]'`"
        ) from None
    return mujoco_playground


@cache  # one instance for equal settings: it is static, so another would compile again
def _create(name: str, settings: tuple) -> AsBrax:
    settings = dict(settings)
    with lenient(), no_log():
        env = _playground().dm_control_suite.load(name, config_overrides=settings | dict(impl="jax"))
        return AsBrax(env, settings["action_repeat"])


def make(name: str, num_envs: int, impl: str = "jax", pool_size: int = 256, **params) -> BraxEnv:
    """Builds `num_envs` copies of a task of the DM Control suite.

    Args: impl, MJX's implementation; pool_size, initial states to restart from; params, the numbers in
        Playground's settings of the task: `episode_length`, `action_repeat`, and the seconds `ctrl_dt` of a
        step and `sim_dt` of the physics within it. All are constants of the compiled program.
    Raises: ValueError for a task that needs a download, where the extra is not installed, or naming an
        unknown parameter and the closest there is, or a value of the wrong type or size.
    """
    env_id = f"playground/{name}"
    if name in REFUSED:
        raise ValueError(
            f"{env_id} downloads its robot's files, which Bellmax does not do; "
            "the tasks that run are those of the DM Control suite, such as playground/CheetahRun"
        )
    if impl != "jax":
        raise ValueError(f"{env_id} has no impl {impl!r}; choose jax")
    config = _playground().dm_control_suite.get_default_config(name)
    settings = {key: config[key] for key in ("episode_length", "action_repeat", "ctrl_dt", "sim_dt")}
    counts = ("episode_length", "action_repeat", "pool_size")
    own = dict(pool_size=pool_size)
    given = convert(env_id, own | params, settings | dict(impl="jax", pool_size=256), positive=counts)
    given = {key: value.item() for key, value in given.items()}
    pool_size = given.pop("pool_size")
    settings |= given

    substeps = settings["ctrl_dt"] / settings["sim_dt"] if settings["sim_dt"] > 0 else 0
    if not math.isfinite(substeps) or round(substeps) < 1 or abs(substeps - round(substeps)) > 1e-6:
        raise ValueError(
            f"{env_id}: ctrl_dt {settings['ctrl_dt']} must be a multiple of sim_dt {settings['sim_dt']}, both positive"
        )
    limit = -(-settings["episode_length"] // settings["action_repeat"])
    return vectorise(_create(name, tuple(sorted(settings.items()))), limit, num_envs, pool_size)
