"""Watching models: statistics of the attention in any torch model, without a change to the model's code."""
