"""Models of Hugging Face's transformers over graphs: `use` changes a model in place, `from_hf` copies it."""

try:
    from mpnn.integrations.hf.use import from_hf, use
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError("mpnn.hf needs transformers, which is not installed; run: pip install transformers") from error

__all__ = ["from_hf", "use"]
