// numpy's default_rng, bit by bit, so that `random`, `expander` and `bigbird` have the same edges here as in Python:
// SeedSequence (numpy/random/bit_generator.pyx) and PCG64 (O'Neill 2014), with Lemire's bounded integers (2019).

const MOST_DRAWN = 1 << 20; // numbers, about a second
const TOO_MANY = "so many random edges take too long in a browser; use fewer nodes, or a smaller degree";

// Integers of 128 bits are eight limbs of 16 bits, the lowest first: several times as fast as BigInt.
const LIMBS = 8;
const BASE = 1 << 16;
const MULTIPLIER = limbs(0x2360ed051fc65da44385df649fccf645n);

function limbs(x: bigint): number[] {
  return Array.from({ length: LIMBS }, (_, k) => Number((x >> BigInt(16 * k)) & 0xffffn));
}

export class Generator {
  private readonly state: number[];
  private readonly increment: number[];
  private high = 0; // of the 64 bits drawn last
  private low = 0;
  private hasHigh = false; // whether `next32` returns `high` next

  /** As `np.random.default_rng(entropy)`. */
  constructor(entropy: number[]) {
    const [a, b, c, d] = seedWords(entropy);
    const increment = BigInt.asUintN(128, (((c << 64n) | d) << 1n) | 1n);
    this.increment = limbs(increment);
    this.state = limbs(BigInt.asUintN(128, increment + ((a << 64n) | b))); // a step from 0, and the seed
    this.step();
  }

  /** Uniform in [0, 1). */
  double(): number {
    this.next64();
    return (this.high * 2 ** 21 + (this.low >>> 11)) / 2 ** 53;
  }

  /** Uniform in 0, ..., bound - 1. */
  below(bound: number): number {
    if (bound <= 1) return 0;
    const threshold = (2 ** 32 - bound) % bound;
    for (;;) {
      const drawn = this.next32();
      const lower = (drawn & 0xffff) * bound; // drawn * bound in two parts, each exact
      const upper = (drawn >>> 16) * bound + Math.floor(lower / BASE);
      const remainder = (upper % BASE) * BASE + (lower % BASE);
      if (remainder >= bound || remainder >= threshold) return Math.floor(upper / BASE);
    }
  }

  /** 0, ..., size - 1 in random order. numpy draws its numbers by their lowest bits here, and rejects too large ones. */
  permutation(size: number): number[] {
    if (size > MOST_DRAWN) throw new Error(TOO_MANY);
    const order = Array.from({ length: size }, (_, k) => k);
    for (let i = size - 1; i > 0; i--) {
      const mask = 2 ** (32 - Math.clz32(i)) - 1;
      let j = this.next32() & mask;
      while (j > i) j = this.next32() & mask;
      [order[i], order[j]] = [order[j], order[i]];
    }
    return order;
  }

  /** state = state * MULTIPLIER + increment, modulo 2^128. */
  private step(): void {
    const { state, increment } = this;
    let carry = 0;
    const next = new Array<number>(LIMBS);
    for (let k = 0; k < LIMBS; k++) {
      let sum = carry + increment[k];
      for (let i = 0; i <= k; i++) sum += state[i] * MULTIPLIER[k - i];
      next[k] = sum % BASE;
      carry = Math.floor(sum / BASE);
    }
    for (let k = 0; k < LIMBS; k++) state[k] = next[k];
  }

  /** Draws 64 bits: the two halves of the state, combined and rotated by its highest six bits. */
  private next64(): void {
    this.step();
    const { state } = this;
    let low = ((state[1] ^ state[5]) << 16) | (state[0] ^ state[4]);
    let high = ((state[3] ^ state[7]) << 16) | (state[2] ^ state[6]);
    const turn = state[7] >>> 10;
    if (turn >= 32) [low, high] = [high, low];
    const rest = turn % 32;
    if (rest) [low, high] = [(low >>> rest) | (high << (32 - rest)), (high >>> rest) | (low << (32 - rest))];
    this.low = low >>> 0;
    this.high = high >>> 0;
  }

  private next32(): number {
    if (!this.hasHigh) this.next64();
    this.hasHigh = !this.hasHigh;
    return this.hasHigh ? this.low : this.high;
  }
}

/** SeedSequence(entropy).generate_state(4, uint64). */
function seedWords(entropy: number[]): bigint[] {
  const words = entropy.flatMap((x) => (x < 2 ** 32 ? [x] : [x % 2 ** 32, Math.floor(x / 2 ** 32)]));
  const pool: number[] = [];
  let constant = 0x43b0d7e5;
  const hashed = (value: number): number => {
    value ^= constant;
    constant = Math.imul(constant, 0x931e8875);
    value = Math.imul(value, constant);
    return (value ^ (value >>> 16)) >>> 0;
  };
  const mixed = (x: number, y: number): number => {
    const value = (Math.imul(x, 0xca01f9dd) - Math.imul(y, 0x4973f715)) | 0;
    return (value ^ (value >>> 16)) >>> 0;
  };
  for (let k = 0; k < 4; k++) pool.push(hashed(words[k] ?? 0));
  for (let from = 0; from < 4; from++) {
    for (let to = 0; to < 4; to++) if (from !== to) pool[to] = mixed(pool[to], hashed(pool[from]));
  }
  for (const word of words.slice(4)) for (let to = 0; to < 4; to++) pool[to] = mixed(pool[to], hashed(word));

  let output = 0x8b51f9dd;
  const drawn = Array.from({ length: 8 }, (_, k) => {
    let value = pool[k % 4] ^ output;
    output = Math.imul(output, 0x58f38ded);
    value = Math.imul(value, output);
    return BigInt((value ^ (value >>> 16)) >>> 0);
  });
  return [0, 2, 4, 6].map((k) => drawn[k] | (drawn[k + 1] << 32n));
}

/** Distinct integers below `available[row]` for each row, `count` or as many as there are: `_draw` in graphs/sparse.py. */
export function draw(generator: Generator, available: number[], count: number): number[][] {
  const most = available.reduce((a, b) => Math.max(a, b), 0);
  count = Math.min(count, most);
  const isDense = count * 8 >= most;
  if (available.length * (isDense ? most : count) > MOST_DRAWN) {
    throw new Error(TOO_MANY);
  }
  if (isDense) {
    return available.map((limit) => {
      const keys = Array.from({ length: most }, () => generator.double());
      const order = Array.from({ length: limit }, (_, k) => k).sort((a, b) => keys[a] - keys[b]);
      return order.slice(0, count);
    });
  }
  const drawn = available.map((limit) => (limit >= count ? [] : Array.from({ length: limit }, (_, k) => k)));
  let todo = available.flatMap((limit, row) => (limit >= count ? [row] : []));
  const fresh = (row: number): number[] => Array.from({ length: count }, () => generator.below(available[row]));
  for (const row of todo) drawn[row] = fresh(row);
  for (;;) {
    const repeats = todo.map((row) => {
      drawn[row].sort((a, b) => a - b);
      return drawn[row].map((x, k) => k > 0 && x === drawn[row][k - 1]);
    });
    if (!repeats.some((row) => row.some(Boolean))) return drawn;
    todo = todo.filter((row, at) => {
      const again = fresh(row); // drawn for all rows, as numpy does
      drawn[row] = drawn[row].map((x, k) => (repeats[at][k] ? again[k] : x));
      return repeats[at].some(Boolean);
    });
  }
}
