// Buttons that copy text, and that save a drawing as PNG or SVG.

import { h } from "./dom";

const SAID_MS = 1500;
const SCALE = 2; // pixels of a PNG for a unit of an SVG
const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "opacity", "font-family", "font-size", "font-weight", "text-anchor"];

type Drawing = HTMLCanvasElement | SVGElement | null;

/** A button that copies what `text` returns. */
export function copyButton(label: string, text: () => string): HTMLElement {
  const button = h("button", {
    type: "button",
    class: "small",
    click: async () => {
      await copy(text());
      button.textContent = "Copied";
      window.setTimeout(() => (button.textContent = label), SAID_MS);
    },
  }, label);
  return button;
}

async function copy(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", {}, text); // for pages that may not use the clipboard
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** Buttons that save what `drawing` returns at the time; `vector` gives the SVG of a canvas. */
export function saveButtons(name: string, drawing: () => Drawing, vector: () => SVGElement | null = () => null): HTMLElement {
  const button = (label: string, act: () => unknown): HTMLElement =>
    h("button", { type: "button", class: "small", "aria-label": `save as ${label}`, click: act }, label);
  const svgOf = (): SVGElement | null => {
    const shown = drawing();
    return shown instanceof SVGElement ? shown : vector();
  };
  const png = async (): Promise<void> => {
    const shown = drawing();
    const canvas = shown instanceof SVGElement ? await painted(standalone(shown)) : shown;
    canvas?.toBlob((blob) => blob && download(`${name}.png`, blob));
  };
  const svg = (): void => {
    const shown = svgOf();
    if (shown) download(`${name}.svg`, new Blob([standalone(shown).text], { type: "image/svg+xml" }));
  };
  return h("div", { class: "buttons" }, h("span", { class: "note" }, "Save"), button("PNG", png), button("SVG", svg));
}

interface Standalone {
  text: string;
  width: number;
  height: number;
}

/** An SVG that needs no style sheet, with the background of the page. */
function standalone(shown: SVGElement): Standalone {
  const copy = shown.cloneNode(true) as SVGElement;
  if (shown.isConnected) {
    const originals = [shown, ...shown.querySelectorAll<SVGElement>("*")];
    [copy, ...copy.querySelectorAll<SVGElement>("*")].forEach((element, k) => {
      const style = getComputedStyle(originals[k]);
      for (const name of STYLES) element.setAttribute(name, style.getPropertyValue(name));
    });
  }
  const [x, y, width, height] = shown.getAttribute("viewBox")!.split(" ").map(Number);
  const background = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ x, y, width, height, fill: getComputedStyle(document.body).backgroundColor })) {
    background.setAttribute(name, String(value));
  }
  copy.prepend(background);
  copy.setAttribute("width", String(width));
  copy.setAttribute("height", String(height));
  return { text: new XMLSerializer().serializeToString(copy), width, height };
}

async function painted({ text, width, height }: Standalone): Promise<HTMLCanvasElement> {
  const image = h("img", { src: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}` });
  await image.decode();
  const canvas = h("canvas", { width: SCALE * width, height: SCALE * height });
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas;
}

function download(name: string, blob: Blob): void {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  window.setTimeout(() => URL.revokeObjectURL(link.href), SAID_MS);
}
