"""Log-prob and entropy of a linear head without the [tokens, vocab] matrix: actor and reference of every script.

Plain logits of 16,384 tokens at a vocabulary of 152,064 are 10 GB in fp32, several times over in autograd. Here forward
works through `chunk_tokens` tokens at a time and keeps two numbers per token; backward recomputes each chunk's logits
(one more matmul). With the vocabulary spread over a tensor-parallel group, each rank does so for its own columns, and the
ranks exchange four numbers per token, once.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class _Options(NamedTuple):
    temperature: float
    softcap: float | None
    scale: float
    chunk_tokens: int
    with_entropy: bool
    group: dist.ProcessGroup | None
    first: int  # the vocabulary's index of this rank's first row of weight
    columns: int  # of weight's rows, those that are not padding, which comes last
    vocab_size: int


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


def _own_targets(targets: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """(row of this rank's weight, or 0 where another rank has it; whether another has it). A bad target stays out of range."""
    rows = targets - options.first
    elsewhere = (targets >= 0) & (targets < options.vocab_size) & ((rows < 0) | (rows >= options.columns))
    return rows.masked_fill(elsewhere, 0), elsewhere


def _chunk_statistics(logits: Tensor, targets: Tensor, with_entropy: bool) -> Tensor:
    """Over this rank's columns, maximum m, sum of exp(x - m), logit of the target and, for the entropy, sum of
    exp(x - m) (x - m): [3 or 4, chunk]; overwrites logits."""
    target_logit = logits.gather(1, targets[:, None]).squeeze(1)
    maximum = logits.amax(-1)
    exponentials = logits.sub_(maximum[:, None]).exp()
    statistics = [maximum, exponentials.sum(-1), target_logit]
    if with_entropy:
        statistics.append(exponentials.mul_(logits).sum(-1))
    return torch.stack(statistics)


def _parallel_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(logsumexp, logprob, entropy), each [T], the same on every rank: the ranks' statistics are merged as an online softmax
    merges its blocks (Milakov and Gimelshein, arXiv 1805.02867, section 3.1)."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    own = hidden.new_zeros(4 if options.with_entropy else 3, len(hidden), dtype=dtype)
    targets, elsewhere = _own_targets(targets, options)
    if options.columns == 0:
        own[0] = torch.finfo(dtype).min  # not -inf, for below it is multiplied by this rank's sums, which are 0
    else:
        for start in range(0, len(hidden), options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            own[:, chunk] = _chunk_statistics(_logits(hidden[chunk], weight, bias, options), targets[chunk], options.with_entropy)
        own[2].masked_fill_(elsewhere, 0.0)
    every = own.new_empty(dist.get_world_size(options.group) * len(own), len(hidden))
    dist.all_gather_into_tensor(every, own, group=options.group)
    maxima, sums, target_logits, *weighted = every.unflatten(0, (-1, len(own))).unbind(1)  # each [ranks, T]
    maximum = maxima.amax(0)
    shift = maxima - maximum
    share = shift.exp()
    total = (share * sums).sum(0)
    log_total = total.log()
    # -sum p log p, with x - maximum = (x - m) + shift. Neither term is negative, so nothing cancels.
    entropy = log_total - (share * (weighted[0] + shift * sums)).sum(0) / total if weighted else None
    return maximum + log_total, target_logits.sum(0) - maximum - log_total, entropy


def _chunk_backward(
    logits: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    entropy: Tensor | None,
    grad_logprob: Tensor,
    grad_target: Tensor,
    grad_entropy: Tensor | None,
    options: _Options,
) -> Tensor:
    """[chunk, V] gradient of hidden @ weight.T + bias; overwrites logits. grad_target is grad_logprob where the target's
    column is here, else 0."""
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
    grad.scatter_add_(1, targets[:, None], grad_target[:, None])
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
        own_weight, own_bias = weight[: options.columns], bias[: options.columns] if bias is not None else None
        if options.group is None:
            logprob = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
            logsumexp = torch.empty_like(logprob)
            entropy = torch.empty_like(logprob) if options.with_entropy else None
            for start in range(0, len(hidden), options.chunk_tokens):
                chunk = slice(start, start + options.chunk_tokens)
                # The logits stay unnamed, so that those of one chunk are gone before the next chunk's are made.
                logsumexp[chunk], logprob[chunk], chunk_entropy = _chunk_forward(
                    _logits(hidden[chunk], own_weight, own_bias, options), targets[chunk], options.with_entropy
                )
                if entropy is not None:
                    entropy[chunk] = chunk_entropy
        else:
            logsumexp, logprob, entropy = _parallel_forward(hidden, own_weight, own_bias, targets, options)
        # FSDP2 may free the weight's storage and gather it again before backward: save the parameter, never a copy.
        ctx.save_for_backward(hidden, weight, bias, targets, logsumexp, entropy)
        ctx.options = options
        ctx.set_materialize_grads(False)  # an output that no loss uses has the gradient None, and costs nothing in backward
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, logsumexp, entropy = ctx.saved_tensors
        columns = ctx.options.columns
        own_weight, own_bias = weight[:columns], bias[:columns] if bias is not None else None
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(logsumexp)
        grad_target = grad_logprob
        if ctx.options.group is not None:
            targets, elsewhere = _own_targets(targets, ctx.options)
            grad_target = grad_logprob.masked_fill(elsewhere, 0.0)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = (torch.empty_like if columns else torch.zeros_like)(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=logsumexp.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=logsumexp.dtype) if needs_bias else None
        for start in range(0, len(hidden) if columns else 0, ctx.options.chunk_tokens):
            chunk = slice(start, start + ctx.options.chunk_tokens)
            grad = _chunk_backward(
                _logits(hidden[chunk], own_weight, own_bias, ctx.options),
                targets[chunk],
                logsumexp[chunk],
                entropy[chunk] if entropy is not None else None,
                grad_logprob[chunk],
                grad_target[chunk],
                grad_entropy[chunk] if grad_entropy is not None else None,
                ctx.options,
            )
            if grad_bias is not None:
                grad_bias[:columns] += grad.sum(0)
            grad = grad.to(weight.dtype)  # the matmuls run in the dtype that autograd's would
            if grad_hidden is not None:
                grad_hidden[chunk] = grad @ own_weight
            if grad_weight is not None:
                grad_weight[:columns] += grad.T @ hidden[chunk]
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
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of `targets` and entropy, in nats, under softmax(cap((hidden @ weight.T + bias) * scale) / temperature).

    cap(x) = softcap * tanh(x / softcap) (Gemma 2, arXiv 2408.00118, section 2), or x where softcap is None. Gradients
    of both outputs flow exactly to hidden, weight and bias; there is no second derivative.

    Args: hidden [T, H], any strides, T may be 0; weight [V, H] and bias [V] of hidden's dtype; targets [T] int64 in
    [0, V); with_entropy=False saves a pass over [chunk, V]. Returns (logprob [T], entropy [T] or None), fp32.
    vocab_size: rows of weight (of all ranks', with a group) from this on are padding. They take no probability, whatever
    they hold, and their gradient is exactly 0.
    Raises ValueError unless there is one target per token, chunk_tokens >= 1, and the rows suffice for vocab_size; a bad
    target fails in torch's gather.

    With a tensor-parallel group weight and bias are this rank's equal share of the rows, in rank order; hidden and targets
    are the same on every rank, and so are the results, to the bit. One all-gather of 16 bytes a token and rank, in forward.
    The gradients of weight and bias are complete, for this rank's rows; hidden's is this rank's PARTIAL sum, which the
    caller adds up over the group: what Megatron's copy_to_tensor_model_parallel_region, or with sequence parallelism
    gather_from_sequence_parallel_region, applied to hidden, do in backward.

    Bytes beyond inputs and outputs, for C = chunk_tokens: 4 T (log-sum-exp) between the passes. Forward peaks at 8 C V:
    logits and their exponentials. Backward peaks at 8 C V too, logits and their gradient, or 12 C V with softcap; the
    weight gradient adds 4 V H for the fp32 sum over chunks and V H elements of weight's dtype for the current chunk.
    """
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be [T] = {list(hidden.shape[:1])}, got {list(targets.shape)}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if group is not None and group.size() == 1:
        group = None
    ranks, rank = (group.size(), group.rank()) if group is not None else (1, 0)
    rows = len(weight)
    if vocab_size is None:
        vocab_size = ranks * rows
    elif not 1 <= vocab_size <= ranks * rows:
        raise ValueError(f"vocab_size must be in 1..{ranks * rows}, the rows of weight on all ranks, got {vocab_size}")
    columns = min(max(vocab_size - rank * rows, 0), rows)
    options = _Options(temperature, softcap, scale, chunk_tokens, with_entropy, group, rank * rows, columns, vocab_size)
    return _LinearLogprob.apply(hidden, weight, bias, targets, options)
