// The largest row of each target, number by number, and which row it is from; and matchings of nodes.
//
//     out[i, d] = max over the rows e with to[e] = i of x[e, d]          arg[i, d] = the first such e
//
// Rows are taken in the order in which they are given, so nothing is sorted. NaN is larger than any number.
// Called by `mpnn/kernels/rows/scatter.py`.
#include "rows.h"

template <class T> struct RowExtreme {
  const int64_t *to;                   // [E], the target of each row, below num_rows
  int64_t num_edges, num_rows, size;   // num_edges < 2^31
  double sign;                         // -1: the smallest
  const T *x;                          // [E, size]
  T *out;                              // [num_rows, size]: 0 without rows
  int32_t *arg;                        // [num_rows, size]: num_edges without rows
};

// Vectors of columns are divided between the parts.
template <class T> static bool row_extreme(const RowExtreme<T> &p, int64_t part, int64_t parts) {
  using X = vec<T, LANES>;
  using Arg = vec<int32_t, LANES>;
  const int64_t size = p.size, vectors = (size + LANES - 1) / LANES;
  const int64_t first = vectors * part / parts * LANES, stop = vectors * (part + 1) / parts * LANES;
  const int64_t end = stop < size ? stop : size;
  const T sign = (T)p.sign;
  const int32_t none = (int32_t)p.num_edges;
  for (int64_t r = 0; r < p.num_rows; r++)
    for (int64_t d = first; d < end; d++) p.out[r * size + d] = 0, p.arg[r * size + d] = none;
  // Rows that follow one another to the same target are compared in registers.
  for (int64_t begin = 0, end_of_run; begin < p.num_edges; begin = end_of_run) {
    const int64_t row = p.to[begin];
    for (end_of_run = begin + 1; end_of_run < p.num_edges && p.to[end_of_run] == row;) end_of_run++;
    if (begin + AHEAD < p.num_edges) {
      prefetch(p.out + p.to[begin + AHEAD] * size + first, end - first);
      prefetch(p.arg + p.to[begin + AHEAD] * size + first, end - first);
    }
    for (int64_t d = first; d < end; d += LANES) {
      const int64_t left = end - d;
      X best = load_first<T, LANES>(p.out + row * size + d, left);
      Arg known = load_first<int32_t, LANES>(p.arg + row * size + d, left);
      for (int64_t e = begin; e < end_of_run; e++) {
        const X next = load_first<T, LANES>(p.x + e * size + d, left);
        const auto larger = sign * next > sign * best || (next != next && best == best);
        const Arg takes = __builtin_convertvector(larger, Arg) | (Arg)(known == none);
        best = __builtin_convertvector(takes, decltype(larger)) ? next : best;
        known = takes ? splat<int32_t, LANES>((int32_t)e) : known;
      }
      store_first<T, LANES>(p.out + row * size + d, best, left);
      store_first<int32_t, LANES>(p.arg + row * size + d, known, left);
    }
  }
  return true;
}

KERNEL(row_extreme_f32, RowExtreme<float>, row_extreme(*p, part, parts))
KERNEL(row_extreme_f64, RowExtreme<double>, row_extreme(*p, part, parts))
extern "C" int64_t row_extreme_size() { return sizeof(RowExtreme<float>); }

// A greedy matching: each node in `order` that has no partner takes the neighbor without one that has the largest weight,
// the last of equal ones; without weights the first. `cluster` is the lower number of a pair, or the node's own.
struct Match {
  const int64_t *ptr, *col, *order;  // the neighbors of node u are col[ptr[u]] to col[ptr[u + 1]]
  int64_t num_nodes;
  const double *weight;              // [E], or null
  int64_t *cluster;                  // [num_nodes]
};

extern "C" int64_t match_size() { return sizeof(Match); }
extern "C" void match(const Match *p) {
  for (int64_t n = 0; n < p->num_nodes; n++) p->cluster[n] = -1;
  for (int64_t n = 0; n < p->num_nodes; n++) {
    const int64_t u = p->order[n];
    if (p->cluster[u] >= 0) continue;
    int64_t partner = u;
    double best = 0;
    for (int64_t e = p->ptr[u]; e < p->ptr[u + 1]; e++) {
      const int64_t v = p->col[e];
      if (v == u || p->cluster[v] >= 0 || (p->weight && !(p->weight[e] >= best))) continue;
      partner = v;
      if (!p->weight) break;
      best = p->weight[e];
    }
    p->cluster[u] = p->cluster[partner] = u < partner ? u : partner;
  }
}
