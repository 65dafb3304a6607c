#!/usr/bin/env bash
# Everything that must hold before a commit: bash tests/run.sh [pytest arguments]. The exit code is non-zero if any part fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/setup.sh || exit
export PATH=$PWD/.venv/bin:$PATH OMP_NUM_THREADS=1
failed=0
ruff check . || failed=1
mypy || failed=1
# `timeout` in pyproject.toml ends one test; this ends a hang that it cannot, as at exit. In the foreground, so that ^C reaches pytest.
# pytest comes last, so that the last line is its count of tests.
timeout --foreground --kill-after 30 1800 python -m pytest -q "$@" || failed=1
exit $failed
