"""Generated functions that run a repeated call: for Python, and for XLA."""
