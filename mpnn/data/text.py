"""Text datasets: plays, the Python manual, translated captions; and a character vocabulary."""

import gzip
from collections.abc import Iterable

import torch
from torch import Tensor

from mpnn.data.errors import DatasetNotFound
from mpnn.data.read import read
from mpnn.graph import capacity
from mpnn.graph.arguments import at_least

SPLITS = ("train", "val", "test_2016_flickr")


def tinyshakespeare() -> str:
    """Loads 1.1 MB of Shakespeare's plays, 65 different characters.

    Raises:
        DatasetNotFound, DamagedFile: see `mpnn.data.errors`.
    """
    return read("tinyshakespeare", "input.txt").decode()


def topics() -> dict[str, str]:
    """The manual that is part of Python, by topic, in alphabetical order; it depends on the Python version.

    Raises:
        DatasetNotFound: if this Python was installed without its manual.
    """
    try:
        from pydoc_data.topics import topics as manual
    except ImportError as error:
        raise DatasetNotFound(
            "this Python was installed without its manual (the standard module pydoc_data.topics); "
            "to get it, install the whole standard library of this Python version"
        ) from error
    return {name: manual[name] for name in sorted(manual)}


def pydoc_topics() -> str:
    """Returns the text of `topics()`: about 370 kB of English, without a download.

    The manual repeats sections under several topics (a fifth of the text). Only the first occurrence of a paragraph is
    kept, because otherwise training text would appear in the validation part, and the validation loss would reward
    memorisation.
    """
    paragraphs = (paragraph.strip("\n") for text in topics().values() for paragraph in text.split("\n\n"))
    return "\n\n".join(dict.fromkeys(filter(None, paragraphs))) + "\n"


def multi30k(split: str) -> list[tuple[str, str]]:
    """Returns captions of photographs as (English, German) pairs: 29,000 in "train", 1,014 in "val", 1,000 in
    "test_2016_flickr".

    Raises:
        ValueError: if there is no such split.
        DatasetNotFound, DamagedFile: see `mpnn.data.errors`.
    """
    if split not in SPLITS:
        raise ValueError(f"multi30k has no split {split!r}; it has {', '.join(SPLITS)}")
    english, german = (gzip.decompress(read("multi30k", f"{split}.{language}.gz")) for language in ("en", "de"))
    pairs = zip(english.decode().split("\n"), german.decode().split("\n"), strict=True)
    return list(pairs)[:-1]  # after the last line end


class Characters:
    """A vocabulary of characters, numbered in sorted order.

    Args:
        symbols: the characters, or any text that contains them.
    """

    def __init__(self, symbols: Iterable[str]) -> None:
        self.symbols = "".join(sorted(set(symbols)))
        self._index = {symbol: index for index, symbol in enumerate(self.symbols)}

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, text: str) -> Tensor:
        """Returns the numbers of the characters of `text`, int64 `[len(text)]`.

        Raises:
            ValueError: if a character (named with its position) is not in the vocabulary.
        """
        try:
            return torch.tensor([self._index[symbol] for symbol in text], dtype=torch.int64)
        except KeyError as error:
            unknown = error.args[0]
            raise ValueError(
                f"the character {unknown!r} at position {text.index(unknown)} is not among the {len(self)} "
                f"of this vocabulary; build the vocabulary from text that contains it"
            ) from None

    def decode(self, indices: Tensor) -> str:
        """Returns the text with these character numbers, int64 `[length]`.

        Raises:
            ValueError: if `indices` is not one-dimensional, or a number (named with its position) is out of range.
        """
        if indices.ndim != 1:
            raise ValueError(f"expected indices of shape [length], got {list(indices.shape)}; decode row by row")
        numbers = indices.tolist()
        for position, number in enumerate(numbers):
            if not 0 <= number < len(self):
                raise ValueError(f"the index {number} at position {position} is outside this vocabulary of {len(self)}")
        return "".join(self.symbols[number] for number in numbers)


def batches(data: Tensor, length: int, batch: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Samples `batch` random crops of `data`, and the next character of each of their characters.

    Args:
        data: encoded text, `[characters]`.
        length: characters in a crop.
        batch: number of crops.
        generator: random generator, on any device; the crops are on the device of `data`.

    Returns:
        `x` and `y`, both `[batch, length]`, with `y[:, t] == x[:, t + 1]` wherever both exist.

    Raises:
        ValueError: if `data` is not one-dimensional, or too short for one crop and its next character.
    """
    if data.ndim != 1:
        raise ValueError(f"expected data of shape [characters], got {list(data.shape)}")
    length, batch = at_least("length", length, 1), at_least("batch", batch, 1)
    capacity.require(24 * batch * (length + 1), f"batch={batch} crops of length={length}", "use fewer or shorter crops")
    if len(data) <= length:
        raise ValueError(f"crops of {length} characters need at least {length + 1} of them, got {len(data)}")
    device = generator.device if generator is not None else "cpu"
    starts = torch.randint(len(data) - length, (batch, 1), generator=generator, device=device)
    crops = data[starts.to(data.device) + torch.arange(length + 1, device=data.device)]
    return crops[:, :-1], crops[:, 1:]
