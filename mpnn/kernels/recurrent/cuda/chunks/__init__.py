"""Recurrences in parallel chunks, by Triton. `function.Chunked` runs them; `scan.recurrence` calls it."""
