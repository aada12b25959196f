"""Running sums: `scan.py` (linear attention, recurrences with gates and the delta rule), `selective.py` (Mamba-1),
`state.py` (one token of Mamba-2), `convolution.py` and `prefixes.py` (sums and extremes of prefixes).

`reference.py` holds their formulas in torch's operations, by which they are differentiated twice. Loops:
`../cpu/scan.cpp`, `../cpu/delta_rule.cpp`, `../cpu/feature_gates.cpp`, `../cpu/recurrence_steps.cpp`,
`../cpu/selective_scan.cpp`, `../cpu/state_update.cpp`; in Triton `cuda/chunks` (in parallel chunks),
`cuda/recurrence.py` (node by node) and `cuda/selective_scan.py`.

The backend `scan` and the recurrent layers of `integrations/hf/` call them. The twins are in
`tests/support/recurrences.py`.
"""

from mpnn.kernels.recurrent.convolution import short_convolution
from mpnn.kernels.recurrent.scan import by_triton, has_kernel, recurrence, serves
from mpnn.kernels.recurrent.selective import selective_scan
from mpnn.kernels.recurrent.state import state_update

__all__ = ["by_triton", "has_kernel", "recurrence", "selective_scan", "serves", "short_convolution", "state_update"]
