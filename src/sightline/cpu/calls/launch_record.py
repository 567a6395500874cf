"""The launch record: a table of addresses and lengths with which generated code runs a bound call.

A bound call lacks only the values of a call: addresses of arrays, numbers of formulas and words such as the seed. A
record has the addresses of the kernel and of its argument block, and says where the values belong in the block. The
generated code of `calls.launcher` writes them and runs the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...arrays.layouts import MAX_ARRAYS
from ..codegen.values import INT64, POINTER

# a call has these values: addresses of arguments, addresses of results, numbers of formulas, computed words
MAX_RESULTS, MAX_NUMBERS, MAX_COMPUTED = 64, 256, 8
FIRST_RESULT = MAX_ARRAYS
FIRST_NUMBER = FIRST_RESULT + MAX_RESULTS
FIRST_COMPUTED = FIRST_NUMBER + MAX_NUMBERS
NUM_VALUES = FIRST_COMPUTED + MAX_COMPUTED
UNCHANGED = -1  # the source of a word that is 0 in every call
RECORD_FIELDS: dict[str, Any] = {
    "is_busy": INT64,  # 1 while a thread uses the buffer
    "kernel": POINTER,
    "block": POINTER,  # the kernel's argument block
    "words": POINTER,  # the address in the argument block at which the words of the call begin
    "num_words": INT64,
    "sources": POINTER,  # for each of these words, the index of its value among the values of a call, or `UNCHANGED`
    "imprecise_lse_flag": POINTER,  # null if the kernel does not set this flag
    "nonfinite_flag": POINTER,
    # without a search, the call has the tile ranges of the first call, as long as it has the same numbers
    "first_numbers": POINTER,  # the numbers of the first call; null if no number changes the ranges, or with a search
    "num_numbers": INT64,
    "search": POINTER,  # the function that searches for tile ranges; null without a search
    "search_block": POINTER,  # the argument block of the search
    "search_words": POINTER,  # the address in `search_block` of the words that the search takes from the call
    "first_search_word": INT64,  # the index of the first of these words among the words of the call
    "num_search_words": INT64,
    "count": POINTER,  # the number of tile ranges that the search found; negative if a check failed
    "capacity": INT64,  # the most tile ranges for which the buffer has memory
    "zeroed": POINTER,  # the first word of the workspace that is set to 0
    "num_zeroed": INT64,  # how many words from there on are set to 0
}


class Direct(NamedTuple):
    """What generated code reads of a prepared call.

    address : the address of a launch record
    makers : the functions that allocate the results
    computed : the words that Python computes, which are the same in every direct call
    run_on_team : `LaunchRecord.run_on_team` with its first argument; None if one thread runs the kernel
    record : the `LaunchRecord`, which this reference keeps alive
    """

    address: int
    makers: tuple[Callable[[], Any], ...]
    computed: tuple[int, ...]
    run_on_team: Callable[[Any], None] | None
    record: Any
