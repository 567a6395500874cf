"""The kernels, written in Triton."""
