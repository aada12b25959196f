import type { PlanData } from "../data";
import { h } from "../dom";

export function planPane(plan: PlanData): HTMLElement {
  return h("p", {}, plan.graph);
}
