// Elements in one expression: h("p", { class: "note" }, "text", other).

type Attributes = Record<string, string | number | boolean | null | EventListener | ((event: any) => void)>;
type Child = Node | string;

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  assign(element, attributes);
  element.append(...children);
  return element;
}

export function svg(tag: string, attributes: Attributes = {}, ...children: Child[]): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  assign(element, attributes);
  element.append(...children);
  return element;
}

/** Functions become listeners, `true` an empty attribute; `false` and `null` are left out. */
function assign(element: Element, attributes: Attributes): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value as EventListener);
    else if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : String(value));
  }
}

/** Calls `act` once before the next frame, however often it is asked to. */
export function oncePerFrame(act: () => void): () => void {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      act();
    });
  };
}

let ids = 0;

/** An id that no other element has. */
export function newId(): string {
  return `mpnn-${++ids}`;
}
