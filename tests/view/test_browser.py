"""The page in a real browser, Chromium without a window: no error in the console, and an interaction of each pane."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from chromium import CHROMIUM, Browser, browser

from mpnn import Graph, graphs
from mpnn.cli import page as demo_page
from mpnn.models.layers.images import with_class_token
from mpnn.view import Page, of_topology as topology_page
from mpnn.view.attention import Recording, attention
from mpnn.view.page import script
from mpnn.view.subject import Nodes, Patches, Tokens
from mpnn.view.topology import plan_data

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

HELP = """
const frame = () => new Promise((done) => requestAnimationFrame(done));
window.wait = async (ms = 20) => {
  await new Promise((done) => setTimeout(done, ms));
  await frame();
  await frame();
};
window.find = (query) => [...document.querySelectorAll(query)].filter((one) => one.offsetParent || one.closest("svg"));
window.tab = async (name) => { find("[role=tab]").find((one) => one.textContent === name).click(); await wait(); };
window.type = async (query, text, k = 0) => {
  find(query)[k].value = text;
  find(query)[k].dispatchEvent(new Event("input", {bubbles: true}));
  await wait();
};
window.at = (element, name, x, y, more = {}) => {
  const box = element.getBoundingClientRect();
  const place = {bubbles: true, cancelable: true, clientX: box.left + x * box.width, clientY: box.top + y * box.height};
  const kind = name.startsWith("pointer") ? PointerEvent : name === "wheel" ? WheelEvent : MouseEvent;
  element.dispatchEvent(new kind(name, {...place, ...more}));
};
window.pixels = (canvas) => canvas.toDataURL();
window.press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
window.text = (query) => find(query).map((one) => one.textContent);
window.chooseHead = async (head) => {
  const select = find("[aria-label=head]")[0];
  select.value = head;
  select.dispatchEvent(new Event("change"));
  await wait();
};
window.check = async (words) => { find("label").find((one) => one.textContent.includes(words)).click(); await wait(); };
window.colors = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
window.over = (color, below) => {  // what a color, which may be transparent, gives on another
  colors.globalAlpha = 1;
  colors.fillStyle = below;
  colors.fillRect(0, 0, 1, 1);
  colors.fillStyle = color;
  colors.fillRect(0, 0, 1, 1);
  return `rgb(${[...colors.getImageData(0, 0, 1, 1).data].slice(0, 3)})`;
};
window.luminance = (color) => {
  const linear = (x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const [red, green, blue] = color.match(/[0-9]+/g).map((x) => linear(x / 255));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
window.behind = (one) => {
  const below = one.parentElement ? behind(one.parentElement) : "rgb(255, 255, 255)";
  return over(getComputedStyle(one).backgroundColor, below);
};
window.contrast = (color, below) => {  // WCAG 2.2, 1.4.3
  const [a, b] = [over(color, below), below].map(luminance);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
};
window.pale = () => find(".mpnn-viewer *").flatMap((one) => {
  const style = getComputedStyle(one);
  const isText = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!isText || one.closest("style, title")) return [];
  const box = one.closest("g")?.querySelector(":scope > rect");
  let below = behind(one);
  const share = 100 * box?.getAttribute("fill-opacity");
  if (box) below = over(`color-mix(in srgb, ${box.getAttribute("fill")} ${share}%, transparent)`, below);
  const found = contrast(one.closest("svg") ? style.fill : style.color, below);
  return found < 4.5 ? [`${one.textContent}: ${found.toFixed(2)}`] : [];
});
window.unreachable = () => find(".mpnn-viewer *").filter((one) => {
  const acts = ["pointer", "crosshair"].includes(getComputedStyle(one).cursor);
  const keys = one.closest("button, select, [tabindex], label:has(input)");
  return acts && !keys;
}).map((one) => one.outerHTML.slice(0, 80));
window.facts = () => Object.fromEntries(find("dt").map((one) => [one.textContent, one.nextSibling.textContent]));
"""


def page() -> Page:
    tokens = [f" word{k}" for k in range(12)]
    recordings = []
    for name in ("complete", "window(2)"):
        graph = graphs.parse(name).bind(len(tokens))
        src, dst = graph.edge_index
        recording = Recording(name, len(tokens), 2)
        for layer in range(2):
            # token i attends to i + 1 in head 0 of the first layer, and evenly elsewhere
            even = 1 / graph.degree()[dst]
            weights = torch.stack([((src == dst + 1).float() if layer == 0 else even), even], 1)
            recording.add(graph, weights)
        recordings.append(recording)
    plan = plan_data(graphs.parse("causal & window(4)"), 32)
    graph_data = {"expression": "causal & window(4)", "n": 32, "num_src": None}
    return Page("A title", "A subtitle", graph_data, attention(Tokens(tokens), recordings), plan)


def recording(name: str, graph: Graph, heads: Sequence[int]) -> Recording:
    """Each node attends to its first source only in head 1 of each layer, and evenly in the others."""
    made = Recording(name, graph.num_dst, len(heads))
    dst = graph.edge_index[1]
    first = torch.ones(graph.num_edges)
    first[1:] = (dst[1:] != dst[:-1]).float()
    even = 1 / graph.degree()[dst]
    for count in heads:
        made.add(graph, torch.stack([first, *[even] * (count - 1)], 1))
    return made


def page_of_patches() -> Page:
    """Two rows of three patches, and a class token."""
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    graphs_of = {name: graphs.parse(name).bind(7) for name in ("complete", "window(1)")}
    recordings = [recording(name, graph, [2, 2]) for name, graph in graphs_of.items()]
    return Page("photo.png", "", None, attention(Patches(pixels, 2, 3, ["[CLS]"]), recordings))


def page_of_nodes(pictures: bool = False) -> Page:
    """A ring of twelve nodes of two classes: 100 to 111, and 103 in the middle."""
    ring = graphs.parse("window(1)").bind(12)
    images = np.zeros((12, 2, 2, 3), np.uint8) if pictures else None
    nodes = Nodes(range(100, 112), [0] * 6 + [1] * 6, [0] * 12, 3, images)
    return Page("Node 103", "", None, attention(nodes, [recording("ring", ring, [3, 1])]))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("page") / "page.html"
    written.write_text(page().html(), encoding="utf-8")
    return written


@pytest.fixture
def see(chromium: Browser, file: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Opens a document, by default that of `page()`. Returns what the script, the body of an async function, puts into
    `seen`."""

    def run(script: str, other: str | None = None, **options: Any) -> dict[str, Any]:
        chromium.problems.clear()
        shown = file
        if other is not None:
            shown = tmp_path / "other.html"
            shown.write_text(other, encoding="utf-8")
        chromium.open(shown, **options)
        chromium.run(HELP)
        wide = "seen.wide = document.documentElement.scrollWidth > innerWidth; return seen;"
        seen: dict[str, Any] = chromium.run(f"const seen = {{}}; await wait(100); {script}; {wide}")
        assert chromium.problems == []
        assert not seen["wide"], "the page scrolls sideways"
        return seen

    return run


def test_hovering_a_token_shows_what_it_attends_to(see: Callable[..., dict[str, Any]]) -> None:
    seen = see(
        """
        for (const select of find("select")) { select.value = "1"; select.dispatchEvent(new Event("change")); }
        await wait();
        at(find("[data-node='3']")[0], "pointerover", .5, .5, {pointerType: "mouse"});
        await wait();
        seen.said = text(".sentence");
        const marked = (one) => [...one.querySelectorAll("span")].filter((span) => span.style.background);
        seen.marked = find(".tokens").map((one) => marked(one).map((span) => span.textContent));
        find(".segmented input")[1].click();
        await wait();
        seen.by = text(".sentence");
        const before = pixels(find("canvas.large")[0]);
        at(find("canvas.heads")[0], "click", .75, .75);
        await wait();
        seen.head = text(".sentence");
        seen.redrawn = before !== pixels(find("canvas.large")[0]);
        press(find(".tokens")[0], "ArrowRight");
        await wait();
        seen.next = text(".sentence")[0];
        """
    )
    assert seen["said"] == ["Layer 1, head 1: “word3” attends to “word4” 100.0 %."] * 2
    assert seen["marked"] == [[" word4"], [" word4"]]
    assert seen["by"][0] == "Layer 1, head 1: “word3” is attended by “word2” 100.0 %."
    assert seen["head"][0].startswith("Layer 2, head 2: “word3” is attended by")
    assert "and 8 more" in seen["head"][0]
    assert "and 1 more" in seen["head"][1]
    assert seen["redrawn"]
    assert "“word4” is attended by" in seen["next"]


def page_with_special_tokens() -> Page:
    graph = graphs.complete().bind(4)
    dst, src = graph.edge_index[1], graph.edge_index[0]
    weights = torch.tensor([0.5, 0.1, 0.3, 0.1])[src] * torch.ones_like(dst)  # half on the first
    made = Recording("complete", 4, 1)
    made.add(graph, weights[:, None])
    tokens = Tokens(["[CLS] ", "a", " b", " [SEP]"], chosen=1, special=[0, 3])
    return Page("Title", "", None, attention(tokens, [made]))


def test_special_tokens_are_left_out_and_two_copies_have_lines(see: Callable[..., dict[str, Any]]) -> None:
    seen = see(
        """
        seen.all = text(".sentence")[0];
        await check("without [CLS] and [SEP]");
        seen.without = text(".sentence")[0];
        await check("lines between two copies");
        const isOwn = (one) => one.getAttribute("stroke") === "#0072b2";
        const own = () => find("svg.between path").filter(isOwn).length;
        seen.lines = own();
        at(find("svg.between [data-node='2'] rect")[1], "click", .5, .5, {});
        await wait();
        seen.held = text(".sentence")[0];
        await check("without [CLS] and [SEP]");
        seen.more = own();
        const saved = new Promise((done) => { URL.createObjectURL = (blob) => (blob.text().then(done), "data:,"); });
        find("button").find((one) => one.textContent === "SVG").click();
        seen.svg = await saved;
        """,
        page_with_special_tokens().html(),
    )
    assert seen["all"].startswith("Layer 1, mean of all heads: “a” attends to “[CLS]” 49.8 %")
    assert seen["without"].startswith("Layer 1, mean of all heads: “a” attends to “b” 7"), "3/4 of what is left"
    assert re.search(r"Left out: 59\.\d % of its attention", seen["without"])
    assert (seen["lines"], seen["more"]) == (2, 4)
    assert "“b” attends to “b”" in seen["held"]
    assert "Held" in seen["held"]
    drawing = ElementTree.fromstring(seen["svg"])
    assert [one.text for one in drawing.iter("{http://www.w3.org/2000/svg}text")][:4] == ["[CLS]", "a", "b", "[SEP]"]
    path = next(drawing.iter("{http://www.w3.org/2000/svg}path"))
    assert path.get("stroke").startswith("rgb"), "it needs no style sheet"


def test_the_address_opens_the_same(chromium: Browser, file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.html"
    copy.write_text(file.read_text())
    chromium.open(file)
    chromium.run(HELP)
    script = """
        const seen = {};
        await wait(100);
        await chooseHead(2);
        at(find("[data-node='3']")[0], "click", .5, .5, {});
        await tab("Graph");
        await type(".expression", "window(3)");
        find(".segmented input").find((one) => one.value === "arcs").click();
        await wait(400);
        seen.address = location.hash;
        return seen;
    """
    address = chromium.run(script)["address"]
    expected = "node=3&layer=2&head=2&pane=Graph&graph=window(3)&n=32&drawing=arcs"
    assert dict(parse_qsl(address[1:])) == dict(parse_qsl(expected))
    chromium.problems.clear()
    chromium.open(copy, fragment=address)
    chromium.run(HELP)
    script = """
        const seen = {};
        await wait(100);
        seen.expression = find(".expression")[0].value;
        seen.drawing = find(".stage svg").length;
        await tab("Attention");
        seen.said = text(".sentence")[0];
        return seen;
    """
    seen = chromium.run(script)
    assert chromium.problems == []
    assert (seen["expression"], seen["drawing"]) == ("window(3)", 1)
    assert seen["said"].startswith("Layer 2, head 2: “word3” attends to")
    assert "Held" in seen["said"]


def test_a_graph_is_copied_as_python_and_saved(see: Callable[..., dict[str, Any]]) -> None:
    seen = see(
        """
        await tab("Graph");
        let copied = "";
        Object.defineProperty(navigator, "clipboard", {value: {writeText: async (text) => { copied = text; }}});
        const copy = async (text) => {
          await type(".expression", text);
          find("button").find((one) => /Cop/.test(one.textContent)).click();
          await wait();
          return copied;
        };
        seen.code = [];
        for (const one of ["causal & graphs.window(3, dilation=2)", "mpnn.graphs.global_nodes([1, 2]) - ~identity()"]) {
          seen.code.push(await copy(one));
        }
        seen.problems = [];
        for (const one of ["windw(3)", "window(radus=3)", "causal and window(3)"]) {
          await type(".expression", one);
          seen.problems.push(text(".problem")[0]);
        }
        const saved = (label) => new Promise((done) => {
          URL.createObjectURL = (blob) => (done(blob), "data:,");
          find("button").find((one) => one.textContent === label).click();
        });
        await type(".expression", "window(1)");
        seen.svg = await (await saved("SVG")).text();
        seen.png = [...new Uint8Array(await (await saved("PNG")).arrayBuffer())].slice(0, 4);
        """
    )
    for code, expected in zip(
        seen["code"],
        (graphs.causal() & graphs.window(3, dilation=2), graphs.global_nodes([1, 2]) - ~graphs.identity()),
        strict=True,
    ):
        names: dict[str, Any] = {}
        exec(code, names)
        assert names["topology"] == expected
        assert names["graph"].num_dst == 32
    misspelled, argument, word = seen["problems"]
    assert misspelled.startswith("column 1: there is no topology windw (did you mean window?); there are bigbird,")
    assert argument.endswith("window takes only radius, dilation (did you mean radius?)")
    assert word == "column 8: write & for and"
    drawn = ElementTree.fromstring(seen["svg"])
    assert next(drawn.iter("{http://www.w3.org/2000/svg}path")).get("d", "").count("M") == 32, "a run for each row"
    assert seen["png"] == [0x89, *b"PNG"]


def test_a_graph_with_builders_of_one_s_own_is_drawn(see: Callable[..., dict[str, Any]]) -> None:
    own = topology_page(with_class_token(graphs.window(1)), 6)
    seen = see(
        """
        seen.problem = text(".problem")[0];
        seen.edges = facts()["Edges"];
        await type(".expression", "window(1)");
        seen.changed = facts()["Edges"];
        """,
        replace(own, plan=None).html(),
    )
    assert seen["problem"] == ""
    assert seen["edges"] == str(with_class_token(graphs.window(1)).bind(6).num_edges)
    assert seen["changed"] == str(graphs.window(1).bind(6).num_edges)


def test_pointing_at_a_patch_colors_others_over_the_image(see: Callable[..., dict[str, Any]]) -> None:
    seen = see(
        """
        seen.mean = text(".sentence")[0];
        await chooseHead(1);
        seen.first = text(".sentence");
        const canvas = find("canvas.patches");
        const before = canvas.map(pixels);
        const heads = pixels(find("canvas.heads")[1]);
        at(canvas[0], "pointermove", .9, .9, {pointerType: "mouse"});
        await wait();
        seen.last = text(".sentence");
        seen.redrawn = canvas.map((one, k) => before[k] !== pixels(one));
        seen.heads = heads !== pixels(find("canvas.heads")[1]);
        seen.label = canvas[0].getAttribute("aria-label");
        at(canvas[1], "click", .1, .1, {});
        at(canvas[1], "pointermove", .9, .9, {pointerType: "mouse"});
        await wait();
        seen.held = text(".sentence")[1];
        press(canvas[1], "ArrowDown");
        await wait();
        seen.below = text(".sentence")[1];
        press(canvas[1], "Enter");  // lets it go
        at(canvas[1], "pointermove", .9, .9, {pointerType: "mouse"});
        await wait();
        seen.free = text(".sentence")[1];
        find(".extra span")[0].click();
        await wait();
        seen.token = text(".sentence")[0];
        press(find(".extra")[0], "ArrowRight");
        await wait();
        seen.beside = text(".sentence")[0];
        seen.tabs = find("[role=tab]").length;
        """,
        page_of_patches().html(),
    )
    assert seen["mean"].startswith("Layer 2, mean of all heads: [CLS] attends to [CLS] 57.1 %")
    assert seen["first"] == ["Layer 2, head 1: [CLS] attends to [CLS] 100.0 %."] * 2
    assert seen["last"] == [
        "Layer 2, head 1: patch (2, 3) attends to [CLS] 100.0 %.",
        "Layer 2, head 1: patch (2, 3) attends to patch (2, 2) 100.0 %.",
    ]
    assert seen["redrawn"] == [True, True]
    assert seen["heads"]  # the small squares follow the patch
    assert seen["label"].startswith("image of 2 x 3 patches; patch (2, 3) is chosen")
    assert seen["held"].endswith(": patch (1, 1) attends to [CLS] 100.0 %. Held: click or press Enter to let go.")
    assert seen["below"].startswith("Layer 2, head 1: patch (2, 1) attends to patch (1, 3) 100.0 %.")
    assert seen["free"].startswith("Layer 2, head 1: patch (2, 3) attends to")
    assert "Held" not in seen["free"]
    assert seen["token"].startswith("Layer 2, head 1: [CLS] attends to")
    assert seen["beside"].startswith("Layer 2, head 1: patch (1, 1) attends to")
    assert seen["tabs"] == 0


def test_the_neighborhood_of_a_node(see: Callable[..., dict[str, Any]]) -> None:
    seen = see(
        """
        const numbers = () => text(".ego text").map(Number).sort((a, b) => a - b);
        const own = () => find(".ego .own").length;
        await chooseHead(1);
        seen.first = [numbers(), own(), text(".sentence")[0]];
        seen.label = find("svg.ego")[0].getAttribute("aria-label");
        at(find(".ego [data-node='4']")[0], "pointerover", .5, .5, {pointerType: "mouse"});
        await wait();
        seen.pointed = [numbers(), text(".sentence")[0]];
        at(find(".ego [data-node='4']")[0], "click", .5, .5, {});
        await wait();
        seen.clicked = [numbers(), find("input[type=number]")[0].value];
        find(".ego [data-node='5']")[0].focus();
        await wait();
        seen.focused = text(".sentence")[0];
        press(find(".ego [data-node='5']")[0], " ");
        await wait();
        seen.entered = [find("input[type=number]")[0].value, document.activeElement.dataset.node];
        find(".controls .chips button")[1].click();
        await wait();
        seen.next = [find("input[type=number]")[0].value, text(".sentence")[0]];
        const input = find("input[type=number]")[0];
        input.value = 7;
        input.dispatchEvent(new Event("change"));
        seen.problem = text(".controls [role=status]")[0];
        input.value = 110;
        input.dispatchEvent(new Event("change"));
        const [layer, head] = find("select");
        layer.value = "1";
        layer.dispatchEvent(new Event("change"));
        await wait();
        head.value = "3";
        head.dispatchEvent(new Event("change"));
        await wait();
        seen.third = text(".sentence")[0];
        layer.value = "2";
        layer.dispatchEvent(new Event("change"));
        await wait();
        seen.only = text(".sentence")[0];
        """,
        page_of_nodes().html(),
    )
    assert seen["first"] == [
        [101, 102, 103, 104, 105],
        1,
        "Layer 2, head 1: node 103 (class 0, predicted right) attends to node 102 (class 0, predicted right) 100.0 %.",
    ]
    assert seen["label"].startswith(
        "node 103 (class 0, predicted right) in the middle, 2 nodes that it attends to around it, and 2"
    )
    assert seen["pointed"] == [
        [101, 102, 103, 104, 105],
        "Layer 2, head 1: node 104 (class 0, predicted right) attends to node 103 (class 0, predicted right) 100.0 %.",
    ]
    assert seen["clicked"] == [[102, 103, 104, 105, 106], "104"]
    assert seen["focused"].startswith("Layer 2, head 1: node 105 (class 0, predicted right)")
    assert seen["entered"] == ["105", "5"]
    assert seen["next"] == [
        "106",
        "Layer 2, head 1: node 106 (class 1, predicted class 0) attends to node 105 (class 0, predicted right) "
        "100.0 %.",
    ]
    assert seen["problem"] == "The page has no node 7."
    assert seen["third"].startswith("Layer 1, head 3: node 110 (class 1, predicted class 0) attends to node")
    assert seen["third"].count("33.2 %") == 3  # a third, as a byte
    assert seen["only"].startswith("Layer 2, head 1: node 110")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("make", [page_of_patches, lambda: page_of_nodes(pictures=True)], ids=["patches", "nodes"])
def test_patches_and_nodes_fit(
    see: Callable[..., dict[str, Any]], make: Callable[[], Page], width: int, scheme: str
) -> None:
    seen = see(
        """
        seen.silent = find("canvas, svg[class]").filter((one) => !one.getAttribute("aria-label")).length;
        seen.drawn = find("canvas, svg[class]").length;
        seen.widest = Math.max(...find("canvas, svg[class]").map((one) => one.getBoundingClientRect().width));
        seen.missed = [...pale(), ...unreachable()];
        const edge = (one) => contrast(getComputedStyle(one).stroke, behind(one.closest("svg.ego")));
        seen.dim = find(".ego circle").filter((one) => edge(one) < 3).length;
        """,
        make().html(),
        width=width,
        scheme=scheme,
    )
    assert seen["silent"] == seen["dim"] == 0  # the edge of each dot has a contrast of 3 (WCAG 2.2, 1.4.11)
    assert seen["missed"] == []
    assert seen["drawn"] >= 3
    assert seen["widest"] > 300  # in one column on a telephone


def test_several_parts_in_one_document(see: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """As on the page of `mpnn demo`: no headings of their own, and the styles of the document stay outside."""
    tokens = attention(Tokens(["a", "b", "a"]), [recording("causal", graphs.causal().bind(3), [1])])
    graph = {"expression": "causal", "n": 3, "num_src": None}
    parts = [Page("", "", graph, tokens), page_of_patches(), page_of_nodes()]
    document = demo_page.page("Title", [demo_page.viewer(replace(part, title="")) for part in parts], [], script())
    seen = see(
        """
        seen.titles = text("h1");
        seen.sentences = text(".sentence").length;
        at(find(".tokens span")[2], "pointerover", .5, .5, {pointerType: "mouse"});
        await wait();
        seen.said = text(".sentence")[0];
        await tab("Graph");
        seen.drawn = find("canvas.matrix").length;
        seen.size = getComputedStyle(find(".mpnn-viewer h2")[0]).borderTopWidth;
        """,
        document,
        width=400,
    )
    assert seen["titles"] == ["Title"]
    assert seen["sentences"] == 4
    assert seen["said"] == "Layer 1, mean of all heads: “a” (3) attends to “a” (1) 100.0 %."
    assert seen["drawn"] == 1
    assert seen["size"] == "0px"


def test_the_graph_follows_expression_sliders_and_zoom(see: Callable[..., dict[str, Any]]) -> None:
    seen = see(
        """
        await tab("Graph");
        await wait(500);
        seen.first = facts();
        await type("input[type=range]", 2, 1);
        seen.text = find(".expression")[0].value;
        seen.second = facts();
        await type(".expression", "causal & wind");
        seen.problem = text(".problem")[0];
        seen.invalid = find(".expression")[0].getAttribute("aria-invalid");
        await type(".expression", "identity");
        seen.label = find("canvas.matrix")[0].getAttribute("aria-label");
        await type(".expression", "grid(4, 6)");
        seen.grid = [find(".slider output")[0].textContent, ...text(".problem")];
        await type(".expression", "identity");
        await type("input[type=range]", 5, 0);
        const canvas = find("canvas.matrix")[0];
        const before = pixels(canvas);
        at(canvas, "wheel", .1, .1, {deltaY: -600});
        await wait();
        seen.zoomed = pixels(canvas) !== before;
        press(canvas, "0");
        await wait();
        seen.back = pixels(canvas) === before;
        at(canvas, "pointermove", .5, .5);
        seen.status = text(".status")[0];
        for (const k of [1, 2]) {
          find(".segmented input")[k].click();
          await wait();
          seen["drawing" + k] = find("svg.drawing")[0].getAttribute("aria-label");
          seen["dots" + k] = find("svg.drawing circle").length;
        }
        find(".chips button").find((one) => one.textContent === "BigBird").click();
        await wait(500);
        seen.drawn = facts();
        await type("input[type=range]", 7, 0);
        seen.random = text(".problem")[0];
        find(".chips button").at(-1).click();
        await wait(1500);
        seen.refused = text(".empty")[0];
        find(".segmented input")[0].click();
        await wait(500);
        seen.large = facts();
        """
    )
    graph = graphs.parse("causal & window(4)").bind(32)
    assert seen["first"]["Edges"] == str(graph.num_edges)
    assert seen["first"]["Diameter"] == f"{graph.diameter()} layers"
    assert seen["text"] == "causal & window(2)"
    assert seen["second"]["Edges"] == str(graphs.parse("causal & window(2)").bind(32).num_edges)
    assert "there is no topology wind" in seen["problem"]
    assert seen["invalid"] == "true"
    assert seen["label"] == "Adjacency matrix: identity, 32 x 32, 32 edges, 3.13 % of all pairs."
    assert seen["grid"] == ["24", ""]
    assert seen["zoomed"]
    assert seen["back"]
    assert seen["status"] == "Node 16 (row) receives from node 16 (column)."
    assert seen["drawing1"].startswith("Arcs: identity")
    assert seen["drawing2"].startswith("Nodes and lines: identity")
    assert seen["dots1"] == seen["dots2"] == 32
    assert seen["drawn"]["Edges"] == f"{graphs.bigbird(4, 3, 2, 1).bind(96).num_edges:,}"
    assert 'mpnn view "bigbird(block=4, window=3, random=2, globals=1)" --n N' in seen["random"]
    assert "this graph has 100,000" in seen["refused"]
    assert (
        seen["large"]["Edges"]
        == f"{graphs.parse('causal & (window(2048) | global_nodes(64))').bind(100_000).num_edges:,}"
    )


def test_reach_grows_layer_by_layer(see: Callable[..., dict[str, Any]]) -> None:
    seen = see(
        """
        await tab("Reach");
        await type("input[type=number]", 20);
        await type("input[type=range]", 3);
        seen.said = text("figure .note");
        seen.compared = text("h2.graph");
        const before = pixels(find("canvas.cone")[0]);
        at(find("canvas.cone")[0], "click", .99, .5);
        await wait();
        seen.moved = pixels(find("canvas.cone")[0]) !== before;
        seen.node = find("input[type=number]")[0].value;
        const play = find(".controls button")[0];
        play.click();
        seen.playing = play.textContent;
        while (find("input[type=range]")[0].value < 2) await wait();
        play.click();
        seen.stopped = play.textContent;
        """
    )
    assert seen["said"][0].startswith(
        "After 3 layers, node 20 has learned from 13 of 32 nodes (40.6 %), itself included."
    )
    assert "It never learns from 11 of them." in seen["said"][0]
    assert "node 20 has learned from 14 of 32 nodes" in seen["said"][1]  # and from the hub
    assert seen["compared"] == ["causal & window(4)", "causal & (window(4) | global_nodes(1))"]
    assert seen["moved"]
    assert seen["node"] == "31"
    assert (seen["playing"], seen["stopped"]) == ("Stop", "Play")


def test_the_plan_has_every_backend_and_charts(see: Callable[..., dict[str, Any]]) -> None:
    seen = see(
        """
        press(find("[role=tab]")[0], "ArrowLeft");  // the last tab
        await wait();
        seen.tab = document.querySelector("[role=tab][aria-selected=true]").textContent;
        seen.rows = find(".plan tbody tr").map((row) => [...row.children].map((cell) => cell.textContent));
        seen.charts = find("svg.chart").map((one) => one.getAttribute("aria-label"));
        """,
        width=400,
    )
    assert seen["tab"] == "Plan"
    plan = plan_data(graphs.parse("causal & window(4)"), 32)
    assert [row[0] for row in seen["rows"]] == [one["name"] for one in plan["candidates"]]
    assert all(
        one["reason"] is None or row[3] == one["reason"]
        for row, one in zip(seen["rows"], plan["candidates"], strict=True)
    )
    assert [label.split(":")[0] for label in seen["charts"]] == [
        "Time of a forward pass by nodes",
        "Memory beyond inputs and output by nodes",
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_every_pane_fits_and_says_what_it_draws(see: Callable[..., dict[str, Any]], width: int, scheme: str) -> None:
    seen = see(
        """
        seen.panes = [];
        seen.silent = [];
        for (const name of ["Graph", "Reach", "Plan", "Attention"]) {
          await tab(name);
          if (document.documentElement.scrollWidth > innerWidth) seen.panes.push(name);
          const drawings = find("canvas, svg").filter((one) => !one.getAttribute("aria-label"));
          seen.silent.push(...drawings.map((one) => one.outerHTML));
        }
        seen.pale = [];
        seen.unreachable = [];
        for (const name of ["Graph", "Reach", "Plan", "Attention"]) {
          await tab(name);
          for (const select of find("select")) { select.selectedIndex = 0; select.dispatchEvent(new Event("change")); }
          await wait();
          seen.pale.push(...pale());
          seen.unreachable.push(...unreachable());
        }
        await check("two copies");
        seen.pale.push(...pale());
        seen.contrasts = [contrast("#595959", "rgb(255,255,255)"), contrast("#ddcc77", "rgb(255,255,255)")];
        seen.paper = getComputedStyle(document.body).backgroundColor;
        """,
        width=width,
        scheme=scheme,
    )
    assert seen["panes"] == seen["silent"] == seen["pale"] == seen["unreachable"] == []
    assert seen["contrasts"] == pytest.approx([7.0, 1.61], abs=0.02)  # those of the two colors on white
    assert seen["paper"] == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 29)")
