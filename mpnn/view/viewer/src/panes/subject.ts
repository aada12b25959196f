// What the Attention pane has to know of its subject: how nodes are named, drawn and chosen. A new kind of subject is a
// case here, a type in data.ts, and a view.

import type { AttentionData } from "../data";
import type { Controls } from "./attention";
import { MOST_LINED } from "./lines";
import { NodesView, nameOfNode, nodeControls } from "./nodes";
import type { Picture } from "./heads";
import { PatchesView, mapOf, nameOfPatch } from "./patches";
import type { Choose, State, SubjectView } from "./state";
import { TokensView, nameOfToken } from "./tokens";
import type { Head, Weights } from "./weights";

const SQUARES = "Each small square is one head, a row of them one layer";

export interface Description {
  /** The number of nodes. */
  size: number;
  noun: string;
  instruction: string;
  /** What the small squares show: by default the matrices of the heads. */
  legend: string;
  thumbnail: ((weights: Weights, chosen: Head, state: State) => Picture) | null;
  /** Whether a click holds a node against pointing at others. */
  holds: boolean;
  /** Nodes that stand for no part of the text or image, such as [CLS]. */
  special: number[];
  /** Whether it can be shown as two copies with lines between them. */
  hasLines: boolean;
  name(node: number): string;
  /** The name without its place. */
  plainName(node: number): string;
  view(weights: Weights, state: State, choose: Choose): SubjectView;
  controls(state: State, choose: Choose): Controls | null;
}

export function describe({ subject, start, heads: { length: layers } }: AttentionData): Description {
  switch (subject.kind) {
    case "tokens":
      return {
        size: subject.tokens.length,
        noun: "token",
        instruction: "Point at a token to see what it attends to: the stronger the color, the more. Click to hold it.",
        legend: `${SQUARES}: rows are tokens, columns what they attend to.`,
        thumbnail: null,
        holds: true,
        special: subject.special,
        hasLines: subject.tokens.length <= MOST_LINED,
        name: nameOfToken(subject),
        plainName: (node) => subject.tokens[node].trim(),
        view: (weights, state, choose) => new TokensView(subject, weights, state, choose),
        controls: () => null,
      };
    case "patches":
      return {
        size: subject.extra.length + subject.rows * subject.columns,
        noun: "patch",
        instruction: "Point at a patch to see what it attends to: the stronger the color, the more. Click to hold it.",
        legend: `${SQUARES}, and has the patches in their places. The matrix beside them is that of the chosen head: rows are patches, columns what they attend to.`,
        thumbnail: (weights, chosen, { direction, node }) => mapOf(subject, weights.between(direction, node, chosen)),
        holds: true,
        special: subject.extra.map((_, k) => k),
        hasLines: false,
        name: (node) => nameOfPatch(subject, node),
        plainName: (node) => nameOfPatch(subject, node),
        view: (_, state, choose) => new PatchesView(subject, state, choose),
        controls: () => null,
      };
    case "nodes":
      return {
        size: subject.numbers.length,
        noun: "node",
        instruction:
          "In the middle is the chosen node, around it the nodes that it attends to, and around them those that these attend to. " +
          "Point at a node for what it attends to: the wider the line, the more. Click to put it in the middle. " +
          "A node has the color of its class, and a frame in that of the predicted class if this is another.",
        legend: `${SQUARES}: rows are nodes in the order of their classes, columns what they attend to.`,
        thumbnail: null,
        holds: false,
        special: [],
        hasLines: false,
        name: (node) => nameOfNode(subject, node),
        plainName: (node) => nameOfNode(subject, node),
        view: (weights, _, choose) => new NodesView(subject, weights, layers, start, choose),
        controls: (state, choose) => nodeControls(subject, start, state, choose),
      };
  }
}
