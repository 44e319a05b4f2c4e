#!/usr/bin/env bash
# Runs the fast tests with another MindSpore or another Python; not part of CI.
#   bash scripts/test_matrix.sh                         MindSpore 2.9.0
#   bash scripts/test_matrix.sh --python 3.10           the same on Python 3.10 (or a path to one)
#   bash scripts/test_matrix.sh --mindspore 2.10.0 --python 3.12 -k swap
# Other arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mindspore=2.9.0
wanted=
arguments=()
while (($#)); do
    case $1 in
        --python | --mindspore)
            (($# >= 2)) || fail "$1 needs a value"
            if [[ $1 == --python ]]; then wanted=$2; else mindspore=$2; fi
            shift 2
            ;;
        *)
            arguments+=("$1")
            shift
            ;;
    esac
done

python=$(find_python "$wanted")
IFS=. read -r major minor _ <<<"$mindspore"
venv=$root/.venv-ms$major$minor
[[ -z $wanted ]] || venv+=$("$python" -c 'import sys; print("-py%d%d" % sys.version_info[:2])')
ensure_venv "$venv" "$python" --editable "$root[test]" "mindspore==$mindspore"
"$venv/bin/python" -c 'import sys, mindspore; print(f"MindSpore {mindspore.__version__}, Python {sys.version.split()[0]}")'
run_pytest "$venv" -m "not slow" ${arguments[@]+"${arguments[@]}"}
