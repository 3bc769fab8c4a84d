"""MR.Q: model-free Q-learning on a representation that a model of the environment is trained for.

MR.Q (Fujimoto et al. 2025) has one set of hyperparameters for continuous and discrete actions, for
vectors and pixels. An encoder embeds states and state-action pairs so that reward, termination and
next embedding are linear in the pair's embedding; a twin value and a policy are then learned on the
embeddings by an ordinary model-free update. Nothing is planned, and the model is never rolled out to act.

    z_s = f_w(s)      z_sa = g_w(z_s, a)      (d, z_s', reward logits) = m^T z_sa, linear

Encoder, on windows of H = `encoder_horizon` steps from z^0 = f_w(s_0),
by (d^t, z^t, logits^t) = m^T g_w(z^{t-1}, a_{t-1}):

    L_enc = sum_{t=1..H} E[ alive_t (  dynamics_weight    mean (z^t - f_w'(s_t))^2
                                     + reward_weight      CE(logits^t, two-hot symexp bins of r_{t-1})
                                     + termination_weight (d^t - terminated_{t-1})^2 ) ]
    alive_1 = 1, alive_{t+1} = alive_t (1 - terminated_{t-1}); the last term counts once a termination was seen.
    Dead rows count in the denominator of E.

Value, twin, on n = `n_step` steps; R and gamma^n stop at a termination:

    a'  = policy'(f_w'(s_n)) + clip(noise), noise ~ N(0, target_noise^2), then clipped to [-1, 1];
          where actions are discrete the one-hot of its largest entry
    y   = (R + (1 - terminated) gamma^n rbar' min_i Q'_i(g_w'(f_w'(s_n), a'))) / rbar
    L_Q = E[ mean_i huber(Q_i(g_w(f_w(s), a)) - y) ],  gradient's global norm clipped

Policy, after the value's step:  L_pi = -E[ mean_i Q_i(g_w(z_s, pi(z_s))) ] + preactivation_weight E[ z_pi^2 ]

where z_pi is what the policy's tanh (continuous) or Gumbel-softmax (discrete) is applied to. The
encoder is trained by L_enc alone. Primes are targets: copies made every `target_period` updates.
rbar is the mean |reward| in the replay when the targets were last copied, rbar' the one before. Replay is LAP's,
priority max(1, max_i |Q_i - y|)^0.4 (replay/prioritised.py).

Index mapping. `params` holds w, pi, Q and rbar, `target_params` w', pi', Q' and rbar'; a sync is
`target_params = params`, and rbar is then measured anew. In windows `zs[:, t]` is z^{t+1}, t = 0..H-1, beside
`next_obs[:, t]`, `reward[:, t]` and `terminated[:, t]`. The leading axis of `value` is i.

Order, as in the authors' code: at the beginning of a period the targets are copied, and then the encoder
makes all of its `target_period` updates, on fresh batches, towards the encoder from before them. During
the period's environment steps the encoder stands still, and value and policy make one update each
for every `train_period` env steps. The first period has rbar' = 1.

Source: Fujimoto, D'Oro, Zhang, Tian, Rabbat, "Towards General-Purpose Model-Free Reinforcement Learning", ICLR 2025
(arXiv 2501.16142). Code: facebookresearch/MRQ (8a44a7d). LAP: Fujimoto, Meger, Precup 2020.

Deviations:
- The n-step reward counts the terminating reward and nothing after it. The code of 8a44a7d drops the former and adds
  rewards from after it, the paper's first release the latter only; both are errors.
- A period's encoder updates come before its first environment step; the code makes that step first, with the encoder
  from before them, and then updates on a replay that holds it. So one `step` is one scan; one action in 250 differs.
- rbar is the mean over transitions. The code's replay has one slot more for each episode, of zero reward, which
  the mean counts.
- A slot enters the replay's distribution with the largest priority at that time, up to max(`encoder_horizon`, `n_step`)
  steps after it was stored; the code takes the largest at the time it was stored. One array less.
- Of a slot drawn twice in a batch the larger priority stays; the code leaves it to the order of writes.
- Random actions before learning are stored as they are; the code stores a discrete one as its number in every entry.
- 10x10 MinAtar pixels go through MinAtar's 3x3 convolution and one normalised layer, without random shifts: the
  paper has no such task.
- Rewards beyond the outer bins, +-(exp(`reward_range`) - 1), count as the outer bin; the code stops with an error.
- `truncated_tails` (off, as in the code) also samples the end of episodes that a time limit cut. A window is dead after
  a truncation too, and the return bootstraps there. For short episodes, of which the code learns nothing.
- `greedy` (off, as in the code) evaluates the likeliest discrete action. The authors draw from the policy.
- AdamW decays value and policy too, as the code does; the paper's table names the encoder alone.

One `step` is one period: `target_period` updates of the encoder, then `target_period` x `train_period` env steps with
`target_period` updates of value and policy.
"""

from typing import Annotated, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from envs.types import (
    Count,
    Example,
    Fraction,
    Interval,
    NonNegative,
    Positive,
    Spec,
    example_transition,
    pytree,
    static,
    zeros,
)
from networks import ensemble
from networks.augment import random_shift
from networks.conv import MinAtarTorso, StridedTorso
from networks.dense import dot_general
from networks.mlp import MLP
from networks.norm import elu
from replay import prioritised, ring

ACTIONS = ("continuous", "discrete")
DISCRETE_NOISE = 0.5  # one-hot actions span [0, 1], half of [-1, 1]: all noise is halved, as published
LogRange = Annotated[float, Interval(0, 88, True)]  # exp(88) is about the largest float32


@pytree
class Config:
    # Traced: may differ between the runs of one vmapped sweep.
    encoder_learning_rate: Positive = 1e-4  # AdamW's; published 1e-4
    value_learning_rate: Positive = 3e-4  # AdamW's; published 3e-4
    policy_learning_rate: Positive = 3e-4  # AdamW's; published 3e-4
    weight_decay: NonNegative = 1e-4  # AdamW's, of all three; published 1e-4
    gamma: Fraction = 0.99  # discount per env step; published 0.99
    dynamics_weight: NonNegative = 1.0  # of the encoder's loss; published 1
    reward_weight: NonNegative = 0.1  # of the encoder's loss; published 0.1
    termination_weight: NonNegative = 0.1  # of the encoder's loss; published 0.1
    reward_range: LogRange = 10.0  # the bins end at +-(exp(reward_range) - 1); published 10
    exploration_noise: NonNegative = 0.2  # std added to actions, halved where discrete; published 0.2
    target_noise: NonNegative = 0.2  # std added to target actions, halved where discrete; published 0.2
    target_noise_clip: NonNegative = 0.3  # bound of that noise, halved where discrete; published 0.3
    temperature: Positive = 10.0  # of the Gumbel-softmax; published 10
    preactivation_weight: NonNegative = 1e-5  # of the policy's loss; published 1e-5
    max_grad_norm: Positive = 20.0  # global norm over both values; published 20
    priority_exponent: NonNegative = 0.4  # of |TD error|; published 0.4
    min_priority: Positive = 1.0  # below which |TD error| does not count, in units of rbar; published 1
    # Static: shape the program.
    zs_size: Count = static(default=512)  # width of z_s; published 512
    za_size: Count = static(default=256)  # width of the embedded action; published 256
    zsa_size: Count = static(default=512)  # width of z_sa; published 512
    hidden_size: Count = static(default=512)  # width of every hidden layer; published 512
    num_bins: Count = static(default=65)  # of the reward; published 65
    encoder_horizon: Count = static(default=5)  # env steps of an unroll; published 5
    n_step: Count = static(default=3)  # env steps in a return; published 3
    target_period: Count = static(default=250)  # updates between copies of the targets; published 250
    train_period: Count = static(default=1)  # env steps per update; published 1
    batch_size: Count = static(default=256)  # windows; published 256
    capacity: Count = static(default=1_000_000)  # transitions over all envs; published 1e6
    prefill: Count = static(default=10_000)  # env steps by a uniform policy; published 10k
    truncated_tails: bool = static(default=False)  # sample the last steps of truncated episodes; published False
    greedy: bool = static(default=False)  # evaluate the likeliest action (discrete); published False


class Params(NamedTuple):
    encoder: dict  # w
    policy: dict  # pi
    value: dict  # Q_1, Q_2: leading axis 2
    reward_scale: jax.Array  # () rbar, mean |reward|: values are returns in units of it


class OptState(NamedTuple):
    encoder: tuple
    policy: tuple
    value: tuple


class State(NamedTuple):
    params: Params
    target_params: Params  # as params were at the last sync
    opt_state: OptState
    replay: prioritised.Replay
    env_state: object
    terminates: jax.Array  # () bool, whether a termination was ever stored
    nonfinite_reward: jax.Array  # () int32, env step of the first reward that is not a finite number; -1 before
    env_steps: jax.Array  # () int32, over all envs, prefill included
    gradient_steps: jax.Array  # () int32, updates of the value
    key: jax.Array


# Xavier's uniform initialisation with the gain of a ReLU, sqrt(2); biases are zero.
kernel_init = nn.initializers.variance_scaling(2.0, "fan_avg", "uniform")
layer = dict(kernel_init=kernel_init, dot_general=dot_general)
norm_mlp = lambda *sizes, **options: MLP(sizes, normalize=True, **layer, **options)


class Encoder(nn.Module):
    """f, g and the linear model m. Embeds observations, and pairs of an embedding and an action."""

    obs: jax.ShapeDtypeStruct
    zs_size: int
    za_size: int
    zsa_size: int
    hidden_size: int
    num_bins: int

    def setup(self):
        hidden, top = self.hidden_size, dict(activation=elu, activate_final=True)
        match self.obs.shape:
            case (84, 84, _):
                self.torso, self.zs = StridedTorso(kernel_init=kernel_init), norm_mlp(self.zs_size, **top)
            case (10, 10, _):
                self.torso, self.zs = MinAtarTorso((), kernel_init), norm_mlp(self.zs_size, **top)
            case _:
                self.torso = lambda obs: obs.astype(jnp.float32).reshape(*obs.shape[: obs.ndim - self.obs.ndim], -1)
                self.zs = norm_mlp(hidden, hidden, self.zs_size, **top)
        self.za = nn.Dense(self.za_size, **layer)
        self.zsa = norm_mlp(hidden, hidden, self.zsa_size, activation=elu)
        self.model = nn.Dense(1 + self.zs_size + self.num_bins, **layer)

    def embed_obs(self, obs):
        """f: `(..., *obs_shape)` to z_s `(..., zs_size)`."""
        return self.zs(self.torso(obs))

    def embed_action(self, action):
        """The embedded action, `(..., za_size)`; `action` is `(..., D)` in [-1, 1] or one-hot `(..., A)`."""
        return elu(self.za(action))

    def embed_pair(self, zs, za):
        """g: z_sa of an embedding and an embedded action, `(..., zsa_size)`."""
        return self.zsa(jnp.concatenate([zs, za], -1))

    def predict(self, zsa):
        """m: termination `(...,)`, next z_s `(..., zs_size)` and reward logits `(..., num_bins)`."""
        out = self.model(zsa)
        return out[..., 0], out[..., 1 : 1 + self.zs_size], out[..., 1 + self.zs_size :]

    def __call__(self, obs, action):
        return self.predict(self.embed_pair(self.embed_obs(obs), self.embed_action(action)))


class Nets(NamedTuple):
    encoder: Encoder
    policy: nn.Module  # z_s to z_pi, the policy before its last activation
    value: nn.Module  # z_sa to one number


def networks(config, spec: Spec) -> Nets:
    encoder = Encoder(spec.obs, config.zs_size, config.za_size, config.zsa_size, config.hidden_size, config.num_bins)
    hidden = config.hidden_size
    policy = norm_mlp(hidden, hidden, spec.num_actions or spec.action_size, activation=nn.relu)
    return Nets(encoder, policy, norm_mlp(hidden, hidden, hidden, 1, activation=elu))


def embed_state(nets, encoder_params, obs):
    """z_s of a batch of observations."""
    return nets.encoder.apply(encoder_params, obs, method="embed_obs")


def embed_pair(nets, encoder_params, zs, action):
    """z_sa of embedded states and actions (one-hot where discrete)."""
    za = nets.encoder.apply(encoder_params, action, method="embed_action")
    return nets.encoder.apply(encoder_params, zs, za, method="embed_pair")


def twin_values(nets, value_params, zsa):
    """Q_1 and Q_2, in units of rbar: `(B, zsa_size)` to `(2, B)`."""
    return ensemble.apply(nets.value, value_params, zsa)[..., 0]


def q_values(config, spec, params: Params, obs):
    """Both values of every discrete action as returns, `(2, B, A)`. For inspection: nothing here is trained on it."""
    nets = networks(config, spec)
    zs = embed_state(nets, params.encoder, obs)
    one = lambda action: twin_values(nets, params.value, embed_pair(nets, params.encoder, zs, action))
    actions = jnp.eye(spec.num_actions)[:, None] + jnp.zeros((1, zs.shape[0], 1))  # (A, B, A)
    return params.reward_scale * jnp.moveaxis(jax.vmap(one)(actions), 0, -1)


def symexp_bins(num_bins, reward_range):
    """Bins b_i = sign(x_i) (exp|x_i| - 1), x_i evenly spaced in [-reward_range, reward_range]. `(num_bins,)`."""
    x = jnp.linspace(-1.0, 1.0, num_bins) * reward_range
    return jnp.sign(x) * (jnp.exp(jnp.abs(x)) - 1)


def two_hot(x, bins):
    """Weights `(..., num_bins)` of the two bins around x, linear in x, so that their mean is x clipped to the bins."""
    bins = bins.reshape(*[1] * x.ndim, bins.size)
    x = jnp.clip(x[..., None], bins[..., :1], bins[..., -1:])
    gap, one = jnp.diff(bins), jnp.ones_like(x)
    rise = jnp.concatenate([one, (x - bins[..., :-1]) / gap], -1)  # 1 at the bin, 0 at the bin below
    fall = jnp.concatenate([(bins[..., 1:] - x) / gap, one], -1)  # 1 at the bin, 0 at the bin above
    return jnp.clip(jnp.minimum(rise, fall), 0.0, 1.0)


def cross_entropy(logits, target):
    """Of probabilities `target`, both `(..., num_bins)`. `(...,)`."""
    return -(target * jax.nn.log_softmax(logits)).sum(-1)


def alive_mask(ended):
    """1 up to and including the step that ends the episode, 0 after it: `(B, T)` bool to `(B, T)` float32."""
    before = jnp.cumsum(ended, 1) - ended
    return (before == 0).astype(jnp.float32)


def encoder_losses(zs, target_zs, logits, target_reward, termination, terminated, alive):
    """Dynamics, reward and termination loss, each summed over time and averaged over the batch.

    Args: zs, target_zs `(B, T, zs_size)`; logits, target_reward (two-hot) `(B, T, num_bins)`;
        termination `(B, T)`, predicted; terminated `(B, T)` bool; alive `(B, T)`, 0 for steps that do not count.
    Returns: three () float32.
    """
    over_time = lambda error: (alive * error).mean(0).sum()
    return (
        over_time(jnp.square(zs - target_zs).mean(-1)),
        over_time(cross_entropy(logits, target_reward)),
        over_time(jnp.square(termination - terminated)),
    )


def unroll(nets, encoder_params, zs, action):
    """The model's predictions for a sequence of actions `(B, T, A or D)` from embeddings `zs` `(B, zs_size)`.

    Returns: termination `(B, T)`, z_s `(B, T, zs_size)` and reward logits `(B, T, num_bins)`.
    """
    za = nets.encoder.apply(encoder_params, action, method="embed_action")  # (B, T, za_size)
    predictions = []
    for t in range(action.shape[1]):
        zsa = nets.encoder.apply(encoder_params, zs, za[:, t], method="embed_pair")
        termination, zs, logits = nets.encoder.apply(encoder_params, zsa, method="predict")
        predictions.append((termination, zs, logits))
    return jax.tree.map(lambda *x: jnp.stack(x, 1), *predictions)


def value_target(reward, discount, next_q, reward_scale, target_reward_scale):
    """y in units of rbar: (R + discount rbar' min_i Q'_i) / rbar.

    Args: reward, discount `(B,)`, the n-step sum and gamma^n (1 - terminated); next_q `(2, B)`, in units of rbar'.
    """
    return (reward + discount * target_reward_scale * next_q.min(0)) / reward_scale


def activate(spec, z, temperature, key):
    """The policy's action from z_pi: tanh, or where discrete a Gumbel-softmax sample, a point of the simplex.

    Its argmax is distributed as softmax(z) (the Gumbel-max trick). `(B, D)` or `(B, A)`.
    """
    if spec.action_type == "continuous":
        return jnp.tanh(z)
    return jax.nn.softmax((z + jax.random.gumbel(key, z.shape)) / temperature)


def perturb(spec, action, key, std, bound=jnp.inf):
    """Adds Gaussian noise clipped to +-bound; then clips to [-1, 1], or where discrete takes the argmax, one-hot."""
    factor = 1.0 if spec.action_type == "continuous" else DISCRETE_NOISE
    noisy = action + jnp.clip(factor * std * jax.random.normal(key, action.shape), -factor * bound, factor * bound)
    if spec.action_type == "continuous":
        return jnp.clip(noisy, -1.0, 1.0)
    return jax.nn.one_hot(noisy.argmax(-1), spec.num_actions)


def as_vector(spec, action):
    """Actions as networks read them: `(..., D)` as they are, or one-hot `(..., A)`."""
    return action if spec.action_type == "continuous" else jax.nn.one_hot(action, spec.num_actions)


def as_action(spec, vector):
    """Actions as the environment takes them: `(B, D)`, or `(B,)` int32. Undoes `as_vector`."""
    return vector if spec.action_type == "continuous" else vector.argmax(-1).astype(jnp.int32)


def augment(spec, pixels, key):
    """Random shifts of 84x84 pixels `(B, ..., 84, 84, C)`, each image its own; any other observation as it is."""
    if len(spec.obs.shape) != 3 or spec.obs.shape[:2] != (84, 84):
        return pixels
    return random_shift(key, pixels.reshape(-1, *spec.obs.shape)).reshape(pixels.shape)


def mean_abs_reward(replay: prioritised.Replay):
    """rbar: mean |reward| over the stored transitions, at least 1e-8. () float32."""
    count = replay.ring.stored * replay.ring.num_envs
    return jnp.maximum(jnp.abs(replay.data.reward).sum() / count, 1e-8)  # empty slots hold zeros


def encoder_loss(config, spec, encoder_params, target_encoder, window, terminates):
    """L_enc of a batch of windows, leaves `(B, encoder_horizon, ...)`; of `obs` the first step is read.

    Returns: the loss, and its three parts unweighted.
    """
    nets = networks(config, spec)
    bins = symexp_bins(config.num_bins, config.reward_range)
    zs = embed_state(nets, encoder_params, window.obs[:, 0])
    termination, zs, logits = unroll(nets, encoder_params, zs, as_vector(spec, window.action))
    target_zs = jax.lax.stop_gradient(embed_state(nets, target_encoder, window.next_obs))
    alive = alive_mask(window.terminated | window.truncated)  # truncated ones come with `truncated_tails` only
    dynamics_loss, reward_loss, termination_loss = encoder_losses(
        zs, target_zs, logits, two_hot(window.reward, bins), termination, window.terminated, alive
    )
    gate = config.termination_weight * terminates
    loss = config.dynamics_weight * dynamics_loss + config.reward_weight * reward_loss + gate * termination_loss
    return loss, dict(dynamics_loss=dynamics_loss, reward_loss=reward_loss, termination_loss=termination_loss)


def value_loss(nets, value_params, zsa, target):
    """L_Q, and both values `(2, B)`; `target` is y, `(B,)`."""
    q = twin_values(nets, value_params, zsa)
    return optax.huber_loss(q, jnp.broadcast_to(target[None], q.shape)).mean(), q


def policy_loss(config, spec, params: Params, policy_params, zs, key):
    """L_pi on embedded states `(B, zs_size)`, through the encoder's g and the value, neither of which it trains."""
    nets = networks(config, spec)
    z = nets.policy.apply(policy_params, zs)
    action = activate(spec, z, config.temperature, key)
    q = twin_values(nets, params.value, embed_pair(nets, params.encoder, zs, action))
    return -q.mean() + config.preactivation_weight * jnp.square(z).mean()


def optimizers(config) -> OptState:
    """AdamW for each of the three networks; the value's gradient is clipped first."""
    adamw = lambda learning_rate: optax.adamw(learning_rate, weight_decay=config.weight_decay)
    clipped = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw(config.value_learning_rate))
    return OptState(adamw(config.encoder_learning_rate), adamw(config.policy_learning_rate), clipped)


class Collected(NamedTuple):
    """The part of the state that acting changes."""

    env_state: object
    replay: prioritised.Replay
    terminates: jax.Array
    nonfinite_reward: jax.Array
    env_steps: jax.Array


def store(env, collected: Collected, action, key):
    """Steps every environment and inserts the transitions."""
    env_state, transition, finished = env.step(key, collected.env_state, action)
    env_steps = collected.env_steps + env.num_envs
    bad = (collected.nonfinite_reward < 0) & ~jnp.isfinite(transition.reward).all()
    collected = Collected(
        env_state,
        prioritised.insert(collected.replay, transition),
        collected.terminates | transition.terminated.any(),
        jnp.where(bad, env_steps, collected.nonfinite_reward),
        env_steps,
    )
    return collected, finished


def period(config, env) -> int:
    """Env steps that one `step` makes."""
    return config.target_period * config.train_period


def horizon(config) -> int:
    """Env steps of the windows that the replay holds."""
    return max(config.encoder_horizon, config.n_step)


def check(config, env):
    """What `init` needs beyond the ranges in Config. Raises ValueError."""
    prioritised.check(config.capacity, env.num_envs, horizon(config))
    small, large = sorted((env.num_envs, config.train_period))
    if large % small:
        raise ValueError(
            f"train_period {config.train_period} and num_envs {env.num_envs}: one must be a multiple of the other"
        )
    if period(config, env) % large:
        raise ValueError(
            f"target_period {config.target_period} x train_period {config.train_period} env steps must be a multiple "
            f"of num_envs {env.num_envs}; choose a num_envs that divides {period(config, env)}"
        )
    if config.prefill % env.num_envs:
        raise ValueError(f"prefill {config.prefill} must be a multiple of num_envs {env.num_envs}")
    rows = min(config.prefill, config.capacity) // env.num_envs
    if rows <= horizon(config):
        raise ValueError(
            f"prefill {config.prefill} gives each of {env.num_envs} environments {rows} steps; windows of horizon "
            f"{horizon(config)} need at least {horizon(config) + 1}: raise prefill to "
            f"{(horizon(config) + 1) * env.num_envs}"
        )
    if config.prefill % period(config, env):
        raise ValueError(
            f"prefill {config.prefill} must be a multiple of the {period(config, env)} env steps of one step, "
            f"target_period {config.target_period} x train_period {config.train_period}"
        )
    limit = env.spec.max_episode_steps
    least = 2 * horizon(config) + 1  # rows: the last of a truncated episode and the first of the next cannot be drawn
    if limit and not config.truncated_tails and config.capacity // env.num_envs < least:
        raise ValueError(
            f"capacity {config.capacity} holds {config.capacity // env.num_envs} steps of each of {env.num_envs} "
            f"environments; after a truncation windows of horizon {horizon(config)} need {least}: raise capacity to "
            f"{least * env.num_envs}, or set truncated_tails"
        )
    if 0 < limit <= horizon(config) and not config.truncated_tails:
        raise ValueError(
            f"episodes of at most {limit} env steps hold no window of horizon {horizon(config)}: "
            "set truncated_tails, or shorten encoder_horizon and n_step"
        )
    if config.num_bins < 2:
        raise ValueError(f"num_bins {config.num_bins} must be at least 2")
    if not hasattr(env.spec.obs, "shape"):
        raise ValueError("mrq needs one array as its observation; this environment's is structured")


def init(config, env, key) -> State:
    key, encoder_key, policy_key, value_key, reset_key, prefill_key = jax.random.split(key, 6)

    # Networks; the targets start as copies.
    nets = networks(config, env.spec)
    obs, action = zeros(env.spec.obs), as_vector(env.spec, zeros(env.spec.action))
    params = Params(
        encoder=nets.encoder.init(encoder_key, obs, action),
        policy=nets.policy.init(policy_key, jnp.zeros(config.zs_size)),
        value=ensemble.init(nets.value, value_key, 2, jnp.zeros(config.zsa_size)),
        reward_scale=jnp.float32(1),
    )
    optimizer = optimizers(config)
    opt_state = OptState(*(o.init(p) for o, p in zip(optimizer, params[:3], strict=True)))

    # Replay, prefilled by a uniform policy.
    replay = prioritised.create(
        config.capacity, env.num_envs, example_transition(env.spec), horizon(config), config.truncated_tails
    )

    def collect(collected, key):
        action_key, env_key = jax.random.split(key)
        shape = (env.num_envs, *env.spec.action.shape)
        if env.spec.action_type == "continuous":
            action = jax.random.uniform(action_key, shape, minval=-1.0, maxval=1.0)
        else:
            action = jax.random.randint(action_key, shape, 0, env.spec.num_actions)
        return store(env, collected, action, env_key)[0], None

    collected = Collected(env.reset(reset_key), replay, jnp.bool_(False), jnp.int32(-1), jnp.int32(0))
    collected, _ = jax.lax.scan(collect, collected, jax.random.split(prefill_key, config.prefill // env.num_envs))
    return State(params, params, opt_state, key=key, gradient_steps=jnp.int32(0), **collected._asdict())


def act(config, spec, params: Params, obs, key):
    """The policy without exploration noise: tanh of z_pi, or a draw from softmax(z_pi); its argmax where `greedy`."""
    nets = networks(config, spec)
    z = nets.policy.apply(params.policy, embed_state(nets, params.encoder, obs))
    if config.greedy and spec.action_type == "discrete":
        return as_action(spec, z)
    return as_action(spec, activate(spec, z, config.temperature, key))


def explore(config, spec, params: Params, obs, key):
    """The policy with exploration noise, as the environment takes it."""
    activate_key, noise_key = jax.random.split(key)
    nets = networks(config, spec)
    z = nets.policy.apply(params.policy, embed_state(nets, params.encoder, obs))
    action = activate(spec, z, config.temperature, activate_key)
    return as_action(spec, perturb(spec, action, noise_key, config.exploration_noise))


def update_encoder(config, spec, params: Params, target_params: Params, opt_state, window, terminates):
    """One gradient step on L_enc. Returns the new encoder, its optimiser's state and the losses."""
    loss_fn = lambda p: encoder_loss(config, spec, p, target_params.encoder, window, terminates)
    grads, losses = jax.grad(loss_fn, has_aux=True)(params.encoder)
    updates, opt_state = optimizers(config).encoder.update(grads, opt_state, params.encoder)
    return optax.apply_updates(params.encoder, updates), opt_state, losses


def update_value_and_policy(config, spec, params: Params, target_params: Params, opt_state, batch, discount, key):
    """One gradient step on L_Q, then one on L_pi. `batch` holds n-step transitions, `discount` their gamma^n or 0.

    Returns: params, optimiser states, max_i |Q_i - y| `(B,)` before the step, and metrics.
    """
    target_key, noise_key, policy_key = jax.random.split(key, 3)
    nets, optimizer = networks(config, spec), optimizers(config)

    # Value.
    next_zs = embed_state(nets, target_params.encoder, batch.next_obs)
    next_action = activate(spec, nets.policy.apply(target_params.policy, next_zs), config.temperature, target_key)
    next_action = perturb(spec, next_action, noise_key, config.target_noise, config.target_noise_clip)
    next_q = twin_values(nets, target_params.value, embed_pair(nets, target_params.encoder, next_zs, next_action))
    target = value_target(batch.reward, discount, next_q, params.reward_scale, target_params.reward_scale)

    zs = embed_state(nets, params.encoder, batch.obs)
    zsa = embed_pair(nets, params.encoder, zs, as_vector(spec, batch.action))
    loss_fn = lambda p: value_loss(nets, p, zsa, target)
    (loss, q), grads = jax.value_and_grad(loss_fn, has_aux=True)(params.value)
    updates, value_opt_state = optimizer.value.update(grads, opt_state.value, params.value)
    params = params._replace(value=optax.apply_updates(params.value, updates))

    # Policy, against the value just updated.
    loss_fn = lambda p: policy_loss(config, spec, params, p, zs, policy_key)
    pi_loss, grads = jax.value_and_grad(loss_fn)(params.policy)
    updates, policy_opt_state = optimizer.policy.update(grads, opt_state.policy, params.policy)
    params = params._replace(policy=optax.apply_updates(params.policy, updates))

    opt_state = opt_state._replace(value=value_opt_state, policy=policy_opt_state)
    metrics = dict(loss=loss, policy_loss=pi_loss, q_mean=params.reward_scale * q.mean())
    return params, opt_state, jnp.abs(q - target[None]).max(0), metrics


def step(config, env, state: State) -> tuple[State, dict]:
    key, encode_key, learn_key = jax.random.split(state.key, 3)
    spec = env.spec

    # Sync: the targets are what was learned so far, rbar' among them.
    target_params = state.params
    params = state.params._replace(reward_scale=mean_abs_reward(state.replay))

    # The encoder: all of the period's updates in a row.
    def encode(carry, key):
        params, opt_state = carry
        sample_key, obs_key, next_obs_key = jax.random.split(key, 3)
        slot = prioritised.sample(state.replay, sample_key, config.batch_size)
        window = prioritised.windows(state.replay, slot, config.encoder_horizon)
        window = window._replace(
            obs=augment(spec, window.obs[:, :1], obs_key),  # the others are not read
            next_obs=augment(spec, window.next_obs, next_obs_key),
        )
        encoder, encoder_opt_state, losses = update_encoder(
            config, spec, params, target_params, opt_state.encoder, window, state.terminates
        )
        outside = jnp.abs(window.reward) > jnp.expm1(config.reward_range)
        metrics = dict(losses, clipped_rewards=outside.mean())
        return (params._replace(encoder=encoder), opt_state._replace(encoder=encoder_opt_state)), metrics

    (params, opt_state), encoder_metrics = jax.lax.scan(
        encode, (params, state.opt_state), jax.random.split(encode_key, config.target_period)
    )

    # Act and store, then learn: one update of value and policy for every `train_period` env steps.
    def iterate(carry, key):
        params, opt_state, collected = carry
        act_key, update_key = jax.random.split(key)

        def act_and_store(collected, key):
            act_key, env_key = jax.random.split(key)
            action = explore(config, spec, params, collected.env_state.obs, act_key)
            return store(env, collected, action, env_key)

        collected, finished = jax.lax.scan(act_and_store, collected, jax.random.split(act_key, vector_steps))

        def learn(carry, key):
            params, opt_state, replay = carry
            sample_key, obs_key, next_obs_key, update_key = jax.random.split(key, 4)
            slot = prioritised.sample(replay, sample_key, config.batch_size)
            window = prioritised.windows(replay, slot, config.n_step)
            batch, discount = ring.n_step(window, config.gamma)
            batch = batch._replace(
                obs=augment(spec, batch.obs, obs_key), next_obs=augment(spec, batch.next_obs, next_obs_key)
            )
            params, opt_state, td_error, metrics = update_value_and_policy(
                config, spec, params, target_params, opt_state, batch, discount, update_key
            )
            priority = prioritised.lap_priority(td_error, config.priority_exponent, config.min_priority)
            return (params, opt_state, prioritised.update(replay, slot, priority)), metrics

        carry = (params, opt_state, collected.replay)
        (params, opt_state, replay), metrics = jax.lax.scan(learn, carry, jax.random.split(update_key, updates))
        return (params, opt_state, collected._replace(replay=replay)), (finished, metrics)

    env_steps = max(env.num_envs, config.train_period)  # of one iteration
    vector_steps, updates = env_steps // env.num_envs, env_steps // config.train_period
    iterations = period(config, env) // env_steps
    collected = Collected(*(getattr(state, name) for name in Collected._fields))
    (params, opt_state, collected), (finished, metrics) = jax.lax.scan(
        iterate, (params, opt_state, collected), jax.random.split(learn_key, iterations)
    )

    gradient_steps = state.gradient_steps + config.target_period
    state = State(params, target_params, opt_state, gradient_steps=gradient_steps, key=key, **collected._asdict())
    return state, dict(metrics, **encoder_metrics, reward_scale=params.reward_scale, **finished)


# `--preset small`: for laptops, 15 times fewer parameters.
PRESETS = {"small": dict(zs_size=128, za_size=128, zsa_size=128, hidden_size=128)}

EXAMPLE = Example(
    source="Pendulum-v1",
    steps=15_000,
    eval_period=500,
    num_envs=1,
    seeds=(0, 1),
    config=Config(**PRESETS["small"]),
)
