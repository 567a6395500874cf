"""The kernels, written in the vector language of `codegen`."""
