// Numbers as people read them.

export function count(x: number): string {
  return x.toLocaleString("en");
}

export function plural(x: number, noun: string): string {
  return `${count(x)} ${noun}${x === 1 ? "" : "s"}`;
}

export function percent(share: number): string {
  if (share === 0 || share >= 1e-4) return `${(100 * share).toFixed(share < 0.1 ? 2 : 1)} %`;
  return `${(100 * share).toPrecision(1)} %`;
}

/** The number in the first unit in which it is below 1,000. */
export function scaled(x: number, units: string[]): string {
  let k = 0;
  for (; k < units.length - 1 && x >= 999.5; k++) x /= 1000;
  return `${x < 10 ? Number(x.toPrecision(2)) : Math.round(x)} ${units[k]}`.trim();
}

export function seconds(x: number): string {
  return x < 1 ? scaled(x * 1e6, ["µs", "ms", "s"]) : x < 120 ? `${Number(x.toPrecision(3))} s` : `${(x / 60).toFixed(1)} min`;
}

export function bytes(x: number): string {
  return scaled(x, ["B", "kB", "MB", "GB", "TB", "PB"]);
}
