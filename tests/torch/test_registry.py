"""While "sightline" is active in torch's registry, calls of torch's attention have the results of this library."""

import pytest
import torch
from hypothesis import given, settings
from torch.backends import mha
from torch.nn import attention, functional

from fault_planting import Fault, make_fault_test
from sightline.torch import registry, replacing, scaled_dot_product_attention
from torch_calls import calls, drawn, run_call

pytestmark = pytest.mark.skipif(not hasattr(attention, "restore_flash_attention_impl"), reason="torch has no registry")
FLASH, FLASH_BACKWARD = (getattr(torch.ops.aten, registry.FLASH + end) for end in ("", "_backward"))
HIDDEN_ROW = drawn(2, 1, 9, 9, seed=5).index_fill(2, torch.tensor(2), -torch.inf)
OPTIONS = {
    "causal": {"is_causal": True},
    "bool": {"attn_mask": HIDDEN_ROW > 0, "enable_gqa": True},
    "float": {"attn_mask": HIDDEN_ROW, "scale": 0.3},
}


def attend(*given, **options):
    return functional.scaled_dot_product_attention(*given, **options)


def operands(dtype=torch.float32):
    return [drawn(2, 9, 4, 8, seed=seed).to(dtype).transpose(1, 2).requires_grad_() for seed in range(3)]


def differentiated(function, given, **options):
    output = function(*given, **options)
    return output, *torch.autograd.grad(output.square().sum(), given)


@given(call=calls())
@settings(max_examples=10)
def test_drawn_calls_have_the_bits_of_this_library(call):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        attention.activate_flash_attention_impl("sightline")
        found = run_call(attend, dtype, *call)
        attention.restore_flash_attention_impl()
        expected = run_call(scaled_dot_product_attention, dtype, *call)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_fast_path_of_layers_is_off_until_the_last_context_ends():
    attention.activate_flash_attention_impl("sightline")
    with replacing():
        attention.restore_flash_attention_impl()
        assert not mha.get_fastpath_enabled()
    assert mha.get_fastpath_enabled()


@pytest.mark.sampled(one_in=9)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls(backend, name, dtype):
    """They are served while this library is activated, and by torch after that, without another compilation."""
    torch.compiler.reset()
    compiled, options = torch.compile(attend, backend=backend), OPTIONS[name]
    if (name, dtype) == ("float", torch.float64):  # torch reads a mask of float32 as if it were one of float64
        options = options | {"attn_mask": HIDDEN_ROW.double()}
    given, bound = operands(dtype), max(1e-5, 16 * torch.finfo(dtype).eps)
    attention.activate_flash_attention_impl("sightline")
    ours = differentiated(compiled, given, **options)
    attention.restore_flash_attention_impl()
    theirs, expected = differentiated(compiled, given, **options), differentiated(attend, given, **options)
    torch.testing.assert_close(theirs + ours, expected * 2, rtol=bound, atol=bound)
    are_equal = [torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)]
    assert not (all if dtype is torch.bfloat16 else any)(are_equal)  # a few numbers of 8 bits may all round alike


def check_operators():
    """Compare results, memory order and gradients with torch's. Each library also differentiates the other's."""
    given, mask, d_output = [x.detach() for x in operands()], HIDDEN_ROW, drawn(2, 4, 9, 8, seed=7)
    theirs = FLASH(*given, attn_mask=mask, scale=0.3)
    expected = FLASH_BACKWARD(d_output, *given, *theirs, 0.0, False, attn_mask=mask, scale=0.3)
    attention.activate_flash_attention_impl("sightline")
    ours = FLASH(*given, attn_mask=mask, scale=0.3)
    found = [FLASH_BACKWARD(d_output, *given, *x, 0.0, False, attn_mask=mask, scale=0.3) for x in (ours, theirs)]
    attention.restore_flash_attention_impl()
    found.append(FLASH_BACKWARD(d_output, *given, *ours, 0.0, False, attn_mask=mask, scale=0.3))
    for one, other in ((ours, theirs), *[(each, expected) for each in found]):
        torch.testing.assert_close(one, other, check_stride=True)


FAULTS = {
    "another scale": Fault(registry._read, "scale", "0.2"),
    "lse left out": Fault(registry._differentiate, "sums.double()", "0 * sums.double()"),
    "memory in another order": Fault(
        registry._order_heads_last, "array.transpose(1, 2).contiguous()", "array.transpose(1, 2)"
    ),
    "lse of hidden rows": Fault(registry._attend_below_autograd, "sums.masked_fill(sums == -torch.inf, 0.0)", "sums"),
}
test_operators = make_fault_test(FAULTS, check_operators)
