"""Run on 2 ranks, then on 1: common/checkpoint.py with real sharded models and AdamW, and with disks that fail."""

import functools
import os
import random
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from common import checkpoint
from common.checkpoint import list_steps, load, save, step_folder
from common.reshard import fsdp_buckets, named_weights
from launch import make_tiny
from ppo_fsdp_vllm import ActorArgs, Args, CriticArgs, DataArgs, FSDPArgs, build_model, make_optimizer

SHARED = os.environ.get("CHECKPOINT_CASES", "")  # of test_checkpoint.py: what the run on 2 ranks leaves for the one on 1

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
RANK, WORLD = dist.get_rank(), dist.get_world_size()
LAST = WORLD - 1
FULL = "OSError: [Errno 28] No space left on device"


def steps(path: str) -> list[int]:
    out = list_steps(path)
    dist.barrier()  # rank 0 may go on to change the folder
    return out


def names(path: str) -> list[str]:
    out = sorted(os.listdir(path))
    dist.barrier()
    return out


@functools.cache
def mesh():
    return init_device_mesh("cpu", (WORLD,))


def new_folder() -> str:
    """The same empty folder on every rank."""
    path = [tempfile.mkdtemp() if RANK == 0 else ""]
    dist.broadcast_object_list(path)
    return path[0]


@functools.cache
def model_folder(tied: bool = True) -> str:
    path = new_folder()
    if RANK == 0:
        make_tiny.build_model(seed=1, tied=tied).save_pretrained(path)
        make_tiny.build_tokenizer().save_pretrained(path)
    dist.barrier()
    return path


class Training:
    """An actor and a critic, whose gradients are random numbers from this rank's generator."""

    def __init__(self, tied: bool = True) -> None:
        path = model_folder(tied)
        args = Args(actor=ActorArgs(model=path, lr=1e-3), critic=CriticArgs(), data=DataArgs(train=("none",)),
                    fsdp=FSDPArgs(param_dtype="float32"))
        kinds = {"actor": "policy", "critic": "critic"}
        self.models = {name: build_model(kind, path, args, mesh(), args.actor) for name, kind in kinds.items()}
        self.optimizers = {name: make_optimizer(model, args.actor) for name, model in self.models.items()}

    def step(self) -> None:
        for name, model in self.models.items():
            for p in model.parameters():
                local = torch.randn(p.to_local().shape)
                p.grad = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
            self.optimizers[name].step()

    def state(self) -> dict[str, Any]:
        """As in the scripts."""
        out = {}
        for name, model in self.models.items():
            out[name], out[f"{name}_optimizer"] = get_state_dict(model, self.optimizers[name])
        return out

    def load(self, path: str) -> dict[str, Any]:
        state = self.state()
        progress = load(path, state)
        for name, model in self.models.items():
            set_state_dict(model, self.optimizers[name], model_state_dict=state[name], optim_state_dict=state[f"{name}_optimizer"])
        return progress


@functools.cache
def training() -> Training:
    t = Training()
    t.step()
    return t


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """{path: tensor or number}, DTensors gathered. Collective."""
    if isinstance(state, dict):
        return {key: leaf for k, v in state.items() for key, leaf in flat(v, f"{name}/{k}").items()}
    if isinstance(state, (list, tuple)):
        return {key: leaf for k, v in enumerate(state) for key, leaf in flat(v, f"{name}/{k}").items()}
    return {name: state.full_tensor().clone() if isinstance(state, DTensor) else state.clone() if torch.is_tensor(state) else state}


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]) if torch.is_tensor(a[name]) else a[name] == b[name], name


def seed(n: int) -> None:
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(n)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def raises(expected: str, do: Callable[[], Any]) -> None:
    try:
        do()
    except RuntimeError as e:
        assert expected in str(e) and "\n" not in str(e), e
    else:
        raise AssertionError(f"went unnoticed: {expected}")


def small(value: int) -> dict[str, Any]:
    """A state that costs nothing to save."""
    return {"x": torch.full((3,), float(value))}


def saved_small(path: str) -> tuple[list[float], dict[str, Any]]:
    state = small(-1)
    progress = load(path, state)
    return state["x"].tolist(), progress


@contextmanager
def disk_full(path_part: str) -> Iterator[None]:
    """On the last rank, torch.save to files with `path_part` in their path fails; DCP's writers call it with their streams."""
    plain = torch.save

    def full(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if path_part in (f if isinstance(f, str) else f"stream {getattr(f, 'name', '')}"):
            raise OSError(28, "No space left on device")
        plain(obj, f, *args, **kwargs)

    with mock.patch.object(torch, "save", full if RANK == LAST else plain):
        yield


def case_round_trip_to_the_bit():
    """Weights, AdamW's moments, step counts and rates, and the generators of every rank: the next step is the same."""
    path, t = new_folder(), Training()
    seed(10 + RANK)
    t.step()
    t.step()
    draws()
    t.optimizers["actor"].param_groups[0]["lr"] = 0.25  # what a schedule does
    written = flat(t.state())
    progress = {"sampler": {"position": 5, "shuffle": True}, "list": [1, 2.5, None]}
    final = save(path, 20, t.state(), progress, keep=2)
    assert final == step_folder(path, 20) and steps(path) == [20] and names(path) == ["step_000020"]
    assert_same(written, flat(t.state()))  # saving changes nothing
    t.step()
    expected = flat(t.state()), draws()

    seed(99)
    other = Training()
    assert other.load(final) == progress | {"step": 20, "world_size": WORLD}
    assert_same(flat(other.state()), written)
    assert other.optimizers["actor"].param_groups[0]["lr"] == 0.25
    other.step()
    assert_same(flat(other.state()), expected[0])
    assert draws() == expected[1]


def case_generators_of_a_missing_rank_stay():
    path = new_folder()
    seed(RANK)
    final = save(path, 1, small(1), {}, keep=0)
    expected = draws()
    if RANK == LAST:
        os.unlink(os.path.join(final, f"rank_{LAST}.pt"))
    seed(50)
    assert saved_small(final)[0] == [1.0] * 3
    got = draws()
    seed(50)
    assert got == (draws() if RANK == LAST else expected)


def case_only_the_newest_stay():
    path = new_folder()
    for step, keep, expected in (
        (1, 2, [1]), (2, 2, [1, 2]), (3, 2, [2, 3]), (4, 0, [2, 3, 4]), (1000000, 0, [2, 3, 4, 1000000]), (1000001, 1, [1000001]),
    ):
        save(path, step, small(step), {}, keep)
        assert steps(path) == expected
        assert len(names(path)) == len(expected)
    save(path, 1000002, small(5), {}, 1, protect=1000001)
    assert steps(path) == [1000001, 1000002]
    assert saved_small(step_folder(path, 1000001))[0] == [1000001.0] * 3
    save(path, 3, small(3), {}, 1)  # of a run that began anew beside them: what was just saved is not the oldest
    assert steps(path) == [3, 1000001, 1000002]


def case_what_a_killed_save_left_is_never_listed_and_removed():
    path = new_folder()
    assert steps(path) == [] and steps(os.path.join(path, "nowhere")) == []
    save(path, 2, small(2), {}, 0)
    if RANK == 0:
        for name in ("step_000004.partial", "step_000003.partial"):
            os.makedirs(os.path.join(path, name, "deeper"))
            Path(path, name, "__0_0.distcp").write_bytes(b"half of a tensor")
        Path(path, "step_notes").mkdir()
    dist.barrier()
    assert steps(path) == [2]
    save(path, 4, small(4), {}, 0)
    assert steps(path) == [2, 4] and names(path) == ["step_000002", "step_000004", "step_notes"]
    assert saved_small(step_folder(path, 4))[0] == [4.0] * 3


def case_saving_a_step_again_replaces_it():
    path = new_folder()
    save(path, 7, small(1), {"run": 1}, 2)
    save(path, 7, small(2), {"run": 2}, 2)
    assert steps(path) == [7]
    assert saved_small(step_folder(path, 7)) == ([2.0] * 3, {"run": 2, "step": 7, "world_size": WORLD})


def case_a_removal_that_is_cut_short_leaves_nothing_that_looks_complete():
    """A process killed while it removes an old checkpoint must not leave half of it under a complete one's name."""
    path = new_folder()
    save(path, 1, small(1), {}, 0)
    dist.barrier()

    def cut_short(folder: str, *args: Any, **kwargs: Any) -> None:
        os.unlink(os.path.join(folder, "progress.json"))
        raise OSError("cut short")

    with mock.patch.object(checkpoint.shutil, "rmtree", cut_short):
        raises("cut short", lambda: save(path, 2, small(2), {}, 1))
    assert steps(path) == [2]
    with mock.patch.object(checkpoint.shutil, "rmtree", cut_short):
        raises("", lambda: save(path, 2, small(3), {}, 1))  # the same for a step that is saved again
    assert all(Path(step_folder(path, step), "progress.json").exists() for step in steps(path))
    dist.barrier()
    save(path, 3, small(3), {}, 1)  # and the next save cleans up
    assert names(path) == ["step_000003"]


def case_a_full_disk_on_one_rank_stops_all_and_harms_nothing():
    path, t = new_folder(), training()
    before = flat(t.state())
    save(path, 1, t.state(), {"n": 1}, 1)
    for path_part in ("stream", f"rank_{LAST}.pt"):  # while DCP writes tensors, and after it
        with disk_full(path_part):
            raises(FULL, lambda: save(path, 2, t.state(), {"n": 2}, 1))
        assert steps(path) == [1]
    with disk_full(f"rank_{LAST}.pt"):
        raises(f"step_000002 failed on rank(s) [{LAST}]: ", lambda: save(path, 2, t.state(), {"n": 2}, 1))
    t.step()
    assert t.load(step_folder(path, 1))["n"] == 1
    assert_same(flat(t.state()), before)
    save(path, 2, t.state(), {"n": 2}, 1)
    assert names(path) == ["step_000002"]


def case_a_file_size_limit_is_such_a_disk():
    """Not a patched function but the kernel's own refusal, on the last rank."""
    path, t = new_folder(), training()
    save(path, 1, t.state(), {}, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if RANK == LAST:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        raises("failed", lambda: save(path, 2, t.state(), {}, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert steps(path) == [1]
    t.load(step_folder(path, 1))


def case_a_folder_that_cannot_be_made_or_renamed_stops_all():
    path = new_folder()
    file = os.path.join(path, "file")
    Path(file).touch()
    raises("NotADirectoryError", lambda: save(os.path.join(file, "checkpoints"), 1, small(1), {}, 1))
    with mock.patch.object(checkpoint.os, "rename", side_effect=OSError(5, "Input/output error")):
        raises("Input/output error", lambda: save(path, 1, small(1), {}, 1))
    assert steps(path) == []


def case_a_damaged_or_different_checkpoint_stops_all():
    path = new_folder()
    final = save(path, 1, small(1), {}, 1)
    raises("failed", lambda: load(final, small(1) | {"y": torch.zeros(2)}))  # a tensor that was not saved
    raises("failed", lambda: load(final, {"x": torch.zeros(4)}))  # another shape
    dist.barrier()
    if RANK == LAST:
        os.rename(os.path.join(final, "rank_0.pt"), os.path.join(final, "rank_0.pt.old"))
        Path(final, f"rank_{LAST}.pt").write_bytes(b"damaged")
    dist.barrier()
    raises(f"failed on rank(s) [{LAST}]: ", lambda: load(final, small(1)))


def case_another_world_size_reads_the_same():
    """On 1 rank: what 2 ranks left. Shards of 101 rows, so their sizes differ."""
    t, reference = training(), Path(SHARED, "full.pt")
    if WORLD == 2:
        for name in ("checkpoints", "full.pt"):  # of an earlier failed run
            assert not Path(SHARED, name).exists()
        full = flat(t.state())
        save(os.path.join(SHARED, "checkpoints"), 3, t.state(), {"n": 3}, 1)
        if RANK == 0:
            torch.save(full, reference)
        return
    fresh = Training()
    assert fresh.load(step_folder(os.path.join(SHARED, "checkpoints"), 3)) == {"n": 3, "step": 3, "world_size": 2}
    expected = torch.load(reference)
    assert any(name.endswith("exp_avg_sq") for name in expected)
    assert_same(flat(fresh.state()), expected)


def export(folder: str, t: Training, tied: bool, dtype: torch.dtype, shard_bytes: int = 2**30) -> None:
    config = AutoConfig.from_pretrained(model_folder(tied))
    config.dtype = dtype
    buckets = fsdp_buckets(named_weights(t.models["actor"].lm), dtype, 100_000, torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(model_folder(tied))
    checkpoint.export_hf(folder, buckets, config, tokenizer, GenerationConfig.from_model_config(config), shard_bytes)


def case_the_export_opens():
    """Tied and untied, both dtypes, one file and several, over an earlier export; every tensor equal, every file for all to read."""
    os.umask(0o022)
    for tied in (True, False):
        t = Training(tied)
        t.step()
        weights = {name: w.full_tensor() for name, w in named_weights(t.models["actor"].lm)}
        assert ("lm_head.weight" in weights) != tied
        folder = os.path.join(new_folder(), "runs", "hf")
        for dtype, shard_bytes in ((torch.bfloat16, 50_000), (torch.float32, 150_000), (torch.float32, 2**30), (torch.bfloat16, 1)):
            if RANK == 0:  # of an export that was killed
                os.makedirs(folder + ".partial", exist_ok=True)
                Path(folder + ".partial", "part-0.safetensors").write_bytes(b"half")
                os.makedirs(folder, exist_ok=True)
                Path(folder, "model-of-an-earlier-export.safetensors").touch()
            dist.barrier()
            export(folder, t, tied, dtype, shard_bytes)
            files = sorted(Path(folder).glob("*.safetensors"))
            biggest = max(w.numel() * dtype.itemsize for w in weights.values())
            assert (len(files) == 1) == (shard_bytes == 2**30), files
            assert Path(folder, "model.safetensors.index.json").exists() == (len(files) > 1)
            assert {path.stat().st_mode & 0o777 for path in Path(folder).iterdir()} == {0o644}
            for file in files:
                tensors = load_file(file)
                assert sum(x.nbytes for x in tensors.values()) <= max(shard_bytes, biggest)
            assert names(os.path.dirname(folder)) == ["hf"]
            opened = AutoModelForCausalLM.from_pretrained(folder)  # its dtype comes from the config
            assert opened.dtype == dtype and opened.config.tie_word_embeddings == tied
            parameters = dict(opened.named_parameters())
            assert parameters.keys() == weights.keys()
            for name, w in weights.items():
                assert torch.equal(parameters[name], w.to(dtype)), name
            tokenizer = AutoTokenizer.from_pretrained(folder)
            assert tokenizer.decode(tokenizer("12+30=").input_ids) == "12+30=" and tokenizer.chat_template
            assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
            dist.barrier()


def case_an_export_that_fails_stops_all_and_keeps_the_earlier_one():
    t = training()
    path = new_folder()
    folder = os.path.join(path, "hf")
    export(folder, t, True, torch.float32)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if RANK == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        for shard_bytes in (2**30, 1000):  # when the last file is written, and while others still gather
            raises("failed on rank(s) [0]: ", lambda size=shard_bytes: export(folder, t, True, torch.float32, size))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    AutoModelForCausalLM.from_pretrained(folder)
    dist.barrier()
    export(folder, t, True, torch.float32)
    assert names(path) == ["hf"]
    if RANK == 0:
        shutil.rmtree(path)
        Path(path).touch()  # a file where a folder should be
    dist.barrier()
    raises("failed on rank(s) [0]: NotADirectoryError", lambda: export(folder, t, True, torch.float32))
