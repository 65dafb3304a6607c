"""Training state <-> host memory, between the phases that need it.

Callers: the FSDP scripts. FSDP2's parameters alias storages of its own, so `p.data = ...` frees nothing: here each
storage is emptied in place and refilled, and every view of it stays valid. Gradients need no room on the host: they are
dropped after each optimizer step.

Bytes: the host holds one arena of exactly the bytes that it is given, page-locked, allocated at the first use and kept;
the device gives back all of them but rounding, and transfers run at the speed of PCIe.
"""

import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def parameter_tensors(model: nn.Module) -> list[Tensor]:
    """This rank's shards."""
    return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This rank's shards of the optimizer's moments; step counters stay where they are."""
    state = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor) and x.dim() > 0]
    return [x.to_local() if isinstance(x, DTensor) else x for x in state]


class Parked:
    """State that lives on the host, and on the device only inside `with`.

    Args:
        tensors: gives the tensors; called at each move to the host, as an optimizer has none before its first step.
            Their storages must not be shared with anything that is used outside `with`.
        owner: the module or optimizer that works with them; its forward or step then refuses to run outside `with`, where
            it would read freed memory.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], owner: nn.Module | torch.optim.Optimizer | None = None) -> None:
        self.tensors = tensors
        self.arena = torch.empty(0, dtype=torch.uint8)
        self.parked: list[tuple[torch.UntypedStorage, torch.device, Tensor]] = []
        if isinstance(owner, nn.Module):
            owner.register_forward_pre_hook(self._refuse, prepend=True)  # before FSDP2's own, which gathers
        elif owner is not None:
            owner.register_step_pre_hook(self._refuse)
        self.park()

    def park(self) -> int:
        """Copy to the host and free the device's bytes; returns how many."""
        if self.parked:
            return 0
        storages = list({t.untyped_storage().data_ptr(): t for t in self.tensors() if t.numel()}.values())
        size = sum(t.untyped_storage().nbytes() for t in storages)
        if self.arena.numel() < size:
            self.arena = _page_locked(size, storages[0].device)
        at = 0
        for tensor in storages:
            storage = tensor.untyped_storage()
            place = self.arena[at : at + storage.nbytes()]
            place.copy_(_bytes(storage, tensor.device), non_blocking=True)
            self.parked.append((storage, tensor.device, place))
            at += storage.nbytes()
        _wait(storages)
        for storage, _, _ in self.parked:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # else the bytes stay with the caching allocator, out of the engine's reach
        return size

    def __enter__(self) -> None:
        for storage, device, place in self.parked:
            storage.resize_(place.numel())
            _bytes(storage, device).copy_(place, non_blocking=True)  # the stream orders it before any use
        self.parked = []

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.park()

    def _refuse(self, *_: Any) -> None:
        if self.parked:
            raise RuntimeError("this state waits on the host: enter its Parked (`with`) before using it")


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _page_locked(size: int, device: torch.device) -> Tensor:
    """Host bytes that the device can copy from without staging. Registered by hand: pin_memory() rounds its block up to
    a power of two."""
    arena = torch.empty(size, dtype=torch.uint8)
    if device.type == "cuda":
        code = int(torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), size, 0))
        if code:
            raise RuntimeError(f"cannot page-lock {size / 2**30:.1f} GiB of host memory for offloading (CUDA error {code})")
        # Memory freed while it is registered poisons the next allocation at that address.
        weakref.finalize(arena, torch.cuda.cudart().cudaHostUnregister, arena.data_ptr())
    return arena


def _wait(tensors: list[Tensor]) -> None:
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)
