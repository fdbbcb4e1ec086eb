#!/usr/bin/env bash
# debian_headers.sh SUITE SHA256|signed-index DEST: the headers of Debian's libonnxruntime-dev, unpacked into DEST.
# Uses the mirror and the keyring that this machine already has, with package lists of its own: nothing is installed and
# no system file is touched. apt checks the package against the archive's signed index; SHA256 pins it beyond that.
set -euo pipefail
suite=$1 sha256=$2 dest=$3
fail() { echo "$1" >&2; exit 1; }
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail "this is no Debian machine"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -f "$keyring" ] || fail "the archive keyring $keyring is missing"

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{lists/partial,cache/archives/partial}
mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.{sources,list} 2>/dev/null |
  sed 's/^URIs: *//' | grep -v '^#' | grep -oE 'https?://[^ ]+/debian/?( |$)' | head -n 1 | tr -d ' ') || true
[ -n "$mirror" ] || fail "no Debian mirror is configured"
echo "deb [signed-by=$keyring] $mirror $suite main" >"$root/sources.list"
apt=(apt-get -q -o "Dir::Etc::sourcelist=$root/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o "Dir::State::Lists=$root/lists" -o "Dir::Cache=$root/cache" -o APT::Sandbox::User=root
  -o APT::Update::Error-Mode=any -o Acquire::http::Timeout=30 -o Acquire::Retries=1)
"${apt[@]}" update >"$root/log" 2>&1 || fail "apt-get update failed: $(grep -m 1 '^E:' "$root/log")"
(cd "$root" && "${apt[@]}" download libonnxruntime-dev >>"$root/log" 2>&1) ||
  fail "apt-get download failed: $(grep -m 1 '^E:' "$root/log")"

deb=$(ls "$root"/libonnxruntime-dev_*.deb)
found=$(sha256sum "$deb" | cut -d ' ' -f 1)
[ "$sha256" = signed-index ] || [ "$sha256" = "$found" ] || fail "its SHA-256 is $found, expected $sha256"
rm -rf "$dest" "$dest.partial"
mkdir -p "$dest.partial"
dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$dest.partial" ./usr/include
mv "$dest.partial" "$dest" # whole or not at all
