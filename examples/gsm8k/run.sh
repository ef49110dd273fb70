#!/bin/sh
# All roles on this machine. Ctrl-C ends them all; started again, they go on from the newest checkpoint.
set -eu
cd "$(dirname "$0")"
trap 'kill $pids 2>/dev/null; wait' EXIT
trap 'exit 130' INT TERM

rollq redis --dir redis &
pids=$!
for role in produce work; do
    rollq "$role" rollq.toml &
    pids="$pids $!"
done
rollq train rollq.toml
