"""Times the SAC of ajax-rl 0.4, in its own interpreter, for `benchmarks/peer_speed.py`.

The interpreter (Python 3.12) needs: ajax-rl==0.4.0 jax==0.10.2 flax==0.12.8 optax==0.2.8

A step is one env step of one Pendulum-v1 and one gradient step each of critics, policy and temperature. Equal to
ours: gymnax 1.0.1, 256-256 with ReLU, two critics, batch 256, Adam 3e-4 (epsilon 1e-8), target update rate 0.005 at
every step, target entropy -1, sampling with replacement from a replay of the same size, full before timing, no
evaluation or logging inside, training state donated between calls. One seed, without the vmap over seeds that
`SAC.train` adds: then its conditionals stay conditionals, which is faster.
Not equal, as ajax-rl has no setting for it: its environment wrappers, and the metrics that it computes on every
update.
"""

import os

os.environ["AJAX_NO_COMPILE_CACHE"] = "1"  # the compile is timed

import jax
from ajax import SAC
from turns import flags, serve

args = flags()
assert args.seeds == 1, "one seed"


def trainer(env_steps, learning_starts):
    """ajax-rl's own jitted train function for `env_steps`, of a new state or of the one it is given."""
    agent = SAC(
        "Pendulum-v1",
        n_envs=1,
        actor_learning_rate=3e-4,
        critic_learning_rate=3e-4,
        alpha_learning_rate=3e-4,
        actor_architecture=("256", "relu", "256", "relu"),
        critic_architecture=("256", "relu", "256", "relu"),
        gamma=0.99,
        tau=0.005,
        buffer_size=args.capacity,
        batch_size=256,
        learning_starts=learning_starts,
        policy_update_start=0,
        alpha_update_start=0,
    )
    return agent.get_make_train()(
        env_args=agent.env_args,
        actor_optimizer_args=agent.actor_optimizer_args,
        critic_optimizer_args=agent.critic_optimizer_args,
        network_args=agent.network_args,
        agent_config=agent.agent_config,
        total_timesteps=env_steps,
        num_episode_test=1,
        **agent.train_kwargs,
    )


key = jax.random.PRNGKey(0)
state, _ = trainer(args.capacity, learning_starts=args.capacity)(key)
train = trainer(args.steps, learning_starts=0)


def turn(program):
    global state
    before = int(state.critic_state.step)
    state, _ = jax.block_until_ready(program(key, initial_state=state))
    steps = int(state.critic_state.step) - before
    assert steps == args.steps, f"{steps} gradient steps, not {args.steps}"


full = bool(state.collector_state.buffer_state.is_full)
serve(lambda: train.lower(key, initial_state=state, resume_from_state=True), turn, args.steps, replay_full=full)
