#!/bin/bash
# Run one machine's part of an island: bash machine.sh NODES HOST PORT PROCESSES TORCHRUN… -- COMMAND…
# HOST:PORT of the first machine is where the machines meet. Slurm and Kubernetes run this on each of them.
# It exits as `diloco run --attach` does: 0 when the run is finished, 75 when it has left before (start it again).
nodes=$1 host=$2 port=$3 processes=$4
shift 4
torchrun=()
while [ "$1" != -- ]; do torchrun+=("$1"); shift; done
shift
[ "$nodes" -gt 1 ] || exec "$@"         # diloco itself starts the processes of one machine

# torchrun knows success and failure only, and after a signal it kills its processes within 30 s. So it hears no signals
# here; its processes get them directly, and one that leaves (75) counts as a success that is written down.
export DILOCO_RANKS=$(mktemp -d)
trap 'for pid in "$DILOCO_RANKS"/[0-9]*; do kill -TERM "${pid##*/}" 2>/dev/null; done' TERM
rank='"$@" & touch "$DILOCO_RANKS/$!"; wait $!; code=$?; [ $code = 75 ] || exit $code; touch "$DILOCO_RANKS/left"'
export PET_SIGNALS_TO_HANDLE=SIGQUIT OMP_NUM_THREADS=$(((${OMP_NUM_THREADS:-1} + processes - 1) / processes))
(
    trap '' TERM
    exec "${torchrun[@]}" --nnodes "$nodes" --node-rank "${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-0}}" \
        --nproc-per-node "$processes" --master-addr "$host" --master-port "$port" --max-restarts 0 \
        --no-python bash -c "$rank" rank "$@"
) &
while kill -0 $! 2>/dev/null; do wait $!; code=$?; done
[ $code -ne 0 ] || [ ! -e "$DILOCO_RANKS/left" ] || code=75
rm -r "$DILOCO_RANKS"
exit $code
