"""The page that `mpnn demo` writes: two panes of the viewer, a chart, and the sentences around them."""

from dataclasses import dataclass
from pathlib import Path

from mpnn.cli import page, pictures, recall, tasks, view_nodes
from mpnn.cli.tasks import Nodes, Run
from mpnn.cli.view_text import record_characters
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
    digits: list[Run]

    @property
    def trained(self) -> list[Run]:
        return [*self.recall, *self.digits]


def write(
    results: Results,
    nodes: Nodes,
    out: Path,
    footer: list[tuple[str, str]],
) -> str:
    """Draws the pictures into `out` and returns the HTML."""
    neighbors, self_loops = (trained.result for trained in results.digits)
    window, with_landmarks, _ = results.recall
    added = with_landmarks.graph.num_edges - window.graph.num_edges
    parts = [
        page.paragraph(
            "In a layer of a network, nodes receive from their in-neighbors in a graph. Here the model, its first "
            "weights and its data stay the same, and only the graph changes. Everything was trained and measured on "
            "this machine."
        ),
        page.cards(
            {
                f"{_percent(window)} → {_percent(with_landmarks)}": "of answers are right when a model must remember "
                f"one letter of a text: over a window, and with {added} more edges that carry the letter",
                results.times.gain(-1): f"is a training step on {results.times.lengths[-1]:,} characters, when each "
                "character attends to 65 characters instead of to all before it",
                f"{self_loops} → {neighbors}": "of handwritten digits are recognized, alone and when each image "
                "receives from the images most like it",
            }
        ),
        *_recall(results.recall),
        *_times(results.times, out),
        *_digits(results.digits, nodes),
        page.fold(
            "All measurements",
            [
                page.table(tasks.headings(results.trained), [trained.row for trained in results.trained]),
                page.legend(tasks.meanings(results.trained)),
            ],
        ),
        page.fold(
            "Next",
            [
                page.code(
                    'mpnn graph "causal & (window(16) | global_nodes(2))" --n 64 -o graph.png\n'
                    "mpnn compare --file your.txt --budget 5m\n"
                    'mpnn train --file your.txt --graph "causal & window(32)" --context 256'
                )
            ],
        ),
    ]
    return page.page("The choice of graph is the choice of model", parts, footer, script())


def _percent(trained: Run) -> str:
    return f"{trained.history.test_accuracy or 0.0:.0%}"


def _recall(results: list[Run]) -> list[str]:
    """The two sparse graphs are shown. Over the causal graph the letter is carried by layer 1 already, and the weights
    of layer 2, all equal, show nothing."""
    letters = recall.strings(1, seed=2)[0]
    window, with_landmarks, causal = results
    shown = window, with_landmarks
    recordings = [record_characters(trained.model, letters, trained.expression) for trained in shown]
    marked = recall.ASKED, recall.LANDMARK
    tokens = Tokens([recall.LETTERS[k] for k in letters], chosen=len(letters) - 1, marked=marked)
    share = with_landmarks.graph.num_edges / causal.graph.num_edges
    return [
        page.heading(2, "What a graph lets through"),
        page.paragraph(
            f"A transformer of {recall.LAYERS} layers reads {recall.LENGTH} random letters and names the fourth one, "
            "at every place. Over a window of eight letters, two layers carry information 14 places: in the second "
            f"half of the text, {_percent(window)} of the answers are right, and one in eight would be by chance. With "
            "landmarks (every eighth letter, to which all later letters attend), "
            f"{_percent(with_landmarks)} are right. Over the causal graph, where letters attend to all before them, "
            f"{_percent(causal)} are; landmarks take {share:.0%} of its edges."
        ),
        page.paragraph(
            "The fourth letter and the ninth, a landmark, are underlined. In layer 1 the ninth letter attends to the "
            "fourth; in layer 2, shown here, the last letter attends to the ninth. Over the window it cannot."
        ),
        page.viewer(Page("", "", attention=attention(tokens, recordings))),
    ]


def _times(times: Times, out: Path) -> list[str]:
    path = out / "step-times.png"
    pictures.step_times(times.lengths, times.steps, path)
    names = " and ".join(times.steps)
    return [
        page.heading(2, "What a graph costs"),
        page.paragraph(
            "The edges of the causal graph grow with the square of the length, those of a window with the length, and "
            "pairs without an edge are not computed. A training step of a character model over the window was "
            f"{times.gain(0)} on {times.lengths[0]} characters and {times.gain(-1)} on {times.lengths[-1]:,}; "
            "attention without the rest of the model was "
            f"{faster(*times.attention.values())} on {times.attention_length:,}."
        ),
        page.picture(
            path,
            f"Milliseconds of a training step over {names} for texts of {times.lengths[0]} to "
            f"{times.lengths[-1]:,} characters",
            "A training step (forward, backward, update) on one text, on one thread: the minimum of two interleaved "
            "runs. Both axes are logarithmic.",
        ),
    ]


def _digits(results: list[Run], nodes: Nodes) -> list[str]:
    trained = results[0]
    neighbors, self_loops = (each.result for each in results)
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
            f"images most like it, by distances between pixels. 200 of the {len(images.x):,} images have labels. With "
            f"these edges {neighbors} of the test images are recognized; with self-loops only, {self_loops}."
        ),
        page.viewer(Page("", "", attention=attention(shown, [recording]))),
    ]
