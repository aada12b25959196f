import type { AttentionData } from "../data";
import { h } from "../dom";

export function attentionPane(attention: AttentionData): HTMLElement {
  return h("p", {}, String(attention.layers));
}
