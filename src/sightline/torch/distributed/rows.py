"""The results of some queries, merged from the results on one block of keys after another.

A block's result holds for the weights of the block alone. With w = exp(lse_block − lse), the weights of all keys are w
times the weights of the block, so

    lse = ln Σ exp(lse_block)                     out = Σ w out_block
    entropy = Σ w (entropy_block − ln w)          mass = Σ w mass_block
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ParameterError
from ...kernel import Result
from ...statistics import Entropy, Lse, Mass, MaxScore, Pooled, Received, Statistic, TopK, unwrap_mean

__all__ = ["PER_QUERY", "RowResults", "check_statistics"]

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
    """Output, lse and per-query statistics of a rank's queries.

    Attributes
    ----------
    output : (*batch_shape, H, n_r, d_v), the accumulator's dtype
    lse : (*batch_shape, H, n_r) float64
    statistics : the arrays of each statistic, in the order of `see`; [] for lse
    """

    def __init__(self, output: Tensor, see: tuple[Statistic, ...]) -> None:
        self.see, self.output = see, output
        self.lse = torch.full(output.shape[:-1], -torch.inf, dtype=torch.float64, device=output.device)
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
        before, own = self._scale(rows, result.lse)
        self._add_output(rows, result.output, own)
        for statistic, arrays, answer in zip(self.see, self.statistics, result.seen, strict=True):
            current = [array[..., rows, :] if isinstance(statistic, TopK) else array[..., rows] for array in arrays]
            if isinstance(statistic, Entropy):
                current[0].copy_(_mix_entropy(current[0], before) + _mix_entropy(answer.double(), own))
            elif isinstance(statistic, Mass):
                current[0].mul_(before.exp()).add_(answer.double() * own.exp())
            elif isinstance(statistic, MaxScore):
                _take_larger(current, answer.score.double(), _global_keys(answer.where, first_key))
            elif isinstance(statistic, TopK):
                weights = answer.weights.double() * own.exp()[..., None]
                _take_largest(current, before, weights, _global_keys(answer.where, first_key))

    def add_sinks(self, sinks: Tensor) -> None:
        """Add the sinks (H,): a key of each head without a value."""
        rows = slice(None)
        before, _ = self._scale(rows, sinks.double()[:, None].expand(self.lse.shape))
        for statistic, arrays in zip(self.see, self.statistics, strict=True):
            if isinstance(statistic, Entropy):
                arrays[0].copy_(_mix_entropy(arrays[0], before))
            elif isinstance(statistic, Mass):
                arrays[0].mul_(before.exp())
            elif isinstance(statistic, TopK):
                arrays[0].mul_(before.exp()[..., None])

    def _scale(self, rows: slice, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Add an lse, and multiply the output by its new share. Return ln of the shares of the old and the new keys."""
        old = self.lse[..., rows]
        new = torch.logaddexp(old, lse)
        shift = torch.where(new == -torch.inf, 0.0, new)
        before, own = old - shift, lse - shift
        is_lost = (before.exp() == 0) & (old != -torch.inf)  # then the output may be NaN or ∞
        share = before.exp().to(self.output.dtype)[..., None]
        output = self.output[..., rows, :]
        if bool((old != -torch.inf).any()):
            output.mul_(share)
            if bool(is_lost.any()):
                output.masked_fill_(is_lost[..., None], 0.0)
        self.lse[..., rows] = new
        return before, own

    def _add_output(self, rows: slice, output: Tensor, log_share: Tensor) -> None:
        weight = log_share.exp().to(self.output.dtype)[..., None]
        is_lost = (weight == 0) & (log_share != -torch.inf)[..., None]  # then the output may be NaN or ∞
        if bool(is_lost.any()):
            output = torch.where(is_lost, 0.0, output)
        if output.dtype == self.output.dtype:
            self.output[..., rows, :].addcmul_(output, weight)
        else:
            self.output[..., rows, :] += output.to(self.output.dtype) * weight


def _mix_entropy(entropy: Tensor, log_share: Tensor) -> Tensor:
    """Return w (entropy − ln w), where `log_share` is ln w; 0 for w = 0."""
    mixed = log_share.exp() * (entropy - log_share)
    return torch.where(log_share == -torch.inf, 0.0, mixed)


def _global_keys(where: Tensor, first_key: int) -> Tensor:
    """Return key positions of a block as positions of the whole sequence; −1 stays −1."""
    return torch.where(where < 0, where, where + first_key)


def _take_larger(current: list[Tensor], score: Tensor, where: Tensor) -> None:
    """Keep the larger score and its key, in place; among equal scores the smaller key."""
    is_earlier = (score == current[0]) & (where >= 0) & ((where < current[1]) | (current[1] < 0))
    is_new = (score > current[0]) | (score.isnan() & ~current[0].isnan()) | is_earlier
    current[0].copy_(torch.where(is_new, score, current[0]))
    current[1].copy_(torch.where(is_new, where, current[1]))


def _take_largest(current: list[Tensor], before: Tensor, weights: Tensor, where: Tensor) -> None:
    """Keep the k largest weights and their keys, in place; among equal weights the smaller key comes first."""
    k = current[0].shape[-1]
    all_weights = torch.cat([current[0] * before.exp()[..., None], weights], dim=-1)
    all_keys = torch.cat([current[1], where], dim=-1)
    all_weights = torch.where(all_keys < 0, -1.0, all_weights)  # empty entries come last
    by_key = torch.argsort(all_keys, dim=-1, stable=True)
    order = by_key.gather(-1, torch.argsort(all_weights.gather(-1, by_key), dim=-1, descending=True, stable=True))
    order = order[..., :k]
    keys = all_keys.gather(-1, order)
    current[0].copy_(torch.where(keys < 0, 0.0, all_weights.gather(-1, order)))
    current[1].copy_(keys)
