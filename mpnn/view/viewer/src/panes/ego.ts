// The neighborhood of a node: the nodes whose features reach it, and where they are drawn. Rings are hops.

import type { Weights } from "./weights";

const MOST_HOPS = 2;
const MOST_DRAWN = 48;
const SIDE = 520;
const RINGS = [0, 0.54, 0.94]; // radius of each hop, of half the side

export interface Place {
  x: number;
  y: number;
  hop: number;
}

export const SQUARE = SIDE;

/** The nodes around `center` that the page draws, with their places in a square of `SQUARE` units. Of many, those with
 * the largest product of weights on the way to the center, as means over layers and heads. */
export function ego(weights: Weights, layers: number, center: number): Map<number, Place> {
  const sources = (node: number): { node: number; weight: number }[] => {
    const sums = new Map<number, number>();
    for (let layer = 0; layer < layers; layer++) {
      for (const one of weights.attendsTo(node, { layer, head: "mean" })) sums.set(one.node, (sums.get(one.node) ?? 0) + one.weight / layers);
    }
    return [...sums].map(([other, weight]) => ({ node: other, weight }));
  };

  const parent = new Map<number, number>([[center, center]]);
  let ring = [{ node: center, weight: 1 }];
  const rings = [[center]];
  for (let hop = 1; hop <= Math.min(layers, MOST_HOPS); hop++) {
    const found = new Map<number, { node: number; weight: number; from: number }>();
    for (const { node, weight } of ring) {
      for (const one of sources(node)) {
        if (parent.has(one.node)) continue;
        const product = weight * one.weight;
        if (product > (found.get(one.node)?.weight ?? 0)) found.set(one.node, { node: one.node, weight: product, from: node });
      }
    }
    const room = hop === 1 ? MOST_DRAWN / 2 : MOST_DRAWN - parent.size;
    const kept = [...found.values()].sort((a, b) => b.weight - a.weight).slice(0, room);
    for (const { node, from } of kept) parent.set(node, from);
    ring = kept;
    rings.push(kept.map(({ node }) => node));
  }
  return places(rings, parent);
}

/** Nodes of the first ring take a share of the circle that grows with their children, which are beside them. */
function places(rings: number[][], parent: Map<number, number>): Map<number, Place> {
  const [[center], first = [], second = []] = rings;
  const children = (node: number): number[] => second.filter((one) => parent.get(one) === node);
  const found = new Map<number, Place>([[center, { x: SIDE / 2, y: SIDE / 2, hop: 0 }]]);
  const put = (node: number, hop: number, angle: number): void => {
    const radius = (SIDE / 2) * RINGS[hop];
    found.set(node, { x: SIDE / 2 + radius * Math.sin(angle), y: SIDE / 2 - radius * Math.cos(angle), hop });
  };
  const share = (node: number): number => 1 + children(node).length / 2;
  const total = first.reduce((sum, node) => sum + share(node), 0);
  let at = 0;
  for (const node of [...first].sort((a, b) => a - b)) {
    const width = (2 * Math.PI * share(node)) / total;
    const own = children(node).sort((a, b) => a - b);
    put(node, 1, at + width / 2);
    own.forEach((child, k) => put(child, 2, at + (width * (k + 0.5)) / own.length));
    at += width;
  }
  return found;
}
