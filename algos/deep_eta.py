"""DηN ("deep eta net"): QR-DQN with a stock beside the observation, for objectives of the whole return, as its CVaR.

The stock c remembers what was collected, in the units of now (`envs/stock.py`). The network predicts the law of what is
still to come, G; actions are compared by the expected utility f of both together, c + G (`networks/objectives.py`):

    c_{t+1}     = (c_t + r_{t+1}) / gamma                                     c_0 + G_0 = gamma^t (c_t + G_t)
    Score(c, q) = mean_i f(c + q_i)
    y_j         = r + (1 - terminated) gamma^n qbar_j(s', c', a*)             a* = argmax_a Score(c', qbar(s', c', a))
                  r the sum of n discounted rewards,  c' = (c + r) / gamma^n
    L           = sum_i mean_j |taus_i - 1{u_ij < 0}| Huber_kappa(u_ij),      u_ij = y_j - q_i(s, c, a)

    max over c_0 of  -c_0 + max_a Score(c_0, q(s_0, c_0, a)) / tau            lower CVaR, f(x) = min(x, 0)

`quantiles(...)[..., i]` is q_i, the quantile of G (not of c + G) at (i + 1/2) / N. With f(x) = x this is QR-DQN.

Neither rewards nor successors depend on the stock. So a transition is one of every stock: `relabel_fraction` of a batch
is given another c, drawn from [stock_low, stock_high], and the c' that follows from it. The same range is that of c_0
in training, of the search for c_0, and of what the network reads: c clipped to it, over `stock_scale`. Let it hold
minus every return that is possible from any state: for a smaller c all of c + G is negative, for a larger one positive,
and f with a kink at 0 is linear there, so that the best action no longer depends on c.

c_0 is chosen for an evaluation by `begin`, once for all episodes that are played at once, as the objective is one of
the law of returns over their first states too: the best on an even grid for the CVaRs (least for the upper one), and
minus the target for others.

Source: Pires, Rowland, Borsa, Guo, Khetarpal, Barreto, Abel, Munos, Dabney, "Optimizing Return Distributions with
Distributional Dynamic Programming", JMLR 26(185), 2025 (arXiv 2501.13028), DηN. Code: MehrdadMoghimi/RIGOR,
qrdqn_mean_cvar (arXiv 2602.04131), for defaults and the score; the loss as in `qrdqn`.

Deviations: the paper's body could not be read, so differences from it are not known. From RIGOR:
- Relabelled when sampled; RIGOR stores 49 copies of each transition, along the stocks of whole episodes.
- c_0 is uniform in training, where RIGOR uses the best one found; at evaluation the best of the grid, where RIGOR
  goes on to a predicted quantile.
- Targets are copied, as in DQN; RIGOR moves them by 0.01 every 500 steps.
- Ties take the first action; RIGOR averages the targets of tied actions.
- For pixels the stock is embedded and added to the torso's features; RIGOR has vectors only.
- Upper CVaR: the first best action is taken at a tie, where the optimum may need to randomise.

One `step` is `max(num_envs, train_period)` env steps and one gradient step for every `train_period` of them.
"""

import dataclasses
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from envs import mdps, stock
from envs.types import (
    Count,
    Example,
    Fraction,
    NonNegative,
    Positive,
    Real,
    Spec,
    Widths,
    example_transition,
    pytree,
    static,
    zeros,
)
from networks import laws, objectives
from networks.mlp import MLP
from networks.torso import split_network
from replay import ring

ACTIONS = ("discrete",)
wrap = stock.wrap


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    learning_rate: Positive = 1e-3  # Adam's; RIGOR 1e-3
    adam_epsilon: Positive = 7.8125e-5  # added to Adam's root mean square; RIGOR 0.01/128
    gamma: Fraction = 0.99  # discount per env step; RIGOR 0.99
    epsilon_start: Fraction = 1.0  # exploration after the prefill; RIGOR 1.0
    epsilon_end: Fraction = 0.05  # exploration from epsilon_decay on; RIGOR 0.05
    epsilon_decay: NonNegative = 250_000.0  # env steps after the prefill, linear; RIGOR half of training
    kappa: NonNegative = 0.1  # where Huber's square turns into a line, return; 0: the plain quantile loss; RIGOR 0.1
    tau: objectives.Tail = 0.25  # of the CVaRs: the fraction of the returns that counts
    weight: Fraction = 0.5  # of mean_cvar: the mean's
    target: Real = 0.0  # of desired_return, squared_error and threshold, discounted return
    rate: Positive = 1.0  # of exponential, 1 / return
    stock_low: Real = -10.0  # stocks that matter: minus the greatest return possible from any state
    stock_high: Real = 10.0  # minus the least
    stock_scale: Positive = 1.0  # of rewards; the network reads the stock over it
    relabel_fraction: Fraction = 0.5  # of a batch
    anneal_steps: NonNegative = 0.0  # env steps over which the learning rate falls to 0, linearly; 0: constant
    # Static: shape the program.
    objective: str = static(default="lower_cvar")  # a name in networks/objectives.py
    num_stocks: Count = static(default=201)  # grid points of the search for c_0; RIGOR 2001 (201 wealth)
    num_quantiles: Count = static(default=100)  # N; RIGOR 100
    target_period: Count = static(default=250)  # gradient steps between copies of the target; ours
    train_period: Count = static(default=10)  # env steps per gradient step; RIGOR 10
    n_step: Count = static(default=1)  # env steps in a return; RIGOR 1
    batch_size: Count = static(default=128)  # transitions; RIGOR 128 to 256
    capacity: Count = static(default=100_000)  # transitions over all envs; RIGOR 1e5
    prefill: Count = static(default=10_000)  # env steps by a uniform policy; RIGOR 1e4
    hidden: Widths = static(default=(120, 84))  # widths of the dense layers; RIGOR (120, 84)
    padding: str = static(default="VALID")  # of the 84x84 torso, SAME or VALID


class State(NamedTuple):
    params: dict
    target_params: dict
    opt_state: tuple
    replay: ring.Replay
    env_state: object
    env_steps: jax.Array  # () int32, over all envs, prefill included
    gradient_steps: jax.Array  # () int32
    key: jax.Array


class StockNetwork(nn.Module):
    """Of a vector the stock is the last feature; of pixels the torso's features and the stock's embedding are added."""

    torso: nn.Module
    head: nn.Module
    flat: bool

    @nn.compact
    def __call__(self, obs, c):
        """`(..., *obs_shape)` and `(...,)` to `(..., A N)`."""
        if self.flat:
            return self.head(self.torso(jnp.concatenate([obs, c[..., None]], -1)))
        features = self.torso(obs)
        return self.head(nn.relu(features + MLP((64, features.shape[-1]))(c[..., None])))


def network(config, spec: Spec) -> nn.Module:
    obs = spec.obs[0]
    flat = len(obs.shape) == 1
    read = jax.ShapeDtypeStruct((obs.shape[0] + 1,), jnp.float32) if flat else obs
    torso, head = split_network(read, config.hidden, spec.num_actions * config.num_quantiles, config.padding)
    return StockNetwork(torso, head, flat)


def quantiles(config, spec, params, obs):
    """q of a batch of observations and stocks, `(B, A, N)`."""
    obs, c = obs
    c = jnp.clip(c, config.stock_low, config.stock_high) / config.stock_scale
    q = network(config, spec).apply(params, obs, c)  # (B, A N)
    return q.reshape(-1, spec.num_actions, config.num_quantiles)


def objective_of(config):
    """The objective that `config` names, with its parameters."""
    cls = objectives.OBJECTIVES[config.objective]
    names = [field.name for field in dataclasses.fields(cls) if field.name != "name"]
    return cls(**{name: getattr(config, name) for name in names})


def scores(config, q, c):
    """What actions are compared by, E f(c + G). Args: q `(..., A, N)`; c `(...,)`. Returns: `(..., A)`."""
    return objective_of(config).f(c[..., None, None] + q).mean(-1)


def best_action(config, q, c):
    """argmax_a Score(c, q), `(...,)`. Args: q `(..., A, N)`; c `(...,)`.

    A piecewise linear f is linear where all of c + q has one sign: c adds the same to every action there, and is
    clipped, as float32 would lose the differences beside a large one.
    """
    if hasattr(objective_of(config), "slopes"):
        c = jnp.clip(c, -q.max((-2, -1)), -q.min((-2, -1)))
    return scores(config, q, c).argmax(-1)


def relabel(batch, discount, c):
    """The transitions as they are at another stock c, `(B,)`. Args: batch `(B, ...)`; discount `(B,)`, 0 at an end."""
    c_next = jnp.where(discount > 0, stock.update(c, batch.reward, discount), 0)
    return batch._replace(obs=(batch.obs[0], c), next_obs=(batch.next_obs[0], c_next))


def target_of(config, spec, target_params, batch, discount):
    """y, `(B, N)`. Args: batch `(B, ...)`, of n steps; discount `(B,)`, gamma^n (1 - terminated)."""
    q = quantiles(config, spec, target_params, batch.next_obs)  # (B, A, N)
    best = of_action(q, best_action(config, q, batch.next_obs[1]))
    return batch.reward[:, None] + discount[:, None] * best


def of_action(q, action):
    """`(B, A, N)` and `(B,)` to `(B, N)`."""
    return jnp.take_along_axis(q, action[:, None, None], 1)[:, 0]


def quantile_loss(q, target, kappa):
    """L, of one law. Args: q, target `(N,)`, any number of each; kappa (), 0 for absolute errors. Returns: ()."""
    taus = (jnp.arange(q.shape[0]) + 0.5) / q.shape[0]
    u = jax.lax.stop_gradient(target)[None, :] - q[:, None]  # (i, j)
    inner = jnp.minimum(jnp.abs(u), kappa)
    huber = jnp.where(kappa > 0, inner * (jnp.abs(u) - inner / 2), jnp.abs(u))
    return (jnp.abs(taus[:, None] - (u < 0)) * huber).mean(1).sum()


def draw_stocks(config, key, probability, c):
    """c or, with a probability, one drawn from the range that matters. Args: probability (); c `(B,)`."""
    choice_key, draw_key = jax.random.split(key)
    drawn = jax.random.uniform(draw_key, c.shape, minval=config.stock_low, maxval=config.stock_high)
    return jnp.where(jax.random.uniform(choice_key, c.shape) < probability, drawn, c)


def restart(config, env_state, transition, key):
    """Another c_0 for each episode that has just begun."""
    done = transition.terminated | transition.truncated
    return stock.restart(env_state, done, draw_stocks(config, key, 1.0, env_state.first_stock))


def best_first_stock(config, spec, params, obs):
    """c_0 for episodes that begin with `obs`, `(B, *obs_shape)`. Returns: ()."""
    outer = objectives.outer(objective_of(config))
    if outer.search == "fixed":
        return outer.c0
    grid = jnp.linspace(config.stock_low, config.stock_high, config.num_stocks)

    def value(c):
        c = jnp.full(obs.shape[0], c)
        u = scores(config, quantiles(config, spec, params, (obs, c)), c).max(-1)  # (B,)
        return outer.value(c[0], u.mean())

    h = jax.lax.map(value, grid)  # (num_stocks,); one by one: an evaluation may have many episodes
    return grid[h.argmax() if outer.search == "max" else h.argmin()]


def measure(config, episodes) -> dict:
    """What the episodes are worth. Args: episodes, `(N,)` by name. Returns: () by name.

    `objective`, of the law of their discounted returns or, where c_0 is fixed, mean f(c_0 + G); `first_stock`, c_0; and
    where c_0 is fixed `abs_stock`, mean |c_0 + G|.
    """
    g, c = episodes["episode_discounted_return"], episodes["episode_stock"]  # G and c_0 + G
    objective, p = objective_of(config), jnp.full(g.shape, 1 / g.shape[0])
    found = dict(first_stock=(c - g).mean())
    match objective:
        case objectives.LowerCVaR(tau):
            return found | dict(objective=laws.cvar(g, p, tau))
        case objectives.UpperCVaR(tau):
            return found | dict(objective=laws.upper_cvar(g, p, tau))
        case objectives.MeanCVaR(tau, weight):
            return found | dict(objective=weight * g.mean() + (1 - weight) * laws.cvar(g, p, tau))
    return found | dict(objective=objective.f(c).mean(), abs_stock=jnp.abs(c).mean())


def epsilon(config, env_steps):
    """Linear from epsilon_start at the end of the prefill to epsilon_end `epsilon_decay` env steps later."""
    progress = (env_steps - config.prefill) / jnp.maximum(config.epsilon_decay, 1.0)
    return config.epsilon_start + jnp.clip(progress, 0, 1) * (config.epsilon_end - config.epsilon_start)


def optimizer(config, env_steps):
    """Adam with the learning rate of `env_steps`."""
    progress = jnp.where(config.anneal_steps > 0, env_steps / jnp.maximum(config.anneal_steps, 1.0), 0.0)
    return optax.adam(config.learning_rate * jnp.clip(1 - progress, 0, 1), eps=config.adam_epsilon)


def period(config, env) -> int:
    """Env steps that one `step` makes."""
    return max(env.num_envs, config.train_period)


def check(config, env):
    """What `init` needs beyond the ranges in Config. Raises ValueError."""
    ring.check(config.capacity, env.num_envs)
    small, large = sorted((env.num_envs, config.train_period))
    if large % small:
        raise ValueError(
            f"train_period {config.train_period} and num_envs {env.num_envs}: one must be a multiple of the other"
        )
    if config.prefill % period(config, env):
        raise ValueError(
            f"prefill {config.prefill} must be a multiple of {period(config, env)}, "
            "the larger of num_envs and train_period"
        )
    rows = min(config.prefill, config.capacity) // env.num_envs
    if rows < config.n_step:
        raise ValueError(
            f"n_step {config.n_step} is longer than the {rows} steps an environment stores before learning; "
            "raise prefill and capacity"
        )
    if not hasattr(env.spec.obs[0], "shape"):
        raise ValueError("deep_eta needs one array as its observation; this environment's is structured")
    if config.padding not in ("SAME", "VALID"):
        raise ValueError(f"padding {config.padding!r} must be SAME or VALID")
    if config.objective not in objectives.OBJECTIVES | objectives.INSTEAD:
        raise ValueError(f"objective {config.objective!r} is none of {', '.join(objectives.OBJECTIVES)}")
    if config.objective in objectives.INSTEAD:
        objectives.check(objectives.Direct(config.objective), config.gamma, 1)
    if objectives.is_vector(objective_of(config)):
        raise ValueError(f"{config.objective} needs a vector of rewards; of one reward, desired_return is the same")
    if objectives.outer(objective_of(config)).search != "fixed" and config.num_stocks < 2:
        raise ValueError(f"num_stocks {config.num_stocks} must be at least 2: a grid to search c_0 on")
    low, high = (float(jnp.float32(x)) for x in (config.stock_low, config.stock_high))
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"stock_low {config.stock_low:g} must be less than stock_high {config.stock_high:g}")
    world = env.env  # within the stock
    objectives.check(objective_of(config), config.gamma, world.mdp.horizon if isinstance(world, mdps.Sampler) else None)


def init(config, env, key) -> State:
    key, params_key, reset_key, stock_key, prefill_key = jax.random.split(key, 5)
    params = network(config, env.spec).init(params_key, *zeros(env.spec.obs))

    # Replay, prefilled by a uniform policy.
    env_state = env.reset(reset_key)
    first_stock = draw_stocks(config, stock_key, 1.0, env_state.first_stock)
    env_state = stock.start(env_state, first_stock, config.gamma)
    replay = ring.create(config.capacity, env.num_envs, example_transition(env.spec))

    def collect(carry, key):
        env_state, replay = carry
        action_key, env_key, stock_key = jax.random.split(key, 3)
        action = jax.random.randint(action_key, (env.num_envs,), 0, env.spec.num_actions)
        env_state, transition, _ = env.step(env_key, env_state, action)
        env_state = restart(config, env_state, transition, stock_key)
        return (env_state, ring.insert(replay, transition)), None

    keys = jax.random.split(prefill_key, config.prefill // env.num_envs)
    (env_state, replay), _ = jax.lax.scan(collect, (env_state, replay), keys)
    opt_state, env_steps = optimizer(config, 0).init(params), jnp.int32(config.prefill)
    return State(params, params, opt_state, replay, env_state, env_steps, jnp.int32(0), key)


def begin(config, spec, params, env_state, key):
    """All episodes of an evaluation at the best first stock."""
    return stock.start(env_state, best_first_stock(config, spec, params, env_state.obs[0]), config.gamma)


def act(config, spec, params, obs, key):
    """Greedy with respect to `scores`, `(B,)` int32. Args: obs, `(observation, stock)`."""
    return best_action(config, quantiles(config, spec, params, obs), obs[1]).astype(jnp.int32)


def step(config, env, state: State) -> tuple[State, dict]:
    key, act_key, learn_key = jax.random.split(state.key, 3)

    # Act and store, epsilon-greedily.
    def act_and_store(carry, key):
        env_state, replay, env_steps = carry
        greedy_key, uniform_key, explore_key, env_key, stock_key = jax.random.split(key, 5)
        greedy = act(config, env.spec, state.params, env_state.obs, greedy_key)
        uniform = jax.random.randint(uniform_key, greedy.shape, 0, env.spec.num_actions)
        explore = jax.random.uniform(explore_key, greedy.shape) < epsilon(config, env_steps)
        action = jnp.where(explore, uniform, greedy)
        env_state, transition, finished = env.step(env_key, env_state, action)
        env_state = restart(config, env_state, transition, stock_key)
        return (env_state, ring.insert(replay, transition), env_steps + env.num_envs), finished

    # Learn: one gradient step for every `train_period` env steps.
    def learn(carry, key):
        params, target_params, opt_state, gradient_steps = carry
        sample_key, stock_key = jax.random.split(key)
        batch, discount = ring.sample_n_step(replay, sample_key, config.batch_size, config.n_step, config.gamma)
        batch = relabel(batch, discount, draw_stocks(config, stock_key, config.relabel_fraction, batch.obs[1]))
        target = target_of(config, env.spec, target_params, batch, discount)

        def loss_fn(params):
            q = of_action(quantiles(config, env.spec, params, batch.obs), batch.action)  # (B, N)
            return jax.vmap(quantile_loss, (0, 0, None))(q, target, config.kappa).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer(config, state.env_steps).update(grads, opt_state)
        params = optax.apply_updates(params, updates)

        gradient_steps += 1
        due = gradient_steps % config.target_period == 0
        target_params = jax.tree.map(lambda p, t: jnp.where(due, p, t), params, target_params)
        return (params, target_params, opt_state, gradient_steps), loss

    carry = (state.env_state, state.replay, state.env_steps)
    keys = jax.random.split(act_key, period(config, env) // env.num_envs)
    (env_state, replay, env_steps), finished = jax.lax.scan(act_and_store, carry, keys)
    carry = (state.params, state.target_params, state.opt_state, state.gradient_steps)
    keys = jax.random.split(learn_key, period(config, env) // config.train_period)
    learned, loss = jax.lax.scan(learn, carry, keys)
    params, target_params, opt_state, gradient_steps = learned

    state = State(params, target_params, opt_state, replay, env_state, env_steps, gradient_steps, key)
    return state, dict(loss=loss, epsilon=epsilon(config, env_steps), **finished)


EXAMPLE = Example(
    source="mdp/slippery",
    steps=480_000,
    eval_period=48_000,
    num_envs=64,
    seeds=(0, 1, 2, 3, 4),
    config=Config(
        adam_epsilon=1e-4,
        gamma=1.0,
        epsilon_end=0.5,
        epsilon_decay=100_000.0,
        tau=0.1,
        stock_low=0.0,
        stock_high=16.0,
        stock_scale=5.0,
        anneal_steps=480_000.0,
        num_quantiles=30,
        target_period=50,
        train_period=32,
        capacity=204_800,
        prefill=6_400,
    ),
)
