"""The kernels on every named machine: AVX-512, AVX2, SSE2 and 64-bit ARM.

Machines whose features this processor has run on this processor. ARM is emulated otherwise (emulator.py).
"""

import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from llvmlite import binding as llvm

import emulator
import sightline
from elementary_functions import PROMISED, applied, check_promise
from emulator import Emulator
from sample_problems import PROBLEMS, arrays, serves
from sightline import i, j, lse, s
from sightline.call.problem import make_problem
from sightline.cpu import Cpu
from sightline.cpu.codegen.builder import Builder, Module
from sightline.cpu.codegen.values import DOUBLE, POINTER
from sightline.cpu.runtime import compile
from sightline.cpu.runtime.compile import optimised
from sightline.cpu.runtime.machine import (
    CPU_VARIABLE,
    Machine,
    host,
    machine_names,
    missing_features,
    named_machine,
    native_machine,
    restrict_machine,
)
from sightline.cpu.runtime.processor import Processor
from sightline.errors import ParameterError
from sightline.reference.testing import assert_conforms
from sightline.statistics import Mean, TopK, pooled, received, weights
from strategies import DTYPES, cases
from weights_pass_checks import check_everything, compute

SERVED = [dtype for dtype in DTYPES if serves(Cpu(), dtype)]
EXAMPLES = {True: 8, False: 16}  # problems for an emulated machine and for a real one, over all dtypes
REQUIRED = "SIGHTLINE_EMULATOR"  # if "required", tests fail without an emulator, and are not skipped


@pytest.fixture(scope="session")
def neon(tmp_path_factory):
    """An emulated ARM processor."""
    if lacks := emulator.missing():
        report = pytest.fail if os.environ.get(REQUIRED) == "required" else pytest.skip
        report(f"no emulator of ARM: {lacks} not found")
    found = Emulator(named_machine("neon"), tmp_path_factory.mktemp("neon"))
    yield found
    found.close()


@pytest.fixture(scope="session", params=machine_names())
def processor(request):
    """A processor for each named machine: this processor if possible, otherwise an emulator."""
    lacks = missing_features(native_machine(), named_machine(request.param))
    if not lacks:
        return Processor(restrict_machine(native_machine(), request.param))
    if request.param == "neon":
        return request.getfixturevalue("neon")
    return pytest.skip(f"this processor has no {', '.join(lacks)}")


# -- whole problems ------------------------------------------------------


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("dtype", SERVED)
def test_drawn_problems(processor, dtype, times):
    """The soak draws `times` as many problems as the suite."""
    kernel = Cpu(processor)
    options = {"dropout": serves(kernel, dtype, dropout=0.5, seed=0), "dtypes": (dtype,), "largest": 10_000}

    @settings(max_examples=times * EXAMPLES[isinstance(processor, Emulator)] // len(SERVED))
    @given(cases(**options))
    def conforms(case):
        assert_conforms(kernel.run, case.make_problem(see=[lse()]))

    conforms()


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(
    "shift", [0, *(pytest.param(shift, marks=pytest.mark.soak) for shift in range(1, len(SERVED)))]
)
def test_named_problems(processor, name, shift, request):
    """Each problem runs on each processor, in a dtype that depends on both. The soak runs test every dtype."""
    shapes, options = PROBLEMS[name]
    index = machine_names().index(request.node.callspec.params["processor"]) + list(PROBLEMS).index(name) + shift
    dtype = SERVED[index % len(SERVED)]
    assert_conforms(Cpu(processor).run, make_problem(*arrays(dtype=dtype, **shapes), see=[lse()], **options))


@pytest.mark.sampled(one_in=4)
def test_the_weights_pass(processor):
    shapes, options = PROBLEMS["shared heads, causal"]
    check_everything(make_problem(*arrays(dtype="float32", **shapes), **options), processor=processor)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", PROMISED)
def test_elementary_functions_keep_their_promise(processor, name, dtype):
    check_promise(name, dtype, processor)


def test_a_condition_in_any_lane_is_found(processor):
    def any_negative(builder, x):
        return builder.where((x < 0).any(), 1.0, builder.value(0.0, x.type))

    x = np.ones(64)
    x[[17, 63]] = -1
    np.testing.assert_array_equal(applied(any_negative, x, processor), np.repeat([0.0, 1.0, 0.0, 1.0], 16))


# -- assembly of each machine ---------------------------------------------


class PrintedError(Exception):
    """Carries the assembly of a kernel that was to be compiled."""


class Printer(Processor):
    """Raises PrintedError with the assembly of the first kernel."""

    links_parts = False

    def kernel(self, key, name, build_module, common=None, machine=None):
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        with optimised(build_module(), self.machine) as (parsed, target):
            target.set_asm_verbosity(True)
            raise PrintedError(target.emit_assembly(parsed))


def assembly(machine, dtype, **options):
    with pytest.raises(PrintedError) as found:
        Cpu(Printer(machine)).run(make_problem(*arrays((1, 1, 70, 64), dtype), **options))
    return str(found.value)


def weights_pass_assembly(statistic, machine):
    problem = make_problem(*arrays((1, 1, 70, 64), "float32"), mask=i >= j)
    with pytest.raises(PrintedError) as found:
        compute(problem, np.zeros((1, 1, 70)), statistic, processor=Printer(machine))
    return str(found.value)


FOREIGN = {  # registers and instructions that the machine lacks
    "avx512": r"(?!)",
    "avx2": r"%zmm|%[xy]mm(1[6-9]|[23]\d)|%k\d",
    "sse2": r"%[yz]mm|%k\d|\t(v[a-z]+|round\w+|p?blend\w+|ptest|pmulld|movddup|insertps|pinsr[bdq]|pextr[bdq])\t",
    "neon": r"\bz\d+\.|\bp\d+/|\t(ldadd|bf(dot|mmla|mlal|cvt)|sdot)\w*\t",
}
SUPERSETS = {
    "avx2": [named_machine("avx512")],
    "sse2": [named_machine("avx2"), Machine(named_machine("sse2").triple, "penryn", "+sse4.1")],
    "neon": [Machine(named_machine("neon").triple, "neoverse-v1", "+sve,+lse")],
}
WIDEST = {"avx512": r"%zmm31", "avx2": r"%ymm15", "sse2": r"%xmm15", "neon": r"v31\.4s"}


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("dtype", SERVED)
@pytest.mark.parametrize("name", machine_names())
def test_kernels_keep_to_their_machine(name, dtype):
    options = {"mask": i >= j, "score": 5 * np.tanh(s / 5) - np.floor(abs(s))}
    assert not (found := re.search(FOREIGN[name], assembly(named_machine(name), dtype, **options))), found


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    "statistic", [received(), pooled(2, 2), TopK(5), weights(), Mean(weights(), True, False, (0.5,))], ids=repr
)
@pytest.mark.parametrize("name", machine_names())
def test_kernels_of_the_weights_pass_keep_to_their_machine(name, statistic):
    assert not (found := re.search(FOREIGN[name], weights_pass_assembly(statistic, named_machine(name)))), found


@pytest.mark.parametrize(
    ("name", "superset"), [(name, superset) for name, machines in SUPERSETS.items() for superset in machines]
)
def test_foreign_instructions_would_be_found(name, superset):
    assert re.search(FOREIGN[name], assembly(superset, "float32", score=np.floor(s)))


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", machine_names())
def test_kernels_use_what_their_machine_has(name):
    text = assembly(named_machine(name), "float32")
    assert re.search(WIDEST[name], text)
    assert bool(re.search(r"\t(vfmadd\w+|fmla)\t", text)) == named_machine(name).has_fma
    assert not re.search(r"\bfmaf?\b", text), "a library call for each lane instead of an instruction"


def innermost_loops(text):
    """Return the instructions of each innermost loop. LLVM's comments delimit the loops."""
    loops, label, current = {}, "", None
    for line in text.splitlines():
        if found := re.match(r"\.L(BB\w+):|\S+ %bb\.\d+:", line):
            label, current = found[1] or label, None
        if "This Inner Loop Header" in line:
            current = label
            loops[current] = []
        elif found := re.search(r"in Loop: Header=(BB\w+)", line):
            current = found[1] if found[1] in loops else None
        if current and re.match(r"\t[a-z]", line):
            loops[current].append(line)
    return list(loops.values())


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", machine_names())
def test_sums_of_products_stay_in_registers(name, dtype):
    rows, vectors = named_machine(name).register_tile
    loops = [
        [line for line in loop if re.search("Spill|Reload", line)]
        for loop in innermost_loops(assembly(named_machine(name), dtype))
        if sum(bool(re.match(r"\t(vfmadd\w+|fmla|mulp[sd])\t", line)) for line in loop) >= 2 * rows * vectors
        and not any(re.match(r"\t(v?cmp\w*p[sd]|fcm\w+)\t", line) for line in loop)  # comparisons: the softmax
    ]
    assert len(loops) >= 2, "one loop for Q Kᵀ, one for P V"
    assert not any(loops), loops


# -- which machine -------------------------------------------------------

LINUX = "x86_64-unknown-linux-gnu"
PROCESSORS = {  # triple, name, some features; width, registers, fma, half, bf16_dot
    "Zen 4": (LINUX, "znver4", "avx2 fma f16c avx512f avx512bf16", (64, 32, True, True, True)),
    "Skylake server": (LINUX, "skylake-avx512", "avx2 fma f16c avx512f", (64, 32, True, True, False)),
    "Haswell": ("x86_64-apple-darwin", "haswell", "avx avx2 fma f16c", (32, 16, True, True, False)),
    "Piledriver": (LINUX, "bdver2", "avx fma f16c", (16, 16, True, True, False)),
    "Sandy Bridge": ("x86_64-pc-windows-msvc", "sandybridge", "avx sse4.2", (16, 16, False, False, False)),
    "Core 2": (LINUX, "core2", "sse2 ssse3", (16, 16, False, False, False)),
    "Apple M1": ("arm64-apple-darwin", "apple-m1", "", (16, 32, True, True, False)),
    "Graviton 3": ("aarch64-unknown-linux-gnu", "neoverse-v1", "neon sve bf16", (16, 32, True, True, False)),
    "another": ("riscv64-unknown-linux-gnu", "generic-rv64", "m a f d", (16, 16, False, False, False)),
}


@pytest.fixture
def pretend(monkeypatch):
    """A function that makes LLVM detect another processor, and returns the machine of the processor."""

    def put(name):
        triple, cpu, features, _ = PROCESSORS[name]
        found = llvm.FeatureMap(dict.fromkeys(features.split(), True) | {"amx-tile": False})
        for call, answer in (("process_triple", triple), ("host_cpu_name", cpu), ("host_cpu_features", found)):
            monkeypatch.setattr(llvm, f"get_{call}", lambda answer=answer: answer)
        native_machine.cache_clear()
        return native_machine()

    yield put
    native_machine.cache_clear()


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_machine_of_every_processor(name, pretend):
    machine = pretend(name)
    assert (
        machine.vector_bytes,
        machine.vector_registers,
        machine.has_fma,
        machine.has_half_conversion,
        machine.has_bf16_dot,
    ) == PROCESSORS[name][-1]
    rows, vectors = machine.register_tile
    assert rows * vectors + vectors + 1 <= machine.vector_registers, "the tile does not fit"
    assert "amx-tile" not in machine.feature_set


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("Haswell", "sse2"), ("Core 2", "sse2"), ("Apple M1", "neon"), ("Graviton 3", "neon"), ("another", "nothing")],
)
def test_a_machine_with_missing_features_is_refused(name, allowed, pretend, monkeypatch):
    machine = pretend(name)
    monkeypatch.setenv(CPU_VARIABLE, "avx512")
    with pytest.raises(ParameterError, match=rf"avx512, which needs (?s:.*)allowed: {allowed} on .*{machine.cpu}"):
        host()


def test_the_variable_selects_fewer_features(monkeypatch):
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    assert host() == native_machine()
    monkeypatch.setenv(CPU_VARIABLE, "")
    assert host() == native_machine()
    least = machine_names()[-1] if native_machine().architecture == "aarch64" else "sse2"
    monkeypatch.setenv(CPU_VARIABLE, least)
    assert host().features == named_machine(least).features
    assert host().triple == native_machine().triple
    monkeypatch.setenv(CPU_VARIABLE, "pentium")
    with pytest.raises(ParameterError, match=r"SIGHTLINE_CPU=pentium\n.*\n.*unset"):
        host()
    with pytest.raises(ParameterError, match="pentium"):
        named_machine("pentium")


def test_each_machine_has_kernels_of_its_own(monkeypatch, fresh_kernels):
    before = compile.counts["compiled"]
    processor = Processor()
    supported = [name for name in machine_names() if not missing_features(native_machine(), named_machine(name))]
    for name in supported:
        monkeypatch.setenv(CPU_VARIABLE, name)
        for _ in range(2):
            assert_conforms(Cpu(processor).run, make_problem(*arrays((1, 2, 50, 8), "float32"), mask=i >= j))
    assert compile.counts["compiled"] - before == 2 * len(supported)  # a kernel with a formula has two parts


# -- checks of the emulator -----------------------------------------------


def faulty(write):
    """Return a module whose function stores 1.0 at write(builder, first address of the argument block)."""
    module = Module()
    builder = Builder(module, "faulty")
    write(builder, builder.arguments[0].load(POINTER, 8)).store(builder.value(1.0, DOUBLE))
    builder.finish()
    return module


@pytest.mark.parametrize("offset", [-8, 24])
def test_writing_outside_an_array_is_detected(neon, offset):
    x = np.zeros(3)
    arguments = np.array([x.ctypes.data])
    for at in (16, offset):
        kernel = neon.linked(faulty(lambda builder, pointer, at=at: pointer.at(at)), "faulty")
        if at == offset:
            with pytest.raises(AssertionError, match="outside an array"):
                neon.call(kernel, arguments, 1, (x,))
        else:
            neon.call(kernel, arguments, 1, (x,))
            np.testing.assert_array_equal(x, [0, 0, 1])


def test_a_crash_is_detected(neon, tmp_path):
    another = Emulator(neon.machine, tmp_path)
    kernel = another.linked(faulty(lambda builder, _: builder.null()), "faulty")
    with pytest.raises(AssertionError, match="ended"):
        another.call(kernel, np.zeros(1, np.int64), 1, ())
    another.file.close()


def test_arrays_that_share_memory_share_it_in_the_arena():
    whole = np.arange(20)
    separate, backwards = np.arange(4), sightline.reference.testing.LAYOUTS["backwards"](np.ones((1, 3, 3)))
    found = emulator.memory_ranges((whole[:12], [whole[8:], separate], np.empty(0), backwards))
    assert len(found) == 3
    assert (whole.ctypes.data, whole.ctypes.data + whole.nbytes) in found
