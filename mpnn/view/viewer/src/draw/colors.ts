// Colors of edges and weights, for light and dark pages: those of mpnn/view/plot.py, darker on a light page where text
// would have a contrast below 4.5, or dots below 3 (WCAG 2.2, AA).

const dark = (): MediaQueryList => matchMedia("(prefers-color-scheme: dark)");

interface Palette {
  empty: string;
  /** From weak to strong. */
  scale: string[];
  line: string;
  ink: string;
  /** Categories, after Okabe & Ito 2008. */
  series: string[];
  /** Classes of nodes, of which there may be more: Tol 2021, the muted and the light scheme. */
  classes: string[];
}

const LIGHT: Palette = {
  empty: "#f2f4f7",
  scale: ["#d3e4f3", "#84b9dc", "#3487c0", "#12588f", "#062a52"],
  line: "#ffffff",
  ink: "#1f2933",
  series: ["#0072b2", "#b34f00", "#007a59", "#a5507d", "#8a5e00", "#20739f"],
  classes: ["#332288", "#2e8fc7", "#2f8f80", "#117733", "#85852a", "#a08a1e", "#c0566a", "#882255", "#aa4499", "#777777"],
};
const DARK: Palette = {
  empty: "#1c2229",
  scale: ["#17324a", "#1f5685", "#3487c0", "#84b9dc", "#d3e4f3"],
  line: "#14181d",
  ink: "#e4e8ee",
  series: ["#56b4e9", "#e69f00", "#2bbf95", "#cc79a7", "#d55e00", "#f0e442"],
  classes: ["#77aadd", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00", "#eedd88", "#ee8866", "#ffaabb", "#cc79a7", "#dddddd"],
};

export function palette(): Palette {
  return dark().matches ? DARK : LIGHT;
}

/** Calls `redraw` when the page becomes light or dark. */
export function onSchemeChange(redraw: () => void): void {
  dark().addEventListener("change", redraw);
}

const ramps = new Map<Palette, Uint32Array>();

/** 256 colors as bytes of an image, from nothing to 1. Any share above 0 can be told from nothing. */
export function ramp(): Uint32Array {
  const now = palette();
  if (!ramps.has(now)) ramps.set(now, blend(now));
  return ramps.get(now)!;
}

function blend({ empty, scale }: Palette): Uint32Array {
  const stops = scale.map(channels);
  const colors = new Uint32Array(256);
  for (let k = 0; k < 256; k++) {
    const at = (k / 255) * (stops.length - 2); // the last stop is for marks
    const [low, part] = [Math.min(Math.floor(at), stops.length - 3), at - Math.min(Math.floor(at), stops.length - 3)];
    colors[k] = packed(stops[low].map((x, c) => x + part * (stops[low + 1][c] - x)));
  }
  colors[0] = packed(channels(empty));
  return colors;
}

function channels(code: string): number[] {
  return [1, 3, 5].map((k) => parseInt(code.slice(k, k + 2), 16));
}

function packed([red, green, blue]: number[]): number {
  return ((255 << 24) | (Math.round(blue) << 16) | (Math.round(green) << 8) | Math.round(red)) >>> 0;
}

/** Draws shares of 0 to 1 on the canvas, one each pixel. The square root keeps sparse parts visible. */
export function paint(context: CanvasRenderingContext2D, shares: Float32Array, width: number, height: number): void {
  const image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const colors = ramp();
  for (let k = 0; k < shares.length; k++) {
    pixels[k] = colors[shares[k] > 0 ? Math.max(1, Math.round(255 * Math.sqrt(Math.min(shares[k], 1)))) : 0];
  }
  context.putImageData(image, 0, 0);
}
