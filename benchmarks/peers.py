"""The peers: attention of other libraries, one small class for each peer.

Peers that are not installed are listed as missing. All peers get the same numbers as Sightline and the same number of
threads. Conversion to a peer's preferred layout is not timed. If a peer has no option for a mask, it
gets the mask as a dense array.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sightline.api.functions import attention
from sightline.arrays.operations import resolve_dtype

from .cases import Contender, TimedCall
from .contenders import Peer, name_results, prepare_with_autograd, to_tensor, to_tensor_on
from .dense_statistics import WEIGHT_STATISTICS, Dense, dense_statistics, has_uneven_cells
from .torch_operators import Vllm, Zentorch
from .workloads import Inputs, Workload

OPENVINO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # OpenVINO's names of Sightline's dtypes


class Torch(Peer):
    """torch.nn.functional.scaled_dot_product_attention, which gets a mask other than the causal one as a bool array.

    `backend` is torch's name of the one fused kernel that is used; "" for torch's choice.
    """

    packages, pip = ("torch",), "torch"

    def __init__(self, name: str = "torch", label: str = "torch", backend: str = "", device: str = "cpu") -> None:
        self.name, self.label, self.backend, self.device = name, label, backend, device
        self.lacks = ("score", "bias", "dropout", "mask but the causal one", "statistics") if backend else ()

    def reference(self, workload: Workload) -> Workload | None:
        """Return the workload; None if torch's own generator drops weights, so that results cannot be checked."""
        return None if workload.dropout else workload

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> TimedCall:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        attend: Callable[..., Any] = torch.nn.functional.scaled_dot_product_attention
        if self.backend:
            attend = sdpa_kernel(getattr(SDPBackend, self.backend))(attend)
        allowed = workload.mask_array
        mask = None if allowed is None else torch.from_numpy(allowed)
        given = {"dropout_p": workload.dropout, "is_causal": workload.is_causal, "enable_gqa": workload.G != workload.H}
        options: dict[str, Any] = {name: value for name, value in given.items() if value}

        def forward(query: Any, key: Any, value: Any, bias: Any) -> Any:
            added = mask if bias is None else bias
            return attend(query, key, value, *(() if added is None else (added,)), **options)

        return prepare_with_autograd(workload, inputs, forward, threads, self.device)


class Flex(Peer):
    """torch's FlexAttention, compiled. On a CPU the compilation needs a C++ compiler."""

    name, label, packages, pip = "flex", "FlexAttention", ("torch",), "torch"
    note = "compiling it and making its block mask are not timed"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.lacks = ("dropout", "bias", "statistics", *(("backward pass",) if device == "cpu" else ()))

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> TimedCall:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        to_table = to_tensor_on(self.device)
        torch.compiler.reset()  # drop the code compiled for earlier workloads
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


class MultiHead(Peer):
    """torch.nn.MultiheadAttention with identity projections. They add four products of (n, H d) by (H d, H d).

    Statistics are computed from the weights that the layer returns.
    """

    name, label, packages, pip = "mha", "nn.MultiheadAttention", ("torch",), "torch"
    note = "the times include its four projections, here identities"

    lacks = ("backward pass", "mask", "dropout", "bias", "grouped heads", "d_v ≠ d_k", "m ≠ n")

    def refuses(self, workload: Workload) -> str | None:
        """Return why torch's layer cannot compute the workload, such as a statistic of scores; None if it can."""
        if any(statistic.name not in WEIGHT_STATISTICS for statistic in workload.see):
            return "it returns weights, not scores"
        return super().refuses(workload) or ("only cells of equal size" if has_uneven_cells(workload) else None)

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> TimedCall:
        import torch

        kind, width = getattr(torch, workload.dtype), workload.H * workload.d_k
        layer = torch.nn.MultiheadAttention(width, workload.H, bias=False, batch_first=True, dtype=kind).eval()
        with torch.no_grad():
            layer.in_proj_weight.copy_(torch.eye(width).repeat(3, 1))
            layer.out_proj.weight.copy_(torch.eye(width))
        arrays = [to_tensor(merge_heads(x), workload.dtype) for x in (inputs.query, inputs.key, inputs.value)]
        statistics = dense_statistics(workload)

        def call(_: Any) -> Any:
            with torch.inference_mode():
                output, weights = layer(*arrays, need_weights=bool(statistics), average_attn_weights=False)
                return (output, [compute(None, weights) for compute in statistics]) if statistics else output

        def results(result: Any) -> dict[str, Any]:
            named = name_results(workload, result)
            return named | {"output": split_heads(named["output"], workload)}

        return TimedCall(call, results, threads=threads)


class OnnxRuntime(Peer):
    """ONNX Runtime's MultiHeadAttention in a model of one operator.

    A mask other than the causal one is added to the scores as a bias of 0 and −∞.
    """

    name, label, packages, pip = "onnxruntime", "ONNX Runtime", ("onnxruntime", "onnx"), "onnxruntime onnx"
    has_arena = True
    lacks, dtypes = ("backward pass", "dropout", "grouped heads"), ("float32",)

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> TimedCall:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
        session = onnxruntime.InferenceSession(self.model(workload), settings, providers=["CPUExecutionProvider"])
        feed = {"query": merge_heads(inputs.query), "key": merge_heads(inputs.key), "value": merge_heads(inputs.value)}
        added = inputs.bias if workload.bias else workload.added_mask
        if added is not None:
            feed["bias"] = added
        return TimedCall(
            lambda _: session.run(None, feed)[0], lambda out: {"output": split_heads(out, workload)}, threads=threads
        )

    def model(self, workload: Workload) -> bytes:
        """Return the ONNX model of one operator, serialised."""
        from onnx import TensorProto, helper

        B, H, n, m = workload.extent
        shapes = {"query": [B, n, H * workload.d_k], "key": [B, m, H * workload.d_k], "value": [B, m, H * workload.d_v]}
        names = list(shapes)
        if workload.bias or workload.needs_mask_array:
            shapes["bias"] = [1, H if workload.bias else 1, n, m]
            names += ["", "", "bias"]  # "" omits inputs 3 and 4: the bias of the projections, and the padding mask
        tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
        output = helper.make_tensor_value_info("output", TensorProto.FLOAT, [B, n, H * workload.d_v])
        options = {"domain": "com.microsoft", "num_heads": H, "unidirectional": int(workload.is_causal)}
        node = helper.make_node("MultiHeadAttention", names, ["output"], **options)
        versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "attention", tensors, [output])
        serialised: bytes = helper.make_model(graph, opset_imports=versions, ir_version=8).SerializeToString()
        return serialised


class OpenVino(Peer):
    """OpenVINO's ScaledDotProductAttention (opset 13) with the workload's dtype as inference precision."""

    name, label, packages, pip = "openvino", "OpenVINO", ("openvino",), "openvino"
    has_arena = True
    lacks, dtypes = ("backward pass", "dropout", "grouped heads"), tuple(OPENVINO_DTYPES)

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> TimedCall:
        import openvino

        kind = getattr(openvino.Type, OPENVINO_DTYPES[workload.dtype])
        settings = {"INFERENCE_PRECISION_HINT": OPENVINO_DTYPES[workload.dtype], "PERFORMANCE_HINT": "LATENCY"}
        settings["INFERENCE_NUM_THREADS"] = str(threads)
        request = openvino.Core().compile_model(self.model(workload, kind), "CPU", settings).create_infer_request()
        input_tensors: list[Any] = []
        for array in (inputs.contiguous.query, inputs.contiguous.key, inputs.contiguous.value):
            dtype = resolve_dtype(np, workload.dtype)
            bits = array if workload.dtype == "float32" else array.astype(dtype).view(np.uint16)
            input_tensors.append((bits, openvino.Tensor(bits, list(array.shape), kind)))
        if workload.bias:
            input_tensors.append((inputs.bias, openvino.Tensor(inputs.bias, shared_memory=True)))
        elif workload.needs_mask_array:
            input_tensors.append((None, openvino.Tensor(workload.mask_array)))
        for index, (_, array) in enumerate(input_tensors):
            request.set_input_tensor(index, array)

        def results(_: Any) -> dict[str, Any]:
            output = request.get_output_tensor(0)
            dtypes = {name: resolve_dtype(np, dtype) for dtype, name in OPENVINO_DTYPES.items()}
            return {"output": output.data.view(dtypes[output.element_type.to_string()]).astype(np.float32)}

        call = partial(request.infer, share_outputs=True)
        return TimedCall(lambda _: call(), results, threads=threads, close=input_tensors.clear)

    def model(self, workload: Workload, kind: Any) -> Any:
        """Return the OpenVINO model of one operator; `kind` is OpenVINO's type of the arrays."""
        import openvino
        from openvino import opset13

        B, H, n, m = workload.extent
        shapes = [[B, H, n, workload.d_k], [B, H, m, workload.d_k], [B, H, m, workload.d_v]]
        parameters, added = [opset13.parameter(shape, kind) for shape in shapes], {}
        if workload.bias or workload.needs_mask_array:
            added_kind = kind if workload.bias else openvino.Type.boolean
            parameters.append(opset13.parameter([1, H if workload.bias else 1, n, m], added_kind))
            added["attention_mask"] = parameters[-1]
        node = opset13.scaled_dot_product_attention(*parameters[:3], causal=workload.is_causal, **added)
        return openvino.Model([node], parameters, "attention")


class Jax(Peer):
    """jax.nn.dot_product_attention compiled by jax.jit, with gradients by jax.vjp."""

    name, label, packages, pip = "jax", "JAX", ("jax",), "jax"
    has_arena = True
    lacks, dtypes = ("dropout", "d_v ≠ d_k"), ("float32", "bfloat16", "float64")
    by_position = True  # True if positions are before heads in the arrays

    def function(self, workload: Workload, inputs: Inputs) -> Callable[..., Any]:
        """Return the function of query, key and value that is compiled."""
        import jax

        options: dict[str, Any] = {"is_causal": workload.is_causal}
        if workload.needs_mask_array:
            options["mask"] = jax.numpy.asarray(workload.mask_array)
        if workload.bias:
            options["bias"] = jax.numpy.asarray(inputs.bias, dtype=workload.dtype)
        return partial(jax.nn.dot_product_attention, **options)

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> TimedCall:
        """Return the call to time: one compiled program, or for "backward" the second of two compiled programs."""
        os.environ.setdefault("NPROC", str(threads))  # XLA reads NPROC when a process first uses jax
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax

        def swap(array: Any) -> Any:
            return array.swapaxes(1, 2) if self.by_position else array

        def to_jax(array: Any) -> Any:
            return jax.numpy.array(swap(array), dtype=workload.dtype)

        def results(arrays: Any) -> dict[str, Any]:
            found = (swap(np.asarray(array, np.float32)) for array in arrays)
            return dict(zip(("output", "query", "key", "value"), found, strict=False))

        arrays, attend = [to_jax(x) for x in (inputs.query, inputs.key, inputs.value)], self.function(workload, inputs)
        if workload.passes == "forward":
            run = jax.jit(attend)
            return TimedCall(lambda _: (run(*arrays).block_until_ready(),), results, threads=threads)
        d_output = to_jax(inputs.d_output)

        def differentiate(d_output: Any, *given: Any) -> Any:
            output, vjp_function = jax.vjp(attend, *given)
            return output, *vjp_function(d_output)

        if workload.passes == "forward and backward":
            both = jax.jit(differentiate)
            return TimedCall(lambda _: jax.block_until_ready(both(d_output, *arrays)), results, threads=threads)
        forward_pass = jax.jit(lambda *given: jax.vjp(attend, *given))
        backward_pass = jax.jit(lambda vjp_function, d: vjp_function(d))

        def gradients(forward_result: Any) -> Any:
            output, vjp_function = forward_result
            return output, *jax.block_until_ready(backward_pass(vjp_function, d_output))

        return TimedCall(gradients, results, lambda: jax.block_until_ready(forward_pass(*arrays)), threads)


class SightlineInJax(Jax):
    """Sightline on JAX arrays under jax.jit: `attention` with heads before positions, or `dot_product_attention`."""

    is_peer = False

    def __init__(self, name: str, label: str, by_position: bool) -> None:
        self.name, self.label, self.by_position = name, label, by_position

    def function(self, workload: Workload, inputs: Inputs) -> Callable[..., Any]:
        if not self.by_position:
            return partial(attention, mask=workload.formula)
        from sightline.jax import dot_product_attention

        return partial(dot_product_attention, is_causal=workload.is_causal)


def _by_name(*peers: Contender) -> dict[str, Contender]:
    return {peer.name: peer for peer in peers}


PEERS = _by_name(Torch(), Flex(), OnnxRuntime(), OpenVino(), Jax(), Zentorch(), Vllm(), MultiHead(), Dense())


def make_cuda_peers(device: str) -> dict[str, Contender]:
    """Return the GPU's peers by name. Each peer keeps its tensors on `device`, torch's name of a device."""
    return _by_name(
        Torch("flash", "torch, flash", "FLASH_ATTENTION", device),
        Torch("cudnn", "torch, cuDNN", "CUDNN_ATTENTION", device),
        Torch("efficient", "torch, memory-efficient", "EFFICIENT_ATTENTION", device),
        Flex(device),
        Dense(device),
    )


# -- layouts --------------------------------------------------------------------------------------------------------


def merge_heads(array: Any) -> Any:
    """Return an array (B, H, n, d) as a contiguous array (B, n, H d)."""
    B, H, n, d = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(B, n, H * d)


def split_heads(array: Any, workload: Workload) -> Any:
    """Return an array (B, n, H d_v) as an array (B, H, n, d_v)."""
    return array.reshape(workload.B, workload.n, workload.H, workload.d_v).swapaxes(1, 2)
