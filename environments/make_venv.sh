#!/usr/bin/env bash
# make_venv.sh FOLDER: make a virtual environment with pip in FOLDER, unless there is one already.
# Needs python3 with its venv module, pip or ensurepip, and a C++ compiler. Missing Debian packages are installed
# when this runs as root; otherwise it says which ones to install.
set -euo pipefail

python=${PYTHON:-python3}
folder=$1

need() { # need DEBIAN_PACKAGE: install it, or say how
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing the Debian package $1"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1"
    else
        echo "error: please install the package $1 (Debian: apt-get install $1), then run make again" >&2
        exit 1
    fi
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $python is older than Python 3.11; name a newer one: make PYTHON=python3.11" >&2
    exit 1
}
command -v "${CXX:-c++}" >/dev/null || need g++
"$folder/bin/python" -m pip --version >/dev/null 2>&1 && exit

echo "making the virtual environment $folder"
if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv --clear "$folder"
elif "$python" -m venv --clear --without-pip "$folder" && "$python" -m pip --version >/dev/null 2>&1; then
    # Debian keeps ensurepip in python3-venv; the pip of the system can fill the environment as well.
    "$python" -m pip --python "$folder/bin/python" install --quiet pip
else
    need python3-venv
    "$python" -m venv --clear "$folder"
fi
