"""Models of Hugging Face's transformers, run as message passing: `from_hf`, `to_hf`, and one file for each family."""

from mpnn.integrations.hf.convert import FAMILIES, from_hf
from mpnn.integrations.hf.export import to_hf

__all__ = ["FAMILIES", "from_hf", "to_hf"]
