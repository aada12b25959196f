// The topologies of mpnn.graphs: functions of numbers that return the runs of every row. Their drawings and references
// are in mpnn/graphs/{sequence,sparse,image}.py; tests compare the edges with Python's. Random edges come from Python.

import { build, SizeError, union, type Add, type Runs } from "./runs";

export type Value = number | number[];

/** Names in the order of the arguments; `null` for one without a default. */
type Parameters = Record<string, Value | null>;
type Rule = (numDst: number, numSrc: number, args: Record<string, Value>) => Runs;

export interface Builder {
  parameters: Parameters;
  rule: Rule;
}

/** The builders whose rules compare positions: destination i is source i of one sequence. */
export const POSITIONAL = new Set([
  "causal", "identity", "window", "strided", "fixed", "global_nodes", "prefix", "memory", "longformer",
]);

export const BUILDERS: Record<string, Builder> = {
  complete: rows({}, (_, add, numSrc) => add(0, numSrc)),
  causal: rows({}, (i, add) => add(0, i + 1)),
  identity: rows({}, (i, add) => add(i, i + 1)),
  window: rows({ radius: null, dilation: 1 }, window, { radius: 0, dilation: 1 }),
  strided: rows({ stride: null }, strided, { stride: 1 }),
  fixed: rows({ block: null, summary: 1 }, fixed, { block: 1, summary: 0 }),
  global_nodes: { parameters: { count_or_indices: null }, rule: globalNodes },
  prefix: rows({ k: null }, (i, add, _, { k }) => add(0, Math.max(i + 1, k)), { k: 0 }),
  documents: { parameters: { lengths: null }, rule: documents },
  permutation: { parameters: { order: null }, rule: permutation },
  memory: rows({ length: null }, memory, { length: 0 }),
  longformer: { parameters: { window: null, globals: 0 }, rule: longformer },
  grid: { parameters: { height: null, width: null, connectivity: 4 }, rule: grid },
  neighborhood: { parameters: { height: null, width: null, radius: null }, rule: neighborhood },
  convolution: {
    parameters: { height: null, width: null, kernel: null, stride: 1, padding: 0, dilation: 1 },
    rule: convolution,
  },
  pooling: { parameters: { height: null, width: null, size: null }, rule: pooling },
  windows: { parameters: { height: null, width: null, size: null, shift: 0 }, rule: windows },
};

/** The builders that draw random numbers. Python makes their graphs and writes them into the page. */
export const RANDOM = new Set(["random", "expander", "bigbird"]);

type Numbers = Record<string, number>;

/** A builder of integers, each at least `least`, whose rows do not depend on each other. */
function rows(
  parameters: Parameters,
  row: (i: number, add: Add, numSrc: number, args: Numbers, numDst: number) => void,
  least: Numbers = {},
): Builder {
  const rule: Rule = (numDst, numSrc, args) => {
    const numbers = integers(args, least);
    return build(numDst, numSrc, (i, add) => row(i, add, numSrc, numbers, numDst));
  };
  return { parameters, rule };
}

function integers(args: Record<string, Value>, least: Numbers): Numbers {
  return Object.fromEntries(Object.entries(args).map(([name, x]) => [name, atLeast(name, x, least[name])]));
}

function atLeast(name: string, x: Value, least: number): number {
  if (typeof x !== "number") throw new Error(`${name} must be one integer; got a list`);
  if (x < least) throw new Error(`${name} must be at least ${least}; got ${x}`);
  return x;
}

function listOf(name: string, x: Value): number[] {
  if (typeof x === "number") throw new Error(`${name} must be a list of integers; got ${x}`);
  return x;
}

// ---------------------------------------------------------------------------------------------------- sequences

function window(i: number, add: Add, numSrc: number, { radius, dilation }: Numbers, numDst: number): void {
  if (dilation === 1) return add(i - radius, i + radius + 1);
  const reachable = Math.min(radius, Math.floor(Math.max(numDst, numSrc) / dilation));
  for (let k = -reachable; k <= reachable; k++) add(i + k * dilation, i + k * dilation + 1);
}

function strided(i: number, add: Add, numSrc: number, { stride }: Numbers): void {
  for (let j = i % stride; j <= i - stride && j < numSrc; j += stride) add(j, j + 1);
  add(i - stride + 1, i + 1);
}

function fixed(i: number, add: Add, numSrc: number, { block, summary }: Numbers): void {
  if (summary > block) throw new Error(`summary must be at most the block size ${block}; got ${summary}`);
  for (let end = block; end <= i && end - summary < numSrc; end += block) add(end - summary, end);
  add(i - (i % block), i + 1);
}

function memory(i: number, add: Add, numSrc: number, { length }: Numbers, numDst: number): void {
  if (length > 0 && numSrc !== numDst + length) {
    throw new Error(`memory(${length}) needs ${numDst + length} sources for ${numDst} destinations; got ${numSrc}`);
  }
  add(0, i + length + 1);
}

function globalNodes(numDst: number, numSrc: number, { count_or_indices: nodes }: Record<string, Value>): Runs {
  if (typeof nodes === "number") {
    const count = atLeast("count", nodes, 0);
    return build(numDst, numSrc, (i, add) => add(0, i < count ? numSrc : count));
  }
  const [hubs, most] = [new Set(nodes), Math.max(numDst, numSrc)];
  if (hubs.size < nodes.length) throw new Error("indices must be distinct");
  const wrong = nodes.find((x) => x < 0 || x >= most);
  if (wrong !== undefined) throw new Error(`global node ${wrong} does not exist among ${most} nodes`);
  const sorted = [...nodes].sort((a, b) => a - b);
  return build(numDst, numSrc, (i, add) => (hubs.has(i) ? add(0, numSrc) : sorted.forEach((j) => add(j, j + 1))));
}

function documents(numDst: number, numSrc: number, args: Record<string, Value>): Runs {
  const lengths = listOf("lengths", args.lengths);
  lengths.forEach((x, k) => atLeast(`lengths[${k}]`, x, 0));
  const total = lengths.reduce((a, b) => a + b, 0);
  if (numDst !== numSrc) throw new Error(`documents need as many sources as destinations; got ${numDst} x ${numSrc}`);
  if (total !== numDst) {
    throw new SizeError(`the lengths of the documents add up to ${total}, but the graph has ${numDst} nodes`, total);
  }
  let [document, first] = [0, 0];
  return build(numDst, numSrc, (i, add) => {
    while (i >= first + lengths[document]) first += lengths[document++];
    add(first, first + lengths[document]);
  });
}

function permutation(numDst: number, numSrc: number, args: Record<string, Value>): Runs {
  const order = listOf("order", args.order);
  const rank = new Map(order.map((node, k) => [node, k]));
  if (!order.every((_, k) => rank.has(k))) throw new Error(`order must hold each of 0..${order.length - 1} once`);
  if (order.length !== numDst || order.length !== numSrc) {
    throw new SizeError(`the order has ${order.length} nodes, but the graph is ${numDst} x ${numSrc}`, order.length);
  }
  return build(numDst, numSrc, (i, add) => {
    for (let k = 0; k <= rank.get(i)!; k++) add(order[k], order[k] + 1);
  });
}

// ---------------------------------------------------------------------------------------------------- sparse

function longformer(numDst: number, numSrc: number, { window: width, globals }: Record<string, Value>): Runs {
  const radius = Math.floor(atLeast("window", width, 0) / 2);
  const band = BUILDERS.window.rule(numDst, numSrc, { radius, dilation: 1 });
  return globals === 0 ? band : union(band, globalNodes(numDst, numSrc, { count_or_indices: globals }));
}

// ---------------------------------------------------------------------------------------------------- images

/** Adds the pixels `first` to `last` of image row `y`, clipped to the image. */
function addPixels(add: Add, y: number, first: number, last: number, height: number, width: number): void {
  if (y < 0 || y >= height) return;
  [first, last] = [Math.max(first, 0), Math.min(last, width - 1)];
  if (first <= last) add(y * width + first, y * width + last + 1);
}

function checkPixels(name: string, numDst: number, numSrc: number, height: number, width: number): void {
  const pixels = height * width;
  if (numDst !== pixels || numSrc !== pixels) {
    const why = `${name} of ${height} x ${width} pixels needs ${pixels} nodes, but the graph is ${numDst} x ${numSrc}`;
    throw new SizeError(why, pixels);
  }
}

function grid(numDst: number, numSrc: number, args: Record<string, Value>): Runs {
  const { height, width, connectivity } = integers(args, { height: 0, width: 1, connectivity: 4 });
  if (connectivity !== 4 && connectivity !== 8) {
    throw new Error(`connectivity must be 4 (sides) or 8 (sides and corners); got ${connectivity}`);
  }
  checkPixels("grid", numDst, numSrc, height, width);
  const beside = connectivity === 8 ? 1 : 0;
  return build(numDst, numSrc, (i, add) => {
    const [y, x] = [Math.floor(i / width), i % width];
    addPixels(add, y - 1, x - beside, x + beside, height, width);
    addPixels(add, y, x - 1, x - 1, height, width);
    addPixels(add, y, x + 1, x + 1, height, width);
    addPixels(add, y + 1, x - beside, x + beside, height, width);
  });
}

function neighborhood(numDst: number, numSrc: number, args: Record<string, Value>): Runs {
  const { height, width, radius } = integers(args, { height: 0, width: 1, radius: 0 });
  checkPixels("neighborhood", numDst, numSrc, height, width);
  const reach = Math.min(radius, height);
  return build(numDst, numSrc, (i, add) => {
    const [y, x] = [Math.floor(i / width), i % width];
    for (let dy = -reach; dy <= reach; dy++) addPixels(add, y + dy, x - radius, x + radius, height, width);
  });
}

/** One integer or two: vertical, horizontal. */
function pair(name: string, x: Value, least: number): [number, number] {
  const both = typeof x === "number" ? [x, x] : x;
  if (both.length !== 2) throw new Error(`${name} must be one integer or two, vertical and horizontal`);
  return [atLeast(name, both[0], least), atLeast(name, both[1], least)];
}

function convolution(numDst: number, numSrc: number, args: Record<string, Value>): Runs {
  const size = [atLeast("height", args.height, 0), atLeast("width", args.width, 1)];
  const [kernel, stride] = [pair("kernel", args.kernel, 1), pair("stride", args.stride, 1)];
  const [padding, dilation] = [pair("padding", args.padding, 0), pair("dilation", args.dilation, 1)];
  const out = size.map((n, k) => Math.floor((n + 2 * padding[k] - dilation[k] * (kernel[k] - 1) - 1) / stride[k]) + 1);
  if (Math.min(...out) < 1) throw new Error(`a kernel of ${kernel.join(" x ")} does not fit into ${size.join(" x ")} pixels`);
  checkImages("convolution", numDst, numSrc, out, size);
  const [height, width] = size;
  return build(numDst, numSrc, (i, add) => {
    const y = Math.floor(i / out[1]) * stride[0] - padding[0];
    const x = (i % out[1]) * stride[1] - padding[1];
    for (let a = 0; a < kernel[0]; a++) {
      for (let b = 0; b < kernel[1]; b++) {
        const column = x + b * dilation[1];
        addPixels(add, y + a * dilation[0], column, column, height, width);
      }
    }
  });
}

function checkImages(name: string, numDst: number, numSrc: number, dst: number[], src: number[]): void {
  if (numDst !== dst[0] * dst[1] || numSrc !== src[0] * src[1]) {
    throw new Error(
      `${name} of ${src.join(" x ")} pixels gives ${dst.join(" x ")}, so it needs ${dst[0] * dst[1]} destinations and ` +
        `${src[0] * src[1]} sources; the graph is ${numDst} x ${numSrc}`,
    );
  }
}

function pooling(numDst: number, numSrc: number, args: Record<string, Value>): Runs {
  const [height, width] = [atLeast("height", args.height, 0), atLeast("width", args.width, 1)];
  const size = pair("size", args.size, 1);
  const out = [Math.ceil(height / size[0]), Math.ceil(width / size[1])];
  checkImages("pooling", numDst, numSrc, out, [height, width]);
  return build(numDst, numSrc, (i, add) => {
    const [y, x] = [Math.floor(i / out[1]) * size[0], (i % out[1]) * size[1]];
    for (let a = 0; a < Math.min(size[0], height); a++) addPixels(add, y + a, x, x + size[1] - 1, height, width);
  });
}

function windows(numDst: number, numSrc: number, args: Record<string, Value>): Runs {
  const { height, width, size, shift } = integers(args, { height: 0, width: 1, size: 1, shift: 0 });
  checkPixels("windows", numDst, numSrc, height, width);
  /** The window along one axis. Pixels that the cyclic shift wraps around get windows of their own. */
  const windowOf = (at: number, length: number): number => {
    const shifted = at - (shift % Math.max(length, 1));
    return shifted < 0 ? Math.floor((shifted + length) / size) + Math.ceil(length / size) : Math.floor(shifted / size);
  };
  const label = (i: number): string => `${windowOf(Math.floor(i / width), height)},${windowOf(i % width, width)}`;
  const pixels = new Map<string, number[]>();
  for (let i = 0; i < numDst; i++) pixels.set(label(i), [...(pixels.get(label(i)) ?? []), i]);
  return build(numDst, numSrc, (i, add) => pixels.get(label(i))!.forEach((j) => add(j, j + 1)));
}
