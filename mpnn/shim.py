"""`mpnn.shim`: a short name for `python -m mpnn.shim flash_attn script.py` and `mpnn.shim.provide("flash_attn")`.

`mpnn/integrations/shim.py` has the code, and the functions of the other libraries are next to it.
"""

import sys

from mpnn.integrations import (
    bert_padding as padding,
    natten as natten,
    torch_cluster as torch_cluster,
    torch_scatter as torch_scatter,
    xformers as xformers,
)
from mpnn.integrations.shim import MODULES as MODULES, VERSIONS as VERSIONS, main as main, provide as provide

__path__: list[str] = []  # it has submodules: the modules above, under both names, so that their classes are the same
for _name, _module in (
    ("padding", padding),
    ("natten", natten),
    ("torch_cluster", torch_cluster),
    ("torch_scatter", torch_scatter),
    ("xformers", xformers),
):
    sys.modules[f"mpnn.shim.{_name}"] = _module

if __name__ == "__main__":
    main(sys.argv[1:])
