"""Checkpoints that are complete or absent, and Hugging Face folders written bucket by bucket.

Callers: the scripts. A checkpoint is written aside and renamed once every rank has written its part, so a killed save
leaves only a `.partial` folder, which the next save removes. Layout of OUT/checkpoints/step_000020/:

    *.distcp, .metadata    models and optimizers, sharded, by torch.distributed.checkpoint; any world size reads them
    rank_0.pt ...          random-number generators of each rank
    progress.json          step, sampler position and other small state that is the same on every rank
"""

import json
import os
import random
import re
import shutil
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from common.reshard import NamedTensors

STEP_FOLDER = re.compile(r"step_(\d+)$")


def rng_state() -> dict[str, Any]:
    """The state of every generator this process may draw from."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class RankError(RuntimeError):
    """Something failed on one or more ranks; raised on all of them."""


def on_every_rank(error: BaseException | None, what: str) -> None:
    """Raise on all ranks if one failed, so that none waits in a collective for it. Collective.

    Raises:
        RankError: names the ranks and the first error.
    """
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else _reason(error))
    failed = {rank: text for rank, text in enumerate(errors) if text is not None}
    if failed:
        raise RankError(f"{what} failed on rank(s) {sorted(failed)}: {next(iter(failed.values()))}") from error


def list_steps(folder: str) -> list[int]:
    """Steps of the complete checkpoints under `folder`, ascending."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(m[1]) for m in map(STEP_FOLDER.match, names) if m)


def step_folder(folder: str, step: int) -> str:
    return os.path.join(folder, f"step_{step:06d}")


def save(folder: str, step: int, state: dict[str, Any], progress: dict[str, Any], keep: int, protect: int = -1) -> str:
    """Write one checkpoint, then remove all but the newest `keep` (never step `protect`). Collective.

    Args:
        folder: on a file system that all ranks see. state: of DTensors and tensors, for torch.distributed.checkpoint.
        progress: JSON values, the same on every rank. keep: number of checkpoints that stay; 0 keeps all.
    Returns:
        the checkpoint's folder.
    Raises:
        RankError: on every rank, when any could not write; earlier checkpoints are untouched.
    """
    rank, final = dist.get_rank(), step_folder(folder, step)
    partial = final + ".partial"
    error: BaseException | None = None
    if rank == 0:
        try:
            for name in os.listdir(folder) if os.path.isdir(folder) else []:
                if name.endswith(".partial"):  # left by a save that was killed
                    shutil.rmtree(os.path.join(folder, name))
            os.makedirs(partial)
        except OSError as e:
            error = e
    on_every_rank(error, f"saving {final}")
    try:
        dcp.save(state, checkpoint_id=partial)
    except (Exception, CheckpointException) as e:  # on every rank: torch gathers its failures, in a bare BaseException
        raise RankError(f"saving {final} failed: {_reason(e)}") from e
    try:
        torch.save(rng_state(), os.path.join(partial, f"rank_{rank}.pt"))
        if rank == 0:
            with open(os.path.join(partial, "progress.json"), "w") as f:
                json.dump(progress | {"step": step, "world_size": dist.get_world_size()}, f)
    except Exception as e:
        error = e
    on_every_rank(error, f"saving {final}")
    if rank == 0:
        try:
            if os.path.exists(final):
                _remove(final)
            os.rename(partial, final)
            done = [s for s in list_steps(folder) if s <= step]  # later ones are another run's
            for old in done[:-keep] if keep else []:
                if old != protect:
                    _remove(step_folder(folder, old))
        except OSError as e:
            error = e
    on_every_rank(error, f"saving {final}")
    return final


def _remove(path: str) -> None:
    """Renamed first, so that a removal that is cut short leaves nothing that looks complete."""
    aside = path + ".removed.partial"
    os.rename(path, aside)
    shutil.rmtree(aside)


def _reason(error: BaseException) -> str:
    """An error in one line; of a CheckpointException the first failure beneath it."""
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    text = str(cause).splitlines()[0] if str(cause) else ""
    return text if text and isinstance(cause, ValueError) else f"{type(cause).__name__}: {text}"


def note_best(folder: str, best: dict[str, Any]) -> None:
    """Write folder/best.json, which names the step and accuracy of the checkpoint that is never removed. Rank 0 writes."""
    if dist.get_rank() == 0:
        with open(os.path.join(folder, "best.json.partial"), "w") as f:
            json.dump(best, f)
        os.replace(f.name, os.path.join(folder, "best.json"))


def read_best(folder: str) -> dict[str, Any] | None:
    """What `note_best` wrote, if that checkpoint is still there."""
    path = os.path.join(folder, "best.json")
    if not os.path.exists(path):
        return None
    with open(path) as f:
        best = json.load(f)
    return best if best["step"] in list_steps(folder) else None


def load(path: str, state: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint into `state` in place and restore this rank's generators. Collective.

    Returns:
        the saved `progress`. With another world size than at saving, generators of missing ranks are left as they are.
    Raises:
        RankError: on every rank, when any could not read its part, or the checkpoint is of other tensors.
    """
    error: BaseException | None = None
    progress: dict[str, Any] = {}
    try:
        dcp.load(state, checkpoint_id=path)
    except (Exception, CheckpointException) as e:
        raise RankError(f"loading {path} failed: {_reason(e)}") from e
    try:
        mine = os.path.join(path, f"rank_{dist.get_rank()}.pt")
        if os.path.exists(mine):
            set_rng_state(torch.load(mine, weights_only=False))
        with open(os.path.join(path, "progress.json")) as f:
            progress = json.load(f)
    except Exception as e:
        error = e
    on_every_rank(error, f"loading {path}")
    return progress


def export_hf(folder: str, buckets: Iterable[NamedTensors], config: Any, tokenizer: Any, generation_config: Any,
              shard_bytes: int = 4 * 2**30) -> None:
    """Write a folder that AutoModelForCausalLM.from_pretrained opens. Collective; rank 0 writes, holding one file's
    tensors (`shard_bytes`) in host memory at a time. Written aside and renamed, like a checkpoint.

    Raises:
        RankError: on every rank, when rank 0 could not write.
    """
    error: BaseException | None = None
    rank, partial = dist.get_rank(), folder.rstrip("/") + ".partial"
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        if held:
            save_file(held, os.path.join(partial, f"part-{len(files)}.safetensors"), metadata={"format": "pt"})
            files.append(list(held))
            held.clear()

    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    for bucket in buckets:  # every rank takes part in the gathers, also after rank 0 failed to write
        if rank == 0 and error is None:
            try:
                os.makedirs(partial, exist_ok=True)
                for name, tensor in bucket:
                    if sum(t.nbytes for t in held.values()) + tensor.nbytes > shard_bytes:
                        flush()
                    held[name] = tensor.to("cpu", copy=True)
                    total += tensor.nbytes
            except Exception as e:
                error = e
    if rank == 0 and error is None:
        try:
            flush()
            weight_map = {}
            for i, names in enumerate(files):
                file = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
                os.rename(os.path.join(partial, f"part-{i}.safetensors"), os.path.join(partial, file))
                weight_map.update(dict.fromkeys(names, file))
            if len(files) > 1:
                with open(os.path.join(partial, "model.safetensors.index.json"), "w") as f:
                    json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, f, indent=2)
            for part in (config, tokenizer, generation_config):
                part.save_pretrained(partial)
            for name in os.listdir(partial):  # safetensors writes its files for their owner alone, whatever the umask
                shutil.copymode(os.path.join(partial, "config.json"), os.path.join(partial, name))
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(partial, folder)
        except Exception as e:
            error = e
    on_every_rank(error, f"exporting {folder}")
