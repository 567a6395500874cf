"""Kernels compiled for another system with x86-64 processors, and run on this one: macOS, and Windows as llvmlite asks.

On Windows, llvmlite asks LLVM for ELF objects, because its loader takes no others there. LLVM loads ELF and Mach-O
objects on Linux too. What differs is how functions are called, and the names of the C library's functions. So a second
object is linked to the kernel: an entry that this system calls, and the functions of the C library as the other system
calls them. The system itself, its loader and its memory are not imitated.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import llvmlite.binding as llvm

from object_files import read_object
from sightline.cpu.runtime.compile import _compile_object, _load_objects
from sightline.cpu.runtime.machine import Machine
from sightline.cpu.runtime.processor import Processor

WINDOWS, MACOS = "x86_64-pc-windows-msvc-elf", "x86_64-apple-darwin"
ENTRY = "sightline_entry"
SHADOW_BYTES = 32  # above the return address: a called function may use them
KEPT = ("rbx", "rbp", "rdi", "rsi", "r12", "r13", "r14", "r15", *[f"xmm{k}" for k in range(6, 16)])  # on Windows x64
CALLED_SAVED = ("rbx", "rbp", "r12", "r13", "r14", "r15")  # on Linux and macOS
MEMORY = {"memset": "ptr (ptr, i32, i64)", "memcpy": "ptr (ptr, ptr, i64)", "memmove": "ptr (ptr, ptr, i64)"}
MEMORY |= {"malloc": "ptr (i64)", "free": "i64 (ptr)"}  # nothing reads the result of `free`
MATH = {  # the number of arguments of each function; for float32 LLVM calls the function with the suffix f, as `sinf`
    "cos": 1,
    "floor": 1,
    "log": 1,
    "log2": 1,
    "pow": 2,
    "sin": 1,
}
LIBRARY = MEMORY | {
    name + suffix: f"{kind} ({', '.join([kind] * count)})"
    for name, count in MATH.items()
    for suffix, kind in (("", "double"), ("f", "float"))
}


class ForeignProcessor(Processor):
    """The processor at hand, with the code of another system.

    Parameters
    ----------
    triple : `WINDOWS` or `MACOS`
    machine : a machine of this system, for the instructions
    """

    links_parts = False

    def __init__(self, triple: str, machine: Machine) -> None:
        super().__init__(replace(machine, triple=triple))
        llvm.initialize_native_asmparser()
        self.is_windows = triple == WINDOWS
        self.calls = 0

    def kernel(self, key, name, build_module, common=None, machine=None):
        """Return the address of the kernel's entry in a tuple, so that only `call` can call it."""
        machine = machine or self.machine
        code = _compile_object(build_module(), machine)
        helpers = "\n".join([self.entry(name), *(self.function(each) for each in sorted(read_object(code).undefined))])
        return (_load_objects([code, _compile_object(helpers, machine)], ENTRY, machine),)

    def call(self, kernel, packed_arguments, threads, keep_alive):
        """Call the kernel on one thread, and raise AssertionError if it changed a register that it must keep."""
        changed = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(*kernel)(packed_arguments.ctypes.data)
        self.calls += 1
        assert changed == 0, f"{changed} registers changed"

    def entry(self, name):
        """Return a module with the function that this system calls. It returns how many registers have changed."""
        if not self.is_windows:
            return (
                f"declare void @{name}(ptr)\n"
                f"define i64 @{ENTRY}(ptr %x) {{\n  call void @{name}(ptr %x)\n  ret i64 0\n}}"
            )
        numbers = {register: 1000 + k for k, register in enumerate(KEPT)}
        fill = [f"movq ${number}, %rax\nmovq %rax, %{register}" for register, number in numbers.items()]
        compare = [
            f"movq %{register}, %rdx\ncmpq ${number}, %rdx\nje {ENTRY}_{number}\nincq %rax\n{ENTRY}_{number}:"
            for register, number in numbers.items()
        ]
        lines = [
            f".text\n.globl {ENTRY}\n{ENTRY}:",
            *(f"pushq %{register}" for register in CALLED_SAVED),
            f"subq ${SHADOW_BYTES + 8}, %rsp\nmovq %rdi, %rcx",
            *fill,
            f"callq {name}\nxorl %eax, %eax",
            *compare,
            f"addq ${SHADOW_BYTES + 8}, %rsp",
            *(f"popq %{register}" for register in reversed(CALLED_SAVED)),
            "retq",
        ]
        return module_assembly(lines)

    def function(self, name):
        """Return a module's text with a function of the C library, as the other system calls it."""
        if name == "__chkstk":  # takes the bytes of the stack frame in rax, and changes no other register
            return module_assembly([".globl __chkstk\n__chkstk:\nretq"])
        result, _, operands = LIBRARY[name].rstrip(")").partition(" (")
        kinds = operands.split(", ")
        given = ", ".join(f"{kind} %x{k}" for k, kind in enumerate(kinds))
        convention, inner = ("x86_64_sysvcc ", f"{name}_body") if self.is_windows else ("", name)
        address = f"inttoptr (i64 {ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value} to ptr)"
        body = (
            f"define {result} @{inner}({given}) {{\n"
            f"  %found = call {convention}{result} {address}({given})\n  ret {result} %found\n}}"
        )
        if not self.is_windows:
            return body
        overwrite = [f"movq $-1, {8 + offset}(%rsp)" for offset in range(0, SHADOW_BYTES, 8)]
        return module_assembly([f".globl {name}\n{name}:", *overwrite, f"jmp {inner}"]) + "\n" + body


def module_assembly(lines):
    """Return lines of assembly as lines of LLVM."""
    return "\n".join(f'module asm "{line}"' for line in "\n".join(lines).splitlines())
