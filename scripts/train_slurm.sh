#!/usr/bin/env bash
# Trains on one or several nodes of a SLURM cluster. An example: set the lines of your cluster.
#
#   sbatch --nodes 2 scripts/train_slurm.sh fsdp scripts/train_stage2.py \
#     --config configs/tiny/stage2.yaml train.parallel=fsdp
#
# The first argument is a file of configs/accelerate, without .yaml; the rest is the command. Run
# directory, data and checkpoints have to be on a file system that all nodes see.
# Ten minutes before the time is up, and when it is preempted, the run saves and ends; the job is
# queued again and goes on from there, on as many nodes as it then gets.
#SBATCH --job-name=animegamer
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --output=runs/slurm-%j.out
set -euo pipefail

if [ "$#" -lt 2 ] || [ ! -f "configs/accelerate/$1.yaml" ]; then
  echo "usage: sbatch [--nodes N] scripts/train_slurm.sh ddp|fsdp|deepspeed_zero2|deepspeed_zero3" \
    "SCRIPT ARGUMENTS..., from the repository's root" >&2
  exit 2
fi
mode=$1
shift
nodes=${SLURM_JOB_NUM_NODES:?start it with sbatch}
gpus=${SLURM_GPUS_ON_NODE:?no GPUs: see --gpus-per-node}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
main_node=${hosts%%$'\n'*}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# How long the launcher leaves the processes to finish their step and save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-540}

# The node's number is known only on the node: hence the quotes. Without --kill-on-bad-exit, the
# other nodes would wait for one that failed.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch \
  --config_file "$0" --num_machines "$1" --machine_rank "$SLURM_NODEID" --num_processes "$2" \
  --main_process_ip "$3" --main_process_port 29500 "${@:4}"' \
  "configs/accelerate/$mode.yaml" "$nodes" "$((nodes * gpus))" "$main_node" "$@" &
step=$!

requeue=0
# SIGTERM to the launchers; they pass it on, and every process saves after its step.
trap 'requeue=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1 TERM
code=0
wait "$step" || code=$?
if [ "$requeue" = 1 ]; then # the signal ended the first wait, not the step
  code=0
  wait "$step" || code=$?
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
