// The expression and size that the Graph and Reach panes share, and the graph that they make.

import { addressed, keep } from "../address";
import { parse, type Literal, type Topology } from "../graph/expression";
import { SizeError, type Runs } from "../graph/runs";

export const MOST_NODES = 100_000; // that sliders and expressions choose

export class GraphModel {
  runs: Runs | null = null;
  numbers: Literal[] = [];
  problem = "";
  private readonly listeners: (() => void)[] = [];
  /** The graph that Python bound, of an expression with builders that only Python knows. */
  private readonly given: { expression: string; runs: Runs } | null = null;

  constructor(
    public expression: string,
    public n: number,
    public numSrc: number | null,
    given: Runs | null,
  ) {
    if (given) this.given = { expression, runs: given };
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
    return this.given !== null && this.runs === this.given.runs;
  }

  /** The last graph stays while the expression cannot be read. */
  private bind(): void {
    const { given } = this;
    if (given && given.expression === this.expression && given.runs.numDst === this.n) {
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
