"""Models. Each file defines one model: topology + attention + aggregate + update.

`text`, `graph` and `vision` contain one file per model, `layers` the modules that several models share.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpnn.models.graph.arrival_times import ArrivalTimes
from mpnn.models.graph.gat import GAT
from mpnn.models.graph.gatv2 import GATv2
from mpnn.models.graph.gcn import GCN
from mpnn.models.graph.ggnn import GGNN
from mpnn.models.graph.gin import GIN
from mpnn.models.graph.gnn import GNN
from mpnn.models.graph.gps import GPS, GPSLayer
from mpnn.models.graph.graph_bert import GraphBert, Subgraphs, intimate_subgraphs
from mpnn.models.graph.graph_network import GraphNetwork
from mpnn.models.graph.graph_transformer import GraphTransformer
from mpnn.models.graph.graphormer import Graphormer
from mpnn.models.graph.link_prediction import DistMult, Inner, LinkPredictor, PairMLP
from mpnn.models.graph.magna import MAGNA
from mpnn.models.graph.monet import MoNet
from mpnn.models.graph.mpnn import MPNN
from mpnn.models.graph.pinsage import PinSage
from mpnn.models.graph.pna import PNA
from mpnn.models.graph.relational import RelationalMLP
from mpnn.models.graph.rgcn import RGCN
from mpnn.models.graph.sage import GraphSAGE
from mpnn.models.graph.tsp import TSP
from mpnn.models.graph.vain import VAIN
from mpnn.models.published import load_weights
from mpnn.models.saving import Model, safe_globals
from mpnn.models.text.bert import Bert, BertConfig
from mpnn.models.text.big_bird import BigBird
from mpnn.models.text.deepnet import DeepNet
from mpnn.models.text.delta_net import DeltaNet, DeltaNetConfig
from mpnn.models.text.gpt import GPT, GPT2, GPTConfig
from mpnn.models.text.heads import MaskedLM, SentenceClassifier, TokenClassifier
from mpnn.models.text.linformer import Linformer, LinformerConfig, LinformerEncoder
from mpnn.models.text.llama import Llama, LlamaConfig
from mpnn.models.text.longformer import Longformer
from mpnn.models.text.mamba2 import Mamba2, Mamba2Config
from mpnn.models.text.performer import Performer, PerformerConfig, PerformerEncoder, PerformerEncoderConfig
from mpnn.models.text.reformer import Reformer, ReformerConfig, ReformerLM
from mpnn.models.text.retnet import RetNet, RetNetConfig
from mpnn.models.text.seq2seq import Seq2Seq
from mpnn.models.text.sparse_transformer import SparseTransformer
from mpnn.models.text.transformer import Transformer, TransformerConfig
from mpnn.models.text.transformer_xl import TransformerXL
from mpnn.models.text.xlnet import XLNet, XLNetConfig
from mpnn.models.vision.convolution import Convolution, from_conv
from mpnn.models.vision.image_heads import ImageClassifier
from mpnn.models.vision.mae import MAE, MAEConfig
from mpnn.models.vision.swin import Swin, SwinConfig
from mpnn.models.vision.vit import ViT, ViTConfig

__all__ = [
    "GAT",
    "GCN",
    "GGNN",
    "GIN",
    "GNN",
    "GPS",
    "GPT",
    "GPT2",
    "MAE",
    "MAGNA",
    "MPNN",
    "PNA",
    "RGCN",
    "TSP",
    "VAIN",
    "ArrivalTimes",
    "Bert",
    "BertConfig",
    "BigBird",
    "Convolution",
    "DeepNet",
    "DeltaNet",
    "DeltaNetConfig",
    "DistMult",
    "GATv2",
    "GPSLayer",
    "GPTConfig",
    "GraphBert",
    "GraphNetwork",
    "GraphSAGE",
    "GraphTransformer",
    "Graphormer",
    "ImageClassifier",
    "Inner",
    "Linformer",
    "LinformerConfig",
    "LinformerEncoder",
    "LinkPredictor",
    "Llama",
    "LlamaConfig",
    "Longformer",
    "MAEConfig",
    "Mamba2",
    "Mamba2Config",
    "MaskedLM",
    "MoNet",
    "Model",
    "PairMLP",
    "Performer",
    "PerformerConfig",
    "PerformerEncoder",
    "PerformerEncoderConfig",
    "PinSage",
    "Reformer",
    "ReformerConfig",
    "ReformerLM",
    "RelationalMLP",
    "RetNet",
    "RetNetConfig",
    "SentenceClassifier",
    "Seq2Seq",
    "SparseTransformer",
    "Subgraphs",
    "Swin",
    "SwinConfig",
    "TokenClassifier",
    "Transformer",
    "TransformerConfig",
    "TransformerXL",
    "ViT",
    "ViTConfig",
    "XLNet",
    "XLNetConfig",
    "from_conv",
    "from_hf",
    "from_pyg",
    "intimate_subgraphs",
    "load_weights",
    "safe_globals",
]

if TYPE_CHECKING:
    from mpnn.integrations.hf import from_hf
    from mpnn.integrations.pyg import from_pyg

_INTEGRATIONS = {"from_hf": "hf", "from_pyg": "pyg"}


def __getattr__(name: str) -> Any:
    """Imports conversions on first use, because they need transformers or PyTorch Geometric."""
    if name in _INTEGRATIONS:
        return getattr(import_module(f"mpnn.integrations.{_INTEGRATIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
