// Small graphs with the nodes in a line: an arc from source to destination, above for later nodes, below for earlier.

import { svg } from "../dom";
import { eachEdge, type Runs } from "../graph/runs";

const FLATNESS = 0.48; // of ellipses, so that the longest arc fits

export function arcs(runs: Runs, description: string): SVGElement {
  const n = Math.max(runs.numDst, runs.numSrc);
  const [step, middle] = [600 / n, 150];
  const at = (i: number): number => (i + 0.5) * step;
  const paths: string[] = [];
  const loops: string[] = [];
  eachEdge(runs, (i, j) => {
    if (i === j) return loops.push(`M${at(i) - 3} ${middle}a3 3 0 1 1 6 0a3 3 0 1 1 -6 0`);
    const across = Math.abs(i - j) * step * 0.5;
    return paths.push(`M${at(j)} ${middle}A${across} ${across * FLATNESS} 0 0 1 ${at(i)} ${middle}`);
  });
  const dots = Array.from({ length: n }, (_, i) => svg("circle", { cx: at(i), cy: middle, r: Math.min(3, step / 3) }));
  const strength = Math.max(0.15, Math.min(0.7, 40 / Math.max(paths.length, 1)));
  return svg(
    "svg",
    { class: "drawing", viewBox: "0 0 600 300", role: "img", "aria-label": description },
    svg("path", { class: "edges", d: paths.join(""), "stroke-opacity": strength }),
    svg("g", { class: "nodes" }, ...dots),
    svg("path", { class: "loops", d: loops.join("") }),
  );
}
