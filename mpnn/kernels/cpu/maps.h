// Products of rows with weights that are read where they lie: no copy of a weight outlives a product.
//
//     weights [out, in] (nn.Linear)         rows of x are turned into panels [depth][COLUMNS rows], once for all weights
//                                           that read them; numbers of a weight are broadcast, one output after the other
//     the same, for at most FEW_ROWS rows   squares of weights are turned in registers
//     weights [in, out] (GPT-2's Conv1D)    numbers of x are broadcast, vectors of outputs are loaded where they lie
//
// A sum is a chain of additions over each slice of the depth, and the slices are added in order. All three do this in the
// same order, so the bits of a row depend neither on the rows beside it nor on how rows and outputs are shared by threads.
#pragma once
#include "panels.h"

namespace maps {

using panels::COLUMNS;
using panels::Finish;
using panels::LANES;
using panels::Target;
using panels::Tile;
using panels::V;

constexpr int64_t FEW_ROWS = 4;  // for which the rows of x fill too few lanes

// A weight [width, depth] with the number (n, k) at data[n * row + k * column]; one of row and column is 1.
struct Weight {
  const float *data;
  int64_t row, column, width, depth, slice;
  // Whether numbers of an output are side by side, as those of nn.Linear.
  bool by_output() const { return column == 1; }
};

// Rows that a product reads: row r at data + r * row, and turned, for the weights that read them so.
struct Rows {
  const float *data;
  int64_t row, count, depth;
  const float *turned;
};

// Whether a product of so many rows with this weight reads turned rows.
inline bool reads_turned(const Weight &weight, int64_t rows) { return weight.by_output() && rows > FEW_ROWS; }

// Numbers of the panels of rows: the last one has half the width if this is enough.
inline int64_t turned_rows(int64_t rows) { return divide_up(rows, LANES) * LANES; }

// A finish that begins at output n, of a row that is `row` rows further.
inline Finish finish_from(Finish finish, int64_t n, int64_t row) {
  if (finish.bias) finish.bias += n;
  if (finish.add) finish.add += row * finish.add_row + n;
  if (finish.times) finish.times += row * finish.times_row + n;
  return finish;
}

// ------------------------------------------------------------------------------------- weights [out, in], many rows

// Rows [rows, depth] of x as a panel [depth][VECTORS * LANES], with zeros behind the last row.
template <int VECTORS> NOINLINE void turn_panel(const float *x, int64_t x_row, int64_t rows, int64_t depth, float *to) {
  constexpr int64_t WIDE = VECTORS * LANES;
  for (int64_t c = 0; c < WIDE; c += 8)
    for (int64_t k = 0; k < depth; k += 8) {
      vec<float, 8> square[8];
      if (c + 8 <= rows) {
        load_transposed(x + c * x_row + k, x_row, square);
      } else {
        UNROLL for (int i = 0; i < 8; i++) square[i] = c + i < rows ? ::load<float, 8>(x + (c + i) * x_row + k) : vec<float, 8>{};
        transpose<float>(square);
      }
      UNROLL for (int i = 0; i < 8; i++) ::store<float, 8>(to + (k + i) * WIDE + c, square[i]);
    }
}

// All rows, in panels one behind the other.
inline void turn(const float *x, int64_t x_row, int64_t rows, int64_t depth, float *to) {
  for (int64_t r = 0; r < rows; r += COLUMNS) {
    if (rows - r <= LANES) turn_panel<1>(x + r * x_row, x_row, rows - r, depth, to + r * depth);
    else turn_panel<2>(x + r * x_row, x_row, least(COLUMNS, rows - r), depth, to + r * depth);
  }
}

// What a tile asks for while it computes: lines from `from` on, `lines` of them in each of several rows that are `gap`
// numbers apart. No lines: nothing.
struct Ahead {
  const float *from;
  int64_t lines, gap;
};

constexpr int64_t LINE = 64 / sizeof(float);

// Sums [N][VECTORS * LANES] of N outputs for the rows of a panel.
template <int N, int VECTORS, bool ASK>
NOINLINE void broadcast_tile(const float *w, int64_t w_row, const float *panel, int64_t depth, int64_t slice, float *sums, Ahead ahead) {
  const float *a[(N + 2) / 3];
  UNROLL for (int g = 0; g < (N + 2) / 3; g++) a[g] = w + 3 * g * w_row;
  int64_t left = ahead.lines;
  for (int64_t done = 0; done < depth; done += slice) {
    V c[N][VECTORS];
    UNROLL for (int n = 0; n < N; n++)
      UNROLL for (int v = 0; v < VECTORS; v++) c[n][v] = V{};
    for (int64_t k = 0; k < slice; k += 8) {
      if constexpr (ASK) {
        UNROLL for (int i = 0; i < N / 2; i++) __builtin_prefetch(ahead.from + i * LINE, 0, 3);
        ahead.from += N / 2 * LINE;
        left -= N / 2;
        if (left <= 0) ahead.from += ahead.gap, left = ahead.lines;
      }
      UNROLL for (int half = 0; half < 2; half++) {
        UNROLL for (int step = 0; step < 4; step++, panel += VECTORS * LANES) {
          V b[VECTORS];
          UNROLL for (int v = 0; v < VECTORS; v++) b[v] = *(const V *)(panel + v * LANES);
          UNROLL for (int n = 0; n < N; n++) {
            V x;
            BROADCAST(x, a[n / 3][n % 3 * w_row + step]);
            UNROLL for (int v = 0; v < VECTORS; v++) ADD_PRODUCT(c[n][v], x, b[v]);
          }
        }
        UNROLL for (int g = 0; g < (N + 2) / 3; g++) a[g] += 4;
      }
    }
    UNROLL for (int n = 0; n < N; n++)
      UNROLL for (int v = 0; v < VECTORS; v++) {
        float *to = sums + (n * VECTORS + v) * LANES;
        ::store<float, LANES>(to, done ? c[n][v] + ::load<float, LANES>(to) : c[n][v]);
      }
  }
}

template <int VECTORS, int N = STEP>
INLINE void broadcast_tile_of(int64_t outputs, const float *w, int64_t w_row, const float *panel, int64_t depth,
                              int64_t slice, float *sums, const Ahead &ahead) {
  if constexpr (N > 0) {
    if (outputs < N) return broadcast_tile_of<VECTORS, N - 1>(outputs, w, w_row, panel, depth, slice, sums, ahead);
    if constexpr (N == STEP)
      if (ahead.lines) return broadcast_tile<N, VECTORS, true>(w, w_row, panel, depth, slice, sums, ahead);
    broadcast_tile<N, VECTORS, false>(w, w_row, panel, depth, slice, sums, ahead);
  }
}

// Outputs that are finished together: whole tiles and whole panels of them.
constexpr int64_t STRIP = STEP * COLUMNS / (STEP % 4 == 0 ? 4 : 2);
static_assert(STRIP % STEP == 0 && STRIP % COLUMNS == 0, "");
constexpr int64_t MOST_PANELS = 4;  // of rows that pass by a tile of weights

// Turns sums [outputs][VECTORS * LANES] back into rows and finishes them.
template <int VECTORS>
NOINLINE void finish_rows(const float *sums, int64_t n, int64_t outputs, int64_t rows, const Target &target, const Finish &finish, int64_t row) {
  constexpr int64_t WIDE = VECTORS * LANES;
  for (int64_t i = 0; i < outputs; i += COLUMNS) {
    float back[WIDE * COLUMNS];
    for (int64_t r = 0; r < rows; r += 8)
      UNROLL for (int c = 0; c < COLUMNS; c += 8) {
        vec<float, 8> square[8];
        load_transposed(sums + (i + c) * WIDE + r, WIDE, square);
        UNROLL for (int j = 0; j < 8; j++) ::store<float, 8>(back + (r + j) * COLUMNS + c, square[j]);
      }
    Tile t{};
    t.c = target.panel((n + i) / COLUMNS) + row * target.row;
    t.c_row = target.row;
    t.finish = finish_from(finish, n + i, row);
    panels::store_finished(back, t, (int)rows);
  }
}

// Where the outputs of a product with turned rows go: to rows, or, if `turned`, to panels of the next product.
struct Destination {
  Target rows;
  float *turned;
};

// Outputs [n0, n1) for all rows, which are turned.
inline void product_by_output(const Rows &x, const Weight &weight, int64_t n0, int64_t n1, const Destination &to, const Finish &finish) {
  const int64_t depth = x.depth, w_row = weight.row;
  float sums[MOST_PANELS * STRIP * COLUMNS];
  for (int64_t r0 = 0; r0 < x.count; r0 += MOST_PANELS * COLUMNS) {
    const int64_t rows = least(MOST_PANELS * COLUMNS, x.count - r0), panels = divide_up(rows, COLUMNS);
    for (int64_t n = n0; n < n1; n += STRIP) {
      const int64_t outputs = least(STRIP, n1 - n);
      for (int64_t i = 0; i < outputs; i += STEP) {
        const int64_t count = least(STEP, outputs - i);
        const float *w = weight.data + (n + i) * w_row, *next = w + count * w_row;
        Ahead ahead = depth == w_row ? Ahead{next, INT64_MAX, 0} : Ahead{next, depth / LINE, w_row - depth};
        for (int64_t p = 0; p < panels; p++, ahead = {}) {
          const float *panel = x.turned + (r0 + p * COLUMNS) * depth;
          float *at = sums + p * STRIP * COLUMNS;
          if (rows - p * COLUMNS <= LANES) broadcast_tile_of<1>(count, w, w_row, panel, depth, weight.slice, at + i * LANES, ahead);
          else broadcast_tile_of<2>(count, w, w_row, panel, depth, weight.slice, at + i * COLUMNS, ahead);
        }
      }
      for (int64_t p = 0; p < panels; p++) {
        const int64_t r = r0 + p * COLUMNS, left = rows - p * COLUMNS, wide = left <= LANES ? LANES : COLUMNS;
        const float *of_panel = sums + p * STRIP * COLUMNS;
        if (to.turned) {
          const int64_t before = r * weight.width + n * wide;
          Tile t{};
          t.c = to.turned + before;
          t.c_row = wide;
          t.finish = {false, nullptr, finish.activation, nullptr, 0, nullptr};
          if (finish.bias) t.finish.row_bias = finish.bias + n;
          if (finish.times) t.finish.times = finish.times + before, t.finish.times_row = wide;
          panels::store_finished(of_panel, t, (int)outputs, (int)(wide / LANES));
        } else if (left <= LANES) {
          finish_rows<1>(of_panel, n, outputs, left, to.rows, finish, r);
        } else {
          finish_rows<2>(of_panel, n, outputs, least(COLUMNS, left), to.rows, finish, r);
        }
      }
    }
  }
}

// -------------------------------------------------------------------------------------- weights [out, in], few rows

#if defined(__x86_64__)
#define BROADCAST_8(to, from) asm volatile("vbroadcastss %1, %0" : "=v"(to) : "m"(from))
#else
#define BROADCAST_8(to, from) to = splat<float, 8>(from)
#endif

// Sums [R][COLUMNS] of R rows: eight numbers of eight outputs at a time are turned in registers.
template <int R> NOINLINE void square_tile(const float *x, int64_t x_row, const float *w, int64_t w_row, int64_t depth, int64_t slice, float *sums) {
  typedef vec<float, 8> E;
  constexpr int GROUPS = 2;  // of eight outputs, side by side
  for (int part = 0; part < COLUMNS; part += 8 * GROUPS, w += 8 * GROUPS * w_row) {
    const float *ahead = w + 8 * GROUPS * w_row;
    for (int64_t done = 0; done < depth; done += slice) {
      E c[R][GROUPS];
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int g = 0; g < GROUPS; g++) c[r][g] = E{};
      for (int64_t k = done; k < done + slice; k += 16)
        UNROLL for (int g = 0; g < GROUPS; g++) {
          UNROLL for (int i = 0; i < 8; i++) __builtin_prefetch(ahead + i * LINE, 0, 3);
          ahead += 8 * LINE;
          UNROLL for (int half = 0; half < 16; half += 8) {
            E square[8];
            load_transposed(w + 8 * g * w_row + k + half, w_row, square);
            UNROLL for (int i = 0; i < 8; i++)
              UNROLL for (int r = 0; r < R; r++) {
                E b;
                BROADCAST_8(b, x[r * x_row + k + half + i]);
                ADD_PRODUCT(c[r][g], b, square[i]);
              }
          }
        }
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int g = 0; g < GROUPS; g++) {
          float *to = sums + r * COLUMNS + part + 8 * g;
          ::store<float, 8>(to, done ? c[r][g] + ::load<float, 8>(to) : c[r][g]);
        }
    }
  }
}

inline void product_few(const Rows &x, const Weight &weight, int64_t n0, int64_t n1, const Target &target, const Finish &finish) {
  float sums[FEW_ROWS * COLUMNS];
  for (int64_t n = n0; n < n1; n += COLUMNS) {
    const float *w = weight.data + n * weight.row;
    switch (x.count) {
      case 1: square_tile<1>(x.data, x.row, w, weight.row, x.depth, weight.slice, sums); break;
      case 2: square_tile<2>(x.data, x.row, w, weight.row, x.depth, weight.slice, sums); break;
      case 3: square_tile<3>(x.data, x.row, w, weight.row, x.depth, weight.slice, sums); break;
      case 4: square_tile<4>(x.data, x.row, w, weight.row, x.depth, weight.slice, sums); break;
    }
    Tile t{};
    t.c = target.panel(n / COLUMNS);
    t.c_row = target.row;
    t.finish = finish_from(finish, n, 0);
    panels::store_finished(sums, t, (int)x.count);
  }
}

// ------------------------------------------------------------------------------------------------ weights [in, out]

inline void product_by_input(const Rows &x, const Weight &weight, int64_t n0, int64_t n1, const Target &target, const Finish &finish) {
  for (int64_t k = 0; k < x.depth; k += weight.slice) {
    Finish part{};
    if (k + weight.slice == x.depth) part = finish;
    part.more = finish.more || k > 0;
    for (int64_t n = n0; n < n1; n += COLUMNS)
      for (int64_t r = 0, count; r < x.count; r += count) {
        count = panels::next_rows(x.count - r);
        float *to = target.panel(n / COLUMNS) + r * target.row;
        const float *w = weight.data + n + k * weight.column;
        panels::tile_of<0>(count, {x.data + r * x.row + k, x.row, w, weight.column, weight.slice, to, target.row, nullptr,
                                   finish_from(part, n, r)});
      }
  }
}

// ---------------------------------------------------------------------------------------------------------- all three

// Outputs [n0, n1), multiples of COLUMNS, of the product of rows with a weight.
inline void product(const Rows &x, const Weight &weight, int64_t n0, int64_t n1, const Destination &to, const Finish &finish) {
  if (!weight.by_output()) product_by_input(x, weight, n0, n1, to.rows, finish);
  else if (x.count <= FEW_ROWS) product_few(x, weight, n0, n1, to.rows, finish);
  else product_by_output(x, weight, n0, n1, to, finish);
}

}  // namespace maps
