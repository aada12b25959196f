"""Training loops and their checkpoints."""
