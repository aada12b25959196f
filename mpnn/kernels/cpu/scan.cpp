// Linear attention with a gate a head: weights are inner products without a normaliser, so sums over sources do not depend
// on the destination (Katharopoulos et al. 2020, eq. 6 and 9 to 12; Dao and Gu 2024 with gates):
//
//     out_i = scale sum_{j in N(i)} decay_ij <q_i, k_j> v_j          decay_ij: the gates of the nodes after j up to i
//
// The edges are blocks of rows and sources. Without gates, scale q_i S_i with S_i = sum_{j in N(i)} k_j^T v_j [F, D]. Where
// each row of a block has one source more than the row before, S is a running sum. It advances by chunks of nodes; with the
// S of the chunks before, and the gates multiplied from the start of the chunk (before), and to its end (after, whole),
//
//     out = scale (before Q S + (tril(Q K^T) * decay) V)            S = whole S + (after K)^T V
//
// so all work is products of matrices in the cache, and one S is all that is stored. Without gates, the gradients of q, k
// and v are linear attention again: of (d_out, v, k), and over the transposed blocks of (v, d_out, q) and of (k, q, d_out).
// With gates, `Backward` below computes all gradients.
//
// A work item is a range of columns of one S, or of the S of several heads that share queries and keys: logits without
// gates are the same for all of them. Features are read where they lie, in the types of `FLOAT32` and others.
#include "scan.h"

namespace scan {
namespace {  // private to this file

struct Item {
  int64_t b, g, first, width;  // columns [first, first + width) of the values of the heads from g on
};

// Part `part` of `parts` of the columns of the states `set` of B * G / together.
template <class T> Item item_of(const Scan<T> &p, int64_t set, int64_t part, int64_t parts) {
  const int64_t vectors = divide_up(p.value_width, 16), sets = p.groups / p.together;
  const auto cut = [&](int64_t k) { return least(vectors * k / parts * 16, p.value_width); };
  return {set / sets, set % sets * p.together, cut(part), cut(part + 1) - cut(part)};
}

// ------------------------------------------------------------------------------------------------ the scan

// The columns [from, to) of the logits of a chunk that `rows` rows from r on need: row r has the sources before
// (r / heads + 1) * sources, or those from r / heads * sources on.
template <class T> struct Columns {
  int64_t from, to;
  Columns(const Scan<T> &p, int64_t extent, int64_t nodes, int64_t r, int64_t rows)
      : from(extent == PAST ? 0 : r / p.heads * p.sources / 8 * 8),
        to(extent == PAST ? ((r + rows - 1) / p.heads + 1) * p.sources : nodes * p.sources) {}
};

// mask(Q K^T) of a chunk, in the columns that its rows need.
template <class T>
void masked_logits(const Scan<T> &p, int64_t extent, int64_t nodes, const T *q, const T *k_transposed, T *logits) {
  const int64_t q_row = stride<T>(p.width), row = stride<T>(nodes * p.sources);
  for (int64_t r = 0; r < nodes * p.heads; r += ROWS) {
    const int64_t rows = least(nodes * p.heads - r, ROWS);
    const auto [from, to] = Columns<T>(p, extent, nodes, r, rows);
    product<STEP, false, T>({q + r * q_row, q_row}, {k_transposed + from, row}, {logits + r * row + from, row}, rows,
                            p.width, up(to - from, 8));
    for (int64_t n = r; n < r + rows; n++) {
      const int64_t own = n / p.heads * p.sources, zeros = extent == PAST ? own + p.sources : from;
      for (int64_t c = zeros, end = extent == PAST ? to : own; c < end; c++) logits[n * row + c] = 0;
    }
  }
}

// o += (logits * decay) V within a chunk. `decays` is null without gates, and then `weights` is not used.
template <class T>
void add_own_chunk(const Scan<T> &p, int64_t extent, int64_t nodes, int64_t width, const T *logits, const T *v,
                   const Decays<T> *decays, T *weights, T *o) {
  const int64_t v_row = stride<T>(width), row = stride<T>(nodes * p.sources);
  for (int64_t r = 0; r < nodes * p.heads; r += ROWS) {
    const int64_t rows = least(nodes * p.heads - r, ROWS);
    const auto [from, to] = Columns<T>(p, extent, nodes, r, rows);
    const T *A = logits + r * row + from;
    if (decays) {
      for (int64_t n = 0; n < rows; n++)
        for (int64_t c = 0; c < to; c += 8)
          store<T, 8>(weights + n * row + c, load<T, 8>(A + n * row + c) * load<T, 8>(decays->between + (r + n) * Decays<T>::ROW + c));
      A = weights;
    }
    product<STEP, true, T>({A, row}, {v + from * v_row, v_row}, {o + r * v_row, v_row}, rows, to - from, up(width, 8));
  }
}

// Writes, or adds, the rows of o [nodes * heads, width].
template <class T>
void write(const Scan<T> &p, const Item &item, int64_t g, int64_t node, int64_t nodes, const T *o, bool adds) {
  for (int64_t r = 0; r < nodes * p.heads; r++) {
    const T *from = o + r * stride<T>(item.width);
    const int64_t row = ((item.b * p.num_dst + node + r / p.heads) * p.groups + g) * p.heads + r % p.heads;
    T *out = p.out + row * p.value_width + item.first;
    if (adds)
      for (int64_t d = 0; d < item.width; d++) out[d] += from[d];
    else __builtin_memcpy(out, from, item.width * sizeof(T));
  }
}

// Writes the columns of an item, of the rows that blocks have. False: no memory.
template <class T> bool run(const Scan<T> &p, const Item &item) {
  const int64_t most = p.heads > p.sources ? p.heads : p.sources, step = most < CHUNK ? CHUNK / most : 1;
  const int64_t F = stride<T>(p.width), D = stride<T>(item.width), C = stride<T>(step * p.sources);
  const int64_t rows = step * p.heads, columns = up(step * p.sources, 8), padded = up(p.width, STEP), wide = up(item.width, 8);
  Memory memory((rows * (F + D + C) + columns * (F + D) + F * C + ROWS * C + p.together * F * D) * sizeof(T), 8);
  if (!memory) return false;
  T *q = memory.take<T>(rows * F), *k = memory.take<T>(columns * F), *k_transposed = memory.take<T>(F * C);
  T *v = memory.take<T>(columns * D), *logits = memory.take<T>(rows * C), *weights = memory.take<T>(ROWS * C);
  T *o = memory.take<T>(rows * D), *states = memory.take<T>(p.together * F * D);

  const auto read_keys = [&](int64_t node, int64_t nodes) {
    pack(p.key, p.key.at(item.b, item.g, node), nodes, p.sources, p.width, T(1), k);
  };
  const auto read_values = [&](int64_t g, int64_t node, int64_t nodes) {
    pack(p.value, p.value.at(item.b, g, node) + item.first, nodes, p.sources, item.width, T(1), v);
  };
  const auto add_sources = [&](int64_t nodes, T *state) {  // S += K^T V
    product<STEP, true, T>({k, 1, F}, {v, D}, {state, D}, padded, nodes * p.sources, wide);
  };
  const auto matrix = [&](int64_t g) { return ((item.b * p.groups + g) * p.width) * p.value_width + item.first; };
  const auto each_head = [&](auto function) {
    for (int64_t h = 0; h < p.together; h++) function(item.g + h, states + h * F * D);
  };
  Decays<T> gates, *decays = p.log_gate ? &gates : nullptr;
  for (const Block *block = p.blocks; block < p.blocks + p.num_blocks; block++) {
    each_head([&](int64_t g, T *state) {
      read_state(state, p.state && block == p.blocks ? p.state + matrix(g) : nullptr, p.value_width, p.width, item.width);
    });
    if (block->extent == ALL)
      for (int64_t node = block->start; node < block->stop; node += step) {
        const int64_t nodes = least(block->stop - node, step);
        read_keys(node, nodes);
        each_head([&](int64_t g, T *state) { read_values(g, node, nodes), add_sources(nodes, state); });
      }
    const int64_t length = block->last - block->first, chunks = divide_up(length, step);
    for (int64_t n = 0; n < chunks; n++) {
      const int64_t offset = (block->extent == FUTURE ? chunks - 1 - n : n) * step;
      const int64_t node = block->first + offset, nodes = least(length - offset, step);
      pack(p.query, p.query.at(item.b, item.g, node), nodes, p.heads, p.width, T(p.scale), q);
      if (block->extent != ALL) {
        read_keys(block->start + offset, nodes);
        transposed(k, nodes * p.sources, p.width, k_transposed);
        masked_logits(p, block->extent, nodes, q, k_transposed, logits);
      }
      each_head([&](int64_t g, T *state) {
        product<STEP, false, T>({q, F}, {state, D}, {o, D}, nodes * p.heads, p.width, wide);
        if (block->extent != ALL) {
          read_values(g, block->start + offset, nodes);
          if (decays) {
            decays->read(p.log_gate + (item.b * p.num_dst + node) * p.groups + g, p.groups, nodes);
            scale_rows(o, nodes, item.width, decays->before);
          }
          add_own_chunk(p, block->extent, nodes, item.width, logits, v, decays, weights, o);
          if (decays) {
            scale_rows(v, nodes, item.width, decays->after);
            for (int64_t f = 0; f < p.width; f++) scale_row(state + f * D, item.width, decays->whole);
          }
          add_sources(nodes, state);
        }
        write(p, item, g, node, nodes, o, block->adds);
      });
    }
  }
  if (p.last) each_head([&](int64_t g, T *state) { write_state(p.last + matrix(g), p.value_width, state, p.width, item.width); });
  return true;
}

// ------------------------------------------------------------------------------------------------ gradients with gates

// The gradients of one head after the other. Each document is passed forwards with T = S^T, then backwards with Z, the
// gradient of S (q includes the scale):
//
//     dq = before (dO T) + (tril(dO V^T) * decay) K                      T = whole T + (after V)^T K
//     dv = after (K Z) + (tril(Q K^T) * decay)^T dO                      Z = whole Z + (before Q)^T dO
//     dk = after (V Z^T) + (tril(dO V^T) * decay)^T Q
//
// The gradient of log_gate_i is the sum over the edges j -> l that it decays, j < i <= l. It starts with <S, Z> at the first
// node of a chunk, for which the states of a document are kept; then node i's edges as a destination, <q_i, dq_i>, leave the
// sum, and those as a source, <k_i, dk_i>, enter it. A sum along the whole sequence instead would add up roundings: sums over
// gates (Mamba's A) are 100 times as exact. Both products hold the edge i -> i, which no gate decays, and which may be larger
// than all others: it is left out. Where nothing comes from behind a chunk, the sum starts there, with 0 (`add_up`). For edges
// within a chunk, E_ij = decay_ij <q_i, k_j> <do_i, v_j>, the products are sums of rows and of columns of E, j < i.
template <class T> struct Backward {
  const Scan<T> &p;
  const int64_t F = stride<T>(p.width), D = stride<T>(p.value_width), C = stride<T>(CHUNK);
  const int64_t wide = up(p.width, 8), deep = up(p.value_width, 8), chunks = most_chunks(p, CHUNK);
  Memory memory{(CHUNK * (3 * F + 3 * D + 3 * C) + 2 * F * D + (F + D) * C + chunks * CHUNK + (chunks + 1) * D * F) * (int64_t)sizeof(T), 16};
  T *q, *k, *v, *o, *dk, *dv, *P, *W, *k_transposed, *v_transposed, *turned, *Z, *dL, *states;
  Decays<T> decays;
  int64_t b, g, copy;

  explicit Backward(const Scan<T> &p) : p(p) {
    if (!memory) return;
    q = memory.take<T>(CHUNK * F), k = memory.take<T>(CHUNK * F), dk = memory.take<T>(CHUNK * F);
    v = memory.take<T>(CHUNK * D), o = memory.take<T>(CHUNK * D), dv = memory.take<T>(CHUNK * D);
    P = memory.take<T>(CHUNK * C), W = memory.take<T>(CHUNK * C);
    k_transposed = memory.take<T>(F * C), v_transposed = memory.take<T>(D * C);
    turned = memory.take<T>(D * F), Z = memory.take<T>(F * D);  // T of the pass forwards, Z^T of the pass backwards
    dL = memory.take<T>(chunks * CHUNK), states = memory.take<T>((chunks + 1) * D * F);
  }
  void read(int64_t node, int64_t n) {
    const int64_t gate = (b * p.num_dst + node) * p.groups + g;
    decays.read(p.log_gate ? p.log_gate + gate : nullptr, p.groups, n);
    pack_chunk(p.query, p.query.at(b, g, node), n, p.width, T(p.scale), q);
    pack_chunk(p.key, p.key.at(b, g, node), n, p.width, T(1), k);
    pack_chunk(p.value, p.value.at(b, g, node), n, p.value_width, T(1), v);
    pack_chunk(p.d_out, p.d_out.at(b, g, node), n, p.value_width, T(1), o);
    transposed(v, CHUNK, p.value_width, v_transposed);
    lower_logits(P, o, D, v_transposed, p.value_width, &decays);
  }

  // The gradients of the queries of a chunk; T goes on to its end.
  void forwards(int64_t node, int64_t n, T *dL) {
    read(node, n);
    product<STEP, false, T>({o, D}, {turned, F}, {dk, F}, CHUNK, p.value_width, wide);
    for (int64_t i = 0; i < n; i++) {
      scale_row(dk + i * F, wide, decays.before[i]);
      dL[i] = dot(q + i * F, dk + i * F, wide);
    }
    add_lower(P, k, dk, p.width);
    add_rows(p.d_query, p, copy, b, g, node, n, p.width, T(p.scale), dk);
    for (int64_t d = 0; d < p.value_width; d++) scale_row(turned + d * F, wide, decays.whole);
    scale_rows(v, n, p.value_width, decays.after);
    product<STEP, true, T>({v, 1, D}, {k, F}, {turned, F}, up(p.value_width, STEP), n, wide);
  }

  // Sums of the rows less those of the columns of E, j < i; then W = Q K^T gets its decays.
  void add_own_gates(T *dL) {
    T columns[CHUNK] = {};
    for (int64_t i = 0; i < CHUNK; i++) {
      vec<T, 8> row = {};
      for (int64_t j = 0; j <= i; j += 8) {
        vec<T, 8> w = load<T, 8>(W + i * C + j), E = w * load<T, 8>(P + i * C + j);
        if (j + 8 > i) E[i - j] = 0;
        store<T, 8>(W + i * C + j, w * load<T, 8>(decays.between + i * C + j));
        store<T, 8>(columns + j, load<T, 8>(columns + j) + E);
        row += E;
      }
      dL[i] += sum<T, 8>(row);
    }
    for (int64_t i = 0; i < CHUNK; i++) dL[i] -= columns[i];
  }

  // All other gradients of a chunk; Z and Z^T go back to its start, where T was `state`.
  void backwards(int64_t node, int64_t n, const T *state, T *dL) {
    const double behind = inner(state + D * F, turned, p.value_width, F, wide);
    read(node, n);
    transposed(k, CHUNK, p.width, k_transposed);
    lower_logits<T>(W, q, F, k_transposed, p.width, nullptr);
    add_own_gates(dL);
    product<STEP, false, T>({v, D}, {turned, F}, {dk, F}, CHUNK, p.value_width, wide);
    product<STEP, false, T>({k, F}, {Z, D}, {dv, D}, CHUNK, p.width, deep);
    for (int64_t i = 0; i < n; i++) {
      scale_row(dk + i * F, wide, decays.after[i]);
      scale_row(dv + i * D, deep, decays.after[i]);
      dL[i] -= dot(k + i * F, dk + i * F, wide);
    }
    add_lower_transposed(P, q, dk, p.width);
    add_lower_transposed(W, o, dv, p.value_width);
    add_rows(p.d_key, p, copy, b, g, node, n, p.width, T(1), dk);
    add_rows(p.d_value, p, copy, b, g, node, n, p.value_width, T(1), dv);
    for (int64_t f = 0; f < p.width; f++) scale_row(Z + f * D, deep, decays.whole);
    scale_rows(q, n, p.width, decays.before);
    product<STEP, true, T>({q, 1, F}, {o, D}, {Z, D}, up(p.width, STEP), n, deep);
    transposed(Z, p.width, p.value_width, turned);
    if (!p.d_log_gate) return;
    T *const d_log_gate = p.d_log_gate + (b * p.num_dst + node) * p.groups + g;
    add_up(inner(state, turned, p.value_width, F, wide), behind, dL, 1, n, d_log_gate, p.groups);
  }

  void head() {
    for (const Block *block = p.blocks; block < p.blocks + p.num_blocks; block++) {
      const bool is_first = block == p.blocks, is_last = block + 1 == p.blocks + p.num_blocks;
      const int64_t first = block->first, length = block->last - first, count = divide_up(length, CHUNK);
      read_state(Z, is_first ? state_of(p, p.state, b, g) : nullptr, p.value_width, p.width, p.value_width);
      transposed(Z, p.width, p.value_width, turned);
      for (int64_t c = 0; c < count; c++) {
        __builtin_memcpy(states + c * D * F, turned, p.value_width * F * sizeof(T));
        forwards(first + c * CHUNK, least(CHUNK, length - c * CHUNK), dL + c * CHUNK);
      }
      __builtin_memcpy(states + count * D * F, turned, p.value_width * F * sizeof(T));
      read_state(Z, is_last ? state_of(p, p.d_last, b, g) : nullptr, p.value_width, p.width, p.value_width);
      transposed(Z, p.width, p.value_width, turned);
      for (int64_t c = count - 1; c >= 0; c--)
        backwards(first + c * CHUNK, least(CHUNK, length - c * CHUNK), states + c * D * F, dL + c * CHUNK);
      if (is_first && p.d_state) write_state(state_of(p, p.d_state, b, g), p.value_width, Z, p.width, p.value_width);
    }
  }
};

}  // namespace
}  // namespace scan

extern "C" int64_t scan_size() { return sizeof(scan::Scan<float>); }
KERNEL(scan_f32, scan::Scan<float>, scan::run(*p, scan::item_of(*p, b, part, parts)))
KERNEL(scan_f64, scan::Scan<double>, scan::run(*p, scan::item_of(*p, b, part, parts)))
KERNEL(scan_backward_f32, scan::Scan<float>, scan::each_head<scan::Backward<float>>(*p, b, part, parts))
KERNEL(scan_backward_f64, scan::Scan<double>, scan::each_head<scan::Backward<double>>(*p, b, part, parts))
