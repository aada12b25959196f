"""Translation of captions from English to German (Multi30k): what attention, and the graph of the encoder, are worth.

A recurrent network translates without attention and with dot-product, bilinear and additive attention; a Transformer
over complete() and over window(2) in its encoder. It prints BLEU on the 1,000 captions of test_2016_flickr (sacrebleu,
13a tokens, with case) and BLEU by the length of the source, and draws alignments: which source tokens each target token
attends to.

    python examples/translation.py                              half a day on two cores
    python examples/translation.py --seeds 1 --steps 2 --limit 200      a quick test
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from experiment import Outcome, Row, console, measure, parser
from rich.table import Table
from sacrebleu.metrics import BLEU
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.optim import AdamW

from mpnn import graphs
from mpnn.attention.spec import KeyValue
from mpnn.data import multi30k
from mpnn.graph import Graph
from mpnn.models import Seq2Seq, Transformer, TransformerConfig
from mpnn.round import Round
from mpnn.scores import Dot
from mpnn.train.loop import Settings, fit, warm_cosine

PAD, START, END = 0, 1, 2
VOCABULARY, BATCH, LONGEST = 4000, 128, 100
RNN_STEPS, TRANSFORMER_STEPS = 2000, 6000
RNN_RATE, TRANSFORMER_RATE = 1e-3, 3e-3
MODELS = {
    "none": "RNN without attention",
    "dot": "RNN, dot",
    "bilinear": "RNN, bilinear",
    "additive": "RNN, additive",
    "transformer": "Transformer",
    "window": "Transformer, encoder over window(2)",
}
SMALL = TransformerConfig(
    VOCABULARY, dim=128, heads=4, hidden=256, encoder_layers=4, decoder_layers=4, context=LONGEST + 2, dropout=0.3
)
LENGTHS = ((1, 10), (11, 14), (15, 20), (21, LONGEST))
LINE = "A man in an orange hat starring at something."


class Luong(KeyValue):
    """Attention of a recurrent decoder (Luong et al. 2015, section 3.1), with state s and annotations h.

        dot: <s, forward h_j + backward h_j>     bilinear: <W s, h_j>     none: equal weights, so c_i = mean_j h_j

    Without attention, the mean is a vector of fixed size that must hold the whole sentence: the bottleneck.
    """

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__()
        self.kind = kind
        self.to_query = nn.Linear(dim, 2 * dim, bias=False) if kind == "bilinear" else None

    def project(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        query = torch.cat([dst, dst], -1) if self.to_query is None else self.to_query(dst)
        query = torch.zeros_like(query) if self.kind == "none" else query
        return query.unsqueeze(-2), src.unsqueeze(-2), src.unsqueeze(-2)

    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        return Round(graph, value, Dot(query, key, 1.0))


def build(name: str) -> Seq2Seq | Transformer:
    if name == "transformer":
        return Transformer(SMALL)
    if name == "window":
        return Transformer(SMALL, graphs.window(2))
    model = Seq2Seq(VOCABULARY, VOCABULARY, 128, 256, dropout=0.3)
    if name != "additive":
        model.align.attention = Luong(name, 256)
    return model


@dataclass(frozen=True, eq=False)
class Captions:
    """Pairs of sentences as tokens: English with END, German with START and END."""

    source: list[list[int]]
    target: list[list[int]]

    @staticmethod
    def of(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> Captions:
        english, german = (tokenizer.encode_batch([pair[k] for pair in pairs]) for k in (0, 1))
        return Captions(
            [[*tokens.ids[:LONGEST], END] for tokens in english],
            [[START, *tokens.ids[:LONGEST], END] for tokens in german],
        )

    def batch(self, index: Sequence[int]) -> dict[str, Tensor]:
        """The arguments of `loss` for these pairs."""
        source, target = (padded([side[i] for i in index]) for side in (self.source, self.target))
        return {
            "source": source,
            "target": target,
            "source_padding_mask": source == PAD,
            "target_padding_mask": target == PAD,
        }

    def batches(self, epoch: int, seed: int) -> list[list[int]]:
        """The batches of an epoch: sentences of similar length together, in an order that depends on seed and epoch."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.source), generator=generator).tolist()
        order.sort(key=lambda i: len(self.source[i]))  # stable: equal lengths stay shuffled
        parts = [order[k : k + BATCH] for k in range(0, len(order), BATCH)]
        return [parts[k] for k in torch.randperm(len(parts), generator=generator).tolist()]


def padded(sentences: list[list[int]]) -> Tensor:
    """int64 [B, longest], with PAD at the end of shorter ones."""
    longest = max(map(len, sentences))
    return torch.tensor([sentence + [PAD] * (longest - len(sentence)) for sentence in sentences])


def tokens_of(pairs: Sequence[tuple[str, str]]) -> Tokenizer:
    """Byte pairs of both languages, one vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((sentence for pair in pairs for sentence in pair), trainer)
    return tokenizer


@dataclass(frozen=True, eq=False)
class Data:
    """Multi30k: the parts as tokens, and the test captions as text."""

    tokenizer: Tokenizer
    train: Captions
    val: Captions
    test: Captions
    test_pairs: list[tuple[str, str]]
    longest: int  # translation

    @staticmethod
    def read(limit: int | None, longest: int = LONGEST) -> Data:
        train, val, test = (multi30k(split)[:limit] for split in ("train", "val", "test_2016_flickr"))
        tokenizer = tokens_of(train)
        return Data(tokenizer, *(Captions.of(part, tokenizer) for part in (train, val, test)), test, longest)


def train(
    name: str, data: Data, steps: int, out: Path, lengths: Table, seed: int, progress: Any, checkpoint: Any
) -> Outcome:
    model = build(name)
    epoch = lru_cache(2)(partial(data.train.batches, seed=seed))
    per_epoch = len(epoch(0))

    def loss(k: int) -> Tensor:
        return model.loss(**data.train.batch(epoch(k // per_epoch)[k % per_epoch]))

    @torch.no_grad()
    def validate() -> dict[str, float]:
        model.eval()
        parts = data.val.batches(0, 0)
        return {"loss": sum(model.loss(**data.val.batch(part)).item() for part in parts) / len(parts)}

    rate = TRANSFORMER_RATE if isinstance(model, Transformer) else RNN_RATE
    optimizer = AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=1e-4)
    settings = Settings(steps, rate=warm_cosine(steps), clip=1.0, validate_every=min(500, steps), keep="best")
    history = fit(model, optimizer, loss, settings, validate=validate, progress=progress, checkpoint=checkpoint)
    outputs = translate(model, data)
    references = [german for _, german in data.test_pairs]
    if seed == 0:
        buckets = [[i for i, (english, _) in enumerate(data.test_pairs) if low <= len(english.split()) <= high]
                   for low, high in LENGTHS]  # fmt: skip
        scores = [bleu([outputs[i] for i in part], [references[i] for i in part]) for part in buckets]
        lengths.add_row(MODELS[name], *(f"{score:.1f}" for score in scores))
        draw_alignment(model, data, MODELS[name], out / f"multi30k-{name}-alignment.png")
    return Outcome(history, bleu(outputs, references))


def bleu(outputs: list[str], references: list[str]) -> float:
    return BLEU().corpus_score(outputs, [references]).score if outputs else float("nan")


@torch.no_grad()
def translate(model: Seq2Seq | Transformer, data: Data) -> list[str]:
    """The test captions in German, greedily."""
    order = sorted(range(len(data.test.source)), key=lambda i: len(data.test.source[i]))
    texts = [""] * len(order)
    for k in range(0, len(order), BATCH):
        index = order[k : k + BATCH]
        source = padded([data.test.source[i] for i in index])
        output = model.generate(source, data.longest, padding_mask=source == PAD)
        for i, tokens in zip(index, output.tolist(), strict=True):
            end = tokens.index(END) if END in tokens else len(tokens)
            texts[i] = data.tokenizer.decode(tokens[1:end])
    return texts


@torch.no_grad()
def draw_alignment(model: Seq2Seq | Transformer, data: Data, title: str, path: Path) -> None:
    """Draws the attention weights from the tokens of a translation (rows) to those of the source (columns)."""
    model.eval()
    source = torch.tensor([[*data.tokenizer.encode(LINE).ids, END]])
    target = model.generate(source, data.longest)
    if isinstance(model, Seq2Seq):
        weights = model(source, target[:, :-1], return_weights=True)[1][0]
    else:
        decoded = model.decode(target[:, :-1], model.encode(source), return_weights=True)
        weights = decoded.cross_weights[-1][0].mean(0)
    columns, rows = ([data.tokenizer.decode([token]) or "end" for token in side] for side in (source[0], target[0, 1:]))
    figure, ax = plt.subplots(figsize=(6, 1 + 0.25 * len(rows)), layout="constrained")
    ax.imshow(weights.numpy(), cmap="Greys", vmin=0, aspect="auto")
    ax.set_xticks(range(len(columns)), columns, rotation=90)
    ax.set_yticks(range(len(rows)), rows, fontsize=8)
    ax.set(title=title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__, 3, MODELS)
    options.add_argument("--limit", type=int, help="use only this many pairs of each part, for a test")
    options.add_argument("--longest", type=int, help="translate into at most this many tokens, for a test")
    options = options.parse_args()
    data = Data.read(options.limit, options.longest or LONGEST)
    settings = {"limit": options.limit} | ({"longest": options.longest} if options.longest else {})
    lengths = Table("model", *(f"{low}-{high} words" for low, high in LENGTHS), title="BLEU by source length, seed 0")
    for name, title in MODELS.items():
        if name in options.models:
            steps = options.steps or (TRANSFORMER_STEPS if isinstance(build(name), Transformer) else RNN_STEPS)
            published = ("38 to 41", "text-only Transformers") if name == "transformer" else ("none", "")
            row = Row(f"multi30k-{name}", "Multi30k en-de", title, "BLEU, test_2016_flickr", *published)
            run = partial(train, name, data, steps, options.out, lengths)
            measure(row, run, options, {"steps": steps} | settings)
    if lengths.row_count:
        console.print(lengths)


if __name__ == "__main__":
    main()
