"""The results of some queries, merged from the results on one block of keys after another.

A block's result holds for the weights of the block alone. Let L be the largest lse of a block, w = exp(lse_block − L),
and total = Σ w. The weights of all keys are w / total times the weights of the block, so

    out = Σ w out_block / total      lse = L + ln total
    mass = Σ w mass_block / total    entropy = Σ w (entropy_block − ln w) / total + ln total

A sink adds its w to total alone; the entropy then has ln total times the sum of the other w over total. The factors
w / total add up to 1 however large lse is, because total is their own sum and not the exponential of a rounded lse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ParameterError
from ...problem.kernel import Result
from ...statistics import Entropy, Lse, Mass, MaxScore, Pooled, Received, Statistic, TopK, unwrap_mean

PER_QUERY = (Lse, Entropy, Mass, MaxScore, TopK)  # a rank computes them for its own queries
OVER_QUERIES = (Received, Pooled)  # all queries add to their arrays


def check_statistics(see: tuple[Statistic, ...]) -> None:
    """Raise ParameterError if a statistic cannot be computed across ranks."""
    for statistic in see:
        if not isinstance(unwrap_mean(statistic), PER_QUERY + OVER_QUERIES):
            raise ParameterError(
                f"see={statistic!r} across ranks",
                "lse, entropy, max_score, mass, top_k, received and pooled, and their means",
                "select queries and heads from the result, or call sightline.attention on one rank",
            )


class RowResults:
    """Output, lse and per-query statistics of a rank's queries. They are results after `finish`, and sums before.

    Attributes
    ----------
    output : (*batch_shape, H, n_r, d_v), the accumulator's dtype
    lse : (*batch_shape, H, n_r) float64; before `finish` L, the largest lse of a block
    total : (*batch_shape, H, n_r) float64
    statistics : the arrays of each statistic, in the order of `see`; [] for lse
    """

    def __init__(self, output: Tensor, see: tuple[Statistic, ...]) -> None:
        self.see, self.output = see, output
        self.lse = torch.full(output.shape[:-1], -torch.inf, dtype=torch.float64, device=output.device)
        self.total = torch.zeros_like(self.lse)
        self.statistics = [self._start(statistic) for statistic in self.see]

    def _start(self, statistic: Statistic) -> list[Tensor]:
        if isinstance(statistic, TopK):
            shape = (*self.lse.shape, statistic.k)
            return [self.lse.new_zeros(shape), torch.full(shape, -1, dtype=torch.int64, device=self.lse.device)]
        if isinstance(statistic, MaxScore):
            return [self.lse.clone(), torch.full(self.lse.shape, -1, dtype=torch.int64, device=self.lse.device)]
        return [] if isinstance(statistic, Lse) else [torch.zeros_like(self.lse)]

    def add(self, rows: slice, result: Result, first_key: int) -> None:
        """Add the result of these queries on a block of keys whose first key has the position `first_key`."""
        log_weight = self._rescale(rows, result.lse)
        self._add_output(rows, result.output, log_weight)
        weight = log_weight.exp()
        self.total[..., rows] += weight
        for statistic, arrays, answer in zip(self.see, self._rows_of_statistics(rows), result.seen, strict=True):
            if isinstance(statistic, Entropy):
                arrays[0] += _mix_entropy(answer.double(), 1.0, log_weight)
            elif isinstance(statistic, Mass):
                arrays[0] += answer.double() * weight
            elif isinstance(statistic, MaxScore):
                _take_larger(arrays, answer.score.double(), _global_keys(answer.where, first_key))
            elif isinstance(statistic, TopK):
                _take_largest(
                    arrays, answer.weights.double() * weight[..., None], _global_keys(answer.where, first_key)
                )

    def finish(self, sinks: Tensor | None) -> None:
        """Turn the sums into results, after the last block. A sink of `sinks` (H,) is a key without a value."""
        weight_of_keys = self.total
        if sinks is not None:
            log_weight = self._rescale(slice(None), sinks.double()[:, None].expand(self.lse.shape))
            weight_of_keys = self.total.clone()
            self.total += log_weight.exp()
        total = torch.where(self.total == 0, 1.0, self.total)
        self.output /= total.to(self.output.dtype)[..., None]
        for statistic, arrays in zip(self.see, self.statistics, strict=True):
            if isinstance(statistic, Entropy | Mass):
                arrays[0] /= total
            if isinstance(statistic, Entropy):
                arrays[0] += weight_of_keys / total * total.log()
            if isinstance(statistic, TopK):
                arrays[0] /= total[..., None]
        self.lse += torch.where(self.total == 0, 0.0, total.log())

    def _rescale(self, rows: slice, lse: Tensor) -> Tensor:
        """Let L include an lse, and multiply the sums accordingly. Return ln w of the results that have this lse."""
        old, total = self.lse[..., rows], self.total[..., rows]
        new = torch.maximum(old, lse)
        shift = torch.where(new == -torch.inf, 0.0, new)
        change = old - shift
        if bool((total != 0).any()):
            self._multiply_output(rows, change)
            for statistic, arrays in zip(self.see, self._rows_of_statistics(rows), strict=True):
                if isinstance(statistic, Entropy):
                    arrays[0].copy_(_mix_entropy(arrays[0], total, change))
                elif isinstance(statistic, Mass):
                    arrays[0] *= change.exp()
                elif isinstance(statistic, TopK):
                    arrays[0] *= change.exp()[..., None]
        total *= change.exp()
        self.lse[..., rows] = new
        return lse - shift

    def _rows_of_statistics(self, rows: slice) -> list[list[Tensor]]:
        """Return views of the arrays of each statistic that have these queries."""
        pairs = zip(self.see, self.statistics, strict=True)
        return [[x[..., rows, :] if isinstance(one, TopK) else x[..., rows] for x in arrays] for one, arrays in pairs]

    def _multiply_output(self, rows: slice, log_factor: Tensor) -> None:
        output, factor = self.output[..., rows, :], log_factor.exp()
        output *= factor.to(output.dtype)[..., None]
        is_lost = (factor == 0) & (log_factor != -torch.inf)  # then the output may be NaN or ∞
        if bool(is_lost.any()):
            output.masked_fill_(is_lost[..., None], 0.0)

    def _add_output(self, rows: slice, output: Tensor, log_weight: Tensor) -> None:
        weight = log_weight.exp().to(self.output.dtype)[..., None]
        is_lost = (weight == 0) & (log_weight != -torch.inf)[..., None]  # then the output may be NaN or ∞
        if bool(is_lost.any()):
            output = torch.where(is_lost, 0.0, output)
        if output.dtype == self.output.dtype:
            self.output[..., rows, :].addcmul_(output, weight)
        else:
            self.output[..., rows, :] += output.to(self.output.dtype) * weight


def _mix_entropy(entropy: Tensor, total: Tensor | float, log_weight: Tensor) -> Tensor:
    """Return w (entropy − total ln w), where `log_weight` is ln w; 0 for w = 0."""
    mixed = log_weight.exp() * (entropy - total * log_weight)
    return torch.where(log_weight == -torch.inf, 0.0, mixed)


def _global_keys(where: Tensor, first_key: int) -> Tensor:
    """Return key positions of a block as positions of the whole sequence; −1 stays −1."""
    return torch.where(where < 0, where, where + first_key)


def _take_larger(current: list[Tensor], score: Tensor, where: Tensor) -> None:
    """Keep the larger score and its key, in place; among equal scores the smaller key."""
    is_earlier = (score == current[0]) & (where >= 0) & ((where < current[1]) | (current[1] < 0))
    is_new = (score > current[0]) | (score.isnan() & ~current[0].isnan()) | is_earlier
    current[0].copy_(torch.where(is_new, score, current[0]))
    current[1].copy_(torch.where(is_new, where, current[1]))


def _take_largest(current: list[Tensor], weights: Tensor, where: Tensor) -> None:
    """Keep the k largest weights and their keys, in place; among equal weights the smaller key comes first."""
    k = current[0].shape[-1]
    all_weights = torch.cat([current[0], weights], dim=-1)
    all_keys = torch.cat([current[1], where], dim=-1)
    all_weights = torch.where(all_keys < 0, -1.0, all_weights)  # empty entries come last
    by_key = torch.argsort(all_keys, dim=-1, stable=True)
    order = by_key.gather(-1, torch.argsort(all_weights.gather(-1, by_key), dim=-1, descending=True, stable=True))
    order = order[..., :k]
    keys = all_keys.gather(-1, order)
    current[0].copy_(torch.where(keys < 0, 0.0, all_weights.gather(-1, order)))
    current[1].copy_(keys)
