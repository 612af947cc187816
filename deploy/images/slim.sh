#!/bin/sh
# Takes from an environment of Python, `slim.sh DIR`, what no daemon reads: tests of packages, and debug information in their
# extension modules. Libraries that a wheel carries along (`*.libs`, torch/lib) stay as they are: patchelf has moved their
# sections, and `strip` breaks some of those.
set -eu
find "$1" -depth -type d -name tests -exec rm -rf {} +
find "$1" -type f -name '*.so' ! -path '*.libs/*' ! -path '*/torch/lib/*' -exec strip --strip-debug {} +
