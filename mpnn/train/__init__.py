"""The training loop, its tasks and its checkpoints. It needs accelerate, the extra `mpnn[train]`."""
