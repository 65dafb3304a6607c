"""launch/slurm.sh with slurm's commands faked on this machine, and launch/prepare_gsm8k.py on a folder made here."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.data import load_prompts
from common.rewards import auto
from launch import make_tiny, prepare_gsm8k

ROOT = Path(__file__).resolve().parent.parent

# As slurm does: srun stops at the first task that fails (TERM, later KILL), returns the highest exit code, and signals only the
# processes that it started itself (proctrack/cgroup), not their children.
SRUN = """#!{python}
import itertools, json, os, signal, subprocess, sys, time
options = list(itertools.takewhile(lambda a: a.startswith("--"), sys.argv[1:]))
command = sys.argv[1 + len(options):]
nodes, tasks = int(os.environ["SLURM_NNODES"]), int(os.environ["FAKE_TASKS"])
children = []
def tell(number, *_):
    for child in children:
        if child.poll() is None:
            child.send_signal(number)
signal.signal(signal.SIGTERM, tell)
with open("srun.json", "w") as f:
    json.dump({{"options": options, "cpus": os.environ.get("SRUN_CPUS_PER_TASK"), "pid": os.getpid()}}, f)
for rank in range(tasks):
    node, local = divmod(rank, tasks // nodes)
    environment = {{"SLURM_PROCID": rank, "SLURM_NTASKS": tasks, "SLURM_LOCALID": local, "SLURM_NODEID": node}}
    children.append(subprocess.Popen(command, env=os.environ | {{k: str(v) for k, v in environment.items()}}))
limit = None
while any(child.poll() is None for child in children):
    if limit is None and "--kill-on-bad-exit=1" in options and any(child.poll() for child in children):
        limit = time.monotonic() + 3
        tell(signal.SIGTERM)
    if limit is not None and time.monotonic() > limit:
        tell(signal.SIGKILL)
    time.sleep(0.01)
sys.exit(max(child.returncode if child.returncode >= 0 else 128 - child.returncode for child in children))
"""
SCONTROL = """#!/bin/bash
if [[ $* == "show hostnames head[1-2]" ]]; then echo "$FAKE_HOSTS"; exit; fi
echo "$*" >> scontrol.log
exit ${FAKE_REQUEUE:-0}
"""
# A rank: notes what it was started with, adds up ranks over gloo if asked to, and then lives until TERM, or ends by itself with
# the code that its rank has in `codes`.
STAND_IN = """
import json, os, signal, sys, time
told = []
plan = json.loads(sys.argv[1])
rank = int(os.environ["RANK"])
if rank not in plan.get("deaf", []):
    signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
state = {"argv": sys.argv[2:], **{name: os.environ[name] for name in names}}
if plan.get("reduce"):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(rank)
    dist.all_reduce(total)
    state["sum"] = total.item()
    dist.destroy_process_group()
with open(f"rank_{rank}.partial", "w") as f:
    json.dump(state, f)
os.rename(f.name, f"rank_{rank}.json")
codes = {int(k): v for k, v in plan.get("codes", {}).items()}
deadline = time.monotonic() + 15
def go_on():
    return told or rank in codes and all(os.path.exists(f"rank_{other}.json") for other in range(4))
while plan.get("wait") and not go_on() and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(plan.get("closing", 0) * rank)
open(f"ended_{rank}", "w").close()
sys.exit(codes.get(rank, 85 if told else 70 if plan.get("wait") else 0))
"""


def free_job_id() -> int:
    """One whose port nothing listens on."""
    while True:
        job = random.randrange(10**6, 10**7)
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", 10000 + job % 20000)):
                return job


class Job:
    """launch/slurm.sh, copied into a spool folder as sbatch does, with the variables of a job of 4 tasks on 2 nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.id = folder, free_job_id()
        bin_folder, spool = folder / "bin", folder / "spool"
        for path in (bin_folder, spool):
            path.mkdir()
        shutil.copy(ROOT / "launch/slurm.sh", spool / "slurm_script")
        (folder / "stand_in.py").write_text(STAND_IN)
        for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)
        (bin_folder / "python").symlink_to(sys.executable)

    def run(self, *more: str, act: Any = None, hosts: str = "127.0.0.1\n127.0.0.2", requeue: int = 0, **plan: Any) -> SimpleNamespace:
        """act(job) is called once every rank has said what it was started with."""
        own = {"SLURM_JOB_ID": self.id, "SLURM_JOB_NODELIST": "head[1-2]", "SLURM_SUBMIT_DIR": self.folder, "SLURM_NNODES": 2,
               "SLURM_CPUS_PER_TASK": 3, "FAKE_TASKS": 4, "FAKE_HOSTS": hosts, "FAKE_REQUEUE": requeue}
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "OMP_NUM_THREADS")} | {k: str(v) for k, v in own.items()}
        environment["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p.endswith("site-packages"))
        command = ["bash", str(self.folder / "spool/slurm_script"), "stand_in.py", json.dumps(plan), *more]
        with open(self.folder / "job.out", "w") as log:
            process = subprocess.Popen(command, cwd=self.folder / "spool", env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            if act is not None:
                deadline = time.monotonic() + 30
                while len(list(self.folder.glob("rank_*.json"))) < 4 and process.poll() is None:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                act(self)
            code = process.wait(60)
            assert not Path(f"/tmp/glassrl_stopped_{self.id}").exists()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        log, ranks = self.folder / "scontrol.log", [self.folder / f"rank_{rank}.json" for rank in range(4)]
        return SimpleNamespace(
            code=code, output=(self.folder / "job.out").read_text(), requeued=log.read_text().splitlines() if log.exists() else [],
            ranks=[json.loads(path.read_text()) for path in ranks if path.exists()],
            ended=sorted(path.name for path in self.folder.glob("ended_*")),
        )

    def srun(self) -> dict[str, Any]:
        return json.loads((self.folder / "srun.json").read_text())

    def terminate(self) -> None:
        """As slurm does some time before the limit."""
        os.kill(self.srun()["pid"], signal.SIGTERM)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


ALL_ENDED = [f"ended_{rank}" for rank in range(4)]


def test_slurm_ranks_find_each_other(job: Job) -> None:
    done = job.run("--data.train", "a b.parquet", "--rollout.engine-args", '{"x": "it\'s $HOME"}', reduce=True)
    assert (done.code, done.requeued) == (0, []), done.output
    for rank, told in enumerate(done.ranks):
        assert told == {
            "argv": ["--data.train", "a b.parquet", "--rollout.engine-args", '{"x": "it\'s $HOME"}'], "RANK": str(rank), "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(10000 + job.id % 20000),
            "OMP_NUM_THREADS": "1", "sum": 6,
        }
    assert len(done.ranks) == 4 and job.srun()["cpus"] == "3"


def test_slurm_requeues_a_job_that_was_stopped(job: Job) -> None:
    """Rank 0 ends first with 85, rank 3 a second later: it must not be killed for that."""
    done = job.run(wait=True, closing=0.3, act=Job.terminate)
    assert (done.code, done.requeued, done.ended) == (0, [f"requeue {job.id}"], ALL_ENDED), done.output


def test_slurm_requeues_a_job_that_was_stopped_before_it_listened(job: Job) -> None:
    done = job.run(wait=True, deaf=[0, 1, 2, 3], act=Job.terminate)
    assert (done.code, done.requeued, done.ended) == (0, [f"requeue {job.id}"], []), done.output


def test_slurm_passes_85_on_when_it_cannot_requeue(job: Job) -> None:
    assert job.run(wait=True, act=Job.terminate, requeue=1).code == 85


@pytest.mark.parametrize(("codes", "expected"), [({1: 1}, 1), ({2: 99}, 99), ({3: 2}, 2)])
def test_slurm_job_fails_with_a_failing_rank(job: Job, codes: dict[int, int], expected: int) -> None:
    """The others stop with 85 when they are signalled for it, the higher number for two of these codes."""
    done = job.run(wait=True, codes=codes)
    assert (done.code, done.requeued) == (expected, []), done.output


def test_slurm_job_fails_with_a_rank_that_fails_while_stopping(job: Job) -> None:
    done = job.run(wait=True, closing=0.1, codes={3: 1}, act=Job.terminate)
    assert (done.code, done.requeued) == (1, []), done.output


def test_slurm_does_not_requeue_for_an_earlier_stop(job: Job) -> None:
    assert job.run(wait=True, act=Job.terminate).requeued == [f"requeue {job.id}"]
    Path(f"/tmp/glassrl_stopped_{job.id}").touch()  # as if that job had been killed before it took the file away
    done = job.run()
    assert (done.code, len(done.requeued)) == (0, 1), done.output


def test_slurm_without_a_first_node(job: Job) -> None:
    done = job.run(hosts="")
    assert done.code == 1 and done.output.count("\n") == 1 and done.output.startswith("slurm.sh: "), done.output


def test_slurm_directives() -> None:
    lines = (ROOT / "launch/slurm.sh").read_text().splitlines()
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert {"--signal=TERM@300", "--requeue", "--open-mode=append"} <= {*directives} and len(lines) < 50
    assert all(i < first_command for i, line in enumerate(lines) if line.startswith("#SBATCH"))  # sbatch reads none after it


def test_slurm_knows_the_scripts_exit_code() -> None:
    from ppo_fsdp_vllm import EXIT_STOPPED

    text = (ROOT / "launch/slurm.sh").read_text()
    assert f"code == {EXIT_STOPPED}" in text and f"|| exit {EXIT_STOPPED}" in text


# ---- GSM8K ----

ROWS = {
    "train": [
        ("Natalia sold clips.\nHow many?", "48/2 = <<48/2=24>>24\n#### 72", "72"),
        ("A \"rich\" man?", "It's much.\n#### 1,450,000", "1450000"),
        ("Below zero?", "Cold.\n#### -3", "-3"),
        ("In all?", "Half.\n#### 10.50", "10.50"),
    ],
    "test": [("Last?", "Done.\n#### 8", "8")],
}


@pytest.fixture(params=["hub", "jsonl"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "local"
    (folder / "main").mkdir(parents=True)
    for split, rows in ROWS.items():
        table = [{"question": question, "answer": answer} for question, answer, _ in rows]
        if request.param == "jsonl":
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
            continue
        half = (len(table) + 1) // 2  # two files of a split
        for i, part in enumerate(filter(None, (table[:half], table[half:]))):
            pq.write_table(pa.Table.from_pylist(part), folder / f"main/{split}-{i:05d}-of-00002.parquet")
    return folder


def prepare(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch/prepare_gsm8k.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60)


def test_gsm8k(local: Path, tmp_path: Path) -> None:
    done = prepare(tmp_path / "out", "--local", local)
    assert done.returncode == 0, done.stderr
    tokenizer = make_tiny.build_tokenizer()
    for split, rows in ROWS.items():
        path = str(tmp_path / f"out/{split}.parquet")
        asked = [q + ' Let\'s think step by step and output the final answer after "####".' for q, _, _ in rows]
        assert pq.read_table(path).to_pylist() == [
            {
                "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": content}], "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"split": split, "index": i, "question": question, "answer": answer},
            }
            for i, (content, (question, answer, truth)) in enumerate(zip(asked, rows, strict=True))
        ]
        prompts, dropped = load_prompts([path], tokenizer, max_length=200)
        assert dropped == 0 and len(prompts) == len(rows)
        for prompt, content, (_, answer, _) in zip(prompts, asked, rows, strict=True):
            assert prompt.ids == tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
            )
            right, wrong = (auto(prompt.data_source, text, prompt.ground_truth, prompt.extra_info) for text in (answer, "#### 5"))
            assert (right["score"], wrong["score"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.jsonl", None, "holds neither main/train-*.parquet nor train.jsonl"),
        ("test.jsonl", None, "holds neither main/test-*.parquet nor test.jsonl"),
        ("test.jsonl", "", "the test split in"),
        ("test.jsonl", '{"question": "a", "answer": "#### 1"}\n{"quest', "test.jsonl, row 1 is not JSON"),
        ("test.jsonl", '{"question": "a"}', "test.jsonl, row 0: question and answer must be text"),
        ("test.jsonl", '{"question": "a", "answer": "one"}', "test.jsonl, row 0: the answer has no number after ####"),
        ("main/test-0.parquet", "no parquet", "test-0.parquet is not a parquet file"),
    ],
)
def test_gsm8k_that_cannot_be_read(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n')
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, OSError)) as caught:
        prepare_gsm8k.main(tmp_path / "out", tmp_path, "unused")
    assert message in str(caught.value) and "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_gsm8k_errors_are_one_line(tmp_path: Path) -> None:
    done = prepare(tmp_path / "out", "--local", tmp_path / "nowhere")
    assert (done.returncode, done.stderr) == (1, f"error: --local {tmp_path / 'nowhere'}: no such folder\n")
    offline = prepare(tmp_path / "out", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert offline.returncode == 1 and offline.stderr.count("\n") == 1, offline.stderr
    assert offline.stderr.startswith("error: openai/gsm8k is not to be had from the hub") and "--local" in offline.stderr


def test_gsm8k_asks_the_hub_for_the_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or str(tmp_path))
    assert prepare_gsm8k.from_hub("openai/gsm8k") == tmp_path
    assert asked == [(("openai/gsm8k",), {"repo_type": "dataset", "allow_patterns": ["main/*.parquet"]})]
