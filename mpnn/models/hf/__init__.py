"""Models of Hugging Face's transformers, run as message passing: `from_hf`, and one file for each family."""

from mpnn.models.hf.convert import FAMILIES, from_hf

__all__ = ["FAMILIES", "from_hf"]
