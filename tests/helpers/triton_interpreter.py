"""Triton's interpreter, extended by the features that the kernels need."""

import os
from dataclasses import replace

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def lifted(function):
    """Return a NumPy function as a function of the interpreter's blocks, which stands for one of libdevice."""

    def call(*inputs):
        blocks = [x for x in inputs if isinstance(x, tl.tensor)]
        values = function(*(x.handle.data if isinstance(x, tl.tensor) else x for x in inputs))
        shape = max((block.type for block in blocks), key=lambda kind: len(getattr(kind, "shape", ())))
        return tl.tensor(TensorHandle(values.astype(blocks[0].handle.data.dtype), blocks[0].dtype.scalar), shape)

    return call


def condition(comparison):
    """Return a comparison whose result has the dtype int1: the interpreter returns integers for scalars."""
    return lambda *blocks: TensorHandle(comparison(*blocks).data.astype(bool), tl.int1)


def once(patch):
    """Return `patch`, applied once per launch; the interpreter applies it in every call of a device function."""
    done = set()

    def patched(function):
        modules = frozenset(id(x) for x in function.__globals__.values() if x is tl or x is tl.core)
        if modules in done:
            return None
        done.add(modules)
        scope = patch(function)
        if scope is not None:  # None in Triton 3.5, which never undoes the patch
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    return patched


def patch_interpreter():
    """Replace comparisons, elementary functions and integer sums of the interpreter; call it once per process."""
    for name in dir(InterpreterBuilder):
        if name.startswith(("create_fcmp", "create_icmp")):
            setattr(InterpreterBuilder, name, condition(getattr(InterpreterBuilder, name)))
    for name, function in (("exp", np.exp), ("tanh", np.tanh), ("pow", np.power), ("log1p", np.log1p)):
        setattr(libdevice, name, lifted(function))
    interpreter._patch_lang = once(interpreter._patch_lang)
    options = interpreter.interpreter_builder.options  # else it computes overflow checks whose results it ignores
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
