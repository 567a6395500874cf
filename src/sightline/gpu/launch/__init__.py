"""The host side of a kernel launch: arguments, grid, schedule and results."""
