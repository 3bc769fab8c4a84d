"""IQL from offline to online: learns from a dataset, then goes on acting and learning in the environment.

The same losses as algos/iql.py in both phases, which is the point: IQL needs no change to go online. What is new:

    before   `offline_steps` updates from the dataset alone, or the result of a run of `iql` (`--init-from RUN`)
    then     for every env step an action drawn from the policy, and one update from a replay that starts with the
             whole dataset; what happens is appended, and all of it is drawn alike (no half of each)

The reward transform is applied to every batch, so that new rewards are measured as the old ones are. The policy's
learning rate does not fall, in either phase, unless `anneal_steps` is set. A transition that a time limit cut
bootstraps.

Source: Kostrikov, Nair, Levine, ICLR 2022 (arXiv 2110.06169), section on online fine-tuning;
https://github.com/ikostrikov/implicit_q_learning at 09d7002, train_finetune.py.

Deviations:
- The authors scale locomotion rewards in the dataset alone and say that fine-tuning is not supported there; here the
  scale of `return_range`, that of the dataset's episodes, applies online too.
- The replay holds a dataset up to whole rows of `num_envs`; at most `num_envs - 1` transitions at its end are left out.

One `step` is `max(num_envs, train_period)` env steps, and one update per `train_period` of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from algos import iql
from algos.iql import ACTIONS, Params, act, explore  # noqa: F401  what the runner asks of an algorithm
from envs.types import Count, EnvAndData, Example, Natural, NonNegative, example_transition, pytree, static
from replay import ring

STARTS_FROM = "iql"  # whose runs --init-from takes


@pytree
class Config(iql.Config):
    anneal_steps: NonNegative = 0.0  # the policy's rate does not fall
    # Static: shape the program.
    offline_steps: Natural = static(default=1_000_000)  # gradient steps before acting; published 1e6
    train_period: Count = static(default=1)  # env steps per gradient step; published 1
    capacity: Count = static(default=2_000_000)  # transitions, the dataset's included; published 2e6


class State(NamedTuple):
    params: Params  # these as in algos/iql.py
    target_q: dict
    opt_state: tuple
    reward_scale: jax.Array
    reward_shift: jax.Array
    gradient_steps: jax.Array  # () int32, of both phases
    replay: ring.Replay  # the dataset, then what happened
    env_state: object
    env_steps: jax.Array  # () int32, over all envs
    key: jax.Array


def warm_start(config, source: EnvAndData, state: State, offline: iql.State) -> State:
    """What a run of `iql` learned instead of the offline phase of this one: networks, targets, optimisers, rewards."""
    learned = {name: getattr(offline, name) for name in iql.State._fields if name != "key"}
    return state._replace(**learned)


def period(config, source: EnvAndData) -> int:
    """Env steps that one `step` makes."""
    return max(source.env.num_envs, config.train_period)


def check(config, source: EnvAndData):
    """What `init` needs beyond the ranges in Config. Raises ValueError."""
    iql.check(config, source.dataset)
    num_envs, num = source.env.num_envs, source.dataset.num_transitions
    ring.check(config.capacity, num_envs)
    small, large = sorted((num_envs, config.train_period))
    if large % small:
        raise ValueError(
            f"train_period {config.train_period} and num_envs {num_envs}: one must be a multiple of the other"
        )
    if not num_envs <= num <= config.capacity:
        raise ValueError(
            f"the dataset's {num} transitions must fill a row of num_envs {num_envs} and fit into capacity "
            f"{config.capacity}"
        )


def init(config, env_and_data: EnvAndData, key) -> State:
    key, learner_key, reset_key = jax.random.split(key, 3)
    env, dataset = env_and_data

    # The offline phase.
    learner = iql.init(config, dataset, learner_key)
    learner = jax.lax.fori_loop(0, config.offline_steps, lambda _, s: iql.step(config, dataset, s)[0], learner)

    # The replay starts with the dataset.
    replay = ring.create(config.capacity, env.num_envs, example_transition(env.spec))
    replay = ring.fill(replay, dataset.transitions)
    return State(*learner[:-1], replay, env.reset(reset_key), jnp.int32(0), key)


def step(config, env_and_data: EnvAndData, state: State) -> tuple[State, dict]:
    key, act_key, learn_key = jax.random.split(state.key, 3)
    env = env_and_data.env

    # Act and store.
    def act_and_store(carry, key):
        env_state, replay = carry
        action_key, env_key = jax.random.split(key)
        action = explore(config, env.spec, state.params, env_state.obs, action_key)
        env_state, transition, finished = env.step(env_key, env_state, action)
        return (env_state, ring.insert(replay, transition)), finished

    vector_steps = period(config, env_and_data) // env.num_envs
    (env_state, replay), finished = jax.lax.scan(
        act_and_store, (state.env_state, state.replay), jax.random.split(act_key, vector_steps)
    )

    # Learn from old and new alike.
    def learn(learner, key):
        sample_key, dropout_key = jax.random.split(key)
        batch = ring.sample(replay, sample_key, config.batch_size)
        return iql.learn(config, env.spec, learner, batch, dropout_key)

    learner = iql.State(*state[: len(iql.State._fields) - 1], key)
    updates = period(config, env_and_data) // config.train_period
    learner, metrics = jax.lax.scan(learn, learner, jax.random.split(learn_key, updates))

    env_steps = state.env_steps + period(config, env_and_data)
    return State(*learner[:-1], replay, env_state, env_steps, key), dict(metrics, **finished)


EXAMPLE = Example(
    source="pendulum/medium",
    steps=10_000,
    eval_period=1_000,
    num_envs=1,
    seeds=(0, 1, 2, 3, 4),
    config=Config(
        expectile=0.9,
        inverse_temperature=0.1,
        hidden=(64, 64),
        offline_steps=10_000,
        capacity=100_000,
    ),
)
