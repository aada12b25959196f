// What the kernels of recurrences share: their parameters, chunks of nodes in buffers, and the decays of a chunk.
//
// A recurrence is a sum over a causal graph: the edge j -> i weighs <q_i, k_j> times the gates of the nodes after j up to
// i. So one matrix S [F, D] holds all that a node needs of the nodes before its chunk. `scan.cpp` has one gate a head (or
// none: linear attention), `delta_rule.cpp` stores what S does not predict yet, `feature_gates.cpp` has a gate a feature.
// The edges are blocks; where there are gates, each block is a document, whose first node has no node before it.
#pragma once
#include "products.h"

namespace scan {

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
  int64_t shared;                          // states that have one group: state g reads group g / shared
  int64_t at(int64_t b, int64_t g, int64_t n) const { return b * batch + g / shared * group + n * node; }
};

// Dense [copies, B, N, groups, width], a copy for each part, or one for all. The first head of a part that has a group
// writes its rows, the others add to them.
template <class T> struct Gradient {
  T *data;
  int64_t groups, copies;
};

template <class T> struct Scan {    // mpnn/kernels/recurrent/scan.py has the same fields in the same order
  int64_t groups, heads, sources;   // G states; R query rows and P sources of a node share one
  int64_t batch, num_dst, width, value_width;
  double scale;
  Features query, key, value;
  T *out;  // [B, N, G, R, D]
  const Block *blocks;
  int64_t num_blocks;
  // recurrences, R = P = 1. Absent: null.
  int64_t by_feature;  // whether log_gate has one for each feature
  const T *log_gate;   // [B, N, G], or [B, N, G, F]
  const T *beta;       // [B, N, G]
  const T *state;      // [B, G, F, D], before the first block
  T *last;             // the same, after the last block
  // their gradients
  Features d_out;
  const T *d_last;
  Gradient<T> d_query, d_key, d_value;
  T *d_log_gate, *d_beta, *d_state;
  int64_t unit;      // whether queries and keys are divided by their lengths; of passes forwards alone
  int64_t together;  // of `scan` alone: consecutive states of a work item, which share queries and keys
};

// ------------------------------------------------------------------------------------------------ copies of chunks

constexpr int64_t up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// The numbers from row to row of a buffer: an odd number of cache lines, so that the rows do not push one another out
// of the cache. It is at least the width rounded up to whole steps of a product.
template <class T> constexpr int64_t stride(int64_t width) {
  constexpr int64_t LINE = 64 / sizeof(T);
  return (divide_up(up(width, STEP), LINE) | 1) * LINE;
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

template <class T>
void pack(const Features &x, int64_t at, int64_t nodes, int64_t per_node, int64_t width, T factor, T *out) {
  switch (x.type) {
    case FLOAT32: return pack_as<T, float>(x, at, nodes, per_node, width, factor, out);
    case FLOAT64: return pack_as<T, double>(x, at, nodes, per_node, width, factor, out);
    case BFLOAT16: return pack_as<T, bfloat16>(x, at, nodes, per_node, width, factor, out);
    case FLOAT16: return pack_as<T, float16>(x, at, nodes, per_node, width, factor, out);
  }
}

// A whole chunk [C, stride] of n nodes, with zeros in the rows from n on.
template <int64_t C = CHUNK, class T>
void pack_chunk(const Features &x, int64_t at, int64_t n, int64_t width, T factor, T *out) {
  pack(x, at, n, 1, width, factor, out);
  __builtin_memset(out + n * stride<T>(width), 0, (C - n) * stride<T>(width) * sizeof(T));
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

// x [n, width] *= factor, of rows of a buffer.
template <class T> INLINE void scale_row(T *x, int64_t width, T factor) {
  for (int64_t d = 0; d < width; d += 8) store<T, 8>(x + d, load<T, 8>(x + d) * factor);
}
template <class T> void scale_rows(T *x, int64_t n, int64_t width, const T *factors) {
  for (int64_t i = 0; i < n; i++) scale_row(x + i * stride<T>(width), width, factors[i]);
}

// Inner product of rows of buffers, whose padding is zero.
template <class T> INLINE T dot(const T *a, const T *b, int64_t width) {
  vec<T, 8> s = {};
  for (int64_t d = 0; d < width; d += 8) s += load<T, 8>(a + d) * load<T, 8>(b + d);
  return sum<T, 8>(s);
}

// Queries or keys x [n, width], rows of a buffer, times `factor`, over their lengths if the caller wants it.
template <class T> void finish(const Scan<T> &p, T *x, int64_t n, T factor) {
  if (!p.unit && factor == 1) return;
  for (int64_t i = 0; i < n; i++, x += stride<T>(p.width))
    scale_row(x, p.width, p.unit ? factor / (T)__builtin_sqrt(dot(x, x, p.width) + 1e-6) : factor);
}

// S [F, stride(D)] = from [F, D], and back; S = 0 if `from` is null.
template <class T> void read_state(T *S, const T *from, int64_t row, int64_t F, int64_t D) {
  __builtin_memset(S, 0, stride<T>(F) * stride<T>(D) * sizeof(T));
  if (from) for (int64_t f = 0; f < F; f++) __builtin_memcpy(S + f * stride<T>(D), from + f * row, D * sizeof(T));
}
template <class T> void write_state(T *to, int64_t row, const T *S, int64_t F, int64_t D) {
  for (int64_t f = 0; f < F; f++) __builtin_memcpy(to + f * row, S + f * stride<T>(D), D * sizeof(T));
}

// Writes x [n, width], rows of a buffer, times `factor` to a gradient, or adds it.
template <class T>
void add_rows(const Gradient<T> &to, const Scan<T> &p, int64_t copy, int64_t b, int64_t g, int64_t node, int64_t n,
              int64_t width, T factor, const T *x) {
  const int64_t shared = p.groups / to.groups, group = g / shared, own = to.copies > 1 ? copy : 0;
  const int64_t first = p.groups * own / to.copies;  // head of this copy
  const bool adds = g != (first > group * shared ? first : group * shared);
  for (int64_t i = 0; i < n; i++) {
    T *row = to.data + (((own * p.batch + b) * p.num_dst + node + i) * to.groups + group) * width;
    const T *from = x + i * stride<T>(width);
    int64_t d = 0;
    for (; d + 8 <= width; d += 8)
      store<T, 8>(row + d, load<T, 8>(from + d) * factor + (adds ? load<T, 8>(row + d) : vec<T, 8>{}));
    for (; d < width; d++) row[d] = from[d] * factor + (adds ? row[d] : 0);
  }
}

// ------------------------------------------------------------------------------------------------ decays

// Decays within a chunk of n nodes by one gate a node: products of gates, row by row, with no logarithm and no difference,
// so that any gate is exact, 0 included. A product below 1e-30 becomes 0: denormal numbers are slow.
template <class T> struct Decays {
  static constexpr int64_t ROW = stride<T>(CHUNK);
  T between[CHUNK * ROW] = {};      // row i: the gates after j up to i, j <= i; zeros behind
  T before[CHUNK], after[CHUNK];    // the gates from the start of the chunk up to i; those after i to the end
  T whole;                          // all of them

  // log_gate of the nodes, `step` apart; all gates are 1 if it is null.
  void read(const T *log_gate, int64_t step, int64_t n) {
    T product = 1;
    for (int64_t i = 0; i < CHUNK; i++) {
      T *row = between + i * ROW;
      const T gate = log_gate && i < n ? exp1<T>(log_gate[i * step]) : 1;
      for (int64_t j = 0; j < i; j += 8) {
        vec<T, 8> x = load<T, 8>(row - ROW + j) * gate;
        store<T, 8>(row + j, x < (T)1e-30 ? vec<T, 8>{} : x);
      }
      row[i] = 1;
      product *= gate;
      product = product < (T)1e-30 ? 0 : product;
      before[i] = product;
    }
    for (int64_t i = 0; i < CHUNK; i++) after[i] = i < n ? between[(n - 1) * ROW + i] : 0;
    whole = before[n - 1];
  }
};

// to [CHUNK, CHUNK] = tril(A [CHUNK, depth] B [depth, CHUNK]), times the decays if there are some; zeros behind, as far
// as products of ROWS rows read them. B has rows of `stride(CHUNK)`, as `to` has.
template <class T>
void lower_logits(T *to, const T *A, int64_t A_row, const T *B, int64_t depth, const Decays<T> *decays) {
  const int64_t row = stride<T>(CHUNK);
  for (int64_t r = 0; r < CHUNK; r += ROWS) {
    const int64_t columns = r + ROWS;
    product<STEP, false, T>({A + r * A_row, A_row}, {B, row}, {to + r * row, row}, ROWS, depth, columns);
    for (int64_t i = r; i < columns; i++) {
      if (decays)
        for (int64_t j = 0; j <= i; j += 8)
          store<T, 8>(to + i * row + j, load<T, 8>(to + i * row + j) * load<T, 8>(decays->between + i * Decays<T>::ROW + j));
      for (int64_t j = i + 1; j < columns; j++) to[i * row + j] = 0;
    }
  }
}

// to += L X and to += L^T X for a lower triangle L [C, C], zeros behind, and X, to [C, width].
template <int64_t C = CHUNK, class T> void add_lower(const T *L, const T *X, T *to, int64_t width) {
  const int64_t row = stride<T>(width), L_row = stride<T>(C);
  for (int64_t r = 0; r < C; r += ROWS)
    product<STEP, true, T>({L + r * L_row, L_row}, {X, row}, {to + r * row, row}, ROWS, r + ROWS, up(width, 8));
}
template <int64_t C = CHUNK, class T> void add_lower_transposed(const T *L, const T *X, T *to, int64_t width) {
  const int64_t row = stride<T>(width), L_row = stride<T>(C);
  for (int64_t r = 0; r < C; r += ROWS)
    product<STEP, true, T>({L + r * L_row + r, 1, L_row}, {X + r * row, row}, {to + r * row, row}, ROWS, C - r,
                           up(width, 8));
}

// ------------------------------------------------------------------------------------------------ triangular systems

// U = (1 - A)^-1 U for a strictly lower A [C, C], M vectors of L columns: STEP rows in registers, the rows before as a
// product, their own triangle by substitution. TURNED: (1 - A^T)^-1 U, from the last rows to the first.
template <int64_t C, bool TURNED, int L, int M, class T>
INLINE void solve_columns(const T *A, int64_t A_row, T *U, int64_t U_row) {
  const int64_t row = TURNED ? 1 : A_row, column = TURNED ? A_row : 1;
  for (int64_t block = 0; block < C; block += STEP) {
    const int64_t r = TURNED ? C - STEP - block : block, from = TURNED ? r + STEP : 0, to = TURNED ? C : r;
    vec<T, L> u[STEP][M];
    UNROLL for (int i = 0; i < STEP; i++)
      UNROLL for (int m = 0; m < M; m++) u[i][m] = load<T, L>(U + (r + i) * U_row + m * L);
    for (int64_t j = from; j < to; j++)
      UNROLL for (int i = 0; i < STEP; i++)
        UNROLL for (int m = 0; m < M; m++)
          u[i][m] += A[(r + i) * row + j * column] * load<T, L>(U + j * U_row + m * L);
    UNROLL for (int n = 0; n < STEP; n++)
      UNROLL for (int l = n + 1; l < STEP; l++) {
        const int j = TURNED ? STEP - 1 - n : n, i = TURNED ? STEP - 1 - l : l;
        UNROLL for (int m = 0; m < M; m++) u[i][m] += A[(r + i) * row + (r + j) * column] * u[j][m];
      }
    UNROLL for (int i = 0; i < STEP; i++)
      UNROLL for (int m = 0; m < M; m++) store<T, L>(U + (r + i) * U_row + m * L, u[i][m]);
  }
}
template <int64_t C, bool TURNED, class T> NOINLINE void solve(const T *A, T *U, int64_t width) {
  constexpr int L = VECTOR_BYTES / sizeof(T);
  const int64_t A_row = stride<T>(C), U_row = stride<T>(width);
  for (width = up(width, 8); width >= 2 * L; width -= 2 * L, U += 2 * L)
    solve_columns<C, TURNED, L, 2>(A, A_row, U, U_row);
  for (; width > 0; width -= 8, U += 8) solve_columns<C, TURNED, 8, 1>(A, A_row, U, U_row);
}

// ------------------------------------------------------------------------------------------------ gradients of gates

// <A, B> of two matrices of `rows` rows.
template <class T> double inner(const T *A, const T *B, int64_t rows, int64_t stride, int64_t width) {
  double total = 0;
  for (int64_t at = 0; at < rows * stride; at += stride) total += (double)dot(A + at, B + at, width);
  return total;
}

// The gradients of the gates of a chunk: `first` at its first node, less dL of each node, which leaves `behind`. If that is 0,
// because no later node has a gradient, they are added up from the end: nodes behind the last one that the loss reads get
// exactly 0. Else from the start, where the sum is as small as the gates are.
template <class T>
void add_up(double first, double behind, const T *dL, int64_t step, int64_t n, T *to, int64_t row) {
  if (behind == 0) {
    for (int64_t i = n - 1; i >= 0; i--) to[i * row] = (T)(behind += (double)dL[i * step]);
    return;
  }
  for (int64_t i = 0; i < n; first -= (double)dL[i++ * step]) to[i * row] = (T)first;
}

// ------------------------------------------------------------------------------------------------ one head after the other

// The number of chunks of C nodes of the longest document.
template <class T> int64_t most_chunks(const Scan<T> &p, int64_t C) {
  int64_t most = 1;
  for (const Block *block = p.blocks; block < p.blocks + p.num_blocks; block++) {
    const int64_t chunks = divide_up(block->last - block->first, C);
    most = chunks > most ? chunks : most;
  }
  return most;
}

// The state [F, D] of a head, in a tensor [B, G, F, D] that may be absent.
template <class T, class S> S *state_of(const Scan<T> &p, S *x, int64_t b, int64_t g) {
  return x ? x + (b * p.groups + g) * p.width * p.value_width : x;
}

// Part `part` of `parts` of the heads of entry b, each computed by `Pass::head`. False: no memory.
template <class Pass, class T> bool each_head(const Scan<T> &p, int64_t b, int64_t part, int64_t parts) {
  Pass pass(p);
  if (!pass.memory) return false;
  pass.b = b, pass.copy = part;
  for (pass.g = p.groups * part / parts; pass.g < p.groups * (part + 1) / parts; pass.g++) pass.head();
  return true;
}

// ------------------------------------------------------------------------------------------------ there and back

// Gradients that need the state before each chunk of C nodes: each document is passed forwards, then backwards. The states
// of one segment are in memory, and the first state of each; on the way back the others are computed again (Chen et al. 2016,
// arXiv:1604.06174).
constexpr int64_t SEGMENT = 64;  // chunks

inline int64_t states_kept(int64_t chunks) {
  return least(chunks, SEGMENT) + 1 + (chunks > SEGMENT ? divide_up(chunks, SEGMENT) : 0);
}

// `Pass::forwards` moves a state to the end of a chunk and writes the e of its nodes, from which `again` moves it. `states`
// holds [F, D] `states_kept` times, `es` [chunks, C, D], Z the gradient of the state.
template <int64_t C, class Pass> void there_and_back(Pass &pass) {
  const auto &p = pass.p;
  const int64_t size = pass.F * pass.D, bytes = size * sizeof(*pass.states);
  const auto state = [&](int64_t c) { return pass.states + c % SEGMENT * size; };
  const auto e = [&](int64_t c) { return pass.es + c * C * pass.D; };
  const auto firsts = pass.states + (SEGMENT + 1) * size;
  for (const auto *block = p.blocks; block < p.blocks + p.num_blocks; block++) {
    const bool is_first = block == p.blocks, is_last = block + 1 == p.blocks + p.num_blocks;
    const int64_t length = block->last - block->first, chunks = divide_up(length, C);
    const auto node = [&](int64_t c) { return block->first + c * C; };
    const auto nodes = [&](int64_t c) { return least(C, length - c * C); };
    read_state(state(0), is_first ? state_of(p, p.state, pass.b, pass.g) : nullptr, p.value_width, p.width, p.value_width);
    for (int64_t c = 0; c < chunks; c++) {
      if (c % SEGMENT == 0 && chunks > SEGMENT) {
        if (c) __builtin_memcpy(state(c), state(c - 1) + size, bytes);
        __builtin_memcpy(firsts + c / SEGMENT * size, state(c), bytes);
      }
      __builtin_memcpy(state(c) + size, state(c), bytes);
      pass.forwards(node(c), nodes(c), state(c) + size, e(c));
    }
    read_state(pass.Z, is_last ? state_of(p, p.d_last, pass.b, pass.g) : nullptr, p.value_width, p.width, p.value_width);
    for (int64_t c = chunks - 1; c >= 0; c--) {
      if (c % SEGMENT == SEGMENT - 1 && c < chunks - 1) {  // the last one of an earlier segment
        __builtin_memcpy(pass.states, firsts + c / SEGMENT * size, bytes);
        for (int64_t a = c + 1 - SEGMENT; a <= c; a++) {
          __builtin_memcpy(state(a) + size, state(a), bytes);
          pass.again(node(a), nodes(a), state(a) + size, e(a));
        }
      }
      pass.backwards(node(c), nodes(c), state(c), e(c));
    }
    if (is_first && p.d_state)
      write_state(state_of(p, p.d_state, pass.b, pass.g), p.value_width, pass.Z, p.width, p.value_width);
  }
}

}  // namespace scan
