// Sums, means, extremes and variances along the rows of a sparse graph, and their gradients, in one pass:
//
//     SUM       y_i = sum_j w_ij x_j                  dx_j = sum_i w_ij dy_i
//     CENTERED  y_i = sum_j (w_ij x_j - c_i)          c_i is the first message, and the mean is c_i + y_i
//     SQUARES   y_i = sum_j (w_ij x_j - mean_i)^2     dx_j = sum_i w_ij dy_i (w_ij x_j - mean_i)
//     EXTREME   y_i = max_j w_ij x_j                  dx_j = sum_i w_ij dy_i [w_ij x_j = y_i]
//
// A mean is two numbers, c_i and the offset from it: their sum would be rounded by more than messages that are nearly
// equal differ. With as many weights of an edge as features, a sum multiplies them one by one (CHANNELS), w_ij and x_j [D], and the
// gradient of a weight is dw_ij = dy_i x_j. No E x D tensor but gradients of weights is written. The backward pass goes along the rows of the transposed graph. Rows that begin in a part
// of the edges are written in place; a part's share of the row before goes to `partial`, and `join` adds it.
//
//     for each batch entry and part of the edges      side by side
//         for each row
//             for each block of EDGES edges           the weights of the block first
//                 for each head, and a few vectors of its columns
//                     for each edge of the block      sums stay in registers
//
// Called by `mpnn/kernels/rows/reduce.py`.
#include "rows.h"

enum { SUM, SQUARES, CENTERED, EXTREME, COUNTED, CHANNELS };  // COUNTED: EXTREME, and how many messages are equal to it

template <class T> struct RowReduce {
  Rows rows;
  int64_t kind, size, heads, num_cols;
  double sign;          // -1: the smallest instead of the largest
  int64_t mean;         // 1: divide by the number of edges
  const void *x;        // [batch, num_cols, size], of 16 bits or T: messages; in the backward pass dy
  const T *compared;    // backward pass, [batch, num_cols, size]: c or extremes
  const T *weight;      // [batch or 1, E, heads] in the caller's order; null: ones
  int64_t weight_stride;
  const T *own;         // [batch, num_rows, size]: c; in the backward pass the features x_j
  T *out, *count;       // [batch, num_rows, size]; CENTERED writes c into count
  T *d_weight;          // backward pass, [batch, E, heads]; null: not asked
  T *partial, *partial_count;  // [batch, parts, size]
  const T *offset;      // SQUARES: what means exceed c by, as `own`; in the backward pass as `compared`
};

constexpr int64_t EDGES = 32;         // of a block: their features stay in the nearest cache
constexpr int64_t WEIGHTS_AHEAD = 64; // edges by which weights in another order are fetched early
constexpr int64_t FEATURES_AHEAD = 6;

// A block of edges of one row. Features are read as S.
template <class T, class S> struct Fold {
  const RowReduce<T> &p;
  const S *x;               // of this entry of the batch
  const T *compared;
  const T *weight;          // [E, heads], of this entry of the batch, and its gradient: for CHANNELS
  T *d_weight;
  const T *staged;          // [edges, heads] weights, for the others
  T *dot;                   // [edges, heads]: <dy_i, x_j> for the gradients of weights; null: not asked
  int64_t first, n;
  bool begins;              // the row's sums start here
  T factor;                 // multiplies the sums at the end
  const T *offset;          // SQUARES: of this row; in the backward pass of this entry of the batch
};

// A number that is rounded before it is added to. Fused, a message would differ from an equal one that was stored, and
// a difference of three numbers in another order loses what the first two have in common.
template <class X> INLINE X rounded(X number) { return __arithmetic_fence(number); }

// COUNT vectors from d on, in registers along the edges of the block. PARTLY: the last has only `left` < LANES numbers.
template <class T, class S, int KIND, bool BACKWARD, int COUNT, bool PARTLY = false>
INLINE void fold_vectors(const Fold<T, S> &f, int64_t h, int64_t d, int64_t left, bool fetch, const T *own, T *out, T *count) {
  using X = vec<T, LANES>;
  const RowReduce<T> &p = f.p;
  constexpr bool extreme = KIND == EXTREME || KIND == COUNTED, linear = KIND == SUM || KIND == CHANNELS;
  const T start = extreme && !BACKWARD ? -infinity<T>() : 0;
  auto first = [&](auto *from) { return PARTLY ? load_first_as<T, LANES>(from, left) : load_as<T, LANES>(from); };
  X total[COUNT], equal[COUNT], mine[COUNT], offset[COUNT];
  UNROLL for (int k = 0; k < COUNT; k++) {
    total[k] = f.begins ? splat<T, LANES>(start) : first(out + d + k * LANES);
    if (KIND == COUNTED) equal[k] = f.begins ? X{} : first(count + d + k * LANES);
    if (BACKWARD ? !linear || f.dot : KIND == SQUARES || KIND == CENTERED) mine[k] = first(own + d + k * LANES);
    if (!BACKWARD && KIND == SQUARES) offset[k] = first(f.offset + d + k * LANES);
  }
  const int32_t *col = p.rows.col + f.first;
  const int64_t known = p.rows.num_edges - f.first - 1, size = p.size, heads = p.heads, n = f.n;
  const S *x = f.x;
  const T *compared = f.compared, *staged = f.staged + h;
  T *dot = f.dot;
  for (int64_t e = 0; e < n; e++) {
    if (fetch) {
      int64_t later = (int64_t)col[e + FEATURES_AHEAD < known ? e + FEATURES_AHEAD : known] * size;
      prefetch(x + later, size);
      if (BACKWARD && !linear) prefetch(compared + later, size);
      if (BACKWARD && KIND == SQUARES) prefetch(f.offset + later, size);
      if (KIND == CHANNELS) prefetch(f.weight + p.rows.edge_of(f.first + (e + FEATURES_AHEAD < known ? e + FEATURES_AHEAD : known)) * size, size);
    }
    int64_t at = (int64_t)col[e] * size + d, own_weights = KIND == CHANNELS ? p.rows.edge_of(f.first + e) * size + d : 0;
    T w = KIND == CHANNELS ? 1 : staged[e * heads];
    X product{};
    UNROLL for (int k = 0; k < COUNT; k++) {
      X value = first(x + at + k * LANES);
      if (KIND == CHANNELS) {
        total[k] += first(f.weight + own_weights + k * LANES) * value;
        if (BACKWARD && dot) store_first<T, LANES>(f.d_weight + own_weights + k * LANES, value * mine[k], PARTLY ? left : LANES);
      } else if (BACKWARD) {
        if (!linear) {
          X other = first(compared + at + k * LANES), m = rounded(w * mine[k]);
          const X unequal = other == other ? X{} : other;  // an extreme of NaN has no gradient but NaN
          if (KIND == SQUARES) value *= rounded(m - other) - first(f.offset + at + k * LANES);
          else value = m == other ? value : unequal;
        }
        total[k] += w * value;
        if (dot) {
          product += value * mine[k];
        }
      } else if (extreme) {
        X m = w * value;
        if (KIND == COUNTED) equal[k] = m > total[k] ? splat<T, LANES>(1) : equal[k] + (m == total[k] ? splat<T, LANES>(1) : X{});
        total[k] = m != m ? m : larger(m, total[k]);
      } else if (KIND == SQUARES || KIND == CENTERED) {
        X m = rounded(rounded(w * value) - mine[k]);
        if (KIND == SQUARES) m -= offset[k];
        total[k] += KIND == SQUARES ? m * m : m;
      } else {
        total[k] += w * value;
      }
    }
    if (BACKWARD && dot && KIND != CHANNELS) dot[e * heads + h] += sum<T, LANES>(product);
  }
  UNROLL for (int k = 0; k < COUNT; k++) {
    store_first<T, LANES>(out + d + k * LANES, total[k] * f.factor, PARTLY ? left : LANES);
    if (KIND == COUNTED) store_first<T, LANES>(count + d + k * LANES, equal[k], PARTLY ? left : LANES);
  }
}

template <class T, class S, int KIND, bool BACKWARD>
static void fold_block(const Fold<T, S> &f, const T *own, T *out, T *count) {
  int64_t heads = KIND == CHANNELS ? 1 : f.p.heads, width = f.p.size / heads;
  bool fetch = true;
  for (int64_t h = 0; h < heads; h++)
    for (int64_t d = h * width, stop = d + width; d < stop; fetch = false) {
      int64_t left = stop - d;
      if (left >= 8 * LANES) fold_vectors<T, S, KIND, BACKWARD, 8>(f, h, d, left, fetch, own, out, count), d += 8 * LANES;
      else if (left >= 4 * LANES) fold_vectors<T, S, KIND, BACKWARD, 4>(f, h, d, left, fetch, own, out, count), d += 4 * LANES;
      else if (left >= 2 * LANES) fold_vectors<T, S, KIND, BACKWARD, 2>(f, h, d, left, fetch, own, out, count), d += 2 * LANES;
      else if (left >= LANES) fold_vectors<T, S, KIND, BACKWARD, 1>(f, h, d, left, fetch, own, out, count), d += LANES;
      else fold_vectors<T, S, KIND, BACKWARD, 1, true>(f, h, d, left, fetch, own, out, count), d += LANES;
    }
}

// The weights of n edges times `sign` into staged [n, heads].
template <class T> static void stage(const RowReduce<T> &p, const T *weight, int64_t first, int64_t n, T *staged) {
  for (int64_t e = 0; e < n; e++) {
    if (p.rows.edge && first + e + WEIGHTS_AHEAD < p.rows.num_edges) prefetch(weight + p.rows.edge[first + e + WEIGHTS_AHEAD] * p.heads, p.heads);
    const T *from = weight + p.rows.edge_of(first + e) * p.heads;
    for (int64_t h = 0; h < p.heads; h++) staged[e * p.heads + h] = from[h] * (T)p.sign;
  }
}

// Folds the edges begin to end of a row into out [size].
template <class T, class S, int KIND, bool BACKWARD>
static void fold_row(const RowReduce<T> &p, int64_t b, int64_t begin, int64_t end, T factor, T *staged, T *dot, const T *own, T *out, T *count) {
  if (begin == end)
    for (int64_t d = 0; d < p.size; d++) out[d] = 0;
  const T *weight = p.weight ? p.weight + b * p.weight_stride : nullptr;
  T *d_weight = p.d_weight ? p.d_weight + b * p.rows.num_edges * p.heads : nullptr;
  int64_t features = p.num_cols * p.size;
  const T *offset = KIND == SQUARES ? p.offset + (BACKWARD ? b * features : own - p.own) : nullptr;
  for (int64_t at = begin; at < end; at += EDGES) {
    int64_t n = end - at < EDGES ? end - at : EDGES;
    if (weight && KIND != CHANNELS) stage(p, weight, at, n, staged);
    if (dot && KIND != CHANNELS) __builtin_memset(dot, 0, n * p.heads * sizeof(T));
    Fold<T, S> f{p, (const S *)p.x + b * features, p.compared + (p.compared ? b * features : 0), weight, d_weight, staged, dot, at, n, at == begin, at + n == end ? factor : (T)1, offset};
    fold_block<T, S, KIND, BACKWARD>(f, own, out, count);
    if (dot && KIND != CHANNELS)
      for (int64_t e = 0; e < n; e++)
        for (int64_t h = 0; h < p.heads; h++) d_weight[p.rows.edge_of(at + e) * p.heads + h] = dot[e * p.heads + h];
  }
}

// The first message of row r, [size].
template <class T, class S> static void first_message(const RowReduce<T> &p, int64_t b, int64_t r, T *to) {
  const int64_t e = p.rows.ptr[r], width = p.size / p.heads;
  const S *x = (const S *)p.x + (b * p.num_cols + p.rows.col[e]) * p.size;
  const T *weight = p.weight ? p.weight + b * p.weight_stride + p.rows.edge_of(e) * p.heads : nullptr;
  for (int64_t h = 0; h < p.heads; h++)
    for (int64_t d = h * width, stop = d + width; d < stop; d += LANES) {
      const vec<T, LANES> first = load_first_as<T, LANES>(x + d, stop - d) * (weight ? weight[h] : (T)1);
      store_first<T, LANES>(to + d, first, stop - d);
    }
}

// The first row that begins at edge e or after it.
INLINE int64_t first_row_from(const Rows &rows, int64_t e) {
  int64_t low = 0, high = rows.num_rows;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (rows.ptr[middle] < e) low = middle + 1;
    else high = middle;
  }
  return low;
}

template <class T, class S, int KIND, bool BACKWARD> static bool reduce_part(const RowReduce<T> &p, int64_t b, int64_t part) {
  const Rows &rows = p.rows;
  int64_t first = rows.cuts[part], last = rows.cuts[part + 1], size = p.size, entry = b * rows.num_rows * size;
  int64_t row = part ? first_row_from(rows, first) : 0, stop = part + 1 < rows.num_parts ? first_row_from(rows, last) : rows.num_rows;
  Workspace memory;
  T *staged, *dot;
  for (int round = 0; round < 2; round++) {
    if (round && !memory.allocate()) return false;
    staged = memory.take<T>(EDGES * p.heads);
    dot = memory.take<T>(p.d_weight ? EDGES * p.heads : 0);
  }
  if (!p.d_weight) dot = nullptr;
  for (int64_t c = 0; c < EDGES * p.heads; c++) staged[c] = (T)p.sign;
  auto fold = [&](int64_t r, int64_t begin, int64_t end, T *out, T *count) {
    int64_t degree = rows.ptr[r + 1] - rows.ptr[r];
    T factor = p.mean && degree ? 1 / (T)degree : (T)p.sign;
    const T *own = KIND == CENTERED ? count : p.own ? p.own + entry + rows.node_of(r) * size : nullptr;
    if (KIND == CENTERED && degree) first_message<T, S>(p, b, r, count);
    fold_row<T, S, KIND, BACKWARD>(p, b, begin, end, factor, staged, dot, own, out, count);
  };
  if (first < last && first < rows.ptr[row]) {
    int64_t at = (b * rows.num_parts + part) * size, end = rows.ptr[row] < last ? rows.ptr[row] : last;
    fold(row - 1, first, end, p.partial + at, p.count ? p.partial_count + at : nullptr);
  }
  for (; row < stop; row++) {
    int64_t at = entry + rows.node_of(row) * size, end = rows.ptr[row + 1] < last ? rows.ptr[row + 1] : last;
    if (rows.node && row + 4 < stop) prefetch(p.out + entry + rows.node[row + 4] * size, size);
    fold(row, rows.ptr[row], end, p.out + at, p.count ? p.count + at : nullptr);
  }
  return true;
}

// Adds the partial results of rows that several parts share to their rows; of extremes, it keeps the better one.
template <class T> static void join_reduced(const RowReduce<T> &p, int64_t b) {
  const bool extreme = p.kind >= EXTREME && !p.compared;  // the backward pass adds
  for (int64_t part = 1; part < p.rows.num_parts; part++) {
    int64_t first = p.rows.cuts[part], row = first_row_from(p.rows, first);
    if (first == p.rows.cuts[part + 1] || first == p.rows.ptr[row]) continue;
    int64_t at = (b * p.rows.num_rows + p.rows.node_of(row - 1)) * p.size, piece = (b * p.rows.num_parts + part) * p.size;
    for (int64_t d = 0; d < p.size; d++) {
      T more = p.partial[piece + d], so_far = p.out[at + d];
      bool beats = more * (T)p.sign > so_far * (T)p.sign;
      if (p.kind == COUNTED) {
        if (beats) p.count[at + d] = p.partial_count[piece + d];
        else if (more == so_far) p.count[at + d] += p.partial_count[piece + d];
      }
      p.out[at + d] = !extreme ? so_far + more : beats || more != more ? more : so_far;
    }
  }
}

template <class T, class S, bool BACKWARD> static bool reduce(const RowReduce<T> &p, int64_t b, int64_t part) {
  if (p.kind == SUM && p.weight && p.heads == p.size && p.size > 1) return reduce_part<T, S, CHANNELS, BACKWARD>(p, b, part);
  if (p.kind == SUM) return reduce_part<T, S, SUM, BACKWARD>(p, b, part);
  if constexpr (!BACKWARD)
    if (p.kind == CENTERED) return reduce_part<T, S, CENTERED, false>(p, b, part);
  if (p.kind == SQUARES) return reduce_part<T, S, SQUARES, BACKWARD>(p, b, part);
  if (p.kind == EXTREME || BACKWARD) return reduce_part<T, S, EXTREME, BACKWARD>(p, b, part);
  return reduce_part<T, S, COUNTED, BACKWARD>(p, b, part);
}

// A sum or mean along edges in the order that the caller has them in, for a graph that is too small to be sorted first.
// A row adds up its edges in the order that sorted ones have, so the bits are those of `reduce` in one part.
template <class T> struct EdgeSum {
  const int64_t *to, *from;  // [E]; null: edge e comes from node e
  int64_t num_edges, num_rows, size;
  const T *x, *weight;       // [nodes, size], [E]; null weights: ones
  T *out, *share;            // [num_rows, size]; [num_rows]: null for a sum; of a mean, what an edge of a row counts
};

template <class T> static bool edge_sum(const EdgeSum<T> &p) {
  __builtin_memset(p.out, 0, p.num_rows * p.size * sizeof(T));
  for (int64_t e = 0; e < p.num_edges; e++) {
    if (p.from && e + FEATURES_AHEAD < p.num_edges) prefetch(p.x + p.from[e + FEATURES_AHEAD] * p.size, p.size);
    const T *x = p.x + (p.from ? p.from[e] : e) * p.size, w = p.weight ? p.weight[e] : 1;
    T *out = p.out + p.to[e] * p.size;
    int64_t d = 0;
    for (; d + LANES <= p.size; d += LANES) {
      vec<T, LANES> total = load<T, LANES>(out + d);
      total += w * load<T, LANES>(x + d);
      store<T, LANES>(out + d, total);
    }
    if (d < p.size) {
      vec<T, LANES> total = load_first<T, LANES>(out + d, p.size - d);
      total += w * load_first<T, LANES>(x + d, p.size - d);
      store_first<T, LANES>(out + d, total, p.size - d);
    }
  }
  if (!p.share) return true;
  __builtin_memset(p.share, 0, p.num_rows * sizeof(T));
  for (int64_t e = 0; e < p.num_edges; e++) p.share[p.to[e]] += 1;
#pragma clang loop vectorize(disable)
  for (int64_t r = 0; r < p.num_rows; r++) {
    const T share = p.share[r] > 0 ? 1 / p.share[r] : (T)1;
    p.share[r] = share;
    T *out = p.out + r * p.size;
    for (int64_t d = 0; d < p.size; d++) out[d] *= share;
  }
  return true;
}

KERNEL(edge_sum_f32, EdgeSum<float>, edge_sum(*p))
KERNEL(edge_sum_f64, EdgeSum<double>, edge_sum(*p))
extern "C" int64_t edge_sum_size() { return sizeof(EdgeSum<float>); }

#define EXPORT_FOR(suffix, T, S) \
  KERNEL(row_reduce_forward_##suffix, RowReduce<T>, reduce<T, S, false>(*p, b, part)) \
  KERNEL(row_reduce_backward_##suffix, RowReduce<T>, reduce<T, S, true>(*p, b, part)) \
  KERNEL(row_reduce_join_##suffix, RowReduce<T>, join_reduced(*p, b), true)
EXPORT_FOR(f32, float, float)
EXPORT_FOR(f64, double, double)
#undef EXPORT_FOR
KERNEL(row_reduce_forward_bf16, RowReduce<float>, reduce<float, bfloat16, false>(*p, b, part))
extern "C" int64_t row_reduce_size() { return sizeof(RowReduce<float>); }
