"""Model families, tiny and random: two PPO steps with the script's own functions and a real vLLM engine, then engine, packed training
forward and plain Hugging Face agree. All in fp32, and with sliding windows of 8 under sequences of up to 56 tokens where a family has them.

Every engine lives on in this process: vLLM has no way to end one and start another.
"""

import functools
import json
import random
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import vllm.model_executor.models.registry as vllm_registry
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from common.attention import check_packable
from common.batching import minibatches
from common.data import Prompt
from common.loss import gae, token_rewards, whiten
from launch import make_tiny
from ppo_fsdp_vllm import (
    ActorArgs,
    Args,
    Batch,
    BatchArgs,
    CriticArgs,
    DataArgs,
    FSDPArgs,
    PPOArgs,
    Rollout,
    RolloutArgs,
    actor_loss,
    build_model,
    check,
    check_sync,
    critic_loss,
    forward_only,
    make_optimizer,
    minibatch_weights,
    plan_minibatch,
    update,
)

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
RANK, WORLD = dist.get_rank(), dist.get_world_size()
CPU = torch.device("cpu")
PROMPT, RESPONSE, VOCAB = 40, 16, len(make_tiny.SPECIAL + make_tiny.CHARACTERS)
PROMPTS = (1, 40, 5, 33, 17, 26)  # lengths
SAMPLES = 2
ENGINES: list[Rollout] = []

# As in cases_engine: rounding in fp32 is some 3e-6, and what does not arrive, or a layer that is computed otherwise, far above 1e-2.
SAME, OTHER = 1e-5, 1e-2

COMMON = dict(
    vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, bos_token_id=None, eos_token_id=5, pad_token_id=0,
    initializer_range=0.08,  # attention, positions and windows show in the log-probs as in a trained model, which they hardly do at 0.02
)
MIXED = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)

vllm_registry._run_in_subprocess = lambda f: f()  # a new process for each architecture's first use on a machine: 10 s a family


def write_folder(family: str, **fields) -> str:
    """A random model whose norms and biases, too, are other than 0 and 1; rank 0 writes and every rank reads."""
    path = [tempfile.mkdtemp()]
    if RANK == 0:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(COMMON | fields)), dtype=torch.float32)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 1:
                    p.add_(0.2 * torch.randn_like(p))
        model.save_pretrained(path[0])
        make_tiny.build_tokenizer().save_pretrained(path[0])
    dist.broadcast_object_list(path)
    return path[0]


def make_prompts(seed: int) -> list[Prompt]:
    g = torch.Generator().manual_seed(seed)
    many = [torch.randint(6, VOCAB, (length,), generator=g).tolist() for length in PROMPTS]
    return [Prompt(ids=ids, text="", data_source="", ground_truth="", extra_info={}, index=i) for i, ids in enumerate(many)]


def plan_of(batch: Batch, sequences: list[int]) -> list[list[list[int]]]:
    return plan_minibatch(batch, sequences, WORLD, 128, COMMON["hidden_size"])


class Family:
    """The script's engine, actor and critic, and Hugging Face's own model with the actor's weights, in fp64."""

    def __init__(self, family: str, **fields) -> None:
        path = write_folder(family, **fields)
        engine_args = dict(enforce_eager=True, num_gpu_blocks_override=64, max_num_seqs=16, max_num_batched_tokens=128)
        self.args = args = Args(
            actor=ActorArgs(model=path, lr=1e-2), critic=CriticArgs(lr=1e-2), data=DataArgs(train=("none",), max_prompt_length=PROMPT),
            batch=BatchArgs(prompts=len(PROMPTS), max_tokens=128), ppo=PPOArgs(minibatch_size=3),
            rollout=RolloutArgs(
                samples=SAMPLES, max_response_length=RESPONSE, dtype="float32", bucket_mb=1, engine_args=json.dumps(engine_args)
            ),
            fsdp=FSDPArgs(param_dtype="float32"),
        )
        config, tokenizer = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        check(args, config, WORLD)
        self.rollout = Rollout(args, path, config, tokenizer, CPU)
        ENGINES.append(self.rollout)
        mesh = init_device_mesh("cpu", (WORLD,))
        actor, critic = build_model("policy", path, args, mesh, args.actor), build_model("critic", path, args, mesh, args.critic)
        self.models = {"actor": actor, "critic": critic}
        self.optimizers = {"actor": make_optimizer(actor, args.actor), "critic": make_optimizer(critic, args.critic)}
        self.plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")

    @torch.no_grad()
    def load(self, name: str) -> None:
        """The weights of actor or critic into the plain model."""
        weights = {key: p.full_tensor() if isinstance(p, DTensor) else p for key, p in self.models[name].lm.named_parameters()}
        for key, p in self.plain.named_parameters():
            if name == "actor" or key in weights:  # a critic has no head for tokens
                p.copy_(weights[key])

    @torch.no_grad()
    def plain_logprobs(self, batch: Batch) -> Tensor:
        """One sequence at a time, all logits."""
        out = []
        for i in range(len(batch.lengths)):
            logits = self.plain(torch.cat([batch.prompt(i), batch.response(i)])[None]).logits[0, batch.prompt_lens[i] - 1 : -1]
            out.append(logits.double().log_softmax(-1).gather(1, batch.response(i)[:, None])[:, 0])
        return torch.cat(out)

    @torch.no_grad()
    def plain_values(self, batch: Batch) -> Tensor:
        head, out = self.models["critic"].head.weight.full_tensor().double()[0], []
        for i in range(len(batch.lengths)):
            hidden = self.plain.get_decoder()(torch.cat([batch.prompt(i), batch.response(i)])[None]).last_hidden_state
            out.append(hidden[0, batch.prompt_lens[i] - 1 : -1].double() @ head)
        return torch.cat(out)

    def sample(self, seed: int) -> Batch:
        prompts = make_prompts(seed)
        return self.rollout.collect(prompts, self.rollout.generate(prompts, seed, n=SAMPLES, temperature=1.0))

    def engine_error(self, seed: int) -> float:
        batch = self.sample(seed)
        return largest(batch.rollout_logprobs - self.plain_logprobs(batch))

    def step(self, step: int) -> None:
        """generate -> scores -> old log-probs and values -> advantages -> update critic and actor, as in the script's main."""
        batch = self.sample(step)
        updates = [
            (sequences, plan_of(batch, sequences)) for sequences in minibatches(len(PROMPTS), SAMPLES, 3, random.Random(step))
        ]
        plans = [plan for _, plan in updates]
        tokens = {"rollout_logprobs": batch.rollout_logprobs, "old_logprobs": forward_only(self.models["actor"], batch, plans)}
        tokens["values"] = forward_only(self.models["critic"], batch, plans)
        scores = torch.rand(len(batch.lengths), generator=torch.Generator().manual_seed(step))
        advantages, tokens["returns"] = gae(token_rewards(scores, batch.response_lens), tokens["values"], batch.response_lens, 1.0, 0.95)
        tokens["advantages"] = whiten(advantages)
        for name, loss in (("critic", critic_loss), ("actor", actor_loss)):
            model, optimizer = self.models[name], self.optimizers[name]
            for sequences, plan in updates:
                tokens |= minibatch_weights(batch, sequences, "token-mean", False)
                update(model, optimizer, 1.0, batch, plan, functools.partial(loss, model, tokens, self.args))


def largest(difference: Tensor) -> float:
    """Of all ranks."""
    worst = difference.abs().nan_to_num(torch.inf).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def two_steps(family: str, **fields) -> None:
    f = Family(family, **fields)
    assert (off := f.engine_error(100)) <= SAME, f"as loaded: engine off by {off:.1e}"
    for step in (1, 2):
        f.step(step)
        f.load("actor")
        assert (off := f.engine_error(200 + step)) > OTHER, f"step {step}, before the sync: engine off by only {off:.1e}"
        f.rollout.push(f.models["actor"])
        check_sync(f.rollout, f.models["actor"], make_prompts(0), f.args)
    assert (off := f.engine_error(300)) <= SAME, f"after two steps: engine off by {off:.1e}"
    batch = f.sample(301)
    plan = plan_of(batch, list(range(len(batch.lengths))))
    off = largest(forward_only(f.models["actor"], batch, [plan]) - f.plain_logprobs(batch))
    assert off <= SAME, f"after two steps: packed log-probs off by {off:.1e}"
    f.load("critic")
    expected = f.plain_values(batch)
    off = largest(forward_only(f.models["critic"], batch, [plan]) - expected)
    assert off <= SAME * largest(expected), f"after two steps: packed values off by {off:.1e} of {largest(expected):.1e}"


def case_llama():
    two_steps("llama", rope_parameters=LLAMA3_ROPE)


def case_qwen2():
    """Every layer with a window, and tied."""
    two_steps("qwen2", tie_word_embeddings=True, use_sliding_window=True, sliding_window=8, max_window_layers=0)


def case_qwen3():
    two_steps("qwen3", head_dim=64)


def case_mistral():
    two_steps("mistral", sliding_window=8)


def case_gemma2():
    """Softcapped attention and logits; tied, and vLLM's model has no head of its own."""
    two_steps("gemma2", head_dim=64, query_pre_attn_scalar=48, final_logit_softcapping=3.0, attn_logit_softcapping=5.0, **MIXED)


def case_gemma3():
    two_steps("gemma3_text", head_dim=64, query_pre_attn_scalar=48, **MIXED)


def case_phi3():
    two_steps("phi3", sliding_window=8)


def case_granite():
    """Logits divided by a constant."""
    two_steps("granite", logits_scaling=3.0, attention_multiplier=0.3, residual_multiplier=0.7, embedding_multiplier=2.0)


def case_olmo2():
    """In vLLM, this is Hugging Face's own class with other layers put in."""
    two_steps("olmo2")


def case_smollm3():
    """As OLMo-2; its second layer has no positions."""
    two_steps("smollm3", no_rope_layers=[1, 0], use_sliding_window=True, **MIXED)


def case_a_window_of_another_width_in_the_engine_is_refused():
    """vLLM gives Cohere2 a window one token wider than Hugging Face does."""
    for layers, refused in ((["full_attention"] * 2, False), (MIXED["layer_types"], True)):
        f = Family("cohere2", logit_scale=0.5, sliding_window=8, layer_types=layers)
        f.rollout.push(f.models["actor"])
        try:
            check_sync(f.rollout, f.models["actor"], make_prompts(0), f.args)
        except RuntimeError as error:
            assert refused and "engine and trainer differ" in str(error), error
        else:
            assert not refused, "check_sync did not notice windows of 8 and 9 tokens"


REFUSED: list[tuple[str, dict]] = [
    ("qwen3_next", {}), ("mamba", {}), ("mamba2", {}), ("jamba", {}), ("bamba", {}), ("falcon_h1", {}), ("zamba2", {}), ("rwkv", {}),
    ("recurrent_gemma", {}), ("minimax", {}), ("granitemoehybrid", {}), ("nemotron_h", {}), ("llama4_text", {}), ("bloom", {}),
    ("lfm2", dict(layer_types=["conv", "full_attention"], num_hidden_layers=2)), ("gemma3_text", dict(use_bidirectional_attention=True)),
]


def case_linear_hybrid_and_chunked_attention_is_refused_by_name():
    for name, fields in REFUSED:
        config: PretrainedConfig = AutoConfig.for_model(name, **fields)
        try:
            check_packable(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
        except ValueError as error:
            assert f"model type {name!r}" in str(error), error
        else:
            raise AssertionError(f"{name} {fields} is not refused")


def case_a_refusal_comes_before_any_weight_is_read():
    folder = tempfile.mkdtemp()  # nothing but a config
    AutoConfig.for_model("qwen3_next", **COMMON, head_dim=32, num_experts=2, moe_intermediate_size=32).save_pretrained(folder)
    args = Args(actor=ActorArgs(model=folder), critic=CriticArgs(), data=DataArgs(train=("none",)))
    try:
        build_model("policy", folder, args, init_device_mesh("cpu", (WORLD,)), args.actor)
    except ValueError as error:
        assert "model type 'qwen3_next'" in str(error), error
    else:
        raise AssertionError("a linear-attention model was built")
