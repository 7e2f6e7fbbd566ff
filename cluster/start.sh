#!/usr/bin/env bash
# A Dask scheduler and its workers, on this machine or on several hosts through ssh, until Ctrl-C stops all of them.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: cluster/start.sh [--workers N] [--port PORT] [--host ADDRESS] [--scheduler-file FILE]
                        [--dashboard ADDRESS] [--patience SECONDS] [HOST ...]

Start a Dask scheduler here, and worker processes of one thread here or on every HOST, until Ctrl-C.

  --workers N            worker processes on each machine (default: 2)
  --port PORT            port of the scheduler, 0 for any free one (default: 8786)
  --host ADDRESS         address of this machine to listen at (default: 127.0.0.1, seen by this machine alone)
  --scheduler-file FILE  where the scheduler's address is written; removed at the end
  --dashboard ADDRESS    where the scheduler's dashboard listens (default: 127.0.0.1:8787, seen by this machine alone)
  --patience SECONDS     how long to wait for all workers (default: 60)
  HOST ...               run the workers there, through ssh; localhost is this machine, without ssh

Where DASK_CONFIG names the dask.yaml of cluster/certificates.sh, all of them speak TLS and refuse whoever does not.
TEXT
}

refuse() {
    echo "start.sh: $1" >&2
    exit 2
}

give_up() {
    echo "start.sh: $1" >&2
    exit 1
}

workers=2 port=8786 host=127.0.0.1 dashboard=127.0.0.1:8787 scheduler_file="" patience=60 hosts=()

is_port() {
    [[ $1 =~ ^[0-9]{1,5}$ ]] && ((10#$1 < 65536))
}

read_flags() {
    while (($#)); do
        [[ $1 != --*=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}"
        case $1 in
            --workers | --port | --host | --dashboard | --scheduler-file | --patience)
                [[ -n ${2-} ]] || refuse "$1 must have a value; got none. Try --help."
                ;;
        esac
        case $1 in
            -h | --help) usage && exit 0 ;;
            --workers) workers=$2 && shift ;;
            --port) port=$2 && shift ;;
            --host) [[ $2 == *:*:* && $2 != \[* ]] && host="[$2]" || host=$2; shift ;;
            --dashboard) dashboard=$2 && shift ;;
            --scheduler-file) scheduler_file=$2 && shift ;;
            --patience) patience=$2 && shift ;;
            -*) refuse "a flag must be known; got $1. Try --help." ;;
            *) hosts+=("$1") ;;
        esac
        shift
    done
    [[ $workers =~ ^[1-9][0-9]*$ ]] || refuse "--workers must be a positive number; got $workers. Try --workers 2."
    is_port "$port" || refuse "--port must be a number up to 65535; got $port. Try --port 8786."
    [[ $dashboard =~ ^[^:]+:[0-9]+$ ]] && is_port "${dashboard##*:}" || # Dask takes no address of IPv6 there
        refuse "--dashboard must be a name or IPv4 address, and a port; got $dashboard. Try --dashboard 127.0.0.1:8787."
    [[ $patience =~ ^[1-9][0-9]*$ ]] || refuse "--patience must be whole seconds; got $patience. Try --patience 60."
    [[ -z $scheduler_file || ! -e $scheduler_file ]] ||
        refuse "--scheduler-file must be new; got $scheduler_file. Remove it if the cluster that wrote it is gone."
    [[ -z $scheduler_file || (-d $(dirname -- "$scheduler_file") && -w $(dirname -- "$scheduler_file")) ]] ||
        refuse "--scheduler-file must be in a folder that can be written; got $scheduler_file. Make the folder."
    [[ -z ${DASK_CONFIG-} || -e $DASK_CONFIG ]] ||
        refuse "DASK_CONFIG must name a file; got $DASK_CONFIG. Name the dask.yaml of certificates.sh, or unset it."
    for name in "${hosts[@]-}"; do
        [[ -z $name || $name == localhost ]] || ! on_loopback ||
            refuse "$name must be able to reach the scheduler; got --host $host. Give --host an address of this machine."
    done
}

on_loopback() {
    [[ $host == 127.* || $host == localhost || $host == "[::1]" ]]
}

check_python_and_port() {
    local problem
    problem=$("$python" -c '
import socket, sys

python, host, port = sys.argv[1:]
try:
    from distributed.security import Security
    [Security().get_connection_args(role) for role in ("scheduler", "worker", "client")]
except ImportError:
    sys.exit(print(f"Python must have Dask; got python={python}. Activate the environment that daskgpt is installed in."))
except (ValueError, TypeError, OSError) as error:
    said, advice = " ".join(str(error).split()), "Check DASK_CONFIG and the files that it names, or ~/.config/dask."
    sys.exit(print(f"the settings of Dask must be readable; got error={said}. {advice}"))
try:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host.strip("[]"), int(port)), family=family).close()
except OSError as error:
    advice = "Give --host an address of this machine, and a --port that is free (0 for any)."
    print(f"the scheduler must be able to listen; got --host {host} --port {port} ({error}). {advice}")
' "$python" "$host" "$port")
    [[ -z $problem ]] || refuse "$problem"
}

# One heap that keeps its memory: see daskgpt/schedulers/local.py.
heap=(MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0)
# Longer intervals of Dask's own work between tasks: see BETWEEN_TASKS in daskgpt/schedulers/connect.py.
quiet=(
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL=${DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL:-500ms}"
    "DASK_DISTRIBUTED__WORKER__PROFILE__INTERVAL=${DASK_DISTRIBUTED__WORKER__PROFILE__INTERVAL:-100ms}"
    "DASK_DISTRIBUTED__WORKER__PROFILE__CYCLE=${DASK_DISTRIBUTED__WORKER__PROFILE__CYCLE:-10s}"
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__DISK=${DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__DISK:-False}"
)

started=() names=() # ids and names of the processes

# start NAME COMMAND ...: in the background, in a separate process group, so that Ctrl-C reaches only this script
start() {
    names+=("$1")
    shift
    set -m
    "$@" </dev/null &
    set +m
    started+=("$!")
}

alive() {
    kill -0 "$1" 2>/dev/null
}

# end PID ...: sends SIGTERM and waits ten seconds; a second signal would interrupt their shutdown
end() {
    local pid tries
    for pid in "$@"; do kill -TERM "$pid" 2>/dev/null || true; done
    for pid in "$@"; do
        for ((tries = 0; tries < 100; tries++)); do
            alive "$pid" || break
            sleep 0.1
        done
    done
}

# Workers first, while the scheduler can still unregister them. Processes that survive end with their group.
stop() {
    set +eu # nothing may cut this short: no second signal, and (before bash 4.4) no empty list
    trap '' INT TERM HUP
    local pid tries scheduler=${started[0]-none} others=()
    for pid in $(jobs -pr); do
        [[ $pid == "$scheduler" ]] || others+=("$pid")
    done
    end "${others[@]}"
    end "${started[@]:0:1}"
    for pid in "${started[@]}"; do
        # A killed process is there until the system has taken it apart, and for ever where nothing asks how it ended.
        for ((tries = 0; tries < 50; tries++)); do
            kill -KILL -- "-$pid" 2>/dev/null || break
            sleep 0.1
        done
    done
    rm -rf "$scratch" "$file"
}

check_running() {
    local number
    for number in "${!started[@]}"; do
        alive "${started[number]}" ||
            give_up "the scheduler and all workers must keep running; the ${names[number]} ended. Read what it said above."
    done
}

start_scheduler() {
    start scheduler env "${quiet[@]}" "$python" -m dask scheduler --host "$host" --port "$port" \
        --dashboard-address "$dashboard" --scheduler-file "$file" --preload daskgpt.profiling.dashboard
    until [[ -s $file ]]; do
        check_running
        sleep 0.1
    done
    address=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["address"])' "$file")
}

start_workers() {
    local name command
    local worker=(env "${quiet[@]}" "${heap[@]}" "$python" -m dask worker "$address" --nthreads 1 --nworkers "$workers"
        --no-dashboard --dashboard-address 127.0.0.1:0)
    for name in "${hosts[@]:-localhost}"; do
        if [[ $name == localhost ]]; then
            # By default a worker listens on every address of its machine.
            start "workers here" "${worker[@]}" --host "$host"
        else
            # With a terminal (-tt) the workers end when the connection does; without a scheduler, after a minute.
            printf -v command '%q ' env "PYTHONPATH=$PYTHONPATH" "DASK_LOGGING__DISTRIBUTED=$DASK_LOGGING__DISTRIBUTED" \
                ${DASK_CONFIG:+"DASK_CONFIG=$DASK_CONFIG"} "${worker[@]}" --death-timeout 60
            start "workers on $name" ssh -tt -o BatchMode=yes "$name" "exec $command"
        fi
    done
}

wait_for_workers() {
    local count=$((workers * (${#hosts[@]} ? ${#hosts[@]} : 1))) ready
    "$python" -c '
import sys
from distributed import Client

address, dashboard, count, patience = *sys.argv[1:3], *map(int, sys.argv[3:])
with Client(address, timeout=30) as client:
    try:
        client.wait_for_workers(count, timeout=patience)
    except TimeoutError:
        found = len(client.scheduler_info(n_workers=-1)["workers"])
        sys.exit(f"start.sh: all workers must register in {patience} seconds; got {found} of {count}. Try a longer --patience.")
    port = client.scheduler_info(n_workers=0)["services"]["dashboard"]
    print(f"scheduler  {address}\nworkers    {count}, of one thread each\ndashboard  http://{dashboard}:{port}/status")
' "$address" "${dashboard%:*}" "$count" "$patience" &
    ready=$!
    while alive "$ready"; do
        check_running
        sleep 0.1
    done
    wait "$ready" || exit 1
}

# From the start, so that a signal ends the script in the same way at any time.
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

read_flags "$@"
python=$(command -v python || command -v python3) || refuse "Python must be on the PATH; got none. Activate its environment."
check_python_and_port
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" DASK_LOGGING__DISTRIBUTED="${DASK_LOGGING__DISTRIBUTED:-warning}"

scratch=$(mktemp -d)
file=${scheduler_file:-$scratch/scheduler.json}
export DASK_TEMPORARY_DIRECTORY=$scratch
trap stop EXIT

start_scheduler
on_loopback || [[ $address == tls://* ]] ||
    echo "start.sh: no TLS: whoever reaches $host can run code here; see Safety in cluster/README.md" >&2
start_workers
wait_for_workers
echo "train      python -m daskgpt.train --scheduler ${scheduler_file:+file:}$(printf %q "${scheduler_file:-$address}")"
echo "Ctrl-C stops the cluster."
while :; do
    check_running
    sleep 0.5
done
