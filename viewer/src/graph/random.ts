// numpy's default_rng, bit by bit, so that `random` and `bigbird` have the same edges here as in Python:
// SeedSequence (numpy/random/bit_generator.pyx) and PCG64 (O'Neill 2014), with Lemire's bounded integers (2019).

const MULTIPLIER = 0x2360ed051fc65da44385df649fccf645n;
const LOW_32 = 0xffffffffn;
const LOW_64 = 0xffffffffffffffffn;

export class Generator {
  private state = 0n;
  private readonly increment: bigint;
  private half: number | null = null; // the upper 32 bits of the last draw

  /** As `np.random.default_rng(entropy)`. */
  constructor(entropy: number[]) {
    const [a, b, c, d] = seedWords(entropy);
    this.increment = BigInt.asUintN(128, (((c << 64n) | d) << 1n) | 1n);
    this.step();
    this.state = BigInt.asUintN(128, this.state + ((a << 64n) | b));
    this.step();
  }

  /** Uniform in [0, 1). */
  double(): number {
    return Number(this.next64() >> 11n) / 2 ** 53;
  }

  /** Uniform in 0, ..., bound - 1. */
  below(bound: number): number {
    if (bound <= 1) return 0;
    const threshold = (2 ** 32 - bound) % bound;
    for (;;) {
      const product = BigInt(this.next32()) * BigInt(bound);
      const low = Number(product & LOW_32);
      if (low >= bound || low >= threshold) return Number(product >> 32n);
    }
  }

  private step(): void {
    this.state = BigInt.asUintN(128, this.state * MULTIPLIER + this.increment);
  }

  private next64(): bigint {
    this.step();
    const mixed = (this.state >> 64n) ^ (this.state & LOW_64);
    const turn = this.state >> 122n;
    return ((mixed >> turn) | (mixed << ((64n - turn) & 63n))) & LOW_64;
  }

  private next32(): number {
    if (this.half !== null) {
      const kept = this.half;
      this.half = null;
      return kept;
    }
    const drawn = this.next64();
    this.half = Number(drawn >> 32n);
    return Number(drawn & LOW_32);
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
  if (count * 8 >= most) {
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
