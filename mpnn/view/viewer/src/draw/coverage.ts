// How much of each pixel of a matrix is edges, computed from runs. The work is bounded by a budget of runs, so that
// 100,000 rows are drawn in some milliseconds: beyond the budget, some of the rows of each pixel are read.

import { firstRunAfter, type Runs } from "../graph/runs";

/** The part of a matrix on screen: its first row and source, and the number of them across, as fractions. */
export interface Region {
  row: number;
  column: number;
  rows: number;
  columns: number;
}

const ROUNDING = 1e-9; // what is left of a sum of fractions that cancel
const BUDGET = 400_000; // runs that are read for one picture

/** The share of edges of each pixel, float32 [height * width], rows from top to bottom. */
export function coverage(runs: Runs, region: Region, width: number, height: number): Float32Array {
  const out = new Float32Array(width * height);
  const [down, across] = [region.rows / height, region.columns / width];
  const top = Math.max(0, Math.floor(region.row));
  const bottom = Math.min(runs.numDst, Math.ceil(region.row + region.rows));
  const visible = top < bottom ? runs.ptr[bottom] - runs.ptr[top] : 0;
  const each = Math.max(1, Math.ceil(visible / BUDGET)); // reads every so many rows
  const line = new Float64Array(width + 2);
  let drawn = -1; // the row that the line above shows, if it shows one only

  for (let y = 0; y < height; y++) {
    let first = Math.floor(region.row + y * down);
    let last = Math.floor(region.row + (y + 1) * down);
    if (down < 1) last = (first = Math.floor(region.row + (y + 0.5) * down)) + 1;
    [first, last] = [Math.max(first, 0), Math.min(Math.max(last, first + 1), runs.numDst)];
    if (first >= last) continue;
    if (last - first === 1 && first === drawn) {
      out.copyWithin(y * width, (y - 1) * width, y * width);
      continue;
    }
    drawn = last - first === 1 ? first : -1;
    line.fill(0);
    let read = 0;
    for (let i = first; i < last; i += each, read++) addRow(line, runs, i, region.column, across, width);
    let sum = 0;
    for (let x = 0; x < width; x++) {
      sum += line[x];
      out[y * width + x] = sum > ROUNDING ? Math.min(1, sum / read) : 0;
    }
  }
  return out;
}

/** Adds the changes of the coverage from pixel to pixel: its running sum is the coverage. */
function addRow(line: Float64Array, runs: Runs, i: number, column: number, across: number, width: number): void {
  const end = runs.ptr[i + 1];
  for (let k = firstRunAfter(runs, i, column); k < end; k++) {
    let from = Math.max(0, (runs.start[k] - column) / across);
    if (from >= width) return;
    let to = Math.min(width, (runs.stop[k] - column) / across);
    if (across < 1) [from, to] = [Math.round(from), Math.round(to)]; // cells of whole pixels have sharp ends
    const [a, b] = [Math.floor(from), Math.floor(to)];
    line[a] += 1 - (from - a);
    line[a + 1] += from - a;
    line[b] -= 1 - (to - b);
    line[b + 1] -= to - b;
  }
}
