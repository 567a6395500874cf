"""The public functions: attention, its derivative in a direction, and attention over arrays that lie on disk."""
