// What the page shows, kept after "#" in its address, so that a link or a reload opens the same. A document with several
// viewers, or one inside a notebook, keeps nothing.

const SETTLED_MS = 200; // browsers refuse frequent changes

let kept: URLSearchParams | null = null;
let waiting = 0;

/** Reads the address, and keeps what follows in it. */
export function useAddress(): void {
  kept = new URLSearchParams(location.hash.slice(1));
  addEventListener("hashchange", () => location.reload()); // somebody wrote another address
}

export function addressed(name: string): string | null {
  return kept?.get(name) ?? null;
}

/** An integer of the address from 0 to `count` - 1, or the fallback. */
export function addressedNumber(name: string, count: number, fallback: number): number {
  const text = addressed(name);
  return text !== null && /^\d+$/.test(text) && Number(text) < count ? Number(text) : fallback;
}

/** Null removes a name. */
export function keep(values: Record<string, string | number | null>): void {
  if (!kept) return;
  for (const [name, value] of Object.entries(values)) {
    if (value === null) kept.delete(name);
    else kept.set(name, String(value));
  }
  clearTimeout(waiting);
  waiting = window.setTimeout(() => history.replaceState(null, "", `#${kept}`), SETTLED_MS);
}
