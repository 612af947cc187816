#!/bin/sh
# Takes from an environment of Python, `slim.sh DIR`, what no daemon reads: tests of packages, headers and programs of torch, and
# debug information in extension modules. Libraries that a wheel carries along (`*.libs`, torch/lib) stay as they are: patchelf
# has moved their sections, and `strip` breaks some of those.
set -eu
find "$1" -depth -type d \( -name tests -o -path '*/torch/test' -o -path '*/torch/include' \) -exec rm -rf {} +
find "$1" -type f -path '*/torch/bin/*' ! -name torch_shm_manager -delete # which torch looks for when it is imported
find "$1" -type f -name '*.so' ! -path '*.libs/*' ! -path '*/torch/lib/*' -exec strip --strip-debug {} +
