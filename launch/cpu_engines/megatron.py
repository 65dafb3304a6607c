"""Import this before Megatron-Core to run it on a CPU: the tiny recipes and the tests do, the scripts never.

Megatron-Core runs on gloo, and without Transformer Engine and apex its arithmetic is plain torch. Four things keep it from running
without CUDA: it makes tensors on device "cuda", or on torch.cuda.current_device(); its optimizer knows parameters by the type
"torch.cuda.FloatTensor"; it seeds CUDA's generator and saves its state; its expert dispatcher has streams. Importing this module
turns them to the CPU, in the thread that imports it, and does nothing where CUDA is available. torch.cuda.is_available() stays False,
and so does every tensor's is_cuda.
"""

import contextlib
import logging
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of what only CUDA can do
CPU = torch.device("cpu")


def on_cpu(value: Any) -> Any:
    """A CUDA device becomes the CPU, whatever else is given stays."""
    is_cuda = value.type == "cuda" if isinstance(value, torch.device) else isinstance(value, str) and value.startswith("cuda")
    return CPU if is_cuda else value


class CUDAIsCPU(TorchFunctionMode):
    """torch leaves modes while backward runs, so there device="cuda" fails; Megatron's backward asks for current_device() only."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.pin_memory:
            return args[0].clone()  # a copy, as there: what it was made from may be freed
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if "device" in kwargs:
            kwargs = kwargs | {"device": on_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        return func(*map(on_cpu, args), **kwargs)


class Stream:
    """There is one, and it is never behind; its events neither."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def wait_stream(self, other: "Stream") -> None: ...

    def record_event(self) -> "Stream":
        return self

    def synchronize(self) -> None: ...


def set_rng_state(state: Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's does nothing, and so leaves tensors as they are, where is_cuda is False."""
    return tensor.numpy() if isinstance(tensor, Tensor) and as_numpy else tensor


def install() -> None:
    """Before anything of Megatron runs, for the life of this thread."""
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda device=None: None
    cuda.Stream = Stream
    cuda.current_stream = cuda.default_stream = lambda device=None: Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    # What Megatron draws on "cuda" comes from the CPU's generator: that is the one it seeds and whose state it swaps.
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = set_rng_state
    CUDAIsCPU().__enter__()

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # it warns that CUDA's generator moved the CPU's: they are one
    random._set_cuda_rng_state = set_rng_state  # its own waits for CUDA to start
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


if not torch.cuda.is_available():
    install()
