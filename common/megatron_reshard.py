"""Megatron's weights -> full tensors under their Hugging Face names, bucket by bucket.

Callers: the Megatron scripts; the buckets go to reshard.push_to_sglang and checkpoint.export_hf. The layout of training is
Megatron's own business and the engine's is the engine's: here every rank gets every full tensor, whatever either is.

Bytes: a bucket of B bytes costs one local buffer of B / TP, one gathered buffer of B and the full tensors made from it, another
B; so two buckets live at a time.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from transformers import PretrainedConfig

from common.megatron_hf import VOCABULARY, kv_heads, local_weights, part_rows, split
from common.reshard import NamedTensors


@dataclass(frozen=True)
class Shard:
    """A parameter of some pipeline stage, as every rank knows it; each rank of the stage holds a part of that shape."""

    stage: int
    hf_names: tuple[tuple[str, ...], ...]  # of each expert-parallel rank; of weights that are not experts', one
    shape: tuple[int, ...]
    axis: int | None
    rows: tuple[int, ...]  # of a rank's part of each Hugging Face tensor
    groups: int


@dataclass
class MegatronPlan:
    """What is sent and in which order: the same on every rank, but for `parameters`, which are this rank's own, by place."""

    shards: list[Shard]
    parameters: dict[int, Tensor]
    vocab_size: int


def megatron_plan(models: list[nn.Module], hf: PretrainedConfig) -> MegatronPlan:
    """Every rank's weights, each once: of tied embeddings the first stage's. Once a run. Collective.

    Raises:
        RuntimeError: ranks that should hold the same kinds of parts do not.
    """
    stage, ep = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_expert_model_parallel_world_size()
    last = stage > 0 and hf.tie_word_embeddings
    mine: list[tuple[Shard, Tensor]] = []
    for weight, parameter in local_weights(models, hf):
        if last and weight.hf_names == ("model.embed_tokens.weight",):
            continue  # the head's copy
        names: tuple[tuple[str, ...], ...] = (weight.hf_names,)
        if weight.expert is not None:
            each = hf.num_experts // ep
            of_ranks = [f".experts.{r * each + weight.expert}." for r in range(ep)]
            names = tuple(tuple(re.sub(r"\.experts\.\d+\.", expert, n) for n in weight.hf_names) for expert in of_ranks)
        rows = tuple(part_rows(weight, parameter, hf))
        mine.append((Shard(stage, names, tuple(parameter.shape), weight.axis, rows, kv_heads(hf) // weight.tp), parameter.detach()))
    stages: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, [shard for shard, _ in mine], group=parallel_state.get_pipeline_model_parallel_group())
    shards = [shard for shards in stages for shard in shards]
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(repr(shards).encode()).hexdigest())
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks would not send the same weights: plans {digests}")
    before = sum(len(shards) for shards in stages[:stage])
    return MegatronPlan(shards, {before + i: parameter for i, (_, parameter) in enumerate(mine)}, hf.vocab_size)


def megatron_buckets(plan: MegatronPlan, dtype: torch.dtype, bucket_bytes: int, device: torch.device) -> Iterator[NamedTensors]:
    """Gather Megatron's parts into full tensors, at most `bucket_bytes` of them at a time (a larger tensor goes alone).

    Collective: every rank iterates to the end. A bucket is of one pipeline stage, and either of experts or not. Its parts cross the
    pipeline as they are, from that stage to the others, and then are gathered over tensor (for experts, tensor and expert)
    parallel ranks: what goes between stages, which are often on different nodes, is 1 / TP of the bucket.

    Args: dtype: of the full tensors; the cast comes before any message. bucket_bytes: of full tensors. device: where they are wanted.
    Yields: lists of (Hugging Face name, full tensor), contiguous, not shared with the weights, the vocabulary's padding stripped.
    """
    for places in _megatron_order(plan, dtype.itemsize, bucket_bytes):
        yield _gather_megatron(plan, places, dtype, device)


def _parts(shard: Shard) -> dist.ProcessGroup:
    """The ranks that hold the parts of a shard's tensors."""
    if ".experts." in shard.hf_names[0][0]:
        return parallel_state.get_expert_tensor_and_model_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _megatron_order(plan: MegatronPlan, itemsize: int, bucket_bytes: int) -> Iterator[list[int]]:
    places: list[int] = []
    size = 0
    for i, shard in enumerate(plan.shards):
        nbytes = prod(shard.shape) * itemsize * _parts(shard).size()
        if places and (size + nbytes > bucket_bytes or plan.shards[places[0]].stage != shard.stage
                       or _parts(plan.shards[places[0]]) is not _parts(shard)):
            yield places
            places, size = [], 0
        places.append(i)
        size += nbytes
    if places:
        yield places


def _gather_megatron(plan: MegatronPlan, places: list[int], dtype: torch.dtype, device: torch.device) -> NamedTensors:
    shards = [plan.shards[i] for i in places]
    counts = [prod(shard.shape) for shard in shards]
    local = torch.empty(sum(counts), dtype=dtype, device=device)
    if places[0] in plan.parameters:
        for part, i in zip(local.split(counts), places, strict=True):
            part.copy_(plan.parameters[i].reshape(-1))
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        dist.broadcast(local.view(torch.uint8), group=pipeline, group_src=shards[0].stage)
    group = _parts(shards[0])
    gathered = local.new_empty(group.size() * local.numel())
    dist.all_gather_into_tensor(gathered.view(torch.uint8), local.view(torch.uint8), group=group)
    out: NamedTensors = []
    for parts, shard in zip(gathered.view(group.size(), -1).split(counts, 1), shards, strict=True):
        # ranks of one expert are neighbours: Megatron counts tensor-parallel ranks before expert-parallel ones
        for names, of_expert in zip(shard.hf_names, parts.chunk(len(shard.hf_names)), strict=True):
            pieces = [split(part.view(shard.shape), list(shard.rows), shard.groups) for part in of_expert]
            for name, of_ranks in zip(names, zip(*pieces, strict=True), strict=True):
                full = of_ranks[0].clone() if shard.axis is None else torch.cat(of_ranks, shard.axis)
                out.append((name, full[: plan.vocab_size] if name in VOCABULARY else full))
    return out
