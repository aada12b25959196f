// Two copies of a text, token by token, with lines from each token on the left to those that it attends to on the right.

import type { TokensData } from "../data";
import { svg } from "../dom";
import { palette } from "../draw/colors";
import type { State } from "./state";
import type { Weighted, Weights } from "./weights";

export const MOST_LINED = 200; // tokens
const STRONGEST = 4; // lines of each other token
const [HIGH, WIDE, LEFT, RIGHT] = [22, 480, 170, 310];
const LETTERS = 20; // of a token

/** The drawing, whose `[data-node]` are the tokens. */
export function linesView({ tokens }: TokensData): { element: SVGElement; show: (state: State, found: Weighted[], weights: Weights, hidden: Set<number>) => void } {
  const middle = (k: number): number => HIGH * (k + 0.5);
  const text = (token: string): string => (token.trim().length > LETTERS ? `${token.trim().slice(0, LETTERS)}…` : token.trim() || "␣");
  const side = (right: boolean): SVGElement[] =>
    tokens.map((token, k) =>
      svg(
        "g",
        { "data-node": k },
        svg("rect", { "data-node": k, x: right ? RIGHT + 6 : 0, y: HIGH * k, width: LEFT - 6, height: HIGH, rx: 4 }),
        svg("text", { "data-node": k, x: right ? RIGHT + 12 : LEFT - 12, y: middle(k) + 4.5, "text-anchor": right ? "start" : "end" }, text(token)),
      ),
    );
  const lines = svg("g", { class: "lines" });
  const [from, to] = [side(false), side(true)];
  const element = svg(
    "svg",
    { class: "drawing between", viewBox: `0 0 ${WIDE} ${HIGH * tokens.length}`, role: "img" },
    lines,
    ...from,
    ...to,
  );
  const line = (dst: number, src: number, color: string, opacity: number, width: number): SVGElement => {
    const bend = (LEFT + RIGHT) / 2;
    const d = `M${LEFT} ${middle(dst)}C${bend} ${middle(dst)} ${bend} ${middle(src)} ${RIGHT} ${middle(src)}`;
    return svg("path", { d, fill: "none", stroke: color, "stroke-opacity": opacity.toFixed(2), "stroke-width": width.toFixed(1) });
  };
  const show = ({ node, chosen, direction }: State, found: Weighted[], weights: Weights, hidden: Set<number>): void => {
    const { series, ink } = palette();
    const attends = direction === "attendsTo";
    const own = found.map((one) => {
      const [dst, src] = attends ? [node, one.node] : [one.node, node];
      return line(dst, src, series[0], Math.max(0.12, one.weight / found[0].weight), 1 + 3 * (one.weight / found[0].weight));
    });
    const others = tokens.flatMap((_, dst) => {
      if (hidden.has(dst)) return [];
      const kept = weights.attendsTo(dst, chosen).filter((one) => !hidden.has(one.node) && (attends ? dst : one.node) !== node);
      return kept.slice(0, STRONGEST).map((one) => line(dst, one.node, ink, 0.4 * one.weight, 1));
    });
    lines.replaceChildren(...others, ...own);
    const most = found[0]?.weight ?? 1;
    const strength = new Map(found.map((one) => [one.node, one.weight / most]));
    const color = (group: SVGElement, share: number | undefined, framed: boolean): void => {
      const box = group.firstElementChild as SVGElement;
      box.setAttribute("fill", series[0]);
      box.setAttribute("fill-opacity", String(share === undefined ? 0 : Math.max(0.08, 0.54 * share)));
      box.setAttribute("stroke", framed ? series[1] : "none");
    };
    from.forEach((group, k) => color(group, attends ? undefined : strength.get(k), attends && k === node));
    to.forEach((group, k) => color(group, attends ? strength.get(k) : undefined, !attends && k === node));
    element.setAttribute("aria-label", `lines from ${tokens.length} tokens on the left to those that they attend to on the right`);
  };
  return { element, show };
}
