"""Triton's interpreter, with what it lacks for these kernels put in place."""

import os
from dataclasses import replace

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def lifted(compile_function):
    """A function of NumPy on the interpreter's blocks, which knows none of libdevice."""

    def call(*inputs):
        blocks = [x for x in inputs if isinstance(x, tl.tensor)]
        values = compile_function(*(x.handle.data if isinstance(x, tl.tensor) else x for x in inputs))
        shape = max((block.type for block in blocks), key=lambda kind: len(getattr(kind, "shape", ())))
        return tl.tensor(TensorHandle(values.astype(blocks[0].handle.data.dtype), blocks[0].dtype.scalar), shape)

    return call


def condition(comparison):
    """A comparison that says of its result that it is a condition, not a number: of scalars the interpreter forgets."""
    return lambda *blocks: TensorHandle(comparison(*blocks).data.astype(bool), tl.int1)


def once(patch):
    """Puts the interpreter's functions in place once a launch, where it does so for every call of a device function."""
    done = set()

    def patched(compile_function):
        rooms = frozenset(id(x) for x in compile_function.__globals__.values() if x is tl or x is tl.core)
        if rooms in done:
            return None
        done.add(rooms)
        scope = patch(compile_function)
        restore = scope.restore
        scope.restore = lambda: (done.clear(), restore())
        return scope

    return patched


def patch_interpreter():
    """Comparisons, elementary functions, and sums of whole numbers as the kernels need them; once a process."""
    for name in dir(InterpreterBuilder):
        if name.startswith(("create_fcmp", "create_icmp")):
            setattr(InterpreterBuilder, name, condition(getattr(InterpreterBuilder, name)))
    libdevice.exp, libdevice.tanh, libdevice.pow = lifted(np.exp), lifted(np.tanh), lifted(np.power)
    interpreter._patch_lang = once(interpreter._patch_lang)
    options = interpreter.interpreter_builder.options  # it works out whether sums overflow, and without debug drops it
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
