// Nodes of a graph: the neighborhood of one as dots and lines, which are the wider the larger the attention.

import type { NodesData } from "../data";
import { h, svg } from "../dom";
import { palette } from "../draw/colors";
import { saveButtons } from "../save";
import type { Controls } from "./attention";
import { SQUARE, ego, type Place } from "./ego";
import type { Choose, State, SubjectView } from "./state";
import type { Weighted, Weights } from "./weights";

const RADIUS = [15, 11, 8]; // of the dots of each hop
const LARGER = 1.4; // times, with pictures in them
const WIDEST = 6; // of a line
const FRAME = 3; // of a node whose predicted class is another than its own
const BEND = 0.12; // of a line, so that its two directions lie apart

export class NodesView implements SubjectView {
  readonly element: HTMLElement;
  private readonly lines = svg("g", { class: "lines" });
  private readonly dots = svg("g", { class: "dots" });
  private readonly drawing = svg("svg", { class: "drawing ego", viewBox: `-20 -20 ${SQUARE + 40} ${SQUARE + 40}`, role: "group" });
  private places = new Map<number, Place>();
  private center = -1;
  private scheme = "";
  private readonly radius: number[];

  constructor(
    private readonly data: NodesData,
    private readonly weights: Weights,
    private readonly layers: number,
    private readonly start: number,
    choose: Choose,
  ) {
    this.radius = RADIUS.map((r) => r * (data.sprite ? LARGER : 1));
    this.drawing.append(this.lines, this.dots);
    this.element = h("div", {}, this.drawing, saveButtons("attention", () => this.drawing));
    const nodeAt = (event: Event): number | null => {
      const dot = (event.target as Element).closest<SVGElement>("[data-node]");
      return dot ? Number(dot.dataset.node) : null;
    };
    this.drawing.addEventListener("pointerover", (event) => {
      const node = nodeAt(event);
      if (node !== null && (event as PointerEvent).pointerType !== "touch") choose({ node });
    });
    const center = (event: Event): void => {
      const node = nodeAt(event);
      if (node !== null) choose({ node, held: node });
    };
    this.drawing.addEventListener("click", center);
    this.drawing.addEventListener("focusin", (event) => choose({ node: nodeAt(event) ?? this.center }));
    this.drawing.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault(); // Space would scroll the page
      center(event);
    });
  }

  show(state: State, found: Weighted[]): void {
    const center = state.held ?? this.start;
    const scheme = palette().empty;
    if (center !== this.center || scheme !== this.scheme) {
      [this.center, this.scheme] = [center, scheme];
      this.places = ego(this.weights, this.layers, center);
      const hadFocus = this.dots.contains(document.activeElement);
      this.dots.replaceChildren(...[...this.places].map(([node, place]) => this.dot(node, place)));
      if (hadFocus) (this.dots.firstElementChild as SVGElement).focus(); // the one in the middle
    }
    const near = new Set([state.node, ...found.map(({ node }) => node)]);
    for (const dot of this.dots.children as Iterable<any>) {
      const node = Number(dot.dataset.node);
      dot.classList.toggle("chosen", node === state.node);
      dot.classList.toggle("far", !near.has(node));
    }
    this.lines.replaceChildren(...this.linesOf(state, found[0]?.weight ?? 1));
    const rings = [1, 2].map((hop) => [...this.places.values()].filter((place) => place.hop === hop).length);
    this.drawing.setAttribute(
      "aria-label",
      `${nameOfNode(this.data, center)} in the middle, ${rings[0]} nodes that it attends to around it, and ${rings[1]} that these attend to; ` +
        "lines are the wider the larger the attention",
    );
  }

  /** Lines between the nodes that are drawn, those of the chosen node last, in another color, and the widest for the
   * largest of its weights. */
  private linesOf({ node, chosen, direction }: State, most: number): SVGElement[] {
    const [own, others]: SVGElement[][] = [[], []];
    for (const [dst, to] of this.places) {
      for (const { node: src, weight } of this.weights.attendsTo(dst, chosen)) {
        const from = this.places.get(src);
        const isOwn = direction === "attendsTo" ? dst === node : src === node;
        if (!from || (src === dst && !isOwn)) continue;
        const width = Math.max(0.6, WIDEST * (isOwn ? weight / most : weight));
        const d = src === dst ? loop(to, this.radius[to.hop]) : curve(from, to);
        (isOwn ? own : others).push(svg("path", { class: isOwn ? "own" : null, d, "stroke-width": width.toFixed(1) }));
      }
    }
    return [...others, ...own];
  }

  private dot(node: number, { x, y, hop }: Place): SVGElement {
    const radius = this.radius[hop];
    const color = colorOf(this.data.classes[node]);
    const label = svg("text", { x, y: y + radius + 10 }, labelOf(this.data, node));
    const name = svg("title", {}, nameOfNode(this.data, node));
    const circle = svg("circle", { cx: x, cy: y, r: radius, fill: color });
    const { predicted, classes } = this.data;
    const isOther = predicted[node] !== classes[node];
    const frame = svg("circle", { class: "wrong", cx: x, cy: y, r: radius + FRAME, style: `stroke: ${colorOf(predicted[node])}` });
    return svg("g", { "data-node": node, tabindex: 0, role: "button", "aria-label": name.textContent }, name, circle, ...(isOther ? [frame] : []), ...this.picture(node, x, y, radius), label);
  }

  /** The image of a node, in the circle. */
  private picture(node: number, x: number, y: number, radius: number): SVGElement[] {
    const { sprite } = this.data;
    if (!sprite) return [];
    const side = 1.3 * radius;
    const [row, column] = [Math.floor(node / sprite.columns), node % sprite.columns];
    const whole = svg("image", {
      href: sprite.image,
      x: -column * side,
      y: -row * side,
      width: sprite.columns * side,
      height: sprite.rows * side,
      preserveAspectRatio: "none",
    });
    return [svg("svg", { x: x - side / 2, y: y - side / 2, width: side, height: side }, whole)];
  }
}

/** A field for the number of the node in the middle, and a button for each class that goes to the next of its nodes. */
export function nodeControls(data: NodesData, start: number, state: State, choose: Choose): Controls {
  const index = new Map(data.numbers.map((_, k) => [labelOf(data, k), k]));
  const input = h("input", { type: data.names ? "text" : "number", spellcheck: "false", "aria-label": "node", value: labelOf(data, start) });
  const problem = h("span", { class: "note", role: "status" });
  input.addEventListener("change", () => {
    const node = index.get(input.value.trim());
    problem.textContent = node === undefined ? `The page has no node ${input.value}.` : "";
    if (node !== undefined) choose({ node, held: node });
  });
  const next = (kind: number): void => {
    const of = data.classes.flatMap((one, k) => (one === kind ? [k] : []));
    const node = of.find((k) => k > (state.held ?? start)) ?? of[0];
    choose({ node, held: node });
  };
  const kinds = [...new Set(data.classes)].sort((a, b) => a - b);
  const dots = kinds.map(() => h("span", { class: "dot" }));
  const buttons = kinds.map((kind, k) => h("button", { type: "button", class: "small", click: () => next(kind) }, dots[k], nameOfClass(data, kind)));
  const update = (): void => {
    if (document.activeElement !== input) input.value = labelOf(data, state.held ?? start);
    dots.forEach((dot, k) => (dot.style.background = colorOf(kinds[k])));
  };
  update();
  return { elements: [h("label", {}, "Node ", input), problem, h("div", { class: "chips", role: "group", "aria-label": "next node of a class" }, ...buttons)], update };
}

/** The node with its class and the predicted one. */
export function nameOfNode(data: NodesData, node: number): string {
  const [own, given] = [data.classes[node], data.predicted[node]];
  const says = own === given ? "predicted right" : `predicted ${nameOfClass(data, given)}`;
  return `node ${labelOf(data, node)} (${nameOfClass(data, own)}, ${says})`;
}

function labelOf({ names, numbers }: NodesData, node: number): string {
  return names ? names[node] : String(numbers[node]);
}

function nameOfClass({ class_names }: NodesData, kind: number): string {
  return kind < 0 ? "no class" : class_names ? class_names[kind] : `class ${kind}`;
}

function colorOf(kind: number): string {
  const { classes, ink } = palette();
  return kind < 0 ? ink : classes[kind % classes.length];
}

function curve(from: Place, to: Place): string {
  const [x, y] = [(from.x + to.x) / 2 + BEND * (to.y - from.y), (from.y + to.y) / 2 - BEND * (to.x - from.x)];
  return `M${from.x.toFixed(1)} ${from.y.toFixed(1)}Q${x.toFixed(1)} ${y.toFixed(1)} ${to.x.toFixed(1)} ${to.y.toFixed(1)}`;
}

/** A circle above a node, for what it attends to in itself. */
function loop({ x, y }: Place, radius: number): string {
  const r = radius * 0.7;
  return `M${x - r} ${y - 0.7 * radius}a${r} ${r} 0 1 1 ${2 * r} 0`;
}
