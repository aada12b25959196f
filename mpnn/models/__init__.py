"""Models, each read as its definition: topology + attention + aggregate + update."""

from mpnn.models.bert import Bert, BertConfig
from mpnn.models.gat import GAT
from mpnn.models.gcn import GCN
from mpnn.models.gin import GIN
from mpnn.models.gpt import GPT
from mpnn.models.hf import from_hf
from mpnn.models.linformer import Linformer
from mpnn.models.sage import GraphSAGE
from mpnn.models.saving import Model

__all__ = ["GAT", "GCN", "GIN", "GPT", "Bert", "BertConfig", "GraphSAGE", "Linformer", "Model", "from_hf"]
