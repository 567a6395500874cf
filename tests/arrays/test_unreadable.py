"""Every kind of array as every argument: the call is right, or it is refused by an error that names the kind.

A new kind of array is one line of `KINDS`, and a new argument is one line of `ARGUMENTS`. Each call is repeated with
new contents, after as many calls with plain arrays, because repeated calls take another path.
"""

import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import sightline
from sightline import bias, i, j, s, table
from sightline.call.problem import make_problem
from sightline.errors import SightlineError
from sightline.reference.accuracy import compute_baseline, term_sizes
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget
from sightline.torch import MultiHeadAttention, ScaledDotProductAttention, SelfAttention
from sightline.torch import scaled_dot_product_attention as sdpa

REPETITIONS = 9
B, H, N, M, D = 2, 2, 5, 7, 8


# -- classes of arrays ---------------------------------------------------------------------------------------------


class Plain(torch.Tensor):
    """A tensor with its own class, and the data and functions of Tensor."""


class WithFunction(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


class WithoutFunctions(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return NotImplemented


class WithFunctionsDisabled(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


class OwnParameter(nn.Parameter):
    pass


class Wrapper(torch.Tensor):
    """A tensor that wraps another one, and computes every operator on it."""

    @staticmethod
    def __new__(cls, wrapped):
        return torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, strides=wrapped.stride(), dtype=wrapped.dtype)

    def __init__(self, wrapped):
        self.wrapped = wrapped

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda x: x.wrapped, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, function(*args, **kwargs))


class AtenWrapper(Wrapper):
    """A wrapper that computes the operators of torch alone."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function.namespace != "aten":
            raise NotImplementedError(f"no rule for {function}")
        return super().__torch_dispatch__(function, types, args, kwargs)


class RefusingWrapper(Wrapper):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return NotImplemented


class TensorDictionary:
    """What a dictionary of tensors, such as a TensorDict, shows of its tensors."""

    requires_grad = False

    def __init__(self, tensor):
        self.tensor = tensor

    def __getattr__(self, name):
        if name not in ("shape", "dtype", "device", "ndim", "batch_size"):
            raise AttributeError(name)
        return getattr(self.tensor, name)


class Subclass(np.ndarray):
    pass


class Quantity(np.ndarray):
    """An array with a unit, which NumPy's functions do not compute."""

    def __array_ufunc__(self, *inputs, **options):
        raise TypeError("units differ")


class NothingReadable:
    """An object with shape and dtype whose entries NumPy cannot read."""

    def __init__(self, array):
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


# -- how each kind is made -------------------------------------------------------------------------------------------


def tensor(x):
    return torch.from_numpy(np.array(x))


def parameter(x):
    return nn.Parameter(tensor(x), requires_grad=False)


def nested(layout):
    return lambda x: torch.nested.nested_tensor(list(tensor(np.atleast_2d(x))), layout=layout)


def functional(x):
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(tensor(x))


def distributed(x):
    return DTensor.from_local(tensor(x), init_device_mesh("cpu", (1,)), [Replicate()])


def freed(x):
    found = tensor(x).clone()
    found.untyped_storage().resize_(0)
    return found


def inference(x):
    with torch.inference_mode():
        return tensor(x).clone()


def leaked(transform):
    """Return a tensor of a transform that has ended."""

    def make(x):
        found = []
        transform(found)(tensor(x))
        return found[0]

    return make


def memory_mapped(x):
    with tempfile.TemporaryFile() as file:
        found = np.memmap(file, x.dtype, "w+", shape=x.shape)
    found[...] = x
    return found


def with_flags(x, writeable):
    found = x.copy()
    found.flags.writeable = writeable
    return found


def jax_array(x):
    return pytest.importorskip("jax.numpy").asarray(x)


def jax_sparse(x):
    """Return a sparse array of all entries; its other constructor compiles for seconds."""
    places = np.argwhere(np.ones_like(x))
    return pytest.importorskip("jax.experimental.sparse").BCOO((jax_array(x.reshape(-1)), places), shape=x.shape)


def structured(x):
    return np.zeros(x.shape, [("one", "f4"), ("other", "f4")])


def scipy_sparse(x):
    return pytest.importorskip("scipy.sparse").csr_array(x)


def mapped(call, *given):
    return torch.vmap(call)(*[tensor(x)[None] for x in given])[0]


def under(context):
    def run(call, *given):
        with context():
            return call(*map(tensor, given))

    return run


class Kind(NamedTuple):
    """A kind of arrays.

    make : NumPy array → array of this kind with the same entries
    word : text of the error that refuses the kind; "" for kinds that every argument of their library takes
    library : the library of the plain arrays beside an array of this kind
    floats, axes : True if the kind has no arrays of booleans; the number of axes of query, key and value
    run : (call, *NumPy arrays) → result of the call; by default the call of the made arrays
    """

    make: Callable[[Any], Any]
    word: str = ""
    library: str = "torch"
    floats: bool = False
    axes: int = 4
    run: Any = None


KINDS = {
    "a tensor": Kind(tensor),
    "a parameter": Kind(parameter),
    "a parameter of an own class": Kind(lambda x: OwnParameter(tensor(x), requires_grad=False)),
    "a buffer": Kind(lambda x: nn.Buffer(tensor(x))),
    "a subclass": Kind(lambda x: tensor(x).as_subclass(Plain)),
    "a subclass with __torch_function__": Kind(lambda x: tensor(x).as_subclass(WithFunction)),
    "a subclass with functions disabled": Kind(lambda x: tensor(x).as_subclass(WithFunctionsDisabled)),
    "a subclass without functions": Kind(lambda x: tensor(x).as_subclass(WithoutFunctions), "WithoutFunctions"),
    "a wrapper": Kind(lambda x: Wrapper(tensor(x))),
    "a wrapper of two": Kind(lambda x: TwoTensor(tensor(x), tensor(x))),
    "a parameter of a wrapper": Kind(lambda x: nn.Parameter(TwoTensor(tensor(x), tensor(x)), requires_grad=False)),
    "a wrapper of torch's operators": Kind(lambda x: AtenWrapper(tensor(x)), "AtenWrapper"),
    "a wrapper of nothing": Kind(lambda x: RefusingWrapper(tensor(x)), "RefusingWrapper"),
    "an uninitialized parameter": Kind(lambda _: nn.UninitializedParameter(requires_grad=False), "uninitialized"),
    "an uninitialized buffer": Kind(lambda _: nn.UninitializedBuffer(), "uninitialized"),
    "a masked tensor": Kind(lambda x: masked_tensor(tensor(x), torch.ones(x.shape, dtype=torch.bool)), "masked"),
    "a CausalBias": Kind(
        lambda x: causal_lower_right(*x.shape[-2:] if x.ndim > 1 else (2, 2)), "CausalBias", floats=True
    ),
    "a DTensor": Kind(distributed, "DTensor"),
    "a tensor of a collective": Kind(lambda x: AsyncCollectiveTensor(tensor(x))),
    "a functional tensor": Kind(functional, "FunctionalTensor"),
    "a functional tensor without class": Kind(lambda x: torch._to_functional_tensor(tensor(x)), "functional"),
    "a fake tensor": Kind(lambda x: FakeTensorMode().from_tensor(tensor(x)), "FakeTensor"),
    "a meta tensor": Kind(lambda x: tensor(x).to("meta"), "meta"),
    "a quantized tensor": Kind(
        lambda x: torch.quantize_per_tensor(tensor(x), 0.1, 0, torch.qint8), "quantized", floats=True
    ),
    "a sparse tensor": Kind(lambda x: tensor(x).to_sparse(), "sparse"),
    "rows of a sparse tensor": Kind(lambda x: tensor(x).to_sparse_csr(), "sparse", axes=2),
    "columns of a sparse tensor": Kind(lambda x: tensor(x).to_sparse_csc(), "sparse", axes=2),
    "blocks of a sparse tensor": Kind(lambda x: tensor(x).to_sparse_bsr((1, 1)), "sparse", axes=2),
    "a tensor of oneDNN": Kind(lambda x: tensor(x).to_mkldnn(), "mkldnn", floats=True),
    "a nested tensor": Kind(nested(torch.strided), "nested"),
    "a jagged tensor": Kind(nested(torch.jagged), "nested"),
    "a complex tensor": Kind(lambda x: torch.complex(tensor(x), tensor(x)).conj(), "complex", floats=True),
    "a negative view": Kind(lambda x: torch._neg_view(-tensor(x)), floats=True),
    "an imaginary part": Kind(lambda x: torch.complex(tensor(0 * x), tensor(-x)).conj().imag, floats=True),
    "an inference tensor": Kind(inference),
    "a freed tensor": Kind(freed, "no memory"),
    "a zero tensor": Kind(lambda x: torch._efficientzerotensor(x.shape, dtype=tensor(x).dtype), "no memory"),
    "a tensor of an ended grad": Kind(
        leaked(lambda found: torch.func.grad(lambda x: (found.append(x), x.sum())[1])), floats=True
    ),
    "a tensor of an ended vmap": Kind(
        leaked(lambda found: lambda x: torch.vmap(lambda x: (found.append(x), x)[1])(x[None])), "torch.func"
    ),
    "a dictionary of tensors": Kind(lambda x: TensorDictionary(tensor(x)), "TensorDictionary"),
    "a tensor in vmap": Kind(tensor, run=mapped),
    "a tensor in vjp": Kind(tensor, run=lambda call, *x: torch.func.vjp(call, *map(tensor, x))[0], floats=True),
    "a tensor in functionalize": Kind(
        tensor, "functionalize", run=lambda call, *x: torch.func.functionalize(call)(*map(tensor, x))
    ),
    "a tensor in a mode of functions": Kind(tensor, run=under(FunctionMode)),
    "a tensor in a mode of operators": Kind(tensor, run=under(DispatchMode)),
    "a tensor under a default device": Kind(tensor, run=under(partial(torch.device, "meta"))),
    "a tensor in inference mode": Kind(tensor, run=under(torch.inference_mode)),
    "an array": Kind(np.copy, library="numpy"),
    "an array of a subclass": Kind(lambda x: x.copy().view(Subclass), library="numpy"),
    "an array with a unit": Kind(lambda x: x.copy().view(Quantity), library="numpy"),
    "a record array of floats": Kind(lambda x: x.copy().view(np.recarray), library="numpy"),
    "a memory map": Kind(memory_mapped, library="numpy"),
    "a read-only array": Kind(lambda x: with_flags(x, writeable=False), library="numpy"),
    "a matrix": Kind(np.matrix, library="numpy", axes=2),
    "a masked array": Kind(lambda x: np.ma.array(x, mask=x > 0), "masked", "numpy"),
    "an array of objects": Kind(lambda x: x.astype(object), "object", "numpy"),
    "a structured array": Kind(structured, "one", "numpy"),
    "a record array": Kind(lambda x: structured(x).view(np.recarray), "one", "numpy"),
    "an array of dates": Kind(lambda x: np.zeros(x.shape, "M8[s]"), "datetime", "numpy"),
    "an array of strings": Kind(lambda x: np.char.array(x.astype("U8")), "<U8", "numpy"),
    "an object that NumPy cannot read": Kind(NothingReadable, "NothingReadable", "numpy"),
    "a sparse array of SciPy": Kind(scipy_sparse, "csr_array", "numpy", axes=2),
    "a sparse array of JAX": Kind(jax_sparse, "sparse", "jax"),
}


# -- the arguments ---------------------------------------------------------------------------------------------------


def softmax_layer(*given):
    return ScaledDotProductAttention()(*given)[0]


@lru_cache
def make_layer(kind, dtype):
    torch.manual_seed(0)
    with torch.device("cpu"):  # which the first call may have changed
        layer = kind(D, H, batch_first=True) if kind is MultiHeadAttention else kind(D, D, D)
    return layer.to(dtype).requires_grad_(False)


def projecting_layer(a, **given):
    """Return the output of a MultiHeadAttention for the plain arrays, with some arguments replaced by `given`."""
    arguments = {"query": a.x, "key": a.y, "value": a.y, "need_weights": False} | given
    return make_layer(MultiHeadAttention, a.x.dtype)(**arguments)[0]


def rotary_layer(a, x):
    return make_layer(SelfAttention, a.x.dtype)(x)


def captured(x):
    return lambda score, b, h, q_idx, kv_idx: score + x[q_idx, kv_idx]


class Argument(NamedTuple):
    """An argument of a function.

    arrays : the names of the arrays that get the kind
    call : (plain arrays, *arrays of the kind) → output
    options : plain arrays → options of the problem that defines the output; None if float64 computes the definition
    in_torch : True for functions and layers of `sightline.torch`
    """

    arrays: tuple[str, ...]
    call: Callable[..., Any]
    options: Callable[[Any], dict[str, Any]] | None = lambda _: {}
    in_torch: bool = False


def with_mask(a):
    return {"mask": a.mask}


def with_bias(a):
    return {"score": bias(a.bias)}


ARGUMENTS = {
    "query": Argument(("q",), lambda a, q: sightline.attention(q, a.k, a.v)),
    "key": Argument(("k",), lambda a, k: sightline.attention(a.q, k, a.v)),
    "value": Argument(("v",), lambda a, v: sightline.attention(a.q, a.k, v)),
    "query, key and value": Argument(("q", "k", "v"), lambda a, q, k, v: sightline.attention(q, k, v)),
    "mask": Argument(("mask",), lambda a, x: sightline.attention(a.q, a.k, a.v, mask=x), with_mask),
    "bias": Argument(("bias",), lambda a, x: sightline.attention(a.q, a.k, a.v, score=bias(x)), with_bias),
    "table": Argument(("bias",), lambda a, x: sightline.attention(a.q, a.k, a.v, score=s + table(x)[i, j]), with_bias),
    "captured": Argument(("bias",), lambda a, x: sightline.attention(a.q, a.k, a.v, score=captured(x)), with_bias),
    "sinks": Argument(
        ("sinks",), lambda a, x: sightline.attention(a.q, a.k, a.v, sinks=x), lambda a: {"sinks": a.sinks}
    ),
    "query of torch's function": Argument(("q",), lambda a, q: sdpa(q, a.k, a.v), in_torch=True),
    "key of torch's function": Argument(("k",), lambda a, k: sdpa(a.q, k, a.v), in_torch=True),
    "value of torch's function": Argument(("v",), lambda a, v: sdpa(a.q, a.k, v), in_torch=True),
    "all of torch's function": Argument(("q", "k", "v"), lambda a, q, k, v: sdpa(q, k, v), in_torch=True),
    "attn_mask of booleans": Argument(("mask",), lambda a, x: sdpa(a.q, a.k, a.v, x), with_mask, in_torch=True),
    "attn_mask of floats": Argument(("bias",), lambda a, x: sdpa(a.q, a.k, a.v, x), with_bias, in_torch=True),
    "query of a layer": Argument(("q",), lambda a, q: softmax_layer(q, a.k, a.v), in_torch=True),
    "mask of a layer": Argument(("mask",), lambda a, x: softmax_layer(a.q, a.k, a.v, x), with_mask, in_torch=True),
    "x of a layer": Argument(("x",), rotary_layer, None, in_torch=True),
    "query of projections": Argument(("x",), lambda a, x: projecting_layer(a, query=x), None, in_torch=True),
    "value of projections": Argument(("y",), lambda a, y: projecting_layer(a, value=y), None, in_torch=True),
    "hidden pairs": Argument(("mask",), lambda a, x: projecting_layer(a, attn_mask=x), None, in_torch=True),
    "added logits": Argument(("bias",), lambda a, x: projecting_layer(a, attn_mask=x), None, in_torch=True),
    "hidden keys": Argument(("padding",), lambda a, x: projecting_layer(a, key_padding_mask=x), None, in_torch=True),
}


def draw(repetition, axes):
    """Return contents: query, key and value with four axes or two, mask, bias and sinks."""
    rng = np.random.default_rng(repetition)
    lead, heads = ((B, H), H) if axes == 4 else ((), 1)
    shapes = {"q": (*lead, N, D), "k": (*lead, M, D), "v": (*lead, M, D), "bias": (N, M), "sinks": (heads,)}
    shapes |= {"x": (*lead[:1], N, D), "y": (*lead[:1], M, D)}
    found = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return SimpleNamespace(mask=rng.random((N, M)) < 0.7, padding=rng.random((*lead[:1], M)) < 0.3, **found)


@lru_cache(1024)
def definition(argument, repetition, axes):
    """Return the output by the definition, by the plain computations, and the sizes of its terms."""
    a, (arrays, call, options, _) = draw(repetition, axes), ARGUMENTS[argument]
    if options is None:
        plain = SimpleNamespace(**{name: tensor(x) for name, x in vars(a).items()})
        exact = SimpleNamespace(**{name: x.double() if x.is_floating_point() else x for name, x in vars(plain).items()})
        return *[call(x, *[vars(x)[name] for name in arrays]).detach().numpy() for x in (exact, plain)], None
    problem = make_problem(a.q, a.k, a.v, **options(a))
    stages, baseline = compute_stages(problem), compute_baseline(problem)
    return stages.output, baseline.output, term_sizes(problem, stages.weights)


def to_plain(output):
    """Return the entries of an output of any class as a NumPy array."""
    output = getattr(output, "wrapped", getattr(output, "a", output))
    if not isinstance(output, torch.Tensor):
        return np.asarray(output)
    return output.detach().as_subclass(torch.Tensor).numpy()


PROJECTED = "x of a layer", "query of projections", "value of projections"
OWN_MEANING = {
    ("a CausalBias", "attn_mask of floats"),  # a mask, which test_causal_bias.py tests
    ("a meta tensor", "query, key and value"),  # the output is a meta tensor
    ("a meta tensor", "all of torch's function"),
    ("a meta tensor", "x of a layer"),
    ("a sparse array of SciPy", "captured"),  # its own code reads the entries
    *[("a zero tensor", argument) for argument in PROJECTED],  # torch projects it
}
MAKERS = {"torch": tensor, "numpy": np.copy, "jax": jax_array}
CASES = [
    pytest.param(name, argument, library, id=f"{name}-{argument}-{library}")
    for name, kind in KINDS.items()
    for argument, (arrays, _, _, in_torch) in ARGUMENTS.items()
    for library in {"torch": ["torch", "numpy"], "numpy": ["numpy", "torch"], "jax": ["jax"]}[kind.library]
    if (library == "torch" or not in_torch)
    and not (kind.floats and {"mask", "padding"} & set(arrays))
    and not (kind.axes == 2 and {"sinks", "padding"} & set(arrays))
    and not (kind.run and library != "torch")
    and (name, argument) not in OWN_MEANING
]


def is_wrapper(array):
    """True if the array is a tensor that wraps others: arrays of NumPy cannot share its memory."""
    return isinstance(array, Wrapper | TwoTensor | AsyncCollectiveTensor)


@pytest.fixture(scope="module", autouse=True)
def _process_group():
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    destroy_process_group()


@lru_cache(1024)
def warm_up(argument, library, axes):
    """Call the function with plain arrays so often that the next call is a repeated one. JAX compiles for seconds."""
    arrays, call, _, _ = ARGUMENTS[argument]
    for repetition in range(REPETITIONS if library != "jax" else 0):
        plain = SimpleNamespace(**{key: MAKERS[library](x) for key, x in vars(draw(repetition, axes)).items()})
        call(plain, *[vars(plain)[array] for array in arrays])


def outcome(name, argument, library, repetition):
    """Return ("right", None), or ("refused", the message)."""
    kind, (arrays, call, _, _) = KINDS[name], ARGUMENTS[argument]
    drawn = draw(repetition, kind.axes)
    plain = SimpleNamespace(**{key: MAKERS[library](x) for key, x in vars(drawn).items()})
    given = [vars(drawn)[array] for array in arrays]
    try:
        if kind.run is not None:
            output = kind.run(lambda *x: call(plain, *x), *given)
        else:
            output = call(plain, *map(kind.make, given))
    except SightlineError as error:
        return "refused", str(error)
    found = to_plain(output)
    oracle, orders, terms = definition(argument, repetition, kind.axes)
    assert_within_budget(found.reshape(oracle.shape), oracle, orders, "output", terms)
    return "right", None


@pytest.mark.sampled(one_in=19)
@pytest.mark.filterwarnings("ignore")  # of torch, about kinds that are prototypes
@pytest.mark.parametrize(("name", "argument", "library"), CASES)
def test_right_or_refused_by_name(name, argument, library):
    kind, (arrays, _, _, in_torch) = KINDS[name], ARGUMENTS[argument]
    warm_up(argument, library, kind.axes)
    found = [outcome(name, argument, library, repetition) for repetition in range(REPETITIONS)]
    assert len({result for result, _ in found}) == 1, found
    result, message = found[0]
    takes_other_libraries = not in_torch and not {"q", "k", "v"} & set(arrays)
    made = kind.make(draw(0, 2).bias)
    if kind.word:
        assert result == "refused"
    elif library == kind.library or (takes_other_libraries and not is_wrapper(made)):
        assert result == "right", message
    if result == "refused":
        names = kind.word or kind.library, f": {kind.library}", f"is a {type(made).__name__}"
        assert any(text in message for text in names), message
        assert "cure:" in message


LISTS = {"a list": "query=numpy.asarray(query)", "a KVCache": "attention(query, cache)"}  # the cures of these two


@pytest.mark.parametrize("query", [None, "query", sightline.causal(), sightline.KVCache(), [[1.0]]], ids=str)
def test_what_is_no_array_has_its_own_cure(query):
    name = "None" if query is None else f"a {type(query).__name__}"
    x = np.ones((1, 1, 2, 4), np.float32)
    for function in (sightline.attention, sightline.explain, sightline.attention_vjp):
        with pytest.raises(SightlineError, match=f"query is {name}\n") as error:
            function(query, x, x)
        assert error.value.cure.startswith(LISTS.get(name, "pass an array as query"))
