"""Shared by the pages of models: loading a model of transformers, and recording its attention over each graph."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mpnn.decoding.generation import check_causal
from mpnn.graphs import parse
from mpnn.view.attention import Recording

OWN = "its own graph"
MAX_GRAPHS = 2


def record_each(
    record: Callable[[str], Recording], graphs: Sequence[str] | None, other: Callable[[Recording], str | None]
) -> tuple[list[Recording], str | None]:
    """The recordings over each graph, and the last of these graphs that has an expression.

    Args:
        record: gives the recording over an expression; "" stands for the model's own graph.
        graphs: expressions. None: the model's own, and the expression that `other` gives for its recording.
    """
    if graphs:
        named = [expression for expression in graphs if expression]
        return [record(expression) for expression in graphs], named[-1] if named else None
    own = record("")
    expression = other(own)
    return [own] if expression is None else [own, record(expression)], expression


def shown_name(name: str | Path) -> str:
    """The name of a model as a page shows it: without the folders on this machine that lead to it."""
    return Path(name).absolute().name if Path(name).exists() else str(name)


def transformers_model(name: str, kind: str = "AutoModel") -> Any:
    """A model of transformers in a folder, or of this name on the Hub, in evaluation mode, as this auto class."""
    import_module("mpnn.hf")  # says if transformers is missing; registers the attention that saved models name
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        return getattr(transformers, kind).from_pretrained(name).eval()
    except OSError as error:
        raise not_a_model(name, error) from None


def tokenizer_of(name: str | Path) -> Any:
    """The tokenizer of a model of transformers in a folder, or of this name on the Hub."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        # Without files, transformers makes a tokenizer that knows special tokens only.
        if {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens}:
            return tokenizer
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not Path(name).exists():
            raise not_a_model(str(name), error) from None
    raise ValueError(f"{name} has no tokenizer; write it there with tokenizer.save_pretrained")


def own_graph(model: Any) -> dict[str, Any]:
    """The arguments of `mpnn.hf.use` that give a model of transformers the graph that it was saved with, if any."""
    config = model.config.get_text_config()
    return {"graph": getattr(config, "mpnn_graph", None), "causal": getattr(config, "mpnn_causal", True)}


def named_graph(model: Any, expression: str, tokens: int) -> dict[str, Any]:
    """The arguments of `mpnn.hf.use` for an expression over this many tokens.

    Raises:
        ValueError: if a token of a decoder attends to a later one. Commands have no `causal=False`.
    """
    import mpnn.hf

    if mpnn.hf.is_causal(model):
        check_causal(parse(expression), tokens)
    return {"graph": expression}


def not_a_model(name: str, error: OSError) -> ValueError:
    """The error for a name that does not load a model and what it reads."""
    why = str(error).splitlines()[0]
    missing = (
        "" if Path(name).exists() else f"{name} is no expression, no folder of a model, and no name that loads one: "
    )
    return ValueError(f"{missing}{why}")


def record_transformers(model: Any, inputs: Any, name: str, graph: str | None, budget: int | None = None) -> Recording:
    """The attention of a model of transformers over a graph; None: the one that it was saved with, or its own masks."""
    import mpnn.hf

    layers = model.config.get_text_config().num_hidden_layers
    made: list[Recording] = []

    def visit(over: Any, weights: torch.Tensor) -> None:
        if not made:
            made.append(Recording(name, over.num_dst, layers, budget=budget))
        made[0].add(over, weights)

    tokens = inputs["input_ids"].shape[-1] if "input_ids" in inputs else 1
    handle = mpnn.hf.use(model, **(own_graph(model) if graph is None else named_graph(model, graph, tokens)))
    try:
        with torch.no_grad(), mpnn.hf.record(visit):
            model(**inputs)
    finally:
        handle.restore()
    if not made:
        raise ValueError(f"no layer of {type(model).__name__} gave attention weights; the viewer cannot show it")
    return made[0]
