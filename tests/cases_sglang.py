"""A real SGLang engine on a CPU, of a Qwen3 or a Qwen3-MoE (MODEL, an environment variable), whose tensor-parallel size is the number
of ranks, against Hugging Face; all in fp32.

Starting the engine is most of the time. Cases run in this order, and each leaves the weights wherever it moved them: engine and
reference agree again once a case has pushed. What is compared is agreed on by all ranks, so that no rank fails alone and leaves the
others waiting. The last case ends the engine.
"""

import json
import os
import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import launch.cpu_engines.sglang  # noqa: F401  before anything of SGLang

# isort: split
import psutil
import torch
import torch.distributed as dist
from engine_prompts import LENGTHS, TOKENS, agreed, make_prompts
from safetensors.torch import load_file, save_file
from sglang.srt.server_args import RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3MoeConfig

from common.checkpoint import RankError
from common.data import Prompt
from common.reshard import push_to_sglang, tensor_names
from grpo_megatron_sglang import ActorArgs, Args, Batch, DataArgs, Rollout, RolloutArgs
from launch import make_tiny

MODEL = os.environ["MODEL"]
dist.init_process_group("gloo", timeout=timedelta(seconds=100))
RANK, WORLD = dist.get_rank(), dist.get_world_size()
CPU = torch.device("cpu")
PROMPT, RESPONSE = 96, 8  # tokens at most; together they are all the positions of the model
BUCKET = 130_000  # bytes: several buckets of several tensors each; some tensors are larger
CONFIG_EOS, GENERATION_EOS, TOKENIZER_EOS = [11, 23], [37, 41], 53
EOS = [11, 23, 37, 41, 53]

# The reference computes in fp64. The engine's fp32 has 24 bits, so a logit, of 10 at most, is rounded by up to 5e-7 at each of its
# last few sums. bf16's 8 bits would be off by 1e-2, as is every change of weights here that does not arrive.
SAME, OTHER = 1e-5, 1e-2


def make_folder() -> str:
    """A random model that rank 0 writes and every rank reads; its files name five different eos ids between them, and defaults for
    sampling that must not be heeded."""
    path = [tempfile.mkdtemp()]
    if RANK == 0:
        sizes = dict(
            vocab_size=len(TOKENS), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
            num_key_value_heads=2, max_position_embeddings=PROMPT + RESPONSE, bos_token_id=None, eos_token_id=CONFIG_EOS, pad_token_id=0,
            initializer_range=0.08,  # attention and positions show in the log-probs as in a trained model, which they hardly do at 0.02
        )
        moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
        config = Qwen3Config(**sizes, tie_word_embeddings=True) if MODEL == "dense" else Qwen3MoeConfig(**sizes | moe)
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        model.generation_config = GenerationConfig(
            eos_token_id=GENERATION_EOS, do_sample=True, top_k=2, top_p=0.3, temperature=0.6, repetition_penalty=1.5
        )
        model.save_pretrained(path[0])
        if MODEL == "dense":  # some folders hold a tied head, or buffers, beside the parameters
            file = Path(path[0], "model.safetensors")
            extra = {"lm_head.weight": model.lm_head.weight.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
            save_file(load_file(file) | extra, file, metadata={"format": "pt"})
        tokenizer = make_tiny.build_tokenizer()
        tokenizer.eos_token = TOKENS[TOKENIZER_EOS]
        tokenizer.save_pretrained(path[0])
    dist.broadcast_object_list(path)
    return path[0]


FOLDER = make_folder()
HANDLERS = {number: (lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
for number, handler in HANDLERS.items():
    signal.signal(number, handler)
RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")  # else seeds that are heeded mean no prefix cache
ENVIRONMENT = dict(os.environ)
ARGS = Args(
    actor=ActorArgs(model=FOLDER), data=DataArgs(train=("none",), max_prompt_length=PROMPT),
    rollout=RolloutArgs(
        max_response_length=RESPONSE, dtype="float32", tensor_parallel_size=WORLD,
        engine_args=json.dumps({"max_running_requests": 16, "chunked_prefill_size": 128}),  # less than a call asks for
    ),
)
ROLLOUT = Rollout(ARGS, FOLDER, AutoConfig.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER), CPU)
REFERENCE = AutoModelForCausalLM.from_pretrained(
    FOLDER, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
)


@torch.no_grad()
def change(seed: int) -> None:
    """Every number of every tensor of the reference: by 5 to 15 %, up or down; what is 0 by 0.05 to 0.15."""
    g = torch.Generator().manual_seed(seed)
    for p in REFERENCE.parameters():
        step = (0.051 + 0.1 * torch.rand(p.shape, generator=g)) * torch.where(torch.rand(p.shape, generator=g) < 0.5, 1.0, -1.0)
        p.copy_((p + step * torch.where(p == 0, 1.0, p)).float())  # what fp32 holds


def weights() -> dict[str, Tensor]:
    """The reference's, by the names that its files would have, and in fp32."""
    folder = Path(FOLDER, "reference")
    REFERENCE.save_pretrained(folder)  # rank 0 writes
    dist.barrier()
    tensors = {name: p.float() for name, p in load_file(folder / "model.safetensors").items()}
    dist.barrier()
    return tensors


def buckets(tensors: dict[str, Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    for name, tensor in tensors.items():
        if bucket and sum(t.nbytes for _, t in bucket) + tensor.nbytes > BUCKET:
            yield bucket
            bucket = []
        bucket.append((name, tensor.clone()))
    yield bucket


def push(tensors: dict[str, Tensor] | None = None) -> int:
    return push_to_sglang(ROLLOUT.engine, buckets(weights() if tensors is None else tensors), ROLLOUT.ranks, ROLLOUT.names)


def sample(prompts: list[Prompt], purpose: str, n: int = 2, temperature: float = 1.0) -> Batch:
    return ROLLOUT.collect(prompts, ROLLOUT.generate(prompts, purpose, n, temperature=temperature))


@torch.no_grad()
def reference_logprobs(prompt: list[int], response: list[int], temperature: float = 1.0) -> Tensor:
    """[response, vocab], the slow, obvious way: one sequence at a time, all logits."""
    logits = REFERENCE(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def difference(batch: Batch, temperature: float = 1.0) -> float:
    """The largest one between the engine's log-probs and the reference's, over all tokens; ranks share the work."""
    worst = 0.0
    for i, got in enumerate(batch.rollout_logprobs.double().split(batch.response_lens.tolist())):
        if i % WORLD == RANK:
            response = batch.response(i).tolist()
            expected = reference_logprobs(batch.prompt(i).tolist(), response, temperature)[range(len(response)), response]
            worst = max(worst, (got - expected).abs().nan_to_num(torch.inf).max().item())
    return agreed(worst)


def error_of_sync(seed: int = 0) -> float:
    """How far the engine is from the reference."""
    return difference(sample(make_prompts(seed), f"check {seed}"))


def case_the_engine_leaves_this_process_as_it_was():
    """SGLang changes the environment, which NCCL and Megatron read later, and the handlers of signals."""
    assert dict(os.environ) == ENVIRONMENT, set(os.environ.items()) ^ set(ENVIRONMENT.items())
    assert all(signal.getsignal(number) is handler for number, handler in HANDLERS.items())
    assert (ROLLOUT.engine is not None) == (RANK == 0)


def case_sync_gives_hugging_face_logprobs():
    """After every tensor changed by 5 % or more, twice; the engine is far off before each sync."""
    assert (off := error_of_sync()) <= SAME, f"as loaded: off by {off:.1e}"
    for seed in (1, 2):
        change(seed)
        assert (off := error_of_sync(seed)) > OTHER, f"before the sync: off by only {off:.1e}"
        sent = weights()
        assert push(sent) == sum(t.nbytes for t in sent.values())
        assert (off := error_of_sync(seed)) <= SAME, f"after the sync: off by {off:.1e}"


def case_sync_empties_the_prefix_cache():
    prompts = make_prompts(5, (65, 90))

    def ask() -> tuple[float, list[int]]:
        """Greedily, so that the same prompts get the same requests: (how far off, how many tokens came from the cache)."""
        cached: list = [None]
        if ROLLOUT.engine is not None:
            params = {"temperature": 0.0, "max_new_tokens": 4}
            outputs = ROLLOUT.engine.generate(input_ids=[p.ids for p in prompts], sampling_params=params)
            cached = [[o["meta_info"]["cached_tokens"] for o in outputs]]
        dist.broadcast_object_list(cached)
        return difference(sample(prompts, "cache", n=1, temperature=0.0)), cached[0]

    ask()
    off, cached = ask()
    assert min(cached) > 60, cached  # else this case shows nothing
    assert off <= SAME, f"from the cache: off by {off:.1e}"
    change(3)
    push()
    off, cached = ask()
    assert cached == [0, 0], cached
    assert off <= SAME, f"after the sync: off by {off:.1e}"


def case_samples_of_a_prompt_are_its_own():
    """Twelve of each prompt, more than run at once: each log-prob is that of its own prompt and sample."""
    prompts = make_prompts(9, (1, 20, 33, 95))
    prompts += prompts[-1:] * 2  # the same one again, of which the cache may serve the second
    batch = sample(prompts, "many", n=12)
    assert (off := difference(batch)) <= SAME, f"off by {off:.1e}"
    assert len(batch.lengths) == 12 * len(prompts)
    for i in range(len(batch.lengths)):
        assert batch.prompt(i).tolist() == prompts[i // 12].ids
    long = [tuple(batch.response(i).tolist()) for i in range(len(batch.lengths)) if batch.response_lens[i] >= 4]
    assert len(long) > len(batch.lengths) // 2 and len(set(long)) == len(long), "samples repeat"


def case_temperature_divides_the_logits():
    """In the log-probs that are returned and in what is drawn; 0 is greedy; and the folder's own defaults for sampling change nothing."""
    prompts = make_prompts(11)
    for temperature in (0.7, 1.0):
        batch = sample(prompts, "temperature", n=4, temperature=temperature)
        assert (off := difference(batch, temperature)) <= SAME, f"off by {off:.1e}"
        assert difference(batch, 1.7 - temperature) > OTHER
        drawn = mean = variance = 0.0  # the mean log-prob of what is drawn is minus the entropy, at each token whatever came before
        for i in range(len(batch.lengths)):
            response = batch.response(i).tolist()
            logp = reference_logprobs(batch.prompt(i).tolist(), response, temperature)
            drawn += logp[range(len(response)), response].sum().item()
            mean += (logp.exp() * logp).sum().item()
            variance += ((logp.exp() * logp**2).sum(1) - (logp.exp() * logp).sum(1) ** 2).sum().item()
        sigmas = abs(drawn - mean) / variance**0.5
        assert sigmas < 4, f"{sigmas:.1f} standard errors from what temperature {temperature} draws"

    batch = sample(prompts, "greedy", n=1, temperature=0.0)
    for i, prompt in enumerate(prompts):
        response = batch.response(i).tolist()
        logp = reference_logprobs(prompt.ids, response)
        assert (logp.max(1).values - logp[range(len(response)), response]).max() < SAME


def case_generation_is_a_function_of_its_seed():
    """Whatever was generated or drawn before; the trainer's generators stay."""
    prompts = make_prompts(13, (33, 2, 64, 13, 90))

    def told(purpose: str) -> list[list[int]]:
        batch = sample(prompts, purpose, n=3)
        return [batch.response(i).tolist() for i in range(len(batch.lengths))]

    torch.manual_seed(RANK)
    before = random.getstate(), torch.get_rng_state().tolist()
    first = told("5 0")
    moved = before != (random.getstate(), torch.get_rng_state().tolist())
    others = {"purpose": told("6 0")}
    sample(make_prompts(14, (90, 5, 40, 1)), "7 0", temperature=0.5)
    torch.rand(RANK + 3)
    again = told("5 0")
    ARGS.seed += 1
    others["seed"] = told("5 0")
    ARGS.seed -= 1
    assert not agreed(moved), "a generator of the trainer moved"
    assert first == again, "the same seed gave something else"
    for what, outputs in others.items():
        same = sum(a == b for a, b in zip(first, outputs, strict=True))
        assert same < len(first) // 4, f"{same} of {len(first)} responses do not depend on the {what}"


def case_every_eos_id_ends_a_response():
    """Those of config, generation_config and tokenizer. The eos is among the ids, with its log-prob, and only a response
    without one is marked as cut, at its full length."""
    assert ROLLOUT.stop["stop_token_ids"] == EOS
    batch = sample(make_prompts(15, (*LENGTHS, PROMPT)), "eos", n=16)
    responses = [batch.response(i).tolist() for i in range(len(batch.lengths))]
    for response, cut in zip(responses, batch.truncated.tolist(), strict=True):
        assert not set(response[:-1]) & set(EOS), f"went on after an eos: {response}"
        assert cut == (response[-1] not in EOS) and (len(response) == RESPONSE or not cut), f"cut {cut}: {response}"
    ended = [r for r in responses if r[-1] in EOS]
    at_limit = sum(len(r) == RESPONSE for r in ended)
    enough = {r[-1] for r in ended} == set(EOS) and at_limit and len(ended) < len(responses) and batch.truncated[-16:].any()
    assert enough, f"this case shows too little: {len(ended)} of {len(responses)} ended, {at_limit} of them at the limit"
    assert (off := difference(batch)) <= SAME, f"off by {off:.1e}"


def case_names_must_be_the_models_own():
    """SGLang itself is content with any: push_to_sglang raises on every rank and names them. Then a whole sync works."""
    change(4)
    whole = weights()
    assert ROLLOUT.names == set(whole) == tensor_names(FOLDER, MODEL == "dense")
    kinds = ["embed_tokens", "model.norm", "layers.1.", "k_proj"]
    kinds += ["lm_head", "mlp.gate.", "experts.3.gate_proj"] if MODEL == "moe" else ["up_proj"]
    wrong = {kind: {name: t for name, t in whole.items() if kind not in name} for kind in kinds}
    wrong["layers.2."] = whole | {"model.layers.2.mlp.up_proj.weight": torch.zeros(256, 128)}
    if MODEL == "moe":
        wrong["mlp.experts.gate_up_proj"] = whole | {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 128, 128)}
    else:
        wrong["lm_head"] = whole | {"lm_head.weight": torch.zeros(len(TOKENS), 128)}
    for kind, tensors in wrong.items():
        try:
            push(tensors)
        except RuntimeError as error:
            assert set(json.loads(str(error).split(": ")[1].replace("'", '"'))) == set(tensors) ^ set(whole), error
        else:
            raise AssertionError(f"push_to_sglang did not notice {kind}")
    push()
    assert (off := error_of_sync()) <= SAME, f"after a whole sync again: off by {off:.1e}"


def case_signals_to_all_processes_end_no_engine():
    """torchrun, slurm and ^C send them to every process; the ranks then still want to save."""
    for number in HANDLERS:
        for process in psutil.Process().children(recursive=True) if RANK == 0 else ():
            if "python" in process.name():
                process.send_signal(number)
        signal.raise_signal(number)
    assert (off := error_of_sync()) <= SAME, f"off by {off:.1e}"


def case_a_dead_engine_is_one_error_on_every_rank():
    """Killed while it generates; later calls and syncs fail at once."""
    if ROLLOUT.engine is not None:
        scheduler = psutil.Process(ROLLOUT.engine.get_all_child_pids()[0])
        threading.Timer(0.2, scheduler.kill).start()
    for what in ("generating", "generating", "sending weights"):
        try:
            if what == "generating":
                sample(make_prompts(17) * 20, "dead", n=16)
            else:
                push()
        except (RankError, RuntimeError) as error:
            assert "a process of the SGLang engine has died" in str(error), error
        else:
            raise AssertionError(f"{what} with a dead engine worked")
