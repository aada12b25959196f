// What is chosen in the Attention pane. All of its columns show the same choice.

import type { Direction, Head, Weighted } from "./weights";

export interface State {
  node: number;
  /** The node that was clicked; pointing at others does not change the choice of a held token or patch. */
  held: number | null;
  chosen: Head;
  direction: Direction;
  /** Whether tokens without text, such as [CLS], are left out. */
  without: boolean;
  /** Whether tokens are two copies with lines between them. */
  lines: boolean;
}

export type Choose = (change: Partial<State>) => void;

/** The drawing of a subject in one column. */
export interface SubjectView {
  element: HTMLElement;
  /** Marks the chosen node and those that it attends to, or that attend to it, the strongest first. */
  show(state: State, found: Weighted[]): void;
}

export function clamp(k: number, count: number): number {
  return Math.min(Math.max(k, 0), count - 1);
}

/** Pointing at a node chooses it, a click, Enter or Space holds it or lets it go, and other keys move by `steps` nodes. */
export function pick(
  element: HTMLElement,
  nodeAt: (event: MouseEvent) => number | null,
  steps: Record<string, number>,
  count: number,
  state: State,
  choose: Choose,
): void {
  const point = (event: PointerEvent): void => {
    const node = nodeAt(event);
    if (node !== null && node !== state.node && state.held === null && event.pointerType !== "touch") choose({ node });
  };
  element.addEventListener("pointerover", point);
  element.addEventListener("pointermove", point);
  element.addEventListener("click", (event) => {
    const node = nodeAt(event);
    if (node !== null) choose({ node, held: state.held === node ? null : node });
  });
  element.addEventListener("keydown", (event) => {
    const step = steps[event.key];
    const holds = event.target === element && (event.key === "Enter" || event.key === " ");
    if (!step && !holds) return;
    event.preventDefault();
    if (holds) return choose({ held: state.held === null ? state.node : null });
    const node = clamp(state.node + step, count);
    choose({ node, held: node });
  });
}
