"""Models that can be kept in a folder: `config.json` says how to make one, `model.safetensors` holds its weights.

A subclass of `Model` does nothing for it: the arguments of its constructor are written down as it is called. They may
be numbers, text, lists, dictionaries, topologies, dataclasses of these, and other such models.
"""

from __future__ import annotations

import inspect
import json
import os
import reprlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from math import prod
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mpnn.files import atomic_path
from mpnn.graph import Graph
from mpnn.graphs.parse import parse
from mpnn.topology import Topology

M = TypeVar("M", bound="Model")
T = TypeVar("T")

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_CONFIG_KEY = "config"  # in the metadata of the weights: what config.json holds

_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Model(nn.Module):
    """A module that `save_pretrained` writes to a folder and `from_pretrained` makes again."""

    _arguments: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = _noted(cls.__init__)  # type: ignore[method-assign]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`; the folder is created if it does not exist.

        Both files are complete on the disk before the first takes its name, the weights. They hold their configuration
        too, so that `from_pretrained` notices a process that was killed between the two, and never mixes two models.

        Raises:
            ImportError: safetensors is not installed.
            ValueError: an argument that the model was made with cannot be written as JSON; the sentence names it.
            OSError: the folder cannot be written; what it held before is still there.
        """
        safetensors = _safetensors()
        config = _written(self, type(self).__name__)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(folder / CONFIG) as beside, atomic_path(folder / WEIGHTS) as weights:  # renames the last first
            safetensors.save_model(self, str(weights), {"format": "pt", _CONFIG_KEY: json.dumps(config)})
            beside.write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls: type[M], folder: str | os.PathLike[str], **changes: Any) -> M:
        """The model that `save_pretrained` wrote, its weights of the same type, in evaluation mode and on the CPU.

        The header of the weights is read first. A configuration that needs far more numbers than the weights hold is
        refused before these are allocated. Arguments are changed through `changes`, not in the file: `config.json` has
        to be the one that was saved with the weights.

        Args:
            folder: where it was written. changes: arguments of the constructor that take the place of those written,
                such as `graph=window(64)`: the same weights over another topology.

        Raises:
            ImportError: safetensors is not installed.
            FileNotFoundError: the folder or one of its files is not there.
            TypeError: the constructor takes no argument of a name in `changes`.
            ValueError: a file is damaged, not of this model, or not of the same save as the other; the sentence says
                which and why.
        """
        safetensors = _safetensors()
        path, weights = Path(folder) / CONFIG, Path(folder) / WEIGHTS
        config = _config(path, cls.__name__)
        if not weights.is_file():
            raise FileNotFoundError(f"there is no {weights}; save_pretrained writes it beside {CONFIG}")
        if unknown := _unknown(cls, changes):
            raise TypeError(f"{cls.__name__} takes no {', '.join(unknown)}")
        _refuse_unknown(cls, config["arguments"], path, "arguments")
        try:
            header = _Header.read(weights)
            _refuse_other_save(config, header)
            _refuse_beyond({k: v for k, v in config["arguments"].items() if k not in changes}, header, path)
            with _Budget(header):
                model = _call(cls, _read_all(cls, config["arguments"], path, changes, "arguments"), path, "arguments")
            header.check_shapes(model)
            if len(header.types) == 1:
                model.to(next(iter(header.types)))
            safetensors.load_model(model, str(weights))
        except _Refused:
            raise
        except RecursionError:
            raise ValueError(f"{path} is nested too deeply") from None
        except Exception as error:  # safetensors has its own kinds, and torch's loading raises RuntimeError
            raise ValueError(f"{weights} does not hold the weights of this {cls.__name__}: {_why(error)}") from None
        return model.eval()


class _Refused(ValueError):
    """A configuration that does not describe a model, or not that of the weights beside it."""


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


@dataclass(frozen=True)
class _Header:
    """What a file of weights says about itself before any tensor is read."""

    path: Path
    shapes: dict[str, list[int]]
    types: set[torch.dtype]
    config: str | None

    @staticmethod
    def read(path: Path) -> _Header:
        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no dictionary
            shapes = {name: part.get_shape() for name, part in parts.items()}
            types = {_TYPES[kind] for part in parts.values() if (kind := part.get_dtype()) in _TYPES}
            return _Header(path, shapes, types, (file.metadata() or {}).get(_CONFIG_KEY))

    @property
    def elements(self) -> int:
        return sum(map(prod, self.shapes.values()))

    def check_shapes(self, model: nn.Module) -> None:
        for name, tensor in model.state_dict().items():
            shape = self.shapes.get(name, list(tensor.shape))
            if shape != list(tensor.shape):
                raise ValueError(f"{name} has shape {shape} there and {list(tensor.shape)} by {CONFIG}")


class _Budget(TorchFunctionMode):
    """Refuses tensors before they are allocated, once they are together far larger than the weights can fill."""

    _EACH = 2**16  # elements that a tensor counts at least, so that their number is limited too
    _FACTORIES: tuple[Any, ...] = (
        *(torch.empty, torch.zeros, torch.ones, torch.full, torch.eye, torch.arange, torch.linspace),
        *(torch.rand, torch.randn, torch.randint, torch.randperm),
    )

    def __init__(self, header: _Header) -> None:
        super().__init__()
        self._message = f"it needs far more than the {header.elements:,} numbers that {header.path.name} holds"
        spare = 2**24 if header.config is None else 2**28  # for what a constructor computes besides its parameters
        self._left = 2 * (header.elements + self._EACH * len(header.shapes)) + spare

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._FACTORIES:
            without_generator = {name: value for name, value in kwargs.items() if name != "generator"}
            self._left -= func(*args, **without_generator | {"device": "meta"}).numel() + self._EACH
            if self._left < 0:
                raise ValueError(self._message)
        return func(*args, **kwargs)


def _refuse_other_save(config: dict[str, Any], header: _Header) -> None:
    """Raises where the weights were saved with another configuration."""
    if header.config is not None and (difference := _difference(json.loads(header.config), config, "")):
        raise ValueError(
            f"{difference} in the configuration that they were saved with, which is in their metadata. Save the model "
            "again, or put that configuration back; to change an argument, call from_pretrained(folder, name=value)"
        )


def _difference(saved: Any, written: Any, field: str) -> str | None:
    """The first field in which two configurations differ, and how."""
    if type(saved) is type(written) is dict:
        parts = [(f"{field}.{k}".strip("."), saved.get(k, _ABSENT), written.get(k, _ABSENT)) for k in saved | written]
    elif type(saved) is type(written) is list and len(saved) == len(written):
        parts = [(f"{field}[{k}]", a, b) for k, (a, b) in enumerate(zip(saved, written, strict=True))]
    elif repr(saved) == repr(written):  # NaN is not equal to itself, and 1 equals True
        return None
    else:
        return f"{field or 'all'} is {reprlib.repr(written)} in {CONFIG} and {reprlib.repr(saved)}"
    return next(filter(None, (_difference(a, b, name) for name, a, b in parts)), None)


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _refuse_beyond(value: Any, header: _Header, path: Path, field: str = "arguments") -> None:
    """Raises at integers that no size of a model with so few weights can be: Python's lists know no budget."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        _refuse_beyond(part, header, path, f"{field}.{name}")
    if isinstance(value, int) and abs(value) > max(header.elements, 2**20) and not field.endswith(".seed"):
        raise _Refused(
            f"{path}: {field} is {reprlib.repr(value)}, but {header.path.name} holds {header.elements:,} numbers; if "
            "it is no size, give it again: from_pretrained(folder, name=value)"
        )


def _why(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 500 else f"{text[:500]}..."


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
            raise ValueError(
                f"{name}={value} cannot be written as text: register its builder with graphs.register, or save the "
                "weights with safetensors instead"
            )
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


def _read_all(cls: type[Model], written: Any, path: Path, changes: dict[str, Any], field: str) -> dict[str, Any]:
    if not isinstance(written, dict):
        raise _Refused(
            f"{path} does not describe a {cls.__name__}: {field} must be an object; got {reprlib.repr(written)}"
        )
    _refuse_unknown(cls, written, path, field)
    hints = get_type_hints(cls.__init__)
    arguments = {}
    for name, value in (written | changes).items():
        if name in changes:
            arguments[name] = value
        elif isinstance(value, dict) and set(value) == {"graph"}:
            raise _Refused(
                f"this model was made over a graph, {str(value['graph'])[:200]}; give it: from_pretrained(..., {name}=)"
            )
        else:
            arguments[name] = _read(value, hints.get(name), path, f"{field}.{name}")
    return arguments


def _refuse_unknown(cls: type[Model], written: dict[str, Any], path: Path, field: str) -> None:
    if unknown := _unknown(cls, written):
        raise _Refused(f"{path} does not describe a {cls.__name__}, which takes no {', '.join(unknown)} ({field})")


def _unknown(cls: type[Model], arguments: dict[str, Any]) -> list[str]:
    """The names that the constructor does not take."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return []
    return sorted(arguments.keys() - {parameter.name for parameter in parameters})


def _read(value: Any, hint: Any, path: Path, field: str) -> Any:
    if isinstance(value, dict) and set(value) == {"topology"}:
        try:
            return parse(value["topology"])
        except (TypeError, ValueError) as error:
            raise _Refused(f"{path}: {field} is no topology: {_why(error)}") from None
    if isinstance(value, list):
        return [_read(part, None, path, f"{field}[{k}]") for k, part in enumerate(value)]
    if isinstance(value, dict) and set(value) == {"model", "arguments"}:
        model = _named(value["model"], path, field)
        return _call(model, _read_all(model, value["arguments"], path, {}, f"{field}.arguments"), path, field)
    hint = next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)), None)
    if isinstance(value, dict) and hint is not None:
        hints = get_type_hints(hint)
        parts = {name: _read(part, hints.get(name), path, f"{field}.{name}") for name, part in value.items()}
        return _call(hint, parts, path, field)
    return value


def _call(kind: Callable[..., T], arguments: dict[str, Any], path: Path, field: str) -> T:
    """`kind(**arguments)`, where everything that goes wrong is the configuration's mistake."""
    try:
        return kind(**arguments)
    except Exception as error:
        given = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in arguments.items())
        name = getattr(kind, "__name__", kind)
        raise _Refused(f"{path} does not describe a {name}: {_why(error)}; {field} is {given}") from error


def _named(name: Any, path: Path, field: str) -> type[Model]:
    """The kind of model that has this name."""
    known = [Model]
    for model in known:
        known += model.__subclasses__()
    candidates = [model for model in known if model.__name__ == name]
    if not candidates:
        raise _Refused(f"{path}: {field}.model is {reprlib.repr(name)}, which is not imported here")
    return candidates[-1]


def _config(path: Path, name: str) -> dict[str, Any]:
    """What `config.json` holds, when it is one that this model wrote."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; from_pretrained takes a folder that save_pretrained wrote")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {_why(error)}") from None
    if not isinstance(config, dict) or not isinstance(config.get("arguments"), dict) or "model" not in config:
        raise ValueError(f"{path} was not written by save_pretrained of this library: it needs model and arguments")
    if config["model"] != name:
        raise ValueError(f"{path} describes a {str(config['model'])[:80]}, not a {name}: that is its field model")
    return config
