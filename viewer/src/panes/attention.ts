// The Attention pane: the text, and for the token under the pointer whom it attends to, over one graph or two.

import type { AttentionData, AttentionGraph } from "../data";
import { h, newId, oncePerFrame } from "../dom";
import { onSchemeChange, paint, palette } from "../draw/colours";
import { count, percent, plural } from "../text";
import { Weights, type Head, type Weighted } from "./weights";

const MOST_MARKED = 400; // tokens that are coloured at a time
const NAMED = 4; // tokens in the sentence below
const LARGE = 300; // pixels of the chosen head, at least
const GAP = 2; // pixels between thumbnails

type Direction = "attendsTo" | "attendedBy";

interface State {
  token: number;
  pinned: boolean;
  chosen: Head;
  direction: Direction;
}

export function attentionPane(data: AttentionData): HTMLElement {
  const state: State = {
    token: Math.min(Math.floor(data.tokens.length / 2), 30), // on screen also in a long text
    pinned: false,
    chosen: { layer: Math.floor(data.layers / 2), head: 0 },
    direction: "attendsTo",
  };
  const update = oncePerFrame(() => {
    layer.value = String(state.chosen.layer + 1);
    head.value = state.chosen.head === "mean" ? "mean" : String(state.chosen.head + 1);
    for (const column of columns) column.show(state);
  });
  const choose = (change: Partial<State>): void => {
    Object.assign(state, change);
    update();
  };
  const columns = data.graphs.map((graph) => new Column(data, graph, state, choose));
  const numbers = (n: number): HTMLOptionElement[] => Array.from({ length: n }, (_, k) => h("option", {}, String(k + 1)));
  const layer = h(
    "select",
    { "aria-label": "layer", change: () => choose({ chosen: { ...state.chosen, layer: Number(layer.value) - 1 } }) },
    ...numbers(data.layers),
  );
  const head = h(
    "select",
    {
      "aria-label": "head",
      change: () => choose({ chosen: { ...state.chosen, head: head.value === "mean" ? "mean" : Number(head.value) - 1 } }),
    },
    ...numbers(data.heads),
    h("option", { value: "mean" }, "mean of all"),
  );
  for (const { text } of columns) {
    text.addEventListener("scroll", () => columns.forEach((other) => (other.text.scrollTop = text.scrollTop)));
  }
  onSchemeChange(update);
  update();
  return h(
    "div",
    {},
    h(
      "p",
      {},
      "Point at a token to see what it attends to: the stronger the colour, the more. Click to hold it. Each small square is one " +
        "head, a row of them one layer: rows are tokens, columns what they attend to.",
    ),
    h(
      "div",
      { class: "controls" },
      h("label", {}, "Layer ", layer),
      h("label", {}, "Head ", head),
      directions((direction) => choose({ direction })),
    ),
    h("div", { class: columns.length > 1 ? "pair" : "" }, ...columns.map((column) => column.element)),
  );
}

function directions(choose: (direction: Direction) => void): HTMLElement {
  const name = newId();
  const radio = (direction: Direction, text: string): HTMLElement =>
    h(
      "label",
      {},
      h("input", { type: "radio", name, checked: direction === "attendsTo", change: () => choose(direction) }),
      h("span", {}, text),
    );
  return h(
    "div",
    { class: "segmented", role: "radiogroup", "aria-label": "direction" },
    radio("attendsTo", "attends to"),
    radio("attendedBy", "is attended by"),
  );
}

/** One graph: its thumbnails, the tokens, and a sentence. */
class Column {
  readonly element: HTMLElement;
  private readonly weights: Weights;
  private readonly spans: HTMLElement[];
  readonly text: HTMLElement;
  private readonly sentence = h("p", { class: "note sentence", "aria-live": "polite" });
  private readonly grid: HTMLCanvasElement;
  private readonly large = h("canvas", { class: "large", role: "img" });
  private marked: HTMLElement[] = [];
  private drawn = "";

  constructor(
    private readonly data: AttentionData,
    graph: AttentionGraph,
    state: State,
    choose: (change: Partial<State>) => void,
  ) {
    this.weights = new Weights(data, graph);
    this.spans = data.tokens.map((token, k) => h("span", { "data-token": k }, token));
    this.text = h(
      "div",
      {
        class: "tokens",
        tabindex: 0,
        role: "group",
        "aria-label": `${plural(data.tokens.length, "token")}; arrow keys choose one`,
      },
      ...this.spans,
    );
    this.grid = h("canvas", { class: "heads", tabindex: 0, role: "img" });
    this.grid.setAttribute(
      "aria-label",
      `${data.layers} x ${data.heads} attention matrices, one for each layer and head; arrow keys choose one`,
    );
    this.listen(state, choose);
    const kept =
      graph.share > 0.9995 ? "" : ` The page keeps the ${graph.top} strongest of each token: ${percent(graph.share)} of the weights.`;
    this.element = h(
      "section",
      { class: "column" },
      h("h2", { class: "graph" }, graph.name),
      h("p", { class: "note" }, `${plural(graph.edges, "edge")}, ${percent(graph.edges / data.tokens.length ** 2)} of all pairs.${kept}`),
      this.text,
      this.sentence,
      h("div", { class: "matrices" }, this.grid, this.large),
    );
    new ResizeObserver(() => this.drawHeads(state)).observe(this.grid);
  }

  show(state: State): void {
    const { token, chosen, direction } = state;
    const found = this.weights[direction](token, chosen);
    for (const span of this.marked) span.removeAttribute("style");
    const shown = found.slice(0, MOST_MARKED);
    const most = shown[0]?.weight ?? 1;
    const series = palette().series[0];
    for (const { token: other, weight } of shown) {
      const strength = Math.round(100 * Math.max(0.08, weight / most));
      const ink = strength > 60 ? "color: var(--on);" : "";
      this.spans[other].style.cssText = `background: color-mix(in srgb, ${series} ${strength}%, transparent); ${ink}`;
    }
    this.spans[token].style.boxShadow = `0 0 0 2px ${palette().series[1]}`;
    this.marked = [...shown.map(({ token: other }) => this.spans[other]), this.spans[token]];
    this.sentence.textContent = this.say(found, state);
    this.drawHeads(state);
  }

  private say(found: Weighted[], { token, chosen, direction, pinned }: State): string {
    const named = found.slice(0, NAMED).map(({ token: other, weight }) => `${this.name(other)} ${percent(weight)}`);
    const where = `Layer ${chosen.layer + 1}, ${chosen.head === "mean" ? "mean of all heads" : `head ${chosen.head + 1}`}`;
    const does = direction === "attendsTo" ? "attends to" : "is attended by";
    const others = found.length > NAMED ? `, and ${count(found.length - NAMED)} more` : "";
    const held = pinned ? " Held: click again to let go." : "";
    return `${where}: ${this.name(token)} ${does} ${named.join(", ") || "nothing"}${others}.${held}`;
  }

  private name(token: number): string {
    return `“${this.data.tokens[token].trim() || "␣"}”`;
  }

  private drawHeads({ token, chosen }: State): void {
    const { grid, large, data } = this;
    const box = grid.getBoundingClientRect();
    if (!box.width) return;
    const sharpness = Math.min(window.devicePixelRatio || 1, 2);
    const step = Math.max(Math.min(data.cells, 56), Math.floor((box.width * sharpness) / data.heads));
    const scheme = palette().empty;
    if (this.drawn !== `${step} ${scheme}`) {
      this.drawn = `${step} ${scheme}`;
      this.thumbnails = this.paintThumbnails(step);
    }
    [grid.width, grid.height] = [step * data.heads, step * data.layers];
    const context = grid.getContext("2d")!;
    context.drawImage(this.thumbnails!, 0, 0);
    context.strokeStyle = palette().series[1];
    context.lineWidth = 3;
    const [x, wide] = chosen.head === "mean" ? [0, data.heads] : [chosen.head, 1];
    context.strokeRect(x * step + 0.5, chosen.layer * step + 0.5, wide * step - GAP, step - GAP);

    this.drawLarge(token, chosen);
    large.setAttribute("aria-label", `attention matrix of layer ${chosen.layer + 1}; the row of the token is marked`);
  }

  /** The matrix of the chosen head, with the row of the token. */
  private drawLarge(token: number, chosen: Head): void {
    const { large, data } = this;
    const cell = Math.ceil(LARGE / data.cells);
    const side = cell * data.cells;
    [large.width, large.height] = [side, side];
    const context = large.getContext("2d")!;
    paint(context, this.weights.thumbnail(chosen), data.cells, data.cells);
    context.imageSmoothingEnabled = false;
    context.drawImage(large, 0, 0, data.cells, data.cells, 0, 0, side, side);
    context.strokeStyle = palette().series[1];
    context.lineWidth = 2;
    const row = Math.floor((token * data.cells) / data.tokens.length);
    context.strokeRect(1, row * cell, side - 2, cell);
  }

  private thumbnails: OffscreenCanvas | null = null;

  /** All thumbnails on one canvas that is kept until the size or the colours change. */
  private paintThumbnails(step: number): OffscreenCanvas {
    const { data } = this;
    const all = new OffscreenCanvas(step * data.heads, step * data.layers);
    const context = all.getContext("2d")!;
    context.imageSmoothingEnabled = data.cells > step;
    const one = h("canvas", { width: data.cells, height: data.cells });
    const small = one.getContext("2d")!;
    for (let layer = 0; layer < data.layers; layer++) {
      for (let head = 0; head < data.heads; head++) {
        paint(small, this.weights.thumbnail({ layer, head }), data.cells, data.cells);
        context.drawImage(one, head * step, layer * step, step - GAP, step - GAP);
      }
    }
    return all;
  }

  private listen(state: State, choose: (change: Partial<State>) => void): void {
    const { text, grid, data } = this;
    const tokenAt = (event: Event): number | null => {
      const at = (event.target as HTMLElement).dataset.token;
      return at === undefined ? null : Number(at);
    };
    text.addEventListener("pointerover", (event) => {
      const token = tokenAt(event);
      if (token !== null && !state.pinned && event.pointerType !== "touch") choose({ token });
    });
    text.addEventListener("click", (event) => {
      const token = tokenAt(event);
      if (token !== null) choose({ token, pinned: !(state.pinned && token === state.token) });
    });
    text.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
      if (!step) return;
      event.preventDefault();
      choose({ token: clamp(state.token + step, data.tokens.length), pinned: true });
      this.spans[state.token].scrollIntoView({ block: "nearest" });
    });
    grid.addEventListener("click", (event) => {
      const box = grid.getBoundingClientRect();
      const layer = clamp(Math.floor(((event.clientY - box.top) / box.height) * data.layers), data.layers);
      const head = clamp(Math.floor(((event.clientX - box.left) / box.width) * data.heads), data.heads);
      choose({ chosen: { layer, head } });
    });
    grid.addEventListener("keydown", (event) => {
      const steps: Record<string, [number, number]> = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
      const [down, right] = steps[event.key] ?? [0, 0];
      if (!down && !right) return;
      event.preventDefault();
      const head = state.chosen.head === "mean" ? 0 : state.chosen.head;
      choose({ chosen: { layer: clamp(state.chosen.layer + down, data.layers), head: clamp(head + right, data.heads) } });
    });
  }
}

function clamp(k: number, count: number): number {
  return Math.min(Math.max(k, 0), count - 1);
}
