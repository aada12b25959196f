// Reads questions as JSON from standard input and answers them with the built viewer: tests/view/test_algebra.py compares
// the answers with Python's. `cases.mjs VIEWER.js`.

import { readFile } from "node:fs/promises";

const source = await readFile(process.argv[2]);
const viewer = await import(`data:text/javascript;base64,${source.toString("base64")}`);

const ANSWERS = {
  runs: (runs) => ({ ptr: [...runs.ptr], start: [...runs.start], stop: [...runs.stop] }),
  levels: (runs, { node }) => [...viewer.levels(runs, node)],
  diameter: (runs) => [...viewer.diameters(runs)].at(-1).layers,
  coverage: (runs, { region, width, height }) => [...viewer.coverage(runs, region, width, height)],
};

function answer(question) {
  const { kind, expression, n, num_src } = question;
  try {
    return { answer: ANSWERS[kind](viewer.parse(expression).bind(n, num_src), question) };
  } catch (error) {
    return { refused: error.message };
  }
}

let text = "";
for await (const part of process.stdin) text += part;
process.stdout.write(JSON.stringify(JSON.parse(text).map(answer)));
