"""The Triton backend: one operation a file, each with its kernels, a launch that checks strides, and a SPEC."""
