"""What a shared library for Linux, macOS or Windows says of itself: its processor, the names that it exports, the
libraries that it needs, and the oldest system that it runs on. All are for 64 bits."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Binary:
    """`oldest`: the greatest version of glibc that it asks for, or the least of macOS; None on Windows. `signed`: it
    has a signature, without which macOS loads nothing on arm64."""

    system: str
    machine: str
    exports: set[str] = field(default_factory=set)
    needs: set[str] = field(default_factory=set)
    oldest: tuple[int, ...] | None = None
    signed: bool = False


def read(path: Path) -> Binary:
    data = path.read_bytes()
    readers = {b"\x7fELF": _elf, b"\xcf\xfa\xed\xfe": _mach_o, b"MZ\x90\x00": _pe, b"MZ\x78\x00": _pe}
    return readers[data[:4]](data)


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _elf(data: bytes) -> Binary:
    machine, sections, size, count = (
        struct.unpack_from(kind, data, at)[0] for kind, at in (("<H", 18), ("<Q", 40), ("<H", 58), ("<H", 60))
    )
    binary = Binary("linux", {62: "x86_64", 183: "arm64"}[machine])
    # of each section: type, offset, size, number of the section with its names
    table = [struct.unpack_from("<4xI8x8xQQI", data, sections + size * k) for k in range(count)]
    for kind, at, length, link in table:
        names = table[link][1] if link < count else 0
        if kind == 11:  # dynamic symbols
            for name, section in struct.iter_unpack("<I2xH16x", data[at : at + length]):
                if section:
                    binary.exports.add(_text(data, names + name))
        if kind == 6:  # dynamic entries
            entries = struct.iter_unpack("<QQ", data[at : at + length])
            binary.needs = {_text(data, names + value) for tag, value in entries if tag == 1}
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", data)
    binary.oldest = max(((int(major), int(minor)) for major, minor in versions), default=None)
    return binary


def _mach_o(data: bytes) -> Binary:
    machine, commands = struct.unpack_from("<I8xI", data, 4)
    binary, at = Binary("darwin", {0x1000007: "x86_64", 0x100000C: "arm64"}[machine]), 32
    for _ in range(commands):
        command, size = struct.unpack_from("<II", data, at)
        if command == 2:  # symbols; type 0xE: its section, 1: external
            symbols, count, names = struct.unpack_from("<III", data, at + 8)
            for name, kind in struct.iter_unpack("<IB11x", data[symbols : symbols + 16 * count]):
                if kind & 1 and kind & 0xE:
                    binary.exports.add(_text(data, names + name).removeprefix("_"))
        if command == 0xC:  # a library
            binary.needs.add(_text(data, at + struct.unpack_from("<I", data, at + 8)[0]))
        if command == 0x32:  # the least version
            version = struct.unpack_from("<I", data, at + 12)[0]
            binary.oldest = version >> 16, version >> 8 & 255
        binary.signed |= command == 0x1D
        at += size
    return binary


def _pe(data: bytes) -> Binary:
    header = struct.unpack_from("<I", data, 60)[0]
    machine, count, optional = struct.unpack_from("<HH12xH", data, header + 4)
    binary = Binary("win32", {0x8664: "x86_64", 0xAA64: "arm64"}[machine])
    # of each section: size and address in memory, size and offset in the file
    places = [struct.unpack_from("<IIII", data, header + 24 + optional + 40 * k + 8) for k in range(count)]

    def offset(address: int) -> int:
        return next(address - start + at for size, start, _, at in places if start <= address < start + size)

    exports, _, imports, _ = struct.unpack_from("<IIII", data, header + 24 + 112)
    count, names = struct.unpack_from("<I4xI", data, offset(exports) + 24)
    binary.exports = {_text(data, offset(name)) for name in _numbers(data, offset(names), count)}
    at = offset(imports)
    while (name := struct.unpack_from("<I", data, at + 12)[0]) != 0:
        binary.needs.add(_text(data, offset(name)).lower())
        at += 20
    return binary


def _numbers(data: bytes, at: int, count: int) -> Iterator[int]:
    return iter(struct.unpack_from(f"<{count}I", data, at))
