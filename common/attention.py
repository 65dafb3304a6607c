"""Packed attention for any Hugging Face causal LM: many sequences in one row, no padding, none sees another.

Callers: the FSDP scripts. Importing this module registers the implementation "packed" with transformers; a model built
with attn_implementation="packed" is then called as

    model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **packed_kwargs(cu_seqlens, max_seqlen))

The keyword names are the ones transformers itself uses for FlashAttention, so attn_implementation="flash_attention_2"
takes the same call.
"""

import inspect
from typing import Any

import torch
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
        out = _dense(q, k, v, cu_seq_lens_q, max_length_q, scaling, window, softcap, s_aux)
    return out[None], None


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scaling: float, window: int | None
) -> Tensor:
    """torch's varlen FlashAttention; spelled for torch 2.11 (neither scale nor grouped heads) and later."""
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
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **extra)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scaling: float, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:
    """Exact attention over a padded view: the CPU's path, and CUDA's for fp32, softcapping and attention sinks.

    Sequences are padded on the right, so causality alone keeps every real query from the padding.
    """
    lengths = cu_seqlens.diff().long()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths, output_size=q.shape[0])
    position = torch.arange(q.shape[0], device=q.device) - cu_seqlens[sequence]

    def pad(x: Tensor) -> Tensor:  # [T, heads, head_dim] -> [sequences, heads, max_seqlen, head_dim]
        out = x.new_zeros(len(lengths), max_seqlen, *x.shape[1:])
        out[sequence, position] = x
        return out.transpose(1, 2)

    groups = q.shape[1] // k.shape[1]
    q, k, v = pad(q), pad(k).repeat_interleave(groups, 1), pad(v).repeat_interleave(groups, 1)
    behind = torch.arange(max_seqlen, device=q.device)[:, None] - torch.arange(max_seqlen, device=q.device)
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
        out = scores.softmax(-1)[..., :max_seqlen].to(v.dtype) @ v
    return out.transpose(1, 2)[sequence, position]


AttentionInterface.register("packed", _packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("packed", _window_of_layer)
