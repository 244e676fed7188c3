#!/bin/bash
# One job on several hosts under Slurm: sbatch --nodes 4 --gpus-per-node 8 examples/slurm.sh recipes/flux_flow_grpo.toml
# The run folder must be on a disk that all hosts share. A job that is preempted (SIGTERM, with notice) leaves a
# checkpoint and, where the partition requeues what it preempts, is put back into the queue; at the time limit it leaves
# one too, and goes on when it is submitted again. A rank that dies is restarted by torchrun with all others, and the
# run goes on from the newest whole checkpoint. Submit it from the directory of the recipe's relative paths, with the
# environment that has stretto and torchrun active; without --gpus-per-node a host runs one process.
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
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs may share their first host

# Where a host has several interfaces, name the one over which hosts reach each other:
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0

# srun passes the signal on to torchrun, which passes it on to the ranks: they finish the iteration and save. When one
# host's torchrun fails, --kill-on-bad-exit ends the others, those too that can no longer reach it.
exec srun --kill-on-bad-exit 1 --cpus-per-task "${SLURM_CPUS_PER_TASK:-1}" torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head:$port" \
    --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts 3 \
    --shutdown-timeout 280 \
    -m stretto train "$recipe" --resume auto "$@"
