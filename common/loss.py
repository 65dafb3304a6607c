"""Advantages, policy, value and KL losses, importance weights: pure functions of tensors, called by every script.

Token-level tensors are flat over the response tokens of all sequences, shape [T], one response after another; `lengths`
[N] int64 counts each response's tokens (all >= 1, sum T). All compute and return fp32 (lower precision is raised
first). Losses are per token and unreduced: multiply by `token_weights` and sum. Where a paper leaves a choice open it
is verl's (trainer/ppo/core_algos.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_LOGRATIO = 20.0  # nats, as verl; exp(20) = 5e8 times any sane advantage is finite in fp32


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    Args: rewards [T]; values [T], the value of the state BEFORE token t; lengths [N]; gamma and lam in [0, 1].
    A response ends with a bootstrap value of 0, whether by an eos token or cut by length.
    Returns (advantages [T], returns [T]), fp32, detached, with returns = advantages + values.
    """
    starts = lengths.cumsum(0) - lengths
    row = torch.repeat_interleave(lengths)
    col = torch.arange(len(row), device=lengths.device) - starts[row]
    num_seqs, max_len = len(lengths), int(lengths.max())

    # Padding holds reward 0 and value 0, so its deltas are 0 and the last token of each response sees a bootstrap of 0.
    deltas = rewards.new_zeros(num_seqs, max_len, dtype=torch.float32)
    padded_values = rewards.new_zeros(num_seqs, max_len + 1, dtype=torch.float32)
    deltas[row, col] = rewards.float()
    padded_values[row, col] = values.float()
    deltas += gamma * padded_values[:, 1:] - padded_values[:, :-1]

    padded_advantages = torch.zeros_like(deltas)
    advantage = deltas.new_zeros(num_seqs)
    for t in reversed(range(max_len)):
        advantage = deltas[:, t] + gamma * lam * advantage
        padded_advantages[:, t] = advantage
    advantages = padded_advantages[row, col]
    return advantages, advantages + values.float()


@torch.no_grad()
def group_advantages(scores: Tensor, samples: int, normalise_std: bool) -> tuple[Tensor, Tensor]:
    """GRPO: (score - mean) / (std + 1e-6) over the samples of a prompt (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The std is unbiased, as verl's. Dr.GRPO (arXiv 2503.20783, section 3.2) does not divide by it: normalise_std False.

    Args: scores [N], the `samples` of a prompt one after another. Returns (advantages [N] fp32, detached; differs [N]
    bool, the scores of the sequence's group are not all equal). Where they are, the advantage is exactly 0 and teaches
    nothing. A group of 1 has mean 0 and std 1, as verl, and never differs. Raises ValueError unless samples divides N.
    """
    if samples < 1 or len(scores) % samples:
        raise ValueError(f"{len(scores)} scores are no whole groups of --rollout.samples {samples}")
    groups = scores.float().double().view(-1, samples)  # in fp64 the mean of equal fp32 numbers is exactly that number
    centred, std = groups, 1.0
    if samples > 1:
        centred = groups - groups.mean(1, keepdim=True)
        std = (centred.square().sum(1, keepdim=True) / (samples - 1)).sqrt()
    advantages = centred / (std + 1e-6) if normalise_std else centred
    differs = groups.amax(1) > groups.amin(1)
    return advantages.float().flatten(), differs.repeat_interleave(samples)


def _centred(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x minus its mean over the mask, 0 outside the mask; number of elements in the mask).

    In fp64, where the mean of equal fp32 numbers is exactly that number: no variance is 0, not a rounding error.
    """
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    count = mask.sum()
    x = x.double().masked_fill(~mask, 0.0)
    return (x - x.sum() / count.clamp(min=1)).masked_fill(~mask, 0.0), count


def whiten(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """(x - mean) * rsqrt(var + 1e-8) with unbiased variance over the mask, as verl's masked_whiten.

    Args: x [T]; mask [T] bool, or None for all. Returns [T] fp32, 0 where masked out (where verl leaves shifted
    values), and 0 everywhere for a single element or zero variance.
    """
    centred, count = _centred(x, mask)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return (centred * torch.rsqrt(variance + 1e-8)).float()


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens sampled by the policy, in nats.

    Schulman 2020 (joschu.net/blog/kl-approx.html), with r = ref / policy: k1 = -log r, k2 = (log r)^2 / 2,
    k3 = r - 1 - log r. k3 clamps log r to [-20, 20] and the result to [-10, 10], as verl. "k3+" has the value of k3 and
    the gradient of k2: the expected gradient of k3 (and of k1) is not the gradient of the KL, that of k2 is.

    Args: logprob [T], ref_logprob [T]. Returns [T] fp32. Raises ValueError for a kind not among these four.
    """
    logratio = ref_logprob.float() - logprob.float()
    if kind == "k1":
        return -logratio
    k2 = 0.5 * logratio.square()
    if kind == "k2":
        return k2
    if kind not in ("k3", "k3+"):
        raise ValueError(f"unknown KL estimator {kind!r}: choose k1, k2, k3 or k3+")
    logratio = logratio.clamp(-MAX_LOGRATIO, MAX_LOGRATIO)
    # expm1: where policies are close exp(x) - 1 - x is all rounding error (5e-9 at x = 1e-4, and fp32 eps is 1e-7).
    k3 = (torch.expm1(logratio) - logratio).clamp(-10.0, 10.0)
    return k3 if kind == "k3" else k2 - k2.detach() + k3.detach()


@torch.no_grad()
def importance_weights(old_logprob: Tensor, rollout_logprob: Tensor, cap: float, floor: float | None = None) -> Tensor:
    """Weights pi_old / pi_rollout, which correct for the engine's own numerics: truncated or masked.

    Without a floor min(ratio, cap) (TIS); with one the ratio inside [floor, cap] and 0 outside (IcePop: Ring-1T, arXiv
    2510.18855). The loss's denominators still count tokens of weight 0, as in verl.

    Args: old_logprob [T] by the trainer and rollout_logprob [T] by the engine, from the same weights; cap > 0, verl's
    is 2 for TIS, its IcePop recipe has [0.5, 5]. Returns [T] fp32, detached.
    """
    logratio = (old_logprob.float() - rollout_logprob.float()).clamp(-MAX_LOGRATIO, MAX_LOGRATIO)
    ratio = logratio.exp()
    return ratio.clamp(max=cap) if floor is None else ratio.where((ratio >= floor) & (ratio <= cap), 0.0)


@torch.no_grad()
def sequence_means(x: Tensor, sequence: Tensor, lengths: Tensor, reduce: Callable[[Tensor], Any] | None = None) -> Tensor:
    """The mean of x over the whole of each token's sequence, at that token; of log-ratios it is the log of GSPO's ratio.

    Args: x [T]; sequence [T] int64, the place in `lengths` of each token's sequence, tokens in any order; lengths [N] of
    the whole sequences. With context parallelism x and sequence are this rank's tokens, lengths are the same on all
    ranks, and reduce adds an [N] tensor up over them in place, such as partial(dist.all_reduce, group=cp_group).
    Returns [T] fp32, detached.
    """
    sums = x.new_zeros(len(lengths), dtype=torch.float32).index_add_(0, sequence, x.float())
    if reduce is not None:
        reduce(sums)
    return (sums / lengths)[sequence]


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    *,
    sequence_logratio: Tensor | None = None,
    cispo: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate loss per token (Schulman et al. 2017, arXiv 1707.06347, eq. 7), with an optional dual clip.

    The ratio is clipped to [1 - clip_low, 1 + clip_high] (DAPO, arXiv 2503.14476, eq. 10). Where advantages < 0 the
    loss is at most -dual_clip * advantages (Ye et al. 2020, arXiv 1912.09729, eq. 5), with dual_clip > 1, None for off.

    sequence_logratio makes it GSPO-token (arXiv 2507.18071, eq. 13 and 14): the ratio is sg(s) pi / sg(pi), where sg
    stops gradients and s = exp(sequence_logratio). Its value and its clip are the sequence's, its gradient the token's
    own; for equal advantages in a sequence, under "seq-mean-token-mean", it is GSPO (eq. 5). The paper clips with 3e-4
    and 4e-4; verl has no dual clip here, and caps the log of the ratio at 10.
    cispo makes it -sg(clip(ratio)) * advantages * logprob (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): a clip bounds a
    token's gradient and never stops it. It has no dual clip. The paper sets no lower bound (clip_low 1).

    Args: logprob [T] with gradient; old_logprob, advantages [T]; weights [T] or None multiply the loss of each token;
    sequence_logratio [T], the `sequence_means` of logprob - old_logprob.
    Returns (loss [T] fp32, stats), stats of detached [T] tensors: "logratio" fp32, the token's own, clamped to [-20, 20]
    as verl; "clipped" bool, the clipped surrogate is the larger loss (CISPO: the clip changed the ratio);
    "dual_clipped" bool, the dual clip lowered the loss.
    """
    logprob, advantages = logprob.float(), advantages.float()
    logratio = (logprob - old_logprob.float()).clamp(-MAX_LOGRATIO, MAX_LOGRATIO)
    ratio = logratio.exp()
    if sequence_logratio is not None:
        # The difference is exactly 0; logprob + sequence_logratio would round what a clip range of 3e-4 measures.
        straight_through = (logprob - logprob.detach()) + sequence_logratio.detach()
        ratio = straight_through.clamp(-MAX_LOGRATIO, MAX_LOGRATIO).exp()
    ratio_clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)

    dual_clipped = torch.zeros_like(ratio, dtype=torch.bool)
    if cispo:
        loss = -advantages * ratio_clipped.detach() * logprob
        clipped = ratio_clipped != ratio
    else:
        loss_unclipped = -advantages * ratio
        loss_clipped = -advantages * ratio_clipped
        loss = torch.maximum(loss_unclipped, loss_clipped)
        clipped = loss_clipped > loss_unclipped
        if dual_clip is not None:
            bound = -advantages * dual_clip
            dual_clipped = (advantages < 0) & (loss > bound)
            loss = torch.where(dual_clipped, bound, loss)
    if weights is not None:
        loss = loss * weights
    return loss, {"logratio": logratio.detach(), "clipped": clipped, "dual_clipped": dual_clipped}


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None) -> tuple[Tensor, Tensor]:
    """Half the larger squared error of the value and the value clipped to old_values +- clip, as verl and baselines.

    Args: values [T] with gradient; old_values, returns [T]; clip >= 0 in units of return, or None for no clipping.
    Returns (loss [T] fp32, clipped [T] bool: the clipped error is the larger one).
    """
    values = values.float()
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    # Not old + (values - old).clamp(): that rounds values inside the range, and some would count as clipped.
    old_values = old_values.float()
    error_clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(error, error_clipped), error_clipped > error


def token_weights(lengths: Tensor, mode: str, mask: Tensor | None = None, max_response_length: int | None = None) -> Tensor:
    """Weights that make (loss * weights).sum(), added over all ranks and micro-batches, the mini-batch's loss.

    It then does not depend on how the mini-batch was split.
    "token-mean" 1 / tokens (DAPO), "seq-mean-token-mean" 1 / (len_i N) (GRPO), "seq-mean-token-sum" 1 / N,
    "seq-mean-token-sum-norm" 1 / (max_response_length N) (Dr.GRPO, arXiv 2503.20783, section 3.2).

    Args: lengths [N] of ALL ranks' sequences of the mini-batch; mask [N] bool, sequences where it is False get weight 0
    and leave the denominators; max_response_length in tokens, the same for a whole run, for the last mode only.
    Returns [T] fp32, all zeros if every sequence is masked. Raises ValueError for a mode not among these four, and for
    the last one without max_response_length.
    """
    mask = torch.ones_like(lengths, dtype=torch.bool) if mask is None else mask
    num_seqs = mask.sum()
    if mode == "token-mean":
        denominators = (lengths * mask).sum().expand_as(lengths)
    elif mode == "seq-mean-token-mean":
        denominators = lengths * num_seqs
    elif mode == "seq-mean-token-sum":
        denominators = num_seqs.expand_as(lengths)
    elif mode == "seq-mean-token-sum-norm":
        if not max_response_length:
            raise ValueError("aggregation seq-mean-token-sum-norm needs max_response_length, which it divides by")
        denominators = (num_seqs * max_response_length).expand_as(lengths)
    else:
        names = "token-mean, seq-mean-token-mean, seq-mean-token-sum or seq-mean-token-sum-norm"
        raise ValueError(f"unknown aggregation {mode!r}: choose {names}")
    weights = mask / denominators.clamp(min=1).float()
    return weights.repeat_interleave(lengths)


def token_rewards(scores: Tensor, lengths: Tensor) -> Tensor:
    """Each response's score on its last token, 0 elsewhere. Args: scores [N], lengths [N]. Returns [T] fp32."""
    ends = lengths.cumsum(0)
    rewards = scores.new_zeros(int(ends[-1]), dtype=torch.float32)
    rewards[ends - 1] = scores.float()
    return rewards


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 no better than a constant, negative is worse.

    Args: values, returns [T]; mask [T] bool or None for all. Returns a scalar fp32, 0 if the returns have no variance.
    """
    residuals, _ = _centred(returns.float() - values.float(), mask)
    deviations, _ = _centred(returns, mask)
    total = deviations.square().sum()
    return torch.where(total > 0, 1.0 - residuals.square().sum() / total, 0.0).float()


class AdaptiveKL:
    """KL coefficient steered towards a target KL (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    K_beta of the paper is n_steps / horizon here, as in verl, so that the pace does not depend on the batch size.

    Args: coef, the coefficient to start from; target > 0 in the unit of `current` (nats); horizon > 0 in the unit of
    `n_steps`. `coef` is the whole state: save it and set it to resume.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """Scale `coef` after n_steps sequences of mean KL `current`; the relative error is clipped to +-0.2."""
        error = min(max(current / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * n_steps / self.horizon
