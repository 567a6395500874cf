"""Execution of CPU kernels: the LLVM target, compilation, the disk cache and the threads that run a kernel."""
