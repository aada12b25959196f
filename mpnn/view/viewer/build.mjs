// Bundles src/ into one JavaScript file, ../static/viewer.js, or into the file that is named as an argument.
// The file is committed, because installing the package must not need node.

import { readFile } from "node:fs/promises";
import { build } from "esbuild";

const BUNDLED = ["d3-dispatch", "d3-force", "d3-quadtree", "d3-timer"];

const here = new URL(".", import.meta.url);
const notices = await Promise.all(BUNDLED.map((name) => readFile(new URL(`node_modules/${name}/LICENSE`, here), "utf8")));
const said = BUNDLED.map((name, k) => `${name}:\n${notices[k].trim()}`).join("\n\n");

await build({
  absWorkingDir: new URL(".", import.meta.url).pathname,
  entryPoints: ["src/main.ts"],
  outfile: process.argv[2] ?? "../static/viewer.js",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "ascii",
  loader: { ".css": "text" },
  banner: { js: `/* mpnn's viewer, built from viewer/. It contains:\n\n${said}\n*/` },
});
