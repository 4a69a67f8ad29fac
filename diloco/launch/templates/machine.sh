#!/bin/bash
# Run one machine's part of an island: bash machine.sh NODES HOST PORT PROCESSES TORCHRUN… -- COMMAND…
# HOST:PORT of the first machine is where the machines meet. Slurm and Kubernetes run this on each of them.
# It exits as `diloco run --attach` does: 0 when the run is finished, 75 when it has left before (start it again).
# A finished run is also noted in the file DILOCO_FINISHED, where that is set: srun's exit code is 0 for a lost node, too.
nodes=$1 host=$2 port=$3 processes=$4
shift 4
torchrun=()
while [ "$1" != -- ]; do torchrun+=("$1"); shift; done
shift
asked='' left='' heard=yes

end() {
    if [ -n "$left" ] || { [ -n "$asked" ] && [ $code -ne 0 ]; }; then code=75; fi
    [ $code -ne 0 ] || [ -z "${DILOCO_FINISHED:-}" ] || touch "$DILOCO_FINISHED"
    exit $code
}

if [ "$nodes" -eq 1 ] && [ -z "${DILOCO_TORCHRUN:-}" ]; then     # diloco itself starts the processes of one machine
    "$@" &
    child=$!
    trap 'asked=yes heard=yes; kill -TERM $child 2>/dev/null' TERM
    while [ -n "$heard" ]; do heard=''; wait $child; code=$?; done      # a signal interrupts `wait`
    end
fi

# torchrun knows success and failure only, after a signal it kills its processes within 30 s, and once they have ended it
# waits for other machines. So it hears no signals here; its processes get them directly, and one that leaves (75)
# counts as a success that is written down.
DILOCO_RANKS=$(mktemp -d)
OMP_NUM_THREADS=$(((${OMP_NUM_THREADS:-1} + processes - 1) / processes))
export DILOCO_RANKS OMP_NUM_THREADS PET_SIGNALS_TO_HANDLE=SIGQUIT
signal_ranks() { local ranks=("$DILOCO_RANKS"/[0-9]*); kill "$1" "${ranks[@]##*/}" 2>/dev/null; }
# A process ignores SIGTERM until it can leave in good order, which takes seconds; a second one would end it at once.
declare -A told
ask_ranks() {
    local rank ignored
    for rank in "$DILOCO_RANKS"/[0-9]*; do
        rank=${rank##*/}
        ignored=$(awk '/^SigIgn/ { print $2 }' "/proc/$rank/status" 2>/dev/null)
        [ -z "$ignored" ] || [ -n "${told[$rank]:-}" ] || ((16#$ignored & 1 << 14)) || { kill -TERM "$rank"; told[$rank]=yes; }
    done
}
trap 'asked=yes told=()' TERM
rank='"$@" & touch "$DILOCO_RANKS/$!"; wait $!; code=$?; [ $code = 75 ] || exit $code; touch "$DILOCO_RANKS/left"'
(
    trap '' TERM
    exec "${torchrun[@]}" --nnodes "$nodes" --node-rank "${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-0}}" \
        --nproc-per-node "$processes" --master-addr "$host" --master-port "$port" --max-restarts 0 \
        --no-python bash -c "$rank" rank "$@"
) &
agent=$!
while kill -0 $agent 2>/dev/null; do
    [ -z "$asked" ] || ask_ranks
    if [ -e "$DILOCO_RANKS/left" ] && ! signal_ranks -0; then kill -KILL $agent; fi
    { sleep 1 & wait $!; } 2>/dev/null  # which a signal interrupts
done
wait $agent 2>/dev/null
code=$?
[ ! -e "$DILOCO_RANKS/left" ] || left=yes
rm -r "$DILOCO_RANKS"
end
