#!/usr/bin/env bash
# A Slurm on one machine for tests: no systemd, no cgroups, no database. Debian (slurm 22.05 of bookworm), root.
#   slurm.sh install          installs what is missing
#   slurm.sh up NODES GPUS    starts munged (if none answers), slurmctld and NODES slurmds (8 nodes of 2 GPUs each)
#   slurm.sh down             ends all that `up` has started
# The nodes n1..nK are virtual: a slurmd each, with a port of its own, all of them at 127.0.0.1. Each has as many CPUs as
# GPUs, whatever this machine has. A GPU is a link to /dev/null, the device file that a GRES without cgroups asks for;
# so each node hands out the numbers 0, 1, … in CUDA_VISIBLE_DEVICES as a real one does.
# SLURM_TEST_DIR holds the configuration, states, logs and pid files; clients find it by SLURM_CONF=$SLURM_TEST_DIR/slurm.conf.
set -euo pipefail
DIR=${SLURM_TEST_DIR:-${TMPDIR:-/tmp}/slurm-test}
PORT=${SLURM_TEST_PORT:-26817}          # slurmctld's; node k has PORT + 100 + k
HOST=$(hostname -s)
export SLURM_CONF=$DIR/slurm.conf

install_packages() {
    command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && return
    # the packages' scripts try to start services, which is refused where there is no systemd
    local policy=/usr/sbin/policy-rc.d made=
    [ -e $policy ] || { made=yes; printf '#!/bin/sh\nexit 101\n' >$policy; chmod +x $policy; }
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -qq install -y --no-install-recommends \
        slurmctld slurmd slurm-client munge >/dev/null
    [ -z "$made" ] || rm $policy
}

munge_up() {
    munge -n </dev/null 2>/dev/null | unmunge >/dev/null 2>&1 && return
    [ -s /etc/munge/munge.key ] || dd if=/dev/urandom of=/etc/munge/munge.key bs=1 count=1024 status=none
    chown munge:munge /etc/munge/munge.key; chmod 400 /etc/munge/munge.key
    install -d -o munge -g munge -m 0755 /run/munge
    install -d -o munge -g munge -m 0700 /var/log/munge /var/lib/munge
    su -s /bin/sh munge -c '/usr/sbin/munged --force'
    touch "$DIR/munged-is-ours"
    for _ in $(seq 50); do munge -n </dev/null 2>/dev/null | unmunge >/dev/null 2>&1 && return; sleep 0.1; done
    echo "munge does not answer" >&2; exit 1
}

configure() {
    local nodes=$1 gpus=$2
    mkdir -p "$DIR"/state "$DIR"/log "$DIR"/dev
    cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# a requeued job waits for its credential to expire: 120 s by default
AuthInfo=cred_expire=5
StateSaveLocation=$DIR/state
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdPidFile=$DIR/slurmd.%n.pid
SlurmdLogFile=$DIR/log/slurmd.%n.log
SlurmdSpoolDir=$DIR/spool.%n
# no cgroups here: follow processes by /proc, bind nothing
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1,requeue_delay=1
# a node that is set down stays down, though its slurmd answers
ReturnToService=1
JobRequeue=1
KillWait=10
MinJobAge=300
MessageTimeout=30
SlurmctldTimeout=60
SlurmdTimeout=60
# more CPUs than there are
SlurmdParameters=config_overrides
TreeWidth=64
CONF
    : >"$DIR/gres.conf"
    for n in $(seq "$nodes"); do
        echo "NodeName=n$n NodeHostname=$HOST NodeAddr=127.0.0.1 Port=$((PORT + 100 + n)) CPUs=$gpus Boards=1 Sockets=1 CoresPerSocket=$gpus ThreadsPerCore=1 RealMemory=2000 Gres=gpu:$gpus State=UNKNOWN" >>"$SLURM_CONF"
        for g in $(seq 0 $((gpus - 1))); do ln -sfn /dev/null "$DIR/dev/n$n-gpu$g"; done
        echo "NodeName=n$n Name=gpu File=$DIR/dev/n$n-gpu[0-$((gpus - 1))]" >>"$DIR/gres.conf"
    done
    echo "PartitionName=all Nodes=n[1-$nodes] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO" >>"$SLURM_CONF"
}

node_up() { mkdir -p "$DIR/spool.$1"; slurmd -N "$1" -f "$SLURM_CONF"; }

up() {
    local nodes=${1:-8} gpus=${2:-2}
    install_packages; mkdir -p "$DIR"; munge_up; configure "$nodes" "$gpus"
    getent hosts "$HOST" >/dev/null || echo "127.0.0.1 $HOST" >>/etc/hosts
    slurmctld -c -f "$SLURM_CONF"       # -c: forget earlier jobs
    for n in $(seq "$nodes"); do node_up "n$n"; done
    for _ in $(seq 150); do
        [ "$(sinfo -h -N -o %t 2>/dev/null | grep -c '^idle')" = "$nodes" ] && { sinfo; return; }
        sleep 0.2
    done
    sinfo; tail -5 "$DIR"/log/*.log >&2; exit 1
}

# whether a process runs; nobody may have waited for one that has ended, where init does not
runs() { [ -e "/proc/$1" ] && ! grep -q '^State:.*Z' "/proc/$1/status" 2>/dev/null; }

stop_daemons() {  # by their pid files, and waits for their ends
    local file pid pids=()
    for file in "$@"; do [ ! -s "$file" ] || pids+=("$(cat "$file")"); done
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do
        for _ in $(seq 100); do runs "$pid" || continue 2; sleep 0.1; done
        kill -KILL "$pid" 2>/dev/null || true
    done
}

down() {
    stop_daemons "$DIR"/slurmd.*.pid "$DIR"/slurmctld.pid
    [ ! -e "$DIR/munged-is-ours" ] || { stop_daemons /run/munge/munged.pid; rm "$DIR/munged-is-ours"; }
}

case ${1:-} in
    install) install_packages ;;
    up) up "${@:2}" ;;
    down) down ;;
    *) sed -n '2,5p' "$0"; exit 2 ;;
esac
