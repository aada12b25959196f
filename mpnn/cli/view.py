"""`mpnn view`: a page for the browser that shows a graph, and what tokens, patches or nodes attend to over it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mpnn.cli.console import Force, NumSrc, check_file, console, exit_on_failure, exit_on_invalid_input
from mpnn.cli.expressions import bind
from mpnn.cli.tasks import CHARACTERS
from mpnn.cli.train import CHECKPOINT, FINISHED, saved_options
from mpnn.graph.files import write_atomically
from mpnn.graphs import parse
from mpnn.view import Page, of_topology

_SUFFIXES = (".html", ".htm")
_NODES = 64
_NAME_OF_MODEL = re.compile(r"[\w.-]*[\d/-][\w./-]*")  # as on the Hub: org/name, or a name with a digit or a hyphen


@dataclass(frozen=True)
class Reads:
    """The input of a model, as options of the command; a model reads one of them."""

    text: str | None = None
    image: Path | None = None
    node: str | None = None

    def only(self, mine: str, what: str, kind: str) -> Any:
        """Returns the value of the option `mine`. Raises ValueError if another is given, or no image."""
        for name in ("text", "image", "node"):
            if name != mine and getattr(self, name) is not None:
                raise ValueError(f"{what} is {kind}, which takes --{mine}; leave out --{name}")
        if mine == "image" and self.image is None:
            raise ValueError(f"{what} is a model of images; name one with --image")
        return getattr(self, mine)


def view(
    what: Annotated[
        str,
        typer.Argument(
            metavar="EXPR|DIR|MODEL",
            help='A topology, such as "causal & window(16)"; a folder of mpnn train, or with a ViT of mpnn; or a model '
            "of transformers, as a folder or by its name on the Hugging Face Hub.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.", dir_okay=False)] = Path(
        "view.html"
    ),
    text: Annotated[
        str | None, typer.Option("--text", help="The text that the model reads. Default: a sentence in English.")
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(
            "--image",
            help="The image that a vision model reads: a file that Pillow opens, or an array (.npy) of the model's "
            "values, channels x height x width.",
            dir_okay=False,
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            help="The node whose neighbors a run on nodes shows, by its id, or its number from 0 where nodes have no "
            "ids. Default: one with about eight.",
        ),
    ] = None,
    graph: Annotated[
        list[str] | None,
        typer.Option(
            "--graph",
            help='A topology over which the model attends, of the patches for an image; "" is its own. Give up to two. '
            "Default: its own, and a window, or the neighbors of each patch; only its own for nodes.",
        ),
    ] = None,
    n: Annotated[
        int | None, typer.Option("--n", help="Number of nodes (destinations, which receive messages). Default: 64.")
    ] = None,
    num_src: NumSrc = None,
    force: Force = False,
) -> None:
    """Write a page for the browser that shows a graph, and what a model attends to over it.

    The page is one file that needs no network. Expressions can be changed
    there, and their numbers by sliders.

    \b
    Examples:
      mpnn view "causal & window(16)" -o graph.html
      mpnn view "longformer(64, globals=2)" --n 4096 -o longformer.html
      mpnn view runs/train --text "If the " -o letters.html
      mpnn view sentence-transformers/all-MiniLM-L6-v2 --text "A bank by the river." -o bank.html
      mpnn view google/vit-base-patch16-224 --image cat.jpg -o cat.html
      mpnn view runs/cora --node 1358 -o paper.html
    """
    check_file(out, _SUFFIXES, "the page is an HTML file", force)
    reads = Reads(text, image, node)
    with exit_on_invalid_input():
        if _is_model(what):
            if n is not None or num_src is not None:
                raise ValueError(
                    f"--n and --num-src are for expressions; {what} is a model, whose nodes are its input's"
                )
            page = _page_of_model(what, reads, graph)
        else:
            if reads != Reads() or graph:
                raise ValueError(f"--text, --image, --node and --graph are for models; {what} is an expression")
            nodes = _NODES if n is None else n
            bind(what, nodes, num_src)  # its errors name the options
            with console.status("planning"):
                page = of_topology(what, nodes, num_src)
    with exit_on_failure():
        write_atomically(out, lambda temporary: temporary.write_text(page.html(), encoding="utf-8"))
    console.print(f"saved to {out}; open it in a browser", soft_wrap=True)


def _is_model(what: str) -> bool:
    path = Path(what)
    if path.is_dir():
        return True
    try:
        parse(what)
    except ValueError:
        # A name on a hub has one slash, and no folder of this machine before it.
        is_path = path.is_absolute() or path.parts[:1] in ((".",), ("..",), ("runs",)) or what.startswith((".", "~"))
        if is_path or ("/" in what and path.parent.is_dir()):
            raise ValueError(f"there is no folder {what}") from None
        return _NAME_OF_MODEL.fullmatch(what) is not None
    return False


def _page_of_model(what: str, reads: Reads, graphs: list[str] | None) -> Page:
    from mpnn.cli import view_images, view_models, view_nodes, view_text

    if graphs and len(graphs) > view_models.MAX_GRAPHS:
        raise ValueError(f"the page shows up to two graphs side by side; got {len(graphs)}")
    with console.status("reading attention weights"):
        folder = Path(what)
        if (folder / CHARACTERS).is_file():
            return view_text.of_run(what, reads.only("text", what, "a run on text") or view_text.TEXT, graphs)
        if (folder / FINISHED).is_file():
            return view_nodes.of_run(what, reads.only("node", what, "a run on nodes"), graphs)
        if (vit := view_images.saved_vit(folder)) is not None:
            return view_images.of_saved(what, vit, reads.only("image", what, "a model of images"), graphs)
        if (folder / CHECKPOINT).is_file() or (folder.is_dir() and not any(folder.glob("*.json"))):
            saved_options(folder)  # raises an error that says what the folder has
        model = view_models.transformers_model(what)
        if reads.image is not None:
            model = getattr(model, "vision_model", model)  # of two towers, such as CLIP's
        if model.main_input_name == "pixel_values":
            return view_images.of_transformers(what, model, reads.only("image", what, "a model of images"), graphs)
        return view_text.of_transformers(
            what, model, reads.only("text", what, "a model of text") or view_text.TEXT, graphs
        )
