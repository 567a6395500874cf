"""The peers: other libraries' attention, each a small class. Whatever is not installed is shown as absent.

All get the same numbers on the same number of threads, in the layout each likes best, which is made beforehand. Masks
that a peer has no word for are handed to it whole, as arrays.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .contenders import Contender, Ready, named, reading, tensor, through_autograd
from .dense import OF_WEIGHTS, Dense, uneven, ways
from .problems import CAUSAL
from .races import Inputs, Race

__all__ = ["PEERS"]

HINTS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # OpenVINO's names of dtypes


def dense_mask(race: Race) -> Any:
    """The mask as a boolean array (1, 1, n, m), True attends; none of these masks reads b or h."""
    assert race.formula is not None
    return np.array(race.formula.array(race.n, race.m)[None, None])  # a copy: torch takes none that is read-only


class Torch(Contender):
    """torch.nn.functional.scaled_dot_product_attention, masks other than causal given as arrays of truth values."""

    name, label, packages, pip = "torch", "torch", ("torch",), "torch"

    def refuses(self, race: Race) -> str | None:
        """Nothing."""
        return None

    def judged_as(self, race: Race) -> Race | None:
        """Nothing where it drops weights: which, its own generator decides."""
        return None if race.dropout else race

    def prepare(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        import torch

        sdpa = torch.nn.functional.scaled_dot_product_attention
        causal = race.mask is CAUSAL
        mask = None if race.mask is None or causal else torch.from_numpy(dense_mask(race))
        options: dict[str, Any] = {"dropout_p": race.dropout, "is_causal": causal, "enable_gqa": race.G != race.H}
        if options == {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False}:
            options = {}

        def forward(query: Any, key: Any, value: Any, bias: Any) -> Any:
            added = mask if bias is None else bias
            return sdpa(query, key, value, **options) if added is None else sdpa(query, key, value, added, **options)

        return through_autograd(race, inputs, forward, threads)


class Flex(Contender):
    """torch's FlexAttention, compiled: it needs a C++ compiler."""

    name, label, packages, pip, note = "flex", "FlexAttention", ("torch",), "torch", "compiled once, outside the timing"

    def refuses(self, race: Race) -> str | None:
        """Gradients, dropout and bias."""
        if race.passes != "forward":
            return "no backward pass on CPUs"
        if race.dropout or race.bias:
            return "no dropout" if race.dropout else "no bias with a gradient"
        return None

    def prepare(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        read = reading(self.device)
        torch.compiler.reset()  # what the last race compiled is not carried along
        options: dict[str, Any] = {"enable_gqa": True} if race.G != race.H else {}
        if race.mask is not None:
            allows = race.mask.write(race.n, read)
            options["block_mask"] = create_block_mask(allows, None, None, race.n, race.m, device=self.device)
        if race.score is not None:
            options["score_mod"] = race.score.write(race.H, read)
        compiled = torch.compile(flex_attention)

        def forward(query: Any, key: Any, value: Any, _: Any) -> Any:
            return compiled(query, key, value, **options)

        return through_autograd(race, inputs, forward, threads, self.device)


class MultiHead(Contender):
    """torch.nn.MultiheadAttention with identity projections: four products of (n, H d) by (H d, H d) more.

    Statistics are of the weights it returns where asked.
    """

    name, label, packages, pip = "mha", "nn.MultiheadAttention", ("torch",), "torch"
    note = "its four projections, here identities, are timed with it"

    def refuses(self, race: Race) -> str | None:
        """All but plain forward passes."""
        plainly = race.passes == "forward" and race.mask is None and not (race.dropout or race.bias)
        fits = race.G == race.H and race.d_k == race.d_v and race.n == race.m
        if not (plainly and fits):
            return "plain forward passes alone"
        if any(statistic.name not in OF_WEIGHTS for statistic in race.see):
            return "its weights do not tell the scores"
        return "cells of one size alone" if uneven(race) else None

    def prepare(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        import torch

        kind, width = getattr(torch, race.dtype), race.H * race.d_k
        layer = torch.nn.MultiheadAttention(width, race.H, bias=False, batch_first=True, dtype=kind).eval()
        with torch.no_grad():
            layer.in_proj_weight.copy_(torch.eye(width).repeat(3, 1))
            layer.out_proj.weight.copy_(torch.eye(width))
        arrays = [tensor(merged(x), race.dtype) for x in (inputs.query, inputs.key, inputs.value)]
        found = ways(race)

        def call(_: Any) -> Any:
            with torch.inference_mode():
                output, weights = layer(*arrays, need_weights=bool(found), average_attn_weights=False)
                return (output, [way(None, weights) for way in found]) if found else output

        def answers(result: Any) -> dict[str, Any]:
            given = named(race, result)
            return given | {"output": split(given["output"], race)}

        return Ready(call, answers, threads=threads)


class OnnxRuntime(Contender):
    """ONNX Runtime's MultiHeadAttention, a model of this one operator; masks other than causal are added."""

    name, label, packages, pip = "onnxruntime", "ONNX Runtime", ("onnxruntime", "onnx"), "onnxruntime onnx"
    arena = True

    def refuses(self, race: Race) -> str | None:
        """Gradients, 16 bits, shared key heads, dropout."""
        if race.passes != "forward" or race.dropout:
            return "inference alone"
        if race.dtype != "float32":
            return f"no {race.dtype} on CPUs"
        return "no shared key heads" if race.G != race.H else None

    def prepare(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
        session = onnxruntime.InferenceSession(self.model(race), settings, providers=["CPUExecutionProvider"])
        feed = {"query": merged(inputs.query), "key": merged(inputs.key), "value": merged(inputs.value)}
        if race.bias:
            feed["bias"] = inputs.bias
        elif race.mask is not None and race.mask is not CAUSAL:
            feed["bias"] = np.where(dense_mask(race), np.float32(0), np.float32(-np.inf))
        return Ready(lambda _: session.run(None, feed)[0], lambda out: {"output": split(out, race)}, threads=threads)

    def model(self, race: Race) -> bytes:
        """The model, serialised."""
        from onnx import TensorProto, helper

        shapes = {"query": [race.B, race.n, race.H * race.d_k], "key": [race.B, race.m, race.H * race.d_k]}
        shapes["value"], names = [race.B, race.m, race.H * race.d_v], ["query", "key", "value"]
        if race.bias or not (race.mask is None or race.mask is CAUSAL):
            shapes["bias"] = [1, race.H if race.bias else 1, race.n, race.m]
            names += ["", "", "bias"]  # the places of projections' biases and of padding
        made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
        output = helper.make_tensor_value_info("output", TensorProto.FLOAT, [race.B, race.n, race.H * race.d_v])
        node = helper.make_node(
            "MultiHeadAttention",
            names,
            ["output"],
            domain="com.microsoft",
            num_heads=race.H,
            unidirectional=int(race.mask is CAUSAL),
        )
        versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "attention", made, [output])
        serialised: bytes = helper.make_model(graph, opset_imports=versions, ir_version=8).SerializeToString()
        return serialised


class OpenVino(Contender):
    """OpenVINO's ScaledDotProductAttention (opset 13), its inference precision that of the race."""

    name, label, packages, pip = "openvino", "OpenVINO", ("openvino",), "openvino"
    arena = True

    def refuses(self, race: Race) -> str | None:
        """Gradients, float64, shared key heads, dropout."""
        if race.passes != "forward" or race.dropout:
            return "inference alone"
        if race.dtype not in HINTS:
            return f"no {race.dtype}"
        return "no shared key heads" if race.G != race.H else None

    def prepare(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        import openvino

        kind = getattr(openvino.Type, HINTS[race.dtype])
        settings = {"INFERENCE_PRECISION_HINT": HINTS[race.dtype], "PERFORMANCE_HINT": "LATENCY"}
        settings["INFERENCE_NUM_THREADS"] = str(threads)
        request = openvino.Core().compile_model(self.model(race, kind), "CPU", settings).create_infer_request()
        held: list[Any] = []
        for array in (inputs.query, inputs.key, inputs.value):
            bits = array if race.dtype == "float32" else in_16_bits(array, race.dtype)
            held.append((bits, openvino.Tensor(bits, list(array.shape), kind)))
        if race.bias:
            held.append((inputs.bias, openvino.Tensor(inputs.bias, shared_memory=True)))
        elif race.mask is not None and race.mask is not CAUSAL:
            held.append((None, openvino.Tensor(dense_mask(race))))
        for place, (_, array) in enumerate(held):
            request.set_input_tensor(place, array)

        def answers(_: Any) -> dict[str, Any]:
            found = request.get_output_tensor(0)
            kinds = {hint: dtype for dtype, hint in HINTS.items()}
            return {"output": widened(found.data, kinds[found.element_type.to_string()])}

        def close() -> None:
            held.clear()

        return Ready(lambda _: request.infer(share_outputs=True), answers, threads=threads, close=close)

    def model(self, race: Race, kind: Any) -> Any:
        """The model of one operator."""
        import openvino
        from openvino import opset13

        shapes = [[race.B, race.H, race.n, race.d_k], [race.B, race.H, race.m, race.d_k]]
        shapes.append([race.B, race.H, race.m, race.d_v])
        parameters, added = [opset13.parameter(shape, kind) for shape in shapes], {}
        if race.bias or not (race.mask is None or race.mask is CAUSAL):
            heads = race.H if race.bias else 1
            parameters.append(
                opset13.parameter([1, heads, race.n, race.m], kind if race.bias else openvino.Type.boolean)
            )
            added["attention_mask"] = parameters[-1]
        node = opset13.scaled_dot_product_attention(*parameters[:3], causal=race.mask is CAUSAL, **added)
        return openvino.Model([node], parameters, "attention")


class Jax(Contender):
    """jax.nn.dot_product_attention under jax.jit, the gradient through jax.vjp."""

    name, label, packages, pip = "jax", "JAX", ("jax",), "jax"
    arena = True

    def refuses(self, race: Race) -> str | None:
        """Dropout, float16, d_v ≠ d_k, and more than one pass at once."""
        if race.dropout or race.dtype == "float16":
            return "no dropout" if race.dropout else "no float16 on CPUs"
        if race.d_k != race.d_v:
            return "d_v is d_k there"
        return "not set up" if race.passes == "forward and backward" else None

    def prepare(self, race: Race, inputs: Inputs, threads: int) -> Ready:
        os.environ.setdefault("NPROC", str(threads))  # XLA reads it when jax is first used
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax

        def laid(array: Any) -> Any:
            return jax.numpy.asarray(array.swapaxes(1, 2), dtype=race.dtype)

        def back(array: Any) -> Any:
            return np.asarray(array, np.float32).swapaxes(1, 2)

        arrays = [laid(x) for x in (inputs.query, inputs.key, inputs.value)]
        options: dict[str, Any] = {"is_causal": race.mask is CAUSAL}
        if race.mask is not None and race.mask is not CAUSAL:
            options["mask"] = jax.numpy.asarray(dense_mask(race))
        if race.bias:
            options["bias"] = jax.numpy.asarray(inputs.bias, dtype=race.dtype)

        def attend(*given: Any) -> Any:
            return jax.nn.dot_product_attention(*given, **options)

        if race.passes == "forward":
            run = jax.jit(attend)
            return Ready(lambda _: run(*arrays).block_until_ready(), lambda out: {"output": back(out)}, threads=threads)
        seed = laid(inputs.d_output)
        ahead, behind = jax.jit(lambda *given: jax.vjp(attend, *given)), jax.jit(lambda pull, d: pull(d))

        def gradients(passed: Any) -> Any:
            return passed[0], jax.block_until_ready(behind(passed[1], seed))

        def answers(found: Any) -> dict[str, Any]:
            named = dict(zip(("query", "key", "value"), found[1], strict=True))
            return {"output": back(found[0])} | {name: back(array) for name, array in named.items()}

        return Ready(gradients, answers, lambda: jax.block_until_ready(ahead(*arrays)), threads)


PEERS: dict[str, Contender] = {
    peer.name: peer for peer in (Torch(), Flex(), OnnxRuntime(), OpenVino(), Jax(), MultiHead(), Dense())
}


# -- layouts --------------------------------------------------------------------------------------------------------


def merged(array: Any) -> Any:
    """(B, H, n, d) to (B, n, H d)."""
    B, H, n, d = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(B, n, H * d)


def split(array: Any, race: Race) -> Any:
    """(B, n, H d_v) to (B, H, n, d_v)."""
    return array.reshape(race.B, race.n, race.H, race.d_v).swapaxes(1, 2)


def in_16_bits(array: Any, dtype: str) -> Any:
    """float32 numbers as the bits of a 16-bit format."""
    from ..arrays import resolve

    return array.astype(resolve(np, dtype)).view(np.uint16)


def widened(array: Any, dtype: str) -> Any:
    """An array of that format, given as its bits or as itself, in float32; a copy."""
    from ..arrays import resolve

    kind = resolve(np, dtype)
    return (array if array.dtype == kind else array.view(kind)).astype(np.float32)
