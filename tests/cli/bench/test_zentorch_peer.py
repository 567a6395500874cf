"""The peer zentorch, which is not installed here: its calls fit the operator's schema, and its results are checked."""

import sys
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from sightline.cli.bench.benchmarks import BENCHMARKS, CAUSAL, window
from sightline.cli.bench.check import share_of_budget
from sightline.cli.bench.peers import PEERS
from sightline.cli.bench.workloads import Inputs, Workload

SCHEMA = (  # as in zentorch's source
    "zentorch_sdpa(Tensor query, Tensor key, Tensor value , float dropout_p=0.0, bool is_causal=False, *, "
    "Tensor? attn_mask=None, float? scale=None, str zentorch_op_name = 'zentorch::zentorch_sdpa')-> (Tensor, Tensor)"
)
PEER = PEERS["zentorch"]


@pytest.fixture
def operator(monkeypatch):
    """A stand-in for the operator, with its schema and its demands on masks, computed by torch."""
    if "zentorch" in sys.modules or PEER.skip_reason() is None:
        pytest.skip("zentorch is installed")

    def compute(query, key, value, dropout_p, is_causal, attn_mask, scale, zentorch_op_name):
        assert attn_mask is None or attn_mask.dtype in (torch.float32, query.dtype)
        assert attn_mask is None or attn_mask.ndim in (2, 4)
        mask = None if attn_mask is None else attn_mask.to(query.dtype)
        grouped = query.shape[1] != key.shape[1]
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
        )
        return output, torch.empty(query.shape[:3])

    library = torch.library.Library("zentorch", "DEF")
    library.define(SCHEMA)
    library.impl(
        "zentorch_sdpa",
        lambda query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None, zentorch_op_name="": (
            compute(query, key, value, dropout_p, is_causal, attn_mask, scale, zentorch_op_name)
        ),
        "CPU",
    )
    monkeypatch.setitem(sys.modules, "zentorch", ModuleType("zentorch"))
    yield
    library._destroy()


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize(
    "options",
    [{}, {"mask": CAUSAL}, {"mask": window(8)}, {"bias": True}, {"H": 4, "G": 2}, {"dtype": "bfloat16"}],
    ids=["plain", "causal", "window", "bias", "grouped", "bfloat16"],
)
def test_calls_fit_the_schema_and_results_are_right(options):
    workload = Workload(name="x", **({"H": 2, "n": 40, "d_k": 16} | options))
    assert PEER.refuses(workload) is None
    inputs = Inputs.of(workload)
    prepared = PEER.prepare(workload, inputs, 2)
    assert share_of_budget(workload, inputs, prepared.results(prepared.call(prepared.setup()))) <= 1


def test_what_it_cannot_compute_is_refused():
    for options in (
        {"passes": "backward"},
        {"dropout": 0.1},
        {"dtype": "float16"},
        {"d_v": 8},
        {"mask": CAUSAL, "m": 50},
    ):
        assert PEER.refuses(Workload(name="x", **({"n": 40, "d_k": 16} | options)))


def test_it_is_compared_on_forward_passes():
    compared = {b.name for b in BENCHMARKS if isinstance(b, Workload) and "zentorch" in b.baselines}
    assert {"forward float32 d64", "forward bfloat16 d128", "decode float32"} <= compared
    assert np.all([b.passes == "forward" for b in BENCHMARKS if b.name in compared])
