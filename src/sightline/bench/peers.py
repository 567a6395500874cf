"""The peers: other libraries' attention, each a small class. Whatever is not installed is shown as absent.

All get the same numbers on the same number of threads, in the layout each likes best, which is made beforehand. Masks
that a peer has no word for are handed to it whole, as arrays.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .benchmarks import CAUSAL
from .dense_statistics import WEIGHT_STATISTICS, Dense, dense_statistics, has_uneven_cells
from .implementations import Implementation, PreparedCall, name_results, prepare_with_autograd, to_tensor, to_tensor_on
from .workloads import Inputs, Workload

__all__ = ["PEERS"]

OPENVINO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # OpenVINO's names of dtypes


def dense_mask(workload: Workload) -> Any:
    """The mask as a boolean array (1, 1, n, m), True attends; none of these masks reads b or h."""
    assert workload.formula is not None
    return np.array(
        workload.formula.array(workload.n, workload.m)[None, None]
    )  # a copy: torch takes none that is read-only


class Torch(Implementation):
    """torch.nn.functional.scaled_dot_product_attention, masks other than causal given as arrays of truth values."""

    name, label, packages, pip = "torch", "torch", ("torch",), "torch"

    def refuses(self, workload: Workload) -> str | None:
        """Nothing."""
        return None

    def reference_workload(self, workload: Workload) -> Workload | None:
        """Nothing where it drops weights: which, its own generator decides."""
        return None if workload.dropout else workload

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        import torch

        sdpa = torch.nn.functional.scaled_dot_product_attention
        causal = workload.mask is CAUSAL
        mask = None if workload.mask is None or causal else torch.from_numpy(dense_mask(workload))
        options: dict[str, Any] = {
            "dropout_p": workload.dropout,
            "is_causal": causal,
            "enable_gqa": workload.G != workload.H,
        }
        if options == {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False}:
            options = {}

        def forward(query: Any, key: Any, value: Any, bias: Any) -> Any:
            added = mask if bias is None else bias
            return sdpa(query, key, value, **options) if added is None else sdpa(query, key, value, added, **options)

        return prepare_with_autograd(workload, inputs, forward, threads)


class Flex(Implementation):
    """torch's FlexAttention, compiled: it needs a C++ compiler."""

    name, label, packages, pip, note = "flex", "FlexAttention", ("torch",), "torch", "compiled once, outside the timing"

    def refuses(self, workload: Workload) -> str | None:
        """Gradients, dropout and bias."""
        if workload.passes != "forward":
            return "no backward pass on CPUs"
        if workload.dropout or workload.bias:
            return "no dropout" if workload.dropout else "no bias with a gradient"
        return None

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        to_table = to_tensor_on(self.device)
        torch.compiler.reset()  # what the last race compiled is not carried along
        options: dict[str, Any] = {"enable_gqa": True} if workload.G != workload.H else {}
        if workload.mask is not None:
            allows = workload.mask.make_function(workload.n, to_table)
            options["block_mask"] = create_block_mask(allows, None, None, workload.n, workload.m, device=self.device)
        if workload.score is not None:
            options["score_mod"] = workload.score.make_function(workload.H, to_table)
        compiled = torch.compile(flex_attention)

        def forward(query: Any, key: Any, value: Any, _: Any) -> Any:
            return compiled(query, key, value, **options)

        return prepare_with_autograd(workload, inputs, forward, threads, self.device)


class MultiHead(Implementation):
    """torch.nn.MultiheadAttention with identity projections: four products of (n, H d) by (H d, H d) more.

    Statistics are of the weights it returns where asked.
    """

    name, label, packages, pip = "mha", "nn.MultiheadAttention", ("torch",), "torch"
    note = "its four projections, here identities, are timed with it"

    def refuses(self, workload: Workload) -> str | None:
        """All but plain forward passes."""
        is_plain = workload.passes == "forward" and workload.mask is None and not (workload.dropout or workload.bias)
        shapes_fit = workload.G == workload.H and workload.d_k == workload.d_v and workload.n == workload.m
        if not (is_plain and shapes_fit):
            return "plain forward passes alone"
        if any(statistic.name not in WEIGHT_STATISTICS for statistic in workload.see):
            return "its weights do not tell the scores"
        return "cells of one size alone" if has_uneven_cells(workload) else None

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        import torch

        kind, width = getattr(torch, workload.dtype), workload.H * workload.d_k
        layer = torch.nn.MultiheadAttention(width, workload.H, bias=False, batch_first=True, dtype=kind).eval()
        with torch.no_grad():
            layer.in_proj_weight.copy_(torch.eye(width).repeat(3, 1))
            layer.out_proj.weight.copy_(torch.eye(width))
        arrays = [to_tensor(merge_heads(x), workload.dtype) for x in (inputs.query, inputs.key, inputs.value)]
        found = dense_statistics(workload)

        def call(_: Any) -> Any:
            with torch.inference_mode():
                output, weights = layer(*arrays, need_weights=bool(found), average_attn_weights=False)
                return (output, [compute(None, weights) for compute in found]) if found else output

        def results(result: Any) -> dict[str, Any]:
            given = name_results(workload, result)
            return given | {"output": split_heads(given["output"], workload)}

        return PreparedCall(call, results, threads=threads)


class OnnxRuntime(Implementation):
    """ONNX Runtime's MultiHeadAttention, a model of this one operator; masks other than causal are added."""

    name, label, packages, pip = "onnxruntime", "ONNX Runtime", ("onnxruntime", "onnx"), "onnxruntime onnx"
    has_arena = True

    def refuses(self, workload: Workload) -> str | None:
        """Gradients, 16 bits, shared key heads, dropout."""
        if workload.passes != "forward" or workload.dropout:
            return "inference alone"
        if workload.dtype != "float32":
            return f"no {workload.dtype} on CPUs"
        return "no shared key heads" if workload.G != workload.H else None

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
        session = onnxruntime.InferenceSession(self.model(workload), settings, providers=["CPUExecutionProvider"])
        feed = {"query": merge_heads(inputs.query), "key": merge_heads(inputs.key), "value": merge_heads(inputs.value)}
        if workload.bias:
            feed["bias"] = inputs.bias
        elif workload.mask is not None and workload.mask is not CAUSAL:
            feed["bias"] = np.where(dense_mask(workload), np.float32(0), np.float32(-np.inf))
        return PreparedCall(
            lambda _: session.run(None, feed)[0], lambda out: {"output": split_heads(out, workload)}, threads=threads
        )

    def model(self, workload: Workload) -> bytes:
        """The model, serialised."""
        from onnx import TensorProto, helper

        shapes = {
            "query": [workload.B, workload.n, workload.H * workload.d_k],
            "key": [workload.B, workload.m, workload.H * workload.d_k],
        }
        shapes["value"], names = [workload.B, workload.m, workload.H * workload.d_v], ["query", "key", "value"]
        if workload.bias or not (workload.mask is None or workload.mask is CAUSAL):
            shapes["bias"] = [1, workload.H if workload.bias else 1, workload.n, workload.m]
            names += ["", "", "bias"]  # the places of projections' biases and of padding
        made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
        output = helper.make_tensor_value_info(
            "output", TensorProto.FLOAT, [workload.B, workload.n, workload.H * workload.d_v]
        )
        node = helper.make_node(
            "MultiHeadAttention",
            names,
            ["output"],
            domain="com.microsoft",
            num_heads=workload.H,
            unidirectional=int(workload.mask is CAUSAL),
        )
        versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "attention", made, [output])
        serialised: bytes = helper.make_model(graph, opset_imports=versions, ir_version=8).SerializeToString()
        return serialised


class OpenVino(Implementation):
    """OpenVINO's ScaledDotProductAttention (opset 13), its inference precision that of the race."""

    name, label, packages, pip = "openvino", "OpenVINO", ("openvino",), "openvino"
    has_arena = True

    def refuses(self, workload: Workload) -> str | None:
        """Gradients, float64, shared key heads, dropout."""
        if workload.passes != "forward" or workload.dropout:
            return "inference alone"
        if workload.dtype not in OPENVINO_DTYPES:
            return f"no {workload.dtype}"
        return "no shared key heads" if workload.G != workload.H else None

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        import openvino

        kind = getattr(openvino.Type, OPENVINO_DTYPES[workload.dtype])
        settings = {"INFERENCE_PRECISION_HINT": OPENVINO_DTYPES[workload.dtype], "PERFORMANCE_HINT": "LATENCY"}
        settings["INFERENCE_NUM_THREADS"] = str(threads)
        request = openvino.Core().compile_model(self.model(workload, kind), "CPU", settings).create_infer_request()
        input_tensors: list[Any] = []
        for array in (inputs.query, inputs.key, inputs.value):
            bits = array if workload.dtype == "float32" else to_16_bit_words(array, workload.dtype)
            input_tensors.append((bits, openvino.Tensor(bits, list(array.shape), kind)))
        if workload.bias:
            input_tensors.append((inputs.bias, openvino.Tensor(inputs.bias, shared_memory=True)))
        elif workload.mask is not None and workload.mask is not CAUSAL:
            input_tensors.append((None, openvino.Tensor(dense_mask(workload))))
        for place, (_, array) in enumerate(input_tensors):
            request.set_input_tensor(place, array)

        def results(_: Any) -> dict[str, Any]:
            found = request.get_output_tensor(0)
            kinds = {hint: dtype for dtype, hint in OPENVINO_DTYPES.items()}
            return {"output": to_float32(found.data, kinds[found.element_type.to_string()])}

        def close() -> None:
            input_tensors.clear()

        return PreparedCall(lambda _: request.infer(share_outputs=True), results, threads=threads, close=close)

    def model(self, workload: Workload, kind: Any) -> Any:
        """The model of one operator."""
        import openvino
        from openvino import opset13

        shapes = [
            [workload.B, workload.H, workload.n, workload.d_k],
            [workload.B, workload.H, workload.m, workload.d_k],
        ]
        shapes.append([workload.B, workload.H, workload.m, workload.d_v])
        parameters, added = [opset13.parameter(shape, kind) for shape in shapes], {}
        if workload.bias or not (workload.mask is None or workload.mask is CAUSAL):
            heads = workload.H if workload.bias else 1
            parameters.append(
                opset13.parameter([1, heads, workload.n, workload.m], kind if workload.bias else openvino.Type.boolean)
            )
            added["attention_mask"] = parameters[-1]
        node = opset13.scaled_dot_product_attention(*parameters[:3], causal=workload.mask is CAUSAL, **added)
        return openvino.Model([node], parameters, "attention")


class Jax(Implementation):
    """jax.nn.dot_product_attention under jax.jit, the gradient through jax.vjp."""

    name, label, packages, pip = "jax", "JAX", ("jax",), "jax"
    has_arena = True

    def refuses(self, workload: Workload) -> str | None:
        """Dropout, float16, d_v ≠ d_k, and more than one pass at once."""
        if workload.dropout or workload.dtype == "float16":
            return "no dropout" if workload.dropout else "no float16 on CPUs"
        if workload.d_k != workload.d_v:
            return "d_v is d_k there"
        return "not set up" if workload.passes == "forward and backward" else None

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> PreparedCall:
        os.environ.setdefault("NPROC", str(threads))  # XLA reads it when jax is first used
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax

        def to_jax_layout(array: Any) -> Any:
            return jax.numpy.asarray(array.swapaxes(1, 2), dtype=workload.dtype)

        def from_jax_layout(array: Any) -> Any:
            return np.asarray(array, np.float32).swapaxes(1, 2)

        arrays = [to_jax_layout(x) for x in (inputs.query, inputs.key, inputs.value)]
        options: dict[str, Any] = {"is_causal": workload.mask is CAUSAL}
        if workload.mask is not None and workload.mask is not CAUSAL:
            options["mask"] = jax.numpy.asarray(dense_mask(workload))
        if workload.bias:
            options["bias"] = jax.numpy.asarray(inputs.bias, dtype=workload.dtype)

        def attend(*given: Any) -> Any:
            return jax.nn.dot_product_attention(*given, **options)

        if workload.passes == "forward":
            run = jax.jit(attend)
            return PreparedCall(
                lambda _: run(*arrays).block_until_ready(),
                lambda out: {"output": from_jax_layout(out)},
                threads=threads,
            )
        seed = to_jax_layout(inputs.d_output)
        forward_pass, backward_pass = (
            jax.jit(lambda *given: jax.vjp(attend, *given)),
            jax.jit(lambda vjp_function, d: vjp_function(d)),
        )

        def gradients(passed: Any) -> Any:
            return passed[0], jax.block_until_ready(backward_pass(passed[1], seed))

        def results(found: Any) -> dict[str, Any]:
            named_gradients = dict(zip(("query", "key", "value"), found[1], strict=True))
            return {"output": from_jax_layout(found[0])} | {
                name: from_jax_layout(array) for name, array in named_gradients.items()
            }

        return PreparedCall(gradients, results, lambda: jax.block_until_ready(forward_pass(*arrays)), threads)


PEERS: dict[str, Implementation] = {
    peer.name: peer for peer in (Torch(), Flex(), OnnxRuntime(), OpenVino(), Jax(), MultiHead(), Dense())
}


# -- layouts --------------------------------------------------------------------------------------------------------


def merge_heads(array: Any) -> Any:
    """(B, H, n, d) to (B, n, H d)."""
    B, H, n, d = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(B, n, H * d)


def split_heads(array: Any, workload: Workload) -> Any:
    """(B, n, H d_v) to (B, H, n, d_v)."""
    return array.reshape(workload.B, workload.n, workload.H, workload.d_v).swapaxes(1, 2)


def to_16_bit_words(array: Any, dtype: str) -> Any:
    """float32 numbers as the bits of a 16-bit format."""
    from ..arrays import resolve_dtype

    return array.astype(resolve_dtype(np, dtype)).view(np.uint16)


def to_float32(array: Any, dtype: str) -> Any:
    """An array of that format, given as its bits or as itself, in float32; a copy."""
    from ..arrays import resolve_dtype

    kind = resolve_dtype(np, dtype)
    return (array if array.dtype == kind else array.view(kind)).astype(np.float32)
