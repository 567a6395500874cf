"""Entries, with which generated code repeats forward passes without Python; see `cpu.calls.xla_direct_call`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..cpu.calls.launcher import FIRST_NUMBER, NUM_VALUES
from ..cpu.calls.xla_direct_call import ENTRY_FIELDS
from ..cpu.codegen.abi import to_word
from ..dispatch.call_request import machine_setting
from .result_indices import LSE, OUTPUT
from .xla_calls import XlaCall, XlaForward

if TYPE_CHECKING:
    from ..cpu.calls.launch_record import LaunchRecord
    from ..cpu.launch.prepared_call import PreparedCall

MAX_ENTRIES = 1024  # entries live as long as the process


class DirectEntries:
    """The entries of this process.

    install : the generated function that stores the entry at an address; see `xla_direct_call.build_install`
    """

    install: Callable[[int], None]

    def __init__(self) -> None:
        self.entries: dict[tuple[bytes, Any], _Entry] = {}
        self.made: list[_Entry] = []  # all entries: a thread may still read one that another has replaced

    def update(self, text: bytes, call: XlaCall) -> None:
        """Install an entry for a call that ran in Python, if generated code can run the call as a whole."""
        if not isinstance(call, XlaForward) or os.name != "posix":
            return
        prepared = call.find_prepared()
        if prepared is None or prepared.direct is None:
            return
        key, record = (text, machine_setting()), prepared.direct[2]
        entry = self.entries.get(key)
        if entry is None or entry.record is not record:
            if len(self.made) >= MAX_ENTRIES:
                return
            entry = self.entries[key] = _make_entry(*key, call, prepared, record)
            self.made.append(entry)
        self.install(entry.array.ctypes.data)  # also an old entry, which a text with the same hash may have replaced


class _Entry(NamedTuple):
    """The words of an entry, and the objects whose addresses they are: the launch record, prepared call and arrays.

    The prepared call owns tile ranges and machine code. It is kept here because the call cache may drop it.
    """

    array: Any
    record: LaunchRecord
    prepared: PreparedCall
    memory: tuple[Any, ...]


def _make_entry(
    text: bytes, setting: bytes | None, call: XlaForward, prepared: PreparedCall, record: LaunchRecord
) -> _Entry:
    texts = np.frombuffer(text, np.uint8), np.frombuffer((setting or b"") + b"\0", np.uint8)
    values = np.zeros(NUM_VALUES, np.int64)
    values[FIRST_NUMBER : FIRST_NUMBER + len(call.numbers)] = [to_word(number) for number in call.numbers]
    fields = {
        "text": texts[0].ctypes.data,
        "length": len(text),
        "setting": 0 if setting is None else texts[1].ctypes.data,
        "record": record.address,
        "num_arguments": len(call.arguments),
        "values": values.ctypes.data,
        "num_rows": math.prod(call.results[OUTPUT].shape[:-1]),
        "is_lse_wide": call.results[LSE].dtype == "float64",
    }
    array = np.array([fields[name] for name in ENTRY_FIELDS], np.int64)
    return _Entry(array, record, prepared, (values, texts))
