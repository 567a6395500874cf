"""The machine, or LLVM target, that kernels are compiled for: its vector registers and its instructions.

Four machines have names. `native_machine` asks LLVM for the features of the processor, and `host` returns that machine
or the one that SIGHTLINE_CPU names. One code generator serves every machine. The width and number of vector registers
and every other property are derived from the features.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache

from ...arrays.caching import cached_property
from ...call.request import CPU_VARIABLE
from ...errors import ParameterError
from . import llvmlite_lock

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
AVX2 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
NAMED_MACHINES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "avx512": (X86, "x86-64", AVX512),  # every server with AVX-512; only later servers have the bfloat16 product
    "avx2": (X86, "x86-64", AVX2),
    "sse2": (X86, "x86-64", ()),  # the baseline of x86-64
    "neon": (ARM, "generic", ()),  # the baseline of 64-bit ARM
}


@dataclass(frozen=True)
class Machine:
    """A target that LLVM compiles kernels for.

    Parameters
    ----------
    triple, cpu : LLVM's names of the platform and of the processor
    features : LLVM's names of all features, as in "+avx2,-avx512f"; kernels use no other feature
    vectors : the vectors in a row of `register_tile`, a power of two; None for as many as the registers hold
    """

    triple: str
    cpu: str
    features: str
    vectors: int | None = None

    @cached_property
    def feature_set(self) -> frozenset[str]:
        return frozenset(name[1:] for name in self.features.split(",") if name.startswith("+"))

    @property
    def architecture(self) -> str:
        """The first part of the triple: x86_64, aarch64, or another. Apple's name arm64 is returned as aarch64."""
        name = self.triple.partition("-")[0]
        return "aarch64" if name == "arm64" else name

    @cached_property
    def vector_bytes(self) -> int:
        """Bytes per vector: 64, 32 or 16. Without AVX2 or FMA, vectors of 32 bytes are not faster than those of 16."""
        if "avx512f" in self.feature_set:
            return 64
        return 32 if {"avx2", "fma"} <= self.feature_set else 16

    @cached_property
    def vector_registers(self) -> int:
        return 32 if self.architecture == "aarch64" or "avx512f" in self.feature_set else 16

    @cached_property
    def register_tile(self) -> tuple[int, int]:
        """(rows, vectors) of the register tile: the rows × vectors of sums that a matrix product keeps in registers.

        The factors of the product need registers too. x86 with FMA loads, multiplies and adds in one instruction, so
        the sums can have six rows. Other machines also need registers for the loaded vector or for the product. The
        number of vectors is a power of two. Blocks of queries then begin where blocks of `TableBounds` begin.
        """
        rows = 6 if self.architecture == "x86_64" and self.has_fma else 4
        return rows, self.vectors or self.vector_registers // 8

    def narrow_tile(self, vectors: int) -> Machine:
        """Return this machine with a register tile of at most `vectors` vectors per row, rounded up to a power of two.

        Few queries fill few vectors, and the other vectors of a wider tile would do no useful work.
        """
        wide = 1 << max(vectors - 1, 0).bit_length()
        return _replace(self, vectors=wide) if wide < self.register_tile[1] else self

    @cached_property
    def has_fma(self) -> bool:
        """True if one instruction multiplies and adds, with one rounding."""
        return self.architecture == "aarch64" or "fma" in self.feature_set

    @cached_property
    def has_half_conversion(self) -> bool:
        """True if instructions convert float16 to float32 and back. Else `FloatFormat` uses integer operations."""
        return self.architecture == "aarch64" or not self.feature_set.isdisjoint({"f16c", "avx512f"})

    @cached_property
    def has_scalef(self) -> bool:
        """True if the machine has instructions to round and to scale by powers of two (AVX512F and AVX512DQ)."""
        return self.vector_bytes == 64 and "avx512dq" in self.feature_set

    @cached_property
    def has_bf16_dot(self) -> bool:
        """True if the machine multiplies bfloat16 pairs and adds in float32 (llvm.x86.avx512bf16.dpbf16ps.512)."""
        return {"avx512f", "avx512bf16"} <= self.feature_set

    @cached_property
    def without_bf16_dot(self) -> Machine:
        """The same machine without instructions for bfloat16."""
        return replace(self, features=",".join(x for x in self.features.split(",") if x != "+avx512bf16"))


_replace = cache(replace)  # equal machines share what `cached_property` computes


def machine_names() -> tuple[str, ...]:
    """Return the names of the named machines. For each architecture, the machine with the most features is first."""
    return tuple(NAMED_MACHINES)


@cache
def named_machine(name: str) -> Machine:
    """Return the machine of this name, with the features that every processor of that kind has.

    Raises
    ------
    ParameterError
        No machine has this name.
    """
    if name not in NAMED_MACHINES:
        raise ParameterError(f"the machine {name!r}", f"one of {', '.join(machine_names())}", "correct the name")
    triple, cpu, features = NAMED_MACHINES[name]
    return Machine(triple, cpu, ",".join(f"+{feature}" for feature in features))


def host() -> Machine:
    """Return the machine of this process with all its features, or the machine that SIGHTLINE_CPU names.

    Raises
    ------
    ParameterError
        `SIGHTLINE_CPU` names no machine, or a machine whose kernels this processor cannot run.
    """
    wanted = os.environ.get(CPU_VARIABLE)
    return restrict_machine(native_machine(), wanted) if wanted else native_machine()


@cache
def native_machine() -> Machine:
    """Return the machine of this process, as LLVM detects it."""
    import llvmlite.binding as llvm

    try:
        return Machine(llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    except BaseException:
        llvmlite_lock.repair()
        raise


@cache
def restrict_machine(machine: Machine, name: str) -> Machine:
    """Return the machine called `name`, with the triple of `machine`.

    Raises
    ------
    ParameterError
        No machine has this name, or `machine` lacks features of the machine called `name`.
    """
    runnable = [candidate for candidate in machine_names() if not missing_features(machine, named_machine(candidate))]
    if name not in runnable:
        missing = missing_features(machine, named_machine(name)) if name in NAMED_MACHINES else []
        raise ParameterError(
            f"{CPU_VARIABLE}={name}" + (f", which needs {', '.join(missing)}" if missing else ""),
            f"{', '.join(runnable) or 'nothing'} on this processor ({machine.cpu})",
            f"unset {CPU_VARIABLE} to use all features of the processor",
        )
    named = named_machine(name)
    return Machine(machine.triple, named.cpu, named.features)


def missing_features(machine: Machine, other: Machine) -> list[str]:
    """Return what `machine` lacks to run kernels for `other`: its architecture, or features; [] if it lacks nothing."""
    if machine.architecture != other.architecture:
        return [other.architecture]
    return sorted(other.feature_set - machine.feature_set)
