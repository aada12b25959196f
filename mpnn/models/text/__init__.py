"""Models of text. Each file defines one model."""
