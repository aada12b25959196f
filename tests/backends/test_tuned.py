"""How a processor is named in files of prices."""

import json

import pytest

from mpnn.backends import tuned

ZEN = "vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC 9B45 \nflags\t: fpu\n"
ARM = "processor\t: 0\nBogoMIPS\t: 2000.00\nCPU part\t: 0xd4f\n"


@pytest.mark.parametrize(
    ("cpuinfo", "named", "name", "family"),
    [
        (ZEN, "", "AMD EPYC 9B45", "AuthenticAMD 26"),
        (ZEN.replace("vendor_id", "maker"), "", "AMD EPYC 9B45", ""),
        (ZEN.replace("cpu family", "family"), "", "AMD EPYC 9B45", ""),
        (ARM, "aarch64", "aarch64", ""),
        (ARM, "", "a machine", ""),
        ("", "Intel64 Family 6 Model 207 Stepping 2, GenuineIntel", None, "GenuineIntel 6"),
        ("", "Family 6", "Family 6", ""),
        ("", "a processor, Maker", "a processor, Maker", ""),
    ],
)
def test_the_name_and_the_family_of_a_processor(
    cpuinfo: str, named: str, name: str | None, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux names the processor in a file, Windows in Python's `platform`."""
    monkeypatch.setattr(tuned, "_cpuinfo", lambda: cpuinfo)
    monkeypatch.setattr(tuned.platform, "processor", lambda: named)
    monkeypatch.setattr(tuned.platform, "machine", lambda: "a machine")
    assert tuned.processor.__wrapped__() == (named if name is None else name)
    assert tuned.family.__wrapped__() == family


def test_people_can_read_the_file_of_prices() -> None:
    prices = {"csr": {"sum": 1.5, "max": 2.0}}
    text = tuned.text(prices, 2)
    assert json.loads(text) == {"measured": tuned.machine(2), "nanoseconds": prices}
    assert '\n  "csr": {\n   "sum": 1.5,' in text
