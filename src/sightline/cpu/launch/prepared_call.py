"""A prepared call: a bound call with its inputs and results, and all that decides how the call is repeated.

A bound call lacks only addresses, the numbers of formulas and the seed, which are 64-bit words of its argument block.
The call is repeated in one of two ways. `PreparedCall.run` repeats it in Python. After `RUNS_BEFORE_RECORD` runs the
call becomes direct: generated code repeats it (`calls.direct_call`, `calls.xla_direct_call`). For this, one thread must
be enough for the work, and each word must be the address of an array of the caller, the address of a result, a number
of a formula, or the same in every call.

The call cache, the backward passes, the weights passes and the custom call of XLA hold prepared calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ...arrays.layouts import addresses_of
from ...arrays.operations import memory_layout
from ...formula.parameters import Structure
from ..calls.launch_record import LaunchRecord
from ..calls.launcher import FIRST_NUMBER, FIRST_RESULT, MAX_NUMBERS, MAX_RESULTS, UNCHANGED
from ..calls.python_functions import make_array_functions
from ..codegen.abi import signed_word, to_word

if TYPE_CHECKING:
    from .bound_call import BoundCall

RUNS_BEFORE_RECORD = 6  # after so many runs of a call, its record for direct calls is made


@dataclass(frozen=True)
class KernelInputs:
    """Which of the caller's tables and numbers the kernel of a bound call reads.

    tables : for each table of the kernel, its index among the caller's tables
    converters : for each table of the kernel, a function that returns the copy that the kernel reads; None if the
        kernel reads the array itself
    numbers : for each number of the kernel, its index among the caller's numbers
    """

    tables: tuple[int, ...]
    converters: tuple[Callable[[Any], Any] | None, ...]
    numbers: tuple[int, ...]

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
        return cls(own_tables, tuple(converters), tuple(range(len(structure.numbers))))

    def of(
        self, tables: Sequence[Any], addresses: Sequence[int], numbers: tuple[float, ...]
    ) -> tuple[Sequence[Any], Sequence[int], tuple[float, ...]]:
        """Return the arrays that the kernel reads as its tables, their addresses, and the numbers of the kernel.

        `addresses` has the addresses of the caller's tables.
        """
        own_numbers = tuple([numbers[number] for number in self.numbers])
        if not any(self.converters):
            return tables, [addresses[table] for table in self.tables], own_numbers
        arrays = [
            tables[table] if convert is None else convert(tables[table])
            for table, convert in zip(self.tables, self.converters, strict=True)
        ]
        return arrays, addresses_of(arrays), own_numbers


COMPUTED = ("sinks", "d_lse", "seed")  # the fields whose words Python computes in each call


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
    direct : for generated code: the address of the record, `makers`, and the record; None if the call is not direct
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
        self.makers, self.num_keys, self.num_runs = tuple(makers), num_keys, 0
        self.has_inputs = bool(inputs.tables or inputs.numbers)
        self.select_words = itemgetter(*self.find_places())
        self.direct: tuple[int, tuple[Callable[[], Any], ...], LaunchRecord] | None = None
        fits = len(self.makers) <= MAX_RESULTS and len(inputs.numbers) <= MAX_NUMBERS
        self.can_be_direct = can_be_direct and fits and not any(inputs.converters)

    make_functions = staticmethod(make_array_functions)  # the functions of `call.lookup`, which run direct calls

    def copy(self, num_keys: int) -> PreparedCall:
        """Return a copy of the call for `num_keys` keys. The copy counts its own runs, and makes its own record."""
        return self.rebind(self.call, self.makers, num_keys)

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
        """Return (result of `BoundCall.run`, arrays of the results).

        Parameters
        ----------
        addresses : the addresses of the operands, and then of the tables
        tables, numbers : the tables and numbers of the caller
        threads : the number of threads; None for the default
        keep_alive : the arrays at these addresses
        sinks, d_lse : the addresses of these arrays; 0 if there are none
        seed : the seed of dropout
        """
        results = [make() for make in self.makers]
        computed = (sinks, d_lse, signed_word(seed) if seed else 0, 0)  # the last is the word of a field without value
        own_tables: Sequence[Any] = ()
        own_numbers: tuple[float, ...] = ()
        if self.has_inputs:
            count = len(self.operands)
            own_tables, own_addresses, own_numbers = self.inputs.of(tables, addresses[count:], numbers)
            inputs = (*addresses[:count], *own_addresses, *map(to_word, own_numbers))
            words = self.select_words((*inputs, *addresses_of(results), *computed))
        else:
            words = self.select_words((*addresses[: len(self.operands)], *addresses_of(results), *computed))
        status = self.call.run(threads, words, own_numbers, self.num_keys, (keep_alive, results, own_tables))
        if self.can_be_direct and status is not None and (self.num_runs < RUNS_BEFORE_RECORD or self.is_outgrown):
            self.prepare_direct(threads)
        return status, results

    @property
    def is_outgrown(self) -> bool:
        """True if the bound call now has memory for more tile ranges than the record has."""
        search, direct = self.call.search, self.direct
        return search is not None and direct is not None and 0 < direct[2].capacity < search.capacity

    def prepare_direct(self, threads: int | None) -> None:
        """Count one more run. If the call was run often enough, make the record for direct calls."""
        self.num_runs += 1
        if self.num_runs >= RUNS_BEFORE_RECORD:
            record = self.call.make_direct_record(threads, self.num_keys, self.find_sources())
            self.direct = None if record is None else (record.address, self.makers, record)

    def find_places(self) -> list[int]:
        """Return the index of each word in the tuple of `run`: operands, tables, numbers, results, computed fields."""
        inputs, operands = self.inputs, len(self.operands)
        first_number = operands + len(inputs.tables)
        first_result = first_number + len(inputs.numbers)
        first_computed = first_result + len(self.makers)
        place = {name: first_computed + index for index, name in enumerate(COMPUTED)}
        numbers, unset = range(first_number, first_result), first_computed + len(COMPUTED)
        return self._place_words(place, first_result, range(operands, first_number), numbers, unset)

    def find_sources(self) -> list[int]:
        """Return the source of each word in generated code; see `RecordCode.write_words`."""
        tables = [len(self.operands) + table for table in self.inputs.tables]
        numbers = [FIRST_NUMBER + number for number in self.inputs.numbers]
        return self._place_words({}, FIRST_RESULT, tables, numbers, UNCHANGED)

    def _place_words(
        self, place: dict[str, int], first_result: int, tables: Sequence[int], numbers: Sequence[int], unset: int
    ) -> list[int]:
        """Return the place of each word of the call: its fields by name, then tables, numbers and other outputs."""
        place = place | {name: index for index, name in enumerate(self.operands)}
        place |= {name: first_result + index for index, name in enumerate(self.results)}
        outputs = range(first_result + len(self.results), first_result + len(self.makers))
        return [*[place.get(name, unset) for name in self.call.call_fields], *tables, *numbers, *outputs]
