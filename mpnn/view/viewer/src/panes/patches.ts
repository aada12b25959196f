// The patches of an image, over the image. Those that the chosen one attends to are colored.

import type { PatchesData } from "../data";
import { h, oncePerFrame } from "../dom";
import { palette } from "../draw/colors";
import type { Picture } from "./heads";
import { pick, type Choose, type State, type SubjectView } from "./state";
import { Spans, nodeAt } from "./tokens";
import type { Weighted } from "./weights";

const MOST_OPAQUE = 0.85; // of the strongest patch's color
const FAINT = 0.6; // of the image below the colors

export class PatchesView implements SubjectView {
  readonly element: HTMLElement;
  private readonly canvas = h("canvas", { class: "patches", tabindex: 0, role: "img" });
  private readonly spans: Spans;
  private readonly image: HTMLImageElement;
  private shown: { node: number; found: Weighted[] } = { node: 0, found: [] };
  private readonly redraw = oncePerFrame(() => this.draw());

  constructor(
    private readonly data: PatchesData,
    state: State,
    choose: Choose,
  ) {
    const { rows, columns, extra } = data;
    const size = extra.length + rows * columns;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
    this.spans = new Spans(extra);
    const words = h("div", { class: "extra", tabindex: 0, role: "group", "aria-label": `beside the patches: ${extra.join(", ")}; arrow keys choose one` }, ...this.spans.elements);
    this.element = h("div", {}, ...(extra.length ? [words] : []), this.canvas);
    this.canvas.style.aspectRatio = `${columns} / ${rows}`;
    pick(words, nodeAt, { ArrowRight: 1, ArrowLeft: -1 }, size, state, choose);
    pick(this.canvas, (event) => this.patchAt(event), steps, size, state, choose);
    this.image = h("img", { src: data.image, load: this.redraw });
    new ResizeObserver(this.redraw).observe(this.canvas);
  }

  show({ node }: State, found: Weighted[]): void {
    this.shown = { node, found };
    this.spans.mark(node, found);
    this.draw();
  }

  private patchAt(event: MouseEvent): number | null {
    const { rows, columns, extra } = this.data;
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    const inside = row >= 0 && row < rows && column >= 0 && column < columns;
    return inside ? extra.length + row * columns + column : null;
  }

  private draw(): void {
    const { canvas, data, image } = this;
    const { node, found } = this.shown;
    const box = canvas.getBoundingClientRect();
    if (!box.width || !image.complete) return;
    const sharpness = Math.min(window.devicePixelRatio || 1, 2);
    const [width, height] = [Math.round(box.width * sharpness), Math.round(box.height * sharpness)];
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    const context = canvas.getContext("2d")!;
    context.clearRect(0, 0, width, height);
    context.imageSmoothingEnabled = image.naturalWidth >= width / 2; // pixels of small images stay sharp
    context.globalAlpha = FAINT;
    context.filter = "grayscale(1)";
    context.drawImage(image, 0, 0, width, height);
    context.filter = "none";

    const { series } = palette();
    const most = found[0]?.weight ?? 1;
    context.fillStyle = series[0];
    for (const { node: other, weight } of found) {
      context.globalAlpha = (MOST_OPAQUE * weight) / most;
      this.onPatch(other, (x, y, wide, high) => context.fillRect(x, y, wide, high));
    }
    context.globalAlpha = 1;
    context.strokeStyle = series[1];
    context.lineWidth = 3 * sharpness;
    this.onPatch(node, (x, y, wide, high) => context.strokeRect(x, y, wide, high));
    canvas.setAttribute("aria-label", `image of ${data.rows} x ${data.columns} patches; ${nameOfPatch(data, node)} is chosen; arrow keys choose others`);
  }

  /** Calls `draw` with the pixels of a node that has some: whole pixels, so that neighbors leave no gaps. */
  private onPatch(node: number, draw: (x: number, y: number, width: number, height: number) => void): void {
    const { rows, columns, extra } = this.data;
    const patch = node - extra.length;
    if (patch < 0) return;
    const { width, height } = this.canvas;
    const at = (k: number, count: number, pixels: number): number => Math.round((k * pixels) / count);
    const [row, column] = [Math.floor(patch / columns), patch % columns];
    const [x, y] = [at(column, columns, width), at(row, rows, height)];
    draw(x, y, at(column + 1, columns, width) - x, at(row + 1, rows, height) - y);
  }
}

/** The weights of patches in their places, as shares of the largest. */
export function mapOf({ rows, columns, extra }: PatchesData, weights: Float32Array): Picture {
  const shares = weights.subarray(extra.length);
  const most = shares.reduce((a, b) => Math.max(a, b), 1e-9);
  return { shares: shares.map((weight) => weight / most), width: columns, height: rows };
}

export function nameOfPatch({ extra, columns }: PatchesData, node: number): string {
  const patch = node - extra.length;
  if (patch < 0) return extra[node];
  return `patch (${Math.floor(patch / columns) + 1}, ${(patch % columns) + 1})`;
}
