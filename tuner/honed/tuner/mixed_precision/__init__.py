"""Mixed precision: which operators of a float32 model a device computes in fp16, and why.

`choose` says whether fp16 pays on a device, provides the inputs for measuring errors, and starts `child`,
which does not use TVM: it computes a graph as the device would in fp16, and finds the operators to keep in
float32. `honed.tuner.graph.fp16_casts` then writes the casts into the graph.
"""
