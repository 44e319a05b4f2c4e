#!/usr/bin/env bash
# Sets up a virtual environment, installs, and runs the demo: bash scripts/demo.sh [--steps N] [--modes plain,swap] ...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

python=$(find_python)
ensure_venv "$root/.venv-demo" "$python" --editable "$root[demo]"
exec "$root/.venv-demo/bin/hyper-parallel" demo "$@"
