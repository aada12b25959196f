"""The page that `mpnn demo` writes: the viewer's panes, charts, and the sentences around them."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from mpnn.cli import page, pictures, recall, tasks, view_nodes
from mpnn.cli.tasks import Corpus, Nodes, Run, TextSettings
from mpnn.cli.view_text import record_characters
from mpnn.train.comparison import half_interval, paired_gaps, spread
from mpnn.view import Page
from mpnn.view.attention import attention
from mpnn.view.page import script
from mpnn.view.subject import Tokens

_SHOWN_DIGIT = 8


@dataclass(frozen=True)
class Times:
    """Seconds of a training step by topology and length, and of attention alone at one of the lengths."""

    lengths: list[int]
    steps: dict[str, list[float]]
    attention_length: int
    attention: dict[str, float]

    def gain(self, at: int) -> str:
        """How much faster than the first graph the second is, for a step at `lengths[at]`."""
        return faster(*(of_graph[at] for of_graph in self.steps.values()))


def faster(first: float, second: float) -> str:
    """In words: how much faster than `first` seconds are `second`."""
    return f"{first / second:.1f} times faster" if second <= first else f"{second / first:.1f} times slower"


@dataclass(frozen=True)
class Results:
    """All that the demo trained and measured."""

    recall: list[Run]
    times: Times
    texts: list[Run]
    digits: list[Run]

    @property
    def trained(self) -> list[Run]:
        return [*self.recall, *self.texts, *self.digits]


def write(
    results: Results,
    corpus: Corpus,
    nodes: Nodes,
    settings: TextSettings,
    out: Path,
    footer: list[tuple[str, str]],
) -> str:
    """Draws the pictures into `out` and returns the HTML."""
    neighbors, alone = (trained.result for trained in results.digits)
    window, with_landmarks, causal, _ = results.recall
    parts = [
        page.paragraph(
            "A network layer is one round of message passing over a graph, and the choice of graph is the choice of "
            "model. Everything on this page was trained and measured on this machine a moment ago. In each section the "
            "model, its first weights and its data stay the same, and only the graph changes."
        ),
        page.cards(
            {
                f"{_percent(window)} → {_percent(with_landmarks)}": "recall of a letter, after "
                f"{with_landmarks.graph.num_edges - window.graph.num_edges} edges were added to a window of "
                f"{window.graph.num_edges}; the causal graph has {causal.graph.num_edges:,}",
                results.times.gain(-1): "a training step over a window instead of the causal graph, "
                f"on {results.times.lengths[-1]:,} characters",
                f"{alone} → {neighbors}": "of handwritten digits classified correctly, after each image was "
                "connected to the images nearest to it",
            }
        ),
        *_recall(results.recall[:-1]),
        *_recurrence(results.recall[-1]),
        *_times(results.times, out),
        *_texts(results.texts, corpus, settings, out),
        *_digits(results.digits, nodes),
        page.heading(2, "All measurements"),
        page.table(tasks.headings(results.trained), [trained.row for trained in results.trained]),
        page.legend(tasks.meanings(results.trained)),
        page.heading(2, "Next"),
        page.code(
            'mpnn graph "causal & (window(16) | global_nodes(2))" --n 64 -o graph.png\n'
            "mpnn compare --file your.txt --budget 5m\n"
            'mpnn train --file your.txt --graph "causal & window(32)" --context 256'
        ),
    ]
    return page.page("The choice of graph is the choice of model", parts, footer, script())


def _percent(trained: Run) -> str:
    return f"{trained.history.test_accuracy or 0.0:.0%}"


def _recall(results: list[Run]) -> list[str]:
    letters = recall.strings(1, seed=2)[0]
    recordings = [record_characters(trained.model, letters, trained.expression) for trained in results]
    marked = recall.ASKED, recall.LANDMARK
    tokens = Tokens([recall.LETTERS[k] for k in letters], chosen=len(letters) - 1, marked=marked)
    window, with_landmarks, causal = results
    share = with_landmarks.graph.num_edges / causal.graph.num_edges
    return [
        page.heading(2, "What a graph lets through"),
        page.paragraph(
            f"The task: read {recall.LENGTH} random letters and name the fourth one, at every place. A small "
            f"transformer of {recall.LAYERS} layers trains on it over three graphs. Over the window, each letter "
            "attends to itself and the seven before it, so two layers carry information 14 places. In the second half "
            f"of the text the model can only guess: {_percent(window)} of its answers are right, and one in eight "
            f"would be by chance. Over the causal graph, {_percent(causal)} are right. With landmarks, all later "
            f"letters also attend to every eighth letter. This takes {share:.0%} of the causal graph's edges, and "
            f"{_percent(with_landmarks)} of the answers are right."
        ),
        page.paragraph(
            f"Below is their attention on {len(letters)} new letters; the fourth and the ninth are underlined. With "
            "landmarks, the fourth letter travels in two steps: the ninth letter, a landmark, attends to it in layer "
            "1, and all later letters attend to this landmark in layer 2. Choose a layer, and point at these letters."
        ),
        page.viewer(Page("", "", attention=attention(tokens, recordings))),
        page.paragraph("A topology of your own is a function that returns runs of sources. This is all of landmarks:"),
        page.code(inspect.getsource(recall._landmarks)),
    ]


def _recurrence(trained: Run) -> list[str]:
    side = recall.DIM // recall.HEADS
    return [
        page.heading(2, "Edges or a state"),
        page.paragraph(
            "The same task over the causal graph with retention (Sun et al. 2023) in place of a softmax. Its weights "
            "are products and a decay, so the sum over all earlier letters is a matrix that each head carries from "
            f"letter to letter: {recall.HEADS} heads of {side} x {side} numbers in a layer, however long the text is. "
            f"{_percent(trained)} of its answers are right. The same model is a graph in training, computed for all "
            "letters at once, and a recurrent network when it writes. One letter fits into its state; a state that "
            "must keep more than it has room for forgets."
        ),
        page.code(
            'mpnn compare --graphs "causal; causal:retention; causal:delta" --budget 5m\n'
            '# in Python: mpnn.models.GPT(..., attention="retention")'
        ),
    ]


def _times(times: Times, out: Path) -> list[str]:
    path = out / "step-times.png"
    pictures.step_times(times.lengths, times.steps, path)
    names = " and ".join(times.steps)
    return [
        page.heading(2, "What a graph costs"),
        page.paragraph(
            "The edges of the causal graph grow with the square of the length, those of a window with the length. The "
            "time of attention follows, because pairs without an edge are not computed; the other parts of the model "
            f"take as long over both. A training step over the window was {times.gain(0)} on {times.lengths[0]} "
            f"characters and {times.gain(-1)} on {times.lengths[-1]:,}; attention alone, on "
            f"{times.attention_length:,}, was "
            f"{faster(*times.attention.values())}."
        ),
        page.picture(
            path,
            f"Milliseconds of a training step over {names} for texts of {times.lengths[0]} to "
            f"{times.lengths[-1]:,} characters",
            "A training step (forward, backward, update) of the transformer of the next section on one text, on "
            "one thread of this machine: the lesser of two, graphs interleaved. Both axes are logarithmic.",
        ),
    ]


def _texts(texts: list[Run], corpus: Corpus, settings: TextSettings, out: Path) -> list[str]:
    errors = [[t.history.val_loss[-1] for t in texts[k::2]] for k in (0, 1)]
    texts = texts[:2]
    pictures.losses(texts, out / "learning-curves.png")
    first, second = (t.graph.num_edges for t in texts)
    parts = [
        page.heading(2, "Text"),
        page.paragraph(
            f"A transformer of {settings.layers} layers, {settings.heads} heads and width {settings.dim} reads "
            f"{settings.context} characters of Python's manual at a time and learns to predict the next one: once over "
            f"all {first:,} pairs of the causal graph, once over a window with {second:,} of them. Their losses on "
            f"text that was not for training, after {settings.steps} steps, are {spread(errors[0])} and "
            f"{spread(errors[1])} nats per character (mean and standard deviation of {len(errors[0])} seeds). "
            f"{_conclusion(*errors)}"
        ),
    ]
    characters = corpus.characters.decode(corpus.val)
    start = characters.find("\n", 200) + 1
    crop = corpus.val[start : start + settings.context]
    tokens = Tokens(list(corpus.characters.decode(crop)))
    recordings = [record_characters(trained.model, crop, trained.expression) for trained in texts]
    graph = {"expression": texts[-1].expression, "n": len(crop), "num_src": None}
    parts += [
        page.paragraph(
            "Their attention in each layer and head, on text that was not for training. The tab Graph changes the "
            "graph, and Reach shows what a character learns from, layer by layer."
        ),
        page.viewer(Page("", "", graph, attention(tokens, recordings))),
    ]
    curves = page.picture(
        out / "learning-curves.png",
        "Validation loss over the training steps",
        "Loss on the last tenth of the text, in nats per character: lower is better.",
    )
    return [*parts, curves]


def _conclusion(causal: list[float], window: list[float]) -> str:
    gaps = paired_gaps(window, causal)
    gap = mean(gaps)
    half = half_interval(gaps)
    interval = f"95% interval of the difference: {gap - half:.3f} to {gap + half:.3f} nats"
    if not abs(gap) > half:
        return f"{len(gaps)} seeds cannot tell which is better ({interval}, positive where the window is)."
    better = "window" if gap > 0 else "causal graph"
    return f"The {better} is better by {abs(gap):.3f} nats ({interval}, positive where the window is)."


def _digits(results: list[Run], nodes: Nodes) -> list[str]:
    trained = results[0]
    neighbors, alone = (each.result for each in results)
    images = nodes.data
    graph = trained.graph
    test_nodes = images.test_mask.nonzero().squeeze(1)
    node = int(test_nodes[images.y[test_nodes] == _SHOWN_DIGIT][0])
    order = view_nodes.by_class(nodes)
    recording = view_nodes.record(trained.model, nodes, graph, trained.expression, order)
    shown = view_nodes.subject(trained.model, nodes, graph, order, node)
    return [
        page.heading(2, "Digits"),
        page.paragraph(
            "The same operator, with GAT's attention, over a graph that comes from data: each image receives from the "
            f"images most like it, by distances between pixels only. 200 of the {len(images.x):,} images are labeled. "
            f"With these edges, the network classifies {neighbors} of the test images correctly; with self-loops "
            f"only, {alone}. In the middle is a test image; its class is the digit that it shows."
        ),
        page.viewer(Page("", "", attention=attention(shown, [recording]))),
    ]
