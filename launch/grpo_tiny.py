"""GRPO teaches a tiny model to add, on two CPU cores: torchrun --nproc-per-node 2 launch/grpo_tiny.py --out runs/tiny_grpo

Two tensor-parallel ranks train; `--megatron.tensor-parallel-size 1 --megatron.pipeline-parallel-size 2` makes them two stages of a
pipeline. The model and the data come from launch/make_tiny.py; `launch/quickstart.sh grpo` runs both. Any flag of the script goes
here too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import launch.cpu_engines  # noqa: E402, F401  before torch
import launch.cpu_engines.megatron  # noqa: E402, F401  before Megatron-Core
import launch.cpu_engines.sglang  # noqa: E402, F401  before SGLang

# isort: split
import grpo_megatron_sglang as grpo  # noqa: E402

if __name__ == "__main__":
    tiny = "runs/tiny_data"
    grpo.cli(grpo.Args(
        actor=grpo.ActorArgs(model=f"{tiny}/model", lr=3e-4, schedule="linear"),
        data=grpo.DataArgs(train=(f"{tiny}/train.parquet",), val=(f"{tiny}/test.parquet",), max_prompt_length=16),
        batch=grpo.BatchArgs(prompts=64, max_tokens=8192),
        rollout=grpo.RolloutArgs(samples=8, max_response_length=4, dtype="float32"),
        reward=grpo.RewardArgs(fn="exact", workers=1),
        grpo=grpo.GRPOArgs(minibatch_size=16),
        kl=grpo.KLArgs(coef=0.2, kind="k3+"),  # without it, rewards of no meaning still move the greedy answers
        megatron=grpo.MegatronArgs(tensor_parallel_size=2, param_dtype="float32"),
        val=grpo.ValArgs(every=5),
        save=grpo.SaveArgs(every=20),
        log=grpo.LogArgs(rollouts=True),
        steps=40,
    ))
