"""What products of bytes are called in OpenCL C; apart, since whoever only reads kernels needs no TVM."""

# Of four signed bytes in each of two words, and added to a third number (cl_khr_integer_dot_product).
DOT, DOT_ADD = "dot_4x8packed_ss_int", "dot_acc_sat_4x8packed_ss_int"
