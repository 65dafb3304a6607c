#!/usr/bin/env bash
# One task per GPU on any number of nodes, without torchrun; from the repository, with the Python environment active:
#     sbatch --nodes 2 launch/slurm.sh ppo_fsdp_vllm.py --actor.model ... --out runs/NAME --save.every 50 --save.grace 280
# Slurm signals the ranks 300 s before the time limit, and on preemption; they save, exit with 85, and the job is queued again,
# to go on from that checkpoint. Hence --save.grace (the seconds there are), and --save.every: without checkpoints it would begin anew.
#SBATCH --job-name=glassrl
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --time=24:00:00
# No --gpus-per-task: it would hide the other GPUs of the node, and rank 3 would look for a cuda:3 that it cannot see.
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
# No "B:" before TERM: that would signal this shell alone; without it, every task and not this shell.
#SBATCH --signal=TERM@300
#SBATCH --requeue
set -u
cd "$SLURM_SUBMIT_DIR" || exit

read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST") && [[ $MASTER_ADDR ]] || { echo "slurm.sh: no first node" >&2; exit 1; }
export MASTER_ADDR MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))  # one to a job, below the ports that systems hand out themselves
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not take sbatch's
export STOPPED=/tmp/glassrl_stopped_$SLURM_JOB_ID  # rank 0 runs on this node
rm -f "$STOPPED"
trap 'rm -f "$STOPPED"' EXIT

# srun's exit code is the highest of all tasks, and it kills all as soon as one fails. So that 85 neither kills a rank that is still
# closing down nor hides another's failure, a task turns it into 0 and a file: all ranks stop together, so rank 0 tells. The task's
# shell passes TERM on, because slurm may signal only the process that it started; `wait` returns early then, and waits again.
srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
    told= child=
    trap "told=yes again=yes; kill -TERM \$child 2>/dev/null" TERM
    python "$@" & child=$!
    [[ $told ]] && kill -TERM $child
    while again=; wait $child; code=$?; [[ $again ]]; do :; done
    [[ $code == 143 && $told ]] && code=85  # so early that the script did not listen yet
    ((code == 85)) && { code=0; ((RANK)) || touch "$STOPPED"; }
    exit $code' task "$@"
code=$?

if ((code == 0)) && [[ -e $STOPPED ]]; then
    echo "slurm.sh: stopped by a signal; back into the queue"
    scontrol requeue "$SLURM_JOB_ID" || exit 85
fi
exit $code
