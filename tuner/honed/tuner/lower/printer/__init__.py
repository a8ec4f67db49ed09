"""Prints lowered TIR as OpenCL C, written so that a plain compiler makes good code of it.

TVM's own printer rebuilds every address at every access, reads vectors as if they were not aligned, and
keeps accumulators in arrays. Compilers that do not clean that up, such as those
for Mali, then generate code that is bound by the arithmetic of addresses. Here:

- an index is a sum; its terms are added to a pointer in the order in which they become known, so that terms
  which a loop does not change are outside of it, and pointers move with the loop (`memory`);
- a vector is read as one where the alignment is proven (`memory`);
- private arrays become variables, once short loops over them are unrolled (`kernel`, `memory`);
- products and sums are `mad`, or left to be fused, predicates and constants are folded (`expressions`).
"""
