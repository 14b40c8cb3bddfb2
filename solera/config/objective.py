"""The room `objective`: what is minimised, and the names that its fields may take."""

from dataclasses import dataclass
from typing import Annotated, Literal

from solera.config.fields import short

AdvantageName = Literal["mean", "whiten", "whiten_bessel", "leave_one_out", "logavgexp", "shifted", "raw"]
AggregationName = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length", "group_sum"]
ClipName = Literal["none", "one_side", "two_side", "ring"]
WeightName = Literal["none", "importance", "exp_advantage"]
RegulariserName = Literal["none", "forward_kl", "k2_token", "k2_sequence"]
DropName = Literal["none", "random", "worst"]
KLName = Literal["k1", "k2", "k3"]
KLWeight = Literal["importance", "none"]
ClipCentre = Literal["one", "proximal"]
ClipLevel = Literal["token", "sequence"]


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised. A field left unset takes the objective's own value; a field that the objective does not use is
    refused. `solera algorithms` lists the objectives, `solera algorithms NAME` shows one with all its fields."""

    name: Annotated[str, short("objective", "name")] = "rec_oneside_nois_wide"
    """One of the names that `solera algorithms` lists."""
    advantage: AdvantageName | None = None
    """`mean`: reward minus the group's mean; `whiten`: that, divided by the group's standard deviation
    (`whiten_bessel`: over G−1); `leave_one_out`: minus the mean of the others; `logavgexp`, `shifted`: minus another
    baseline; `raw`: the reward."""
    aggregation: AggregationName | None = None
    """`token_mean`: all tokens count alike; `sequence_mean`: all responses count alike; `sequence_sum`: mean over
    responses of their sums; `fixed_length`: that, divided by the response limit; `group_sum`: mean over groups of their
    sums."""
    zero_variance_mask: bool | None = None
    """Leave out groups whose rewards are all equal, before any forward pass."""
    refill: bool | None = None
    """Draw further groups in place of masked ones."""
    drop: DropName | None = None
    """RED-Drop: where negatives outnumber positives in a group, leave out as many, `random` ones or the `worst`."""
    keep_denominator: bool | None = None
    """Dropped responses keep their place in the loss's denominator."""
    clip: ClipName | None = None
    """Which tokens count by their ratio: up to the edge their advantage drives them to (`one_side`), within both edges
    (`two_side`), or there and far outside where they are pulled back (`ring`)."""
    weight: WeightName | None = None
    """What a token is multiplied with: its ratio (`importance`), or exp(A/T) (`exp_advantage`)."""
    epsilon: float | None = None
    """Half-width of the clip band around its centre."""
    epsilon_low: float | None = None
    """Lower clip: at ratios below 1 − this."""
    epsilon_high: float | None = None
    """Upper clip: at ratios above 1 + this."""
    dual_clip: float | None = None
    """Bound on large ratios: where the advantage is negative, a token with a ratio above this has no gradient
    (dual-clip PPO; TRL's `delta`). Above 1. Unset means no such bound; verl and Trinity-RFT use 3."""
    ring_low: float | None = None
    """Ring clip: below 1 − this a token counts again where its advantage is positive."""
    ring_high: float | None = None
    """Ring clip: above 1 + this a token counts again where its advantage is negative."""
    centre: ClipCentre | None = None
    """Centre ρ' of the clip band: `one` (1, as in `grpo`), or `proximal`, the ratio that the batch began with (π_k/α).
    `proximal` bounds how far this batch moves the policy, however old the data is."""
    level: ClipLevel | None = None
    """Whether ratios are of each token or of the whole response."""
    weight_temperature: float | None = None
    """T of the weight exp(A/T)."""
    adaptive_temperature: bool | None = None
    """Choose T for each minibatch so that good and bad tokens balance."""
    weight_low: float | None = None
    """Below this, the weight of the policy before this batch against who wrote a token counts as 0."""
    weight_high: float | None = None
    """Above this, that weight is cut down to it (`tis`) or counts as 0 (`mis`)."""
    cap: float | None = None
    """Largest ratio by which a token is weighted."""
    second_moment: float | None = None
    """Largest mean of (log ρ)² over the tokens that move away from who wrote them."""
    tolerance: float | None = None
    """Largest change of a token's probability before it is masked."""
    tau: float | None = None
    """Temperature of mirror descent: the smaller, the further from the reference policy it ends."""
    tau_positive: float | None = None
    """Steepness of the soft gate where the advantage is positive."""
    tau_negative: float | None = None
    """Steepness of the soft gate where the advantage is negative."""
    threshold: float | None = None
    """Lowest reward of a response to imitate."""
    delta: float | None = None
    """Shift of the baseline in the advantage `shifted`; below 0 it leans towards imitation."""
    whiten_epsilon: float | None = None
    """Added to the variance of a group's rewards in the advantage `whiten`. Keep it far below that variance: it is a
    floor on the standard deviation, and rewards that differ less than the floor get small advantages."""
    advantage_tau: float | None = None
    """Temperature of the advantage `logavgexp`."""
    regulariser: RegulariserName | None = None
    """Pull towards who wrote the data: `forward_kl` −ℓ, `k2_token` (ℓ−b)², `k2_sequence` ½(Σ(ℓ−b))²."""
    regulariser_weight: float | None = None
    """Weight of the regulariser."""
    beta: float | None = None
    """Weight of the KL divergence from the reference policy; 0 loads no reference."""
    kl: KLName | None = None
    """Estimator of that divergence."""
    kl_weight: KLWeight | None = None
    """`importance` corrects the estimator for who wrote the response; `none` is what older GRPO code does."""
    ref_period: int | None = None
    """Replace the reference by the current policy every so many batches; unset keeps it."""
    ref_ema: float | None = None
    """Mix this share of the current policy into the reference after every batch; unset keeps it."""
    entropy_bonus: float | None = None
    """Weight of the policy's entropy, subtracted from the loss."""
    unknown_behaviour: Literal["refuse", "proximal"] | None = None
    """Text whose author's probabilities nobody recorded: `refuse` it, or take those of the policy before the batch."""
