"""LLVM in, address out."""

from __future__ import annotations

from typing import Any

from .machine import Machine

__all__ = ["compile_module", "optimised"]

_KEPT: list[Any] = []  # engines own the code they made


def compile_module(module: Any, machine: Machine, name: str) -> int:
    """The address of the module's function `name`, optimised for the machine at hand."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    engine = llvm.create_mcjit_compiler(*optimised(module, machine))
    engine.finalize_object()
    _KEPT.append(engine)
    return int(engine.get_function_address(name))


def optimised(module: Any, machine: Machine) -> tuple[Any, Any]:
    """The module as LLVM's passes leave it for the machine, and LLVM's target that writes its code.

    Loops are unrolled by the generator, which knows the registers; LLVM's unrolling and vectorising stay off.
    """
    import llvmlite.binding as llvm

    target = llvm.Target.from_triple(machine.triple).create_target_machine(
        cpu=machine.cpu, features=machine.features, opt=3
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.triple = machine.triple
    parsed.data_layout = str(target.target_data)
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = options.loop_interleaving = False
    passes = llvm.create_pass_builder(target, options)
    passes.getModulePassManager().run(parsed, passes)
    return parsed, target
