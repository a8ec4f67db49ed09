"""The programs: how each is installed, and its command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.beside import models
from benchmarks.beside.comparison import Program

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_NPM = ("onnxruntime-node@1.30.0", "@huggingface/transformers@4.3.2", "sherpa-onnx-node@1.13.8")
_PYPI = ("sherpa-onnx==2.0.1", "sherpa-onnx-core==2.0.1", "piper_phonemize==1.1.0")
_DEBIAN = (
    *("gcc", "libc6-dev", "libonnxruntime-dev", "python3-gi", "gstreamer1.0-plugins-bad"),
    *("gstreamer1.0-plugins-base", "gir1.2-gst-plugins-base-1.0", "gir1.2-gst-plugins-bad-1.0"),
)
_COMPILE = "gcc -O2 -Wall -Wextra -Werror -I/usr/include/onnxruntime /work/image.c -o /work/"
# Runs a program in the root $0 with the folder $1 as its /run/honed; its mounts end with it.
_INSIDE = (
    'mount -t proc proc "$0/proc" && mount --bind /dev "$0/dev" && mount --bind "$1" "$0/run/honed" &&'
    ' root=$0 && shift && exec chroot "$root" "$@"'
)


def install(folder: Path) -> None:
    """Install the programs, and write their models, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "installed").exists():
        # Scripts of npm packages would fetch libraries for GPUs, which are not needed.
        npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)]
        subprocess.run([*npm, *_NPM], check=True, stdout=subprocess.DEVNULL)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*pip, str(folder / "python"), *_PYPI], check=True)
        models.write_embedder(folder / "models" / "bert")
        models.write_images(folder / "images.onnx")
        models.write_denoiser(folder / "gtcrn.onnx")
        (folder / "installed").touch()
    for script in (*_HERE.glob("[!_]*.*js"), *_HERE.glob("[!_]*.py"), _HERE.parent / "beside" / "turns.py"):
        shutil.copy(script, folder)  # Beside node_modules, where node looks


def install_debian(folder: Path) -> None:
    """Install Debian 13 with its ONNX Runtime and GStreamer, unless it is there; for root."""
    root = folder / "trixie"
    work = root / "work"
    if not (root / "installed").exists():
        debian = ["debootstrap", "--variant=minbase", "trixie", str(root)]
        subprocess.run(debian, check=True, stdout=subprocess.DEVNULL)
        apt = "apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends"
        command = ["chroot", str(root), "sh", "-c", f"{apt} {' '.join(_DEBIAN)}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (root / "installed").touch()
    for place in (work, root / "run" / "honed"):
        place.mkdir(exist_ok=True)
    for name in ("images.onnx", "frames.py", "turns.py"):
        shutil.copy(folder / name, work)
    shutil.copy(_HERE / "image.c", work)
    compilers = (f"{_COMPILE}linked -lonnxruntime", f"{_COMPILE}opened -DOPENED")
    subprocess.run(["chroot", str(root), "sh", "-c", " && ".join(compilers)], check=True)


def build(folder: Path) -> Path:
    """Return the preload library, made of this source."""
    subprocess.run(["make", "-s", "-C", str(_ROOT / "libhoned"), f"BUILD={folder / 'libhoned'}"], check=True)
    return folder / "libhoned" / "libhoned-ort.so"


def programs(folder: Path, library: Path) -> Mapping[str, Program]:
    """Install programs from npm and PyPI; return how they run, beside a preload library."""
    install(folder)
    python = str(folder / "python")

    def here(*command: str) -> Program:
        def program(socket: str) -> list[str]:
            return ["env", f"PYTHONPATH={python}", *_variables(socket, str(library)), *command]

        return program

    return {
        "transformers.js": here("node", str(folder / "embed.mjs"), str(folder / "models"), "bert"),
        "onnxruntime-node": here("node", str(folder / "image.cjs"), str(folder / "images.onnx")),
        "sherpa-onnx-node": here("node", str(folder / "speech.cjs"), str(folder / "gtcrn.onnx")),
        "sherpa-onnx": here(sys.executable, str(folder / "speech.py"), str(folder / "gtcrn.onnx")),
        "piper_phonemize": here(sys.executable, str(folder / "vowels.py")),
    }


def debian_programs(folder: Path, library: Path) -> Mapping[str, Program]:
    """Return how to run Debian 13's programs; none if they cannot be installed."""
    if os.geteuid() or not shutil.which("debootstrap"):
        print("Debian's programs are left out: they need root and debootstrap", file=sys.stderr)
        return {}
    install_debian(folder)
    shutil.copy(library, folder / "trixie" / "work")

    def inside(*command: str) -> Program:
        def program(socket: str) -> list[str]:
            run = str(Path(socket).parent) if socket else "/mnt"
            name = f"/run/honed/{Path(socket).name}" if socket else ""
            variables = _variables(name, f"/work/{library.name}")
            root = str(folder / "trixie")
            return ["unshare", "--mount", "sh", "-c", _INSIDE, root, run, "env", *variables, *command]

        return program

    images = "/work/images.onnx"
    return {
        "C, linked": inside("/work/linked", images),
        "C, dlopen": inside("/work/opened", images, "libonnxruntime.so.1.21"),
        "GStreamer": inside("python3", "/work/frames.py", images),
    }


def _variables(socket: str, library: str) -> list[str]:
    """Return what a program has in its environment beside honed; nothing alone."""
    return [f"LD_PRELOAD={library}", f"HONED_SOCKET={socket}", "HONED_ORT_LOG=1"] if socket else []
