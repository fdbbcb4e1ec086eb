#!/usr/bin/env bash
# packages.sh DEST: what the NUMA guest needs from Debian, unpacked into DEST: the kernel for clouds as DEST/vmlinuz and,
# unless this machine has it, QEMU with the libraries that this machine lacks as DEST/qemu.
# Uses the mirrors that this machine has configured, with package lists of its own: nothing is installed.
set -euo pipefail
dest=$1
fail() { echo "$1" >&2; exit 1; }
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail "this is no Debian machine"

mkdir -p "$(dirname "$dest")"
root=$(mktemp -d -p "$(dirname "$dest")")
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{lists/partial,cache/archives/partial,packages/partial,out/qemu}
apt=(apt-get -q -y -o "Dir::State::Lists=$root/lists" -o "Dir::Cache=$root/cache" -o "Dir::Cache::archives=$root/packages"
  -o APT::Sandbox::User=root -o Debug::NoLocking=1 -o APT::Update::Error-Mode=any -o Acquire::http::Timeout=30
  -o Acquire::Retries=1)
try() { "$@" >>"$root/log" 2>&1 || fail "apt-get failed: $(grep -m 1 '^E:' "$root/log" || tail -n 1 "$root/log")"; }
try "${apt[@]}" update
kernel=$(apt-cache -o "Dir::State::Lists=$root/lists" -o "Dir::Cache=$root/cache" depends linux-image-cloud-amd64 |
  awk '/Depends: linux-image-/ {print $2; exit}')
[ -n "$kernel" ] || fail "no package linux-image-cloud-amd64 is offered"
(cd "$root" && try "${apt[@]}" download "$kernel")
dpkg-deb --fsys-tarfile "$root"/linux-image-*.deb | tar -x -C "$root" --wildcards './boot/vmlinuz-*'
mv "$root"/boot/vmlinuz-* "$root/out/vmlinuz"
if ! command -v qemu-system-x86_64 >/dev/null; then
  try "${apt[@]}" install --download-only --no-install-recommends qemu-system-x86
  for package in "$root"/packages/*.deb; do dpkg-deb -x "$package" "$root/out/qemu"; done
fi
rm -rf "$dest"
mv "$root/out" "$dest" # whole or not at all
