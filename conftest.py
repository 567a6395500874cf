"""Keras chooses its backend when first imported; tests and documentation run it on torch."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")
