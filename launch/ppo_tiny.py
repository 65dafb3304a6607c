"""PPO teaches a tiny model to add, on two CPU cores: torchrun --nproc-per-node 2 launch/ppo_tiny.py --out runs/tiny

The model and the data come from launch/make_tiny.py; launch/quickstart.sh runs both. Any flag of the script goes here too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import launch.cpu_engines  # noqa: E402, F401  before torch and vLLM
import ppo_fsdp_vllm as ppo  # noqa: E402

if __name__ == "__main__":
    tiny = "runs/tiny_data"
    ppo.cli(ppo.Args(
        actor=ppo.ActorArgs(model=f"{tiny}/model", lr=3e-4, schedule="linear"),
        critic=ppo.CriticArgs(lr=1e-3),
        data=ppo.DataArgs(train=(f"{tiny}/train.parquet",), val=(f"{tiny}/test.parquet",), max_prompt_length=16),
        batch=ppo.BatchArgs(prompts=128, max_tokens=8192),
        rollout=ppo.RolloutArgs(
            samples=4, max_response_length=4, dtype="float32", engine_args='{"max_num_seqs": 256, "enforce_eager": true}'
        ),
        reward=ppo.RewardArgs(fn="exact", workers=1),
        ppo=ppo.PPOArgs(minibatch_size=32),
        kl=ppo.KLArgs(where="loss", coef=0.2, kind="k3+"),  # without it, rewards of no meaning still move the greedy answers
        fsdp=ppo.FSDPArgs(param_dtype="float32"),
        val=ppo.ValArgs(every=5, samples=4),
        save=ppo.SaveArgs(every=20),
        log=ppo.LogArgs(rollouts=True),
        steps=60,
    ))
