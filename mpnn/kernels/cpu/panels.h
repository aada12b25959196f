// Tiles of products whose sums stay in registers: STEP rows and a panel [depth][COLUMNS], which is two vectors of columns
// wide; and what becomes of the sums. A sum of a row has the same order of additions in every tile, so its bits depend
// neither on the rows beside it nor on how rows are shared by threads.
#pragma once
#include "products.h"

namespace panels {

constexpr int LANES = VECTOR_BYTES / sizeof(float), COLUMNS = 2 * LANES;
typedef vec<float, LANES> V;

constexpr int64_t MAX_SLICE = (24 << 10) / (COLUMNS * sizeof(float));  // of a panel's depth: 24 KB
constexpr int64_t LEAST_SLICE = 64;  // below, to store sums takes too large a share

// The depth over which products between these widths sum in one chain: the largest divisor of all. 0: there is none that
// is worth it.
inline int64_t slice_of(int64_t width, int64_t hidden, int64_t inner) {
  for (int64_t slice = MAX_SLICE; slice >= LEAST_SLICE; slice -= COLUMNS)
    if (width % slice == 0 && hidden % slice == 0 && inner % slice == 0) return slice;
  return 0;
}

enum Activation { IDENTITY, GELU, GELU_TANH, RELU, QUICK_GELU, SILU };

// What becomes of sums: activation(sums + what is there + bias) times + add, in this order. What is large beside the
// products is added last, or each of them would be rounded to its size.
struct Finish {
  bool more;          // adds what is there
  const float *bias;  // [columns], or null
  int64_t activation;
  const float *add;   // [rows, add_row], or null
  int64_t add_row;
  const float *scale;  // a factor of each row, or null
  const float *times = nullptr;  // [rows, times_row], or null
  int64_t times_row = 0;
  const float *row_bias = nullptr;  // [rows], or null
};

struct Tile {
  const float *a;  // [rows, depth]
  int64_t a_row;
  const float *b;  // [depth, COLUMNS]
  int64_t b_row, depth;
  float *c;
  int64_t c_row;
  Finish finish;
  float *kept = nullptr;         // where a tile that keeps b writes it, [depth, COLUMNS]
  const float *ahead = nullptr;  // what to ask for: rows of AHEAD numbers, ahead_row apart
  int64_t ahead_row = 0, asks = 0;  // the rows in four steps of depth
};

constexpr int64_t AHEAD = 64;

// x / 2 (1 + erf(x / sqrt 2)) with erf as a rational function up to |x| = 5.44, where it is 1 but for 6e-8; the error of
// this fit is 1.4e-8.
INLINE V gelu(V x) {
  constexpr float END = 5.4447222f;
  V z = x > END ? splat<float, LANES>(END) : x;
  z = z < -END ? splat<float, LANES>(-END) : z;
  const V s = z * z;
  V p = s * 4.658637263e-08f + 1.262524107e-05f, q = s * 1.210368423e-06f + 7.159521556e-05f;
  p = p * s + 3.247411299e-04f, q = q * s + 1.848135784e-03f;
  p = p * s + 9.277241745e-03f, q = q * s + 2.828247517e-02f;
  p = p * s + 6.643267651e-02f, q = q * s + 2.499274498e-01f;
  p = p * s + 7.978845494e-01f, q = q * s + 1.0f;
  const V half = x * 0.5f;
  return half * (z * p / q) + half;
}

template <int ACTIVATION> INLINE V activated(V x) {
  if constexpr (ACTIVATION == GELU) return gelu(x);
  if constexpr (ACTIVATION == GELU_TANH) return x * 0.5f * (1 + tanh<float, LANES>((x + x * x * x * 0.044715f) * 0.7978845608f));
  if constexpr (ACTIVATION == RELU) return x < 0 ? V{} : x;  // NaN passes
  if constexpr (ACTIVATION == QUICK_GELU) return x * sigmoid<float, LANES>(x * 1.702f);
  if constexpr (ACTIVATION == SILU) return x * sigmoid<float, LANES>(x);
  return x;
}

// Stores sums [rows, vectors * LANES]. One function for all tiles, so that a row has the same bits in each of them.
template <int ACTIVATION> NOINLINE void store_finished(const float *sums, const Tile &t, int rows, int vectors) {
  const Finish f = t.finish;
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < vectors; n++, sums += LANES) {
      V s = ::load<float, LANES>(sums);
      float *to = t.c + r * t.c_row + n * LANES;
      if (f.more) s += ::load<float, LANES>(to);
      if (f.bias) s += ::load<float, LANES>(f.bias + n * LANES);
      if (f.row_bias) s += f.row_bias[r];
      s = activated<ACTIVATION>(s);
      if (f.times) s *= ::load<float, LANES>(f.times + r * f.times_row + n * LANES);
      if (f.add) s += ::load<float, LANES>(f.add + r * f.add_row + n * LANES);
      if (f.scale) s *= f.scale[r];
      ::store<float, LANES>(to, s);
    }
}

static void store_finished(const float *sums, const Tile &t, int rows, int vectors = 2) {
  switch (t.finish.activation) {
    case GELU: return store_finished<GELU>(sums, t, rows, vectors);
    case GELU_TANH: return store_finished<GELU_TANH>(sums, t, rows, vectors);
    case RELU: return store_finished<RELU>(sums, t, rows, vectors);
    case QUICK_GELU: return store_finished<QUICK_GELU>(sums, t, rows, vectors);
    case SILU: return store_finished<SILU>(sums, t, rows, vectors);
  }
  store_finished<IDENTITY>(sums, t, rows, vectors);
}

#if defined(__x86_64__)
// In assembly: clang otherwise loads the broadcasts of many rows ahead, has no registers for them and spills them.
#define BROADCAST(to, from) asm volatile("vbroadcastss %1, %0" : "=v"(to) : "m"(from))
#define ADD_PRODUCT(sum, a, b) asm volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))
#else
#define BROADCAST(to, from) to = splat<float, LANES>(from)
#define ADD_PRODUCT(sum, a, b) sum += (a) * (b)
#endif

// One step of depth: the sums of R rows take the product of a number of each row with a row of the panel.
template <int R> INLINE void add_products(V (&c)[R][2], const float *const (&a)[(R + 2) / 3], int64_t a_row, V b0, V b1, int k) {
  UNROLL for (int r = 0; r < R; r++) {
    V x;
    BROADCAST(x, a[r / 3][r % 3 * a_row + k]);
    ADD_PRODUCT(c[r][0], x, b0);
    ADD_PRODUCT(c[r][1], x, b1);
  }
}

// A tile of R rows. One that keeps b reads it from memory and writes it where other tiles find it in the cache.
template <int R, bool KEEP> NOINLINE void tile(const Tile &t) {
  V c[R][2];
  UNROLL for (int r = 0; r < R; r++) c[r][0] = c[r][1] = V{};
  const int64_t a_row = t.a_row, b_row = t.b_row;
  const float *a[(R + 2) / 3], *b = t.b;
  UNROLL for (int g = 0; g < (R + 2) / 3; g++) a[g] = t.a + 3 * g * a_row;
  float *kept = t.kept;
  const float *ahead = t.ahead;
  int64_t k = 0;
  for (; k + 4 <= t.depth; k += 4) {
    for (int64_t i = 0; i < t.asks; i++, ahead += t.ahead_row)
      UNROLL for (int line = 0; line < AHEAD; line += 64 / (int)sizeof(float)) __builtin_prefetch(ahead + line, 0, 2);
    UNROLL for (int step = 0; step < 4; step++, b += b_row) {
      const V b0 = *(const V *)b, b1 = *(const V *)(b + LANES);
      if constexpr (KEEP) {
        ::store<float, LANES>(kept, b0);
        ::store<float, LANES>(kept + LANES, b1);
        kept += COLUMNS;
      }
      add_products<R>(c, a, a_row, b0, b1, step);
    }
    UNROLL for (int g = 0; g < (R + 2) / 3; g++) a[g] += 4;
  }
  for (; k < t.depth; k++, b += b_row) {
    add_products<R>(c, a, a_row, *(const V *)b, *(const V *)(b + LANES), 0);
    UNROLL for (int g = 0; g < (R + 2) / 3; g++) a[g]++;
  }
  const Finish &f = t.finish;
  if (f.bias || f.activation || f.add || f.scale || f.times) {
    alignas(64) float sums[R * COLUMNS];
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int n = 0; n < 2; n++) ::store<float, LANES>(sums + r * COLUMNS + n * LANES, c[r][n]);
    return store_finished(sums, t, R);
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int n = 0; n < 2; n++) {
      float *to = t.c + r * t.c_row + n * LANES;
      ::store<float, LANES>(to, f.more ? c[r][n] + ::load<float, LANES>(to) : c[r][n]);
    }
}

template <bool KEEP, int R = STEP> INLINE void tile_of(int64_t rows, const Tile &t) {
  if constexpr (R > 0) {
    if (rows == R) return tile<R, KEEP>(t);
    return tile_of<KEEP, R - 1>(rows, t);
  }
}

// The rows of the next tile, where all are about alike.
INLINE int64_t next_rows(int64_t left) { return divide_up(left, divide_up(left, STEP)); }

// Where a product goes: column n of row r at data[r * row + n], or, in groups of so many panels,
// data[n / group * group_stride + r * row + n % group].
struct Target {
  float *data;
  int64_t row, group = 0, group_stride = 0;
  float *panel(int64_t p) const {
    return group ? data + p / group * group_stride + p % group * COLUMNS : data + p * COLUMNS;
  }
};

}  // namespace panels
