"""Run on 1, 2 and 4 ranks: MegatronState against torch.optim.AdamW on the plain Hugging Face model, in many layouts.

Gradients are not computed but given: random numbers under Hugging Face names, which every layout reads with the same function
as it reads weights. So steps are from identical gradients, and what is wrong is this module's fault.
"""

import copy
import functools
import itertools
import math
import os
import tempfile
from datetime import timedelta
from typing import Any

import launch.cpu_engines.megatron  # noqa: F401  before megatron

# isort: split
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron_groups import initialize
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from common import checkpoint
from common.megatron_hf import build_model, load_hf, transformer_config
from common.megatron_state import MegatronState, boxes

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
RANK, WORLD = dist.get_rank(), dist.get_world_size()
LR, DECAY, BETAS, CLIP = 1e-2, 0.1, (0.9, 0.95), 15.0
NORM = 10.0  # of the first step's gradient, twice that of the second's and so on
STEPS = 3
SIZES = dict(
    vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, initializer_range=0.2,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8, norm_topk_prob=True, mlp_only_layers=[])
HF: dict[str, PretrainedConfig] = {
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "moe": Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False),
}
# (model, tensor, pipeline, virtual pipeline, context, expert parallel); what is left of the ranks is data parallel
Layout = tuple[str, int, int, int, int, int]
LAYOUTS: dict[int, list[Layout]] = {
    1: [("tied", 1, 1, 1, 1, 1), ("moe", 1, 1, 1, 1, 1)],
    2: [
        ("tied", 1, 1, 1, 1, 1), ("tied", 2, 1, 1, 1, 1), ("tied", 1, 2, 2, 1, 1), ("untied", 1, 1, 1, 2, 1), ("untied", 1, 2, 1, 1, 1),
        ("moe", 1, 1, 1, 1, 2), ("moe", 1, 2, 1, 1, 1),
    ],
    4: [
        ("tied", 2, 2, 1, 1, 1), ("tied", 1, 2, 2, 2, 1), ("moe", 1, 1, 1, 1, 2), ("moe", 2, 1, 1, 1, 2),
    ],
}


def in_dtypes() -> list[tuple[Layout, torch.dtype]]:
    """One rank's layouts in both, others' in either, by turns."""
    both = (torch.bfloat16, torch.float32)
    return [(layout, dtype) for i, layout in enumerate(LAYOUTS[WORLD]) for dtype in (both if WORLD == 1 else both[i % 2 :][:1])]


def new_folder() -> str:
    """The same empty folder on every rank."""
    path = [tempfile.mkdtemp() if RANK == 0 else ""]
    dist.broadcast_object_list(path)
    return path[0]


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@functools.cache
def values(kind: str, number: int) -> Any:
    """A Hugging Face model: 0 is where training starts, n the gradients of step n, -n the weights after n steps."""
    if number < 0:
        model = copy.deepcopy(values(kind, 0))
        decays, others = ([p for p in model.parameters() if (p.dim() > 1) == many] for many in (True, False))
        adam = torch.optim.AdamW(
            [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}], lr=LR, betas=BETAS,
        )
        for n in range(1, 1 - number):
            for p, g in zip(model.parameters(), values(kind, n).parameters(), strict=True):
                p.grad = g.detach().clone()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            adam.step()
        return model
    torch.manual_seed(number)
    model = AutoModelForCausalLM.from_config(HF[kind], dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.1)
    if number:
        torch.nn.utils.vector_to_parameters(number * NORM * torch.nn.functional.normalize(flat(model), dim=0), model.parameters())
    return model


@functools.cache
def folder(kind: str, number: int) -> str:
    path = new_folder()
    if RANK == 0:
        values(kind, number).save_pretrained(path)
    dist.barrier()
    return path


def models_of(layout: Layout, number: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """This rank's chunks, filled with `values`; Megatron's groups must be the layout's."""
    kind, tp, pp, vpp, cp, ep = layout
    config = transformer_config(
        HF[kind], tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1 if ep > 1 else tp, sequence_parallel=tp > 1, params_dtype=dtype, calculate_per_token_loss=True,
    )
    models = build_model(HF[kind], config)
    load_hf(models, HF[kind], folder(kind, number))
    return models


def start(layout: Layout, dtype: torch.dtype = torch.float32, number: int = 0) -> MegatronState:
    kind, tp, pp, vpp, cp, ep = layout
    initialize(tp, pp, vpp, cp, ep, 1 if ep > 1 else tp)
    return MegatronState(models_of(layout, number, dtype), HF[kind].vocab_size, LR, DECAY, BETAS, CLIP)


def parameters(models: list[Any]) -> list[torch.Tensor]:
    return [p for model in models for p in model.parameters()]


@torch.no_grad()
def give_gradients(state: MegatronState, layout: Layout, number: int) -> None:
    """As backward leaves them: parts, of which DDP makes the sum. 2 and -1 times a number add up to it to the bit."""
    groups = {p: buffer.data_parallel_group for buffer in state.buffers for p in buffer.params}
    for p, g in zip(parameters(state.chunks), parameters(models_of(layout, number)), strict=True):
        size, rank = groups[p].size(), groups[p].rank()
        p.main_grad.copy_(g * (1 if size == 1 else (2, -1, 0, 0)[rank]))
    for chunk in state.chunks:
        chunk.finish_grad_sync()


def train(state: MegatronState, layout: Layout, numbers: range) -> list[float]:
    norms = []
    for number in numbers:
        give_gradients(state, layout, number)
        norms.append(state.grad_norm())
        state.step(norms[-1])
    return norms


def distance(state: MegatronState, layout: Layout, number: int) -> float:
    """Largest difference of this layout's weights from `values`, over ranks. Padding rows of the vocabulary do not count: they decay."""
    worst = torch.zeros(())
    for (name, p), e in zip(((n, p) for c in state.chunks for n, p in c.module.named_parameters()), parameters(models_of(layout, number)),
                            strict=True):
        rows = len(p)
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            rows = max(HF[layout[0]].vocab_size - len(p) * parallel_state.get_tensor_model_parallel_rank(), 0)
        worst = max(worst, (p[:rows] - e[:rows]).detach().abs().max() if rows else worst)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def case_boxes_cover_a_range_in_order():
    for shape in ((7,), (3, 5), (1, 4), (4, 1), (2, 3, 4)):
        numbers = torch.arange(math.prod(shape)).view(shape)
        for lo, hi in itertools.combinations_with_replacement(range(math.prod(shape) + 1), 2):
            found = [numbers[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].flatten() for box in boxes(lo, hi, shape)]
            assert torch.equal(torch.cat(found) if found else torch.empty(0), torch.arange(lo, hi)), (shape, lo, hi)
            assert len(found) <= 2 * len(shape) - 1


def case_steps_are_adamws():
    for layout in LAYOUTS[WORLD]:
        state = start(layout)
        norms = train(state, layout, range(1, STEPS + 1))
        assert all(abs(norm - NORM * n) < 1e-5 * NORM for n, norm in enumerate(norms, 1)), (layout, norms)
        moved, off = distance(state, layout, 0), distance(state, layout, -STEPS)
        assert moved > LR and off < 1e-6, (layout, moved, off)


def bits(state: MegatronState) -> list[torch.Tensor]:
    """All that training depends on, copied: this rank's weights, moments, fp32 copies and counts."""
    counts = [values["step"] for part in state.parts for values in part.optimizer.state.values()]
    return [t.detach().clone() for t in parameters(state.chunks) + state.optimizer_tensors() + counts]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def raises(expected: str, do: Any, kind: type[Exception] = RuntimeError) -> None:
    try:
        do()
    except kind as e:
        assert expected in str(e), e
    else:
        raise AssertionError(f"went unnoticed: {expected}")


def case_bf16_updates_fp32_copies():
    """Steps far below bf16's resolution add up; every rank's bf16 weights are the rounded fp32 ones."""
    for layout in LAYOUTS[WORLD]:
        state, plain = start(layout, torch.bfloat16), start(layout)
        for each in (state, plain):
            each.set_lr(1e-4, DECAY)
        for part in plain.parts:  # start where bf16 starts
            for p in part.get_parameters():
                p.data.copy_(p.data.bfloat16())
        plain.gather_weights()
        train(state, layout, range(1, 8))
        train(plain, layout, range(1, 8))
        assert {p.dtype for p in parameters(state.chunks)} == {torch.bfloat16}
        off = [(a.float() - b).abs().max().item() for a, b in zip(parameters(state.chunks), parameters(plain.chunks), strict=True)]
        rounded = [torch.equal(a, b.bfloat16()) for a, b in zip(parameters(state.chunks), parameters(plain.chunks), strict=True)]
        assert all(rounded), (layout, off)


def case_average_gradients_are_refused():
    layout = LAYOUTS[WORLD][0]
    start(layout)
    models = models_of(layout, 0)
    models[0].config.calculate_per_token_loss = False
    raises("calculate_per_token_loss", lambda: MegatronState(models, 101, LR), ValueError)


def case_no_decay_of_norms_and_biases():
    for layout in LAYOUTS[WORLD]:
        state = start(layout)
        state.set_lr(0.5, 0.25)
        for part in state.parts:
            for group in part.param_groups:
                assert group["lr"] == 0.5 and group["weight_decay"] in (0.0, 0.25) and group["betas"] == BETAS
        decays = {p for part in state.parts for p in part.model_param_group_index_map
                  if part.param_groups[part.model_param_group_index_map[p][0]]["weight_decay"] > 0}
        assert decays == {p for part in state.parts for p in part.model_param_group_index_map if p.dim() > 1}


def case_a_norm_that_is_not_finite_changes_nothing():
    """On one rank only; every rank hears of it before a weight changes."""
    for layout in LAYOUTS[WORLD]:
        state = start(layout)
        train(state, layout, range(1, 2))
        before = bits(state)
        give_gradients(state, layout, 2)
        if RANK == WORLD - 1:
            state.parts[0].buffers[0].grad_data.fill_(math.inf)
        assert not math.isfinite(state.grad_norm())
        assert same(before, bits(state))
        state.zero_grad()
        train(state, layout, range(2, 4))
        assert distance(state, layout, -3) < 1e-6


def saved(state: MegatronState) -> str:
    return checkpoint.save(new_folder(), 2, state.tensors(), {"n": 1}, keep=0)


def resumed(layout: Layout, path: str, dtype: torch.dtype = torch.float32) -> MegatronState:
    state = start(layout, dtype, number=9)  # other weights
    tensors = state.tensors()
    assert checkpoint.load(path, tensors)["n"] == 1
    state.loaded(tensors)
    return state


def case_a_resumed_run_takes_the_same_steps():
    for layout, dtype in in_dtypes():
        state = start(layout, dtype)
        train(state, layout, range(1, 3))
        path = saved(state)
        norms = train(state, layout, range(3, 5))
        expected = bits(state)
        other = resumed(layout, path, dtype)
        assert train(other, layout, range(3, 5)) == norms and same(bits(other), expected), layout


def case_another_layout_goes_on():
    """From every layout to every other of the same model; what the checkpoint holds does not depend on who wrote it."""
    for kind in HF:
        layouts, paths = [x for x in LAYOUTS[WORLD] if x[0] == kind], []
        for layout in layouts:
            state = start(layout)
            train(state, layout, range(1, 3))
            paths.append(saved(state))
        sizes = [{k: m.size for k, m in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items()} for path in paths]
        assert all(size == sizes[0] for size in sizes), kind
        for layout, path in itertools.product(layouts, paths):
            state = resumed(layout, path)
            train(state, layout, range(3, 4))
            assert distance(state, layout, -3) < 1e-6, (layout, path)


def case_a_run_starts_from_weights_alone():
    layout = LAYOUTS[WORLD][-1]
    state = start(layout)
    train(state, layout, range(1, 4))
    path = saved(state)
    fresh = start(layout, torch.bfloat16, number=9)
    tensors = {name: t for name, t in fresh.tensors().items() if name.startswith("weights.")}
    dcp.load(tensors, checkpoint_id=path)
    fresh.loaded(tensors)
    assert same([p.bfloat16() for p in parameters(state.chunks)], [p.detach() for p in parameters(fresh.chunks)])
    assert int(fresh.tensors()["step"]) == 0 and not any(t.any() for t in fresh.optimizer_tensors()[-1:])


def case_a_failed_write_on_one_rank_stops_all():
    layout = LAYOUTS[WORLD][0]
    state = start(layout)
    train(state, layout, range(1, 3))
    path = saved(state)
    before = bits(state)
    train(state, layout, range(3, 4))
    plain = torch.save

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    torch.save = full if RANK == WORLD - 1 else plain
    try:
        raises("No space left on device", lambda: checkpoint.save(os.path.dirname(path), 3, state.tensors(), {"n": 2}, keep=0))
    finally:
        torch.save = plain
    assert checkpoint.list_steps(os.path.dirname(path)) == [2]
    assert same(bits(resumed(layout, path)), before)
    raises("failed", lambda: checkpoint.load(path, state.tensors() | {"weights.more": torch.zeros(1)}), checkpoint.RankError)


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.untyped_storage().nbytes()}.values())


def case_offloaded_training_is_the_same():
    """Between steps nothing is on the device; weights, moments and fp32 copies come back to the bit, gradients as zeros."""
    for layout, dtype in in_dtypes():
        expected = start(layout, dtype)
        train(expected, layout, range(1, 4))
        state = start(layout, dtype)
        views = parameters(state.chunks) + [p.main_grad for p in parameters(state.chunks)] + state.optimizer_tensors()
        total = bytes_of(views)
        parked = {what: state.parked(what) for what in ("params", "grads", "optimizer")}
        assert total > 0 and bytes_of(views) == 0
        dp = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        weights = sum(buffer.param_data.numel() for chunk in state.chunks for buffer in chunk.buffers)
        if layout[0] != "moe":
            assert parked["params"].arena.numel() == weights * dtype.itemsize // dp and parked["grads"].arena.numel() == 0
        for number in range(1, 4):
            with parked["params"], torch.no_grad():
                assert all(torch.isfinite(p).all() for p in parameters(state.chunks))
            with parked["params"], parked["grads"], parked["optimizer"]:
                assert not any(p.main_grad.any() for p in parameters(state.chunks)) and bytes_of(views) == total
                give_gradients(state, layout, number)
                before = bits(state)
            with parked["params"], parked["grads"], parked["optimizer"]:  # the gradients are lost, and nothing else is
                assert same(before, bits(state)) and not any(buffer.grad_data.any() for buffer in state.buffers)
                train(state, layout, range(number, number + 1))
            assert bytes_of(views) == 0
        with parked["params"], parked["optimizer"]:
            assert same(bits(state), bits(expected)), layout


def case_parked_state_cannot_be_used():
    layout = LAYOUTS[WORLD][0]
    for what in ("params", "grads", "optimizer"):
        state = start(layout)
        parked = state.parked(what)
        raises("waits on the host", lambda state=state: state.parts[0].optimizer.step())
        if what != "optimizer":
            raises("waits on the host", lambda state=state: state.chunks[0](input_ids=None, position_ids=None, attention_mask=None))
        with parked:
            train(state, layout, range(1, 2))


def case_the_reference_swaps_in_and_out():
    for layout, dtype in in_dtypes():
        expected, state = start(layout, dtype), start(layout, dtype)
        first = [p.detach().clone() for p in parameters(state.chunks)]
        reference = state.reference()
        reference.BLOCK = 1000  # several, and a rest
        parked = {what: state.parked(what) for what in ("params", "optimizer")}
        raises("wait on the host", reference.__enter__)
        for number in range(1, 3):
            with parked["params"], parked["optimizer"]:
                train(state, layout, range(number, number + 1))
            train(expected, layout, range(number, number + 1))
            with parked["params"]:
                with reference:
                    assert same(first, [p.detach() for p in parameters(state.chunks)]), layout
                    raises("reference", lambda state=state: state.parts[0].optimizer.step())
                    raises("reference", lambda state=state: state.chunks[0](input_ids=None, position_ids=None, attention_mask=None))
                assert same([p.detach() for p in parameters(expected.chunks)], [p.detach() for p in parameters(state.chunks)])
            assert reference.arena.numel() == parked["params"].arena.numel()
        with parked["params"], parked["optimizer"]:
            assert same(bits(state), bits(expected)), layout
