"""The config section `objective`: the loss to minimise, and the names that its fields accept."""

from dataclasses import dataclass
from typing import Annotated, Literal

from solera.config.fields import short

AdvantageName = Literal["mean", "whiten", "whiten_bessel", "leave_one_out", "logavgexp", "shifted", "raw"]
AggregationName = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length", "group_sum"]
ClipName = Literal["none", "one_side", "two_side", "ring"]
WeightName = Literal["none", "importance", "exp_advantage"]
RegulariserName = Literal["none", "forward_kl", "k2_token", "k2_sequence"]
CreditName = Literal["rollout", "turn"]
DropName = Literal["none", "random", "worst"]
KLName = Literal["k1", "k2", "k3"]
KLWeight = Literal["importance", "none"]
ClipCentre = Literal["one", "proximal"]
ClipLevel = Literal["token", "sequence"]


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss to minimise. An unset field takes the objective's own value; setting a field that the objective does not
    use is an error. `solera algorithms` lists the objectives; `solera algorithms NAME` shows one and all its fields."""

    name: Annotated[str, short("objective", "name")] = "rec_oneside_nois_wide"
    """The objective. `solera algorithms` lists all names."""
    advantage: AdvantageName | None = None
    """How a reward becomes an advantage. `mean` subtracts the group's mean reward. `whiten` also divides by the group's
    standard deviation (`whiten_bessel` computes it with G−1). `leave_one_out` subtracts the mean of the other responses
    of the group. `logavgexp` and `shifted` subtract other baselines. `raw` uses the reward itself."""
    credit: CreditName | None = None
    """What has an advantage in an episode of several turns. `rollout`: the whole episode, from its total reward.
    `turn`: each turn, from the rewards of this turn and later ones, compared with the same turn of the group's other
    members."""
    aggregation: AggregationName | None = None
    """How token losses are combined. `token_mean`: mean over all tokens. `sequence_mean`: mean over responses of each
    response's token mean. `sequence_sum`: mean over responses of each response's token sum. `fixed_length`: like
    `sequence_sum`, divided by `sampling.max_tokens`. `group_sum`: mean over groups of each group's sum."""
    zero_variance_mask: bool | None = None
    """Skip groups whose rewards are all equal. They are removed before any forward pass."""
    refill: bool | None = None
    """Draw more groups to replace those that `zero_variance_mask` removed."""
    drop: DropName | None = None
    """RED-Drop: if a group has more negative than positive responses, leave out the surplus, either `random` ones or
    the `worst`."""
    keep_denominator: bool | None = None
    """Still count dropped responses in the denominator of the loss."""
    clip: ClipName | None = None
    """Which tokens keep their gradient, judged by their ratio. `one_side`: until the ratio passes the edge that the
    advantage pushes it towards. `two_side`: while the ratio is between both edges. `ring`: like `two_side`, and also
    far outside the edges if the update pulls the ratio back."""
    weight: WeightName | None = None
    """Factor of each token's loss: its ratio (`importance`), or exp(A/T) (`exp_advantage`)."""
    epsilon: float | None = None
    """Half-width of the clip range around its centre."""
    epsilon_low: float | None = None
    """Lower edge of the clip range: 1 − this."""
    epsilon_high: float | None = None
    """Upper edge of the clip range: 1 + this."""
    dual_clip: float | None = None
    """Limit on large ratios: a token with a negative advantage and a ratio above this gets no gradient (dual-clip PPO;
    TRL's `delta`). Must be above 1. Unset means no limit; verl and Trinity-RFT use 3."""
    ring_low: float | None = None
    """Ring clip: a token with a positive advantage counts again if its ratio is below 1 − this."""
    ring_high: float | None = None
    """Ring clip: a token with a negative advantage counts again if its ratio is above 1 + this."""
    centre: ClipCentre | None = None
    """Centre of the clip range. `one` is 1, as in `grpo`. `proximal` is π_k/α: the ratio at the start of the batch,
    with π_k the policy before the batch and α the policy that wrote the token. It limits how far one batch moves the
    policy, regardless of the age of the data."""
    level: ClipLevel | None = None
    """Compute ratios per `token` or for the whole response (`sequence`)."""
    weight_temperature: float | None = None
    """Temperature T of the weight exp(A/T)."""
    adaptive_temperature: bool | None = None
    """Choose T for each minibatch so that positive and negative advantages balance."""
    weight_low: float | None = None
    """Ignore tokens whose importance weight π_k/α is below this. π_k is the policy before the batch, α the policy that
    wrote the token."""
    weight_high: float | None = None
    """Upper limit of the importance weight π_k/α: `tis` clips larger weights to it, `mis` ignores those tokens."""
    cap: float | None = None
    """Upper limit of the ratio that weights a token."""
    second_moment: float | None = None
    """Upper limit of the mean of (log ρ)² over the tokens that the update pushes further from the policy that wrote
    them. The tokens with the largest (log ρ)² are masked until the mean is below it."""
    tolerance: float | None = None
    """Mask a token if the update pushes it further from the policy that wrote it and its probability already differs
    by more than this."""
    tau: float | None = None
    """Temperature of mirror descent. A smaller value lets the policy move further from the reference policy."""
    tau_positive: float | None = None
    """Steepness of the soft gate for positive advantages."""
    tau_negative: float | None = None
    """Steepness of the soft gate for negative advantages."""
    threshold: float | None = None
    """Imitate responses with at least this reward."""
    delta: float | None = None
    """Shift of the baseline for `advantage = "shifted"`. Below 0 the update leans towards imitation."""
    whiten_epsilon: float | None = None
    """Added to the variance of a group's rewards for `advantage = "whiten"`. Keep it far below that variance: its
    square root is a floor on the standard deviation, and rewards that differ by less get small advantages."""
    advantage_tau: float | None = None
    """Temperature for `advantage = "logavgexp"`."""
    regulariser: RegulariserName | None = None
    """Penalty that pulls the policy towards the policy that wrote the data: `forward_kl` is −ℓ, `k2_token` is (ℓ−b)²,
    `k2_sequence` is ½(Σ(ℓ−b))². ℓ is the log-probability of a token under the current policy, b under the policy that
    wrote it."""
    regulariser_weight: float | None = None
    """Weight of the regulariser."""
    beta: float | None = None
    """Weight of the KL divergence from the reference policy. 0 disables it, and no reference is loaded."""
    kl: KLName | None = None
    """Estimator of the KL divergence from the reference policy."""
    kl_weight: KLWeight | None = None
    """`importance` corrects the KL estimate for responses that another policy wrote. `none` does not, as in older GRPO
    code."""
    ref_period: int | None = None
    """Batches after which the current policy becomes the new reference policy. Unset keeps the first one."""
    ref_ema: float | None = None
    """Share of the current policy to mix into the reference policy after every batch. Unset keeps the first one."""
    entropy_bonus: float | None = None
    """Weight of the policy's entropy, which is subtracted from the loss."""
    unknown_behaviour: Literal["refuse", "proximal"] | None = None
    """What to do with responses that have no recorded log-probabilities: `refuse` them, or use those of the policy
    before the batch (`proximal`)."""
