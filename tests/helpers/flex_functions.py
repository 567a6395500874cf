"""Mask and score functions that were published for FlexAttention, each written anew from its description.

Sources: the blog posts "FlexAttention: The Flexibility of PyTorch with the Performance of FlashAttention" and
"FlexAttention Part II: FlexAttention for Inference", the attention gym (github.com/meta-pytorch/attention-gym), torch's
own tests of flex_attention, and the masks of torchtune, gpt-fast and Transformers.

`MASKS` has the functions of masks. `SCORES` has a maker for each function of scores: it takes `Tensors`, which make the
tensors that the function captures, and returns the function.
"""

import functools
import math
from dataclasses import dataclass, field

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

B, H, N, D = 2, 4, 24, 8  # the lengths of the arrays; `SHAPES` has the exceptions
SHAPES = {  # (n, m) by the name of a function
    "flamingo": (12, 9),
    "offset of a cache": (3, 24),
    "offset of each sequence": (3, 24),
    "left padding": (1, 24),
    "draft tree": (7, 12),
    "draft training": (12, 17),
    "natten": (36, 36),
    "tiled natten": (36, 36),
    "morton natten": (16, 16),
    "sliding tiles 2-D": (40, 40),
    "sliding tiles 3-D": (64, 64),
    "spatial heads": (30, 30),
    "temporal heads": (30, 30),
}


@dataclass
class Tensors:
    """Makes captured tensors, the same for every dtype. `learned` lists those that require gradients."""

    dtype: torch.dtype = torch.float32
    learned: list = field(default_factory=list)

    def drawn(self, *shape):
        generator = torch.Generator().manual_seed(len(shape) + sum(shape))
        return torch.randn(*shape, generator=generator).to(self.dtype)

    def learn(self, *shape):
        self.learned.append(self.drawn(*shape).requires_grad_())
        return self.learned[-1]


# -- masks of the blog posts -----------------------------------------------------------------------------------------


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def given(tensor, make):
    """Return make(tensor), a function that captures the tensor."""
    return make(tensor)


def ids_of(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def stacked_documents():
    offsets = torch.tensor([0, 5, 17, 24])
    document = ids_of([5, 12, 7])

    def mask(b, h, q_idx, kv_idx):
        q_inner, kv_inner = (x - offsets[document[x]] for x in (q_idx, kv_idx))
        return (document[q_idx] == document[kv_idx]) & causal(b, h, q_inner, kv_inner)

    return mask


def jagged():
    """The adapter of nested tensors: one sequence number for each position, and each sequence's own positions."""
    offsets = torch.tensor([0, 9, 24], dtype=torch.int32)
    sequence = torch.searchsorted(offsets[1:], torch.arange(24), right=True)

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= 4

    def mask(b, h, q_idx, kv_idx):
        owner_q, owner_kv = sequence[q_idx], sequence[kv_idx]
        inside = window(b, h, q_idx - offsets[owner_q], kv_idx - offsets[owner_kv])
        return inside.logical_and(owner_q == owner_kv)

    return mask


class OffsetOfEachSequence:
    """A callable object with its tensors in attributes."""

    def __init__(self):
        self.state = {"offsets": [torch.tensor([4, 20])]}

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx + self.state["offsets"][0][b] >= kv_idx


class Pages:
    """Keys in pages: the physical page of a key is mapped to the key's logical position."""

    def __init__(self):
        self.page_size = 4
        self.logical_page = torch.tensor([[2, 0, -1, 1, -1, 3], [-1, 1, 0, -1, 2, -1]])

    def _logical(self, b, kv_idx):
        page = self.logical_page[b, kv_idx // self.page_size]
        return page, page * self.page_size + kv_idx % self.page_size

    def mask(self, b, h, q_idx, kv_idx):
        page, position = self._logical(b, kv_idx)
        return torch.where(page >= 0, causal(b, h, q_idx, position), False)

    def score(self, score, b, h, q_idx, kv_idx):
        page, position = self._logical(b, kv_idx)
        return torch.where(page >= 0, score + (position - q_idx) * 0.1, float("-inf"))


# -- masks of the attention gym ---------------------------------------------------------------------------------------


def neighbourhood(position, width, height, size):
    """Attention to a square around the query's place on a canvas; the square stays inside the canvas."""

    def mask(b, h, q_idx, kv_idx):
        (q_x, q_y), (kv_x, kv_y) = position(q_idx), position(kv_idx)
        half = size // 2
        centre_x, centre_y = q_x.clamp(half, width - 1 - half), q_y.clamp(half, height - 1 - half)
        return ((centre_x - kv_x).abs() <= half) & ((centre_y - kv_y).abs() <= half)

    return mask


def tiled(idx, width=6, tile=2):
    """(x, y) of a position whose canvas is stored tile by tile."""
    number, inside = idx // (tile * tile), idx % (tile * tile)
    tiles = width // tile
    return number % tiles * tile + inside % tile, number // tiles * tile + inside // tile


def even_bits(code):
    """The number that the bits 0, 2, 4, ... of the code make."""
    code = code & 0x55555555
    for shift, keep in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
        code = (code | (code >> shift)) & keep
    return code


def sliding_tiles(canvas, kernel, tile, text):
    """Sliding tile attention: the tiles around the query's tile. `text` keys follow, which everyone sees."""
    tiles = [c // t for c, t in zip(canvas, tile, strict=True)]
    reach = [k // t for k, t in zip(kernel, tile, strict=True)]
    seen = math.prod(canvas)

    def place(idx):
        number = idx // math.prod(tile)
        found = []
        for count in reversed(tiles):
            found.append(number % count)
            number = number // count
        return found[::-1]

    def mask(b, h, q_idx, kv_idx):
        near = (q_idx < seen) & (kv_idx < seen)
        for q_at, kv_at, count, size in zip(place(q_idx), place(kv_idx), tiles, reach, strict=True):
            left, right = size // 2, size // 2 + (size % 2 - 1)
            centre = q_at.clamp(left, count - 1 - right)
            near = near & (kv_at >= centre - left) & (kv_at <= centre + right)
        to_text = (q_idx < seen) & (kv_idx >= seen) & (kv_idx < seen + text)
        return near | to_text | ((q_idx >= seen) & (kv_idx < seen + text))

    return mask


def flamingo():
    """Text attends to the image whose interval of text positions contains it; an interval is a row of a tensor."""
    image = torch.arange(3).repeat_interleave(3)
    intervals = torch.tensor([[0, 7], [1, 7], [7, 12]])

    def mask(b, h, q_idx, kv_idx):
        interval = intervals[image[kv_idx]]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    return mask


def transfusion():
    """Causal text, and images whose tokens see all tokens of the same image."""
    spans = torch.tensor([[[2, 5], [12, 6]], [[0, 4], [9, 0]]])  # (B, images, (offset, length))

    def inside(span, idx):
        return (idx >= span[0]) & (idx < span[0] + span[1])

    def image(number):
        return lambda b, h, q_idx, kv_idx: inside(spans[b, number], q_idx) & inside(spans[b, number], kv_idx)

    return or_masks(causal, *map(image, range(spans.shape[1])))


def block_diffusion(b, h, q_idx, kv_idx):
    q_noised, kv_noised = q_idx < 12, kv_idx < 12
    q_block, kv_block = q_idx % 12 // 4, kv_idx % 12 // 4
    own = (q_block == kv_block) & (q_noised == kv_noised)
    clean = ~kv_noised & ((q_block > kv_block) & q_noised | (q_block >= kv_block) & ~q_noised)
    return own | clean


def draft_tree():
    parents = [-1, 0, 1, 1, 3, 3, 0]
    ancestors = torch.eye(7, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        ancestors[node] |= ancestors[parent]

    def mask(b, h, q_idx, kv_idx):
        node = (kv_idx - 5).clamp(min=0, max=6)
        return (kv_idx < 5) | ((kv_idx >= 5) & (kv_idx < 12) & ancestors[q_idx, node])

    return mask


def shared_prefix():
    offsets, prefix = torch.tensor([0, 6, 12, 18, 24]), torch.tensor([0, 0, 2, 2])
    document = ids_of([6, 6, 6, 6])

    def mask(b, h, q_idx, kv_idx):
        own = document[q_idx]
        shared = prefix[own]
        before = (own != shared) & (kv_idx >= offsets[shared]) & (kv_idx < offsets[shared + 1])
        return (kv_idx >= offsets[own]) & causal(b, h, q_idx, kv_idx) | before

    return mask


# -- masks of libraries -----------------------------------------------------------------------------------------------


def packed_samples():
    document = torch.stack([ids_of([4, 20]), torch.cat([ids_of([9, 9]), torch.full((6,), -1)])])

    def mask(b, h, q_idx, kv_idx):
        real = (document[b, q_idx] != -1) & (document[b, kv_idx] != -1)
        return causal(b, h, q_idx, kv_idx) & (document[b, q_idx] == document[b, kv_idx]) & real

    return mask


def chunked_with_padding():
    attention_mask = torch.ones(B, 24, dtype=torch.int64)
    attention_mask[1, 20:] = 0

    def padding(b, h, q_idx, kv_idx):
        return attention_mask[b, kv_idx].to(torch.bool)

    def same_chunk(b, h, q_idx, kv_idx):
        return torch.div(q_idx, 7, rounding_mode="floor") == (kv_idx / 7).floor().long()

    def joined(b, h, q_idx, kv_idx):
        result = q_idx.new_ones((), dtype=torch.bool)
        for mask in (causal, same_chunk, padding):
            result = result & mask(b, h, q_idx, kv_idx)
        return result

    return joined


MASKS = {
    "no mask": noop_mask,
    "causal": causal,
    "sliding window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 5),
    "prefix": or_masks(lambda b, h, q_idx, kv_idx: kv_idx < 6, causal),
    "prefix of each sequence": given(
        torch.tensor([3, 9]), lambda lengths: or_masks(lambda b, h, q, kv: kv < lengths[b], causal)
    ),
    "documents": given(ids_of([5, 12, 7]), lambda ids: lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]),
    "stacked documents": stacked_documents(),
    "jagged": jagged(),
    "padding": given(torch.tensor([24, 10]), lambda lengths: and_masks(causal, lambda b, h, q, kv: kv < lengths[b])),
    "offset of a cache": given(torch.tensor(13), lambda written: lambda b, h, q, kv: causal(b, h, q + written, kv)),
    "offset of each sequence": OffsetOfEachSequence(),
    "pages": Pages().mask,
    "dilated window": lambda b, h, q, kv: (torch.abs(q - kv) <= 9) & (torch.abs(q - kv) % 3 == 0),
    "batchified": lambda b, h, q, kv: (q // 8 == kv // 8) & causal(b, h, q % 8, kv % 8),
    "window with sinks": given(
        torch.tensor([0, 2]),
        lambda sinks: and_masks(
            or_masks(lambda b, h, q, kv: q - kv <= 4, lambda b, h, q, kv: torch.isin(kv, sinks)), causal
        ),
    ),
    "natten": neighbourhood(lambda idx: (idx % 6, idx // 6), 6, 6, 3),
    "tiled natten": neighbourhood(tiled, 6, 6, 3),
    "morton natten": neighbourhood(lambda idx: (even_bits(idx), even_bits(idx >> 1)), 4, 4, 3),
    "sliding tiles 2-D": sliding_tiles((6, 6), (6, 2), (2, 2), 4),
    "sliding tiles 3-D": sliding_tiles((4, 4, 4), (2, 4, 2), (2, 2, 2), 0),
    "flamingo": flamingo(),
    "transfusion": transfusion(),
    "spatial heads": lambda b, h, q, kv: (kv < 2 + 7) | (q < 2) | (torch.abs(q - kv) < math.floor(2 * 7 / 4) * 4),
    "temporal heads": lambda b, h, q, kv: (kv < 2) | (q < 2) | (torch.abs((q - 2) % 7 - (kv - 2) % 7) < 2 * 7 // 4),
    "block diffusion": block_diffusion,
    "window with global tokens": given(
        torch.isin(torch.arange(24), torch.tensor([0, 8])),
        lambda sees_all: or_masks(
            lambda b, h, q, kv: (q - kv).abs() <= 3, lambda b, h, q, kv: sees_all[q] | sees_all[kv]
        ),
    ),
    "draft tree": draft_tree(),
    "draft training": lambda b, h, q, kv: (kv < 5) | ((kv >= 5) & (q // 4 == (kv - 5) // 4) & ((kv - 5) % 4 <= q % 4)),
    "shared prefix": shared_prefix(),
    "selected tiles": given(
        torch.zeros(B, H, 3, 3, dtype=torch.bool).index_fill_(3, torch.tensor([0, 2]), True),
        lambda tiles: lambda b, h, q, kv: tiles[b, h, q // 8, kv // 8],
    ),
    "packed samples": packed_samples(),
    "left padding": given(
        torch.tensor([0, 7]),
        lambda first: given(torch.tensor([15]), lambda at: lambda b, h, q, kv: (kv >= first[b]) & (q + at[0] >= kv)),
    ),
    "chunks with padding": chunked_with_padding(),
    "window of each head": functools.partial(
        lambda windows, b, h, q, kv: torch.logical_and(q.ge(kv), q.sub(kv).lt(windows[h])), torch.tensor([2, 4, 8, 24])
    ),
}


# -- scores of the blog posts and of torch's tests --------------------------------------------------------------------


def always(function):
    return lambda tensors: function


def checkerboard(score, b, h, q_idx, kv_idx):
    score = torch.where(torch.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)
    return torch.where(torch.abs(kv_idx - q_idx) % 2 == 0, score * 2.0, score)


def squared(score, b, h, q_idx, kv_idx):
    score = score * score
    score += h.float().rsqrt().clamp(max=1.0)
    return score


def softcap(tensors, cap=3.0, tanh=torch.tanh):
    def score_mod(score, b, h, q_idx, kv_idx):
        score = score / cap
        score = tanh(score)
        return score * cap

    return score_mod


class ApproximateTanh(torch.autograd.Function):
    """The gym's approximation: a custom operator inside a function with a derivative of its own."""

    @staticmethod
    def forward(x):
        return torch.ops.approx.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * (1 - result * result)

    @staticmethod
    def vmap(info, in_dims, x):
        return torch.tanh(x), 0


LIBRARY = torch.library.Library("approx", "DEF")
LIBRARY.define("tanh(Tensor x) -> Tensor")
LIBRARY.impl("tanh", torch.tanh, "CompositeExplicitAutograd")


# -- learned scores ---------------------------------------------------------------------------------------------------


def learned(shape, make):
    return lambda tensors: make(tensors.learn(*shape))


class Module(torch.nn.Module):
    """A layer whose method is the score function; its bias is a parameter and its window a number."""

    def __init__(self, bias, window):
        super().__init__()
        self.bias, self.window = torch.nn.Parameter(bias), window

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.bias[torch.clamp(q_idx - kv_idx + self.window, 0, 2 * self.window)]


def local_window_bias(tensors):
    layer = Module(tensors.drawn(9), 4)
    tensors.learned.append(layer.bias)
    return layer.score_mod


def bucketed_bias(tensors):
    """T5's relative positions: the bucket of every distance is computed before the call."""
    bias, distance = tensors.learn(8, H), torch.arange(1 - N, N)
    far = 2 + (distance.abs().clamp(min=2).float() / 2).log() / math.log(24 / 2) * 2
    bucket = 4 * (distance > 0) + torch.where(distance.abs() < 2, distance.abs(), far.long().clamp(max=3))

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[bucket[kv_idx - q_idx + N - 1], h]

    return score_mod


def forgetting(tensors):
    """Forget gates: the logarithms of the gates between key and query are summed before the call."""
    total = functional.logsigmoid(tensors.learn(B, H, N)).cumsum(-1)
    return lambda score, b, h, q_idx, kv_idx: score + (total[b, h, q_idx] - total[b, h, kv_idx]).clamp(max=0)


def sandwich(tensors):
    frequencies = 10000.0 ** (-torch.arange(4) / 4)
    distance = torch.arange(1 - N, N).to(tensors.dtype)
    bias = torch.cos(distance.abs()[:, None] * frequencies.to(tensors.dtype)).sum(-1)
    ratio = H / (8.0 * torch.arange(1, H + 1).to(tensors.dtype))
    return lambda score, b, h, q_idx, kv_idx: score + bias[q_idx - kv_idx + N - 1] * ratio[h]


def graph_distances(tensors):
    bias, distance = tensors.learn(H, 6), (torch.arange(N)[:, None] - torch.arange(N)).abs().clamp(max=5)
    distance = torch.stack([distance, distance.flip(0)]).to(torch.int32)
    return lambda score, b, h, q_idx, kv_idx: score + bias[h, distance[b, q_idx, kv_idx]]


def graph_edges(tensors):
    bias = tensors.learn(H, 2, 3)
    types = torch.arange(B * N * N * 2).reshape(B, N, N, 2) % 3
    lengths = torch.arange(B * N * N).reshape(B, N, N) % 4 % 3
    positions = [bias[:, k] for k in range(2)]

    def score_mod(score, b, h, q_idx, kv_idx):
        length, total = lengths[b, q_idx, kv_idx], 0.0
        for k, table in enumerate(positions):
            total = total + torch.where(length > k, table[h, types[b, q_idx, kv_idx, k]], 0.0)
        return score + total / torch.clamp(length, min=1)

    return score_mod


def latent_rotary(tensors):
    """Multi-head latent attention: the products of the rotary parts are added to those of the latent parts."""
    q_rope, k_rope = tensors.learn(B, H, N, 4), tensors.learn(B, 1, N, 4)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + 0.5 * torch.dot(q_rope[b, h, q_idx], k_rope[b, h // H, kv_idx])

    return score_mod


SCORES = {
    "identity": always(lambda score, b, h, q_idx, kv_idx: score),
    "relative positions": always(lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx)),
    "causal by score": always(lambda score, b, h, q, kv: torch.where(q >= kv, score, -float("inf"))),
    "checkerboard": always(checkerboard),
    "trigonometric": always(lambda score, b, h, q, kv: torch.sin(torch.cos(score)) + torch.tan(b * 0.5)),
    "squared": always(squared),
    "alibi": lambda tensors: given(
        torch.exp2(-torch.arange(1.0, H + 1)).to(tensors.dtype),
        lambda slopes: lambda score, b, h, q, kv: score + slopes[h] * (kv - q),
    ),
    "alibi by formula": always(lambda score, b, h, q, kv: score + (kv - q) * torch.exp2(-((h + 1) * 8.0 / H))),
    "softcap": softcap,
    "softcap by a custom operator": lambda tensors: softcap(tensors, tanh=ApproximateTanh.apply),
    "gelu": given(
        functools.partial(functional.gelu, approximate="tanh"),
        lambda gelu: always(lambda score, b, h, q, kv: torch.log(gelu(score) + 1.0)),
    ),
    "relu": always(lambda score, b, h, q, kv: torch.log(functional.relu(score) + torch.full_like(score, 0.5))),
    "sigmoid": always(lambda score, b, h, q_idx, kv_idx: torch.log(score.sigmoid() + score.new_full((), 1e-3))),
    "pages": lambda tensors: Pages().score,
    "head bias": learned((H,), lambda bias: lambda score, b, h, q_idx, kv_idx: score + bias[h]),
    "local window bias": local_window_bias,
    "distance bias": learned((2 * N,), lambda bias: lambda score, b, h, q, kv: score + bias[torch.abs(q - kv)]),
    "pair bias": learned((N, N), lambda bias: lambda score, b, h, q_idx, kv_idx: score + bias[q_idx, kv_idx]),
    "head pair bias": learned((B, H, N, N), lambda bias: lambda score, b, h, q, kv: score + bias[b, h, q, kv]),
    "query factor": learned((N,), lambda bias: lambda score, b, h, q_idx, kv_idx: score * bias[q_idx]),
    "chosen bias": learned(
        (B, H, 4, N), lambda bias: given(torch.tensor(2), lambda k: lambda s, b, h, q, kv: s + bias[b, h, k, q])
    ),
    "moved bias": learned(
        (N,), lambda bias: given(torch.arange(N).flip(0), lambda m: lambda score, b, h, q, kv: score + bias[m[kv]])
    ),
    "learned temperature": learned(
        (1,), lambda one: given(one.reshape(()), lambda t: lambda s, b, h, q, kv: s * torch.exp(t))
    ),
    "bucketed bias": bucketed_bias,
    "gates": learned((B, H, N), lambda gate: lambda score, b, h, q, kv: score + functional.logsigmoid(gate[b, h, kv])),
    "forgetting": forgetting,
    "sandwich": sandwich,
    "graph distances": graph_distances,
    "graph edges": graph_edges,
    "latent rotary": latent_rotary,
}
