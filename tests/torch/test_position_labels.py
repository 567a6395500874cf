"""The labels of positions in models without tokens: patches of images as timm has them, audio of openai-whisper."""

import pytest
import torch
from torch import nn

import sightline
from sightline.errors import ParameterError
from watched_modules import record

SEE = sightline.received()
ATTEND = nn.functional.scaled_dot_product_attention


class PatchEmbed(nn.Module):
    patch_size = 4, 2

    def forward(self, image):
        return nn.functional.unfold(image, self.patch_size, stride=self.patch_size).mT


class VisionTransformer(nn.Module):
    """The parts of a vision transformer by which timm describes its positions."""

    def __init__(self, first, registers):
        super().__init__()
        self.patch_embed = PatchEmbed()
        for name in first:
            setattr(self, name, torch.zeros(1, 1, 24))
        self.num_prefix_tokens = len(first) + registers

    def forward(self, image, dropped=0):
        patches = self.patch_embed(image)[:, dropped:]
        x = torch.cat([torch.zeros(len(image), self.num_prefix_tokens, 24), patches], 1)[:, None]
        return ATTEND(x, x, x)


class AudioEncoder(nn.Module):
    def forward(self, spectrogram):
        x = spectrogram.mT[:, None, ::2]
        return ATTEND(x, x, x)[:, 0]


class TextDecoder(nn.Module):
    def forward(self, x, xa, kv_cache=None):
        return ATTEND(x[:, None], xa[:, None], xa[:, None])


class Whisper(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = AudioEncoder(), TextDecoder()


@pytest.fixture
def whisper(monkeypatch):
    for kind in (AudioEncoder, TextDecoder):
        monkeypatch.setattr(kind, "__module__", "whisper.model")
    return Whisper()


@pytest.mark.parametrize(
    ("first", "registers", "expected"),
    [
        (["cls_token"], 2, ["class", "register 1", "register 2"]),
        (["cls_token", "dist_token"], 0, ["class", "distillation"]),
        ([], 1, ["register 1"]),
        ([], 0, []),
    ],
)
def test_patches_are_labelled_by_row_and_column(first, registers, expected):
    vit = VisionTransformer(first, registers)
    with torch.no_grad(), sightline.watch(vit, SEE) as seen:
        vit(torch.randn(2, 3, 8, 6))
        vit(torch.randn(1, 3, 4, 4))  # images of other sizes
        vit(torch.randn(1, 3, 8, 6), dropped=1)  # as in training with patch dropout
    patches = [*expected, "0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]
    assert seen.labels(seen[0], 1) == (patches, patches)
    assert seen.labels(seen[1])[0] == [*expected, "0,0", "0,1"]
    assert seen.labels(seen[2])[0] == [str(k) for k in range(len(patches) - 1)]
    assert {one.token for one in sightline.statistics.recording.Seen(seen[:1]).heaviest(count=99)} == set(patches)
    assert not vit.patch_embed._forward_pre_hooks


@pytest.mark.parametrize("by_name", [False, True])
def test_frames_of_openai_whisper_are_labelled_by_seconds(whisper, by_name):
    with torch.no_grad(), sightline.watch(whisper, SEE) as seen:
        audio = whisper.encoder(torch.randn(1, 8, 12)).repeat(2, 1, 1)  # two texts of one audio
        given = {"xa": audio} if by_name else {}
        whisper.decoder(torch.randn(2, 3, 8), *() if by_name else (audio,), **given)
        whisper.decoder(torch.randn(2, 1, 8), *() if by_name else (audio,), **given, kv_cache={0: torch.zeros(2, 3, 8)})
    frames = ["0.00 s", "0.02 s", "0.04 s", "0.06 s", "0.08 s", "0.10 s"]
    assert seen.labels(seen[0]) == (frames, frames)
    assert seen.labels(seen[1], 1) == (["0", "1", "2"], frames)
    assert (seen[2].query_start, seen.labels(seen[2])) == (3, (["3"], frames))
    seen.tokens = {"decoder": [list("abcd")] * 2}  # labels of one side leave those of the other side
    assert seen.labels(seen[2], 1) == (["d"], frames)


def test_tokens_that_do_not_fit_are_not_kept():
    vit = VisionTransformer(["cls_token"], 2)
    seen = record(vit, SEE, torch.randn(1, 3, 8, 6))
    with pytest.raises(ParameterError, match=r"'class', \*registers, \*patches"):
        seen.tokens = ["class", *"abcdef"]
    assert seen.labels(seen[0])[0][:3] == ["class", "register 1", "register 2"]
