#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up .venv from envs/cpu.txt (default) or envs/gpu.txt; or what a cluster takes besides it, in .venv-slurm or
# .venv-kubernetes, whose Python finds .venv's packages behind its own. Does nothing if it already holds just that.
#   bash envs/setup.sh [cpu|gpu|slurm|kubernetes]
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:-cpu}
wanted=envs/$name.txt
[ -f "$wanted" ] || { echo "error: no environment $name; choose cpu, gpu, slurm or kubernetes" >&2; exit 1; }
case $name in
    cpu | gpu) folder=.venv size="about 2 GB" python=${PYTHON:-python3} ;;
    *) folder=.venv-$name size="about 40 MB" python=.venv/bin/python ;;
esac
done_mark=$folder/requirements.txt
if cmp -s "$wanted" "$done_mark"; then exit 0; fi

command -v "$python" > /dev/null || { echo "error: no $python; run bash envs/setup.sh gpu, or cpu, first" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
echo "setting up $folder from $wanted ($size; once)"
"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps)
if [ "$folder" != .venv ]; then
    packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    echo "import site; site.addsitedir('$("$python" -c "$packages")')" > "$("$folder/bin/python" -c "$packages")/below.pth"
    pip+=(--ignore-installed)
fi
if [ "$name" = cpu ]; then
    torch=$(grep '^torch==' "$wanted")
    "${pip[@]}" "$torch" 2>/dev/null ||
        "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu "$torch"
fi
"${pip[@]}" -r "$wanted"
"$folder/bin/python" envs/check.py "$wanted"
cp "$wanted" "$done_mark"
