"""transformers' Trainer over texts whose tokens are divided over the processes of torchrun. Prints its losses."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from mpnn import graphs, hf
from mpnn.distributed import partition, sharded

TOKENS, TEXTS = 64, 8


class Parts(Dataset[Any]):
    """Part r of text k is item `k * ranks + r`: Trainer gives rank r every item of its own."""

    def __init__(self, texts: Tensor, part: Any) -> None:
        self.texts, self.part = texts, part

    def __len__(self) -> int:
        return len(self.texts) * self.part.ranks

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        tokens = self.part.scatter(self.texts[item // self.part.ranks], -1, rank=item % self.part.ranks)
        return {"input_ids": tokens, "labels": tokens}


class Divided(Trainer):
    def __init__(self, part: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.part, self.model_accepts_loss_kwargs = part, False  # the model counts the labels of all processes

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        with sharded(self.part):
            return super().training_step(*arguments, **options)

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    topology = graphs.causal() & graphs.window(16)
    hf.use(model, topology)
    part = partition(topology.bind(TOKENS), balance="nodes")
    texts = torch.randint(50, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        sys.argv[1],
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Divided(part, model, arguments, train_dataset=Parts(texts, part))
    trainer.train()
    if dist.get_rank() == 0:
        for step, row in enumerate(row for row in trainer.state.log_history if "loss" in row):
            print(f"step {step + 1}: {row['loss']:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
