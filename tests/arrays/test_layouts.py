"""Arrays read by generated code and by the Python functions that define their layouts: equal keys and addresses."""

import ctypes
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

import sightline
from sightline.arrays import layouts as array_layouts
from sightline.arrays.layouts import MAX_ARRAYS, MAX_AXES, unpack
from sightline.call import call_cache
from sightline.call.call_cache import LOOKUP
from sightline.cpu.calls import python_functions
from sightline.cpu.calls.direct_call import ARRAY_OFFSETS, DTYPE_OFFSETS
from sightline.cpu.calls.python_functions import READ_TENSOR_INDEX, make_find_or_run
from strategies import to_torch

DTYPES = ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"]


@pytest.fixture(scope="module")
def read():
    """The generated code that reads arrays; a call of a tensor has told the readers of torch."""
    sightline.attention(*[torch.ones(1, 1)] * 3)
    return make_reader(LOOKUP.tensors)


def make_reader(tensors):
    """Return a function of arrays that returns (layouts, *addresses), or None where `find_or_run` returns None."""
    find = make_find_or_run(tensors)
    return lambda *arrays: None if (found := find({}, (), (), *arrays)) is None else found[2:]


@st.composite
def views(draw):
    """An array of NumPy or torch with any strides."""
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=MAX_AXES))
    array = np.zeros([2 * length for length in shape], draw(st.sampled_from([*DTYPES, "bfloat16"])))
    if draw(st.booleans()):
        array = to_torch(array)
        array = array.permute(draw(st.permutations(range(array.ndim))))
    else:
        array = array.transpose(draw(st.permutations(range(array.ndim))))
    return array[tuple(slice(None, None, draw(st.sampled_from([1, 2]))) for _ in shape)]


@settings(max_examples=100)
@given(st.lists(views(), max_size=5))
def test_equal_layouts_and_addresses(read, arrays):
    found = read(*arrays)
    assert found == LOOKUP.read_arrays(*arrays)
    if found is None:
        assert any(isinstance(array, torch.Tensor) and array.numel() == 0 for array in arrays)
        return
    for array, layout, address in zip(arrays, unpack(found[0]), found[1:], strict=True):
        is_tensor = isinstance(array, torch.Tensor)
        unit = array.element_size() if is_tensor else 1
        assert layout.shape == tuple(array.shape)
        assert layout.strides == tuple(unit * stride for stride in (array.stride() if is_tensor else array.strides))
        assert layout.itemsize == array.dtype.itemsize
        assert address == (array.data_ptr() if is_tensor else array.ctypes.data)


def test_dtypes_have_different_layouts(read):
    kinds = [np.zeros(2, dtype) for dtype in [*DTYPES, ml_dtypes.bfloat16, ">f4", ">f8", "complex64"]]
    kinds += [torch.zeros(2, dtype=getattr(torch, dtype)) for dtype in [*DTYPES, "bfloat16"]]
    found = [read(array)[0] for array in kinds]
    assert len(set(found)) == len(kinds)
    assert found == [LOOKUP.read_arrays(array)[0] for array in kinds]


X = torch.ones(2, 3)


def without_memory():
    x = torch.ones(2, 3)
    x.untyped_storage().resize_(0)
    return x


class Quantized(Parameter):
    pass


UNREADABLE = {
    "a list": lambda: ([1.0],),
    "a subclass of ndarray": lambda: (np.zeros(2).view(np.matrix),),
    "a subclass of Parameter": lambda: (Quantized(X),),
    "without memory": lambda: (without_memory(),),
    "empty": lambda: (torch.zeros(0, 3),),
    "sparse": lambda: (X.to_sparse(),),
    "meta": lambda: (X.to("meta"),),
    "negative": lambda: (torch.imag(torch.conj(torch.ones(2, dtype=torch.complex64))),),
    "nine axes": lambda: (np.zeros((1,) * 9),),
    "too many arrays": lambda: (X,) * (MAX_ARRAYS + 1),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_arrays_that_only_the_full_dispatch_can_read(read, name):
    arrays = UNREADABLE[name]()
    assert read(*arrays) is None
    assert LOOKUP.read_arrays(*arrays) is None


CPU, CUDA, METAL, ROCM = 1, 2, 8, 10  # DLDeviceType


@pytest.mark.parametrize(
    ("device", "gpu"),
    [((CPU, 0), 0), ((CUDA, 0), 1), ((CUDA, 62), 63), ((ROCM, 3), 4), ((CUDA, 63), None), ((METAL, 0), None)],
)
def test_the_layout_names_the_gpu(device, gpu):
    found = make_reader(LOOKUP.tensors._replace(exchange=exchange_on(*device)))(X)
    if gpu is None:
        assert found is None
        return
    (layout,), (on_cpu,) = unpack(found[0]), unpack(LOOKUP.read_arrays(X)[0])
    assert layout == on_cpu._replace(kind=on_cpu.kind | gpu << 2)
    assert found[1] == X.data_ptr()


def exchange_on(device_type, index):
    """Return torch's exchange functions of DLPack, which describe every tensor as one on this device."""
    name, words = b"dlpack_exchange_api", (ctypes.c_uint64 * 6)()
    get, new = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    ctypes.memmove(words, get(LOOKUP.tensors.exchange, name), ctypes.sizeof(words))
    kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))
    original = kind(words[READ_TENSOR_INDEX])

    def describe(array, tensor):
        status = original(array, tensor)
        tensor[2], tensor[3] = device_type, index  # the address of the data comes first
        return status

    changed = kind(describe)
    words[READ_TENSOR_INDEX] = ctypes.cast(changed, ctypes.c_void_p).value
    KEPT.append((words, changed, original))
    return new(ctypes.addressof(words), name, None)


KEPT = []  # what the generated functions read


def test_gradients(read):
    x = X.clone().requires_grad_()
    assert [layout.kind & array_layouts.GRADIENT_BIT > 0 for layout in unpack(read(X, x, X, x)[0])] == [0, 1, 0, 1]
    assert read(X, x, X) == LOOKUP.read_arrays(X, x, X)
    assert read(Parameter(x))[0] == LOOKUP.read_arrays(Parameter(x))[0] == read(x)[0]
    with torch.no_grad():
        assert read(x)[0] == LOOKUP.read_arrays(x)[0] == read(X)[0]


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("state", [forward_ad.dual_level, Mode, lambda: torch.autocast("cpu")])
def test_states_in_which_torch_must_see_the_call(read, state):
    with state():
        assert read(X) is None
        assert LOOKUP.read_arrays(X) is None
        assert read(X.numpy()) == LOOKUP.read_arrays(X.numpy())
    assert torch.vmap(lambda x: x * (read(x) is None) * (LOOKUP.read_arrays(x) is None))(X).equal(X)


def results(q, k, v):
    """Return results for which this library makes tensors of its own: a seed, arrays in another order, indices."""
    leaf, cache = q.clone().requires_grad_(), sightline.KVCache(dtype="int8")
    cache.append(k, v)
    (first,) = torch.autograd.grad(sightline.attention(leaf, k, v).square().sum(), leaf, create_graph=True)
    return [
        sightline.attention(q, k, v, dropout=0.2, seed=3),
        sightline.attention(*(x.swapaxes(1, 2).contiguous().swapaxes(1, 2) for x in (q, k, v))),
        *torch.autograd.grad(first.square().sum(), leaf),
        sightline.attention(q, cache),
        sightline.attention(q, cache, score=np.exp2(sightline.s), kernel="streaming"),
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_default_device_is_no_such_state(read, device):
    """On meta, a tensor that is made without a device has no entries."""
    x = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(1))
    expected = results(*x)
    call_cache.clear()
    with torch.device(device):
        assert read(X) == LOOKUP.read_arrays(X)
        assert read(X) is not None
        for _ in range(3):
            assert all(map(torch.equal, results(*x), expected))


def test_calls_use_the_generated_function(rng, monkeypatch):
    monkeypatch.setattr(LOOKUP, "find_or_run", LOOKUP.find_in_python)
    monkeypatch.setattr(LOOKUP, "is_generated", False)
    x = rng.normal(size=(4, 8))
    for _ in range(2):
        sightline.attention(x, x, x)
    assert type(LOOKUP.find_or_run).__name__ == "builtin_function_or_method"


def test_a_torch_without_exchange_functions_is_read_in_python(read):
    assert make_find_or_run(LOOKUP.tensors._replace(exchange=None)) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sightline.cpu.calls.python_functions.PYTHON_API", {"PyLong_FromLongLong", "PyNothing_New"}),
        ("sysconfig.get_config_var", lambda name: 1),
    ],
    ids=["a function is missing", "without a global lock"],
)
def test_a_python_that_generated_functions_cannot_use_is_not_served(name, value, monkeypatch):
    monkeypatch.setattr(name, value)
    python_functions.is_supported.cache_clear()
    try:
        assert make_find_or_run(LOOKUP.tensors) is None
        assert python_functions.launcher.__wrapped__() is None
    finally:
        python_functions.is_supported.cache_clear()


def test_references_are_balanced(read):
    """Objects that the function receives and returns have the references that they had."""
    arrays = np.ones(3), torch.ones(3), torch.ones(3, requires_grad=True)
    objects = [*arrays, None, True, torch.is_grad_enabled, *LOOKUP.tensors.conditions]
    before = [sys.getrefcount(x) for x in objects]
    for _ in range(1000):
        read(*arrays)
        read(*arrays, arrays[2])
    assert all(abs(sys.getrefcount(x) - count) < 100 for x, count in zip(objects, before, strict=True))


def test_errors_of_conditions_are_raised(read):
    """A signal handler may run in a condition, and raise KeyboardInterrupt."""

    def interrupt():
        raise KeyboardInterrupt

    tensors = LOOKUP.tensors._replace(conditions=(interrupt,))
    with pytest.raises(KeyboardInterrupt):
        make_reader(tensors)(X)
    assert read(X) == LOOKUP.read_arrays(X)


@pytest.mark.parametrize("name", [*ARRAY_OFFSETS, *DTYPE_OFFSETS])
def test_arrays_of_another_numpy_are_read_in_python(name, monkeypatch):
    """If a field of NumPy's structs is at another place, no generated function reads it."""
    offsets = ARRAY_OFFSETS if name in ARRAY_OFFSETS else DTYPE_OFFSETS
    monkeypatch.setitem(offsets, name, offsets[name] + {"order": 1, "axes": 4, "number": 4}.get(name, 8))
    assert make_find_or_run(LOOKUP.tensors) is None
