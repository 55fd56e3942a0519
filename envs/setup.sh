#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up .venv from envs/cpu.txt (default) or envs/gpu.txt; or .venv-slurm, which is .venv and the few packages of
# envs/slurm.txt on top. Does nothing if it already holds just that.
#   bash envs/setup.sh [cpu|gpu|slurm]
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:-cpu}
wanted=envs/$name.txt
[ -f "$wanted" ] || { echo "error: no environment $name; choose cpu, gpu or slurm" >&2; exit 1; }
folder=.venv
[ "$name" != slurm ] || folder=.venv-slurm
done_mark=$folder/requirements.txt
if cmp -s "$wanted" "$done_mark"; then exit 0; fi

python=${PYTHON:-python3}
if [ "$name" = slurm ]; then
    python=.venv/bin/python
    [ -x "$python" ] || { echo "error: no .venv; run bash envs/setup.sh gpu (or cpu) first" >&2; exit 1; }
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
pip=("$folder/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps)
if [ "$name" = slurm ]; then
    echo "setting up $folder from $wanted (once)"
    "$python" -m venv "$folder"
    # Its Python finds .venv's packages behind its own; `site.addsitedir` also reads what they have in .pth files.
    below=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$below')" > "$own/below.pth"
    pip+=(--ignore-installed)
else
    echo "setting up $folder from $wanted (about 2 GB; once)"
    "$python" -m venv "$folder"
fi
if [ "$name" = cpu ]; then
    torch=$(grep '^torch==' "$wanted")
    "${pip[@]}" "$torch" 2>/dev/null ||
        "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu "$torch"
fi
"${pip[@]}" -r "$wanted"
"$folder/bin/python" envs/check.py "$wanted"
cp "$wanted" "$done_mark"
