// Topologies as text, "causal & window(16)", with Python's precedence: `~` before `-` before `&` before `|`.
// Every integer keeps its place in the text, so that a slider can change it.

import { BUILDERS, POSITIONAL, RANDOM, type Value } from "./builders";
import { complement, difference, intersection, rowsOf, union, type Runs } from "./runs";

export interface Topology {
  bind(numDst: number, numSrc?: number): Runs;
  /** The integers of the text, from left to right. */
  numbers: Literal[];
}

export interface Literal {
  /** Such as "radius of window". */
  name: string;
  value: number;
  /** Where it is in the text: text.slice(from, to). */
  from: number;
  to: number;
}

/** A topology: its rule, the number of its memory nodes, and whether it compares positions (see POSITIONAL). */
interface Part {
  rule: (numDst: number, numSrc: number) => Runs;
  memory: number;
  positional: boolean;
}
type Token = { text: string; at: number };

const OPERATORS: Record<string, (a: Runs, b: Runs) => Runs> = { "|": union, "&": intersection, "-": difference };
const LEVELS = ["|", "&", "-"]; // the loosest first

/** The topology that the text describes. Throws an Error whose message names the column if there is none. */
export function parse(text: string): Topology {
  const parser = new Parser(text);
  const { rule, memory, positional } = parser.whole();
  const bind = (numDst: number, numSrc: number = numDst + memory): Runs => {
    if (positional && !memory && 0 < numDst && numDst < numSrc) {
      throw new Error(`${text} compares positions: it needs as many destinations as the ${numSrc} sources`);
    }
    return rule(numDst, numSrc);
  };
  return { bind, numbers: parser.numbers };
}

/** The text with another number in place of the literal. */
export function replaced(text: string, literal: Literal, value: number): string {
  return text.slice(0, literal.from) + value + text.slice(literal.to);
}

/** Joins the graphs of topologies. With memory nodes, the destinations are the last of all nodes: a topology without
 * memory is bound to all of them, and its last rows are taken. */
function combined(parts: Part[], join: (...graphs: Runs[]) => Runs): Part {
  const memory = Math.max(...parts.map((part) => part.memory));
  const bind = (part: Part, numDst: number, numSrc: number): Runs => {
    if (!memory || part.memory || !part.positional) return part.rule(numDst, numSrc);
    return rowsOf(part.rule(memory + numDst, memory + numDst), memory, memory + numDst);
  };
  const rule = (numDst: number, numSrc: number): Runs => join(...parts.map((part) => bind(part, numDst, numSrc)));
  return { rule, memory, positional: parts.some((part) => part.positional) };
}

/** " (did you mean window?)" if a known name is close, or "". */
function didYouMean(name: string, known: string[]): string {
  const [nearest] = known.map((one) => ({ one, far: distance(name, one) })).sort((a, b) => a.far - b.far);
  return nearest && nearest.far <= Math.max(1, name.length / 3) ? ` (did you mean ${nearest.one}?)` : "";
}

/** The number of letters to insert, delete or replace (Levenshtein). */
function distance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, k) => k);
  for (let i = 1; i <= a.length; i++) {
    const above = row;
    row = [i];
    for (let j = 1; j <= b.length; j++) {
      row.push(Math.min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] === b[j - 1] ? 0 : 1)));
    }
  }
  return row[b.length];
}

/** The code that makes the graph in Python. */
export function asPython(text: string, n: number, numSrc: number | null): string {
  const known = text.replace(/(?:(?:mpnn\.)?graphs\.)?\b([A-Za-z_]\w*)\b(?!\s*=)(\s*\()?/g, (_, name, open) => `graphs.${name}${open ? "(" : "()"}`);
  return `from mpnn import graphs\n\ntopology = ${known}\ngraph = topology.bind(${numSrc === null ? n : `${n}, ${numSrc}`})\n`;
}

class Parser {
  readonly numbers: Literal[] = [];
  private readonly tokens: Token[];
  private next = 0;

  constructor(private readonly text: string) {
    this.tokens = [...text.matchAll(/[A-Za-z_]\w*|\d[\d_]*|\S/g)].map((m) => ({ text: m[0], at: m.index }));
  }

  whole(): Part {
    const part = this.joined(0);
    const words: Record<string, string> = { and: "&", or: "|" };
    const instead = words[this.peek()];
    if (instead) throw this.error(`write ${instead} for ${this.peek()}`);
    if (this.peek()) throw this.error("expected | & - or the end");
    return part;
  }

  private joined(level: number): Part {
    if (level === LEVELS.length) return this.operand();
    let left = this.joined(level + 1);
    while (this.taken(LEVELS[level])) {
      left = combined([left, this.joined(level + 1)], OPERATORS[LEVELS[level]]);
    }
    return left;
  }

  private operand(): Part {
    if (this.taken("~")) return combined([this.operand()], complement);
    if (this.taken("(")) {
      const inner = this.joined(0);
      this.expect(")");
      return inner;
    }
    return this.builder();
  }

  /** A builder, written `causal`, `graphs.causal` or `mpnn.graphs.causal`. */
  private builder(): Part {
    const ahead = (text: string): boolean => text.split(" ").every((word, k) => this.tokens[this.next + k]?.text === word);
    this.next += ahead("mpnn . graphs .") ? 4 : ahead("graphs .") ? 2 : 0;
    const name = this.peek();
    if (!/^[A-Za-z_]/.test(name)) throw this.error("expected a topology such as window(256)");
    if (RANDOM.has(name)) throw this.error(`Python draws the edges of ${name}: mpnn view "${this.text}" --n N writes a page with them`);
    if (!Object.hasOwn(BUILDERS, name)) {
      const known = [...Object.keys(BUILDERS), ...RANDOM].sort();
      throw this.error(`there is no topology ${name}${didYouMean(name, known)}; there are ${known.join(", ")}`);
    }
    this.next++;
    const { parameters, rule } = BUILDERS[name];
    const args: Record<string, Value> = this.taken("(") ? this.arguments(name, Object.keys(parameters)) : {};
    for (const [parameter, fallback] of Object.entries(parameters)) {
      if (parameter in args) continue;
      if (fallback === null) throw this.error(`${name} needs ${parameter}: ${name}(${Object.keys(parameters).join(", ")})`);
      args[parameter] = fallback;
    }
    return {
      rule: (numDst, numSrc) => rule(numDst, numSrc, args),
      memory: name === "memory" && typeof args.length === "number" ? args.length : 0,
      positional: POSITIONAL.has(name),
    };
  }

  private arguments(builder: string, parameters: string[]): Record<string, Value> {
    const args: Record<string, Value> = {};
    let named = false;
    for (let k = 0; !this.taken(")"); k++) {
      if (k > 0) this.expect(",");
      if (k > 0 && this.taken(")")) break;
      let parameter = parameters[k];
      if (/^[A-Za-z_]/.test(this.peek())) {
        parameter = this.tokens[this.next++].text;
        this.expect("=");
        named = true;
      } else if (named) {
        throw this.error("arguments without a name come before those with one");
      }
      if (!parameters.includes(parameter)) {
        const takes = parameters.length ? `only ${parameters.join(", ")}` : "no arguments";
        throw this.error(`${builder} takes ${takes}${parameter ? didYouMean(parameter, parameters) : ""}`);
      }
      if (parameter in args) throw this.error(`${parameter} is given twice`);
      args[parameter] = this.value(`${parameter} of ${builder}`);
    }
    return args;
  }

  private value(name: string): Value {
    const close = this.taken("[") ? "]" : this.taken("(") ? ")" : null;
    if (close === null) return this.integer(name);
    const list: number[] = [];
    while (!this.taken(close)) {
      if (list.length) this.expect(",");
      if (list.length && this.taken(close)) break;
      list.push(this.integer(`${name}, ${list.length + 1}`));
    }
    return list;
  }

  private integer(name: string): number {
    const from = this.tokens[this.next]?.at ?? this.text.length;
    const sign = this.taken("-") ? -1 : 1;
    const digits = this.peek();
    if (!/^\d/.test(digits)) throw this.error("arguments are integers or lists of integers");
    const to = this.tokens[this.next++].at + digits.length;
    const value = sign * Number(digits.replaceAll("_", ""));
    if (!Number.isSafeInteger(value)) throw this.error(`${digits} is too large`);
    this.numbers.push({ name: name.replace("count_or_indices", "count").replaceAll("_", " "), value, from, to });
    return value;
  }

  private peek(): string {
    return this.tokens[this.next]?.text ?? "";
  }

  private taken(text: string): boolean {
    if (this.peek() !== text) return false;
    this.next++;
    return true;
  }

  private expect(text: string): void {
    if (!this.taken(text)) throw this.error(`expected ${text}`);
  }

  private error(why: string): Error {
    const at = this.tokens[this.next]?.at ?? this.text.length;
    return new Error(`column ${at + 1}: ${why}`);
  }
}
