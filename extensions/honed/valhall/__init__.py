"""Judges kernels by their machine code for Mali's Valhall GPUs, where there is no such GPU.

Mesa's compiler makes the code offline (`compiler`); `dump` reads its dump; `count` counts the instructions by
pipe, weighted with the loops' turns; the busiest pipe bounds the time of a launch (`judge`). In a session of
tuning, `bench` takes the place of a device.
"""
