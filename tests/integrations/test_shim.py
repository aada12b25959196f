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


# A layer as code for torch_scatter and torch_cluster writes it.
LAYER = """
import torch
import torch_cluster
import torch_scatter
from torch_cluster.knn import knn_graph
from torch_scatter import scatter, segment_csr
from torch_scatter.composite import scatter_softmax
from torch_scatter.scatter import scatter_max
from torch_scatter.utils import broadcast

x = torch.randn(20, 8, requires_grad=True)
src, dst = knn_graph(x, 3)
weights = scatter_softmax((x[src] * x[dst]).sum(-1), dst)
out = scatter(weights[:, None] * x[src], dst, dim=0, reduce="mean")
out.sum().backward()
assert out.shape == x.shape == x.grad.shape
values, arg = scatter_max(x[src], dst, dim=0)
assert x[src].gather(0, arg).equal(values)
assert segment_csr(x, torch.tensor([0, 5, 20])).shape == (2, 8)
assert torch_scatter.scatter is scatter and torch_cluster.knn_graph is knn_graph
print(torch_scatter.__version__, torch_cluster.__version__)
"""

# PyTorch Geometric asks torch_scatter, pyg_lib, and before version 2.8 torch_cluster.
GEOMETRIC = """
import sys
import warnings

warnings.filterwarnings("ignore", "'torch-cluster' is no longer necessary", DeprecationWarning)
import torch
import torch_geometric
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from torch_geometric.nn import DynamicEdgeConv, GravNetConv, Node2Vec, XConv
from torch_geometric.nn import fps, graclus, knn, knn_graph, nearest, radius, radius_graph, voxel_grid
from torch_geometric.nn.aggr import SoftmaxAggregation
from torch_geometric.utils import scatter, softmax

assert torch_geometric.typing.WITH_TORCH_SCATTER
torch.manual_seed(0)
x, batch = torch.randn(40, 3), torch.arange(40) // 20
apart = torch.cdist(x, x).masked_fill(batch[:, None] != batch, torch.inf).fill_diagonal_(torch.inf)
edges = knn_graph(x, 4, batch)
assert edges[0].view(40, 4).equal(apart.topk(4, largest=False).indices)
assert edges[1].equal(torch.arange(40).repeat_interleave(4))
near = radius_graph(x, 1.0, batch, flow="target_to_source")
assert near.equal((apart < 1.0).nonzero().t())
assert knn(x, x[::4], 2, batch, batch[::4].contiguous()).shape == (2, 20)
assert radius(x, x, 1.0, batch, batch).shape[1] == near.shape[1] + 40
assert fps(x, batch, 0.25).shape == (10,)
assert nearest(x, x, batch, batch).equal(torch.arange(40))
assert voxel_grid(x, 0.5, batch).shape == graclus(edges).shape == (40,)
assert DynamicEdgeConv(torch.nn.Linear(6, 4), 3)(x, batch).shape == (40, 4)
assert XConv(3, 8, 3, 4, hidden_channels=4)(x, x, batch).shape == (40, 8)
assert GravNetConv(3, 4, 2, 2, 3)(x, batch).shape == (40, 4)
walks = Node2Vec(edges, 8, 5, 3, p=2.0)
assert walks.loss(*next(iter(walks.loader(batch_size=8)))).isfinite()
data = Data(x=x, edge_index=edges)
for part in (*NeighborLoader(data, [2, 2], batch_size=10), *LinkNeighborLoader(data, [2], batch_size=50)):
    assert edges[:, part.e_id].equal(part.n_id[part.edge_index])
weights = softmax(x[:, 0], batch)
torch.testing.assert_close(scatter(weights, batch), torch.ones(2))
print("geometric", *sys.argv[1:])
"""


@pytest.mark.usefixtures("imports")
def test_a_layer_runs_in_place_of_torch_scatter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "layer.py").write_text(LAYER)
    main(["torch_scatter,torch_cluster", str(tmp_path / "layer.py")])
    assert capsys.readouterr().out == "2.1.2 1.6.3\n"


@pytest.mark.slow  # imports PyTorch Geometric in a process of its own
def test_pytorch_geometrics_graphs_of_points_run(tmp_path: Path) -> None:
    (tmp_path / "points.py").write_text(GEOMETRIC)
    command = [sys.executable, "-m", "mpnn.shim", "torch_scatter,torch_cluster,pyg_lib", "points.py", "--k", "4"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "geometric --k 4\n", done.stderr


def test_errors() -> None:
    with pytest.raises(ValueError, match=f"provides {', '.join(MODULES)}; got 'deepspeed'"):
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
    same = ("natten", "torch_cluster", "torch_scatter", "xformers")
    for name, home in (*zip(same, same, strict=True), ("padding", "bert_padding")):
        assert import_module(f"mpnn.shim.{name}") is import_module(f"mpnn.integrations.{home}")
    done = subprocess.run([sys.executable, "-m", "mpnn.shim"], capture_output=True, text=True)
    assert "usage: python -m mpnn.shim NAME" in done.stderr, done
