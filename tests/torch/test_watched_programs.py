"""A watch of programs of other libraries: timm, open_clip, openai-whisper, diffusers and rxnmapper, if installed."""

import sys
from importlib.resources import files
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import sightline
from sightline.call.problem import make_problem
from sightline.errors import ParameterError
from sightline.reference.accuracy import compute_baseline
from sightline.reference.definition import compute_stages
from sightline.reference.testing import assert_within_budget
from softmax_capture import Softmaxes

pytestmark = pytest.mark.filterwarnings("ignore")  # these libraries use what torch deprecates
RNG = torch.Generator().manual_seed(0)


def attention_weights(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Return the weights of a call of torch's function: by the definition, and computed densely in float32."""
    options = {"scale": scale, "mask": sightline.causal() if is_causal else None}
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        options |= {"mask": sightline.dense(attn_mask)} if is_bool else {"score": sightline.bias(attn_mask)}
    problem = make_problem(query, key, value, **options)
    return compute_stages(problem).weights, compute_baseline(problem).weights


def multi_head_weights(*inputs, **options):
    """Return the weights that torch's function of multi-head attention computes in float64, and in float32."""
    options |= {"need_weights": True, "average_attn_weights": False}
    inputs64, options64 = tree_map(lambda x: x.double() if torch.is_tensor(x) else x, (inputs, options))
    function = functional.multi_head_attention_forward
    return function(*inputs64, **options64)[1], function(*inputs, **options)[1]


DENSE = {
    functional.scaled_dot_product_attention: attention_weights,
    functional.multi_head_attention_forward: multi_head_weights,
}


class DenseWeights(TorchFunctionMode):
    """The dense weights of every call of torch's attention, from the operands of the call."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, inputs=(), options=None):
        if function in DENSE:
            with torch._C.DisableTorchFunction():
                self.found.append(DENSE[function](*inputs, **(options or {})))
        return function(*inputs, **(options or {}))


def check_handwritten(model, call, count):
    """Compare what a watch records of attention written by hand with every softmax of the model."""
    with torch.no_grad(), sightline.watch(model, sightline.weights(), handwritten=True) as seen, Softmaxes() as dense:
        call(model)
    assert len(seen) == len(dense.oracles) == count
    for weights, oracle, scores in zip(seen["weights"], dense.oracles, dense.scores, strict=True):
        query, key = (scores.new_zeros(*scores.shape[:-2], length, 1) for length in scores.shape[-2:])
        baseline = compute_baseline(make_problem(query, key, key, score=sightline.bias(scores))).weights
        assert_within_budget(weights, oracle, baseline)


def check(model, call, paths):
    """Compare the recorded weights with the dense ones, and the output with that of the model without a watch."""
    model.eval()
    with torch.no_grad():
        plain = call(model)
        with sightline.watch(model, see=sightline.weights()) as seen, DenseWeights() as dense:
            output = call(model)
    torch.testing.assert_close(output, plain, rtol=1e-4, atol=1e-4)
    assert len(seen) == len(dense.found)
    assert set(paths) <= set(seen.layers)
    for recorded, (oracle, baseline) in zip(seen["weights"], dense.found, strict=True):
        assert_within_budget(recorded, oracle.reshape(recorded.shape), baseline.reshape(-1, *recorded.shape))


def image(size):
    return torch.randn(1, 3, size, size, generator=RNG)


@pytest.mark.parametrize(
    ("name", "size", "path"),
    [
        ("vit_tiny_patch16_224", 64, "blocks.11.attn"),
        ("vit_small_patch14_reg4_dinov2", 56, "blocks.0.attn"),
        ("eva02_tiny_patch14_224", 56, "blocks.0.attn"),
        ("swin_tiny_patch4_window7_224", 112, "layers.3.blocks.1.attn"),
    ],
)
def test_timm(name, size, path):
    timm = pytest.importorskip("timm")
    if "swin" in name:
        model = timm.create_model(name, img_size=size).eval()
        message = r"by hand in WindowAttention.*swin_transformer\.py:\d"
        with pytest.raises(ParameterError, match=message), torch.no_grad(), sightline.watch(model, sightline.lse()):
            model(image(size))
        check_handwritten(model, lambda model: model(image(size)), 12)
        timm.layers.set_fused_attn(True, experimental=True)
    x = image(size)
    check(timm.create_model(name, img_size=size), lambda model: model(x), [path])


def test_open_clip():
    open_clip = pytest.importorskip("open_clip")
    tower = {"layers": 2, "width": 32}
    vision, text = {**tower, "image_size": 32, "patch_size": 8, "head_width": 16}, {**tower, "context_length": 12}
    model = open_clip.CLIP(16, {**vision}, {**text, "vocab_size": 50, "heads": 2})
    ids = torch.randint(0, 50, (2, 12), generator=RNG)
    check(model, lambda model: model.encode_text(ids), ["transformer.resblocks.0.attn"])
    check(model, lambda model: model.encode_image(torch.ones(1, 3, 32, 32)), ["visual.transformer.resblocks.0.attn"])
    convolutions = {**vision, "layers": (1, 1, 1, 1), "image_size": 64}
    model = open_clip.CLIP(16, convolutions, {**text, "vocab_size": 50, "heads": 2})
    check(model, lambda model: model.encode_image(torch.ones(1, 3, 64, 64)), ["visual.attnpool"])


def test_openai_whisper():
    whisper = pytest.importorskip("whisper.model")
    model = whisper.Whisper(whisper.ModelDimensions(80, 30, 32, 2, 2, 100, 16, 32, 2, 2))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=RNG)
    spectrogram, ids = torch.randn(1, 80, 60, generator=RNG), torch.arange(7)[None]
    paths = ["encoder.blocks.0.attn", "decoder.blocks.1.attn", "decoder.blocks.1.cross_attn"]
    check(model, lambda model: model(spectrogram, ids), paths)
    message = r"by hand in MultiHeadAttention \(.*model\.py:\d"
    with whisper.disable_sdpa(), pytest.raises(ParameterError, match=message), sightline.watch(model, sightline.lse()):
        model(spectrogram, ids)
    with whisper.disable_sdpa():
        check_handwritten(model, lambda model: model(spectrogram, ids), 6)


def test_diffusers():
    attention = pytest.importorskip("diffusers.models.attention")
    block = attention.BasicTransformerBlock(32, 4, 8, cross_attention_dim=16)
    x, context = torch.randn(1, 20, 32, generator=RNG), torch.randn(1, 9, 16, generator=RNG)
    check(block, lambda model: model(x, encoder_hidden_states=context), ["attn1", "attn2"])


REACTIONS = [
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12",
    "CC(=O)O.OCC>>CC(=O)OCC",
    "C=CC=C.C=CC(=O)OC>>COC(=O)C1CC=CCC1",
    "Brc1ccccc1.OB(O)c1ccncc1>>c1ccc(-c2ccncc2)cc1",
    "O=Cc1ccccc1.NCCc1ccccc1.[BH4-].[Na+]>>C(NCCc1ccccc1)c1ccccc1",
]


def eager_head(model, head, **inputs):
    model.set_attn_implementation("eager")
    return model(**inputs, output_attentions=True).attentions[10][:, head]


def watched_head(model, head, **inputs):
    with sightline.watch(model, see=sightline.weights(), heads=[head]) as seen:
        model(**inputs)
    return seen.of(call=10)[0]["weights"][:, 0]


def test_rxnmapper(monkeypatch):
    """The trained mapper maps the same atoms, as surely, by one head of a watch as by the weights of "eager".

    Its model runs with transformers 5. Its tokenizer does not, so the subclass reads the vocabulary.
    """
    folder = SimpleNamespace(resource_filename=lambda package, path: str(files(package) / path))
    monkeypatch.setitem(sys.modules, "pkg_resources", folder)  # setuptools had it until version 81
    pytest.importorskip("rdkit")
    core = pytest.importorskip("rxnmapper.core")
    smiles = pytest.importorskip("rxnmapper.tokenization_smiles")

    class Mapper(core.RXNMapper):
        def _load_model_and_tokenizer(self):
            names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "basic_tokenizer": smiles.BasicSmilesTokenizer()}
            ids = smiles.load_vocab(f"{self.model_path}/vocab.txt")
            return core.AlbertModel.from_pretrained(self.model_path).eval(), SimpleNamespace(ids=ids, **names)

        def convert_batch_to_attns(self, reactions, *_, **__):
            rows = [
                torch.tensor([self.tokenizer.ids[token] for token in self.tokenize_for_model(one)]) for one in reactions
            ]
            real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            inputs = {"input_ids": pad_sequence(rows, batch_first=True), "attention_mask": real}
            with torch.no_grad():
                weights = self.look(self.model, self.head, **inputs)
            return [one[: len(row), : len(row)] for one, row in zip(weights, rows, strict=True)]

    def map_atoms(look, dtype):
        mapper = Mapper()
        mapper.model.to(dtype)
        mapper.look = look
        found = mapper.get_attention_guided_atom_maps(REACTIONS)
        return [one["mapped_rxn"] for one in found], torch.tensor([float(one["confidence"]) for one in found])

    looks = [(watched_head, torch.float32), (eager_head, torch.float64), (eager_head, torch.float32)]
    (maps, confidences), (true_maps, oracle), (_, plain) = (map_atoms(*one) for one in looks)
    assert maps == true_maps
    assert maps[2] == "O[C:4]([CH3:5])=[O:6].[CH3:1][CH2:2][OH:3]>>[CH3:1][CH2:2][O:3][C:4]([CH3:5])=[O:6]"
    assert_within_budget(confidences, oracle, plain)
