"""Models over graphs in the tools that people train them with: Trainer, PEFT, Accelerate."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

transformers = pytest.importorskip("transformers")

import mpnn.hf  # noqa: E402

pytestmark = pytest.mark.slow

GRAPH = "causal() & window(5)"
TOKENS = torch.randint(3, 60, (8, 17), generator=torch.Generator().manual_seed(0))


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def test_trainer_and_what_it_saves(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = llama()
    mpnn.hf.use(model, graph=GRAPH)
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=5, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True,
        logging_steps=1, save_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 5
    assert losses[-1] < losses[0]

    trainer.save_model(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.mpnn_graph == GRAPH
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, model.eval()(TOKENS).logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
def test_lora_trains_its_own_weights_only(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain = llama().eval()
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    mpnn.hf.use(model, graph="causal()")
    model(TOKENS, labels=TOKENS).loss.backward()
    for name, weight in model.named_parameters():
        assert (weight.grad is not None and bool(weight.grad.any())) == ("lora" in name)
    with torch.no_grad(), model.disable_adapter():
        torch.testing.assert_close(model.eval()(TOKENS).logits, plain(TOKENS).logits, rtol=0, atol=1e-5)
        changed = model(TOKENS).logits
    with torch.no_grad():
        adapted = model(TOKENS).logits
        assert not torch.allclose(adapted, changed, atol=1e-3)
        torch.testing.assert_close(model.merge_and_unload()(TOKENS).logits, adapted, rtol=0, atol=1e-5)


STEP = """
import json, sys
import torch
sys.path.insert(0, {folder!r})
from accelerate import Accelerator
from test_hf_tools import GRAPH, TOKENS, llama
import mpnn.hf

accelerator = Accelerator(cpu=True)
model = llama()
mpnn.hf.use(model, graph=GRAPH)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
rank, ranks = accelerator.process_index, accelerator.num_processes
rows = TOKENS[rank::ranks]
for _ in range(2):
    loss = model(rows, labels=rows).loss
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
bare = accelerator.unwrap_model(model)
if accelerator.is_main_process:
    with torch.no_grad():
        json.dump([ranks, bare(TOKENS[:1]).logits.flatten().tolist()], open({out!r}, "w"))
accelerator.end_training()
"""


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    found = []
    for processes in (1, 2):
        out, script = tmp_path / f"{processes}.json", tmp_path / f"step_{processes}.py"
        script.write_text(STEP.format(folder=str(Path(__file__).parent), out=str(out)))
        forked.run_ranks(processes, script, folder=tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
        ranks, logits = json.loads(out.read_text())
        assert ranks == processes
        found.append(torch.tensor(logits))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
