#!/usr/bin/env bash
# Check the NEON kernels on an x86-64 machine with Debian: its Python for ARM runs in an emulator.
#
#   apt-get install qemu-user-static
#   tools/check_neon.sh                   10 problems, in a few minutes
#   tools/check_neon.sh --problems 100    options of `python -m tileattn check`
#
# Packages are unpacked into build/neon, and not installed. The processor of the emulator has SVE
# too, which the kernels do not use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD/build/neon
python=python3.11 # of Debian 12

if [ ! -e "$root/ready" ]; then
  mkdir -p "$root"/{apt/lists/partial,cache/archives/partial,debs,site}
  touch "$root/apt/status"
  apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64
    -o Dir::State="$root/apt" -o Dir::State::status="$root/apt/status" -o Dir::Cache="$root/cache"
    -o APT::Sandbox::User=root)
  "${apt[@]}" update
  (cd "$root/debs" && "${apt[@]}" download libc6 libexpat1 libffi8 libgcc-s1 libssl3 libstdc++6 \
    zlib1g libbz2-1.0 liblzma5 $python-minimal lib$python-minimal lib$python-stdlib)
  for package in "$root"/debs/*.deb; do dpkg-deb -x "$package" "$root"; done
  python3 -m pip install --quiet --target "$root/site" --only-binary :all: --python-version 3.11 \
    --platform manylinux_2_17_aarch64 --platform manylinux_2_27_aarch64 \
    --platform manylinux_2_28_aarch64 numpy ml_dtypes threadpoolctl llvmlite
  touch "$root/ready"
fi

[ $# -gt 0 ] || set -- --problems 10
emulated=(qemu-aarch64-static -cpu max -L "$root" -E PYTHONPATH="$root/site:$PWD"
  -E PYTHONDONTWRITEBYTECODE=1 -E TILEATTN_CACHE_DIR="$root/kernels" "$root/usr/bin/$python")
"${emulated[@]}" -m tileattn explain --Nq 64 | grep NEON
"${emulated[@]}" -m tileattn check --backend llvm "$@"
