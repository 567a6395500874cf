"""The CPU kernels, each a class that writes LLVM text with `codegen`."""
