"""The entries by which generated code runs repeated forward passes; see `cpu.calls.xla_direct_call`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..cpu.calls.xla_direct_call import ENTRY_FIELDS
from ..dispatch.call_request import machine_setting
from .host_calls import ForwardCall, HostCall
from .result_indices import LSE, OUTPUT

if TYPE_CHECKING:
    from ..cpu.calls.launch_record import LaunchRecord
    from ..cpu.launch.bound_call import BoundCall
    from .bound_forward import BoundForward

RUNS_BEFORE_ENTRY = 4  # after this number of runs in Python, a call gets an entry with a buffer of its own
MAX_ENTRIES = 1024  # entries live as long as the process


class DirectEntries:
    """The entries of this process.

    Attributes
    ----------
    install : the function `xla_direct_call.build_install`
    """

    install: Callable[[int], None]

    def __init__(self) -> None:
        self.runs: Counter[tuple[bytes, Any]] = Counter()  # of the calls without an entry
        self.entries: dict[tuple[bytes, Any], _Entry | None] = {}
        self.made: list[_Entry | None] = []  # all entries: a thread may still read one that another has replaced

    def count(self, text: bytes, call: HostCall) -> None:
        """Count a call with this text that ran in Python. If it ran often enough, install its entry."""
        setting = machine_setting()
        if not isinstance(call, ForwardCall) or call.bound.get(setting) is None or os.name != "posix":
            return
        key = text, setting
        if key not in self.entries:
            self.runs[key] += 1
            if self.runs[key] < RUNS_BEFORE_ENTRY or len(self.entries) >= MAX_ENTRIES:
                return
            self.runs.pop(key, None)
            self.entries.setdefault(key, self.make(*key, call))  # another thread may have made one
        entry = self.entries[key]
        if entry is not None and entry.is_outgrown_by(call.bound[setting]):
            entry = self.entries[key] = self.make(*key, call)
        if entry is not None:  # an entry of another text may have replaced it
            self.install(entry.array.ctypes.data)

    def make(self, text: bytes, setting: bytes | None, call: ForwardCall) -> _Entry | None:
        """Return a new entry that lives as long as the process; None if the call is large."""
        entry = _make_entry(text, setting, call)
        self.made.append(entry)
        return entry


class _Entry(NamedTuple):
    """An entry: its fields, its record, the bound call, and other memory that the code reads.

    The bound call owns its tile ranges and the machine code. `parse_call` drops calls that were not used recently.
    """

    array: Any
    record: LaunchRecord
    call: BoundCall
    memory: tuple[Any, ...]

    def is_outgrown_by(self, bound: BoundForward | None) -> bool:
        """True if the bound call has memory for more tile ranges than the record has."""
        search = None if bound is None else bound.call.search
        return search is not None and 0 < self.record.capacity < search.capacity


def _make_entry(text: bytes, setting: bytes | None, call: ForwardCall) -> _Entry | None:
    """Return the entry; None if the call is large."""
    bound = call.bound.get(setting)
    record = None if bound is None else bound.make_record()
    if bound is None or record is None:
        return None
    output = call.results[OUTPUT]
    *lead, heads, queries, width = output.shape
    scratch = np.empty(output.shape, output.numpy_dtype) if output.by_position else None
    tables = np.array([*bound.tables, 0], np.int64)
    texts = np.frombuffer(text, np.uint8), np.frombuffer((setting or b"") + b"\0", np.uint8)
    batches = int(np.prod(lead))
    fields = {
        "text": texts[0].ctypes.data,
        "length": len(text),
        "setting": 0 if setting is None else texts[1].ctypes.data,
        "record": record.address,
        "num_arguments": len(call.arguments),
        "num_tables": len(bound.tables),
        "tables": tables.ctypes.data,
        "num_rows": batches * heads * queries,
        "is_lse_wide": call.results[LSE].dtype == "float64",
        "scratch": 0 if scratch is None else scratch.ctypes.data,
        "batches": batches,
        "heads": heads,
        "queries": queries,
        "row_bytes": width * output.numpy_dtype.itemsize,
    }
    array = np.array([fields[name] for name in ENTRY_FIELDS], np.int64)
    return _Entry(array, record, bound.call, (scratch, tables, texts))
