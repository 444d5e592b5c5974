#!/usr/bin/env bash
# Makes .venv with the pinned packages of requirements.txt and this repository, or brings it up to
# date. Quick when nothing changed.
#   bash scripts/setup_env.sh          what running and training need
#   bash scripts/setup_env.sh --dev    and the tools of the tests and checks
# PYTHON=/path/to/python3 chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

requirements=(requirements.txt)
case "${1:-}" in
  "") ;;
  --dev) requirements+=(requirements-dev.txt) ;;
  *) echo "usage: bash scripts/setup_env.sh [--dev]" >&2; exit 2 ;;
esac

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11)
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if new_enough "$candidate"; then echo "$candidate"; return; fi
  done
  echo "The pinned packages need Python 3.11 or newer; ${candidates[0]} is:" \
    "$("${candidates[0]}" --version 2>&1 || true)" >&2
  echo "Install a newer one, then: PYTHON=/path/to/python3 bash scripts/setup_env.sh" >&2
  return 1
}

# A stamp says what was installed from a requirement file, for which interpreter and where.
stamp_of() {
  { .venv/bin/python --version; pwd; cat "$1" setup.py animegamer/__init__.py; } |
    .venv/bin/python -c \
      'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

if [ ! -x .venv/bin/python ] || ! new_enough .venv/bin/python; then
  python=$(find_python)
  echo "Making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
fi

arguments=()
for file in "${requirements[@]}"; do
  if [ "$(cat ".venv/stamp-$file" 2>/dev/null)" != "$(stamp_of "$file")" ]; then
    arguments+=(-r "$file")
  fi
done
if [ "${#arguments[@]}" -eq 0 ]; then exit 0; fi

echo "Installing the pinned packages into .venv. This takes minutes; on Linux, where pip's torch" \
  "brings CUDA along, a new .venv takes about 6 GB of disk."
free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
if [ ! -f .venv/stamp-requirements.txt ] && [ "$free_kb" -lt 8000000 ]; then
  echo "Warning: only $((free_kb / 1000000)) GB are free here; it may not fit." >&2
fi
pip=(.venv/bin/python -m pip install --disable-pip-version-check)
if [ ! -t 1 ]; then pip+=(--quiet); fi
"${pip[@]}" "${arguments[@]}"
"${pip[@]}" --no-deps -e .
for file in "${requirements[@]}"; do stamp_of "$file" > ".venv/stamp-$file"; done
