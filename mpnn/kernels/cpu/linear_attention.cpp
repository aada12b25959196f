// Linear attention: weights are inner products without a normaliser, so sums over sources do not depend on the
// destination (Katharopoulos et al. 2020, eq. 6 and 9 to 12):
//
//     out_i = scale sum_{j in N(i)} <q_i, k_j> v_j = scale q_i S_i,      S_i = sum_{j in N(i)} k_j^T v_j   [F, D]
//
// The edges are blocks of rows and sources. Where each row of a block has one source more than the row before, S is a
// running sum. It advances by chunks of nodes; with the S of the chunks before,
//
//     out = scale (Q S + mask(Q K^T) V)            S += K^T V
//
// so all work is products of matrices in the cache, and one S is all that is stored. The gradients of q, k and v are
// linear attention again: of (d_out, v, k), and over the transposed blocks of (v, d_out, q) and of (k, q, d_out).
//
// A work item is a range of columns of one S. Features are read where they lie, in the types of `FLOAT32` and others.
#include "products.h"

namespace linear_attention {
namespace {  // private to this file

enum { ALL, PAST, FUTURE };                    // the sources of a row in a block: all; up to its own; from its own on
enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };  // types of features
constexpr int64_t CHUNK = 48, ROWS = 24;       // rows of a chunk, and rows for which logits are computed together

struct Block {  // rows [first, last) and sources [start, stop)
  int64_t first, last, start, stop, extent;
  int64_t adds;  // 0: it writes its rows of `out`; 1: it adds to them
};

struct Features {  // x [B, N, G, P, width], each row contiguous
  const char *data;
  int64_t type, batch, node, group, head;  // strides, in numbers
};

template <class T> struct LinearAttention {  // mpnn/kernels/linear_attention.py has the same fields in the same order
  int64_t groups, heads, sources;            // G states; R query rows and P sources of a node share one
  int64_t num_dst, width, value_width;
  double scale;
  Features query, key, value;
  T *out;  // [B, N, G, R, D]
  const Block *blocks;
  int64_t num_blocks;
};

struct Item {
  int64_t b, g, first, width;  // columns [first, first + width) of the values
};

// Part `part` of `parts` of the columns of state `state` of B * G.
template <class T> Item item_of(const LinearAttention<T> &p, int64_t state, int64_t part, int64_t parts) {
  const int64_t vectors = divide_up(p.value_width, 16);
  const auto cut = [&](int64_t k) { return least(vectors * k / parts * 16, p.value_width); };
  return {state / p.groups, state % p.groups, cut(part), cut(part + 1) - cut(part)};
}

// ------------------------------------------------------------------------------------------------ copies of chunks

// The numbers from row to row of a buffer: an odd number of cache lines, so that the rows do not push one another out
// of the cache. It is at least the width rounded up to whole steps of a product.
template <class T> int64_t stride(int64_t width) {
  constexpr int64_t LINE = 64 / sizeof(T);
  return (divide_up(divide_up(width, STEP) * STEP, LINE) | 1) * LINE;
}

// out [nodes * per_node, stride] = factor * x [nodes, per_node, width], zeros behind each row.
template <class T, class S>
void pack_as(const Features &x, int64_t at, int64_t nodes, int64_t per_node, int64_t width, T factor, T *out) {
  const int64_t row = stride<T>(width);
  for (int64_t r = 0; r < nodes * per_node; r++, out += row) {
    const S *from = (const S *)x.data + at + r / per_node * x.node + r % per_node * x.head;
    int64_t d = 0;
    for (; d + 8 <= width; d += 8) store<T, 8>(out + d, load_as<T, 8>(from + d) * factor);
    for (; d < width; d++) out[d] = load_as<T, 1>(from + d)[0] * factor;
    for (; d < row; d++) out[d] = 0;
  }
}

// The same for the nodes from `node` on, of columns of one item.
template <class T>
void pack(const Features &x, const Item &item, int64_t first, int64_t node, int64_t nodes, int64_t per_node,
          int64_t width, T factor, T *out) {
  const int64_t at = item.b * x.batch + item.g * x.group + node * x.node + first;
  switch (x.type) {
    case FLOAT32: return pack_as<T, float>(x, at, nodes, per_node, width, factor, out);
    case FLOAT64: return pack_as<T, double>(x, at, nodes, per_node, width, factor, out);
    case BFLOAT16: return pack_as<T, bfloat16>(x, at, nodes, per_node, width, factor, out);
    case FLOAT16: return pack_as<T, float16>(x, at, nodes, per_node, width, factor, out);
  }
}

// out [width, rows] = x [rows, width]^T, in squares of 8 that may reach beyond both.
template <class T> void transposed(const T *x, int64_t rows, int64_t width, T *out) {
  const int64_t x_row = stride<T>(width), out_row = stride<T>(rows);
  for (int64_t r = 0; r < rows; r += 8)
    for (int64_t d = 0; d < width; d += 8) {
      vec<T, 8> square[8];
      UNROLL for (int n = 0; n < 8; n++) square[n] = load<T, 8>(x + (r + n) * x_row + d);
      transpose<T>(square);
      UNROLL for (int n = 0; n < 8; n++) store<T, 8>(out + (d + n) * out_row + r, square[n]);
    }
}

// ------------------------------------------------------------------------------------------------ the scan

// o += mask(Q K^T) V within a chunk: row r has the sources before (r / heads + 1) * sources, or those from
// r / heads * sources on.
template <class T>
void add_own_chunk(const LinearAttention<T> &p, int64_t extent, int64_t nodes, int64_t width, const T *q,
                   const T *k_transposed, const T *v, T *logits, T *o) {
  const int64_t q_row = stride<T>(p.width), v_row = stride<T>(width), row = stride<T>(nodes * p.sources);
  for (int64_t r = 0; r < nodes * p.heads; r += ROWS) {
    const int64_t rows = least(nodes * p.heads - r, ROWS);
    const auto own = [&](int64_t n) { return (r + n) / p.heads * p.sources; };
    const int64_t from = extent == PAST ? 0 : own(0) / 8 * 8;
    const int64_t to = extent == PAST ? own(rows - 1) + p.sources : nodes * p.sources;
    product<STEP, false, T>({q + r * q_row, q_row}, {k_transposed + from, row}, {logits, row}, rows, p.width,
                            divide_up(to - from, 8) * 8);
    for (int64_t n = 0; n < rows; n++) {
      const int64_t zeros = extent == PAST ? own(n) + p.sources : from, end = extent == PAST ? to : own(n);
      for (int64_t c = zeros; c < end; c++) logits[n * row + c - from] = 0;
    }
    product<STEP, true, T>({logits, row}, {v + from * v_row, v_row}, {o + r * v_row, v_row}, rows, to - from,
                           divide_up(width, 8) * 8);
  }
}

// Writes, or adds, the rows of o [nodes * heads, width].
template <class T>
void write(const LinearAttention<T> &p, const Item &item, int64_t node, int64_t nodes, const T *o, bool adds) {
  for (int64_t r = 0; r < nodes * p.heads; r++) {
    const T *from = o + r * stride<T>(item.width);
    const int64_t row = ((item.b * p.num_dst + node + r / p.heads) * p.groups + item.g) * p.heads + r % p.heads;
    T *out = p.out + row * p.value_width + item.first;
    if (adds)
      for (int64_t d = 0; d < item.width; d++) out[d] += from[d];
    else __builtin_memcpy(out, from, item.width * sizeof(T));
  }
}

// Writes the columns of an item, of the rows that blocks have. False: no memory.
template <class T> bool run(const LinearAttention<T> &p, const Item &item) {
  const int64_t most = p.heads > p.sources ? p.heads : p.sources, step = most < CHUNK ? CHUNK / most : 1;
  const int64_t F = stride<T>(p.width), D = stride<T>(item.width), C = stride<T>(step * p.sources);
  const int64_t rows = step * p.heads, columns = divide_up(step * p.sources, 8) * 8;
  const int64_t padded = divide_up(p.width, STEP) * STEP, wide = divide_up(item.width, 8) * 8;
  Memory memory((rows * (F + D) + columns * (F + D) + F * (C + D) + ROWS * C) * sizeof(T), 7);
  if (!memory) return false;
  T *q = memory.take<T>(rows * F), *k = memory.take<T>(columns * F), *k_transposed = memory.take<T>(F * C);
  T *v = memory.take<T>(columns * D), *logits = memory.take<T>(ROWS * C), *o = memory.take<T>(rows * D);
  T *state = memory.take<T>(F * D);

  const auto read_sources = [&](int64_t node, int64_t nodes) {
    pack(p.key, item, 0, node, nodes, p.sources, p.width, T(1), k);
    pack(p.value, item, item.first, node, nodes, p.sources, item.width, T(1), v);
  };
  const auto add_sources = [&](int64_t nodes) {  // S += K^T V
    product<STEP, true, T>({k, 1, F}, {v, D}, {state, D}, padded, nodes * p.sources, wide);
  };
  for (const Block *block = p.blocks; block < p.blocks + p.num_blocks; block++) {
    __builtin_memset(state, 0, F * D * sizeof(T));
    if (block->extent == ALL)
      for (int64_t node = block->start; node < block->stop; node += step) {
        const int64_t nodes = least(block->stop - node, step);
        read_sources(node, nodes);
        add_sources(nodes);
      }
    const int64_t length = block->last - block->first, chunks = divide_up(length, step);
    for (int64_t n = 0; n < chunks; n++) {
      const int64_t offset = (block->extent == FUTURE ? chunks - 1 - n : n) * step;
      const int64_t node = block->first + offset, nodes = least(length - offset, step);
      pack(p.query, item, 0, node, nodes, p.heads, p.width, T(p.scale), q);
      product<STEP, false, T>({q, F}, {state, D}, {o, D}, nodes * p.heads, p.width, wide);
      if (block->extent != ALL) {
        read_sources(block->start + offset, nodes);
        transposed(k, nodes * p.sources, p.width, k_transposed);
        add_own_chunk(p, block->extent, nodes, item.width, q, k_transposed, v, logits, o);
        add_sources(nodes);
      }
      write(p, item, node, nodes, o, block->adds);
    }
  }
  return true;
}

}  // namespace
}  // namespace linear_attention

extern "C" int64_t linear_attention_size() { return sizeof(linear_attention::LinearAttention<float>); }
KERNEL(linear_attention_f32, linear_attention::LinearAttention<float>, run(*p, item_of(*p, b, part, parts)))
KERNEL(linear_attention_f64, linear_attention::LinearAttention<double>, run(*p, item_of(*p, b, part, parts)))
