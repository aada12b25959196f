// The expression and size that the Graph and Reach panes share, and the graph that they make.

import { addressed, keep } from "../address";
import { parse, type Literal, type Topology } from "../graph/expression";
import { SizeError, type Runs } from "../graph/runs";

export const MOST_NODES = 100_000; // that sliders and expressions choose

/** A graph that Python bound, because the browser cannot: of an expression with random edges, or with a user's builders. */
export interface Given {
  expression: string;
  runs: Runs;
}

export class GraphModel {
  runs: Runs | null = null;
  numbers: Literal[] = [];
  problem = "";
  private readonly listeners: (() => void)[] = [];

  constructor(
    public expression: string,
    public n: number,
    public numSrc: number | null,
    private readonly given: Given[],
  ) {
    const [written, nodes] = [addressed("graph"), Number(addressed("n"))];
    if (written !== null) this.expression = written;
    if (nodes > 0 && nodes <= MOST_NODES && Number.isInteger(nodes) && nodes !== n) [this.n, this.numSrc] = [nodes, null];
    this.bind();
  }

  set(expression: string, n: number): void {
    if (n !== this.n) this.numSrc = null;
    [this.expression, this.n] = [expression, n];
    this.bind();
    keep({ graph: expression, n });
    for (const act of this.listeners) act();
  }

  onChange(act: () => void): void {
    this.listeners.push(act);
  }

  get isGiven(): boolean {
    return this.given.some(({ runs }) => runs === this.runs);
  }

  /** The last graph stays while the expression cannot be read. */
  private bind(): void {
    const given = this.given.find(({ expression, runs }) => expression === this.expression && runs.numDst === this.n);
    if (given) {
      [this.runs, this.numbers, this.problem] = [given.runs, [], ""];
      return;
    }
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
