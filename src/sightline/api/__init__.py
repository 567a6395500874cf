"""The public functions: attention, its gradients and directional derivatives, and attention over arrays on disk."""
