"""`sightline.attention` for JAX arrays and tracers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..api.kernels import KERNELS, to_caller
from ..call.explanation import Explanation
from ..call.kernel import Kernel, Plan, Refusal, Result, choose
from ..call.problem import Options, Problem, parse
from ..call.spec import Arrays, CallSpec, build_seen
from ..call.validation import read_seed
from ..errors import ParameterError, ShapeError
from ..gpu import Triton
from ..kv_cache import unpack_cache
from ..statistics import solve_selections_separately
from .options import PrimitiveOptions, check_tables, fold_traced_scale
from .primitives import bind_attention


class JaxOperations(Kernel):
    """What `explain` names as the kernel on devices other than the CPU, where programs run `array_operations`."""

    name = "jax"
    description = "blocks of queries in a loop, by operations of JAX"

    def cost(self, problem: Problem) -> float:
        return 1.0

    def run(self, problem: Problem) -> Result:
        raise NotImplementedError("only compiled programs run the operations of JAX; `explain` reports them")


def explain(query: Any, problem: Problem, source: bool) -> Explanation:
    """Return how a call is computed on the device of `query`; `problem` is the call with NumPy arrays of its shapes."""
    is_traced = isinstance(query, jax.core.Tracer)
    platform: str = jax.default_backend() if is_traced else next(iter(query.devices())).platform
    if platform == "cpu":
        return Explanation.of(problem, choose(KERNELS, problem, problem.kernel), source)
    cure = 'put them on the CPU: jax.device_put(array, jax.devices("cpu")[0])'
    refusal = Refusal(f"the arrays are on the platform {platform!r}", cure)
    refusals: dict[str, tuple[Refusal, ...]] = {JaxOperations.name: (), "cpu": (refusal,)}
    return Explanation.of(problem, Plan(JaxOperations(), refusals, False), source, platform)


def run(query: Any, key: Any, value: Any, options: Options) -> tuple[Any, tuple[Any, ...]]:
    """Return (output, seen) of `sightline.attention`."""
    names, kernel = [candidate.name for candidate in KERNELS if not isinstance(candidate, Triton)], options.kernel
    if kernel is not None and kernel not in names:
        listed = ", ".join(map(repr, names))
        raise ParameterError(f"kernel={kernel!r} for JAX arrays", f"one of {listed}, or None", "leave kernel=None")
    if not all(isinstance(length, int) for array in (query, key, value) for length in np.shape(array)):
        shapes = ", ".join(str(np.shape(array)) for array in (query, key, value))
        raise ShapeError(f"arrays of symbolic shapes {shapes}", "fixed shapes", "export one program for each shape")
    seed = options.seed
    static_options = fold_traced_scale(options).replace(seed=None if seed is None else 0)
    problem = parse(query, *unpack_cache(query, key, value, static_options))
    check_tables(problem)
    options = options.replace(seed=_read_seed(seed, problem.dropout))
    result = solve_selections_separately(problem, lambda subproblem: solve(subproblem, options))
    return to_caller(problem, result, options.see)


def solve(problem: Problem, options: Options) -> Result:
    """Return the result of a parsed problem. The seed of the options is a pair of uint32, the lower half first."""
    spec, tables = CallSpec.of(problem)
    converted = [_to_jax(table.array) for table in tables]
    seed = options.seed if problem.dropout else None  # a selection of a statistic is a problem without dropout
    arrays = Arrays(problem.query, problem.key, problem.value, [x for x, _ in converted], problem.sinks, seed)
    parameters = PrimitiveOptions(spec, tuple([dtype for _, dtype in converted]), options.by_position)
    output, lse, _, *own = bind_attention(*arrays.flatten(), options=parameters)
    return Result(output, lse, build_seen(problem.see, [output, lse, *own], jax.lax.stop_gradient))


def _to_jax(array: Any) -> tuple[Any, str]:
    """Return a table as a JAX array, and the name of its dtype if it is passed as pairs of 32-bit words, else "".

    If JAX has no 64-bit numbers, a NumPy table of int64 numbers that fit into 32 bits becomes int32. Every other NumPy
    table of 64-bit numbers becomes uint32, and the two words of a number lie in a new last axis.
    """
    if isinstance(array, np.ndarray) and array.dtype.itemsize == 8 and not jax.config.jax_enable_x64:
        if array.dtype.kind == "i" and np.array_equal(narrow := array.astype(np.int32), array):
            return jnp.asarray(narrow), ""
        return jnp.asarray(np.ascontiguousarray(array)[..., None].view(np.uint32)), str(array.dtype)
    return jnp.asarray(array), ""


def _read_seed(seed: Any, dropout: float) -> Any:
    """Return the seed as a pair of uint32, the lower half first; None without dropout.

    A seed that is a JAX array of 32 bits or fewer becomes the lower half, converted to uint32. The upper half is 0.
    """
    if isinstance(seed, jax.Array):
        if seed.shape or not jnp.issubdtype(seed.dtype, jnp.integer):
            given = f"a seed of shape {seed.shape} and dtype {seed.dtype}"
            raise ParameterError(given, "one whole number", "seed=jax.random.bits(key)")
    else:
        seed = read_seed(seed, dropout)
    if not dropout:
        return None
    if not isinstance(seed, jax.Array):
        return jnp.asarray([seed % 2**32, seed // 2**32], jnp.uint32)
    if jnp.iinfo(seed.dtype).bits == 64:
        return jax.lax.bitcast_convert_type(seed, jnp.uint32)
    return jnp.stack([seed.astype(jnp.uint32), jnp.zeros((), jnp.uint32)])
