"""Run on 1, 2 and 4 ranks: sharded models against a plain Hugging Face model in this process, all in fp32."""

import functools
import tempfile
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2MLP

from common import fused_logprob
from common.batching import schedule
from common.loss import gae, token_rewards, whiten
from common.reshard import fsdp_buckets, named_weights
from launch import make_tiny
from ppo_fsdp_vllm import (
    ActorArgs,
    Args,
    Batch,
    CriticArgs,
    DataArgs,
    FSDPArgs,
    KLArgs,
    PPOArgs,
    actor_loss,
    build_model,
    critic_loss,
    forward_only,
    gather_flat,
    minibatch_weights,
    pack_micro,
    update,
)

if not dist.is_initialized():  # tests/cases_cuda.py brings its own
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
RANK, WORLD = dist.get_rank(), dist.get_world_size()
CPU = torch.device("cpu")


def mesh():
    return init_device_mesh("cpu", (WORLD,))


@functools.cache
def folder(tied: bool = True, **overrides: int) -> str:
    """A random model that rank 0 writes and every rank reads."""
    path = [tempfile.mkdtemp()]
    if RANK == 0:
        make_tiny.build_model(seed=1, tied=tied, **overrides).save_pretrained(path[0])
    dist.broadcast_object_list(path)
    return path[0]


def make_args(path: str, **kwargs) -> Args:
    kwargs.setdefault("ppo", PPOArgs(entropy_coef=0.01, tis_cap=2.0))
    return Args(
        actor=ActorArgs(model=path), critic=CriticArgs(), data=DataArgs(train=("none",)), fsdp=FSDPArgs(param_dtype="float32"), **kwargs
    )


def make_batch(count: int = 11, seed: int = 3) -> Batch:
    """Sequences of very different lengths."""
    g = torch.Generator().manual_seed(seed)
    prompt_lens = torch.randint(1, 12, (count,), generator=g)
    response_lens = torch.randint(1, 20, (count,), generator=g)
    tokens = int((prompt_lens + response_lens).sum())
    return Batch(
        ids=torch.randint(0, 90, (tokens,), generator=g), prompt_lens=prompt_lens, response_lens=response_lens,
        rollout_logprobs=-4 * torch.rand(int(response_lens.sum()), generator=g), truncated=torch.zeros(count, dtype=torch.bool),
    )


def padded_logits(lm, batch: Batch) -> list[torch.Tensor]:
    """The slow, obvious reference: each sequence by itself through Hugging Face's own attention."""
    lm.set_attn_implementation("eager")
    return [lm(torch.cat([batch.prompt(i), batch.response(i)])[None]).logits[0] for i in range(len(batch.lengths))]


def reference_logprobs(lm, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    out = []
    for i, logits in enumerate(padded_logits(lm, batch)):
        logprobs = (logits[batch.prompt_lens[i] - 1 : -1] / temperature).log_softmax(-1)
        out.append(logprobs.gather(1, batch.response(i)[:, None])[:, 0])
    return torch.cat(out)


def plan_of(batch: Batch, budget: int, world: int = WORLD):
    return schedule(batch.lengths.tolist(), world, budget)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Relative to the norm: fp32 sums in another order."""
    difference = ((a - b).norm() / b.norm()).item()
    assert difference <= tolerance, f"relative difference {difference:.2e} > {tolerance:.0e}"


def case_weights_and_buffers_equal_from_pretrained():
    for tied in (True, False):
        model = build_model("policy", folder(tied), make_args(folder(tied)), mesh(), None)
        plain = AutoModelForCausalLM.from_pretrained(folder(tied), dtype=torch.float32)
        full = {name.removeprefix("lm."): p.full_tensor() for name, p in model.named_parameters()}
        assert full.keys() == dict(plain.named_parameters()).keys()
        for name, p in plain.named_parameters():
            assert torch.equal(full[name], p), name
        for (name, a), (_, b) in zip(model.lm.named_buffers(), plain.named_buffers(), strict=True):
            assert torch.equal(a, b), name


def case_packed_equals_single_sequences():
    """Log-probs, for tied and untied heads, a sliding window narrower than the sequences, and a temperature."""
    batch = make_batch()
    window = dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    for tied, temperature, overrides in ((True, 1.0, {}), (False, 0.7, {}), (True, 1.0, window)):
        path = folder(tied, **overrides)
        args = make_args(path)
        args.rollout.temperature = temperature
        model = build_model("policy", path, args, mesh(), None)
        with torch.no_grad():
            expected = reference_logprobs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), batch, temperature)
        for budget in (40, 64, 1000):
            got = forward_only(model, batch, [plan_of(batch, budget)])
            close(got, expected)


def training_tokens(batch: Batch) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    size = len(batch.rollout_logprobs)
    values = torch.randn(size, generator=g)
    scores = torch.rand(len(batch.lengths), generator=g)
    advantages, returns = gae(token_rewards(scores, batch.response_lens), values, batch.response_lens, 0.99, 0.95)
    everything = list(range(len(batch.lengths)))
    return {
        "rollout_logprobs": batch.rollout_logprobs, "old_logprobs": batch.rollout_logprobs + 0.1 * torch.randn(size, generator=g),
        "ref_logprobs": batch.rollout_logprobs - 0.1, "values": values, "returns": returns, "advantages": whiten(advantages),
    } | minibatch_weights(batch, everything, "seq-mean-token-mean", False)


class NoStep(torch.optim.SGD):
    """Keeps the gradients: what is compared."""

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        pass


def full_gradients(kind: str, path: str, batch: Batch, budget: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    args = make_args(path, kl=KLArgs(where="loss", coef=0.1, kind="k3"))
    optim = args.actor if kind == "policy" else args.critic
    model = build_model(kind, path, args, mesh(), optim)
    if kind == "critic":
        torch.nn.init.constant_(model.head.weight, 0.02)
    loss = functools.partial(actor_loss if kind == "policy" else critic_loss, model, training_tokens(batch), args)
    result = update(model, NoStep(model.parameters(), lr=1.0), 0.0, batch, plan_of(batch, budget), loss)
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}, result


def kl_k3(logprob: torch.Tensor, ref_logprob: torch.Tensor) -> torch.Tensor:
    return ((ref_logprob - logprob).exp() - 1 - (ref_logprob - logprob)).clamp(-10, 10)


def plain_gradients(kind: str, path: str, batch: Batch, padded: bool) -> tuple[dict[str, torch.Tensor], float]:
    """The same losses written out token by token on unsharded Hugging Face outputs, mostly in fp64 (its norms and softmax are
    fp32): each sequence by itself, or all in one batch padded on the right."""
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).double()
    lm.set_attn_implementation("eager")
    t = {name: values.double() for name, values in training_tokens(batch).items()}
    total = torch.zeros((), dtype=torch.float64)
    head = torch.full((1, lm.config.hidden_size), 0.02, requires_grad=True, dtype=torch.float64)
    at = 0
    rows = [torch.cat([batch.prompt(i), batch.response(i)]) for i in range(len(batch.lengths))]
    if padded:
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        real = torch.arange(ids.shape[1]) < batch.lengths[:, None]
        outputs = list(lm.model(ids, attention_mask=real.long()).last_hidden_state)
    else:
        outputs = [lm.model(row[None]).last_hidden_state[0] for row in rows]
    for i, output in enumerate(outputs):
        hidden = output[int(batch.prompt_lens[i]) - 1 : int(batch.lengths[i]) - 1]
        for j, h in enumerate(hidden):
            if kind == "critic":
                value = (head @ h)[0]
                clipped = value.clamp(t["values"][at] - 0.5, t["values"][at] + 0.5)
                loss = 0.5 * torch.maximum((value - t["returns"][at]) ** 2, (clipped - t["returns"][at]) ** 2)
            else:
                logp = (lm.lm_head.weight @ h).log_softmax(-1)
                logprob = logp[batch.response(i)[j]]
                ratio, a = (logprob - t["old_logprobs"][at]).exp(), t["advantages"][at]
                surrogate = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
                if a < 0:
                    surrogate = torch.minimum(surrogate, -3.0 * a)
                loss = surrogate * (t["old_logprobs"][at] - t["rollout_logprobs"][at]).exp().clamp(max=2.0)
                loss = loss + 0.01 * (logp.exp() * logp).sum() + 0.1 * kl_k3(logprob, t["ref_logprobs"][at])
            total = total + loss / (len(hidden) * len(batch.lengths))
            at += 1
    total.backward()
    gradients = {f"lm.{name}": p.grad for name, p in lm.named_parameters() if p.grad is not None}
    return gradients | ({"head.weight": head.grad} if kind == "critic" else {}), total.item()


def case_loss_and_gradients_of_packed_equal_padded_and_single_whatever_the_split():
    """Also with fewer sequences than ranks, when some ranks run dummies."""
    for kind, tied, padded in (("policy", True, False), ("policy", False, True), ("critic", True, True)):
        for batch in (make_batch(), make_batch(count=1)):
            expected, expected_loss = plain_gradients(kind, folder(tied), batch, padded)
            for budget in (40, 1000):
                got, result = full_gradients(kind, folder(tied), batch, budget)
                assert got.keys() == expected.keys()
                assert abs(result["loss"] - expected_loss) <= 1e-6 * max(1.0, abs(expected_loss)), (result["loss"], expected_loss)
                for name in expected:
                    close(got[name].double(), expected[name], 2e-6)


def case_first_update_has_ratio_one():
    """Same-policy invariant, to the bit: old log-probs come from the update's own micro-batches."""
    batch, path = make_batch(), folder()
    args = make_args(path)
    model = build_model("policy", path, args, mesh(), args.actor)
    plan = plan_of(batch, 64)
    tokens = training_tokens(batch)
    del tokens["ref_logprobs"]
    tokens["old_logprobs"] = forward_only(model, batch, [plan])
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=1.0), functools.partial(actor_loss, model, tokens, args)
    result = update(model, optimizer, 1.0, batch, plan, loss)
    assert result["approx_kl"] == 0.0 and result["clipfrac"] == 0.0, result
    after = update(model, optimizer, 1.0, batch, plan, loss)
    assert after["approx_kl"] > 0.0, after


def case_without_a_bonus_entropy_is_logged_and_has_no_gradient():
    batch, path = make_batch(), folder()
    with torch.no_grad():
        logits = padded_logits(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), batch)
        logp = torch.cat([x[n - 1 : -1] for x, n in zip(logits, batch.prompt_lens, strict=True)]).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    tokens = training_tokens(batch) | minibatch_weights(batch, list(range(len(batch.lengths))), "token-mean", False)
    backward = fused_logprob._chunk_backward
    for coef in (0.0, 0.01):
        seen: list[bool] = []  # whether there was a gradient of the entropy
        args = make_args(path, ppo=PPOArgs(entropy_coef=coef))
        model = build_model("policy", path, args, mesh(), args.actor)
        with mock.patch.object(fused_logprob, "_chunk_backward", lambda *a, to=seen: to.append(a[6] is not None) or backward(*a)):
            loss = functools.partial(actor_loss, model, tokens, args)
            result = update(model, NoStep(model.parameters(), lr=1.0), 0.0, batch, plan_of(batch, 64), loss)
        assert set(seen) == {coef > 0}, (coef, seen)
        assert abs(result["entropy"] - entropy.mean().item()) <= 1e-5, (result["entropy"], entropy.mean())


def case_a_model_that_changes_its_logits_or_mixes_sequences_is_refused():
    path, logits, mlp = folder(), Qwen2ForCausalLM.forward, Qwen2MLP.forward

    def scaled(*args, **kwargs):
        out = logits(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    args = make_args(path)
    for of, forward in ((Qwen2ForCausalLM, scaled), (Qwen2MLP, lambda module, x: mlp(module, x + x.roll(1, dims=1)))):
        with mock.patch.object(of, "forward", forward):
            build_model("policy", path, args, mesh(), None)  # the reference: it comes after the actor, which is checked
            try:
                build_model("policy", path, args, mesh(), args.actor)
            except ValueError as e:
                assert "'qwen2': its own log-probs and those of a packed forward differ" in str(e) and "\n" not in str(e), e
            else:
                raise AssertionError(f"another forward of {of.__name__} went unnoticed")


def case_not_finite_loss_stops_every_rank_before_the_step():
    batch, path = make_batch(), folder()
    args = make_args(path)
    model = build_model("policy", path, args, mesh(), args.actor)
    before = [p.full_tensor().clone() for p in model.parameters()]
    tokens = training_tokens(batch)
    tokens["advantages"][7] = float("nan")  # in one micro-batch of one rank
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    try:
        update(model, optimizer, 1.0, batch, plan_of(batch, 40), functools.partial(actor_loss, model, tokens, args))
    except FloatingPointError as e:
        assert "nan" in str(e)
    else:
        raise AssertionError("a NaN advantage went unnoticed")
    assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters(), strict=True))


def case_buckets_are_the_weights():
    """Any bucket size, down to one tensor a bucket; uneven shards (101 rows on 2 and 4 ranks); the rollout's dtype."""
    for tied in (True, False):
        model = build_model("policy", folder(tied), make_args(folder(tied)), mesh(), None)
        expected = {name: p.full_tensor() for name, p in model.named_parameters()}
        for dtype in (torch.float32, torch.bfloat16):
            for size in (1, 50_000, 2**30):
                seen = []
                for bucket in fsdp_buckets(named_weights(model), dtype, size, CPU):
                    assert len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= size
                    for name, tensor in bucket:
                        assert tensor.is_contiguous() and torch.equal(tensor, expected[name].to(dtype)), name
                        seen.append(name)
                assert seen == list(expected)
    plain = [("bias", torch.arange(3.0)), ("scalar", torch.tensor(2.0))]
    for (_, a), (_, b) in zip(*[plain, [x for bucket in fsdp_buckets(plain, torch.float32, 8, CPU) for x in bucket]], strict=True):
        assert torch.equal(a, b)


def case_gather_flat_concatenates_in_rank_order():
    mine = torch.arange(RANK * 2, dtype=torch.int64) + 100 * RANK  # nothing from rank 0
    expected = torch.cat([torch.arange(r * 2) + 100 * r for r in range(WORLD)])
    assert torch.equal(gather_flat(mine), expected)


def case_dummy_micro_batch_has_no_tokens():
    micro = pack_micro(make_batch(), [])
    assert len(micro.predict) == len(micro.targets) == len(micro.token_index) == 0 and micro.inputs["input_ids"].shape == (1, 2)
