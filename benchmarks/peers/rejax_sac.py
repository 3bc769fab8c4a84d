"""Times the SAC of rejax 0.1.3, in its own interpreter, for `benchmarks/peer_speed.py`.

The interpreter (Python 3.11) needs: rejax==0.1.3 gymnax==0.0.9 jax==0.10.2 flax==0.12.8 optax==0.2.8

A step is one env step of one Pendulum-v1 and one gradient step each of critics, policy and temperature. Equal to
ours: 256-256 with ReLU, two critics, batch 256, Adam 3e-4, target update rate 0.005 at every step, target entropy -1,
a replay of the same size, full before timing, no evaluation inside, training state donated between calls.
Not equal, as rejax has no setting for it: it samples without replacement, which costs time in the replay's
capacity; it clips gradients elementwise (here at infinity); a time limit counts as a termination; its gymnax is 0.0.9,
ours 1.0.1.
"""

import jax
import jax.numpy as jnp
from rejax.algos.sac import SAC
from turns import flags, serve

args = flags()


def algorithm(env_steps, fill_buffer):
    return SAC.create(
        env="Pendulum-v1",
        num_envs=1,
        buffer_size=args.capacity,
        fill_buffer=fill_buffer,
        batch_size=256,
        learning_rate=3e-4,
        gamma=0.99,
        polyak=0.995,
        target_update_freq=1,
        hidden_layer_sizes=(256, 256),
        agent_kwargs=dict(activation="relu"),
        total_timesteps=env_steps,
        eval_freq=env_steps,
        skip_initial_evaluation=True,
    ).replace(eval_callback=lambda algo, state, key: jnp.float32(0))


def vmapped(fn):
    return jax.vmap(fn) if args.seeds > 1 else fn


def program(algo):
    return jax.jit(vmapped(lambda state: algo.train(train_state=state)[0]), donate_argnums=0)


fill, train = algorithm(args.capacity, args.capacity), algorithm(args.steps, 0)
key = jax.random.PRNGKey(0)
state = jax.jit(vmapped(train.init_state))(jax.random.split(key, args.seeds) if args.seeds > 1 else key)
state = program(fill)(state)


def turn(program):
    global state
    before = state.global_step + 0  # a copy: the state is donated
    state = jax.block_until_ready(program(state))
    assert (state.global_step - before == args.steps).all(), "not the env steps asked for"


full = bool(jnp.all(state.replay_buffer.full))
serve(lambda: program(train).lower(state), turn, args.steps, replay_full=full)
