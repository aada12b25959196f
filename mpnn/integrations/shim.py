"""Modules under the names of other libraries, for code that imports these: their functions, computed by mpnn.

    python -m mpnn.shim flash_attn script.py --its-arguments       runs a script
    python -m mpnn.shim flash_attn,natten -m its.module            or a module

    import mpnn.shim                                               or two lines, before the code is imported
    mpnn.shim.provide("flash_attn")

    name           modules                                             functions in `mpnn.` and `mpnn.integrations.`
    flash_attn     flash_attn, .flash_attn_interface, .bert_padding    `varlen`, `bert_padding`
    natten         natten, .functional                                 `natten`
    xformers       xformers, .ops, .ops.fmha, .ops.fmha.attn_bias      `xformers`
    torch_scatter  torch_scatter, .composite, .utils and others        `torch_scatter`
    torch_cluster  torch_cluster, .knn, .radius and others             `torch_cluster`
    pyg_lib        pyg_lib, .ops, .sampler, torch.ops.pyg              `pyg_lib`

Nothing is provided unless one of these is called: importing mpnn changes no import.
"""

import runpy
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

MODULES: dict[str, dict[str, str]] = {
    "flash_attn": {
        "flash_attn": "mpnn.varlen",
        "flash_attn.flash_attn_interface": "mpnn.varlen",
        "flash_attn.bert_padding": "mpnn.integrations.bert_padding",
    },
    "natten": {"natten": "mpnn.integrations.natten", "natten.functional": "mpnn.integrations.natten"},
    "xformers": {
        "xformers": "mpnn.integrations.xformers",
        "xformers.ops": "mpnn.integrations.xformers",
        "xformers.ops.fmha": "mpnn.integrations.xformers",
        "xformers.ops.fmha.attn_bias": "mpnn.integrations.xformers",
    },
    "torch_scatter": dict.fromkeys(
        [f"torch_scatter{part}" for part in ("", ".scatter", ".segment_csr", ".segment_coo", ".composite", ".utils")],
        "mpnn.integrations.torch_scatter",
    ),
    "torch_cluster": dict.fromkeys(
        [f"torch_cluster{part}" for part in ("", ".knn", ".radius", ".fps", ".grid", ".graclus", ".nearest", ".rw")],
        "mpnn.integrations.torch_cluster",
    ),
    "pyg_lib": dict.fromkeys(["pyg_lib", "pyg_lib.ops", "pyg_lib.sampler"], "mpnn.integrations.pyg_lib"),
}
VERSIONS = {
    "flash_attn": "2.8.4",
    "natten": "0.21.7",
    "xformers": "0.0.32",
    "torch_scatter": "2.1.2",
    "torch_cluster": "1.6.3",
    "pyg_lib": "0.6.0",
}
"""The version whose signatures each name has; `__version__` of the module."""


def provide(*names: str) -> None:
    """Provides modules under the names of other libraries, until the process ends: `import flash_attn` finds mpnn's.

    A library of that name that is installed is not imported from now on. Calling it twice is calling it once.

    Raises:
        ValueError: there is no such name.
        RuntimeError: the real library is already imported, so that other code may hold its functions.
    """
    for name in names:
        if name not in MODULES:
            raise ValueError(f"mpnn.integrations.shim provides {', '.join(MODULES)}; got {name!r}")
        held = sys.modules.get(name)
        if held is not None and not hasattr(held, "__mpnn__"):
            raise RuntimeError(f"{name} is already imported, from {held.__spec__}; call provide before it is imported")
    for name in names:
        if name not in sys.modules:
            sys.modules.update(_modules(name))


def _modules(name: str) -> dict[str, ModuleType]:
    """The modules of a library, each an attribute of the one that contains it."""
    made: dict[str, ModuleType] = {}
    for path, home in MODULES[name].items():
        source = import_module(home)
        module = made[path] = ModuleType(path, source.__doc__)
        module.__spec__ = ModuleSpec(path, None, origin=home, is_package=True)
        module.__path__ = []
        module.__dict__.update({key: x for key, x in vars(source).items() if not key.startswith("_")})
        module.__dict__.update(__version__=VERSIONS[name], __mpnn__=home)
        parent, _, last = path.rpartition(".")
        if parent and last not in vars(made[parent]):  # torch_scatter.scatter is a function and a module
            setattr(made[parent], last, module)
    return made


def main(arguments: list[str]) -> None:
    """Provides the libraries named first, then runs the script or the module as Python does."""
    is_module = arguments[1:2] == ["-m"]
    if len(arguments) < (3 if is_module else 2):
        sys.exit(f"usage: python -m mpnn.shim NAME[,NAME...] script.py [arguments]; names: {', '.join(MODULES)}")
    try:
        provide(*arguments[0].split(","))
    except ValueError as error:
        sys.exit(str(error))
    if is_module:
        sys.argv = arguments[2:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments[1:]
    sys.path.insert(0, str(Path(arguments[1]).resolve().parent))
    runpy.run_path(arguments[1], run_name="__main__")
