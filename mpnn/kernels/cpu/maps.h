// Products of rows with weights that are read where they lie: no copy of a weight outlives a product.
//
//     weights [out, in] (nn.Linear)         rows of x are turned into panels [depth][rows], once for all weights that read
//                                           them; numbers of a weight are broadcast, and each multiplies a panel's rows
//     the same, for at most FEW_ROWS rows   numbers of x are broadcast, and weights turned in registers
//     weights [in, out] (GPT-2's Conv1D)    numbers of x are broadcast, and vectors of outputs are loaded where they lie
//
// A sum is a chain of additions over each slice of the depth, and the slices are added in order. All three do this in the
// same order, so the bits of a row depend neither on the rows beside it nor on how rows and outputs are shared by threads.
//
// Weights come from memory, and each once for a block of rows. So a tile asks for those of the next one, row after row: lines
// of a page come one after the other.
#pragma once
#include "panels.h"

namespace maps {

using panels::COLUMNS;
using panels::Finish;
using panels::LANES;
using panels::Target;
using panels::Tile;
using panels::V;

constexpr int64_t LINE = 64 / sizeof(float);

// Rows that fill too few lanes of a panel: up to here their sums, for 16 outputs, are in registers with room for weights.
constexpr int FEW_ROWS = VECTOR_BYTES == 64 ? 8 : 4;

// A weight [width, depth] with the number (n, k) at data[n * row + k * column]; one of row and column is 1.
struct Weight {
  const float *data;
  int64_t row, column, width, depth, slice;
  // Whether numbers of an output are side by side, as those of nn.Linear.
  bool by_output() const { return column == 1; }
};

// Rows that a product reads: [count, depth], row r at data + r * row; and turned, for weights that lie by output.
struct Rows {
  const float *data;
  int64_t row, count, depth;
  const float *turned;
};

// Rows as far as panels reach: the last one has half the width if this is enough.
inline int64_t padded(int64_t rows) { return divide_up(rows, LANES) * LANES; }

// A finish that begins at output n of a row.
inline Finish finish_from(Finish finish, int64_t n, int64_t row) {
  if (finish.bias) finish.bias += n;
  if (finish.add) finish.add += row * finish.add_row + n;
  if (finish.times) finish.times += row * finish.times_row + n;
  return finish;
}

// Finishes sums [rows, COLUMNS] of the outputs from n on, for rows from `row` on.
inline void finish_panel(const float *sums, int64_t n, int64_t row, int64_t rows, const Target &target, const Finish &finish) {
  Tile t{};
  t.c = target.panel(n / COLUMNS) + row * target.row;
  t.c_row = target.row;
  t.finish = finish_from(finish, n, row);
  panels::store_finished(sums, t, (int)rows);
}

// What a tile asks for while it computes: rows of `length` numbers, which are `row` numbers apart.
struct Ahead {
  const float *start;
  int64_t row, length, done = 0;
};

// Asks for LINES lines in each of ROWS rows.
template <int ROWS, int LINES> INLINE void ask(Ahead &a) {
  UNROLL for (int i = 0; i < ROWS; i++)
    UNROLL for (int j = 0; j < LINES; j++) __builtin_prefetch(a.start + i * a.row + a.done + j * LINE, 0, 3);
  a.done += LINES * LINE;
  if (a.done < a.length) return;
  a.done = 0;
  a.start += ROWS * a.row;
}

// ------------------------------------------------------------------------------------------------------ turned rows

// Rows as a panel [depth][VECTORS * LANES]. Lanes behind the last row repeat it: their sums are not stored.
template <int VECTORS> NOINLINE void turn_panel(const float *x, int64_t x_row, int64_t rows, int64_t depth, float *to) {
  UNROLL for (int v = 0; v < VECTORS; v++) {
    const float *first[LANES];
    for (int i = 0; i < LANES; i++) first[i] = x + least(v * LANES + i, rows - 1) * x_row;
    for (int64_t k = 0; k < depth; k += 4) {
      V across[4];
      load_across<LANES>([&](int i) { return first[i] + k; }, across);
      UNROLL for (int i = 0; i < 4; i++) ::store<float, LANES>(to + ((k + i) * VECTORS + v) * LANES, across[i]);
    }
  }
}

// Turns rows [rows, depth] into panels of COLUMNS rows, one behind the other; a few rows into pieces [depth / 4][rows][4].
inline void turn(const float *x, int64_t x_row, int64_t rows, int64_t depth, float *to) {
  if (rows <= FEW_ROWS) {
    for (int64_t k = 0; k < depth; k += 4)
      for (int64_t r = 0; r < rows; r++, to += 4) ::store<float, 4>(to, ::load<float, 4>(x + r * x_row + k));
    return;
  }
  for (int64_t r = 0; r < rows; r += COLUMNS) {
    if (rows - r <= LANES) turn_panel<1>(x + r * x_row, x_row, rows - r, depth, to + r * depth);
    else turn_panel<2>(x + r * x_row, x_row, least(COLUMNS, rows - r), depth, to + r * depth);
  }
}

// ------------------------------------------------------------------------------------- weights [out, in], many rows

// Adds the products of a number, where it lies, with vectors.
template <int VECTORS> INLINE void add_products_of(const float &x, const V (&b)[VECTORS], V (&c)[VECTORS]) {
#if defined(__AVX512F__)
  if constexpr (VECTORS == 1) {  // the product broadcasts it: one instruction less
    asm volatile("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(c[0]) : "v"(b[0]), "m"(x));
    return;
  }
#endif
  V all;
  BROADCAST(all, x);
  UNROLL for (int v = 0; v < VECTORS; v++) ADD_PRODUCT(c[v], all, b[v]);
}

// Sums [N][VECTORS * LANES] of N outputs for the rows of a panel, or, if `more`, added to those that are there.
template <int N, int VECTORS, bool ASK>
NOINLINE void broadcast_tile(const float *w, int64_t w_row, const float *panel, int64_t depth, int64_t slice, float *sums, bool more, Ahead ahead) {
  // With one vector of rows, the numbers of a line are loaded one after the other: loads, not products, limit the tile.
  constexpr int STEPS = VECTORS == 1 ? VECTOR_BYTES / 16 : 1;
  constexpr int ROWS = VECTORS == 2 && N % 4 == 0 ? 2 : 1;
  const float *a[(N + 2) / 3];
  UNROLL for (int g = 0; g < (N + 2) / 3; g++) a[g] = w + 3 * g * w_row;
  for (int64_t done = 0; done < depth; done += slice, more = true) {
    V c[N][VECTORS];
    UNROLL for (int n = 0; n < N; n++)
      UNROLL for (int v = 0; v < VECTORS; v++) c[n][v] = V{};
    for (int64_t k = 0; k < slice; k += 8) {
      if constexpr (ASK) ask<ROWS, N / 2 / ROWS>(ahead);
      UNROLL for (int half = 0; half < 2; half++) {
        UNROLL for (int step = 0; step < 4; step += STEPS, panel += STEPS * VECTORS * LANES) {
          V b[STEPS][VECTORS];
          UNROLL for (int i = 0; i < STEPS; i++)
            UNROLL for (int v = 0; v < VECTORS; v++) b[i][v] = *(const V *)(panel + (i * VECTORS + v) * LANES);
          UNROLL for (int n = 0; n < N; n++)
            UNROLL for (int i = 0; i < STEPS; i++) add_products_of<VECTORS>(a[n / 3][n % 3 * w_row + step + i], b[i], c[n]);
        }
        UNROLL for (int g = 0; g < (N + 2) / 3; g++) a[g] += 4;
      }
    }
    UNROLL for (int n = 0; n < N; n++)
      UNROLL for (int v = 0; v < VECTORS; v++) {
        float *to = sums + (n * VECTORS + v) * LANES;
        ::store<float, LANES>(to, more ? c[n][v] + ::load<float, LANES>(to) : c[n][v]);
      }
  }
}

// The outputs of a tile: so many that all registers hold sums. Rows of weights that are a multiple of 4096 bytes apart lie in
// one set of L1: there, a tile for one vector of rows takes no more than a set has room for.
inline int64_t next_outputs(int64_t left, bool is_narrow, int64_t w_row) {
  const int64_t most = !is_narrow ? STEP : w_row * sizeof(float) % 4096 ? 2 * STEP : 8;
  return left >= most ? most : left >= 8 ? 8 : left >= 4 ? 4 : 2;
}

// Runs the tile of so many outputs, among those of N... outputs.
template <int VECTORS, int... N>
INLINE void broadcast_tile_among(int64_t outputs, const float *w, int64_t w_row, const float *panel, int64_t depth,
                                 int64_t slice, float *sums, bool more, const Ahead &ahead) {
  const auto run = [&](auto tile, auto asking_tile) {
    (ahead.start ? asking_tile : tile)(w, w_row, panel, depth, slice, sums, more, ahead);
    return true;
  };
  (void)((outputs == N && run(broadcast_tile<N, VECTORS, false>, broadcast_tile<N, VECTORS, true>)) || ...);
}

constexpr int64_t STRIP = 8 * STEP;  // outputs that are finished together: whole tiles and whole panels
static_assert(STRIP % (2 * STEP) == 0 && STRIP % COLUMNS == 0, "");
constexpr int64_t MOST_PANELS = 96 / COLUMNS;  // of rows that pass by a tile of weights
constexpr int64_t SPAN = 768;                  // of depth for which the panels and a tile's weights stay in L2

// Turns sums [outputs][VECTORS * LANES] of a panel back into rows and finishes them.
template <int VECTORS>
NOINLINE void finish_rows(const float *sums, int64_t n, int64_t outputs, int64_t row, int64_t rows, const Target &target, const Finish &finish) {
  constexpr int64_t WIDE = VECTORS * LANES;
  for (int64_t i = 0; i < outputs; i += COLUMNS) {
    alignas(64) float back[WIDE * COLUMNS];
    for (int c = 0; c < COLUMNS; c += LANES)
      for (int64_t r = 0; r < rows; r += 4) {
        V across[4];
        load_across<LANES>([&](int o) { return sums + (i + c + o) * WIDE + r; }, across);
        UNROLL for (int j = 0; j < 4; j++) ::store<float, LANES>(back + (r + j) * COLUMNS + c, across[j]);
      }
    finish_panel(back, n + i, row, rows, target, finish);
  }
}

// Finishes sums [outputs][wide] of a panel and leaves them turned, as the next product reads them: output n at
// to + n * wide.
inline void finish_turned(const float *sums, int64_t n, int64_t outputs, int64_t wide, const Finish &finish, const float *times, float *to) {
  Tile t{};
  t.c = to + n * wide;
  t.c_row = wide;
  t.finish.activation = finish.activation;
  if (finish.bias) t.finish.row_bias = finish.bias + n;
  if (times) {
    t.finish.times = times + n * wide;
    t.finish.times_row = wide;
  }
  panels::store_finished(sums, t, (int)outputs, (int)(wide / LANES));
}

// Where the outputs of a product go: to rows, or, if `turned` is not null, to panels of rows.
struct Destination {
  Target rows;
  float *turned;
};

// Sums of a strip of outputs for MOST_PANELS panels of rows, of which `turned` is the first.
inline void sum_strip(const float *turned, int64_t rows, const Weight &weight, int64_t n, int64_t outputs, float *sums) {
  const int64_t depth = weight.depth, span = rows <= COLUMNS ? depth : least(depth, SPAN / weight.slice * weight.slice);
  for (int64_t k = 0; k < depth; k += span) {
    const int64_t steps = least(span, depth - k);
    for (int64_t i = 0, count; i < outputs; i += count) {
      count = next_outputs(outputs - i, rows <= LANES, weight.row);
      const float *w = weight.data + (n + i) * weight.row + k, *next = w + count * weight.row;
      if (i + count == outputs && k + steps < depth) next = weight.data + n * weight.row + k + steps;
      Ahead ahead{next, weight.row, steps};
      for (int64_t r = 0; r < rows; r += COLUMNS, ahead = {}) {
        float *at = sums + r * STRIP;
        if (rows - r <= LANES)
          broadcast_tile_among<1, 2 * STEP, STEP, 8, 4, 2>(count, w, weight.row, turned + r * depth + k * LANES, steps, weight.slice, at + i * LANES, k, ahead);
        else
          broadcast_tile_among<2, STEP, 8, 4, 2>(count, w, weight.row, turned + r * depth + k * COLUMNS, steps, weight.slice, at + i * COLUMNS, k, ahead);
      }
    }
  }
}

inline void product_by_output(const Rows &x, const Weight &weight, int64_t n0, int64_t n1, const Destination &to, const Finish &finish) {
  alignas(64) float sums[MOST_PANELS * COLUMNS * STRIP];
  for (int64_t r0 = 0; r0 < x.count; r0 += MOST_PANELS * COLUMNS)
    for (int64_t n = n0; n < n1; n += STRIP) {
      const int64_t rows = least(MOST_PANELS * COLUMNS, x.count - r0), outputs = least(STRIP, n1 - n);
      sum_strip(x.turned + r0 * x.depth, rows, weight, n, outputs, sums);
      for (int64_t r = 0; r < rows; r += COLUMNS) {
        const float *of_panel = sums + r * STRIP;
        const int64_t row = r0 + r, left = least(COLUMNS, rows - r), before = row * weight.width;
        if (to.turned) finish_turned(of_panel, n, outputs, left <= LANES ? LANES : COLUMNS, finish, finish.times ? finish.times + before : nullptr, to.turned + before);
        else if (left <= LANES) finish_rows<1>(of_panel, n, outputs, row, left, to.rows, finish);
        else finish_rows<2>(of_panel, n, outputs, row, left, to.rows, finish);
      }
    }
}

// -------------------------------------------------------------------------------------- weights [out, in], few rows

// Sums [R][COLUMNS] of R rows for 16 outputs, whose weights are turned in registers.
template <int R> NOINLINE void turning_tile(const float *x, const float *w, int64_t w_row, int64_t depth, int64_t slice, float *sums) {
  constexpr int GROUPS = 16 / LANES;
  Ahead ahead{w + 16 * w_row, w_row, depth};
  for (int64_t done = 0; done < depth; done += slice) {
    V c[R][GROUPS];
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int g = 0; g < GROUPS; g++) c[r][g] = V{};
    for (int64_t k = done; k < done + slice; k += LINE) {
      ask<4, 4>(ahead);
      for (int part = 0; part < LINE; part += 4, x += 4 * R)
        UNROLL for (int g = 0; g < GROUPS; g++) {
          V across[4];
          load_across<LANES>([&](int i) { return w + (g * LANES + i) * w_row + k + part; }, across);
          UNROLL for (int i = 0; i < 4; i++)
            UNROLL for (int r = 0; r < R; r++) add_products_of<1>(x[4 * r + i], (const V(&)[1])across[i], (V(&)[1])c[r][g]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int g = 0; g < GROUPS; g++) {
        float *to = sums + r * COLUMNS + g * LANES;
        ::store<float, LANES>(to, done ? c[r][g] + ::load<float, LANES>(to) : c[r][g]);
      }
  }
}

template <int R = FEW_ROWS>
INLINE void turning_tile_of(int64_t rows, const float *x, const float *w, int64_t w_row, int64_t depth, int64_t slice, float *sums) {
  if constexpr (R > 0) {
    if (rows < R) return turning_tile_of<R - 1>(rows, x, w, w_row, depth, slice, sums);
    turning_tile<R>(x, w, w_row, depth, slice, sums);
  }
}

inline void product_few(const Rows &x, const Weight &weight, int64_t n0, int64_t n1, const Target &target, const Finish &finish) {
  alignas(64) float sums[FEW_ROWS * COLUMNS];
  for (int64_t n = n0; n < n1; n += COLUMNS) {
    for (int i = 0; i < COLUMNS; i += 16)
      turning_tile_of(x.count, x.turned, weight.data + (n + i) * weight.row, weight.row, x.depth, weight.slice, sums + i);
    finish_panel(sums, n, 0, x.count, target, finish);
  }
}

// ------------------------------------------------------------------------------------------------ weights [in, out]

// The first tile of rows reads a panel where it lies, in pieces of rows, and keeps it for the other tiles. Panels pass in
// groups of AHEAD outputs, whose tiles together ask for the next group.
inline void product_by_input(const Rows &x, const Weight &weight, int64_t n0, int64_t n1, const Target &target, const Finish &finish) {
  using panels::AHEAD;
  alignas(64) float kept[panels::MAX_SLICE * COLUMNS];
  const int64_t stride = weight.column, slice = weight.slice;
  for (int64_t k = 0; k < x.depth; k += slice) {
    const float *w = weight.data + k * stride;
    Finish part{};
    if (k + slice == x.depth) part = finish;
    part.more = k > 0;
    for (int64_t group = n0; group < n1; group += AHEAD) {
      const int64_t end = least(group + AHEAD, n1);
      const float *ahead = end < n1 ? w + end : w + slice * stride + n0;
      int64_t asked = end == n1 && k + slice == x.depth ? slice : 0;  // rows of the next group
      int64_t tiles = (end - group) / COLUMNS * divide_up(x.count, STEP);
      for (int64_t n = group; n < end; n += COLUMNS) {
        Tile t{x.data + k, x.row, w + n, stride, slice, target.panel(n / COLUMNS), target.row, {}, kept};
        t.ahead_row = stride;
        for (int64_t r = 0, rows; r < x.count; r += rows, tiles--) {
          rows = panels::next_rows(x.count - r);
          t.finish = finish_from(part, n, r);
          t.ahead = ahead + asked * stride;
          t.asks = divide_up(slice - asked, tiles * slice / 4);
          if (r == 0 && rows < x.count) panels::tile_of<true>(rows, t);
          else panels::tile_of<false>(rows, t);
          asked += slice / 4 * t.asks;
          t.a += rows * t.a_row;
          t.c += rows * t.c_row;
          t.b = kept;
          t.b_row = COLUMNS;
        }
      }
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
