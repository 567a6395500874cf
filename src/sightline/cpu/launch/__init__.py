"""The host side of a call: the arguments of a kernel, its items of work, and the results."""
