"""Each online algorithm solves six tiny worlds; the one that it fails names what is wrong with it."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from probes import PROBES

from envs.types import EnvAndData
from runner import run

CASES = [
    pytest.param(name, action_type, marks=[] if name == "iqn" else pytest.mark.slow)
    for name in tiny.NAMES
    if tiny.kind(tiny.load(name)) in ("env", "env_and_demos")
    for action_type in tiny.load(name).ACTIONS
]

# How to read the action values of a batch of observations, `(..., B, A)`, for discrete actions. Any
# leading axes are estimates that must all agree.
Q_OF = {
    "iqn": lambda algo, config, spec, params, obs: algo.q_values(config, spec, params, obs),
    "mrq": lambda algo, config, spec, params, obs: algo.q_values(config, spec, params, obs),
    "qrdqn": lambda algo, config, spec, params, obs: algo.quantiles(config, spec, params, obs).mean(-1),
    "c51": lambda algo, config, spec, params, obs: algo.scores(config, algo.logits(config, spec, params, obs)),
    "deep_eta": lambda algo, config, spec, params, obs: algo.quantiles(config, spec, params, obs).mean(-1),
}
# How to read the values of the states under the agent's own policy, `(..., B)`, of algorithms that have no others.
V_OF = {
    "bangbang_ppo": lambda algo, config, spec, params, obs: algo.values(
        config, spec, params, algo.normalize(config, params.normalizer, obs)
    ),
}
TOLERANCE = {  # AdamW at the published epsilon keeps moving values that have settled, by up to 0.02
    "mrq": 0.05,
    "deep_eta": 0.05,  # a function of the stock too, learned at all of them
    "c51": 0.05,  # a probability reaches 1 only in the limit of large logits
}
# 21 logits on a bias alone, and small gradients near the end
OWN = {"c51": dict(learning_rate=1e-2, adam_epsilon=1e-4)}


def seen(algo, env, obs):
    """Spec and observations as the algorithm sees them: beside a stock of 0, where it wraps environments in one."""
    return (algo.wrap(env).spec, (obs, jnp.zeros(len(obs)))) if hasattr(algo, "wrap") else (env.spec, obs)


@cache
def learned(name, action_type):
    """The policy parameters that each probe ends with; every probe goes through one compiled program."""
    algo, results = tiny.load(name), {}
    for probe_name, probe in PROBES.items():
        env = probe.env(continuous=action_type == "continuous")
        world = getattr(algo, "wrap", lambda env: env)(env)
        source = world if tiny.kind(algo) == "env" else EnvAndData(world, None)
        config = tiny.config(algo, **tiny.LEARNING | OWN.get(name, {}), gamma=probe.gamma)
        configs = run.broadcast(config, 1)
        carry = run.init(algo, configs, source, jax.random.split(jax.random.key(7), 1))
        carry = run.advance(algo, configs, source, carry, tiny.LEARNING_STEPS)
        results[probe_name] = algo, config, env, tiny.run_of(carry.states.params, 0)
    return results


@pytest.mark.parametrize("probe_name", PROBES)
@pytest.mark.parametrize("name, action_type", CASES)
def test_agent_acts_best_in_every_visited_state(name, action_type, probe_name):
    algo, config, env, params = learned(name, action_type)[probe_name]
    q = np.asarray(PROBES[probe_name].q)
    spec, obs = seen(algo, env, jnp.repeat(env.features[: len(q)], 32, 0))  # 32 rows for each state
    action = np.asarray(algo.act(config, spec, params, obs, jax.random.key(3))).reshape(len(q), 32, -1)[..., 0]
    if action_type == "continuous":
        action = (1 + action) / 2  # to [0, 1]: 0 and 1 are the ends with the values q[:, 0] and q[:, 1]
    regret = q.max(1, keepdims=True) - (q[:, :1] * (1 - action) + q[:, 1:] * action)
    # The wrong action costs 2; a continuous policy may stay a little inside the box.
    assert regret.max() <= (0 if action_type == "discrete" else 0.2)


@pytest.mark.parametrize("probe_name", PROBES)
@pytest.mark.parametrize("name, action_type", [c for c in CASES if c.values[1] == "discrete"])
def test_values_are_the_optimal_ones(name, action_type, probe_name):
    assert name in Q_OF | V_OF, f"add to Q_OF or V_OF how to read the values of {name}"
    algo, config, env, params = learned(name, action_type)[probe_name]
    expected = np.asarray(PROBES[probe_name].q, np.float32)
    expected = expected if name in Q_OF else expected.max(-1)
    spec, obs = seen(algo, env, env.features[: len(expected)])
    values = (Q_OF | V_OF)[name](algo, config, spec, params, obs)
    # Errors that the probes look for move a value by 1/6 or more.
    np.testing.assert_allclose(values, np.broadcast_to(expected, values.shape), atol=TOLERANCE.get(name, 0.01))


@pytest.mark.slow
@pytest.mark.parametrize("probe_name", [name for name, probe in PROBES.items() if all(a == b for a, b in probe.q)])
def test_every_bin_of_cqn_has_the_value_of_the_state_where_actions_do_not_matter(probe_name):
    algo, config, env, params = learned("cqn", "continuous")[probe_name]
    expected = np.asarray(PROBES[probe_name].q, np.float32)[:, 0]  # (S,)
    obs = env.features[: len(expected)]
    midpoints = algo.greedy(config, env.spec, params.critic, obs, jax.random.key(3))[2]
    q = algo.values(config, algo.all_levels(config, env.spec, params.critic, obs, midpoints))  # (S, L, D, B)
    # Errors that the probes look for move a value by 1/6 or more; the target lags behind by 1/100.
    np.testing.assert_allclose(q, np.broadcast_to(expected[:, None, None, None], q.shape), atol=0.05)


@pytest.mark.parametrize("probe_name", PROBES)
def test_expected_values_solve_the_optimality_equation(probe_name):
    probe, env = PROBES[probe_name], PROBES[probe_name].env()
    q = np.asarray(probe.q)
    visited = slice(len(q))
    bootstrap = probe.gamma * ~env.terminated[visited] * q.max(1)[np.minimum(env.next_state[visited], len(q) - 1)]
    np.testing.assert_allclose(q, env.reward[visited] + bootstrap)


@jax.jit
def play_one(env, action):
    return env.step(jax.random.key(1), env.reset(jax.random.key(0)), action)


def test_probe_tells_the_true_successor_from_the_reset():
    env = PROBES["truncation"].env(num_envs=512)
    state, transition, finished = play_one(env, jnp.zeros(512, jnp.int32))
    first = transition.obs[:, 0] == -1
    assert 0.4 < first.mean() < 0.6  # both starts have probability 1/2: 0.1 is 4.5 standard deviations
    assert (transition.next_obs[first] == env.features[1][None]).all()
    assert (transition.truncated == first).all() and (transition.terminated == ~first).all()
    assert (transition.reward == ~first).all() and finished["episode_return"].count.all()
    assert 0.4 < (state.obs[first][:, 0] == -1).mean() < 0.6  # a new episode, whatever the successor was


def test_continuous_action_moves_linearly_between_the_two_actions():
    env = PROBES["policy"].env(continuous=True, num_envs=4)
    action = jnp.array([[-1.0], [-0.5], [0.5], [1.0]])
    _, transition, _ = play_one(env, action)
    assert transition.reward.tolist() == [-1.0, -0.5, 0.5, 1.0]
