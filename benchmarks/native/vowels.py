"""Adds vowels to Arabic by piper_phonemize: vowels.py SECONDS."""

import json
import sys
import time

import piper_phonemize

times = []
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    begun = time.perf_counter()
    answer = piper_phonemize.tashkeel_run("مرحبا بالعالم كيف حالك اليوم")
    times.append((time.perf_counter() - begun) * 1e3)
print(json.dumps({"answer": answer, "times": times}))
