"""The entries by which generated code runs repeated forward passes; see `cpu.calls.xla_direct_call`."""

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

    Attributes
    ----------
    install : the function `xla_direct_call.build_install`
    """

    install: Callable[[int], None]

    def __init__(self) -> None:
        self.entries: dict[tuple[bytes, Any], _Entry] = {}
        self.made: list[_Entry] = []  # all entries: a thread may still read one that another has replaced

    def update(self, text: bytes, call: XlaCall) -> None:
        """Install the entry of a call with this text that ran in Python, if the call is direct."""
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
        self.install(entry.array.ctypes.data)  # an entry of another text may have replaced it


class _Entry(NamedTuple):
    """An entry: its fields, its record, the prepared call, and other memory that the code reads.

    The prepared call owns its tile ranges and the machine code. The call cache drops calls that were not used recently.
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
