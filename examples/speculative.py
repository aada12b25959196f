"""Speculative decoding over a tree of drafts: the tokens of greedy decoding, in fewer passes of the large model.

1. A large and a small Llama learn the characters of Python's manual for a while.
2. The small one drafts several continuations, which share their beginnings, as a tree. The large one checks all of them
   in one pass, in which each draft attends to its own past only: a `mpnn.hf.TreeMask`. The longest draft that greedy
   decoding would have chosen is accepted, with one more token, and the cache keeps the tokens of that path (SpecInfer,
   Miao et al. 2024; Medusa, Cai et al. 2024).

    python examples/speculative.py                                       two minutes on two cores
    python examples/speculative.py --train 2 --tokens 12                 a quick test
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import mpnn.hf
from mpnn.data import Characters
from mpnn.data.text import topics


def llama(vocabulary: int, dim: int, layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=dim, intermediate_size=3 * dim, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    mpnn.hf.use(model)
    return model


def train(model: LlamaForCausalLM, text: Tensor, steps: int) -> float:
    """Trains on random passages of 128 characters; the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        passages = text.unfold(0, 128, 1)[torch.randint(len(text) - 127, (16,))]
        loss = model(passages, labels=passages).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    return float(loss.detach())


def greedy(model: LlamaForCausalLM, text: Tensor, steps: int) -> Tensor:
    """The likeliest next token, one pass a token."""
    return model.generate(text[None], max_new_tokens=steps, do_sample=False, eos_token_id=None, pad_token_id=0)[0]


def draft(model: LlamaForCausalLM, text: Tensor, widths: list[int]) -> tuple[Tensor, list[int]]:
    """The text and likely continuations: all tokens, and the parent of each. Each leaf gets `width` children, level by
    level, which the model finds in one pass a level."""
    tokens, parent, leaves = text, list(range(-1, len(text) - 1)), [len(text) - 1]
    for width in widths:
        tree = mpnn.hf.TreeMask(parent)
        logits = model(tokens[None], attention_mask=tree, position_ids=tree.position_ids).logits[0]
        children = logits[leaves].topk(width).indices.flatten()
        parent += [leaf for leaf in leaves for _ in range(width)]
        leaves = list(range(len(tokens), len(tokens) + len(children)))
        tokens = torch.cat([tokens, children])
    return tokens, parent


def accept(tokens: Tensor, parent: list[int], root: int, choices: dict[int, int]) -> tuple[list[int], list[int]]:
    """The drafts on the path from the root that the large model chooses itself, and its choices along that path."""
    path, chosen, node = [], [], root
    while True:
        chosen.append(choices[node])
        children = [k for k in choices if parent[k] == node and int(tokens[k]) == chosen[-1]]
        if not children:
            return path, chosen
        node = children[0]
        path.append(node)


def speculate(
    large: LlamaForCausalLM, small: LlamaForCausalLM, text: Tensor, steps: int, widths: list[int]
) -> tuple[Tensor, int]:
    """The tokens of greedy decoding, and the number of passes of the large model."""
    cache, cached, passes, length = DynamicCache(config=large.config), 0, 0, len(text) + steps
    while len(text) < length:
        tokens, parent = draft(small, text, widths)
        tree = mpnn.hf.TreeMask(parent)
        logits = large(
            tokens[None, cached:], attention_mask=tree, position_ids=tree.position_ids[:, cached:],
            past_key_values=cache,
        ).logits[0]  # fmt: skip
        passes += 1
        choices = dict(enumerate(logits.argmax(-1).tolist(), start=cached))
        path, chosen = accept(tokens, parent, len(text) - 1, choices)
        rows = [*range(len(text)), *path]
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]
        cached, text = len(rows), torch.cat([text, torch.tensor(chosen)])
    return text[:length], passes


def main(train_steps: int, tokens: int, widths: list[int]) -> None:
    torch.manual_seed(0)
    manual = "".join(topics().values())
    symbols = Characters(manual)
    text = symbols.encode(manual)
    large, small = llama(len(symbols), 128, 4), llama(len(symbols), 64, 1)
    losses = [train(model, text, train_steps) for model in (large, small)]
    print("loss of the large model {:.2f}, of the small one {:.2f}".format(*losses))
    prompt = symbols.encode("The statement ")
    with torch.no_grad():
        expected = greedy(large, prompt, tokens)
        for name, shape in (("a chain", [1] * len(widths)), ("a tree", widths)):
            found, passes = speculate(large, small, prompt, tokens, shape)
            same = "the same tokens" if found.equal(expected) else "OTHER TOKENS"
            print(f"{name} of drafts, {shape}: {tokens} tokens in {passes} passes of the large model, {same} as greedy")
    print(symbols.decode(expected))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--train", type=int, default=200, dest="train_steps", help="steps of training (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=200, help="tokens to generate (default: %(default)s)")
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[3, 2, 1, 1], help="children of each draft, by level (%(default)s)"
    )
    main(**vars(parser.parse_args()))
