"""common/loss.py against one-token-at-a-time Python in fp64, hand-computed cases and autograd."""

import math
import statistics
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from common import loss

LENGTHS = torch.tensor([3, 1, 7, 2])
# A few fp32 roundings (eps 1.2e-7) of numbers of order 1 to 10; sums here have at most 13 terms.
FP32 = {"rtol": 1e-5, "atol": 1e-6}


def randn(seed: int, size: int = int(LENGTHS.sum())) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: torch.Tensor, expected: list[float] | float) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), **FP32)


# ---- advantages ------------------------------------------------------------------------------------------------------


def gae_reference(
    rewards: list[float], values: list[float], lengths: list[int], gamma: float, lam: float
) -> list[float]:
    """Equation 16 as a sum over future deltas, not as the recursion."""
    advantages, start = [], 0
    for length in lengths:
        r, v = rewards[start : start + length], [*values[start : start + length], 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        advantages += [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]
        start += length
    return advantages


def test_gae_by_hand() -> None:
    # Response 1: deltas 0 + .5*2 - 1 = 0 and 1 - 2 = -1; advantages 0 + .25 * -1 = -.25 and -1. Response 2: 3 - 4 = -1.
    advantages, returns = loss.gae(
        torch.tensor([0.0, 1.0, 3.0]), torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 1]), gamma=0.5, lam=0.5
    )
    assert advantages.tolist() == [-0.25, -1.0, -1.0]
    assert returns.tolist() == [0.75, 1.0, 3.0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
def test_gae_matches_reference(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    rewards, values = randn(seed, sum(lengths)), randn(seed + 1, sum(lengths))
    advantages, returns = loss.gae(rewards, values.requires_grad_(), torch.tensor(lengths), gamma, lam)
    expected = gae_reference(rewards.tolist(), values.tolist(), lengths, gamma, lam)
    assert_close(advantages, expected)
    assert_close(returns, [a + v for a, v in zip(expected, values.tolist(), strict=True)])
    assert not advantages.requires_grad and not returns.requires_grad


def test_gae_raises_bf16_to_fp32_first() -> None:
    rewards, values = randn(0).bfloat16(), randn(1).bfloat16()
    actual = loss.gae(rewards, values, LENGTHS, 0.99, 0.95)
    expected = loss.gae(rewards.float(), values.float(), LENGTHS, 0.99, 0.95)
    assert all(a.dtype == torch.float32 and torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_token_rewards() -> None:
    rewards = loss.token_rewards(torch.tensor([5.0, -1.0, 2.0]), torch.tensor([3, 1, 2]))
    assert rewards.tolist() == [0, 0, 5, -1, 0, 2]
    assert rewards.dtype == torch.float32


def group_reference(scores: list[float], samples: int, normalise_std: bool) -> list[float]:
    """Section 4.1.2, group by group, in fp64."""
    advantages = []
    for start in range(0, len(scores), samples):
        group = scores[start : start + samples]
        mean = statistics.fmean(group) if samples > 1 else 0.0
        std = statistics.stdev(group) if samples > 1 else 1.0
        advantages += [(score - mean) / (std + 1e-6 if normalise_std else 1.0) for score in group]
    return advantages


def test_group_advantages_by_hand() -> None:
    # Means 1 and 3; unbiased variances (1 + 1 + 0) / 2 = 1 and (1 + 0 + 1) / 2 = 1.
    scores = torch.tensor([2.0, 0.0, 1.0, 4.0, 3.0, 2.0])
    assert_close(loss.group_advantages(scores, 3, normalise_std=False)[0], [1, -1, 0, 1, 0, -1])
    unit = 1 / (1 + 1e-6)
    assert_close(loss.group_advantages(scores, 3, normalise_std=True)[0], [unit, -unit, 0, unit, 0, -unit])
    # One right answer of four: mean 1/4, variance (9/16 + 3/16) / 3 = 1/4, so 3/2 and -1/2.
    advantages, differs = loss.group_advantages(torch.tensor([0.0, 1.0, 0.0, 0.0]), 4, normalise_std=True)
    assert_close(advantages, [-0.499999, 1.499997, -0.499999, -0.499999])
    assert differs.tolist() == [True] * 4


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 1000))
def test_group_advantages_match_reference(
    groups: int, samples: int, normalise_std: bool, dtype: torch.dtype, seed: int
) -> None:
    scores = (2 * randn(seed, groups * samples) + 1).to(dtype).requires_grad_()
    advantages, differs = loss.group_advantages(scores, samples, normalise_std)
    assert differs.tolist() == [samples > 1] * len(scores)
    assert_close(advantages, group_reference(scores.tolist(), samples, normalise_std))
    assert not advantages.requires_grad


@pytest.mark.parametrize("normalise_std", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1000.1, -3e7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_group_of_equal_scores_has_no_advantage(normalise_std: bool, value: float, dtype: torch.dtype) -> None:
    for samples in (2, 3, 7, 16, 1001):
        scores = torch.cat([torch.full((samples,), value, dtype=dtype), torch.arange(samples, dtype=dtype)])
        advantages, differs = loss.group_advantages(scores, samples, normalise_std)
        equal, unequal = advantages.split(samples)
        assert equal.tolist() == [0.0] * samples
        assert unequal.any()
        assert differs.tolist() == [False] * samples + [True] * samples


def test_group_of_one() -> None:
    scores = torch.tensor([2.0, -3.0])
    for normalise_std, expected in ((False, [2.0, -3.0]), (True, [2 / (1 + 1e-6), -3 / (1 + 1e-6)])):
        advantages, differs = loss.group_advantages(scores, 1, normalise_std)
        assert_close(advantages, expected)
        assert differs.tolist() == [False, False]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.1, 0.3]), min_size=3, max_size=3), min_size=1, max_size=5), st.booleans())
def test_groups_differ_where_an_advantage_is_not_zero(groups: list[list[float]], normalise_std: bool) -> None:
    advantages, differs = loss.group_advantages(torch.tensor(groups).flatten(), 3, normalise_std)
    assert differs.view(-1, 3).tolist() == [[len(set(group)) > 1] * 3 for group in groups]
    assert torch.equal(advantages.view(-1, 3).any(1), differs[::3])


@pytest.mark.parametrize("samples", [0, 2, 8])
def test_groups_must_be_whole(samples: int) -> None:
    with pytest.raises(ValueError, match=f"5 scores .* --rollout.samples {samples}"):
        loss.group_advantages(torch.zeros(5), samples, normalise_std=True)


# ---- whitening and explained variance --------------------------------------------------------------------------------


def test_whiten_by_hand() -> None:
    # Mean 2, unbiased variance (1 + 0 + 1) / 2 = 1; the 100 is masked out.
    x, mask = torch.tensor([1.0, 2.0, 100.0, 3.0]), torch.tensor([True, True, False, True])
    assert_close(loss.whiten(x, mask), [-1.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whiten_matches_reference(masked: bool, dtype: torch.dtype) -> None:
    x = (3 * randn(0) + 5).to(dtype)
    mask = torch.arange(len(x)) % 3 != 0 if masked else None
    kept = [v for i, v in enumerate(x.tolist()) if mask is None or mask[i]]
    mean, variance = statistics.fmean(kept), statistics.variance(kept)
    expected = [
        (v - mean) / math.sqrt(variance + 1e-8) if mask is None or mask[i] else 0.0 for i, v in enumerate(x.tolist())
    ]
    assert_close(loss.whiten(x, mask), expected)


@pytest.mark.parametrize("value", [0.1, 1000.1, -3e7])
@pytest.mark.parametrize("count", [1, 3, 1001])
def test_whiten_of_no_variance_is_zero(value: float, count: int) -> None:
    x = torch.full((count,), value)
    assert loss.whiten(x).tolist() == [0.0] * count
    mask = torch.ones(count + 1, dtype=torch.bool)
    mask[-1] = False
    assert loss.whiten(torch.cat([x, torch.tensor([math.nan])]), mask).tolist() == [0.0] * (count + 1)


def test_whiten_of_all_masked_is_zero() -> None:
    assert loss.whiten(torch.tensor([1.0, 2.0]), torch.tensor([False, False])).tolist() == [0.0, 0.0]


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert loss.explained_variance(returns + 7.0, returns).item() == 1.0  # a constant offset is not variance
    assert loss.explained_variance(torch.zeros(4), returns).item() == 0.0
    assert loss.explained_variance(-returns, returns).item() == -3.0  # residual 2 * returns: 1 - 4
    # Residuals 0, 1, 0, 1: variance 1/4 against 5/4.
    assert_close(loss.explained_variance(torch.tensor([1.0, 1.0, 3.0, 3.0]), returns), 0.8)


def test_explained_variance_matches_reference_under_a_mask() -> None:
    values, returns, mask = randn(0), randn(1), torch.arange(13) % 3 != 0
    kept_returns = returns[mask].tolist()
    residuals = [r - v for r, v in zip(kept_returns, values[mask].tolist(), strict=True)]
    expected = 1 - statistics.variance(residuals) / statistics.variance(kept_returns)
    assert_close(loss.explained_variance(values, returns, mask), expected)


def test_explained_variance_without_variance_is_zero() -> None:
    assert loss.explained_variance(randn(0), torch.full((13,), 0.1)).item() == 0.0
    assert loss.explained_variance(randn(0), randn(1), torch.zeros(13, dtype=torch.bool)).item() == 0.0


# ---- KL and importance weights ---------------------------------------------------------------------------------------


def kl_reference(logprob: float, ref_logprob: float, kind: str) -> float:
    if kind == "k1":
        return logprob - ref_logprob
    if kind == "k2":
        return (logprob - ref_logprob) ** 2 / 2
    x = min(max(ref_logprob - logprob, -20.0), 20.0)
    return min(max(math.exp(x) - 1 - x, -10.0), 10.0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kl_penalty_matches_reference(kind: str, dtype: torch.dtype) -> None:
    logprob, ref_logprob = (3 * randn(0)).to(dtype), (3 * randn(1)).to(dtype)
    expected = [kl_reference(a, b, kind) for a, b in zip(logprob.tolist(), ref_logprob.tolist(), strict=True)]
    assert_close(loss.kl_penalty(logprob, ref_logprob, kind), expected)


def test_kl_penalty_by_hand() -> None:
    logprob, ref_logprob = torch.tensor([-1.0]), torch.tensor([-1.0 + math.log(2)])  # r = 2
    assert_close(loss.kl_penalty(logprob, ref_logprob, "k1"), [-0.6931472])
    assert_close(loss.kl_penalty(logprob, ref_logprob, "k2"), [0.2402265])
    assert_close(loss.kl_penalty(logprob, ref_logprob, "k3"), [0.3068528])


def test_kl_penalty_clamps() -> None:
    logprob, ref_logprob = torch.tensor([-50.0, -1.0, -1.0]), torch.tensor([-1.0, -6.0, -500.0])
    # log r 49: exp(20) - 21, cut to 10; log r -5: exp(-5) + 4; log r -499, cut to -20: 19, cut to 10.
    assert_close(loss.kl_penalty(logprob, ref_logprob, "k3"), [10.0, 4.006738, 10.0])
    assert_close(loss.kl_penalty(logprob, ref_logprob, "k1"), [-49.0, 5.0, 499.0])


def test_k3_keeps_its_digits_where_policies_are_close() -> None:
    x = torch.tensor([1e-3, -1e-3, 1e-4])
    # x^2/2 + x^3/6 in fp64. The relative error of expm1(x) - x is up to 6e-8 * x / (x^2/2), 1.2e-3 at 1e-4;
    # exp(x) - 1 - x would be off by up to 6e-8 / (x^2/2), over 10% at 1e-3.
    expected = [v**2 / 2 + v**3 / 6 for v in x.tolist()]
    torch.testing.assert_close(loss.kl_penalty(torch.zeros(3), x, "k3"), torch.tensor(expected), rtol=2e-3, atol=0.0)


def test_kl_penalty_gradients() -> None:
    ref_logprob = randn(1)
    gradients = {}
    for kind in ("k1", "k2", "k3", "k3+"):
        logprob = randn(0).requires_grad_()
        loss.kl_penalty(logprob, ref_logprob, kind).sum().backward()
        gradients[kind] = logprob.grad
    log_r = (ref_logprob - randn(0)).tolist()
    assert_close(gradients["k1"], [1.0] * 13)
    assert_close(gradients["k2"], [-x for x in log_r])
    assert_close(gradients["k3"], [1 - math.exp(x) for x in log_r])
    assert torch.equal(gradients["k3+"], gradients["k2"])


def test_kl_penalty_rejects_unknown_kinds() -> None:
    with pytest.raises(ValueError, match="'k4'"):
        loss.kl_penalty(randn(0), randn(1), "k4")


def test_importance_weights() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, 30.0, -90.0], requires_grad=True)
    rollout = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(3), 0.0, 0.0])
    weights = loss.importance_weights(old, rollout, cap=2.0)
    assert_close(weights, [1.0, 0.5, 2.0, 2.0, math.exp(-20)])
    assert not weights.requires_grad
    # Without a cap in reach the clamp of the exponent shows.
    assert_close(loss.importance_weights(old, rollout, cap=1e12)[3:4], [math.exp(20)])


def test_importance_weights_masked_outside_a_range() -> None:
    ratios = [0.49, 0.5, 1.0, 5.0, 5.1, 1e9]
    old = torch.tensor(ratios, requires_grad=True).log()
    weights = loss.importance_weights(old, torch.zeros(6), cap=5.00001, floor=0.49999)
    assert_close(weights, [0.0, 0.5, 1.0, 5.0, 0.0, 0.0])
    assert not weights.requires_grad
    # The bounds belong to the range, and both engines agreeing is inside it.
    assert loss.importance_weights(torch.zeros(1), torch.zeros(1), cap=1.0, floor=1.0).tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_importance_weights_match_reference(dtype: torch.dtype) -> None:
    old, rollout = randn(0, 200).to(dtype), randn(1, 200).to(dtype)
    ratios = [math.exp(a - b) for a, b in zip(old.tolist(), rollout.tolist(), strict=True)]
    assert_close(loss.importance_weights(old, rollout, 2.0), [min(r, 2.0) for r in ratios])
    masked = [r if 0.5 <= r <= 5.0 else 0.0 for r in ratios]
    assert_close(loss.importance_weights(old, rollout, 5.0, 0.5), masked)
    assert 0 < masked.count(0.0) < 200


# ---- policy and value losses -----------------------------------------------------------------------------------------


def policy_reference(
    logprob: float, old: float, advantage: float, low: float, high: float, dual: float | None
) -> tuple[float, bool, bool]:
    ratio = math.exp(min(max(logprob - old, -20.0), 20.0))
    surrogate, clipped_surrogate = ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage
    objective = min(surrogate, clipped_surrogate)  # equation 7 maximises
    dual_clipped = dual is not None and advantage < 0 and objective < dual * advantage
    return -(dual * advantage if dual_clipped else objective), clipped_surrogate < surrogate, dual_clipped


def test_policy_loss_by_hand() -> None:
    # Ratios 2, 2, 0.5, 0.5, 8 with clip range [0.8, 1.3] and dual clip 3.
    logprob = torch.tensor([2.0, 2.0, 0.5, 0.5, 8.0]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -2.0])
    actual, stats = loss.policy_loss(logprob, torch.zeros(5), advantages, 0.2, 0.3, dual_clip=3.0)
    assert_close(actual, [-1.3, 2.0, -0.5, 0.8, 6.0])
    assert stats["clipped"].tolist() == [True, False, False, True, False]
    assert stats["dual_clipped"].tolist() == [False, False, False, False, True]
    assert_close(stats["logratio"], [math.log(2), math.log(2), -math.log(2), -math.log(2), math.log(8)])


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_policy_loss_matches_reference(dual_clip: float | None, dtype: torch.dtype) -> None:
    logprob, old, advantages = (randn(seed, 200).to(dtype) for seed in range(3))
    weights = randn(3, 200).abs()
    actual, stats = loss.policy_loss(logprob, old, advantages, 0.2, 0.28, dual_clip, weights)
    rows = [
        policy_reference(a, b, c, 0.2, 0.28, dual_clip)
        for a, b, c in zip(logprob.tolist(), old.tolist(), advantages.tolist(), strict=True)
    ]
    assert_close(actual, [value * w for (value, _, _), w in zip(rows, weights.tolist(), strict=True)])
    assert stats["clipped"].tolist() == [clipped for _, clipped, _ in rows]
    assert stats["dual_clipped"].tolist() == [dual_clipped for _, _, dual_clipped in rows]
    # The comparison means something: each case occurs and does not always occur.
    assert 0 < stats["clipped"].sum() < 200
    assert (stats["dual_clipped"].sum() > 0) == (dual_clip is not None)


def test_same_policy_has_ratio_one_and_clips_nothing() -> None:
    logprob, advantages = (10 * randn(0)).requires_grad_(), randn(1)
    actual, stats = loss.policy_loss(logprob, logprob.detach().clone(), advantages, 0.0, 0.0, dual_clip=1.0)
    assert torch.equal(actual, -advantages)
    assert not stats["logratio"].any() and not stats["clipped"].any() and not stats["dual_clipped"].any()
    assert not stats["logratio"].requires_grad
    actual.sum().backward()
    # The policy gradient itself: -A d logprob, even where clipped and unclipped tie.
    assert_close(logprob.grad, (-advantages).tolist())


def test_policy_loss_gradient_stops_where_clipped() -> None:
    logprob = torch.tensor([2.0, 2.0, 0.5, 0.5, 8.0]).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -2.0])
    weights = torch.tensor([1.0, 3.0, 1.0, 1.0, 1.0])
    loss.policy_loss(logprob, torch.zeros(5), advantages, 0.2, 0.3, 3.0, weights)[0].sum().backward()
    assert_close(logprob.grad, [0.0, 6.0, -0.5, 0.0, 0.0])  # -A ratio weight, 0 where a clip holds


def test_policy_loss_survives_any_logratio() -> None:
    logprob = torch.tensor([0.0, -1000.0], requires_grad=True)
    actual, stats = loss.policy_loss(logprob, torch.tensor([-1000.0, 0.0]), torch.tensor([-1.0, -1.0]), 0.2, 0.2)
    actual.sum().backward()
    assert stats["logratio"].tolist() == [20.0, -20.0]
    torch.testing.assert_close(actual.detach(), torch.tensor([math.exp(20), 0.8]), **FP32)
    assert logprob.grad.isfinite().all()


def test_sequence_means_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 6.0, 5.0], requires_grad=True)
    means = loss.sequence_means(x, torch.tensor([1, 1, 1, 0]), torch.tensor([1, 3]))
    assert means.tolist() == [3.0, 3.0, 3.0, 5.0]
    assert means.dtype == torch.float32 and not means.requires_grad
    # A micro-batch without sequences.
    nothing = torch.empty(0, dtype=torch.int64)
    assert loss.sequence_means(torch.empty(0), nothing, nothing).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 4])
def test_sequence_means_over_context_parallel_ranks(world_size: int, dtype: torch.dtype) -> None:
    """Of 2 * world_size chunks rank r holds r and the r-th from the end, as Megatron; gloo adds the ranks' sums up."""
    lengths = torch.tensor([9, 1, 16, 4])
    x, sequence = randn(0, 30).to(dtype), torch.repeat_interleave(lengths)
    expected = [statistics.fmean(x[sequence == s].tolist()) for s in sequence.tolist()]
    assert_close(loss.sequence_means(x, sequence, lengths), expected)

    store, results = dist.HashStore(), {}

    def rank(r: int) -> None:
        group = dist.ProcessGroupGloo(store, r, world_size)
        chunks = torch.arange(30).tensor_split(2 * world_size)
        mine = torch.cat([chunks[r], chunks[-1 - r]])
        means = loss.sequence_means(x[mine], sequence[mine], lengths, lambda sums: group.allreduce([sums]).wait())
        results.update(zip(mine.tolist(), means.tolist(), strict=True))

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert_close(torch.tensor([results[i] for i in range(30)]), expected)


Losses = tuple[torch.Tensor, dict[str, torch.Tensor]]


def gspo(logprob: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, low: float, high: float, **options) -> Losses:
    means = loss.sequence_means(logprob.detach() - old, torch.repeat_interleave(LENGTHS), LENGTHS)
    return loss.policy_loss(logprob, old, advantages, low, high, sequence_logratio=means, **options)


def cispo(logprob: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, low: float, high: float, **options) -> Losses:
    return loss.policy_loss(logprob, old, advantages, low, high, cispo=True, **options)


def near(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, old ones) whose sequence ratios of the four LENGTHS lie on both sides of a range of +-0.1."""
    old = -randn(seed).abs() - 1
    shift = torch.tensor([0.2, -0.2, 0.03, -0.03]).repeat_interleave(LENGTHS)
    return old + shift + 0.02 * randn(seed + 1), old


def test_gspo_by_hand() -> None:
    # Two sequences, of ratios exp((.1 + .3) / 2) = exp(.2) and exp(-.2), clipped to [.9, 1.1].
    logprob, old = torch.tensor([0.1, 0.3, -0.2]).requires_grad_(), torch.zeros(3)
    means = loss.sequence_means(logprob.detach() - old, torch.tensor([0, 0, 1]), torch.tensor([2, 1]))
    for advantage, values, slopes in (
        (1.0, [-1.1, -1.1, -math.exp(-0.2)], [0.0, 0.0, -math.exp(-0.2)]),
        (-1.0, [math.exp(0.2), math.exp(0.2), 0.9], [math.exp(0.2), math.exp(0.2), 0.0]),
    ):
        logprob.grad = None
        actual, stats = loss.policy_loss(logprob, old, torch.full((3,), advantage), 0.1, 0.1, sequence_logratio=means)
        actual.sum().backward()
        assert_close(actual, values)
        assert_close(logprob.grad, slopes)  # each token's own: -A s, not -A s / length
        assert stats["clipped"].tolist() == [slope == 0.0 for slope in slopes]
        assert_close(stats["logratio"], [0.1, 0.3, -0.2])


def test_cispo_by_hand() -> None:
    # Ratios 2, 0.5 and 1 clipped to [0.8, 1.3]; log-probs log 2, log .5, 0 after old ones of 0. The gradient never stops.
    logprob = torch.tensor([2.0, 0.5, 1.0]).log().requires_grad_()
    actual, stats = cispo(logprob, torch.zeros(3), torch.tensor([1.0, -2.0, 3.0]), 0.2, 0.3)
    actual.sum().backward()
    assert_close(actual, [-1.3 * math.log(2), 1.6 * math.log(0.5), 0.0])
    assert_close(logprob.grad, [-1.3, 1.6, -3.0])
    assert stats["clipped"].tolist() == [True, True, False] and not stats["dual_clipped"].any()
    # No lower bound at clip_low 1, and a dual clip changes nothing.
    actual, stats = cispo(logprob, torch.zeros(3), torch.tensor([1.0, -2.0, 3.0]), 1.0, 0.3, dual_clip=1.1)
    assert_close(actual, [-1.3 * math.log(2), 1.0 * math.log(0.5), 0.0])
    assert stats["clipped"].tolist() == [True, False, False]


@pytest.mark.parametrize("variant", [gspo, cispo])
def test_gradients_are_finite_differences_with_what_is_stopped_held_fixed(variant: Callable[..., Losses]) -> None:
    """Stop-gradient means: at x0, differentiate x -> f(x, stopped parts at x0). In Python, fp64, one token at a time."""
    logprob, old = near(0)
    advantages, low, high = randn(2), 0.1, 0.1
    x0, olds, adv = logprob.double().tolist(), old.double().tolist(), advantages.double().tolist()
    starts = [0, 3, 4, 11, 13]
    log_s = [
        statistics.fmean([x0[t] - olds[t] for t in range(a, b)]) for a, b in zip(starts, starts[1:], strict=False)
        for t in range(a, b)
    ]

    def f(t: int, x: float) -> float:
        if variant is cispo:
            return -min(max(math.exp(x0[t] - olds[t]), 1 - low), 1 + high) * adv[t] * x
        ratio = math.exp(log_s[t]) * math.exp(x) / math.exp(x0[t])
        return -min(ratio * adv[t], min(max(ratio, 1 - low), 1 + high) * adv[t])

    logprob.requires_grad_()
    actual, stats = variant(logprob, old, advantages, low, high)
    actual.sum().backward()
    assert_close(actual, [f(t, x) for t, x in enumerate(x0)])
    # Central differences in fp64: their error is of order step^2 = 1e-10.
    assert_close(logprob.grad, [(f(t, x + 1e-5) - f(t, x - 1e-5)) / 2e-5 for t, x in enumerate(x0)])
    assert 0 < stats["clipped"].sum() < 13


@pytest.mark.parametrize("clip", [0.1, 3e-4])
def test_gspo_token_is_gspo_for_one_advantage_a_sequence(clip: float) -> None:
    """Equation 5 with the ratio of equation 7, differentiated through the mean, has the value and gradient of GSPO-token."""
    logprob, old = near(0)
    per_sequence = torch.tensor([1.0, 2.0, 0.5, -3.0])
    weights = loss.token_weights(LENGTHS, "seq-mean-token-mean")
    a, b = logprob.clone().requires_grad_(), logprob.clone().requires_grad_()
    actual = gspo(a, old, per_sequence.repeat_interleave(LENGTHS), clip, clip, weights=weights)[0].sum()
    actual.backward()

    s = torch.stack([x.mean() for x in (b - old).split(LENGTHS.tolist())]).exp()
    objective = torch.minimum(s * per_sequence, s.clamp(1 - clip, 1 + clip) * per_sequence).mean()
    (-objective).backward()
    torch.testing.assert_close(actual, -objective, **FP32)
    torch.testing.assert_close(a.grad, b.grad, **FP32)
    assert b.grad.any() and not b.grad.all()


def test_gspo_keeps_the_digits_that_its_clip_range_needs() -> None:
    # Log-probs of -17: fp32 numbers there are 2e-6 apart, of which a clip range of 3e-4 holds 160.
    logprob, s = torch.full((1000,), -17.123456), torch.linspace(-6e-4, 6e-4, 1000)
    actual, _ = loss.policy_loss(logprob, logprob, torch.full((1000,), -1.0), 1.0, 1.0, sequence_logratio=s)
    torch.testing.assert_close(actual, s.exp(), rtol=2e-7, atol=0.0)
    _, stats = loss.policy_loss(logprob, logprob, torch.ones(1000), 3e-4, 4e-4, sequence_logratio=s)
    assert stats["clipped"].tolist() == [x > math.log1p(4e-4) for x in s.tolist()]


@pytest.mark.parametrize("variant", [gspo, cispo])
def test_variants_of_the_same_policy_are_the_policy_gradient(variant: Callable[..., Losses]) -> None:
    logprob, advantages = (10 * randn(0)).requires_grad_(), randn(1)
    actual, stats = variant(logprob, logprob.detach().clone(), advantages, 0.0, 0.0)
    actual.sum().backward()
    assert torch.equal(logprob.grad, -advantages)
    assert not stats["logratio"].any() and not stats["clipped"].any()
    if variant is gspo:
        assert torch.equal(actual, -advantages)


@pytest.mark.parametrize("variant", [gspo, cispo])
def test_variants_survive_any_logratio(variant: Callable[..., Losses]) -> None:
    logprob = torch.linspace(-1000, 0, 13).requires_grad_()
    for old in (torch.zeros(13), torch.full((13,), -1000.0)):
        actual, _ = variant(logprob, old, torch.full((13,), -1.0), 0.2, 0.2)
        logprob.grad = None
        actual.sum().backward()
        assert actual.isfinite().all() and logprob.grad.isfinite().all()


def test_value_loss_by_hand() -> None:
    values, old = torch.tensor([2.0, 2.0, 0.1, -3.0]), torch.zeros(4)
    returns = torch.tensor([0.0, 3.0, 1.0, -4.0])
    # Clipped to +-0.5: errors max(4, .25), max(1, 6.25), max(.81, .81), max(1, 12.25), halved.
    actual, clipped = loss.value_loss(values, old, returns, clip=0.5)
    assert_close(actual, [2.0, 3.125, 0.405, 6.125])
    assert clipped.tolist() == [False, True, False, True]
    actual, clipped = loss.value_loss(values, old, returns, clip=None)
    assert_close(actual, [2.0, 0.5, 0.405, 0.5])
    assert not clipped.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_loss_matches_reference(dtype: torch.dtype) -> None:
    values, old, returns = (randn(seed, 200).to(dtype) for seed in range(3))
    actual, clipped = loss.value_loss(values, old, returns, clip=0.5)
    expected = []
    for i, (v, o, r) in enumerate(zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)):
        error, error_clipped = (v - r) ** 2, (min(max(v, o - 0.5), o + 0.5) - r) ** 2
        expected.append(0.5 * max(error, error_clipped))
        assert clipped[i] == (error_clipped > error)
    assert_close(actual, expected)
    assert 0 < clipped.sum() < 200


def test_value_loss_counts_nothing_inside_the_range() -> None:
    values = randn(0, 10_000)
    old = values + 0.1 * randn(1, 10_000).clamp(-1, 1)
    assert not loss.value_loss(values, old, randn(2, 10_000), clip=0.2)[1].any()


# ---- aggregation -----------------------------------------------------------------------------------------------------


LIMIT = 9  # tokens of the longest response that could be


def aggregate_reference(per_token: list[list[float]], mode: str) -> float:
    """Means spelled out over the kept sequences' lists."""
    if mode == "token-mean":
        return statistics.fmean([x for sequence in per_token for x in sequence])
    if mode == "seq-mean-token-sum-norm":
        return statistics.fmean([sum(sequence) / LIMIT for sequence in per_token])
    reduce = statistics.fmean if mode == "seq-mean-token-mean" else sum
    return statistics.fmean([reduce(sequence) for sequence in per_token])


MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def test_token_weights_by_hand() -> None:
    lengths, mask = torch.tensor([2, 1, 3]), torch.tensor([True, False, True])
    assert_close(loss.token_weights(lengths, "token-mean", mask), [0.2, 0.2, 0.0, 0.2, 0.2, 0.2])
    assert_close(loss.token_weights(lengths, "seq-mean-token-mean", mask), [1 / 4, 1 / 4, 0.0, 1 / 6, 1 / 6, 1 / 6])
    assert_close(loss.token_weights(lengths, "seq-mean-token-sum", mask), [0.5, 0.5, 0.0, 0.5, 0.5, 0.5])
    weights = loss.token_weights(lengths, "seq-mean-token-sum-norm", mask, max_response_length=5)
    assert_close(weights, [0.1, 0.1, 0.0, 0.1, 0.1, 0.1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep", [[1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 0, 0]])
def test_token_weights_match_reference_for_any_split(mode: str, keep: list[int]) -> None:
    mask = torch.tensor(keep, dtype=torch.bool)
    sequences = randn(0).split(LENGTHS.tolist())
    expected = aggregate_reference([x.tolist() for x, kept in zip(sequences, keep, strict=True) if kept], mode)
    weights = loss.token_weights(LENGTHS, mode, mask, LIMIT).split(LENGTHS.tolist())
    for micro_batches in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2, 0], [3, 1]]):
        total = sum((sequences[i] * weights[i]).sum() for batch in micro_batches for i in batch)
        assert_close(total, expected)


@pytest.mark.parametrize("mode", MODES)
def test_token_weights_of_no_mask_and_of_all_masked(mode: str) -> None:
    everything = loss.token_weights(LENGTHS, mode, torch.ones(4, dtype=torch.bool), LIMIT)
    assert torch.equal(loss.token_weights(LENGTHS, mode, None, LIMIT), everything)
    assert loss.token_weights(LENGTHS, mode, torch.zeros(4, dtype=torch.bool), LIMIT).tolist() == [0.0] * 13


def test_token_weights_reject_unknown_modes() -> None:
    with pytest.raises(ValueError, match="'mean'"):
        loss.token_weights(LENGTHS, "mean")
    with pytest.raises(ValueError, match="seq-mean-token-sum-norm needs max_response_length"):
        loss.token_weights(LENGTHS, "seq-mean-token-sum-norm")


# ---- whole losses as verl and TRL write them: padded [N, L] with a response mask --------------------------------------


def padded(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(x.split(LENGTHS.tolist()), batch_first=True)


def published_per_token(variant: str, x: torch.Tensor, old: torch.Tensor, a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """verl's compute_policy_loss_vanilla, _gspo and _cispo before aggregation, without clamps of the log-ratio."""
    low, high = 0.1, 0.15
    ratio = torch.exp(x - old)
    if variant == "cispo":
        return -ratio.clamp(1 - low, 1 + high).detach() * a * x
    if variant == "gspo":
        mean = ((x - old) * mask).sum(-1) / mask.sum(-1)
        ratio = torch.exp(x - x.detach() + mean.detach()[:, None])
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def published_aggregate(mode: str, per_token: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """verl's agg_loss. TRL calls these dapo (or bnpo), grpo, none, and dr_grpo."""
    match mode:
        case "token-mean":
            return (per_token * mask).sum() / mask.sum()
        case "seq-mean-token-mean":
            return ((per_token * mask).sum(-1) / mask.sum(-1)).mean()
        case "seq-mean-token-sum":
            return (per_token * mask).sum(-1).mean()
    return (per_token * mask).sum() / (len(mask) * LIMIT)


@pytest.mark.parametrize("variant", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("mode", MODES)
def test_losses_as_published_for_any_split(variant: str, mode: str) -> None:
    logprob, old = near(5)
    # Advantages of one group of four; the published one divides by the unbiased std too, TRL with 1e-4 for 1e-6.
    scores = torch.tensor([1.0, 0.0, 0.25, 1.0])
    per_sequence = (scores - scores.mean()) / (scores.std() + 1e-6)
    mask = padded(torch.ones(13))
    x = logprob.clone().requires_grad_()
    per_token = published_per_token(variant, padded(x), padded(old), per_sequence[:, None], mask)
    expected = published_aggregate(mode, per_token, mask)
    expected.backward()

    weights = loss.token_weights(LENGTHS, mode, None, LIMIT)
    advantages = loss.group_advantages(scores, 4, normalise_std=True)[0].repeat_interleave(LENGTHS)
    owner = torch.repeat_interleave(LENGTHS)
    for micro_batches in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2, 0], [3, 1]]):
        y, total = logprob.clone().requires_grad_(), torch.tensor(0.0)
        for batch in micro_batches:
            index = torch.cat([(owner == i).nonzero().squeeze(1) for i in batch])
            mine, means = y[index], None
            if variant == "gspo":
                place = torch.arange(len(batch)).repeat_interleave(LENGTHS[batch])
                means = loss.sequence_means(mine - old[index], place, LENGTHS[batch])
            values, _ = loss.policy_loss(
                mine, old[index], advantages[index], 0.1, 0.15, sequence_logratio=means, cispo=variant == "cispo"
            )
            total = total + (values * weights[index]).sum()
        total.backward()
        torch.testing.assert_close(total, expected, **FP32)
        torch.testing.assert_close(y.grad, x.grad, **FP32)


# ---- KL controller ---------------------------------------------------------------------------------------------------


def test_adaptive_kl_by_hand() -> None:
    control = loss.AdaptiveKL(coef=0.2, target=6.0, horizon=10_000)
    control.update(current=6.6, n_steps=1000)  # error 0.1, times 1000 / 10000
    assert control.coef == pytest.approx(0.2 * 1.01)
    control.coef = 0.2
    control.update(current=600.0, n_steps=1000)  # error 99, clipped to 0.2
    assert control.coef == pytest.approx(0.2 * 1.02)
    control.coef = 0.2
    control.update(current=-1.0, n_steps=1000)  # error below -1, clipped to -0.2
    assert control.coef == pytest.approx(0.2 * 0.98)
    control.coef = 0.2
    control.update(current=6.0, n_steps=1000)
    assert control.coef == 0.2
