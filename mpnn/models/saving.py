"""Models that can be kept in a folder: `config.json` says how to make one, `model.safetensors` holds its weights.

A subclass of `Model` does nothing for it: the arguments of its constructor are written down as it is called. They may
be numbers, text, lists, dictionaries, topologies, dataclasses of these, and other such models.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import nn
from torch.nn import functional as F

from mpnn.graph import Graph
from mpnn.graphs.parse import parse
from mpnn.topology import Topology

M = TypeVar("M", bound="Model")

CONFIG, WEIGHTS = "config.json", "model.safetensors"

_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Model(nn.Module):
    """A module that `save_pretrained` writes to a folder and `from_pretrained` makes again."""

    _arguments: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = _noted(cls.__init__)  # type: ignore[method-assign]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`, whole or not at all; the folder is made if need be. What stood
        there is replaced when both are written.

        Raises:
            ImportError: safetensors is not installed.
            ValueError: an argument that the model was made with cannot be written as JSON; the sentence names it.
        """
        safetensors = _safetensors()
        config = _written(self, type(self).__name__)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _replace(
            {
                folder / CONFIG: lambda path: path.write_text(json.dumps(config, indent=2) + "\n"),
                folder / WEIGHTS: lambda path: safetensors.save_model(self, str(path), {"format": "pt"}),
            }
        )

    @classmethod
    def from_pretrained(cls: type[M], folder: str | os.PathLike[str], **changes: Any) -> M:
        """The model that `save_pretrained` wrote, its weights of the same type, in evaluation mode and on the CPU.

        Args:
            folder: where it was written. changes: arguments of the constructor that take the place of those written,
                such as `graph=window(64)`: the same weights over another topology.

        Raises:
            ImportError: safetensors is not installed.
            FileNotFoundError: the folder or one of its files is not there.
            ValueError: a file is damaged, or not of this model; the sentence says which and why.
        """
        safetensors = _safetensors()
        folder = Path(folder)
        config = _config(folder / CONFIG, cls.__name__)
        model = cls(**_read_all(cls, config["arguments"], folder / CONFIG, changes))
        weights = folder / WEIGHTS
        if not weights.is_file():
            raise FileNotFoundError(f"there is no {weights}; save_pretrained writes it beside {CONFIG}")
        try:
            _to_type_of(model, weights)
            safetensors.load_model(model, str(weights))
        except Exception as error:  # safetensors has its own kinds, and torch's loading raises RuntimeError
            why = " ".join(str(error).split())
            raise ValueError(f"{weights} does not hold the weights of this {cls.__name__}: {why}") from None
        return model.eval()


def _noted(init: Callable[..., None]) -> Callable[..., None]:
    """`init`, after its arguments have been written down; a subclass's come first, and those are kept."""
    signature = inspect.signature(init)

    @wraps(init)
    def noted(self: Model, *args: Any, **kwargs: Any) -> None:
        if "_arguments" not in self.__dict__:
            given = dict(signature.bind(self, *args, **kwargs).arguments)
            del given[next(iter(signature.parameters))]
            for parameter in signature.parameters.values():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    given |= given.pop(parameter.name, {})
            self.__dict__["_arguments"] = given
        init(self, *args, **kwargs)

    return noted


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            'models are saved with safetensors, which is not installed; run: pip install "mpnn[hf]"'
        ) from error
    return safetensors.torch


def _to_type_of(model: nn.Module, weights: Path) -> None:
    """Brings the model to the floating point type of the weights, where they have one."""
    from safetensors import safe_open

    with safe_open(str(weights), framework="pt") as file:
        names = file.keys()
        types = {_TYPES[kind] for name in names if (kind := file.get_slice(name).get_dtype()) in _TYPES}
    if len(types) == 1:
        model.to(types.pop())


def _replace(files: Mapping[Path, Callable[[Path], Any]]) -> None:
    """Writes all of them beside where they belong and then moves them there, so that none is ever half a file."""
    written: dict[Path, str] = {}
    try:
        for path, write in files.items():
            handle, written[path] = tempfile.mkstemp(dir=path.parent, prefix=path.name)
            os.close(handle)
            write(Path(written[path]))
            os.chmod(written[path], 0o644)
        for path, name in written.items():
            os.replace(name, path)
    finally:
        for name in written.values():
            Path(name).unlink(missing_ok=True)


def safe_globals() -> list[Any]:
    """What a pickle of a whole model names, so that torch reads it without running anything else:

        with torch.serialization.safe_globals(models.safe_globals()):
            model = torch.load("model.pt", weights_only=True)

    These are torch's modules and activations and the classes of mpnn that layers and models are made of; add classes of
    your own. `save_pretrained` needs no such list, and what it writes does not depend on how classes are laid out.
    """
    modules = {name: module for name, module in sys.modules.items() if name.startswith(_LAYERS)}
    classes = [
        value
        for name, module in modules.items()
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == name
    ]
    return [*classes, F.elu, F.gelu, F.leaky_relu, F.relu, F.selu, F.sigmoid, F.silu, F.softplus, F.tanh]


_LAYERS = (
    "torch.nn.modules.",
    *(
        f"mpnn.{name}"
        for name in ("aggregate", "attention", "dropout", "message_passing", "models", "position", "scores", "update")
    ),
)

# ---------------------------------------------------------------------------------------------------- arguments


def _written_all(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: _written(value, name) for name, value in arguments.items()}


def _written(value: Any, name: str) -> Any:
    """An argument as JSON; topologies as {"topology": text}, graphs as {"graph": what it was}, models as files have
    them."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_written(part, name) for part in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _written(part, name) for key, part in value.items()}
    if isinstance(value, Topology):
        text = repr(value)
        if _parsed(text) != value:
            raise ValueError(f"{name}={text} cannot be written as text; save the weights with safetensors instead")
        return {"topology": text}
    if isinstance(value, Graph):
        return {"graph": repr(value)}
    if isinstance(value, Model):
        return {"model": type(value).__name__, "arguments": _written_all(getattr(value, "_arguments", {}))}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _written(getattr(value, field.name), name) for field in fields(value)}
    raise ValueError(f"{name}={value!r} cannot be written as JSON; save the weights with safetensors instead")


def _parsed(text: str) -> Topology | None:
    try:
        return parse(text)
    except ValueError:
        return None


def _read_all(cls: type[Model], written: dict[str, Any], path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(cls.__init__)
    _refuse_unknown(cls, written, path)
    arguments = {}
    for name, value in (written | changes).items():
        if name in changes:
            arguments[name] = value
        elif isinstance(value, dict) and set(value) == {"graph"}:
            raise ValueError(
                f"this model was made over a graph, {value['graph']}; give it: from_pretrained(..., {name}=)"
            )
        else:
            arguments[name] = _read(value, hints.get(name), path)
    return arguments


def _refuse_unknown(cls: type[Model], written: dict[str, Any], path: Path) -> None:
    parameters = inspect.signature(cls.__init__).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    if unknown := written.keys() - {parameter.name for parameter in parameters}:
        raise ValueError(f"{path} does not describe a {cls.__name__}, which takes no {', '.join(sorted(unknown))}")


def _read(value: Any, hint: Any, path: Path) -> Any:
    if isinstance(value, dict) and set(value) == {"topology"}:
        return parse(value["topology"])
    if isinstance(value, list):
        return [_read(part, None, path) for part in value]
    if isinstance(value, dict) and set(value) == {"model", "arguments"}:
        model = _named(value["model"], path)
        return model(**_read_all(model, value["arguments"], path, {}))
    hint = next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)), None)
    if isinstance(value, dict) and hint is not None:
        hints = get_type_hints(hint)
        try:
            return hint(**{name: _read(part, hints.get(name), path) for name, part in value.items()})
        except TypeError as error:
            raise ValueError(f"{path} does not describe a {hint.__name__}: {error}") from None
    return value


def _named(name: str, path: Path) -> type[Model]:
    """The kind of model that has this name."""
    known = [Model]
    for model in known:
        known += model.__subclasses__()
    found = [model for model in known if model.__name__ == name]
    if not found:
        raise ValueError(f"{path} speaks of a model {name!r}, which is not imported here")
    return found[-1]


def _config(path: Path, name: str) -> dict[str, Any]:
    """What `config.json` holds, when it is one that this model wrote."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; from_pretrained takes a folder that save_pretrained wrote")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("arguments"), dict) or "model" not in config:
        raise ValueError(f"{path} was not written by save_pretrained of this library")
    if config["model"] != name:
        raise ValueError(f"{path} describes a {config['model']}, not a {name}")
    return config
