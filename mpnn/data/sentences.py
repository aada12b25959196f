"""A few hundred real English sentences for semantic search, from the manual that comes with Python."""

import re

from mpnn.data.text import topics
from mpnn.graph.arguments import at_least

_CLOSING = "\"'”’)"
_SENTENCE_END = re.compile(rf"(?:(?<=[.!?])|(?<=[.!?][{_CLOSING}]))(?<!e\.g\.)(?<!i\.e\.)\s+(?=[A-Z])")
_BROKEN_WORD = re.compile(r"(?<=\w)-\n")
_EMPHASIS = re.compile(r"(?<![\"\w*])\*{1,2}(\w[^*\"]*)\*{1,2}(?![\"\w*])")
_CODE = re.compile(r"::=|>>>|->|==|[{}\\|<>]|^\W*\w+\(")
_CHANGE_NOTE = re.compile(r"(Changed in|Added in|New in|Deprecated since) version|Availability:")


def sentences(limit: int = 400) -> list[str]:
    """Returns at most `limit` different sentences of 5 to 40 words, spread evenly over the manual's topics.

    Code blocks, headings, tables and sentences with code are excluded. The result depends on the Python version
    only.

    Raises:
        ValueError: if `limit` is less than 1.
        DatasetNotFound: if this Python was installed without its manual.
    """
    at_least("limit", limit, 1)
    candidates = list(dict.fromkeys(s for text in topics().values() for s in _sentences_in(text)))
    count = min(limit, len(candidates))
    return [candidates[i * len(candidates) // count] for i in range(count)]


def _sentences_in(text: str) -> list[str]:
    paragraphs = (p.strip("\n") for p in re.split(r"\n\s*\n", text))
    prose = (" ".join(_BROKEN_WORD.sub("-", p).split()) for p in paragraphs if _is_prose(p))
    parts = (part for p in prose for part in _SENTENCE_END.split(p))
    return [_EMPHASIS.sub(r"\1", part) for part in parts if _is_sentence(part)]


def _is_prose(paragraph: str) -> bool:
    """The manual indents code, grammar and definitions; unindented paragraphs are text or headings."""
    lines = paragraph.split("\n")
    return lines[0][:1].isupper() and not any(line.startswith((" ", "\t", "*", "=", "-", "~")) for line in lines)


def _is_sentence(part: str) -> bool:
    return (
        part[:1].isupper()
        and part.rstrip(_CLOSING).endswith((".", "!", "?"))
        and 5 <= len(part.split()) <= 40
        and _CODE.search(part) is None
        and _CHANGE_NOTE.match(part) is None
    )
