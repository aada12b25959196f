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
//
//     for each set of heads, or range of columns of S     side by side
//         for each block of rows and sources
//             for each chunk of CHUNK nodes               in order; backward: once more from the last to the first
//
// Called by `kernels/recurrent/scan.py`: by `linear_attention`, and by `recurrence` without beta and at most a gate a head.
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
    finish(p, k, nodes * p.sources, T(1));
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
      pack(p.query, p.query.at(item.b, item.g, node), nodes, p.heads, p.width, T(1), q);
      finish(p, q, nodes * p.heads, T(p.scale));
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

// The gradients of one set of heads after the other: consecutive heads that share queries and keys. Each document is passed
// forwards with T = S^T of each head, then backwards with Z, the gradient of S (q includes the scale):
//
//     dq = before (dO T) + (tril(dO V^T) * decay) K                      T = whole T + (after V)^T K
//     dv = after (K Z) + (tril(Q K^T) * decay)^T dO                      Z = whole Z + Q^T (before dO)
//     dk = after (V Z^T) + (tril(dO V^T) * decay)^T Q
//
// The gradient of log_gate_i is the sum over the edges j -> l that it decays, j < i <= l. It starts with <S, Z> at every
// ANCHOR-th chunk, for which T is kept; then node i's edges as a destination, <q_i, dq_i>, leave the sum, and those as a
// source, <k_i, dk_i>, enter it. A sum along the whole sequence instead would add up roundings: sums over gates (Mamba's A)
// are 100 times as exact. Both products hold the edge i -> i, which no gate decays, and which may be larger than all others:
// it is left out. Where nothing comes from behind, the sum starts there, with 0 (`add_up`). For edges within a chunk,
// E_ij = decay_ij <q_i, k_j> <do_i, v_j>, the products are sums of rows and of columns of E, j < i.
constexpr int64_t ANCHOR = 8, MOST_HEADS = 8;

template <class T> struct Backward {
  struct Head {
    T *turned, *Z, *dL, *anchors;  // T of the pass forwards, Z^T of the pass backwards
    double behind;                 // <S, Z> at the last anchor
  };
  const Scan<T> &p;
  const int64_t F = stride<T>(p.width), D = stride<T>(p.value_width), C = stride<T>(CHUNK);
  const int64_t wide = up(p.width, 8), deep = up(p.value_width, 8), chunks = most_chunks(p, CHUNK), kept = divide_up(chunks, ANCHOR);
  const int64_t b, copy, end, most;  // heads before `end`, in sets of at most `most`
  Memory memory{(CHUNK * (4 * F + 3 * D + 3 * C) + (F + D) * C + most * (2 * F * D + chunks * CHUNK + kept * D * F)) * (int64_t)sizeof(T),
                12 + 4 * MOST_HEADS};
  T *q, *k, *v, *o, *sum, *own, *dv, *QK, *P, *W, *k_transposed, *v_transposed;
  Head heads[MOST_HEADS];
  Decays<T> decays;
  int64_t g, count;  // the first head of a set, and how many they are

  Backward(const Scan<T> &p, int64_t b, int64_t part, int64_t parts)
      : p(p), b(b), copy(part), end(p.groups * (part + 1) / parts),
        most(least(least(p.query.shared, p.key.shared), least(divide_up(p.groups, parts), MOST_HEADS))), g(p.groups * part / parts) {
    if (!memory) return;
    q = memory.take<T>(CHUNK * F), k = memory.take<T>(CHUNK * F), sum = memory.take<T>(CHUNK * F), own = memory.take<T>(CHUNK * F);
    v = memory.take<T>(CHUNK * D), o = memory.take<T>(CHUNK * D), dv = memory.take<T>(CHUNK * D);
    QK = memory.take<T>(CHUNK * C), P = memory.take<T>(CHUNK * C), W = memory.take<T>(CHUNK * C);
    k_transposed = memory.take<T>(F * C), v_transposed = memory.take<T>(D * C);
    __builtin_memset(W, 0, CHUNK * C * sizeof(T));  // nothing is written behind its diagonal
    for (Head *head = heads; head < heads + most; head++) {
      head->turned = memory.take<T>(D * F), head->Z = memory.take<T>(F * D);
      head->dL = memory.take<T>(chunks * CHUNK), head->anchors = memory.take<T>(kept * D * F);
    }
  }
  template <class Function> void each_head(Function function) {
    for (int64_t h = 0; h < count; h++) function(heads[h], g + h);
  }
  void read(int64_t node, int64_t n) {
    pack_chunk(p.query, p.query.at(b, g, node), n, p.width, T(p.scale), q);
    pack_chunk(p.key, p.key.at(b, g, node), n, p.width, T(1), k);
    __builtin_memset(sum, 0, CHUNK * F * sizeof(T));
  }
  void read_head(int64_t head, int64_t node, int64_t n) {
    const int64_t gate = (b * p.num_dst + node) * p.groups + head;
    decays.read(p.log_gate ? p.log_gate + gate : nullptr, p.groups, n);
    pack_chunk(p.value, p.value.at(b, head, node), n, p.value_width, T(1), v);
    pack_chunk(p.d_out, p.d_out.at(b, head, node), n, p.value_width, T(1), o);
    transposed(v, CHUNK, p.value_width, v_transposed);
    lower_logits(P, o, D, v_transposed, p.value_width, &decays);
  }
  // sum += factor * own, row by row; dL [n] += sign <x, factor * own>.
  void add_decayed(const T *factor, int64_t n, const T *x, T sign, T *dL) {
    for (int64_t i = 0; i < n; i++) {
      vec<T, 8> inner = {};
      for (int64_t f = i * F; f < i * F + wide; f += 8) {
        const vec<T, 8> y = load<T, 8>(own + f) * factor[i];
        store<T, 8>(sum + f, load<T, 8>(sum + f) + y);
        inner += load<T, 8>(x + f) * y;
      }
      dL[i] += sign * ::sum<T, 8>(inner);
    }
  }

  // The gradients of the queries of a chunk; T of each head goes on to its end.
  void forwards(int64_t node, int64_t n, int64_t c) {
    read(node, n);
    each_head([&](Head &head, int64_t g) {
      read_head(g, node, n);
      product<STEP, false, T>({o, D}, {head.turned, F}, {own, F}, CHUNK, p.value_width, wide);
      __builtin_memset(head.dL + c * CHUNK, 0, CHUNK * sizeof(T));
      add_decayed(decays.before, n, q, T(1), head.dL + c * CHUNK);
      add_lower(P, k, sum, p.width);
      for (int64_t d = 0; d < p.value_width; d++) scale_row(head.turned + d * F, wide, decays.whole);
      scale_rows(v, n, p.value_width, decays.after);
      product<STEP, true, T>({v, 1, D}, {k, F}, {head.turned, F}, up(p.value_width, STEP), n, wide);
    });
    add_rows(p.d_query, p, copy, b, g, node, n, p.width, T(p.scale), sum);
  }

  // Sums of the rows less those of the columns of E, j < i; and W = Q K^T with its decays.
  void add_own_gates(T *dL) {
    T columns[CHUNK] = {};
    for (int64_t i = 0; i < CHUNK; i++) {
      vec<T, 8> row = {};
      for (int64_t j = 0; j <= i; j += 8) {
        vec<T, 8> w = load<T, 8>(QK + i * C + j), E = w * load<T, 8>(P + i * C + j);
        if (j + 8 > i) E[i - j] = 0;
        store<T, 8>(W + i * C + j, w * load<T, 8>(decays.between + i * Decays<T>::ROW + j));
        store<T, 8>(columns + j, load<T, 8>(columns + j) + E);
        row += E;
      }
      dL[i] += ::sum<T, 8>(row);
    }
    for (int64_t i = 0; i < CHUNK; i++) dL[i] -= columns[i];
  }

  // All other gradients of a chunk; Z and Z^T of each head go back to its start.
  void backwards(int64_t node, int64_t n, int64_t c, int64_t length) {
    read(node, n);
    transposed(k, CHUNK, p.width, k_transposed);
    lower_logits<T>(QK, q, F, k_transposed, p.width, nullptr);
    each_head([&](Head &head, int64_t g) {
      T *const dL = head.dL + c * CHUNK;
      read_head(g, node, n);
      add_own_gates(dL);
      product<STEP, false, T>({v, D}, {head.turned, F}, {own, F}, CHUNK, p.value_width, wide);
      add_decayed(decays.after, n, k, T(-1), dL);
      add_lower_transposed(P, q, sum, p.width);
      product<STEP, false, T>({k, F}, {head.Z, D}, {dv, D}, CHUNK, p.width, deep);
      scale_rows(dv, n, p.value_width, decays.after);
      add_lower_transposed(W, o, dv, p.value_width);
      add_rows(p.d_value, p, copy, b, g, node, n, p.value_width, T(1), dv);
      for (int64_t f = 0; f < p.width; f++) scale_row(head.Z + f * D, deep, decays.whole);
      scale_rows(o, n, p.value_width, decays.before);
      product<STEP, true, T>({q, 1, F}, {o, D}, {head.Z, D}, up(p.width, STEP), n, deep);
      transposed(head.Z, p.width, p.value_width, head.turned);
      if (!p.d_log_gate || c % ANCHOR) return;
      const double first = inner(head.anchors + c / ANCHOR * D * F, head.turned, p.value_width, F, wide);
      T *const d_log_gate = p.d_log_gate + (b * p.num_dst + node) * p.groups + g;
      add_up(first, head.behind, dL, 1, least(ANCHOR * CHUNK, length - c * CHUNK), d_log_gate, p.groups);
      head.behind = first;
    });
    add_rows(p.d_key, p, copy, b, g, node, n, p.width, T(1), sum);
  }
  // <T^T, Z> for Z [F, D] of the caller.
  double inner_with(const T *turned, const T *Z) const {
    double total = 0;
    for (int64_t f = 0; Z && f < p.width; f++)
      for (int64_t d = 0; d < p.value_width; d++) total += (double)turned[d * F + f] * (double)Z[f * p.value_width + d];
    return total;
  }
  // Z = from, or 0; and Z^T.
  void start(Head &head, const T *from) {
    read_state(head.Z, from, p.value_width, p.width, p.value_width);
    transposed(head.Z, p.width, p.value_width, head.turned);
  }

  void set() {
    for (const Block *block = p.blocks; block < p.blocks + p.num_blocks; block++) {
      const bool is_first = block == p.blocks, is_last = block + 1 == p.blocks + p.num_blocks;
      const int64_t first = block->first, length = block->last - first, last = divide_up(length, CHUNK) - 1;
      each_head([&](Head &head, int64_t g) { start(head, is_first ? state_of(p, p.state, b, g) : nullptr); });
      for (int64_t c = 0; c <= last; c++) {
        if (c % ANCHOR == 0)
          each_head([&](Head &head, int64_t) { __builtin_memcpy(head.anchors + c / ANCHOR * D * F, head.turned, p.value_width * F * sizeof(T)); });
        forwards(first + c * CHUNK, least(CHUNK, length - c * CHUNK), c);
      }
      each_head([&](Head &head, int64_t g) {
        const T *d_last = is_last ? state_of(p, p.d_last, b, g) : nullptr;
        head.behind = inner_with(head.turned, d_last);
        start(head, d_last);
      });
      for (int64_t c = last; c >= 0; c--) backwards(first + c * CHUNK, least(CHUNK, length - c * CHUNK), c, length);
      if (is_first && p.d_state)
        each_head([&](Head &head, int64_t g) { write_state(state_of(p, p.d_state, b, g), p.value_width, head.Z, p.width, p.value_width); });
    }
  }
  bool run() {
    if (!memory) return false;
    for (; g < end; g += count) {
      const auto rest = [&](int64_t shared) { return shared - g % shared; };
      count = least(least(rest(p.query.shared), rest(p.key.shared)), least(end - g, most));
      set();
    }
    return true;
  }
};

}  // namespace
}  // namespace scan

extern "C" int64_t scan_size() { return sizeof(scan::Scan<float>); }
KERNEL(scan_f32, scan::Scan<float>, scan::run(*p, scan::item_of(*p, b, part, parts)))
KERNEL(scan_f64, scan::Scan<double>, scan::run(*p, scan::item_of(*p, b, part, parts)))
KERNEL(scan_backward_f32, scan::Scan<float>, scan::Backward<float>(*p, b, part, parts).run())
KERNEL(scan_backward_f64, scan::Scan<double>, scan::Backward<double>(*p, b, part, parts).run())
