"""Log-prob and entropy of a linear head without the [tokens, vocab] matrix: actor and reference of every script.

Plain logits of 16,384 tokens at a vocabulary of 152,064 are 10 GB in fp32, several times over in autograd. Here forward
works through `chunk_tokens` tokens at a time and keeps two numbers per token; backward recomputes each chunk's logits
(one more matmul).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class _Options(NamedTuple):
    temperature: float
    softcap: float | None
    scale: float
    chunk_tokens: int
    with_entropy: bool


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: _Options) -> Tensor:
    """[chunk, V] logits that softmax sees: matmul in the inputs' dtype, then fp32 (or fp64, for gradcheck)."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Each of these reads and writes [chunk, V], so the common case of doing nothing skips them.
    if options.scale != 1.0:
        logits.mul_(options.scale)
    if options.softcap is not None:
        logits.div_(options.softcap).tanh_().mul_(options.softcap)
    if options.temperature != 1.0:
        logits.div_(options.temperature)
    return logits


def _chunk_forward(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(logsumexp, logprob, entropy), each [chunk]; overwrites logits."""
    logsumexp = logits.logsumexp(-1)
    logp = logits.sub_(logsumexp[:, None])
    logprob = logp.gather(1, targets[:, None]).squeeze(1)
    entropy = -logp.exp().mul_(logp).sum(-1) if with_entropy else None
    return logsumexp, logprob, entropy


def _chunk_backward(
    logits: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    entropy: Tensor | None,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    options: _Options,
) -> Tensor:
    """[chunk, V] gradient of hidden @ weight.T + bias; overwrites logits."""
    if options.softcap is not None:
        # d softcap * tanh(x / softcap) / dx = 1 - tanh^2, before logits are overwritten
        slope = logits.mul(options.temperature / options.softcap).square_().neg_().add_(1.0)
    logp = logits.sub_(logsumexp[:, None])
    grad = logp.exp()
    # d logprob / d logits = onehot(target) - p;  d entropy / d logits = -p * (logp + entropy)
    if entropy is None or grad_entropy is None:
        grad.mul_(-grad_logprob[:, None])
    else:
        logp.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprob[:, None])
        grad.mul_(logp).neg_()
    grad.scatter_add_(1, targets[:, None], grad_logprob[:, None])
    if options.softcap is not None:
        grad.mul_(slope)
    if options.scale != options.temperature:
        grad.mul_(options.scale / options.temperature)
    return grad


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor | None]:
        logprob = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        logsumexp = torch.empty_like(logprob)
        entropy = torch.empty_like(logprob) if options.with_entropy else None
        for start in range(0, len(hidden), options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            # The logits stay unnamed, so that those of one chunk are gone before the next chunk's are made.
            logsumexp[chunk], logprob[chunk], chunk_entropy = _chunk_forward(
                _logits(hidden[chunk], weight, bias, options), targets[chunk], options.with_entropy
            )
            if entropy is not None:
                entropy[chunk] = chunk_entropy
        # FSDP2 may free the weight's storage and gather it again before backward: save the parameter, never a copy.
        ctx.save_for_backward(hidden, weight, bias, targets, logsumexp, entropy)
        ctx.options = options
        ctx.set_materialize_grads(False)  # an output that no loss uses has the gradient None, and costs nothing in backward
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, logsumexp, entropy = ctx.saved_tensors
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(logsumexp)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=logsumexp.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=logsumexp.dtype) if needs_bias else None
        for start in range(0, len(hidden), ctx.options.chunk_tokens):
            chunk = slice(start, start + ctx.options.chunk_tokens)
            grad = _chunk_backward(
                _logits(hidden[chunk], weight, bias, ctx.options),
                targets[chunk],
                logsumexp[chunk],
                entropy[chunk] if entropy is not None else None,
                grad_logprob[chunk],
                grad_entropy[chunk] if grad_entropy is not None else None,
                ctx.options,
            )
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)  # the matmuls run in the dtype that autograd's would
            if grad_hidden is not None:
                grad_hidden[chunk] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[chunk]
            del grad  # as in forward
        grad_weight = grad_weight.to(weight.dtype) if grad_weight is not None else None
        grad_bias = grad_bias.to(bias.dtype) if bias is not None and grad_bias is not None else None
        return grad_hidden, grad_weight, grad_bias, None, None


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk_tokens: int = 1024,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of `targets` and entropy, in nats, under softmax(cap((hidden @ weight.T + bias) * scale) / temperature).

    cap(x) = softcap * tanh(x / softcap) (Gemma 2, arXiv 2408.00118, section 2), or x where softcap is None. Gradients
    of both outputs flow exactly to hidden, weight and bias; there is no second derivative.

    Args: hidden [T, H], any strides, T may be 0; weight [V, H] and bias [V] of hidden's dtype; targets [T] int64 in
    [0, V); with_entropy=False saves a pass over [chunk, V]. Returns (logprob [T], entropy [T] or None), fp32.
    Raises ValueError unless there is one target per token and chunk_tokens >= 1; a bad target fails in torch's gather.

    Bytes beyond inputs and outputs, for C = chunk_tokens: 4 T (log-sum-exp) between the passes. Forward peaks at 8 C V:
    logits and their exponentials. Backward peaks at 8 C V too, logits and their gradient, or 12 C V with softcap; the
    weight gradient adds 4 V H for the fp32 sum over chunks and V H elements of weight's dtype for the current chunk.
    """
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be [T] = {list(hidden.shape[:1])}, got {list(targets.shape)}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    options = _Options(temperature, softcap, scale, chunk_tokens, with_entropy)
    return _LinearLogprob.apply(hidden, weight, bias, targets, options)
