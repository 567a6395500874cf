"""Modules that call a function, and the recording of one forward pass of a module."""

import torch
from torch import nn

import sightline


class Calling(nn.Module):
    """A module whose forward pass is a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs, **options):
        return self.function(*inputs, **options)


@torch.no_grad()
def record(model, see, *inputs, **options):
    """Return what a watch with these options records of one forward pass, without gradients."""
    with sightline.watch(model, see, **options) as seen:
        model(*inputs)
    return seen


def make_encoder():
    """Return two encoder layers of torch, with the same parameters at each call."""
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
