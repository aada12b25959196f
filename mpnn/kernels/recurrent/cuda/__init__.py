"""Triton kernels of recurrences: `chunks/` (in parallel chunks), `recurrence` (node by node) and `selective_scan`."""
