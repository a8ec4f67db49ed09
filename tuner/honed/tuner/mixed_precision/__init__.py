"""Mixed precision: which operators of a float32 model a device computes in fp16, and why.

`choose` says whether fp16 pays on a device, gives the inputs that errors are measured on and has it tried
by `child`, which knows no TVM: it computes a graph as the device would in fp16, and finds what is to be
kept in float32. `honed.tuner.graph.fp16_casts` is what stands in the graph afterwards.
"""
