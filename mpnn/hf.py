"""Hugging Face models over graphs, in place. Importing this module registers `attn_implementation="mpnn"`.

import mpnn.hf

model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="mpnn")    the model's own masks
handle = mpnn.hf.use(model, graph="causal() & window(256)")                       another topology
handle.restore()
"""

from mpnn.integrations.hf.interface import attend, record
from mpnn.integrations.hf.masks import Mask
from mpnn.integrations.hf.trees import Rollouts, TreeMask, log_probs
from mpnn.integrations.hf.use import Handle, is_causal, use

__all__ = ["Handle", "Mask", "Rollouts", "TreeMask", "attend", "is_causal", "log_probs", "record", "use"]
