#!/bin/sh
# Makes honed run on a bare machine with an NVIDIA GPU and Python 3.12, from what was carried there:
#   .device/lib/libtvm_compiler.so.xz  TVM's compiler library, compressed
#   .device/rest/tvm.tar.xz            the rest of the apache-tvm wheel, without its headers
#   .device/rest/*.whl                 apache-tvm-ffi, pyopencl and what it needs, xgboost-cpu
# Each part is installed when it is there, so that they may come with several calls.
set -eu
site=/tmp/honed-site
mkdir -p "$site/tvm/lib" /etc/OpenCL/vendors
if [ -f .device/lib/libtvm_compiler.so.xz ]; then
    xz -T0 -dc .device/lib/libtvm_compiler.so.xz >"$site/tvm/lib/libtvm_compiler.so"
fi
if [ -d .device/rest ]; then
    tar -C "$site" -xJf .device/rest/tvm.tar.xz
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .device/rest/*.whl
fi
# compiled models say which version of honed made them
mkdir -p "$site/honed-0.dist-info"
printf 'Metadata-Version: 2.1\nName: honed\nVersion: 0\n' >"$site/honed-0.dist-info/METADATA"
library=$(find /usr/lib /usr/local /opt -name 'libnvidia-opencl.so.1' 2>/dev/null | head -n 1)
echo "$library" >/etc/OpenCL/vendors/nvidia.icd
