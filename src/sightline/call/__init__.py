"""A call of attention: its checked arguments, its parts, the interface of kernels, and the calls that are repeated."""
