"""The attention that `mpnn view` shows over a text: of models of transformers, and of runs of `mpnn train`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpnn import Graph
from mpnn.cli.tasks import CHARACTERS
from mpnn.cli.view_models import OWN, record_each, record_transformers, shown_name, tokenizer_of
from mpnn.graphs import parse
from mpnn.view import Page, of_topology
from mpnn.view.attention import Recording, attention
from mpnn.view.subject import Tokens

TEXT = "The animal didn't cross the street because it was too tired."
_WINDOW = "window(2)"
_TITLE = 60  # characters


def of_transformers(name: str, model: Any, text: str, graphs: Sequence[str] | None) -> Page:
    """The page of a model of transformers.

    Args:
        name: the folder or name of the model.
        graphs: expressions; "" stands for the model's own masks. None: these, and a window.
    """
    config = model.config.get_text_config()
    if config.is_encoder_decoder:
        raise ValueError(f"{name} has an encoder and a decoder; the viewer shows models over one sequence")
    tokenizer = tokenizer_of(name)
    inputs = tokenizer(text, return_tensors="pt", verbose=False)
    count = inputs.input_ids.shape[1]
    most = getattr(config, "max_position_embeddings", None)
    if not count:
        raise ValueError("the text has no tokens; name one with --text")
    if most is not None and count > most:
        raise ValueError(f"{name} takes at most {most} tokens; the text has {count}")

    def record(expression: str) -> Recording:
        return record_transformers(model, inputs, expression or OWN, expression or None)

    recorded = record_each(record, graphs, _window)
    return _page(name, _tokens(tokenizer, text, inputs.input_ids[0]), text, *recorded)


def of_run(name: str, text: str, graphs: Sequence[str] | None) -> Page:
    """The page of a model of characters that `mpnn train` saved in the folder `name`, as `of_transformers`. "" stands
    for the graph that it was trained on."""
    from mpnn.data import Characters
    from mpnn.models import GPT

    folder = Path(name)
    characters = Characters((folder / CHARACTERS).read_bytes().decode("utf-8"))
    model = GPT.from_pretrained(folder).eval()
    tokens = characters.encode(text)
    if not 0 < len(tokens) <= model.context:
        raise ValueError(f"the model takes 1 to {model.context} characters; --text has {len(tokens)}")

    def record(expression: str) -> Recording:
        return record_characters(model, tokens, expression or str(model.layers[0].graph), expression)

    return _page(name, Tokens(list(text)), text, *record_each(record, graphs, _window))


def record_characters(model: Any, tokens: Tensor, name: str, expression: str = "") -> Recording:
    """The attention of a GPT over characters, int64 [N], and a graph; "" stands for the graph of each of its layers."""
    recording = Recording(name, len(tokens), len(model.layers))

    def bind(own: Any) -> Graph:
        graph: Graph = (parse(expression) if expression else own).bind(len(tokens))
        return graph

    bound = [bind(layer.graph) for layer in model.layers]
    with torch.no_grad():
        weights = model.decode(tokens[None], bind=bind, return_weights=True).weights
    for graph, of_layer in zip(bound, weights or (), strict=True):
        recording.add(graph, of_layer)
    return recording


def _window(own: Recording) -> str:
    return f"causal & {_WINDOW}" if own.is_causal else _WINDOW


def _page(name: str, tokens: Tokens, text: str, recordings: Sequence[Recording], named: str | None) -> Page:
    said = f"What each of its {tokens.size:,} tokens attends to in {shown_name(name)}, in every layer and head."
    title = text if len(text) <= _TITLE else f"{text[:_TITLE]}…"
    graph = of_topology(named or ("causal" if recordings[0].is_causal else "complete"), tokens.size)
    return replace(graph, title=title, subtitle=said, attention=attention(tokens, recordings))


def _tokens(tokenizer: Any, text: str, ids: Tensor) -> Tokens:
    """The text of each token, with the blank before it, or the name of a token without text, such as [CLS]."""
    special = [k for k, one in enumerate(ids.tolist()) if one in tokenizer.all_special_ids]
    names = tokenizer.convert_ids_to_tokens(ids.tolist())
    if not getattr(tokenizer, "is_fast", False):
        return Tokens([str(name) for name in names], special=special)
    pieces: list[str] = []
    end = 0
    spans = tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    for name, (start, stop) in zip(names, spans, strict=True):
        pieces.append(text[end:stop] if stop > start else f" {name} " if pieces else f"{name} ")
        end = max(end, stop)
    return Tokens(pieces, special=special)
