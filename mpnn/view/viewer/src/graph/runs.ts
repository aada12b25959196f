// Rows of runs, as in mpnn/graph/runs.py: the in-neighbors of each row are sorted, disjoint intervals [start, stop) that
// do not touch. Everything the viewer draws or counts reads them, so that 100,000 nodes cost as much as their runs.

const MOST_RUNS = 1 << 23; // 64 MB

export interface Runs {
  readonly numDst: number;
  readonly numSrc: number;
  /** The runs of row i are `ptr[i]` to `ptr[i + 1]`. */
  readonly ptr: Int32Array;
  readonly start: Int32Array;
  readonly stop: Int32Array;
}

/** A graph that exists over `nodes` nodes only. */
export class SizeError extends Error {
  constructor(
    message: string,
    readonly nodes: number,
  ) {
    super(message);
  }
}

/** Adds the interval [start, stop) to the current row. It may be empty or exceed the sources. */
export type Add = (start: number, stop: number) => void;

/** The union of the intervals that `row(i, add)` adds for each row, in any order. */
export function build(numDst: number, numSrc: number, row: (i: number, add: Add) => void): Runs {
  const ptr = new Int32Array(numDst + 1);
  let start = new Int32Array(2 * numDst + 16);
  let stop = new Int32Array(2 * numDst + 16);
  let first = 0; // the first run of the row
  let count = 0;
  let sorted = true;

  const add: Add = (from, to) => {
    from = Math.max(from, 0);
    to = Math.min(to, numSrc);
    if (from >= to) return;
    if (count > first && from < start[count - 1]) sorted = false;
    if (count === start.length) [start, stop] = [grown(start), grown(stop)];
    start[count] = from;
    stop[count++] = to;
  };

  for (let i = 0; i < numDst; i++) {
    first = count;
    sorted = true;
    row(i, add);
    if (!sorted) sortByStart(start, stop, first, count);
    count = joined(start, stop, first, count);
    ptr[i + 1] = count;
  }
  return { numDst, numSrc, ptr, start: start.slice(0, count), stop: stop.slice(0, count) };
}

function grown(array: Int32Array): Int32Array<ArrayBuffer> {
  if (array.length >= MOST_RUNS) {
    throw new Error(`more than ${MOST_RUNS.toLocaleString("en")} runs; use fewer nodes, or fewer runs per row`);
  }
  const larger = new Int32Array(Math.min(2 * array.length, MOST_RUNS));
  larger.set(array);
  return larger;
}

function sortByStart(start: Int32Array, stop: Int32Array, first: number, last: number): void {
  const order = Array.from({ length: last - first }, (_, k) => first + k).sort((a, b) => start[a] - start[b]);
  const [starts, stops] = [order.map((k) => start[k]), order.map((k) => stop[k])];
  start.set(starts, first);
  stop.set(stops, first);
}

/** Joins intervals that overlap or touch, in place. Returns where they end. */
function joined(start: Int32Array, stop: Int32Array, first: number, last: number): number {
  let end = first;
  for (let k = first; k < last; k++) {
    if (end > first && start[k] <= stop[end - 1]) {
      stop[end - 1] = Math.max(stop[end - 1], stop[k]);
    } else {
      start[end] = start[k];
      stop[end++] = stop[k];
    }
  }
  return end;
}

export function union(a: Runs, b: Runs): Runs {
  checkSameSize(a, b);
  return build(a.numDst, a.numSrc, (i, add) => {
    let [p, q] = [a.ptr[i], b.ptr[i]];
    const [endP, endQ] = [a.ptr[i + 1], b.ptr[i + 1]];
    while (p < endP || q < endQ) {
      if (q === endQ || (p < endP && a.start[p] <= b.start[q])) add(a.start[p], a.stop[p++]);
      else add(b.start[q], b.stop[q++]);
    }
  });
}

export function intersection(a: Runs, b: Runs): Runs {
  checkSameSize(a, b);
  return build(a.numDst, a.numSrc, (i, add) => {
    let [p, q] = [a.ptr[i], b.ptr[i]];
    while (p < a.ptr[i + 1] && q < b.ptr[i + 1]) {
      add(Math.max(a.start[p], b.start[q]), Math.min(a.stop[p], b.stop[q]));
      if (a.stop[p] < b.stop[q]) p++;
      else q++;
    }
  });
}

export function complement(a: Runs): Runs {
  return build(a.numDst, a.numSrc, (i, add) => {
    let from = 0;
    for (let k = a.ptr[i]; k < a.ptr[i + 1]; k++) {
      add(from, a.start[k]);
      from = a.stop[k];
    }
    add(from, a.numSrc);
  });
}

export function difference(a: Runs, b: Runs): Runs {
  return intersection(a, complement(b));
}

function checkSameSize(a: Runs, b: Runs): void {
  if (a.numDst !== b.numDst || a.numSrc !== b.numSrc) {
    throw new Error(`set algebra needs graphs of one size; got ${a.numDst} x ${a.numSrc} and ${b.numDst} x ${b.numSrc}`);
  }
}

/** The rows `first` to `last`. */
export function rowsOf(a: Runs, first: number, last: number): Runs {
  return build(last - first, a.numSrc, (i, add) => {
    for (let k = a.ptr[first + i]; k < a.ptr[first + i + 1]; k++) add(a.start[k], a.stop[k]);
  });
}

export function numEdges(runs: Runs): number {
  let total = 0;
  for (let k = 0; k < runs.start.length; k++) total += runs.stop[k] - runs.start[k];
  return total;
}

/** A node and a later node that it receives from; null if there is none, as in a causal graph. */
export function edgeFromLater(runs: Runs): [number, number] | null {
  for (let i = 0; i < runs.numDst; i++) {
    const last = runs.ptr[i + 1] - 1;
    if (last >= runs.ptr[i] && runs.stop[last] > i + 1) return [i, runs.stop[last] - 1];
  }
  return null;
}

/** The least and the largest in-degree. */
export function degreeRange(runs: Runs): [number, number] {
  let [least, most] = [runs.numDst ? Infinity : 0, 0];
  for (let i = 0; i < runs.numDst; i++) {
    let degree = 0;
    for (let k = runs.ptr[i]; k < runs.ptr[i + 1]; k++) degree += runs.stop[k] - runs.start[k];
    least = Math.min(least, degree);
    most = Math.max(most, degree);
  }
  return [least, most];
}

/** The first run of row i that stops after source j; `ptr[i + 1]` if there is none. */
export function firstRunAfter(runs: Runs, i: number, j: number): number {
  let [low, high] = [runs.ptr[i], runs.ptr[i + 1]];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (runs.stop[middle] > j) high = middle;
    else low = middle + 1;
  }
  return low;
}

export function contains(runs: Runs, i: number, j: number): boolean {
  const k = firstRunAfter(runs, i, j);
  return k < runs.ptr[i + 1] && runs.start[k] <= j;
}

/** Calls `visit(dst, src)` for each edge, row by row. */
export function eachEdge(runs: Runs, visit: (dst: number, src: number) => void): void {
  for (let i = 0; i < runs.numDst; i++) {
    for (let k = runs.ptr[i]; k < runs.ptr[i + 1]; k++) {
      for (let j = runs.start[k]; j < runs.stop[k]; j++) visit(i, j);
    }
  }
}
