"""Runs CPU kernels in small and odd sizes from the library argv[1]: under an address sanitizer, by a test.

With the further argument "planted", a layer gets parts of more rows than it has, which a sanitizer must report.
"""

import ctypes
import itertools
import sys

import torch

from mpnn import MessagePassing, graphs
from mpnn.attention import DotProduct
from mpnn.kernels.cpu import library
from mpnn.kernels.layers.encoder_layer import EncoderLayer, Form, Weights
from mpnn.kernels.parts import Parts

WIDE = {
    "BERT": Form(64, 2, 192, "gelu", False, (1e-12, 1e-3), 0.2),
    "GPT-2": Form(128, 4, 512, "gelu_tanh", True, (1e-12, 1e-3), 0.2),
    "wide": Form(64, 2, 1024, "relu", True, (1e-12, 1e-3), 0.2),
    "grouped": Form(256, 8, 192, "silu", True, (1e-6, 1e-5), 0.2, kv_heads=2, head_width=64, rms_norm=True, gated=True),
}


def weights(form: Form, transposed: tuple[bool, ...]) -> Weights:
    maps = [torch.randn(shape) for shape in form.shapes]
    maps = [map.T.contiguous().T if turn else map for map, turn in zip(maps, transposed, strict=False)]
    biases = tuple(torch.randn(rows) for rows, _ in form.shapes)
    norms = tuple(torch.rand(form.width) for _ in range(4))
    return Weights(tuple(maps), biases, norms[:2], norms[2:])


def layer(form: Form, rows: int, transposed: tuple[bool, ...], is_causal: bool, claimed: int = 0) -> None:
    head_width = form.head_width or form.width // form.heads
    of_keys = (form.kv_heads or form.heads) * head_width
    first = rows // 3
    lengths = [first, rows - first] if first else [rows]
    parts = Parts(lengths, is_causal=is_causal)
    cos_sin = (torch.rand(rows, head_width), torch.rand(rows, head_width)) if form.gated else None
    states = torch.empty(rows * of_keys), torch.empty(rows * of_keys)
    x = torch.randn(rows, form.width)
    if claimed:
        parts.table[-1, 1] += claimed
        parts.table[-1, 3] += claimed
    EncoderLayer(form)(x, weights(form, transposed), parts, cos_sin, states)


def layers() -> None:
    patterns = [(False,) * 7, (True,) * 7, (True, False) * 4]
    for form, transposed, is_causal in itertools.product(WIDE.values(), patterns, (False, True)):
        for rows in (*range(1, 51), 97):
            layer(form, rows, transposed, is_causal)


def rounds() -> None:
    """Rows and tiles, forward and backward, with features of odd widths."""
    for backend, nodes, width in itertools.product(("csr", "tiles"), (1, 5, 33, 70), (3, 8, 20)):
        attention = DotProduct(2 * width, 2)
        op = MessagePassing(graphs.causal() & graphs.window(7), "sum", None, attention, backend=backend)
        x = torch.randn(2, nodes, 2 * width, requires_grad=True)
        op(x).sum().backward()


def main() -> None:
    found = ctypes.CDLL(sys.argv[1])
    library._load = lambda: found
    torch.manual_seed(0)
    for count in (1, 2):
        torch.set_num_threads(count)
        if sys.argv[2:] == ["planted"]:
            layer(WIDE["BERT"], 9, (False,) * 7, False, claimed=1000)
        layers()
        rounds()
    print("all kernels ran")


if __name__ == "__main__":
    main()
