// The Graph pane: an expression, sliders for its numbers, the edges drawn, and counted.

import { h, newId, oncePerFrame } from "../dom";
import { arcs } from "../draw/arcs";
import { MatrixView } from "../draw/matrix";
import { nodeLink } from "../draw/nodelink";
import { addressed, keep } from "../address";
import type { Example } from "../data";
import { asPython, replaced, type Literal } from "../graph/expression";
import { diameters, type Diameter } from "../graph/reach";
import { degreeRange, edgeFromLater, numEdges, type Runs } from "../graph/runs";
import { copyButton, saveButtons } from "../save";
import { count, percent, plural, scaled } from "../text";
import { MOST_NODES, type GraphModel } from "./model";

const MOST_ARCS = 64; // nodes
const MOST_LINKS = 4000; // edges of the node-link view
const MOST_LINKED = 256; // nodes
const DIAMETER_MS = 300;
const SLICE_MS = 8; // after which events come first
const REST_MS = 200; // without a change, after which the diameter is searched for
const WIDTH = 64; // features; each edge takes one product for the score and one for the sum

type View = "matrix" | "arcs" | "nodes";
const VIEWS: [View, string][] = [
  ["matrix", "Matrix"],
  ["arcs", "Arcs"],
  ["nodes", "Nodes and lines"],
];

export function graphPane(model: GraphModel, examples: Example[]): HTMLElement {
  const problem = h("p", { class: "problem", id: newId(), role: "alert" });
  const input = h("input", {
    class: "expression",
    "aria-label": "graph expression",
    "aria-describedby": problem.id,
    spellcheck: "false",
    autocapitalize: "off",
    autocomplete: "off",
    input: () => model.set(input.value, model.n),
  });
  const sliders = h("div", { class: "sliders" });
  const chips = examples.map(({ name, expression, n }) =>
    h("button", { type: "button", title: expression, click: () => model.set(expression, n) }, name),
  );
  const matrix = new MatrixView();
  const stage = h("div", { class: "stage" }, matrix.element);
  const facts = h("dl", { class: "facts", "aria-live": "polite" });
  let view: View = VIEWS.map(([one]) => one).find((one) => one === addressed("drawing")) ?? "matrix";
  let waiting = 0;
  const choices = viewChoices(view, (chosen) => {
    view = chosen;
    keep({ drawing: chosen });
    update();
  });

  const update = oncePerFrame(() => {
    if (input.value !== model.expression) input.value = model.expression;
    problem.textContent = model.problem;
    input.setAttribute("aria-invalid", String(Boolean(model.problem)));
    if (!model.problem) showSliders(sliders, model);
    if (!model.runs || model.problem) return;
    const { runs } = model;
    const edges = numEdges(runs);
    const said = describe(model.expression, runs, edges);
    const why = refusal(view, runs, edges);
    if (view === "matrix") {
      stage.replaceChildren(matrix.element);
      matrix.show(runs, `Adjacency matrix: ${said}`);
    } else if (why) {
      stage.replaceChildren(h("p", { class: "note empty" }, why));
    } else {
      const drawing = view === "arcs" ? arcs(runs, `Arcs: ${said}`) : nodeLink(runs, `Nodes and lines: ${said}`);
      stage.replaceChildren(drawing);
    }
    showFacts(facts, model.expression, runs, edges);
    window.clearTimeout(waiting);
    waiting = window.setTimeout(() => showDiameter(facts, runs, () => runs !== model.runs), REST_MS);
  });
  model.onChange(update);
  update();

  return h(
    "div",
    {},
    h("label", { class: "wide" }, h("span", { class: "caption" }, "Graph"), input),
    problem,
    h("div", { class: "chips", role: "group", "aria-label": "examples" }, ...chips),
    sliders,
    h(
      "div",
      { class: "columns" },
      h("div", {}, choices, stage, h("p", { class: "note" }, "Rows are destinations, columns sources: node i receives from node j.")),
      h(
        "div",
        {},
        facts,
        legend(),
        h(
          "div",
          { class: "controls" },
          copyButton("Copy as Python", () => python(model)),
          saveButtons(
            "graph",
            () => (view === "matrix" ? matrix.drawing : stage.querySelector<SVGElement>("svg")),
            () => (view === "matrix" ? matrix.vector() : null),
          ),
        ),
      ),
    ),
  );
}

/** Of a graph that Python bound, the text, which `graphs.parse` reads where the user's builders are registered. */
function python(model: GraphModel): string {
  const { expression, n, numSrc } = model;
  if (!model.isGiven) return asPython(expression, n, numSrc);
  return `from mpnn import graphs\n\ngraph = graphs.parse(${JSON.stringify(expression)}).bind(${n})  # import the builder before, if it is yours\n`;
}

function viewChoices(first: View, choose: (view: View) => void): HTMLElement {
  const name = newId();
  const radios = VIEWS.map(([view, label]) =>
    h(
      "label",
      {},
      h("input", { type: "radio", name, value: view, checked: view === first, change: () => choose(view) }),
      h("span", {}, label),
    ),
  );
  return h("div", { class: "segmented", role: "radiogroup", "aria-label": "drawing" }, ...radios);
}

/** Why a graph is not drawn in this way, or "". */
function refusal(view: View, runs: Runs, edges: number): string {
  const most = view === "arcs" ? MOST_ARCS : MOST_LINKED;
  if (runs.numDst > most) return `This drawing shows at most ${most} nodes; this graph has ${count(runs.numDst)}.`;
  if (runs.numDst !== runs.numSrc) return "This drawing needs a graph whose sources are its destinations.";
  if (edges > MOST_LINKS) return `This drawing shows at most ${count(MOST_LINKS)} edges; this graph has ${count(edges)}.`;
  return "";
}

function legend(): HTMLElement {
  return h(
    "p",
    { class: "note" },
    "Join graphs by ",
    h("code", {}, "|"),
    " (edges of either), ",
    h("code", {}, "&"),
    " (edges of both), ",
    h("code", {}, "-"),
    " (edges of the first only); ",
    h("code", {}, "~"),
    " takes the other edges.",
  );
}

function describe(expression: string, runs: Runs, edges: number): string {
  const [rows, columns] = [count(runs.numDst), count(runs.numSrc)];
  const share = edges / Math.max(runs.numDst * runs.numSrc, 1);
  return `${expression}, ${rows} x ${columns}, ${plural(edges, "edge")}, ${percent(share)} of all pairs.`;
}

function showFacts(facts: HTMLElement, expression: string, runs: Runs, edges: number): void {
  const [least, most] = degreeRange(runs);
  const square = runs.numDst === runs.numSrc;
  const rows: [string, string][] = [
    ["Nodes", square ? count(runs.numDst) : `${count(runs.numDst)} destinations, ${count(runs.numSrc)} sources`],
    ["Edges", count(edges)],
    ["Density", `${percent(edges / Math.max(runs.numDst * runs.numSrc, 1))} of all pairs`],
    ["In-degree", `${count(least)} to ${count(most)}`],
    ["Runs", `${count(runs.start.length)}, in which the graph is stored`],
  ];
  if (square && runs.numDst) rows.push(["Direction", direction(expression, runs)], ["Diameter", "…"]);
  rows.push(["Cost", `${scaled(2 * edges * WIDTH, ["", "thousand", "million", "G", "T"])} multiply-adds for a layer of ${WIDTH} features`]);
  facts.replaceChildren(...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/** Whether nodes receive from later ones. An expression that says causal may mean that they must not. */
function direction(expression: string, runs: Runs): string {
  const late = edgeFromLater(runs);
  if (!late) return "causal: no node receives from a later one";
  const said = `not causal: node ${count(late[0])} receives from node ${count(late[1])}`;
  return /\bcausal\b/.test(expression) ? `${said}. For a model that predicts the next node, write causal & (...)` : said;
}

/** Searches between events, for DIAMETER_MS in all, until `isStale`. */
function showDiameter(facts: HTMLElement, runs: Runs, isStale: () => boolean): void {
  const name = [...facts.querySelectorAll("dt")].find((term) => term.textContent === "Diameter");
  if (!name) return;
  const search = diameters(runs);
  let took = 0;
  const step = (): void => {
    if (isStale()) return;
    const began = performance.now();
    let found = search.next().value;
    while (found && !found.exact && performance.now() - began < SLICE_MS) found = search.next().value;
    took += performance.now() - began;
    if (found && (found.exact || took > DIAMETER_MS)) name.nextElementSibling!.textContent = diameterText(found);
    else window.setTimeout(step);
  };
  step();
}

function diameterText({ layers, exact, searched }: Diameter): string {
  if (layers === null) return "none: some nodes never learn from some others";
  return exact ? `${plural(layers, "layer")}` : `at least ${plural(layers, "layer")} (from ${plural(searched, "node")})`;
}

/** One slider for the nodes and one for each number of the expression. They stay while only values change. */
function showSliders(box: HTMLElement, model: GraphModel): void {
  const names = ["nodes", ...model.numbers.map((literal) => literal.name)];
  const shown = [...box.children] as HTMLElement[];
  if (shown.length !== names.length || shown.some((label, k) => label.dataset.name !== names[k])) {
    box.replaceChildren(
      slider("nodes", 3, Math.log2(MOST_NODES), true, (n) => model.set(model.expression, n)),
      ...model.numbers.map((literal, k) =>
        slider(literal.name, 0, mostOf(literal), false, (value) => {
          model.set(replaced(model.expression, model.numbers[k], value), model.n);
        }),
      ),
    );
  }
  [model.n, ...model.numbers.map((literal) => literal.value)].forEach((value, k) => {
    const label = box.children[k] as HTMLElement;
    const range = label.querySelector("input")!;
    label.querySelector("output")!.textContent = count(value);
    const position = k === 0 ? Math.log2(value) : value;
    if (position > Number(range.max)) range.max = String(position);
    if (document.activeElement !== range) range.value = String(position);
    range.setAttribute("aria-valuetext", count(value));
  });
}

function mostOf(literal: Literal): number {
  return Math.max(16, 4 * literal.value);
}

function slider(name: string, least: number, most: number, powers: boolean, act: (value: number) => void): HTMLElement {
  const read = (): number => (powers ? Math.round(2 ** Number(input.value)) : Number(input.value));
  const input = h("input", {
    type: "range",
    min: least,
    max: most,
    step: powers ? "any" : 1,
    input: () => act(read()),
  });
  return h("label", { class: "slider", "data-name": name }, h("span", {}, name, " ", h("output", {})), input);
}
