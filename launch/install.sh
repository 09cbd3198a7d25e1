# Sourced by quickstart.sh and test.sh. install_dsv4 [dev]: a .venv with the tested package versions. Done once per
# change of pyproject.toml or the constraints; a second run returns at once.

say() { printf '%s\n' "$*"; }

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the first Python >= 3.11: $PYTHON if set, else the usual names.
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [[ -n $candidate ]] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer found (python3 is $(python3 --version 2>&1 || true)); install one, or set PYTHON=/path/to/it"
}

# One line per extra that is installed, keyed by everything that decides what gets installed.
install_key() {
  cat pyproject.toml requirements/constraints-cpu.txt | cksum | tr ' ' '-'
}

install_dsv4() {
  local extra=${1:-} stamp=.venv/dsv4-installed key python
  key=$(install_key)
  # What was installed with the dev extra serves without it too.
  if [[ -x .venv/bin/python ]] && grep -qxF -e "$key dev" -e "$key ${extra:-base}" "$stamp" 2>/dev/null; then
    return
  fi
  if [[ ! -x .venv/bin/python ]]; then
    python=$(find_python)
    say "creating .venv with $python"
    "$python" -m venv .venv || fail "cannot create .venv; on Debian and Ubuntu install python3-venv"
  fi
  say "installing dsv4-cluster${extra:+ and its $extra extra} with pip: a few minutes the first time."
  say "  To download: about 0.4 GB, half of it torch${extra:+, and 0.3 GB for the $extra extra}; 1.5 GB on disk${extra:+, 2.7 GB with the extra}."
  say "  This holds for the CPU build of torch. The default build on Linux brings the CUDA libraries along, which makes it"
  say "  several GB; the README says how to get the CPU build."
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --constraint requirements/constraints-cpu.txt --editable ".${extra:+[$extra]}" ||
    fail "pip could not install the packages; its messages are above"
  printf '%s %s\n' "$key" "${extra:-base}" >>"$stamp"
}
