// What kernels along the rows of a sparse graph share: the graph, parts of about equally many edges, blocks of edges,
// and weighted sums of the features that edges read.
//
// Parts begin where rows begin, and within long rows, so that one hub does not hold up a core. A row that lies within a
// part is written by it. What a part has of its first and last row goes to a partial result; `join` functions add these
// up afterwards, always in the same order. There are no atomics: results do not depend on the number of threads.
//
// The order in which a row is summed does not depend on other rows: a part that begins within a row begins at a piece
// of it (`Rows.parts` of kernels/rows/rows.py), and a block that begins within a row holds edges of this row up to a
// whole block (`Segments.cut`).
#pragma once
#include <stdlib.h>
#include "simd.h"

constexpr int LANES = 8;  // numbers taken at once, of either type; features come padded to whole vectors
constexpr int AHEAD = 8;  // edges by which features are fetched early: hardware cannot guess where a sparse graph reads

// Edges sorted by destination, source or edge type. Row r has the edges ptr[r] to ptr[r + 1].
struct Rows {
  int64_t num_rows, num_edges;
  const int64_t *ptr;
  const int32_t *col;    // the node at the other end of each edge
  const int64_t *edge;   // the number of each edge in the caller's order; null: the same order
  const int64_t *slot;   // the position of each edge in the order by destination; null: this is that order
  const int64_t *node;   // the node of each row; null: row r is node r
  int64_t num_parts;
  const int64_t *cuts;   // [num_parts + 1] edges

  int64_t edge_of(int64_t e) const { return edge ? edge[e] : e; }
  int64_t slot_of(int64_t e) const { return slot ? slot[e] : e; }
  int64_t node_of(int64_t r) const { return node ? node[r] : r; }

  // The row of an edge.
  int64_t row_of(int64_t e) const {
    int64_t low = 0, high = num_rows;
    while (high - low > 1) {
      int64_t middle = (low + high) / 2;
      (ptr[middle] <= e ? low : high) = middle;
    }
    return low;
  }
};

// [batch, nodes, heads, width]; null data: absent. Several of H heads may share one of these. Results are contiguous.
template <class T> struct NodeTensor {
  T *data;
  int64_t heads, width, batch_stride, node_stride, head_stride;

  int64_t size() const { return heads * width; }
  T *entry(int64_t b) const { return data + b * batch_stride; }
};

// [batch, edges or edge types, heads (all or 1), width]; null data: absent. `ids`: the edge type of each edge in the
// caller's order; null: the tensor has a row for each edge.
template <class T> struct EdgeTensor {
  T *data;
  const int64_t *ids;
  int64_t heads, width, batch_stride;

  T *row(int64_t b, int64_t edge) const { return data + b * batch_stride + (ids ? ids[edge] : edge) * heads * width; }
  T *of_head(T *row, int64_t h) const { return row + (heads == 1 ? 0 : h * width); }
};

// A block of consecutive edges, cut by row. Segment k has the edges first[k] to first[k + 1] of the block, all in row[k].
struct Segments {
  int64_t *row, *first, count;

  // The edges from `begin` on, the first of which lies in row `at`, at most `most`; returns how many. A row that would
  // exceed the block begins the next one, so that blocks cut rows at the same edges wherever the rows lie.
  int64_t cut(const Rows &rows, int64_t begin, int64_t most, int64_t at) {
    int64_t e = 0;
    for (count = 0; e < most; count++) {
      while (rows.ptr[at + 1] <= begin + e) at++;
      const int64_t end = rows.ptr[at + 1] - begin;
      if (end > most && e > 0) break;
      row[count] = at;
      first[count] = e;
      e = end < most ? end : most;
    }
    first[count] = e;
    return e;
  }
};

// Memory of one kernel call, from one allocation. `take` is called twice in the same order: to count, then to lay out.
struct Workspace {
  char *memory = nullptr;
  size_t used = 0;

  template <class T> T *take(int64_t count) {
    const size_t first = (used + 63) / 64 * 64;
    used = first + (count > 0 ? count : 0) * sizeof(T);
    return memory ? (T *)(memory + first) : nullptr;
  }
  bool allocate() {
    memory = (char *)calloc(1, used + 64);
    used = 0;
    return memory != nullptr;
  }
  ~Workspace() { free(memory); }
};

// Edges in a block: so few that their numbers for all heads stay in cache.
INLINE int64_t block_size(int64_t heads) {
  int64_t size = 1024 / (heads > 0 ? heads : 1) / 8 * 8;
  return size < 8 ? 8 : size > 64 ? 64 : size;
}

template <int N> struct lanes { static constexpr int count = N; };

// body(lanes<N>, first head) over all heads: eight at a time, then four, two and one.
template <class Body> INLINE void by_heads(int64_t heads, Body body) {
  int64_t h = 0;
  for (; h + 8 <= heads; h += 8) body(lanes<8>{}, h);
  if (heads & 4) body(lanes<4>{}, h), h += 4;
  if (heads & 2) body(lanes<2>{}, h), h += 2;
  if (heads & 1) body(lanes<1>{}, h);
}

// Where edges read the features of a node: [heads, width], which H heads may share.
template <class T> struct Reads {
  const T *data;
  int64_t *at;      // where the features of each edge's node begin
  int64_t *head;    // of each vector of H heads
  int64_t *offset;  // of each vector, among the features of a node
  int64_t *start;   // of each head, among the features of a node
  int64_t stride, apart, heads, vectors, per_head;  // of nodes; from one of the shared heads to the next; how many

  template <class U> void plan(Workspace &memory, const NodeTensor<U> &x, int64_t heads, int64_t room) {
    data = nullptr;
    stride = x.node_stride, apart = x.head_stride, this->heads = x.heads;
    per_head = (x.width + LANES - 1) / LANES;
    vectors = heads * per_head;
    at = memory.take<int64_t>(room);
    start = memory.take<int64_t>(heads);
    head = memory.take<int64_t>(vectors);
    offset = memory.take<int64_t>(vectors);
    if (!memory.memory) return;
    for (int64_t h = 0; h < heads; h++) {
      start[h] = h * x.heads / heads * x.head_stride;
      for (int64_t v = 0; v < per_head; v++) {
        head[h * per_head + v] = h;
        offset[h * per_head + v] = start[h] + v * LANES;
      }
    }
  }
  // Edges read the nodes at their other ends; some after the block's are known too, to be fetched early.
  void by_column(const Rows &rows, int64_t begin, int64_t n) {
    int64_t known = rows.num_edges - begin;
    for (int64_t e = 0; e < n + AHEAD; e++) at[e] = rows.col[begin + (e < known ? e : known - 1)] * stride;
  }
  // Edges read the nodes of their rows.
  void by_row(const Rows &rows, const Segments &segments, int64_t n) {
    for (int64_t k = 0; k < segments.count; k++) {
      int64_t from = rows.node_of(segments.row[k]) * stride;
      for (int64_t e = segments.first[k]; e < segments.first[k + 1]; e++) at[e] = from;
    }
    for (int64_t e = n; e < n + AHEAD; e++) at[e] = at[n - 1];
  }
  const T *of(int64_t e, int64_t h) const { return data + at[e] + start[h]; }
  void fetch(int64_t e) const {
    const T *from = data + at[e + AHEAD];
    if (apart == per_head * LANES) return prefetch(from, heads * apart);
    for (int64_t h = 0; h < heads; h++) prefetch(from + h * apart, per_head * LANES);
  }
};

// sums[v] += weight of the edge and head * vector v of what the edge reads, over the edges begin to end of a block.
// sums [H, width] start at zero if `fresh`. Up to eight vectors stay in registers over all edges.
template <class T, int COUNT>
INLINE void weighted_vectors(const T *weight, int64_t heads, const Reads<T> &x, int64_t begin, int64_t end, int64_t v, bool fetch, bool fresh, T *sums) {
  vec<T, LANES> total[COUNT];
  const int64_t *head = x.head + v, *offset = x.offset + v;
  UNROLL for (int k = 0; k < COUNT; k++) total[k] = fresh ? vec<T, LANES>{} : load<T, LANES>(sums + (v + k) * LANES);
  for (int64_t e = begin; e < end; e++) {
    if (fetch) x.fetch(e);
    const T *w = weight + e * heads, *from = x.data + x.at[e];
    UNROLL for (int k = 0; k < COUNT; k++) total[k] += w[head[k]] * load<T, LANES>(from + offset[k]);
  }
  UNROLL for (int k = 0; k < COUNT; k++) store<T, LANES>(sums + (v + k) * LANES, total[k]);
}

template <class T>
static void weighted_sums(const T *weight, int64_t heads, const Reads<T> &x, int64_t begin, int64_t end, bool fetch, bool fresh, T *sums) {
  int64_t v = 0;
  for (; v + 8 <= x.vectors; v += 8) weighted_vectors<T, 8>(weight, heads, x, begin, end, v, fetch && !v, fresh, sums);
  if (x.vectors & 4) weighted_vectors<T, 4>(weight, heads, x, begin, end, v, fetch && !v, fresh, sums), v += 4;
  if (x.vectors & 2) weighted_vectors<T, 2>(weight, heads, x, begin, end, v, fetch && !v, fresh, sums), v += 2;
  if (x.vectors & 1) weighted_vectors<T, 1>(weight, heads, x, begin, end, v, fetch && !v, fresh, sums);
}

// The same for vectors of edges, added to sums [H, padded].
template <class T, class E>
static void weighted_edge_vectors(const T *weight, int64_t heads, const EdgeTensor<E> &x, const Rows &rows, int64_t b, int64_t first, int64_t begin, int64_t end, int64_t padded, T *sums) {
  for (int64_t e = begin; e < end; e++) {
    E *row = x.row(b, rows.edge_of(first + e));
    for (int64_t h = 0; h < heads; h++)
      for (int64_t c = 0; c < x.width; c += LANES) {
        T *to = sums + h * padded + c;
        store<T, LANES>(to, load<T, LANES>(to) + weight[e * heads + h] * load_first<T, LANES>(x.of_head(row, h) + c, x.width - c));
      }
  }
}

// to[h] = from[h].
template <class T> INLINE void copy_heads(T *to, const T *from, int64_t heads) {
  by_heads(heads, [&](auto wide, int64_t h) { store<T, decltype(wide)::count>(to + h, load<T, decltype(wide)::count>(from + h)); });
}

// sums[h] += x[e * stride + h] over the edges begin to end.
template <class T>
INLINE void sum_numbers(const T *x, int64_t stride, int64_t heads, int64_t begin, int64_t end, bool fresh, T *sums) {
  by_heads(heads, [&](auto wide, int64_t h) {
    constexpr int N = decltype(wide)::count;
    vec<T, N> total = fresh ? vec<T, N>{} : load<T, N>(sums + h);
    for (int64_t e = begin; e < end; e++) total += load<T, N>(x + e * stride + h);
    store<T, N>(sums + h, total);
  });
}

// Adds the numbers of n edges to s [n, heads]; nothing if they are absent.
template <class T, class E>
INLINE void add_numbers(const EdgeTensor<E> &x, const Rows &rows, int64_t b, int64_t first, int64_t n, int64_t heads, T *s) {
  if (!x.data) return;
  for (int64_t e = 0; e < n; e++) {
    E *row = x.row(b, rows.edge_of(first + e));
    if (x.heads == 1) for (int64_t h = 0; h < heads; h++) s[e * heads + h] += row[0];
    else for (int64_t h = 0; h < heads; h++) s[e * heads + h] += row[h];
  }
}

// Its adjoint: adds g [n, heads] to the numbers of n edges.
template <class T>
INLINE void add_to_numbers(const EdgeTensor<T> &x, const Rows &rows, int64_t b, int64_t first, int64_t n, int64_t heads, const T *g) {
  if (!x.data) return;
  for (int64_t e = 0; e < n; e++) {
    T *row = x.row(b, rows.edge_of(first + e));
    for (int64_t h = 0; h < heads; h++) row[x.heads == 1 ? 0 : h] += g[e * heads + h];
  }
}

// Writes (or adds) sums [heads, width] times `factor` to row `node` of an output whose heads several of them may share.
template <class T>
INLINE void write_row(const NodeTensor<T> &out, int64_t b, int64_t node, const T *sums, int64_t heads, T factor, bool add) {
  if (!out.data) return;
  T *to = out.entry(b) + node * out.size();
  int64_t shared_by = heads / out.heads, width = out.width;
  if (shared_by == 1 && !add) {
    for (int64_t d = 0; d < heads * width; d++) to[d] = sums[d] * factor;
    return;
  }
  for (int64_t h = 0; h < out.heads; h++)
    for (int64_t d = 0; d < width; d++) {
      T total = sums[h * shared_by * width + d];
      for (int64_t k = 1; k < shared_by; k++) total += sums[(h * shared_by + k) * width + d];
      T *at = to + h * width + d;
      *at = total * factor + (add ? *at : 0);
    }
}
