#!/usr/bin/env bash
# What scripts/test.sh runs, with 25 times as many random nets, drawn anew each time, and four times as many mutated
# policy files and schedules of training on the emulated Ascend device; not part of CI.
#   bash scripts/test_full.sh                 everything
#   bash scripts/test_full.sh tests/exactness other arguments go to scripts/test.sh
set -euo pipefail
export HYPOTHESIS_PROFILE=full
exec bash "$(dirname "${BASH_SOURCE[0]}")/test.sh" "$@"
