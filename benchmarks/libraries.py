"""Contenders that are other libraries than torch: ONNX Runtime, OpenVINO and JAX, and Sightline on JAX arrays.

Conversion to the layout that a library prefers is not timed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from sightline.api.functions import attention
from sightline.arrays.operations import resolve_dtype

from .attention import CAUSAL, Attention, Inputs
from .core import Call, Contender, Results

OPENVINO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # OpenVINO's names of the dtypes


def prepare_onnxruntime(problem: Attention, inputs: Inputs, threads: int) -> Call:
    """Prepare ONNX Runtime's MultiHeadAttention in a model of one operator."""
    import onnxruntime
    from onnx import TensorProto, helper

    B, H, n, _ = problem.extent
    feed = {"query": merge_heads(inputs.query), "key": merge_heads(inputs.key), "value": merge_heads(inputs.value)}
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in feed.items()]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, [B, n, H * problem.d_v])
    options = {"domain": "com.microsoft", "num_heads": H, "unidirectional": int(problem.mask is CAUSAL)}
    node = helper.make_node("MultiHeadAttention", list(feed), ["output"], **options)
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "attention", tensors, [output])
    model = helper.make_model(graph, opset_imports=versions, ir_version=8).SerializeToString()
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])

    def results(array: Any) -> Results:
        return {"output": array.reshape(B, n, H, problem.d_v).swapaxes(1, 2)}

    return Call(lambda _: session.run(None, feed)[0], results)


def merge_heads(array: Any) -> Any:
    """Return an array (B, H, n, d) as a contiguous array (B, n, H d)."""
    B, H, n, d = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(B, n, H * d)


def prepare_openvino(problem: Attention, inputs: Inputs, threads: int) -> Call:
    """Prepare OpenVINO's ScaledDotProductAttention (opset 13) with the problem's dtype as inference precision."""
    import openvino
    from openvino import opset13

    name, dtype = OPENVINO_DTYPES[problem.dtype], resolve_dtype(np, problem.dtype)
    kind, whole = getattr(openvino.Type, name), inputs.contiguous()
    arrays = [array.astype(dtype) for array in (whole.query, whole.key, whole.value)]
    arrays = arrays if problem.dtype == "float32" else [array.view(np.uint16) for array in arrays]
    tensors = [openvino.Tensor(array, list(array.shape), kind) for array in arrays]
    parameters = [opset13.parameter(list(array.shape), kind) for array in arrays]
    node = opset13.scaled_dot_product_attention(*parameters, causal=problem.mask is CAUSAL)
    settings = {"INFERENCE_PRECISION_HINT": name, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": str(threads)}
    model = openvino.Model([node], parameters, "attention")
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    for place, tensor in enumerate(tensors):
        request.set_input_tensor(place, tensor)

    def results(_: Any) -> Results:
        output = request.get_output_tensor(0)
        dtypes = {short: resolve_dtype(np, long) for long, short in OPENVINO_DTYPES.items()}
        return {"output": output.data.view(dtypes[output.element_type.to_string()]).astype(np.float32)}

    read = [*arrays, *tensors]  # the request reads their memory, which `close` holds until the end
    return Call(lambda _: request.infer(share_outputs=True), results, close=read.clear)


# -- JAX --------------------------------------------------------------------------------------------------------------


def prepare_jax(problem: Attention, inputs: Inputs, threads: int, module: str) -> Call:
    """Prepare one program of jax.jit: the output, and with a backward pass the gradients by jax.vjp.

    The program calls `dot_product_attention` of the module, whose arrays have positions before heads, or
    `sightline.attention` if the module is "".
    """
    os.environ.setdefault("NPROC", str(threads))  # XLA reads NPROC when a process first uses jax
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    def swap(array: Any) -> Any:
        return array.swapaxes(1, 2) if module else array

    def results(arrays: Any) -> Results:
        found = (swap(np.asarray(array, np.float32)) for array in arrays)
        return dict(zip(("output", "query", "key", "value"), found, strict=False))

    options = {"is_causal": problem.mask is CAUSAL, "mask": problem.mask_array}
    attend: Any = partial(attention, mask=problem.formula)
    if module:
        attend = partial(import_module(module).dot_product_attention, **options)

    def compute(*operands: Any) -> Any:
        if problem.passes == "forward":
            return (attend(*operands),)
        output, gradients_of = jax.vjp(attend, *operands[:3])
        return output, *gradients_of(operands[3])

    operands = [inputs.query, inputs.key, inputs.value, *([] if inputs.d_output is None else [inputs.d_output])]
    arrays, program = [jax.numpy.array(swap(array), dtype=problem.dtype) for array in operands], jax.jit(compute)
    return Call(lambda _: jax.block_until_ready(program(*arrays)), results)


LACKS = ("backward pass", "dropout", "bias", "mask but the causal one", "grouped heads")  # in a model of one operator
OPENVINO = Contender("OpenVINO", prepare_openvino, needs=("openvino",), lacks=LACKS, has_arena=True)
ONNX_RUNTIME = Contender(
    "ONNX Runtime",
    prepare_onnxruntime,
    needs=("onnxruntime", "onnx"),
    lacks=(*LACKS, "bfloat16", "float16"),
    has_arena=True,
)
JAX_LACKS = ("dropout", "bias", "float16", "d_v ≠ d_k")
JAX = Contender("JAX", partial(prepare_jax, module="jax.nn"), needs=("jax",), lacks=JAX_LACKS, has_arena=True)
IN_JAX = replace(JAX, name="Sightline", prepare=partial(prepare_jax, module=""), is_ours=True)
IN_JAX_LAYOUT = replace(JAX, name="JAX's layout", prepare=partial(prepare_jax, module="sightline.jax"), is_ours=True)
