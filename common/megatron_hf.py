"""Hugging Face <-> Megatron-Core: one table of names and layouts, used to read a folder and to send or write weights.

Callers: the Megatron scripts (`transformer_config`, `build_model`, `load_hf`, `head_weight`) and megatron_reshard.py
(`local_weights`, `split`). For Llama, Qwen2, Qwen3 and Qwen3-MoE and what has their architecture (SmolLM2, Qwen2.5). Nothing is
converted on disk: each rank reads its slices of the safetensors into the GPTModel of its pipeline stage.

How a Megatron parameter relates to Hugging Face's: tensor parallelism cuts each Hugging Face tensor along one axis into equal
parts, and a rank's parts of one, two or three tensors are joined into its parameter (`join`, undone by `split`). Two are gate and
up, one after the other. Three are q, k and v: for each key-value head its query heads, then the key, then the value.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.attention import MegatronAttention

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")
TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None
vars(moe_utils).setdefault("te_general_gemm", None)  # which megatron-core 0.16.1 reads unbound without Transformer Engine

ROWS, COLUMNS, WHOLE = 0, 1, None  # the axis of the Hugging Face tensors that tensor parallelism cuts
# Megatron's name in the local spec: (Hugging Face names, axis). {l} is a layer, {e} an expert, counted over the whole model.
TABLE: dict[str, tuple[tuple[str, ...], int | None]] = {
    "embedding.word_embeddings.weight": (("model.embed_tokens.weight",), ROWS),
    "decoder.layers.{l}.input_layernorm.weight": (("model.layers.{l}.input_layernorm.weight",), WHOLE),
    "decoder.layers.{l}.self_attention.linear_qkv.weight": (
        tuple(f"model.layers.{{l}}.self_attn.{x}_proj.weight" for x in "qkv"), ROWS),
    "decoder.layers.{l}.self_attention.linear_qkv.bias": (tuple(f"model.layers.{{l}}.self_attn.{x}_proj.bias" for x in "qkv"), ROWS),
    "decoder.layers.{l}.self_attention.q_layernorm.weight": (("model.layers.{l}.self_attn.q_norm.weight",), WHOLE),
    "decoder.layers.{l}.self_attention.k_layernorm.weight": (("model.layers.{l}.self_attn.k_norm.weight",), WHOLE),
    "decoder.layers.{l}.self_attention.linear_proj.weight": (("model.layers.{l}.self_attn.o_proj.weight",), COLUMNS),
    "decoder.layers.{l}.pre_mlp_layernorm.weight": (("model.layers.{l}.post_attention_layernorm.weight",), WHOLE),
    "decoder.layers.{l}.mlp.linear_fc1.weight": (
        ("model.layers.{l}.mlp.gate_proj.weight", "model.layers.{l}.mlp.up_proj.weight"), ROWS),
    "decoder.layers.{l}.mlp.linear_fc2.weight": (("model.layers.{l}.mlp.down_proj.weight",), COLUMNS),
    "decoder.layers.{l}.mlp.router.weight": (("model.layers.{l}.mlp.gate.weight",), WHOLE),
    "decoder.layers.{l}.mlp.experts.local_experts.{e}.linear_fc1.weight": (
        ("model.layers.{l}.mlp.experts.{e}.gate_proj.weight", "model.layers.{l}.mlp.experts.{e}.up_proj.weight"), ROWS),
    "decoder.layers.{l}.mlp.experts.local_experts.{e}.linear_fc2.weight": (
        ("model.layers.{l}.mlp.experts.{e}.down_proj.weight",), COLUMNS),
    "decoder.final_layernorm.weight": (("model.norm.weight",), WHOLE),
    "output_layer.weight": (("lm_head.weight",), ROWS),
}
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")  # these have rows of padding in Megatron
# Transformer Engine's spec fuses norms into the products that follow, and the experts of a layer into one module.
TRANSFORMER_ENGINE_NAMES = {
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
    ".mlp.experts.linear_fc1.weight{e}": ".mlp.experts.local_experts.{e}.linear_fc1.weight",
    ".mlp.experts.linear_fc2.weight{e}": ".mlp.experts.local_experts.{e}.linear_fc2.weight",
}


# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------
def transformer_config(hf: PretrainedConfig, **layout: Any) -> TransformerConfig:
    """Megatron's config of a Hugging Face model; `layout` are its fields for parallelism, dtype, recompute and losses.

    Raises:
        ValueError: an architecture, or a variant of one, that the table does not describe.
    """
    if hf.model_type not in ARCHITECTURES:
        raise ValueError(f"model type {hf.model_type!r} is not one that Megatron is given here: {', '.join(ARCHITECTURES)}")
    rope = hf.rope_parameters
    for wrong, what in (
        (hf.hidden_act != "silu", f"hidden_act {hf.hidden_act!r}"),
        (hf.model_type != "qwen2" and getattr(hf, "attention_bias", False), "attention_bias"),
        (getattr(hf, "mlp_bias", False), "mlp_bias"),
        (getattr(hf, "use_sliding_window", False), "use_sliding_window"),
        (rope.get("partial_rotary_factor", 1.0) != 1.0, "partial_rotary_factor"),
        (rope["rope_type"] not in ("default", "linear", "llama3"), f"rope_type {rope['rope_type']!r}"),
        (bool(getattr(hf, "mlp_only_layers", None)) or getattr(hf, "decoder_sparse_step", 1) != 1, "layers with and without experts"),
    ):
        if wrong:
            raise ValueError(f"a {hf.model_type} with {what} is not supported with Megatron here")
    moe: dict[str, Any] = {}
    if experts := getattr(hf, "num_experts", None):
        moe = dict(
            num_moe_experts=experts, moe_router_topk=hf.num_experts_per_tok, moe_ffn_hidden_size=hf.moe_intermediate_size,
            moe_router_pre_softmax=not hf.norm_topk_prob,  # softmax over the chosen experts is softmax over all, normalised
            moe_router_dtype="fp32", moe_router_load_balancing_type="none", moe_grouped_gemm=TRANSFORMER_ENGINE,
            moe_permute_fusion=False,
        )
    virtual = layout.get("virtual_pipeline_model_parallel_size") is not None
    dtype = layout.get("params_dtype", torch.float32)
    return TransformerConfig(**dict(
        num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size, ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads, num_query_groups=kv_heads(hf), kv_channels=head_dim(hf),
        normalization="RMSNorm", layernorm_epsilon=hf.rms_norm_eps, activation_func=F.silu, gated_linear_unit=True,
        add_bias_linear=False, add_qkv_bias=hf.model_type == "qwen2", qk_layernorm=hf.model_type in ("qwen3", "qwen3_moe"),
        hidden_dropout=0.0, attention_dropout=0.0,  # with dropout the same policy would give two different log-probs
        bf16=dtype == torch.bfloat16, pipeline_dtype=dtype,
        variable_seq_lengths=True, moe_token_dispatcher_type="alltoall",  # "allgather" refuses them, in dense models too
        # Kernels of apex or Transformer Engine that are not there without them.
        gradient_accumulation_fusion=False, persist_layer_norm=False, apply_rope_fusion=False, masked_softmax_fusion=False,
        # An interleaved schedule sends and receives as it computes; with batched messages, or outputs freed early, gloo loses some.
        overlap_p2p_comm=virtual, batch_p2p_comm=not virtual, deallocate_pipeline_outputs=not virtual,
    ) | moe | layout)


def head_dim(hf: PretrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def kv_heads(hf: PretrainedConfig) -> int:
    return getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows that each of `tp` ranks holds alike, a multiple of 8: tensor cores want 16 bytes."""
    return -(-vocab_size // (8 * tp)) * 8 * tp


class RMSNorm(nn.RMSNorm):
    """For the local spec, whose own norm refuses sequence parallelism: there its gradient is a sum over ranks, which Megatron makes
    for weights with this mark."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel


class HiddenStates(GPTModel):
    """A GPTModel whose last stage gives final hidden states [t, 1, H] (with sequence parallelism this rank's tokens), not logits: the
    [t, vocab] matrix is never made (common/fused_logprob.py)."""

    def _preprocess(self, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if padding_mask is not None and self.config.sequence_parallel and not self.pre_process:
            # Megatron takes a rank's share of the mask in the first stage only, and of the tokens in all.
            padding_mask = padding_mask.chunk(self.pg_collection.tp.size(), 1)[self.pg_collection.tp.rank()]
        return super()._preprocess(*args, padding_mask=padding_mask, **kwargs)

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def build_model(hf: PretrainedConfig, config: TransformerConfig) -> list[nn.Module]:
    """This rank's stage of the pipeline on its device, with random weights: a chunk for each virtual stage. Uses Megatron's groups
    and generators, which must have been made. Transformer Engine's layers where that is installed, else Megatron's own with
    MegatronAttention."""
    chunks: list[nn.Module] = []
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        virtual = stage if config.virtual_pipeline_model_parallel_size else None
        model = HiddenStates(
            config, layer_spec(config, virtual), padded_vocab_size(hf.vocab_size, config.tensor_model_parallel_size),
            hf.max_position_embeddings, position_embedding_type="rope", rotary_base=hf.rope_parameters["rope_theta"],
            share_embeddings_and_output_weights=hf.tie_word_embeddings, vp_stage=virtual,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        )
        kind = hf.rope_parameters["rope_type"]
        if kind != "default":
            model.rotary_pos_emb.inv_freq = ROPE_INIT_FUNCTIONS[kind](hf, model.rotary_pos_emb.inv_freq.device)[0]
        chunks.append(model.to(torch.cuda.current_device()))  # of a router Megatron leaves the weight on the host
    return chunks


def layer_spec(config: TransformerConfig, virtual_stage: int | None) -> Any:
    """Of the layers of one chunk."""
    options = dict(num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm)
    if TRANSFORMER_ENGINE:
        return get_gpt_layer_with_transformer_engine_spec(**options)
    layer: ModuleSpec = get_gpt_layer_local_spec(**options, normalization="RMSNorm")
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = MegatronAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=virtual_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def head_weight(model: nn.Module) -> Tensor:
    """[padded vocabulary / TP, H], of the last stage: the embedding where they are tied."""
    return model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else model.output_layer.weight


# ---------------------------------------------------------------------------------------------------------------------
# Names and layouts
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Weight:
    """What a parameter is made of."""

    hf_names: tuple[str, ...]
    axis: int | None  # of the Hugging Face tensors, cut into tp parts of which rank tp_rank has its own; None: all have all
    tp: int
    tp_rank: int
    expert: int | None  # the number of the expert among this rank's own; those of its expert-parallel peers have the same number


def local_weights(models: list[nn.Module], hf: PretrainedConfig) -> Iterator[tuple[Weight, Tensor]]:
    """Every parameter of this rank's chunks, in order; a tied head that a last stage keeps a copy of is named as the embedding.

    Raises:
        KeyError: a parameter is not in the table.
    """
    ep_rank, ep = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_model_parallel_world_size()
    dense = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    of_experts = parallel_state.get_expert_tensor_parallel_world_size(), parallel_state.get_expert_tensor_parallel_rank()
    for model in models:
        layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in model.named_parameters():
            key, numbers = table_key(name)
            hf_names, axis = TABLE[key]
            if key == "output_layer.weight" and hf.tie_word_embeddings:
                hf_names, _ = TABLE["embedding.word_embeddings.weight"]
            expert = numbers.get("e")
            where = {"l": layers[numbers["l"]] if "l" in numbers else 0}
            if expert is not None:
                where["e"] = ep_rank * (hf.num_experts // ep) + expert
            tp, rank = dense if expert is None else of_experts
            yield Weight(tuple(n.format(**where) for n in hf_names), axis, tp, rank, expert), parameter


def table_key(name: str) -> tuple[str, dict[str, int]]:
    """("decoder.layers.{l}.mlp.linear_fc2.weight", {"l": 3}) of "decoder.layers.3.mlp.linear_fc2.weight", in either spec's names."""
    numbers: dict[str, int] = {}

    def number(kind: str) -> Callable[[re.Match[str]], str]:
        def replace(match: re.Match[str]) -> str:
            numbers[kind] = int(match[2])
            return f"{match[1]}{{{kind}}}"

        return replace

    key = re.sub(r"(decoder\.layers\.)(\d+)", number("l"), name)
    key = re.sub(r"(\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)", number("e"), key)
    for fused, local in TRANSFORMER_ENGINE_NAMES.items():
        if key.endswith(fused):
            key = key.removesuffix(fused) + local
    return key, numbers


def join(parts: list[Tensor], groups: int) -> Tensor:
    """A parameter from this rank's parts of its Hugging Face tensors, of which `groups` key-value heads are this rank's."""
    if len(parts) < 3:
        return torch.cat(parts)
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def split(parameter: Tensor, rows: list[int], groups: int) -> list[Tensor]:
    """The inverse of `join`; `rows` of each part."""
    if len(rows) < 3:
        return list(parameter.split(rows))
    return [part.flatten(0, 1) for part in parameter.unflatten(0, (groups, -1)).split([r // groups for r in rows], 1)]


def part_rows(weight: Weight, parameter: Tensor, hf: PretrainedConfig) -> list[int]:
    """Rows of this rank's part of each Hugging Face tensor."""
    if len(weight.hf_names) < 3:
        return [len(parameter) // len(weight.hf_names)] * len(weight.hf_names)
    return [heads * head_dim(hf) // weight.tp for heads in (hf.num_attention_heads, kv_heads(hf), kv_heads(hf))]


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def load_hf(models: list[nn.Module], hf: PretrainedConfig, folder: str) -> None:
    """Fill the parameters from a folder's safetensors, of whatever dtype; rows of padding become 0. Not collective: a rank reads
    its own slices.

    Raises:
        ValueError: a tensor is missing there, or has another shape than the config says.
    """
    files: dict[str, str] = {}
    handles: dict[str, Any] = {}
    for file in sorted(f for f in os.listdir(folder) if f.endswith(".safetensors")):
        handles[file] = safe_open(os.path.join(folder, file), framework="pt")
        files |= dict.fromkeys(handles[file].keys(), file)
    for weight, parameter in local_weights(models, hf):
        parts = []
        vocabulary = weight.hf_names[0] in VOCABULARY
        for name, rows in zip(weight.hf_names, part_rows(weight, parameter, hf), strict=True):
            if name not in files:
                raise ValueError(f"{folder} has no tensor {name}")
            whole = handles[files[name]].get_slice(name)
            shape = [rows, *parameter.shape[1:]]
            expected = [n * weight.tp if axis == weight.axis else n for axis, n in enumerate(shape)]
            if vocabulary:
                expected[0] = hf.vocab_size
            if whole.get_shape() != expected:
                raise ValueError(f"{folder}: {name} has shape {whole.get_shape()}, not {expected} as its config says")
            start = weight.tp_rank * shape[weight.axis or 0]
            if weight.axis == COLUMNS:
                parts.append(whole[:, start : start + shape[1]])
            elif weight.axis == ROWS:
                part = whole[min(start, expected[0]) : min(start + rows, expected[0])]
                parts.append(F.pad(part, (0, 0, 0, rows - len(part))) if vocabulary else part)
            else:
                parts.append(whole[:])
        parameter.copy_(join(parts, kv_heads(hf) // weight.tp))
