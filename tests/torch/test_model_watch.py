"""Tests of `sightline.watch` for torch's layers and ours, and of the recording `Seen`."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import sightline
from fault_planting import Fault, assert_found
from sightline import i, j, watch
from sightline.errors import ParameterError
from sightline.reference.testing import assert_within_budget
from sightline.statistics import recording
from sightline.statistics.recording import Call, Seen
from sightline.torch import MultiHeadAttention, ScaledDotProductAttention, SelfAttention, layer_calls
from sightline.torch.watching.attention_finder import FINDER
from watched_modules import Calling, make_encoder, record

LSE = sightline.lse()
TOKENS = [[f"{entry}.{position}" for position in range(6)] for entry in range(3)]


def attend_to_self(x):
    return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.fixture
def x():
    return torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def transformer():
    torch.manual_seed(0)
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch uses nested tensors for padding
def test_torch_layers_compute_the_same_while_watched(transformer, x):
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.bool)
    hidden = torch.arange(6) >= torch.tensor([6, 5, 4])[:, None]
    masks = {"tgt_mask": causal, "src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    floats = torch.zeros(3, 6).masked_fill(hidden, -torch.inf)

    def run(x):  # a fast path of torch, which a watch switches off, writes zeros at padding of the encoder's output
        return transformer(x, x.flip(0), **masks), *(transformer.encoder(x, None, mask) for mask in (hidden, floats))

    with torch.no_grad():
        plain = run(x)
        with watch(transformer, [sightline.weights()]) as seen:
            watched = run(x)
        transformer.double()
        for arrays in zip(watched, run(x.double()), plain, strict=True):
            assert_within_budget(*arrays)
    seen = seen[:3]
    assert [(call.layer, call.kind) for call in seen] == [
        ("encoder.layers.0.self_attn", "self"),
        ("decoder.layers.0.self_attn", "self"),
        ("decoder.layers.0.multihead_attn", "cross"),
    ]
    encoder, decoder, cross = (call["weights"] for call in seen)
    assert not (encoder * hidden[:, None, None]).any()
    assert not (cross * hidden[:, None, None]).any()
    assert not decoder.triu(1).any()


def test_modules_are_restored(transformer, x):
    layer = transformer.encoder.layers[0]

    def state():
        kinds = [type(module) for module in transformer.modules()]
        return kinds, [len(module._forward_pre_hooks) for module in transformer.modules()], FINDER.watchers

    before = state()
    with torch.no_grad(), watch(layer, [LSE]) as outer:
        layer(x)
        with watch(layer, [sightline.weights()]) as inner:
            layer(x)
        layer(x)
    assert (len(outer), len(inner)) == (3, 1)
    assert [call.step for call in outer] == [0, 1, 2]
    assert state() == before
    with pytest.raises(RuntimeError, match="inside watch"), watch(transformer, [LSE]):
        raise RuntimeError("inside watch")
    assert state() == before


def test_watch_contexts_exit_in_any_order(transformer, x):
    layer = transformer.encoder.layers[0]
    before = type(layer.self_attn), transformer.encoder.use_nested_tensor
    first, second = watch(transformer.encoder, [LSE]), watch(transformer.encoder, [LSE])
    seen = first.__enter__(), second.__enter__()
    with torch.no_grad():
        transformer.encoder(x)
        first.__exit__(None, None, None)
        transformer.encoder(x)
    assert [len(recording) for recording in seen] == [1, 2]
    second.__exit__(None, None, None)
    assert (type(layer.self_attn), transformer.encoder.use_nested_tensor) == before
    assert not layer_calls._ORIGINALS


@pytest.mark.parametrize(
    ("layer", "arguments", "shape"),
    [
        (SelfAttention(8, 4, 4, heads=2), 1, (3, 2, 6)),
        (MultiHeadAttention(8, 2, batch_first=True), 3, (3, 2, 6)),
        (ScaledDotProductAttention(), 3, (3, 1, 6)),
    ],
)
def test_our_layers_are_watched(layer, arguments, shape, x):
    with watch(layer, [LSE, sightline.weights()]) as seen:
        watched = layer(*[x] * arguments)
    unwatched = layer(*[x] * arguments)
    first, second = (result[0] if isinstance(result, tuple) else result for result in (watched, unwatched))
    assert torch.equal(first, second)
    (call,) = seen
    assert (call.layer, call.kind, call.query_start) == (type(layer).__name__, "self", 0)
    assert call["lse"].shape == shape
    assert call["weights"].shape == (*shape, 6)


LAYER = nn.MultiheadAttention(8, 2)
NO_STATISTICS = "list or dict of statistics\n.*see="


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": None}, "cure"),
        ({"model": "bert-base-uncased"}, "a model that is a str"),
        *[({"see": see}, NO_STATISTICS) for see in ([], {}, [LSE, 1])],
        ({"see": "entropy"}, r"list or dict of statistics\n.*sightline\.entropy\("),
        *[({"layers": layers}, "cure") for layers in (1.5, [None], [False], [])],
        ({"heads": 5}, "heads=5(?s:.)*cure"),
        ({"tokens": 5}, "cure"),
        ({"tokenizer": object()}, r"cure: +tokens="),
    ],
)
def test_invalid_arguments_have_a_cure(changed, message):
    with pytest.raises(ParameterError, match=message), watch(**({"model": LAYER, "see": [LSE]} | changed)):
        pass


@pytest.mark.parametrize("use", [lambda one: one["lse"], lambda one: one.calls, list])
def test_a_watch_without_a_with_block_has_a_cure(use):
    with pytest.raises(ParameterError, match=r"cure: +with watch"):
        use(watch(LAYER))


def test_statistics_have_the_names_of_a_dict(x):
    layer = SelfAttention(8, 4, 4)
    with watch(layer, LSE) as one, watch(layer, {"near": sightline.mass(abs(i - j) <= 1), "lse": LSE}) as two:
        layer(x)
    assert torch.equal(one["lse"][0], two["lse"][0])
    assert two["near"][0].shape == two["mass"][0].shape == (3, 1, 6)


# -- the recording -------------------------------------------------------------------------------------------------


def call(layer="decoder.0", step=0, kind="self", n=2, m=4, query_start=2, results=None):
    results = (torch.arange(12.0).reshape(1, 2, 6),) if results is None else results
    return Call(layer, kind, step, query_start, 0, n, m, (0, 1), (LSE,), results)


@pytest.fixture
def seen():
    return Seen([call(), call("decoder.1"), call(step=1), call("decoder.1", step=1, kind="cross")])


def test_calls_are_selected(seen):
    assert [c.step for c in seen.of("decoder.0")] == [0, 1]
    assert seen.of(np.int64(-1)).layers == ("decoder.1",)
    assert seen.of("*.1", step=-1).calls == [seen[3]]
    assert seen.of(kind="cross").calls == [seen[3]]
    assert torch.equal(seen.of(0, step=0, heads=[1])["lse"][0], seen[0]["lse"][:, [1]])
    assert seen[1:3] == seen.calls[1:3]
    for options in ({"layer": "encoder.*"}, {"layer": 2}, {"heads": [2]}, {"kind": "across"}):
        with pytest.raises(ParameterError, match=next(iter(options))):
            seen.of(**options)
    for name, cure in (("entropy", r"see=\[sightline\.entropy"), ("lsee", r"seen\['lse\(\)'\]"), (7, r"seen\[0\]")):
        with pytest.raises(ParameterError, match=f"cure: .*{cure}"):
            seen[name]


def test_labels_follow_positions(seen):
    positions = list("0123")
    assert seen.labels(seen[0]) == seen.labels(seen[3]) == (positions[2:], positions)
    seen.tokens = ["a", "b", "c", "d"]
    assert seen.labels(seen[0]) == (["c", "d"], ["a", "b", "c", "d"])
    assert seen.labels(seen[3]) == (["c", "d"], positions)
    seen.tokens = {"encoder": [["w", "x", "y", "z"]], "decoder": [["a", "b", "c", "d"]]}
    assert seen.labels(seen[0]) == (["c", "d"], ["a", "b", "c", "d"])
    assert seen.labels(seen[3]) == (["c", "d"], ["w", "x", "y", "z"])
    assert seen.labels(seen[0], entry=1) == (positions[2:], positions)
    with pytest.raises(ParameterError, match="encoder"):
        seen.tokens = {"left": [["a"]]}
    assert seen.of(step=0).tokens == seen.tokens


def test_tokens_of_a_wrong_length_are_refused(seen):
    with pytest.raises(ParameterError, match="up to 3 labels, for calls with 1 batch entries of 4 positions"):
        seen.tokens = ["a", "b", "c"]
    with pytest.raises(ParameterError, match="2 lists of up to 4 labels, for calls with 1 batch entries"):
        seen.tokens = [list("abcd"), list("abcd")]
    with pytest.raises(ParameterError, match=r"up to 3 labels.*4 positions"):
        seen.tokens = {"encoder": ["a", "b", "c"]}
    seen.tokens = list("abcde")  # a generation returns its last token, which no layer gets
    without_cache = Seen([call(query_start=0, n=4)])
    with pytest.raises(ParameterError, match=r"up to 5 labels.*4 positions"):
        without_cache.tokens = list("abcde")
    padded = Seen([call(query_start=0, n=4, results=(torch.zeros(2, 2, 4),))])
    padded.tokens = [list("abcd"), list("ab")]
    assert padded.labels(padded[0], 1)[0] == ["a", "b", "", ""]
    module = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.zeros(1, 3, 4)
    with pytest.raises(ParameterError, match=r"up to 2 labels.*3 positions"):
        record(module, [LSE], x, x, x, tokens=["a", "b"])


def test_statistics_of_several_arrays_and_of_one_name():
    class Named(type(LSE)):
        def __init__(self, k):
            self.k = k

        def __repr__(self):
            return f"lse({self.k})"

    both = Call("a", "self", 0, 0, 0, 1, 1, (0, 1), (Named(1), Named(2)), (torch.zeros(1, 2), torch.ones(1, 2)))
    assert both["lse(2)"].all()
    with pytest.raises(ParameterError, match="one recorded statistic"):
        both["lse"]


def test_the_explorer_is_imported_on_demand(seen, monkeypatch, tmp_path):
    written = []
    stub = SimpleNamespace(
        from_seen=lambda s, **options: (s, options),
        explore=lambda data: data,
        save_html=lambda data, path: written.append((data, path)),
    )
    monkeypatch.setitem(sys.modules, "sightline.view.explorer", stub)
    seen.save_html(tmp_path / "page.html", limit=9)
    assert written == [((seen, {"limit": 9}), tmp_path / "page.html")]
    assert seen.explore() == seen.show() == (seen, {})


def test_the_recording_prints_as_a_table(seen):
    lines = repr(seen).splitlines()
    assert (lines[0], repr(Seen())) == ("Seen: 4 calls of 2 layers", "Seen: 0 calls of 0 layers")
    assert lines[1].split() == ["layer", "kind", "step", "queries", "keys", "heads", "results"]
    assert lines[2].split() == ["decoder.0–1", "self", "0", "2", "from", "2", "4", "2", "lse()", "1×2×6"]
    paths = [f"block.{k}.attn.{k % 2}" for k in (0, 2, 1)] + [f"layer.{k}" for k in (7, 0, 1, 2)]
    many = [Call(path, "self", 0, 0, 0, 1, 1, (0,), (), ()) for path in paths]
    shown = [line.split("  ")[0] for line in repr(Seen(many)).splitlines()[2:]]
    assert shown == ["block.0.attn.0", "block.2.attn.0", "block.1.attn.1", "layer.0–2, 7"]
    wide = repr(Seen([Call("a." * 60, "self", 0, 0, 0, 1, 1, (0,), (sightline.lse(),) * 30, (np.ones(1),) * 30)]))
    assert (wide.count("lse()"), max(map(len, wide.splitlines())) <= 98) == (30, True)
    lines = repr(Seen([Call("layer.0", "self", k, k, 0, 1, k + 1, (0,), (), ()) for k in range(100)])).splitlines()
    assert (len(lines), lines[0], lines[21]) == (42, "Seen: 100 calls of 1 layer", "… 61 more lines")
    assert (lines[20].split()[2], lines[22].split()[2]) == ("18", "80")


# -- nothing recorded --------------------------------------------------------------------------------------------------


def test_a_watch_that_recorded_nothing_raises():
    model = make_encoder().layers[0]
    with pytest.raises(ParameterError, match="EncoderLayer that recorded no call: none of its"), watch(model, LSE):
        pass
    with pytest.raises(ParameterError, match="its modules ran, and called none"), watch(model, LSE):
        model.linear1(torch.zeros(1, 3, 8))
    # most modules compute no attention, so the cure names none of them
    with pytest.raises(ParameterError, match=r"cure: +layers=\[0\]"), watch(model, LSE, layers="linear3"):
        pass
    with pytest.raises(ParameterError, match="layers='linear1', which selects none of 1 layers"):
        record(model, LSE, torch.zeros(1, 3, 8), layers="linear1")


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_a_watch_of_a_scripted_model_names_it(x):
    model = nn.Sequential(torch.jit.trace(Calling(attend_to_self), x))
    with pytest.raises(ParameterError, match=r"0 is compiled by torch\.jit"):
        record(model, [LSE], x)


def test_an_error_inside_an_empty_watch_is_kept():
    with pytest.raises(ZeroDivisionError), watch(make_encoder(), see=[LSE]):
        raise ZeroDivisionError


# -- sums and means over layers ----------------------------------------------------------------------------------------

FACTORS = [[0.5, -2.0], [1.0, 3.0]]


@pytest.fixture
def encoder():
    return make_encoder()


def test_sums_and_means_over_layers(encoder, x):
    weighted = sightline.weights().sum("heads", weights=FACTORS).sum("layers")
    see = [sightline.weights(), weighted, sightline.received().mean("layers"), LSE.rows([-1]).mean("layers")]
    with watch(encoder.double(), see) as seen:
        encoder(x.double())
    found = seen[repr(weighted)], seen["received"]
    weights = torch.stack(seen["weights"])
    factors = torch.tensor(FACTORS, dtype=torch.float64)
    expected = torch.einsum("lbhij,lh->bij", weights, factors), weights.mean(0).sum(-2)
    torch.testing.assert_close(found, expected)
    assert seen["lse"].shape == (3, 2, 1)
    assert len(seen) == 2
    assert [call.statistics for call in seen] == [(see[0],)] * 2
    ours, theirs = (
        torch.autograd.grad((one**2).sum(), list(encoder.parameters()), retain_graph=True, allow_unused=True)
        for one in (found[0], expected[0])
    )
    torch.testing.assert_close(ours, theirs)  # both may be None


def test_totals_in_half_precision_are_sums_in_float32(encoder, x):
    seen = record(encoder.bfloat16(), [sightline.weights(), sightline.weights().sum("layers")], x.bfloat16())
    assert seen['weights().sum("layers")'].dtype == torch.float32
    assert torch.equal(seen['weights().sum("layers")'], sum(one.float() for one in seen["weights()"]))


def test_totals_of_some_heads_without_results_of_calls(encoder, x, tmp_path):
    see = [sightline.weights().mean("heads", weights=[1, 3]).mean("layers")]
    seen = record(encoder, see, x, heads=[np.int64(1), 0], layers=[np.int64(0), 1], tokens=list("abcdef"))
    weights = torch.stack(record(encoder, [sightline.weights()], x)["weights"]).mean(0)
    torch.testing.assert_close(seen["weights"], 0.25 * weights[:, 1] + 0.75 * weights[:, 0])
    assert seen.labels(seen[0])[0] == list("abcdef")
    assert "3×6×6, of 2 calls" in repr(seen)
    with pytest.raises(ParameterError, match="no statistics of single calls"):
        seen.save_html(tmp_path / "page.html")
    with pytest.raises(ParameterError, match=r"seen\['entropy'\] of a recording"):
        seen["entropy"]


def test_errors_of_totals(encoder, transformer, x):
    rows = sightline.weights().sum("heads", weights=FACTORS).sum("layers")
    one_row = sightline.weights().sum("heads", weights=FACTORS[:1]).heads([0, 1])
    with pytest.raises(ParameterError, match="weights of 2 layers, in a watch of 1 layers"):
        record(encoder, rows, x, layers=[0])
    with pytest.raises(ParameterError, match="weights of 1 layers, in a watch of at least 2 layers"):
        record(encoder, one_row, x)
    with pytest.raises(ParameterError, match="cannot be dropped"), watch(encoder, rows, layers=[-1]):
        pass
    with pytest.raises(ParameterError, match="of shape 3×2×6, and of shape 3×2×4"):
        record(transformer, [LSE.mean("layers")], x, x[:, :4])
    with watch(encoder, [LSE.mean("layers")]) as seen:
        with pytest.raises(ParameterError, match="before the first call"):
            seen["lse"]
        encoder(x)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(
            recording.Total.result.fget,
            'self._sum if self.statistic.how == "sum" else self._sum / self.count',
            'self._sum * 2 if self.statistic.how == "sum" else self._sum / self.count',
        ),
        Fault(recording.Total.add, "self._sum + result", "result"),
    ],
)
def test_every_fault_in_a_total_is_found(fault, encoder, x, monkeypatch):
    assert_found(fault, monkeypatch, lambda: test_sums_and_means_over_layers(encoder, x))


def test_names_of_totals(encoder, x):
    seen = record(encoder, {"all": sightline.weights().mean("layers"), "sizes": sightline.lse()}, x)
    assert seen["all"].shape == (3, 2, 6, 6)
    assert [len(call.results) for call in seen] == [1, 1]
    assert torch.equal(seen["sizes"][1], seen[1]["lse"])


def test_the_default_statistics_make_a_page(encoder, x, tmp_path):
    with torch.no_grad(), watch(encoder) as seen:
        encoder(x)
    assert seen[0].statistics == sightline.OVERVIEW
    seen.save_html(tmp_path / "page.html")
    assert '["0","1","2","3","4","5"]' in (tmp_path / "page.html").read_text()
    with pytest.raises(ParameterError, match=r"cure: +see=sightline\.OVERVIEW"):
        record(encoder, [LSE], x).save_html(tmp_path / "page.html")


def test_cross_attention_has_the_positions_of_its_queries():
    """A decoder without a cache of keys: its cross-attention follows the self-attention of the same queries."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            attend = nn.functional.scaled_dot_product_attention
            self.attn, self.cross_attn = (Calling(lambda q, k: attend(q, k, k)) for _ in range(2))

        def forward(self, x, keys, audio):
            return self.attn(x, keys) + self.cross_attn(x, audio)

    decoder, x, audio = Decoder(), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 9, 4)
    with watch(decoder, [LSE]) as seen:
        for start, stop in ((0, 3), (3, 4), (4, 5), (0, 2)):
            decoder(x[..., start:stop, :], x[..., :stop, :], audio)
    assert [call.query_start for call in seen.of(kind="cross")] == [0, 3, 4, 0]
    assert seen.labels(seen.of(kind="cross")[2]) == (["4"], list("012345678"))
    assert "cross  2     1 from 4" in repr(seen)


def test_the_heaviest_keys(encoder, x):
    seen = record(encoder, [sightline.weights(), sightline.received(), LSE], x, tokens=TOKENS)
    received = torch.stack(seen["weights"]).sum(-2)  # layers, entries, heads, keys
    shares = received / received.sum(-1, keepdim=True)
    found = seen.heaviest(count=5)
    torch.testing.assert_close(torch.tensor([one.share for one in found]), shares.flatten().topk(5).values)
    for one in found:
        layer = seen.layers.index(one.layer)
        assert one.share == pytest.approx(float(shares[layer, one.entry, one.head, one.position]))
        assert (one.token, one.step) == (TOKENS[one.entry][one.position], 0)
    seen.tokens = None
    assert [one.token for one in seen.heaviest(count=5)] == [str(one.position) for one in found]
    last = seen.of(heads=[1]).heaviest("received()", 1)[0]
    assert (last.head, last.share) == (1, pytest.approx(float(shares[:, :, 1].max())))
    with pytest.raises(ParameterError, match="where weights"):
        seen.heaviest("weights")
    with pytest.raises(ParameterError, match=r"seen\['entropy'\] of a recording"):
        seen.heaviest("entropy")
