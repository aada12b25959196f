// Tokens as running text. Those that the chosen one attends to are colored.

import type { TokensData } from "../data";
import { h } from "../dom";
import { palette } from "../draw/colors";
import { saveButtons } from "../save";
import { plural } from "../text";
import { linesView } from "./lines";
import { pick, type Choose, type State, type SubjectView } from "./state";
import type { Weighted, Weights } from "./weights";

const MOST_MARKED = 400; // tokens that are colored at a time
const MOST_COLORED = 54; // percent, at which the text on the color has a contrast of 4.5 in a light and a dark page
const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };

export class TokensView implements SubjectView {
  readonly element: HTMLElement;
  private readonly spans: Spans;
  private readonly text: HTMLElement;
  /** The two copies, made when they are first shown. */
  private between: ReturnType<typeof linesView> | null = null;

  constructor(
    private readonly data: TokensData,
    private readonly weights: Weights,
    state: State,
    choose: Choose,
  ) {
    const { tokens } = data;
    this.spans = new Spans(tokens);
    for (const node of data.marked) this.spans.elements[node].classList.add("marked");
    const label = `${plural(tokens.length, "token")}; arrow keys choose one`;
    this.text = h("div", {}, ...this.spans.elements);
    this.element = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": label }, this.text);
    pick(this.element, nodeAt, STEPS, tokens.length, state, choose);
    this.element.addEventListener("keydown", () => (this.element.querySelector(`[data-node="${state.node}"]`)!.scrollIntoView({ block: "nearest" })));
  }

  show(state: State, found: Weighted[]): void {
    if (!state.lines) {
      this.element.replaceChildren(this.text);
      this.spans.mark(state.node, found);
      return;
    }
    this.between ??= linesView(this.data);
    const { element, show } = this.between;
    if (!element.isConnected) this.element.replaceChildren(element, saveButtons("attention", () => element));
    show(state, found, this.weights, new Set(state.without ? this.data.special : []));
  }
}

/** Names of tokens: their text, with their place if the text has it more than once. */
export function nameOfToken({ tokens }: TokensData): (node: number) => string {
  const words = tokens.map((token) => token.trim() || "␣");
  const times = new Map<string, number>();
  for (const word of words) times.set(word, (times.get(word) ?? 0) + 1);
  return (node) => `“${words[node]}”${times.get(words[node]) === 1 ? "" : ` (${node + 1})`}`;
}

/** Words that are nodes. */
export class Spans {
  readonly elements: HTMLElement[];
  private marked: HTMLElement[] = [];

  constructor(words: string[]) {
    this.elements = words.map((word, k) => h("span", { "data-node": k }, word));
  }

  /** Frames a node and colors others. Nodes without a word are left out. */
  mark(node: number, found: Weighted[]): void {
    for (const span of this.marked) span.removeAttribute("style");
    const most = found[0]?.weight ?? 1;
    const series = palette().series;
    const shown = found.slice(0, MOST_MARKED).filter((one) => one.node < this.elements.length);
    for (const { node: other, weight } of shown) {
      const strength = Math.round(MOST_COLORED * Math.max(0.1, weight / most));
      this.elements[other].style.cssText = `background: color-mix(in srgb, ${series[0]} ${strength}%, transparent)`;
    }
    this.marked = shown.map(({ node: other }) => this.elements[other]);
    const own = this.elements[node];
    if (!own) return;
    own.style.boxShadow = `0 0 0 2px ${series[1]}`;
    this.marked.push(own);
  }
}

export function nodeAt(event: Event): number | null {
  const node = (event.target as HTMLElement).dataset.node;
  return node === undefined ? null : Number(node);
}
