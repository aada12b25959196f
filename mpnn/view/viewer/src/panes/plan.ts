// The Plan pane: what each backend would take, or why it does not run, and how time and memory grow with the nodes.

import type { Candidate, PlanData } from "../data";
import { h } from "../dom";
import { lineChart, type Series } from "../draw/chart";
import { bytes, seconds } from "../text";

export function planPane(plan: PlanData): HTMLElement {
  return h(
    "div",
    {},
    h("p", {}, `${plan.graph}. ${plan.work}.`),
    h("p", { class: "note" }, "Estimates for the machine that wrote this page; nothing was run."),
    table(plan),
    ...(plan.sizes.length > 1 ? [charts(plan)] : []),
  );
}

function table(plan: PlanData): HTMLElement {
  const row = (one: Candidate): HTMLElement =>
    h(
      "tr",
      { class: one.name === plan.backend ? "chosen" : "" },
      h("th", { scope: "row" }, one.name),
      h("td", {}, one.seconds === null ? "–" : seconds(one.seconds)),
      h("td", {}, one.bytes === null ? "–" : bytes(one.bytes)),
      h("td", { class: "why" }, one.reason ?? (one.name === plan.backend ? "chosen: the lowest estimate" : "would run, but is estimated slower")),
    );
  return h(
    "table",
    { class: "plan" },
    h("thead", {}, h("tr", {}, ...["Backend", "Time", "Memory", ""].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...plan.candidates.map(row)),
  );
}

function charts(plan: PlanData): HTMLElement {
  const names = plan.candidates.filter((one) => one.seconds !== null).map(({ name }) => name).sort();
  const of = (measure: "seconds" | "bytes"): Series[] =>
    names
      .map((name, k) => ({
        name,
        color: k,
        points: plan.sizes.flatMap(({ n, candidates }): [number, number][] => {
          const y = candidates.find((one) => one.name === name)?.[measure];
          return y ? [[n, y]] : [];
        }),
      }))
      .filter(({ points }) => points.length > 1);
  return h(
    "div",
    { class: "pair" },
    lineChart("Time of a forward pass", "nodes", of("seconds"), seconds),
    lineChart("Memory beyond inputs and output", "nodes", of("bytes"), bytes),
  );
}
