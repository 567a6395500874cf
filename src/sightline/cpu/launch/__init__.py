"""The host side of a call: arguments of a kernel, work split into items, results."""
