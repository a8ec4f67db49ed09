"""Lowering: a Relax module to a compiled model.

`module` is the way in. `program`, `plan` and `barriers` are free of TVM and imported without it.
"""

# Names of OpenCL C's products of four signed bytes in each of two words, and with a third number added
# (cl_khr_integer_dot_product). They are here because readers of kernels need no TVM.
DOT, DOT_ADD = "dot_4x8packed_ss_int", "dot_acc_sat_4x8packed_ss_int"

# The annotation of loops whose compiler must not know how many turns they take, because it would unroll them.
ROLLED = "honed.rolled"
