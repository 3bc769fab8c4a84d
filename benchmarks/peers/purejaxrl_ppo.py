"""Times the PPO of purejaxrl, in an interpreter with its packages, for `benchmarks/peer_speed.py`.

purejaxrl is not a package: `--source` is a checkout of github.com/luchris429/purejaxrl, the folder that holds
`purejaxrl/ppo.py` (commit 146b485, Apache-2.0). The interpreter is rejax's: gymnax 0.0.9, distrax 0.1.9, jax
0.10.2, flax 0.12.8, optax 0.2.8. Brax, which it imports and does not use here, may be missing.

A step is one rollout of 4 x 128 env steps and 4 epochs of 4 minibatches. The settings are its own for CartPole-v1,
and ours are these: 64-64 with tanh for policy and value each, orthogonal, Adam 2.5e-4 (epsilon 1e-5) annealed
linearly, gamma 0.99, lambda 0.95, ratio and value clipped at 0.2, entropy 0.01, value 0.5, global norm 0.5.
Not equal: a turn is a whole training, so that it also draws the networks and resets the environments, once in a
turn; a time limit counts as a termination, and V of the rollout's own successors is used where ours evaluates V
at the true ones; its gymnax is 0.0.9, ours 1.0.1.
"""

import importlib.util
import sys
import types

import jax
from turns import flags, serve

args = flags()
sys.path.insert(0, args.source)
if importlib.util.find_spec("brax") is None:
    sys.modules["brax"] = types.ModuleType("brax")
    sys.modules["brax"].envs = None

from purejaxrl.ppo import make_train

settings = dict(
    ENV_NAME="CartPole-v1",
    NUM_ENVS=4,
    NUM_STEPS=128,
    TOTAL_TIMESTEPS=args.steps * 512,
    UPDATE_EPOCHS=4,
    NUM_MINIBATCHES=4,
    LR=2.5e-4,
    ANNEAL_LR=True,
    GAMMA=0.99,
    GAE_LAMBDA=0.95,
    CLIP_EPS=0.2,
    ENT_COEF=0.01,
    VF_COEF=0.5,
    MAX_GRAD_NORM=0.5,
    ACTIVATION="tanh",
    DEBUG=False,
)
train, key = make_train(settings), jax.random.PRNGKey(0)
if args.seeds > 1:
    train, key = jax.vmap(train), jax.random.split(key, args.seeds)


def turn(program):
    out = jax.block_until_ready(program(key))
    steps = out["metrics"]["returned_episode"].shape[args.seeds > 1]
    assert steps == args.steps, f"{steps} rollouts, not {args.steps}"


serve(lambda: jax.jit(train).lower(key), turn, args.steps)
