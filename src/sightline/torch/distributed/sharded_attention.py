"""The public function `attention`: exact attention over a sequence that is divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Never, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ...api.kernels import to_caller
from ...arrays.operations import needs_gradient
from ...call import validation
from ...call.foreign_arguments import refuse_arguments
from ...call.kernel import Result
from ...call.partition.shards import ShardLayout, Shards, check_shards
from ...call.problem import Problem, make_problem
from ...errors import ParameterError
from ...statistics import Statistic
from ..dispatch import apply_autocast
from ..operator import autocast_disabled, make_seed
from .agreement import agree, describe_array, describe_formula, describe_number, describe_shard
from .group import Group
from .heads import attention_by_heads
from .ring import attention_by_ring

Method = Literal["ring", "heads"]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *positional: Any,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    see: Statistic | Sequence[Statistic] | dict[str, Statistic] | None = None,
    threads: int | None = None,
    group: Any = None,
    layout: ShardLayout = "contiguous",
    method: Method = "ring",
    **unknown: Never,
) -> Any:
    """Compute exact attention over a sequence that is divided among the ranks of a process group.

    Every rank calls the function with its shards, and receives the output of its own queries. The result is that of
    `sightline.attention` for the whole sequence. Formulas are written for the whole sequence: i and j are positions in
    it, and n and m are its lengths.

    Parameters
    ----------
    query, key, value : (..., H, n_r, d_k), (..., G, m_r, d_k) and (..., G, m_r, d_v), this rank's, of one dtype
        H is a multiple of G. The numbers n_r and m_r may differ from rank to rank. DTensors that are sharded along the
        positions work too.
    mask, score, scale, sinks, dropout, seed, threads
        As in `sightline.attention`, and equal on every rank. A table has the entries of the whole sequence; `unshard`
        makes one from shards. The same seed drops the same weights for any number of ranks. Without a seed, rank 0
        draws one from torch's generator.
    see : list of statistics, dict from names to statistics, or one statistic, optional
        lse, entropy, max_score, mass, sum and top_k are returned for this rank's queries, received for its keys.
        pooled is returned for the whole sequence, equal on every rank. The means of these statistics are allowed too.
    group : ProcessGroup or DeviceMesh of one axis, optional
        The ranks. The default is all processes.
    layout : {"contiguous", "zigzag"}
        How `shard` has divided the positions. "zigzag" balances the work of a causal mask.
    method : {"ring", "heads"}
        "ring" sends blocks of keys to the ranks whose queries need them. A rank receives a block while it computes with
        the block before. "heads" exchanges heads for positions, so that each rank computes some heads of the whole
        sequence. G must then be at least the number of ranks. All statistics have their gradients with "heads".

    Returns
    -------
    output : (..., H, n_r, d_v), the dtype of the inputs
        The output of this rank's queries.
    seen : tuple, or dict if `see` is a dict; only if `see` is given

    All ranks must run the backward pass too. Gradients of the shards are complete. A gradient of a table or of sinks is
    only this rank's part, as for any parameter that every rank has. DistributedDataParallel averages the parts, and
    `torch.distributed.all_reduce` adds them. With method="ring", second derivatives and the gradients of received and
    pooled are not available.

    Raises
    ------
    SightlineError
        Every error of `sightline.attention`.
    RankError
        The calls of the ranks differ, which is found before the arrays are sent. Or a rank died or did not answer
        within the timeout of the group.
    ParameterError
        torch.distributed is not initialized, a layout or a method is unknown, a statistic is not available across
        ranks, or dropout is used with shards of keys that do not begin at multiples of 4.

    References
    ----------
    Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, section 3.
    Jacobs et al., "DeepSpeed Ulysses", 2023, section 3, for method="heads".

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> import sightline, sightline.torch.distributed as distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank
    >>> x, see = torch.zeros(1, 1, 4, 8), [sightline.entropy()]  # four tokens with equal scores
    >>> _, (entropy,) = distributed.attention(x, x, x, mask=sightline.causal(), see=see)
    >>> entropy.exp().round()  # the number of keys that each query of this rank attends to
    tensor([[[1., 2., 3., 4.]]])
    >>> dist.destroy_process_group()
    """
    given_arrays = {"query": query, "key": key, "value": value}
    arrays, group = _local_tensors(list(given_arrays.values()), group)
    query, key, value = map(apply_autocast, arrays)
    ranks = Group(group)
    names, statistics = validation.split_names(see)
    options: dict[str, Any] = {"mask": mask, "score": score, "see": statistics}
    options |= {"scale": scale, "sinks": sinks, "dropout": dropout, "seed": seed, "threads": threads}
    named = {"query": query, "key": key, "value": value}

    def describe() -> tuple[tuple[int, ...], dict[str, str]]:
        if positional or unknown:
            refuse_arguments("torch.distributed.attention", attention, positional, unknown)
        _check_tensors(given_arrays)
        validation.check_choice(None, threads)
        if method not in get_args(Method):
            raise ParameterError(f"method={method!r}", '"ring" or "heads"', 'method="ring"')
        numbers, description = _describe(named, options)
        return numbers, description | {"layout": str(layout), "method": str(method)}

    numbers = agree(ranks, describe, query)
    shards = [check_shards(name, [row[k] for row in numbers], layout) for k, name in enumerate(("queries", "keys"))]
    problem = _whole_problem([query, key, value], shards, options | {"seed": numbers[0][2]})
    _check_statistics(problem)
    _check_dropout(problem, shards[1])
    run = attention_by_ring if method == "ring" else attention_by_heads
    with autocast_disabled(query):
        output, seen = run(ranks, problem, shards, validation.broadcast_inputs(named))
    pairs = zip(problem.see, seen, strict=True)
    answers = [one.build_result(own if one.is_differentiable else [x.detach() for x in own]) for one, own in pairs]
    output, results = to_caller(problem, Result(output, None, tuple(answers)), statistics)
    output = _to_dtensor(output, given_arrays["query"])
    if see is None:
        return output
    return output, results if names is None else dict(zip(names, results, strict=True))


def _describe(named: dict[str, Any], options: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, str]]:
    """Return the numbers and the description that `agree` compares, after the checks of this rank's arguments."""
    validation.check_arrays(named)
    validation.broadcast_inputs(named)
    formulas = {"mask": validation.read_mask(options["mask"]), "score": validation.read_score(options["score"])}
    description = {name: describe_formula(formula) for name, formula in formulas.items()}
    for name, array in named.items():
        description |= describe_shard(name, array, -2)
    statistics = validation.read_statistics(options["see"])
    description["see"] = "; ".join(
        [f"{statistic!r} {statistic.serialize(describe_formula)}" for statistic in statistics]
    )
    sinks = options["sinks"]
    description["sinks"] = "None" if sinks is None else describe_array(sinks)
    description |= {name: describe_number(options[name]) for name in ("scale", "dropout")}
    tables = [table.array for formula in formulas.values() if formula is not None for table in formula.tables]
    for name, arrays in {"sinks": [sinks], "scale": [options["scale"]], "tables": tables}.items():
        description[f"requires_grad of {name}"] = str([needs_gradient(array) for array in arrays])
    seed, dropout = options["seed"], validation.read_dropout(options["dropout"])
    if seed is not None or not dropout:
        seed = validation.read_seed(seed, dropout)
    description["seed"] = str(seed)
    return (named["query"].shape[-2], named["key"].shape[-2], int(make_seed(seed))), description


def _whole_problem(arrays: list[Tensor], shards: list[Shards], options: dict[str, Any]) -> Problem:
    """Return the problem of the whole sequence. Its arrays have their full shapes, but one entry each in memory."""
    lengths = [shards[k > 0].length for k in range(len(arrays))]
    whole = [
        x.new_zeros(1).expand(*x.shape[:-2], length, x.shape[-1]) for x, length in zip(arrays, lengths, strict=True)
    ]
    return make_problem(*whole, **options | {"seed": options["seed"] % 2**64 if options["dropout"] else None})


def _check_statistics(problem: Problem) -> None:
    """Raise ParameterError if a statistic cannot be computed across ranks."""
    for statistic in problem.see:
        if statistic.has_own_problem or not (statistic.is_mergeable or (statistic.axes and not statistic.finds)):
            allowed = "lse, entropy, max_score, mass, top_k, sums over i or j, cells, and their sums and means"
            cure = "select queries and heads from the result, or call sightline.attention on one rank"
            raise ParameterError(f"see={statistic!r} across ranks", allowed, cure)


def _check_dropout(problem: Problem, keys: Shards) -> None:
    starts = [span.start for spans in keys.ranks for span in spans if len(span)]
    if problem.dropout and any(start % 4 for start in starts):
        given = f"dropout with shards of keys that begin at {starts}"
        raise ParameterError(given, "shards that begin at multiples of 4", "divide the keys with shard(x)")


# -- DTensors that are sharded along the positions ---------------------------------------------------------------------


def _check_tensors(named: dict[str, Any]) -> None:
    """Raise ParameterError if the arrays are neither three tensors nor three DTensors that `attention` takes.

    The DTensors that `attention` takes have one placement: sharded along the positions on one axis of the mesh, and
    replicated on the other axes.
    """
    for name, array in named.items():
        if not isinstance(array, Tensor):
            raise ParameterError(f"{name} is a {type(array).__name__}", "a tensor of torch", "torch.as_tensor(array)")
    arrays = list(named.values())
    placed = [array for array in arrays if isinstance(array, DTensor)]
    if not placed:
        return
    if len(placed) < len(arrays):
        given, allowed = "DTensors and plain tensors as query, key and value", "three DTensors, or three plain tensors"
        raise ParameterError(given, allowed, "DTensor.from_local(x, mesh, [Shard(-2)])")
    if len({(array.device_mesh, array.placements) for array in placed}) > 1:
        raise ParameterError("DTensors of different placements", "one placement", "redistribute all to Shard(-2)")
    first: Any = placed[0]
    sharded = _sharded_axes(first)
    others = [place for axis, place in enumerate(first.placements) if axis not in sharded and not place.is_replicate()]
    if len(sharded) != 1 or others or first.placements[sharded[0]].dim % first.ndim != first.ndim - 2:
        given = f"DTensors with the placements {first.placements}"
        allowed = "Shard of the positions, axis −2, on one axis of the mesh, and Replicate on the others"
        raise ParameterError(given, allowed, "query.redistribute(mesh, [Shard(query.ndim - 2)])")


def _local_tensors(arrays: Sequence[Any], group: Any) -> tuple[list[Any], Any]:
    """Return (local arrays, group). For DTensors, the group is that of the mesh axis that shards them.

    Arrays that `_check_tensors` refuses raise no error here, because this rank needs the group to report the error.
    """
    if all(isinstance(array, DTensor) for array in arrays) and len(axes := _sharded_axes(arrays[0])) == 1:
        group = arrays[0].device_mesh.get_group(axes[0])
    return [array.to_local() if isinstance(array, DTensor) else array for array in arrays], group


def _sharded_axes(array: Any) -> list[int]:
    """Return the axes of the mesh along which a DTensor is sharded."""
    return [axis for axis, place in enumerate(array.placements) if isinstance(place, Shard)]


def _to_dtensor(output: Tensor, query: Tensor) -> Any:
    """Return the output as a DTensor that is placed as the query; `output` itself if the query is no DTensor."""
    if not isinstance(query, DTensor):
        return output
    shape = torch.Size([*query.shape[:-1], output.shape[-1]])
    strides = torch.empty(shape, device="meta").stride()
    placed = query.device_mesh, query.placements
    return DTensor.from_local(output, *placed, run_check=False, shape=shape, stride=strides)
