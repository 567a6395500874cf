"""When plain problems on a GPU are left to torch's fused kernels: by rules, each of which says what it rests on."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import sightline
from sightline import i, j
from sightline.explanation import Explanation
from sightline.kernel import choose
from sightline.problem import make_problem
from sightline.torch import dispatch as torch_dispatch
from sightline.torch.fused import RULES, Fused
from stub_kernel import Choosy


class OnCpu(Fused):
    """Fused where the arrays are on this processor, on which torch has such kernels too."""

    def refuses(self, problem):
        yield from (refusal for refusal in super().refuses(problem) if refusal.reason != "the arrays are on cpu")


def half(grad=False):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 4, 40, 8, generator=generator).half().requires_grad_(grad) for _ in range(3)]


OURS, TILES = Choosy("triton", 1.0), Choosy("streaming", 10.0)


@pytest.mark.parametrize(
    ("architecture", "taken"), [("sm_80", True), ("sm_90", True), ("sm_120", True), ("gfx942", False), ("xe", False)]
)
def test_a_rule_decides(architecture, taken):
    fused, problem = OnCpu(architecture), make_problem(*half())
    plan = choose((fused, OURS, TILES), problem)
    assert (plan.kernel is fused) == taken
    assert choose((fused, TILES), problem).kernel is fused, "rather than tiles in plain array operations"
    page = str(Explanation.of(problem, plan))
    assert f"fused: {fused.cost_reason(problem)}" in page


def test_rows_that_do_not_lie_together_are_not_torchs():
    """Its fused kernels refuse them, and what it would take instead holds all weights."""
    query, key, value = half()
    fused = OnCpu("sm_90")
    assert choose((fused, OURS), make_problem(query, key.mT.contiguous().mT, value)).kernel is OURS
    assert (
        choose((fused, OURS), make_problem(query.transpose(1, 2).contiguous().transpose(1, 2), key, value)).kernel
        is fused
    )


def test_every_rule_says_why_and_none_is_in_anothers_way():
    assert all(rule.reason for rule in RULES)
    names = [rule.architecture for rule in RULES]
    assert not [(x, y) for x in names for y in names if x != y and x.startswith(y)]


def test_gradients_stay_with_kernels_that_repeat_themselves():
    fused, problem = OnCpu("sm_90"), make_problem(*half(grad=True))
    assert choose((fused, OURS), problem).kernel is OURS
    assert "from run to run" in fused.cost_reason(problem)
    with torch.no_grad():
        assert choose((fused, OURS), problem).kernel is fused
    torch.use_deterministic_algorithms(True)
    try:
        assert choose((fused, OURS), problem).kernel is fused, "torch's are the same on every run then"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("grad", [False, True])
def test_torch_compile_follows_the_choice(monkeypatch, grad):
    """Whichever kernel is taken, in one graph; gradients are the same as outside."""
    monkeypatch.setattr(torch_dispatch, "FUSED", OnCpu("sm_90"))
    given = half(grad)

    def step(query, key, value):
        return sightline.attention(query, key, value)

    taken, counted = [], OnCpu.run
    monkeypatch.setattr(OnCpu, "run", lambda *asked: (taken.append(1), counted(*asked))[1])
    outside = step(*given)
    assert bool(taken) != grad
    compiled = torch.compile(step, fullgraph=True, backend="eager")(*given)
    assert torch.equal(compiled, outside)
    if grad:
        wanted = [torch.autograd.grad(output.sum(), given) for output in (outside, compiled)]
        assert all(torch.equal(x, y) for x, y in zip(*wanted, strict=True))


def test_torchs_causal_mask_lets_hidden_values_through():
    """Why it is not given the causal mask: a value that no query before it may see reaches them."""
    query, key, value = (x.float() for x in half())
    value[..., -1, :] = math.nan
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    ours = sightline.attention(query, key, value, mask=i >= j)
    assert theirs[..., :-1, :].isnan().any()
    assert not ours[..., :-1, :].isnan().any()


@pytest.mark.parametrize("low", [-math.inf, -1e4])
def test_torchs_weights_of_0_take_values_that_are_not_finite(low):
    """What the page of GPUs says that its kernels have otherwise: by an infinite key, and by one of a low score."""
    query, key, value = (x.float() for x in half())
    query[..., 0] = abs(query[..., 0]) + 1
    key[..., 5, 0], value[..., 5, :] = low, math.nan
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert theirs.isnan().any()
    assert not sightline.attention(query, key, value).isnan().any()
