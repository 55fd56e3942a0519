#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up .venv from envs/cpu.txt (default) or envs/gpu.txt; does nothing if it already holds just that.
#   bash envs/setup.sh [cpu|gpu]
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:-cpu}
wanted=envs/$name.txt
done_mark=.venv/requirements.txt
[ -f "$wanted" ] || { echo "error: no environment $name; choose cpu or gpu" >&2; exit 1; }
if cmp -s "$wanted" "$done_mark"; then exit 0; fi

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
echo "setting up .venv from $wanted (about 2 GB; once)"
"$python" -m venv .venv
pip=(.venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps)
if [ "$name" = cpu ]; then
    torch=$(grep '^torch==' "$wanted")
    "${pip[@]}" "$torch" 2>/dev/null ||
        "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu "$torch"
fi
"${pip[@]}" -r "$wanted"
.venv/bin/python envs/check.py "$wanted"
cp "$wanted" "$done_mark"
