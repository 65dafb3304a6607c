"""common/fused_logprob.py against the formula with the whole [T, V] matrix, under autograd, and in memory."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from common.fused_logprob import linear_logprob

T, H, V = 13, 8, 37


def make(dtype: torch.dtype, tokens: int = T, hidden_size: int = H, vocab: int = V) -> tuple[Tensor, ...]:
    """hidden, weight, bias (leaves that want gradients) and targets; logits of order 3, so that softmax is not flat."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden_size, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(vocab, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(vocab, (tokens,), generator=generator)


def naive(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T if bias is None else torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, dim=-1)
    return logp[torch.arange(len(targets)), targets], -(logp.exp() * logp).sum(-1)


def gradients(outputs: tuple[Tensor, Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a sum with a different weight on every token and output, so that no two terms can cancel or swap."""
    logprob, entropy = outputs
    ramp = torch.linspace(-1.0, 2.0, len(logprob), dtype=logprob.dtype)
    return torch.autograd.grad((ramp * logprob).sum() + (ramp.flip(0).cos() * entropy).sum(), inputs)


HEADS = [
    {},
    {"temperature": 0.7},
    {"scale": 0.25},
    {"softcap": 3.0},
    {"temperature": 1.6, "softcap": 2.0, "scale": 1.5},
    {"temperature": 0.5, "scale": 0.5},  # scale / temperature is 1, yet neither is
]


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 13, 1024])
def test_matches_naive_in_fp32(head: dict[str, float], with_bias: bool, chunk_tokens: int) -> None:
    hidden, weight, bias, targets = make(torch.float32)
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    head = head | {"bias": bias if with_bias else None}
    actual, expected = (
        linear_logprob(hidden, weight, targets, chunk_tokens=chunk_tokens, **head),
        naive(hidden, weight, targets, **head),
    )
    # fp32 (eps 1.2e-7), values of order 10, sums over 37 columns or 13 tokens in another order.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(actual, inputs), gradients(expected, inputs), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_gradcheck_in_fp64(head: dict[str, float]) -> None:
    hidden, weight, bias, targets = make(torch.float64, tokens=5, hidden_size=3, vocab=7)

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprob(hidden, weight, targets, bias=bias, chunk_tokens=2, **head)

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("chunk_tokens", [5, 1024])
def test_matches_naive_in_bf16(head: dict[str, float], chunk_tokens: int) -> None:
    hidden, weight, bias, targets = make(torch.bfloat16)
    actual = linear_logprob(hidden, weight, targets, bias=bias, chunk_tokens=chunk_tokens, **head)
    expected = naive(hidden, weight, targets, bias, **head)
    assert actual[0].dtype == actual[1].dtype == torch.float32
    # A matmul of another shape may round a bf16 logit of up to 16 to its neighbour, 2^-4 away, hence not the fp32
    # tolerance. Log-prob moves by twice that at most (target and log-sum-exp), and rarely both are hit.
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=2**-3)
    inputs = [hidden, weight, bias]
    for a, e in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert a.dtype == torch.bfloat16
        # Logit gradients, products and results are each rounded to bf16, eps 2^-8, relative to the largest terms.
        torch.testing.assert_close(a, e, rtol=0.0, atol=4 * 2**-8 * e.abs().max().item())


def test_bf16_matmul_but_fp32_softmax() -> None:
    hidden, weight, _, targets = make(torch.bfloat16)
    logits = hidden @ weight.T
    in_fp32 = torch.log_softmax(logits.float(), -1)[torch.arange(T), targets]
    in_bf16 = torch.log_softmax(logits, -1)[torch.arange(T), targets].float()
    actual, _ = linear_logprob(hidden, weight, targets)  # one chunk: the same matmul
    torch.testing.assert_close(actual, in_fp32, rtol=1e-6, atol=1e-6)
    assert (actual - in_bf16).abs().max() > 1e-3


def test_weight_gradient_is_summed_over_chunks_in_fp32() -> None:
    """512 chunks of one token, the first large: in bf16 the later ones, each below half an ulp, would all be lost."""
    hidden = torch.ones(513, 1, dtype=torch.bfloat16)
    hidden[0] = 512.0
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprob, _ = linear_logprob(hidden, weight, torch.zeros(513, dtype=torch.int64), chunk_tokens=1)
    logprob.sum().backward()
    # p = 1/2 everywhere: (512 + 512 * 1) / 2. In bf16 an ulp of 256 is 2, so adding 1/2 to it gives 256 again.
    assert weight.grad.flatten().tolist() == [512.0, -512.0]


def test_by_hand() -> None:
    # Logits [0, log 3] * 2 / 2: p = [1/4, 3/4], entropy = 2 log 2 - 3/4 log 3. With temperature 0.5: p = [1/10, 9/10].
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [math.log(3)]])
    target = torch.tensor([1])
    logprob, entropy = linear_logprob(hidden, weight, target, scale=2.0, temperature=2.0)
    torch.testing.assert_close(logprob, torch.tensor([math.log(0.75)]))
    torch.testing.assert_close(entropy, torch.tensor([2 * math.log(2) - 0.75 * math.log(3)]))
    logprob, _ = linear_logprob(hidden, weight, target, temperature=0.5)
    torch.testing.assert_close(logprob, torch.tensor([math.log(0.9)]))
    # bias is added before the scale: [0 + 1, log 3 + 1 - log 3] is flat.
    logprob, entropy = linear_logprob(hidden, weight, target, bias=torch.tensor([1.0, 1.0 - math.log(3)]), scale=5.0)
    torch.testing.assert_close(torch.stack([logprob, entropy]), torch.tensor([[-math.log(2)], [math.log(2)]]))


def test_without_entropy() -> None:
    hidden, weight, bias, targets = make(torch.float32)
    logprob, entropy = linear_logprob(
        hidden, weight, targets, bias=bias, softcap=3.0, chunk_tokens=5, with_entropy=False
    )
    expected, _ = naive(hidden, weight, targets, bias, softcap=3.0)
    assert entropy is None
    ramp = torch.linspace(-1.0, 2.0, T)
    torch.testing.assert_close(logprob, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad((ramp * logprob).sum(), [hidden, weight, bias]),
        torch.autograd.grad((ramp * expected).sum(), [hidden, weight, bias]),
        rtol=1e-5,
        atol=2e-5,
    )


@pytest.mark.parametrize("output", [0, 1])
def test_gradient_of_one_output_alone(output: int) -> None:
    hidden, weight, _, targets = make(torch.float32)
    actual = torch.autograd.grad(
        linear_logprob(hidden, weight, targets, chunk_tokens=5)[output].sum(), [hidden, weight]
    )
    expected = torch.autograd.grad(naive(hidden, weight, targets)[output].sum(), [hidden, weight])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs_get_no_gradient_and_others_the_same(frozen: int) -> None:
    hidden, weight, bias, targets = make(torch.float32)
    inputs = [hidden, weight, bias]
    expected = gradients(naive(hidden, weight, targets, bias), inputs)
    inputs[frozen].requires_grad_(False)
    outputs = linear_logprob(hidden, weight, targets, bias=bias, chunk_tokens=5)
    wanted = [i for i in range(3) if i != frozen]
    actual = gradients(outputs, [inputs[i] for i in wanted])
    torch.testing.assert_close(actual, tuple(expected[i] for i in wanted), rtol=1e-5, atol=2e-5)


def test_no_grad() -> None:
    hidden, weight, _, targets = make(torch.float32)
    with torch.no_grad():
        actual = linear_logprob(hidden, weight, targets, chunk_tokens=5)
    assert not actual[0].requires_grad and not actual[1].requires_grad
    torch.testing.assert_close(actual, naive(hidden.detach(), weight.detach(), targets), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tokens(with_entropy: bool) -> None:
    hidden, weight, bias, targets = make(torch.bfloat16, tokens=0)
    logprob, entropy = linear_logprob(hidden, weight, targets, bias=bias, with_entropy=with_entropy)
    assert logprob.shape == (0,) and logprob.dtype == torch.float32 and logprob.requires_grad
    assert (entropy is None) if not with_entropy else (entropy.shape == (0,) and entropy.requires_grad)
    logprob.sum().backward()
    for x in (hidden, weight, bias):
        assert x.grad.shape == x.shape and x.grad.dtype == x.dtype and not x.grad.any()


def test_non_contiguous_hidden() -> None:
    hidden, weight, _, targets = make(torch.float32)
    strided = torch.empty(H, 2 * T).T[::2]  # rows are a stride of 2 apart, columns 2 T
    strided.copy_(hidden.detach())
    strided.requires_grad_()
    assert not strided.is_contiguous()
    actual, expected = linear_logprob(strided, weight, targets, chunk_tokens=5), naive(hidden, weight, targets)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradients(actual, [strided, weight]), gradients(expected, [hidden, weight]), rtol=1e-5, atol=2e-5
    )


def test_weight_storage_may_be_freed_between_forward_and_backward() -> None:
    """What FSDP2 does with reshard_after_forward: same parameter, storage emptied, then gathered again."""
    hidden, weight, _, targets = make(torch.float32)
    expected = gradients(naive(hidden, weight, targets), [hidden, weight])
    outputs = linear_logprob(hidden, weight, targets, chunk_tokens=5)
    kept, storage = weight.detach().clone(), weight.untyped_storage()
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(kept)
    torch.testing.assert_close(gradients(outputs, [hidden, weight]), expected, rtol=1e-5, atol=2e-5)


def test_saves_the_parameter_itself_and_nothing_of_vocabulary_width() -> None:
    hidden, weight, bias, targets = make(torch.float32)
    saved = []
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        linear_logprob(hidden, weight, targets, bias=bias, softcap=3.0, chunk_tokens=5)
    wide = [x for x in saved if V in x.shape]
    assert sorted(x.data_ptr() for x in wide) == sorted([weight.data_ptr(), bias.data_ptr()])
    assert sum(x.numel() for x in saved) == hidden.numel() + weight.numel() + bias.numel() + 3 * T


def peak_bytes(prof: profile) -> int:
    """Most bytes alive at a time of those allocated under the profiler."""
    alive = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_as_documented(dtype: torch.dtype, softcap: float | None) -> None:
    chunk, vocab, hidden_size = 32, 8192, 4
    hidden, weight, _, targets = make(dtype, 4 * chunk, hidden_size, vocab)
    slack = 2**18  # bytes: a quarter of one fp32 [chunk, V] buffer, for [T] vectors and the [V, H] weight gradient
    assert 4 * len(hidden) * 8 + 10 * vocab * hidden_size < 2 * slack
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        logprob, entropy = linear_logprob(hidden, weight, targets, softcap=softcap, chunk_tokens=chunk)
    forward = peak_bytes(prof)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        (logprob.sum() + entropy.sum()).backward()
    backward = peak_bytes(prof)
    buffer = 4 * chunk * vocab
    assert buffer < forward <= 2 * buffer + slack  # the lower bound shows that the profiler saw the logits
    assert buffer < backward <= (2 if softcap is None else 3) * buffer + 2 * slack


def test_rejects_what_would_be_silently_wrong() -> None:
    hidden, weight, _, targets = make(torch.float32)
    with pytest.raises(ValueError, match="targets must be"):
        linear_logprob(hidden, weight, targets[:1])
    with pytest.raises(ValueError, match="chunk_tokens"):
        linear_logprob(hidden, weight, targets, chunk_tokens=-1)
