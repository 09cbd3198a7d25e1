#!/usr/bin/env bash
# Runs the tests in .venv, installing first when needed. Further arguments go to pytest.
#
#   ./launch/test.sh                      the default suite, under ten minutes on two cores
#   ./launch/test.sh --slow               then the slow tests, one at a time: up to an hour
#   ./launch/test.sh tests/engine -x      what pytest makes of it
#
# A process per core, at most four, shares the tests. One process runs them all when a file or test is named, with a
# selection of your own (-m), with a debugger or unhidden output, and with -n 0.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/install.sh

MAX_PROCESSES=4 # each takes about 1.5 GB
SOME_FAILED=1   # pytest's exit statuses
NOTHING_SELECTED=5

with_slow=false
own_selection=false
stop_at_failure=false
processes=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc would follow these
((processes <= MAX_PROCESSES)) || processes=$MAX_PROCESSES
((processes > 1)) || processes=
args=()
for arg in "$@"; do
  case "$arg" in
    --slow)
      with_slow=true
      continue
      ;;
    -m*)
      own_selection=true
      processes=
      ;;
    -x | --exitfirst | --maxfail*) stop_at_failure=true ;;
    -n* | --numprocesses* | --pdb* | --trace | -s | --capture=no | *.py | *::*) processes= ;;
  esac
  args+=("$arg")
done

export OMP_NUM_THREADS=1 # the processes fill the cores; with more threads they would spin waiting for each other

# run_pytest ARGUMENT...: those arguments behind the user's own. Returns: pytest's exit status.
run_pytest() {
  .venv/bin/python -m pytest ${processes:+-n "$processes"} ${args[@]+"${args[@]}"} "$@"
}

install_dsv4 dev
if $own_selection; then
  run_pytest
  exit
fi
if ! $with_slow; then
  run_pytest -m "not slow and not gpu"
  exit
fi

# A choice such as -k may leave one of the two halves empty, which pytest reports as a failure.
status=0
run_pytest -m "not slow and not gpu" || status=$?
if ((status != 0 && status != NOTHING_SELECTED)) && { $stop_at_failure || ((status != SOME_FAILED)); }; then
  exit "$status"
fi
slow_status=0
run_pytest -m "slow and not gpu" -n 0 || slow_status=$?
((slow_status != NOTHING_SELECTED)) || exit "$status"
((status == SOME_FAILED)) && exit "$status"
exit "$slow_status"
