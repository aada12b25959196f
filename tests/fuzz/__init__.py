"""A differential fuzzer: random requests, run by every backend that takes them and compared with a float64 computation
that imports nothing of the project.

`python -m tests.fuzz --hours 2` runs it for long; `test_fuzz.py` runs 2,000 cases, with a new seed each day.

- `cases.py` draws a case: plain data that JSON can hold.
- `topologies.py` says which edges a case has, by comparing all pairs.
- `oracle.py` computes what should come out, its gradients, and how far rounding may move each number.
- `project.py` turns a case into a graph and a request, and runs it. It alone imports mpnn.
- `compare.py` compares the two; `shrink.py` makes a failing case small.
"""
