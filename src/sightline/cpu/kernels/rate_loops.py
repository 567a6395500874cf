"""Loops of independent multiply-adds or dot products in registers, by which the rates of a processor are measured."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..codegen.builder import Builder, Module, Variable
from ..codegen.values import BFLOAT, DOUBLE, FLOAT, INT64, POINTER, Type, Value, vector
from ..runtime.machine import Machine

NAME = "products"  # of the function; its arguments are a number of steps, the address of x, and that of the sums
UNROLL = 4
DOT = "llvm.x86.avx512bf16.dpbf16ps.512"


class ProductLoop(NamedTuple):
    """The module of a loop, and the FLOPs of one step."""

    module: Module
    flops: int


def make_product_loop(dtype: str, machine: Machine) -> ProductLoop:
    """Return the loop of dot products for bfloat16, and the loop of multiply-adds for float32 and float64."""
    chains = machine.vector_registers - 4  # the other four registers are for operands
    if dtype == "bfloat16":
        module = _write_loop(chains, vector(FLOAT, 16), vector(BFLOAT, 32), _add_dot_product)
        return ProductLoop(module, chains * UNROLL * 16 * 4)
    lanes = machine.vector_bytes // np.dtype(dtype).itemsize
    kind = vector({"float32": FLOAT, "float64": DOUBLE}[dtype], lanes)
    module = _write_loop(chains, kind, kind, lambda builder, total, x: builder.fma(total, x, x))
    return ProductLoop(module, chains * UNROLL * lanes * 2)


def _add_dot_product(builder: Builder, total: Value, x: Value) -> Value:
    return builder.call(DOT, total.type, total, x, x)


def _write_loop(chains: int, kind: Type, operand: Type, step: Callable[[Builder, Value, Value], Value]) -> Module:
    """Return the module of a loop that runs arguments[0] times. Each round makes UNROLL steps of every chain.

    A chain is a vector c, and one step computes c = step(c, x). The vector x is at the address arguments[1].
    """
    builder = Builder(Module(), NAME)
    (arguments,) = builder.arguments
    x = arguments.at(8).load(POINTER).load(operand)
    sums = [Variable(builder, kind, 0) for _ in range(chains)]
    with builder.loop(0, arguments.load(INT64)):
        for _ in range(UNROLL):
            for each in sums:
                each.set(step(builder, each.get(), x))
    total = functools.reduce(operator.add, (each.get() for each in sums))
    arguments.at(16).load(POINTER).store(total)
    builder.finish()
    return builder.module
