"""PPO teaches a tiny model to add, on two CPU cores: torchrun --nproc-per-node 2 launch/ppo_tiny.py --out runs/tiny

The model and the data come from launch/make_tiny.py; launch/quickstart.sh runs both. Any flag of the script goes here too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import launch.cpu_engines  # noqa: E402, F401  before torch and vLLM
from ppo_fsdp_vllm import (  # noqa: E402
    ActorArgs,
    Args,
    BatchArgs,
    CriticArgs,
    DataArgs,
    FSDPArgs,
    KLArgs,
    LogArgs,
    PPOArgs,
    RewardArgs,
    RolloutArgs,
    SaveArgs,
    ValArgs,
    cli,
)

if __name__ == "__main__":
    tiny = "runs/tiny_data"
    cli(Args(
        actor=ActorArgs(model=f"{tiny}/model", lr=3e-4),
        critic=CriticArgs(lr=1e-3),
        data=DataArgs(train=(f"{tiny}/train.parquet",), val=(f"{tiny}/test.parquet",), max_prompt_length=16),
        batch=BatchArgs(prompts=128, max_tokens=8192),
        rollout=RolloutArgs(samples=4, max_response_length=4, dtype="float32", engine_args='{"max_num_seqs": 256, "enforce_eager": true}'),
        reward=RewardArgs(fn="exact", workers=1),
        ppo=PPOArgs(minibatch_size=32),
        kl=KLArgs(where="loss", coef=0.0, kind="k3"),
        fsdp=FSDPArgs(param_dtype="float32"),
        val=ValArgs(every=5, samples=4),
        save=SaveArgs(every=20),
        log=LogArgs(rollouts=True),
        steps=40,
    ))
