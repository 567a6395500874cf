"""Calls with the arguments of torch's `scaled_dot_product_attention`: drawn ones, and their results."""

import math

import torch
from hypothesis import strategies as st


@st.composite
def calls(draw):
    """Draw the shapes of query, key and value, options of the function, and a mask."""
    lengths, widths = st.integers(1, 9), st.sampled_from([3, 8])
    query_length, keys, width, value_width = draw(st.tuples(lengths, lengths, widths, widths))
    lead = draw(st.sampled_from([(), (2,), (2, 4), (3, 2, 4)]))
    gqa = len(lead) > 1 and draw(st.booleans())
    key_lead = (*lead[:-1], 2) if gqa else lead
    shapes = [(*lead, query_length, width), (*key_lead, keys, width), (*key_lead, keys, value_width)]
    kind = draw(st.sampled_from(["none", "bool", "float", "causal"]))
    mask_lead = tuple(draw(st.sampled_from([1, length])) for length in lead)[draw(st.integers(0, len(lead))) :]
    mask_shape = (*mask_lead, draw(st.sampled_from([1, query_length])), draw(st.sampled_from([1, keys])))
    noise = drawn(*mask_shape, seed=9)
    mask = {"bool": noise > -0.5, "float": torch.where(noise > -1, noise, -math.inf)}.get(kind)
    scale = draw(st.sampled_from([None, 0.3]))
    return shapes, {"is_causal": kind == "causal", "scale": scale, "enable_gqa": gqa}, mask


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


def run_call(function, dtype, shapes, options, mask):
    """Return the output. In float64, also return the gradients of all arrays and of a float mask."""
    arrays = [drawn(*shape, seed=k) for k, shape in enumerate(shapes)]
    learned = [*arrays, mask] if mask is not None and mask.is_floating_point() else arrays
    learned = [x.to(dtype).requires_grad_() for x in learned]
    output = function(*learned[:3], attn_mask=learned[3] if len(learned) > 3 else mask, **options)
    gradients = torch.autograd.grad(output.square().sum(), learned) if dtype == torch.float64 else ()
    return output.detach(), *gradients
