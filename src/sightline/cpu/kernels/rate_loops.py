"""Loops of independent multiply-adds or dot products in registers, by which the rates of a processor are measured."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

from ..codegen.builder import Builder, Module, Variable
from ..codegen.register_tile import RegisterTiles
from ..codegen.values import DOUBLE, FLOAT, INT64, POINTER
from ..runtime.machine import Machine

NAME = "products"  # of the function; its arguments are a number of steps, the address of x, and that of the sums
UNROLL = 4


class ProductLoop(NamedTuple):
    """The module of a loop, and the FLOPs of one step."""

    module: Module
    flops: int


def make_product_loop(dtype: str, machine: Machine) -> ProductLoop:
    """Return the loop of dot products for bfloat16, and the loop of multiply-adds for float32 and float64.

    A chain is a vector c, and one step computes c + x · x. Each round makes UNROLL steps of every chain.
    """
    builder, chains = Builder(Module(), NAME), machine.vector_registers - 4  # the other registers are for operands
    tiles = RegisterTiles(builder, DOUBLE if dtype == "float64" else FLOAT, machine, dtype == "bfloat16")
    (arguments,) = builder.arguments
    x = arguments.at(8).load(POINTER).load(tiles.operand_vector)
    sums = [Variable(builder, tiles.vector, 0) for _ in range(chains)]
    with builder.loop(0, arguments.load(INT64)):
        for _ in range(UNROLL):
            for each in sums:
                each.set(tiles.multiply_add(x, x, each.get()))
    total = functools.reduce(operator.add, (each.get() for each in sums))
    arguments.at(16).load(POINTER).store(total)
    builder.finish()
    return ProductLoop(builder.module, chains * UNROLL * tiles.lanes * tiles.pair_size * 2)
