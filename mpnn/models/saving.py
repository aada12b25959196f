"""Saving and loading of models: `config.json` holds the constructor arguments, `model.safetensors` the weights.

Subclasses of `Model` need no code for this: the arguments of the constructor are recorded when it is called. They may
be numbers, strings, lists, dictionaries, topologies, dataclasses of these, and other models.
"""

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
from typing import IO, Any, TypeVar, get_args, get_type_hints

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mpnn import Topology
from mpnn.graph.bound import BoundGraph
from mpnn.graph.files import DIGITS, atomic_path, digest
from mpnn.graphs.parse import parse, text_of

M = TypeVar("M", bound="Model")
T = TypeVar("T")

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_CONFIG_KEY = "config"  # key in the metadata of the weights, whose value is the content of config.json
_DIGEST_KEY = "sha256"  # the same, of the digest of the file

_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Model(nn.Module):
    """Base class of models, with `save_pretrained` and `from_pretrained`."""

    _arguments: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = _record_arguments(cls.__init__)  # type: ignore[method-assign]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`. Creates the folder if it does not exist.

        Both files are written completely under temporary names; then the weights are renamed, then the configuration.
        The weights also contain the configuration. `from_pretrained` compares the two and refuses files of different
        saves, such as after a process was killed between the two renames. They contain a digest of themselves, too.
        Equal models give equal bytes.

        Raises:
            ImportError: if safetensors is not installed.
            ValueError: if a constructor argument cannot be written as JSON. The message names it.
            OSError: if the folder cannot be written. Its previous files are unchanged.
        """
        safetensors = _safetensors()
        config = _to_json(self, type(self).__name__)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # the files are renamed in reverse order: the weights first
        with atomic_path(folder / CONFIG) as config_path, atomic_path(folder / WEIGHTS) as weights:
            metadata = {"format": "pt", _CONFIG_KEY: json.dumps(config), _DIGEST_KEY: "0" * DIGITS}
            safetensors.save_model(self, str(weights), metadata)
            _seal(weights)
            config_path.write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls: type[M], folder: str | os.PathLike[str], **changes: Any) -> M:
        """Loads a model that `save_pretrained` wrote, in evaluation mode on the CPU, with weights of the saved dtype.

        The header of the weights is read first. A configuration that needs far more memory than the size of the weights
        is refused before tensors are allocated. To change arguments, use `changes`; an edited `config.json` is refused,
        because it differs from the configuration in the weights.

        Args:
            folder: the folder that `save_pretrained` wrote.
            changes: constructor arguments that replace the saved ones. `graph=window(64)` loads the same weights over
                another topology.

        Raises:
            ImportError: if safetensors is not installed.
            FileNotFoundError: if the folder or one of its files does not exist.
            TypeError: if the constructor has no argument of a name in `changes`.
            ValueError: if a file is damaged, belongs to another model, or does not belong to the same save as the other
                file. The message says which and why.
        """
        safetensors = _safetensors()
        path = Path(folder) / CONFIG
        weights = Path(folder) / WEIGHTS
        config = _config(path, cls.__name__)
        if not weights.is_file():
            raise FileNotFoundError(f"there is no {weights}; save_pretrained writes it next to {CONFIG}")
        if unknown := _unknown(cls, changes):
            raise TypeError(f"{cls.__name__} has no argument {', '.join(unknown)}")
        _refuse_unknown(cls, config["arguments"], path, "arguments")
        try:
            header = _Header.read(weights)
            _refuse_other_save(config, header)
            _refuse_changed_bytes(weights)
            _refuse_beyond({k: v for k, v in config["arguments"].items() if k not in changes}, header, path)
            with _Budget(header):
                arguments = _arguments_from_json(cls, config["arguments"], path, changes, "arguments")
                model = _call(cls, arguments, path, "arguments")
            header.check_shapes(model)
            if len(header.types) == 1:
                model.to(next(iter(header.types)))
            safetensors.load_model(model, str(weights))
        except _InvalidConfig:
            raise
        except RecursionError:
            raise ValueError(f"{path} is nested too deeply") from None
        except Exception as error:  # safetensors raises its own exceptions, and load_state_dict RuntimeError
            raise ValueError(f"{weights} does not hold the weights of this {cls.__name__}: {_summary(error)}") from None
        return model.eval()


class _InvalidConfig(ValueError):
    """Raised for a configuration that does not describe a model, or not the model of the weights."""


def _record_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps a constructor to record its arguments. If constructors are nested, the outermost one (that of the subclass)
    is recorded."""
    signature = inspect.signature(init)

    @wraps(init)
    def recording_init(self: Model, *args: Any, **kwargs: Any) -> None:
        if "_arguments" not in self.__dict__:
            arguments = dict(signature.bind(self, *args, **kwargs).arguments)
            del arguments[next(iter(signature.parameters))]
            for parameter in signature.parameters.values():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    arguments |= arguments.pop(parameter.name, {})
            self.__dict__["_arguments"] = arguments
        init(self, *args, **kwargs)

    return recording_init


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "models are saved with safetensors, which is not installed; run: pip install safetensors"
        ) from error
    return safetensors.torch


@dataclass(frozen=True)
class _Header:
    """The header of a file of weights: shapes and dtypes of its tensors, and its metadata."""

    path: Path
    shapes: dict[str, list[int]]
    types: set[torch.dtype]
    config: str | None

    @staticmethod
    def read(path: Path) -> "_Header":
        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
            shapes = {name: part.get_shape() for name, part in parts.items()}
            types = {_TYPES[kind] for part in parts.values() if (kind := part.get_dtype()) in _TYPES}
            return _Header(path, shapes, types, (file.metadata() or {}).get(_CONFIG_KEY))

    @property
    def elements(self) -> int:
        """Total number of elements of all tensors."""
        return sum(map(prod, self.shapes.values()))

    def check_shapes(self, model: nn.Module) -> None:
        """Raises ValueError if a tensor of the model has another shape than in the file."""
        for name, tensor in model.state_dict().items():
            shape = self.shapes.get(name, list(tensor.shape))
            if shape != list(tensor.shape):
                raise ValueError(f"{name} has shape {shape} in the file and {list(tensor.shape)} according to {CONFIG}")


class _Budget(TorchFunctionMode):
    """Raises ValueError before a tensor is allocated if the total size would be far larger than that of the weights."""

    _EACH = 2**16  # overhead in elements counted for each tensor, so that the number of tensors is limited too
    _FACTORIES: tuple[Any, ...] = (
        *(torch.empty, torch.zeros, torch.ones, torch.full, torch.eye, torch.arange, torch.linspace),
        *(torch.rand, torch.randn, torch.randint, torch.randperm),
    )

    def __init__(self, header: _Header) -> None:
        super().__init__()
        self._message = f"the model needs far more than the {header.elements:,} numbers in {header.path.name}"
        spare = 2**24 if header.config is None else 2**28  # for intermediate results of constructors
        self._remaining = 2 * (header.elements + self._EACH * len(header.shapes)) + spare

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._FACTORIES:
            without_generator = {name: value for name, value in kwargs.items() if name != "generator"}
            self._remaining -= func(*args, **without_generator | {"device": "meta"}).numel() + self._EACH
            if self._remaining < 0:
                raise ValueError(self._message)
        return func(*args, **kwargs)


def _refuse_other_save(config: dict[str, Any], header: _Header) -> None:
    """Raises ValueError if the weights were saved with another configuration."""
    if header.config is not None and (difference := _difference(json.loads(header.config), config, "")):
        raise ValueError(
            f"{difference} in the configuration that they were saved with, which is in their metadata. Save the model "
            "again, or restore that configuration; to change an argument, call from_pretrained(folder, name=value)"
        )


def _seal(path: Path) -> None:
    """Sorts the metadata, which safetensors writes in random order, and writes the digest of the file into it."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= size
        file.seek(8)
        file.write(text.ljust(size))
        at = _place_of_digest(file)
        checksum = digest(file, at)
        file.seek(at)
        file.write(checksum)


def _place_of_digest(file: IO[bytes]) -> int:
    """The position of the digest in a file of weights, or 0 if it has none, as older files."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    name = f'"{_DIGEST_KEY}":"'.encode()
    return 8 + len(name) + at if (at := file.read(size).find(name)) >= 0 else 0


def _refuse_changed_bytes(path: Path) -> None:
    with path.open("rb") as file:
        if at := _place_of_digest(file):
            file.seek(at)
            if file.read(DIGITS) != digest(file, at):
                raise ValueError("a byte of the file has changed since it was saved: copy it again, or save again")


def _difference(saved: Any, written: Any, field: str) -> str | None:
    """Describes the first field in which two configurations differ, or returns None."""
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
    """Raises for integers too large to be a size of this model. `_Budget` does not limit Python lists."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        _refuse_beyond(part, header, path, f"{field}.{name}")
    if isinstance(value, int) and abs(value) > max(header.elements, 2**20) and not field.endswith(".seed"):
        raise _InvalidConfig(
            f"{path}: {field} is {reprlib.repr(value)}, but {header.path.name} holds {header.elements:,} numbers; if "
            "the value is not a size, pass it as an argument: from_pretrained(folder, name=value)"
        )


def _summary(error: Exception) -> str:
    """Returns the message of an error on one line, shortened to 500 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 500 else f"{text[:500]}..."


def safe_globals() -> list[Any]:
    """Returns the classes and functions that a pickled model may contain, so that torch loads it without other code:

        with torch.serialization.safe_globals(models.safe_globals()):
            model = torch.load("model.pt", weights_only=True)

    These are the modules and activations of torch and the classes of layers and models of mpnn. Add your own classes to
    the list. `save_pretrained` needs no such list, and its files do not depend on the module paths of classes.
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
    *("mpnn.aggregate", "mpnn.attention", "mpnn.graphs.encodings", "mpnn.message_passing", "mpnn.models"),
    *("mpnn.position", "mpnn.scores", "mpnn.update"),
)

# ---------------------------------------------------------------------------------------------------- arguments


def _to_json(value: Any, name: str) -> Any:
    """Converts an argument to JSON. Topologies become {"topology": text}, graphs {"graph": description}, and models
    {"model": class name, "arguments": {...}}, as in `config.json`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_to_json(part, name) for part in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _to_json(part, name) for key, part in value.items()}
    if isinstance(value, Topology):
        if (text := text_of(value)) is None:
            raise ValueError(
                f"{name}={value} cannot be written as text: decorate its builder with graphs.register, and give "
                "its rule the name of the builder after an underscore, or save the weights with safetensors instead"
            )
        return {"topology": text}
    if isinstance(value, BoundGraph):
        return {"graph": repr(value)}
    if isinstance(value, Model):
        arguments = {name: _to_json(part, name) for name, part in getattr(value, "_arguments", {}).items()}
        return {"model": type(value).__name__, "arguments": arguments}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_json(getattr(value, field.name), name) for field in fields(value)}
    raise ValueError(f"{name}={value!r} cannot be written as JSON; save the weights with safetensors instead")


def _arguments_from_json(
    cls: type[Model], saved: Any, path: Path, changes: dict[str, Any], field: str
) -> dict[str, Any]:
    if not isinstance(saved, dict):
        raise _InvalidConfig(
            f"{path} does not describe a {cls.__name__}: {field} must be an object; got {reprlib.repr(saved)}"
        )
    _refuse_unknown(cls, saved, path, field)
    hints = get_type_hints(cls.__init__)
    arguments = {}
    for name, value in (saved | changes).items():
        if name in changes:
            arguments[name] = value
        elif isinstance(value, dict) and set(value) == {"graph"}:
            raise _InvalidConfig(
                f"the model was saved with a graph, {str(value['graph'])[:200]}; pass it: from_pretrained(..., {name}=)"
            )
        else:
            arguments[name] = _from_json(value, hints.get(name), path, f"{field}.{name}")
    return arguments


def _refuse_unknown(cls: type[Model], saved: dict[str, Any], path: Path, field: str) -> None:
    if unknown := _unknown(cls, saved):
        names = ", ".join(unknown)
        raise _InvalidConfig(f"{path} does not describe a {cls.__name__}, which has no argument {names} ({field})")


def _unknown(cls: type[Model], arguments: dict[str, Any]) -> list[str]:
    """Returns the names that are not arguments of the constructor."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return []
    return sorted(arguments.keys() - {parameter.name for parameter in parameters})


def _from_json(value: Any, hint: Any, path: Path, field: str) -> Any:
    """Inverse of `_to_json`. `hint` is the type annotation of the argument, which names its dataclass."""
    if isinstance(value, dict) and set(value) == {"topology"}:
        try:
            return parse(value["topology"])
        except (TypeError, ValueError) as error:
            raise _InvalidConfig(f"{path}: {field} is not a topology: {_summary(error)}") from None
    if isinstance(value, list):
        return [_from_json(part, None, path, f"{field}[{k}]") for k, part in enumerate(value)]
    if isinstance(value, dict) and set(value) == {"model", "arguments"}:
        model = _model_class(value["model"], path, field)
        arguments = _arguments_from_json(model, value["arguments"], path, {}, f"{field}.arguments")
        return _call(model, arguments, path, field)
    hint = next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)), None)
    if isinstance(value, dict) and hint is not None:
        hints = get_type_hints(hint)
        parts = {name: _from_json(part, hints.get(name), path, f"{field}.{name}") for name, part in value.items()}
        return _call(hint, parts, path, field)
    return value


def _call(kind: Callable[..., T], arguments: dict[str, Any], path: Path, field: str) -> T:
    """Returns `kind(**arguments)`. Any error is raised as an invalid configuration."""
    try:
        return kind(**arguments)
    except Exception as error:
        text = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in arguments.items())
        name = getattr(kind, "__name__", kind)
        raise _InvalidConfig(f"{path} does not describe a {name}: {_summary(error)}; {field} is {text}") from error


def _model_class(name: Any, path: Path, field: str) -> type[Model]:
    """Returns the subclass of Model with this name."""
    known = [Model]
    for model in known:
        known += model.__subclasses__()
    candidates = [model for model in known if model.__name__ == name]
    if not candidates:
        raise _InvalidConfig(f"{path}: {field}.model is {reprlib.repr(name)}; no imported class has this name")
    return candidates[-1]


def _config(path: Path, name: str) -> dict[str, Any]:
    """Returns the content of `config.json`, checked to be that of a model of this class name."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; from_pretrained needs a folder that save_pretrained wrote")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {_summary(error)}") from None
    if not isinstance(config, dict) or not isinstance(config.get("arguments"), dict) or "model" not in config:
        raise ValueError(
            f"{path} was not written by save_pretrained of mpnn: it must have the fields model and arguments"
        )
    if config["model"] != name:
        raise ValueError(f"{path} describes a {str(config['model'])[:80]}, not a {name} (field model)")
    return config
