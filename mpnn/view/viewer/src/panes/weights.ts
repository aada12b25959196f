// Attention weights of one graph, read from the page's data.

import { bytesOf, integersOf } from "../binary";
import type { AttentionData, AttentionGraph } from "../data";

export interface Weighted {
  node: number;
  weight: number;
}

/** One head, or the mean over the heads of a layer. */
export interface Head {
  layer: number;
  head: number | "mean";
}

export type Direction = "attendsTo" | "attendedBy";

export class Weights {
  readonly thumbnails: Uint8Array;
  private readonly sources: Uint16Array | Uint32Array;
  private readonly weights: Uint8Array;
  /** Heads of earlier layers, for each layer. */
  private readonly before: number[];

  constructor(
    private readonly data: AttentionData,
    private readonly graph: AttentionGraph,
    private readonly nodes: number,
  ) {
    this.before = data.heads.map((_, layer) => data.heads.slice(0, layer).reduce((a, b) => a + b, 0));
    this.thumbnails = bytesOf(graph.thumbnails);
    this.sources = integersOf(graph.sources, nodes <= 1 << 16 ? 2 : 4);
    this.weights = bytesOf(graph.weights);
  }

  /** The sources that a node attends to, the strongest first. */
  attendsTo(node: number, chosen: Head): Weighted[] {
    return this.sorted("attendsTo", node, chosen);
  }

  /** The nodes that attend to a node, among the sources that the page keeps of each. */
  attendedBy(node: number, chosen: Head): Weighted[] {
    return this.sorted("attendedBy", node, chosen);
  }

  /** The weights between a node and all others, float32 [nodes], in one of these directions. */
  between(direction: Direction, node: number, chosen: Head): Float32Array {
    const sums = new Float32Array(this.nodes);
    this.visit(direction, node, chosen, (other, weight) => (sums[other] += weight));
    return sums;
  }

  private sorted(direction: Direction, node: number, chosen: Head): Weighted[] {
    const sums = new Map<number, number>();
    this.visit(direction, node, chosen, (other, weight) => sums.set(other, (sums.get(other) ?? 0) + weight));
    return [...sums].map(([other, weight]) => ({ node: other, weight })).sort((a, b) => b.weight - a.weight);
  }

  /** Calls `act` with each node that this one attends to, or is attended by, and the weight over the number of heads. */
  private visit(direction: Direction, node: number, chosen: Head, act: (other: number, weight: number) => void): void {
    const { top } = this.graph;
    const heads = this.heads(chosen);
    for (const head of heads) {
      const first = this.row(chosen.layer, head) * top;
      if (direction === "attendsTo") {
        for (let k = first + node * top; k < first + (node + 1) * top && this.weights[k]; k++) act(this.sources[k], this.weight(k) / heads.length);
      } else {
        for (let k = first; k < first + this.nodes * top; k++) {
          if (this.sources[k] === node && this.weights[k]) act(Math.floor((k - first) / top), this.weight(k) / heads.length);
        }
      }
    }
  }

  /** The mean weights of a head in cells, as shares of the largest, 0 to 1. */
  thumbnail({ layer, head }: Head): Float32Array {
    const size = this.data.cells ** 2;
    const shares = new Float32Array(size);
    const heads = this.heads({ layer, head });
    for (const each of heads) {
      const first = (this.before[layer] + each) * size;
      for (let k = 0; k < size; k++) shares[k] += (this.thumbnails[first + k] / 255) ** 2 / heads.length;
    }
    return shares;
  }

  private heads({ layer, head }: Head): number[] {
    return head === "mean" ? Array.from({ length: this.data.heads[layer] }, (_, k) => k) : [head];
  }

  private row(layer: number, head: number): number {
    return (this.before[layer] + head) * this.nodes;
  }

  private weight(k: number): number {
    return (this.weights[k] / 255) ** 2;
  }
}
