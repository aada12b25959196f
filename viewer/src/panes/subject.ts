// What the Attention pane has to know of its subject: how nodes are named, drawn and chosen. A new kind of subject is a
// case here, a type in data.ts, and a view.

import type { AttentionData } from "../data";
import type { Controls } from "./attention";
import { NodesView, nameOfNode, nodeControls } from "./nodes";
import { PatchesView, nameOfPatch } from "./patches";
import type { Choose, State, SubjectView } from "./state";
import { TokensView, nameOfToken } from "./tokens";
import type { Weights } from "./weights";

export interface Description {
  /** The number of nodes. */
  size: number;
  noun: string;
  nouns: string;
  instruction: string;
  /** Whether a click holds a node against pointing at others. */
  holds: boolean;
  name(node: number): string;
  view(weights: Weights, state: State, choose: Choose): SubjectView;
  controls(state: State, choose: Choose): Controls | null;
}

export function describe({ subject, start, heads: { length: layers } }: AttentionData): Description {
  switch (subject.kind) {
    case "tokens":
      return {
        size: subject.tokens.length,
        noun: "token",
        nouns: "tokens",
        instruction: "Point at a token to see what it attends to: the stronger the colour, the more. Click to hold it.",
        holds: true,
        name: nameOfToken(subject),
        view: (_, state, choose) => new TokensView(subject, state, choose),
        controls: () => null,
      };
    case "patches":
      return {
        size: subject.extra.length + subject.rows * subject.columns,
        noun: "patch",
        nouns: "patches",
        instruction: "Point at a patch to see what it attends to: the stronger the colour, the more. Click to hold it.",
        holds: true,
        name: (node) => nameOfPatch(subject, node),
        view: (_, state, choose) => new PatchesView(subject, state, choose),
        controls: () => null,
      };
    case "nodes":
      return {
        size: subject.numbers.length,
        noun: "node",
        nouns: "nodes in the order of their classes",
        instruction:
          "In the middle is the chosen node, around it the nodes that it attends to, and around them those that these attend to. " +
          "Point at a node for what it attends to: the wider the line, the more. Click to put it in the middle.",
        holds: false,
        name: (node) => nameOfNode(subject, node),
        view: (weights, _, choose) => new NodesView(subject, weights, layers, start, choose),
        controls: (state, choose) => nodeControls(subject, start, state, choose),
      };
  }
}
