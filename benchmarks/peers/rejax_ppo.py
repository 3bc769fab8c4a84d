"""Times the PPO of rejax 0.1.3, in its own interpreter, for `benchmarks/peer_speed.py`.

The interpreter (Python 3.11) needs: rejax==0.1.3 gymnax==0.0.9 jax==0.10.2 flax==0.12.8 optax==0.2.8

A step is one rollout of 4 x 128 env steps and 4 epochs of 4 minibatches on CartPole-v1. Equal to ours: 64-64 with
tanh for policy and value each, Adam 2.5e-4, gamma 0.99, lambda 0.95, ratio and value clipped at 0.2, entropy 0.01,
value 0.5, no evaluation inside, training state donated between calls.
Not equal, as rejax has no setting for it: a constant learning rate; an optimiser for each network, and gradients
clipped elementwise (at 0.5), so that no global norm is computed; a time limit counts as a termination, and V of the
rollout's own successors is used where ours evaluates V at the true ones; its gymnax is 0.0.9, ours 1.0.1.
"""

import jax
import jax.numpy as jnp
from rejax.algos.ppo import PPO
from turns import flags, serve

args = flags()
env_steps = args.steps * 512
algo = PPO.create(
    env="CartPole-v1",
    num_envs=4,
    num_steps=128,
    num_epochs=4,
    num_minibatches=4,
    learning_rate=2.5e-4,
    gamma=0.99,
    gae_lambda=0.95,
    clip_eps=0.2,
    ent_coef=0.01,
    vf_coef=0.5,
    max_grad_norm=0.5,
    agent_kwargs=dict(activation="tanh", hidden_layer_sizes=(64, 64)),
    total_timesteps=env_steps,
    eval_freq=env_steps,
    skip_initial_evaluation=True,
).replace(eval_callback=lambda algo, state, key: jnp.float32(0))

init, train, key = algo.init_state, lambda state: algo.train(train_state=state)[0], jax.random.PRNGKey(0)
if args.seeds > 1:
    init, train, key = jax.vmap(init), jax.vmap(train), jax.random.split(key, args.seeds)
state = jax.jit(init)(key)


def turn(program):
    global state
    before = state.global_step + 0  # a copy: the state is donated
    state = jax.block_until_ready(program(state))
    assert (state.global_step - before == env_steps).all(), "not the env steps asked for"


serve(lambda: jax.jit(train, donate_argnums=0).lower(state), turn, args.steps)
