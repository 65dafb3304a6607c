"""grpo_megatron_sglang.py itself, with real Megatron-Core and real SGLang on untrained tiny models: a whole run on two ranks, and what
its kept rollouts train without an engine, stopped in between, in another layout, and with everything offloaded; and a mixture of
experts on four ranks."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from torchrun import torchrun  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3MoeConfig  # noqa: E402

from launch import make_tiny  # noqa: E402

RECIPE = "launch/grpo_tiny.py"
REWARD = "def fn(answer, ground_truth, extra_info):\n    return {'score': sum(c.isdigit() for c in answer) / 6, 'length': len(answer)}\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer, model = make_tiny.build_tokenizer(), make_tiny.build_model(seed=1)
    moe = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, max_position_embeddings=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        norm_topk_prob=True, tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
    )
    torch.manual_seed(1)
    for name, part in (("model", model), ("moe", AutoModelForCausalLM.from_config(moe, dtype=torch.float32))):
        tokenizer.save_pretrained(folder / name)
        part.save_pretrained(folder / name)
    for name, rows in (("train", range(24)), ("val", range(30, 35))):
        pq.write_table(pa.Table.from_pylist([
            {
                "data_source": "tiny", "prompt": [{"role": "user", "content": f"{i}+{i + 1}="}],
                "reward_model": {"style": "rule", "ground_truth": str(2 * i + 1)}, "extra_info": {"row": i},
            } for i in rows
        ]), folder / f"{name}.parquet")
    (folder / "reward.py").write_text(REWARD)
    return folder


def run(tiny: Path, out: Path, *more: str, world_size: int = 2, model: str = "model") -> subprocess.CompletedProcess[str]:
    pairs = {
        "actor.model": tiny / model, "actor.lr": 1e-3, "data.train": tiny / "train.parquet", "data.val": tiny / "val.parquet",
        "batch.prompts": 8, "batch.max-tokens": 64, "rollout.samples": 4, "rollout.max-response-length": 6,
        "reward.fn": f"{tiny / 'reward.py'}:fn", "grpo.minibatch-size": 4, "actor.schedule": "constant",
        "kl.coef": 0.05, "steps": 3, "val.every": 2, "save.every": 2, "out": out,
    }
    flags = [text for name, value in pairs.items() for text in (f"--{name}", str(value))]
    return torchrun(world_size, RECIPE, *flags, *more)


def finished(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-40000:]
    return done.stdout


def metrics_of(out: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line for line in lines}


def of_training(metrics: dict[str, float]) -> dict[str, float]:
    """What the update computed, not how long it took."""
    return {name: x for name, x in metrics.items() if name.startswith(("actor/", "advantage/", "group/", "moe/"))}


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tensor-parallel ranks, an engine on each."""
    out = tmp_path_factory.mktemp("whole") / "run"
    finished(run(tiny, out, "--rollout.check-sync"))
    return out


@pytest.fixture(scope="module")
def replayed(tiny: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without an engine, stopped after step 2."""
    out = tmp_path_factory.mktemp("replayed") / "run"
    finished(run(tiny, out, "--replay", str(whole / "rollouts"), "--steps", "2"))
    return out


def test_metrics(whole: Path) -> None:
    metrics = metrics_of(whole)
    assert list(metrics) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        m = metrics[step]
        assert all(math.isfinite(x) for x in m.values())
        assert m["actor/prob_diff"] < 1e-5 and m["rollout/sync_logprob_diff"] < 1e-4 and m["actor/grad_norm"] > 0
        assert 0 < m["reward/mean"] < 1 and m["reward/length"] > 0 and m["reward/errors"] == 0
        assert {f"time/{name}" for name in ("generate", "reward", "old_logprob", "ref_logprob", "advantages", "update", "sync")} <= m.keys()
    assert "val/greedy" in metrics[0] and "val/greedy" not in metrics[1] and "val/greedy" in metrics[2] and "val/greedy" in metrics[3]
    assert 0 < metrics[1]["actor/ref_kl"] < metrics[3]["actor/ref_kl"]


def test_advantages_are_each_groups_own(whole: Path) -> None:
    tokenizer = make_tiny.build_tokenizer()
    for step in (1, 3):
        rows = pq.read_table(whole / f"rollouts/step_{step:06d}.parquet").to_pylist()
        assert len(rows) == 32
        for i in range(0, 32, 4):
            group = rows[i : i + 4]
            assert len({r["prompt"] for r in group}) == 1 and all(r["prompt"] == group[0]["prompt"] for r in group)
            rewards = torch.tensor([r["reward"] for r in group])
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for r, advantage in zip(group, expected.tolist(), strict=True):
                text = tokenizer.decode(r["response_ids"], skip_special_tokens=True)
                assert r["reward"] == pytest.approx(sum(c.isdigit() for c in text) / 6)
                assert r["advantages"] == pytest.approx([advantage] * len(r["response_ids"]), abs=1e-5)


def test_engine_and_trainer_agree_with_hugging_face(whole: Path, tiny: Path) -> None:
    """Before the first update both have the folder's weights."""
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    for r in pq.read_table(whole / "rollouts/step_000001.parquet").to_pylist()[::5]:
        ids = torch.tensor(r["prompt_ids"] + r["response_ids"])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[None]).logits[0, len(r["prompt_ids"]) - 1 : -1], -1)
        expected = logprobs.gather(1, ids[len(r["prompt_ids"]) :, None])[:, 0].tolist()
        for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs"):
            assert r[name] == pytest.approx(expected, abs=2e-5), name


def test_export_opens_and_has_learnt(whole: Path, tiny: Path) -> None:
    start, end = (dict(AutoModelForCausalLM.from_pretrained(path).named_parameters()) for path in (tiny / "model", whole / "hf"))
    assert start.keys() == end.keys()
    moved = {name: (end[name] - start[name]).abs().max().item() for name in start}
    assert min(moved.values()) > 1e-4 and max(moved.values()) < 1e-2, moved


def test_replay_trains_alike_to_the_bit(whole: Path, replayed: Path) -> None:
    for step in (1, 2):
        assert of_training(metrics_of(replayed)[step]) == of_training(metrics_of(whole)[step])


def test_a_resumed_run_takes_the_same_step(whole: Path, replayed: Path, tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(replayed, tmp_path / "run")
    output = finished(run(tiny, tmp_path / "run", "--replay", str(whole / "rollouts")))
    assert "resumed from step 2" in output
    assert of_training(metrics_of(tmp_path / "run")[3]) == of_training(metrics_of(whole)[3])


def test_another_layout_goes_on(whole: Path, replayed: Path, tiny: Path, tmp_path: Path) -> None:
    """Two stages of a pipeline from a checkpoint of two tensor-parallel ranks."""
    shutil.copytree(replayed, tmp_path / "run")
    sizes = ["--megatron.tensor-parallel-size", "1", "--megatron.pipeline-parallel-size", "2"]
    finished(run(tiny, tmp_path / "run", "--replay", str(whole / "rollouts"), *sizes))
    found, expected = of_training(metrics_of(tmp_path / "run")[3]), of_training(metrics_of(whole)[3])
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_offloading_and_recomputation_change_nothing(whole: Path, tiny: Path, tmp_path: Path) -> None:
    more = ["--megatron.param-offload", "--megatron.grad-offload", "--megatron.optimizer-offload", "--megatron.recompute", "full"]
    finished(run(tiny, tmp_path / "run", "--replay", str(whole / "rollouts"), *more, "--save.every", "0"))
    for step in (1, 2, 3):
        assert of_training(metrics_of(tmp_path / "run")[step]) == of_training(metrics_of(whole)[step])


def test_a_run_starts_from_anothers_checkpoint(whole: Path, replayed: Path, tiny: Path, tmp_path: Path) -> None:
    """Its weights are step 2's, which made step 3's rollouts, and the reference is where that run began."""
    more = [
        "--megatron.tensor-parallel-size", "1", "--megatron.pipeline-parallel-size", "2", "--steps", "1", "--grpo.minibatch-size", "8",
        "--actor.checkpoint", str(replayed / "checkpoints/step_000002"),
    ]
    shutil.copytree(whole / "rollouts", tmp_path / "rollouts")
    shutil.copy(tmp_path / "rollouts/step_000003.parquet", tmp_path / "rollouts/step_000001.parquet")
    finished(run(tiny, tmp_path / "run", "--replay", str(tmp_path / "rollouts"), *more))
    metrics = metrics_of(tmp_path / "run")[1]
    assert metrics["actor/prob_diff"] < 1e-5 and metrics["actor/ref_kl"] > 1e-3


def test_a_mixture_of_experts_in_four_ranks(tiny: Path, tmp_path: Path) -> None:
    """Tensor and expert parallel training in a pipeline; two engines of two ranks; groups that differ in reward only."""
    done = run(
        tiny, tmp_path / "run", "--megatron.pipeline-parallel-size", "2", "--megatron.expert-parallel-size", "2",
        "--rollout.tensor-parallel-size", "2", "--rollout.check-sync", "--grpo.dynamic-sampling", "--steps", "2", "--val.every", "0",
        "--save.every", "0",
        "--megatron.moe-aux-loss-coef", "0.01", world_size=4, model="moe",
    )
    finished(done)
    for step in (1, 2):
        m = metrics_of(tmp_path / "run")[step]
        assert m["group/zero_variance"] == 0 and m["rollout/generations"] >= 1
        assert m["rollout/sync_logprob_diff"] < 1e-4 and m["actor/prob_diff"] < 1e-5
        loads = [x for name, x in m.items() if name.startswith("moe/load_0")]
        assert len(loads) == 4 and sum(loads) == pytest.approx(4) and m["moe/load_min"] <= min(loads) and max(loads) <= m["moe/load_max"]
    start, end = (dict(AutoModelForCausalLM.from_pretrained(path).named_parameters()) for path in (tiny / "moe", tmp_path / "run/hf"))
    assert start.keys() == end.keys() and all((end[name] != start[name]).any() for name in start)


def make_args(**changes: Any) -> Any:
    import grpo_megatron_sglang as grpo

    args = {"actor": grpo.ActorArgs(model="m"), "data": grpo.DataArgs(train=("t",))}
    groups = {f.name: f for f in dataclasses.fields(grpo.Args)}
    for flag, value in changes.items():
        group, _, name = flag.partition("__")
        if not name:
            args[group] = value
        elif group in args:
            args[group] = dataclasses.replace(args[group], **{name: value})
        else:
            args[group] = dataclasses.replace(groups[group].default_factory(), **{name: value})  # type: ignore[misc]
    return grpo.Args(**args)


@pytest.mark.parametrize(("changes", "message"), [
    ({"rollout__samples": 1}, "--rollout.samples is 1"),
    ({"grpo__minibatch_size": 50}, "--grpo.minibatch-size 50 must divide"),
    ({"grpo__tis_cap": 0.4}, "--grpo.tis-cap"),
    ({"grpo__dual_clip": 0.5}, "--grpo.dual-clip"),
    ({"grpo__dynamic_sampling": True, "reward__permute": True}, "--reward.permute"),
    ({"megatron__virtual_pipeline_size": 2}, "--megatron.virtual-pipeline-size"),
    ({"megatron__tensor_parallel_size": 0}, "--megatron.tensor-parallel-size"),
    ({"megatron__moe_aux_loss_coef": -1.0}, "--megatron.moe-aux-loss-coef"),
    ({"rollout__engine_args": "{"}, "--rollout.engine-args"),
    ({"rollout__engine_args": "[]"}, "--rollout.engine-args"),
    ({"rollout__temperature": 0.0}, "--rollout.temperature"),
    ({"data__train": ()}, "--data.train"),
    ({"replay": "r", "rollout_only": True}, "--rollout-only"),
    ({"save__best": True}, "--save.best"),
    ({"kl__coef": -0.1}, "--kl.coef"),
])
def test_flags_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_args(**changes)


@pytest.mark.parametrize(("changes", "config", "world_size", "message"), [
    ({}, {}, 1, None),
    ({"megatron__tensor_parallel_size": 2, "megatron__pipeline_parallel_size": 2}, {}, 4, None),
    ({"megatron__tensor_parallel_size": 3}, {}, 3, "must divide the model's 4 attention heads"),
    ({"megatron__tensor_parallel_size": 4}, {}, 4, "must divide the model's 2 key-value heads"),
    ({"rollout__tensor_parallel_size": 4}, {}, 4, None),  # an engine gives a key-value head to several ranks
    ({"rollout__tensor_parallel_size": 2}, {}, 3, "must divide the 3 ranks"),
    ({"megatron__pipeline_parallel_size": 2}, {}, 3, "must divide the number of ranks, 3"),
    ({"megatron__pipeline_parallel_size": 2, "megatron__virtual_pipeline_size": 2}, {}, 2, "must divide the model's 2 layers"),
    ({"megatron__expert_parallel_size": 2}, {}, 2, "has no experts"),
    ({"megatron__tensor_parallel_size": 2}, {"intermediate_size": 255}, 2, "must divide the model's MLP width, 255"),
    ({"megatron__expert_tensor_parallel_size": 1, "megatron__tensor_parallel_size": 2}, {"num_experts": 4, "moe_intermediate_size": 64},
     2, "leave it at 0"),
    ({"megatron__expert_parallel_size": 3}, {"num_experts": 4, "moe_intermediate_size": 64}, 3, "must divide the model's 4 experts"),
    ({"megatron__expert_parallel_size": 2, "megatron__tensor_parallel_size": 2, "megatron__sequence_parallel": False},
     {"num_experts": 4, "moe_intermediate_size": 64}, 2, "--megatron.sequence-parallel"),
    ({"batch__prompts": 2, "grpo__minibatch_size": 1}, {}, 4, "less than the number of engines"),
    ({"data__max_prompt_length": 2048}, {}, 1, "positions for 2048 tokens"),
    ({"batch__max_tokens": 1000}, {}, 1, "--batch.max-tokens 1000 is too little"),
    ({"batch__max_tokens": 512, "megatron__context_parallel_size": 2}, {}, 2, None),
])
def test_models_and_ranks_that_cannot_work(changes: dict[str, Any], config: dict[str, int], world_size: int, message: str | None) -> None:
    import grpo_megatron_sglang as grpo

    hf = make_tiny.build_model(max_position_embeddings=2048, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2).config
    for name, value in config.items():
        setattr(hf, name, value)
    if message is None:
        grpo.check(make_args(**changes), hf, world_size)
    else:
        with pytest.raises(ValueError, match=message):
            grpo.check(make_args(**changes), hf, world_size)


def test_bad_input_ends_every_rank_with_one_line(whole: Path, tiny: Path, tmp_path: Path) -> None:
    for more, expected in (
        (["--replay", str(whole / "rollouts"), "--batch.prompts", "16", "--grpo.minibatch-size", "16"],
         "error: --grpo.minibatch-size 16 must divide the 8 prompts"),
        (["--actor.model", str(tmp_path)], f"error: {tmp_path} has no config.json"),
        (["--actor.checkpoint", str(tmp_path / "absent"), "--replay", str(tmp_path)], "error: --actor.checkpoint"),
    ):
        done = run(tiny, tmp_path / "run", *more)
        lines = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
        assert done.returncode != 0 and len(lines) == 1 and expected in lines[0], done.stdout[-2000:]
