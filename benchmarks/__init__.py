"""Benchmarks: this library and its peers, interleaved in one run on the same inputs; `python -m benchmarks --help`."""
