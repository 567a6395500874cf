"""Tests of torch.onnx.export: ONNX Runtime computes the results of this library."""

import io
from functools import partial

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
CALLS = {  # a function of query, key, value and more arrays; `is_causal` of its operators Attention
    "causal": (partial(sightline.attention, mask=lambda b, h, i, j: i >= j), [1]),
    "a query without keys": (partial(sightline.attention, mask=i > j), [0]),
    "distances": (partial(sightline.attention, mask=i >= j, score=s - abs(i - j) * 0.5**h), [0]),
    "batch axes": (lambda *x: sightline.attention(*(array[:, None] for array in x), mask=i >= j), [1]),
    "lower right": (partial(sightline.attention, mask=sightline.causal("lower right")), [0]),
    "soft cap": (partial(sightline.attention, mask=i > j, score=sightline.softcap(3.0)), []),
    "sinks": (partial(sightline.attention, mask=i >= j, sinks=torch.arange(4.0)), []),
    "lengths": (lambda *x: sightline.attention(*x[:3], mask=j < table(x[3])[b]), [0], torch.tensor([3, 10])),
    "booleans": (partial(scaled_dot_product_attention, enable_gqa=True), [0], BIAS > 3.5),
    "floats": (partial(scaled_dot_product_attention, enable_gqa=True), [0], BIAS),
}


def export(function, arrays):
    """Return the program of torch.onnx.export, with lengths that may change if the arrays are query, key and value."""
    shapes = (({2: torch.export.Dim("n", max=4096)},) * 3,) if len(arrays) == 3 else None
    options = {"dynamo": True, "opset_version": 23, "verbose": False, "dynamic_shapes": shapes}
    return torch.onnx.export(Calling(function).eval(), arrays, **options)


@pytest.mark.parametrize("name", CALLS)
def test_onnx_runtime_computes_the_same(name):
    function, are_causal, *more = CALLS[name]
    arrays, file = (QUERY, KEY, VALUE, *more), io.BytesIO()
    program = export(function, arrays)
    found = [node.attributes["is_causal"].value for node in program.model.graph if node.op_type == "Attention"]
    assert found == are_causal
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    for given in [arrays] if more else [arrays, [array[:, :, :7] for array in arrays]]:
        inputs = {one.name: x.numpy() for one, x in zip(session.get_inputs(), given, strict=True)}
        [output] = session.run(None, inputs)
        torch.testing.assert_close(torch.from_numpy(output), function(*given), rtol=0, atol=2e-6)


def test_statistics_are_refused_by_name():
    refusal = pytest.warns(UserWarning, match="statistics of the weights, dropout or a quantised KVCache")
    with refusal, pytest.raises(Exception, match="ONNX"):
        export(partial(sightline.attention, see=[sightline.entropy()]), (QUERY, KEY, VALUE))
