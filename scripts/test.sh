#!/usr/bin/env bash
# Sets up a virtual environment and runs linters, type checker, doctests and tests.
#   bash scripts/test.sh                 everything, and the coverage that the core must have
#   bash scripts/test.sh --fast          without the tests marked slow
#   bash scripts/test.sh tests/cli -k x  other arguments go to pytest
# Coverage is demanded only of a whole run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

arguments=()
whole=yes
for argument in "$@"; do
    whole=no
    if [[ $argument == --fast ]]; then
        arguments+=(-m "not slow")
    else
        arguments+=("$argument")
    fi
done

python=$(find_python)
venv=$root/.venv-test
ensure_venv "$venv" "$python" --editable "$root[test]"

(
    cd "$root"
    "$venv/bin/ruff" check .
    "$venv/bin/ruff" format --check .
    "$venv/bin/mypy"
)
run_pytest "$venv" --cov --cov-config="$root/pyproject.toml" --cov-report= ${arguments[@]+"${arguments[@]}"}

coverage=("$venv/bin/coverage" report --rcfile="$root/pyproject.toml")
if [[ $whole == yes ]]; then
    "${coverage[@]}" --include="*/hyper_parallel/core/*" --fail-under=95
    "${coverage[@]}" --include="*/hyper_parallel/core/activation_memory/policy.py" --fail-under=100
else
    "${coverage[@]}" --include="*/hyper_parallel/core/*" || true
fi
