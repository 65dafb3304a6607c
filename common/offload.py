"""Training state <-> host memory, between the phases that need it.

Callers: the scripts. FSDP2's parameters alias storages of its own, and Megatron's its buffers, so `p.data = ...` frees
nothing: here each storage is emptied in place and refilled, and every view of it stays valid. Gradients need no room on the
host: FSDP's are dropped after each optimizer step, Megatron's are zeros.

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
        owners: modules and optimizers that work with them; their forward or step then refuses to run outside `with`, where
            it would read freed memory.
        keep: False for gradients: freed without a copy, they come back as zeros, and only a forward that records for
            backward is refused.
        refill: if given, only the tensors' own bytes are kept on the host, not the whole of the storages that they are
            views of, and this makes the rest from them on the way back: as of weights, of which each rank keeps its shard.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[Tensor]], *owners: nn.Module | torch.optim.Optimizer, keep: bool = True,
        refill: Callable[[], Any] | None = None,
    ) -> None:
        self.tensors, self.keep, self.refill = tensors, keep, refill
        self.arena = torch.empty(0, dtype=torch.uint8)
        self.storages: list[tuple[torch.UntypedStorage, int]] = []  # emptied, and their sizes
        self.places: list[tuple[Tensor, Tensor]] = []  # bytes on the device, bytes on the host
        for owner in owners:
            _before_use(owner, self._refuse)
        self.park()

    def park(self) -> int:
        """Copy to the host and free the device's bytes; returns how many."""
        if self.storages:
            return 0
        tensors = [t for t in self.tensors() if t.numel()]
        whole = list({t.untyped_storage().data_ptr(): _bytes(t.untyped_storage(), t.device) for t in tensors}.values())
        if self.keep:
            self.arena, self.places = _placed([t.view(torch.uint8) for t in tensors] if self.refill else whole, self.arena)
        for device, host in self.places:
            host.copy_(device, non_blocking=True)
        _wait(tensors)
        for t in whole:
            storage = t.untyped_storage()
            self.storages.append((storage, storage.nbytes()))
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # else the bytes stay with the caching allocator, out of the engine's reach
        return sum(size for _, size in self.storages)

    def __enter__(self) -> None:
        emptied = bool(self.storages)
        for storage, size in self.storages:
            storage.resize_(size)
        for device, host in self.places:
            device.copy_(host, non_blocking=True)  # the stream orders it before any use
        self.storages = []
        if not self.keep:
            for t in self.tensors():
                t.zero_()
        if self.refill and emptied:
            self.refill()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.park()

    def _refuse(self, owner: Any, *_: Any) -> None:
        if self.storages and (self.keep or not isinstance(owner, nn.Module) or torch.is_grad_enabled()):
            raise RuntimeError("this state waits on the host: enter its Parked (`with`) before using it")


class Swapped:
    """Values that a module held when this was made, and holds again inside `with`: a reference model without a second model.

    Bytes: page-locked on the host, as many as the tensors have. While one version is on the device the host holds the other,
    and they change places through BLOCK bytes of the device. Given a rank's shards (and `refill`, as for Parked) the weights
    of a model that DP ranks share cost the host once, not once a rank. Enter it inside the tensors' Parked, not outside.

    Args:
        tensors, refill: as for Parked. owners: refuse to run inside `with` in a forward that records for backward, or a step.
    """

    BLOCK = 64 * 2**20

    def __init__(
        self, tensors: Callable[[], Iterable[Tensor]], *owners: nn.Module | torch.optim.Optimizer, refill: Callable[[], Any] | None = None,
    ) -> None:
        self.tensors, self.refill, self.inside = tensors, refill, False
        self.arena, places = _placed([t.view(torch.uint8) for t in tensors()], torch.empty(0, dtype=torch.uint8))
        for device, host in places:
            host.copy_(device)
        for owner in owners:
            _before_use(owner, self._refuse)

    def _swap(self) -> None:
        for whole, host_whole in _placed([t.view(torch.uint8) for t in self.tensors()], self.arena)[1]:
            for device, host in zip(whole.split(self.BLOCK), host_whole.split(self.BLOCK), strict=True):
                before = device.clone()
                device.copy_(host, non_blocking=True)
                host.copy_(before, non_blocking=True)
        if self.refill:
            self.refill()
        self.inside = not self.inside

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._swap()

    def _refuse(self, owner: Any, *_: Any) -> None:
        if self.inside and (not isinstance(owner, nn.Module) or torch.is_grad_enabled()):
            raise RuntimeError("these are the reference's weights: leave its Swapped before training")


def _before_use(owner: nn.Module | torch.optim.Optimizer, check: Callable[..., None]) -> None:
    if isinstance(owner, nn.Module):
        owner.register_forward_pre_hook(check, prepend=True)  # before FSDP2's own, which gathers
    else:
        owner.register_step_pre_hook(check)


def _placed(tensors: list[Tensor], arena: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Flat bytes, each with its place in the arena, which is made anew if it is too small."""
    sizes = [t.numel() for t in tensors]
    if arena.numel() < sum(sizes):
        arena = _page_locked(sum(sizes), tensors[0].device)
    return arena, list(zip(tensors, arena[: sum(sizes)].split(sizes), strict=True))


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
