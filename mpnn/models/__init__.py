"""Models. Each file defines one model: topology + attention + aggregate + update.

`text`, `graph` and `vision` contain one file per model, `layers` the modules that several models share.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpnn.models.graph.arrival_times import ArrivalTimes as ArrivalTimes
from mpnn.models.graph.dimenet import DimeNet as DimeNet
from mpnn.models.graph.egnn import EGNN as EGNN
from mpnn.models.graph.gat import GAT as GAT, GATv2 as GATv2
from mpnn.models.graph.gcn import GCN as GCN
from mpnn.models.graph.ggnn import GGNN as GGNN
from mpnn.models.graph.gin import GIN as GIN
from mpnn.models.graph.gnn import GNN as GNN
from mpnn.models.graph.gps import GPS as GPS, GPSLayer as GPSLayer
from mpnn.models.graph.graph_bert import (
    GraphBert as GraphBert,
    Subgraphs as Subgraphs,
    intimate_subgraphs as intimate_subgraphs,
)
from mpnn.models.graph.graph_cast import GraphCast as GraphCast
from mpnn.models.graph.graph_network import GraphBlock as GraphBlock, GraphNetwork as GraphNetwork
from mpnn.models.graph.graph_predictor import GraphPredictor as GraphPredictor
from mpnn.models.graph.graph_transformer import GraphTransformer as GraphTransformer
from mpnn.models.graph.graphormer import Graphormer as Graphormer
from mpnn.models.graph.hgt import HGT as HGT
from mpnn.models.graph.light_gcn import LightGCN as LightGCN
from mpnn.models.graph.link_prediction import (
    ComplEx as ComplEx,
    DistMult as DistMult,
    Inner as Inner,
    LinkPredictor as LinkPredictor,
    PairMLP as PairMLP,
)
from mpnn.models.graph.link_ranker import LinkRanker as LinkRanker
from mpnn.models.graph.magna import MAGNA as MAGNA
from mpnn.models.graph.mesh_graph_net import MeshGraphNet as MeshGraphNet
from mpnn.models.graph.monet import MoNet as MoNet
from mpnn.models.graph.mpnn import MPNN as MPNN
from mpnn.models.graph.painn import PaiNN as PaiNN
from mpnn.models.graph.pinsage import PinSage as PinSage
from mpnn.models.graph.pna import PNA as PNA
from mpnn.models.graph.relational import RelationalMLP as RelationalMLP
from mpnn.models.graph.rgcn import RGCN as RGCN
from mpnn.models.graph.sage import GraphSAGE as GraphSAGE
from mpnn.models.graph.schnet import SchNet as SchNet
from mpnn.models.graph.tgat import TGAT as TGAT
from mpnn.models.graph.tgn import TGNMemory as TGNMemory
from mpnn.models.graph.tsp import TSP as TSP
from mpnn.models.graph.vain import VAIN as VAIN
from mpnn.models.layers.hetero import Hetero as Hetero
from mpnn.models.published import load_weights as load_weights
from mpnn.models.saving import Model as Model, safe_globals as safe_globals
from mpnn.models.text.bert import Bert as Bert, BertConfig as BertConfig
from mpnn.models.text.big_bird import BigBird as BigBird
from mpnn.models.text.deepnet import DeepNet as DeepNet
from mpnn.models.text.delta_net import DeltaNet as DeltaNet, DeltaNetConfig as DeltaNetConfig
from mpnn.models.text.gpt import GPT as GPT, GPT2 as GPT2, GPTConfig as GPTConfig
from mpnn.models.text.heads import (
    MaskedLM as MaskedLM,
    SentenceClassifier as SentenceClassifier,
    TokenClassifier as TokenClassifier,
)
from mpnn.models.text.linformer import (
    Linformer as Linformer,
    LinformerConfig as LinformerConfig,
    LinformerEncoder as LinformerEncoder,
)
from mpnn.models.text.llama import Llama as Llama, LlamaConfig as LlamaConfig
from mpnn.models.text.longformer import Longformer as Longformer
from mpnn.models.text.mamba2 import Mamba2 as Mamba2, Mamba2Config as Mamba2Config
from mpnn.models.text.nsa import NSA as NSA, NSAConfig as NSAConfig
from mpnn.models.text.performer import (
    Performer as Performer,
    PerformerConfig as PerformerConfig,
    PerformerEncoder as PerformerEncoder,
    PerformerEncoderConfig as PerformerEncoderConfig,
)
from mpnn.models.text.reformer import Reformer as Reformer, ReformerConfig as ReformerConfig, ReformerLM as ReformerLM
from mpnn.models.text.retnet import RetNet as RetNet, RetNetConfig as RetNetConfig
from mpnn.models.text.seq2seq import Seq2Seq as Seq2Seq
from mpnn.models.text.sparse_transformer import SparseTransformer as SparseTransformer
from mpnn.models.text.transformer import Transformer as Transformer, TransformerConfig as TransformerConfig
from mpnn.models.text.transformer_xl import TransformerXL as TransformerXL
from mpnn.models.text.xlnet import XLNet as XLNet, XLNetConfig as XLNetConfig
from mpnn.models.vision.convolution import Convolution as Convolution, from_conv as from_conv
from mpnn.models.vision.image_heads import ImageClassifier as ImageClassifier
from mpnn.models.vision.mae import MAE as MAE, MAEConfig as MAEConfig
from mpnn.models.vision.swin import Swin as Swin, SwinConfig as SwinConfig
from mpnn.models.vision.vit import ViT as ViT, ViTConfig as ViTConfig

if TYPE_CHECKING:
    from mpnn.integrations.hf import from_hf as from_hf
    from mpnn.integrations.pyg import from_pyg as from_pyg

_INTEGRATIONS = {"from_hf": "hf", "from_pyg": "pyg"}


def __getattr__(name: str) -> Any:
    """Imports conversions on first use, because they need transformers or PyTorch Geometric."""
    if name in _INTEGRATIONS:
        return getattr(import_module(f"mpnn.integrations.{_INTEGRATIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
