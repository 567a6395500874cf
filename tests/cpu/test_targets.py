"""Object code for Windows, macOS and Linux, on x86-64 and on 64-bit ARM.

All of it is compiled here and linked by LLVM's loader, and its format and undefined symbols are checked. The code for
x86-64 as llvmlite asks for it also runs here (`ForeignProcessor`). Nothing runs on Windows or macOS.
"""

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import llvmlite.binding as llvm
import numpy as np
import pytest

from object_files import ARM64, X86_64, read_object
from sample_problems import PROBLEMS, arrays
from sightline import causal, documents, i, j, lse, padding, s, softcap, table, window
from sightline.call.kernel import GivenGradients
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.cpu.calls import xla_handler
from sightline.cpu.calls.direct_call import DirectCall
from sightline.cpu.calls.launcher import PYTHON_API, Launcher
from sightline.cpu.codegen.builder import Module
from sightline.cpu.runtime.compile import _compile_object, _load_objects
from sightline.cpu.runtime.machine import CPU_VARIABLE, Machine, missing_features, named_machine, native_machine
from sightline.cpu.runtime.processor import Processor
from sightline.reference.testing import assert_conforms
from sightline.statistics import TopK, received
from weights_pass_checks import check_everything, compute

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

SYSTEMS = {  # triple: format, architecture
    "x86_64-unknown-linux-gnu": ("ELF", X86_64),
    "aarch64-unknown-linux-gnu": ("ELF", ARM64),
    "x86_64-pc-windows-msvc": ("COFF", X86_64),
    "aarch64-pc-windows-msvc": ("COFF", ARM64),
    "x86_64-pc-windows-msvc-elf": ("ELF", X86_64),  # what llvmlite asks for on Windows
    "aarch64-pc-windows-msvc-elf": ("ELF", ARM64),
    "x86_64-apple-darwin": ("Mach-O", X86_64),
    "arm64-apple-darwin": ("Mach-O", ARM64),
}
if llvm.llvm_version_info < (
    22,
):  # LLVM 20 fails on large stack frames of Windows on ARM, for which llvmlite has no LLVM 20
    SYSTEMS = {triple: row for triple, row in SYSTEMS.items() if not triple.startswith("aarch64-pc-windows")}
MACHINES = {X86_64: ("avx512", "avx2", "sse2"), ARM64: ("neon",)}
TARGETS = [(triple, name) for triple, (_, architecture) in SYSTEMS.items() for name in MACHINES[architecture]]
# Functions of the standard C library that LLVM or the library calls. Each of the three systems has them.
KINDS = ("backward", "decode", "forward", "statistics")
STANDARD = {"getenv", "memcmp", "strcmp", *LIBRARY}
SYSTEM = {
    "linux": {"sincos", "sincosf"},  # of the GNU C library
    "windows": {"__chkstk"},  # of ntdll.dll: touches the pages of a stack frame of more than 4096 bytes
    "darwin": {"bzero", "__bzero", "__sincos_stret", "__sincosf_stret"},  # of libSystem
}
LINKED = {"_fltused"}  # in COFF objects alone: a mark for the linker, which the C library defines
XLA_CALLBACK = {xla_handler.CALLBACK}  # `llvm.add_symbol` gives its address


class Collector(Processor):
    """Keeps the modules of all kernels, and runs none."""

    links_parts = False

    def __init__(self, machine):
        super().__init__(machine)
        self.modules = {}

    def kernel(self, key, name, build_module, common=None, machine=None):
        self.modules[name, key] = str(build_module())
        return name

    def call(self, kernel, packed_arguments, threads, keep_alive):
        """Compute nothing."""


def machine_of(triple, name):
    machine = named_machine(name)
    return Machine(triple, machine.cpu, machine.features)


def kernels(machine):
    """Return the modules of kernels of each kind for this machine. Their results are uninitialised memory."""
    collector = Collector(machine)
    kernel = Cpu(collector)
    score = s + np.sin(s) - np.abs(s) ** 1.5 + table(np.linspace(-1, 1, 9))[(i - j) % 9] + np.cos(i)
    for dtype, options in (
        ("float32", {"mask": causal(), "score": score, "see": [lse()]}),
        ("float16", {"mask": window(40, 3), "score": softcap(5.0)}),
        ("bfloat16", {"mask": documents(lengths=[30, 40])}),
        ("float64", {"score": score}),
    ):
        problem = make_problem(*arrays((1, 2, 70, 64), dtype), **options)
        kernel.run(problem)
        if dtype == "float32":
            saved = np.zeros_like(problem.query), np.zeros(problem.query.shape[:-1])
            kernel.backward(problem, GivenGradients(saved[0], None, saved, []))
    kernel.run(make_problem(*arrays((2, 4, 1, 64), "float32", groups=1, m=513), mask=padding([513, 130])))
    kernel.run(make_problem(*arrays((1, 1, 20, 1024), "float32")))
    weighed = make_problem(*arrays((1, 2, 70, 16), "float32"))
    for statistic in (received(), TopK(3)):
        compute(weighed, np.zeros((1, 2, 70)), statistic, processor=collector)
    return [(name, text) for (name, _), text in collector.modules.items()]


def check_loading(name, module, machine):
    """Return the `ObjectFile` of a module, after LLVM's loader has linked it with empty functions. Nothing runs.

    The loader ends the process if it cannot apply a relocation, or if a section has no reserved memory.
    """
    code = _compile_object(module, machine)
    found = read_object(code)
    empty = "\n".join(f"define void @{each}() {{\n  ret void\n}}" for each in found.undefined)
    assert _load_objects([code, _compile_object(empty, machine)], name, machine)
    return found


def functions_of_python():
    for writer in (DirectCall, Launcher):
        module = Module()
        writer(module, "function").build()
        yield str(module)


@pytest.fixture(autouse=True, scope="module")
def all_targets():
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def allowed_symbols(triple):
    (own,) = (names for system, names in SYSTEM.items() if system in triple)
    return STANDARD | own | (LINKED if SYSTEMS[triple][0] == "COFF" else set())


@pytest.mark.sampled(one_in=11)
@pytest.mark.parametrize(("triple", "name"), TARGETS)
def test_kernels_are_compiled_for_every_system(triple, name):
    machine = machine_of(triple, name)
    with np.errstate(all="ignore"):
        modules = kernels(machine)
    found = [check_loading(name, text, machine) for name, text in modules]
    assert {name for name, _ in modules} == {f"sightline_{kind}" for kind in KINDS}
    assert {(each.format, each.architecture) for each in found} == {SYSTEMS[triple]}
    undefined = frozenset().union(*(each.undefined for each in found))
    assert undefined <= allowed_symbols(triple)
    assert undefined & {"sin", "__sincos_stret", "sincos"}, "the score has no function of the library"


@pytest.mark.parametrize("triple", SYSTEMS)
def test_functions_of_python_and_xla_are_compiled_for_every_system(triple):
    machine = machine_of(triple, MACHINES[SYSTEMS[triple][1]][-1])
    allowed = allowed_symbols(triple) | PYTHON_API
    for module in functions_of_python():
        found = check_loading("function", module, machine)
        assert found[:2] == SYSTEMS[triple]
        assert found.undefined <= allowed
    handler = xla_handler.build_module("handler", (0, 1), machine.architecture, CPU_VARIABLE)
    assert check_loading("handler", handler, machine).undefined <= allowed | XLA_CALLBACK


@pytest.mark.parametrize("triple", SYSTEMS)
def test_a_symbol_that_no_system_has_is_found(triple):
    machine = machine_of(triple, MACHINES[SYSTEMS[triple][1]][0])
    module = "declare void @nowhere()\ndefine void @f() {\n  call void @nowhere()\n  ret void\n}"
    assert read_object(_compile_object(module, machine)).undefined == {"nowhere"}


def test_llvmlite_asks_for_elf_on_windows(monkeypatch):
    machine = machine_of("x86_64-pc-windows-msvc", "avx2")
    monkeypatch.setattr(llvm.targets, "os", SimpleNamespace(name="nt"))
    code = _compile_object("define double @f(double %x) {\n  ret double %x\n}", machine)
    assert read_object(code) == ("ELF", X86_64, frozenset())


LARGE_FRAME = """
declare void @fill(ptr)
define void @f() {
  %slot = alloca [5000 x i8]
  call void @fill(ptr %slot)
  ret void
}
"""


@pytest.mark.parametrize("triple", SYSTEMS)
def test_windows_checks_the_stack_of_large_frames(triple):
    machine = machine_of(triple, MACHINES[SYSTEMS[triple][1]][0])
    expected = {"fill", "__chkstk"} if "windows" in triple else {"fill"}
    assert read_object(_compile_object(LARGE_FRAME, machine)).undefined == expected


# -- code of Windows and macOS on this processor ------------------------------------------------------------------


class ForeignProcessor(Processor):
    """The processor at hand, with the code of another system: of macOS, or of Windows as llvmlite asks.

    On Windows, llvmlite asks LLVM for ELF objects, because its loader takes no others there. LLVM loads ELF and Mach-O
    objects on Linux too. What differs is how functions are called, and the names of the C library's functions. So a
    second object is linked to the kernel: an entry that this system calls, and the functions of the C library as the
    other system calls them. The system itself, its loader and its memory are not imitated.
    """

    links_parts = False

    def __init__(self, triple, machine):
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


@pytest.fixture(params=[WINDOWS, MACOS], ids=["windows", "macos"])
def foreign(request):
    """A processor that runs the code of another system."""
    if native_machine().architecture != X86_64 or "linux" not in native_machine().triple:
        pytest.skip("needs Linux on x86-64")
    best = next(name for name in MACHINES[X86_64] if not missing_features(native_machine(), named_machine(name)))
    found = ForeignProcessor(request.param, named_machine(best))
    yield found
    assert found.calls, "no kernel ran"


NAMES = ("odd sizes", "decoding", "window, soft cap, sinks", "tables, library functions")
FOREIGN = {name: PROBLEMS[name] for name in NAMES} | {"wide heads": ({"shape": (1, 1, 20, 1024)}, {"mask": causal()})}


@pytest.mark.sampled(one_in=11)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", FOREIGN)
def test_kernels_of_another_system_conform(foreign, name, dtype):
    shapes, options = FOREIGN[name]
    assert_conforms(Cpu(foreign).run, make_problem(*arrays(dtype=dtype, **shapes), see=[lse()], **options))


def test_the_weights_pass_of_another_system(foreign):
    problem = make_problem(*arrays((2, 4, 70, 64), "float32", groups=2, m=75), mask=causal("lower right"))
    check_everything(problem, processor=foreign)


def test_a_changed_register_is_found():
    """A function of Linux keeps fewer registers than one of Windows."""
    if native_machine().architecture != X86_64 or "linux" not in native_machine().triple:
        pytest.skip("needs Linux on x86-64")
    foreign = ForeignProcessor(WINDOWS, named_machine("sse2"))
    module = 'define void @f(ptr %x) {\n  call void asm sideeffect "xorl %esi, %esi", ""()\n  ret void\n}'
    with pytest.raises(AssertionError, match="1 registers changed"):
        foreign.call(foreign.kernel("", "f", lambda: module), np.zeros(1), 1, ())
