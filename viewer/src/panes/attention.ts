// The Attention pane: tokens, patches or nodes, and for the one under the pointer what it attends to, over one graph or
// several.

import type { AttentionData, AttentionGraph } from "../data";
import { h, newId, oncePerFrame } from "../dom";
import { onSchemeChange } from "../draw/colors";
import { count, percent, plural } from "../text";
import { HeadsView } from "./heads";
import { describe, type Description } from "./subject";
import type { Choose, State, SubjectView } from "./state";
import { Weights, type Direction, type Weighted } from "./weights";

const NAMED = 4; // nodes in the sentence below

export function attentionPane(data: AttentionData): HTMLElement {
  const subject = describe(data);
  const state: State = {
    node: data.start,
    held: null,
    chosen: { layer: Math.floor(data.heads.length / 2), head: 0 },
    direction: "attendsTo",
  };
  const choose: Choose = (change) => {
    Object.assign(state, change);
    const { layer, head } = state.chosen;
    if (head !== "mean" && head >= data.heads[layer]) state.chosen = { layer, head: data.heads[layer] - 1 };
    update();
  };
  const columns = data.graphs.map((graph) => new Column(data, graph, subject, state, choose));
  const controls = headControls(data, state, choose);
  const own = subject.controls(state, choose);
  const update = oncePerFrame(() => {
    controls.update();
    own?.update();
    for (const column of columns) column.show();
  });
  for (const { view } of columns) {
    view.element.addEventListener("scroll", () => columns.forEach((other) => (other.view.element.scrollTop = view.element.scrollTop)));
  }
  onSchemeChange(update);
  update();
  return h(
    "div",
    {},
    h("p", {}, `${subject.instruction} ${subject.legend}`),
    h("div", { class: "controls" }, ...controls.elements, directions(choose), ...(own?.elements ?? [])),
    h("div", { class: columns.length > 1 ? "side-by-side" : `alone ${data.subject.kind}` }, ...columns.map((column) => column.element)),
  );
}

/** Controls that show the state again after it changed. */
export interface Controls {
  elements: HTMLElement[];
  update: () => void;
}

function headControls(data: AttentionData, state: State, choose: Choose): Controls {
  const numbers = (n: number): HTMLOptionElement[] => Array.from({ length: n }, (_, k) => h("option", {}, String(k + 1)));
  const layer = h(
    "select",
    { "aria-label": "layer", change: () => choose({ chosen: { ...state.chosen, layer: Number(layer.value) - 1 } }) },
    ...numbers(data.heads.length),
  );
  const head = h("select", {
    "aria-label": "head",
    change: () => choose({ chosen: { ...state.chosen, head: head.value === "mean" ? "mean" : Number(head.value) - 1 } }),
  });
  const update = (): void => {
    const heads = data.heads[state.chosen.layer];
    if (head.options.length !== heads + 1) head.replaceChildren(...numbers(heads), h("option", { value: "mean" }, "mean of all"));
    layer.value = String(state.chosen.layer + 1);
    head.value = state.chosen.head === "mean" ? "mean" : String(state.chosen.head + 1);
  };
  update();
  return { elements: [h("label", {}, "Layer ", layer), h("label", {}, "Head ", head)], update };
}

function directions(choose: Choose): HTMLElement {
  const name = newId();
  const radio = (direction: Direction, text: string): HTMLElement =>
    h(
      "label",
      {},
      h("input", { type: "radio", name, checked: direction === "attendsTo", change: () => choose({ direction }) }),
      h("span", {}, text),
    );
  return h(
    "div",
    { class: "segmented", role: "radiogroup", "aria-label": "direction" },
    radio("attendsTo", "attends to"),
    radio("attendedBy", "is attended by"),
  );
}

/** One graph: the drawing of the subject, a sentence, and the matrices of its heads. */
class Column {
  readonly element: HTMLElement;
  readonly view: SubjectView;
  private readonly weights: Weights;
  private readonly heads: HeadsView;
  private readonly sentence = h("p", { class: "note sentence", "aria-live": "polite" });

  constructor(
    data: AttentionData,
    graph: AttentionGraph,
    private readonly subject: Description,
    private readonly state: State,
    choose: Choose,
  ) {
    const { size, noun } = subject;
    this.weights = new Weights(data, graph, size);
    this.view = subject.view(this.weights, state, choose);
    this.heads = new HeadsView(data, this.weights, subject, state, choose);
    const kept = graph.share > 0.9995 ? "" : ` The page keeps the ${graph.top} strongest of each ${noun}: ${percent(graph.share)} of the weights.`;
    const edges = `${plural(graph.edges, "edge")}, ${percent(graph.edges / size ** 2)} of all pairs.${kept}`;
    this.element = h(
      "section",
      { class: "column" },
      h("div", {}, h("h2", { class: "graph" }, graph.name), h("p", { class: "note" }, edges), this.view.element),
      h("div", {}, this.sentence, this.heads.element),
    );
  }

  show(): void {
    const { state } = this;
    const found = this.weights[state.direction](state.node, state.chosen);
    this.view.show(state, found);
    this.sentence.textContent = this.say(found);
    this.heads.show(state);
  }

  private say(found: Weighted[]): string {
    const { subject, state } = this;
    const { node, chosen, direction, held } = state;
    const named = found.slice(0, NAMED).map(({ node: other, weight }) => `${subject.name(other)} ${percent(weight)}`);
    const where = `Layer ${chosen.layer + 1}, ${chosen.head === "mean" ? "mean of all heads" : `head ${chosen.head + 1}`}`;
    const does = direction === "attendsTo" ? "attends to" : "is attended by";
    const others = found.length > NAMED ? `, and ${count(found.length - NAMED)} more` : "";
    const hold = held === null || !subject.holds ? "" : " Held: click again to let go.";
    return `${where}: ${subject.name(node)} ${does} ${named.join(", ") || "nothing"}${others}.${hold}`;
  }
}
