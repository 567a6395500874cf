"""Tests of torch.onnx.export: ONNX Runtime computes the results of this library."""

import io
from functools import partial
from itertools import chain

import pytest
import torch

import sightline
from sightline import b, h, i, j, s, table
from sightline.torch import scaled_dot_product_attention
from watched_modules import Calling

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore:. The axis name")]
onnxruntime = pytest.importorskip("onnxruntime")
QUERY, KEY, VALUE = torch.rand(3, 2, 4, 10, 16, generator=torch.Generator().manual_seed(0)).unbind()
KEY, VALUE, BIAS = KEY[:, :2], VALUE[:, :2], KEY @ VALUE.mT
CALLS = {  # a function of query, key and value; `is_causal` of its operators Attention
    "causal": (partial(sightline.attention, mask=lambda b, h, i, j: i >= j), [1]),
    "a query without keys": (partial(sightline.attention, mask=i > j), [0]),
    "distances": (partial(sightline.attention, mask=i >= j, score=s - abs(i - j) * 0.5**h), [0]),
    "batch axes": (lambda *x: sightline.attention(*(array[:, None] for array in x), mask=i >= j), [1]),
    "lower right": (partial(sightline.attention, mask=sightline.causal("lower right")), [0]),
    "soft cap": (partial(sightline.attention, mask=i > j, score=sightline.softcap(3.0)), []),
    "sinks": (partial(sightline.attention, mask=i >= j, sinks=torch.arange(4.0)), []),
}
torch_call = partial(scaled_dot_product_attention, enable_gqa=True)
CALLS_OF_MORE = {  # functions of query, key, value and three more arrays
    "lengths": (lambda *x: sightline.attention(*x[:3], mask=j < table(x[3])[b]), [0]),
    "booleans": (lambda *x: torch_call(*x[:3], x[4]), [0]),
    "floats": (lambda *x: torch_call(*x[:3], x[5]), [0]),
}
MORE = torch.tensor([3, 10]), BIAS > 3.5, BIAS


def export(functions, arrays):
    """Return the program of torch.onnx.export, with lengths that may change if the arrays are query, key and value."""
    shapes = (({2: torch.export.Dim("n", max=4096)},) * 3,) if len(arrays) == 3 else None
    options = {"dynamo": True, "opset_version": 23, "verbose": False, "dynamic_shapes": shapes}
    return torch.onnx.export(Calling(lambda *x: [call(*x) for call in functions]).eval(), arrays, **options)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("calls", "more"), [(CALLS, ()), (CALLS_OF_MORE, MORE)], ids=["any length", "more arrays"])
def test_onnx_runtime_computes_the_same(calls, more):
    """One program has all calls: an export takes seconds."""
    (functions, are_causal), arrays, file = zip(*calls.values(), strict=True), (QUERY, KEY, VALUE, *more), io.BytesIO()
    program = export(functions, arrays)
    found = [node.attributes["is_causal"].value for node in program.model.graph if node.op_type == "Attention"]
    assert found == [*chain(*are_causal)]
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    for given in [arrays] if more else [arrays, [array[:, :, :7] for array in arrays]]:
        outputs = session.run(None, {one.name: x.numpy() for one, x in zip(session.get_inputs(), given, strict=True)})
        for name, function, output in zip(calls, functions, outputs, strict=True):
            expected = function(*given)
            torch.testing.assert_close(torch.from_numpy(output), expected, rtol=0, atol=2e-6, msg=name)


def test_statistics_are_refused_by_name():
    refusal = pytest.warns(UserWarning, match="statistics of the weights, dropout or a quantised KVCache")
    with refusal, pytest.raises(Exception, match="ONNX"):
        export([partial(sightline.attention, see=[sightline.entropy()])], (QUERY, KEY, VALUE))
