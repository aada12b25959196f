"""The subjects of the Attention pane: the tokens of a text, the patches of an image, or the nodes of a graph.

`viewer/src/data.ts` has the same three, and `viewer/src/panes/subject.ts` the drawing of each.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ON_SCREEN = 30  # a token that is on screen also in a long text


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text, each with the blanks around it.

    Attributes:
        chosen: where the page starts; None: the middle.
        special: the numbers of the tokens that stand for no text, such as [CLS].
        marked: the numbers of the tokens that are underlined.
    """

    tokens: Sequence[str]
    chosen: int | None = None
    special: Sequence[int] = ()
    marked: Sequence[int] = ()

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def start(self) -> int:
        return min(self.size // 2, _ON_SCREEN) if self.chosen is None else self.chosen

    def data(self) -> dict[str, Any]:
        return {"kind": "tokens", **{name: list(getattr(self, name)) for name in ("tokens", "special", "marked")}}


@dataclass(frozen=True)
class Patches:
    """The patches of an image in row-major order, after nodes without pixels, such as a class token.

    Attributes:
        pixels: the image, uint8 [height, width, 3].
        rows, columns: of the grid of patches.
        extra: the names of the nodes before the patches.
    """

    pixels: NDArray[np.uint8]
    rows: int
    columns: int
    extra: Sequence[str] = ()

    @property
    def size(self) -> int:
        return len(self.extra) + self.rows * self.columns

    @property
    def start(self) -> int:
        return 0 if self.extra else self.size // 2 + self.columns // 2

    def data(self) -> dict[str, Any]:
        grid = {"rows": self.rows, "columns": self.columns}
        return {"kind": "patches", "image": data_url(self.pixels), "extra": list(self.extra), **grid}


@dataclass(frozen=True)
class Nodes:
    """Nodes of a graph, each with its number and class.

    Attributes:
        numbers: their numbers in the whole graph.
        classes: their classes, integers from 0; -1 where the class is not known.
        predicted: the classes that the model gives them.
        start: the index of the node that is chosen when the page opens.
        pictures: uint8 [size, height, width, 3], an image of each node; None for nodes without.
        names: of the nodes; None: their numbers.
        class_names: None: their numbers.
    """

    numbers: Sequence[int]
    classes: Sequence[int]
    predicted: Sequence[int]
    start: int
    pictures: NDArray[np.uint8] | None = None
    names: Sequence[str] | None = None
    class_names: Sequence[str] | None = None

    @property
    def size(self) -> int:
        return len(self.numbers)

    def data(self) -> dict[str, Any]:
        return {
            "kind": "nodes",
            "numbers": list(self.numbers),
            "classes": list(self.classes),
            "predicted": list(self.predicted),
            "names": None if self.names is None else list(self.names),
            "class_names": None if self.class_names is None else list(self.class_names),
            "sprite": None if self.pictures is None else _sprite(self.pictures),
        }


Subject = Tokens | Patches | Nodes
"""What attends. `size` is the number of nodes, `start` the node that is chosen when the page opens, and `data()` what
`viewer/src/data.ts` calls Subject."""


def _sprite(pictures: NDArray[np.uint8]) -> dict[str, Any]:
    """All pictures in one image, row by row."""
    count, height, width, channels = pictures.shape
    columns = max(1, round(count**0.5))
    rows = -(-count // columns)
    sheet = np.zeros((rows * columns, height, width, channels), np.uint8)
    sheet[:count] = pictures
    sheet = sheet.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    image = data_url(sheet.reshape(rows * height, columns * width, channels))
    return {"image": image, "columns": columns, "rows": rows}


def data_url(pixels: NDArray[np.uint8]) -> str:
    """The address `data:image/png;base64,...` of pixels, uint8 [height, width, 3]."""
    from PIL import Image

    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise ValueError(f"pixels must be uint8 [height, width, 3]; got {pixels.dtype} {list(pixels.shape)}")
    file = BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode('ascii')}"
