"""The host side of a call: arguments of a kernel, grid, schedule, results."""
