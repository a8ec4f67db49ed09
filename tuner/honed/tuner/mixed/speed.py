"""Whether a device computes fp16 faster than float32."""

from __future__ import annotations

from honed.machine import mali
from honed.machine.profile import DeviceProfile

# Of fp16's peak over float32's. Below, casts and what stays in float32 use up what is won.
LEAST_GAIN = 1.25


def why_not_half(profile: DeviceProfile) -> str:
    """Why fp16 does not pay on a device, "" where it does.

    By its measured peaks; where there are none, by what is known of its model.
    """
    if not profile.limits.fp16:
        return "the device has no fp16 arithmetic"
    gain = _gain(profile)
    if gain is None:
        return "the device's peaks were not measured, so that it is not known whether it computes fp16 faster"
    if gain < LEAST_GAIN:
        return f"the device computes fp16 {gain:.2f} times as fast as fp32; it pays from {LEAST_GAIN:g} on"
    return ""


def _gain(profile: DeviceProfile) -> float | None:
    peaks, model = profile.peaks, mali.model_of(profile.identity.name)
    if peaks is not None:
        return peaks.fp16_gflops / peaks.fp32_gflops if peaks.fp16_gflops else None
    return model.fma_fp16 / model.fma_fp32 if model is not None else None
