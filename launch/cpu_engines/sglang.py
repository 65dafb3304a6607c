"""Import this first to run SGLang on a CPU: the tiny recipes and the tests do, the scripts never.

SGLang's wheel on PyPI is a CUDA build. Three things keep it from running without CUDA, in the process that builds the engine and
in each that the engine spawns: it imports torchvision and sgl_kernel, whose CPU builds PyPI lacks; it registers model types that a
newer transformers has; and its seeded sampling draws in a Triton kernel. Importing this module mends them and makes `sglang.Engine`
start such processes, with the flags that a CPU needs. The processes import this module and not the script, so what else the script
patches (launch/cpu_engines/megatron.py) stays in the trainer.
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
warnings.filterwarnings("ignore", category=UserWarning, module="sglang")  # of what only CUDA can do
logging.getLogger("sglang").setLevel(logging.ERROR)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.utils.import_utils import is_torchvision_available  # noqa: E402

torch.multiprocessing.set_sharing_strategy("file_system")  # by name: what any rank has shared, any process of an engine can open

FLAGS = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none",
    "disable_cuda_graph": True, "disable_overlap_schedule": True, "skip_server_warmup": True,
    "enable_deterministic_inference": True,  # else it ignores sampling_seed
    "sleep_on_idle": True,  # else an idle engine burns a core
    "mem_fraction_static": 0.1, "max_total_tokens": 16384, "max_running_requests": 256,
}


def stand_in(name: str, **members: Any) -> None:
    """A module that can be imported and has any name: what text generation does not use."""

    def absent(attribute: str) -> type:
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"{name}.{attribute} is not in the CPU environment")

        return type(attribute, (), {"__init__": __init__})

    module = ModuleType(name)
    module.__dict__.update(members, __spec__=ModuleSpec(name, None), __path__=[], __version__="0.0.0", __getattr__=absent)
    sys.modules[name] = module


def assign_req_to_token_pool_cpu(
    requests: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, pool_len: int
) -> None:
    """sgl_kernel's: write the KV cache slots of each request's new tokens into its row of the table."""
    at = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[at : at + end - start].to(table.dtype)
        at += end - start


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3_x86_32 of (seed, position, column), as sglang's Triton kernel of this name has it: it makes seeded sampling the
    same function of these three on both devices.

    seed [rows] uint64, positions [rows] and columns [n] int; returns [rows, n] int64, from 0 to 2^32 - 1.
    """
    mask, seed = 0xFFFFFFFF, seed.to(torch.int64)
    h = torch.zeros(len(seed), len(columns), dtype=torch.int64)
    for block in (seed[:, None] & mask, (seed[:, None] >> 32) & mask, positions[:, None].long() & mask, columns[None].long()):
        k = (block * 0xCC9E2D51) & mask
        k = (((k << 15) | (k >> 17)) & mask) * 0x1B873593 & mask
        h = h ^ k
        h = (((h << 13) | (h >> 19)) & mask) * 5 + 0xE6546B64 & mask
    h = h ^ 16  # bytes hashed
    h = (h ^ (h >> 16)) * 0x85EBCA6B & mask
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & mask
    return h ^ (h >> 16)


def install() -> None:
    """In every process, before anything of sglang is imported."""
    is_torchvision_available()  # transformers remembers the answer: for it torchvision stays absent
    for name in ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional"):
        stand_in(name)
    stand_in("sgl_kernel", assign_req_to_token_pool_cpu=assign_req_to_token_pool_cpu)
    mapping = type(CONFIG_MAPPING)
    register = mapping.register
    mapping.register = lambda self, key, value, exist_ok=False: register(self, key, value, exist_ok=True)
    import sglang

    sglang.Engine = build_engine


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Children spawned meanwhile do not import the main script again."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The scheduler's process: unpickling this function's name has imported this module first."""
    sys.modules["megatron"] = None  # type: ignore[assignment]  # SGLang's debugging tools import it where they find it: seconds
    import sglang.srt.batch_invariant_ops as invariant
    import sglang.srt.distributed.device_communicators.pynccl as pynccl
    import sglang.srt.layers.sampler as sampler
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.platforms import current_platform

    current_platform.empty_cache = lambda: None  # it collects garbage: half a second, each time that the prefix cache is emptied
    sampler.murmur_hash32 = murmur_hash32
    invariant.enable_batch_invariant_mode = lambda: None  # Triton kernels for matrix products
    pynccl.NCCLLibrary = None  # torch's CUDA build brings one; without it TP goes through gloo
    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)


def build_engine(**flags: Any) -> Any:
    """What `sglang.Engine(**flags)` becomes. Flags that are given win over FLAGS."""
    from sglang.srt import server_args
    from sglang.srt.entrypoints.engine import Engine

    class CPUEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)
        run_detokenizer_process_func = staticmethod(run_detokenizer)

    server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    # SGLang asks which cores each rank should have, and without its own kernels binds none.
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(flags.get("tp_size", 1))))
    with hidden_main():
        return CPUEngine(**(FLAGS | flags))


install()
