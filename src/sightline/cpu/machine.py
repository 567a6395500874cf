"""The processor kernels are made for: how wide its vectors are and how many registers hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

__all__ = ["Machine", "host"]


@dataclass(frozen=True)
class Machine:
    """A target of LLVM and the shape of its vector registers.

    Parameters
    ----------
    triple, cpu, features : as LLVM names them
    width : bytes in a vector register
    registers : how many there are
    half : whether it converts float16 in hardware
    bf16_dot : whether it multiplies pairs of bfloat16 (AVX512-BF16)
    """

    triple: str
    cpu: str
    features: str
    width: int
    registers: int
    half: bool = False
    bf16_dot: bool = False

    @property
    def tile(self) -> tuple[int, int]:
        """(rows, vectors) of the register tile: rows · vectors sums, one row of vectors and one broadcast fit.

        The vectors are a power of two, which keeps blocks of queries aligned with the pyramids of tables.
        """
        return (6, 4) if self.registers >= 32 else (6, 2)


@cache
def host() -> Machine:
    """The machine this process runs on."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    width, registers = 16, 16
    if features.get("avx512f"):
        width, registers = 64, 32
    elif features.get("avx2") and features.get("fma"):
        width = 32
    elif llvm.get_process_triple().startswith(("aarch64", "arm64")):
        registers = 32
    half = bool(features.get("f16c")) or registers == 32
    bf16_dot = bool(features.get("avx512bf16")) and width == 64
    triple, cpu = llvm.get_process_triple(), llvm.get_host_cpu_name()
    return Machine(triple, cpu, features.flatten(), width, registers, half, bf16_dot)
