// The expression and size that the Graph and Reach panes share, and the graph that they make.

import { parse, type Literal, type Topology } from "../graph/expression";
import { SizeError, type Runs } from "../graph/runs";

export const MOST_NODES = 100_000; // that sliders and expressions choose

export class GraphModel {
  runs: Runs | null = null;
  numbers: Literal[] = [];
  problem = "";
  private readonly listeners: (() => void)[] = [];

  constructor(
    public expression: string,
    public n: number,
    public numSrc: number | null,
  ) {
    this.bind();
  }

  set(expression: string, n: number): void {
    if (n !== this.n) this.numSrc = null;
    [this.expression, this.n] = [expression, n];
    this.bind();
    for (const act of this.listeners) act();
  }

  onChange(act: () => void): void {
    this.listeners.push(act);
  }

  /** The last graph stays while the expression cannot be read. */
  private bind(): void {
    try {
      const topology = parse(this.expression);
      this.numbers = topology.numbers;
      this.runs = this.graph(topology);
      this.problem = "";
    } catch (error) {
      this.problem = (error as Error).message;
    }
  }
  /** Where the expression says how many nodes there are, these. */
  private graph(topology: Topology): Runs {
    try {
      return topology.bind(this.n, this.numSrc ?? undefined);
    } catch (error) {
      if (!(error instanceof SizeError) || this.numSrc !== null || error.nodes > MOST_NODES) throw error;
      this.n = error.nodes;
      return topology.bind(this.n);
    }
  }
}
