#!/usr/bin/env bash
# The whole path on one machine: installs into .venv, makes a tiny random checkpoint, serves it with Ray Serve, asks one
# chat question and stays up until Ctrl-C.
#
#   ./launch/quickstart.sh          stay up after the answer
#   ./launch/quickstart.sh --once   stop after the answer; the exit code tells whether it came
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/install.sh
source launch/environment.sh

CONFIG=configs/dsv4.yaml
CHECKPOINT=checkpoints/tiny
LOG=quickstart.log
STOP_LIMIT_S=45 # Serve itself gives up on a graceful end after 30 s

once=false
case "${1:-}" in
  "") ;;
  --once) once=true ;;
  *)
    sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    [[ $1 == --help || $1 == -h ]] && exit 0 || exit 2
    ;;
esac

serve_pid=
ray_dir=

# Ends what this script started, by id: first as Ctrl-C would, then by force.
stop() {
  local waited=0
  if [[ -n $serve_pid ]] && kill -INT "$serve_pid" 2>/dev/null; then
    while kill -0 "$serve_pid" 2>/dev/null; do
      sleep 0.2
      waited=$((waited + 1))
      if ((waited > STOP_LIMIT_S * 5)); then
        # Ray's own processes end with the process that started them.
        kill -KILL "$serve_pid" 2>/dev/null || true
      fi
    done
  fi
  [[ -z $ray_dir ]] || rm -rf "$ray_dir"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

show_log() {
  printf '%s\n' "--- last lines of $LOG ---" >&2
  tail -n 40 "$LOG" >&2
}

install_dsv4
.venv/bin/dsv4 make-checkpoint --preset tiny --out "$CHECKPOINT"
.venv/bin/dsv4 check "$CONFIG" --port-free

# Ray keeps its sockets and logs here. The path is short because Unix socket names must stay below 108 bytes.
ray_dir=$(mktemp -d /tmp/dsv4.XXXXXX)
export RAY_TMPDIR=$ray_dir
say "starting Ray and the cluster (log: $LOG; while it runs, one per process in $ray_dir/ray/session_latest/logs)"
set -m # a process group of its own: Ctrl-C reaches this script alone, which then ends the rest in order
.venv/bin/serve run "$CONFIG" >"$LOG" 2>&1 &
serve_pid=$!
set +m

if ! .venv/bin/python launch/first_answer.py "$CONFIG" "$LOG" "$serve_pid"; then
  show_log
  fail "no answer; see above"
fi
$once && exit 0

say
say "serving; try the README's curl example. Ctrl-C stops everything."
wait "$serve_pid" || fail "serve ended by itself; see $LOG"
