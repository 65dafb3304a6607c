"""common/loss.py against one-token-at-a-time Python in fp64, hand-computed cases and autograd."""

import math
import statistics

import pytest
import torch
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


def aggregate_reference(per_token: list[list[float]], mode: str) -> float:
    """Means spelled out over the kept sequences' lists."""
    if mode == "token-mean":
        return statistics.fmean([x for sequence in per_token for x in sequence])
    reduce = statistics.fmean if mode == "seq-mean-token-mean" else sum
    return statistics.fmean([reduce(sequence) for sequence in per_token])


MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


def test_token_weights_by_hand() -> None:
    lengths, mask = torch.tensor([2, 1, 3]), torch.tensor([True, False, True])
    assert_close(loss.token_weights(lengths, "token-mean", mask), [0.2, 0.2, 0.0, 0.2, 0.2, 0.2])
    assert_close(loss.token_weights(lengths, "seq-mean-token-mean", mask), [1 / 4, 1 / 4, 0.0, 1 / 6, 1 / 6, 1 / 6])
    assert_close(loss.token_weights(lengths, "seq-mean-token-sum", mask), [0.5, 0.5, 0.0, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keep", [[1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 0, 0]])
def test_token_weights_match_reference_for_any_split(mode: str, keep: list[int]) -> None:
    mask = torch.tensor(keep, dtype=torch.bool)
    sequences = randn(0).split(LENGTHS.tolist())
    expected = aggregate_reference([x.tolist() for x, kept in zip(sequences, keep, strict=True) if kept], mode)
    weights = loss.token_weights(LENGTHS, mode, mask).split(LENGTHS.tolist())
    for micro_batches in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2, 0], [3, 1]]):
        total = sum((sequences[i] * weights[i]).sum() for batch in micro_batches for i in batch)
        assert_close(total, expected)


@pytest.mark.parametrize("mode", MODES)
def test_token_weights_of_no_mask_and_of_all_masked(mode: str) -> None:
    everything = loss.token_weights(LENGTHS, mode, torch.ones(4, dtype=torch.bool))
    assert torch.equal(loss.token_weights(LENGTHS, mode), everything)
    assert loss.token_weights(LENGTHS, mode, torch.zeros(4, dtype=torch.bool)).tolist() == [0.0] * 13


def test_token_weights_reject_unknown_modes() -> None:
    with pytest.raises(ValueError, match="'mean'"):
        loss.token_weights(LENGTHS, "mean")


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
