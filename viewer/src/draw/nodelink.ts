// Small graphs as nodes and lines, placed by d3-force: connected nodes attract each other, all nodes repel.

import { forceLink, forceManyBody, forceSimulation, forceX, forceY, type SimulationNodeDatum } from "d3-force";
import { svg } from "../dom";
import { eachEdge, type Runs } from "../graph/runs";

const TICKS = 200;
const SIDE = 500;

export function nodeLink(runs: Runs, description: string): SVGElement {
  const n = runs.numDst;
  const nodes: SimulationNodeDatum[] = Array.from({ length: n }, (_, i) => ({ index: i, ...onCircle(i, n) }));
  const pairs = new Map<string, { source: number; target: number }>();
  eachEdge(runs, (i, j) => {
    if (i !== j) pairs.set(`${Math.min(i, j)},${Math.max(i, j)}`, { source: j, target: i });
  });
  const links = [...pairs.values()];
  forceSimulation(nodes)
    .force("links", forceLink(links).distance(30))
    .force("repel", forceManyBody().strength(-60))
    .force("x", forceX().strength(0.05))
    .force("y", forceY().strength(0.05))
    .stop()
    .tick(TICKS);

  const most = Math.max(1, ...nodes.map((node) => Math.max(Math.abs(node.x!), Math.abs(node.y!))));
  const at = (x: number): number => Math.round((SIDE / 2) * (1 + (0.95 * x) / most));
  const lines = links.map(({ source, target }: any) => `M${at(source.x)} ${at(source.y)}L${at(target.x)} ${at(target.y)}`);
  const radius = Math.max(2.5, Math.min(8, 60 / Math.sqrt(Math.max(n, 1))));
  const dots = nodes.map((node, i) =>
    svg("circle", { cx: at(node.x!), cy: at(node.y!), r: radius }, svg("title", {}, `node ${i}`)),
  );
  const strength = Math.max(0.12, Math.min(0.7, 150 / Math.max(links.length, 1)));
  return svg(
    "svg",
    { class: "drawing", viewBox: `0 0 ${SIDE} ${SIDE}`, role: "img", "aria-label": description },
    svg("path", { class: "edges", d: lines.join(""), "stroke-opacity": strength }),
    svg("g", { class: "nodes" }, ...dots),
  );
}

function onCircle(i: number, n: number): { x: number; y: number } {
  const angle = (2 * Math.PI * i) / n;
  return { x: 100 * Math.cos(angle), y: 100 * Math.sin(angle) };
}
