#!/bin/sh
# Keep one island at work (local, ssh): start it, pass on a request to stop, start it again when it fails.
# `diloco launch` fills this in, for {{place}}. It runs detached; `pid` and `exit` beside it say how it is.
cd {{directory}} || exit 1
{{setup}}
asked= child= failures=0 code=75 began=
trap 'asked=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM INT HUP
while [ -z "$asked" ]; do
    # an island that comes back when the others have finished and gone would wait for them for ever
    [ ! -e {{finished}} ] || { code=0 && break; }
    began=$(date +%s)
    {{command}} &
    child=$!
    (until [ -e {{finished}} ]; do sleep 10; done; sleep {{grace_s}}; kill -TERM "$child") 2>/dev/null &
    watcher=$!
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ends `wait` before the island has left
        wait "$child"
        code=$?
    done
    kill "$watcher" 2>/dev/null
    child=
    [ "$code" -ne 0 ] || touch {{finished}}
    [ ! -e {{finished}} ] || { code=0 && break; }
    if [ "$code" -ne 75 ]; then # 75: it left before the end, and can be started again
        [ $(($(date +%s) - began)) -lt 600 ] || failures=0 # what went well for so long counts as mended
        failures=$((failures + 1))
        [ "$failures" -le {{restarts}} ] || break
    fi
    [ -n "$asked" ] || sleep 3
done
[ -z "$asked" ] || [ "$code" -eq 0 ] || code=75
echo "$code" >{{job}}/exit
rm -f {{passing}}
exit "$code"
