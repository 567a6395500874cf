"""A prepared call: a bound call with its inputs and results, which generated code repeats.

A bound call lacks only addresses, the numbers of formulas and words such as the seed. `PreparedCall.run` computes these
words and calls the generated function `launch`. If every word is the address of an array of the caller, the address of
a result, a number of a formula, or the same in every call, the call is direct: the generated function `find_or_run`
does all this from the third call on (`calls.direct_call`, `calls.xla_direct_call`).

The call cache, the backward passes, the weights passes and the custom call of XLA hold prepared calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...arrays.layouts import addresses_of
from ...arrays.operations import memory_layout
from ...formula.parameters import Structure
from ..calls.launch_record import LaunchRecord
from ..calls.launcher import FAILED, FIRST_COMPUTED, FIRST_NUMBER, FIRST_RESULT, UNCHANGED
from ..calls.python_functions import launcher, make_array_functions
from ..codegen.abi import signed_word

if TYPE_CHECKING:
    from .bound_call import BoundCall


@dataclass(frozen=True)
class KernelInputs:
    """Which of the caller's tables and numbers the kernel of a bound call reads.

    tables : for each table of the kernel, its index among the caller's tables
    converters : for each table of the kernel, a function that returns the copy that the kernel reads; None if the
        kernel reads the array itself
    num_numbers : the kernel has the first of the caller's numbers
    """

    tables: tuple[int, ...]
    converters: tuple[Callable[[Any], Any] | None, ...]
    num_numbers: int

    @classmethod
    def bind(cls, call: BoundCall, tables: Sequence[Any], structure: Structure) -> KernelInputs | None:
        """Return the inputs of a call that was made for these tables and formulas; None if it was made for others.

        The result is also None if the call was bound for other memory layouts than those of the tables.

        Parameters
        ----------
        tables : the caller's tables, in the order of the structure of its formulas
        structure : the part of the structure of the caller's formulas that the kernel reads; see `Structure.first`
        """
        origins = [id(table) for table in structure.tables]
        if not set(call.table_origins) <= set(origins) or call.numbers != structure.numbers:
            return None
        own_tables = tuple([origins.index(origin) for origin in call.table_origins])
        converters: list[Callable[[Any], Any] | None] = []
        for table, bound in zip(own_tables, call.table_layouts, strict=True):
            is_direct = memory_layout(tables[table]) == bound
            if not is_direct and memory_layout(call.convert_table(tables[table])) != bound:
                return None
            converters.append(None if is_direct else call.convert_table)
        return cls(own_tables, tuple(converters), len(structure.numbers))

    def convert(self, tables: Sequence[Any], addresses: Sequence[int]) -> tuple[list[Any], list[int]]:
        """Return the converted tables, and the addresses of the caller's tables with those of the converted ones."""
        converted, addresses = [], list(addresses)
        for table, convert in zip(self.tables, self.converters, strict=True):
            if convert is not None:
                converted.append(convert(tables[table]))
                (addresses[table],) = addresses_of(converted[-1:])
        return converted, addresses


COMPUTED = ("sinks", "d_lse", "seed")  # the fields whose words Python computes in each call


class Direct(NamedTuple):
    """What generated code reads of a prepared call.

    record : the address of a launch record
    makers : the functions that allocate the results
    computed : the words of `COMPUTED`, which are 0, and of `BoundCall.length_fields`
    run_on_team : the record's function that runs the kernel on several threads; None if one thread runs it
    extend : `LaunchRecord.extend`
    """

    record: int
    makers: tuple[Callable[[], Any], ...]
    computed: tuple[int, ...]
    run_on_team: Callable[[Any], None] | None
    extend: Callable[[], None]


class PreparedCall:
    """A bound call, to which each repetition gives only arrays, numbers and a seed.

    Parameters
    ----------
    call : the bound call
    inputs : its tables and numbers
    operands : the names of the fields of the caller's arrays that precede the tables
    results : the names of the fields of the first results; the other results have no fields
    makers : functions that allocate the results
    num_keys : the number of keys
    can_be_direct : False if Python must run every repetition, for example to compute the word of a field in `COMPUTED`

    Attributes
    ----------
    records : the launch records, one for each thread that ran the call at the same time as others
    direct : what generated code reads; None if the call is not direct
        The tuple is never changed but replaced, because a thread may use it.
    """

    def __init__(
        self,
        call: BoundCall,
        inputs: KernelInputs,
        operands: Sequence[str],
        results: Sequence[str],
        makers: Sequence[Callable[[], Any]],
        num_keys: int,
        can_be_direct: bool = True,
    ) -> None:
        self.call, self.inputs, self.operands, self.results = call, inputs, tuple(operands), tuple(results)
        self.makers, self.num_keys = tuple(makers), num_keys
        self.has_converters = any(inputs.converters)
        self.lengths = call.find_length_words(num_keys)
        self.sources = self.find_sources()
        self.records: list[LaunchRecord] = []
        self.direct: Direct | None = None
        self.can_be_direct = can_be_direct and not self.has_converters

    make_functions = staticmethod(make_array_functions)  # the functions of `call.lookup`, which run direct calls

    def copy(self, num_keys: int) -> PreparedCall:
        """Return a copy of the call for `num_keys` keys, which has the same records."""
        other = object.__new__(PreparedCall)  # in a fifth of the time of `copy.copy`
        lengths = self.call.find_length_words(num_keys)
        vars(other).update(vars(self), num_keys=num_keys, lengths=lengths, direct=None)
        return other

    def rebind(self, call: BoundCall, makers: Sequence[Callable[[], Any]], num_keys: int) -> PreparedCall:
        """Return the prepared call for another bound call of the same family; see `CallFamily`."""
        return PreparedCall(call, self.inputs, self.operands, self.results, makers, num_keys, self.can_be_direct)

    def run(
        self,
        addresses: Sequence[int],
        tables: Sequence[Any],
        numbers: tuple[float, ...],
        threads: int | None,
        keep_alive: tuple[Any, ...],
        sinks: int = 0,
        d_lse: int = 0,
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
        sinks, d_lse : the addresses of these arrays; 0 if there are none
        seed : the seed of dropout
        """
        if self.lengths is None:
            return None, []
        results = [make() for make in self.makers]
        converted: Sequence[Any] = ()
        if self.has_converters:
            count = len(self.operands)
            converted, own_addresses = self.inputs.convert(tables, addresses[count:])
            addresses = *addresses[:count], *own_addresses
        numbers = numbers[: self.inputs.num_numbers]
        computed = sinks, d_lse, signed_word(seed), *self.lengths
        given = (keep_alive, results, converted), tuple(addresses), tuple(addresses_of(results)), numbers, computed
        launch = launcher()
        for record in (*self.records, None):  # another thread may use one of the records
            used = record or LaunchRecord(self.call, self.sources)
            direct = self.describe(used, threads)
            status = launch(direct, *given)
            if status is not None:
                break
        if not used.can_be_kept:  # the call may have extended a record that was kept
            self.records[:] = [record for record in self.records if record is not used]
        elif used not in self.records:
            self.records.append(used)  # after its first use, so that no other thread has taken it
        self.direct = direct if self.can_be_direct and used.can_be_kept else None
        return None if status == FAILED or status >= 2 else status, results

    def describe(self, record: LaunchRecord, threads: int | None) -> Direct:
        """Return what generated code reads, for a record and the given number of threads."""
        max_threads = self.call.find_max_threads(self.num_keys)
        has_team = max_threads > 1 and threads != 1
        team = partial(record.run_on_team, max_threads, threads) if has_team else None
        return Direct(record.address, self.makers, self.computed, team, record.extend)

    @property
    def computed(self) -> tuple[int, ...]:
        """The computed words of a call that has neither sinks nor a seed nor a gradient of lse."""
        return *(0,) * len(COMPUTED), *(self.lengths or ())

    def find_sources(self) -> list[int]:
        """Return the source of each word of the call: its fields, then tables, numbers and other outputs."""
        place = {name: index for index, name in enumerate(self.operands)}
        place |= {name: FIRST_RESULT + index for index, name in enumerate(self.results)}
        place |= {name: FIRST_COMPUTED + index for index, name in enumerate((*COMPUTED, *self.call.length_fields))}
        tables = [len(self.operands) + table for table in self.inputs.tables]
        numbers = range(FIRST_NUMBER, FIRST_NUMBER + self.inputs.num_numbers)
        outputs = range(FIRST_RESULT + len(self.results), FIRST_RESULT + len(self.makers))
        return [*[place.get(name, UNCHANGED) for name in self.call.call_fields], *tables, *numbers, *outputs]
