"""Times the PPO of ajax-rl 0.4, in its own interpreter, for `benchmarks/peer_speed.py`.

The interpreter (Python 3.12) needs: ajax-rl==0.4.0 jax==0.10.2 flax==0.12.8 optax==0.2.8

A step is one rollout of 4 x 128 env steps and 4 epochs of 4 minibatches on CartPole-v1. Equal to ours: gymnax
1.0.1, 64-64 with tanh for policy and value each, orthogonal, Adam 2.5e-4 (epsilon 1e-5) annealed linearly, gamma
0.99, lambda 0.95, ratio clipped at 0.2, entropy 0.01, value 0.5, one global norm of 0.5, V at the true successors,
no evaluation or logging inside, training state donated between calls. One seed, without the vmap over seeds that
`PPO.train` adds.
Not equal, as ajax-rl has no setting for it: the value's loss is not clipped; its environment wrappers, and the
metrics that it computes on every update.
"""

import os

os.environ["AJAX_NO_COMPILE_CACHE"] = "1"  # the compile is timed

import jax
import optax
from ajax import PPO
from turns import flags, serve

args = flags()
assert args.seeds == 1, "one seed"
schedule = optax.linear_schedule(2.5e-4, 0.0, 10**9)
agent = PPO(
    "CartPole-v1",
    n_envs=4,
    n_steps=128,
    n_epochs=4,
    num_minibatches=4,
    actor_learning_rate=schedule,
    critic_learning_rate=schedule,
    adam_eps=1e-5,
    actor_architecture=("64", "tanh", "64", "tanh"),
    critic_architecture=("64", "tanh", "64", "tanh"),
    gamma=0.99,
    gae_lambda=0.95,
    clip_range=0.2,
    ent_coef=0.01,
    vf_coef=0.5,
    max_grad_norm=0.5,
)
train = agent.get_make_train()(
    env_args=agent.env_args,
    actor_optimizer_args=agent.actor_optimizer_args,
    critic_optimizer_args=agent.critic_optimizer_args,
    network_args=agent.network_args,
    agent_config=agent.agent_config,
    total_timesteps=(args.steps - 1) * 512,  # ajax-rl makes one rollout more
    num_episode_test=1,
    **agent.train_kwargs,
)
key = jax.random.PRNGKey(0)
state, _ = train(key)


def turn(program):
    global state
    before = int(state.n_updates)
    state, _ = jax.block_until_ready(program(key, initial_state=state))
    steps = int(state.n_updates) - before
    assert steps == args.steps, f"{steps} rollouts, not {args.steps}"


serve(lambda: train.lower(key, initial_state=state, resume_from_state=True), turn, args.steps)
