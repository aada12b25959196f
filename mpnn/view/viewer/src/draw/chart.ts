// Lines over two logarithmic axes, as an SVG that takes its colors from the page.

import { h, svg } from "../dom";
import { scaled } from "../text";
import { onSchemeChange, palette } from "./colors";

export interface Series {
  name: string;
  /** Its number among the colors of the page. */
  color: number;
  points: [x: number, y: number][];
}

const [WIDTH, HEIGHT] = [480, 300];
const [LEFT, RIGHT, TOP, BOTTOM] = [64, 76, 12, 36];
const LABEL = 14; // pixels between the names of lines

export function lineChart(title: string, across: string, series: Series[], format: (y: number) => string): HTMLElement {
  const figure = h("figure", {}, h("h2", {}, title));
  const draw = (): void => {
    figure.querySelector("svg")?.remove();
    figure.append(chart(title, across, series, format));
  };
  draw();
  onSchemeChange(draw);
  return figure;
}

function chart(title: string, across: string, series: Series[], format: (y: number) => string): SVGElement {
  const points = series.flatMap((one) => one.points);
  const x = scale(points.map(([a]) => a), LEFT, WIDTH - RIGHT);
  const y = scale(points.map(([, b]) => b), HEIGHT - BOTTOM, TOP);
  const tick = (text: string, a: number, b: number, anchor: string): SVGElement =>
    svg("text", { x: a, y: b, "text-anchor": anchor }, text);
  const rows = y.ticks.flatMap((value) => [
    svg("path", { class: "rule", d: `M${LEFT} ${y.at(value)}H${WIDTH - RIGHT}` }),
    tick(format(value), LEFT - 6, y.at(value) + 4, "end"),
  ]);
  const columns = x.ticks.map((value) => tick(scaled(value, ["", "k", "M"]), x.at(value), HEIGHT - BOTTOM + 16, "middle"));
  const colors = palette().series;
  const colorOf = (one: Series): string => colors[one.color % colors.length];
  const lines = series.map((one) =>
    svg("path", {
      class: "line",
      stroke: colorOf(one),
      d: `M${one.points.map(([a, b]) => `${x.at(a).toFixed(1)} ${y.at(b).toFixed(1)}`).join("L")}`,
    }),
  );
  const ends = spaced(series.map((one) => y.at(one.points.at(-1)![1])));
  const names = series.map((one, k) =>
    svg("text", { x: x.at(one.points.at(-1)![0]) + 5, y: ends[k] + 4, fill: colorOf(one) }, one.name),
  );
  const said = series.map((one) => `${one.name} ${format(one.points.at(-1)![1])} at ${one.points.at(-1)![0]} ${across}`);
  return svg(
    "svg",
    { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title} by ${across}: ${said.join("; ")}` },
    ...rows,
    ...columns,
    tick(across, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 2, "middle"),
    ...lines,
    ...names,
  );
}

/** A logarithmic axis, with ticks at powers of ten, at most six. */
function scale(values: number[], from: number, to: number): { at: (value: number) => number; ticks: number[] } {
  const [low, high] = [Math.log10(Math.min(...values)), Math.log10(Math.max(...values))];
  const span = Math.max(high - low, 1e-9);
  const powers: number[] = [];
  for (let k = Math.ceil(low); k <= high; k++) powers.push(k);
  const each = Math.max(1, Math.ceil(powers.length / 6));
  return {
    at: (value) => from + ((Math.log10(value) - low) / span) * (to - from),
    ticks: powers.filter((k) => (k - powers[0]) % each === 0).map((k) => 10 ** k),
  };
}

/** Moves heights apart, from top to bottom, so that names do not overlap. */
function spaced(heights: number[]): number[] {
  const order = heights.map((_, k) => k).sort((a, b) => heights[a] - heights[b]);
  const moved = [...heights];
  order.forEach((k, place) => {
    if (place > 0) moved[k] = Math.max(moved[k], moved[order[place - 1]] + LABEL);
  });
  return moved;
}
