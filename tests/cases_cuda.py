"""Run on one GPU or more: what only CUDA does. The measure of a bf16 result is its distance from fp32 on the same GPU."""

import functools
import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

from cases_fsdp import close, folder, make_args, make_batch, plan_of, training_tokens  # noqa: E402  it finds the group that is there
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from common.fused_logprob import linear_logprob  # noqa: E402
from common.offload import Parked, optimizer_tensors, parameter_tensors  # noqa: E402
from ppo_fsdp_vllm import FSDPArgs, actor_loss, build_model, forward_only, make_mesh, make_optimizer, update  # noqa: E402

DEVICE = torch.device("cuda", torch.cuda.current_device())
WORLD = dist.get_world_size()


def cuda_batch(count: int = 11):
    batch = make_batch(count)
    batch.rollout_logprobs = batch.rollout_logprobs.to(DEVICE)
    batch.device = DEVICE
    return batch


def mesh():
    return init_device_mesh("cuda", (WORLD,))


def truth(path: str, batch) -> torch.Tensor:
    """fp32 log-probs, a sequence at a time, by Hugging Face's eager attention."""
    from cases_fsdp import reference_logprobs

    with torch.no_grad():
        return reference_logprobs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), batch).to(DEVICE)


def case_varlen_attention_is_as_near_to_fp32_as_eager():
    """bf16 packed by varlen kernels against bf16 eager, both measured from fp32; also with a window of 8."""
    batch = cuda_batch()
    for overrides in ({}, dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)):
        path = folder(True, **overrides)
        expected = truth(path, batch)
        args = make_args(path)
        args.fsdp.param_dtype = "bfloat16"
        packed = forward_only(build_model("policy", path, args, mesh(), None), batch, [plan_of(batch, 64)])
        args.fsdp.attention = "eager"
        model = build_model("policy", path, args, mesh(), None)
        eager = forward_only(model, batch, [[[[i] for i in range(len(batch.lengths))]] * WORLD])
        a, b = (packed - expected).norm().item(), (eager / WORLD - expected).norm().item()
        print(f"distance from fp32: varlen {a:.2e}, eager {b:.2e}", flush=True)
        assert a <= 1.5 * b, (a, b)


def case_compiled_layers_are_as_near_to_fp32_as_eager():
    batch, path = cuda_batch(), folder()
    expected, distance = truth(path, batch), {}
    for compiled in (False, True):
        args = make_args(path)
        args.fsdp.param_dtype, args.fsdp.compile = "bfloat16", compiled
        model = build_model("policy", path, args, mesh(), args.actor)
        distance[compiled] = (forward_only(model, batch, [plan_of(batch, 64)]) - expected).norm().item()
    print(f"distance from fp32: compiled {distance[True]:.2e}, not {distance[False]:.2e}", flush=True)
    assert distance[True] <= 1.5 * distance[False], distance


def case_every_strategy_updates_alike():
    """Loss and gradient norm of one bf16 update under each option, from FULL_SHARD's: what differs is the order of sums."""
    batch, path = cuda_batch(), folder()
    tokens = {name: x.to(DEVICE) for name, x in training_tokens(make_batch()).items()}
    results = {}
    for options in (
        {}, {"strategy": "SHARD_GRAD_OP"}, {"strategy": "NO_SHARD"}, {"strategy": "HYBRID_SHARD", "shard_size": 1}, {"cpu_offload": True},
        {"forward_prefetch": 1, "backward_prefetch": 1}, {"ignored_modules": ("model.norm",)}, {"param_dtype": "float32"},
    ):
        args = make_args(path)
        args.fsdp = FSDPArgs(**options)
        model = build_model("policy", path, args, make_mesh(args.fsdp, WORLD, WORLD, "cuda"), args.actor)
        loss_fn = functools.partial(actor_loss, model, tokens, args)
        results[str(options)] = update(model, make_optimizer(model, args.actor), 1.0, batch, plan_of(batch, 64), loss_fn)
        print(f"{options}: loss {results[str(options)]['loss']:.5f}, gradient norm {results[str(options)]['grad_norm']:.5f}", flush=True)
    expected = results["{}"]
    for options, result in results.items():
        for key in ("loss", "grad_norm"):
            assert abs(result[key] - expected[key]) <= 1e-2 * abs(expected["grad_norm"]), (options, key, result[key], expected[key])


def case_offload_is_bit_equal_and_frees_the_device():
    gc.collect()  # what earlier cases left would share its segments, and a segment is given back only whole
    torch.cuda.empty_cache()
    path = folder(False, hidden_size=1024, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=8)
    args = make_args(path)
    args.fsdp.param_dtype = "bfloat16"
    batch = cuda_batch()
    model = build_model("policy", path, args, mesh(), args.actor)
    optimizer = make_optimizer(model, args.actor)
    tokens = {name: x.to(DEVICE) for name, x in training_tokens(make_batch()).items()}
    update(model, optimizer, 1.0, batch, plan_of(batch, 64), functools.partial(actor_loss, model, tokens, args))
    sources = (lambda: parameter_tensors(model), lambda: optimizer_tensors(optimizer))
    before = [[t.clone().cpu() for t in tensors()] for tensors in sources]
    torch.cuda.empty_cache()
    free, total, parked = torch.cuda.mem_get_info()[0], 0, []
    for tensors in sources:
        named = sum(t.untyped_storage().nbytes() for t in tensors())
        parked.append(Parked(tensors))
        total += named
        print(f"offload of {named / 2**20:.0f} MiB; free in all {(torch.cuda.mem_get_info()[0] - free) / 2**20:.0f} MiB more", flush=True)
    # Both together: parameters alone share segments of torch's allocator (20 MiB, for tensors of 1 to 10 MiB) with the moments,
    # and a segment goes back to the device when all in it is gone.
    freed = torch.cuda.mem_get_info()[0] - free
    assert freed >= 0.95 * total, (freed, total)
    for state, tensors, was in zip(parked, sources, before, strict=True):
        with state:
            assert all(torch.equal(a, b.cpu()) for a, b in zip(was, tensors(), strict=True))


def case_linear_logprob_in_bf16():
    torch.manual_seed(0)
    hidden = torch.randn(3000, 256, device=DEVICE, dtype=torch.bfloat16)
    weight = (0.05 * torch.randn(5000, 256, device=DEVICE)).bfloat16().requires_grad_()
    targets = torch.randint(5000, (3000,), device=DEVICE)
    logprob, entropy = linear_logprob(hidden, weight, targets)
    logprob.sum().backward()
    gradient, weight.grad = weight.grad.float(), None
    expected = (hidden.float() @ weight.float().T).log_softmax(-1)
    close(logprob, expected.gather(1, targets[:, None])[:, 0], 2e-3)  # logits are rounded to bf16: 2^-9 each
    close(entropy, -(expected.exp() * expected).sum(-1), 2e-3)
    expected.gather(1, targets[:, None]).sum().backward()
    close(gradient, weight.grad.float(), 1e-2)
