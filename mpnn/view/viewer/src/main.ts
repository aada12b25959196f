// The page that `mpnn view` writes: tabs, one for each pane that the page has data for.

import { attentionPane } from "./panes/attention";
import { graphPane } from "./panes/graph";
import { GraphModel, type Given } from "./panes/model";
import { planPane } from "./panes/plan";
import { reachPane } from "./panes/reach";
import { addressed, keep, useAddress } from "./address";
import { integersOf } from "./binary";
import type { GraphData, PageData } from "./data";
import { h, newId } from "./dom";
import style from "./style.css";

export { parse } from "./graph/expression";
export { diameters, levels } from "./graph/reach";
export { coverage } from "./draw/coverage";

type Pane = [name: string, make: () => HTMLElement];

/** Fills an element with the viewer. */
export function show(root: HTMLElement, data: PageData): void {
  const panes: Pane[] = [];
  const { attention, graph, plan } = data;
  if (attention) panes.push(["Attention", () => attentionPane(attention)]);
  if (graph) {
    const examples = data.examples ?? [];
    const model = new GraphModel(graph.expression, graph.n, graph.num_src, [graph, ...examples].flatMap(given));
    panes.push(["Graph", () => graphPane(model, examples)], ["Reach", () => reachPane(model)]);
  }
  if (plan) panes.push(["Plan", () => planPane(plan)]);
  root.classList.add("mpnn-viewer");
  const shown = panes.length > 1 ? tabs(panes) : panes.map(([, make]) => make());
  root.replaceChildren(h("style", {}, style), ...(data.title ? [header(data)] : []), ...shown);
}

function header(data: PageData): HTMLElement {
  return h("header", {}, h("h1", {}, data.title), h("p", { class: "note" }, data.subtitle));
}

/** A list of tabs and their panels, after the pattern of the ARIA Authoring Practices. A pane is made when it is shown. */
function tabs(panes: Pane[]): HTMLElement[] {
  const buttons = panes.map(([name]) => h("button", { type: "button", role: "tab", id: newId() }, name));
  const panels = panes.map((_, k) => {
    const panel = h("section", { role: "tabpanel", id: newId(), "aria-labelledby": buttons[k].id });
    buttons[k].setAttribute("aria-controls", panel.id);
    return panel;
  });
  const choose = (chosen: number): void => {
    buttons.forEach((button, k) => {
      button.setAttribute("aria-selected", String(k === chosen));
      button.tabIndex = k === chosen ? 0 : -1;
      panels[k].hidden = k !== chosen;
    });
    keep({ pane: chosen ? panes[chosen][0] : null });
    if (!panels[chosen].hasChildNodes()) panels[chosen].append(panes[chosen][1]());
  };
  buttons.forEach((button, k) => button.addEventListener("click", () => choose(k)));
  const list = h("div", { role: "tablist", "aria-label": "views" }, ...buttons);
  list.addEventListener("keydown", (event) => {
    const at = buttons.indexOf(event.target as HTMLButtonElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = (to + panes.length) % panes.length;
    choose(next);
    buttons[next].focus();
  });
  choose(Math.max(panes.findIndex(([name]) => name === addressed("pane")), 0));
  return [list, ...panels];
}

/** The graph, if Python wrote its runs. */
function given({ expression, n, num_src, runs }: GraphData): Given[] {
  if (!runs) return [];
  const [ptr, start, stop] = [runs.ptr, runs.start, runs.stop].map((text) => new Int32Array(integersOf(text, 4).buffer));
  return [{ expression, runs: { numDst: n, numSrc: num_src ?? n, ptr, start, stop } }];
}

// Each element that Python wrote is followed by its data.
const all = globalThis.document?.querySelectorAll("script.mpnn-data") ?? [];
if (all.length === 1 && location.protocol !== "about:") useAddress();
for (const written of all) {
  show(written.previousElementSibling as HTMLElement, JSON.parse(written.textContent!) as PageData);
}
