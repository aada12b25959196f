"""Random damage to files."""

import random
import struct


def mutated(whole: bytes, draw: random.Random) -> bytes:
    """One to three random changes: bytes, bits, numbers, cuts, repeats, insertions."""
    data = bytearray(whole)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data) + 1)
        to = min(len(data), at + draw.choice([1, 2, 4, 8, 50]))
        kind = draw.randrange(6)
        if kind == 0:
            data[at:to] = draw.randbytes(to - at)
        elif kind == 1 and at < to:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            data[at : at + 4] = struct.pack("<I", draw.choice([0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1]))
        elif kind == 3:
            del data[at:to]
        elif kind == 4:
            data[at:at] = data[at:to] * draw.choice([1, 2, 1000])
        else:
            data[at:at] = draw.choice([b"-", b"9" * 20, b"\n", b" ", b"\x00", b"(", b"t", b"R", b"b", b"2"])
    return bytes(data)
