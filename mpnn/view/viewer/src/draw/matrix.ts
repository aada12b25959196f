// The matrix of a graph on a canvas: rows are destinations, columns sources. It is dragged, pinched, scrolled and moved by
// keys, from the whole of 100,000 nodes to single edges.

import { h, newId, oncePerFrame, svg } from "../dom";
import { contains, type Runs } from "../graph/runs";
import { onSchemeChange, paint, palette } from "./colors";
import { coverage, type Region } from "./coverage";

const GRID_FROM = 9; // pixels of a cell from which lines are drawn between cells
const LEAST = 4; // rows or columns on screen
const SVG_SIDE = 600;
const MOST_RECTANGLES = 20_000; // of an SVG
const KEYS = "Arrow keys move, + and − zoom, 0 shows all.";

export class MatrixView {
  readonly element: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private readonly status: HTMLElement;
  private runs: Runs | null = null;
  private region: Region = { row: 0, column: 0, rows: 1, columns: 1 };
  private readonly pointers = new Map<number, PointerEvent>();
  private readonly redraw = oncePerFrame(() => this.draw());

  constructor() {
    const id = newId();
    this.canvas = h("canvas", { class: "matrix", tabindex: 0, role: "img", "aria-describedby": id });
    this.status = h("p", { class: "note status", id }, KEYS);
    const zoom = (label: string, name: string, act: () => void): HTMLElement =>
      h("button", { type: "button", class: "small", "aria-label": name, title: name, click: act }, label);
    this.element = h(
      "figure",
      { class: "view" },
      this.canvas,
      h(
        "figcaption",
        {},
        this.status,
        h(
          "div",
          { class: "buttons" },
          zoom("+", "zoom in", () => this.zoom(0.5)),
          zoom("−", "zoom out", () => this.zoom(2)),
          zoom("all", "show the whole matrix", () => this.showAll()),
        ),
      ),
    );
    this.listen();
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
    onSchemeChange(() => this.redraw());
  }

  /** Draws other edges. The part on screen stays where the size is the same. */
  show(runs: Runs, description: string): void {
    const sameSize = this.runs?.numDst === runs.numDst && this.runs?.numSrc === runs.numSrc;
    this.runs = runs;
    this.canvas.setAttribute("aria-label", description);
    const aspect = Math.min(Math.max(runs.numSrc / Math.max(runs.numDst, 1), 0.8), 4);
    this.canvas.style.aspectRatio = String(aspect);
    if (!sameSize) this.showAll();
    this.redraw();
  }

  get drawing(): HTMLCanvasElement {
    return this.canvas;
  }

  /** The part on screen as an SVG, with a rectangle for each run; with the pixels of the canvas if these are many. */
  vector(): SVGElement | null {
    const { runs, region, canvas } = this;
    if (!runs) return null;
    const [first, last] = [Math.floor(region.row), Math.min(Math.ceil(region.row + region.rows), runs.numDst)];
    const side = (SVG_SIDE * region.rows) / region.columns;
    const marks: string[] = [];
    for (let i = first; i < last && marks.length <= MOST_RECTANGLES; i++) {
      for (let k = runs.ptr[i]; k < runs.ptr[i + 1]; k++) {
        const [from, to] = [Math.max(runs.start[k], region.column), Math.min(runs.stop[k], region.column + region.columns)];
        if (from < to) marks.push(`M${from - region.column} ${i - region.row}h${to - from}v1h${from - to}z`);
      }
    }
    const [x, y] = [SVG_SIDE / region.columns, side / region.rows];
    const { scale, empty } = palette();
    const shown =
      marks.length > MOST_RECTANGLES
        ? svg("image", { href: canvas.toDataURL(), width: SVG_SIDE, height: side })
        : svg("path", { d: marks.join(""), fill: scale[3], transform: `scale(${x} ${y})` });
    const frame = svg("rect", { width: SVG_SIDE, height: side, fill: empty });
    return svg("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${SVG_SIDE} ${side}` }, frame, shown);
  }

  /** Shows these rows and columns, for tests and links. */
  showRegion(region: Region): void {
    this.region = region;
    this.redraw();
  }

  private showAll(): void {
    const [rows, columns] = this.size();
    this.showRegion({ row: 0, column: 0, rows, columns });
    this.status.textContent = KEYS;
  }

  private size(): [number, number] {
    return [Math.max(this.runs?.numDst ?? 1, 1), Math.max(this.runs?.numSrc ?? 1, 1)];
  }

  /** Scales what is on screen; the cell at the fraction (x, y) of the canvas stays there. */
  private zoom(factor: number, x = 0.5, y = 0.5): void {
    const [rows, columns] = this.size();
    const { region } = this;
    const least = Math.max(Math.min(LEAST, rows) / region.rows, Math.min(LEAST, columns) / region.columns);
    factor = Math.min(Math.max(factor, least), Math.max(rows / region.rows, columns / region.columns));
    const height = Math.min(region.rows * factor, rows);
    const width = Math.min(region.columns * factor, columns);
    this.region = {
      row: region.row + y * (region.rows - height),
      column: region.column + x * (region.columns - width),
      rows: height,
      columns: width,
    };
    this.move(0, 0);
  }

  /** Moves the part on screen by fractions of itself, within the matrix. */
  private move(right: number, down: number): void {
    const [rows, columns] = this.size();
    const { region } = this;
    const within = (x: number, most: number): number => Math.min(Math.max(x, 0), Math.max(most, 0));
    region.row = within(region.row + down * region.rows, rows - region.rows);
    region.column = within(region.column + right * region.columns, columns - region.columns);
    this.redraw();
  }

  private draw(): void {
    const { runs, canvas, region } = this;
    const box = canvas.getBoundingClientRect();
    if (!runs || !box.width) return;
    const sharpness = Math.min(window.devicePixelRatio || 1, 2);
    const [width, height] = [Math.round(box.width * sharpness), Math.round(box.height * sharpness)];
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    const context = canvas.getContext("2d")!;
    paint(context, coverage(runs, region, width, height), width, height);
    context.fillStyle = palette().line;
    drawLines(region.column, region.columns, width, (x) => context.fillRect(x, 0, 1, height));
    drawLines(region.row, region.rows, height, (y) => context.fillRect(0, y, width, 1));
  }

  private listen(): void {
    const { canvas } = this;
    const at = (event: MouseEvent): [number, number] => {
      const box = canvas.getBoundingClientRect();
      return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    };
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), ...at(event));
    });
    canvas.addEventListener("dblclick", (event) => this.zoom(0.25, ...at(event)));
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, event);
    });
    for (const name of ["pointerup", "pointercancel"] as const) {
      canvas.addEventListener(name, (event) => this.pointers.delete(event.pointerId));
    }
    canvas.addEventListener("pointermove", (event) => {
      const before = this.pointers.get(event.pointerId);
      if (before) this.drag(before, event, at);
      else this.say(...at(event));
    });
    canvas.addEventListener("keydown", (event) => {
      const act = {
        ArrowLeft: () => this.move(-0.1, 0),
        ArrowRight: () => this.move(0.1, 0),
        ArrowUp: () => this.move(0, -0.1),
        ArrowDown: () => this.move(0, 0.1),
        "+": () => this.zoom(0.5),
        "=": () => this.zoom(0.5),
        "-": () => this.zoom(2),
        "0": () => this.showAll(),
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
      this.say(0.5, 0.5);
    });
  }

  /** One finger or the mouse moves the matrix; two fingers zoom around the one that rests. */
  private drag(before: PointerEvent, event: PointerEvent, at: (event: MouseEvent) => [number, number]): void {
    const [[x0, y0], [x, y]] = [at(before), at(event)];
    const other = [...this.pointers.values()].find((pointer) => pointer.pointerId !== event.pointerId);
    this.pointers.set(event.pointerId, event);
    if (other) {
      const [a, b] = at(other);
      const distance = (p: number, q: number): number => Math.max(Math.hypot(p - a, q - b), 0.01);
      this.zoom(distance(x0, y0) / distance(x, y), a, b);
    } else {
      this.move(x0 - x, y0 - y);
    }
  }

  /** Says what is at a fraction of the canvas. */
  private say(x: number, y: number): void {
    const { runs, region } = this;
    if (!runs || !runs.numDst || !runs.numSrc) return;
    const i = Math.min(Math.max(Math.floor(region.row + y * region.rows), 0), runs.numDst - 1);
    const j = Math.min(Math.max(Math.floor(region.column + x * region.columns), 0), runs.numSrc - 1);
    const edge = contains(runs, i, j) ? "receives from" : "does not receive from";
    this.status.textContent = `Node ${i} (row) ${edge} node ${j} (column).`;
  }
}

function drawLines(first: number, count: number, pixels: number, line: (at: number) => void): void {
  if (pixels / count < GRID_FROM) return;
  for (let k = Math.ceil(first); k <= first + count; k++) line(Math.round(((k - first) / count) * pixels));
}
