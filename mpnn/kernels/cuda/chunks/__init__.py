"""Recurrences in parallel chunks, by Triton. `function.Chunked` runs them; `mpnn.kernels.scan.recurrence` calls it."""
