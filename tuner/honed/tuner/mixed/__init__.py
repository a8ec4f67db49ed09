"""Mixed precision: which operators of a float32 model a device computes in fp16, and why.

`choose` says whether fp16 pays on a device, gives the inputs that errors are measured on and has it tried:
`simulate` computes a graph as the device would in fp16, `search` finds what is to be kept in float32.
`halves` is what stands in the graph afterwards. Trying is done by `child`, which knows no TVM.
"""
