"""Megatron's process groups for cases that go through many layouts in one process."""

import gc

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

_now: list[tuple[int, ...]] = []


def initialize(tp: int = 1, pp: int = 1, vpp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1) -> None:
    """The groups of a layout, and generators as at a start. Groups of the layout before are destroyed, of which Megatron itself
    only forgets the names: each has threads, and thousands of them stop a machine."""
    sizes = (tp, pp, vpp, cp, ep, etp)
    if _now != [sizes]:
        parallel_state.destroy_model_parallel()
        gc.collect()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        )
        _now[:] = [sizes]
    if vpp > 1:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
