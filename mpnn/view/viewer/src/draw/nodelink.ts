// Small graphs as nodes and lines, placed by d3-force: connected nodes attract each other, all nodes repel.

import { forceLink, forceManyBody, forceSimulation, forceX, forceY, type SimulationNodeDatum } from "d3-force";
import { svg } from "../dom";
import { eachEdge, type Runs } from "../graph/runs";

const TICKS = 200;
const SIDE = 500;

export function nodeLink(runs: Runs, description: string): SVGElement {
  const n = runs.numDst;
  const pairs = new Map<string, { source: number; target: number }>();
  eachEdge(runs, (i, j) => {
    if (i !== j) pairs.set(`${Math.min(i, j)},${Math.max(i, j)}`, { source: j, target: i });
  });
  const links = [...pairs.values()];
  const nodes: SimulationNodeDatum[] = places(n, links);
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

type Link = { source: number; target: number };

/** Where the nodes start: by their distances from three nodes that are far apart, so that grids and rings unfold; and
 * on a small circle, so that nodes at equal distances are apart. */
function places(n: number, links: Link[]): { x: number; y: number }[] {
  const neighbors: number[][] = Array.from({ length: n }, () => []);
  for (const { source, target } of links) {
    neighbors[source].push(target);
    neighbors[target].push(source);
  }
  const farthest = (far: number[]): number => far.indexOf(Math.max(...far));
  const one = distances(farthest(distances(0, neighbors)), neighbors);
  const other = distances(farthest(one), neighbors);
  const side = distances(farthest(one.map((x, i) => Math.min(x, other[i]))), neighbors);
  return one.map((x, i) => {
    const angle = (2 * Math.PI * i) / n;
    return { x: 40 * (x - other[i]) + 80 * Math.cos(angle), y: 80 * (side[i] + Math.sin(angle)) };
  });
}

/** The number of lines between a node and each; 0 where there is no way. */
function distances(from: number, neighbors: number[][]): number[] {
  const far = new Array<number>(neighbors.length).fill(0);
  const seen = new Set([from]);
  for (const i of seen) {
    for (const j of neighbors[i]) {
      if (!seen.has(j)) {
        seen.add(j); // a set visits what is added while it is walked
        far[j] = far[i] + 1;
      }
    }
  }
  return far;
}
