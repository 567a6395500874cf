"""The decoding kernel's call: the keys cut into parts, and the same call for other keys, of which there may be more."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import layout, to_numpy
from ...problem import Problem
from ..codegen.abi import DECODE, pack
from ..kernels.block import KEYS
from ..kernels.decode import ROWS, TOGETHER, Decode
from ..runtime.processor import Processor
from ..runtime.thread_team import count
from .arguments import Inputs, kernel_of, structure_of
from .bound_call import KEY, LSE, OUTPUT, QUERY, VALUE, Prepared

__all__ = ["decode", "decodes"]

ITEMS = 16  # pieces of work wanted, whatever the number of threads
LEAST = 8 * KEYS  # keys worth a part of their own
M, TOTAL, CHUNKS, CHUNK = map(list(DECODE).index, ("m", "items", "chunks", "chunk"))


def decodes(problem: Problem, processor: Processor) -> bool:
    """Whether few queries look at many keys, in rows of whole vectors and the same ones for all heads."""
    lanes = processor.machine.width // (8 if problem.dtype == "float64" else 4)
    paired = problem.dtype == "bfloat16" and processor.machine.bf16_dot
    units = all(layout(x)[1][-1] == x.itemsize for x in (problem.key, problem.value))
    whole = problem.d_k % (lanes * (1 + paired)) == 0 and problem.d_v % (lanes * (1 + paired)) == 0
    shared = problem.mask is None or "h" not in problem.mask.reads
    return problem.n <= ROWS and problem.m >= LEAST and not problem.dropout and whole and units and shared


def decode(problem: Problem, output: Any, lse: Any, threads: int | None, processor: Processor) -> Decoding | None:
    """Fill output and lse, and give the call; None where an output is NaN or ∞, which the forward kernel sorts out."""
    inputs = Inputs(problem, ROWS)
    call = Decoding(problem, inputs, processor)
    arrays = (*inputs.arrays.values(), output)
    query, key, value, place = (layout(array)[0] for array in arrays)
    return call if call.run(threads, query, key, value, place, (*arrays, *inputs.kept, lse), lse.ctypes.data) else None


class Decoding(Prepared):
    """The decoding kernel's call for arrays of one layout; of any number of keys where no formula asks for it.

    A cache that grows by a key at every token has one layout until its storage is full.
    """

    fields = DECODE

    def __init__(self, problem: Problem, inputs: Inputs, processor: Processor) -> None:
        self.processor = processor
        self.any_length = problem.mask is None and problem.score is None
        rows, outputs = problem.group * problem.n, problem.B * problem.H * problem.n
        self.apart = problem.B * problem.G * -(-rows // ROWS)
        parts = self.pieces if self.any_length else self.cut(problem.m)[1]
        size = np.dtype(problem.accumulator).itemsize
        room = {"counter": 1, "taint": 1, "done": self.apart, "part_lse": parts * outputs, "lse": outputs}
        room |= {"part_output": -(-parts * outputs * problem.d_v * size // 8)}
        if self.any_length:
            room["run_last"] = 1  # without a mask there is one run, of all blocks
        sinks = np.zeros(1) if problem.sinks is None else to_numpy(problem.sinks).astype(np.float64)
        structure = structure_of("decode", problem, inputs, together=min(rows, TOGETHER))
        fixed = {"query_blocks": 1, "batches": problem.B, "sinks": inputs.address(sinks)}
        fields = dict.fromkeys(DECODE, 0) | inputs.fields(structure) | fixed
        kernel = kernel_of(structure, inputs, Decode, processor)
        words = pack(DECODE, fields, inputs.table_words())
        super().__init__(kernel, words, self.apart * parts, room, inputs.steady())

    @property
    def pieces(self) -> int:
        """Parts of the keys wanted, where there are enough keys."""
        return -(-ITEMS // self.apart)

    def cut(self, m: int) -> tuple[int, int]:
        """(blocks of keys in a part, parts) of that many keys."""
        blocks = -(-m // KEYS)
        chunk = -(-blocks // min(self.pieces, -(-m // LEAST)))
        return chunk, -(-blocks // chunk)

    def run(
        self,
        threads: int | None,
        query: int,
        key: int,
        value: int,
        output: int,
        arrays: tuple[Any, ...],
        lse: int | None = None,
    ) -> bool:
        """As `Prepared.run`, for keys of any number: it answers where they are many and no output is NaN or ∞."""
        m = arrays[1].shape[-2]
        if m < LEAST:
            return False
        chunk, parts = self.cut(m)
        used = self.words()
        whole, words, address = used
        words[QUERY], words[KEY], words[VALUE], words[OUTPUT] = query, key, value, output
        words[M], words[TOTAL], words[CHUNKS], words[CHUNK] = m, self.apart * parts, parts, chunk
        words[LSE] = address + self.own_lse if lse is None else lse
        whole[self.counter : self.places["part_lse"]] = 0  # counter, taint and done
        if self.any_length:
            words[self.places["run_last"]] = -(-m // KEYS)
        mine = whole[: self.template.size], min(count(threads), self.apart * parts)
        self.processor.call(self.kernel, *mine, (arrays, self.kept, whole))
        answered = not words[self.places["taint"]]
        self.give_back(used)
        return answered
