"""Run on 1, 2 and 4 ranks: the vocab-parallel log-prob against the whole [T, V] matrix; Megatron's attention, packed and spread over
context-parallel ranks, against each sequence by itself."""

import dataclasses
import itertools
from datetime import timedelta
from types import SimpleNamespace

import launch.cpu_engines.megatron  # noqa: F401  before megatron

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from common.attention import MegatronAttention, context_parallel_index
from common.fused_logprob import linear_logprob

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
RANK, WORLD = dist.get_rank(), dist.get_world_size()
GROUP = dist.group.WORLD
HEADS = [{}, {"temperature": 0.7}, {"temperature": 1.6, "softcap": 2.0, "scale": 1.5}, {"scale": 200.0}]
# (vocab, rows on all ranks): no padding; padding; ranks with nothing else (on 4 ranks one, on 2 none, then three and one)
VOCABS = [(40, 40), (37, 40), (5, 12), (1, 8)]
T, H = 13, 8


def make(dtype: torch.dtype, vocab: int, rows: int, tokens: int = T, padding: float = torch.nan) -> tuple[Tensor, ...]:
    """hidden [T, H], weight [rows, H], bias [rows] and targets, on every rank the same; logits of order 3."""
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((tokens, H), (rows, H), (rows,)))
    weight[vocab:], bias[vocab:] = padding, padding
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), torch.randint(vocab, (tokens,), generator=g)


def whole(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, vocab: int, temperature=1.0, softcap=None, scale=1.0):
    logits = F.linear(hidden, weight[:vocab], bias[:vocab])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def weighted(logprob: Tensor, entropy: Tensor | None) -> Tensor:
    """A different weight on every token and output, so that no two terms can cancel or swap."""
    ramp = torch.linspace(-1.0, 2.0, len(logprob), dtype=logprob.dtype)
    return (ramp * logprob).sum() + (0.0 if entropy is None else (ramp.flip(0).cos() * entropy).sum())


def spread(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, vocab: int | None, with_entropy: bool = True, **options):
    """linear_logprob on this rank's rows; (outputs, gradients of hidden, summed over ranks, and of this rank's weight and bias)."""
    leaves = [x.clone().requires_grad_() for x in (hidden, weight.chunk(WORLD)[RANK], bias.chunk(WORLD)[RANK])]
    outputs = linear_logprob(
        leaves[0], leaves[1], targets, bias=leaves[2], group=GROUP, vocab_size=vocab, with_entropy=with_entropy, **options
    )
    weighted(*outputs).backward()
    total = leaves[0].grad.to(torch.promote_types(hidden.dtype, torch.float32))
    dist.all_reduce(total)
    return outputs, (total, leaves[1].grad, leaves[2].grad)


def expect(inputs: tuple[Tensor, ...], vocab: int, with_entropy: bool = True, **head: float):
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    logprob, entropy = whole(*leaves, inputs[3], vocab, **head)
    weighted(logprob, entropy if with_entropy else None).backward()
    grad_hidden, grad_weight, grad_bias = (x.grad for x in leaves)
    return (logprob, entropy), (grad_hidden, grad_weight.chunk(WORLD)[RANK], grad_bias.chunk(WORLD)[RANK])


def case_logprob_equals_whole_matrix():
    """Padding is NaN: whatever touches it shows. fp64 to 1e-12; fp32 as in tests/test_fused_logprob.py."""
    for (vocab, rows), head, chunk, (dtype, rtol, atol) in itertools.product(
        VOCABS, HEADS, (5, 1024), ((torch.float64, 1e-12, 1e-12), (torch.float32, 1e-5, 2e-5))
    ):
        if dtype == torch.float32 and "scale" in head and "softcap" not in head:
            continue  # logits of 600: fp32 itself is off by more
        inputs = make(dtype, vocab, rows)
        outputs, gradients = spread(*inputs, vocab, chunk_tokens=chunk, **head)
        expected = expect(inputs, vocab, **head)
        torch.testing.assert_close(outputs, expected[0], rtol=rtol, atol=atol)
        scale = max(1.0, *(x.abs().max().item() for x in expected[1]))
        torch.testing.assert_close(gradients, expected[1], rtol=rtol, atol=atol * scale)
        first = min(max(vocab - RANK * rows // WORLD, 0), rows // WORLD)
        assert not gradients[1][first:].any() and not gradients[2][first:].any()


def case_logprob_without_vocab_size_takes_every_row():
    inputs = make(torch.float64, 40, 40)
    outputs, gradients = spread(*inputs, None)
    torch.testing.assert_close((outputs, gradients), expect(inputs, 40), rtol=1e-12, atol=1e-12)


def case_logprob_is_the_same_on_every_rank():
    (logprob, entropy), _ = spread(*make(torch.float32, 37, 40), 37)
    mine = torch.stack([logprob, entropy]).detach()
    every = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(every, mine)
    assert all(torch.equal(x, mine) for x in every)


def case_logprob_in_bf16():
    """Tolerances of tests/test_fused_logprob.py: a logit of up to 16 may round to its neighbour, 2^-4 away; eps is 2^-8."""
    inputs = make(torch.bfloat16, 37, 40)
    outputs, gradients = spread(*inputs, 37, chunk_tokens=5)
    assert outputs[0].dtype == outputs[1].dtype == torch.float32
    expected = expect(inputs, 37)
    torch.testing.assert_close(outputs, expected[0], rtol=0.0, atol=2**-3)
    for a, e in zip(gradients, expected[1], strict=True):
        torch.testing.assert_close(a.float(), e.float(), rtol=0.0, atol=4 * 2**-8 * e.abs().max().item())


def case_logprob_of_no_tokens():
    (logprob, entropy), gradients = spread(*make(torch.float32, 5, 12, tokens=0), 5)
    assert logprob.shape == entropy.shape == (0,) and not any(x.any() for x in gradients)


def case_logprob_without_entropy():
    inputs = make(torch.float64, 5, 12)
    (logprob, entropy), gradients = spread(*inputs, 5, with_entropy=False, chunk_tokens=5)
    expected = expect(inputs, 5, with_entropy=False)
    assert entropy is None
    torch.testing.assert_close((logprob, gradients), (expected[0][0], expected[1]), rtol=1e-12, atol=1e-12)


def case_logprob_gradcheck_with_padding():
    """Numerically, in one process: other ranks' weights would move the outputs too."""
    hidden, weight, bias, targets = make(torch.float64, 5, 8, tokens=3, padding=1.0)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(lambda h, w, b: linear_logprob(h, w, targets, bias=b, vocab_size=5, chunk_tokens=2), inputs)


def refused(call, error: type[Exception], words: str) -> None:
    try:
        call()
    except error as e:
        assert words in str(e), e
    else:
        raise AssertionError(f"nothing refused: {words}")


def case_logprob_refuses_bad_targets_and_sizes():
    *inputs, targets = make(torch.float32, 37, 40)
    for bad in (-1, 37, 39, 40):  # below, padding, and beyond it: on every rank, so that none waits for another
        one_bad = targets.index_fill(0, torch.tensor(3), bad)
        refused(lambda one_bad=one_bad: spread(*inputs, one_bad, 37), RuntimeError, "out of bounds")
    for size in (0, 41):
        refused(lambda size=size: spread(*inputs, targets, size), ValueError, "vocab_size must be in 1..40")


LENGTHS = [n * 2 * WORLD for n in (3, 1, 6, 2)] if WORLD > 1 else [5, 1, 12, 3]
CU_SEQLENS = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
MINE = context_parallel_index(CU_SEQLENS, WORLD, RANK)
PACKED = PackedSeqParams("thd", CU_SEQLENS, CU_SEQLENS, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS))


def make_config(cp: int, **overrides) -> TransformerConfig:
    defaults = dict(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8, attention_dropout=0.0, hidden_dropout=0.0,
        add_bias_linear=False, context_parallel_size=cp, use_cpu_initialization=True, apply_rope_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return TransformerConfig(**defaults | overrides)


def core_attention(**overrides) -> MegatronAttention:
    return MegatronAttention(make_config(WORLD), 1, AttnMaskType.causal, "self", pg_collection=SimpleNamespace(cp=GROUP), **overrides)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """The slow, obvious reference: a sequence and a head at a time."""
    out = torch.zeros_like(q)
    for start, end in itertools.pairwise(CU_SEQLENS.tolist()):
        future = torch.ones(end - start, end - start).triu(1).bool()
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = q[start:end, head] @ k[start:end, kv_head].T * scaling
            out[start:end, head] = scores.masked_fill(future, -torch.inf).softmax(-1) @ v[start:end, kv_head]
    return out


def case_context_parallel_index_by_hand():
    cu_seqlens = torch.tensor([0, 4, 12])
    assert context_parallel_index(cu_seqlens, 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert context_parallel_index(cu_seqlens, 2, 1).tolist() == [1, 2, 6, 7, 8, 9]
    assert context_parallel_index(torch.tensor([0, 3, 5]), 1, 0).tolist() == [0, 1, 2, 3, 4]
    every = torch.cat([context_parallel_index(CU_SEQLENS, WORLD, r) for r in range(WORLD)])
    assert every.sort().values.tolist() == list(range(sum(LENGTHS)))
    refused(lambda: context_parallel_index(torch.tensor([0, 4, 10]), 2, 0), ValueError, "pad lengths [4, 6] to multiples of 4")


def case_attention_equals_one_by_one():
    """Outputs and gradients of q, k, v, for one, two and four heads a key, in fp64, with Megatron's own scale, and with padding."""
    g = torch.Generator().manual_seed(0)
    unpadded = CU_SEQLENS - torch.arange(len(CU_SEQLENS), dtype=torch.int32)  # a token less each: not what counts
    padded = dataclasses.replace(PACKED, cu_seqlens_q=unpadded, cu_seqlens_q_padded=CU_SEQLENS)
    for heads, kv_heads, scaling, packed in ((4, 4, None, PACKED), (4, 2, 0.1, PACKED), (4, 1, None, padded)):
        full = [torch.randn(sum(LENGTHS), n, 8, generator=g, dtype=torch.float64) for n in (heads, kv_heads, kv_heads, heads)]
        leaves = [x.clone().requires_grad_() for x in full[:3]]
        expected = one_by_one(*leaves, scaling or 8**-0.5)
        expected.backward(full[3])
        mine = [x[MINE].requires_grad_() for x in full[:3]]
        out = core_attention(softmax_scale=scaling)(*mine, None, packed_seq_params=packed)
        out.backward(full[3][MINE].flatten(1))
        torch.testing.assert_close(out, expected[MINE].flatten(1), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close([x.grad for x in mine], [x.grad[MINE] for x in leaves], rtol=1e-12, atol=1e-12)


def case_attention_in_megatrons_layer():
    """Its SelfAttention, with rotary embedding: packed, over all ranks and with ours inside, against its own, a sequence at a time."""
    parallel_state.initialize_model_parallel(context_parallel_size=WORLD)
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    alone = ProcessGroupCollection(tp=groups.tp, cp=groups.tp)  # a group of one rank
    spec = get_gpt_layer_local_spec().submodules.self_attention
    own = build_module(spec, config=make_config(1), layer_number=1, pg_collection=alone)
    spec.submodules.core_attention = MegatronAttention
    ours = build_module(spec, config=make_config(WORLD), layer_number=1, pg_collection=groups)
    ours.load_state_dict(own.state_dict())
    rotary = RotaryEmbedding(8, rotary_percent=1.0, use_cpu_initialization=True, cp_group=groups.cp)
    g = torch.Generator().manual_seed(0)
    hidden, grad = (torch.randn(sum(LENGTHS), 1, 32, generator=g) for _ in range(2))
    leaf, mine = hidden.clone().requires_grad_(), hidden[MINE].requires_grad_()
    expected = []
    for row in leaf.split(LENGTHS):
        mask = torch.ones(1, 1, len(row), len(row)).triu(1).bool()
        expected.append(own(row, mask, rotary_pos_emb=rotary(len(row), packed_seq=True))[0])
    torch.cat(expected).backward(grad)
    out = ours(mine, None, rotary_pos_emb=rotary(max(LENGTHS), packed_seq=True), packed_seq_params=PACKED)[0]
    out.backward(grad[MINE])
    torch.testing.assert_close(out, torch.cat(expected)[MINE], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.grad, leaf.grad[MINE], rtol=1e-5, atol=1e-5)
    for (name, p), q in zip(own.named_parameters(), ours.parameters(), strict=True):
        dist.all_reduce(q.grad)
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-4, msg=name)
    parallel_state.destroy_model_parallel()


def case_attention_refuses_what_it_cannot_do():
    for config, words in (
        (make_config(WORLD, attention_dropout=0.1), "attention_dropout is 0.1: set it to 0"),
        (make_config(WORLD, window_size=(8, 0)), "window_size (8, 0)"),
        (make_config(WORLD, softmax_type="learnable"), "softmax_type 'learnable'"),
    ):
        refused(lambda config=config: MegatronAttention(config, 1, AttnMaskType.causal, "self"), ValueError, words)
    refused(lambda: MegatronAttention(make_config(WORLD), 1, AttnMaskType.padding, "self"), ValueError, "attention mask 'padding'")
    x = torch.zeros(2, 2, 8)
    refused(lambda: core_attention()(x, x, x, None), ValueError, 'qkv_format "thd"')
    refused(lambda: core_attention()(x, x, x, torch.ones(1), packed_seq_params=PACKED), ValueError, "give neither attention_mask")
