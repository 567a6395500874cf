"""A generated function that XLA calls for each execution of a custom call.

    XLA_FFI_Error *handler(XLA_FFI_CallFrame *frame)

The function takes the addresses of all arguments and results from the frame, and the text of the call from the string
attribute `ATTRIBUTE`. The code of `xla_direct_call` runs the call if the same call was run before. Else the handler
passes the addresses and the text to a function of Python, the C symbol `CALLBACK`. If the Python function returns a
message, XLA raises an error with this message.

XLA lets its threads flush denormal numbers to 0. While the call runs, the function sets the floating-point modes that C
programs start with. So a kernel computes the same bits as in a call without XLA.

Source of the structs: xla/ffi/api/c_api.h, which jaxlib ships.
"""

from __future__ import annotations

from typing import Any

from ..codegen.builder import Builder, Module, Variable
from ..codegen.values import INT32, INT64, POINTER, VOID, Value
from .xla_direct_call import XlaDirectCall, build_install

ATTRIBUTE = "call"
CALLBACK = "sightline_xla_callback"
CLOSE = "sightline_xla_close"  # a second function: it lets no more calls enter Python, and returns `NUM_CALLS`
INSTALL = "sightline_xla_install"  # a third function, `xla_direct_call.build_install`
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


class XlaHandler(Builder):
    """Builds the function `handler` that the module's docstring describes.

    Parameters
    ----------
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
            is_done = XlaDirectCall(self, self.text("variable", self.variable)).run(start, length, buffers)
            with self.if_then(~is_done):
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
