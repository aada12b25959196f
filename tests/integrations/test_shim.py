"""mpnn.shim: code that imports other libraries runs over mpnn, unchanged."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from mpnn.integrations.shim import MODULES, main, provide

# A model file as they are published with weights (`trust_remote_code`): it imports flash_attn where it is available,
# packs a padded batch, and calls the varlen functions.
MODEL = """
import sys
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import nn

if find_spec("flash_attn"):
    from flash_attn import flash_attn_func, flash_attn_varlen_func
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # noqa
    from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
import flash_attn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask):
        tokens, indices, cu_seqlens, longest, _ = unpad_input(x, mask)
        qkv = self.qkv(tokens).unflatten(-1, (3, self.heads, -1))
        out = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, longest, dropout_p=0.0, causal=True)
        return pad_input(self.out(out.flatten(1)), indices, *x.shape[:2])


torch.manual_seed(0)
layer, x = Attention(16, 4), torch.randn(3, 7, 16, requires_grad=True)
mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4, [1] * 5 + [0] * 2])
y = layer(x, mask)
y.square().sum().backward()
q, k, v = layer.qkv(x.detach()).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
right = layer.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)) * mask[..., None]
torch.testing.assert_close(y, right)
assert x.grad[1, 3:].abs().sum() == 0 and x.grad[1, :3].abs().min() > 0
print(__name__, sys.argv[1:], flash_attn.__version__)
"""


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules and arguments of this process are restored after the test."""
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in MODULES:
        for module in MODULES[name]:
            monkeypatch.setitem(sys.modules, module, sys)
            del sys.modules[module]


@pytest.mark.usefixtures("imports")
def test_a_published_model_runs_in_place_of_flash_attn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    main(["flash_attn", str(tmp_path / "model.py"), "--steps", "3"])
    main(["flash_attn,natten", "-m", "model"])
    assert capsys.readouterr().out == "__main__ ['--steps', '3'] 2.8.4\n__main__ [] 2.8.4\n"
    natten = import_module("natten")
    assert import_module("natten.functional").na1d is natten.na1d
    assert natten.functional.na1d is natten.na1d


def test_errors() -> None:
    with pytest.raises(ValueError, match="provides flash_attn, natten, xformers; got 'deepspeed'"):
        provide("deepspeed")
    with pytest.raises(SystemExit, match=r"usage: python -m mpnn\.shim NAME"):
        main(["flash_attn"])
    with pytest.raises(SystemExit, match=r"mpnn\.integrations\.shim provides"):
        main(["deepspeed", "script.py"])


def test_a_library_that_is_imported_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", sys)
    with pytest.raises(RuntimeError, match="flash_attn is already imported"):
        provide("flash_attn")


def test_the_short_names_are_the_same_modules() -> None:
    shim = import_module("mpnn.shim")
    assert shim.provide is provide
    for name, home in (("natten", "natten"), ("xformers", "xformers"), ("padding", "bert_padding")):
        assert import_module(f"mpnn.shim.{name}") is import_module(f"mpnn.integrations.{home}")
    done = subprocess.run([sys.executable, "-m", "mpnn.shim"], capture_output=True, text=True)
    assert "usage: python -m mpnn.shim NAME" in done.stderr, done
