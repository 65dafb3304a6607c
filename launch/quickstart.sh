#!/usr/bin/env bash
# From a clone to a learning curve, on two CPU cores: installs into .venv, makes a tiny model and its task, trains it with PPO on
# real FSDP2 and real vLLM, or (bash launch/quickstart.sh grpo) with GRPO on real Megatron-Core and real SGLang, and reports.
# Flags go to the training script: bash launch/quickstart.sh --steps 20 --seed 1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

recipe=ppo
case ${1:-} in
    ppo | grpo) recipe=$1; shift ;;
    -* | "") ;;
    *) echo "quickstart: $1 is neither ppo nor grpo nor a flag" >&2; exit 2 ;;
esac

bash launch/setup.sh
export PATH=$PWD/.venv/bin:$PATH OMP_NUM_THREADS=1  # one thread a rank: more of them fight over the cores

run=runs/quickstart-$recipe n=2  # each call gets a folder of its own, so that none continues or overwrites an earlier run
while [[ -e $run ]]; do run=runs/quickstart-$recipe-$((n++)); done

fail() { echo "quickstart: $1 failed; the cause stands above." >&2; exit 1; }
python launch/make_tiny.py runs/tiny_data || fail "making the tiny model"
echo "quickstart: training; the engines take half a minute to start"
torchrun --standalone --nproc-per-node 2 launch/${recipe}_tiny.py --out "$run" "$@" || fail "training"
python launch/report.py "$run" || fail "the report"

cat <<END
metrics:     $run/metrics.jsonl, or .venv/bin/tensorboard --logdir runs
rollouts:    $run/rollouts/, a parquet file a step: texts, ids, log-probs, rewards, advantages
model:       $run/hf/, which transformers.AutoModelForCausalLM.from_pretrained opens
END
