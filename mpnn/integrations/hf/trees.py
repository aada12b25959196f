"""Trees of texts for decoders of transformers. A tree travels as the batch's `attention_mask`, through data loaders,
the model and checkpointing, and becomes a graph where transformers asks for a mask (masks.py)."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from mpnn.graph.runs import Ints
from mpnn.graphs import trees
from mpnn.integrations.hf import compat
from mpnn.integrations.hf.closures import Described, Rule

FAMILIES = frozenset({
    "cohere2", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama", "mistral", "mixtral",
    "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
})  # fmt: skip
"""Families whose decoders a test compares with separate texts: they take positions from `position_ids` alone."""

_ONLY = (
    "a TreeMask is not a tensor, and this model's attention cannot read it; call mpnn.hf.use(model), for one of the "
    f"families {', '.join(sorted(FAMILIES))}"
)


class TreeMask:
    """The `attention_mask` of one row of tokens that form a tree. Call a decoder with `position_ids=mask.position_ids`,
    int64 [1, N], which are depths. Each token attends to itself and to its ancestors; the model's own windows, or the
    graph of `mpnn.hf.use`, count depths. With a cache, the tree holds the cached tokens too.

    `parent` [N] is as for `graphs.tree`; `answers` are the slices of the row that `log_probs` reads.
    """

    ndim = 2

    def __init__(self, parent: Sequence[int] | Tensor, answers: Iterable[slice] = ()) -> None:
        self.parents = trees.parents_of(parent).tobytes()
        self.answers = tuple(answers)
        self.position_ids = trees.tree(parent).node_positions()[0][None]
        self.shape = tuple(self.position_ids.shape)
        self.is_read = False

    def to(self, *args: Any, **options: Any) -> "TreeMask":
        """Returns the same mask: it has no device."""
        return self

    view = to

    def rule(self, described: Described, config: compat.PretrainedConfig | None) -> Rule:
        """Returns the rule of the model's own mask along the paths of the tree."""
        require_family(config)
        self.is_read = True
        tokens, (queries, keys, first_query, first_key) = self.position_ids.shape[1], described.sizes
        if described.batch != 1:
            raise ValueError(f"a TreeMask is for one row of tokens; got a batch of {described.batch}")
        if (first_query + queries, keys, first_key) != (tokens, tokens, 0):
            raise ValueError(
                f"the tree has {tokens} tokens, and the model has {queries} new ones, from {first_query} on, and the "
                f"keys {first_key} to {first_key + keys}: a tree holds all tokens, also cached ones, and takes no "
                "sliding cache that has dropped some"
            )
        return described.rules()[0].along(self.parents)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r}: {_ONLY}")

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(_ONLY)


def require_family(config: Any) -> None:
    """Raises ValueError if the layers of a model may read more than its mask and `position_ids`."""
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise ValueError(
            f"trees of texts were not compared with separate texts for models of the type {family}, whose layers may "
            f"follow the row instead of the tree; those that were are {', '.join(sorted(FAMILIES))}"
        )


class Rollouts:
    """Collates groups, each a mapping with the tokens of a "prompt" and a list of "answers", into one row for a decoder
    in place: `input_ids`, `labels` and `position_ids`, int64 [1, N], and a `TreeMask` as `attention_mask`.

    The row holds a prompt without its last token, then each answer after a copy of that token, which predicts the
    answer's first one. So labels shift by one along the row, as models shift them: `model(**batch).loss` is the mean
    over the tokens of all answers. Labels of other tokens are -100. An answer without tokens has no place in the row.

    `model` computes the batches. It is checked and not stored. Raises ValueError if its attention is not that of
    mpnn, or if its family was not compared with separate texts.
    """

    def __init__(self, model: nn.Module) -> None:
        config: Any = next((part.config for part in model.modules() if isinstance(part, PreTrainedModel)), None)
        require_family(config)
        if (name := config._attn_implementation) != "mpnn":
            raise ValueError(f"{type(model).__name__} attends by {name!r}; call mpnn.hf.use(model)")

    def __call__(self, groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        packed = [_packed(k, group) for k, group in enumerate(groups)]
        firsts = [*accumulate((len(row) for row, _, _ in packed), initial=0)][:-1]
        parents = [
            np.where(parent < 0, -1, parent + first) for (_, parent, _), first in zip(packed, firsts, strict=True)
        ]
        answers = [
            slice(first + start, first + stop)
            for (_, _, ends), first in zip(packed, firsts, strict=True)
            for start, stop in ends
        ]
        if not any(answer.stop > answer.start for answer in answers):
            raise ValueError("no answer has a token, so there is nothing to train on")
        row = torch.cat([row for row, _, _ in packed])[None]
        mask = TreeMask(torch.from_numpy(np.concatenate(parents)), answers)
        labels = torch.full_like(row, -100)
        for answer in answers:
            labels[:, answer] = row[:, answer]
        return {"input_ids": row, "attention_mask": mask, "position_ids": mask.position_ids, "labels": labels}


def _packed(k: int, group: Mapping[str, Any]) -> tuple[Tensor, Ints, list[tuple[int, int]]]:
    """The tokens of a group's row, their parents, and where each answer begins and ends."""
    prompt = _tokens(f"the prompt of group {k}", group["prompt"])
    if not len(prompt):
        raise ValueError(f"the prompt of group {k} has no token, so nothing predicts the first one of an answer")
    answers = [_tokens(f"answer {n} of group {k}", answer) for n, answer in enumerate(group["answers"])]
    behind = [torch.cat([prompt[-1:], answer]) if len(answer) else answer for answer in answers]
    stops = (len(prompt) - 1 + np.cumsum([len(part) for part in behind])).tolist()
    ends = [(stop - len(answer), stop) for stop, answer in zip(stops, answers, strict=True)]
    return torch.cat([prompt[:-1], *behind]), trees.answers_after(len(prompt) - 1, list(map(len, behind))), ends


def log_probs(logits: Tensor, batch: Mapping[str, Any]) -> list[Tensor]:
    """Returns the log-probabilities of the tokens of each answer of a batch of `Rollouts`, in the order of groups and
    answers.

        log p(a_t | prompt, a_1 .. a_t-1) = log softmax(logits of the token before)[a_t]

    `logits` are those of the whole row, [1, N, vocabulary]. Each tensor is [length of the answer], at least in float32;
    the mean of all numbers, negated, is the loss. Raises ValueError if no model has read the mask of the batch.
    """
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    if logits.shape[:2] != tokens.shape:
        raise ValueError(f"the row has {tokens.shape[1]} tokens, and the logits are of shape {list(logits.shape)}")
    logits = logits[0].to(torch.promote_types(logits.dtype, torch.float32))
    if not mask.is_read:  # some recurrent models (RWKV, xLSTM) ignore what they are given as attention_mask
        raise ValueError("no model has read the tree of this batch; call one that attends by mpnn with the whole batch")
    targets = [tokens[0, answer].to(logits.device) for answer in mask.answers]
    before = [logits[max(answer.start - 1, 0) :][: len(y)] for answer, y in zip(mask.answers, targets, strict=True)]
    return [-F.cross_entropy(x, y, reduction="none") for x, y in zip(before, targets, strict=True)]


def _tokens(name: str, tokens: Any) -> Tensor:
    row = torch.as_tensor(tokens)
    if row.dim() != 1 or (len(row) and (row.is_floating_point() or row.dtype == torch.bool)):
        raise TypeError(f"{name} must be a list of token numbers; got {row.dtype} of shape {list(row.shape)}")
    return row.long()
