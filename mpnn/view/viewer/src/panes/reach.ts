// The Reach pane: what a node learns from, layer by layer, over this graph and over another one.

import { h, oncePerFrame } from "../dom";
import { onSchemeChange, paint, palette } from "../draw/colors";
import { parse } from "../graph/expression";
import { levels, NEVER, reachedWithin } from "../graph/reach";
import { edgeFromLater, type Runs } from "../graph/runs";
import { count, percent, plural } from "../text";
import type { GraphModel } from "./model";

const MOST_LAYERS = 16;
const FAINT = 0.01; // of the color of a reached node, for layers that are still to come

export function reachPane(model: GraphModel): HTMLElement {
  let node = Math.floor((model.runs?.numDst ?? 0) / 2);
  let timer = 0;

  const nodeInput = h("input", { type: "number", min: 0, "aria-label": "node", input: () => choose(Number(nodeInput.value)) });
  const layerSlider = h("input", {
    type: "range",
    min: 0,
    max: MOST_LAYERS,
    value: 2,
    step: 1,
    "aria-label": "layers",
    input: () => {
      stop();
      update();
    },
  });
  const layerText = h("output", {});
  const play = h("button", { type: "button", click: () => (timer ? stop() : start()) }, "Play");
  const other = h("input", {
    class: "expression",
    "aria-label": "graph to compare with",
    spellcheck: "false",
    autocapitalize: "off",
    autocomplete: "off",
    value: withHub(model),
    input: () => update(),
  });
  const problem = h("p", { class: "problem", role: "alert" });
  const cones = [new Cone((i) => choose(i)), new Cone((i) => choose(i))];

  const choose = (i: number): void => {
    if (!model.runs || !Number.isFinite(i)) return;
    node = Math.min(Math.max(Math.round(i), 0), model.runs.numDst - 1);
    update();
  };
  const start = (): void => {
    layerSlider.value = "0";
    play.textContent = "Stop";
    update();
    timer = window.setInterval(() => {
      layerSlider.value = String(Number(layerSlider.value) + 1);
      if (Number(layerSlider.value) >= Number(layerSlider.max)) stop();
      update();
    }, 700);
  };
  const stop = (): void => {
    window.clearInterval(timer);
    timer = 0;
    play.textContent = "Play";
  };

  const update = oncePerFrame(() => {
    const { runs } = model;
    problem.textContent = "";
    if (!runs || runs.numDst !== runs.numSrc || !runs.numDst) {
      problem.textContent = "Layers follow each other over graphs whose sources are their destinations.";
      return;
    }
    node = Math.min(node, runs.numDst - 1);
    nodeInput.max = String(runs.numDst - 1);
    if (document.activeElement !== nodeInput) nodeInput.value = String(node);
    const compared = bound(other.value, runs.numDst, problem);
    const layers = Number(layerSlider.value);
    layerText.textContent = plural(layers, "layer");
    cones[0].show(model.expression, runs, node, layers);
    if (compared) cones[1].show(other.value, compared, node, layers);
  });
  model.onChange(() => {
    other.value = withHub(model);
    update();
  });
  onSchemeChange(update);
  update();

  return h(
    "div",
    {},
    h("p", {}, "Each layer passes messages along one edge. Choose a node: the picture shows the nodes that it has learned from after each layer."),
    h(
      "div",
      { class: "controls" },
      h("label", {}, "Node ", nodeInput),
      h("label", { class: "grow" }, "After ", layerText, " ", layerSlider),
      play,
    ),
    h("div", { class: "pair" }, cones[0].element, cones[1].element),
    h("label", { class: "wide" }, h("span", { class: "caption" }, "Compare with"), other),
    problem,
  );
}

/** The graph with a hub, which connects all nodes in two layers; a window where it has one, or where only Python reads it.
 * Over a causal graph, the hub does not attend to later nodes. */
function withHub({ expression, isGiven, runs }: GraphModel): string {
  const isCausal = runs !== null && edgeFromLater(runs) === null;
  if (isGiven || /global|bigbird|complete/.test(expression)) return isCausal ? "causal & window(4)" : "window(4)";
  if (!isCausal) return `${expression} | global_nodes(1)`;
  const rest = /^causal(?:\(\))?\s*&\s*([^|~-]+)$/.exec(expression.trim());
  return rest ? `causal & (${rest[1]} | global_nodes(1))` : `causal & (${expression} | global_nodes(1))`;
}

function bound(expression: string, n: number, problem: HTMLElement): Runs | null {
  try {
    return parse(expression).bind(n);
  } catch (error) {
    problem.textContent = (error as Error).message;
    return null;
  }
}

/** Layers from top to bottom, nodes from left to right; a node is colored once the chosen one has learned from it, and
 * faint in layers after the chosen number. */
class Cone {
  readonly element: HTMLElement;
  private readonly title = h("h2", { class: "graph" });
  private readonly canvas: HTMLCanvasElement;
  private readonly text = h("p", { class: "note", "aria-live": "polite" });
  private nodes = 1;
  private node = 0;
  private cached: { runs: Runs; node: number; level: Int32Array } | null = null;

  constructor(choose: (node: number) => void) {
    this.canvas = h("canvas", {
      class: "cone",
      role: "img",
      tabindex: 0,
      keydown: (event: KeyboardEvent) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        choose(this.node + step);
      },
      click: (event: MouseEvent) => {
        const box = this.canvas.getBoundingClientRect();
        choose(Math.floor(((event.clientX - box.left) / box.width) * this.nodes));
      },
    });
    this.element = h("figure", {}, this.title, this.canvas, this.text);
  }

  show(expression: string, runs: Runs, node: number, layers: number): void {
    if (this.cached?.runs !== runs || this.cached.node !== node) this.cached = { runs, node, level: levels(runs, node) };
    const { level } = this.cached;
    const reached = reachedWithin(level);
    const within = (k: number): number => reached[Math.min(k, reached.length - 1)];
    [this.nodes, this.node] = [runs.numSrc, node];
    this.title.textContent = expression;
    this.draw(level, node, layers);
    const share = within(layers) / runs.numSrc;
    const all =
      within(Infinity) === runs.numSrc
        ? `It has learned from all after ${plural(reached.length - 1, "layer")}.`
        : `It never learns from ${count(runs.numSrc - within(Infinity))} of them.`;
    this.text.textContent =
      `After ${plural(layers, "layer")}, node ${node} has learned from ${count(within(layers))} of ` +
      `${plural(runs.numSrc, "node")} (${percent(share)}), itself included. ${all}`;
    this.canvas.setAttribute("aria-label", this.text.textContent);
  }

  private draw(level: Int32Array, node: number, layers: number): void {
    const box = this.canvas.getBoundingClientRect();
    const sharpness = Math.min(window.devicePixelRatio || 1, 2);
    const [width, height] = [Math.round(box.width * sharpness), Math.round(box.height * sharpness)];
    if (!width) return;
    [this.canvas.width, this.canvas.height] = [width, height];
    const context = this.canvas.getContext("2d")!;
    const shares = new Float32Array(width * height);
    const rows = MOST_LAYERS + 1;
    for (let row = 0; row < rows; row++) {
      const line = reachedShares(level, row, width);
      if (row > layers) for (let x = 0; x < width; x++) line[x] *= FAINT;
      for (let y = Math.round((row * height) / rows); y < Math.round(((row + 1) * height) / rows) - 1; y++) {
        shares.set(line, y * width);
      }
    }
    paint(context, shares, width, height);
    context.fillStyle = palette().series[1];
    const mark = Math.max(3 * sharpness, width / level.length);
    context.fillRect(((node + 0.5) / level.length) * width - mark / 2, 0, mark, height / rows - 1);
  }
}

/** The share of the nodes of each pixel that are reached within `layers`. */
function reachedShares(level: Int32Array, layers: number, width: number): Float32Array {
  const line = new Float32Array(width);
  const n = level.length;
  for (let x = 0; x < width; x++) {
    const first = Math.floor((x * n) / width);
    const last = Math.max(Math.floor(((x + 1) * n) / width), first + 1);
    let reached = 0;
    for (let j = first; j < last; j++) if (level[j] !== NEVER && level[j] <= layers) reached++;
    line[x] = reached / (last - first);
  }
  return line;
}
