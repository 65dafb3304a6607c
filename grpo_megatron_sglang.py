"""GRPO on Megatron-Core (training: tensor, pipeline, expert, context and data parallel) and SGLang (generation), without Ray.

One step, in the order of `main`:

    generate, until enough groups differ in reward -> reward -> old/reference log-probs -> group advantages -> update
             -> save -> push the weights into SGLang -> validate

Every rank trains. The first of every `--rollout.tensor-parallel-size` consecutive ranks also owns an engine, whose own processes
live on those ranks' GPUs; the layouts of training and of rollout have nothing to do with each other. Each rank sees the whole
batch as flat tensors and computes the same advantages and the same schedule; there is no controller process.

Left out on purpose: LoRA, reward models on the GPU, multi-turn rollouts, off-policy pipelining, images, multi-token prediction.

Launch:
    bash launch/quickstart.sh grpo                                     # a laptop CPU: sets up, makes a tiny model, trains it
    torchrun --standalone --nproc-per-node 1 grpo_megatron_sglang.py --actor.model Qwen/Qwen2.5-0.5B-Instruct \
        --data.train gsm8k/train.parquet --data.val gsm8k/test.parquet --out runs/gsm8k                     # 1 GPU
    torchrun --standalone --nproc-per-node 8 grpo_megatron_sglang.py --megatron.tensor-parallel-size 2 \
        --megatron.pipeline-parallel-size 2 --rollout.tensor-parallel-size 2 ...                            # 8 GPUs
    sbatch --nodes 2 launch/slurm.sh grpo_megatron_sglang.py --megatron.expert-parallel-size 8 ...         # slurm, a task a GPU

docs/grpo_megatron_sglang.md: every equation with its source, every flag group, every metric with its healthy range.
"""

import atexit
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
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, redirect_stderr, redirect_stdout
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
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig

from common import checkpoint
from common.attention import context_parallel_index
from common.batching import minibatches, schedule
from common.data import Prompt, Sampler, load_prompts
from common.fused_logprob import linear_logprob
from common.loss import group_advantages, importance_weights, kl_penalty, policy_loss, sequence_means, token_weights
from common.megatron_hf import TRANSFORMER_ENGINE, build_model, head_weight, load_hf, transformer_config
from common.megatron_reshard import megatron_buckets, megatron_plan
from common.megatron_state import MegatronState
from common.metrics import MetricsLog, Phases, memory_metrics, peak_flops, profiled
from common.reshard import SyncError, empty_prefix_cache, push_to_sglang, tensor_names
from common.rewards import Reward, RewardPool, overlong_penalty
from common.sglang_engine import start_engine

EXIT_STOPPED = 85  # after SIGTERM or SIGINT: tells a launcher to start the run again, not that it failed
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What an update logs, by name: only the last stage of a pipeline computes it, and all ranks add it up.
MEANS = ("loss", "clipfrac", "dual_clipfrac", "entropy", "is_weight", "approx_kl", "prob_diff", "ref_kl")


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------
@dataclass
class ActorArgs:
    model: str = tyro.MISSING
    """Hugging Face causal LM with a chat template: a folder or a hub name. The reference model starts from it too."""
    checkpoint: str | None = None
    """Start from the weights in this checkpoint of another run, out/checkpoints/step_N, of whatever parallel layout. Config and
    tokenizer come from `model` all the same, and so does the reference."""
    lr: float = 1e-6
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
    prompts: int = 128
    """Prompts (groups) a step, over all ranks."""
    max_tokens: int = 16384
    """Tokens of one packed micro-batch on one rank: the dial between memory and speed. A context-parallel group takes this many a
    rank, so a sequence may be that many times longer."""


@dataclass
class RolloutArgs:
    samples: int = 8
    """Responses to each prompt: the size of a group."""
    max_response_length: int = 512
    """Tokens; a response cut there is marked as such and has no eos."""
    temperature: float = 1.0
    """Of sampling; it divides the logits in training as well."""
    top_p: float = 1.0
    """Below 1 the engine samples from a truncated distribution but gives log-probs of the whole one: a bias that no metric shows."""
    top_k: int = -1
    """-1 is off. The same warning holds."""
    tensor_parallel_size: int = 1
    """GPUs of one engine, whatever the layout of training; must divide the world size. World size / this many engines share the
    prompts."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the engine's weights and compute; weights are gathered in it."""
    bucket_mb: int = 512
    """MiB of weights gathered at a time during a sync."""
    gpu_memory_utilization: float = 0.5
    """Share of the GPU that the engine may take while it is awake (SGLang's mem_fraction_static)."""
    check_sync: bool = False
    """After each sync compare engine and trainer on fixed prompts, and stop if they differ by more than precision allows."""
    engine_args: str = "{}"
    """JSON of further arguments of sglang.Engine, such as '{"attention_backend": "flashinfer", "max_running_requests": 512}'."""


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
class GRPOArgs:
    minibatch_size: int = 64
    """Prompts (with all their samples) of one optimizer step; must divide batch.prompts."""
    epochs: int = 1
    """Passes over each batch."""
    normalise_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards; Dr.GRPO does not."""
    drop_zero_variance: bool = False
    """Leave groups whose answers all scored alike out of the loss and its denominator: their advantage is 0, but they count."""
    dynamic_sampling: bool = False
    """Replace such groups: generate until `batch.prompts` groups differ in reward (DAPO)."""
    max_generations: int = 10
    """Generations of one step under dynamic sampling; if groups still lack after them, the run stops."""
    ratio: Literal["token", "sequence"] = "token"
    """The policy ratio of each token, or one of the whole response (GSPO; clip it at 3e-4 and 4e-4)."""
    objective: Literal["clip", "cispo"] = "clip"
    """PPO's clipped surrogate, or CISPO: the clipped ratio weighs a policy gradient that every token keeps."""
    clip_low: float = 0.2
    """The policy ratio is clipped below at 1 - this."""
    clip_high: float = 0.2
    """And above at 1 + this; DAPO's clip-higher is 0.28."""
    dual_clip: float = 3.0
    """For negative advantages the loss is bounded by this times |advantage|; 0 is off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    mismatch: Literal["off", "truncate", "mask"] = "truncate"
    """Importance sampling between engine and trainer: weights truncated at `tis_cap` (TIS), or set to 0 outside of
    [`tis_floor`, `tis_cap`] (IcePop)."""
    tis_cap: float = 2.0
    """Largest weight."""
    tis_floor: float = 0.5
    """Least weight; of `mask` only."""
    mask_truncated: bool = False
    """Leave responses cut by length out of the loss: their score says nothing of how they would have ended."""
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = "token-mean"
    """How per-token losses become one number, over the global mini-batch; -norm divides by the constant maximal length (Dr.GRPO)."""


@dataclass
class KLArgs:
    coef: float = 0.0
    """Weight of the KL to the reference model in the loss; 0 is off, and no reference model is kept."""
    kind: Literal["k2", "k3", "k3+"] = "k3"
    """Estimator (Schulman 2020); k3+ has k3's value and k2's gradient, which is unbiased."""


@dataclass
class MegatronArgs:
    tensor_parallel_size: int = 1
    """Ranks that share each matrix."""
    sequence_parallel: bool = True
    """With tensor parallelism also share what lies between the matrices, by tokens."""
    pipeline_parallel_size: int = 1
    """Ranks that share the layers."""
    virtual_pipeline_size: int = 1
    """Chunks of layers on each pipeline rank (interleaved schedule): a smaller bubble for more messages."""
    context_parallel_size: int = 1
    """Ranks that share each sequence."""
    expert_parallel_size: int = 1
    """Ranks that share the experts."""
    expert_tensor_parallel_size: int = 0
    """Ranks that share each expert's matrices; 0 is `tensor_parallel_size` without expert parallelism, and 1 with it."""
    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of compute and of the weights that compute; the optimizer's master weights and the gradients are always fp32."""
    recompute: Literal["off", "selective", "full"] = "off"
    """Activations computed again in backward: none, those inside attention, or whole layers."""
    moe_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts (Switch Transformer)."""
    param_offload: bool = False
    """Weights wait in page-locked host memory but from the log-probs to the update, and while they are sent or saved."""
    grad_offload: bool = False
    """The gradient buffers' memory is given back outside of updates. They hold nothing then."""
    optimizer_offload: bool = False
    """Master weights and Adam's moments wait in page-locked host memory outside of updates."""


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
    data: DataArgs = field(default_factory=DataArgs)
    batch: BatchArgs = field(default_factory=BatchArgs)
    rollout: RolloutArgs = field(default_factory=RolloutArgs)
    reward: RewardArgs = field(default_factory=RewardArgs)
    grpo: GRPOArgs = field(default_factory=GRPOArgs)
    kl: KLArgs = field(default_factory=KLArgs)
    megatron: MegatronArgs = field(default_factory=MegatronArgs)
    val: ValArgs = field(default_factory=ValArgs)
    save: SaveArgs = field(default_factory=SaveArgs)
    log: LogArgs = field(default_factory=LogArgs)
    profile: ProfileArgs = field(default_factory=ProfileArgs)
    replay: str | None = None
    """Train from the rollouts kept in this folder (out/rollouts of a run) without an engine."""
    rollout_only: bool = False
    """Generate, score and keep rollouts; train nothing."""
    out: str = "runs/grpo"
    """Folder of the run: metrics, checkpoints, rollouts, the final model."""
    steps: int = 100
    """Training steps in all, those before a resume included."""
    seed: int = 0
    """Of the data order, sampling and mini-batches."""
    timeout: float = 3600.0
    """Seconds that a collective may wait: longer than the slowest generation or reward."""

    def __post_init__(self) -> None:
        """Raises ValueError for what is wrong whatever the model and the world size."""
        for flag, value in {
            "--batch.prompts": self.batch.prompts, "--grpo.minibatch-size": self.grpo.minibatch_size,
            "--grpo.epochs": self.grpo.epochs, "--grpo.max-generations": self.grpo.max_generations,
            "--rollout.samples": self.rollout.samples, "--steps": self.steps,
            "--rollout.max-response-length": self.rollout.max_response_length, "--reward.workers": self.reward.workers,
            "--rollout.tensor-parallel-size": self.rollout.tensor_parallel_size, "--rollout.bucket-mb": self.rollout.bucket_mb,
            "--data.max-prompt-length": self.data.max_prompt_length,
            "--megatron.tensor-parallel-size": self.megatron.tensor_parallel_size,
            "--megatron.pipeline-parallel-size": self.megatron.pipeline_parallel_size,
            "--megatron.virtual-pipeline-size": self.megatron.virtual_pipeline_size,
            "--megatron.context-parallel-size": self.megatron.context_parallel_size,
            "--megatron.expert-parallel-size": self.megatron.expert_parallel_size,
        }.items():
            if value < 1:
                raise ValueError(f"{flag} is {value}; it must be at least 1")
        for flag, number in {
            "--grpo.dual-clip": self.grpo.dual_clip, "--grpo.clip-low": self.grpo.clip_low, "--grpo.clip-high": self.grpo.clip_high,
            "--grpo.tis-floor": self.grpo.tis_floor, "--kl.coef": self.kl.coef, "--actor.clip-grad-norm": self.actor.clip_grad_norm,
            "--save.every": self.save.every, "--save.keep": self.save.keep, "--val.every": self.val.every,
            "--val.samples": self.val.samples, "--reward.overlong-buffer": self.reward.overlong_buffer,
            "--megatron.expert-tensor-parallel-size": self.megatron.expert_tensor_parallel_size,
            "--megatron.moe-aux-loss-coef": self.megatron.moe_aux_loss_coef,
        }.items():
            if number < 0:
                raise ValueError(f"{flag} is {number}; it must not be negative (0 is off)")
        if self.rollout.samples == 1:
            raise ValueError("--rollout.samples is 1: a group of one answer has nothing to be compared with")
        if self.grpo.tis_cap <= self.grpo.tis_floor:
            raise ValueError("--grpo.tis-cap must be above --grpo.tis-floor")
        if 0 < self.grpo.dual_clip <= 1:
            raise ValueError(f"--grpo.dual-clip is {self.grpo.dual_clip}; it must be above 1, or 0 for off")
        if self.grpo.dynamic_sampling and self.reward.permute:
            raise ValueError("--grpo.dynamic-sampling picks groups by their rewards, which --reward.permute takes away: use one of them")
        if self.val.samples and self.val.temperature <= 0:
            raise ValueError("--val.temperature must be above 0: the greedy answer is measured anyway")
        if self.batch.prompts % self.grpo.minibatch_size:
            raise ValueError(f"--grpo.minibatch-size {self.grpo.minibatch_size} must divide --batch.prompts {self.batch.prompts}")
        if self.megatron.virtual_pipeline_size > 1 and self.megatron.pipeline_parallel_size == 1:
            raise ValueError("--megatron.virtual-pipeline-size needs --megatron.pipeline-parallel-size of 2 or more")
        if self.rollout.temperature <= 0:
            raise ValueError("--rollout.temperature must be above 0: GRPO needs samples (validation is greedy by itself)")
        if not self.data.train and not self.replay:
            raise ValueError("--data.train is missing: name parquet files of prompts (launch/prepare_gsm8k.py makes some)")
        if self.replay and self.rollout_only:
            raise ValueError("--replay and --rollout-only exclude each other: one has no engine, the other no training")
        if self.reward.overlong_buffer > self.rollout.max_response_length:
            raise ValueError("--reward.overlong-buffer must not exceed --rollout.max-response-length")
        if self.save.best and not (self.save.every and self.val.every and self.data.val):
            raise ValueError("--save.best needs checkpoints and validation: set --save.every, --val.every and --data.val")
        if self.log.wandb_project is not None and importlib.util.find_spec("wandb") is None:
            raise ValueError("--log.wandb-project needs the package wandb, which is not installed")
        try:
            engine_args = json.loads(self.rollout.engine_args)
        except json.JSONDecodeError as e:
            raise ValueError(f"--rollout.engine-args is not JSON: {e}") from e
        if not isinstance(engine_args, dict):
            raise ValueError('--rollout.engine-args must be a JSON object, such as \'{"max_running_requests": 512}\'')


def expert_tensor_parallel_size(args: MegatronArgs) -> int:
    """Without expert parallelism, experts that are split over fewer ranks than the other matrices get wrong gradients in megatron-core
    0.16.1; `check` refuses it."""
    return args.expert_tensor_parallel_size or (args.tensor_parallel_size if args.expert_parallel_size == 1 else 1)


def check(args: Args, config: PretrainedConfig, world_size: int) -> None:
    """Raises ValueError for what cannot work with this model and this number of ranks, before any weight is read."""
    m, heads = args.megatron, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    for flag, tp in (("--rollout", args.rollout.tensor_parallel_size), ("--megatron", m.tensor_parallel_size)):
        if heads % tp:
            raise ValueError(f"{flag}.tensor-parallel-size {tp} must divide the model's {heads} attention heads")
        if kv_heads % tp and (flag == "--megatron" or tp % kv_heads):
            raise ValueError(f"{flag}.tensor-parallel-size {tp} must divide the model's {kv_heads} key-value heads")
    if world_size % args.rollout.tensor_parallel_size:
        raise ValueError(f"--rollout.tensor-parallel-size {args.rollout.tensor_parallel_size} must divide the {world_size} ranks")
    for flags, size in {
        "tensor, pipeline and context": m.tensor_parallel_size * m.pipeline_parallel_size * m.context_parallel_size,
        "expert, expert-tensor and pipeline": m.expert_parallel_size * expert_tensor_parallel_size(m) * m.pipeline_parallel_size,
    }.items():
        if world_size % size:
            raise ValueError(f"the product of --megatron's {flags} parallel sizes, {size}, must divide the number of ranks, {world_size}")
    chunks = m.pipeline_parallel_size * m.virtual_pipeline_size
    if config.num_hidden_layers % chunks:
        raise ValueError(f"--megatron's pipeline of {chunks} chunks must divide the model's {config.num_hidden_layers} layers")
    if m.expert_parallel_size == 1 and expert_tensor_parallel_size(m) != m.tensor_parallel_size:
        raise ValueError(
            f"--megatron.expert-tensor-parallel-size {m.expert_tensor_parallel_size} beside --megatron.tensor-parallel-size "
            f"{m.tensor_parallel_size} needs expert parallelism: leave it at 0"
        )
    experts = getattr(config, "num_experts", None)
    width = config.moe_intermediate_size if experts else config.intermediate_size
    if width % (expert_tensor_parallel_size(m) if experts else m.tensor_parallel_size):
        raise ValueError(f"--megatron.{'expert-' if experts else ''}tensor-parallel-size must divide the model's MLP width, {width}")
    if m.expert_parallel_size > 1 and not experts:
        raise ValueError(f"--megatron.expert-parallel-size {m.expert_parallel_size}, but a {config.model_type} has no experts")
    if experts and experts % m.expert_parallel_size:
        raise ValueError(f"--megatron.expert-parallel-size {m.expert_parallel_size} must divide the model's {experts} experts")
    if m.expert_parallel_size > 1 and m.tensor_parallel_size > 1 and not m.sequence_parallel:
        raise ValueError("--megatron.expert-parallel-size beside tensor parallelism needs --megatron.sequence-parallel")
    if args.batch.prompts < world_size // args.rollout.tensor_parallel_size:
        raise ValueError(f"--batch.prompts {args.batch.prompts} is less than the number of engines, "
                         f"{world_size // args.rollout.tensor_parallel_size}")
    longest = args.data.max_prompt_length + args.rollout.max_response_length
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"--data.max-prompt-length plus --rollout.max-response-length is {longest}, but the model has positions "
            f"for {config.max_position_embeddings} tokens"
        )
    align = sequence_alignment(m)
    if args.batch.max_tokens * m.context_parallel_size < -(-longest // align) * align:
        raise ValueError(
            f"--batch.max-tokens {args.batch.max_tokens} is too little for one sequence: --data.max-prompt-length plus "
            f"--rollout.max-response-length is {longest}, padded to a multiple of {align} and shared by {m.context_parallel_size} rank(s)"
        )


def sequence_alignment(args: MegatronArgs) -> int:
    """Each packed sequence is padded to a multiple of this: two chunks for every context-parallel rank, whose tokens sequence
    parallelism can share."""
    cp, tp = args.context_parallel_size, args.tensor_parallel_size
    return (2 * cp if cp > 1 else 1) * (tp if args.sequence_parallel else 1)


# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------
class Policy:
    """The model as Megatron-Core holds it: this rank's chunks of layers (several in a virtual pipeline), wrapped for data
    parallelism, their optimizer, and this rank's place in Megatron's groups."""

    def __init__(self, args: Args, hf: PretrainedConfig, folder: str) -> None:
        """Build and read from a Hugging Face folder; each rank reads only its slices. Collective.

        Raises:
            ValueError: the architecture is not one of common/megatron_hf.py's, or the folder's tensors are not the model's.
        """
        m = args.megatron
        self.args, self.hf = args, hf
        self.tp_group, self.tp_rank = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_tensor_model_parallel_rank()
        self.cp_group, self.cp_rank = parallel_state.get_context_parallel_group(), parallel_state.get_context_parallel_rank()
        self.dp_rank, self.dp = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self.sequence_parallel = m.sequence_parallel and m.tensor_parallel_size > 1
        self.align = sequence_alignment(m)
        self.config = transformer_config(
            hf, tensor_model_parallel_size=m.tensor_parallel_size, sequence_parallel=self.sequence_parallel,
            pipeline_model_parallel_size=m.pipeline_parallel_size,
            virtual_pipeline_model_parallel_size=m.virtual_pipeline_size if m.virtual_pipeline_size > 1 else None,
            context_parallel_size=m.context_parallel_size, expert_model_parallel_size=m.expert_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size(m), params_dtype=DTYPES[m.param_dtype],
            moe_aux_loss_coeff=m.moe_aux_loss_coef, moe_router_load_balancing_type="aux_loss" if m.moe_aux_loss_coef else "none",
            recompute_granularity=None if m.recompute == "off" else m.recompute,
            recompute_method="uniform" if m.recompute == "full" else None, recompute_num_layers=1 if m.recompute == "full" else None,
            # Losses carry global denominators of their own: gradients are added up over ranks and micro-batches (see `backward`).
            calculate_per_token_loss=True, finalize_model_grads_func=finalize_model_grads,
        )
        self.models = build_model(hf, self.config)
        load_hf(self.models, hf, folder)
        a = args.actor
        self.state = MegatronState(self.models, hf.vocab_size, a.lr, a.weight_decay, a.betas, a.clip_grad_norm)
        self.chunks = self.state.chunks
        self.plan = megatron_plan(self.models, hf)
        names = {name for shard in self.plan.shards for of_rank in shard.hf_names for name in of_rank}
        if extra := tensor_names(folder, hf.tie_word_embeddings) - names:
            raise ValueError(f"{folder} has tensors that a {hf.model_type} of its config has not: {sorted(extra)[:3]}")
        self.expert_tokens = torch.zeros(0)
        if hf_experts := getattr(hf, "num_experts", None):
            self.count_expert_tokens(hf_experts)

    def count_expert_tokens(self, experts: int) -> None:
        """Count what the routers send to each expert during updates, in `expert_tokens` [layers, experts]."""
        self.expert_tokens = torch.zeros(self.config.num_layers, experts, dtype=torch.int64, device=torch.cuda.current_device())

        def count(router: nn.Module, args: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor]) -> None:
            if torch.is_grad_enabled():  # once, with recompute too: its first forward runs without
                (_, padding), (_, chosen) = args, out
                self.expert_tokens[router.layer_number - 1] += (chosen & ~padding.reshape(-1, 1)).sum(0)

        for model in self.models:
            for module in model.modules():
                if type(module).__name__ == "TopKRouter":
                    module.register_forward_hook(count)

    def run(
        self, micros: list["Micro"], finish: Callable[[nn.Module, "Micro", Tensor], tuple[Tensor, Tensor, dict]], forward_only: bool
    ) -> None:
        """Send micro-batches through Megatron's pipeline schedule. Collective over the ranks that share a model.

        Args:
            finish: on the last stage, with its model and the final hidden states [t, 1, H] of a micro-batch: (sum of losses, number of
                tokens, {}). The schedule adds gradients up over micro-batches and ranks, and divides them by the sum of the tokens.
        """

        def forward_step(micros: Iterator["Micro"], chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple]]:
            micro = next(micros)
            hidden = chunk(
                input_ids=micro.ids, position_ids=micro.positions, attention_mask=None, packed_seq_params=micro.packed,
                padding_mask=micro.padding if len(self.expert_tokens) else None,
            )
            return hidden, functools.partial(finish, getattr(chunk, "module", chunk), micro)

        iterators = [iter(micros) for _ in self.chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(iterators) > 1 else self.chunks[0], num_microbatches=len(micros),
            seq_length=1, micro_batch_size=1,  # not looked at: the lengths vary
            forward_only=forward_only,
        )

    def logprob(self, model: nn.Module, micro: "Micro", hidden: Tensor, with_entropy: bool = False) -> tuple[Tensor, Any]:
        """(log-prob, entropy or None) of micro.targets, each [R] fp32, under the distribution that is sampled from. Collective over
        the tensor-parallel group, whose ranks each hold a part of the vocabulary."""
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        weight = head_weight(model)
        return linear_logprob(
            hidden[micro.predict, 0].to(weight.dtype), weight, micro.targets, temperature=self.args.rollout.temperature,
            with_entropy=with_entropy, group=self.tp_group, vocab_size=self.hf.vocab_size,
        )

    @torch.no_grad()
    def logprobs(self, batch: "Batch", plans: list[list[list[list[int]]]]) -> Tensor:
        """Log-probs of every response token, [R] fp32 on every rank; each rank computes its share of each plan. Collective."""
        out = torch.zeros_like(batch.rollout_logprobs)

        def finish(model: nn.Module, micro: Micro, hidden: Tensor) -> tuple[Tensor, Tensor, dict]:
            logprob, _ = self.logprob(model, micro, hidden)
            if self.tp_rank == 0:  # its peers have the same numbers
                out[micro.token_index] = logprob
            return hidden.new_zeros(()), torch.zeros((), dtype=torch.int32, device=hidden.device), {}

        for plan in plans:
            self.run([pack_micro(batch, sequences, self) for sequences in plan[self.dp_rank]], finish, forward_only=True)
        dist.all_reduce(out)  # one rank's number and zeros: exact
        return out


def learning_rate(args: ActorArgs, step: int, steps: int) -> float:
    """Of training step `step` (from 1) of `steps`: linear warm-up, then constant, linear or cosine decay."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    progress = (step - args.warmup_steps) / max(steps - args.warmup_steps, 1)
    decay = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[args.schedule]
    return args.lr * (args.min_lr_ratio + (1.0 - args.min_lr_ratio) * decay)


def read_config(folder: str) -> tuple[PretrainedConfig, Any]:
    """(config, tokenizer) of a model that this script can train.

    Raises:
        FileNotFoundError: the folder has no config, tokenizer or safetensors.
        ValueError: its architecture is not one of common/megatron_hf.py's.
    """
    names = os.listdir(folder)
    if "config.json" not in names:
        raise FileNotFoundError(f"{folder} has no config.json: it is not a Hugging Face model")
    if not any(name.endswith(".safetensors") for name in names):
        raise FileNotFoundError(f"{folder} has no safetensors: load it with AutoModelForCausalLM and save it again with save_pretrained")
    if not any(name.startswith("tokenizer") for name in names):
        raise FileNotFoundError(f"{folder} has no tokenizer: save one there with AutoTokenizer.from_pretrained(...).save_pretrained")
    try:
        config = AutoConfig.from_pretrained(folder)
        transformer_config(config)
        return config, AutoTokenizer.from_pretrained(folder)
    except ValueError as e:
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

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
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

    def groups(self, chosen: list[int], samples: int) -> "Batch":
        """The batch of these groups alone."""
        many = [g * samples + s for g in chosen for s in range(samples)]
        return Batch(
            ids=torch.cat([self.ids[self.id_starts[i] : self.id_starts[i] + self.lengths[i]] for i in many]),
            prompt_lens=self.prompt_lens[many], response_lens=self.response_lens[many],
            rollout_logprobs=self.rollout_logprobs[self.token_index(many)], truncated=self.truncated[many],
        )


def join(batches: list[Batch]) -> Batch:
    """One batch of all their sequences, in order."""
    return Batch(**{f.name: torch.cat([getattr(b, f.name) for b in batches]) for f in dataclasses.fields(Batch)})


@dataclass
class Micro:
    """What a rank holds of a packed micro-batch, on the device: t of its T tokens (T / context-parallel size), R of them before a
    response token. Labels are looked up in the whole row: the token after a chunk's last one lies on another rank."""

    ids: Tensor  # [1, t] int64
    positions: Tensor  # [1, t] int64, in their sequences
    padding: Tensor  # [1, t] bool
    packed: PackedSeqParams  # of the whole row
    predict: Tensor  # [R] int64, places among the t whose output predicts a response token
    targets: Tensor  # [R] int64, those tokens
    token_index: Tensor  # [R] int64, where they lie in the batch's flat [R] tensors
    sequence: Tensor  # [R] int64, which of the micro-batch's sequences each belongs to
    response_lens: Tensor  # [sequences] int64, on all ranks the whole response's


def pack_micro(batch: Batch, sequences: list[int], policy: Policy) -> Micro:
    """Pack sequences of the batch into one row, each padded to a multiple of `policy.align`, and take this rank's share. For an
    empty list: a row of padding alone, which takes part in every collective and in no loss."""
    lengths, prompt_lens = batch.lengths[sequences], batch.prompt_lens[sequences]
    padded = -(-lengths // policy.align) * policy.align if sequences else torch.tensor([max(policy.align, 2)])
    ends = padded.cumsum(0)
    starts = ends - padded
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    positions = torch.arange(int(ends[-1])) - torch.repeat_interleave(starts, padded)
    ids = torch.zeros(len(positions), dtype=torch.int64)
    padding = torch.ones(len(positions), dtype=torch.bool)
    token_index = torch.full((len(positions),), -1)  # of the response token that comes next, if one does
    owner = torch.zeros(len(positions), dtype=torch.int64)
    for k, i in enumerate(sequences):
        start, length, prompt = int(starts[k]), int(lengths[k]), int(prompt_lens[k])
        ids[start : start + length] = batch.ids[batch.id_starts[i] : batch.id_starts[i] + length]
        padding[start : start + length] = False
        token_index[start + prompt - 1 : start + length - 1] = batch.token_index([i])
        owner[start : start + length] = k
    mine = context_parallel_index(cu_seqlens, policy.cp_group.size(), policy.cp_rank)
    predict = (token_index[mine] >= 0).nonzero().squeeze(1)
    at = mine[predict]
    cu = cu_seqlens.to(batch.device, torch.int32)
    longest = int(padded.max())
    ids_here, positions, padding = (x[mine][None].to(batch.device) for x in (ids, positions, padding))
    return Micro(
        ids=ids_here, positions=positions, padding=padding,
        packed=PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cu, cu_seqlens_kv_padded=cu,
            max_seqlen_q=longest, max_seqlen_kv=longest,
        ),
        predict=predict.to(batch.device), targets=ids[at + 1].to(batch.device), token_index=token_index[at].to(batch.device),
        sequence=owner[at].to(batch.device), response_lens=batch.response_lens[sequences].to(batch.device),
    )


def gather_flat(mine: Tensor) -> Tensor:
    """Concatenate the 1-D tensors of all ranks, in rank order, on every rank. Collective."""
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=mine.device)
    sizes[dist.get_rank()] = len(mine)
    dist.all_reduce(sizes)
    padded = mine.new_zeros(len(sizes), int(sizes.max()))
    dist.all_gather_into_tensor(padded.view(-1), torch.cat([mine, mine.new_zeros(padded.shape[1] - len(mine))]))
    return torch.cat([row[:size] for row, size in zip(padded, sizes.tolist(), strict=True)])


def minibatch_weights(batch: Batch, sequences: list[int], args: Args, counted: Tensor) -> dict[str, Tensor]:
    """Of a mini-batch's tokens, zero elsewhere, each [R]: `loss_weights` add up per-token losses to the mini-batch's loss,
    `mean_weights` give means over its tokens. Being global, they make the result independent of how it is split.
    `counted` [N] bool: sequences that take part."""
    index, lengths = batch.token_index(sequences), batch.response_lens[sequences]
    out = {}
    for name, mode in (("loss_weights", args.grpo.loss_agg), ("mean_weights", "token-mean")):
        out[name] = torch.zeros_like(batch.rollout_logprobs)
        out[name][index] = token_weights(lengths, mode, counted[sequences], args.rollout.max_response_length).to(batch.device)
    return out


def actor_loss(
    policy: Policy, tokens: dict[str, Tensor], model: nn.Module, micro: Micro, hidden: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the mini-batch's loss, and of the means to log.

    `tokens` holds the batch's flat [R] tensors. Without old log-probs in it, this is the only update of the batch, and the policy's
    own log-probs are the old ones.
    """
    args = policy.args
    t = {name: values[micro.token_index] for name, values in tokens.items()}
    logprob, entropy = policy.logprob(model, micro, hidden, with_entropy=True)
    old_logprobs = t["old_logprobs"] if "old_logprobs" in t else logprob.detach()
    sequence_logratio = None
    if args.grpo.ratio == "sequence":  # its tokens are spread over the context-parallel ranks
        add_up = functools.partial(dist.all_reduce, group=policy.cp_group)
        sequence_logratio = sequence_means(logprob - old_logprobs, micro.sequence, micro.response_lens, add_up)
    is_weights = importance_weights(
        old_logprobs, t["rollout_logprobs"], args.grpo.tis_cap, args.grpo.tis_floor if args.grpo.mismatch == "mask" else None
    )
    loss, stats = policy_loss(
        logprob, old_logprobs, t["advantages"], args.grpo.clip_low, args.grpo.clip_high, args.grpo.dual_clip or None,
        is_weights if args.grpo.mismatch != "off" else None, sequence_logratio=sequence_logratio, cispo=args.grpo.objective == "cispo",
    )
    if args.grpo.entropy_coef:
        loss = loss - args.grpo.entropy_coef * entropy
    means = {
        "clipfrac": stats["clipped"], "dual_clipfrac": stats["dual_clipped"], "entropy": entropy, "is_weight": is_weights,
        "approx_kl": torch.expm1(stats["logratio"]) - stats["logratio"],  # k3, as CleanRL's
        "prob_diff": (old_logprobs.exp() - t["rollout_logprobs"].exp()).abs(),
    }
    if "ref_logprobs" in t:
        loss = loss + args.kl.coef * kl_penalty(logprob, t["ref_logprobs"], args.kl.kind)
    means["ref_kl"] = kl_penalty(logprob, t.get("ref_logprobs", logprob), "k3")
    loss = (loss * t["loss_weights"]).sum()
    return loss, {"loss": loss} | {name: (x * t["mean_weights"]).sum() for name, x in means.items()}


def backward(policy: Policy, batch: Batch, plan: list[list[list[int]]], tokens: dict[str, Tensor]) -> dict[str, float]:
    """The gradients of one mini-batch, added up over its micro-batches and all ranks, and the numbers to log. Collective.

    Args:
        plan: the mini-batch's micro-batches, by data-parallel rank. tokens: see `actor_loss`.
    """
    micros = [pack_micro(batch, sequences, policy) for sequences in plan[policy.dp_rank]]
    # Megatron divides gradients by the number of tokens that `finish` reports, summed over micro-batches and ranks; it is what a
    # load-balancing loss is scaled by as well. The loss here is a sum with a global denominator already: times that number.
    total = int(sum(batch.lengths[micro].sum() for micros in plan for micro in micros))
    sums = torch.zeros(len(MEANS), device=batch.device)

    def finish(model: nn.Module, micro: Micro, hidden: Tensor) -> tuple[Tensor, Tensor, dict]:
        loss, stats = actor_loss(policy, tokens, model, micro, hidden)
        if policy.tp_rank == 0:  # its peers have the same numbers
            sums.add_(torch.stack([stats[name].detach() for name in MEANS]))
        return loss * total, (~micro.padding).sum().to(torch.int32), {}

    policy.run(micros, finish, forward_only=False)
    dist.all_reduce(sums)
    return dict(zip(MEANS, sums.tolist(), strict=True))


def update(policy: Policy, batch: Batch, plan: list[list[list[int]]], tokens: dict[str, Tensor]) -> dict[str, float]:
    """One optimizer step on one mini-batch; arguments as for `backward`. Collective.

    Returns:
        the loss, the gradient's norm before clipping, and the logged means.
    Raises:
        FloatingPointError: the loss or the norm is not finite; on every rank, before the step.
    """
    result = backward(policy, batch, plan, tokens)
    result["grad_norm"] = norm = policy.state.grad_norm()
    if not (math.isfinite(result["loss"]) and math.isfinite(norm)):
        raise FloatingPointError(f"loss {result['loss']}, gradient norm {norm}")
    policy.state.step(norm)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Rollout
# ---------------------------------------------------------------------------------------------------------------------
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


@dataclass
class Response:
    """One answer of the engine."""

    ids: list[int]  # the eos included, if it ended by itself
    logprobs: list[float]  # of the distribution that was sampled from
    truncated: bool  # cut by length


def make_engine(args: Args, folder: str, device: torch.device) -> Any:
    """The engine of this rank's rollout group: on the group's first rank of each node, which starts the processes that run there, and
    None elsewhere. The group's very first rank gives it work. Collective.

    Raises:
        ValueError: groups that nodes do not share evenly, or too little memory for one sequence.
        RankError: on every rank; it did not start on some.
    """
    tp, (rank, local_rank, local_world) = args.rollout.tensor_parallel_size, (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    if tp % local_world and local_world % tp:
        raise ValueError(f"--rollout.tensor-parallel-size {tp} must divide the {local_world} ranks of a node, or be a multiple of them")
    place, group, nodes = rank % tp, rank // tp, max(tp // local_world, 1)
    longest = args.data.max_prompt_length + args.rollout.max_response_length
    with socket.socket() as held:  # until every rank has a port: no two engines of a node get the same
        held.bind(("", 0))
        ports: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(ports, held.getsockname()[1])
    hosts: list[str] = ["127.0.0.1"] * dist.get_world_size()
    if nodes > 1:
        from sglang.srt.utils.network import get_local_ip_auto

        dist.all_gather_object(hosts, get_local_ip_auto())  # SGLANG_HOST_IP overrules it
    first = group * tp
    engine: Any = None
    error: Exception | None = None
    if place % local_world == 0:
        flags = dict(
            model_path=folder, skip_tokenizer_init=True, trust_remote_code=False, dtype=args.rollout.dtype, tp_size=tp, log_level="error",
            context_length=longest + 8,  # it keeps some for itself
            random_seed=random.Random(f"{args.seed} {group}").getrandbits(30), nnodes=nodes, node_rank=place // local_world,
            dist_init_addr=f"{hosts[first]}:{ports[first]}",
        )
        if device.type == "cuda":
            flags |= dict(base_gpu_id=local_rank, mem_fraction_static=args.rollout.gpu_memory_utilization, enable_memory_saver=True)
        try:
            engine = start_engine(flags | json.loads(args.rollout.engine_args))
            if place == 0 and engine.tokenizer_manager.max_req_input_len + 5 <= longest:
                raise ValueError(
                    f"its KV cache has no room for one sequence of {longest} tokens: raise --rollout.gpu-memory-utilization or "
                    "--rollout.tensor-parallel-size, or lower --data.max-prompt-length or --rollout.max-response-length"
                )
        except Exception as e:
            error = e
    checkpoint.on_every_rank(error, "starting SGLang")
    return engine


class Rollout:
    """An SGLang engine for every `tensor_parallel_size` ranks, owned by the first of them, sharing the prompts. It runs in processes
    of its own on these ranks' GPUs."""

    def __init__(self, args: Args, folder: str, config: PretrainedConfig, tokenizer: Any, device: torch.device) -> None:
        tp = args.rollout.tensor_parallel_size
        self.args, self.config, self.device = args, config, device
        self.group, self.groups = dist.get_rank() // tp, dist.get_world_size() // tp
        self.ranks, _ = dist.new_subgroups(tp, timeout=timedelta(seconds=args.timeout))
        self.hosted = make_engine(args, folder, device)  # also where a further node hosts a part of it
        self.engine = self.hosted if dist.get_rank() % tp == 0 else None  # the engine's first rank speaks for it
        self.names = tensor_names(folder, config.tie_word_embeddings)
        self.awake = True
        self.stop = {"stop_token_ids": eos_ids(folder, config, tokenizer), "max_new_tokens": args.rollout.max_response_length}

    def share(self, items: list[Any]) -> list[Any]:
        """This engine's contiguous share."""
        return items[len(items) * self.group // self.groups : len(items) * (self.group + 1) // self.groups]

    def generate(self, prompts: list[Prompt], purpose: str, n: int, **sampling: Any) -> list[Response]:
        """The engine's answers to its share of the prompts, `n` to each, prompt by prompt; none where another rank owns it.
        Collective.

        Each request has a seed of its own, a function of (run's seed, purpose, engine), which SGLang heeds with
        enable_deterministic_inference only: else two runs draw differently.
        """
        rng = random.Random(f"{self.args.seed} {purpose} {self.group}")
        ids = [p.ids for p in self.share(prompts) for _ in range(n)]
        params = [self.stop | sampling | {"sampling_seed": rng.getrandbits(31)} for _ in ids]

        def ask(engine: Any) -> list[dict[str, Any]]:
            outputs = engine.generate(input_ids=ids, sampling_params=params, return_logprob=True) if ids else []
            for o in outputs:
                if o["meta_info"]["finish_reason"]["type"] == "abort":
                    raise RuntimeError(f"SGLang gave up a request: {o['meta_info']['finish_reason']}")
            return outputs

        outputs = self.on_owner("generating", ask) or []
        return [
            Response(
                o["output_ids"], [entry[0] for entry in o["meta_info"]["output_token_logprobs"]],
                o["meta_info"]["finish_reason"]["type"] == "length",
            )
            for o in outputs
        ]

    def collect(self, prompts: list[Prompt], responses: list[Response]) -> Batch:
        """Every engine's answers as one batch on every rank. Collective."""

        def gather(values: list[Any], dtype: torch.dtype) -> Tensor:
            return gather_flat(torch.tensor(values, dtype=dtype, device=self.device))

        response_lens = gather([len(r.ids) for r in responses], torch.int64).cpu()
        ids = gather([t for r in responses for t in r.ids], torch.int64).cpu().split(response_lens.tolist())
        n = len(ids) // len(prompts)
        return Batch(
            ids=torch.cat([part for i, r in enumerate(ids) for part in (torch.tensor(prompts[i // n].ids), r)]),
            prompt_lens=torch.tensor([len(p.ids) for p in prompts]).repeat_interleave(n),
            response_lens=response_lens,
            rollout_logprobs=gather([x for r in responses for x in r.logprobs], torch.float32),
            truncated=gather([r.truncated for r in responses], torch.uint8).cpu().bool(),
        )

    def push(self, policy: Policy) -> dict[str, float]:
        """The policy's weights into the engine, which ends awake. On CUDA the KV cache comes back only after the buckets are gone."""
        self.wake(["weights"])
        start = time.perf_counter()
        buckets = megatron_buckets(policy.plan, DTYPES[self.args.rollout.dtype], self.args.rollout.bucket_mb * 2**20, self.device)
        nbytes = 0
        error: Exception | None = None
        try:
            nbytes = push_to_sglang(self.engine, buckets, self.ranks, self.names)
        except SyncError as e:  # anything else is one rank's alone: the others wait for it in a collective, so it must end
            error = e
        checkpoint.on_every_rank(error, "sending weights to the engine")
        seconds = time.perf_counter() - start
        self.wake(["kv_cache"])
        self.awake = True
        return {"perf/sync_GBps": nbytes / seconds / 1e9}

    def wake(self, tags: list[str]) -> None:
        """Map that part of the engine's memory again, where there is a device. Collective."""
        if self.device.type == "cuda" and not self.awake:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()  # the engine maps its memory past torch's allocator, which would not free any for it
            dist.barrier()
            self.on_owner("waking the engine", lambda engine: engine.resume_memory_occupation(tags))

    def sleep(self) -> None:
        """Give back the memory of weights and KV cache, where there is a device to give it back to. Collective."""
        if self.device.type == "cuda" and self.awake:

            def release(engine: Any) -> None:
                done, reason = empty_prefix_cache(engine)  # only an idle engine can sleep: one that is asked too early dies
                if not done:
                    raise RuntimeError(reason)
                engine.release_memory_occupation(["kv_cache", "weights"])

            self.on_owner("sending the engine to sleep", release)
        self.awake = False

    def on_owner(self, what: str, call: Callable[[Any], Any]) -> Any:
        """What `call(engine)` returns, None where another rank owns it. Collective: where it raises, every rank raises RankError."""
        answer: Any = None
        error: Exception | None = None
        try:
            answer = call(self.engine) if self.engine is not None else None
        except Exception as e:
            error = e
        checkpoint.on_every_rank(error, what)
        return answer

    def close(self) -> None:
        """End the engine's processes. At the same time on all ranks: a part of an engine that outlives another complains."""
        if self.hosted is None:
            return
        from sglang.srt.utils import kill_process_tree

        atexit.unregister(self.hosted.shutdown)  # it would kill every child of this process, Python's resource tracker too
        if self.engine is not None:
            self.engine.tokenizer_manager._subprocess_watchdog.stop()
        for pid in self.hosted.get_all_child_pids():
            kill_process_tree(pid, wait_timeout=60)


def score(pool: RewardPool | None, tokenizer: Any, prompts: list[Prompt], responses: list[Response]) -> list[Reward]:
    """Rewards of an engine's answers to its prompts, computed outside this process; none where another rank owns them."""
    if pool is None or not responses:  # another rank's answers, or an engine without a share; batch_decode([]) is [""]
        return []
    texts = tokenizer.batch_decode([r.ids for r in responses], skip_special_tokens=True)
    many = [p for p in prompts for _ in range(len(responses) // len(prompts))]
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


def plan_minibatch(batch: Batch, sequences: list[int], policy: Policy) -> list[list[list[int]]]:
    """Micro-batches of these sequences of the batch, by data-parallel rank."""
    m = policy.args.megatron
    plan = schedule(
        batch.lengths[sequences].tolist(), policy.dp, policy.args.batch.max_tokens * m.context_parallel_size, policy.hf.hidden_size,
        align=policy.align, multiple=m.pipeline_parallel_size,
    )
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


def parameter_counts(config: PretrainedConfig) -> tuple[int, int]:
    """(all parameters, those that a token meets: of the experts only the chosen ones)."""
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    total, experts = sum(sizes.values()), sum(n for name, n in sizes.items() if ".experts." in name)
    return total, total - experts + (experts * config.num_experts_per_tok // config.num_experts if experts else 0)


def speed_metrics(
    batch: Batch, config: PretrainedConfig, parameters: int, epochs: int, world: int, metrics: dict[str, float], seconds: float
) -> dict[str, float]:
    """Tokens (of prompts and responses) per second of the whole step, and the update's share of the peak bf16 FLOPs of the GPUs:
    6 FLOPs a parameter that a token meets and token, and 6 L H s^2 for the causal attention of a sequence of s tokens."""
    tokens = int(batch.lengths.sum())
    out = {"time/step": seconds, "perf/tokens_per_s": tokens / seconds, "perf/tokens_per_s_per_rank": tokens / seconds / world}
    peak = peak_flops()
    if peak and "time/update" in metrics:
        width = config.num_attention_heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        attention = 6 * config.num_hidden_layers * width * int(batch.lengths.square().sum())
        out["perf/mfu_update"] = epochs * (6 * parameters * tokens + attention) / (metrics["time/update"] * peak * world)
    return out


def expert_metrics(policy: Policy) -> dict[str, float]:
    """Each expert's share of the tokens since the last call, times the number of experts (1 is balance): the largest and the least of
    any layer, and each expert's mean over layers. Collective."""
    counts = policy.expert_tokens.double()
    policy.expert_tokens.zero_()
    if not len(counts):
        return {}
    dist.all_reduce(counts)  # where several ranks count the same tokens, all experts' counts are as many times too large
    load = counts / counts.sum(1, keepdim=True) * counts.shape[1]
    return {"moe/load_max": load.max().item(), "moe/load_min": load.min().item()} | {
        f"moe/load_{i:03d}": x for i, x in enumerate(load.mean(0).tolist())
    }


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
        responses = rollout.generate(prompts, f"{step} validation", n, temperature=temperature)
        rewards = score(pool, tokenizer, rollout.share(prompts), responses)
        scores = gather_flat(torch.tensor([r.score for r in rewards], device=rollout.device)).view(len(prompts), n).cpu()
        values = {"greedy": scores[:, 0]} if temperature == 0 else {f"avg@{n}": scores.mean(1), f"pass@{n}": (scores > 0.5).any(1).float()}
        for name, value in values.items():
            metrics[f"val/{name}"] = value.mean().item()
            metrics |= {f"val/{source}/{name}": value[rows].mean().item() for source, rows in of_source.items()}
    return metrics


def check_sync(rollout: Rollout, policy: Policy, prompts: list[Prompt], args: Args) -> dict[str, float]:
    """Engine and trainer on the same tokens, right after a sync. Collective.

    Raises:
        RuntimeError: mean |log-prob difference| above what two runs of the precision differ by: 1e-4 in fp32, 0.1 in bf16; a tensor
            that did not arrive makes it several nats.
    """
    batch = rollout.collect(prompts, rollout.generate(prompts, "sync", 1, temperature=args.rollout.temperature))
    plan = plan_minibatch(batch, list(range(len(prompts))), policy)
    difference = (policy.logprobs(batch, [plan]) - batch.rollout_logprobs).abs().mean().item()
    limit = (1e-4 if args.rollout.dtype == args.megatron.param_dtype == "float32" else 0.1) / min(args.rollout.temperature, 1.0)
    if not difference <= limit:
        raise RuntimeError(f"after a sync engine and trainer differ by {difference:.1e} nats a token, above {limit}")
    return {"rollout/sync_logprob_diff": difference}


def console_line(step: int, steps: int, metrics: dict[str, float]) -> str:
    """A step in one line of the terminal."""
    parts = [f"step {step}/{steps}", f"reward {metrics['reward/mean']:.3f}"]
    if "val/greedy" in metrics:
        parts.append(f"held-out {metrics['val/greedy']:.3f}")
    if "actor/ref_kl" in metrics:
        parts.append(f"kl {metrics['actor/ref_kl']:.4f}")
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
    console: Callable[..., None] = functools.partial(print, flush=True) if rank == 0 else lambda *a: None

    # --- data, and everything that can be wrong before a weight is read
    folder = local_folder(args.actor.model, local_rank)
    config, tokenizer = read_config(folder)
    check(args, config, world)
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
    if args.actor.checkpoint and not os.path.exists(os.path.join(args.actor.checkpoint, ".metadata")):
        raise FileNotFoundError(f"--actor.checkpoint {args.actor.checkpoint}: that is no checkpoint; name a folder out/checkpoints/step_N")
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

    # --- the model and its optimizer, each on the device only while it works, where that is asked for
    seed_everything(args.seed)
    m = args.megatron
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=m.tensor_parallel_size, pipeline_model_parallel_size=m.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=m.virtual_pipeline_size if m.virtual_pipeline_size > 1 else None,
        context_parallel_size=m.context_parallel_size, expert_model_parallel_size=m.expert_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size(m), distributed_timeout_minutes=math.ceil(args.timeout / 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    policy: Any = None
    on_device: dict[str, Any] = dict.fromkeys(("params", "grads", "optimizer", "reference"), nullcontext())
    if not args.rollout_only:
        policy = Policy(args, config, folder)
        if args.kl.coef:
            on_device["reference"] = policy.state.reference()
        for name, wanted in (("params", m.param_offload), ("grads", m.grad_offload), ("optimizer", m.optimizer_offload)):
            if wanted:
                on_device[name] = policy.state.parked(name)
    best: dict[str, Any] = {"step": -1, "accuracy": -math.inf}

    def save(step: int, sampler_state: dict[str, int] | None) -> None:
        with on_device["params"], on_device["optimizer"]:
            checkpoint.save(checkpoints, step, policy.state.tensors(), {"sampler": sampler_state}, args.save.keep, best["step"])

    if args.actor.checkpoint and not saved and policy is not None:
        with on_device["params"], on_device["optimizer"]:
            tensors = {name: x for name, x in policy.state.tensors().items() if name.startswith(("weights.", "buffers."))}
            dcp.load(tensors, checkpoint_id=args.actor.checkpoint)
            policy.state.loaded(tensors)
    if saved and policy is not None:
        with on_device["params"], on_device["optimizer"]:
            tensors = policy.state.tensors()
            progress = checkpoint.load(checkpoint.step_folder(checkpoints, saved[-1]), tensors)
            policy.state.loaded(tensors)
        if sampler is not None:
            sampler.load_state_dict(progress["sampler"])
        best = checkpoint.read_best(checkpoints) or best
        console(f"resumed from step {saved[-1]} in {checkpoints}")
    log = MetricsLog(args.out, rank == 0, args.log.tensorboard, args.log.wandb_project, dataclasses.asdict(args), first_step - 1)
    phase = Phases(device)

    def push() -> dict[str, float]:
        with phase("sync"), on_device["params"]:
            metrics = rollout.push(policy)
            if args.rollout.check_sync:
                metrics |= check_sync(rollout, policy, train_prompts[:16], args)
        return metrics

    if rollout is not None and policy is not None:
        push()
    size, active = parameter_counts(config)
    console(
        f"{world} rank(s) on {device.type}: TP {m.tensor_parallel_size} PP {m.pipeline_parallel_size} CP {m.context_parallel_size} "
        f"EP {m.expert_parallel_size}, {'Transformer Engine' if TRANSFORMER_ENGINE else 'local'} layers, "
        f"{rollout.groups if rollout else 'no'} engine(s) of {args.rollout.tensor_parallel_size}, "
        f"{size / 1e6:.1f}M parameters, {len(train_prompts)} prompts ({dropped} dropped), {len(val_prompts)} held out"
    )
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

                # --- generate: each engine answers its share of the prompts; then every rank gets the whole batch. Rewards are
                # given once, by the owner of each answer, and shared. Under dynamic sampling groups whose answers all scored
                # alike are replaced by further prompts, until the batch is full.
                if args.replay:
                    prompts, batch, scores = read_rollouts(kept.format(step), args.rollout.samples, device)
                    if len(prompts) % args.grpo.minibatch_size:
                        raise ValueError(f"--grpo.minibatch-size {args.grpo.minibatch_size} must divide the {len(prompts)} prompts that "
                                         f"{kept.format(step)} holds")
                else:
                    prompts, batches, generations, rewarded = [], [], 0, dict[str, float]()
                    while len(prompts) < args.batch.prompts:
                        if generations == args.grpo.max_generations:
                            raise ValueError(
                                f"--grpo.dynamic-sampling found {len(prompts)} of {args.batch.prompts} groups that differ in reward in "
                                f"{generations} generations: raise --grpo.max-generations, or take other prompts"
                            )
                        asked = [train_prompts[i] for i in sampler.next_batch()]
                        with phase("generate"):
                            responses = rollout.generate(
                                asked, f"{step} {generations}", args.rollout.samples, temperature=args.rollout.temperature,
                                top_p=args.rollout.top_p, top_k=args.rollout.top_k,
                            )
                            answered = rollout.collect(asked, responses)
                        stop.check()
                        with phase("reward"):
                            rewards = score(pool, tokenizer, rollout.share(asked), responses)
                            raw = gather_flat(torch.tensor([r.score for r in rewards], device=device))
                            more, failure = reward_metrics(rewards, len(raw))
                            rewarded = {name: rewarded.get(name, 0.0) + x for name, x in more.items()}
                            if failure is not None:
                                console(f"warning: {more['reward/errors']:.0f} of {len(raw)} answers could not be scored: {failure}")
                        differs = raw.view(len(asked), -1).amax(1) > raw.view(len(asked), -1).amin(1)
                        chosen = [g for g, d in enumerate(differs.tolist()) if d or not args.grpo.dynamic_sampling]
                        chosen = chosen[: args.batch.prompts - len(prompts)]
                        if chosen:
                            prompts += [asked[g] for g in chosen]
                            batches.append((answered.groups(chosen, args.rollout.samples), raw.view(len(asked), -1)[chosen].flatten()))
                        generations += 1
                    if policy is not None:
                        with phase("generate"):
                            rollout.sleep()
                    batch, scores = join([b for b, _ in batches]), torch.cat([s for _, s in batches])
                    scores = shape_scores(scores, batch.response_lens, args, step)
                    metrics |= {name: x if name == "reward/errors" else x / generations for name, x in rewarded.items()}
                    metrics["rollout/generations"] = generations
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
                    (sequences, plan_minibatch(batch, sequences, policy))
                    for _ in range(args.grpo.epochs)
                    for sequences in minibatches(len(prompts), args.rollout.samples, args.grpo.minibatch_size, rng)
                ]
                first_epoch = [plan for _, plan in updates[: len(updates) // args.grpo.epochs]]

                # --- old and reference log-probs, on the very micro-batches of the first epoch: with nothing updated yet the ratio
                # is then exactly 1. A batch that gets one update needs no old log-probs: they are the update's own.
                with on_device["params"]:
                    if len(updates) > 1:
                        with phase("old_logprob"):
                            tokens["old_logprobs"] = policy.logprobs(batch, first_epoch)
                    if args.kl.coef:
                        with phase("ref_logprob"), on_device["reference"]:
                            tokens["ref_logprobs"] = policy.logprobs(batch, first_epoch)
                    stop.check()

                    # --- advantages: each answer against its group, of the whole batch on every rank
                    with phase("advantages"):
                        advantages, differs = group_advantages(scores, args.rollout.samples, args.grpo.normalise_std)
                        tokens["advantages"] = advantages.repeat_interleave(batch.response_lens.to(device))
                        counted = torch.ones(len(scores), dtype=torch.bool)
                        if args.grpo.mask_truncated:
                            counted &= ~batch.truncated
                        if args.grpo.drop_zero_variance:
                            counted &= differs.cpu()

                    # --- update
                    policy.state.set_lr(learning_rate(args.actor, step, args.steps), args.actor.weight_decay)
                    stats = []
                    with phase("update"), on_device["grads"], on_device["optimizer"]:
                        for sequences, plan in updates:
                            tokens |= minibatch_weights(batch, sequences, args, counted)
                            try:
                                stats.append(update(policy, batch, plan, tokens))
                            except FloatingPointError as e:
                                bad = os.path.join(args.out, f"failed_step_{step:06d}.parquet")
                                if rank == 0:
                                    keep_rollouts(bad, prompts, batch, tokenizer, scores, tokens)
                                raise FloatingPointError(f"step {step}, update {len(stats) + 1}: {e}; batch kept in {bad}") from e
                metrics |= {f"actor/{key}": sum(s[key] for s in stats) / len(stats) for key in stats[0] if args.kl.coef or key != "ref_kl"}
                metrics |= expert_metrics(policy)
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
                    "actor/lr": learning_rate(args.actor, step, args.steps), "advantage/std": tokens["advantages"].std().item(),
                    "group/zero_variance": 1.0 - differs.float().mean().item(),
                }
                if args.log.rollouts and rank == 0:
                    kept_tokens = {name: x for name, x in tokens.items() if not name.endswith("_weights")}
                    keep_rollouts(kept.format(step), prompts, batch, tokenizer, scores, kept_tokens)
                metrics |= phase.take() | memory_metrics(device, 0)
                metrics |= speed_metrics(batch, config, active, args.grpo.epochs, world, metrics, time.perf_counter() - start)
                log.log(step, metrics)
                console(console_line(step, args.steps, metrics))
    except Stopped:
        worth = args.save.every > 0 and done > 0 and done not in checkpoint.list_steps(checkpoints) and policy is not None
        if rollout is not None and policy is not None:
            rollout.sleep()  # its memory may be what the training state came from
        if worth and stop.time_for(2 * save_seconds + 1, args.save.grace):
            save(done, sampler_state)
        console(f"stopped by a signal after step {done}; complete checkpoints: {checkpoint.list_steps(checkpoints) or 'none'}")
        code = EXIT_STOPPED
    else:
        code = 0
        if args.save.hf and policy is not None:
            if rollout is not None:
                rollout.sleep()
            with on_device["params"]:
                dtype = config.dtype = DTYPES[args.rollout.dtype]
                buckets = megatron_buckets(policy.plan, dtype, args.rollout.bucket_mb * 2**20, device)
                generation = read_generation_config(folder, config)
                generation.eos_token_id = eos_ids(folder, config, tokenizer)  # so that it stops where it was trained to
                checkpoint.export_hf(os.path.join(args.out, "hf"), buckets, config, tokenizer, generation)
    log.close()
    if pool is not None:
        pool.close()
    dist.barrier()
    if rollout is not None:
        rollout.close()
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
            raise ValueError("start this script with torchrun, for instance: torchrun --nproc-per-node 1 grpo_megatron_sglang.py ...")
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
