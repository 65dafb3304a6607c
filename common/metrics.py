"""Metrics of a run: metrics.jsonl always, TensorBoard and wandb on request, and the phase timer.

Callers: the scripts. Names are slash-separated (`actor/clipfrac`); docs/ explains each.
"""

import json
import os
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

PEAK_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense, from the vendor's datasheets


class MetricsLog:
    """Writes on rank 0 only; on other ranks every call does nothing.

    Args:
        folder: of the run. enabled: this is rank 0. tensorboard: also write event files to folder/tensorboard.
        wandb_project: None for no wandb. config: the run's arguments, kept by wandb.
        resume_step: lines of later steps, written by a run that died before its next checkpoint, are dropped.
    """

    def __init__(self, folder: str, enabled: bool, tensorboard: bool, wandb_project: str | None,
                 config: Mapping[str, Any], resume_step: int) -> None:
        self.enabled, self.writer, self.wandb = enabled, None, None
        if not enabled:
            return
        path = os.path.join(folder, "metrics.jsonl")
        kept = []
        if resume_step >= 0 and os.path.exists(path):
            with open(path) as f:  # a killed process may leave half a line at the end
                lines = [line for line in f if line.endswith("\n")]
            kept = [line for line in lines if json.loads(line)["step"] <= resume_step]
        self.file = open(path, "w")
        self.file.writelines(kept)
        self.file.flush()
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(os.path.join(folder, "tensorboard"), purge_step=resume_step + 1)
        if wandb_project is not None:
            import wandb

            self.wandb = wandb.init(project=wandb_project, dir=folder, config=dict(config), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self.enabled:
            return
        self.file.write(json.dumps({"step": step, "unix_time": time.time()} | dict(metrics)) + "\n")
        self.file.flush()
        if self.writer is not None:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()
        if self.wandb is not None:
            self.wandb.log(dict(metrics), step=step)

    def close(self) -> None:
        if self.enabled:
            self.file.close()
            if self.writer is not None:
                self.writer.close()
            if self.wandb is not None:
                self.wandb.finish()


class Phases:
    """Seconds of each named phase of a step. The device is synchronised at both ends, so work counts where it runs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            self._wait()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def take(self) -> dict[str, float]:
        """Seconds since the last take, as time/NAME."""
        out = {f"time/{name}": value for name, value in self.seconds.items()}
        self.seconds = {}
        return out


def memory_metrics(device: torch.device, engine_bytes: int) -> dict[str, float]:
    """GiB on this rank: the training state's peak since the last call (torch's, less `engine_bytes` of an engine that
    slept at that time), what is in use on the whole device just now, and the process's largest resident host memory."""
    out = {"memory/host_peak_GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        out["memory/device_used_GiB"] = (total - free) / 2**30
        out["memory/device_peak_GiB"] = (torch.cuda.max_memory_allocated(device) - engine_bytes) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
    return out


def peak_flops() -> float | None:
    """Dense bf16 FLOP/s of this GPU, where it is known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((flops for key, flops in PEAK_BF16_FLOPS.items() if key in name), None)


@contextmanager
def profiled(tool: str, folder: str, step: int) -> Iterator[None]:
    """Profile what runs inside; each rank writes folder/step_N_rank_R.

    Args:
        tool: "off"; "torch" for a Chrome trace with the phases' names (.json.gz); "torch_memory" for a snapshot of the CUDA
            allocator's history (.pickle, for pytorch.org/memory_viz), nothing on a CPU.
    """
    path = os.path.join(folder, f"step_{step:06d}_rank_{dist.get_rank()}") if tool != "off" else ""
    if tool == "torch":
        os.makedirs(folder, exist_ok=True)
        with torch.profiler.profile() as profiler:
            yield
        profiler.export_chrome_trace(path + ".json.gz")
    elif tool == "torch_memory" and torch.cuda.is_available():
        os.makedirs(folder, exist_ok=True)
        torch.cuda.memory._record_memory_history()
        yield
        torch.cuda.memory._dump_snapshot(path + ".pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        yield
