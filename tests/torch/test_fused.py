"""Tests of the rules that prefer torch's fused kernels for problems without formulas on a GPU."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import sightline
from sightline import i, j
from sightline.call.explanation import Explanation
from sightline.call.kernel import choose
from sightline.call.problem import make_problem
from sightline.torch import dispatch as torch_dispatch
from sightline.torch.fused import RULES, Fused
from stub_kernel import Choosy


class OnCpu(Fused):
    """`Fused` for arrays on the CPU, for which torch has fused kernels too."""

    device = "cpu"


def half(grad=False):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 4, 40, 8, generator=generator).half().requires_grad_(grad) for _ in range(3)]


TRITON, STREAMING = Choosy("triton", 1.0), Choosy("streaming", 10.0)


@pytest.mark.parametrize(
    ("architecture", "preferred"),
    [("sm_80", True), ("sm_90", True), ("sm_120", True), ("gfx942", False), ("xe", False)],
)
def test_a_rule_decides(architecture, preferred):
    fused, problem = OnCpu(architecture), make_problem(*half())
    plan = choose((fused, TRITON, STREAMING), problem)
    assert (plan.kernel is fused) == preferred
    assert choose((fused, STREAMING), problem).kernel is fused, "torch's kernels are always preferred to streaming"
    page = str(Explanation.of(problem, plan))
    assert f"fused: {fused.cost_reason(problem)}" in page


def test_strided_rows_are_refused():
    """torch's fused kernels refuse rows with a stride, and torch's other implementation stores all weights."""
    query, key, value = half()
    fused = OnCpu("sm_90")
    assert choose((fused, TRITON), make_problem(query, key.mT.contiguous().mT, value)).kernel is TRITON
    transposed = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert choose((fused, TRITON), make_problem(transposed, key, value)).kernel is fused


def test_every_rule_has_a_reason_and_no_two_rules_overlap():
    assert all(RULES.values())
    assert not [(x, y) for x in RULES for y in RULES if x != y and x.startswith(y)]


def test_gradients_use_deterministic_kernels():
    fused, problem = OnCpu("sm_90"), make_problem(*half(grad=True))
    assert choose((fused, TRITON), problem).kernel is TRITON
    assert "from run to run" in fused.cost_reason(problem)
    with torch.no_grad():
        assert choose((fused, TRITON), problem).kernel is fused
    torch.use_deterministic_algorithms(True)
    try:
        assert choose((fused, TRITON), problem).kernel is fused, (
            "in this mode torch's gradients are the same on every run"
        )
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("grad", [False, True])
def test_torch_compile_follows_the_choice(monkeypatch, grad):
    """The compiled call is one graph for either kernel, with the same output and gradients as the eager call."""
    monkeypatch.setattr(torch_dispatch, "FUSED", OnCpu("sm_90"))
    given = half(grad)

    def step(query, key, value):
        return sightline.attention(query, key, value)

    fused_runs, run = [], OnCpu.run
    monkeypatch.setattr(OnCpu, "run", lambda *arguments: (fused_runs.append(1), run(*arguments))[1])
    eager = step(*given)
    assert bool(fused_runs) != grad
    compiled = torch.compile(step, fullgraph=True, backend="eager")(*given)
    assert torch.equal(compiled, eager)
    if grad:
        gradients = [torch.autograd.grad(output.sum(), given) for output in (eager, compiled)]
        assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def test_torchs_causal_mask_lets_hidden_nan_through():
    """The reason why `Fused` refuses causal masks: a hidden NaN in the values reaches earlier queries."""
    query, key, value = (x.float() for x in half())
    value[..., -1, :] = math.nan
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch_output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    output = sightline.attention(query, key, value, mask=i >= j)
    assert torch_output[..., :-1, :].isnan().any()
    assert not output[..., :-1, :].isnan().any()


@pytest.mark.parametrize("low", [-math.inf, -1e4])
def test_torchs_kernels_return_nan_for_a_nan_value_with_weight_0(low):
    """docs/gpu.md states this difference to the other kernels, for a key with −∞ and for a key with a low score."""
    query, key, value = (x.float() for x in half())
    query[..., 0] = abs(query[..., 0]) + 1
    key[..., 5, 0], value[..., 5, :] = low, math.nan
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch_output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert torch_output.isnan().any()
    assert not sightline.attention(query, key, value).isnan().any()


def test_a_repeated_call_goes_straight_to_torch(monkeypatch, fresh_calls):
    planned, make_problem = [], torch_dispatch.parse
    monkeypatch.setattr(torch_dispatch, "FUSED", OnCpu("sm_90"))
    monkeypatch.setattr(torch_dispatch, "_prefers_fused", lambda problem: True)
    monkeypatch.setattr(torch_dispatch, "parse", lambda *x, **options: planned.append(x) or make_problem(*x, **options))
    for scale in (0.3, 0.5):
        expected = torch.nn.functional.scaled_dot_product_attention(*half(), scale=scale)
        for _ in range(3):
            assert torch.equal(sightline.attention(*half(), scale=scale), expected)
    assert len(planned) == 2
    for _ in range(2):
        output = sightline.attention(*half(grad=True))
        assert output.requires_grad
    assert len(planned) == 4, "whether gradients are deterministic may change"
    grouped = half()[0], *[x[:, :2] for x in half()[1:]]
    for _ in range(2):
        found = sightline.attention(*grouped)
    assert torch.equal(found, torch.nn.functional.scaled_dot_product_attention(*grouped, enable_gqa=True))
    assert len(planned) == 5
