"""Models, each read as its definition: topology + attention + aggregate + update; `parts` holds what they share."""

from mpnn.models.bert import Bert, BertConfig
from mpnn.models.big_bird import BigBird
from mpnn.models.convolution import Convolution, from_conv
from mpnn.models.deepnet import DeepNet
from mpnn.models.edge_network import MPNN
from mpnn.models.eta import ArrivalTimes
from mpnn.models.gat import GAT
from mpnn.models.gatv2 import GATv2
from mpnn.models.gcn import GCN
from mpnn.models.ggnn import GGNN
from mpnn.models.gin import GIN
from mpnn.models.gnn import GNN
from mpnn.models.gps import GPS, GPSLayer
from mpnn.models.gpt import GPT, GPT2, GPTConfig
from mpnn.models.graph_bert import GraphBert, Subgraphs, intimate_subgraphs
from mpnn.models.graph_network import GraphNetwork
from mpnn.models.graph_transformer import GraphTransformer
from mpnn.models.graphormer import Graphormer
from mpnn.models.hashing import ReformerConfig
from mpnn.models.heads import MaskedLM, SentenceClassifier, TokenClassifier
from mpnn.models.hf import from_hf, to_hf
from mpnn.models.image_heads import ImageClassifier
from mpnn.models.linformer import Linformer, LinformerConfig, LinformerEncoder
from mpnn.models.link_prediction import DistMult, Inner, LinkPredictor, PairMLP
from mpnn.models.llama import Llama, LlamaConfig
from mpnn.models.longformer import Longformer
from mpnn.models.mae import MAE, MAEConfig
from mpnn.models.magna import MAGNA
from mpnn.models.monet import MoNet
from mpnn.models.performer import Performer, PerformerConfig, PerformerEncoder, PerformerEncoderConfig
from mpnn.models.pinsage import PinSage
from mpnn.models.pna import PNA
from mpnn.models.pyg import from_pyg
from mpnn.models.reformer import Reformer, ReformerLM
from mpnn.models.relational import RelationalMLP
from mpnn.models.rgcn import RGCN
from mpnn.models.sage import GraphSAGE
from mpnn.models.saving import Model, safe_globals
from mpnn.models.seq2seq import Seq2Seq
from mpnn.models.sparse_transformer import SparseTransformer
from mpnn.models.swin import Swin, SwinConfig
from mpnn.models.transformer import Transformer, TransformerConfig
from mpnn.models.transformer_xl import TransformerXL
from mpnn.models.tsp import TSP
from mpnn.models.vain import VAIN
from mpnn.models.vit import ViT, ViTConfig
from mpnn.models.xlnet import XLNet, XLNetConfig

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
    "safe_globals",
    "to_hf",
]
