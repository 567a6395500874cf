"""The format, the processor and the undefined symbols of object files: ELF of Linux, COFF of Windows, Mach-O of macOS.

Sources: the System V ABI (ELF-64 object file format), Microsoft's PE/COFF specification, Apple's <mach-o/loader.h> and
<mach-o/nlist.h>.
"""

import struct
from typing import NamedTuple

X86_64, ARM64 = "x86_64", "aarch64"
ELF_MACHINES = {62: X86_64, 183: ARM64}
COFF_MACHINES = {0x8664: X86_64, 0xAA64: ARM64}
MACH_MACHINES = {0x01000007: X86_64, 0x0100000C: ARM64}


class ObjectFile(NamedTuple):
    """What `read_object` finds; the names of Mach-O are without the first underscore, which all of them have."""

    format: str
    architecture: str
    undefined: frozenset[str]


def read_object(code):
    """Return the `ObjectFile` of these bytes."""
    if code[:4] == b"\x7fELF":
        return ObjectFile(
            "ELF", ELF_MACHINES[struct.unpack_from("<H", code, 18)[0]], frozenset(_undefined_of_elf(code))
        )
    magic, kind = struct.unpack_from("<II", code)
    if magic == 0xFEEDFACF:
        return ObjectFile("Mach-O", MACH_MACHINES[kind], frozenset(_undefined_of_mach(code)))
    return ObjectFile("COFF", COFF_MACHINES[magic & 0xFFFF], frozenset(_undefined_of_coff(code)))


def _text(code, start):
    """Return the text from this byte to the next 0."""
    return code[start : code.index(0, start)].decode()


def _undefined_of_elf(code):
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + k * size) for k in range(count)]
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind == 2:  # a table of symbols; `link` is the section of its texts
            for at in range(offset, offset + length, 24):
                name, _, _, section = struct.unpack_from("<IBBH", code, at)
                symbol = _text(code, sections[link][4] + name)
                if section == 0 and symbol not in ("", "_GLOBAL_OFFSET_TABLE_"):  # the loader knows the latter
                    yield symbol


def _undefined_of_coff(code):
    table, count = struct.unpack_from("<II", code, 8)
    texts, index = table + 18 * count, 0
    while index < count:
        name, value, section, _, storage, auxiliary = struct.unpack_from("<8sIhHBB", code, table + 18 * index)
        if section == 0 and value == 0 and storage == 2:  # external
            is_long = name[:4] == bytes(4)
            yield _text(code, texts + struct.unpack("<I", name[4:])[0]) if is_long else name.rstrip(b"\0").decode()
        index += 1 + auxiliary


def _undefined_of_mach(code):
    (count,) = struct.unpack_from("<I", code, 16)
    at = 32
    for _ in range(count):
        command, size, *rest = struct.unpack_from("<6I", code, at)
        if command == 2:  # LC_SYMTAB
            symbols, length, texts, _ = rest
            for k in range(length):
                name, kind = struct.unpack_from("<IB", code, symbols + 16 * k)
                if kind & 0xEF == 1:  # external, in no section, and no entry of a debugger
                    yield _text(code, texts + name).removeprefix("_")
        at += size
