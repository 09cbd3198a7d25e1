#!/usr/bin/env bash
# Runs the tests in .venv, installing first when needed. Further arguments go to pytest.
#
#   ./launch/test.sh                      the default suite, under ten minutes on two cores
#   ./launch/test.sh --slow               with the slow tests, up to an hour
#   ./launch/test.sh tests/engine -x      what pytest makes of it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/install.sh

selection="not slow and not gpu"
args=()
for arg in "$@"; do
  case "$arg" in
    --slow) selection="not gpu" ;;
    *) args+=("$arg") ;;
  esac
done

install_dsv4 dev
exec .venv/bin/python -m pytest -m "$selection" ${args[@]+"${args[@]}"}
