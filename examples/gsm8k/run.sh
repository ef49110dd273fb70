#!/bin/sh
# Runs all roles on this machine. Ctrl-C stops them; the next start continues from the newest checkpoint.
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
