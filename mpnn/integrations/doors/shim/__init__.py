"""`mpnn.shim`: a short name for `python -m mpnn.shim flash_attn script.py` and `mpnn.shim.provide("flash_attn")`.

`mpnn/__init__.py` lets Python look for submodules of mpnn in this folder, too. What they do is in
`mpnn/integrations/shim.py`, and the functions of the other libraries stand beside it.
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

# The same modules under both names, so that a mask of one is a mask of the other.
for _name, _module in (
    ("padding", padding),
    ("natten", natten),
    ("torch_cluster", torch_cluster),
    ("torch_scatter", torch_scatter),
    ("xformers", xformers),
):
    sys.modules[f"{__name__}.{_name}"] = _module
