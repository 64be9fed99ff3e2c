#!/usr/bin/env bash
# Makes .venv with everything in it; `make setup` calls this. A second call does nothing.
# DEVICE=cpu or DEVICE=gpu overrides what nvidia-smi says; PYTHON=... names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

device=${DEVICE:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
requirements=requirements/$device.txt
[ -f "$requirements" ] || { echo "setup: DEVICE=$device: use cpu or gpu" >&2; exit 2; }
stamp=.venv/.stamp-$device-$(cat "$requirements" pyproject.toml | sha256sum | cut -c 1-16)
[ -e "$stamp" ] && exit 0

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: needs Python 3.11, 3.12 or 3.13; name one with PYTHON=/path/to/python3 make setup" >&2
    return 2
}

pip() {
    .venv/bin/python -m pip --disable-pip-version-check --no-input -qq "$@"
}

# A .venv with older requirements, or an interrupted one, is completed; one for the other device is rebuilt.
[ "$device" = cpu ] && other=gpu || other=cpu
if ! .venv/bin/python -m pip --version >/dev/null 2>&1 || compgen -G ".venv/.*-$other*" >/dev/null; then
    python=$(find_python)
    rm -rf .venv
    "$python" -m venv .venv || { echo "setup: $python cannot make a venv; on Debian, install python3-venv" >&2; exit 2; }
fi
touch ".venv/.unfinished-$device"
rm -f .venv/.stamp-*

echo "setup: installing the $device packages into .venv, once; about 3 minutes, longer for GPU"
torch=$(grep '^torch==' "$requirements")
echo "setup: 1/3 $torch"
pip install --constraint "$requirements" "$torch" # with dependencies, which differ between builds
echo "setup: 2/3 $(grep -c '^[^#]' "$requirements") packages from $requirements"
pip install --no-deps --requirement "$requirements"
echo "setup: 3/3 rlhf itself"
pip install --no-deps --no-build-isolation --editable .
rm ".venv/.unfinished-$device"
touch "$stamp"
echo "setup: done in $SECONDS s"
