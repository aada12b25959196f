// The Attention pane: tokens, patches or nodes, and for the one under the pointer what it attends to, over one graph or
// several.

import { addressed, addressedNumber, keep } from "../address";
import type { AttentionData, AttentionGraph } from "../data";
import { h, newId, oncePerFrame } from "../dom";
import { onSchemeChange } from "../draw/colors";
import { count, percent, plural } from "../text";
import { HeadsView } from "./heads";
import { describe, type Description } from "./subject";
import type { Choose, State, SubjectView } from "./state";
import { Weights, type Direction, type Head, type Weighted } from "./weights";

const NAMED = 4; // nodes in the sentence below

export function attentionPane(data: AttentionData): HTMLElement {
  const subject = describe(data);
  const state: State = {
    node: addressedNumber("node", subject.size, data.start),
    held: addressed("node") === null ? null : addressedNumber("node", subject.size, data.start),
    chosen: chosenFirst(data),
    direction: addressed("direction") === "attendedBy" ? "attendedBy" : "attendsTo",
    without: addressed("without") !== null && subject.special.length > 0,
    lines: addressed("lines") !== null && subject.hasLines,
  };
  const choose: Choose = (change) => {
    Object.assign(state, change);
    const { layer, head } = state.chosen;
    if (head !== "mean" && head >= data.heads[layer]) state.chosen = { layer, head: data.heads[layer] - 1 };
    keep({
      node: state.held,
      layer: state.chosen.layer + 1,
      head: state.chosen.head === "mean" ? null : state.chosen.head + 1,
      direction: state.direction === "attendsTo" ? null : state.direction,
      without: state.without ? 1 : null,
      lines: state.lines ? 1 : null,
    });
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
    h("div", { class: "controls" }, ...controls.elements, directions(state, choose), ...switches(subject, state, choose), ...(own?.elements ?? [])),
    h("div", { class: columns.length > 1 ? "side-by-side" : `alone ${data.subject.kind}` }, ...columns.map((column) => column.element)),
  );
}

/** The mean over the heads of the middle layer, or what the address names. */
function chosenFirst({ heads }: AttentionData): Head {
  const layer = addressedNumber("layer", heads.length + 1, Math.floor(heads.length / 2) + 1) - 1;
  const head = addressedNumber("head", heads[Math.max(layer, 0)] + 1, 0);
  return { layer: Math.max(layer, 0), head: head ? head - 1 : "mean" };
}

function switches(subject: Description, state: State, choose: Choose): HTMLElement[] {
  const box = (text: string, checked: boolean, act: (checked: boolean) => void): HTMLElement => {
    const input = h("input", { type: "checkbox", checked, change: () => act(input.checked) });
    return h("label", {}, input, " ", text);
  };
  const names = [...new Set(subject.special.map((node) => subject.plainName(node)))];
  const shown = names.length > 2 ? `${names.slice(0, 2).join(", ")} and others` : names.join(" and ");
  return [
    ...(subject.special.length ? [box(`without ${shown}`, state.without, (without) => choose({ without }))] : []),
    ...(subject.hasLines ? [box("lines between two copies", state.lines, (lines) => choose({ lines }))] : []),
  ];
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

function directions(state: State, choose: Choose): HTMLElement {
  const name = newId();
  const radio = (direction: Direction, text: string): HTMLElement =>
    h(
      "label",
      {},
      h("input", { type: "radio", name, checked: direction === state.direction, change: () => choose({ direction }) }),
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
    const all = this.weights[state.direction](state.node, state.chosen);
    const { found, share } = state.without ? this.without(all) : { found: all, share: 0 };
    this.view.show(state, found);
    this.sentence.textContent = this.say(found) + (share ? ` Left out: ${percent(share)} of its attention.` : "");
    this.heads.show(state);
  }

  /** The weights of other nodes than special ones, of a node that attends as shares of what is left; and what is not. */
  private without(all: Weighted[]): { found: Weighted[]; share: number } {
    const hidden = new Set(this.subject.special);
    const rest = all.filter(({ node }) => !hidden.has(node));
    if (this.state.direction === "attendedBy") return { found: rest, share: 0 };
    const sum = (some: Weighted[]): number => some.reduce((total, { weight }) => total + weight, 0);
    const left = sum(rest);
    return { found: rest.map(({ node, weight }) => ({ node, weight: weight / left })), share: 1 - left / Math.max(sum(all), 1e-9) };
  }

  private say(found: Weighted[]): string {
    const { subject, state } = this;
    const { node, chosen, direction, held } = state;
    const named = found.slice(0, NAMED).map(({ node: other, weight }) => `${subject.name(other)} ${percent(weight)}`);
    const where = `Layer ${chosen.layer + 1}, ${chosen.head === "mean" ? "mean of all heads" : `head ${chosen.head + 1}`}`;
    const does = direction === "attendsTo" ? "attends to" : "is attended by";
    const others = found.length > NAMED ? `, and ${count(found.length - NAMED)} more` : "";
    const hold = held === null || !subject.holds ? "" : " Held: click or press Enter to let go.";
    return `${where}: ${subject.name(node)} ${does} ${named.join(", ") || "nothing"}${others}.${hold}`;
  }
}
