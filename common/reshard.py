"""Training weights -> full tensors under their Hugging Face names, bucket by bucket -> the rollout engine in this process.

Callers: the FSDP scripts (`fsdp_buckets`, `push_to_vllm`), the Megatron scripts (`tensor_names`, `push_to_sglang`; their buckets come
from megatron_reshard.py) and checkpoint.export_hf, which writes the same buckets to disk.

Bytes: a bucket of B bytes costs one local buffer of B / shards, one gathered buffer of B and the full tensors cut from
it, another B; so two buckets live at a time, and no rank ever holds a second full model beside the engine's own copy.
"""

import os
import time
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
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


class SyncError(RuntimeError):
    """What all ranks of an engine raise together: they can go on to agree with the others."""


def tensor_names(folder: str, tied: bool) -> set[str]:
    """What SGLang reads of a folder's safetensors. A model that transformers builds would name the experts otherwise (it fuses them in
    memory), and SGLang's own parameters are fused and split over its processes. `tied`: a head is the embedding, and if a file has one
    it is not read; neither is what old files keep of rotary embeddings."""
    names: set[str] = set()
    for file in os.listdir(folder):
        if file.endswith(".safetensors"):
            with safe_open(os.path.join(folder, file), framework="pt") as tensors:
                names.update(tensors.keys())
    return {n for n in names if not n.endswith("rotary_emb.inv_freq") and not (tied and n == "lm_head.weight")}


def push_to_sglang(engine: Any, buckets: Iterable[NamedTensors], ranks: dist.ProcessGroup, names: set[str]) -> int:
    """Write every weight into an engine whose processes live beside `ranks`, the i-th tensor-parallel one on the device of the i-th
    rank, and empty its prefix cache, whose entries belong to the old weights. Collective over `ranks`.

    A bucket is copied into one flat buffer on each rank; the engine's process there maps it (CUDA IPC; on a CPU shared memory), and
    the buffer is freed when all have read it. So at most two buckets live on a device: while it is made, the bucket and its copy.

    Args:
        engine: sglang.Engine on the first of `ranks`, elsewhere None. buckets: on each rank the same full tensors; consumed to the end.
        names: from `tensor_names`. SGLang answers "Success" to names that it does not know, and does not miss any.
    Returns:
        bytes of full tensors pushed.
    Raises:
        SyncError: on each of `ranks`: the engine failed, or the names that were sent are not `names`.
    """
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    sent: list[str] = []
    nbytes, failure = 0, [""]  # the engine's, as its owner tells the others

    def tell(call: Any, *args: Any, **kwargs: Any) -> None:
        """The owner alone calls; the others wait for it, and learn whether it failed."""
        if engine is not None:
            try:
                success, message = call(*args, **kwargs)
                failure[0] = "" if success else f"SGLang answered: {message}"
            except Exception as e:
                failure[0] = str(e) or repr(e)
        dist.broadcast_object_list(failure, group=ranks, group_src=0)

    for bucket in buckets:
        sent += [name for name, _ in bucket]
        nbytes += sum(t.nbytes for _, t in bucket)
        if failure[0]:
            continue  # to the end: making the buckets is collective over more ranks than these
        flat = FlattenedTensorBucket(named_tensors=bucket)
        del bucket
        payload = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        if payload["flattened_tensor"].is_cuda:
            monkey_patch_torch_reductions()  # devices travel as UUIDs: the engine's processes may number them otherwise
        handles = [""] * dist.get_world_size(ranks)
        dist.all_gather_object(handles, MultiprocessingSerializer.serialize(payload, output_str=True), group=ranks)
        tell(engine and engine.update_weights_from_tensor, handles, load_format="flattened_bucket", flush_cache=False)
        del flat, payload
    if not failure[0]:
        tell(engine and empty_prefix_cache, engine)
    if failure[0]:
        raise SyncError(f"weight sync: {failure[0]}")
    if missing := names.difference(sent):
        raise SyncError(f"weight sync did not bring these to the engine: {sorted(missing)}")
    if extra := set(sent) - names:
        raise SyncError(f"weight sync brought what the engine does not know: {sorted(extra)}")
    return nbytes


def empty_prefix_cache(engine: Any, patience: float = 30.0) -> tuple[bool, str]:
    """(done, why not). SGLang refuses while requests run, and the last batch of a generation may be the engine's for a moment longer."""
    end = time.monotonic() + patience
    while not (done := engine.flush_cache().success) and time.monotonic() < end:
        time.sleep(0.1)
    return done, f"its prefix cache could not be emptied in {patience:.0f} s: requests are still running"
