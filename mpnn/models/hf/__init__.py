"""Models of Hugging Face's transformers, run as message passing: `from_hf`, `to_hf`, and one file for each family."""

from mpnn.models.hf.back import to_hf
from mpnn.models.hf.convert import FAMILIES, from_hf

__all__ = ["FAMILIES", "from_hf", "to_hf"]
