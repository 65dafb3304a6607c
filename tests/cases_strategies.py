"""FSDP2's strategies on 1, 2 and 4 ranks against one process, and offloading; all in fp32. The run on 1 rank comes first, and leaves what
it got in a folder (an environment variable) for the others."""

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from cases_fsdp import CPU, RANK, WORLD, NoStep, folder, make_args, make_batch, plan_of, training_tokens
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from common.offload import Parked, optimizer_tensors, parameter_tensors
from common.reshard import fsdp_buckets, named_weights
from ppo_fsdp_vllm import (
    Args,
    FSDPArgs,
    KLArgs,
    OptimArgs,
    actor_loss,
    build_model,
    clip_gradients,
    critic_loss,
    forward_only,
    make_mesh,
    make_optimizer,
    update,
)

REFERENCE = Path(os.environ["REFERENCE"])
IGNORED = ("model.norm", "model.layers.1.input_layernorm", "model.layers.0.mlp")
PLAIN: dict[str, Any] = {"strategy": "FULL_SHARD"}  # on one rank: the reference
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": PLAIN, "grad_op": {"strategy": "SHARD_GRAD_OP"}, "none": {"strategy": "NO_SHARD"},
    **{f"hybrid {n}": {"strategy": "HYBRID_SHARD", "shard_size": n} for n in (1, 2) if WORLD % n == 0},
    "cpu_offload": {"cpu_offload": True}, "prefetch": {"forward_prefetch": 1, "backward_prefetch": 1},
    "ignored": {"ignored_modules": IGNORED}, "checkpointing": {"gradient_checkpointing": True},
    "all": {
        "strategy": "HYBRID_SHARD", "shard_size": min(WORLD, 2), "cpu_offload": True, "forward_prefetch": 1, "backward_prefetch": 1,
        "ignored_modules": IGNORED, "gradient_checkpointing": True,
    },
}
MODELS = [("policy", True), ("policy", False), ("critic", True)]  # kind, tied
CASES = [("policy", True, name) for name in STRATEGIES] + [(*model, name) for model in MODELS[1:] for name in ("full", "none", "all")]


def setup(kind: str, tied: bool, options: dict[str, Any]) -> tuple[Any, Args, OptimArgs]:
    path = folder(tied)
    args = make_args(path, kl=KLArgs(where="loss", coef=0.1, kind="k3"))
    optim = args.actor if kind == "policy" else args.critic
    optim.lr, optim.gradient_checkpointing = 1e-2, options.get("gradient_checkpointing", False)
    args.fsdp = FSDPArgs(**{"param_dtype": "float32"} | {k: v for k, v in options.items() if k != "gradient_checkpointing"})
    model = build_model(kind, path, args, make_mesh(args.fsdp, WORLD, WORLD, "cpu"), optim)
    if kind == "critic":
        nn.init.constant_(model.head.weight, 0.02)
    return model, args, optim


def loss_of(kind: str, model: nn.Module, args: Args) -> Callable:
    return functools.partial(actor_loss if kind == "policy" else critic_loss, model, training_tokens(make_batch()), args)


def full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p) for name, p in model.named_parameters()}


def gradients(kind: str, tied: bool, options: dict[str, Any], ranks: int = WORLD) -> tuple[dict[str, Tensor], dict[str, float]]:
    """With the micro-batches of `ranks` ranks; one process runs all of them, one after the other. Other micro-batches would add the
    rounding of other shapes, which has nothing to do with FSDP (cases_fsdp compares those with fp64)."""
    model, args, _ = setup(kind, tied, options)
    plan = plan_of(make_batch(), 64, ranks)
    if WORLD == 1:
        plan = [[micro for micros in plan for micro in micros]]
    result = update(model, NoStep(model.parameters(), lr=1.0), 0.0, make_batch(), plan, loss_of(kind, model, args))
    return {name: full(p.grad) for name, p in model.named_parameters()}, result


def shuffled(x: Tensor, seed: int) -> Tensor:
    return x.flatten()[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))].view_as(x)


def steps(kind: str, tied: bool, options: dict[str, Any], ranks: int = WORLD) -> dict[str, Tensor]:
    """Three optimizer steps from gradients of one process: at first as they are, then permuted and smaller."""
    given, _ = reference("gradients", kind, tied, 1)
    model, _, optim = setup(kind, tied, options)
    optimizer = make_optimizer(model, optim)
    for i in range(3):
        set_gradients(model, {name: shuffled(x, i) * 0.3**i if i else x for name, x in given.items()})
        clip_gradients(model, torch.inf)  # sums those of ignored parameters
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


@functools.cache
def reference(what: str, kind: str, tied: bool, ranks: int) -> Any:
    """What one process got; it is computed there, for the later runs as well."""
    path = REFERENCE / f"{what} {kind} {tied} {ranks}.pt"
    if WORLD == 1 and not path.exists():
        torch.save({"gradients": gradients, "steps": steps}[what](kind, tied, PLAIN, ranks), path)
    return torch.load(path)


def case_one_process_leaves_its_numbers():
    for kind, tied in MODELS:
        for ranks in (1, 2, 4):
            reference("gradients", kind, tied, ranks)
        reference("steps", kind, tied, 1)


def case_strategies_are_what_they_say():
    """Else what follows might compare FULL_SHARD with itself."""
    for name, options in STRATEGIES.items():
        model, args, _ = setup("policy", True, options)
        shards = {"FULL_SHARD": WORLD, "SHARD_GRAD_OP": WORLD, "NO_SHARD": 1, "HYBRID_SHARD": args.fsdp.shard_size}[args.fsdp.strategy]
        two_dims = args.fsdp.strategy in ("HYBRID_SHARD", "NO_SHARD")
        for key, p in model.named_parameters():
            if any(key.startswith(f"lm.{module}.") for module in args.fsdp.ignored_modules):
                assert not isinstance(p, DTensor), (name, key)
                continue
            rows = -(-len(p) // shards)
            assert len(p.to_local()) == min(rows, max(len(p) - RANK % shards * rows, 0)), (name, key)
            assert p.placements == ((Replicate(), Shard(0)) if two_dims else (Shard(0),)), (name, key)
        layers, norm = model.lm.model.layers, model.lm.model.norm
        states = [layer._get_fsdp_state() for layer in layers]
        assert len(states[0]._states_to_forward_prefetch) == args.fsdp.forward_prefetch, name
        assert len(states[1]._states_to_backward_prefetch) == args.fsdp.backward_prefetch, name
        assert all(p.offload_to_cpu == args.fsdp.cpu_offload for state in states for p in state._fsdp_param_group.fsdp_params), name

        calls: list[int] = []
        gathered: list[bool] = []  # the first layer's weights, when the last one is done
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        norm.register_forward_pre_hook(lambda *_, at=layers[0].self_attn, to=gathered: to.append(not isinstance(at.q_proj.weight, DTensor)))
        update(model, NoStep(model.parameters(), lr=1.0), 0.0, make_batch(), plan_of(make_batch(), 1000), loss_of("policy", model, args))
        keeps = args.fsdp.strategy in ("SHARD_GRAD_OP", "NO_SHARD")
        assert gathered and all(g == keeps for g in gathered), (name, gathered)
        assert len(calls) == len(layers) * len(gathered) * (2 if options.get("gradient_checkpointing") else 1), (name, len(calls))


def case_gradients_equal_one_process():
    """And so do the loss, the norm and every mean that is logged."""
    for kind, tied, name in CASES:
        expected, numbers = reference("gradients", kind, tied, WORLD)
        got, result = gradients(kind, tied, STRATEGIES[name])
        assert got.keys() == expected.keys()
        for key, gradient in expected.items():
            off = ((got[key] - gradient).norm() / gradient.norm()).item()
            assert off <= 1e-6, f"{kind}, tied {tied}, {name}: the gradient of {key} is off by {off:.1e}"
        for key, number in numbers.items():
            assert abs(result[key] - number) <= 1e-6 * max(abs(number), 0.1), (name, key, result[key], number)


def case_reduce_dtype_rounds_the_gradients():
    """To bf16's 8 bits, on one rank too; but for ignored parameters, which are summed as they are."""
    expected, _ = reference("gradients", "policy", True, WORLD)
    for name in ("full", "hybrid 1", "ignored"):
        got, _ = gradients("policy", True, STRATEGIES[name] | {"reduce_dtype": "bfloat16"})
        for key, gradient in expected.items():
            off = ((got[key] - gradient).norm() / gradient.norm()).item()
            whole = any(key.startswith(f"lm.{module}.") for module in STRATEGIES[name].get("ignored_modules", ()))
            assert off <= 1e-6 if whole else 1e-4 < off < 1e-2, f"{name}: the gradient of {key} is off by {off:.1e}"


def set_gradients(model: nn.Module, gradients: dict[str, Tensor]) -> None:
    """As backward leaves them: shards; of an ignored parameter, a part that clip_gradients has yet to sum over ranks."""
    for name, p in model.named_parameters():
        g = gradients[name]
        p.grad = distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, DTensor) else g / WORLD


def case_steps_from_the_same_gradients_are_the_same():
    """To the bit: AdamW works number by number, wherever they lie."""
    for kind, tied, name in CASES:
        expected, got = reference("steps", kind, tied, 1), steps(kind, tied, STRATEGIES[name])
        assert got.keys() == expected.keys()
        for key, weight in expected.items():
            assert torch.equal(got[key], weight), f"{kind}, tied {tied}, {name}: {key} differs after the same gradients"


def case_gradients_are_clipped_by_the_global_norm():
    given, _ = reference("gradients", "policy", True, 1)
    norm = torch.stack([g.double().square().sum() for g in given.values()]).sum().sqrt().item()
    for name, options in STRATEGIES.items():
        model, _, _ = setup("policy", True, options)
        for limit in (norm / 3, 3 * norm):
            set_gradients(model, given)
            got = clip_gradients(model, limit)
            assert abs(got - norm) <= 1e-6 * norm, (name, got, norm)
            for key, p in model.named_parameters():
                off = (full(p.grad) - given[key] * min(1.0, limit / norm)).norm() / given[key].norm()
                assert off <= (1e-5 if limit < norm else 0.0), f"{name}, limit {limit}: {key} is off by {off:.1e}"  # limit / (norm + 1e-6)


def case_buckets_are_the_weights():
    for kind, tied, name in CASES:
        model, _, _ = setup(kind, tied, STRATEGIES[name])
        expected = full_weights(model)
        for size in (1, 50_000, 2**30):
            seen = []
            for bucket in fsdp_buckets(named_weights(model), torch.float32, size, CPU):
                assert len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= size
                for key, tensor in bucket:
                    assert tensor.is_contiguous() and torch.equal(tensor, expected[key]), (name, key)
                    seen.append(key)
            assert seen == list(expected), name


def case_ignored_modules_compute_beside_bf16():
    """Their parameters stay fp32, while their neighbours' are gathered in bf16."""
    expected, _ = gradients("policy", True, {"param_dtype": "bfloat16"})
    for strategy in ("full", "hybrid 1"):
        got, _ = gradients("policy", True, STRATEGIES[strategy] | {"param_dtype": "bfloat16", "ignored_modules": IGNORED})
        for key, gradient in expected.items():
            off = ((got[key] - gradient).norm() / gradient.norm()).item()
            assert off < 0.2, f"{strategy}: the gradient of {key} is off by {off:.1e}"


# ---------------------------------------------------------------------------------------------------------------------
# Offloading
# ---------------------------------------------------------------------------------------------------------------------
PARKED = ("full", "grad_op", "none", "ignored")


def bits(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def trained(options: dict[str, Any], parked: tuple[str, ...]) -> list[Tensor]:
    """Weights and moments after two updates, each with a forward before it, with what is in `parked` on the host meanwhile."""
    model, args, optim = setup("policy", True, options)
    optimizer = make_optimizer(model, optim)
    params, moments = functools.partial(parameter_tensors, model), functools.partial(optimizer_tensors, optimizer)
    on_device = {
        "params": Parked(params, model) if "params" in parked else nullcontext(),
        "optimizer": Parked(moments, optimizer) if "optimizer" in parked else nullcontext(),
    }
    plan, out = plan_of(make_batch(), 64), []
    for _ in range(2):
        with on_device["params"]:
            out.append(forward_only(model, make_batch(), [plan]))
        with on_device["params"], on_device["optimizer"]:
            update(model, optimizer, 1.0, make_batch(), plan, loss_of("policy", model, args))
    with on_device["params"], on_device["optimizer"]:
        return out + bits(params()) + bits(moments())


def case_parked_updates_are_the_same():
    for name in PARKED:
        expected = trained(STRATEGIES[name], ())
        assert any((a != 0).any() for a in expected[-5:])
        for parked in (("params",), ("optimizer",), ("params", "optimizer")) if name == "full" else (("params", "optimizer"),):
            got = trained(STRATEGIES[name], parked)
            assert len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), (name, parked)


def case_parked_state_comes_back_to_the_bit():
    """Its bytes are gone while it waits, views of it stay valid, and the arena is allocated once."""
    for name in PARKED:
        model, args, optim = setup("policy", True, STRATEGIES[name])
        optimizer = make_optimizer(model, optim)
        state = {}
        for what, tensors in (("params", lambda m=model: parameter_tensors(m)), ("moments", lambda o=optimizer: optimizer_tensors(o))):
            before = bits(tensors())
            nbytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors() if t.numel()}.values())
            views = tensors()
            state[what] = parked = Parked(tensors)
            assert parked.arena.numel() == nbytes and (nbytes > 0) == (what == "params")  # no moments before the first step
            for _ in range(2):
                assert not any(t.untyped_storage().nbytes() for t in tensors())
                with parked:
                    assert all(torch.equal(a, b) for a, b in zip(views, before, strict=True)), (name, what)
                assert parked.arena.numel() == nbytes
            if what == "params":
                arena = parked.arena.data_ptr()
        with state["params"], state["moments"]:
            update(model, optimizer, 1.0, make_batch(), plan_of(make_batch(), 64), loss_of("policy", model, args))
            new = bits(parameter_tensors(model)), bits(optimizer_tensors(optimizer))
        assert new[1] and not any(t.untyped_storage().nbytes() for t in optimizer_tensors(optimizer) + parameter_tensors(model))
        second = state["moments"].arena.data_ptr()
        with state["params"], state["moments"]:
            got = bits(parameter_tensors(model)), bits(optimizer_tensors(optimizer))
        assert all(torch.equal(a, b) for a, b in zip(sum(got, []), sum(new, []), strict=True)), name
        assert state["params"].arena.data_ptr() == arena and state["moments"].arena.data_ptr() == second


def case_parked_state_cannot_be_used():
    """Reading freed memory would crash without a word. And leaving twice is leaving once."""
    model, args, optim = setup("policy", True, PLAIN)
    optimizer = make_optimizer(model, optim)
    update(model, optimizer, 1.0, make_batch(), plan_of(make_batch(), 64), loss_of("policy", model, args))
    before = bits(parameter_tensors(model))
    params = Parked(lambda: parameter_tensors(model), model)
    moments = Parked(lambda: optimizer_tensors(optimizer), optimizer)
    for use in (lambda: forward_only(model, make_batch(), [plan_of(make_batch(), 64)]), optimizer.step):
        try:
            use()
        except RuntimeError as error:
            assert "waits on the host" in str(error), error
        else:
            raise AssertionError("parked state was used")
    with params:
        with params:
            pass
    assert params.park() == 0
    with params, moments:
        assert all(torch.equal(a, b) for a, b in zip(parameter_tensors(model), before, strict=True))
