"""ppo_fsdp_vllm.py itself on two ranks, with real FSDP2 and real vLLM on an untrained tiny model: a whole run, one that is
killed in the middle of a save and started again, rewards that misbehave, and input that cannot work.

As a script this file is ppo_fsdp_vllm.py with a save that hangs: what the killed run is started as.
"""

import dataclasses
import json
import math
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SCRIPT = "ppo_fsdp_vllm.py"


def hang_in_a_save(path_part: str) -> None:
    """Rank 1 stops for good before it writes its part of one checkpoint, and says so by a file beside it."""
    import torch

    plain = torch.save

    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if path_part in str(f):
            Path(os.path.dirname(f)).with_suffix(".hangs").touch()
            time.sleep(3600)
        plain(obj, f, *args, **kwargs)

    torch.save = save


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        hang_in_a_save("step_000004.partial/rank_1.pt")
    from ppo_fsdp_vllm import cli

    cli()

import psutil  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402
from torchrun import torchrun  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config  # noqa: E402

from launch import make_tiny  # noqa: E402
from launch.cpu_engines import DEFAULTS  # noqa: E402

REWARD = """
import os, time

def fn(answer, ground_truth, extra_info):
    if os.path.exists(os.environ.get("RUINED_AFTER", "")):
        return 3e38
    match extra_info["kind"]:
        case "raise": raise KeyError("nothing there")
        case "hang": time.sleep(3600)
        case "nan": return float("nan")
    return {"score": sum(c.isdigit() for c in answer) / 6, "letters": sum(c.isalpha() for c in answer)}
"""
KINDS = {3: "raise", 7: "hang", 11: "nan"}  # by row
REASONS = {
    "raise": "KeyError: 'nothing there'", "hang": "no result within 2 s",
    "nan": "ValueError: a reward is a finite number or a dict with one as 'score', got nan",
}
TOO_LONG = 5
ROWS = [i for i in range(17) if i != TOO_LONG]  # two steps of 8 prompts: an epoch ends at each checkpoint
PER_TOKEN = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "returns", "advantages")
PHASES = ("generate", "reward", "old_logprob", "ref_logprob", "values", "advantages", "update_critic", "update_actor", "sync")


def row(i: int) -> dict[str, Any]:
    return {
        "data_source": "tiny/odd" if i % 2 else "tiny/even",
        "prompt": [{"role": "user", "content": "1+1+1+1+1+1+1+1=" if i == TOO_LONG else f"{i}+{i + 1}="}],
        "reward_model": {"style": "rule", "ground_truth": str(2 * i + 1)},
        "extra_info": {"kind": KINDS.get(i, "good")},
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = make_tiny.build_tokenizer()
    for part in (tokenizer, make_tiny.build_model(seed=1)):
        part.save_pretrained(folder / "model")
    pq.write_table(pa.Table.from_pylist([row(i) for i in range(17)]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist([row(i) for i in range(20, 25)]), folder / "val.parquet")
    (folder / "reward.py").write_text(REWARD)
    return folder


def flags(tiny: Path, out: Path, *more: str) -> list[str]:
    pairs = {
        "actor.model": tiny / "model", "actor.lr": 1e-3, "actor.warmup-steps": 3, "critic.lr": 1e-3, "data.train": tiny / "train.parquet",
        "data.val": tiny / "val.parquet", "data.max-prompt-length": 12, "data.overlong": "filter", "batch.prompts": 8,
        "batch.max-tokens": 64, "rollout.samples": 2, "rollout.max-response-length": 6, "rollout.dtype": "float32",
        "rollout.engine-args": '{"max_num_seqs": 32, "enforce_eager": true}', "reward.fn": f"{tiny / 'reward.py'}:fn",
        "reward.timeout": 2, "reward.workers": 2, "ppo.minibatch-size": 4, "kl.where": "reward", "kl.coef": 0.05, "kl.target": 0.01,
        "kl.horizon": 100, "fsdp.param-dtype": "float32", "val.every": 2, "val.samples": 2, "save.every": 2, "save.keep": 1, "out": out,
    }
    return [*(text for name, value in pairs.items() for text in (f"--{name}", str(value))), "--log.rollouts", *more]


def metrics_of(out: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line for line in lines}


def rollouts_of(out: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(out / f"rollouts/step_{step:06d}.parquet").to_pylist()


def checkpoint_of(out: Path, step: int, aside: Path) -> dict[str, Any]:
    """{path: tensor or value} of everything in a checkpoint."""
    folder = out / f"checkpoints/step_{step:06d}"
    dcp_to_torch_save(folder, aside)
    state = {"tensors": torch.load(aside, weights_only=False), "progress": json.loads((folder / "progress.json").read_text())}
    state |= {file.name: torch.load(file, weights_only=False) for file in folder.glob("rank_*.pt")}
    flat: dict[str, Any] = {}

    def flatten(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                flatten(f"{name}/{key}", part)
        elif isinstance(value, (list, tuple)):
            for i, part in enumerate(value):
                flatten(f"{name}/{i}", part)
        else:
            flat[name] = value

    flatten("", state)
    return flat


def same(a: Any, b: Any) -> bool:
    if hasattr(a, "dtype"):
        return a.dtype == b.dtype and bool((a == b).all())
    return a == b


def errors_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error: ")]


# ---- one whole run ----


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    out = tmp_path_factory.mktemp("whole")
    done = torchrun(2, SCRIPT, *flags(tiny, out, "--steps", "4"), timeout=240, **DEFAULTS)
    assert done.returncode == 0, done.stdout[-6000:]
    return SimpleNamespace(out=out, output=done.stdout, metrics=metrics_of(out))


def test_metrics(whole: SimpleNamespace) -> None:
    assert list(whole.metrics) == [0, 1, 2, 3, 4]
    for step, metrics in whole.metrics.items():
        assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in metrics.values()), metrics
        wanted = {
            "reward/mean", "reward/errors", "reward/letters", "length/response_mean", "length/cut_share", "kl/coef", "perf/tokens_per_s",
            "critic/loss", "critic/grad_norm", "critic/explained_variance", "critic/lr", "actor/loss", "actor/grad_norm", "actor/entropy",
            "actor/clipfrac", "actor/approx_kl", "actor/ref_kl", "actor/prob_diff", "actor/lr", "time/step",
        } | {f"time/{phase}" for phase in PHASES} if step else set()
        if step % 2 == 0:  # validated, and at step 0 before anything was trained
            names = ("greedy", "avg@2", "pass@2")
            wanted |= {f"val/{source}{name}" for name in names for source in ("", "tiny/odd/", "tiny/even/")}
            wanted |= {"time/save"} if step else set()
        assert wanted <= metrics.keys(), wanted - metrics.keys()
        assert any(name.startswith("val/") for name in metrics) == (step % 2 == 0)
        if step:
            assert any(name.startswith("memory/") for name in metrics)
            assert sum(metrics[name] for name in metrics if name.startswith("time/")) <= 2 * metrics["time/step"]
            assert metrics["actor/prob_diff"] < 1e-5  # engine and trainer agree, so each step's weights reached the engine
            assert 0 < metrics["actor/entropy"] <= math.log(102) and metrics["actor/grad_norm"] > 0 < metrics["critic/grad_norm"]
    assert [whole.metrics[step]["actor/lr"] for step in (1, 2, 3, 4)] == [pytest.approx(1e-3 * min(s / 3, 1)) for s in (1, 2, 3, 4)]
    assert whole.metrics[1]["kl/coef"] == pytest.approx(0.05 * (1 - 0.2 * 16 / 100))


def test_console_and_files(whole: SimpleNamespace) -> None:
    lines = [line for line in whole.output.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["0/4", "1/4", "2/4", "3/4", "4/4"]  # from rank 0 alone
    assert "16 prompts (1 dropped), 5 held out" in whole.output and "Traceback" not in whole.output
    assert [path.name for path in sorted((whole.out / "checkpoints").iterdir())] == ["step_000004"]
    assert [path.name for path in sorted((whole.out / "rollouts").iterdir())] == [f"step_{s:06d}.parquet" for s in (1, 2, 3, 4)]
    assert not list(whole.out.rglob("*.partial"))


def test_tensorboard(whole: SimpleNamespace) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole.out / "tensorboard"))
    events.Reload()
    for step, metrics in whole.metrics.items():
        for name in metrics.keys() - {"step", "unix_time"}:
            assert metrics[name] == pytest.approx(next(e.value for e in events.Scalars(name) if e.step == step)), name


def test_rollouts(whole: SimpleNamespace, tiny: Path) -> None:
    """Ids, texts, rewards, log-probs against the starting model, returns and advantages against their definitions."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    start = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    fn = runpy.run_path(str(tiny / "reward.py"))["fn"]
    kl_coef = 0.05
    for step in (1, 2, 3, 4):
        rows = rollouts_of(whole.out, step)
        assert len(rows) == 16 and all(rows[i]["row"] == rows[i + 1]["row"] for i in range(0, 16, 2))
        returns, advantages, errors = [], [], 0
        for r in rows:
            source = row(r["row"])
            ids, response = r["prompt_ids"], r["response_ids"]
            assert ids == tokenizer.apply_chat_template(source["prompt"], add_generation_prompt=True, return_dict=False)
            assert r["prompt"] == tokenizer.decode(ids) and r["response"] == tokenizer.decode(response)
            assert (r["data_source"], r["ground_truth"]) == (source["data_source"], source["reward_model"]["ground_truth"])
            assert r["truncated"] == (response[-1] != tokenizer.eos_token_id) and 1 <= len(response) <= 6
            assert tokenizer.eos_token_id not in response[:-1] and (len(response) == 6 or not r["truncated"])
            assert {len(r[name]) for name in PER_TOKEN} == {len(response)}

            kind, score = source["extra_info"]["kind"], 0.0
            if kind == "good":
                score = fn(tokenizer.decode(response, skip_special_tokens=True), "", source["extra_info"])["score"]
            errors += kind != "good"
            assert r["reward"] == pytest.approx(score)

            with torch.no_grad():
                logits = start(torch.tensor([ids + response])).logits[0, len(ids) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
            assert r["ref_logprobs"] == pytest.approx(logprobs, abs=1e-4)
            assert r["rollout_logprobs"] == pytest.approx(r["old_logprobs"], abs=1e-4)
            if step == 1:
                assert r["old_logprobs"] == r["ref_logprobs"] and set(r["values"]) == {0.0}
            else:
                assert r["old_logprobs"] != r["ref_logprobs"]

            per_token = [kl_coef * (ref - old) for ref, old in zip(r["ref_logprobs"], r["old_logprobs"], strict=True)]
            per_token[-1] += score
            returns += [sum(per_token[t:]) for t in range(len(response))]
        assert [x for r in rows for x in r["returns"]] == pytest.approx(returns, abs=1e-5)
        advantages = torch.tensor(returns, dtype=torch.float64) - torch.tensor([x for r in rows for x in r["values"]])
        whitened = (advantages - advantages.mean()) / advantages.std()
        assert [x for r in rows for x in r["advantages"]] == pytest.approx(whitened.tolist(), abs=1e-3)
        kl_coef = whole.metrics[step]["kl/coef"]
        assert whole.metrics[step]["reward/errors"] == errors
        assert whole.metrics[step]["reward/mean"] == pytest.approx(sum(r["reward"] for r in rows) / 16, abs=1e-6)


def test_rewards_that_raise_hang_or_return_nan_cost_only_themselves(whole: SimpleNamespace) -> None:
    """Two answers to each of three prompts, once an epoch; that they scored 0 is in test_rollouts. A line says why the first did."""
    for first in (1, 3):
        assert whole.metrics[first]["reward/errors"] + whole.metrics[first + 1]["reward/errors"] == 2 * len(KINDS)
    assert all(whole.metrics[step]["reward/mean"] > 0 for step in (1, 2, 3, 4))
    expected = []
    for step in (1, 2, 3, 4):
        failed = [KINDS[r["row"]] for r in rollouts_of(whole.out, step) if r["row"] in KINDS]
        expected += [f"warning: {len(failed)} of 16 answers could not be scored: {REASONS[failed[0]]}"] if failed else []
    assert [line for line in whole.output.splitlines() if line.startswith("warning: ")] == expected


def test_an_engine_without_a_prompt_scores_nothing(tiny: Path) -> None:
    from ppo_fsdp_vllm import score

    pool = mock.Mock()
    assert score(pool, AutoTokenizer.from_pretrained(tiny / "model"), [], []) == [] and not pool.score.called


def test_export_opens_and_is_the_checkpoint(whole: SimpleNamespace, tiny: Path, tmp_path: Path) -> None:
    exported = AutoModelForCausalLM.from_pretrained(whole.out / "hf")
    saved = checkpoint_of(whole.out, 4, tmp_path / "state.pt")
    start = dict(AutoModelForCausalLM.from_pretrained(tiny / "model").named_parameters())
    for name, p in exported.named_parameters():
        assert torch.equal(p, saved[f"/tensors/actor/lm.{name}"]) and not torch.equal(p, start[name]), name
    tokenizer = AutoTokenizer.from_pretrained(whole.out / "hf")
    ids = tokenizer.apply_chat_template(row(1)["prompt"], add_generation_prompt=True, return_dict=False)
    assert ids == next(r["prompt_ids"] for step in (1, 2) for r in rollouts_of(whole.out, step) if r["row"] == 1)
    answer = exported.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)
    assert len(ids) < answer.shape[1] <= len(ids) + 6 and exported.generation_config.eos_token_id == [tokenizer.eos_token_id]


# ---- killed in the middle of a save, resumed at an epoch's end, and ended by a loss that is not finite ----


@pytest.fixture(scope="module")
def resumed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The second start does steps 3 and 4 again; in step 5, when the rollouts of step 4 lie there, every reward is 3e38."""
    out = tmp_path_factory.mktemp("resumed")
    command = flags(tiny, out, "--steps", "5")
    environment = DEFAULTS | {"RUINED_AFTER": str(out / "rollouts/step_000004.parquet")}
    with open(out / "killed.log", "w") as log:
        process = psutil.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, *command], cwd=ROOT,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
        hangs, deadline = out / "checkpoints/step_000004.hangs", time.monotonic() + 240
        while process.poll() is None and not hangs.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        everyone = [process, *process.children(recursive=True)] if process.poll() is None else []
        for p in everyone:
            p.kill()
        process.wait()
        _, alive = psutil.wait_procs(everyone, timeout=30)
    assert hangs.exists() and not alive, (out / "killed.log").read_text()[-6000:]
    hangs.unlink()
    left = sorted(str(path.relative_to(out / "checkpoints")) for path in (out / "checkpoints").glob("*/*"))
    steps = list(metrics_of(out))
    with open(out / "metrics.jsonl", "a") as f:
        f.write('{"step": 4, "unix')  # as if it had been writing this too
    began = time.monotonic()
    done = torchrun(2, SCRIPT, *command, timeout=240, **environment)
    return SimpleNamespace(out=out, done=done, left=left, steps=steps, metrics=metrics_of(out), seconds=time.monotonic() - began)


def test_killed_in_the_middle_of_a_save(resumed: SimpleNamespace) -> None:
    assert "step_000002/progress.json" in resumed.left and "step_000004.partial/.metadata" in resumed.left
    assert "step_000004.partial/rank_0.pt" in resumed.left and "step_000004.partial/rank_1.pt" not in resumed.left
    assert resumed.steps == [0, 1, 2, 3]
    assert "resumed from step 2 " in resumed.done.stdout
    assert [path.name for path in sorted((resumed.out / "checkpoints").iterdir())] == ["step_000004"]


def test_resumed_equals_uninterrupted_to_the_bit(resumed: SimpleNamespace, whole: SimpleNamespace, tmp_path: Path) -> None:
    def lasting(metrics: dict[str, float]) -> dict[str, float]:
        return {k: v for k, v in metrics.items() if k.split("/")[0] not in ("time", "perf", "memory", "unix_time")}

    assert list(resumed.metrics) == [0, 1, 2, 3, 4]
    for step in resumed.metrics:
        assert lasting(resumed.metrics[step]) == lasting(whole.metrics[step]), step
    for step in (1, 2, 3, 4):
        assert rollouts_of(resumed.out, step) == rollouts_of(whole.out, step), step
    a, b = (checkpoint_of(run.out, 4, tmp_path / "state.pt") for run in (resumed, whole))
    assert a.keys() == b.keys() and len(a) > 100
    for name in a:
        assert same(a[name], b[name]), name


def test_no_prompt_is_repeated_or_dropped_when_a_resume_falls_on_an_epochs_end(resumed: SimpleNamespace) -> None:
    orders = []
    for first in (1, 3):  # the resume was between steps 2 and 3
        orders.append([r["row"] for step in (first, first + 1) for r in rollouts_of(resumed.out, step)[::2]])
        assert sorted(orders[-1]) == ROWS
    assert orders[0] != orders[1]


def test_a_loss_that_is_not_finite_ends_every_rank(resumed: SimpleNamespace, tmp_path: Path) -> None:
    output = resumed.done.stdout
    kept = resumed.out / "failed_step_000005.parquet"
    assert resumed.done.returncode == 1
    error, = errors_of(output)
    assert error.startswith("error: step 5, critic, update 1: loss inf") and str(kept) in error
    assert SCRIPT not in output.replace(f"{SCRIPT} FAILED", "")  # no traceback but torchrun's own
    rows = pq.read_table(kept).to_pylist()
    assert len(rows) == 16 and all(r["reward"] == pytest.approx(3e38) for r in rows)
    assert {len(r["response_ids"]) - len(r[name]) for r in rows for name in PER_TOKEN} == {0}
    assert not (resumed.out / "rollouts/step_000005.parquet").exists() and not (resumed.out / "hf").exists()
    assert "/tensors/actor/lm.model.norm.weight" in checkpoint_of(resumed.out, 4, tmp_path / "state.pt")


# ---- input that cannot work ----


def ends_with_one_line(done: subprocess.CompletedProcess[str], expected: str) -> None:
    error, = errors_of(done.stdout)
    assert expected in error and done.returncode == 1, done.stdout
    assert SCRIPT not in done.stdout.replace(f"{SCRIPT} FAILED", ""), done.stdout  # no traceback but torchrun's own


def test_bad_input_ends_every_rank_at_once(tiny: Path, tmp_path: Path) -> None:
    done = torchrun(2, SCRIPT, *flags(tiny, tmp_path, "--data.train", "nowhere.parquet"), timeout=100, **DEFAULTS)
    ends_with_one_line(done, "no file nowhere.parquet")


def test_what_only_one_rank_finds_ends_every_rank(tiny: Path, tmp_path: Path) -> None:
    """With TP 2 rank 0 alone starts the reward function; rank 1 would wait for it in the engine's constructor."""
    (tmp_path / "reward.py").write_text("import nothing_of_this_name\ndef fn(answer, ground_truth, extra_info): ...")
    more = ("--reward.fn", f"{tmp_path}/reward.py:fn", "--rollout.tensor-parallel-size", "2")
    done = torchrun(2, SCRIPT, *flags(tiny, tmp_path / "out", *more), timeout=100, **DEFAULTS)
    ends_with_one_line(done, "ModuleNotFoundError: No module named 'nothing_of_this_name'")


def make_args(**changes: Any) -> Any:
    """changes: group__field or field."""
    from ppo_fsdp_vllm import ActorArgs, Args, CriticArgs, DataArgs

    args = Args(actor=ActorArgs(model="m"), critic=CriticArgs(), data=DataArgs(train=("t.parquet",)))
    for name, value in changes.items():
        group, _, field = name.rpartition("__")
        setattr(getattr(args, group) if group else args, field, value)
    return dataclasses.replace(args)  # runs __post_init__ again


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__train": ()}, "--data.train is missing"),
        ({"batch__prompts": 0}, "--batch.prompts is 0"),
        ({"steps": 0}, "--steps is 0"),
        ({"ppo__epochs": 0}, "--ppo.epochs is 0"),
        ({"rollout__samples": -1}, "--rollout.samples is -1"),
        ({"rollout__tensor_parallel_size": 0}, "--rollout.tensor-parallel-size is 0"),
        ({"batch__prompts": 10, "ppo__minibatch_size": 3}, "--ppo.minibatch-size 3 must divide --batch.prompts 10"),
        ({"batch__prompts": 8, "ppo__minibatch_size": 16}, "--ppo.minibatch-size 16 must divide --batch.prompts 8"),
        ({"batch__max_tokens": 1023}, "--batch.max-tokens 1023 .* is 1024"),
        ({"rollout__temperature": 0.0}, "--rollout.temperature must be above 0"),
        ({"ppo__dual_clip": 0.5}, "--ppo.dual-clip is 0.5"),
        ({"rollout__engine_args": "{max_num_seqs: 1}"}, "--rollout.engine-args is not JSON"),
        ({"ppo__tis_cap": -1.0}, "--ppo.tis-cap is -1.0"),
        ({"save__every": -1}, "--save.every is -1"),
        ({"kl__where": "loss"}, "--kl.where loss with --kl.kind k1"),
        ({"kl__where": "reward", "kl__target": 0.0}, "--kl.target and --kl.horizon"),
        ({"val__samples": 4, "val__temperature": 0.0}, "--val.temperature must be above 0"),
        ({"rollout__engine_args": "[1]"}, "--rollout.engine-args must be a JSON object"),
    ],
)
def test_flags_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_args(**changes)
    assert "\n" not in str(caught.value)


def test_replay_needs_no_prompts() -> None:
    assert make_args(data__train=(), replay="kept").data.train == ()


@pytest.mark.parametrize(
    ("changes", "config", "world_size", "message"),
    [
        ({}, {}, 2, None),
        ({"rollout__tensor_parallel_size": 4}, {}, 8, None),  # twice the key-value heads, which vLLM then replicates
        ({"rollout__tensor_parallel_size": 3}, {}, 2, "--rollout.tensor-parallel-size 3 must divide the number of ranks, 2"),
        ({"rollout__tensor_parallel_size": 4}, {}, 2, "--rollout.tensor-parallel-size 4 must divide the number of ranks, 2"),
        ({"rollout__tensor_parallel_size": 8}, {}, 8, "--rollout.tensor-parallel-size 8 must divide the model's 4 attention heads"),
        (
            {"rollout__tensor_parallel_size": 4}, {"num_attention_heads": 12, "num_key_value_heads": 6}, 4,
            "--rollout.tensor-parallel-size 4 .* 6 key-value heads",
        ),
        ({"batch__prompts": 4, "ppo__minibatch_size": 4}, {}, 8, "--batch.prompts 4 is less than the number of engines, 8"),
        ({"data__max_prompt_length": 65}, {}, 2, "577.* positions for 576 tokens"),
    ],
)
def test_models_and_ranks_that_cannot_work(changes: dict[str, Any], config: dict[str, int], world_size: int, message: str | None) -> None:
    from ppo_fsdp_vllm import check

    model = Qwen2Config(**{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 576} | config)
    args = make_args(**{"data__max_prompt_length": 64, **changes})
    if message is None:
        return check(args, model, world_size)
    with pytest.raises(ValueError, match=message) as caught:
        check(args, model, world_size)
    assert "\n" not in str(caught.value)


def ends(*command: str) -> int:
    """cli() in this process, with the exit code in place of the exit."""
    from ppo_fsdp_vllm import cli

    with mock.patch.object(sys, "argv", [SCRIPT, *command]), mock.patch.object(os, "_exit", side_effect=sys.exit):
        with pytest.raises(SystemExit) as caught:
            cli()
    return caught.value.code


def test_command_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert ends(*flags(tiny, tmp_path)) == 1
    assert capsys.readouterr().err.lstrip().startswith("error: start this script with torchrun")
    assert ends(*flags(tiny, tmp_path, "--ppo.minibatch-size", "3")) != 0
    said = capsys.readouterr()
    assert "--ppo.minibatch-size 3 must divide --batch.prompts 8" in " ".join((said.out + said.err).split())
    assert ends(*flags(tiny, tmp_path, "--ppo.minibatch-sice", "3")) != 0
    said = capsys.readouterr()
    assert "--ppo.minibatch-sice" in said.out + said.err
    without_prompts = flags(tiny, tmp_path)
    del without_prompts[(at := without_prompts.index("--data.train")) : at + 2]
    assert ends(*without_prompts) != 0
    said = capsys.readouterr()
    assert "--data.train is missing: name parquet files of prompts" in " ".join((said.out + said.err).replace("│", " ").split())
    monkeypatch.setenv("RANK", "1")  # it says nothing: rank 0 has said it
    assert ends(*flags(tiny, tmp_path, "--ppo.minibatch-sice", "3")) != 0
    assert capsys.readouterr() == ("", "")
