"""Run on 1, 2, 4 and 8 ranks: the model, its gradients and its weights' way back, in many parallel layouts, against one process
of Hugging Face's."""

import dataclasses
import functools
import os
import tempfile
from datetime import timedelta
from typing import Any

import launch.cpu_engines.megatron  # noqa: F401  before megatron

# isort: split
import torch
import torch.distributed as dist
from megatron_groups import initialize
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

import grpo_megatron_sglang as grpo
from common.megatron_hf import TABLE, TRANSFORMER_ENGINE_NAMES, VOCABULARY, local_weights, part_rows, split, table_key
from common.megatron_reshard import megatron_buckets

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
RANK, WORLD = dist.get_rank(), dist.get_world_size()
SIZES = dict(
    vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, initializer_range=0.2,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8, mlp_only_layers=[])
LLAMA3 = dict(
    rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32,
)
HF: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "moe": Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True, tie_word_embeddings=False),
    "moe_raw": Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=False, tie_word_embeddings=True),
}
DENSE, EXPERTS = ("llama", "qwen2", "qwen3"), ("moe", "moe_raw")
# Flags of --megatron; what is left of the ranks is data parallel.
TP, PP, CP, EP = ({f"{name}_parallel_size": 2} for name in ("tensor", "pipeline", "context", "expert"))
VPP, NO_SP = {**PP, "virtual_pipeline_size": 2}, {**TP, "sequence_parallel": False}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
LAYOUTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [(kind, {}) for kind in HF] + [("llama", FULL), ("moe", SELECTIVE)],
    2: [
        ("moe", {}), ("qwen2", TP), ("llama", NO_SP), ("qwen2", PP), ("llama", PP), ("qwen2", VPP), ("qwen3", CP), ("moe", EP),
        ("moe", TP), ("qwen3", TP | FULL), ("llama", TP | SELECTIVE), ("llama", VPP | FULL),
    ],
    4: [
        ("qwen2", TP), ("qwen3", TP | PP), ("qwen2", TP | VPP), ("llama", TP | CP), ("qwen2", PP | CP), ("llama", CP), ("qwen2", PP),
        ("moe", EP), ("moe", TP | EP), ("moe", TP | PP), ("moe_raw", PP | EP), ("moe", CP | EP),
    ],
    8: [("qwen2", TP | PP | CP), ("moe", PP | CP | EP), ("moe", TP | PP | EP)],
}


def new_folder() -> str:
    """The same empty folder on every rank."""
    path = [tempfile.mkdtemp() if RANK == 0 else ""]
    dist.broadcast_object_list(path)
    return path[0]


@functools.cache
def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HF[kind], dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():  # no norm is 1 and no bias 0
            p.add_(torch.randn(p.shape) * 0.1)
    return model


@functools.cache
def folder_of(kind: str) -> str:
    path = new_folder()
    if RANK == 0:
        model_of(kind).save_pretrained(path)
    dist.barrier()
    return path


def start(kind: str, flags: dict[str, Any]) -> grpo.Policy:
    args = grpo.Args(
        actor=grpo.ActorArgs(model="made here"), data=grpo.DataArgs(train=("made here",), max_prompt_length=12),
        batch=grpo.BatchArgs(prompts=12, max_tokens=48),
        rollout=grpo.RolloutArgs(samples=2, temperature=0.8, dtype="float32", max_response_length=32),
        megatron=grpo.MegatronArgs(param_dtype="float32", **flags), grpo=grpo.GRPOArgs(minibatch_size=12), kl=grpo.KLArgs(coef=0.1),
    )
    m = args.megatron
    grpo.check(args, HF[kind], WORLD)
    initialize(
        m.tensor_parallel_size, m.pipeline_parallel_size, m.virtual_pipeline_size, m.context_parallel_size, m.expert_parallel_size,
        grpo.expert_tensor_parallel_size(m),
    )
    return grpo.Policy(args, HF[kind], folder_of(kind))


def weights(policy: grpo.Policy) -> dict[str, Tensor]:
    buckets = list(megatron_buckets(policy.plan, torch.float32, 20_000, torch.device("cpu")))
    flat = [named for bucket in buckets for named in bucket]
    assert len(buckets) > 3 and len(flat) == len(dict(flat))
    return dict(flat)


def sequences_of(seed: int = 3) -> grpo.Batch:
    """12 sequences of 5 to 40 tokens, as 6 groups of 2."""
    g = torch.Generator().manual_seed(seed)
    prompts, responses = torch.randint(2, 12, (12,), generator=g), torch.randint(3, 29, (12,), generator=g)
    ids = torch.randint(101, (int((prompts + responses).sum()),), generator=g)
    return grpo.Batch(ids, prompts, responses, torch.zeros(int(responses.sum())), torch.zeros(12, dtype=torch.bool))


@functools.cache
def batch_of(kind: str) -> tuple[grpo.Batch, dict[str, Tensor]]:
    """With old, rollout and reference log-probs near the model's own, some of them out of the clip's range, and advantages."""
    batch = sequences_of()
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        own = hf_logprobs(kind, batch)
    near = {name: own + 0.2 * torch.randn(own.shape, generator=g) for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs")}
    return batch, near | {"advantages": torch.randn(12, generator=g).repeat_interleave(batch.response_lens)}


def hf_logprobs(kind: str, batch: grpo.Batch) -> Tensor:
    """One sequence at a time, no packing: [R]."""
    out = []
    for i in range(len(batch.lengths)):
        ids = torch.cat([batch.prompt(i), batch.response(i)])
        logits = model_of(kind)(ids[None]).logits[0, batch.prompt_lens[i] - 1 : -1] / 0.8
        out.append(torch.log_softmax(logits, -1).gather(1, batch.response(i)[:, None])[:, 0])
    return torch.cat(out)


OPTIONS = {
    "token": dict(minibatch_size=12),
    "sequence": dict(minibatch_size=12, ratio="sequence", loss_agg="seq-mean-token-mean", mismatch="off"),
}


@functools.cache
def expected(kind: str, option: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the formulas as papers have them (PPO clip with TIS, and GSPO; KL by k3), from Hugging Face's model."""
    batch, t = batch_of(kind)
    logprob = hf_logprobs(kind, batch)
    lens, advantages = batch.response_lens, t["advantages"]
    logratio = logprob - t["old_logprobs"]
    if option == "sequence":
        means = torch.stack([part.mean() for part in logratio.split(lens.tolist())])
        logratio = means.repeat_interleave(lens)
    ratio = logratio.exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    loss = torch.where(advantages < 0, torch.minimum(loss, -3.0 * advantages), loss)
    if option == "token":
        loss = loss * (t["old_logprobs"] - t["rollout_logprobs"]).exp().clamp(max=2.0)
    difference = t["ref_logprobs"] - logprob
    loss = loss + 0.1 * (difference.exp() - difference - 1)
    loss = loss.mean() if option == "token" else torch.stack([part.mean() for part in loss.split(lens.tolist())]).mean()
    model = model_of(kind)
    model.zero_grad()
    loss.backward()
    return loss.item(), unfused({name: p.grad.clone() for name, p in model.named_parameters()})


def unfused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers holds a layer's experts as one tensor, and files hold each."""
    out = {}
    for name, x in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            for e, (gate, up) in enumerate(part.chunk(2) for part in x):
                stem = name.replace("gate_up_proj", str(e))
                out |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        elif name.endswith(".experts.down_proj"):
            out |= {name.replace("down_proj", f"{e}.down_proj.weight"): part for e, part in enumerate(x)}
        else:
            out[name] = x
    return out


@torch.no_grad()
def gradients(policy: grpo.Policy) -> dict[str, Tensor]:
    """Put where the weights were, they go the weights' way back."""
    groups = ((buffer.data_parallel_group, bucket) for buffer in policy.state.buffers for bucket in buffer.buckets)
    shards = [bucket.grad_data.view(group.size(), -1)[group.rank()] for group, bucket in groups]
    for mine, shard in zip(policy.state.weight_shards(), shards, strict=True):
        mine.copy_(shard)
    policy.state.gather_weights()
    return weights(policy)


def case_every_layout_is_hugging_faces():
    """Log-probs; gradients of two losses; and weights to the bit, with rows of padding that are not zero: what adds them shows."""
    for kind, flags in LAYOUTS[WORLD]:
        policy, everyone = start(kind, flags), list(range(12))
        for weight, parameter in local_weights(policy.models, HF[kind]):
            if weight.hf_names[0] in VOCABULARY:
                with torch.no_grad():
                    parameter[max(101 - weight.tp_rank * len(parameter), 0) :] = 7.0
        found, folder = weights(policy), load_file(os.path.join(folder_of(kind), "model.safetensors"))
        assert found.keys() == folder.keys(), (kind, flags, found.keys() ^ folder.keys())
        wrong = [name for name in found if not torch.equal(found[name], folder[name])]
        assert not wrong, (kind, flags, wrong)

        batch, tokens = batch_of(kind)
        plan = grpo.plan_minibatch(batch, everyone, policy)
        assert max(len(micros) for micros in plan) > 1
        own = policy.logprobs(batch, [plan])
        with torch.no_grad():
            off = (own - hf_logprobs(kind, batch)).abs().max().item()
        assert off < 2e-5, (kind, flags, off)
        all_count = grpo.minibatch_weights(batch, everyone, policy.args, torch.ones(12, dtype=torch.bool))
        stats = grpo.backward(policy, batch, plan, tokens | all_count | {"old_logprobs": own})
        assert stats["approx_kl"] == stats["clipfrac"] == 0, (kind, flags, stats)  # with nothing updated the ratio is 1, to the bit
        policy.state.zero_grad()

        start_weights = [shard.clone() for shard in policy.state.weight_shards()]
        for option, values in OPTIONS.items():
            if option == "sequence" and not flags.keys() & {"context_parallel_size", "virtual_pipeline_size"}:
                continue  # its sum over context-parallel ranks is all that layouts could change
            policy.args = dataclasses.replace(policy.args, grpo=grpo.GRPOArgs(**values))
            tokens = tokens | grpo.minibatch_weights(batch, everyone, policy.args, torch.ones(12, dtype=torch.bool))
            stats = grpo.backward(policy, batch, plan, tokens)
            loss, reference = expected(kind, option)
            assert abs(stats["loss"] - loss) < 1e-5 * max(abs(loss), 1), (kind, flags, option, stats["loss"], loss)
            found = gradients(policy)
            assert found.keys() == reference.keys(), found.keys() ^ reference.keys()
            # where the reference is 0, as of an expert that no token chose, so must the gradient be
            off = {name: ((found[name] - g).norm() / g.norm().clamp(min=1e-30)).item() for name, g in reference.items()}
            worst = max(off, key=lambda name: off[name])
            assert off[worst] < 1e-5, (kind, flags, option, worst, off[worst])
            policy.state.zero_grad()
            for shard, before in zip(policy.state.weight_shards(), start_weights, strict=True):
                shard.copy_(before)
            policy.state.gather_weights()


def case_names_and_layouts_are_mbridges():
    """mbridge is written for Transformer Engine's spec: our parameters, under the names that they would have there, become in its hands
    what they become in ours."""
    from mbridge.core.bridge import _MODEL_REGISTRY

    seen = set()
    for kind, hf in HF.items():
        policy, bridge = start(kind, {}), _MODEL_REGISTRY[hf.model_type](hf, dtype=torch.float32)
        names = [name for model in policy.models for name, _ in model.named_parameters()]
        for name, (weight, parameter) in zip(names, local_weights(policy.models, hf), strict=True):
            key, numbers = table_key(name)
            fused = key
            for engine, local in TRANSFORMER_ENGINE_NAMES.items():
                if not (hf.model_type == "qwen3_moe" and "pre_mlp_layernorm" in local):  # the router comes between
                    fused = fused.replace(local, engine)
            assert table_key(fused.format(**numbers)) == (key, numbers), fused
            if key in ("embedding.word_embeddings.weight", "output_layer.weight"):
                assert [bridge._DIRECT_MAPPING[key]] == list(weight.hf_names)
                continue
            found_names, found = bridge._weight_to_hf_format(fused.format(**numbers), parameter.detach())
            rows = part_rows(weight, parameter, hf)
            expected_parts = split(parameter.detach(), rows, hf.num_key_value_heads)
            assert list(found_names) == list(weight.hf_names), (fused, found_names, weight.hf_names)
            assert all(torch.equal(a, b) for a, b in zip(found, expected_parts, strict=True)), fused
            seen.add(key)
    assert seen == TABLE.keys() - {"embedding.word_embeddings.weight", "output_layer.weight"}, TABLE.keys() - seen
