"""The attention that `mpnn view` shows: of models of transformers, and of texts that `mpnn train` learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpnn.cli.tasks import CHARACTERS
from mpnn.graph import Graph
from mpnn.graphs import parse
from mpnn.view.attention import Recording, attention

TEXT = "The animal didn't cross the street because it was too tired."
_OWN = "its own graph"
_WINDOW = "window(2)"

Shown = tuple[dict[str, Any], str]
"""The data of `mpnn.view.attention.attention`, and the expression that the other panes open with."""


def of_transformers(name: str, text: str, graphs: Sequence[str] | None) -> Shown:
    """The attention of a model of transformers over each graph.

    Args:
        name: a folder, or the name of a model that transformers finds.
        graphs: expressions; "" stands for the model's own masks. None: these, and a window.

    Raises:
        ImportError: if transformers is not installed.
        ValueError: if there is no such model, it cannot take the text, or a graph does not fit it.
    """
    try:
        import transformers

        import mpnn.hf
    except ImportError:
        raise ImportError("models need transformers, which is not installed; run: pip install transformers") from None
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model = transformers.AutoModel.from_pretrained(name).eval()
    except OSError as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{name} is no expression, no folder of a model, and no name that loads one: {why}") from None
    config = model.config.get_text_config()
    if config.is_encoder_decoder:
        raise ValueError(f"{name} has an encoder and a decoder; the viewer shows models over one sequence")
    inputs = tokenizer(text, return_tensors="pt", verbose=False)
    count, most = inputs.input_ids.shape[1], getattr(config, "max_position_embeddings", None)
    if not count:
        raise ValueError("the text has no tokens; name one with --text")
    if most is not None and count > most:
        raise ValueError(f"{name} takes at most {most} tokens; the text has {count}")

    def recording(expression: str) -> Recording:
        made = Recording(expression or _OWN, count, config.num_hidden_layers)
        handle = mpnn.hf.use(model, expression or None)
        try:
            with torch.no_grad(), mpnn.hf.record(made.add):
                model(**inputs)
        finally:
            handle.restore()
        return made

    return _side_by_side(_pieces(tokenizer, text, inputs.input_ids[0]), recording, graphs)


def of_run(name: str, text: str, graphs: Sequence[str] | None) -> Shown:
    """The attention of a model of characters that `mpnn train` saved in the folder `name`, as `of_transformers`. ""
    stands for the graph that it was trained on.

    Raises:
        ValueError, OSError: if the folder has no such model, it does not know a character of the text, or a graph does
            not fit it.
    """
    from mpnn.data import Characters
    from mpnn.models import GPT

    folder = Path(name)
    characters = Characters((folder / CHARACTERS).read_bytes().decode("utf-8"))
    model = GPT.from_pretrained(folder).eval()
    tokens = characters.encode(text)
    if not 0 < len(tokens) <= model.context:
        raise ValueError(f"the model takes 1 to {model.context} characters; --text has {len(tokens)}")

    def recording(expression: str) -> Recording:
        made = Recording(expression or str(model.layers[0].graph), len(tokens), len(model.layers))

        def bind(own: Any) -> Graph:
            graph: Graph = (parse(expression) if expression else own).bind(len(tokens))
            return graph

        bound = [bind(layer.graph) for layer in model.layers]
        with torch.no_grad():
            weights = model.decode(tokens[None], bind=bind, return_weights=True).weights
        for graph, of_layer in zip(bound, weights or (), strict=True):
            made.add(graph, of_layer)
        return made

    return _side_by_side(list(text), recording, graphs)


def _side_by_side(tokens: Sequence[str], record: Callable[[str], Recording], graphs: Sequence[str] | None) -> Shown:
    if graphs:
        recordings = [record(expression) for expression in graphs]
        named = [expression for expression in graphs if expression]
    else:
        own = record("")
        named = [f"causal & {_WINDOW}" if own.is_causal else _WINDOW]
        recordings = [own, record(named[0])]
    return attention(tokens, recordings), named[-1] if named else "causal" if recordings[0].is_causal else "complete"


def _pieces(tokenizer: Any, text: str, ids: Tensor) -> list[str]:
    """The text of each token, with the blank before it, or the name of a token without text, such as [CLS]."""
    names = tokenizer.convert_ids_to_tokens(ids.tolist())
    if not getattr(tokenizer, "is_fast", False):
        return [str(name) for name in names]
    pieces: list[str] = []
    end = 0
    spans = tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    for name, (start, stop) in zip(names, spans, strict=True):
        pieces.append(text[end:stop] if stop > start else f" {name} " if pieces else f"{name} ")
        end = max(end, stop)
    return pieces
