"""Which decoders of transformers keep packed texts apart, by how they are told and under which wrapper.

python tests/support/company.py           prints the table of docs/families.md
python tests/support/company.py FAMILY    prints the answers of one family
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import transformers
from packed_texts import WAYS, WRAPPERS, model, plain
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

from mpnn.integrations.hf import recurrences

HOLDS, REFUSES, MIXES, NO_MODEL = "yes", "refused", "no", "no model"

BAR = 2e-5
"""Of the largest number: both sides are float32, through two layers, and each may be off by 1e-5."""
_AMPLIFY = {"zamba": 3e-4}
"""Families that amplify rounding: by how much transformers' own logits change when it computes in float64."""


def bar(family: str) -> float:
    return _AMPLIFY.get(family, BAR)


def families() -> list[str]:
    """Each class of causal language models of transformers, once, by the family that names it first."""
    by_class: dict[str, str] = {}
    for family, classes in CAUSAL_LM.items():
        name = classes if isinstance(classes, str) else classes[0]
        by_class.setdefault(name, family)
    return list(by_class.values())


def class_of(family: str) -> str:
    classes = CAUSAL_LM[family]
    return classes if isinstance(classes, str) else classes[0]


def _answer(run: Any, made: Any, family: str, way: str) -> str:
    try:
        return HOLDS if run(made, way) <= bar(family) else MIXES
    except Exception as error:
        return REFUSES if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {error}"


def by_way(family: str) -> dict[str, str]:
    """The answer for each way to say where texts begin; {NO_MODEL: why} if there is no tiny model in place."""
    name = class_of(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = model(name)
        except Exception as error:
            return {NO_MODEL: f"{type(error).__name__}: {str(error)[:80]}"}
        return {way: _answer(plain, made, family, way) for way in WAYS}


def is_recurrent(family: str) -> bool:
    return any(map(recurrences.keeps_texts_apart, model(class_of(family)).modules()))


def by_wrapper(family: str, way: str) -> dict[str, str]:
    """The answer under each wrapper."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {wrapper: _answer(run, model(class_of(family)), family, way) for wrapper, run in WRAPPERS.items()}


def table(answers: dict[str, dict[str, str]]) -> str:
    """The families with the same answers in one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for family, answer in answers.items():
        if NO_MODEL not in answer:
            rows.setdefault(tuple(answer[way] for way in WAYS), []).append(family)
    lines = [f"| {' | '.join(WAYS)} | families |", f"|{'---|' * (len(WAYS) + 1)}"]
    for answer, names in sorted(rows.items(), key=lambda row: -len(row[1])):
        lines.append(f"| {' | '.join(answer)} | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if sys.argv[1:]:
        for family in sys.argv[1:]:
            print(family, by_way(family), {way: by_wrapper(family, way) for way in WAYS})
    else:
        print(table({family: by_way(family) for family in families()}))
