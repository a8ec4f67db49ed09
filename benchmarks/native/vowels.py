"""Adds vowels to Arabic by piper_phonemize: vowels.py."""

import piper_phonemize
from turns import take_turns

take_turns(lambda: piper_phonemize.tashkeel_run("مرحبا بالعالم كيف حالك اليوم"))
