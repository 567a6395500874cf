"""Loops of independent multiply-adds or dot products in registers, by which the rates of a processor are measured."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from ..codegen.builder import Builder, Variable
from ..codegen.values import DOUBLE, FLOAT, INT64, POINTER, vector
from ..runtime.machine import Machine

NAME = "products"  # of the function; its arguments are a number of steps, the address of x, and that of the sums
UNROLL = 4
DOT = "llvm.x86.avx512bf16.dpbf16ps.512"


class ProductLoop(NamedTuple):
    """The module of a loop, and the FLOPs of one step."""

    module: Any
    flops: int


def make_product_loop(dtype: str, machine: Machine) -> ProductLoop:
    """Return the loop of dot products for bfloat16, and the loop of multiply-adds for float32 and float64."""
    chains = machine.vector_registers - 4  # the other four registers are for operands
    if dtype == "bfloat16":
        return ProductLoop(_dot_product_loop(chains), chains * UNROLL * 16 * 4)
    lanes = machine.vector_bytes // np.dtype(dtype).itemsize
    return ProductLoop(_multiply_add_loop(dtype, chains, lanes), chains * UNROLL * lanes * 2)


def _multiply_add_loop(name: str, chains: int, lanes: int) -> Any:
    """Return the loop of multiply-adds: for _ in range(arguments[0]), UNROLL times each chain.

    Each chain is a vector c, and one step computes c = c · x + x. The vector x is at the address arguments[1].
    """
    kind = vector({"float32": FLOAT, "float64": DOUBLE}[name], lanes)
    builder = Builder(ir.Module(NAME), NAME)
    (arguments,) = builder.arguments
    x = arguments.at(8).load(POINTER).load(kind)
    sums = [Variable(builder, kind, 0) for _ in range(chains)]
    with builder.loop(0, arguments.load(INT64)):
        for _ in range(UNROLL):
            for each in sums:
                each.set(builder.fma(each.get(), x, x))
    total = functools.reduce(operator.add, (each.get() for each in sums))
    arguments.at(16).load(POINTER).store(total)
    builder.finish()
    return builder.module


def _dot_product_loop(chains: int) -> str:
    """Return the loop of `_multiply_add_loop` with dot products of bfloat16 pairs instead of multiply-adds.

    The loop is LLVM text, since llvmlite has no bfloat type.
    """
    rows, names = [], [f"%s{k}" for k in range(chains)]
    for step in range(UNROLL):
        for name in names:
            before = f"{name}.in" if step == 0 else f"{name}.{step - 1}"
            product = f"call <16 x float> @{DOT}(<16 x float> {before}, <32 x bfloat> %x, <32 x bfloat> %x)"
            rows.append(f"  {name}.{step} = {product}")
    phis = [f"  {x}.in = phi <16 x float> [ zeroinitializer, %entry ], [ {x}.{UNROLL - 1}, %loop ]" for x in names]
    total, totals = f"{names[0]}.{UNROLL - 1}", []
    for name in names[1:]:
        totals.append(f"  {name}.t = fadd <16 x float> {total}, {name}.{UNROLL - 1}")
        total = f"{name}.t"
    return "\n".join(
        [
            f"declare <16 x float> @{DOT}(<16 x float>, <32 x bfloat>, <32 x bfloat>)",
            f"define void @{NAME}(ptr %arguments) {{",
            "entry:",
            "  %count = load i64, ptr %arguments",
            "  %source.address = getelementptr i8, ptr %arguments, i64 8",
            "  %source = load ptr, ptr %source.address",
            "  %x = load <32 x bfloat>, ptr %source, align 1",
            "  br label %loop",
            "loop:",
            "  %k = phi i64 [ 0, %entry ], [ %next, %loop ]",
            *phis,
            *rows,
            "  %next = add i64 %k, 1",
            "  %more = icmp slt i64 %next, %count",
            "  br i1 %more, label %loop, label %done",
            "done:",
            *totals,
            "  %sink.address = getelementptr i8, ptr %arguments, i64 16",
            "  %sink = load ptr, ptr %sink.address",
            f"  store <16 x float> {total}, ptr %sink, align 1",
            "  ret void",
            "}",
        ]
    )
