#!/bin/bash
# Islands of a diloco run as tasks of a Slurm array: task K is island-K. `diloco launch --on slurm` fills in what stands
# in double braces and submits it; `sbatch FILE` does so by hand, after any change, any number of times.
#SBATCH --job-name={{job}}
#SBATCH --array={{array}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output="{{logs}}/island-%a.log"
#SBATCH --signal=B:TERM@{{grace_s}}
{{options}}

set -u
here={{here}}                           # secrets, configuration and logs of the launch
number=$SLURM_ARRAY_TASK_ID island=island-$SLURM_ARRAY_TASK_ID
task=${SLURM_ARRAY_JOB_ID}_$number      # not SLURM_JOB_ID: one task's is that of the whole array
port=$(({{port}} + 2 * number)) rendezvous=$(({{port}} - 1 - number))
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK      # srun does not take it over
cd {{directory}} || exit 1
{{setup}}

# Where others reach this island: its first node, as Slurm itself reaches it, or by an interface that is given.
address() {
    local interface={{interface}}
    if [ -n "$interface" ]; then
        ip -o addr show dev "$interface" scope global | awk '{ sub("/.*", "", $4); print $4; exit }'
    else
        scontrol show node "$SLURMD_NODENAME" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2
    fi
}
# Slurm itself ends a job that is cancelled, requeued or preempted: then nothing is left to do here. While it does not
# answer, as when it is busy, the job is taken for one that runs: a signal or a failure is not to be lost by that.
is_running() {
    local state
    state=$(squeue --noheader --jobs="$task" --states=all --format=%T 2>/dev/null) || return 0
    [ "$state" = RUNNING ]
}
say() { echo "$(date -Is) $island $*"; }
queue_again() {     # it has left before the end: make room, and come back
    say "has left and is queued again"
    for _ in 1 2 3; do
        if scontrol requeue "$task"; then exit 0; fi
        sleep 10
    done
    say "cannot be queued again by scontrol: start it with the same \`diloco launch\` command" >&2
    exit 75
}

# An island that comes back when the others have finished and gone would wait for them for ever.
export DILOCO_FINISHED=$here/finished
[ ! -e "$DILOCO_FINISHED" ] || { say "has nothing to do: the run is finished"; exit 0; }
host=$(address)
[ -n "$host" ] || { say "has no address on this node: set launch.interface" >&2; exit 1; }
mkdir -p "$here/at" && echo "$host:$port" >"$here/at/.$island" && mv "$here/at/.$island" "$here/at/$island"
say "starts on $SLURM_JOB_NODELIST at $host:$port (queued again ${SLURM_RESTART_COUNT:-0} times)"

asked='' failures=0
trap 'asked=yes heard=yes; if is_running; then scancel --signal=TERM "$task"; fi' TERM    # to all nodes of the island
while :; do
    SECONDS=0 heard=yes
    # once one node has ended, the others have as long as a request to stop gives them
    srun --kill-on-bad-exit=0 --wait={{grace_s}} {{srun}} bash "$here/machine.sh" \
        {{nodes}} "$host" "$rendezvous" {{processes}} {{torchrun}} -- \
        {{program}} run "$here/config.yaml" --attach "$here/secrets/$island" --at "$here/at" \
        --dir {{folder}}/$island --host "$host" --port "$port" {{changes}} &
    step=$!
    (until [ -e "$DILOCO_FINISHED" ]; do sleep 10; done; sleep {{grace_s}}; exec scancel --signal=TERM "$task") &
    watcher=$!
    while [ -n "$heard" ]; do heard=''; wait $step; code=$?; done       # a signal interrupts `wait`
    kill $watcher 2>/dev/null
    if [ -e "$DILOCO_FINISHED" ]; then
        [ $code -eq 0 ] || say "was away when the run was finished"
        exit 0
    fi
    is_running || exit $code
    if [ $code -eq 75 ] || [ -n "$asked" ]; then queue_again; fi
    [ $SECONDS -lt 600 ] || failures=0
    failures=$((failures + 1))
    [ $failures -le {{restarts}} ] || exit $code
    say "has failed with exit code $code and is started again in 10 s ($failures of {{restarts}})"
    sleep 10
    if [ -n "$asked" ]; then is_running || exit $code; queue_again; fi
done
