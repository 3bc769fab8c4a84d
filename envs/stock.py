"""A stock beside the observation: what was collected so far, in the units of now.

    C_{t+1} = (C_t + R_{t+1}) / gamma          so that  c_0 + G_0 = gamma^t (C_t + G_t)

The future seen from step t is the same random variable as the whole seen from the start, up to the scale gamma^t. An
agent that observes (o_t, C_t) can therefore maximise objectives of the whole return, such as its CVaR (networks/
objectives.py). Neither successors nor rewards depend on the stock.

The first stock c_0 and gamma are the agent's: it sets them by `start` after a reset, and by `restart` where episodes
ended. Until then stocks are 0 and gamma is 1. An algorithm that wants a stock has `wrap = stock.wrap`
(docs/protocol.md).

Source: Pires et al. 2025, arXiv 2501.13028; Baeuerle & Ott 2011. Deviations: none known; the paper's body could not be
read.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envs.types import Mean, Spec, Transition, pytree


class EnvState(NamedTuple):
    inner: Any  # state of the environment that is wrapped
    obs: tuple  # (observation, stock), to act on
    gamma: jax.Array  # () discount factor of the stock
    first_stock: jax.Array  # (num_envs,) c_0 of this episode, and of the next until `restart`
    discount: jax.Array  # (num_envs,) gamma^t
    discounted_return: jax.Array  # (num_envs,) sum of gamma^k R_{k+1} so far in this episode


def update(stock, reward, gamma):
    """The stock after a reward. All `(...)`."""
    return (stock + reward) / gamma


@pytree
class Stock:
    """`env` with observations `(observation, stock)`; all else is its own."""

    env: Any

    @property
    def spec(self) -> Spec:
        return self.env.spec._replace(obs=(self.env.spec.obs, jax.ShapeDtypeStruct((), jnp.float32)))

    @property
    def num_envs(self) -> int:
        return self.env.num_envs

    def reset(self, key) -> EnvState:
        inner, zero = self.env.reset(key), jnp.zeros(self.num_envs)
        return EnvState(inner, (inner.obs, zero), jnp.float32(1), zero, zero + 1, zero)

    def step(self, key, state: EnvState, action) -> tuple[EnvState, Transition, dict[str, Mean]]:
        """As the inner environment's `step`; of the episodes that ended also the metrics

        `episode_discounted_return`, G_0, and `episode_stock`, c_0 + G_0.
        """
        inner, transition, finished = self.env.step(key, state.inner, action)
        stock = update(state.obs[1], transition.reward, state.gamma)
        transition = transition._replace(obs=state.obs, next_obs=(transition.next_obs, stock))
        done = transition.terminated | transition.truncated
        total = state.discounted_return + state.discount * transition.reward
        finished = dict(
            finished,
            episode_discounted_return=Mean(total * done, done),
            episode_stock=Mean((state.first_stock + total) * done, done),
        )
        next_state = EnvState(
            inner=inner,
            obs=(inner.obs, jnp.where(done, state.first_stock, stock)),
            gamma=state.gamma,
            first_stock=state.first_stock,
            discount=jnp.where(done, 1.0, state.discount * state.gamma),
            discounted_return=total * ~done,
        )
        return next_state, transition, finished


def wrap(env) -> Stock:
    return Stock(env)


def start(state: EnvState, first_stock, gamma) -> EnvState:
    """After `reset`: every environment at its first stock. Args: first_stock `(num_envs,)` or (); gamma ()."""
    first_stock = jnp.broadcast_to(jnp.asarray(first_stock, jnp.float32), state.first_stock.shape)
    return state._replace(obs=(state.obs[0], first_stock), first_stock=first_stock, gamma=jnp.float32(gamma))


def restart(state: EnvState, done, first_stock) -> EnvState:
    """After `step`: the episodes that have just begun at another first stock.

    Args: done `(num_envs,)` bool, `terminated | truncated` of that step; first_stock `(num_envs,)`.
    """
    first_stock = jnp.where(done, first_stock, state.first_stock)
    return state._replace(obs=(state.obs[0], jnp.where(done, first_stock, state.obs[1])), first_stock=first_stock)
