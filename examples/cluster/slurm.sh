#!/bin/bash
# A Ray cluster for one Slurm job, and polar up on its first machine:  sbatch examples/cluster/slurm.sh
# POLAR_STORE__URL, POLAR_SERVER__TOKEN and POLAR_SERVER__NODE_TOKEN are set where sbatch is called.
#SBATCH --job-name=polar
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@180
set -euo pipefail

port=${RAY_PORT:-6379}
config=${POLAR_CONFIG:-examples/cluster/polar.toml}
export RAY_USAGE_STATS_ENABLED=0

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${machines[0]}
others=$((${#machines[@]} - 1))
address=$(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --ip-address | awk '{print $1}')

# Ray runs below srun, so that it ends with the job. Machines keep Slurm's names, and nodes their data, in every job.
# shellcheck disable=SC2016  # the name is that of the machine where it runs
start='exec ray start --block --disable-usage-stats --node-name="$SLURMD_NODENAME" --resources="{\"polar_node\": 1}" "$@"'
srun --nodes=1 --ntasks=1 --nodelist="$first" --overlap \
    bash -c "$start" - --head --include-dashboard=false --node-ip-address="$address" --port="$port" &
until ray health-check --address "$address:$port" 2> /dev/null; do
    kill -0 $! || exit 1 # it could not be started, and has said why
    sleep 1
done
if ((others > 0)); then
    srun --nodes="$others" --ntasks="$others" --exclude="$first" bash -c "$start" - --address="$address:$port" &
fi

export POLAR_CLUSTER__ADDRESS="$address:$port"
polar up --config "$config" &
server=$!
trap 'kill -TERM "$server"' TERM INT # before the time is up: nodes are drained, and hand back their work
status=0
wait "$server" || status=$?
while kill -0 "$server" 2> /dev/null; do # a signal ends `wait` before its time
    status=0
    wait "$server" || status=$?
done
# shellcheck disable=SC2046  # one word a process
kill $(jobs -p) 2> /dev/null || true
wait
exit "$status"
