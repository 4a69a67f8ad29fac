"""What runs on hosts: a shell script for each island. `hosts.py` puts `job=FOLDER` and `log=FILE` before it."""

END = "end-of-file-7f3a"  # no line of our files is like that
BEGINS = "begin-of-output-7f3a"  # what a host prints before that is a greeting of its login files

# Another process may have the number of one that is gone.
# An island lives on where only the script that watches it was killed: it is in the same process group.
ALIVE = """alive() {
    pid=$(cat "$job/pid" 2>/dev/null) && [ -n "$pid" ] || return 1
    kill -0 "$pid" 2>/dev/null && is_ours "$pid" && return 0
    for member in $(pgrep -g "$pid" 2>/dev/null); do is_ours "$member" && return 0; done
    return 1
}
is_ours() { [ ! -r "/proc/$1/cmdline" ] || tr '\\0' ' ' <"/proc/$1/cmdline" | grep -qF "$job/"; }"""
START = """set -e
umask 077
command -v setsid >/dev/null || { echo "setsid is missing there: install util-linux" >&2; exit 1; }
mkdir -p "$job"
if alive; then exit 0; fi
WRITES
rm -f "$job/exit"
setsid sh "$job/run.sh" >>"$log" 2>&1 </dev/null &
echo $! >"$job/pid"
"""
STATE = """if alive; then echo running
elif [ -s "$job/exit" ]; then echo ended; cat "$job/exit"
elif [ -s "$job/pid" ]; then echo gone
else echo absent; fi"""
CANCEL = """if alive; then
    group=$pid
    { is_ours "$group" && kill -TERM "$group" 2>/dev/null; } || kill -TERM "-$group" 2>/dev/null
    while alive && [ "$grace_s" -gt 0 ]; do sleep 1; grace_s=$((grace_s - 1)); done
    kill -KILL "-$group" 2>/dev/null
fi
cat "$log" 2>/dev/null
rm -rf "$job"
"""
# Islands of another run may have the ports; those of an earlier process of this one are free after a moment.
PORTS = """listens() { cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -q ":$(printf %04X "$1") [0-9A-F:]* 0A"; }
for port in PORTS; do
    tries=0
    while listens "$port"; do
        tries=$((tries + 1))
        if [ "$tries" -gt 5 ]; then
            other=$(pgrep -af -- "--attach .* --port ($port|$((port - 1)))( |$)" 2>/dev/null | head -n 1)
            other=$(printf '%s' "$other" | sed -n 's/.* --dir \\([^ ]*\\) .*/\\1/p')
            echo "port $port is taken by ${other:-another program}: end that, or launch with another launch.port" >&2
            exit 1
        fi
        sleep 1
    done
done"""
# The GPUs of one of several islands on a host, which are not known before: CUDA_VISIBLE_DEVICES, or all there are.
# Islands of one process share GPUs, in turn, where there are too few; larger ones are refused then.
GPUS = """gpus=${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null)}
gpus=$(printf '%s' "$gpus" | tr -s ', \\n' '\\n' | awk -v first=FIRST -v each=EACH '{ gpu[NR - 1] = $1 }
    END { if (NR && each > 1 && first + each > NR) exit 1
          for (k = first; k < first + each && NR; k++) printf "%s%s", (k > first ? "," : ""), gpu[k % NR] }') ||
    { echo "too few GPUs on this host: NAME needs EACH, after FIRST of other islands" >&2; exit 2; }
[ -z "$gpus" ] || export CUDA_VISIBLE_DEVICES=$gpus"""
PRINTED = 'cat "$log" 2>/dev/null || true'
