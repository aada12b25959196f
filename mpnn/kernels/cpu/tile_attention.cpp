// Attention over the tiles of a structured graph: FlashAttention (Dao et al. 2022) over a block mask.
//
// Query i attends to the keys j of its runs. The forward pass visits the key tiles of a query tile, with a running
// maximum m and sum l for each row (Milakov & Gimelshein 2018):
//
//     X = scale Q K^T          S = cap(X) + bias, and -inf where (i, j) is no edge
//     m' = max(m, max_j S)     P = exp(S - m')     l' = exp(m - m') l + sum_j P     O' = exp(m - m') O + drop(P) V
//     out = O / l              lse = m + log l
//
// The backward pass visits the query tiles of a key tile, with delta_i = <d_out_i, out_i> - d_lse_i:
//
//     P = exp(S - lse)         dP = drop(d_out V^T)          dS = P * (dP - delta)
//     dV = drop(P)^T d_out     d_bias = dS                   dX = dS * cap'(X)
//     dK = scale dX^T Q        dQ = scale dX K
//
// The tangent pass (forward-mode derivatives) visits tiles as the forward pass does, with t_i = sum_j P S' = lse':
//
//     X' = scale (Q' K^T + Q K'^T)          S' = X' * cap'(X) + bias'          P = exp(S - lse)
//     out' = drop(P) V' + drop(P * S') V - t out
//
// cap(x) is softcap tanh(x / softcap), or x without a softcap; `drop` zeroes what dropout drops, and scales the rest.
// The softmax is in `online_softmax`, in `forward` where O is rescaled and divided, and in `softmax_gradient`; all else
// would serve any weights that are 0 where S = -inf.
//
// S, P, dP and dS of a tile are stored transposed, [COLUMNS][ROWS]: maxima, exponentials and sums of rows run down the
// columns of vectors, and K and V are read in the order of their rows. Each step overwrites the one before: `s` holds
// X, S, P and drop(P) in turn, and `g` holds d_out V^T, dP, dS and dX.
//
// Tiles begin where the documents of the graph begin, and then every ROWS queries and COLUMNS keys: so a document is
// computed in the same order whichever documents lie beside it. The last tiles of a document have fewer rows or keys.
//
// A work item is a query tile of one head, or, backward, a segment of the key tiles of one head of keys with all heads
// of queries that share it. Items write to different places, so that results do not depend on the number of threads.
// Each call keeps contiguous copies of the tiles of the other side, because rows that lie a power of two apart push one
// another out of the cache.
//
//     for each query tile of a head               side by side; backward: each segment of key tiles
//         for each key tile with an edge to it    backward: for each key tile, for each query tile
//             products, softmax, products
//
// Called by `mpnn/kernels/tiles/attention.py`.
#include "products.h"

namespace tile_attention {
namespace {  // private to this file

constexpr int64_t ROWS = 32, COLUMNS = 96;  // of a tile; see mpnn/kernels/tiles/attention.py
// Rows that a product holds in registers: STEP (products.h) divides COLUMNS, and ROW_STEP divides ROWS.
constexpr int ROW_STEP = VECTOR_BYTES == 64 ? 8 : 4;

// ------------------------------------------------------------------------------------------------ parameters

struct Features {  // x [B, N, H, D] where it lies: rows are contiguous
  void *data;
  int64_t batch, head, node;  // strides
};

template <class S> S *at(const Features &x, int64_t b, int64_t h, int64_t i) {
  return (S *)x.data + b * x.batch + h * x.head + i * x.node;
}

struct Tiles {  // pairs of tiles that hold edges: tile t of one side with other[e], for e in ptr[t] .. ptr[t + 1]
  const int64_t *ptr, *other;
  const bool *full;           // every query of the tile has edges to all keys low .. high: nothing to mask
  const int64_t *low, *high;  // all its edges are in the columns low .. high of the key tile
};

struct Grid {  // tile t has the nodes start[t] .. start[t + 1]
  const int64_t *start;
  int64_t tiles;

  int64_t size(int64_t t) const { return start[t + 1] - start[t]; }
};

struct Runs {  // row i has the sources start[k] .. stop[k] for k in ptr[i] .. ptr[i + 1], numbered from edge[k] on
  const int64_t *ptr, *start, *stop, *edge;
};

// T: of the arithmetic and of gradients. query, key, value, out and d_out are read and written as S, of 16 bits or T.
template <class T> struct TileAttention {  // mpnn/kernels/tiles/attention.py has the same fields in the same order
  int64_t batch, heads, key_heads, num_dst, num_src, width, value_width;  // widths are multiples of 8
  double scale, softcap;                                                 // softcap 0: none
  Features query, key, value, out;
  T *lse;                // [B, H, num_dst]; +inf for a row without edges
  const T *table, *bias;  // [H, num_dst + num_src - 1 + ROWS] by i - j + num_src - 1; [B or 1, H, edges]; or null
  int64_t edges, bias_batch;
  const T *dst_bias, *src_bias;  // [B, H, num_dst], [B, H, num_src]; or both null
  const uint32_t *dropout_keys;  // [2 + B * H], see simd.h, or null
  const uint32_t *dst_ids, *src_ids;  // what dropout hashes in place of node numbers, [num_dst], [num_src]; or null
  int64_t dropout_threshold;
  double dropout_growth;
  Runs runs;
  Tiles tiles;   // by query tile; by key tile in the backward pass
  Grid queries, keys;
  int64_t slots;  // tiles of the other side to keep

  Features d_out, d_query, d_key, d_value;  // d_query [copies, B, num_dst, H, D]: segment s adds to copy s % copies
  const T *d_lse;                             // [B, H, num_dst], or null
  T *d_table, *d_bias, *d_src_bias;           // d_table [B / shared_batch * segments, H, ...]
  const int64_t *segments;                    // num_segments + 1 boundaries among key tiles
  int64_t num_segments, copies, shared_batch;  // batch entries of an item: those that share a bias

  // The tangents of query, key, value, table and biases, null where they are 0. Its out and lse are written, from `out`
  // and `lse` of this one.
  const TileAttention *tangent;
};

// `columns` keys from j on, for `rows` queries from i on, of one head. The buffers of a tile have all ROWS rows: those
// from `rows` on hold numbers that nobody reads, or zeros. Columns are whole steps of the product: those from `keys` on
// belong to other tiles or lie behind num_src, and are masked as no edges.
struct Tile {
  int64_t b, h, i, rows, j, columns, keys;
  bool full;
};

// ------------------------------------------------------------------------------------------------ vectors

template <class T> constexpr int LANES = VECTOR_BYTES / sizeof(T);
template <class T> using Vector = vec<T, LANES<T>>;
template <class T> INLINE Vector<T> load(const T *x) { return ::load<T, LANES<T>>(x); }
template <class T> INLINE void store(T *x, Vector<T> value) { ::store<T, LANES<T>>(x, value); }

// tanh(x) = (e - 1) / (e + 1) with e = exp(2 x), from e - 1: near zero, e itself would leave no digits of x.
template <class T> INLINE Vector<T> tanh_of(Vector<T> x) {
#pragma clang fp reassociate(off)
  constexpr T MOST = 58;  // of y: tanh is 1 there, in float64 too
  Vector<T> y = x * T(2 * 1.4426950408889634);
  y = y > MOST ? splat<T, LANES<T>>(MOST) : y;  // NaN passes
  y = y < -MOST ? splat<T, LANES<T>>(-MOST) : y;
  const Vector<T> n = __builtin_elementwise_rint(y), f = y - n, one = splat<T, LANES<T>>(1), power = times_exp2<T, LANES<T>>(one, n);
  const Vector<T> e_less_1 = power * (exp2_slope<T, LANES<T>>(f) * f) + (power - 1);
  return e_less_1 / (e_less_1 + 2);
}

// ------------------------------------------------------------------------------------------------ copies of tiles

// out [most, width] = scale * x [rows, width], zeros behind the last row.
template <class T, class S>
void pack(const S *x, int64_t x_row, int64_t rows, int64_t most, int64_t width, T scale, T *out) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t d = 0; d < width; d += 8) ::store<T, 8>(out + r * width + d, load_as<T, 8>(x + r * x_row + d) * scale);
  __builtin_memset(out + rows * width, 0, (most - rows) * width * sizeof(T));
}

// out [width, ROWS] = scale * x [rows, width]^T, zeros behind the last row.
template <class T, class S>
void pack_transposed(const S *x, int64_t x_row, int64_t rows, int64_t width, T scale, T *out) {
  for (int64_t r = 0; r < ROWS; r += 8)
    for (int64_t d = 0; d < width; d += 8) {
      vec<T, 8> square[8];
      UNROLL for (int n = 0; n < 8; n++)
        square[n] = r + n < rows ? load_as<T, 8>(x + (r + n) * x_row + d) * scale : vec<T, 8>{};
      transpose<T>(square);
      UNROLL for (int n = 0; n < 8; n++) ::store<T, 8>(out + (d + n) * ROWS + r, square[n]);
    }
}

// ------------------------------------------------------------------------------------------------ logits of a tile

// The first run of row i that ends behind j.
inline int64_t first_run(const Runs &runs, int64_t i, int64_t j) {
  int64_t low = runs.ptr[i], high = runs.ptr[i + 1];
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (runs.stop[middle] <= j) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Calls visit(r, from, to, edge) for the edges from row r of the tile to its columns from .. to; they are numbered from
// `edge` on.
template <class Visit> INLINE void for_runs(const Runs &runs, const Tile &t, Visit visit) {
  for (int64_t r = 0; r < t.rows; r++)
    for (int64_t k = first_run(runs, t.i + r, t.j); k < runs.ptr[t.i + r + 1] && runs.start[k] < t.j + t.keys; k++) {
      const int64_t start = runs.start[k] - t.j, stop = runs.stop[k] - t.j, from = start > 0 ? start : 0;
      visit(r, from, least(stop, t.keys), runs.edge[k] + from - start);
    }
}

// s = -inf where a pair is no edge. Bit r of `edges` says whether row r has an edge in the column at hand: each run
// toggles it where it starts and where it stops.
template <class T> void mask(T *s, const Runs &runs, const Tile &t) {
  using Int = typename bits_of<T>::type;
  uint32_t toggles[COLUMNS + 1] = {}, edges = 0;
  for_runs(runs, t, [&](int64_t r, int64_t from, int64_t to, int64_t) {
    toggles[from] ^= 1u << r;
    toggles[to] ^= 1u << r;
  });
  Int bit[ROWS];
  for (int r = 0; r < ROWS; r++) bit[r] = 1u << r;
  for (int64_t c = 0; c < t.columns; c++) {
    edges ^= toggles[c];
    for (int r = 0; r < ROWS; r += LANES<T>) {
      T *at = s + c * ROWS + r;
      const auto is_edge = (::load<Int, LANES<T>>(bit + r) & Int(edges)) != 0;
      store(at, is_edge ? load(at) : Vector<T>{} - infinity<T>());
    }
  }
}

// s = softcap tanh(s / softcap), with the derivative in `slope`.
template <class T> void cap(T *s, T *slope, T softcap, const Tile &t) {
  for (int64_t at = 0; at < t.columns * ROWS; at += LANES<T>) {
    const Vector<T> tanh = tanh_of<T>(load(s + at) / softcap);
    store(s + at, softcap * tanh);
    store(slope + at, 1 - tanh * tanh);
  }
}

template <class T> int64_t table_length(const TileAttention<T> &p) { return p.num_dst + p.num_src - 1 + ROWS; }

// Where the table has its entries for column c of a tile: one for each row.
template <class T> int64_t in_table(const TileAttention<T> &p, const Tile &t, int64_t c) {
  return t.h * table_length(p) + t.i - t.j - c + p.num_src - 1;
}

// s += dst_bias_i + src_bias_j. Their sum comes first: of two large numbers it may be a small one.
template <class T> void add_node_biases(T *s, const TileAttention<T> &p, const Tile &t) {
#pragma clang fp reassociate(off)
  const int64_t bh = t.b * p.heads + t.h;
  T dst[ROWS] = {};
  for (int64_t r = 0; r < t.rows; r++) dst[r] = p.dst_bias[bh * p.num_dst + t.i + r];
  for (int64_t c = 0; c < t.keys; c++) {
    const T src = p.src_bias[bh * p.num_src + t.j + c];
    for (int r = 0; r < ROWS; r++) {
      const T sum = dst[r] + src;
      s[c * ROWS + r] += sum;
    }
  }
}

// s += bias
template <class T> void add_biases(T *s, const TileAttention<T> &p, const Tile &t) {
  if (p.table)
    for (int64_t c = 0; c < t.keys; c++) {
      const T *entries = p.table + in_table(p, t, c);
      for (int r = 0; r < ROWS; r++) s[c * ROWS + r] += entries[r];
    }
  if (p.bias) {
    const T *bias = p.bias + t.b * p.bias_batch + t.h * p.edges;
    for_runs(p.runs, t, [=](int64_t r, int64_t from, int64_t to, int64_t edge) {
      for (int64_t c = from; c < to; c++) s[c * ROWS + r] += bias[edge + c - from];
    });
  }
  if (p.dst_bias) add_node_biases(s, p, t);
}

// s = S of a tile from k [columns, width] and q_transposed [width, ROWS], one of which the caller has scaled; slope =
// cap' if there is a softcap.
template <class T>
void logits(const TileAttention<T> &p, const Tile &t, const T *k, const T *q_transposed, T *s, T *slope) {
  product<STEP, false, T>({k, p.width}, {q_transposed, ROWS}, {s, ROWS}, t.columns, p.width, ROWS);
  if (p.softcap != 0) cap(s, slope, T(p.softcap), t);
  add_biases(s, p, t);
  if (!t.full) mask(s, p.runs, t);
}

// g = S' of a tile: the tangents of its logits. k and q_transposed as in `logits`, whose cap' is in `slope`; dk and
// dq_transposed are their tangents, null where they are 0. Pairs that are no edges get numbers that mean nothing.
template <class T>
void logit_tangents(const TileAttention<T> &p, const Tile &t, const T *k, const T *q_transposed, const T *dk, const T *dq_transposed, const T *slope, T *g) {
  if (dq_transposed) product<STEP, false, T>({k, p.width}, {dq_transposed, ROWS}, {g, ROWS}, t.columns, p.width, ROWS);
  else __builtin_memset(g, 0, t.columns * ROWS * sizeof(T));
  if (dk) product<STEP, true, T>({dk, p.width}, {q_transposed, ROWS}, {g, ROWS}, t.columns, p.width, ROWS);
  if (p.softcap != 0)
    for (int64_t at = 0; at < t.columns * ROWS; at++) g[at] *= slope[at];
  add_biases(g, *p.tangent, t);
}

// ------------------------------------------------------------------------------------------------ softmax of a tile

template <class T> struct Running {  // m and l of each row
  alignas(64) T max[ROWS], sum[ROWS];
};

// s = P = exp(s - m'), and `running` becomes m' and l'; rescale = exp(m - m'), by which the caller multiplies O.
template <class T> void online_softmax(T *s, int64_t columns, Running<T> &running, T *rescale) {
  using V = Vector<T>;
  constexpr int ACROSS = ROWS / LANES<T>;
  V max[ACROSS], sum[ACROSS], shift[ACROSS];
  for (int n = 0; n < ACROSS; n++) max[n] = load(running.max + n * LANES<T>);
  for (int64_t c = 0; c < columns; c++)
    for (int n = 0; n < ACROSS; n++) {
      const V x = load(s + c * ROWS + n * LANES<T>);
      max[n] = x > max[n] ? x : max[n];  // passes over NaN, which makes the sum NaN
    }
  for (int n = 0; n < ACROSS; n++) {
    shift[n] = max[n] > -infinity<T>() ? max[n] : V{};  // -inf - -inf would be NaN
    const V factor = exp_below<T, LANES<T>>(load(running.max + n * LANES<T>) - shift[n]);
    sum[n] = load(running.sum + n * LANES<T>) * factor;
    store(rescale + n * LANES<T>, factor);
    store(running.max + n * LANES<T>, max[n]);
  }
  for (int64_t c = 0; c < columns; c++)
    for (int n = 0; n < ACROSS; n++) {
      T *at = s + c * ROWS + n * LANES<T>;
      const V weight = exp_below<T, LANES<T>>(load(at) - shift[n]);
      store(at, weight);
      sum[n] += weight;
    }
  for (int n = 0; n < ACROSS; n++) store(running.sum + n * LANES<T>, sum[n]);
}

// s = P = exp(s - lse), g = dS = P * (g - delta), from s = S and g = dP.
template <class T> void softmax_gradient(T *s, T *g, int64_t columns, const T *lse, const T *delta) {
  using V = Vector<T>;
  for (int64_t c = 0; c < columns; c++)
    for (int r = 0; r < ROWS; r += LANES<T>) {
      const V weight = exp_below<T, LANES<T>>(load(s + c * ROWS + r) - load(lse + r));
      store(s + c * ROWS + r, weight);
      store(g + c * ROWS + r, weight * (load(g + c * ROWS + r) - load(delta + r)));
    }
}

// s = P = exp(s - lse), g = P * S' and t += sum_j g, from s = S and g = S'. Where P is 0, as it is without an edge, S' may
// be infinite or NaN.
template <class T> void softmax_tangent(T *s, T *g, int64_t columns, const T *lse, T *total) {
  using V = Vector<T>;
  for (int64_t c = 0; c < columns; c++)
    for (int r = 0; r < ROWS; r += LANES<T>) {
      const V weight = exp_below<T, LANES<T>>(load(s + c * ROWS + r) - load(lse + r));
      const V moved = weight != 0 ? weight * load(g + c * ROWS + r) : V{};
      store(s + c * ROWS + r, weight);
      store(g + c * ROWS + r, moved);
      store(total + r, load(total + r) + moved);
    }
}

// s = drop(s), for weights or their gradients: the words of head, i and j say which are dropped.
template <class T> void drop_weights(T *s, const TileAttention<T> &p, const Tile &t) {
  if (!p.dropout_keys) return;
  using Ints = vec<typename bits_of<T>::type, LANES<T>>;
  const uint32_t dst_key = p.dropout_keys[0], src_key = p.dropout_keys[1];
  const uint32_t stream = p.dropout_keys[2 + t.b * p.heads + t.h];
  uint32_t row[ROWS];
  for (int64_t r = 0; r < ROWS; r++) {
    const uint32_t i = !p.dst_ids ? uint32_t(t.i + r) : r < t.rows ? p.dst_ids[t.i + r] : 0;
    row[r] = stream * dropout_word(dst_key, i);
  }
  for (int64_t c = 0; c < t.columns; c++) {
    const uint32_t j = !p.src_ids ? uint32_t(t.j + c) : c < t.keys ? p.src_ids[t.j + c] : 0;
    const uint32_t column = dropout_word(src_key, j);
    for (int r = 0; r < ROWS; r += LANES<T>) {
      T *at = s + c * ROWS + r;
      const auto drawn = (vec<int32_t, LANES<T>>)(::load<uint32_t, LANES<T>>(row + r) * column);
      const auto keep = __builtin_convertvector(drawn >= int32_t(p.dropout_threshold), Ints);
      store(at, keep ? load(at) * T(p.dropout_growth) : Vector<T>{});
    }
  }
}

// ------------------------------------------------------------------------------------------------ memory

// Tiles of the other side that are kept as copies, each in the slot of its number modulo the slots.
template <class T> struct Kept {
  T *data;
  int64_t *number, slots, size;

  Kept(Memory &memory, int64_t slots, int64_t size)
      : data(memory.take<T>(slots * size)), number(memory.take<int64_t>(slots)), slots(slots), size(size) {
    for (int64_t k = 0; k < slots; k++) number[k] = -1;
  }
  // The copy of tile t of head bh, made by make(copy) unless it is there.
  template <class Make> inline T *find(int64_t bh, int64_t t, int64_t tiles, Make make) {
    const int64_t slot = t % slots;
    T *copy = data + slot * size;
    if (number[slot] != bh * tiles + t) {
      number[slot] = bh * tiles + t;
      make(copy);
    }
    return copy;
  }
};

// Sets the keys of t to those of pair e of `tiles`, low .. high widened to whole steps of the product; returns where
// they begin in the key tile.
inline int64_t columns_of(const Tiles &tiles, int64_t e, const Grid &keys, int64_t key_tile, Tile &t) {
  const int64_t low = tiles.low[e] / STEP * STEP;
  t.j = keys.start[key_tile] + low;
  t.columns = divide_up(tiles.high[e], STEP) * STEP - low;
  t.keys = least(keys.size(key_tile) - low, t.columns);
  t.full = tiles.full[e] && low == tiles.low[e] && low + t.columns == tiles.high[e];
  return low;
}

// ------------------------------------------------------------------------------------------------ forward

template <class T> bool is_finite(const T *x, int64_t count) {
  T zero = 0;
  for (int64_t k = 0; k < count; k++) zero += x[k] * 0;
  return zero == 0;
}

// o [ROWS, width] += s^T v edge by edge: a pair that is no edge has weight 0, and 0 times NaN would be NaN.
template <class T> void product_of_edges(const T *s, const T *v, T *o, int64_t width, const Runs &runs, const Tile &t) {
  for_runs(runs, t, [=](int64_t r, int64_t from, int64_t to, int64_t) {
    for (int64_t c = from; c < to; c++)
      for (int64_t d = 0; d < width; d++) o[r * width + d] += s[c * ROWS + r] * v[c * width + d];
  });
}

// Writes `out` and `lse` of a part of the work items, each (b, h, query tile). False: no memory.
template <class T, class S> bool forward(const TileAttention<T> &p, int64_t part, int64_t parts) {
  const int64_t query_tiles = p.queries.tiles, key_tiles = p.keys.tiles;
  const int64_t D = p.width, DV = p.value_width;
  const int64_t of_tile = COLUMNS * (D + DV);
  Memory memory((p.slots * of_tile + ROWS * (D + DV)) * sizeof(T) + p.slots * sizeof(int64_t), 4);
  if (!memory) return false;
  T *q_transposed = memory.take<T>(ROWS * D), *o = memory.take<T>(ROWS * DV);
  Kept<T> kept(memory, p.slots, of_tile);
  alignas(64) T s[COLUMNS * ROWS], slope[COLUMNS * ROWS], rescale[ROWS];

  const int64_t items = p.batch * p.heads * query_tiles;
  for (int64_t item = items * part / parts; item < items * (part + 1) / parts; item++) {
    const int64_t bh = item / query_tiles, tile = item % query_tiles;
    Tile t;
    t.b = bh / p.heads, t.h = bh % p.heads, t.i = p.queries.start[tile];
    t.rows = p.queries.size(tile);
    const int64_t kv = t.h * p.key_heads / p.heads;
    pack_transposed(at<S>(p.query, t.b, t.h, t.i), p.query.node, t.rows, D, T(p.scale), q_transposed);

    Running<T> running;
    // Sums that are not finite are computed again, by edges: so NaN and infinities reach only rows that attend to them.
    for (int by_edges = 0; by_edges < 2; by_edges++) {
      for (int r = 0; r < ROWS; r++) running.max[r] = -infinity<T>(), running.sum[r] = 0;
      __builtin_memset(o, 0, ROWS * DV * sizeof(T));
      for (int64_t e = p.tiles.ptr[tile]; e < p.tiles.ptr[tile + 1]; e++) {
        const int64_t key_tile = p.tiles.other[e], low = columns_of(p.tiles, e, p.keys, key_tile, t);
        const T *k = kept.find(t.b * p.key_heads + kv, key_tile, key_tiles, [&](T *copy) {
          const int64_t j = p.keys.start[key_tile], keys = p.keys.size(key_tile);
          pack(at<S>(p.key, t.b, kv, j), p.key.node, keys, COLUMNS, D, T(1), copy);
          pack(at<S>(p.value, t.b, kv, j), p.value.node, keys, COLUMNS, DV, T(1), copy + COLUMNS * D);
        });
        const T *v = k + COLUMNS * D + low * DV;

        logits(p, t, k + low * D, q_transposed, s, slope);
        online_softmax(s, t.columns, running, rescale);
        for (int64_t r = 0; r < t.rows; r++)
          if (rescale[r] != 1)
            for (int64_t d = 0; d < DV; d++) o[r * DV + d] *= rescale[r];
        drop_weights(s, p, t);
        if (by_edges && !t.full) product_of_edges(s, v, o, DV, p.runs, t);
        else product<ROW_STEP, true, T>({s, 1, ROWS}, {v, DV}, {o, DV}, ROWS, t.columns, DV);
      }
      if (is_finite(o, t.rows * DV)) break;
    }
    for (int64_t r = 0; r < t.rows; r++) {
      S *out = at<S>(p.out, t.b, t.h, t.i + r);
      const bool attends = running.sum[r] != 0;  // also true of NaN
      const T factor = attends ? 1 / running.sum[r] : 0;
      for (int64_t d = 0; d < DV; d += 8)
        store_as(out + d, attends ? ::load<T, 8>(o + r * DV + d) * factor : vec<T, 8>{});
      p.lse[bh * p.num_dst + t.i + r] = attends ? running.max[r] + T(__builtin_log(running.sum[r])) : infinity<T>();
    }
  }
  return true;
}

// ------------------------------------------------------------------------------------------------ tangents

// Writes `out` and `lse` of p.tangent of a part of the work items, each (b, h, query tile). False: no memory.
template <class T, class S> bool tangent(const TileAttention<T> &p, int64_t part, int64_t parts) {
  const TileAttention<T> &d = *p.tangent;
  const bool moves = d.query.data || d.key.data || d.table || d.bias || d.dst_bias;
  const int64_t query_tiles = p.queries.tiles, key_tiles = p.keys.tiles;
  const int64_t D = p.width, DV = p.value_width;
  const int64_t of_tile = 2 * COLUMNS * (D + DV);
  Memory memory((p.slots * of_tile + ROWS * (2 * D + DV)) * sizeof(T) + p.slots * sizeof(int64_t), 5);
  if (!memory) return false;
  T *q_transposed = memory.take<T>(ROWS * D), *dq_transposed = memory.take<T>(ROWS * D), *o = memory.take<T>(ROWS * DV);
  Kept<T> kept(memory, p.slots, of_tile);
  alignas(64) T s[COLUMNS * ROWS], g[COLUMNS * ROWS], slope[COLUMNS * ROWS], lse[ROWS], total[ROWS];

  const int64_t items = p.batch * p.heads * query_tiles;
  for (int64_t item = items * part / parts; item < items * (part + 1) / parts; item++) {
    const int64_t bh = item / query_tiles, tile = item % query_tiles;
    Tile t;
    t.b = bh / p.heads, t.h = bh % p.heads, t.i = p.queries.start[tile];
    t.rows = p.queries.size(tile);
    const int64_t kv = t.h * p.key_heads / p.heads;
    pack_transposed(at<S>(p.query, t.b, t.h, t.i), p.query.node, t.rows, D, T(p.scale), q_transposed);
    if (d.query.data) pack_transposed(at<S>(d.query, t.b, t.h, t.i), d.query.node, t.rows, D, T(p.scale), dq_transposed);
    // +inf: rows behind the last have P = 0, as rows without edges do
    for (int64_t r = 0; r < ROWS; r++) lse[r] = r < t.rows ? p.lse[bh * p.num_dst + t.i + r] : infinity<T>();

    for (int by_edges = 0; by_edges < 2; by_edges++) {  // see `forward`
      for (int r = 0; r < ROWS; r++) total[r] = 0;
      __builtin_memset(o, 0, ROWS * DV * sizeof(T));
      for (int64_t e = p.tiles.ptr[tile]; e < p.tiles.ptr[tile + 1]; e++) {
        const int64_t key_tile = p.tiles.other[e], low = columns_of(p.tiles, e, p.keys, key_tile, t);
        T *copy = kept.find(t.b * p.key_heads + kv, key_tile, key_tiles, [&](T *to) {
          const int64_t j = p.keys.start[key_tile], keys = p.keys.size(key_tile);
          const auto keep = [&](const Features &x, int64_t width) {
            if (x.data) pack(at<S>(x, t.b, kv, j), x.node, keys, COLUMNS, width, T(1), to);
            to += COLUMNS * width;
          };
          keep(p.key, D), keep(d.key, D), keep(p.value, DV), keep(d.value, DV);
        });
        const T *k = copy + low * D, *dk = k + COLUMNS * D;
        const T *v = copy + 2 * COLUMNS * D + low * DV, *dv = v + COLUMNS * DV;
        const auto add = [&](const T *weights, const T *values) {
          if (by_edges && !t.full) product_of_edges(weights, values, o, DV, p.runs, t);
          else product<ROW_STEP, true, T>({weights, 1, ROWS}, {values, DV}, {o, DV}, ROWS, t.columns, DV);
        };

        logits(p, t, k, q_transposed, s, slope);
        if (moves) logit_tangents(p, t, k, q_transposed, d.key.data ? dk : nullptr, d.query.data ? dq_transposed : nullptr, slope, g);
        else __builtin_memset(g, 0, t.columns * ROWS * sizeof(T));
        softmax_tangent(s, g, t.columns, lse, total);
        if (d.value.data) drop_weights(s, p, t), add(s, dv);
        if (moves) drop_weights(g, p, t), add(g, v);
      }
      if (is_finite(o, t.rows * DV)) break;
    }
    for (int64_t r = 0; r < t.rows; r++) {
      const S *out = at<S>(p.out, t.b, t.h, t.i + r);
      S *moved = at<S>(d.out, t.b, t.h, t.i + r);
      for (int64_t c = 0; c < DV; c += 8) store_as(moved + c, ::load<T, 8>(o + r * DV + c) - total[r] * load_as<T, 8>(out + c));
      d.lse[bh * p.num_dst + t.i + r] = total[r];
    }
  }
  return true;
}

// ------------------------------------------------------------------------------------------------ backward

// A query tile as the backward pass reads it. The scale is in the rows q, for dK = dX^T (scale Q), and not in
// q_transposed: S = Q (scale K)^T takes it from the rows of k, which have it for dQ = dX (scale K).
template <class T> struct QueryTile {
  T *q, *q_transposed, *d_out, *d_out_transposed, *delta;
  static int64_t size(int64_t D, int64_t DV) { return 2 * ROWS * (D + DV) + ROWS; }
  QueryTile(T *data, int64_t D, int64_t DV)
      : q(data), q_transposed(q + ROWS * D), d_out(q_transposed + ROWS * D), d_out_transposed(d_out + ROWS * DV),
        delta(d_out_transposed + ROWS * DV) {}

  template <class S> void fill(const TileAttention<T> &p, const Tile &t) {
    const S *query = at<S>(p.query, t.b, t.h, t.i), *gradient = at<S>(p.d_out, t.b, t.h, t.i);
    pack(query, p.query.node, t.rows, ROWS, p.width, T(p.scale), q);
    pack_transposed(query, p.query.node, t.rows, p.width, T(1), q_transposed);
    pack(gradient, p.d_out.node, t.rows, ROWS, p.value_width, T(1), d_out);
    pack_transposed(gradient, p.d_out.node, t.rows, p.value_width, T(1), d_out_transposed);
    for (int64_t r = 0; r < ROWS; r++) {
      vec<T, 8> dots{};
      for (int64_t d = 0; r < t.rows && d < p.value_width; d += 8)
        dots += ::load<T, 8>(d_out + r * p.value_width + d) * load_as<T, 8>(at<S>(p.out, t.b, t.h, t.i + r) + d);
      delta[r] = sum<T, 8>(dots);
      if (p.d_lse && r < t.rows) delta[r] -= p.d_lse[(t.b * p.heads + t.h) * p.num_dst + t.i + r];
    }
  }
};

// Adds to the gradients, zeros at first, for a part of the work items, each (shared_batch batch entries, head of keys,
// segment of key tiles). False: no memory.
template <class T, class S> bool backward(const TileAttention<T> &p, int64_t part, int64_t parts) {
  const int64_t query_tiles = p.queries.tiles, group = p.heads / p.key_heads;
  const int64_t D = p.width, DV = p.value_width;
  const int64_t of_tile = QueryTile<T>::size(D, DV), heads_of_item = p.shared_batch * group;
  Memory memory((p.slots * of_tile + COLUMNS * (D + DV)) * sizeof(T) + p.slots * sizeof(int64_t), 4);
  if (!memory) return false;
  T *k_tile = memory.take<T>(COLUMNS * D), *v_tile = memory.take<T>(COLUMNS * DV);
  Kept<T> kept(memory, p.slots, of_tile);
  alignas(64) T s[COLUMNS * ROWS], g[COLUMNS * ROWS], slope[COLUMNS * ROWS], lse[ROWS];

  const int64_t items = p.batch / p.shared_batch * p.key_heads * p.num_segments;
  const int64_t first = items * part / parts, last = items * (part + 1) / parts;
  for (int64_t task = first * heads_of_item; task < last * heads_of_item; task++) {
    const int64_t item = task / heads_of_item, segment = item % p.num_segments;
    const int64_t kv = item / p.num_segments % p.key_heads, shared = item / (p.num_segments * p.key_heads);
    Tile t;
    t.b = shared * p.shared_batch + task / group % p.shared_batch, t.h = kv * group + task % group;
    const int64_t bh = t.b * p.heads + t.h;
    const int64_t table = (shared * p.num_segments + segment) * p.heads * table_length(p);
    for (int64_t key_tile = p.segments[segment]; key_tile < p.segments[segment + 1]; key_tile++) {
      const int64_t j = p.keys.start[key_tile], keys = p.keys.size(key_tile);
      pack(at<S>(p.key, t.b, kv, j), p.key.node, keys, COLUMNS, D, T(p.scale), k_tile);
      pack(at<S>(p.value, t.b, kv, j), p.value.node, keys, COLUMNS, DV, T(1), v_tile);
      for (int64_t e = p.tiles.ptr[key_tile]; e < p.tiles.ptr[key_tile + 1]; e++) {
        const int64_t tile = p.tiles.other[e], low = columns_of(p.tiles, e, p.keys, key_tile, t);
        t.i = p.queries.start[tile], t.rows = p.queries.size(tile);
        const auto fill = [&](T *copy) { QueryTile<T>(copy, D, DV).template fill<S>(p, t); };
        const QueryTile<T> q(kept.find(bh, tile, query_tiles, fill), D, DV);
        // +inf: rows behind the last have P = 0, as rows without edges do
        for (int64_t r = 0; r < ROWS; r++) lse[r] = r < t.rows ? p.lse[bh * p.num_dst + t.i + r] : infinity<T>();
        const T *k = k_tile + low * D, *v = v_tile + low * DV;

        logits(p, t, k, q.q_transposed, s, slope);
        product<STEP, false, T>({v, DV}, {q.d_out_transposed, ROWS}, {g, ROWS}, t.columns, DV, ROWS);
        drop_weights(g, p, t);
        softmax_gradient(s, g, t.columns, lse, q.delta);
        drop_weights(s, p, t);

        if (p.d_table)
          for (int64_t c = 0; c < t.keys; c++) {
            T *entries = p.d_table + table + in_table(p, t, c);
            for (int r = 0; r < ROWS; r++) entries[r] += g[c * ROWS + r];
          }
        if (p.d_bias) {
          T *d_bias = p.d_bias + t.b * p.bias_batch + t.h * p.edges;
          for_runs(p.runs, t, [&](int64_t r, int64_t from, int64_t to, int64_t edge) {
            for (int64_t c = from; c < to; c++) d_bias[edge + c - from] += g[c * ROWS + r];
          });
        }
        if (p.d_src_bias)
          for (int64_t c = 0; c < t.keys; c++)
            for (int r = 0; r < ROWS; r++) p.d_src_bias[bh * p.num_src + t.j + c] += g[c * ROWS + r];
        if (p.softcap != 0)
          for (int64_t at = 0; at < t.columns * ROWS; at++) g[at] *= slope[at];

        const Matrix<T> d_key{at<T>(p.d_key, t.b, kv, t.j), p.d_key.node};
        const Matrix<T> d_value{at<T>(p.d_value, t.b, kv, t.j), p.d_value.node};
        const Matrix<T> d_query{at<T>(p.d_query, segment % p.copies * p.batch + t.b, t.h, t.i), p.d_query.node};
        product<STEP, true, T>({s, ROWS}, {q.d_out, DV}, d_value, t.keys, t.rows, DV);
        product<STEP, true, T>({g, ROWS}, {q.q, D}, d_key, t.keys, t.rows, D);
        product<ROW_STEP, true, T>({g, 1, ROWS}, {k, D}, d_query, t.rows, t.columns, D);
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace tile_attention

extern "C" int64_t tile_attention_size() { return sizeof(tile_attention::TileAttention<float>); }
#define EXPORT_FOR(suffix, T, S) \
  KERNEL(tile_attention_forward_##suffix, tile_attention::TileAttention<T>, tile_attention::forward<T, S>(*p, part, parts)) \
  KERNEL(tile_attention_tangent_##suffix, tile_attention::TileAttention<T>, tile_attention::tangent<T, S>(*p, part, parts)) \
  KERNEL(tile_attention_backward_##suffix, tile_attention::TileAttention<T>, tile_attention::backward<T, S>(*p, part, parts))
EXPORT_FOR(f32, float, float)
EXPORT_FOR(f64, double, double)
EXPORT_FOR(bf16, float, bfloat16)
EXPORT_FOR(f16, float, float16)
#undef EXPORT_FOR
