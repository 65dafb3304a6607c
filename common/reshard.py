"""Training weights -> full tensors under their Hugging Face names, bucket by bucket -> the rollout engine in this process.

Callers: the FSDP scripts (`fsdp_buckets`, `push_to_vllm`) and checkpoint.export_hf, which writes the same buckets to disk.

Bytes: a bucket of B bytes costs one local buffer of B / shards, one gathered buffer of B and the full tensors cut from
it, another B; so two buckets live at a time, and no rank ever holds a second full model beside the engine's own copy.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

NamedTensors = list[tuple[str, Tensor]]


def named_weights(model: nn.Module, aliases: bool = False) -> NamedTensors:
    """Every parameter as (name, possibly sharded tensor); tied ones once, under their first name, unless `aliases`."""
    return [(name, p.detach()) for name, p in model.named_parameters(remove_duplicate=not aliases)]


def fsdp_buckets(
    weights: NamedTensors, dtype: torch.dtype, bucket_bytes: int, device: torch.device
) -> Iterator[NamedTensors]:
    """Gather FSDP2 shards into full tensors, at most `bucket_bytes` of them at a time (a larger tensor goes alone).

    Collective: every rank of the mesh iterates to the end, in the same order. The cast to `dtype` happens before the
    gather, so that fp32 master weights cross the wire as the rollout's bf16.

    Args:
        weights: (name, tensor); a DTensor may be sharded on dim 0 of one mesh dimension (FSDP2's layout, uneven
            shards allowed) and replicated on others; a plain tensor is yielded as it is.
        dtype: of the yielded tensors. bucket_bytes: of full tensors in `dtype`. device: where they are wanted; shards
            that are offloaded to the host move there first.
    Yields:
        lists of (name, full tensor), contiguous, not shared with the training weights.
    Raises:
        ValueError: a DTensor's placement is not one that FSDP2 makes.
    """
    bucket: NamedTensors = []
    size = 0
    for name, weight in weights:
        nbytes = weight.numel() * dtype.itemsize
        if bucket and (size + nbytes > bucket_bytes or shard_group(weight) is not shard_group(bucket[-1][1])):
            yield _gather(bucket, dtype, device)
            bucket, size = [], 0
        bucket.append((name, weight))
        size += nbytes
    if bucket:
        yield _gather(bucket, dtype, device)


def _gather(bucket: NamedTensors, dtype: torch.dtype, device: torch.device) -> NamedTensors:
    """One all-gather for a bucket. torch.chunk's layout: rank r holds rows [r·c, (r+1)·c) with c = ceil(rows / shards),
    the last ranks fewer or none; each shard is padded to c rows so that all contribute the same number of bytes."""
    group = shard_group(bucket[0][1])
    shards = 1 if group is None else dist.get_world_size(group)
    if any(shard_group(weight) is not group for _, weight in bucket):
        raise ValueError("a bucket mixes weights of different FSDP meshes; gather each model by itself")
    rows = [-(-weight.shape[0] // shards) if weight.dim() else 1 for _, weight in bucket]
    counts = [r * prod(weight.shape[1:]) for r, (_, weight) in zip(rows, bucket, strict=True)]
    local = torch.empty(sum(counts), dtype=dtype, device=device)
    for part, (_, weight) in zip(local.split(counts), bucket, strict=True):
        mine = (weight.to_local() if isinstance(weight, DTensor) else weight).reshape(-1)
        part[: mine.numel()].copy_(mine)
        part[mine.numel():].zero_()
    gathered = local
    if shards > 1:
        gathered = local.new_empty(shards * local.numel())
        dist.all_gather_into_tensor(gathered.view(torch.uint8), local.view(torch.uint8), group=group)
    out: NamedTensors = []
    for part, (name, weight) in zip(gathered.view(shards, -1).split(counts, dim=1), bucket, strict=True):
        full = part.reshape(-1)[: weight.numel()].view(weight.shape)
        out.append((name, full.clone() if shards == 1 else full))  # reshape copied where there is more than one shard
    return out


def shard_group(weight: Tensor) -> dist.ProcessGroup | None:
    """The process group over which a weight is sharded; None where every rank has all of it."""
    if not isinstance(weight, DTensor):
        return None
    sharded = [i for i, p in enumerate(weight.placements) if p == Shard(0)]
    if len(sharded) > 1 or any(p not in (Shard(0), Replicate()) for p in weight.placements):
        raise ValueError(f"cannot gather a weight with placements {weight.placements}; FSDP2 shards dim 0 of one mesh dim")
    return weight.device_mesh.get_group(sharded[0]) if sharded else None


def vllm_worker(llm: Any) -> Any:
    """The worker of an in-process vLLM engine (distributed_executor_backend="external_launcher")."""
    worker = llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker)


def keep_hugging_face_classes() -> None:
    """Before an engine is built. For families that vLLM has no code of its own for (OLMo-2, SmolLM3) it runs Hugging
    Face's, and decorates the class in place for torch.compile: the trainer, in the same process, could not build it any
    more. Without that these families run uncompiled in the engine. vLLM 0.32 spells it so; another version may not need it."""
    try:
        from vllm.model_executor.models.transformers.base import Base
    except ImportError:
        return
    if hasattr(Base, "_decorate_cls_for_torch_compile"):
        Base._decorate_cls_for_torch_compile = lambda *args, **kwargs: None


def vllm_push_mode(llm: Any) -> str:
    """"load_weights" writes into the engine's parameters directly, which works on CUDA for unquantised dense weights;
    "reload_weights" rebuilds the layers that vLLM repacks, quantises or derives others from after loading (fused experts, MLA;
    always so on the CPU). It also unties them: tied weights must then be sent under each of their names
    (`named_weights(aliases=True)`)."""
    config = llm.llm_engine.vllm_config
    model = config.model_config
    as_loaded = model.quantization is None and not model.use_mla and model.get_num_experts() == 0
    return "load_weights" if as_loaded and config.device_config.device_type == "cuda" else "reload_weights"


def push_to_vllm(llm: Any, buckets: Iterable[NamedTensors], mode: str) -> int:
    """Write every weight into the engine and empty its prefix cache, whose entries belong to the old weights.

    Args:
        llm: vllm.LLM whose model lives in this process. buckets: from `fsdp_buckets`; consumed to the end.
        mode: from `vllm_push_mode`.
    Returns:
        bytes of full tensors pushed.
    Raises:
        RuntimeError: the engine has parameters, or parts of fused ones, that no pushed tensor reached.
    """
    model = vllm_worker(llm).model_runner.get_model()
    wanted = {name for name, _ in model.named_parameters()}
    original, nbytes = model.load_weights, 0
    loaded: set[str] = set()
    sent: set[str] = set()

    def load(weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        names = original(weights)
        loaded.update(wanted if names is None else names)  # a few vLLM models do not report what they loaded
        return names

    def flat() -> Iterator[tuple[str, Tensor]]:
        nonlocal nbytes
        for bucket in buckets:
            nbytes += sum(t.nbytes for _, t in bucket)
            sent.update(name for name, _ in bucket)
            yield from bucket

    if mode == "load_weights":
        load(flat())
    else:  # reload_weights calls model.load_weights and drops what it returns; one call takes all the buckets
        model.load_weights = load
        try:
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": flat()})
        finally:
            del model.load_weights
    missing = wanted - loaded
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():  # q, k and v are one parameter to vLLM
        for name in wanted - sent:
            if f".{fused}." in name:
                missing |= {name.replace(f".{fused}.", f".{part}.") for part in parts} - sent
    if missing:
        raise RuntimeError(f"weight sync did not bring these to the engine: {sorted(missing)}")
    llm.reset_prefix_cache()
    return nbytes
