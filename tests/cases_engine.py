"""Real vLLM engines on 2 ranks, TP of these an engine (an environment variable), against Hugging Face; all in fp32.

Two engines live in each process, of a tied and of an untied model; building them is most of the time. Cases run in this order,
and each leaves the weights wherever it moved them: engine, sharded actor and reference agree again once a case has pushed.
What is compared is agreed on by all ranks, so that no rank fails alone and leaves the others waiting.
"""

import functools
import json
import os
import random
import tempfile
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from engine_prompts import TOKENS, agreed, make_prompts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from common.data import Prompt
from common.reshard import fsdp_buckets, named_weights, push_to_vllm, vllm_worker
from common.rewards import Reward
from launch import make_tiny
from launch.cpu_engines import name_shared_memory
from ppo_fsdp_vllm import (
    ActorArgs,
    Args,
    Batch,
    CriticArgs,
    DataArgs,
    FSDPArgs,
    Rollout,
    RolloutArgs,
    build_model,
    check_sync,
    make_optimizer,
    plan_minibatch,
    update,
    validate,
)

TP = int(os.environ["TP"])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
RANK, WORLD = dist.get_rank(), dist.get_world_size()
ENGINES = WORLD // TP
CPU = torch.device("cpu")
RESPONSE = 8  # tokens at most
BLOCK = 32  # tokens in a block of the KV cache, which the prefix cache keeps whole
CONFIG_EOS, GENERATION_EOS, TOKENIZER_EOS = [11, 23], [37, 41], 53
EOS = [11, 23, 37, 41, 53]

# The reference computes in fp64. The engine's fp32 has 24 bits, so a logit, of 10 at most, is rounded by up to 5e-7 at each of its
# last few sums: 5e-6 is the worst seen. bf16's 8 bits would be off by 1e-2, as is every change of weights here that does not arrive.
SAME, OTHER = 1e-5, 1e-2


def unlink_shared_memory() -> None:
    """Once every rank has mapped it, nobody needs its name."""
    dist.barrier()
    if RANK == 0:
        for path in Path("/dev/shm").glob(f"*{os.environ['TORCHELASTIC_RUN_ID']}*cpushm*"):
            path.unlink()


class Setup:
    """The script's engine, the sharded actor that feeds it, and the reference: the same weights in plain Hugging Face."""

    def __init__(self, tied: bool) -> None:
        self.name, self.folder = "tied" if tied else "untied", folder(tied)
        engine_args = dict(
            enforce_eager=True, block_size=BLOCK, num_gpu_blocks_override=128,
            max_num_seqs=16, max_num_batched_tokens=128,  # less than a call asks for: requests queue, and prompts come in chunks
        )
        self.args = Args(
            actor=ActorArgs(model=self.folder, lr=1e-2), critic=CriticArgs(), data=DataArgs(train=("none",), max_prompt_length=96),
            rollout=RolloutArgs(
                max_response_length=RESPONSE, dtype="float32", tensor_parallel_size=TP, bucket_mb=1, engine_args=json.dumps(engine_args)
            ),
            fsdp=FSDPArgs(param_dtype="float32"),
        )
        config, tokenizer = AutoConfig.from_pretrained(self.folder), AutoTokenizer.from_pretrained(self.folder)
        self.rollout = Rollout(self.args, self.folder, config, tokenizer, CPU)
        unlink_shared_memory()
        self.actor = build_model("policy", self.folder, self.args, init_device_mesh("cpu", (WORLD,)), self.args.actor)
        self.optimizer = make_optimizer(self.actor, self.args.actor)
        self.reference = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float64, attn_implementation="eager")
        self.changes = 0

    @torch.no_grad()
    def change(self) -> None:
        """Every number of every tensor, in actor and reference: by 5 to 15 %, up or down; what is 0 by 0.05 to 0.15."""
        self.changes += 1
        g = torch.Generator().manual_seed(self.changes)
        reference = dict(self.reference.named_parameters())
        assert reference.keys() == dict(self.actor.lm.named_parameters()).keys()
        for name, p in self.actor.lm.named_parameters():
            old = reference[name].float()
            step = (0.051 + 0.1 * torch.rand(old.shape, generator=g)) * torch.where(torch.rand(old.shape, generator=g) < 0.5, 1.0, -1.0)
            new = old + step * torch.where(old == 0, 1.0, old)
            assert ((new - old).abs() > 0.05 * old.abs()).all()
            reference[name].copy_(new)
            p.copy_(distribute_tensor(new, p.device_mesh, p.placements))

    def push_without(self, parts: tuple[str, ...]) -> None:
        """As Rollout.push, but for the tensors whose names contain one of `parts`; one tensor a bucket."""
        weights = named_weights(self.actor.lm, aliases=self.rollout.push_mode == "reload_weights")
        sent = [(name, weight) for name, weight in weights if not any(part in name for part in parts)]
        assert 0 < len(sent) < len(weights)
        push_to_vllm(self.rollout.llm, fsdp_buckets(sent, torch.float32, 1, CPU), self.rollout.push_mode)

    def clear_kv_cache(self) -> None:
        """Of NaNs from weights that a broken sync left uninitialised: 0 · NaN would come back from unused places of a block."""
        for cache in vllm_worker(self.rollout.llm).model_runner.kv_caches:
            cache.zero_()

    @torch.no_grad()
    def reference_logprobs(self, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
        """[response, vocab], the slow, obvious way: one sequence at a time, all logits."""
        logits = self.reference(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1)

    def difference(self, batch: Batch, temperature: float = 1.0) -> float:
        """The largest one between the engine's log-probs and the reference's, over all tokens; ranks share the work."""
        worst = 0.0
        for i, got in enumerate(batch.rollout_logprobs.double().split(batch.response_lens.tolist())):
            if i % WORLD == RANK:
                response = batch.response(i).tolist()
                expected = self.reference_logprobs(batch.prompt(i).tolist(), response, temperature)[range(len(response)), response]
                worst = max(worst, (got - expected).abs().nan_to_num(torch.inf).max().item())
        return agreed(worst)

    def sample(self, prompts: list[Prompt], step: int, n: int = 2, temperature: float = 1.0) -> Batch:
        return self.rollout.collect(prompts, self.rollout.generate(prompts, step, n=n, temperature=temperature))

    def sync_error(self, n: int = 2) -> float:
        """How far the engine is from the reference, on fresh prompts."""
        return self.difference(self.sample(make_prompts(self.changes), self.changes, n))


name_shared_memory()


@functools.cache
def setup(tied: bool) -> Setup:
    return Setup(tied)


def setups() -> list[Setup]:
    return [setup(True), setup(False)]


def folder(tied: bool) -> str:
    """A random model that rank 0 writes and every rank reads; its files name five different eos ids between them."""
    path = [tempfile.mkdtemp()]
    if RANK == 0:
        # weights of 0.08: attention and positions show in the log-probs as in a trained model, which they hardly do at 0.02
        model = make_tiny.build_model(seed=1, tied=tied, initializer_range=0.08, eos_token_id=CONFIG_EOS)
        model.generation_config = GenerationConfig(eos_token_id=GENERATION_EOS)
        model.save_pretrained(path[0])
        tokenizer = make_tiny.build_tokenizer()
        tokenizer.eos_token = TOKENS[TOKENIZER_EOS]
        tokenizer.save_pretrained(path[0])
    dist.broadcast_object_list(path)
    return path[0]


def case_sync_gives_hugging_face_logprobs():
    """After every tensor changed by 5 % or more, twice; the engine is far off before each sync, and --check-sync says so."""
    for s in setups():
        assert (off := s.sync_error()) <= SAME, f"{s.name}, as loaded: off by {off:.1e}"
        for _ in range(2):
            s.change()
            assert (off := s.sync_error()) > OTHER, f"{s.name}, before the sync: off by only {off:.1e}"
            try:
                check_sync(s.rollout, s.actor, make_prompts(0), s.args)
            except RuntimeError as error:
                assert "engine and trainer differ" in str(error), error
            else:
                raise AssertionError("check_sync did not notice weights that were not sent")
            s.rollout.push(s.actor)
            assert (off := s.sync_error()) <= SAME, f"{s.name}, after the sync: off by {off:.1e}"
            check_sync(s.rollout, s.actor, make_prompts(0), s.args)


def case_sync_after_an_optimizer_step():
    for s in setups():
        before = [p.clone() for p in s.reference.parameters()]
        g = torch.Generator().manual_seed(7)
        prompt_lens, response_lens = torch.randint(1, 12, (8,), generator=g), torch.randint(1, 20, (8,), generator=g)
        count = int(response_lens.sum())
        batch = Batch(
            ids=torch.randint(0, len(TOKENS), (int(prompt_lens.sum()) + count,), generator=g), prompt_lens=prompt_lens,
            response_lens=response_lens, rollout_logprobs=torch.zeros(count), truncated=torch.zeros(8, dtype=torch.bool),
        )
        plan = plan_minibatch(batch, list(range(8)), WORLD, 64, 128)
        update(s.actor, s.optimizer, 1.0, batch, plan, lambda micro, s=s, count=count: (-s.actor(micro)[0].sum() / count, {}))
        with torch.no_grad():
            trained = {name: p.full_tensor() for name, p in s.actor.lm.named_parameters()}
            for name, p in s.reference.named_parameters():
                p.copy_(trained[name])
        assert all((a != b).any() for a, b in zip(before, s.reference.parameters(), strict=True))
        assert (off := s.sync_error()) > OTHER, f"{s.name}, before the sync: off by only {off:.1e}"
        s.rollout.push(s.actor)
        assert (off := s.sync_error()) <= SAME, f"{s.name}, after the sync: off by {off:.1e}"


def case_sync_empties_the_prefix_cache():
    """Asked of vLLM itself: Rollout.generate would empty the cache once more."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, flat_logprobs=True, detokenize=False)
    prompts = make_prompts(5, (2 * BLOCK + 1, 2 * BLOCK + 20) * ENGINES)

    def ask(s: Setup) -> tuple[float, list[int]]:
        requests = s.rollout.llm.generate([{"prompt_token_ids": p.ids} for p in s.rollout.share(prompts)], params, use_tqdm=False)
        return s.difference(s.rollout.collect(prompts, [r.outputs[0] for r in requests])), [r.num_cached_tokens for r in requests]

    for s in setups():
        ask(s)
        off, cached = ask(s)
        assert cached == [2 * BLOCK] * 2, cached  # else this case shows nothing
        assert off <= SAME, f"{s.name}, from the cache: off by {off:.1e}"
        s.change()
        s.rollout.push(s.actor)
        off, cached = ask(s)
        assert off <= SAME, f"{s.name}, after the sync: off by {off:.1e}"
        assert cached == [0, 0], cached


def case_samples_of_a_prompt_are_its_own():
    """Twelve of each prompt, more than run at once: each log-prob is that of its own prompt and sample."""
    for s in setups():
        prompts = make_prompts(9, (1, 20, BLOCK + 1, 3 * BLOCK - 1))
        prompts += prompts[-1:] * 2  # the same one again, of which an engine's cache may serve the second
        batch = s.sample(prompts, 1, n=12)
        assert (off := s.difference(batch)) <= SAME, f"{s.name}: off by {off:.1e}"
        assert len(batch.lengths) == 12 * len(prompts)
        for i in range(len(batch.lengths)):
            assert batch.prompt(i).tolist() == prompts[i // 12].ids
        long = [tuple(batch.response(i).tolist()) for i in range(len(batch.lengths)) if batch.response_lens[i] >= 4]
        assert len(long) > len(batch.lengths) // 2 and len(set(long)) == len(long), f"{s.name}: samples repeat"


def case_temperature_divides_the_logits():
    """In the log-probs that are returned and in what is drawn; and 0 is greedy."""
    for s in setups():
        prompts = make_prompts(11)
        batch = s.sample(prompts, 2, n=4, temperature=0.7)
        assert (off := s.difference(batch, 0.7)) <= SAME, f"{s.name}: off by {off:.1e}"
        assert s.difference(batch, 1.0) > OTHER
        drawn = mean = variance = 0.0  # the mean log-prob of what is drawn is minus the entropy, at each token whatever came before
        for i in range(len(batch.lengths)):
            response = batch.response(i).tolist()
            logp = s.reference_logprobs(batch.prompt(i).tolist(), response, 0.7)
            drawn += logp[range(len(response)), response].sum().item()
            mean += (logp.exp() * logp).sum().item()
            variance += ((logp.exp() * logp**2).sum(1) - (logp.exp() * logp).sum(1) ** 2).sum().item()
        sigmas = abs(drawn - mean) / variance**0.5
        assert sigmas < 4, f"{s.name}: {sigmas:.1f} standard errors from what temperature 0.7 draws"

        batch = s.sample(prompts, 3, n=1, temperature=0.0)
        for i, prompt in enumerate(prompts):
            response = batch.response(i).tolist()
            logp = s.reference_logprobs(prompt.ids, response)
            assert (logp.max(1).values - logp[range(len(response)), response]).max() < SAME, s.name


def case_generation_is_a_function_of_its_seed():
    """To the bit, whatever was generated or drawn before, and alike on the ranks of one engine; the trainer's generators stay."""
    for s in setups():
        prompts = make_prompts(13, (33, 2, 64, 13, 90)) * ENGINES  # the same ones for each engine

        def told(step: int, purpose: int = 0, s: Setup = s, prompts: list[Prompt] = prompts) -> list:
            outputs = s.rollout.generate(prompts, step, purpose, n=3, temperature=1.0)
            return [(list(o.token_ids), list(o.logprobs.logprobs)) for o in outputs]

        def states() -> tuple:
            return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

        torch.manual_seed(RANK)
        before = states()
        first = told(5)
        moved = states() != before
        others = {"step": told(6), "purpose": told(5, 1)}  # these also fill the prefix cache with the same prompts
        s.rollout.generate(make_prompts(14, (90, 5, 40, 1)), 7, n=2, temperature=0.5)
        torch.rand(RANK + 3)
        again = told(5)
        s.args.seed += 1
        others["seed"] = told(5)
        s.args.seed -= 1
        everyone: list = [None] * WORLD
        dist.all_gather_object(everyone, (first, again, moved, others))
        assert not any(moved for _, _, moved, _ in everyone), f"{s.name}: a generator of the trainer moved"
        assert all(first == again for first, again, _, _ in everyone), f"{s.name}: the same seed gave something else"
        for rank in range(0, WORLD, TP):
            assert all(x[:2] == everyone[rank][:2] for x in everyone[rank : rank + TP]), f"{s.name}: ranks of an engine differ"
        if ENGINES > 1:
            others["engine"] = everyone[0 if RANK else 1][0]
        for what, outputs in others.items():
            same = sum(a[0] == b[0] for a, b in zip(first, outputs, strict=True))
            assert agreed(same) < len(first) // 4, f"{s.name}: {same} of {len(first)} responses do not depend on the {what}"


def case_every_eos_id_ends_a_response():
    """Those of config, generation_config and tokenizer. The eos is among the ids, with its log-prob, and only a response
    without one is marked as cut."""
    for s in setups():
        assert s.rollout.stop["stop_token_ids"] == EOS
        batch = s.sample(make_prompts(15), 8, n=16)
        responses = [batch.response(i).tolist() for i in range(len(batch.lengths))]
        for response, cut in zip(responses, batch.truncated.tolist(), strict=True):
            assert not set(response[:-1]) & set(EOS), f"{s.name}: went on after an eos: {response}"
            assert cut == (response[-1] not in EOS) and (len(response) == RESPONSE or not cut), f"{s.name}, cut {cut}: {response}"
        ended = [r for r in responses if r[-1] in EOS]
        at_limit = sum(len(r) == RESPONSE for r in ended)
        enough = {r[-1] for r in ended} == set(EOS) and at_limit and len(ended) < len(responses)
        assert enough, f"{s.name}: this case shows too little: {len(ended)} of {len(responses)} ended, {at_limit} of them at the limit"
        assert (off := s.difference(batch)) <= SAME, f"{s.name}: off by {off:.1e}"


def case_validation_with_fewer_prompts_than_engines():
    """Engines that get no prompt score nothing, and every rank knows the result."""
    for s in setups():
        prompts, tokenizer = make_prompts(16, (21,)), AutoTokenizer.from_pretrained(s.folder)
        text = tokenizer.decode(s.sample(prompts, 9, n=1, temperature=0.0).response(0), skip_special_tokens=True)
        pool = SimpleNamespace(score=lambda items: [Reward(1.0 + len(item["answer"]), {}, None) for item in items])
        got = validate(s.rollout, pool if s.rollout.owner else None, tokenizer, prompts, s.args, 0)
        assert got == {"val/greedy": 1.0 + len(text), "val//greedy": 1.0 + len(text)}, (got, text)


def case_a_kind_left_out_of_the_sync_is_noticed():
    """By the log-probs, always. And push_to_vllm raises, but for a tied head, which is no parameter of its own."""
    for s in setups():
        kinds = {  # what is left out -> push_to_vllm raises
            ("embed_tokens", "lm_head"): True, ("lm_head",): s.name == "untied", ("norm",): True, ("model.norm",): True, (".bias",): True,
            ("q_proj.weight", "k_proj.weight", "v_proj.weight"): True, ("o_proj",): True, ("gate_proj", "up_proj"): True,
            ("down_proj",): True, ("layers.1.",): True, ("k_proj.weight",): True, ("up_proj",): True,
        }
        if s.name == "untied":
            kinds["embed_tokens",] = True
        for kind, raises in kinds.items():
            s.change()
            try:
                s.push_without(kind)
            except RuntimeError as error:
                assert "weight sync did not bring these to the engine" in str(error), error
            else:
                assert not raises, f"{s.name}: push_to_vllm did not notice that {kind} were left out"
            assert (off := s.sync_error(n=1)) > OTHER, f"{s.name}, without {kind}: off by only {off:.1e}"
            s.clear_kv_cache()
        s.rollout.push(s.actor)
        assert (off := s.sync_error()) <= SAME, f"{s.name}, after a whole sync again: off by {off:.1e}"


def case_a_tensor_that_the_engine_does_not_know_is_refused():
    """And a sync without it works again."""
    for s in setups():
        unknown = [("model.layers.2.mlp.up_proj.weight", torch.zeros(256, 128))]
        buckets = [unknown, *fsdp_buckets(named_weights(s.actor.lm, aliases=True), torch.float32, 2**20, CPU)]
        try:
            push_to_vllm(s.rollout.llm, buckets, s.rollout.push_mode)
        except ValueError as error:
            assert "layers.2" in str(error), error
        else:
            raise AssertionError(f"{s.name}: weights of a layer that the engine lacks went unnoticed")
        s.change()
        s.rollout.push(s.actor)
        assert (off := s.sync_error()) <= SAME, f"{s.name}, after the next sync: off by {off:.1e}"
