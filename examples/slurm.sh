#!/bin/bash
# One job on several hosts under Slurm: sbatch --nodes 4 --gpus-per-node 8 examples/slurm.sh recipes/flux_flow_grpo.toml
# The run folder must be on a disk that all hosts share. A job that is preempted (SIGTERM, with notice) leaves a
# checkpoint and is put back into the queue; a rank that dies is restarted by torchrun with all others, and the run goes
# on from the newest whole checkpoint.
#SBATCH --job-name stretto
#SBATCH --ntasks-per-node 1
#SBATCH --cpus-per-task 32
#SBATCH --time 24:00:00
#SBATCH --signal TERM@300
#SBATCH --requeue
#SBATCH --open-mode append
set -euo pipefail

recipe=${1:?name a recipe}
shift
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# srun passes the signal on to torchrun, which passes it on to the ranks: they finish the iteration and save.
exec srun --kill-on-bad-exit 1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head:29500" \
    --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts 3 \
    --shutdown-timeout 280 \
    -m stretto train "$recipe" --resume auto "$@"
