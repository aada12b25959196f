// What mpnn/view/page.py writes into the page.

export interface PageData {
  title: string;
  subtitle: string;
  graph: GraphData | null;
  /** The graphs that the Graph pane offers; only pages with a graph have them. */
  examples?: Example[];
  attention: AttentionData | null;
  plan: PlanData | null;
}

export interface GraphData {
  expression: string;
  n: number;
  num_src: number | null;
  /** Of an expression with random edges or with builders of the user's own, which the browser cannot make. */
  runs?: RunsData;
}

/** A graph, and what it is known by. */
export interface Example extends GraphData {
  name: string;
}

/** The base64 of int32: `ptr` [rows + 1], `start` and `stop` [runs]. */
export interface RunsData {
  ptr: string;
  start: string;
  stop: string;
}

/** Attention of one model over one graph or several. Nodes are those of the subject. */
export interface AttentionData {
  subject: Subject;
  /** The node that is chosen when the page opens. */
  start: number;
  /** The number of heads of each layer. */
  heads: number[];
  /** Cells on a side of a thumbnail. */
  cells: number;
  graphs: AttentionGraph[];
}

/** What attends; mpnn/view/subject.py has the same three. */
export type Subject = TokensData | PatchesData | NodesData;

export interface TokensData {
  kind: "tokens";
  tokens: string[];
  /** The numbers of tokens that stand for no text, such as [CLS] and [SEP]. */
  special: number[];
  /** The numbers of tokens that are underlined. */
  marked: number[];
}

export interface PatchesData {
  kind: "patches";
  /** The address of the image, and its grid of patches. */
  image: string;
  rows: number;
  columns: number;
  /** The names of the nodes before the patches. */
  extra: string[];
}

export interface NodesData {
  kind: "nodes";
  /** The number of each node in the whole graph, its class (-1: not known), and the one that the model gives it. */
  numbers: number[];
  classes: number[];
  predicted: number[];
  /** Names of nodes and of classes; null where they are their numbers. */
  names: string[] | null;
  class_names: string[] | null;
  /** An image of each node, row by row in one. */
  sprite: { image: string; columns: number; rows: number } | null;
}

/** Attention over one graph. Arrays are the base64 of bytes in little-endian order. */
export interface AttentionGraph {
  name: string;
  edges: number;
  /** The strongest sources that are kept of each node; the share of the weights that these are, on average. */
  top: number;
  share: number;
  /** uint8 [heads of all layers, cells, cells]: 255 times the square root of the mean weight over the largest of the head. */
  thumbnails: string;
  /** uint16, or uint32 if there are more than 65,536 nodes, [heads of all layers, nodes, top]: the strongest first. */
  sources: string;
  /** uint8 [heads of all layers, nodes, top]: 255 times the root of the weight; 0 where there are fewer sources. */
  weights: string;
}

export interface PlanData {
  graph: string;
  work: string;
  backend: string;
  candidates: Candidate[];
  /** The same graph with other numbers of nodes. */
  sizes: { n: number; candidates: Candidate[] }[];
}

export interface Candidate {
  name: string;
  /** Null where the backend refuses; `reason` says why. */
  seconds: number | null;
  bytes: number | null;
  reason: string | null;
}
