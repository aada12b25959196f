"""Running sums: `scan.py` (linear attention, recurrences with gates and the delta rule), `selective_scan.py` (Mamba-1),
`state_update.py` (one token of Mamba-2), `short_convolution.py` and `prefixes.py` (sums and extremes of prefixes).

`recurrence_again.py` holds their formulas in torch's operations, by which they are differentiated twice. Loops:
`../cpu/scan.cpp`, `../cpu/delta_rule.cpp`, `../cpu/feature_gates.cpp`, `../cpu/recurrence_steps.cpp`,
`../cpu/selective_scan.cpp`, `../cpu/state_update.cpp`; in Triton `cuda/chunks` (in parallel chunks),
`cuda/recurrence.py` (node by node) and `cuda/selective_scan.py`.

The backend `scan` and the recurrent layers of `integrations/hf/` call them. The twins are in
`tests/support/recurrences.py`.
"""
