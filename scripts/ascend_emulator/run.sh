#!/usr/bin/env bash
# Run a program on the emulated Ascend device: bash scripts/ascend_emulator/run.sh python train.py
# Settings: environment variables ASCSIM_*, see docs/ascend_emulator.md. PYTHON: the interpreter that has MindSpore.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [ $# -eq 0 ]; then
  echo "usage: bash scripts/ascend_emulator/run.sh PROGRAM [ARGUMENT]..." >&2
  exit 2
fi
# The program's own interpreter knows which MindSpore it will import.
python="${PYTHON:-}"
if [ -z "$python" ]; then
  case "$(basename "$1")" in
    python*) python="$1" ;;
    *) python="python3" ;;
  esac
fi
variables="$("$python" "$here/build.py")"
eval "$variables"
exec "$@"
