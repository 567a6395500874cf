"""Cached calls respect every state of torch: compilation, autocast, transforms, modes, subclasses and devices."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import sightline
from cached_calls import key_of, uncached
from sample_calls import bits, tensors
from sightline import i, j
from sightline.call import call_cache


def test_the_first_call_of_a_process_is_cached():
    """The first tensor loads what reads tensors."""
    call = "x = torch.ones(1, 1, 4, 8); sightline.attention(x, x, x); assert len(call_cache.calls) == 1"
    program = f"import sightline, torch; from sightline.call import call_cache; {call}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_compiled_functions(rng):
    q, k, v = tensors(rng)
    expected = sightline.attention(q, k, v, mask=i >= j)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q, k, v):
        return sightline.attention(q, k, v, mask=i >= j)

    for _ in range(2):
        assert bits(compiled(q, k, v)) == bits(expected)


def test_autocast_is_respected(rng):
    q, k, v = tensors(rng)
    sightline.attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert sightline.attention(q, k, v).dtype == torch.bfloat16


@pytest.mark.parametrize("needs_gradients", [False, True])
def test_repeated_calls_under_autocast_need_no_dispatch(rng, needs_gradients, monkeypatch):
    given = [x.requires_grad_(needs_gradients) for x in tensors(rng)]

    def call():
        with torch.autocast("cpu", torch.bfloat16):
            output, seen = sightline.attention(*given, mask=i >= j, see=[sightline.entropy()])
        gradients = torch.autograd.grad(output.float().sum(), given) if needs_gradients else ()
        return [bits(x.detach()) for x in (output, *seen, *gradients)]

    expected = call()
    monkeypatch.setattr("sightline.torch.dispatch.parse", None)  # only the full dispatch needs it
    for _ in range(3):
        assert call() == expected


def test_negated_views(rng):
    q, k, v = tensors(rng)
    minus = torch.view_as_complex(torch.stack([k, k], -1)).conj().imag
    assert minus.is_neg()
    whole = minus.resolve_neg().contiguous()
    expected = uncached((q, whole, v))
    plain = torch.view_as_complex(torch.stack([k, k], -1)).imag
    sightline.attention(q, plain, v)
    assert bits(sightline.attention(q, minus, v)) == bits(expected)


@pytest.mark.filterwarnings(r"ignore:.torch\.jit:DeprecationWarning")  # raised by torch's jvp
def test_transforms_and_modes(rng):
    q, k, v = tensors(rng)
    expected = sightline.attention(q, k, v)
    keys = []

    def note(q):
        keys.append(key_of(q, k, v))
        return q.sum()

    note(q)
    torch.func.grad(note)(q)
    torch.func.vmap(note)(q[None])
    torch.func.jvp(note, (q,), (q,))
    with forward_ad.dual_level():
        note(forward_ad.make_dual(q, k))
    torch.jit.trace(note, q)
    assert [key is None for key in keys[:5]] == [False, True, True, True, True]
    assert keys[5] is None

    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert type(sightline.attention(*fake)) is type(fake[0])

    class Counting(TorchDispatchMode):
        names = []  # noqa: RUF012

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    with Counting():
        assert bits(sightline.attention(q, k, v)) == bits(expected)
    assert any("sightline" in name for name in Counting.names)


def test_tensor_subclasses_are_not_cached(rng):
    class Mine(torch.Tensor):
        pass

    q, k, v = tensors(rng)
    sightline.attention(q, k, v)
    before = len(call_cache.calls)
    for place in range(3):
        given = [x.as_subclass(Mine) if at == place else x for at, x in enumerate((q, k, v))]
        assert key_of(*given) is None
    assert len(call_cache.calls) == before


def test_other_devices(rng):
    q, k, v = tensors(rng)
    sightline.attention(q, k, v)
    assert sightline.attention(*(x.to("meta") for x in (q, k, v))).device.type == "meta"
