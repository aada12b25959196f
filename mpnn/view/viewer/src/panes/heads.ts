// A small picture of each layer and head, by default its matrix, and the matrix of the chosen head with the row of the
// chosen node.

import type { AttentionData } from "../data";
import { h } from "../dom";
import { paint, palette } from "../draw/colors";
import { clamp, type Choose, type State } from "./state";
import type { Description } from "./subject";
import type { Head, Weights } from "./weights";

const LARGE = 300; // pixels of the chosen head, at least
const GAP = 2; // pixels between thumbnails
const MOST_STEP = 120; // pixels of a thumbnail, at most

/** Shares of the largest, 0 to 1, row by row. */
export interface Picture {
  shares: Float32Array;
  width: number;
  height: number;
}

export class HeadsView {
  readonly element: HTMLElement;
  private readonly grid = h("canvas", { class: "heads", tabindex: 0, role: "img" });
  private readonly large = h("canvas", { class: "large", role: "img" });
  private readonly most: number;
  private drawn = "";
  /** All thumbnails, kept until what they show, the size or the colors change. */
  private thumbnails: OffscreenCanvas | null = null;

  constructor(
    private readonly data: AttentionData,
    private readonly weights: Weights,
    private readonly subject: Description,
    state: State,
    choose: Choose,
  ) {
    this.most = Math.max(...data.heads);
    const each = new Set(data.heads).size === 1 ? ` of ${this.most} heads` : "";
    this.grid.setAttribute("aria-label", `attention of ${data.heads.length} layers${each}, a small square for each; arrow keys choose one`);
    this.element = h("div", { class: "matrices" }, this.grid, this.large);
    this.listen(state, choose);
    new ResizeObserver(() => this.show(state)).observe(this.grid);
  }

  show(state: State): void {
    const { grid, large, data, most } = this;
    const { node, chosen } = state;
    const box = grid.getBoundingClientRect();
    if (!box.width) return;
    const sharpness = Math.min(window.devicePixelRatio || 1, 2);
    const wide = Math.floor((box.width * sharpness) / most);
    const step = Math.max(Math.min(data.cells, 56), Math.min(wide, MOST_STEP * sharpness));
    const drawn = [step, palette().empty, ...(this.subject.thumbnail ? [node, state.direction] : [])].join();
    if (this.drawn !== drawn) {
      this.drawn = drawn;
      this.thumbnails = this.paintThumbnails(step, state);
    }
    [grid.width, grid.height] = [step * most, step * data.heads.length];
    grid.style.maxWidth = `${MOST_STEP * most}px`;
    const context = grid.getContext("2d")!;
    context.drawImage(this.thumbnails!, 0, 0);
    context.strokeStyle = palette().series[1];
    context.lineWidth = 3;
    const [x, across] = chosen.head === "mean" ? [0, data.heads[chosen.layer]] : [chosen.head, 1];
    context.strokeRect(x * step + 0.5, chosen.layer * step + 0.5, across * step - GAP, step - GAP);

    this.drawLarge(node, chosen);
    large.setAttribute("aria-label", `attention matrix of layer ${chosen.layer + 1}; the row of the chosen node is marked`);
  }

  /** The matrix of the chosen head, with the row of the node. */
  private drawLarge(node: number, chosen: Head): void {
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
    const row = Math.floor((node * data.cells) / this.subject.size);
    context.strokeRect(1, row * cell, side - 2, cell);
  }

  private paintThumbnails(step: number, state: State): OffscreenCanvas {
    const { data } = this;
    const all = new OffscreenCanvas(step * this.most, step * data.heads.length);
    const context = all.getContext("2d")!;
    const one = h("canvas");
    const small = one.getContext("2d")!;
    data.heads.forEach((heads, layer) => {
      for (let head = 0; head < heads; head++) {
        const { shares, width, height } = this.picture({ layer, head }, state);
        const scale = (step - GAP) / Math.max(width, height);
        if (one.width !== width || one.height !== height) [one.width, one.height] = [width, height];
        paint(small, shares, width, height);
        context.imageSmoothingEnabled = scale < 1;
        context.drawImage(one, head * step, layer * step, scale * width, scale * height);
      }
    });
    return all;
  }

  private picture(chosen: Head, state: State): Picture {
    const { cells } = this.data;
    return this.subject.thumbnail?.(this.weights, chosen, state) ?? { shares: this.weights.thumbnail(chosen), width: cells, height: cells };
  }

  private listen(state: State, choose: Choose): void {
    const { grid, data } = this;
    const layers = data.heads.length;
    const move = (layer: number, head: number): void => {
      layer = clamp(layer, layers);
      choose({ chosen: { layer, head: clamp(head, data.heads[layer]) } });
    };
    grid.addEventListener("click", (event) => {
      const box = grid.getBoundingClientRect();
      const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
      move(Math.floor(y * layers), Math.floor(x * this.most));
    });
    grid.addEventListener("keydown", (event) => {
      const steps: Record<string, [number, number]> = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
      const [down, right] = steps[event.key] ?? [0, 0];
      if (!down && !right) return;
      event.preventDefault();
      const head = state.chosen.head === "mean" ? 0 : state.chosen.head;
      move(state.chosen.layer + down, head + right);
    });
  }
}
