#!/usr/bin/env bash
# A training run as a Slurm job: a scheduler, a worker for each of the job's tasks, and daskgpt.train with the flags given.
# From the repository's folder, which all nodes must share, with the Python environment activated:
#
#   sbatch --nodes 2 --ntasks-per-node 16 --time 04:00:00 cluster/slurm.sh --preset gpt2 --steps 5000
# Two minutes before its time is over (or after `scancel --batch --signal TERM JOB`) the run saves a checkpoint, and the
# job is queued again and continues from it. A plain `scancel JOB` ends it.
#SBATCH --job-name=daskgpt
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

run=runs/slurm-$SLURM_JOB_ID
scratch=$run-cluster # on the file system that all nodes share
rm -rf "$scratch" && mkdir -p runs
trap 'rm -rf "$scratch"' EXIT

# A certificate for this job alone: other users of the nodes can reach the ports, but not use them.
cluster/certificates.sh "$scratch" 30 >/dev/null
export DASK_CONFIG=$PWD/$scratch/dask.yaml DASK_LOGGING__DISTRIBUTED=warning
host=() && ((SLURM_NNODES > 1)) || host=(--host 127.0.0.1)

dask scheduler "${host[@]}" --port 0 --scheduler-file "$scratch/scheduler.json" --dashboard-address 127.0.0.1:0 &
scheduler=$!
srun --overlap dask worker --scheduler-file "$scratch/scheduler.json" "${host[@]}" --nthreads "${SLURM_CPUS_PER_TASK:-1}" \
    --no-dashboard --dashboard-address 127.0.0.1:0 --death-timeout 60 --local-directory "${TMPDIR:-/tmp}" &
until [[ -s $scratch/scheduler.json ]]; do # Dask itself would wait for it as long as the job lasts
    kill -0 "$scheduler" 2>/dev/null || { echo "slurm.sh: the scheduler must start; read what it said above." >&2 && exit 1; }
    sleep 0.2
done
python -c "from distributed import Client; Client(scheduler_file='$scratch/scheduler.json').wait_for_workers($SLURM_NTASKS, 120)"

from=(--out "$run" "$@")
if compgen -G "$run/step-*/state.json" >/dev/null; then # file systems without links have no `latest`
    from=(--resume "$run")
elif [[ -e $run ]]; then # the job was queued again before its first checkpoint, as after the loss of a node
    mv "$run" "$run-$(date +%s)"
fi
python -m daskgpt.train --scheduler "file:$scratch/scheduler.json" "${from[@]}" &
training=$!
trap 'kill -TERM $training' TERM
wait "$training" && code=0 || code=$?
((code < 128)) || { wait "$training" && code=0 || code=$?; } # the first wait ended with the signal
((code != 75)) || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
