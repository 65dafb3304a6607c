"""Runs of ppo_fsdp_vllm.py that are stopped, killed, resumed, replayed or never begin.

One output folder goes through four launches: torchrun that gets SIGTERM; torchrun whose rank 1 is killed; ranks started
directly, one of which gets SIGINT; two torchrun agents that stand for two nodes and run to the end. Then the rollouts that the
four kept are replayed in one go without an engine: to the bit the same training, if no stop lost anything.
"""

import fcntl
import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from test_script import PHASES, SCRIPT, checkpoint_of, ends, errors_of, flags, metrics_of, rollouts_of, row, same
from torchrun import ROOT, torchrun
from transformers import AutoTokenizer

from common.data import Prompt
from launch import make_tiny
from launch.cpu_engines import DEFAULTS

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENDLESS = ("--steps", "1000", "--val.every", "0", "--val.no-before-train", "--save.every", "1000", "--save.no-hf")
REWARD = "def fn(answer, ground_truth, extra_info): return sum(c.isdigit() for c in answer) / 6"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny.main(str(folder), steps=0, threads=1)
    for split, rows in (("train", range(6, 22)), ("val", range(30, 34))):
        pq.write_table(pa.Table.from_pylist([{**row(i), "extra_info": {"kind": "good"}} for i in rows]), folder / f"{split}.parquet")
    (folder / "reward.py").write_text(REWARD)
    return folder


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Launch:
    """Commands that run at once, in the repository's root. Leaving it kills all that is left of them, torchrun's ranks (which
    have sessions of their own) included."""

    def __init__(self, log: Path, *commands: list[str], environments: tuple[dict[str, str], ...] = ()) -> None:
        self.log, self.seen = log, {}
        with open(log, "w") as f:
            self.processes = [
                psutil.Popen(command, cwd=ROOT, stdout=f, stderr=subprocess.STDOUT, start_new_session=True,
                             env=os.environ | {"OMP_NUM_THREADS": "1"} | DEFAULTS | extra)
                for command, extra in zip(commands, environments or [{}] * len(commands), strict=True)
            ]

    def output(self) -> str:
        return self.log.read_text()

    def tree(self) -> list[psutil.Process]:
        for p in self.processes:
            if p.poll() is None:
                self.seen |= {child.pid: child for child in p.children(recursive=True)}
        return [*self.processes, *self.seen.values()]

    def wait_until(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            alive = all(p.poll() is None for p in self.processes)
            assert alive and time.monotonic() < deadline, f"{'not in time' if alive else 'died'}:\n{self.output()[-6000:]}"
            time.sleep(0.02)
        self.tree()

    def exit_codes(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        try:
            return [p.wait(max(deadline - time.monotonic(), 0.1)) for p in self.processes]
        except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
            raise AssertionError(f"still running after {seconds} s:\n{self.output()[-6000:]}") from None

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: Any) -> None:
        for p in self.tree():
            if p.is_running():
                p.kill()
        _, alive = psutil.wait_procs(self.tree(), timeout=30)
        assert not alive


def started_directly(log: Path, arguments: list[str]) -> Launch:
    """Two ranks as launch/slurm.sh starts them."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, SCRIPT, *arguments]
    return Launch(log, command, command, environments=tuple(shared | {"RANK": r, "LOCAL_RANK": r} for r in "01"))


def ranks_of(launch: Launch) -> list[psutil.Process]:
    return [p for p in launch.tree()[1:] if p.is_running() and p.ppid() == launch.processes[0].pid]


def last_step(out: Path) -> int:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def saved_in(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "checkpoints").glob("*"))


def saved_step(out: Path) -> int:
    """Of the only checkpoint; nothing else may lie there."""
    name, = saved_in(out)
    assert name.startswith("step_") and (out / "checkpoints" / name / "progress.json").exists()
    return int(name[5:])


# ---- one folder, four launches ----


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stopped")


@pytest.fixture(scope="module")
def terminated(tiny: Path, out: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    log = tmp_path_factory.mktemp("log") / "terminated.log"
    with Launch(log, [*TORCHRUN, "--standalone", "--nproc-per-node", "2", SCRIPT, *flags(tiny, out, *ENDLESS)]) as launch:
        launch.wait_until(lambda: last_step(out) >= 2)
        with open(out / ".lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        launch.processes[0].send_signal(signal.SIGTERM)
        code, = launch.exit_codes(30)
        left = psutil.wait_procs(launch.tree(), timeout=5)[1]
    return SimpleNamespace(code=code, output=launch.output(), left=left, step=saved_step(out), logged=last_step(out))


@pytest.fixture(scope="module")
def bereaved(tiny: Path, out: Path, terminated: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    log = tmp_path_factory.mktemp("log") / "bereaved.log"
    with Launch(log, [*TORCHRUN, "--standalone", "--nproc-per-node", "2", SCRIPT, *flags(tiny, out, *ENDLESS)]) as launch:
        launch.wait_until(lambda: last_step(out) >= terminated.step + 2)
        killed, = (p for p in ranks_of(launch) if p.environ()["RANK"] == "1")
        killed.kill()
        code, = launch.exit_codes(45)
        left = psutil.wait_procs(launch.tree(), timeout=5)[1]  # reward workers see their end of a pipe close
    return SimpleNamespace(code=code, output=launch.output(), left=left, saved=saved_in(out), logged=last_step(out))


@pytest.fixture(scope="module")
def interrupted(tiny: Path, out: Path, bereaved: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Ctrl-C reaches rank 1 alone."""
    log = tmp_path_factory.mktemp("log") / "interrupted.log"
    start = int(bereaved.saved[0][5:])
    with started_directly(log, flags(tiny, out, *ENDLESS)) as launch:
        # Metrics of the launch before still lie there until this one has resumed.
        launch.wait_until(lambda: f"step {start + 1}/" in launch.output())
        launch.processes[1].send_signal(signal.SIGINT)
        codes = launch.exit_codes(30)
    return SimpleNamespace(codes=codes, output=launch.output(), start=start, step=saved_step(out))


@pytest.fixture(scope="module")
def two_nodes(tiny: Path, out: Path, interrupted: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    steps = interrupted.step + 2
    more = ("--steps", str(steps), "--profile.tool", "torch", "--profile.steps", str(steps))
    agent = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    commands = [[*agent, "--node-rank", r, SCRIPT, *flags(tiny, out, *more)] for r in "01"]
    with Launch(tmp_path_factory.mktemp("log") / "two_nodes.log", *commands) as launch:
        codes = launch.exit_codes(120)
    return SimpleNamespace(codes=codes, output=launch.output(), steps=steps, metrics=metrics_of(out))


def test_sigterm_to_torchrun_saves_the_last_complete_step(terminated: SimpleNamespace) -> None:
    assert terminated.step == terminated.logged >= 2 and terminated.code != 0 and not terminated.left
    assert f"stopped by a signal after step {terminated.step}; complete checkpoints: [{terminated.step}]" in terminated.output
    assert not errors_of(terminated.output) and SCRIPT not in terminated.output.replace(f"{SCRIPT} FAILED", "")


def test_death_of_a_peer_saves_nothing(bereaved: SimpleNamespace, terminated: SimpleNamespace) -> None:
    """Rank 0 had steps worth saving, and SIGTERM from torchrun like in an orderly stop."""
    assert f"resumed from step {terminated.step} in" in bereaved.output
    assert bereaved.logged >= terminated.step + 2
    assert bereaved.code != 0 and bereaved.saved == [f"step_{terminated.step:06d}"] and not bereaved.left
    assert "stopped by a signal" not in bereaved.output


def test_ranks_started_directly_stop_with_the_code_that_requeues(interrupted: SimpleNamespace) -> None:
    from ppo_fsdp_vllm import EXIT_STOPPED

    assert f"resumed from step {interrupted.start} in" in interrupted.output
    assert interrupted.codes == [EXIT_STOPPED, EXIT_STOPPED] == [85, 85]
    assert interrupted.step > interrupted.start and not errors_of(interrupted.output) and "Traceback" not in interrupted.output
    assert f"stopped by a signal after step {interrupted.step}; complete checkpoints: [{interrupted.step}]" in interrupted.output


def test_two_agents_are_one_run(two_nodes: SimpleNamespace, interrupted: SimpleNamespace, out: Path) -> None:
    assert two_nodes.codes == [0, 0], two_nodes.output[-6000:]
    assert f"resumed from step {interrupted.step} in" in two_nodes.output and "2 rank(s) on cpu, 2 engine(s) of 1" in two_nodes.output
    steps = [line.split()[1] for line in two_nodes.output.splitlines() if line.startswith("step ")]
    assert steps == [f"{step}/{two_nodes.steps}" for step in (interrupted.step + 1, interrupted.step + 2)]  # from one of the two
    assert list(two_nodes.metrics) == [*range(1, two_nodes.steps + 1)]
    for first in range(1, two_nodes.steps, 2):  # an epoch is two steps of 8 prompts: no stop lost or repeated one
        assert sorted(r["row"] for step in (first, first + 1) for r in rollouts_of(out, step)[::2]) == [*range(16)]
    assert (out / "hf/config.json").exists() and not list(out.rglob("*.partial"))


def test_profile_has_the_phases_of_the_chosen_step(two_nodes: SimpleNamespace, out: Path) -> None:
    traces = sorted((out / "profile").iterdir())
    assert [path.name for path in traces] == [f"step_{two_nodes.steps:06d}_rank_{rank}.json.gz" for rank in (0, 1)]
    for path in traces:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        durations: dict[str, float] = {}
        for event in events:
            if event.get("ph") == "X" and event.get("cat") == "user_annotation":
                durations[event["name"]] = durations.get(event["name"], 0.0) + event["dur"]
        assert {*PHASES, "validate", "save"} <= durations.keys()
        if path.name.endswith("rank_0.json.gz"):
            for phase in PHASES:
                assert durations[phase] / 1e6 == pytest.approx(two_nodes.metrics[two_nodes.steps][f"time/{phase}"], rel=0.2, abs=0.02)


# ---- generation and training apart ----


def of_training(metrics: dict[str, float]) -> dict[str, float]:
    """What does not depend on an engine, reward workers or the clock."""
    kept = {k: v for k, v in metrics.items() if k.split("/")[0] in ("actor", "critic", "kl", "advantage", "length")}
    return kept | {name: metrics[name] for name in ("step", "reward/mean", "reward/std")}


def test_replay_trains_alike_to_the_bit_without_an_engine(tiny: Path, out: Path, two_nodes: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise RuntimeError('an engine was asked for')")
    more = ("--steps", str(two_nodes.steps), "--replay", str(out / "rollouts"), "--save.every", "0", "--save.no-hf")
    done = torchrun(
        2, SCRIPT, *flags(tiny, tmp_path / "out", *more), timeout=100, **DEFAULTS,
        PYTHONPATH=os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))),
    )
    assert done.returncode == 0 and "no engine" in done.stdout, done.stdout[-6000:]
    replayed = metrics_of(tmp_path / "out")
    assert list(replayed) == list(two_nodes.metrics)
    for step, metrics in replayed.items():
        assert of_training(metrics) == of_training(two_nodes.metrics[step]), step
        assert metrics["actor/grad_norm"] > 0 and metrics["critic/loss"] > 0 and "time/generate" not in metrics


def test_sigterm_to_one_rank_of_a_replay(tiny: Path, out: Path, two_nodes: SimpleNamespace, tmp_path: Path) -> None:
    """Started directly, as by slurm. Many epochs, so that there is time to stop it."""
    more = ("--steps", str(two_nodes.steps), "--replay", str(out / "rollouts"), "--ppo.epochs", "40", "--save.every", "1000")
    with started_directly(tmp_path / "log", flags(tiny, tmp_path / "out", *more)) as launch:
        launch.wait_until(lambda: "step 1/" in launch.output())
        launch.processes[0].send_signal(signal.SIGTERM)
        assert launch.exit_codes(30) == [85, 85], launch.output()[-6000:]
    assert saved_step(tmp_path / "out") == last_step(tmp_path / "out") < two_nodes.steps


def test_rollout_only_keeps_what_a_training_run_starts_from(tiny: Path, out: Path, two_nodes: SimpleNamespace, tmp_path: Path) -> None:
    done = torchrun(2, SCRIPT, *flags(tiny, tmp_path, "--steps", "2", "--rollout-only", "--val.no-before-train"), timeout=100, **DEFAULTS)
    assert done.returncode == 0, done.stdout[-6000:]
    for step in (1, 2):
        kept, trained = rollouts_of(tmp_path, step), rollouts_of(out, step)
        assert [r["row"] for r in kept] == [r["row"] for r in trained] and len(kept) == 16
        assert (kept == [{name: r[name] for name in kept[0]} for r in trained]) == (step == 1)  # then other weights wrote them
    metrics = metrics_of(tmp_path)
    assert list(metrics) == [1, 2] and not any(name.startswith(("actor/", "critic/")) for name in metrics[2])
    assert metrics[1]["reward/mean"] == two_nodes.metrics[1]["reward/mean"]
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "hf").exists()


# ---- resumes, from rollouts that are made up ----


def in_this_process(*command: str) -> int:
    """The script's exit code as the only rank. What it locks stays locked: a second start needs a copy of the folder."""
    environment = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": free_port()}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with mock.patch.dict(os.environ, {name: str(value) for name, value in environment.items()}):
            return ends(*command)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def made_up(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of two random answers to each of four prompts."""
    from ppo_fsdp_vllm import Batch, keep_rollouts

    folder, tokenizer = tmp_path_factory.mktemp("made_up"), AutoTokenizer.from_pretrained(tiny / "model")
    prompts = [Prompt(ids=[i, i + 1], text="", data_source="", ground_truth="", extra_info={}, index=i) for i in range(4)]
    for step in (1, 2, 3, 4):
        g = torch.Generator().manual_seed(step)
        responses = torch.randint(6, 90, (8, 6), generator=g)
        ids = torch.cat([torch.tensor([prompts[i // 2].ids for i in range(8)]), responses], dim=1).flatten()
        lengths, logprobs = torch.full((8,), 6), torch.full((48,), -4.5)
        batch = Batch(ids, torch.full((8,), 2), lengths, logprobs, torch.zeros(8, dtype=torch.bool))
        keep_rollouts(
            str(folder / f"step_{step:06d}.parquet"), prompts, batch, tokenizer, torch.rand(8, generator=g), {"rollout_logprobs": logprobs}
        )
    return folder


def trained(tiny: Path, made_up: Path, out: Path, *more: str, after: Path | None = None) -> Path:
    """The folder of a run without prompts of its own, which may go on where the one in `after` ended. Its first two steps train
    the critic alone."""
    if after is not None:
        shutil.copytree(after, out)
    always = ("--replay", str(made_up), "--data.train", "--ppo.critic-warmup", "2", "--save.every", "10", "--save.no-hf")
    assert in_this_process(*flags(tiny, out, *always, "--log.no-tensorboard", *more)) == 0
    return out


@pytest.fixture(scope="module")
def warmed_up(tiny: Path, made_up: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved before the actor's first update: its optimizer had no state yet, and the checkpoint wants one."""
    return trained(tiny, made_up, tmp_path_factory.mktemp("warmed_up") / "out", "--steps", "2")


def test_a_resume_after_the_critics_warmup_equals_no_stop(tiny: Path, made_up: Path, warmed_up: Path, tmp_path: Path) -> None:
    """To the bit: Adam has counted no step of the actor. The KL coefficient that is steered is the checkpoint's, not the flag's."""
    saved = checkpoint_of(warmed_up, 2, tmp_path / "state.pt")
    for name, taken in (("critic", 2), ("actor", 0)):
        assert {x.item() for key, x in saved.items() if key.startswith(f"/tensors/{name}_optimizer/") and key.endswith("/step")} == {taken}
    whole = trained(tiny, made_up, tmp_path / "whole", "--steps", "3")
    resumed = trained(tiny, made_up, tmp_path / "resumed", "--steps", "3", "--kl.coef", "0.5", after=warmed_up)
    assert of_training(metrics_of(resumed)[3]) == of_training(metrics_of(whole)[3]) and "actor/loss" in metrics_of(whole)[3]
    a, b = (checkpoint_of(run, 3, tmp_path / "state.pt") for run in (resumed, whole))
    assert a.keys() == b.keys() and [name for name in a if not same(a[name], b[name])] == []


def test_flags_of_this_start_hold_on_a_resume(tiny: Path, made_up: Path, warmed_up: Path, tmp_path: Path) -> None:
    decays, more = {"actor": 0.2, "critic": 0.3}, ["--kl.target", "None", "--kl.coef", "0.5"]  # nothing steers it any more
    for name, decay in decays.items():
        more += [f"--{name}.{flag}" for flag in (f"weight-decay={decay}", "schedule=linear", "warmup-steps=0", "lr=0.004")]
        more += [f"--{name}.betas", "0.8", "0.95"]
    resumed = trained(tiny, made_up, tmp_path / "resumed", "--steps", "4", *more, after=warmed_up)
    metrics, saved = metrics_of(resumed), checkpoint_of(resumed, 4, tmp_path / "state.pt")
    assert metrics[3]["kl/coef"] == metrics[4]["kl/coef"] == 0.5
    for name, decay in decays.items():
        assert [metrics[step][f"{name}/lr"] for step in (3, 4)] == [pytest.approx(0.001), 0.0]
        for group in (f"/tensors/{name}_optimizer/param_groups/{i}" for i in (0, 1)):
            assert (saved[f"{group}/betas/0"], saved[f"{group}/betas/1"]) == (0.8, 0.95)
            decays_too = saved[f"/tensors/{name}/{saved[f'{group}/params/0']}"].dim() > 1
            assert saved[f"{group}/weight_decay"] == (decay if decays_too else 0.0)


# ---- what ends before the engine starts ----


@pytest.fixture
def alone(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the script in this process, with an engine that says so in place of one that starts; gives its error line."""
    import ppo_fsdp_vllm

    def engine(*_: Any) -> None:
        raise ValueError("the engine was started")

    def run(*more: str, model: str | Path | None = None, out: Path | None = None) -> str:
        monkeypatch.setattr(ppo_fsdp_vllm, "make_engine", engine)
        changed = ("--actor.model", str(model)) if model else ()
        code = in_this_process(*flags(tiny, out or tmp_path / "out", *changed, *more))
        said = capfd.readouterr()
        assert code == 1 and "Traceback" not in said.err, said.err
        text = said.err[said.err.index("error: ") :].strip()
        assert text.count("\n") == 0, text
        return text

    return run


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(tiny / "model", tmp_path / "model"))


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_engine_starts_when_nothing_is_wrong(alone: Any, model: Path) -> None:
    assert alone(model=model) == "error: the engine was started"


def test_folder_of_a_run_that_goes_on(alone: Any, tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / "args.json").write_text("the first run's")
    with open(busy / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = alone(out=busy)
        assert f"another run is writing into {busy}" in said and "--out" in said
        assert (busy / "args.json").read_text() == "the first run's" and sorted(os.listdir(busy)) == [".lock", "args.json"]
    assert alone(out=busy) == "error: the engine was started"


@pytest.mark.parametrize(
    ("files", "more", "refusal"),
    [
        ({"hf/config.json": "{}"}, (), "holds a run without checkpoints, which cannot go on"),
        ({"metrics.jsonl": "{}\n"}, ("--save.every", "0"), "holds a run without checkpoints, which cannot go on"),
        ({"metrics.jsonl": "{}\n"}, (), None),  # of a run that died before its first checkpoint
        ({"metrics.jsonl": ""}, ("--save.every", "0"), None),
        ({"checkpoints/step_000002/progress.json": "{}", "metrics.jsonl": "{}\n", "hf/config.json": "{}"}, ("--save.every", "0"), None),
        ({"checkpoints/step_000002/progress.json": "{}"}, ("--rollout-only",), "--rollout-only in"),
        ({"checkpoints/step_000002/progress.json": "{}"}, ("--save.no-resume",), "holds checkpoints of another run"),
    ],
)
def test_folder_of_an_earlier_run(alone: Any, tmp_path: Path, files: dict[str, str], more: tuple[str, ...], refusal: str | None) -> None:
    earlier = tmp_path / "earlier"
    for name, text in files.items():
        (earlier / name).parent.mkdir(parents=True, exist_ok=True)
        (earlier / name).write_text(text)
    said = alone(*more, out=earlier)
    if refusal is None:
        assert said == "error: the engine was started"
    else:
        assert refusal in said and str(earlier) in said and "another --out" in said
        assert sorted(str(path.relative_to(earlier)) for path in earlier.rglob("*") if path.is_file()) == sorted(files)


def test_model_that_is_no_folder(alone: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(tiny / "model"))
    for name in ("/no/such/folder", "./folder", "~/folder", "folder/", "runs/ppo/hf"):
        said = f"error: model {name!r}: there is no such folder, and no name on the hub looks like that"
        assert alone(model=name) == alone("--critic.model", name) == said and not asked
    names = ["gpt2", "Qwen/Qwen2.5-0.5B-Instruct"]
    assert {alone(model=name, out=tmp_path / name) for name in names} == {"error: the engine was started"} and asked == names


def test_model_without_a_tokenizer(alone: Any, model: Path) -> None:
    for path in model.glob("*token*"):
        path.unlink()
    assert "has no tokenizer" in alone(model=model)


@pytest.mark.parametrize("only_bin", [False, True])
@pytest.mark.parametrize("whose", ["actor", "critic"])
def test_model_without_safetensors(alone: Any, model: Path, only_bin: bool, whose: str) -> None:
    (model / "model.safetensors").unlink()
    if only_bin:
        torch.save({}, model / "pytorch_model.bin")
    assert f"{model} has no safetensors" in alone(f"--{whose}.model", str(model))


def test_model_without_a_chat_template(alone: Any, model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert "has no chat template" in alone(model=model)


@pytest.mark.parametrize("whose", ["actor", "critic"])
def test_attention_that_cannot_be_packed(alone: Any, model: Path, whose: str) -> None:
    change_json(model / "config.json", layer_types=["full_attention", "chunked_attention"])
    said = alone(f"--{whose}.model", str(model))
    assert "'qwen2'" in said and "chunked_attention" in said


def test_model_without_a_language_model_head(alone: Any, model: Path) -> None:
    change_json(model / "config.json", model_type="t5", architectures=["T5EncoderModel"])
    assert "T5Config" in alone(model=model)


def test_reward_file_that_does_not_import(alone: Any, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("import nothing_of_this_name\ndef fn(answer, ground_truth, extra_info): ...")
    assert "No module named 'nothing_of_this_name'" in alone("--reward.fn", f"{tmp_path}/reward.py:fn")


@pytest.mark.parametrize("known", [True, False], ids=["known model type", "unknown model type"])
def test_code_of_a_model_runs_only_when_asked_for(alone: Any, model: Path, known: bool) -> None:
    marker, name = model / "was_run", f"own_{model.parent.name.replace('-', '_')}"
    (model / f"{name}.py").write_text(
        f"open({str(marker)!r}, 'a').close()\nfrom transformers import Qwen2Config\n"
        f"class Own(Qwen2Config):\n    model_type = 'qwen2' if {known} else 'own'\n"
    )
    change_json(model / "config.json", auto_map={"AutoConfig": f"{name}.Own"}, **({} if known else {"model_type": "own"}))
    said = alone(model=model)
    assert not marker.exists()
    assert said == "error: the engine was started" if known else "--trust-remote-code" in said
    alone("--trust-remote-code", model=model)
    assert marker.exists()
