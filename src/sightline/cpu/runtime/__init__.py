"""How a kernel runs: the processor, compilation, the cache on disk, threads."""
