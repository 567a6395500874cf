"""Generated code by which XLA runs repeated forward passes without Python.

An entry describes a forward pass that was run before: the text of its call, and a launch record, which has the kernel's
address and argument block. The code finds the entry by a hash of the text that XLA passes, and compares the whole text.
It writes the addresses of XLA's arrays into the argument block, and runs the kernel. The caller runs the call in Python
if there is no such entry, if another thread uses the record, if the record lacks the tile ranges, or if the kernel sets
`nonfinite_flag`.
"""

from __future__ import annotations

from typing import Any

from ..codegen.builder import Builder, Variable
from ..codegen.values import BOOL, DOUBLE, FLOAT, INT32, INT64, POINTER, Value
from .launch_record import FIRST_RESULT
from .launcher import RecordCode

ENTRY_FIELDS: dict[str, Any] = {
    "text": POINTER,
    "length": INT64,  # of the text, in bytes
    "setting": POINTER,  # the value of the environment variable when the entry was made; null if it was not set
    "record": POINTER,
    "num_arguments": INT64,
    "values": POINTER,  # the values of the call; see `launch_record`
    "num_rows": INT64,  # queries of all heads and batches
    "is_lse_wide": INT64,  # 1 if the result lse is float64, 0 if it is float32
}
SLOTS = "sightline_xla_slots"  # a variable of the module: the address of an entry for each hash
NUM_SLOTS = 1024
PRIME = 0x100000001B3  # of the hash FNV-1a, which is applied to words of 8 bytes
OUTPUT, LSE, PRECISE_LSE = range(3)  # the results of the custom call


class XlaDirectCall:
    """Builds the part of XLA's handler that finds the entry of a call and runs it; see the module's docstring.

    Parameters
    ----------
    builder : the function that the code is part of
    variable : the name of the environment variable on which the choice of a kernel depends
    """

    def __init__(self, builder: Builder, variable: Value) -> None:
        self.builder, self.variable = builder, variable

    def run(self, text: Value, length: Value, buffers: Value) -> Value:
        """Run the call, and return true if its results are valid.

        `text` is the address of the call's text, and `length` its bytes. `buffers` has the addresses of all arrays.
        """
        builder, is_done = self.builder, Variable(self.builder, BOOL, False)
        slot = slot_of(builder, text, length)
        self.entry = builder.atomic_load(slot, POINTER)
        self.buffers = buffers
        with builder.if_then(self.entry != builder.null()), builder.if_then(self.is_entry_of(text, length)):
            record = RecordCode(builder, self.field("record"))
            with builder.if_then(record.exchange_busy(1) == 0):
                self.write_words(record)
                record.clear_workspace()
                with builder.if_then(record.find_tile_ranges(self.field("values")) == 0):
                    record.run_kernel()
                    is_done.set(record.status() < 2)
                with builder.if_then(is_done.get()):
                    self.write_lse()
                record.exchange_busy(0)
        return is_done.get()

    def field(self, name: str) -> Value:
        return self.entry.at(8 * list(ENTRY_FIELDS).index(name)).load(ENTRY_FIELDS[name], 8)

    def is_entry_of(self, text: Value, length: Value) -> Value:
        """True if the entry has this text, and the environment variable is the same as when the entry was made."""
        builder, is_equal = self.builder, Variable(self.builder, BOOL, False)
        with builder.if_then(self.field("length") == length):
            difference = builder.call("memcmp", INT32, self.field("text"), text, length)
            own, current = self.field("setting"), builder.call("getenv", POINTER, self.variable)
            is_unset = (own == builder.null()) | (current == builder.null())
            is_equal.set((difference == 0) & (own == current))
            with builder.if_then((difference == 0) & ~is_unset):
                is_equal.set(builder.call("strcmp", INT32, own, current) == 0)
        return is_equal.get()

    def write_words(self, record: RecordCode) -> None:
        """Write the addresses of XLA's arrays into the argument block. The kernel writes output and float64 lse."""
        builder, values = self.builder, self.field("values")  # no other thread writes them while the record is in use
        with builder.loop(0, self.field("num_arguments")) as index:
            values.at(index * 8).store(self.buffers.at(index * 8).load(INT64))
        for place, result in enumerate((OUTPUT, PRECISE_LSE)):
            values.at(8 * (FIRST_RESULT + place)).store(self.result(result))
        record.write_words(values)

    def result(self, index: int) -> Value:
        """Return the address of the result `OUTPUT`, `LSE` or `PRECISE_LSE`."""
        return self.buffers.at((self.field("num_arguments") + index) * 8).load(POINTER)

    def write_lse(self) -> None:
        """Convert the float64 lse of the kernel to the dtype of the result `LSE`."""
        builder, precise, lse = self.builder, self.result(PRECISE_LSE), self.result(LSE)
        is_wide = self.field("is_lse_wide") == 1
        with builder.loop(0, self.field("num_rows")) as row:
            number = precise.at(row * 8).load(DOUBLE)
            with builder.if_else(is_wide) as (yes, no):
                with yes:
                    lse.at(row * 8).store(number)
                with no:
                    lse.at(row * 4).store(number.to(FLOAT))


def slot_of(builder: Builder, text: Value, length: Value) -> Value:
    """Return the address of a text's slot in the hash table. The slot has the address of an entry, or null."""
    hashed = Variable(builder, INT64, builder.value(0, INT64) + length)
    with builder.loop(0, length // 8) as index:
        hashed.set((hashed.get() ^ text.at(index * 8).load(INT64)) * PRIME)
    found = hashed.get()
    index = (found ^ (found >> 32)) & (NUM_SLOTS - 1)
    slots = builder.global_variable(SLOTS, f"internal global [{NUM_SLOTS} x i64] zeroinitializer, align 64")
    return slots.at(index * 8)


def build_install(module: Any, name: str) -> None:
    """Build the function that stores an entry: void f(address of the entry).

    An older entry with the same hash is replaced. Entries must live as long as the process.
    """
    builder = Builder(module, name)
    entry = builder.arguments[0]
    text, length = (entry.at(8 * list(ENTRY_FIELDS).index(field)) for field in ("text", "length"))
    slot = slot_of(builder, text.load(POINTER), length.load(INT64))
    builder.atomic_exchange(slot, entry.address())
    builder.finish()
