"""Cleans speech by sherpa-onnx's package for Python: speech.py MODEL SECONDS."""

import json
import math
import sys
import time

import sherpa_onnx

model, seconds = sys.argv[1:]
config = sherpa_onnx.OfflineSpeechDenoiserConfig(
    model=sherpa_onnx.OfflineSpeechDenoiserModelConfig(
        gtcrn=sherpa_onnx.OfflineSpeechDenoiserGtcrnModelConfig(model=model), num_threads=1
    )
)
denoiser = sherpa_onnx.OfflineSpeechDenoiser(config)
samples = [0.3 * math.sin(i / 7) + 0.1 * math.sin(i * i) for i in range(16000)]
times = []
end = time.monotonic() + float(seconds)
while time.monotonic() < end:
    begun = time.perf_counter()
    cleaned = denoiser.run(samples, 16000)
    times.append((time.perf_counter() - begun) * 1e3)
print(json.dumps({"answer": list(cleaned.samples[:1000]), "times": times}))
