"""PPO with a critic on PyTorch FSDP2 (training) and vLLM (generation), in the same torchrun processes, without Ray.

One step, in the order of `main`:

    generate -> reward -> old/reference log-probs and values -> advantages -> update critic -> update actor
             -> save -> push the weights into vLLM -> validate

Every rank is both a trainer and a part of a rollout engine. Each sees the whole batch as flat tensors, computes the same
advantages and the same schedule, and works on its own share; there is no controller process.

Left out on purpose: LoRA, reward models on the GPU, multi-turn rollouts, off-policy pipelining, images.

Launch:
    bash launch/quickstart.sh                                          # a laptop CPU: sets up, makes a tiny model, trains it
    torchrun --standalone --nproc-per-node 1 ppo_fsdp_vllm.py --actor.model Qwen/Qwen2.5-0.5B-Instruct \
        --data.train gsm8k/train.parquet --data.val gsm8k/test.parquet --out runs/gsm8k                     # 1 GPU
    torchrun --standalone --nproc-per-node 8 ppo_fsdp_vllm.py --rollout.tensor-parallel-size 2 ...          # 8 GPUs
    sbatch --nodes 2 launch/slurm.sh ppo_fsdp_vllm.py --fsdp.strategy HYBRID_SHARD ...                      # slurm, a task a GPU

docs/ppo_fsdp_vllm.md: every equation with its source, every flag group, every metric with its healthy range.
"""

import dataclasses
import fcntl
import functools
import importlib.util
import json
import math
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig

from common import checkpoint
from common.attention import check_packable, packed_kwargs
from common.batching import minibatches, schedule
from common.data import Prompt, Sampler, load_prompts
from common.fused_logprob import linear_logprob
from common.loss import (
    AdaptiveKL,
    explained_variance,
    gae,
    importance_weights,
    kl_penalty,
    policy_loss,
    token_rewards,
    token_weights,
    value_loss,
    whiten,
)
from common.metrics import MetricsLog, Phases, memory_metrics, peak_flops, profiled
from common.offload import Parked, optimizer_tensors, parameter_tensors
from common.reshard import (
    fsdp_buckets,
    keep_hugging_face_classes,
    named_weights,
    push_to_vllm,
    shard_group,
    vllm_push_mode,
    vllm_worker,
)
from common.rewards import Reward, RewardPool, overlong_penalty

EXIT_STOPPED = 85  # after SIGTERM or SIGINT: tells a launcher to start the run again, not that it failed
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------
@dataclass
class OptimArgs:
    lr: float
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.01
    """Decoupled weight decay; norms and biases (tensors of one dimension) are left out."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    warmup_steps: int = 0
    """Training steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; linear and cosine fall to `min_lr_ratio` at the last step."""
    min_lr_ratio: float = 0.0
    """Last learning rate as a fraction of the peak."""
    clip_grad_norm: float = 1.0
    """Gradients are scaled to at most this global norm; 0 is off."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in backward: less memory for about a third more compute."""
    offload: tuple[Literal["params", "optimizer"], ...] = ()
    """What waits in page-locked host memory while this model does not work. Gradients never wait: each update drops them."""


@dataclass
class ActorArgs(OptimArgs):
    model: str = tyro.MISSING
    """Hugging Face causal LM with a chat template: a folder or a hub name. The reference model starts from it too."""
    lr: float = 1e-6
    """Peak learning rate of AdamW."""


@dataclass
class CriticArgs(OptimArgs):
    model: str | None = None
    """Folder or hub name of the critic's trunk; the actor's model if not given. The value head starts at 0."""
    lr: float = 1e-5
    """Peak learning rate of AdamW; critics take about ten times the actor's."""


@dataclass
class DataArgs:
    train: tuple[str, ...] = ()
    """Parquet files in verl's schema (data_source, prompt, reward_model, extra_info); required, but for `replay`."""
    val: tuple[str, ...] = ()
    """Parquet files of held-out prompts; none: no validation."""
    max_prompt_length: int = 512
    """Tokens, chat template included."""
    overlong: Literal["error", "filter", "truncate"] = "error"
    """What becomes of a longer prompt: stop, leave it out, or cut it on the left."""
    shuffle: bool = True
    """Each epoch in an order of its own, drawn from `seed` and the epoch."""


@dataclass
class BatchArgs:
    prompts: int = 256
    """Prompts a step, over all ranks."""
    max_tokens: int = 16384
    """Tokens of one packed micro-batch on one rank: the dial between memory and speed."""


@dataclass
class RolloutArgs:
    samples: int = 1
    """Responses to each prompt."""
    max_response_length: int = 512
    """Tokens; a response cut there is marked as such and has no eos."""
    temperature: float = 1.0
    """Of sampling; it divides the logits in training as well."""
    top_p: float = 1.0
    """Below 1 the engine's log-probs belong to a truncated distribution, and the policy ratio is biased."""
    top_k: int = -1
    """-1 is off. The same warning holds."""
    tensor_parallel_size: int = 1
    """GPUs of one engine; must divide the world size. World size / this many engines share the prompts."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the engine's weights and compute; weights are gathered in it."""
    bucket_mb: int = 512
    """MiB of weights gathered at a time during a sync."""
    gpu_memory_utilization: float = 0.5
    """Share of the GPU that the engine may take while it is awake."""
    check_sync: bool = False
    """After each sync compare engine and trainer on fixed prompts, and stop if they differ by more than precision allows."""
    engine_args: str = "{}"
    """JSON of further arguments of vllm.LLM, such as '{"max_num_seqs": 512, "enforce_eager": true}'."""


@dataclass
class RewardArgs:
    fn: str = "auto"
    """gsm8k, gsm8k_flexible, math, exact, auto (by data_source), or your own as path/to/file.py:name."""
    timeout: float = 10.0
    """Seconds for one answer; one that takes longer scores 0."""
    workers: int = 4
    """Scoring processes on each rank that owns an engine."""
    overlong_buffer: int = 0
    """Responses within this many tokens of the limit lose up to `overlong_factor` (DAPO's soft punishment); 0 is off."""
    overlong_factor: float = 1.0
    """What a response of full length loses."""
    permute: bool = False
    """Control experiment: hand the rewards to random answers of the batch. Nothing should be learnt."""


@dataclass
class PPOArgs:
    minibatch_size: int = 64
    """Prompts (with all their samples) of one optimizer step; must divide batch.prompts."""
    epochs: int = 1
    """Passes over each batch."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """Lambda of generalised advantage estimation."""
    whiten: bool = True
    """Advantages of the global batch are shifted and scaled to mean 0 and variance 1."""
    clip_low: float = 0.2
    """The policy ratio is clipped below at 1 - this."""
    clip_high: float = 0.2
    """And above at 1 + this."""
    dual_clip: float = 3.0
    """For negative advantages the loss is bounded by this times |advantage|; 0 is off."""
    value_clip: float = 0.5
    """The value may move this far from its old one before its loss is clipped; 0 is off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    tis_cap: float = 2.0
    """Truncated importance sampling between engine and trainer: cap of the weight; 0 is off."""
    mask_truncated: bool = False
    """Leave responses cut by length out of both losses: their score says nothing of how they would have ended."""
    critic_warmup: int = 0
    """First steps that train the critic alone."""
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
    """How per-token losses become one number, over the global mini-batch."""


@dataclass
class KLArgs:
    where: Literal["off", "reward", "loss"] = "off"
    """Penalise the KL to the reference model in the reward of each token, in the loss, or not at all."""
    coef: float = 0.001
    """Weight of the penalty."""
    kind: Literal["k1", "k2", "k3", "k3+"] = "k1"
    """Estimator (Schulman 2020); k3+ has k3's value and k2's gradient."""
    target: float | None = None
    """Steer `coef` towards this mean KL per token, in nats (adaptive controller, Ziegler et al. 2019); reward only."""
    horizon: float = 10000.0
    """Sequences over which the controller acts."""
    offload: bool = False
    """The reference waits in host memory while it does not work."""


@dataclass
class FSDPArgs:
    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = "FULL_SHARD"
    """FULL_SHARD frees gathered parameters after forward; SHARD_GRAD_OP keeps them until backward; HYBRID_SHARD shards
    within groups of `shard_size` ranks and replicates over groups; NO_SHARD replicates."""
    shard_size: int = 0
    """Ranks of a HYBRID_SHARD group; 0 is those of one node."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer live on the host for good and travel layer by layer: slow, for big models."""
    forward_prefetch: int = 0
    """Layers gathered ahead in forward beside FSDP2's own overlap."""
    backward_prefetch: int = 0
    """The same in backward."""
    ignored_modules: tuple[str, ...] = ()
    """Names of modules, such as model.norm, whose parameters stay whole on every rank."""
    compile: bool = False
    """torch.compile each decoder layer."""
    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of compute and of the gathered parameters; the sharded master weights are always fp32."""
    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Of the gradients while they are reduced."""
    attention: Literal["packed", "flash_attention_2"] = "packed"
    """packed: torch's varlen attention on CUDA, an exact masked one on the CPU. flash_attention_2 needs flash-attn."""


@dataclass
class ValArgs:
    every: int = 10
    """Steps between validations; 0 is never. The last step is always validated."""
    before_train: bool = True
    """Validate the starting point too."""
    samples: int = 0
    """Beside the greedy answer, this many sampled ones to each prompt, for avg@k and pass@k."""
    temperature: float = 1.0
    """Of those samples."""
    limit: int | None = None
    """At most this many prompts."""


@dataclass
class SaveArgs:
    every: int = 0
    """Steps between checkpoints; 0 is none. With checkpoints, the last step is saved too."""
    keep: int = 2
    """The newest that stay; 0 keeps all."""
    resume: bool = True
    """Go on from the newest complete checkpoint in `out`, if there is one."""
    best: bool = False
    """Never remove the checkpoint of best held-out accuracy; saves at every validation."""
    grace: float = 25.0
    """Seconds from SIGTERM or SIGINT to the kill (torchrun: 30): a save that would take longer is not begun."""
    hf: bool = True
    """At the end write the actor as a Hugging Face folder, out/hf."""


@dataclass
class LogArgs:
    tensorboard: bool = True
    """Event files in out/tensorboard. metrics.jsonl is always written."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (needs the wandb package)."""
    rollouts: bool = False
    """Keep every step's rollouts as out/rollouts/step_*.parquet."""


@dataclass
class ProfileArgs:
    tool: Literal["off", "torch", "torch_memory"] = "off"
    """torch: a Chrome trace of each chosen step; torch_memory: a snapshot of the allocator's history (CUDA)."""
    steps: tuple[int, ...] = (2,)
    """Which steps."""
    save_path: str | None = None
    """Folder; out/profile if not given."""


@dataclass
class Args:
    actor: ActorArgs
    critic: CriticArgs
    data: DataArgs = field(default_factory=DataArgs)
    batch: BatchArgs = field(default_factory=BatchArgs)
    rollout: RolloutArgs = field(default_factory=RolloutArgs)
    reward: RewardArgs = field(default_factory=RewardArgs)
    ppo: PPOArgs = field(default_factory=PPOArgs)
    kl: KLArgs = field(default_factory=KLArgs)
    fsdp: FSDPArgs = field(default_factory=FSDPArgs)
    val: ValArgs = field(default_factory=ValArgs)
    save: SaveArgs = field(default_factory=SaveArgs)
    log: LogArgs = field(default_factory=LogArgs)
    profile: ProfileArgs = field(default_factory=ProfileArgs)
    replay: str | None = None
    """Train from the rollouts kept in this folder (out/rollouts of a run) without an engine."""
    rollout_only: bool = False
    """Generate, score and keep rollouts; train nothing."""
    out: str = "runs/ppo"
    """Folder of the run: metrics, checkpoints, rollouts, the final model."""
    steps: int = 100
    """Training steps in all, those before a resume included."""
    seed: int = 0
    """Of the data order, sampling and mini-batches."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model."""
    timeout: float = 3600.0
    """Seconds that a collective may wait: longer than the slowest generation or reward."""

    def __post_init__(self) -> None:
        """Raises ValueError for what is wrong whatever the model and the world size."""
        for flag, value in {
            "--batch.prompts": self.batch.prompts, "--ppo.minibatch-size": self.ppo.minibatch_size,
            "--ppo.epochs": self.ppo.epochs, "--rollout.samples": self.rollout.samples, "--steps": self.steps,
            "--rollout.max-response-length": self.rollout.max_response_length, "--reward.workers": self.reward.workers,
            "--rollout.tensor-parallel-size": self.rollout.tensor_parallel_size, "--rollout.bucket-mb": self.rollout.bucket_mb,
            "--data.max-prompt-length": self.data.max_prompt_length,
        }.items():
            if value < 1:
                raise ValueError(f"{flag} is {value}; it must be at least 1")
        for flag, number in {
            "--ppo.tis-cap": self.ppo.tis_cap, "--ppo.dual-clip": self.ppo.dual_clip, "--ppo.value-clip": self.ppo.value_clip,
            "--ppo.clip-low": self.ppo.clip_low, "--ppo.clip-high": self.ppo.clip_high, "--kl.coef": self.kl.coef,
            "--actor.clip-grad-norm": self.actor.clip_grad_norm, "--critic.clip-grad-norm": self.critic.clip_grad_norm,
            "--save.every": self.save.every, "--save.keep": self.save.keep, "--val.every": self.val.every,
            "--val.samples": self.val.samples, "--reward.overlong-buffer": self.reward.overlong_buffer,
            "--ppo.critic-warmup": self.ppo.critic_warmup,
        }.items():
            if number < 0:
                raise ValueError(f"{flag} is {number}; it must not be negative (0 is off)")
        if (self.kl.target is not None and self.kl.target <= 0) or self.kl.horizon <= 0:
            raise ValueError("--kl.target and --kl.horizon must be above 0")
        if self.kl.where == "loss" and self.kl.kind == "k1" and self.kl.coef > 0:
            raise ValueError("--kl.where loss with --kl.kind k1 has a gradient of mean 0: choose k2, k3 or k3+")
        if self.val.samples and self.val.temperature <= 0:
            raise ValueError("--val.temperature must be above 0: the greedy answer is measured anyway")
        if self.batch.prompts % self.ppo.minibatch_size:
            raise ValueError(f"--ppo.minibatch-size {self.ppo.minibatch_size} must divide --batch.prompts {self.batch.prompts}")
        longest = self.data.max_prompt_length + self.rollout.max_response_length
        if self.batch.max_tokens < longest:
            raise ValueError(
                f"--batch.max-tokens {self.batch.max_tokens} is less than one sequence: --data.max-prompt-length plus "
                f"--rollout.max-response-length is {longest}"
            )
        if self.rollout.temperature <= 0:
            raise ValueError("--rollout.temperature must be above 0: PPO needs samples (validation is greedy by itself)")
        if not self.data.train and not self.replay:
            raise ValueError("--data.train is missing: name parquet files of prompts (launch/prepare_gsm8k.py makes some)")
        if self.replay and self.rollout_only:
            raise ValueError("--replay and --rollout-only exclude each other: one has no engine, the other no training")
        if self.kl.target is not None and self.kl.where != "reward":
            raise ValueError("--kl.target steers the penalty in the reward: set --kl.where reward")
        if self.reward.overlong_buffer > self.rollout.max_response_length:
            raise ValueError("--reward.overlong-buffer must not exceed --rollout.max-response-length")
        if self.save.best and not (self.save.every and self.val.every and self.data.val):
            raise ValueError("--save.best needs checkpoints and validation: set --save.every, --val.every and --data.val")
        if 0 < self.ppo.dual_clip <= 1:
            raise ValueError(f"--ppo.dual-clip is {self.ppo.dual_clip}; it must be above 1, or 0 for off")
        for flag, wanted, package in (
            ("--log.wandb-project", self.log.wandb_project is not None, "wandb"),
            ("--fsdp.attention flash_attention_2", self.fsdp.attention == "flash_attention_2", "flash_attn"),
        ):
            if wanted and importlib.util.find_spec(package) is None:
                raise ValueError(f"{flag} needs the package {package}, which is not installed")
        try:
            engine_args = json.loads(self.rollout.engine_args)
        except json.JSONDecodeError as e:
            raise ValueError(f"--rollout.engine-args is not JSON: {e}") from e
        if not isinstance(engine_args, dict):
            raise ValueError('--rollout.engine-args must be a JSON object, such as \'{"max_num_seqs": 512}\'')


def check(args: Args, config: PretrainedConfig, world_size: int) -> None:
    """Raises ValueError for what cannot work with this model and this number of ranks, before any weight is read."""
    if config.get_text_config() is not config:
        raise ValueError(f"model type {config.model_type!r} holds a text model among others; this script trains plain text models")
    tp, heads = args.rollout.tensor_parallel_size, config.num_attention_heads
    if world_size % tp:
        raise ValueError(f"--rollout.tensor-parallel-size {tp} must divide the number of ranks, {world_size}")
    if heads % tp:
        raise ValueError(f"--rollout.tensor-parallel-size {tp} must divide the model's {heads} attention heads")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(f"--rollout.tensor-parallel-size {tp} neither divides the model's {kv_heads} key-value heads nor is a multiple")
    if args.batch.prompts < world_size // tp:
        raise ValueError(f"--batch.prompts {args.batch.prompts} is less than the number of engines, {world_size // tp}")
    longest = args.data.max_prompt_length + args.rollout.max_response_length
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"--data.max-prompt-length plus --rollout.max-response-length is {longest}, but the model has positions "
            f"for {config.max_position_embeddings} tokens"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------
class Policy(nn.Module):
    """A causal LM that returns log-probs of chosen tokens. The head runs inside this forward, so that FSDP2's root
    hooks gather its weight and reduce its gradient; the [tokens, vocab] logits are never built."""

    def __init__(self, lm: nn.Module, temperature: float) -> None:
        super().__init__()
        self.lm, self.temperature = lm, temperature

    def forward(self, micro: "Micro", with_entropy: bool = False, own_logits: bool = False) -> tuple[Tensor, Tensor | None]:
        """(log-prob, entropy or None) of micro.targets, each [R] fp32, under the distribution that is sampled from.
        `own_logits`: log-probs from the model's own forward and all its logits, to compare with."""
        if own_logits:
            logp = (self.lm(**micro.inputs).logits[0, micro.predict].float() / self.temperature).log_softmax(-1)
            return logp.gather(1, micro.targets[:, None])[:, 0], None
        hidden = self.lm.get_decoder()(**micro.inputs).last_hidden_state[0]
        head, config = self.lm.get_output_embeddings(), self.lm.config
        return linear_logprob(
            hidden[micro.predict].to(head.weight.dtype), head.weight, micro.targets, bias=head.bias, temperature=self.temperature,
            softcap=getattr(config, "final_logit_softcapping", None),
            scale=getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0),
            with_entropy=with_entropy,
        )


class Critic(nn.Module):
    """The trunk of a causal LM with a scalar head: the value of the state before each response token."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        lm.set_output_embeddings(nn.Identity())
        self.lm, self.head = lm, nn.Linear(lm.config.hidden_size, 1, bias=False)

    def forward(self, micro: "Micro") -> Tensor:
        """[R] fp32."""
        hidden = self.lm.get_decoder()(**micro.inputs).last_hidden_state[0]
        return self.head(hidden[micro.predict].to(self.head.weight.dtype)).float().sum(-1)  # drops the dim of 1, without a view


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device and their buffers on the CPU. Buffers that are in
    no checkpoint (rotary frequencies, embedding scales) thus keep the values that their constructors gave them."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # a tied parameter is registered twice, and stays one
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor in nested containers."""
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


def make_mesh(args: FSDPArgs, world_size: int, local_world_size: int, device_type: str) -> DeviceMesh:
    """The ranks as FSDP2 wants them: one dimension of shards, or replicas by shards. Collective.

    Raises:
        ValueError: the shard size does not divide the world size.
    """
    if args.strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        return init_device_mesh(device_type, (world_size,))
    shards = 1 if args.strategy == "NO_SHARD" else args.shard_size or local_world_size
    if world_size % shards:
        raise ValueError(f"--fsdp.shard-size {shards} must divide the number of ranks, {world_size}")
    return init_device_mesh(device_type, (world_size // shards, shards), mesh_dim_names=("replicate", "shard"))


def build_model(
    kind: Literal["policy", "critic"], folder: str, args: Args, mesh: DeviceMesh, optim: OptimArgs | None
) -> Any:
    """A sharded Policy or Critic with fp32 weights from a Hugging Face folder; each rank reads only its slices. Collective.

    Args:
        optim: None for a model that is not trained.
    Raises:
        ValueError: the attention cannot be packed, or the folder's tensors are not the model's.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=args.trust_remote_code)
    with meta_parameters():
        lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=args.fsdp.attention, trust_remote_code=args.trust_remote_code
        )
        check_packable(config, type(lm))
        model = Policy(lm, args.rollout.temperature) if kind == "policy" else Critic(lm)
    for module in lm.modules():
        if isinstance(module, nn.Dropout):  # the same policy must give the same log-probs
            module.p = 0.0
    if optim is None:
        model.requires_grad_(False)
    elif optim.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # Hugging Face checkpoints activations only in training mode; nothing else differs without dropout

    layers = [m for m in lm.modules() if type(m).__name__ in (lm._no_split_modules or ())]
    if args.fsdp.compile:
        for layer in layers:
            layer.compile()
    known = dict(lm.named_modules())
    unknown = [name for name in args.fsdp.ignored_modules if name not in known]
    if unknown:
        raise ValueError(f"--fsdp.ignored-modules: the model has no module {unknown[0]!r}")
    ignored = {p for name in args.fsdp.ignored_modules for p in known[name].parameters()}
    options: dict[str, Any] = {
        "mesh": mesh, "ignored_params": ignored, "reshard_after_forward": args.fsdp.strategy in ("FULL_SHARD", "HYBRID_SHARD"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[args.fsdp.param_dtype], reduce_dtype=DTYPES[args.fsdp.reduce_dtype]),
    }
    if args.fsdp.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for module in (*layers, model):
        fully_shard(module, **options)
        # Gradients are summed, not averaged, over ranks: every loss is already divided by the global count.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    owners = [m for m in lm.modules() if ignored.intersection(m.parameters(recurse=False))]
    for module in owners:  # they compute in fp32, as their parameters are, whatever their neighbours do
        module.register_forward_pre_hook(lambda _, a, k: cast_floats((a, k), torch.float32), with_kwargs=True)
        module.register_forward_hook(lambda _, __, out: cast_floats(out, DTYPES[args.fsdp.param_dtype]))
    for i, layer in enumerate(layers):
        if args.fsdp.forward_prefetch:
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + args.fsdp.forward_prefetch])
        if args.fsdp.backward_prefetch:
            layer.set_modules_to_backward_prefetch(layers[max(i - args.fsdp.backward_prefetch, 0) : i][::-1])

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu" if args.fsdp.cpu_offload else mesh.device_type)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.to(mesh.device_type)
    if ignored:  # to_empty made new parameters of them, on the host with cpu_offload, and untied
        for module in owners:
            module.to(mesh.device_type)
        if kind == "policy":
            lm.tie_weights()
    read_weights(model, folder)
    if isinstance(model, Critic):
        nn.init.zeros_(model.head.weight)
    elif optim is not None:
        limit = 1e-3 if args.fsdp.param_dtype == "float32" else 0.1
        check_logprobs(model, torch.device(mesh.device_type), limit / min(args.rollout.temperature, 1.0))
    return model


@torch.no_grad()
def check_logprobs(policy: Policy, device: torch.device, limit: float) -> None:
    """Two short sequences, packed, must have the log-probs that the model's own forward gives each by itself,
    within `limit` nats a token (bf16 rounds the logits). Collective.

    Raises:
        ValueError: they have not: the model does something to its logits that Policy does not know, or its layers carry
            state from one packed sequence to the next.
    """
    batch = Batch(
        ids=torch.arange(18) * 7 % policy.lm.config.vocab_size, prompt_lens=torch.tensor([1, 1]), response_lens=torch.tensor([8, 8]),
        rollout_logprobs=torch.zeros(16, device=device), truncated=torch.zeros(2, dtype=torch.bool),
    )
    try:
        got = policy(pack_micro(batch, [0, 1]))[0]
        expected = torch.cat([policy(pack_micro(batch, [i]), own_logits=True)[0] for i in (0, 1)])
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError) as e:
        raise ValueError(f"model type {policy.lm.config.model_type!r} cannot run on packed sequences: {e}") from e
    reshard(policy)
    off = (got - expected).abs().mean().item()
    if not off <= limit:
        raise ValueError(
            f"model type {policy.lm.config.model_type!r}: its own log-probs and those of a packed forward differ by {off:.1e} nats a token "
            f"(limit {limit}): it changes its logits, or mixes sequences, in a way that this script does not know"
        )


@torch.no_grad()
def read_weights(model: "Policy | Critic", folder: str) -> None:
    """Fill the shards of `model.lm` from the safetensors of a folder. Tied weights are one parameter, read once.

    Raises:
        ValueError: a parameter is in no file of the folder, or the folder holds more than the model.
    """
    wanted = dict(named_weights(model.lm))
    reader = HuggingFaceStorageReader(folder)
    stored = reader.read_metadata().state_dict_metadata.keys()
    known = dict(named_weights(model.lm, aliases=True)).keys() | dict(model.lm.named_buffers()).keys()
    missing, extra = sorted(wanted.keys() - stored), sorted(name for name in stored - known if "rotary" not in name)
    if missing:
        raise ValueError(f"the safetensors in {folder} lack {len(missing)} of the model's tensors, such as {missing[0]!r}")
    if extra and isinstance(model, Policy):  # a critic leaves the language-model head unread
        raise ValueError(f"the safetensors in {folder} hold tensors that {type(model.lm).__name__} has no place for, such as {extra[0]!r}")
    dcp.load(wanted, storage_reader=reader)


def make_optimizer(model: nn.Module, args: OptimArgs) -> torch.optim.AdamW:
    """AdamW without decay of norms and biases; one fused kernel for each group, which takes no mixture of sharded parameters
    and those that FSDP ignores."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.requires_grad:
            groups.setdefault((p.dim() > 1, isinstance(p, DTensor)), []).append(p)
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": args.weight_decay if decays else 0.0} for (decays, _), params in groups.items()],
        lr=args.lr, betas=args.betas, fused=True,
    )


def learning_rate(args: OptimArgs, step: int, steps: int) -> float:
    """Of training step `step` (from 1) of `steps`: linear warm-up, then constant, linear or cosine decay."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    progress = (step - args.warmup_steps) / max(steps - args.warmup_steps, 1)
    decay = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[args.schedule]
    return args.lr * (args.min_lr_ratio + (1.0 - args.min_lr_ratio) * decay)


def read_config(folder: str, trust_remote_code: bool, tokenizer: bool = True) -> tuple[PretrainedConfig, Any]:
    """(config, tokenizer or None) of a model that this script can train.

    Raises:
        FileNotFoundError: the folder has no config, tokenizer or safetensors.
        ValueError: the model has code of its own that was not allowed, is no causal LM, or cannot be packed.
    """
    names = os.listdir(folder)
    if "config.json" not in names:
        raise FileNotFoundError(f"{folder} has no config.json: it is not a Hugging Face model")
    if not any(name.endswith(".safetensors") for name in names):
        raise FileNotFoundError(f"{folder} has no safetensors: load it with AutoModelForCausalLM and save it again with save_pretrained")
    if tokenizer and not any(name.startswith("tokenizer") for name in names):
        raise FileNotFoundError(f"{folder} has no tokenizer: save one there with AutoTokenizer.from_pretrained(...).save_pretrained")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        check_packable(config, type(lm))
        return config, AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code) if tokenizer else None
    except ValueError as e:
        if "trust_remote_code" in str(e):
            raise ValueError(f"{folder} comes with Python code of its own: read it, then allow it with --trust-remote-code") from e
        raise ValueError(f"{folder}: {str(e).splitlines()[0]}") from e


def local_folder(model: str, local_rank: int) -> str:
    """A folder with config, tokenizer and safetensors; hub names are downloaded once a node. Collective.

    Raises:
        FileNotFoundError: neither a folder nor a name that the hub (or its cache) knows.
    """
    if os.path.isdir(model):
        return model
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", model):
        raise FileNotFoundError(f"model {model!r}: there is no such folder, and no name on the hub looks like that")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py"]  # code runs only with --trust-remote-code
    folder, error = "", None
    for turn in (0, 1):  # first one rank of each node downloads, then the others find its files in the cache
        if (local_rank == 0) == (turn == 0):
            try:
                folder = snapshot_download(model, allow_patterns=patterns, local_files_only=turn == 1)
            except Exception as e:
                error = e
        dist.barrier()
    if error is not None:
        raise FileNotFoundError(f"model {model!r} is neither a folder nor to be had from the hub: {error}") from error
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# The batch
# ---------------------------------------------------------------------------------------------------------------------
@dataclass
class Batch:
    """All sequences of a step, on every rank the same. Sequence i is prompt i // samples and its response.

    Per-token tensors elsewhere in this file are flat over the response tokens of all sequences, in this order: [R].
    """

    ids: Tensor  # [sum of prompt and response lengths] int64, CPU
    prompt_lens: Tensor  # [N] int64, CPU
    response_lens: Tensor  # [N] int64, CPU
    rollout_logprobs: Tensor  # [R] fp32, device; of the engine
    truncated: Tensor  # [N] bool, CPU; cut by length, without eos

    def __post_init__(self) -> None:
        self.lengths = self.prompt_lens + self.response_lens
        self.id_starts = self.lengths.cumsum(0) - self.lengths
        self.token_starts = self.response_lens.cumsum(0) - self.response_lens
        self.device = self.rollout_logprobs.device

    def prompt(self, i: int) -> Tensor:
        return self.ids[self.id_starts[i] : self.id_starts[i] + self.prompt_lens[i]]

    def response(self, i: int) -> Tensor:
        return self.ids[self.id_starts[i] + self.prompt_lens[i] : self.id_starts[i] + self.lengths[i]]

    def token_index(self, sequences: list[int]) -> Tensor:
        """Where the response tokens of these sequences lie in a flat [R] tensor."""
        return torch.cat([torch.arange(self.response_lens[i]) + self.token_starts[i] for i in sequences])


@dataclass
class Micro:
    """A packed micro-batch: one row of T tokens, R of them response tokens, on the device."""

    inputs: dict[str, Any]  # of the Hugging Face decoder
    predict: Tensor  # [R] int64, places in the row whose output predicts a response token
    targets: Tensor  # [R] int64, those tokens
    token_index: Tensor  # [R] int64, where they lie in the batch's flat [R] tensors


def pack_micro(batch: Batch, sequences: list[int]) -> Micro:
    """Pack sequences of the batch into one row. For an empty list: a row of two tokens without response tokens, which
    takes part in every collective and in no loss."""
    if sequences:
        ids = torch.cat([batch.ids[batch.id_starts[i] : batch.id_starts[i] + batch.lengths[i]] for i in sequences])
        lengths, prompt_lens = batch.lengths[sequences], batch.prompt_lens[sequences]
        token_index = batch.token_index(sequences)
    else:
        ids, lengths, prompt_lens = torch.zeros(2, dtype=torch.int64), torch.tensor([2]), torch.tensor([2])
        token_index = torch.empty(0, dtype=torch.int64)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    positions = torch.arange(len(ids)) - torch.repeat_interleave(starts, lengths)
    in_response = positions >= torch.repeat_interleave(prompt_lens, lengths)
    targets = in_response.nonzero().squeeze(1)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(batch.device, torch.int32)
    return Micro(
        inputs={
            "input_ids": ids.to(batch.device)[None], "position_ids": positions.to(batch.device)[None], "use_cache": False,
            **packed_kwargs(cu_seqlens, int(lengths.max())),
        },
        predict=(targets - 1).to(batch.device), targets=ids[targets].to(batch.device), token_index=token_index.to(batch.device),
    )


def gather_flat(mine: Tensor) -> Tensor:
    """Concatenate the 1-D tensors of all ranks, in rank order, on every rank. Collective."""
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=mine.device)
    sizes[dist.get_rank()] = len(mine)
    dist.all_reduce(sizes)
    padded = mine.new_zeros(len(sizes), int(sizes.max()))
    dist.all_gather_into_tensor(padded.view(-1), torch.cat([mine, mine.new_zeros(padded.shape[1] - len(mine))]))
    return torch.cat([row[:size] for row, size in zip(padded, sizes.tolist(), strict=True)])


def reshard(model: nn.Module) -> None:
    """Without a backward, nothing else frees what SHARD_GRAD_OP and the root keep gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def forward_only(model: nn.Module, batch: Batch, plans: list[list[list[list[int]]]]) -> Tensor:
    """Log-probs of a Policy or values of a Critic of every response token, [R] fp32 on every rank; each rank computes its
    share of each plan. Collective."""
    out = torch.zeros_like(batch.rollout_logprobs)
    for plan in plans:
        for sequences in plan[dist.get_rank()]:
            micro = pack_micro(batch, sequences)
            result = model(micro)
            out[micro.token_index] = result[0] if isinstance(result, tuple) else result
    reshard(model)
    dist.all_reduce(out)  # one rank's number and zeros: exact
    return out


def minibatch_weights(batch: Batch, sequences: list[int], loss_agg: str, mask_truncated: bool) -> dict[str, Tensor]:
    """Of a mini-batch's tokens, zero elsewhere, each [R]: `loss_weights` add up per-token losses to the mini-batch's loss,
    `mean_weights` give means over its tokens. Being global, they make the result independent of how it is split."""
    index, lengths = batch.token_index(sequences), batch.response_lens[sequences]
    mask = ~batch.truncated[sequences] if mask_truncated else None
    out = {}
    for name, mode in (("loss_weights", loss_agg), ("mean_weights", "token-mean")):
        out[name] = torch.zeros_like(batch.rollout_logprobs)
        out[name][index] = token_weights(lengths, mode, mask).to(batch.device)
    return out


def actor_loss(actor: Policy, tokens: dict[str, Tensor], args: Args, micro: Micro) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the mini-batch's policy loss, and of the means to log.

    `tokens` holds the batch's flat [R] tensors. Without old log-probs in it, this is the only update of the batch, and
    the policy's own log-probs are the old ones.
    """
    t = {name: values[micro.token_index] for name, values in tokens.items()}
    logprob, entropy = actor(micro, with_entropy=True)
    old_logprobs = t["old_logprobs"] if "old_logprobs" in t else logprob.detach()
    tis_weights = importance_weights(old_logprobs, t["rollout_logprobs"], args.ppo.tis_cap or math.inf)
    loss, stats = policy_loss(
        logprob, old_logprobs, t["advantages"], args.ppo.clip_low, args.ppo.clip_high, args.ppo.dual_clip or None,
        tis_weights if args.ppo.tis_cap else None,
    )
    if args.ppo.entropy_coef:
        loss = loss - args.ppo.entropy_coef * entropy
    means = {
        "clipfrac": stats["clipped"], "dual_clipfrac": stats["dual_clipped"], "entropy": entropy, "tis_weight": tis_weights,
        "approx_kl": torch.expm1(stats["logratio"]) - stats["logratio"],  # k3, as CleanRL's
        "prob_diff": (old_logprobs.exp() - t["rollout_logprobs"].exp()).abs(),
    }
    if "ref_logprobs" in t:
        means["ref_kl"] = kl_penalty(logprob, t["ref_logprobs"], "k3")
        if args.kl.where == "loss":
            loss = loss + args.kl.coef * kl_penalty(logprob, t["ref_logprobs"], args.kl.kind)
    return (loss * t["loss_weights"]).sum(), {name: (x * t["mean_weights"]).sum() for name, x in means.items()}


def critic_loss(critic: Critic, tokens: dict[str, Tensor], args: Args, micro: Micro) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the mini-batch's value loss, and of the means to log."""
    t = {name: tokens[name][micro.token_index] for name in ("values", "returns", "loss_weights", "mean_weights")}
    loss, clipped = value_loss(critic(micro), t["values"], t["returns"], args.ppo.value_clip or None)
    return (loss * t["loss_weights"]).sum(), {"clipfrac": (clipped * t["mean_weights"]).sum()}


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients to a global L2 norm of at most `max_norm`; returns the norm before. Parameters that FSDP ignores
    are plain tensors: their gradients are summed over ranks here, as FSDP sums the others. Collective."""
    params = [p for p in model.parameters() if p.grad is not None]
    sharded = [p.grad.to_local() for p in params if isinstance(p, DTensor)]
    whole = [p.grad for p in params if not isinstance(p, DTensor)]
    for gradient in whole:
        dist.all_reduce(gradient)
    square = torch.stack(torch._foreach_norm(sharded)).square().sum()
    dist.all_reduce(square, group=shard_group(next(p for p in params if isinstance(p, DTensor))))
    norm = (square + sum(g.square().sum() for g in whole)).sqrt().item()
    torch._foreach_mul_(sharded + whole, min(max_norm / (norm + 1e-6), 1.0))
    return norm


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip_grad_norm: float, batch: Batch, plan: list[list[list[int]]],
    loss_fn: Callable[[Micro], tuple[Tensor, dict[str, Tensor]]],
) -> dict[str, float]:
    """One optimizer step on one mini-batch, micro-batch by micro-batch. Collective.

    Args:
        plan: the mini-batch's micro-batches, by rank. loss_fn: a micro-batch's share of the global loss, and of global
            means to log.
    Returns:
        the loss, the gradient's norm before clipping, and the logged means.
    Raises:
        FloatingPointError: the loss or the norm is not finite; on every rank, before the step.
    """
    sums: dict[str, Tensor] = {}
    for sequences in plan[dist.get_rank()]:
        loss, stats = loss_fn(pack_micro(batch, sequences))
        loss.backward()
        for name, value in (stats | {"loss": loss}).items():
            sums[name] = sums.get(name, 0.0) + value.detach()
    norm = clip_gradients(model, clip_grad_norm or math.inf)
    total = torch.stack(list(sums.values()))
    dist.all_reduce(total)
    result = dict(zip(sums, total.tolist(), strict=True)) | {"grad_norm": norm}
    if not (math.isfinite(result["loss"]) and math.isfinite(result["grad_norm"])):
        raise FloatingPointError(f"loss {result['loss']}, gradient norm {result['grad_norm']}")
    optimizer.step()
    optimizer.zero_grad()
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Rollout
# ---------------------------------------------------------------------------------------------------------------------
def make_engine(args: Args, folder: str, device: torch.device) -> Any:
    """vLLM inside this process, its workers being these ranks."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read at import; keeps the model in this process
    from vllm import LLM

    keep_hugging_face_classes()
    engine_args = dict(
        model=folder, dtype=args.rollout.dtype, skip_tokenizer_init=True, generation_config="vllm",
        max_model_len=args.data.max_prompt_length + args.rollout.max_response_length,
        tensor_parallel_size=args.rollout.tensor_parallel_size, distributed_executor_backend="external_launcher",
        logprobs_mode="processed_logprobs",  # of the distribution sampled from: temperature included
        seed=args.seed + dist.get_rank() // args.rollout.tensor_parallel_size,  # ranks of one engine must draw alike
        trust_remote_code=args.trust_remote_code, disable_log_stats=True,
    )
    if device.type == "cuda":
        engine_args |= dict(enable_sleep_mode=True, gpu_memory_utilization=args.rollout.gpu_memory_utilization)
    return LLM(**(engine_args | json.loads(args.rollout.engine_args)))


def read_generation_config(folder: str, config: PretrainedConfig) -> GenerationConfig:
    """The folder's own, or one made from the model's config."""
    if os.path.exists(os.path.join(folder, "generation_config.json")):
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(config)


def eos_ids(folder: str, config: PretrainedConfig, tokenizer: Any) -> list[int]:
    """Every id that ends a response, wherever the model's folder names it."""
    ids = {tokenizer.eos_token_id}
    for source in (config, read_generation_config(folder, config)):
        eos = source.eos_token_id
        ids.update(eos if isinstance(eos, (list, tuple)) else [eos])
    return sorted(ids - {None})


class Rollout:
    """A vLLM engine for every `tensor_parallel_size` ranks, living in their processes and sharing the prompts."""

    def __init__(self, args: Args, folder: str, config: PretrainedConfig, tokenizer: Any, device: torch.device) -> None:
        tp = args.rollout.tensor_parallel_size
        self.args, self.device = args, device
        self.group, self.groups = dist.get_rank() // tp, dist.get_world_size() // tp
        self.owner = dist.get_rank() % tp == 0  # the engine's first rank speaks for it
        self.llm = make_engine(args, folder, device)
        self.push_mode = vllm_push_mode(self.llm)
        self.awake = True
        # Its sleeping pool still counts as allocated in torch's books.
        self.device_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        self.stop = {"stop_token_ids": eos_ids(folder, config, tokenizer), "max_tokens": args.rollout.max_response_length}

    def share(self, items: list[Any]) -> list[Any]:
        """This engine's contiguous share."""
        return items[len(items) * self.group // self.groups : len(items) * (self.group + 1) // self.groups]

    def generate(self, prompts: list[Prompt], step: int, purpose: int = 0, **sampling: Any) -> list[Any]:
        """Responses of this rank's engine to its share of the prompts, prompt by prompt, as vLLM's CompletionOutput.

        Sampling is a function of (seed, step, engine, purpose): the prefix cache is emptied first (a cached prefix and a
        computed one differ in the last bit), the generators that the engine draws from are seeded, and the trainer's are
        put back after.
        """
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        params = SamplingParams(logprobs=0, flat_logprobs=True, detokenize=False, **self.stop, **sampling)
        requests = [{"prompt_token_ids": p.ids} for p in self.share(prompts)]
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(random.Random(f"{self.args.seed} {step} {self.group} {purpose}").getrandbits(63))
            outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [output for request in outputs for output in request.outputs]

    def collect(self, prompts: list[Prompt], outputs: list[Any]) -> "Batch":
        """Every engine's outputs as one batch on every rank. Collective."""
        told = outputs if self.owner else []

        def gather(values: list[Any], dtype: torch.dtype) -> Tensor:
            return gather_flat(torch.tensor(values, dtype=dtype, device=self.device))

        response_lens = gather([len(o.token_ids) for o in told], torch.int64).cpu()
        responses = gather([t for o in told for t in o.token_ids], torch.int64).cpu().split(response_lens.tolist())
        n = len(responses) // len(prompts)
        return Batch(
            ids=torch.cat([part for i, r in enumerate(responses) for part in (torch.tensor(prompts[i // n].ids), r)]),
            prompt_lens=torch.tensor([len(p.ids) for p in prompts]).repeat_interleave(n),
            response_lens=response_lens,
            rollout_logprobs=gather([x for o in told for x in o.logprobs.logprobs], torch.float32),
            truncated=gather([o.finish_reason == "length" for o in told], torch.uint8).cpu().bool(),
        )

    def push(self, actor: nn.Module) -> dict[str, float]:
        """The actor's weights into the engine, which ends awake. On CUDA the KV cache comes back only after the buckets
        are gone."""
        has_head = hasattr(vllm_worker(self.llm).model_runner.get_model(), "lm_head")  # where weights are tied, some have none
        weights = named_weights(actor.lm, aliases=self.push_mode == "reload_weights" and has_head)
        buckets = fsdp_buckets(weights, DTYPES[self.args.rollout.dtype], self.args.rollout.bucket_mb * 2**20, self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the engine maps its memory past torch's allocator, which would not free any for it
            self.llm.wake_up(tags=["weights"])
        start = time.perf_counter()
        nbytes = push_to_vllm(self.llm, buckets, self.push_mode)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["kv_cache"])
        self.awake = True
        return {"perf/sync_GBps": nbytes / seconds / 1e9}

    def sleep(self) -> None:
        """Give back the memory of weights and KV cache, where there is a device to give it back to."""
        if self.device.type == "cuda" and self.awake:
            self.llm.sleep(level=2)
        self.awake = False


def score(pool: RewardPool | None, tokenizer: Any, prompts: list[Prompt], outputs: list[Any]) -> list[Reward]:
    """Rewards of an engine's outputs to its prompts, computed outside this process; none where another rank owns them."""
    if pool is None or not outputs:  # another rank's answers, or an engine without a share; batch_decode([]) is [""]
        return []
    texts = tokenizer.batch_decode([o.token_ids for o in outputs], skip_special_tokens=True)
    many = [p for p in prompts for _ in range(len(outputs) // len(prompts))]
    return pool.score([
        {"data_source": p.data_source, "answer": text, "ground_truth": p.ground_truth, "extra_info": p.extra_info}
        for p, text in zip(many, texts, strict=True)
    ])


def shape_scores(scores: Tensor, lengths: Tensor, args: Args, step: int) -> Tensor:
    """Scores [N] with the overlong punishment and, in the control experiment, handed to random answers of the batch."""
    if args.reward.overlong_buffer:
        shape = (args.rollout.max_response_length, args.reward.overlong_buffer, args.reward.overlong_factor)
        scores = scores + torch.tensor([overlong_penalty(n, *shape) for n in lengths.tolist()], device=scores.device)
    if args.reward.permute:
        order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(random.Random(f"{args.seed} {step}").getrandbits(63)))
        scores = scores[order.to(scores.device)]
    return scores


def reward_metrics(rewards: list[Reward], count: int) -> tuple[dict[str, float], str | None]:
    """(means over all `count` answers of the numbers that the reward function returned beside the score, and the number of
    answers that raised, hung or returned no number; the first such error). Collective."""
    errors = [r.error for r in rewards if r.error is not None]
    sums: dict[str, float] = {"reward/errors": float(len(errors))}
    for reward in rewards:
        for name, value in reward.metrics.items():
            sums[f"reward/{name}"] = sums.get(f"reward/{name}", 0.0) + value / count
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (sums, errors[:1]))
    names = sorted(set().union(*(s for s, _ in everyone)))
    return {name: sum(s.get(name, 0.0) for s, _ in everyone) for name in names}, next((e[0] for _, e in everyone if e), None)


def seed_everything(seed: int) -> None:
    """After the engine is built: its constructor seeds the same generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def plan_minibatch(batch: Batch, sequences: list[int], world: int, max_tokens: int, hidden_size: int) -> list[list[list[int]]]:
    """Micro-batches of these sequences of the batch, by rank."""
    plan = schedule(batch.lengths[sequences].tolist(), world, max_tokens, hidden_size)
    return [[[sequences[i] for i in micro] for micro in micros] for micros in plan]


def keep_rollouts(path: str, prompts: list[Prompt], batch: Batch, tokenizer: Any, scores: Tensor, tokens: dict[str, Tensor]) -> None:
    """Write a step's sequences as parquet, a row each: ids, texts, reward, and each of `tokens` ([R]) as lists."""
    n, lens = len(batch.lengths) // len(prompts), batch.response_lens.tolist()
    many = range(len(batch.lengths))
    columns: dict[str, Any] = {
        "row": [prompts[i // n].index for i in many],
        "data_source": [prompts[i // n].data_source for i in many],
        "ground_truth": [prompts[i // n].ground_truth for i in many],
        "prompt": [prompts[i // n].text for i in many],
        "response": tokenizer.batch_decode([batch.response(i).tolist() for i in many]),
        "prompt_ids": [batch.prompt(i).tolist() for i in many],
        "response_ids": [batch.response(i).tolist() for i in many],
        "truncated": batch.truncated.tolist(),
        "reward": scores.tolist(),
    }
    for name, values in tokens.items():
        columns[name] = [part.tolist() for part in values.cpu().split(lens)]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    pq.write_table(pa.table(columns), path)


def read_rollouts(path: str, samples: int, device: torch.device) -> tuple[list[Prompt], Batch, Tensor]:
    """(prompts, batch, scores) of a step that `keep_rollouts` wrote; every rank reads it whole.

    Raises:
        ValueError: the rows are not `samples` to a prompt.
    """
    rows = pq.read_table(path).to_pylist()
    if len(rows) % samples or any(rows[i]["row"] != rows[i - i % samples]["row"] for i in range(len(rows))):
        raise ValueError(f"{path} was not made with --rollout.samples {samples}")
    prompts = [Prompt(r["prompt_ids"], r["prompt"], r["data_source"], r["ground_truth"], {}, r["row"]) for r in rows[::samples]]
    batch = Batch(
        ids=torch.tensor([t for r in rows for t in r["prompt_ids"] + r["response_ids"]]),
        prompt_lens=torch.tensor([len(r["prompt_ids"]) for r in rows]),
        response_lens=torch.tensor([len(r["response_ids"]) for r in rows]),
        rollout_logprobs=torch.tensor([x for r in rows for x in r["rollout_logprobs"]], device=device),
        truncated=torch.tensor([r["truncated"] for r in rows]),
    )
    return prompts, batch, torch.tensor([r["reward"] for r in rows], device=device)


def batch_metrics(batch: Batch, scores: Tensor) -> dict[str, float]:
    """What is known of a batch before anything is trained on it."""
    lens = batch.response_lens.float()
    return {
        "reward/mean": scores.mean().item(), "reward/std": scores.std(unbiased=False).item(),
        "length/prompt_mean": batch.prompt_lens.float().mean().item(), "length/response_mean": lens.mean().item(),
        "length/response_max": lens.max().item(), "length/cut_share": batch.truncated.float().mean().item(),
    }


def speed_metrics(
    batch: Batch, config: PretrainedConfig, parameters: int, epochs: int, world: int, metrics: dict[str, float], seconds: float
) -> dict[str, float]:
    """Tokens (of prompts and responses) per second of the whole step, and the actor update's share of the peak bf16 FLOPs
    of the GPUs: 6 FLOPs a parameter and token, and 6 L H s^2 for the causal attention of a sequence of s tokens."""
    tokens = int(batch.lengths.sum())
    out = {"time/step": seconds, "perf/tokens_per_s": tokens / seconds, "perf/tokens_per_s_per_rank": tokens / seconds / world}
    peak = peak_flops()
    if peak and "time/update_actor" in metrics:
        attention = 6 * config.num_hidden_layers * config.hidden_size * int(batch.lengths.square().sum())
        flops = epochs * (6 * parameters * tokens + attention)
        out["perf/mfu_update_actor"] = flops / (metrics["time/update_actor"] * peak * world)
    return out


def validate(
    rollout: Rollout, pool: RewardPool | None, tokenizer: Any, prompts: list[Prompt], args: Args, step: int
) -> dict[str, float]:
    """Greedy accuracy, and avg@k and pass@k of samples, over all held-out prompts and by data source. Collective."""
    of_source: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        of_source.setdefault(prompt.data_source, []).append(i)
    metrics: dict[str, float] = {}
    for n, temperature in ((1, 0.0), (args.val.samples, args.val.temperature)):
        if n == 0:
            continue
        outputs = rollout.generate(prompts, step, purpose=1, n=n, temperature=temperature)
        rewards = score(pool, tokenizer, rollout.share(prompts), outputs)
        scores = gather_flat(torch.tensor([r.score for r in rewards], device=rollout.device)).view(len(prompts), n).cpu()
        values = {"greedy": scores[:, 0]} if temperature == 0 else {f"avg@{n}": scores.mean(1), f"pass@{n}": (scores > 0.5).any(1).float()}
        for name, value in values.items():
            metrics[f"val/{name}"] = value.mean().item()
            metrics |= {f"val/{source}/{name}": value[rows].mean().item() for source, rows in of_source.items()}
    return metrics


def check_sync(rollout: Rollout, actor: Policy, prompts: list[Prompt], args: Args) -> dict[str, float]:
    """Engine and trainer on the same tokens, right after a sync. Collective.

    Raises:
        RuntimeError: mean |log-prob difference| above what two runs of the precision differ by: 1e-4 in fp32 (3e-7 seen), 0.1
            in bf16 (0.04 seen on a 135M model); a tensor that did not arrive makes it several nats.
    """
    batch = rollout.collect(prompts, rollout.generate(prompts, 0, purpose=2, n=1, temperature=args.rollout.temperature))
    plan = plan_minibatch(batch, list(range(len(prompts))), dist.get_world_size(), args.batch.max_tokens, 1)
    difference = (forward_only(actor, batch, [plan]) - batch.rollout_logprobs).abs().mean().item()
    limit = (1e-4 if args.rollout.dtype == args.fsdp.param_dtype == "float32" else 0.1) / min(args.rollout.temperature, 1.0)
    if not difference <= limit:
        raise RuntimeError(f"after a sync by {rollout.push_mode} engine and trainer differ by {difference:.1e} nats a token, above {limit}")
    return {"rollout/sync_logprob_diff": difference}


def console_line(step: int, steps: int, metrics: dict[str, float]) -> str:
    """A step in one line of the terminal."""
    parts = [f"step {step}/{steps}", f"reward {metrics['reward/mean']:.3f}"]
    if "val/greedy" in metrics:
        parts.append(f"held-out {metrics['val/greedy']:.3f}")
    if "actor/ref_kl" in metrics:
        parts.append(f"kl {metrics['actor/ref_kl']:.4f}")
    if "actor/entropy" in metrics:  # not during the critic's warm-up
        parts += [f"entropy {metrics['actor/entropy']:.3f}", f"|Δp| {metrics['actor/prob_diff']:.1e}"]
        if metrics["actor/prob_diff"] > 0.01:
            parts[-1] += " (above 0.01: engine and trainer disagree)"
    parts += [
        f"length {metrics['length/response_mean']:.1f}", f"{metrics['perf/tokens_per_s']:,.0f} tok/s", f"{metrics['time/step']:.2f} s",
    ]
    return " | ".join(parts)


# ---------------------------------------------------------------------------------------------------------------------
# Stopping
# ---------------------------------------------------------------------------------------------------------------------
class Stopped(Exception):
    """Every rank has agreed to stop."""


class StopSignal:
    """SIGTERM and SIGINT only set a flag; ranks agree on it at phase boundaries, where all of them can still save.

    torchrun sends the same SIGTERM to the healthy ranks when a peer has died. Then the agreement itself fails, or is
    killed while it waits, and nothing is saved: a collective save without the peer would never end.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.note)

    def note(self, *_: Any) -> None:
        self.since = self.since or time.monotonic()

    def check(self) -> None:
        """Raises Stopped on every rank if any was told to stop. Collective."""
        told = torch.tensor([self.since is not None], dtype=torch.int32)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        if told.item():
            self.note()
            raise Stopped

    def time_for(self, seconds: float, grace: float) -> bool:
        """All ranks still have `seconds` of their grace. Collective."""
        enough = torch.tensor([time.monotonic() - (self.since or 0.0) + seconds < grace], dtype=torch.int32)
        dist.all_reduce(enough, op=dist.ReduceOp.MIN)
        return bool(enough.item())


def lock_output(folder: str) -> None:
    """Hold `folder` for this run, until the process ends. Rank 0 only.

    Raises:
        ValueError: another run is writing there.
    """
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(os.path.join(folder, ".lock"), os.O_CREAT | os.O_WRONLY)  # an open number: never closed by us
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        raise ValueError(f"another run is writing into {folder}: give this one another --out") from e


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------
def main(args: Args) -> int:
    """Train. Bad input raises before any weight is read where possible; see `cli` for how errors end the run.

    Returns:
        the exit code: 0, or EXIT_STOPPED after a signal.
    """
    rank, world, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=args.timeout))
    mesh = make_mesh(args.fsdp, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)), device.type)
    console: Callable[..., None] = functools.partial(print, flush=True) if rank == 0 else lambda *a: None

    # --- data, and everything that can be wrong before a weight is read
    folder = local_folder(args.actor.model, local_rank)
    critic_folder = local_folder(args.critic.model, local_rank) if args.critic.model else folder
    config, tokenizer = read_config(folder, args.trust_remote_code)
    check(args, config, world)
    if args.critic.model:
        read_config(critic_folder, args.trust_remote_code, tokenizer=False)
    load = functools.partial(load_prompts, tokenizer=tokenizer, max_length=args.data.max_prompt_length, overlong=args.data.overlong)
    train_prompts, dropped = ([], 0) if args.replay else load(args.data.train)
    val_prompts = load(args.data.val, limit=args.val.limit)[0] if args.data.val and not args.replay else []
    sampler: Any = None if args.replay else Sampler(len(train_prompts), args.batch.prompts, args.seed, args.data.shuffle)
    kept = os.path.join(args.replay or args.out, "" if args.replay else "rollouts", "step_{:06d}.parquet")
    checkpoints = os.path.join(args.out, "checkpoints")
    saved = checkpoint.list_steps(checkpoints)
    if saved and not args.save.resume:
        raise ValueError(f"--save.no-resume, but {checkpoints} holds checkpoints of another run: give this one another --out")
    if saved and args.rollout_only:
        raise ValueError(f"--rollout-only in {args.out}, where a training run has checkpoints: give it another --out")
    logged = os.path.join(args.out, "metrics.jsonl")
    begun = os.path.exists(logged) and os.path.getsize(logged) > 0
    if not saved and (os.path.exists(os.path.join(args.out, "hf")) or (begun and not args.save.every)):
        raise ValueError(f"{args.out} holds a run without checkpoints, which cannot go on: give this one another --out")
    first_step = saved[-1] + 1 if saved else 1
    for step in range(first_step, args.steps + 1) if args.replay else ():
        if not os.path.exists(kept.format(step)):
            raise FileNotFoundError(f"--replay: there is no {kept.format(step)}; lower --steps to {step - 1} or keep more rollouts")
    error: Exception | None = None
    if rank == 0:
        try:
            lock_output(args.out)
            with open(os.path.join(args.out, "args.json"), "w") as f:
                json.dump(dataclasses.asdict(args), f, indent=2)
        except (ValueError, OSError) as e:
            error = e
    checkpoint.on_every_rank(error, f"opening {args.out}")
    if args.rollout.top_p < 1 or args.rollout.top_k > 0:
        console("warning: --rollout.top-p or top-k truncates the sampled distribution; policy ratios will be biased")

    # --- the engine first: it measures free memory when it is built
    rollout: Any = None
    pool = None
    if not args.replay:
        try:
            if rank % args.rollout.tensor_parallel_size == 0:  # the rank that speaks for an engine scores its answers
                pool = RewardPool(args.reward.fn, args.reward.workers, args.reward.timeout)
        except ValueError as e:
            error = e
        checkpoint.on_every_rank(error, "starting the reward workers")
        rollout = Rollout(args, folder, config, tokenizer, device)
        if not args.rollout_only:
            rollout.sleep()

    # --- models and optimizers, each on the device only while it works, where that is asked for
    seed_everything(args.seed)
    models: dict[str, Any] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    on_device: dict[str, Any] = {}

    def park(name: str, wanted: bool, tensors: Callable[[Any], list[Tensor]], owner: Any) -> None:
        on_device[name] = Parked(functools.partial(tensors, owner), owner) if wanted else nullcontext()

    if not args.rollout_only:
        models["actor"] = build_model("policy", folder, args, mesh, args.actor)
        models["critic"] = build_model("critic", critic_folder, args, mesh, args.critic)
        for name, optim in (("actor", args.actor), ("critic", args.critic)):
            optimizers[name] = make_optimizer(models[name], optim)
            park(name, "params" in optim.offload, parameter_tensors, models[name])
            park(f"{name}_optimizer", "optimizer" in optim.offload, optimizer_tensors, optimizers[name])
        if args.kl.where != "off":
            models["reference"] = build_model("policy", folder, args, mesh, None)
            park("reference", args.kl.offload, parameter_tensors, models["reference"])
    kl = AdaptiveKL(args.kl.coef, args.kl.target or 1.0, args.kl.horizon)
    best: dict[str, Any] = {"step": -1, "accuracy": -math.inf}

    def state() -> dict[str, Any]:
        """What a checkpoint holds beside small numbers; all of it on the device."""
        out = {}
        for name, optimizer in optimizers.items():
            fresh = not optimizer.state
            out[name], out[f"{name}_optimizer"] = get_state_dict(models[name], optimizer)
            if fresh:  # torch made the state by a step without gradients, and counted it: Adam's bias correction would be off
                for values in optimizer.state.values():
                    values["step"].zero_()
        return out

    @contextmanager
    def everything_on_device() -> Iterator[None]:
        with ExitStack() as stack:
            for name in optimizers:
                stack.enter_context(on_device[name])
                stack.enter_context(on_device[f"{name}_optimizer"])
            yield

    def save(step: int, sampler_state: dict[str, int] | None) -> None:
        with everything_on_device():
            progress = {"sampler": sampler_state, "kl_coef": kl.coef}
            checkpoint.save(checkpoints, step, state(), progress, args.save.keep, best["step"])

    if saved and not args.rollout_only:
        with everything_on_device():
            loaded = state()
            progress = checkpoint.load(checkpoint.step_folder(checkpoints, saved[-1]), loaded)
            for name, optimizer in optimizers.items():
                flags = [{key: group[key] for key in ("betas", "weight_decay")} for group in optimizer.param_groups]
                set_state_dict(models[name], optimizer, model_state_dict=loaded[name], optim_state_dict=loaded[f"{name}_optimizer"])
                for group, wanted in zip(optimizer.param_groups, flags, strict=True):
                    group.update(wanted)  # this start's flags hold, not the ones that were saved
        if sampler is not None:
            sampler.load_state_dict(progress["sampler"])
        if args.kl.target is not None:
            kl.coef = progress["kl_coef"]
        best = checkpoint.read_best(checkpoints) or best
        console(f"resumed from step {saved[-1]} in {checkpoints}")
    log = MetricsLog(args.out, rank == 0, args.log.tensorboard, args.log.wandb_project, dataclasses.asdict(args), first_step - 1)
    phase = Phases(device)

    def push() -> dict[str, float]:
        with phase("sync"), on_device["actor"]:
            metrics = rollout.push(models["actor"])
            if args.rollout.check_sync:
                metrics |= check_sync(rollout, models["actor"], train_prompts[:16], args)
        return metrics

    if rollout is not None and models:
        push()
    how = f"{rollout.groups} engine(s) of {args.rollout.tensor_parallel_size}, sync by {rollout.push_mode}" if rollout else "no engine"
    size = sum(p.numel() for p in models["actor"].parameters()) if models else 0
    console(f"{world} rank(s) on {device.type}, {how}, {size / 1e6:.1f}M parameters, {len(train_prompts)} prompts ({dropped} dropped), "
            f"{len(val_prompts)} held out")
    stop = StopSignal()
    if first_step == 1 and args.val.before_train and val_prompts:
        with phase("validate"):
            before = validate(rollout, pool, tokenizer, val_prompts, args, 0)
        log.log(0, before)
        console(f"step 0/{args.steps} | held-out {before['val/greedy']:.3f} before training")

    done, sampler_state = first_step - 1, sampler.state_dict() if sampler else None  # what is true of the weights just now
    save_seconds = 0.0
    try:
        for step in range(first_step, args.steps + 1):
            stop.check()
            tool = args.profile.tool if step in args.profile.steps else "off"
            with profiled(tool, args.profile.save_path or os.path.join(args.out, "profile"), step):
                start = time.perf_counter()
                phase.take()
                metrics: dict[str, float] = {}

                # --- generate: each engine answers its share of the prompts; then every rank gets the whole batch.
                # Rewards are given once, by the owner of each answer, and shared.
                if args.replay:
                    prompts, batch, scores = read_rollouts(kept.format(step), args.rollout.samples, device)
                else:
                    prompts = [train_prompts[i] for i in sampler.next_batch()]
                    with phase("generate"):
                        outputs = rollout.generate(
                            prompts, step, n=args.rollout.samples, temperature=args.rollout.temperature,
                            top_p=args.rollout.top_p, top_k=args.rollout.top_k,
                        )
                        if models:
                            rollout.sleep()
                        batch = rollout.collect(prompts, outputs)
                    stop.check()
                    with phase("reward"):
                        rewards = score(pool, tokenizer, rollout.share(prompts), outputs)
                        scores = gather_flat(torch.tensor([r.score for r in rewards], device=device))
                        more, failure = reward_metrics(rewards, len(scores))
                        metrics |= more
                        if failure is not None:
                            console(f"warning: {more['reward/errors']:.0f} of {len(scores)} answers could not be scored: {failure}")
                        scores = shape_scores(scores, batch.response_lens, args, step)
                lengths = batch.response_lens.to(device)
                metrics |= batch_metrics(batch, scores)
                tokens = {"rollout_logprobs": batch.rollout_logprobs}  # and every other number that a response token has
                if args.rollout_only:
                    if rank == 0:
                        keep_rollouts(kept.format(step), prompts, batch, tokenizer, scores, tokens)
                    log.log(step, metrics | phase.take())
                    console(f"step {step}/{args.steps} | reward {metrics['reward/mean']:.3f}")
                    continue

                # --- the schedule: every epoch's mini-batches, packed and balanced over ranks; the same on every rank
                rng = random.Random(f"{args.seed} {step}")
                updates = [
                    (sequences, plan_minibatch(batch, sequences, world, args.batch.max_tokens, config.hidden_size))
                    for _ in range(args.ppo.epochs)
                    for sequences in minibatches(len(prompts), args.rollout.samples, args.ppo.minibatch_size, rng)
                ]
                first_epoch = [plan for _, plan in updates[: len(updates) // args.ppo.epochs]]

                # --- old and reference log-probs and values, on the very micro-batches of the first epoch: with nothing
                # updated yet the ratio is then exactly 1. A batch that gets one update needs no old log-probs: they are
                # the update's own.
                if len(updates) > 1 or args.kl.where == "reward":
                    with phase("old_logprob"), on_device["actor"]:
                        tokens["old_logprobs"] = forward_only(models["actor"], batch, first_epoch)
                if "reference" in models:
                    with phase("ref_logprob"), on_device["reference"]:
                        tokens["ref_logprobs"] = forward_only(models["reference"], batch, first_epoch)
                with phase("values"), on_device["critic"]:
                    tokens["values"] = forward_only(models["critic"], batch, first_epoch)
                stop.check()

                # --- advantages, of the whole batch on every rank
                with phase("advantages"):
                    rewards_per_token = token_rewards(scores, lengths)
                    if args.kl.where == "reward":
                        penalty = kl_penalty(tokens["old_logprobs"], tokens["ref_logprobs"], args.kl.kind)
                        rewards_per_token -= kl.coef * penalty
                        if args.kl.target is not None:
                            kl.update(penalty.mean().item(), len(scores))
                    advantages, tokens["returns"] = gae(rewards_per_token, tokens["values"], lengths, args.ppo.gamma, args.ppo.lam)
                    counted = ~batch.truncated.to(device).repeat_interleave(lengths) if args.ppo.mask_truncated else None
                    tokens["advantages"] = whiten(advantages, counted) if args.ppo.whiten else advantages

                # --- update the critic, then the actor
                for name, loss, optim in (("critic", critic_loss, args.critic), ("actor", actor_loss, args.actor)):
                    if name == "actor" and step <= args.ppo.critic_warmup:
                        continue
                    model, optimizer, stats = models[name], optimizers[name], []
                    for param_group in optimizer.param_groups:
                        param_group["lr"] = learning_rate(optim, step, args.steps)
                    with phase(f"update_{name}"), on_device[name], on_device[f"{name}_optimizer"]:
                        for sequences, plan in updates:
                            tokens |= minibatch_weights(batch, sequences, args.ppo.loss_agg, args.ppo.mask_truncated)
                            try:
                                stats.append(update(
                                    model, optimizer, optim.clip_grad_norm, batch, plan,
                                    functools.partial(loss, model, tokens, args),
                                ))
                            except FloatingPointError as e:
                                bad = os.path.join(args.out, f"failed_step_{step:06d}.parquet")
                                if rank == 0:
                                    keep_rollouts(bad, prompts, batch, tokenizer, scores, tokens)
                                raise FloatingPointError(f"step {step}, {name}, update {len(stats) + 1}: {e}; batch kept in {bad}") from e
                    metrics |= {f"{name}/{key}": sum(s[key] for s in stats) / len(stats) for key in stats[0]}
                    metrics[f"{name}/lr"] = optimizer.param_groups[0]["lr"]
                done, sampler_state = step, sampler.state_dict() if sampler else None

                # --- save while the training state is whole; then the new weights go to the engine
                last = step == args.steps
                validating = bool(val_prompts) and (last or (args.val.every > 0 and step % args.val.every == 0))
                if args.save.every and (step % args.save.every == 0 or last or (args.save.best and validating)):
                    with phase("save"):
                        save(step, sampler_state)
                    save_seconds = phase.seconds["save"]
                if rollout is not None:
                    metrics |= push()
                if validating:
                    with phase("validate"):
                        metrics |= validate(rollout, pool, tokenizer, val_prompts, args, step)
                    if args.save.best and metrics["val/greedy"] > best["accuracy"]:
                        best = {"step": step, "accuracy": metrics["val/greedy"]}
                        checkpoint.note_best(checkpoints, best)

                # --- log
                metrics |= {
                    "critic/explained_variance": explained_variance(tokens["values"], tokens["returns"], counted).item(),
                    "critic/value_mean": tokens["values"].mean().item(), "advantage/std": advantages.std().item(), "kl/coef": kl.coef,
                }
                if args.log.rollouts and rank == 0:
                    kept_tokens = {name: x for name, x in tokens.items() if not name.endswith("_weights")}
                    keep_rollouts(kept.format(step), prompts, batch, tokenizer, scores, kept_tokens)
                metrics |= phase.take() | memory_metrics(device, rollout.device_bytes if rollout else 0)
                metrics |= speed_metrics(batch, config, size, args.ppo.epochs, world, metrics, time.perf_counter() - start)
                log.log(step, metrics)
                console(console_line(step, args.steps, metrics))
    except Stopped:
        worth = args.save.every > 0 and done > 0 and done not in checkpoint.list_steps(checkpoints) and bool(models)
        if rollout is not None and models:
            rollout.sleep()  # its memory may be what the training state came from
        if worth and stop.time_for(2 * save_seconds + 1, args.save.grace):
            save(done, sampler_state)
        console(f"stopped by a signal after step {done}; complete checkpoints: {checkpoint.list_steps(checkpoints) or 'none'}")
        code = EXIT_STOPPED
    else:
        code = 0
        if args.save.hf and models:
            if rollout is not None:
                rollout.sleep()
            with on_device["actor"]:
                dtype = config.dtype = DTYPES[args.rollout.dtype]
                buckets = fsdp_buckets(named_weights(models["actor"].lm), dtype, args.rollout.bucket_mb * 2**20, device)
                generation = read_generation_config(folder, config)
                generation.eos_token_id = eos_ids(folder, config, tokenizer)  # so that it stops where it was trained to
                checkpoint.export_hf(os.path.join(args.out, "hf"), buckets, config, tokenizer, generation)
    log.close()
    if pool is not None:
        pool.close()
    dist.barrier()
    if rollout is not None:
        rollout.llm.llm_engine.engine_core.shutdown()  # before the groups that it uses are gone
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def cli(default: Args | None = None) -> None:
    """Parse flags over `default` (a recipe's) and train. An error ends every rank with a non-zero code: bad input with one
    line, anything else with its traceback. Other ranks wait a moment before they speak, so that a line that all would say
    comes once, from rank 0, before torchrun ends the rest."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        parse = functools.partial(tyro.cli, Args, description=__doc__)
        with open(os.devnull, "w") as null, ExitStack() as quiet:
            if rank:  # every rank finds the same wrong flag; one says so
                quiet.enter_context(redirect_stdout(null))
                quiet.enter_context(redirect_stderr(null))
            args = parse(default=default) if default is not None else parse()
        if "RANK" not in os.environ:
            raise ValueError("start this script with torchrun, for instance: torchrun --nproc-per-node 1 ppo_fsdp_vllm.py ...")
        code = main(args)
    except (Exception, SystemExit) as e:
        if rank:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's, once rank 0 has spoken and ended
            time.sleep(5)
            if isinstance(e, checkpoint.RankError):  # which rank 0 has raised as well
                os._exit(1)
        if isinstance(e, SystemExit):  # tyro has printed what is wrong with a flag, or the help
            raise
        if not isinstance(e, (ValueError, OSError, FloatingPointError, checkpoint.RankError)):
            traceback.print_exc()
        # One write, on a line of its own, whatever half lines other ranks have left.
        sys.stderr.write(f"\nerror: {e}\n")
        sys.stderr.flush()
        os._exit(1)  # not sys.exit: destructors of a half-built engine may wait for peers that are gone
    sys.exit(code)


if __name__ == "__main__":
    cli()
