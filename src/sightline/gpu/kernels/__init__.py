"""Triton kernels and their device functions."""
