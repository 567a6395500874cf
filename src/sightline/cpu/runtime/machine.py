"""The machine kernels are made for: how wide its vectors are, how many registers hold them, what it can do in hardware.

Four machines have names, and `host` is the one at hand. All are served by the same generator; a machine is what LLVM is
told, and everything else is read from that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache, cached_property

from ...errors import ParameterError

__all__ = [
    "CPU_VARIABLE",
    "Machine",
    "host",
    "machine_names",
    "missing_features",
    "named_machine",
    "native_machine",
    "restrict",
]

CPU_VARIABLE = "SIGHTLINE_CPU"  # names a machine, to take less than the processor has

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
AVX2 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
NAMED_MACHINES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "avx512": (X86, "x86-64", AVX512),  # every AVX-512 server; not the bfloat16 product, which is younger
    "avx2": (X86, "x86-64", AVX2),
    "sse2": (X86, "x86-64", ()),  # the baseline, which every x86-64 has
    "neon": (ARM, "generic", ()),  # the baseline of 64-bit ARM
}


@dataclass(frozen=True)
class Machine:
    """A target of LLVM.

    Parameters
    ----------
    triple, cpu, features : as LLVM names them; features as +this,-that, whole, since what kernels may use is read there
    vectors : of the register tile, a power of two; as many as fit unless fewer are asked, see `narrow_tile`
    """

    triple: str
    cpu: str
    features: str
    vectors: int | None = None

    @cached_property
    def feature_set(self) -> frozenset[str]:
        """The features it has."""
        return frozenset(name[1:] for name in self.features.split(",") if name.startswith("+"))

    @property
    def architecture(self) -> str:
        """x86_64, aarch64, or what else the triple says; Apple says arm64 for aarch64."""
        name = self.triple.partition("-")[0]
        return "aarch64" if name == "arm64" else name

    @cached_property
    def vector_bytes(self) -> int:
        """Bytes in a vector register. AVX without AVX2 and fused products gains nothing from its wider ones."""
        if "avx512f" in self.feature_set:
            return 64
        return 32 if {"avx2", "fma"} <= self.feature_set else 16

    @cached_property
    def vector_registers(self) -> int:
        """How many vector registers there are."""
        return 32 if self.architecture == "aarch64" or "avx512f" in self.feature_set else 16

    @cached_property
    def register_tile(self) -> tuple[int, int]:
        """(rows, vectors) of the register tile: rows · vectors sums fit, and what is multiplied beside them.

        x86 reads memory, multiplies and adds in one instruction where it can fuse; elsewhere what is read, or the
        product, takes registers too. The vectors are a power of two, which keeps blocks of queries aligned with the
        pyramids of tables.
        """
        rows = 6 if self.architecture == "x86_64" and self.has_fma else 4
        return rows, self.vectors or self.vector_registers // 8

    def narrow_tile(self, vectors: int) -> Machine:
        """The machine with a register tile no wider than so many vectors need: a few queries leave the rest idle."""
        wide = 1 << max(vectors - 1, 0).bit_length()
        return _with_vectors(self, wide) if wide < self.register_tile[1] else self

    @cached_property
    def has_fma(self) -> bool:
        """Whether a product and a sum are one instruction, rounded once."""
        return self.architecture == "aarch64" or "fma" in self.feature_set

    @cached_property
    def has_half_conversion(self) -> bool:
        """Whether float16 becomes float32 and back in hardware; elsewhere LLVM calls a function for every number."""
        return self.architecture == "aarch64" or not self.feature_set.isdisjoint({"f16c", "avx512f"})

    @cached_property
    def has_scalef(self) -> bool:
        """Whether it rounds and scales by powers of two in one instruction each (AVX512F and AVX512DQ)."""
        return self.vector_bytes == 64 and "avx512dq" in self.feature_set

    @cached_property
    def has_bf16_dot(self) -> bool:
        """Whether there is a product of bfloat16 pairs summed in float32, llvm.x86.avx512bf16.dpbf16ps.512."""
        return {"avx512f", "avx512bf16"} <= self.feature_set


@cache
def _with_vectors(machine: Machine, vectors: int) -> Machine:
    return replace(machine, vectors=vectors)


def machine_names() -> tuple[str, ...]:
    """The machines that have names, most able first."""
    return tuple(NAMED_MACHINES)


@cache
def named_machine(name: str) -> Machine:
    """The machine of that name: what every processor so called has, and no more.

    Raises
    ------
    ParameterError
        There is none of that name.
    """
    if name not in NAMED_MACHINES:
        raise ParameterError(f"the machine {name!r}", f"one of {', '.join(machine_names())}", "correct the name")
    triple, cpu, features = NAMED_MACHINES[name]
    return Machine(triple, cpu, ",".join(f"+{feature}" for feature in features))


def host() -> Machine:
    """The machine this process runs on, with all it has; or the one `SIGHTLINE_CPU` names, if it can run that.

    Raises
    ------
    ParameterError
        `SIGHTLINE_CPU` names no machine, or one this processor is not.
    """
    wanted = os.environ.get(CPU_VARIABLE)
    return restrict(native_machine(), wanted) if wanted else native_machine()


@cache
def native_machine() -> Machine:
    """The machine this process runs on, as LLVM finds it."""
    import llvmlite.binding as llvm

    triple, found = llvm.get_process_triple(), llvm.get_host_cpu_features()
    return Machine(triple, llvm.get_host_cpu_name(), found.flatten())


@cache
def restrict(machine: Machine, name: str) -> Machine:
    """The named machine in this one's place.

    Raises
    ------
    ParameterError
        There is none of that name, or this machine lacks some of its features.
    """
    runnable = [other for other in machine_names() if not missing_features(machine, named_machine(other))]
    if name not in runnable:
        given, allowed = (
            f"{CPU_VARIABLE}={name}",
            f"{', '.join(runnable) or 'nothing'} on this processor ({machine.cpu})",
        )
        missing = missing_features(machine, named_machine(name)) if name in NAMED_MACHINES else []
        raise ParameterError(
            given + (f", which needs {', '.join(missing)}" if missing else ""),
            allowed,
            f"unset {CPU_VARIABLE} to use all the processor has",
        )
    other = named_machine(name)
    return Machine(machine.triple, other.cpu, other.features)


def missing_features(machine: Machine, other: Machine) -> list[str]:
    """What a machine lacks to run another's kernels: its architecture, or features; empty if it can."""
    if machine.architecture != other.architecture:
        return [other.architecture]
    return sorted(other.feature_set - machine.feature_set)
