"""What a Megatron model's training state is: DDP, AdamW sharded over data-parallel ranks, and both as tensors to save and offload.

Callers: the Megatron scripts. The layout is that of Megatron's distributed optimizer: each model chunk lays its parameters
end to end in buffers, cuts a buffer into buckets, and each bucket into as many equal shards as its group has ranks (DP x CP;
for experts, expert-DP). A rank reduces, updates and owns its shard, and gets the rest of the weights by all-gather. So what a
rank must keep of the weights is 1 / DP of them.

Checkpoints hold the fp32 weights and Adam's moments, 12 bytes a parameter, under the global names, shapes and offsets that
Megatron's `sharded_state_dict` gives them, so that any layout reads what another wrote; each rank writes its shards from
where they are, and reads them there. The files are torch.distributed.checkpoint's, as FSDP's are. Megatron's own
dist_checkpointing with distrib_optim_sharding_type="fully_reshardable" (0.16.1 and 0.19.2) gathers all of the optimizer's
state on every DP rank, cuts it at offsets that count the padding between buckets though it left that out (tied embeddings
under PP have buckets of their own), gives all parameters of torch's AdamW one step tensor, and lets the other ranks wait for
one whose write failed.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from common.offload import Parked, Swapped

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size along each axis


class MegatronState:
    """The chunks of a model on this rank (several in a virtual pipeline) under DDP, and their optimizer.

    Gradients are added up over DP and CP in fp32; what Megatron's finalize_model_grads divides them by is the script's choice.
    Under bf16, AdamW updates fp32 copies of this rank's shards, made from the parameters as they are now: fill those first.

    Args:
        models: GPTModels in bf16 or fp32, with calculate_per_token_loss=True.
        clip_grad_norm: 0 is off. lr, weight_decay: see `set_lr`.
        vocab_size: rows of the embedding before padding. TP sizes pad differently, so checkpoints leave padding out.
    Attributes:
        chunks: the wrapped models, for the schedule. optimizer: Megatron's, a chain of one for dense parameters and, in
            mixtures of experts, one for experts.
    Raises:
        ValueError: DDP would average gradients, or parameters are not all in the config's params_dtype.
    """

    def __init__(
        self, models: list[Any], vocab_size: int, lr: float, weight_decay: float = 0.01, betas: tuple[float, float] = (0.9, 0.999),
        clip_grad_norm: float = 1.0,
    ) -> None:
        config = models[0].config
        if not config.calculate_per_token_loss:
            raise ValueError("the model's config has calculate_per_token_loss=False, with which DDP averages gradients: set it to True")
        for name, p in (named for model in models for named in model.named_parameters()):
            if p.dtype != config.params_dtype:  # Megatron takes one parameter's state for another's where dtypes mix
                raise ValueError(f"{name} is {p.dtype}, but the config's params_dtype is {config.params_dtype}: build it in that")
        self.vocab_size, self.clip_grad_norm = vocab_size, clip_grad_norm
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.chunks: list[Any] = [DistributedDataParallel(config, ddp, model) for model in models]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=lr, weight_decay=weight_decay, adam_beta1=betas[0], adam_beta2=betas[1],
                use_distributed_optimizer=True, bf16=config.params_dtype == torch.bfloat16, params_dtype=config.params_dtype,
            ),
            self.chunks, use_gloo_process_groups=False,
        )
        self.parts: list[Any] = self.optimizer.chained_optimizers
        self.buffers = [buffer for chunk in self.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        for part in self.parts:
            # torch's fused kernel, whether or not Transformer Engine or apex is there. Its state is made now: a checkpoint can be
            # read before the first step.
            adam = torch.optim.AdamW([torch.zeros(1)], lr=lr, betas=betas, fused=True)
            adam.param_groups = [adam.defaults | group | {"fused": True} for group in part.optimizer.param_groups]
            for p in part.get_parameters():
                moments = {name: torch.zeros_like(p, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[p] = {"step": torch.zeros((), device=p.device)} | moments
            part.optimizer = adam
        self.set_lr(lr, weight_decay)

    def set_lr(self, lr: float, weight_decay: float) -> None:
        """For the next steps. Norms and biases (one dimension) do not decay: they are in groups of wd_mult 0, which Megatron
        heeds in its own scheduler only."""
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = lr, weight_decay * group["wd_mult"]

    def grad_norm(self) -> float:
        """Norm of the global gradient, the same on every rank; replicas under TP and tied embeddings count once. It changes no
        weight, so a run can stop on one that is not finite. Once between backward and `step`. Collective."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def step(self, norm: float) -> None:
        """Clip by `norm`, which is `grad_norm`'s, update, gather the weights, zero the gradients. Collective over DP."""
        if 0 < self.clip_grad_norm < norm:
            # as torch.nn.utils.clip_grad_norm_
            torch._foreach_mul_([p.grad for p in self._own()], self.clip_grad_norm / (norm + 1e-6))
        self.optimizer.step_with_ready_grads()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    # --- offloading
    def parked(self, what: Literal["params", "grads", "optimizer"]) -> Parked:
        """On the host from now on, but inside `with`. Bytes on the device and on the host, for each of this rank's P parameters
        under bf16: weights 2 and 2 / DP (its shards; entering gathers, so all of DP enters together), gradients 4 and 0,
        optimizer 12 / DP and 12 / DP. Under fp32: 4 and 4 / DP, 4 and 0, 8 / DP and 8 / DP."""
        adams = [part.optimizer for part in self.parts]
        if what == "grads":
            return Parked(lambda: [buffer.grad_data for buffer in self.buffers], *self.chunks, *adams, keep=False)
        if what == "params":
            return Parked(self.weight_shards, *self.chunks, *adams, refill=self.gather_weights)
        return Parked(self.optimizer_tensors, *adams)

    def reference(self) -> Swapped:
        """The weights as they are now, on the host: 2 / DP bytes a parameter under bf16, 4 / DP under fp32. Inside `with` the
        chunks hold them, and the shards being trained wait in their place."""
        return Swapped(self.weight_shards, *self.chunks, *(part.optimizer for part in self.parts), refill=self.gather_weights)

    def weight_shards(self) -> list[Tensor]:
        """This rank's shard of each bucket, [numel] in the model's dtype. Raises RuntimeError while they are parked."""
        if not all(buffer.param_data.untyped_storage().nbytes() for buffer in self.buffers):
            raise RuntimeError("these weights wait on the host: enter their Parked before using them")
        groups = ((b.data_parallel_group, bucket.param_data) for b in self.buffers for bucket in b.buckets)
        return [data.view(group.size(), -1)[group.rank()] for group, data in groups]

    def gather_weights(self) -> None:
        """All weights from all shards. Collective over DP."""
        for chunk in self.chunks:
            chunk.start_param_sync()

    def optimizer_tensors(self) -> list[Tensor]:
        """Moments, and fp32 weights where those are copies: in fp32 training they are the shards of the weights themselves."""
        weights = {buffer.param_data.untyped_storage().data_ptr() for buffer in self.buffers}
        own = [(p.detach(), part.optimizer.state[p]) for part in self.parts for p in part.get_parameters()]
        copies = [p for p, _ in own if p.untyped_storage().data_ptr() not in weights]
        return copies + [state[name] for _, state in own for name in ("exp_avg", "exp_avg_sq")]

    # --- checkpoints
    def tensors(self) -> dict[str, Tensor]:
        """What checkpoint.save writes and checkpoint.load fills in place; after which call `loaded`.

        Returns:
            "weights.NAME", "exp_avg.NAME" and "exp_avg_sq.NAME": this rank's parts of fp32 tensors; "buffers.NAME" (a router's
            bias) in the model's dtype; "step", a scalar. NAME is Megatron's, with the numbers of a layer and an expert that it
            stacks along an axis. "weights." and "buffers." alone, read by torch.distributed.checkpoint.load, start a new run.
        Raises:
            ValueError: Megatron trains a tensor in another order than it stores it (its legacy grouped experts).
        """
        steps = [int(state["step"]) for part in self.parts for state in part.optimizer.state.values()]
        out: dict[str, Any] = {"step": torch.tensor(max(steps, default=0))}
        owner = {p: part for part in self.parts for p in part.model_param_group_index_map}
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        for chunk in self.chunks:
            trained = set(chunk.module.parameters())
            for entry in nested_values(chunk.module.sharded_state_dict(metadata=metadata)):
                data = entry.data
                if not isinstance(data, Tensor):  # Transformer Engine's _extra_state, which only fp8 uses
                    continue
                if data not in trained:
                    start, end, flats, writes = 0, data.numel(), {"buffers": data.detach().view(-1)}, not any(entry.replica_id)
                elif data in owner:
                    own = owner[data]._get_model_param_range_map(data)["param"]
                    state = owner[data]._get_main_param_and_optimizer_states(data)
                    flats = {"weights": state["param"].detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
                    # (PP, TP, DP): a replica under TP, or a tied embedding's second copy, is another's to write; DP's parts differ.
                    start, end, writes = own.start, own.end, not any(entry.replica_id[:-1])
                else:  # other DP ranks own all of it
                    continue
                for name, shape, offset, box, lo in _placed(entry, start, end, self.vocab_size):
                    for kind, flat in flats.items():
                        piece = flat[lo - start : lo - start + math.prod(box)].view(box)
                        out.setdefault(f"{kind}.{name}", _Pieces(shape, flat.dtype)).add(offset, piece, writes)
        return out

    def loaded(self, tensors: dict[str, Tensor]) -> None:
        """After `tensors` were read into: the model's weights follow from the fp32 shards, Adam's count from "step", if that was
        among them. Collective over DP."""
        for part in self.parts:
            part._copy_main_params_to_model_params()
            for state in part.optimizer.state.values():
                state["step"].fill_(tensors.get("step", state["step"]))
        self.gather_weights()

    def _own(self) -> list[Tensor]:
        return [p for part in self.parts for p in part.get_parameters()]


def _placed(entry: Any, start: int, end: int, vocab_size: int) -> Iterator[tuple[str, tuple, tuple, tuple, int]]:
    """Elements start..end of a local tensor, flattened, as boxes of global tensors: (global name, its shape, the box's offset
    and size in it, the box's first element)."""
    for t in nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]:  # linear_fc1: gate and up
        if not t.data.is_contiguous() or t.data.untyped_storage().data_ptr() != entry.data.untyped_storage().data_ptr():
            raise ValueError(f"{t.key} is stored in another order than it is trained in: use experts that are not grouped")
        at, size = t.data.storage_offset() - entry.data.storage_offset(), t.data.numel()
        stacked = t.prepend_axis_num
        shape, offset = t.global_shape[stacked:], t.global_offset[stacked:]
        if t.allow_shape_mismatch:
            shape = (vocab_size, *shape[1:])
            size = min(size, max(vocab_size - offset[0], 0) * math.prod(shape[1:]))
        lo = max(start, at)
        for corner, box in boxes(lo - at, min(end - at, size), t.data.shape):
            yield ".".join([t.key, *map(str, t.global_offset[:stacked])]), shape, tuple(map(sum, zip(offset, corner, strict=True))), box, lo
            lo += math.prod(box)


def boxes(start: int, end: int, shape: tuple[int, ...]) -> list[Box]:
    """Elements start..end of a row-major tensor as boxes (offset, size) in their order: a row's rest, whole rows, a row's
    beginning; and within a row likewise along further axes."""
    if start >= end:
        return []
    if len(shape) == 1:
        return [((start,), (end - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows
    if first > last:
        return _in_row(last, boxes(start - last * row, end - last * row, shape[1:]))
    head = _in_row(first - 1, boxes(start - (first - 1) * row, row, shape[1:])) if start < first * row else []
    whole = [((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if first < last else []
    return head + whole + _in_row(last, boxes(0, end - last * row, shape[1:]))


def _in_row(row: int, inner: list[Box]) -> list[Box]:
    return [((row, *offset), (1, *size)) for offset, size in inner]


class _Pieces(Tensor):
    """Boxes of one global tensor, which torch.distributed.checkpoint handles through torch/distributed/_checkpointable.py."""

    pieces: dict[torch.Size, tuple[Tensor, bool]]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype) -> "_Pieces":
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        self.pieces = {}
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} on a tensor of which this rank has pieces")

    def add(self, offset: tuple[int, ...], piece: Tensor, writes: bool) -> None:
        self.pieces[torch.Size(offset)] = piece, writes

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(MetadataIndex(fqn, at), WriteItemType.SHARD, tensor_data=TensorWriteData(
                ChunkStorageMetadata(at, piece.shape), TensorProperties.create_from_tensor(piece), self.size()))
            for at, (piece, writes) in self.pieces.items() if writes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(at, piece.shape) for at, (piece, _) in self.pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index.offset][0]
