"""Execution of kernels: the machine, compilation, the disk cache and the threads."""
