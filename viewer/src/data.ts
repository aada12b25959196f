// What mpnn/view/page.py writes into the page.

export interface PageData {
  title: string;
  subtitle: string;
  graph: { expression: string; n: number; num_src: number | null };
  attention: AttentionData | null;
  plan: PlanData | null;
}

export interface AttentionData {
  tokens: string[];
  layers: number;
  heads: number;
  /** Cells on a side of a thumbnail. */
  cells: number;
  graphs: AttentionGraph[];
}

/** Attention over one graph. Arrays are the base64 of bytes in little-endian order. */
export interface AttentionGraph {
  name: string;
  edges: number;
  /** The strongest sources that are kept of each token; the share of the weights that these are, on average. */
  top: number;
  share: number;
  /** uint8 [layers, heads, cells, cells]: 255 times the square root of the mean weight over the largest of the head. */
  thumbnails: string;
  /** uint16, or uint32 if there are more than 65,536 tokens, [layers, heads, tokens, top]: the strongest first. */
  sources: string;
  /** uint8 [layers, heads, tokens, top]: 255 times the weight; 0 where there are fewer sources. */
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
