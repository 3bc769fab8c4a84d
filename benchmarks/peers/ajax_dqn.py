"""Times the DQN of ajax-rl 0.4, in its own interpreter, for `benchmarks/speed.py --peers`.

After compiling, filling the ring and one warm-up it prints a line of JSON, then one more for every
line it reads: the seconds per update, wall clock and CPU time. One update is one vectorised
environment step and one gradient step.

Equal to ours: CartPole-v1 of gymnax 1.0.1, 10 environments, network 120-84 with ReLU, batch 128,
Adam, squared loss, no double Q-learning, hard target update every 500 gradient steps, float32, no
evaluation or logging inside, sampling with replacement, ring filled before timing, training state
donated between calls. One seed, without the vmap over seeds that `DQN.train` adds: then its
conditionals stay conditionals, which is faster.
Not equal, as ajax-rl has no setting for it: its environment wrappers, and the metrics that it
computes on every update.
"""

import argparse
import json
import os
import sys
import time

os.environ["AJAX_NO_COMPILE_CACHE"] = "1"  # the compile is timed

import jax
from ajax import DQN
from ajax.agents.DQN.train_DQN import mse_td_loss

NUM_ENVS = 10

args = argparse.ArgumentParser()
args.add_argument("--capacity", type=int, required=True)
args.add_argument("--updates", type=int, required=True)
args = args.parse_args()


def trainer(env_steps, learning_starts):
    """ajax-rl's own jitted train function for `env_steps`, of a new state or of the one it is given."""
    agent = DQN(
        "CartPole-v1",
        n_envs=NUM_ENVS,
        learning_rate=1e-3,
        architecture=("120", "relu", "84", "relu"),
        buffer_size=args.capacity,
        batch_size=128,
        learning_starts=learning_starts,
        tau=1.0,
        target_update_interval=500,
        td_loss_fn=mse_td_loss,
    )
    adam = agent.critic_optimizer_args.replace(optimizer="adam", beta_2=0.999, eps=1e-8)
    return agent.get_make_train()(
        env_args=agent.env_args,
        actor_optimizer_args=adam,
        critic_optimizer_args=adam,
        network_args=agent.network_args,
        agent_config=agent.agent_config,
        total_timesteps=env_steps,
        num_episode_test=1,
    )


key = jax.random.PRNGKey(0)
fill = trainer(args.capacity, learning_starts=args.capacity)
train = trainer(args.updates * NUM_ENVS, learning_starts=0)
state, _ = fill(key)

start = time.perf_counter()
program = train.lower(key, initial_state=state, resume_from_state=True).compile()
compile_seconds = time.perf_counter() - start
state, _ = jax.block_until_ready(program(key, initial_state=state))
full = bool(state.collector_state.buffer_state.is_full)
print(json.dumps(dict(compile_seconds=compile_seconds, ring_full=full, jax=jax.__version__)), flush=True)

for _ in sys.stdin:
    before = int(state.n_updates)
    wall, cpu = time.perf_counter(), time.process_time()
    state, _ = jax.block_until_ready(program(key, initial_state=state))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert int(state.n_updates) - before == args.updates, "not one gradient step per vectorised step"
    line = dict(seconds_per_update=wall / args.updates, cpu_seconds_per_update=cpu / args.updates)
    print(json.dumps(line), flush=True)
