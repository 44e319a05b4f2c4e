# Shared by the scripts beside it; they source it. Nothing here depends on the working directory.
export PIP_DISABLE_PIP_VERSION_CHECK=1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# find_python [PYTHON]: prints a Python that suits (3.10 to 3.12) and can make virtual environments.
# The argument (a version such as 3.10, or a command), else $PYTHON, is the only one tried if there is one.
# A command that is there may still not run (a shim), so each one is run.
find_python() {
    local wanted=${1:-${PYTHON:-}} candidates candidate without_venv=""
    if [[ $wanted =~ ^[0-9.]+$ ]]; then
        candidates=("python$wanted")
    elif [[ -n $wanted ]]; then
        candidates=("$wanted")
    else
        candidates=(python3.11 python3.10 python3.12 python3)
    fi
    for candidate in "${candidates[@]}"; do
        "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' 2>/dev/null || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
        without_venv=$candidate
    done
    if [[ -n $without_venv ]]; then
        fail "$without_venv has no venv module; install it (on Debian and Ubuntu: the package python3-venv or" \
            "$without_venv-venv) and run this again"
    fi
    fail "no suitable Python among: ${candidates[*]}; this needs Python 3.10, 3.11 or 3.12 (PYTHON=... names one)"
}

# ensure_venv FOLDER PYTHON REQUIREMENT...: a virtual environment with these installed.
# The install is skipped while what it depends on is unchanged. Editable, so that the sources are never stale.
ensure_venv() {
    local venv=$1 python=$2 stamp quiet=()
    shift 2
    [[ -t 2 ]] || quiet=(--quiet --progress-bar off)
    stamp="$root $("$python" --version) $* $(cat "$root/setup.cfg" "$root/pyproject.toml" | cksum)"
    if [[ -x $venv/bin/python && -f $venv/installed && $(<"$venv/installed") == "$stamp" ]]; then
        return
    fi
    echo "installing into ${venv##*/} (only when setup.cfg or pyproject.toml have changed)" >&2
    "$python" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install ${quiet[@]+"${quiet[@]}"} "$@"
    printf '%s\n' "$stamp" >"$venv/installed"
}

# run_pytest VENV ARGUMENT...: in a temporary working directory, since MindSpore leaves rank_0 and kernel_meta there.
# An argument that is a path in the repository (or NODE::ID in one) replaces the default: doctests and all tests.
run_pytest() {
    local venv=$1 argument targets=() options=()
    shift
    for argument in "$@"; do
        if [[ $argument != -* && -e $root/${argument%%::*} ]]; then
            targets+=("$root/$argument")
        elif [[ $argument != -* && -e ${argument%%::*} ]]; then
            targets+=("$(cd "$(dirname "${argument%%::*}")" && pwd)/${argument##*/}")
        else
            options+=("$argument")
        fi
    done
    if ((${#targets[@]} == 0)); then
        targets=("$root/tests" "$root/hyper_parallel" "$root/ms_ops")
    fi
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    cd "$work"
    # as many processes as there are cores, up to 4: each holds a MindSpore of its own
    GLOG_v=${GLOG_v:-3} "$venv/bin/python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" \
        -n "$(($(nproc) < 4 ? $(nproc) : 4))" --dist loadgroup -o cache_dir="$root/.pytest_cache" --doctest-modules ${options[@]+"${options[@]}"} "${targets[@]}"
}
