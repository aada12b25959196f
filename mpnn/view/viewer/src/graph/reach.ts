// What a node learns from after each layer: a breadth-first search from it through in-neighbors. A node is visited
// once, by skipping over the visited part of each run, so that a search takes O(nodes + runs) however deep it is.

import { edgeFromLater, type Runs } from "./runs";

export const NEVER = -1;

/** The number of layers after which node `i` has received from each node, int32 [numSrc]; NEVER if it does not. */
export function levels(runs: Runs, i: number): Int32Array {
  const level = new Int32Array(runs.numSrc).fill(NEVER);
  const unvisited = new Int32Array(runs.numSrc + 1).map((_, j) => j); // towards the first unvisited node at or after j
  const find = (j: number): number => {
    let root = j;
    while (unvisited[root] !== root) root = unvisited[root];
    while (unvisited[j] !== root) [unvisited[j], j] = [root, unvisited[j]];
    return root;
  };
  level[i] = 0;
  unvisited[i] = i + 1;
  let frontier = [i];
  for (let layer = 1; frontier.length; layer++) {
    const following: number[] = [];
    for (const node of frontier) {
      for (let k = runs.ptr[node]; k < runs.ptr[node + 1]; k++) {
        for (let j = find(runs.start[k]); j < runs.stop[k]; j = find(j)) {
          level[j] = layer;
          unvisited[j] = j + 1;
          following.push(j);
        }
      }
    }
    frontier = following;
  }
  return level;
}

/** How many nodes are reached within 0, 1, 2, ... layers, until there are no more. */
export function reachedWithin(level: Int32Array): number[] {
  const counts: number[] = [];
  for (const x of level) if (x !== NEVER) counts[x] = (counts[x] ?? 0) + 1;
  for (let k = 1; k < counts.length; k++) counts[k] += counts[k - 1];
  return counts;
}

export interface Diameter {
  /** The number of layers after which every node searched from has received from all, or, over a graph without edges
   * from later nodes, from all earlier ones; null if one never does. */
  layers: number | null;
  /** Whether all nodes were searched from. */
  exact: boolean;
  searched: number;
}

/** What is known after a search from one node, two nodes, and so on; the last is exact. */
export function* diameters(runs: Runs): Generator<Diameter> {
  const n = runs.numDst;
  const forward = edgeFromLater(runs) === null;
  let [longest, searched] = [0, 0];
  for (const i of spread(n)) {
    const level = levels(runs, i).subarray(0, forward ? i + 1 : n);
    searched++;
    if (level.includes(NEVER)) return yield { layers: null, exact: true, searched };
    longest = level.reduce((a, b) => Math.max(a, b), longest);
    yield { layers: longest, exact: searched === n, searched };
  }
}

/** All of 0, ..., n - 1: the ends, the middle, and then between them, so that any beginning is spread evenly. */
function* spread(n: number): Generator<number> {
  if (n > 0) yield 0;
  if (n > 1) yield n - 1;
  let step = 1;
  while (step < n) step *= 2;
  const seen = new Uint8Array(n);
  seen[0] = 1;
  if (n > 1) seen[n - 1] = 1;
  for (; step >= 1; step /= 2) {
    for (let i = step; i < n; i += step) {
      if (!seen[i]) {
        seen[i] = 1;
        yield i;
      }
    }
  }
}
