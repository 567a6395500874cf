"""The record of a bound call for generated functions that run the call; see `calls.launcher`."""

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
    """One record, and the buffer that belongs to it.

    Parameters
    ----------
    call : the bound call
    searches : True if the tile ranges are found for each call, False if they are those of the first call
    words : for direct calls, the words of the call with 0 in place of what each call gives; see `calls.direct_call`
    sources : for direct calls, where each of these words comes from; see `PreparedCall.find_sources`

    Attributes
    ----------
    address : the address of the record
    capacity : the most tile ranges for which the buffer has memory; 0 if it searches for none
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
