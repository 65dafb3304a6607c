"""Packed attention: many sequences in one row, no padding, none sees another.

For any Hugging Face causal LM (callers: the FSDP scripts). Importing this module registers the implementation "packed"
with transformers; a model built with attn_implementation="packed" is then called as

    model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **packed_kwargs(cu_seqlens, max_seqlen))

The keyword names are the ones transformers itself uses for FlashAttention, so attn_implementation="flash_attention_2"
takes the same call.

For Megatron-Core's local layer spec, with context parallelism (callers: the Megatron scripts): MegatronAttention.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

try:
    from torch.nn.attention.varlen import varlen_attn

    _VARLEN_ARGS = set(inspect.signature(varlen_attn).parameters)
except ImportError:  # torch < 2.10
    _VARLEN_ARGS = set()

PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


def check_packable(config: PretrainedConfig, model_class: type) -> None:
    """Refuse by name what packed attention cannot express.

    Raises:
        ValueError: the model's attention does not go through transformers' attention interface, or some layers are
            linear, recurrent or chunked attention, whose state would leak between packed sequences.
    """
    name = config.model_type
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ValueError(f"model type {name!r}: its attention cannot be replaced (no attention interface in transformers)")
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ["full_attention"])
    if kinds - PACKABLE_LAYERS:
        raise ValueError(f"model type {name!r} has layers of kind {sorted(kinds - PACKABLE_LAYERS)}, which cannot be packed; "
                         f"supported: {sorted(PACKABLE_LAYERS)}")
    if getattr(config, "attention_chunk_size", None) or getattr(config, "use_bidirectional_attention", False):
        raise ValueError(f"model type {name!r} uses chunked or bidirectional attention, which cannot be packed")


def packed_kwargs(cu_seqlens: Tensor, max_seqlen: int) -> dict[str, Any]:
    """cu_seqlens: [sequences + 1] int32, cumulative lengths from 0; max_seqlen: longest sequence, in tokens."""
    return dict(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=max_seqlen, max_length_k=max_seqlen)


def _window_of_layer(
    *args: Any, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any
) -> int | None:
    """Stands where transformers builds a mask. Packing needs none, but a mask is also how a layer learns of its sliding
    window, and returning None would drop it silently: so the "mask" handed to the layer is the window's width."""
    if use_vmap:
        raise ValueError("this model changes the causal mask with a function of its own, which packed attention cannot express")
    return local_size


def _packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: int | None, *, cu_seq_lens_q: Tensor,
    max_length_q: int, scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: [1, heads, T, head_dim]; key, value: [1, kv_heads, T, head_dim] -> [1, T, heads, head_dim].

    Dropout is ignored on purpose: with it, the same policy would give two different log-probs.
    """
    window = attention_mask if attention_mask is not None else sliding_window
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, head_dim]
    if q.is_cuda and q.dtype != torch.float32 and softcap is None and s_aux is None:
        out = _varlen(q, k, v, cu_seq_lens_q, max_length_q, scaling, window)
    else:
        out = _dense(q, k, v, cu_seq_lens_q, max_length_q, scaling, window, softcap=softcap, sinks=s_aux)
    return out[None], None


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scaling: float, window: int | None,
    keys: tuple[Tensor, int] | None = None,
) -> Tensor:
    """torch's varlen FlashAttention; spelled for torch 2.11 (neither scale nor grouped heads) and later.

    keys: cu_seqlens and max_seqlen of k and v where they are longer than q's; the last query then sees the last key.
    """
    if not _VARLEN_ARGS:
        raise RuntimeError('attention "packed" needs torch 2.10 or newer on CUDA; use attention "flash_attention_2"')
    extra: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if "scale" in _VARLEN_ARGS:
        extra["scale"] = scaling
    else:
        q = q * (scaling * q.shape[-1] ** 0.5)
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and "enable_gqa" in _VARLEN_ARGS:
        extra["enable_gqa"] = True
    elif groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    cu_seqlens_k, max_seqlen_k = keys or (cu_seqlens, max_seqlen)
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **extra)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scaling: float, window: int | None,
    keys: tuple[Tensor, int] | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Exact attention over a padded view: the CPU's path, and CUDA's for fp32, softcapping and attention sinks.

    Sequences are padded on the right, so causality alone keeps every real query from the padding. keys: as in _varlen.
    """

    def pad(x: Tensor, places: tuple[Tensor, Tensor], longest: int) -> Tensor:
        """[T, heads, head_dim] -> [sequences, heads, longest, head_dim]"""
        out = x.new_zeros(len(cu_seqlens) - 1, longest, *x.shape[1:])
        out[places] = x
        return out.transpose(1, 2)

    cu_seqlens_k, max_seqlen_k = keys or (cu_seqlens, max_seqlen)
    groups = q.shape[1] // k.shape[1]
    places, places_k = _sequence_and_position(cu_seqlens, q.shape[0]), _sequence_and_position(cu_seqlens_k, k.shape[0])
    q = pad(q, places, max_seqlen)
    k, v = (pad(x, places_k, max_seqlen_k).repeat_interleave(groups, 1) for x in (k, v))
    behind = torch.arange(max_seqlen, device=q.device)[:, None] - torch.arange(max_seqlen_k, device=q.device)
    if keys is not None:
        behind = behind + (cu_seqlens_k.diff() - cu_seqlens.diff())[:, None, None, None]
    visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scaling)
    else:
        scores = (q @ k.transpose(-1, -2)).float() * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:  # one more column that takes probability and gives no value
            column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], dim=-1)
        out = scores.softmax(-1)[..., :max_seqlen_k].to(v.dtype) @ v
    return out.transpose(1, 2)[places]


def _sequence_and_position(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Of each of the `total` tokens of a packed row: its sequence's number and its place in it. Given the total, no GPU waits."""
    sequence = torch.repeat_interleave(cu_seqlens.diff().long(), output_size=total)
    return sequence, torch.arange(total, device=cu_seqlens.device) - cu_seqlens[sequence]


def context_parallel_index(cu_seqlens: Tensor, cp: int, rank: int) -> Tensor:
    """Places in a packed row that a context-parallel rank holds, in its own order: int64 [T / cp].

    The zigzag layout, of which Megatron's rotary embedding is also written: each sequence is cut into 2 cp chunks, and rank r
    holds chunks r and 2 cp - 1 - r, so that under a causal mask every rank has the same work.

    Args: cu_seqlens [sequences + 1], cumulative lengths, padding counted, from 0 to T.
    Raises ValueError unless every length is a multiple of 2 cp (for cp = 1 any length will do).
    """
    if cp == 1:
        return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    lengths = cu_seqlens.diff()
    if (lengths % (2 * cp)).any():
        raise ValueError(f"context parallelism over {cp} ranks cuts sequences into {2 * cp} chunks: pad lengths {lengths.tolist()} "
                         f"to multiples of {2 * cp}")
    return _context_parallel_layout(cu_seqlens, cp, int(cu_seqlens[-1]) // cp)[rank]


def _context_parallel_layout(cu_seqlens: Tensor, cp: int, rows: int) -> Tensor:
    """[cp, rows]: context_parallel_index of every rank, each of which holds `rows` tokens."""
    sequence, position = _sequence_and_position(cu_seqlens // cp, rows)
    chunk = cu_seqlens.diff()[sequence] // (2 * cp)
    rank = torch.arange(cp, device=cu_seqlens.device)[:, None]
    elsewhere = torch.where(position < chunk, rank, 2 * cp - 2 - rank)  # chunks that come before this one and are not held here
    return cu_seqlens[sequence] + position + elsewhere * chunk


def _gather_prefixes(
    key: Tensor, value: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each chunk of queries that this rank holds, all keys and values of its sequence up to the chunk's end.

    key, value: [T / cp, kv_heads, head_dim], this rank's. Returns keys and values [T + T / (2 cp), kv_heads, head_dim] (a rank's
    two chunks of a sequence share a prefix, which is there twice), cu_seqlens of the query chunks and of the prefixes
    [2 sequences + 1]. The copy that undoes the zigzag order makes the prefixes too. Backward sums over the ranks.
    """
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    cp, rank, rows = group.size(), group.rank(), len(key)
    both = gather_from_sequence_parallel_region(torch.stack((key, value), 1), group=group)
    places = _context_parallel_layout(cu_seqlens, cp, rows).flatten()
    row_of_place = torch.empty_like(places)
    row_of_place[places] = torch.arange(len(places), device=places.device)
    chunk = cu_seqlens.diff() // (2 * cp)
    cu_chunks, cu_prefixes = (
        F.pad(lengths.flatten().cumsum(0, dtype=torch.int32), (1, 0))
        for lengths in (torch.stack((chunk, chunk), 1), torch.stack((chunk * (rank + 1), chunk * (2 * cp - rank)), 1))
    )
    prefix, position = _sequence_and_position(cu_prefixes, rows * cp + rows // 2)
    # index_select, not indexing: its backward is an addition in place, not a sort, of two terms at most, so in any order the same.
    keys, values = both.index_select(0, row_of_place[cu_seqlens[prefix // 2] + position]).unbind(1)
    return keys, values, cu_chunks, cu_prefixes


class MegatronAttention(nn.Module):
    """Core attention for Megatron-Core's local layer spec, whose own refuses packed sequences and context parallelism.

    Causal, grouped heads; exact on the CPU and in fp32, else varlen FlashAttention. The arguments are those that Megatron-Core
    0.16.1 and 0.19.2 give. cp_comm_type is not heeded: keys and values are all-gathered. apply_query_key_layer_scaling changes
    only how Megatron rounds scores in fp16. layer_number would choose among windows, which are refused.

    Raises ValueError at construction for dropout (the same policy would give two different log-probs), sliding windows, a softmax
    with an offset, or a mask other than causal.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, attention_dropout: float | None = None,
        softmax_scale: float | None = None, cp_comm_type: str | None = None, pg_collection: Any = None,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"attention_dropout is {dropout}: set it to 0 in the Megatron config")
        if config.window_size is not None or config.softmax_type != "vanilla":
            raise ValueError(f"window_size {config.window_size} or softmax_type {config.softmax_type!r}: packed attention for Megatron's "
                             "local spec has neither windows nor sinks; use Transformer Engine, or another model")
        if attn_mask_type.name not in ("causal", "padding_causal"):
            raise ValueError(f"attention mask {attn_mask_type.name!r}: packed attention for Megatron's local spec is causal")
        self.scaling = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        if pg_collection is None:
            from megatron.core import parallel_state

            self.cp_group = parallel_state.get_context_parallel_group()
        else:
            self.cp_group = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, attn_mask_type: Any = None,
        attention_bias: Tensor | None = None, packed_seq_params: Any = None,
    ) -> Tensor:
        """query: [t, heads / tp, head_dim]; key, value: [t, kv_heads / tp, head_dim] -> [t, heads / tp * head_dim].

        With context parallelism t is this rank's share, in the order of context_parallel_index. packed_seq_params is of the whole
        row: cu_seqlens_q (or cu_seqlens_q_padded, which then counts) int32 on query's device, max_seqlen_q an int, padding counted.

        Raises:
            ValueError: not a packed row, or a mask or bias besides.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError('MegatronAttention needs packed sequences: give the model packed_seq_params with qkv_format "thd"')
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("MegatronAttention is causal within each packed sequence: give neither attention_mask nor attention_bias")
        cu_seqlens, max_seqlen = packed_seq_params.cu_seqlens_q_padded, packed_seq_params.max_seqlen_q
        if cu_seqlens is None:
            cu_seqlens = packed_seq_params.cu_seqlens_q
        keys, cp = None, self.cp_group.size()
        if cp > 1:
            key, value, cu_seqlens, cu_prefixes = _gather_prefixes(key, value, cu_seqlens, self.cp_group)
            max_seqlen //= 2 * cp
            keys = cu_prefixes, max_seqlen * (2 * cp - self.cp_group.rank())
        attend = _varlen if query.is_cuda and query.dtype != torch.float32 else _dense
        return attend(query, key, value, cu_seqlens, max_seqlen, self.scaling, None, keys).flatten(1)


AttentionInterface.register("packed", _packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("packed", _window_of_layer)
