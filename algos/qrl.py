"""QRL, quasimetric RL: learns how many steps it takes from any observation to any other, offline.

    max  E_{s, g}[ -softplus_beta(offset - d(s, g)) ]        softplus_beta(x) = log(1 + exp(beta x)) / beta
    subject to  E_{(s, s')}[ relu(d(s, s') - 1)^2 ] <= epsilon^2

Distances are pushed apart everywhere, but a step in the data is at most 1 long. d obeys the triangle inequality by
construction, so nothing grows beyond the shortest path that the data hold: d becomes it, and -d is the optimal value.

    z = encoder(s)      T(z, a) = z + dynamics(z, a)      d(z, z') = IQE(projector(z), projector(z'))

    L_push        = mean_i softplus_beta(offset - d(z_i, z'_{i-1}))
    L_constraint  = lambda (mean relu(d(z, z') - 1)^2 - epsilon^2)             critics descend, lambda ascends
    L_dynamics    = mean of d(T(z, a), z')^2 and d(z', T(z, a))^2              no stopped gradients
    L_critic      = L_push + L_constraint + dynamics_weight L_dynamics         of each critic
    L_actor       = mean max_k d_k(T_k(z, a~), z_g) - bc_weight log pi(a | s, g'),        a~ ~ pi(. | s, g)

The constraint is soft: local distances settle at about 1 + epsilon, and all others grow with them. Read ratios.

Observations are pairs `(observation, goal)` of one shape. Data give observations alone; goals are drawn from them
(replay/goals.py), and rewards, terminations and the data's own goals are not used: every transition costs 1.

Index mapping. Leaves of `params.critics` lead with k, the critic; `raw_lambda[k]` is softplus^-1(lambda_k).

One update, in the authors' order: all critics and their lambdas; then the actor through the *new* critics, but from
the latents of before. One batch for all. `actor_goals` are those of the distance and `bc_goals` those of the cloning: a
kind of replay/goals.py, or `rolled`, the batch's own successors, each transition having that of the one before it.

Discrete actions have no actor: `act` takes argmin_a max_k d_k(T_k(z, a), z_g).

`variant: ogbench` (its agent `qrl`, with DDPG+BC; `--preset ogbench`) differs in this, sizes and rates apart:

    networks      GELU, then layer norm in critics and dynamics; no projector; the latent is the head's input
    lambda        exp(raw); `epsilon` 0.2236 is its `eps` of 0.05, which it does not square
    push          against goals drawn for it, not rolled
    L_dynamics    the mean of the distances, not of their squares
    L_actor       mean d / mean |d| - bc_weight log N(a; mu(s, g), 1), at the action clip(mu, -1, 1); one goal for both;
                  through the critics of before the update

Source: Wang, Torralba, Isola, Zhang, "Optimal Goal-Reaching Reinforcement Learning via Quasimetric Learning", ICML 2023
(arXiv 2304.01203); https://github.com/quasimetric-learning/quasimetric-rl at 0a611a4, its offline maze2d settings;
https://github.com/seohongpark/ogbench at 1d41409, impls/agents/qrl.py.

Deviations:
- Discrete actions are an extension; the authors' code has no actor for them and refuses.
- `normalize_obs` is not the authors' (raw observations); off by default.
- `actor_goals` other than `rolled` are not the authors' but OGBench's; an image has no convolutions, it is flattened.
- OGBench's AWR actor is left out.

One `step` is one gradient step of each loss.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from envs.types import Count, Example, Fraction, Natural, NonNegative, Positive, Spec, Widths, pytree, static
from networks.quasimetric import IQE, Network
from networks.torso import flat
from replay import goals

ACTIONS = ("continuous", "discrete")
GOAL_CONDITIONED = True  # observations are (observation, goal)
VARIANTS = ("authors", "ogbench")
GOALS = ("rolled", *goals.KINDS)
CLIP = 0.999  # the density of an action beyond it is that of the whole tail


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    critic_learning_rate: Positive = 5e-4  # Adam's, of encoder, projector, head and dynamics; published 5e-4
    actor_learning_rate: Positive = 3e-5  # Adam's; published 3e-5
    lambda_learning_rate: Positive = 1e-2  # Adam's, of lambda before its softplus; published 0.01
    initial_lambda: Positive = 0.01  # of each critic; published 0.01
    epsilon: Positive = 0.25  # steps may be longer than 1 by this, root mean square; published 0.25
    push_beta: Positive = 0.01  # sharpness of the push's softplus, 1 / steps; published 0.01 (online 0.1)
    push_offset: NonNegative = 500.0  # distance from which the push fades, steps; published 500 (online 15)
    dynamics_weight: NonNegative = 1.0  # of L_dynamics; published 1 (online 0.1)
    bc_weight: NonNegative = 0.05  # of the cloning loss; published 0.05
    future_gamma: Fraction = 0.99  # of future_geometric goals, per step; published 0.99
    # Static: shape the program.
    num_critics: Count = static(default=2)  # published 2
    batch_size: Count = static(default=4096)  # transitions; published 4096
    encoder_hidden: Widths = static(default=(1024, 1024, 1024))  # published 1024 x 3
    latent_size: Count = static(default=256)  # width of z; published 256
    projector_hidden: Widths = static(default=(1024, 1024))  # published 1024 x 2
    num_components: Count = static(default=64)  # C of the IQE; published 64
    component_size: Count = static(default=32)  # its intervals in each; published 32
    dynamics_hidden: Widths = static(default=(1024, 1024, 1024))  # published 1024 x 3
    actor_hidden: Widths = static(default=(1024, 1024, 1024, 1024))  # published 1024 x 4
    actor_goals: str = static(default="rolled")  # rolled, random, future_geometric or future_uniform; published rolled
    bc_goals: str = static(default="future_geometric")  # the same kinds; published future_geometric
    mode_samples: Natural = static(default=100)  # act takes the likeliest of these; 0: tanh(mean); published 100
    normalize_obs: bool = static(default=False)  # by the data's mean and standard deviation
    variant: str = static(default="authors")  # authors, or ogbench


class Normalizer(NamedTuple):
    """Mean and standard deviation of each entry of the flattened observation."""

    mean: jax.Array
    std: jax.Array


class Critic(NamedTuple):
    encoder: dict
    projector: dict  # () in OGBench's
    head: dict
    dynamics: dict


class Params(NamedTuple):
    critics: Critic  # leading axis K
    actor: dict  # () where actions are discrete
    normalizer: Normalizer  # of observations and goals, no gradient


class State(NamedTuple):
    params: Params
    raw_lambda: jax.Array  # (K,)
    opt_state: tuple  # of critics, raw_lambda, actor
    gradient_steps: jax.Array  # () int32
    key: jax.Array


class Batch(NamedTuple):
    """What one update sees; observations and goals are features, `(B, features)`."""

    x: jax.Array
    action: jax.Array
    next_x: jax.Array
    push_goal: Any  # None: rolled
    actor_goal: Any  # None: rolled
    bc_goal: Any  # None: rolled


def activation(config) -> str:
    return "gelu_norm" if config.variant == "ogbench" else "relu"


def encoder(config) -> Network:
    return Network((*config.encoder_hidden, config.latent_size), activation(config))


def projector(config) -> Network:
    return Network((*config.projector_hidden, config.num_components * config.component_size), activation(config))


def head(config) -> IQE:
    return IQE(config.num_components, "ogbench" if config.variant == "ogbench" else "maxmean")


def dynamics(config) -> Network:
    return Network((*config.dynamics_hidden, config.latent_size), activation(config), zero_final=True)


def actor_network(config, spec: Spec) -> Network:
    if config.variant == "ogbench":
        return Network((*config.actor_hidden, spec.action_size), "gelu")
    return Network((*config.actor_hidden, 2 * spec.action_size), zero_final=True)


def features(spec: Spec, normalizer: Normalizer, obs):
    """An observation, or a goal, as one vector, in standard deviations from the mean. `(..., features)` float32."""
    x = flat(spec.obs[0], obs)
    mean, std = (jnp.broadcast_to(row, x.shape) for row in normalizer)
    return (x - mean) / std


# One critic; `jax.vmap` over params.critics gives all.
def encode(config, critic: Critic, x):
    """z, `(..., latent)`."""
    return encoder(config).apply(critic.encoder, x)


def project(config, critic: Critic, z):
    """The head's inputs, `(..., C k)`."""
    return z if config.variant == "ogbench" else projector(config).apply(critic.projector, z)


def predict(config, spec: Spec, critic: Critic, z, action):
    """T(z, a), the latent after the action, `(..., latent)`."""
    if spec.action_type == "discrete":
        action = jax.nn.one_hot(action, spec.num_actions)
    return z + dynamics(config).apply(critic.dynamics, jnp.concatenate([z, action], -1))


def distance(config, critic: Critic, z, other):
    """d between latents: `(...,)`."""
    return head(config).apply(critic.head, project(config, critic, z), project(config, critic, other))


def push_loss(d, beta, offset):
    """softplus_beta(offset - d), elementwise: falls with d, at a slope of -1 far below `offset` and of 0 far above."""
    return jax.nn.softplus(beta * (offset - d)) / beta


def violation(d, epsilon):
    """Mean square of what steps are longer than 1, less what is allowed. Args: d `(B,)` of transitions. Returns: ()."""
    return jnp.square(jax.nn.relu(d - 1)).mean() - jnp.square(epsilon)


def constraint_loss(lam, violation):
    """lambda times violation for the critic, its negative for lambda: descending it, lambda ascends."""
    stop = jax.lax.stop_gradient
    return stop(lam) * violation - lam * stop(violation)


def dynamics_loss(forward, backward, squared: bool):
    """Mean over both directions of squared distances, or of distances. Args: `(B,)` each."""
    power = jnp.square if squared else lambda d: d
    return 0.5 * (power(forward).mean() + power(backward).mean())


def multiplier(config, raw_lambda):
    return jnp.exp(raw_lambda) if config.variant == "ogbench" else jax.nn.softplus(raw_lambda)


def raw_multiplier(config):
    """What `multiplier` makes `initial_lambda` of."""
    lam = config.initial_lambda
    return jnp.log(lam) if config.variant == "ogbench" else jnp.log(jnp.expm1(lam))


def critic_loss(config, spec: Spec, critic: Critic, raw_lambda, batch: Batch):
    """L_critic of one critic. Returns: (), and the latents of observations and successors and the metrics."""
    parts = [batch.x, batch.next_x] + ([] if batch.push_goal is None else [batch.push_goal])
    z = encode(config, critic, jnp.concatenate(parts))
    z, next_z, *push_z = jnp.split(z, len(parts))
    predicted = predict(config, spec, critic, z, batch.action)
    p = project(config, critic, jnp.concatenate([z, next_z, predicted, *push_z]))
    p, next_p, predicted_p, *push_p = jnp.split(p, 3 + len(push_z))
    goal_p = push_p[0] if push_p else jnp.roll(next_p, 1, 0)

    # Four distances in one call: push, step, T to successor, successor to T.
    d = head(config).apply(
        critic.head,
        jnp.concatenate([p, p, predicted_p, next_p]),
        jnp.concatenate([goal_p, next_p, next_p, predicted_p]),
    )
    push_d, local_d, forward, backward = jnp.split(d, 4)
    lam = multiplier(config, raw_lambda)
    push = push_loss(push_d, config.push_beta, config.push_offset).mean()
    excess = violation(local_d, config.epsilon)
    model = dynamics_loss(forward, backward, squared=config.variant == "authors")
    loss = push + constraint_loss(lam, excess) + config.dynamics_weight * model
    metrics = {
        "push_loss": push,
        "violation": excess,
        "lambda": lam,
        "dynamics_loss": model,
        "local_distance": local_d.mean(),
        "push_distance": push_d.mean(),
    }
    return loss, (z, next_z, metrics)


def split_outputs(outputs):
    """Mean and standard deviation of the normal before its tanh, `(..., D)` each."""
    mean, raw = jnp.split(outputs, 2, -1)
    return mean, jax.nn.softplus(raw) + 1e-4


def log_prob(outputs, action):
    """log density of tanh of a normal at an action in [-1, 1], summed over dimensions: `(...,)`.

    Beyond +-0.999, where the inverse of tanh loses itself, the density is the tail's mass over 0.001.
    """
    mean, std = split_outputs(outputs)
    edge, width = jnp.arctanh(CLIP), jnp.log(1 - CLIP)
    inside = jnp.clip(action, -CLIP, CLIP)
    u = jnp.arctanh(inside)
    density = jax.scipy.stats.norm.logpdf(u, mean, std) - jnp.log1p(-jnp.square(inside))
    low = jax.scipy.stats.norm.logcdf(-edge, mean, std) - width
    high = jax.scipy.stats.norm.logcdf(-edge, -mean, std) - width
    return jnp.where(action <= -CLIP, low, jnp.where(action >= CLIP, high, density)).sum(-1)


def draw(outputs, key, shape=()):
    """Actions of the policy, `(*shape, ..., D)`; differentiable in its outputs."""
    mean, std = split_outputs(outputs)
    noise = jax.random.normal(key, (*shape, *mean.shape))
    return jnp.tanh(jnp.broadcast_to(mean, noise.shape) + jnp.broadcast_to(std, noise.shape) * noise)


def actor_loss(config, spec: Spec, actor, critics: Critic, z, goal_z, batch: Batch, key):
    """L_actor. Args: z, goal_z `(K, B, latent)`; batch, with all its goals. Returns: (), and metrics."""
    network = actor_network(config, spec)

    def distances(action):
        def of_one(critic, z, goal_z):
            return distance(config, critic, predict(config, spec, critic, z, action), goal_z)

        return jax.vmap(of_one)(critics, z, goal_z).max(0)  # (B,)

    if config.variant == "ogbench":
        mean = network.apply(actor, jnp.concatenate([batch.x, batch.actor_goal], -1))
        d = distances(jnp.clip(mean, -1, 1))
        bc = -jax.scipy.stats.norm.logpdf(batch.action, mean).sum(-1).mean()
        reach = d.mean() / jax.lax.stop_gradient(jnp.abs(d).mean())
    else:
        x = jnp.concatenate([batch.x, batch.x])
        goal = jnp.concatenate([batch.actor_goal, batch.bc_goal])
        outputs, bc_outputs = jnp.split(network.apply(actor, jnp.concatenate([x, goal], -1)), 2)
        d = distances(draw(outputs, key))
        bc = -log_prob(bc_outputs, batch.action).mean()
        reach = d.mean()
    return reach + config.bc_weight * bc, dict(actor_distance=d.mean(), bc_loss=bc)


def update(config, spec: Spec, params: Params, raw_lambda, opt_state, batch: Batch, key):
    """One gradient step of the critics and lambdas, then of the actor.

    Args: key, of the actor's actions. Returns: params, raw_lambda, opt_state, metrics.
    """
    critic_opt_state, lambda_opt_state, actor_opt_state = opt_state

    # Critics and lambdas.
    def loss_fn(critics, raw_lambda):
        loss, aux = jax.vmap(lambda critic, raw: critic_loss(config, spec, critic, raw, batch))(critics, raw_lambda)
        return loss.sum(), (loss, *aux)  # the sum keeps K problems apart

    grads, (loss, z, next_z, metrics) = jax.grad(loss_fn, (0, 1), has_aux=True)(params.critics, raw_lambda)
    updates, critic_opt_state = optax.adam(config.critic_learning_rate).update(grads[0], critic_opt_state)
    critics = optax.apply_updates(params.critics, updates)
    updates, lambda_opt_state = optax.adam(config.lambda_learning_rate).update(grads[1], lambda_opt_state)
    raw_lambda = optax.apply_updates(raw_lambda, updates)
    metrics = dict(loss=loss.mean()) | {name: x.mean() for name, x in metrics.items()}
    if spec.action_type == "discrete":
        opt_state = (critic_opt_state, lambda_opt_state, actor_opt_state)
        return params._replace(critics=critics), raw_lambda, opt_state, metrics

    # Actor: the latents are those of before the critics' step, those of goals drawn for it are not.
    through = params.critics if config.variant == "ogbench" else critics
    if batch.actor_goal is None:
        goal_z = jnp.roll(next_z, 1, 1)
    else:
        goal_z = jax.vmap(lambda critic: encode(config, critic, batch.actor_goal))(through)
    rolled = jnp.roll(batch.next_x, 1, 0)
    whole = batch._replace(
        actor_goal=rolled if batch.actor_goal is None else batch.actor_goal,
        bc_goal=rolled if batch.bc_goal is None else batch.bc_goal,
    )
    grads, actor_metrics = jax.grad(
        lambda actor: actor_loss(config, spec, actor, through, z, goal_z, whole, key), has_aux=True
    )(params.actor)
    updates, actor_opt_state = optax.adam(config.actor_learning_rate).update(grads, actor_opt_state)
    actor = optax.apply_updates(params.actor, updates)

    params = params._replace(critics=critics, actor=actor)
    return params, raw_lambda, (critic_opt_state, lambda_opt_state, actor_opt_state), metrics | actor_metrics


def period(config, dataset) -> int:
    """Gradient steps that one `step` makes."""
    return 1


def check(config, dataset):
    """What `init` needs beyond the ranges in Config. Raises ValueError."""
    obs, variant = dataset.spec.obs, config.variant
    if type(obs) is not tuple or len(obs) != 2 or len({(s.shape, s.dtype) for s in jax.tree.leaves(obs)}) != 1:
        raise ValueError(
            f"qrl needs observations (observation, goal), two arrays of one shape; this dataset has {obs}; "
            "of the mazes take those with -goals in their names"
        )
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} must be one of {', '.join(VARIANTS)}")
    for name in ("actor_goals", "bc_goals"):
        if getattr(config, name) not in GOALS:
            raise ValueError(f"{name} {getattr(config, name)!r} must be one of {', '.join(GOALS)}")
    if not 0 < config.future_gamma < 1:
        raise ValueError(f"future_gamma {config.future_gamma} must be between 0 and 1, both excluded")
    size = config.num_components * config.component_size
    if variant == "ogbench" and config.latent_size != size:
        raise ValueError(
            f"variant ogbench has no projector: latent_size {config.latent_size} must be num_components x "
            f"component_size, {config.num_components} x {config.component_size} = {size}"
        )
    if variant == "ogbench" and dataset.spec.action_type == "discrete":
        raise ValueError("variant ogbench needs continuous actions; use variant authors")


def init(config, dataset, key) -> State:
    key, critic_key, actor_key = jax.random.split(key, 3)
    spec = dataset.spec

    # Observations' statistics.
    x = flat(spec.obs[0], dataset.transitions.obs[0])
    normalizer = Normalizer(jnp.zeros(x.shape[1]), jnp.ones(x.shape[1]))
    if config.normalize_obs:
        normalizer = Normalizer(x.mean(0), x.std(0) + 1e-3)

    # Networks: K critics drawn independently.
    def init_critic(key) -> Critic:
        encoder_key, projector_key, head_key, dynamics_key = jax.random.split(key, 4)
        z, encoder_params = encoder(config).init_with_output(encoder_key, x[0])
        p, projector_params = z, ()
        if config.variant != "ogbench":
            p, projector_params = projector(config).init_with_output(projector_key, z)
        action = jnp.zeros(spec.num_actions or spec.action_size)
        dynamics_params = dynamics(config).init(dynamics_key, jnp.concatenate([z, action]))
        return Critic(encoder_params, projector_params, head(config).init(head_key, p, p), dynamics_params)

    critics = jax.vmap(init_critic)(jax.random.split(critic_key, config.num_critics))
    raw_lambda = jnp.full(config.num_critics, raw_multiplier(config))
    actor = ()
    if spec.action_type == "continuous":
        actor = actor_network(config, spec).init(actor_key, jnp.concatenate([x[0], x[0]]))
    opt_state = (
        optax.adam(config.critic_learning_rate).init(critics),
        optax.adam(config.lambda_learning_rate).init(raw_lambda),
        optax.adam(config.actor_learning_rate).init(actor),
    )
    return State(Params(critics, actor, normalizer), raw_lambda, opt_state, jnp.int32(0), key)


def distances_after(config, spec: Spec, params: Params, obs):
    """Distance to the goal after each discrete action, the largest of the critics': `(..., A)`."""
    x, goal = (features(spec, params.normalizer, o) for o in obs)

    def of_one(critic):
        z, goal_z = encode(config, critic, x), encode(config, critic, goal)
        repeated = jnp.broadcast_to(z[..., None, :], (*z.shape[:-1], spec.num_actions, z.shape[-1]))
        action = jnp.broadcast_to(jnp.arange(spec.num_actions), repeated.shape[:-1])
        p = project(config, critic, predict(config, spec, critic, repeated, action))
        goal_p = jnp.broadcast_to(project(config, critic, goal_z)[..., None, :], p.shape)
        return head(config).apply(critic.head, p, goal_p)

    return jax.vmap(of_one)(params.critics).max(0)


def act(config, spec, params: Params, obs, key):
    """The likeliest of `mode_samples` draws, as the authors have it; of discrete actions the one that leads nearest."""
    if spec.action_type == "discrete":
        return distances_after(config, spec, params, obs).argmin(-1).astype(jnp.int32)
    outputs = policy_outputs(config, spec, params, obs)
    if config.variant == "ogbench":
        return jnp.clip(outputs, -1, 1)
    if config.mode_samples == 0:
        return jnp.tanh(split_outputs(outputs)[0])
    actions = draw(outputs, key, (config.mode_samples,))  # (M, ..., D)
    likeliest = jax.vmap(lambda a: log_prob(outputs, a))(actions).argmax(0)  # (...,)
    return jnp.take_along_axis(actions, likeliest[None, ..., None], 0)[0]


def explore(config, spec, params: Params, obs, key):
    """An action drawn from the policy; of discrete actions that of `act`."""
    if spec.action_type == "discrete":
        return act(config, spec, params, obs, key)
    outputs = policy_outputs(config, spec, params, obs)
    if config.variant == "ogbench":
        return jnp.clip(outputs + jax.random.normal(key, outputs.shape), -1, 1)
    return draw(outputs, key)


def policy_outputs(config, spec: Spec, params: Params, obs):
    x = jnp.concatenate([features(spec, params.normalizer, o) for o in obs], -1)
    return actor_network(config, spec).apply(params.actor, x)


def sample(config, dataset, normalizer: Normalizer, key) -> Batch:
    """A batch with its goals: observations of the data, never the data's own goals."""
    index_key, push_key, actor_key, bc_key = jax.random.split(key, 4)
    index = jax.random.randint(index_key, (config.batch_size,), 0, dataset.num_transitions)
    t, gamma = dataset.transitions, config.future_gamma
    at = lambda observations, index: features(dataset.spec, normalizer, observations[index])

    def goal(kind, key):
        return None if kind == "rolled" else at(t.next_obs[0], goals.draw(kind, dataset, key, index, gamma))

    return Batch(
        at(t.obs[0], index),
        t.action[index],
        at(t.next_obs[0], index),
        push_goal=goal("random" if config.variant == "ogbench" else "rolled", push_key),
        actor_goal=goal(config.actor_goals, actor_key),
        bc_goal=goal(config.bc_goals, bc_key) if config.variant == "authors" else None,
    )


def step(config, dataset, state: State) -> tuple[State, dict]:
    key, sample_key, actor_key = jax.random.split(state.key, 3)
    batch = sample(config, dataset, state.params.normalizer, sample_key)
    args = (state.params, state.raw_lambda, state.opt_state, batch, actor_key)
    params, raw_lambda, opt_state, metrics = update(config, dataset.spec, *args)
    return State(params, raw_lambda, opt_state, state.gradient_steps + 1, key), metrics


SMALL = dict(
    batch_size=256,
    encoder_hidden=(128, 128),
    latent_size=128,
    projector_hidden=(128,),
    num_components=16,
    component_size=8,
    dynamics_hidden=(128,),
    actor_hidden=(128, 128),
)
PRESETS = dict(
    small=SMALL,
    ogbench=dict(
        critic_learning_rate=3e-4,
        actor_learning_rate=3e-4,
        lambda_learning_rate=3e-4,
        initial_lambda=1.0,
        epsilon=0.05**0.5,
        bc_weight=3e-3,
        num_critics=1,
        batch_size=1024,
        encoder_hidden=(512, 512, 512),
        latent_size=512,
        num_components=64,
        component_size=8,
        dynamics_hidden=(512, 512, 512),
        actor_hidden=(512, 512, 512),
        actor_goals="future_uniform",
        variant="ogbench",
    ),
)

EXAMPLE = Example(
    source="maze/umaze-goals-navigate",
    steps=3_000,
    eval_period=250,
    config=Config(
        critic_learning_rate=1e-3,
        actor_learning_rate=1e-3,
        lambda_learning_rate=0.03,
        initial_lambda=1.0,
        push_beta=0.05,
        push_offset=40.0,
        normalize_obs=True,
        **SMALL,
    ),
)
