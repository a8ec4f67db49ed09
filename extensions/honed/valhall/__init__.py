"""Kernels judged by their machine code for Mali's Valhall GPUs, where there is no such GPU.

Mesa's compiler makes the code offline (`compiler`); its dump is read (`dump`), its instructions are counted
by the pipe they go through, weighted with the loops' turns (`count`), and the busiest pipe bounds the time of
a launch (`judge`). A session of tuning has the `bench` in the place of a device.
"""
