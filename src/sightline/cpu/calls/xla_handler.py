"""A generated function that XLA calls for each execution of a custom call.

    XLA_FFI_Error *handler(XLA_FFI_CallFrame *frame)

The function takes the addresses of all arguments and results from the frame, and the text of the call from the string
attribute `ATTRIBUTE`. If the same call was run before, the handler runs it without Python (`run_direct`). Else the
handler passes the addresses and the text to a function of Python, the C symbol `CALLBACK`. If the Python function
returns a message, XLA raises an error with this message.

An entry describes a forward pass that was run before: the text of its call, and a launch record, which has the kernel's
address and argument block. The code finds the entry by a hash of the text that XLA passes, and compares the whole text.
It writes the addresses of XLA's arrays into the argument block, and runs the kernel. Python runs the call if there is
no such entry, if another thread uses the record, if the record lacks the tile ranges, or if the kernel sets
`nonfinite_flag`.

XLA lets its threads flush denormal numbers to 0. While the call runs, the function sets the floating-point modes that C
programs start with. So a kernel computes the same bits as in a call without XLA.

Source of the structs: xla/ffi/api/c_api.h, which jaxlib ships.
"""

from __future__ import annotations

from typing import Any

from ..codegen.builder import Builder, Module, Variable
from ..codegen.values import BOOL, DOUBLE, FLOAT, INT32, INT64, POINTER, VOID, Value
from .launch_record import FIRST_RESULT
from .launcher import RecordCode

ATTRIBUTE = "call"
CALLBACK = "sightline_xla_callback"
CLOSE = "sightline_xla_close"  # a second function: it lets no more calls enter Python, and returns `NUM_CALLS`
INSTALL = "sightline_xla_install"  # a third function, `build_install`
MAX_BUFFERS = 64  # the most arguments and results of a custom call

IS_CLOSED = "is_closed"  # a variable of the module, not 0 if no more calls enter Python
NUM_CALLS = "num_calls"  # a variable of the module: how many calls are in this function

# offsets in bytes
EXTENSION, API, ARGUMENTS, RESULTS, ATTRIBUTES = 8, 16, 40, 80, 120  # in XLA_FFI_CallFrame
SIZE, ITEMS = 16, 32  # in XLA_FFI_Args and XLA_FFI_Rets
NAMES, VALUES = 32, 40  # in XLA_FFI_Attrs
DATA = 24  # in XLA_FFI_Buffer
EXTENSION_TYPE, METADATA, MAJOR, MINOR = 8, 24, 24, 28  # in XLA_FFI_Metadata_Extension and XLA_FFI_Metadata
CREATE_ERROR = 48  # in XLA_FFI_Api
ENDING = "attention was not computed, because Python is ending; call block_until_ready on its results before that"
METADATA_TYPE = 1  # XLA_FFI_Extension_Metadata
ERROR_BYTES, MESSAGE, CODE = 32, 16, 24  # of XLA_FFI_Error_Create_Args, and in it
INTERNAL_ERROR = 13  # XLA_FFI_Error_Code_INTERNAL

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
SLOTS_VARIABLE = "sightline_xla_slots"  # a variable of the module: the address of an entry for each hash
NUM_SLOTS = 1024
PRIME = 0x100000001B3  # of the hash FNV-1a, which is applied to words of 8 bytes
OUTPUT_INDEX, LSE_INDEX, PRECISE_LSE_INDEX = range(3)  # the results of the custom call


class XlaHandler(Builder):
    """Builds the function `handler` that the module's docstring describes.

    version : the major and minor version of XLA's FFI
    architecture : "x86_64", "aarch64" or another; only for these two are the floating-point modes set
    variable : the name of the environment variable on which the choice of a kernel depends
    """

    def __init__(self, module: Any, name: str, version: tuple[int, int], architecture: str, variable: str) -> None:
        super().__init__(module, name, (POINTER,), POINTER)
        self.frame, self.version, self.architecture = self.arguments[0], version, architecture
        self.variable = variable

    def build(self) -> None:
        self.answer_metadata()
        buffers = self.alloca_array(INT64, MAX_BUFFERS)
        num_arguments, num_results = (self.word(at + SIZE) for at in (ARGUMENTS, RESULTS))
        self.copy_addresses(ARGUMENTS, num_arguments, buffers)
        self.copy_addresses(RESULTS, num_results, buffers.at(num_arguments * 8))
        text = self.frame.at(ATTRIBUTES + VALUES).load(POINTER).load(POINTER)  # the only attribute
        start, length = text.load(POINTER), text.at(8).load(INT64)
        answer = Variable(self, POINTER, self.text("ending", ENDING))
        add_to(self, NUM_CALLS, 1)
        with self.if_then(add_to(self, IS_CLOSED, 0) == 0):
            modes = self.exchange_modes(None)
            answer.set(self.null())
            with self.if_then(~self.run_direct(start, length, buffers)):
                answer.set(self.call(CALLBACK, POINTER, start, length, buffers, num_arguments, num_results))
            self.exchange_modes(modes)
        add_to(self, NUM_CALLS, -1)
        message = answer.get()
        with self.if_then(message == self.null()):
            self.return_(self.null())
        self.finish(self.make_error(message))

    def text(self, name: str, text: str) -> Value:
        """Return the address of a constant text that ends with a zero byte. `name` is its name in the module."""
        encoded = text.encode() + b"\0"
        letters = "".join(f"\\{byte:02x}" for byte in encoded)
        return self.global_variable(name, f'internal constant [{len(encoded)} x i8] c"{letters}"')

    def word(self, offset: int) -> Value:
        return self.frame.at(offset).load(INT64)

    def answer_metadata(self) -> None:
        """If XLA asks for the version of its interface, write the version of the installed jaxlib and return."""
        extension = self.frame.at(EXTENSION).load(POINTER)
        kind = Variable(self, INT32, 0)
        with self.if_then(extension != self.null()):
            kind.set(extension.at(EXTENSION_TYPE).load(INT32))
        with self.if_then(kind.get() == METADATA_TYPE):
            metadata = extension.at(METADATA).load(POINTER)
            for offset, number in zip((MAJOR, MINOR), self.version, strict=True):
                metadata.at(offset).store(self.value(number, INT32))
            self.return_(self.null())

    def copy_addresses(self, group: int, count: Value, target: Value) -> None:
        """Write the memory addresses of all arguments (`group` ARGUMENTS) or all results (RESULTS) to `target`."""
        items = self.frame.at(group + ITEMS).load(POINTER)
        with self.loop(0, count) as index:
            buffer = items.at(index * 8).load(POINTER)
            target.at(index * 8).store(buffer.at(DATA).load(INT64))

    def exchange_modes(self, modes: Value | None) -> Value | None:
        """Set the floating-point modes of the thread, and return the earlier modes; None on other architectures.

        `modes` None stands for rounding to the nearest number, without flushing of denormal numbers to 0.
        """
        if self.architecture == "x86_64":
            slot = self.alloca_array(INT32, 1)
            self.call("llvm.x86.sse.stmxcsr", VOID, slot)
            before = slot.load(INT32)
            slot.store(self.value(0x1F80, INT32) if modes is None else modes)
            self.call("llvm.x86.sse.ldmxcsr", VOID, slot)
            return before
        if self.architecture == "aarch64":
            before = self.call("llvm.aarch64.get.fpcr", INT64)
            self.call("llvm.aarch64.set.fpcr", VOID, self.value(0, INT64) if modes is None else modes)
            return before
        return None

    def make_error(self, message: Value) -> Value:
        block = self.alloca_array(INT64, ERROR_BYTES // 8)
        for offset in range(0, ERROR_BYTES, 8):
            block.at(offset).store(self.value(ERROR_BYTES if offset == 0 else 0, INT64))
        block.at(MESSAGE).store(message)
        block.at(CODE).store(self.value(INTERNAL_ERROR, INT32))
        create = self.frame.at(API).load(POINTER).at(CREATE_ERROR).load(POINTER)
        return self.call(create, POINTER, block)

    # -- calls without Python --------------------------------------------------------------------------------------
    def run_direct(self, text: Value, length: Value, buffers: Value) -> Value:
        """Find the entry of a call and run it; see the module's docstring. Return true if the results are valid.

        `text` is the address of the call's text, and `length` its bytes. `buffers` has the addresses of all arrays.
        """
        is_done = Variable(self, BOOL, False)
        self.entry, self.buffers = self.atomic_load(find_slot(self, text, length), POINTER), buffers
        with self.if_then(self.entry != self.null()), self.if_then(self.is_entry_of(text, length)):
            record = RecordCode(self, self.field("record"))
            with self.if_then(record.exchange_busy(1) == 0):
                self.write_words(record)
                record.clear_workspace()
                with self.if_then(record.find_tile_ranges(self.field("values")) == 0):
                    record.run_kernel()
                    is_done.set(record.status() < 2)
                with self.if_then(is_done.get()):
                    self.write_lse()
                record.exchange_busy(0)
        return is_done.get()

    def field(self, name: str) -> Value:
        return self.entry.at(8 * list(ENTRY_FIELDS).index(name)).load(ENTRY_FIELDS[name], 8)

    def is_entry_of(self, text: Value, length: Value) -> Value:
        """True if the entry has this text, and the environment variable is the same as when the entry was made."""
        is_equal = Variable(self, BOOL, False)
        with self.if_then(self.field("length") == length):
            difference = self.call("memcmp", INT32, self.field("text"), text, length)
            own, current = self.field("setting"), self.call("getenv", POINTER, self.text("variable", self.variable))
            is_unset = (own == self.null()) | (current == self.null())
            is_equal.set((difference == 0) & (own == current))
            with self.if_then((difference == 0) & ~is_unset):
                is_equal.set(self.call("strcmp", INT32, own, current) == 0)
        return is_equal.get()

    def write_words(self, record: RecordCode) -> None:
        """Write the addresses of XLA's arrays into the argument block. The kernel writes output and float64 lse."""
        values = self.field("values")  # no other thread writes them while the record is in use
        with self.loop(0, self.field("num_arguments")) as index:
            values.at(index * 8).store(self.buffers.at(index * 8).load(INT64))
        for place, result in enumerate((OUTPUT_INDEX, PRECISE_LSE_INDEX)):
            values.at(8 * (FIRST_RESULT + place)).store(self.result_address(result))
        record.write_words(values)

    def result_address(self, index: int) -> Value:
        """Return the address of the result at this index."""
        return self.buffers.at((self.field("num_arguments") + index) * 8).load(POINTER)

    def write_lse(self) -> None:
        """Convert the float64 lse of the kernel to the dtype of the result at `LSE_INDEX`."""
        precise, lse = map(self.result_address, (PRECISE_LSE_INDEX, LSE_INDEX))
        is_wide = self.field("is_lse_wide") == 1
        with self.loop(0, self.field("num_rows")) as row:
            number = precise.at(row * 8).load(DOUBLE)
            with self.if_else(is_wide) as (yes, no):
                with yes:
                    lse.at(row * 8).store(number)
                with no:
                    lse.at(row * 4).store(number.to(FLOAT))


def find_slot(builder: Builder, text: Value, length: Value) -> Value:
    """Return the address of a text's slot in the hash table. The slot has the address of an entry, or null."""
    hashed = Variable(builder, INT64, builder.value(0, INT64) + length)
    with builder.loop(0, length // 8) as index:
        hashed.set((hashed.get() ^ text.at(index * 8).load(INT64)) * PRIME)
    found = hashed.get()
    index = (found ^ (found >> 32)) & (NUM_SLOTS - 1)
    slots = builder.global_variable(SLOTS_VARIABLE, f"internal global [{NUM_SLOTS} x i64] zeroinitializer, align 64")
    return slots.at(index * 8)


def build_install(module: Any, name: str) -> None:
    """Build the function that stores an entry: void f(address of the entry).

    An older entry with the same hash is replaced. Entries must live as long as the process.
    """
    builder = Builder(module, name)
    entry = builder.arguments[0]
    text, length = (entry.at(8 * list(ENTRY_FIELDS).index(field)) for field in ("text", "length"))
    slot = find_slot(builder, text.load(POINTER), length.load(INT64))
    builder.atomic_exchange(slot, entry.address())
    builder.finish()


def add_to(builder: Builder, name: str, number: int) -> Value:
    """Add a number to a variable of the module, and return the variable's earlier value, in one atomic operation."""
    return builder.atomic_add(builder.global_variable(name, "internal global i64 0"), number, "seq_cst")


def build_module(name: str, version: tuple[int, int], architecture: str, variable: str) -> Any:
    """Return the LLVM module with the handler, `CLOSE` and `INSTALL`; the parameters are those of `XlaHandler`."""
    module = Module()
    XlaHandler(module, name, version, architecture, variable).build()
    build_install(module, INSTALL)
    close = Builder(module, CLOSE, (), INT64)
    add_to(close, IS_CLOSED, 1)
    close.finish(add_to(close, NUM_CALLS, 0))
    return module
