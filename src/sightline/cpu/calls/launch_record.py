"""The launch record: a table of addresses and lengths with which generated code runs a bound call.

A bound call lacks only addresses of arrays, numbers of formulas and a seed. Its tile ranges are the runs of key blocks
that each block of queries processes. `calls.launcher` describes the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernels.tile_search import SEARCH_FIELDS
from .launcher import MAX_ZEROED, RECORD_FIELDS

if TYPE_CHECKING:
    from ..launch.bound_call import BoundCall

FLAGS = ("imprecise_lse_flag", "nonfinite_flag")  # fields of a workspace


class LaunchRecord:
    """One record, and the buffer with the argument block of its kernel.

    Parameters
    ----------
    call : the bound call
    searches : True if each call searches for its tile ranges; False if each call uses those of the first call
    words : for direct calls, the 64-bit words of the call, with 0 for words that change; see `calls.direct_call`
    sources : for direct calls, the source of each of these words; see `RecordCode.write_words`

    Attributes
    ----------
    address : the address of the record
    capacity : the most tile ranges for which the buffer has memory; 0 without a search
    """

    def __init__(self, call: BoundCall, searches: bool, words: Sequence[int] = (), sources: Sequence[int] = ()) -> None:
        assert len(call.zeroed) <= MAX_ZEROED
        assert len(sources) == len(words)
        self.sources = np.array(sources, np.int64)
        buffers = call.make_buffers()
        self.buffer = _, view, block = buffers.acquire()
        addresses = {name: block + 8 * offset for name, offset in buffers.offsets.items()}
        fields: dict[str, Any] = dict.fromkeys(RECORD_FIELDS, 0) | {
            "kernel": call.kernel,
            "block": block,
            "words": block + call.words_at,
            "num_words": call.num_words,
            "sources": self.sources.ctypes.data,
            "num_zeroed": len(call.zeroed),
        }
        fields |= {name: addresses[name] for name in FLAGS if name in addresses}
        for k, (name, length) in enumerate(call.zeroed):
            fields |= {f"zeroed_{k}": addresses[name], f"zeroed_words_{k}": length}
        if searches and call.search is not None:
            search_block = block + 8 * buffers.starts[1]
            fields |= {
                "search": call.search.address,
                "search_block": search_block,
                "search_words": search_block + 8 * len(SEARCH_FIELDS),
                "first_search_word": call.search_words.start,
                "num_search_words": call.search_words.stop - call.search_words.start,
                "count": addresses["count"],
                "capacity": call.search.capacity,
            }
            call.use_found_ranges(view, addresses)
        self.capacity = fields["capacity"]
        for k, word in enumerate(words):
            view[call.words_at // 8 + k] = word
        self.array = np.array([fields[name] for name in RECORD_FIELDS], np.int64)
        self.address = int(self.array.ctypes.data)
