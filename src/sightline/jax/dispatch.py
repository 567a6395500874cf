"""`sightline.attention` for JAX arrays and tracers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..call_text import CallText, count_arrays
from ..dispatch import to_caller_layout
from ..errors import ParameterError
from ..kernel import Result
from ..problem import Problem, parse
from ..statistics import solve_selections_separately
from ..validation import fold_scale, read_seed
from .options import CallOptions
from .primitives import attention
from .result_indices import FIRST_ARRAY, LSE

__all__ = ["run"]

HOST_KERNELS = ("cpu", "streaming", "reference")


def run(
    query: Any, key: Any, value: Any, options: dict[str, Any], kernel: str | None, threads: int | None
) -> tuple[Any, tuple[Any, ...]]:
    """Return (output, seen) of `sightline.attention`; `options` are its other arguments."""
    if kernel is not None and kernel not in HOST_KERNELS:
        raise ParameterError(
            f"kernel={kernel!r} for JAX arrays", f"one of {HOST_KERNELS}, or None", "leave kernel=None"
        )
    seed, scale = options["seed"], options["scale"]
    if isinstance(scale, jax.Array):
        score, scale = fold_scale(options["score"], scale)
        options = options | {"score": score, "scale": scale}
    problem = parse(query, key, value, **(options | {"seed": None if seed is None else 0}))
    words = _read_seed(seed) if problem.dropout else None
    result = solve_selections_separately(problem, lambda one: _run_primitive(one, words, kernel, threads))
    return to_caller_layout(problem, result)


def _run_primitive(problem: Problem, seed: Any, kernel: str | None, threads: int | None) -> Result:
    text, tables = CallText.of(problem)
    converted = [_to_jax(table.array) for table in tables]
    inputs = [problem.query, problem.key, problem.value, *[array for array, _ in converted]]
    inputs += [array for array in (problem.sinks, seed) if array is not None]
    wide_tables = tuple([dtype for _, dtype in converted])
    options = CallOptions(text, wide_tables, problem.sinks is not None, seed is not None, kernel, threads)
    results = attention(inputs, options)
    seen, index = [], FIRST_ARRAY
    for statistic in problem.see:
        count = count_arrays(statistic)
        arrays = results[index : index + count] if count else [results[LSE]]
        index += count
        if not statistic.is_differentiable:
            arrays = [jax.lax.stop_gradient(array) for array in arrays]
        seen.append(statistic.build_result(arrays))
    return Result(results[0], results[LSE], tuple(seen))


def _to_jax(array: Any) -> tuple[Any, str]:
    """Return a table as a JAX array, and "".

    If JAX has no 64-bit numbers, a table of NumPy with such numbers becomes words of 32 bits in a new last axis. The
    name of its dtype is returned too.
    """
    if isinstance(array, np.ndarray) and array.dtype.itemsize == 8 and not jax.config.jax_enable_x64:
        return jnp.asarray(np.ascontiguousarray(array)[..., None].view(np.uint32)), str(array.dtype)
    return jnp.asarray(array), ""


def _read_seed(seed: Any) -> Any:
    """Return the seed as two words of 32 bits, the lower first. A traced seed has 32 bits if JAX has no int64."""
    if isinstance(seed, jax.Array):
        if jax.numpy.iinfo(seed.dtype).bits == 64:
            return jax.lax.bitcast_convert_type(seed, jnp.uint32)
        return jnp.stack([jax.lax.bitcast_convert_type(seed.astype(jnp.int32), jnp.uint32), jnp.zeros((), jnp.uint32)])
    seed = read_seed(seed, dropout=1.0)
    return jnp.asarray([seed % 2**32, seed // 2**32], jnp.uint32)
