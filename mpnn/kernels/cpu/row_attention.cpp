// Attention along the rows of a sparse graph, for destination i, its in-neighbors j and head h:
//
//     l_ij = score(query_i, key_j, edge_ij) + bias_ij                   the logit
//     w_ij = exp(l_ij - max_j l_ij) / sum_j exp(l_ij - max_j l_ij)    or sigmoid(l_ij), or l_ij itself
//     y_i  = sum_j dropout(w_ij) (value_j + edge_value_ij)
//
// The softmax is the online one of FlashAttention (Dao et al. 2022, arXiv:2205.14135): a row keeps its maximum, the sum
// of exponentials and the sum of values, and rescales them when the maximum grows. No E x D tensor is written.
//
// The backward pass goes by source, where key and value are at hand for a whole row and each edge reads the query and
// the gradient at its destination once. With dw_ij = <dy_i, value_j + edge_value_ij> and delta_i = <dy_i, y_i>:
//
//     dl_ij = w_ij (dw_ij - delta_i)      dvalue_j = sum_i w_ij dy_i      dkey_j = sum_i dl_ij scale query_i
//
// It leaves dl_ij of each edge, and `row_attention_sums` then computes dquery_i = sum_j dl_ij scale key_j by
// destination, and the gradients of tables by edge type.
//
// Where several heads of queries share those of keys (`shared`), an edge reads less of its source than of its
// destination, and all of these sums are products of small matrices: of the heads that share a key, with copies of what
// the edges of a row read. Then one pass goes by destination, and adds dkey_j and dvalue_j to copies for each part.
//
// The tangent pass (forward-mode derivatives) goes by destination. With l'_ij the tangent of a logit and t_i = lse'_i:
//
//     t_i = sum_j w_ij l'_ij      y'_i = sum_j dropout(w_ij) value'_j + dropout(w_ij l'_ij) value_j  -  t_i y_i
//
//     for each batch entry and part of the edges      side by side
//         for each block of edges                     logits of the block; then its rows:
//             for each row with edges in the block    weights and sums, heads in vectors
//
// Called by `mpnn/kernels/rows/attention.py`.
#include "products.h"
#include "rows.h"

enum { SOFTMAX, SIGMOID, NO_NORMALIZER };
enum { CONSTANT, DOT, ADDITIVE, ACTIVATED };  // <q, k>; activation(query + key); <vector, activation(query + key)>
enum { LEAKY_RELU, TANH };

template <class T> struct RowAttention {
  Rows rows;
  int64_t heads, score, normalize, activation, shared;
  double scale, softcap, slope;
  NodeTensor<const T> query, key, value;      // of an additive score, its two terms
  const T *vector;                            // [heads, width], ACTIVATED
  EdgeTensor<const T> edge_key, edge_value;   // vectors added to keys (or under the activation), and to values
  EdgeTensor<const T> edge_term, bias, table; // numbers added under the activation, and to logits
  const T *row_bias, *col_bias;               // added to logits, [batch, rows, heads], [batch, num_cols, heads]; or both null
  int64_t num_cols;
  const uint32_t *dropout_keys;               // dropout's, [2 + batch * heads], see simd.h; null: no dropout
  const uint32_t *row_ids, *col_ids;          // what dropout hashes in place of node numbers; null: the numbers
  int64_t threshold;
  double keep_scale;
  T *out;                                     // [batch, rows, heads, value width]
  T *stats;                                   // [batch, rows, 2, heads]: maximum (0 without edges), 1 / sum (0 for 0)
  T *weights;                                 // [batch, E, heads], before dropout, in the caller's order; null: not asked
  T *partial;                                 // [batch, parts, 2, heads * (2 + value width)]: maximum, sum, sum of values
  int64_t *partial_row;                       // [batch, parts, 2]: their rows, -1 for none

  // The rest is for the backward pass, where rows are those of sources; of destinations if `shared`.
  NodeTensor<const T> d_out;
  const T *saved_stats;                       // `stats` of the forward pass
  const T *saved_out;                         // `out` of the forward pass
  const T *saved_weights, *d_weights;         // [batch, E, heads], in the caller's order; null: none
  T *row_stats;                               // [batch, num_dst, 3, heads]: maximum, 1 / sum, delta
  int64_t num_dst;
  T *numbers;                                 // [batch, E, stride, heads] by slot: dl, and w, dbias if there is a place
  int64_t stride, weight_at, bias_at;         // -1: no place
  NodeTensor<T> d_value, d_key;               // if `shared`, [batch * parts, ...], without the scale
  NodeTensor<T> d_query;                      // if `shared`
  T *d_vector;                                // [batch, parts, heads, width]
  EdgeTensor<T> d_edge_key, d_edge_value, d_edge_term, d_bias;

  // The tangents of all inputs, null where they are 0, for the tangent pass, which reads `out` and `stats` of this one.
  // It writes its out; its stats [batch, rows, heads], the tangents of lse; and its weights: w_ij l'_ij of a softmax.
  const RowAttention *tangent;
};

// A sum along rows in the backward pass, [batch, rows, ...] into `out`:
//     WEIGHTED     sum_e numbers[e, which] (x[col_e] + edge_key_e) * factor
//     NUMBERS      sum_e numbers[e, which]
//     ACTIVATIONS  sum_e numbers[e, which] vector activation'(own_row + x[col_e] + edge_key_e)
enum { WEIGHTED, NUMBERS, ACTIVATIONS };
template <class T> struct RowSums {
  Rows rows;
  int64_t heads, kind, activation;
  double slope, factor;
  const T *numbers;
  int64_t stride, which;
  NodeTensor<const T> x, own;
  const T *vector;
  EdgeTensor<const T> edge_key;
  NodeTensor<T> out;
  T *partial;            // [batch, parts, 2, heads * width]
  int64_t *partial_row;  // [batch, parts, 2]
};

template <class T> using V = vec<T, LANES>;

// The function of an additive score, and its derivative.
template <class T, bool IS_TANH> struct Activation {
  T slope;
  INLINE V<T> leaky(V<T> z, T slope) { return z > 0 ? splat<T, LANES>(1) : splat<T, LANES>(slope); }
  V<T> value(V<T> z) const { return IS_TANH ? tanh<T, LANES>(z) : z * leaky(z, slope); }
  // From z, or for tanh from its value.
  V<T> derivative(V<T> z, V<T> y) const { return IS_TANH ? 1 - y * y : leaky(z, slope); }
};
template <class T, class Body> INLINE void with_activation(int64_t activation, double slope, Body body) {
  if (activation == TANH) body(Activation<T, true>{(T)slope});
  else body(Activation<T, false>{(T)slope});
}

// The numbers of a block of edges, [edges, heads] each.
template <class T> struct Block {
  int64_t size, room;
  Segments segments;
  Reads<T> query, key, value, d_out;
  T *s;     // logits, then weights
  T *raw;   // under the activation; of tanh and soft capping its value, from which the derivative follows
  T *kept;  // what dropout multiplies weights by
  T *g;     // gradients
  T *keys, *values, *turned, *found;  // if `shared`: copies of what edges read; features of a row, and a product

  void plan(Workspace &memory, const RowAttention<T> &p) {
    size = block_size(p.heads);
    room = size + AHEAD + LANES;
    segments.row = memory.take<int64_t>(room);
    segments.first = memory.take<int64_t>(room);
    query.plan(memory, p.query, p.heads, room);
    key.plan(memory, p.key, p.heads, room);
    value.plan(memory, p.value, p.heads, room);
    d_out.plan(memory, p.d_out, p.heads, room);
    s = memory.take<T>(room * p.heads + LANES);
    raw = memory.take<T>(room * p.heads + LANES);
    kept = memory.take<T>(room * p.heads + LANES);
    g = memory.take<T>(room * p.heads + LANES);
    if (!p.shared) return;
    const int64_t width = p.query.width > p.value.width ? p.query.width : p.value.width;
    keys = memory.take<T>(size * p.key.size());
    values = memory.take<T>(size * p.value.size());
    turned = memory.take<T>(width * 8);
    found = memory.take<T>(size * (width + p.heads + 8));
  }
  // body(row, first, end) for the edges of each row.
  template <class Body> void each_row(Body body) const {
    for (int64_t k = 0; k < segments.count; k++) body(segments.row[k], segments.first[k], segments.first[k + 1]);
  }
  void point(const RowAttention<T> &p, int64_t b) {
    if (p.score != CONSTANT) query.data = p.query.entry(b), key.data = p.key.entry(b);
    value.data = p.value.entry(b);
    d_out.data = p.d_out.data ? p.d_out.entry(b) : nullptr;
  }
};

// The dot products <x_k, y_k> of eight pairs.
template <class T> INLINE V<T> eight_dots(const T *const *x, const T *const *y, int64_t width) {
  V<T> total[8];
  UNROLL for (int k = 0; k < 8; k++) total[k] = load<T, LANES>(x[k]) * load<T, LANES>(y[k]);
  for (int64_t c = LANES; c < width; c += LANES)
    UNROLL for (int k = 0; k < 8; k++) total[k] += load<T, LANES>(x[k] + c) * load<T, LANES>(y[k] + c);
  return sums_of_eight<T>(total);
}

// out[e, h] = scale <a_h, b_h> over n edges: eight pairs of edge and head at a time.
template <class T>
static void dots(const Reads<T> &a, const Reads<T> &b, int64_t n, int64_t heads, T scale, bool fetch_a, bool fetch_b, T *out) {
  int64_t width = a.per_head * LANES;
  const T *x[8], *y[8];
  if (heads % 8 == 0) {
    for (int64_t e = 0; e < n; e++) {
      if (fetch_a) a.fetch(e);
      if (fetch_b) b.fetch(e);
      const T *from_a = a.data + a.at[e], *from_b = b.data + b.at[e];
      for (int64_t h = 0; h < heads; h += 8) {
        UNROLL for (int k = 0; k < 8; k++) x[k] = from_a + a.start[h + k], y[k] = from_b + b.start[h + k];
        store<T, LANES>(out + e * heads + h, eight_dots(x, y, width) * scale);
      }
    }
    return;
  }
  int64_t e = 0, h = 0;
  for (int64_t pair = 0; pair < n * heads; pair += 8) {
    for (int k = 0; k < 8; k++) {
      x[k] = a.of(e, h), y[k] = b.of(e, h);
      if (!h && fetch_a) a.fetch(e);
      if (!h && fetch_b) b.fetch(e);
      if (h + 1 < heads) h++;
      else if (e + 1 < n) h = 0, e++;
    }
    store<T, LANES>(out + pair, eight_dots(x, y, width) * scale);
  }
}

// Copies of what n edges read, [edges, heads, width].
template <class T> static void copy(const Reads<T> &x, int64_t n, T *to) {
  for (int64_t e = 0; e < n; e++, to += x.heads * x.apart) {
    x.fetch(e);
    for (int64_t c = 0; c < x.heads * x.apart; c += LANES) store<T, LANES>(to + c, load<T, LANES>(x.data + x.at[e] + c));
  }
}

// out[e, h] = scale <own_h, x_eg> over n edges of a row, for the heads h of the row's features that share head g of the
// edges' x [edges, heads, width].
template <class T>
static void shared_dots(const T *own, const T *x, const NodeTensor<const T> &shape, int64_t n, int64_t heads, T scale, T *turned, T *found, T *out) {
  const int64_t width = shape.width, each = heads / shape.heads, columns = divide_up(each, 8) * 8;
  for (int64_t g = 0; g < shape.heads; g++, own += each * width, x += width, out += each) {
    for (int64_t h = 0; h < columns; h += 8) {
      for (int64_t c = 0; c < width; c += 8) {
        V<T> square[8];
        UNROLL for (int k = 0; k < 8; k++) square[k] = h + k < each ? load<T, 8>(own + (h + k) * width + c) : V<T>{};
        transpose<T>(square);
        UNROLL for (int k = 0; k < 8; k++) store<T, 8>(turned + (c + k) * 8, square[k]);
      }
      product_columns<8, 8, 1, false, T>({x, shape.size()}, {turned, 8}, {found + h, columns}, n, width);
    }
    for (int64_t e = 0; e < n; e++)
      for (int64_t h = 0; h < each; h++) out[e * heads + h] = found[e * columns + h] * scale;
  }
}

// sums[h] += weight_eh x_eg over n edges of a row, for the heads h that share head g; sums start at zero if `fresh`.
template <class T>
static void shared_sums(const T *weight, const T *x, const NodeTensor<const T> &shape, int64_t n, int64_t heads, bool fresh, T *sums) {
  const int64_t width = shape.width, each = heads / shape.heads;
  for (int64_t g = 0; g < shape.heads; g++, weight += each, x += width, sums += each * width) {
    const Matrix<const T> A{weight, 1, heads}, B{x, shape.size()};
    if (fresh) product<4, false, T>(A, B, {sums, width}, each, n, width);
    else product<4, true, T>(A, B, {sums, width}, each, n, width);
  }
}

// Its adjoint: adds weight_eh own_h, over the heads h that share head g of `out`, to the sources of n edges.
template <class T>
static void add_to_sources(const T *weight, const T *own, const NodeTensor<T> &out, int64_t entry, const int32_t *source, int64_t n, int64_t heads, T *found) {
  if (!out.data) return;
  const int64_t width = out.width, each = heads / out.heads;
  for (int64_t g = 0; g < out.heads; g++, weight += each, own += each * width) {
    product<4, false, T>({weight, heads}, {own, width}, {found, width}, n, each, width);
    for (int64_t e = 0; e < n; e++) {
      T *to = out.entry(entry) + source[e] * out.size() + g * width;
      for (int64_t c = 0; c < width; c += LANES)
        store<T, LANES>(to + c, load<T, LANES>(to + c) + load<T, LANES>(found + e * width + c));
    }
  }
}

// out[e, h] += scale <a_h, vector of the edge>.
template <class T>
static void add_edge_dots(const Reads<T> &a, const EdgeTensor<const T> &x, const Rows &rows, int64_t b, int64_t first, int64_t n, int64_t heads, T scale, T *out) {
  for (int64_t e = 0; e < n; e++) {
    const T *row = x.row(b, rows.edge_of(first + e));
    for (int64_t h = 0; h < heads; h++) {
      const T *from = a.of(e, h), *own = x.of_head(row, h);
      V<T> total{};
      for (int64_t c = 0; c < x.width; c += LANES)
        total += load<T, LANES>(from + c) * load_first<T, LANES>(own + c, x.width - c);
      out[e * heads + h] += scale * sum<T, LANES>(total);
    }
  }
}

// query_i + key_j + edge_ij of ACTIVATED: LANES numbers from c on.
template <class T>
INLINE V<T> under_activation(const T *query, const T *key, const T *edge, int64_t width, int64_t c) {
  V<T> z = load<T, LANES>(query + c) + load<T, LANES>(key + c);
  return edge ? z + load_first<T, LANES>(edge + c, width - c) : z;
}

// out[e, h] = <vector_h, activation(query_i + key_j + edge_ij)>.
template <class T, class F>
static void activated_dots(const RowAttention<T> &p, const Block<T> &block, int64_t b, int64_t first, int64_t n, bool fetch_query, bool fetch_key, F f, T *out) {
  int64_t heads = p.heads, width = block.query.per_head * LANES;
  for (int64_t e = 0; e < n; e++) {
    if (fetch_query) block.query.fetch(e);
    if (fetch_key) block.key.fetch(e);
    const T *row = p.edge_key.data ? p.edge_key.row(b, p.rows.edge_of(first + e)) : nullptr;
    for (int64_t h = 0; h < heads; h++) {
      const T *query = block.query.of(e, h), *key = block.key.of(e, h), *edge = row ? p.edge_key.of_head(row, h) : nullptr;
      V<T> total{};
      for (int64_t c = 0; c < width; c += LANES)
        total += f.value(under_activation(query, key, edge, p.edge_key.width, c)) * load<T, LANES>(p.vector + h * width + c);
      out[e * heads + h] = sum<T, LANES>(total);
    }
  }
}

// s += row_bias + col_bias. Their sum comes first: of two large numbers it may be a small one.
template <class T> static void add_node_biases(const RowAttention<T> &p, const Segments &segments, int64_t b, int64_t first, T *s) {
#pragma clang fp reassociate(off)
  for (int64_t k = 0; k < segments.count; k++) {
    const T *row = p.row_bias + (b * p.rows.num_rows + p.rows.node_of(segments.row[k])) * p.heads;
    for (int64_t e = segments.first[k]; e < segments.first[k + 1]; e++) {
      const T *col = p.col_bias + (b * p.num_cols + p.rows.col[first + e]) * p.heads;
      for (int64_t h = 0; h < p.heads; h++) {
        const T sum = row[h] + col[h];
        s[e * p.heads + h] += sum;
      }
    }
  }
}

// The logits of n edges into block.s, and what the derivative of an activation or of soft capping needs into block.raw.
template <class T>
static void logits(const RowAttention<T> &p, const Block<T> &block, int64_t b, int64_t first, int64_t n, bool fetch_query, bool fetch_key) {
  int64_t heads = p.heads, count = n * heads;
  T *s = block.s, *raw = block.raw;
  if (p.score == DOT) {
    if (p.shared) block.each_row([&](int64_t, int64_t from, int64_t to) {
      const T *keys = block.keys + from * p.key.size();
      shared_dots(block.query.of(from, 0), keys, p.key, to - from, heads, (T)p.scale, block.turned, block.found, s + from * heads);
    });
    else dots(block.query, block.key, n, heads, (T)p.scale, fetch_query, fetch_key, s);
    if (p.edge_key.data) add_edge_dots(block.query, p.edge_key, p.rows, b, first, n, heads, (T)p.scale, s);
    if (p.softcap != 0)
      for (int64_t c = 0; c < count; c += LANES) {
        V<T> y = tanh<T, LANES>(load<T, LANES>(s + c) / (T)p.softcap);
        store<T, LANES>(raw + c, y);
        store<T, LANES>(s + c, y * (T)p.softcap);
      }
  } else if (p.score == ADDITIVE) {
    for (int64_t e = 0; e < n; e++) {
      if (fetch_query) block.query.fetch(e);
      if (fetch_key) block.key.fetch(e);
    }
    by_heads(heads, [&](auto wide, int64_t h) {
      constexpr int N = decltype(wide)::count;
      for (int64_t e = 0; e < n; e++)
        store<T, N>(raw + e * heads + h, load<T, N>(block.query.data + block.query.at[e] + h) + load<T, N>(block.key.data + block.key.at[e] + h));
    });
    add_numbers(p.edge_term, p.rows, b, first, n, heads, raw);
    with_activation<T>(p.activation, p.slope, [&](auto f) {
      for (int64_t c = 0; c < count; c += LANES) {
        V<T> z = load<T, LANES>(raw + c), y = f.value(z);
        if (p.activation == TANH) store<T, LANES>(raw + c, y);
        store<T, LANES>(s + c, y);
      }
    });
  } else if (p.score == ACTIVATED) {
    with_activation<T>(p.activation, p.slope, [&](auto f) { activated_dots(p, block, b, first, n, fetch_query, fetch_key, f, s); });
  } else {
    for (int64_t c = 0; c < count; c++) s[c] = (T)p.scale;
  }
  add_numbers(p.bias, p.rows, b, first, n, heads, s);
  add_numbers(p.table, p.rows, b, first, n, heads, s);
  if (p.row_bias) add_node_biases(p, block.segments, b, first, s);
}

template <class T> INLINE void sigmoids(T *s, int64_t count) {
  for (int64_t c = 0; c < count; c += LANES) store<T, LANES>(s + c, sigmoid<T, LANES>(load<T, LANES>(s + c)));
}

template <class T> INLINE void multiply(T *x, const T *y, int64_t count) {
  for (int64_t c = 0; c < count; c++) x[c] *= y[c];
}

// What dropout multiplies the weights of a block by.
template <class T> static void draw(const RowAttention<T> &p, const Block<T> &block, int64_t b, int64_t first, bool by_source) {
  int64_t heads = p.heads;
  const uint32_t row_key = p.dropout_keys[by_source], col_key = p.dropout_keys[!by_source];
  by_heads(heads, [&](auto wide, int64_t h) {
    constexpr int N = decltype(wide)::count;
    const auto streams = load<uint32_t, N>(p.dropout_keys + 2 + b * heads + h);
    for (int64_t k = 0; k < block.segments.count; k++) {
      uint32_t row = (uint32_t)p.rows.node_of(block.segments.row[k]);
      if (p.row_ids) row = p.row_ids[row];
      const vec<uint32_t, N> words = streams * dropout_word(row_key, row);
      for (int64_t e = block.segments.first[k]; e < block.segments.first[k + 1]; e++) {
        uint32_t col = (uint32_t)p.rows.col[first + e];
        if (p.col_ids) col = p.col_ids[col];
        const auto drawn = (vec<int32_t, N>)(words * dropout_word(col_key, col)) >= (int32_t)p.threshold;
        const auto kept = __builtin_convertvector(drawn, vec<typename bits_of<T>::type, N>);
        store<T, N>(block.kept + e * heads + h, kept ? splat<T, N>((T)p.keep_scale) : vec<T, N>{});
      }
    }
  });
}

// The running softmax of a row, for all heads.
template <class T> struct Row {
  T *maximum, *shift, *total, *sums;  // shift: the maximum, or 0 while that is minus infinity

  void plan(Workspace &memory, int64_t heads, int64_t width) {
    maximum = memory.take<T>(heads);
    shift = memory.take<T>(heads);
    total = memory.take<T>(heads);
    sums = memory.take<T>(heads * width);
  }

  // w = exp(s - shift) for the logits s of the edges begin to end; what was summed before is rescaled.
  void exponentials(T *s, T *w, int64_t heads, int64_t begin, int64_t end, int64_t width, bool fresh) {
    by_heads(heads, [&](auto wide, int64_t h) {
      constexpr int N = decltype(wide)::count;
      vec<T, N> before = fresh ? splat<T, N>(-infinity<T>()) : load<T, N>(maximum + h), best = before;
      for (int64_t e = begin; e < end; e++) best = larger(load<T, N>(s + e * heads + h), best);
      vec<T, N> by = best == -infinity<T>() ? vec<T, N>{} : best;
      for (int64_t e = begin; e < end; e++) store<T, N>(s + e * heads + h, load<T, N>(s + e * heads + h) - by);
      store<T, N>(maximum + h, best);
      store<T, N>(shift + h, by);
      if (fresh) return;
      for (int k = 0; k < N; k++)
        if (before[k] != best[k]) {
          T factor = exp1<T>(before[k] - best[k]);
          total[h + k] *= factor;
          for (int64_t d = 0; d < width; d++) sums[(h + k) * width + d] *= factor;
        }
    });
    // w has room beyond the end; the next edges come later
    for (int64_t c = begin * heads; c < end * heads; c += LANES)
      store<T, LANES>(w + c, exp<T, LANES>(load<T, LANES>(s + c)));
    sum_numbers(w, heads, heads, begin, end, fresh, total);
  }
};

// y_i = sums / total, and the statistics from which the backward pass computes weights again.
template <class T>
static void finish_row(const RowAttention<T> &p, int64_t b, int64_t row, const T *shift, const T *total, const T *sums) {
  int64_t heads = p.heads, width = p.value.width, at = b * p.rows.num_rows + p.rows.node_of(row);
  T *stats = p.stats + at * 2 * heads, *out = p.out + at * heads * width;
  for (int64_t h = 0; h < heads; h++) {
    T inverse = p.normalize != SOFTMAX ? 1 : total[h] == 0 ? 0 : 1 / total[h];
    stats[h] = shift[h];
    stats[heads + h] = inverse;
    for (int64_t d = 0; d < width; d += LANES)
      store<T, LANES>(out + h * width + d, load<T, LANES>(sums + h * width + d) * inverse);
  }
}

// The part's first and last row, which it may share with others.
enum { BEGUN, UNENDED };

template <class T> static bool forward(const RowAttention<T> &p, int64_t b, int64_t part) {
  int64_t heads = p.heads, width = p.value.width, first = p.rows.cuts[part], last = p.rows.cuts[part + 1];
  if (first == last) return true;
  Workspace memory;
  Block<T> block;
  Row<T> row;
  for (int round = 0; round < 2; round++) {
    if (round && !memory.allocate()) return false;
    block.plan(memory, p);
    row.plan(memory, heads, width);
  }
  block.point(p, b);
  T *s = block.s, *w = p.normalize == SOFTMAX ? block.g : s;
  bool fresh = true;
  int64_t at = p.rows.row_of(first);
  for (int64_t begin = first, n; begin < last; begin += n) {
    n = block.segments.cut(p.rows, begin, last - begin < block.size ? last - begin : block.size, at);
    block.value.by_column(p.rows, begin, n);
    if (p.score != CONSTANT) block.key.by_column(p.rows, begin, n), block.query.by_row(p.rows, block.segments, n);
    if (p.shared) copy(block.key, n, block.keys), copy(block.value, n, block.values);
    logits(p, block, b, begin, n, false, true);
    if (p.normalize == SIGMOID) sigmoids(s, n * heads);
    if (p.weights)
      for (int64_t e = 0; e < n; e++) {
        T *to = p.weights + (b * p.rows.num_edges + p.rows.edge_of(begin + e)) * heads;
        copy_heads(to, s + e * heads, heads);
      }
    if (p.dropout_keys) draw(p, block, b, begin, false);
    for (int64_t k = 0; k < block.segments.count; k++) {
      int64_t from = block.segments.first[k], to = block.segments.first[k + 1];
      at = block.segments.row[k];
      if (p.normalize == SOFTMAX) row.exponentials(s, w, heads, from, to, width, fresh);
      if (p.dropout_keys) multiply(w + from * heads, block.kept + from * heads, (to - from) * heads);
      if (p.shared) shared_sums(w + from * heads, block.values + from * p.value.size(), p.value, to - from, heads, fresh, row.sums);
      else weighted_sums(w, heads, block.value, from, to, true, fresh, row.sums);
      if (p.edge_value.data) weighted_edge_vectors(w, heads, p.edge_value, p.rows, b, begin, from, to, width, row.sums);
      bool whole = begin + to == p.rows.ptr[at + 1];
      if (whole && p.rows.ptr[at] >= first) {
        finish_row(p, b, at, row.shift, row.total, row.sums);
      } else if (whole || begin + to == last) {
        int64_t piece = (b * p.rows.num_parts + part) * 2 + (p.rows.ptr[at] < first ? BEGUN : UNENDED);
        T *state = p.partial + piece * heads * (2 + width);
        p.partial_row[piece] = at;
        for (int64_t h = 0; h < heads; h++) state[h] = row.maximum[h], state[heads + h] = row.total[h];
        for (int64_t d = 0; d < heads * width; d++) state[2 * heads + d] = row.sums[d];
      }
      fresh = whole;
    }
  }
  return true;
}

// Writes the rows that parts share.
template <class T> static void join(const RowAttention<T> &p, int64_t b) {
  int64_t heads = p.heads, width = p.value.width, size = heads * (2 + width), pieces = 2 * p.rows.num_parts;
  T *state = p.partial + b * pieces * size, *so_far = nullptr;
  const int64_t *row = p.partial_row + b * pieces;
  int64_t at = -1;
  auto finish = [&] {
    if (at < 0) return;
    for (int64_t h = 0; h < heads; h++) so_far[h] = so_far[h] == -infinity<T>() ? 0 : so_far[h];
    finish_row(p, b, at, so_far, so_far + heads, so_far + 2 * heads);
  };
  for (int64_t k = 0; k < pieces; k++) {
    if (row[k] < 0) continue;
    T *more = state + k * size;
    if (row[k] != at) {
      finish();
      at = row[k], so_far = more;
      continue;
    }
    for (int64_t h = 0; h < heads; h++) {
      T best = so_far[h] > more[h] ? so_far[h] : more[h], mine = 1, its = 1;
      if (p.normalize == SOFTMAX && so_far[h] != best) mine = exp1<T>(so_far[h] - best);
      if (p.normalize == SOFTMAX && more[h] != best) its = exp1<T>(more[h] - best);
      so_far[h] = best;
      so_far[heads + h] = so_far[heads + h] * mine + more[heads + h] * its;
      for (int64_t d = 2 * heads + h * width; d < 2 * heads + (h + 1) * width; d++)
        so_far[d] = so_far[d] * mine + more[d] * its;
    }
  }
  finish();
}

// Logits in p.weights become the softmax's weights, for the rows that begin in the part.
template <class T> static void normalize_weights(const RowAttention<T> &p, int64_t b, int64_t part) {
  int64_t heads = p.heads, first = p.rows.cuts[part], last = p.rows.cuts[part + 1];
  if (first == last) return;
  int64_t row = p.rows.row_of(first);
  for (int64_t e = first; e < last; e++) {
    while (p.rows.ptr[row + 1] <= e) row++;
    const T *stats = p.stats + (b * p.rows.num_rows + row) * 2 * heads;
    T *w = p.weights + (b * p.rows.num_edges + p.rows.edge_of(e)) * heads;
    by_heads(heads, [&](auto wide, int64_t h) {
      constexpr int N = decltype(wide)::count;
      store<T, N>(w + h, exp<T, N>(load<T, N>(w + h) - load<T, N>(stats + h)) * load<T, N>(stats + heads + h));
    });
  }
}

// out[e, h] = <vector_h, activation'(z) z'> + <vector'_h, activation(z)> with z = query_i + key_j + edge_ij.
template <class T, class F>
static void activated_tangents(const RowAttention<T> &p, const Block<T> &block, const Block<T> &moved, int64_t b, int64_t first, int64_t n, F f, T *out) {
  const RowAttention<T> &d = *p.tangent;
  int64_t heads = p.heads, width = block.query.per_head * LANES;
  for (int64_t e = 0; e < n; e++) {
    if (d.key.data) moved.key.fetch(e);
    const int64_t edge = p.rows.edge_of(first + e);
    const T *row = p.edge_key.data ? p.edge_key.row(b, edge) : nullptr, *d_row = d.edge_key.data ? d.edge_key.row(b, edge) : nullptr;
    for (int64_t h = 0; h < heads; h++) {
      const T *query = block.query.of(e, h), *key = block.key.of(e, h), *own = row ? p.edge_key.of_head(row, h) : nullptr;
      V<T> total{};
      for (int64_t c = 0; c < width; c += LANES) {
        V<T> z = under_activation(query, key, own, p.edge_key.width, c), y = f.value(z), d_z{};
        if (d.query.data) d_z += load<T, LANES>(moved.query.of(e, h) + c);
        if (d.key.data) d_z += load<T, LANES>(moved.key.of(e, h) + c);
        if (d_row) d_z += load_first<T, LANES>(d.edge_key.of_head(d_row, h) + c, d.edge_key.width - c);
        total += load<T, LANES>(p.vector + h * width + c) * f.derivative(z, y) * d_z;
        if (d.vector) total += load<T, LANES>(d.vector + h * width + c) * y;
      }
      out[e * heads + h] = sum<T, LANES>(total);
    }
  }
}

// The tangents of the logits of n edges into moved.s. `block` is as `logits` leaves it.
template <class T>
static void logit_tangents(const RowAttention<T> &p, const Block<T> &block, const Block<T> &moved, int64_t b, int64_t first, int64_t n) {
  const RowAttention<T> &d = *p.tangent;
  const int64_t heads = p.heads, count = n * heads;
  T *g = moved.s, *raw = block.raw, *more = moved.g;
  for (int64_t c = 0; c < count; c++) g[c] = 0;
  if (p.score == DOT) {
    if (d.query.data) dots(moved.query, block.key, n, heads, (T)p.scale, false, false, g);
    if (d.key.data) {
      dots(block.query, moved.key, n, heads, (T)p.scale, false, true, more);
      for (int64_t c = 0; c < count; c++) g[c] += more[c];
    }
    if (d.query.data && p.edge_key.data) add_edge_dots(moved.query, p.edge_key, p.rows, b, first, n, heads, (T)p.scale, g);
    if (d.edge_key.data) add_edge_dots(block.query, d.edge_key, p.rows, b, first, n, heads, (T)p.scale, g);
    if (p.softcap != 0)
      for (int64_t c = 0; c < count; c++) g[c] -= g[c] * raw[c] * raw[c];
  } else if (p.score == ADDITIVE) {
    const auto add = [&](const Reads<T> &x) {
      for (int64_t e = 0; x.data && e < n; e++)
        for (int64_t h = 0; h < heads; h++) g[e * heads + h] += x.data[x.at[e] + h];
    };
    add(moved.query), add(moved.key);
    add_numbers(d.edge_term, p.rows, b, first, n, heads, g);
    with_activation<T>(p.activation, p.slope, [&](auto f) {
      for (int64_t c = 0; c < count; c += LANES) {
        V<T> x = load<T, LANES>(raw + c);
        store<T, LANES>(g + c, load<T, LANES>(g + c) * f.derivative(x, x));
      }
    });
  } else if (p.score == ACTIVATED) {
    with_activation<T>(p.activation, p.slope, [&](auto f) { activated_tangents(p, block, moved, b, first, n, f, g); });
  }
  add_numbers(d.bias, p.rows, b, first, n, heads, g);
  add_numbers(d.table, p.rows, b, first, n, heads, g);
  if (d.row_bias) add_node_biases(d, block.segments, b, first, g);
}

// From logits in block.s and their tangents in moved.s: weights, and the tangents of what a softmax divides by its sum.
template <class T>
static void weight_tangents(const RowAttention<T> &p, const Block<T> &block, const Block<T> &moved, int64_t b, int64_t n) {
  const int64_t heads = p.heads, count = n * heads;
  T *s = block.s, *g = moved.s;
  if (p.normalize == SIGMOID) {
    sigmoids(s, count);
    for (int64_t c = 0; c < count; c++) g[c] *= s[c] - s[c] * s[c];
  }
  if (p.normalize != SOFTMAX) return;
  by_heads(heads, [&](auto wide, int64_t h) {
    constexpr int N = decltype(wide)::count;
    block.each_row([&](int64_t row, int64_t begin, int64_t end) {
      const T *stats = p.stats + (b * p.rows.num_rows + p.rows.node_of(row)) * 2 * heads + h;
      for (int64_t e = begin; e < end; e++) {
        T *x = s + e * heads + h, *y = g + e * heads + h;
        vec<T, N> w = exp<T, N>(load<T, N>(x) - load<T, N>(stats)) * load<T, N>(stats + heads);
        store<T, N>(x, w);
        store<T, N>(y, w * load<T, N>(y));
      }
    });
  });
}

// Writes, or adds, the tangents of a row's results from its sums.
template <class T>
static void tangent_row(const RowAttention<T> &p, int64_t b, int64_t row, const T *total, const T *sums, bool add) {
  const int64_t heads = p.heads, width = p.value.width, at = b * p.rows.num_rows + p.rows.node_of(row);
  const T *out = p.out + at * heads * width;
  T *d_out = p.tangent->out + at * heads * width, *d_lse = p.tangent->stats + at * heads;
  for (int64_t h = 0; h < heads; h++) {
    const T t = p.normalize == SOFTMAX ? total[h] : 0;
    d_lse[h] = t + (add ? d_lse[h] : 0);
    for (int64_t c = h * width; c < (h + 1) * width; c++) d_out[c] = sums[c] - t * out[c] + (add ? d_out[c] : 0);
  }
}

template <class T> static bool tangent(const RowAttention<T> &p, int64_t b, int64_t part) {
  const RowAttention<T> &d = *p.tangent;
  int64_t heads = p.heads, width = p.value.width, first = p.rows.cuts[part], last = p.rows.cuts[part + 1];
  if (first == last) return true;
  Workspace memory;
  Block<T> block, moved;
  T *total, *sums;
  for (int round = 0; round < 2; round++) {
    if (round && !memory.allocate()) return false;
    block.plan(memory, p), moved.plan(memory, d);
    total = memory.take<T>(heads + LANES), sums = memory.take<T>(heads * width);
  }
  block.point(p, b), moved.point(d, b);
  int64_t at = p.rows.row_of(first);
  for (int64_t begin = first, n; begin < last; begin += n) {
    n = block.segments.cut(p.rows, begin, last - begin < block.size ? last - begin : block.size, at);
    const auto read = [&](Block<T> &x) {
      x.value.by_column(p.rows, begin, n);
      if (p.score != CONSTANT) x.key.by_column(p.rows, begin, n), x.query.by_row(p.rows, block.segments, n);
    };
    read(block), read(moved);
    logits(p, block, b, begin, n, false, true);
    logit_tangents(p, block, moved, b, begin, n);
    weight_tangents(p, block, moved, b, n);
    T *w = block.s, *g = moved.s, *dropped = g;
    if (d.weights)
      for (int64_t e = 0; e < n; e++)
        copy_heads(d.weights + (b * p.rows.num_edges + p.rows.edge_of(begin + e)) * heads, g + e * heads, heads);
    if (p.dropout_keys) {
      draw(p, block, b, begin, false);
      dropped = moved.g;
      for (int64_t c = 0; c < n * heads; c++) dropped[c] = g[c] * block.kept[c];
      multiply(w, block.kept, n * heads);
    }
    for (int64_t k = 0; k < block.segments.count; k++) {
      int64_t from = block.segments.first[k], to = block.segments.first[k + 1];
      at = block.segments.row[k];
      bool fresh = begin + from == (p.rows.ptr[at] > first ? p.rows.ptr[at] : first);
      sum_numbers(g, heads, heads, from, to, fresh, total);
      weighted_sums(dropped, heads, block.value, from, to, true, fresh, sums);
      if (d.value.data) weighted_sums(w, heads, moved.value, from, to, true, false, sums);
      if (p.edge_value.data) weighted_edge_vectors(dropped, heads, p.edge_value, p.rows, b, begin, from, to, width, sums);
      if (d.edge_value.data) weighted_edge_vectors(w, heads, d.edge_value, p.rows, b, begin, from, to, width, sums);
      bool whole = begin + to == p.rows.ptr[at + 1];
      if (whole && p.rows.ptr[at] >= first) {
        tangent_row(p, b, at, total, sums, false);
      } else if (whole || begin + to == last) {
        int64_t piece = (b * p.rows.num_parts + part) * 2 + (p.rows.ptr[at] < first ? BEGUN : UNENDED);
        T *state = p.partial + piece * heads * (1 + width);
        p.partial_row[piece] = at;
        for (int64_t h = 0; h < heads; h++) state[h] = total[h];
        for (int64_t c = 0; c < heads * width; c++) state[heads + c] = sums[c];
      }
    }
  }
  return true;
}

// Adds up the rows that parts share. The tangents are 0 there before.
template <class T> static void join_tangent(const RowAttention<T> &p, int64_t b) {
  for (int64_t k = b * 2 * p.rows.num_parts; k < (b + 1) * 2 * p.rows.num_parts; k++) {
    const T *state = p.partial + k * p.heads * (1 + p.value.width);
    if (p.partial_row[k] >= 0) tangent_row(p, b, p.partial_row[k], state, state + p.heads, true);
  }
}

// row_stats of a part of the rows, of destinations here: maximum, 1 / sum, and
// delta_i = sum_j w_ij dw_ij = <dy_i, y_i>, plus <dw_i, w_i> of what weights that were returned are used for.
template <class T> static void prepare(const RowAttention<T> &p, int64_t b, int64_t part, int64_t parts) {
  int64_t heads = p.heads, width = p.d_out.width;
  for (int64_t row = p.num_dst * part / parts; row < p.num_dst * (part + 1) / parts; row++) {
    int64_t i = b * p.num_dst + row;
    const T *stats = p.saved_stats + i * 2 * heads, *out = p.saved_out + i * heads * width;
    const T *d_out = p.d_out.data + i * heads * width;
    T *to = p.row_stats + i * 3 * heads, *delta = to + 2 * heads;
    for (int64_t c = 0; c < 2 * heads; c++) to[c] = stats[c];
    for (int64_t h = 0; h < heads; h++) {
      V<T> total{};
      for (int64_t c = h * width; c < (h + 1) * width; c += LANES) total += load<T, LANES>(d_out + c) * load<T, LANES>(out + c);
      delta[h] = sum<T, LANES>(total);
    }
    for (int64_t e = p.rows.ptr[row]; p.d_weights && e < p.rows.ptr[row + 1]; e++) {
      int64_t at = (b * p.rows.num_edges + p.rows.edge_of(e)) * heads;
      for (int64_t h = 0; h < heads; h++) delta[h] += p.d_weights[at + h] * p.saved_weights[at + h];
    }
  }
}

// Weights into block.s, and into block.g the gradients of what normalised weights were computed from, the logits.
template <class T>
static void logit_gradients(const RowAttention<T> &p, const Block<T> &block, int64_t b, int64_t first, int64_t n) {
  int64_t heads = p.heads, count = n * heads;
  T *s = block.s, *g = block.g;
  if (p.shared) block.each_row([&](int64_t, int64_t from, int64_t to) {
    const T *values = block.values + from * p.value.size();
    shared_dots(block.d_out.of(from, 0), values, p.value, to - from, heads, (T)1, block.turned, block.found, g + from * heads);
  });
  else dots(block.d_out, block.value, n, heads, (T)1, true, false, g);
  if (p.edge_value.data) add_edge_dots(block.d_out, p.edge_value, p.rows, b, first, n, heads, (T)1, g);
  if (p.dropout_keys) {
    draw(p, block, b, first, !p.shared);
    multiply(g, block.kept, count);
  }
  if (p.d_weights)
    for (int64_t e = 0; e < n; e++) {
      const T *from = p.d_weights + (b * p.rows.num_edges + p.rows.edge_of(first + e)) * heads;
      for (int64_t h = 0; h < heads; h++) g[e * heads + h] += from[h];
    }
  if (p.normalize == SOFTMAX) {
    const T *stats = p.row_stats + b * p.num_dst * 3 * heads;
    by_heads(heads, [&](auto wide, int64_t h) {
      constexpr int N = decltype(wide)::count;
      block.each_row([&](int64_t row, int64_t begin, int64_t end) {
        for (int64_t e = begin; e < end; e++) {
          const T *of = stats + (p.shared ? row : p.rows.col[first + e]) * 3 * heads + h;
          T *x = s + e * heads + h, *y = g + e * heads + h;
          vec<T, N> w = exp<T, N>(load<T, N>(x) - load<T, N>(of)) * load<T, N>(of + heads);
          store<T, N>(x, w);
          store<T, N>(y, w * (load<T, N>(y) - load<T, N>(of + 2 * heads)));
        }
      });
    });
  } else if (p.normalize == SIGMOID) {
    sigmoids(s, count);
    for (int64_t c = 0; c < count; c++) g[c] *= s[c] - s[c] * s[c];
  }
}

// Gradients of logits in block.g become those of what soft capping, or the activation of ADDITIVE, was applied to.
template <class T> static void through_activation(const RowAttention<T> &p, const Block<T> &block, int64_t count) {
  T *g = block.g, *raw = block.raw;
  if ((p.score == DOT && p.softcap != 0) || (p.score == ADDITIVE && p.activation == TANH))
    for (int64_t c = 0; c < count; c++) g[c] -= g[c] * raw[c] * raw[c];
  else if (p.score == ADDITIVE)
    for (int64_t c = 0; c < count; c++) g[c] = raw[c] > 0 ? g[c] : g[c] * (T)p.slope;
}

// Adds weight * factor * x to the vectors of n edges, for each head.
template <class T>
static void add_to_edge_vectors(const EdgeTensor<T> &out, const Reads<T> &x, const T *weight, T factor, const Rows &rows, int64_t b, int64_t first, int64_t n, int64_t heads) {
  if (!out.data) return;
  for (int64_t e = 0; e < n; e++) {
    T *row = out.row(b, rows.edge_of(first + e));
    for (int64_t h = 0; h < heads; h++) {
      T w = weight[e * heads + h] * factor, *to = out.of_head(row, h);
      const T *from = x.of(e, h);
      for (int64_t d = 0; d < out.width; d++) to[d] += w * from[d];
    }
  }
}

// With t_e = g_e vector activation'(z_e): adds t_e to sums [heads, width] and to the vectors of edges, and
// g_e activation(z_e) to d_vector. Absent outputs are null.
template <class T, class F>
static void activation_gradients(const T *g, int64_t g_stride, const Reads<T> &query, const Reads<T> &key, const EdgeTensor<const T> &edge_key, const T *vector, const Rows &rows, int64_t b, int64_t first, int64_t begin, int64_t end, int64_t heads, F f, T *sums, T *d_vector, const EdgeTensor<T> *d_edge) {
  int64_t width = query.per_head * LANES;
  for (int64_t h = 0; h < heads; h++)
    for (int64_t c = 0; c < width; c += LANES) {
      T *sum_at = sums + h * width + c;
      V<T> a = load<T, LANES>(vector + h * width + c), total = load<T, LANES>(sum_at), along{};
      for (int64_t e = begin; e < end; e++) {
        int64_t edge = edge_key.data ? rows.edge_of(first + e) : 0;
        const T *own = edge_key.data ? edge_key.of_head(edge_key.row(b, edge), h) : nullptr;
        V<T> z = under_activation(query.of(e, h), key.of(e, h), own, edge_key.width, c), y = f.value(z);
        T weight = g[e * g_stride + h];
        V<T> t = weight * a * f.derivative(z, y);
        total += t;
        along += weight * y;
        if (d_edge) {
          T *to = d_edge->of_head(d_edge->row(b, edge), h) + c;
          store_first<T, LANES>(to, load_first<T, LANES>(to, d_edge->width - c) + t, d_edge->width - c);
        }
      }
      store<T, LANES>(sum_at, total);
      if (d_vector) store<T, LANES>(d_vector + h * width + c, load<T, LANES>(d_vector + h * width + c) + along);
    }
}

// Numbers of n edges to where `row_attention_sums` reads them.
template <class T> static void leave(const RowAttention<T> &p, int64_t b, const T *x, int64_t first, int64_t n, int64_t which) {
  if (!p.numbers || which < 0) return;
  for (int64_t e = 0; e < n; e++) {
    T *to = p.numbers + ((b * p.rows.num_edges + p.rows.slot_of(first + e)) * p.stride + which) * p.heads;
    copy_heads(to, x + e * p.heads, p.heads);
  }
}

// Gradients of sources and of edges, and of destinations if `shared`.
template <class T> static bool backward(const RowAttention<T> &p, int64_t b, int64_t part) {
  int64_t heads = p.heads, first = p.rows.cuts[part], last = p.rows.cuts[part + 1];
  if (first == last) return true;
  int64_t value_size = p.shared ? 0 : heads * p.d_out.width, key_size = p.score == CONSTANT ? 0 : heads * p.query.width;
  int64_t own = b * p.rows.num_parts + part;
  Workspace memory;
  Block<T> block;
  T *sums;
  for (int round = 0; round < 2; round++) {
    if (round && !memory.allocate()) return false;
    block.plan(memory, p);
    sums = memory.take<T>(value_size + key_size + LANES);
  }
  block.point(p, b);
  T *value_sums = sums, *key_sums = sums + value_size;
  T *d_vector = p.d_vector ? p.d_vector + (b * p.rows.num_parts + part) * key_size : nullptr;
  T factor = p.score == DOT ? (T)p.scale : 1;
  int64_t at = p.rows.row_of(first);
  for (int64_t begin = first, n; begin < last; begin += n) {
    n = block.segments.cut(p.rows, begin, last - begin < block.size ? last - begin : block.size, at);
    const int64_t count = n * heads;
    if (p.shared) {
      block.value.by_column(p.rows, begin, n), block.d_out.by_row(p.rows, block.segments, n);
      block.key.by_column(p.rows, begin, n), block.query.by_row(p.rows, block.segments, n);
      copy(block.key, n, block.keys), copy(block.value, n, block.values);
    } else {
      block.value.by_row(p.rows, block.segments, n), block.d_out.by_column(p.rows, begin, n);
      if (p.score != CONSTANT) block.key.by_row(p.rows, block.segments, n), block.query.by_column(p.rows, begin, n);
    }
    for (int64_t e = begin; e < begin + n; e++) {
      if (p.row_stats && !p.shared) prefetch(p.row_stats + (b * p.num_dst + p.rows.col[e]) * 3 * heads, 3 * heads);
      if (p.numbers) prefetch(p.numbers + (b * p.rows.num_edges + p.rows.slot_of(e)) * p.stride * heads, p.stride * heads);
    }
    logits(p, block, b, begin, n, true, false);
    logit_gradients(p, block, b, begin, n);
    add_to_numbers(p.d_bias, p.rows, b, begin, n, heads, block.g);
    if (p.dropout_keys) multiply(block.s, block.kept, count);
    leave(p, b, block.g, begin, n, p.bias_at);
    through_activation(p, block, count);
    add_to_numbers(p.d_edge_term, p.rows, b, begin, n, heads, block.g);
    leave(p, b, block.g, begin, n, 0);
    leave(p, b, block.s, begin, n, p.weight_at);
    add_to_edge_vectors(p.d_edge_value, block.d_out, block.s, (T)1, p.rows, b, begin, n, heads);
    if (p.score == DOT) add_to_edge_vectors(p.d_edge_key, block.query, block.g, (T)p.scale, p.rows, b, begin, n, heads);
    for (int64_t k = 0; k < block.segments.count; k++) {
      int64_t from = block.segments.first[k], to = block.segments.first[k + 1];
      at = block.segments.row[k];
      bool fresh = begin + from == (p.rows.ptr[at] > first ? p.rows.ptr[at] : first);
      if (p.shared) {
        const int32_t *source = p.rows.col + begin + from;
        const T *s = block.s + from * heads, *g = block.g + from * heads;
        if (p.d_query.data) shared_sums(g, block.keys + from * p.key.size(), p.key, to - from, heads, fresh, key_sums);
        if (p.d_query.data && p.edge_key.data) weighted_edge_vectors(block.g, heads, p.edge_key, p.rows, b, begin, from, to, p.query.width, key_sums);
        add_to_sources(s, block.d_out.of(from, 0), p.d_value, own, source, to - from, heads, block.found);
        add_to_sources(g, block.query.of(from, 0), p.d_key, own, source, to - from, heads, block.found);
      } else if (p.d_value.data) {
        weighted_sums(block.s, heads, block.d_out, from, to, false, fresh, value_sums);
      }
      if (p.score == ACTIVATED) {
        if (fresh) for (int64_t d = 0; d < key_size; d++) key_sums[d] = 0;
        with_activation<T>(p.activation, p.slope, [&](auto f) {
          activation_gradients(block.g, heads, block.query, block.key, p.edge_key, p.vector, p.rows, b, begin, from, to, heads, f, key_sums, d_vector, p.d_edge_key.data ? &p.d_edge_key : nullptr);
        });
      } else if (p.score == ADDITIVE) {
        sum_numbers(block.g, heads, heads, from, to, fresh, key_sums);
      } else if (p.score == DOT && p.d_key.data && !p.shared) {
        weighted_sums(block.g, heads, block.query, from, to, false, fresh, key_sums);
      }
      bool whole = begin + to == p.rows.ptr[at + 1];
      if (whole && p.rows.ptr[at] >= first) {
        if (!p.shared) write_row(p.d_value, b, p.rows.node_of(at), value_sums, heads, (T)1, false);
        write_row(p.shared ? p.d_query : p.d_key, b, p.rows.node_of(at), key_sums, heads, factor, false);
      } else if (whole || begin + to == last) {
        int64_t piece = (b * p.rows.num_parts + part) * 2 + (p.rows.ptr[at] < first ? BEGUN : UNENDED);
        p.partial_row[piece] = at;
        for (int64_t d = 0; d < value_size + key_size; d++) p.partial[piece * (value_size + key_size) + d] = sums[d];
      }
    }
  }
  return true;
}

// Adds up the rows that parts share. Outputs are 0 there before.
template <class T> static void join_backward(const RowAttention<T> &p, int64_t b) {
  int64_t heads = p.heads, value_size = p.shared ? 0 : heads * p.d_out.width, key_size = p.score == CONSTANT ? 0 : heads * p.query.width;
  for (int64_t k = b * 2 * p.rows.num_parts; k < (b + 1) * 2 * p.rows.num_parts; k++) {
    if (p.partial_row[k] < 0) continue;
    const T *sums = p.partial + k * (value_size + key_size);
    int64_t node = p.rows.node_of(p.partial_row[k]);
    if (!p.shared) write_row(p.d_value, b, node, sums, heads, (T)1, true);
    write_row(p.shared ? p.d_query : p.d_key, b, node, sums + value_size, heads, p.score == DOT ? (T)p.scale : (T)1, true);
  }
}

template <class T> static bool row_sums(const RowSums<T> &p, int64_t b, int64_t part) {
  int64_t heads = p.heads, first = p.rows.cuts[part], last = p.rows.cuts[part + 1];
  if (first == last) return true;
  int64_t size = block_size(heads), room = size + AHEAD + LANES, total = heads * p.out.width;
  Workspace memory;
  Segments segments;
  Reads<T> x, own;
  T *weight, *sums;
  for (int round = 0; round < 2; round++) {
    if (round && !memory.allocate()) return false;
    segments.row = memory.take<int64_t>(room);
    segments.first = memory.take<int64_t>(room);
    x.plan(memory, p.x, heads, room);
    own.plan(memory, p.own, heads, room);
    weight = memory.take<T>(room * heads + LANES);
    sums = memory.take<T>(total + LANES);
  }
  x.data = p.x.data ? p.x.entry(b) : nullptr, own.data = p.own.data ? p.own.entry(b) : nullptr;
  int64_t at = p.rows.row_of(first);
  for (int64_t begin = first, n; begin < last; begin += n) {
    n = segments.cut(p.rows, begin, last - begin < size ? last - begin : size, at);
    if (x.data) x.by_column(p.rows, begin, n);
    if (own.data) own.by_row(p.rows, segments, n);
    for (int64_t e = 0; e < n; e++) {
      const T *from = p.numbers + ((b * p.rows.num_edges + p.rows.slot_of(begin + e)) * p.stride + p.which) * heads;
      copy_heads(weight + e * heads, from, heads);
    }
    for (int64_t k = 0; k < segments.count; k++) {
      int64_t from = segments.first[k], to = segments.first[k + 1];
      at = segments.row[k];
      bool fresh = begin + from == (p.rows.ptr[at] > first ? p.rows.ptr[at] : first);
      if (p.kind == NUMBERS) {
        sum_numbers(weight, heads, heads, from, to, fresh, sums);
      } else if (p.kind == WEIGHTED) {
        weighted_sums(weight, heads, x, from, to, true, fresh, sums);
        if (p.edge_key.data) weighted_edge_vectors(weight, heads, p.edge_key, p.rows, b, begin, from, to, p.out.width, sums);
      } else {
        if (fresh) for (int64_t d = 0; d < total; d++) sums[d] = 0;
        for (int64_t e = from; e < to; e++) x.fetch(e);
        with_activation<T>(p.activation, p.slope, [&](auto f) {
          activation_gradients<T>(weight, heads, own, x, p.edge_key, p.vector, p.rows, b, begin, from, to, heads, f, sums, nullptr, nullptr);
        });
      }
      bool whole = begin + to == p.rows.ptr[at + 1];
      if (whole && p.rows.ptr[at] >= first) {
        write_row(p.out, b, p.rows.node_of(at), sums, heads, (T)p.factor, false);
      } else if (whole || begin + to == last) {
        int64_t piece = (b * p.rows.num_parts + part) * 2 + (p.rows.ptr[at] < first ? BEGUN : UNENDED);
        p.partial_row[piece] = at;
        for (int64_t d = 0; d < total; d++) p.partial[piece * total + d] = sums[d];
      }
    }
  }
  return true;
}

template <class T> static void join_sums(const RowSums<T> &p, int64_t b) {
  for (int64_t k = b * 2 * p.rows.num_parts; k < (b + 1) * 2 * p.rows.num_parts; k++)
    if (p.partial_row[k] >= 0)
      write_row(p.out, b, p.rows.node_of(p.partial_row[k]), p.partial + k * p.heads * p.out.width, p.heads, (T)p.factor, true);
}

#define EXPORT_FOR(T, suffix) \
  KERNEL(row_attention_forward_##suffix, RowAttention<T>, forward(*p, b, part)) \
  KERNEL(row_attention_join_##suffix, RowAttention<T>, join(*p, b), true) \
  KERNEL(row_attention_weights_##suffix, RowAttention<T>, normalize_weights(*p, b, part), true) \
  KERNEL(row_attention_tangent_##suffix, RowAttention<T>, tangent(*p, b, part)) \
  KERNEL(row_attention_join_tangent_##suffix, RowAttention<T>, join_tangent(*p, b), true) \
  KERNEL(row_attention_prepare_##suffix, RowAttention<T>, prepare(*p, b, part, parts), true) \
  KERNEL(row_attention_backward_##suffix, RowAttention<T>, backward(*p, b, part)) \
  KERNEL(row_attention_join_backward_##suffix, RowAttention<T>, join_backward(*p, b), true) \
  KERNEL(row_attention_sums_##suffix, RowSums<T>, row_sums(*p, b, part)) \
  KERNEL(row_attention_join_sums_##suffix, RowSums<T>, join_sums(*p, b), true)
EXPORT_FOR(float, f32)
EXPORT_FOR(double, f64)
#undef EXPORT_FOR
extern "C" int64_t row_attention_size() { return sizeof(RowAttention<float>); }
extern "C" int64_t row_sums_size() { return sizeof(RowSums<float>); }
