#!/usr/bin/env bash
# A sweep over all nodes of a SLURM allocation, put back into the queue until every cell is done:
#
#     sbatch --nodes=2 --gpus-per-node=4 --time=01:00:00 examples/slurm.sh configs/full.yaml
#
# What follows the config is for `sweep run`. The folder you submit from must be the same on all nodes, and what `python` and
# `sweep` are there must have this program installed (put `. .venv/bin/activate` below). Two jobs in one folder: the second ends.
#SBATCH --job-name=sweep
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

config=${1:?which config? sbatch examples/slurm.sh configs/full.yaml}
shift
port=${RAY_PORT:-6379}
starting_s=120     # for Ray to be there
closing_s=120      # kept of the allocation, to end in order

# Who has no token of this job's is not let in. What measures runs at niceness 0.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
step=(srun --overlap --nodes=1 --ntasks=1)

address=$("${step[@]}" --nodelist="${nodes[0]}" hostname --ip-address | awk '{print $1}')
trap 'jobs -p | xargs --no-run-if-empty kill 2>/dev/null || true' EXIT
there() { ray status --address="$address:$port" 2>/dev/null | grep --count ' node_' || true; }
until_there() {
    for ((waited = 0; waited < starting_s && $(there) < $1; waited++)); do sleep 1; done
}

"${step[@]}" --nodelist="${nodes[0]}" \
    ray start --head --node-ip-address="$address" --port="$port" --include-dashboard=false --block &
until_there 1
for node in "${nodes[@]:1}"; do
    "${step[@]}" --nodelist="$node" ray start --address="$address:$port" --block &
done
until_there "${#nodes[@]}"     # one that is late takes part when it comes

ends=$(squeue --noheader --job="$SLURM_JOB_ID" --format=%e)
limit=()
if ends=$(date --date="$ends" +%s 2>/dev/null); then     # else the job has no limit
    left=$((ends - $(date +%s) - closing_s))
    limit=(--time-limit "$((left > 1 ? left : 1))s")
fi
code=0
sweep run "$config" --address "$address:$port" "${limit[@]}" "$@" || code=$?

# 75: out of time with cells left, see README. What is finished is kept, and the next allocation goes on from there.
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
