"""Times the IQL of ajax-rl 0.4, in its own interpreter, for `benchmarks/peer_speed.py`.

The interpreter (Python 3.12) needs: ajax-rl==0.4.0 jax==0.10.2 flax==0.12.8 optax==0.2.8

A step is one gradient step each of V, policy and both critics on one batch, and one of the target critics. Equal to
ours: the number of transitions, 3 numbers an observation and 1 an action, 256-256 with ReLU, batch 256 drawn with
replacement, Adam 3e-4 (epsilon 1e-8), the policy's rate annealed as a cosine, expectile 0.7, inverse temperature 3,
weights of at most 100, gamma 0.99, target update rate 0.005, one standard deviation for all states, no evaluation or
logging inside, training state donated between calls. One seed, without the vmap over seeds that `IQL.train` adds.
Not equal: the transitions are random numbers, which the work does not depend on; the critics' loss is half of ours,
after Adam the same. The environment gives the sizes and is never stepped.
"""

import os

os.environ["AJAX_NO_COMPILE_CACHE"] = "1"  # the compile is timed

import jax
import numpy as np
import optax
from ajax import IQL
from ajax.buffers.dataset import TransitionDataset
from turns import flags, serve

args = flags()
assert args.seeds == 1, "one seed"
rng, num = np.random.default_rng(0), args.capacity
last = np.arange(num) % 200 == 199
last[-1] = True
data = TransitionDataset(
    obs=rng.normal(size=(num, 3)),
    action=rng.uniform(-1, 1, (num, 1)),
    reward=rng.normal(size=num),
    terminated=np.zeros(num),
    truncated=last,
    next_obs=rng.normal(size=(num, 3)),
)
agent = IQL(
    "Pendulum-v1",
    n_envs=1,
    actor_learning_rate=optax.cosine_decay_schedule(3e-4, 10**9),
    critic_learning_rate=3e-4,
    value_learning_rate=3e-4,
    actor_architecture=("256", "relu", "256", "relu"),
    critic_architecture=("256", "relu", "256", "relu"),
    expectile=0.7,
    temperature=3.0,
    gamma=0.99,
    tau=0.005,
    buffer_size=num,
    batch_size=256,
)


def trainer(updates):
    """ajax-rl's own jitted offline train function for `updates`, of a new state or of the one it is given."""
    return agent.get_make_train()(
        env_args=agent.env_args,
        actor_optimizer_args=agent.actor_optimizer_args,
        critic_optimizer_args=agent.critic_optimizer_args,
        network_args=agent.network_args,
        agent_config=agent.agent_config,
        total_timesteps=updates,
        num_episode_test=1,
        offline_data=data,
    )


key = jax.random.PRNGKey(0)
state, _ = trainer(1)(key)
train = trainer(args.steps)


def turn(program):
    global state
    before = [int(network.step) for network in (state.actor_state, state.critic_state, state.value_state)]
    state, _ = jax.block_until_ready(program(key, initial_state=state))
    after = [int(network.step) for network in (state.actor_state, state.critic_state, state.value_state)]
    steps = [b - a for a, b in zip(before, after, strict=True)]
    assert steps == [args.steps] * 3, f"{steps} gradient steps, not {args.steps} of each"


full = bool(state.collector_state.buffer_state.is_full)
serve(lambda: train.lower(key, initial_state=state, resume_from_state=True), turn, args.steps, replay_full=full)
