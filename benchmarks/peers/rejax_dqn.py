"""Times the DQN of rejax 0.1.3, in its own interpreter, for `benchmarks/speed.py --peers`.

After compiling, filling the ring and one warm-up it prints a line of JSON, then one more for every
line it reads: the seconds per update, wall clock and CPU time. One update is one vectorised
environment step and one gradient step.

Equal to ours: CartPole-v1, 10 environments, network 120-84 with ReLU, batch 128, Adam, squared loss,
no double Q-learning, hard target update every 500 gradient steps, float32, no evaluation inside,
ring filled before timing, training state donated between calls.
Not equal, as rejax has no setting for it: it samples without replacement, which costs time in the
ring's capacity; it clips gradients elementwise (here at infinity); a time limit counts as a
termination; its gymnax is 0.0.9, ours 1.0.1.
"""

import argparse
import json
import sys
import time

import jax
import jax.numpy as jnp
from flax import linen as nn
from rejax.algos.dqn import DQN
from rejax.networks import DiscreteQNetwork, EpsilonGreedyPolicy

NUM_ENVS = 10

args = argparse.ArgumentParser()
args.add_argument("--capacity", type=int, required=True)
args.add_argument("--updates", type=int, required=True)
args = args.parse_args()


def algorithm(env_steps, fill_buffer):
    algo = DQN.create(
        env="CartPole-v1",
        num_envs=NUM_ENVS,
        buffer_size=args.capacity,
        fill_buffer=fill_buffer,
        batch_size=128,
        learning_rate=1e-3,
        ddqn=False,
        target_update_freq=5_000,
        polyak=0.0,
        total_timesteps=env_steps,
        eval_freq=env_steps,
        skip_initial_evaluation=True,
    )
    network = EpsilonGreedyPolicy(DiscreteQNetwork)(hidden_layer_sizes=(120, 84), action_dim=2, activation=nn.relu)
    return algo.replace(agent=network, eval_callback=lambda algo, state, key: jnp.float32(0))


def compiled(algo, state):
    program = jax.jit(lambda state: algo.train(train_state=state)[0], donate_argnums=0)
    return program.lower(state).compile()


fill = algorithm(args.capacity, fill_buffer=args.capacity)
train = algorithm(args.updates * NUM_ENVS, fill_buffer=0)
state = jax.jit(train.init_state)(jax.random.PRNGKey(0))
state = compiled(fill, state)(state)

start = time.perf_counter()
program = compiled(train, state)
compile_seconds = time.perf_counter() - start
state = jax.block_until_ready(program(state))
full = bool(state.replay_buffer.full)
print(json.dumps(dict(compile_seconds=compile_seconds, ring_full=full, jax=jax.__version__)), flush=True)

for _ in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    state = jax.block_until_ready(program(state))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    line = dict(seconds_per_update=wall / args.updates, cpu_seconds_per_update=cpu / args.updates)
    print(json.dumps(line), flush=True)
