"""A prepared call: a bound call with its inputs and results, which generated code repeats.

A bound call lacks only addresses, the numbers of formulas and words such as the seed. `PreparedCall.run` computes these
words and calls the generated function `launch`. If every word is the address of an array of the caller, the address of
a result, a number of a formula, or the same in every call, the call is direct: the generated function `find_or_run`
does all this from the third call on (`calls.direct_call`, `calls.xla_direct_call`).

The call cache, the backward passes, the weights passes and the custom call of XLA hold prepared calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...arrays.layouts import addresses_of
from ...arrays.operations import numpy_address
from ..calls.launch_record import FIRST_COMPUTED, FIRST_NUMBER, FIRST_RESULT, UNCHANGED, Direct, LaunchRecord
from ..calls.launcher import FAILED, SHORT
from ..calls.python_functions import launcher
from ..codegen.abi import call_words, signed_word
from .arguments import convert_sinks

if TYPE_CHECKING:
    from .bound_call import BoundCall

COMPUTED_FIELDS = ("sinks", "d_lse", "seed")  # the fields whose words Python computes in each call


class PreparedCall:
    """A bound call, to which each repetition gives only arrays, numbers and a seed.

    Parameters
    ----------
    call : the bound call
    tables : for each table of the kernel, its index among the caller's tables
    converters : for each table of the kernel, a function that returns the copy that the kernel reads; None if the
        kernel reads the array itself
    operands : the names of the fields of the caller's arrays that precede the tables
    results : the names of the fields of the first results; the other results have no fields
    makers : functions that allocate the results
    num_keys : the number of keys
    can_be_direct : False if Python must run every repetition, to compute the word of a field in `COMPUTED_FIELDS`

    Attributes
    ----------
    records : the launch records, one for each thread that ran the call at the same time as others
    direct : what generated code reads; None if the call is not direct
        The tuple is never changed but replaced, because a thread may use it.
    """

    def __init__(
        self,
        call: BoundCall,
        tables: Sequence[int],
        converters: Sequence[Callable[[Any], Any] | None],
        operands: Sequence[str],
        results: Sequence[str],
        makers: Sequence[Callable[[], Any]],
        num_keys: int,
        can_be_direct: bool,
    ) -> None:
        self.call, self.tables, self.converters = call, tuple(tables), tuple(converters)
        self.operands, self.results = tuple(operands), tuple(results)
        self.makers, self.num_keys = tuple(makers), num_keys
        self.has_converters = any(converters)
        self.lengths = call.find_length_words(num_keys)
        self.sources = self.find_sources()
        self.records: list[LaunchRecord] = []
        self.direct: Direct | None = None
        self.can_be_direct = can_be_direct and not self.has_converters

    def copy(self, num_keys: int) -> PreparedCall:
        """Return a copy of the call for `num_keys` keys, which has the same records."""
        other = object.__new__(PreparedCall)  # in a fifth of the time of `copy.copy`
        lengths = self.call.find_length_words(num_keys)
        vars(other).update(vars(self), num_keys=num_keys, lengths=lengths, direct=None)
        return other

    def rebind(self, call: BoundCall, makers: Sequence[Callable[[], Any]], num_keys: int) -> PreparedCall:
        """Return the prepared call for another bound call of the same family; see `CallFamily`."""
        own = self.tables, self.converters, self.operands, self.results
        return PreparedCall(call, *own, makers, num_keys, self.can_be_direct)

    def run(
        self,
        addresses: Sequence[int],
        tables: Sequence[Any],
        numbers: tuple[float, ...],
        threads: int | None,
        keep_alive: tuple[Any, ...],
        sinks: Any = None,
        d_lse: Any = None,
        seed: int = 0,
    ) -> tuple[int | None, list[Any]]:
        """Return (status, arrays of the results).

        The status is 1 if the kernel set `imprecise_lse_flag`, else 0. It is None if the results are not valid: the
        call then needs the full dispatch.

        Parameters
        ----------
        addresses : the addresses of the operands, and then of the tables
        tables, numbers : the tables and numbers of the caller
        threads : the number of threads; None for the default
        keep_alive : the arrays at these addresses
        sinks : the sinks of the caller; None if there are none
        d_lse : the gradient of lse, a contiguous NumPy array of float64; None for 0
        seed : the seed of dropout
        """
        if self.lengths is None:
            return None, []
        results = [make() for make in self.makers]
        converted: list[Any] = []
        if self.has_converters:
            addresses = list(addresses)
            for table, convert in zip(self.tables, self.converters, strict=True):
                if convert is not None:
                    converted.append(convert(tables[table]))
                    (addresses[len(self.operands) + table],) = addresses_of(converted[-1:])
        numbers = numbers[: len(self.call.numbers)]
        sinks = None if sinks is None else convert_sinks(sinks)
        sinks_address = 0 if sinks is None else numpy_address(sinks)
        d_lse_address = 0 if d_lse is None else numpy_address(d_lse)
        computed = sinks_address, d_lse_address, signed_word(seed), *self.lengths
        arrays = keep_alive, sinks, d_lse, results, converted
        given = arrays, tuple(addresses), tuple(addresses_of(results)), numbers, computed
        return self._launch(threads, given), results

    def _launch(self, threads: int | None, given: tuple[Any, ...]) -> int | None:
        """Run the kernel with a record that no other thread uses. `given` are the other arguments of `launch`."""
        search, known, status = self.call.search, iter(self.records[:]), None
        while status is None or status == SHORT:
            record = next(known, None) or LaunchRecord(self.call, self.sources)
            direct = self.describe(record, threads)
            status = launcher()(direct, *given)
            if status == SHORT and search is not None:  # a new record has what this one lacks
                search.extend(record.buffer.word("count"))
                self._remove(record)
        if not record.can_be_kept:
            self._remove(record)
        elif record not in self.records:
            self.records.append(record)  # after its first use, so that no other thread has taken it
        self.direct = direct if self.can_be_direct and record.can_be_kept else None
        return None if status == FAILED or status >= 2 else status

    def _remove(self, record: LaunchRecord) -> None:
        self.records[:] = [other for other in self.records if other is not record]

    def describe(self, record: LaunchRecord, threads: int | None) -> Direct:
        """Return what generated code reads, for a record and the given number of threads."""
        max_threads = self.call.find_max_threads(self.num_keys)
        has_team = max_threads > 1 and threads != 1
        team = partial(record.run_on_team, max_threads, threads) if has_team else None
        return Direct(record.address, self.makers, self.computed, team, record)

    @property
    def computed(self) -> tuple[int, ...]:
        """The computed words of a call that has neither sinks nor a seed nor a gradient of lse."""
        return *(0,) * len(COMPUTED_FIELDS), *(self.lengths or ())

    def find_sources(self) -> list[int]:
        """Return the source of each word of the call."""
        place = {name: index for index, name in enumerate(self.operands)}
        place |= {name: FIRST_RESULT + index for index, name in enumerate(self.results)}
        computed = *COMPUTED_FIELDS, *self.call.length_fields
        place |= {name: FIRST_COMPUTED + index for index, name in enumerate(computed)}
        return call_words(
            [place.get(name, UNCHANGED) for name in self.call.call_fields],
            [len(self.operands) + table for table in self.tables],
            range(FIRST_NUMBER, FIRST_NUMBER + len(self.call.numbers)),
            range(FIRST_RESULT + len(self.results), FIRST_RESULT + len(self.makers)),
        )
