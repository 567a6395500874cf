"""A call of attention: its checked arguments, the interface of kernels, and the calls that are repeated."""
