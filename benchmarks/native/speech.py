"""Cleans speech by sherpa-onnx's package for Python: speech.py MODEL."""

import math
import sys

import sherpa_onnx
from turns import take_turns

config = sherpa_onnx.OfflineSpeechDenoiserConfig(
    model=sherpa_onnx.OfflineSpeechDenoiserModelConfig(
        gtcrn=sherpa_onnx.OfflineSpeechDenoiserGtcrnModelConfig(model=sys.argv[1]), num_threads=1
    )
)
denoiser = sherpa_onnx.OfflineSpeechDenoiser(config)
samples = [0.3 * math.sin(i / 7) + 0.1 * math.sin(i * i) for i in range(16000)]
take_turns(lambda: list(denoiser.run(samples, 16000).samples[:1000]))
