"""Unpacks the wheels that honed-cpu and honed-tuner bring along, leaving out what honed never uses.

python3 unpack.py PACKAGE WHEELS FOLDER
python3 unpack.py --links PACKAGE WHEELS FOLDER TRIPLET

Every wheel in WHEELS that PACKAGE brings goes below FOLDER, as pip would put it there. The second form makes
links in place of the copies of libraries that Debian has, for a machine named TRIPLET, as x86_64-linux-gnu.
It is a step of its own because dh_python3, which comes between, removes links that lead nowhere on the
building machine. The same wheels give the same files. Works for any machine on any other: nothing is
executed or compiled.
"""

from __future__ import annotations

import sys
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

# What the CPU engine imports; honed-tuner has all the others, and depends on honed-cpu for these.
_OF_CPU = {"ml_dtypes", "onnx", "onnxruntime", "protobuf", "typing_extensions"}
# Patterns of paths in the wheels; * crosses slashes. What is left is what compiling and tuning import.
_UNUSED = (
    # Other backends, and sources and headers for building against the libraries.
    "tvm/3rdparty/*",
    "tvm/cmake/*",
    "tvm/include/*",
    "tvm/lib/libtvm_runtime_cuda.so",
    "tvm/lib64/*",
    "tvm/src/*",
    "tvm/web/*",
    "tvm_ffi/3rdparty/*",
    "tvm_ffi/CMakeLists.txt",
    "tvm_ffi/cython/*",
    "tvm_ffi/include/*",
    "tvm_ffi/share/*",
    "tvm_ffi/src/*",
    "ml_dtypes/include/*",
    # Readers of other frameworks' files: honed reads ONNX files itself.
    "tvm/relax/frontend/onnx/*",
    "tvm/relax/frontend/stablehlo/*",
    "tvm/relax/frontend/tflite/*",
    "tvm/relax/frontend/torch/*",
    # What is for kernels of other makers, for tests, and for commands of TVM's developers.
    "tvm/contrib/cutlass/*",
    "tvm/contrib/hexagon/*",
    "tvm/exec/*",
    "tvm/relax/testing/*",
    "tvm/s_tir/dlight/benchmark/*",
    "tvm/s_tir/meta_schedule/testing/*",
    "tvm/topi/testing/*",
    "tvm_ffi/stub/*",
    # Test data, which is most of ONNX, and tests.
    "onnx/backend/test/*",
    "onnx/test/*",
    "onnx/*.cc",
    "onnx/*.h",
    "onnx/*.in.proto",
    # Of ONNX Runtime, what runs models on the processor; its library for C is in the module for Python, too.
    "onnxruntime/backend/*",
    "onnxruntime/datasets/*",
    "onnxruntime/quantization/*",
    "onnxruntime/tools/*",
    "onnxruntime/transformers/*",
    "onnxruntime/capi/libonnxruntime.so*",
    "onnxruntime/Privacy.md",
    "onnxruntime/LICENSE",
    "xgboost/spark/*",
    "xgboost/dask/*",
    "xgboost/testing/*",
    # Stubs and marks for type checkers, lists of files that are no longer true, other people's commands.
    "*.pyi",
    "*/py.typed",
    "*.dist-info/RECORD",
    "*.dist-info/top_level.txt",
    "*.dist-info/entry_points.txt",
    "*.dist-info/INSTALLER",
    "*/.gitignore",
    "*.dist-info/sboms/*",
    "*.data/scripts/*",
    # Debian's copyright file has them all.
    "*.dist-info/licenses/*",
    "*.dist-info/LICENSE",
    "tvm/licenses/*",
    "tvm/LICENSE",
    "tvm/NOTICE",
    "tvm/README.md",
    "tvm/relax/backend/contrib/example_npu/*",
)
# Copies of libraries that Debian has: a link to Debian's takes the place of the copy.
_DEBIAN_HAS = {"xgboost_cpu.libs/libgomp-*.so.1.0.0": "libgomp.so.1"}


def package_of(wheel: Path) -> str:
    """Which of the two packages brings a wheel."""
    return "honed-cpu" if wheel.name.split("-")[0] in _OF_CPU else "honed-tuner"


def unpack(wheel: Path, folder: Path) -> None:
    """One wheel; raises ValueError where it holds what has no place here."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.is_dir():
                continue
            name = entry.filename
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"{wheel.name} holds {name!r}, which leads elsewhere")
            if any(fnmatchcase(name, pattern) for pattern in (*_UNUSED, *_DEBIAN_HAS)):
                continue
            if ".data/" in name:
                raise ValueError(f"{wheel.name} holds {name!r}; say in unpack.py where it belongs")
            _write(folder / name, archive.read(entry))


def link(wheel: Path, folder: Path, triplet: str) -> None:
    """The links in place of what `unpack` left out of one wheel because Debian has it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for pattern, library in _DEBIAN_HAS.items():
        for name in names:
            if fnmatchcase(name, pattern):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(f"/usr/lib/{triplet}/{library}")


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o644)


def main(arguments: list[str]) -> None:
    """As the module says."""
    links = arguments[0] == "--links"
    package, wheels, folder, *triplet = arguments[links:]
    found = [path for path in sorted(Path(wheels).glob("*.whl")) if package_of(path) == package]
    if not found:
        sys.exit(f"unpack: {wheels} holds no wheels; run packaging/bundle/fetch first")
    for wheel in found:
        if links:
            link(wheel, Path(folder), triplet[0])
        else:
            unpack(wheel, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
