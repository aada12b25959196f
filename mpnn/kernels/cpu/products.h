// Products of matrices that lie in the cache, and what else the kernels made of them share: transposition, and memory.
#pragma once
#include "simd.h"

#define NOINLINE __attribute__((noinline))

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that a product holds in registers, for two vectors of columns.
constexpr int STEP = VECTOR_BYTES == 64 ? 12 : 6;

template <class T> struct Matrix {  // element (r, c) is data[r * row + c * column]
  T *data;
  int64_t row, column = 1;
};

// C [R, N vectors of L numbers] = A [R, depth] B [depth, ...], or added, with C in registers.
template <int L, int R, int N, bool ADD, class T>
INLINE void product_block(Matrix<const T> A, Matrix<const T> B, Matrix<T> C, int64_t depth) {
  vec<T, L> sum[R][N];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int n = 0; n < N; n++) sum[r][n] = ADD ? ::load<T, L>(C.data + r * C.row + n * L) : vec<T, L>{};
  for (int64_t k = 0; k < depth; k++)
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int n = 0; n < N; n++)
        sum[r][n] += A.data[r * A.row + k * A.column] * ::load<T, L>(B.data + k * B.row + n * L);
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int n = 0; n < N; n++) ::store<T, L>(C.data + r * C.row + n * L, sum[r][n]);
}

// The same for any number of rows, in blocks of R.
template <int L, int R, int N, bool ADD, class T>
INLINE void product_columns(Matrix<const T> A, Matrix<const T> B, Matrix<T> C, int64_t rows, int64_t depth) {
  for (; rows >= R; rows -= R, A.data += R * A.row, C.data += R * C.row) product_block<L, R, N, ADD>(A, B, C, depth);
  for (; rows > 0; rows--, A.data += A.row, C.data += C.row) product_block<L, 1, N, ADD>(A, B, C, depth);
}

// C [rows, width] = A [rows, depth] B [depth, width], or added, in blocks of R rows and two vectors. Rows of B and C
// are contiguous, and their width is a multiple of 8.
template <int R, bool ADD, class T>
NOINLINE void product(Matrix<const T> A, Matrix<const T> B, Matrix<T> C, int64_t rows, int64_t depth, int64_t width) {
  constexpr int L = VECTOR_BYTES / sizeof(T);
  for (; width >= 2 * L; width -= 2 * L, B.data += 2 * L, C.data += 2 * L)
    product_columns<L, R, 2, ADD>(A, B, C, rows, depth);
  for (; width >= L; width -= L, B.data += L, C.data += L) product_columns<L, R, 1, ADD>(A, B, C, rows, depth);
  if constexpr (L > 8)
    if (width) product_columns<8, R, 1, ADD>(A, B, C, rows, depth);
}

// Transposes a square of 8 x 8 numbers: each round moves one bit of the row's number to the column's.
template <class T> INLINE void transpose(vec<T, 8> *x) {
  UNROLL for (int round = 0; round < 3; round++) {
    vec<T, 8> y[8];
    UNROLL for (int r = 0; r < 4; r++) {
      y[2 * r] = __builtin_shufflevector(x[r], x[r + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      y[2 * r + 1] = __builtin_shufflevector(x[r], x[r + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    UNROLL for (int r = 0; r < 8; r++) x[r] = y[r];
  }
}

// Loads a square of 8 x 8 numbers, transposed. Halves of rows are joined as they are loaded, so that the rest stays inside
// halves: 16 shuffles, where `transpose` takes 48.
INLINE void load_transposed(const float *from, int64_t row, vec<float, 8> *to) {
  UNROLL for (int half = 0; half < 2; half++, from += 4, to += 4) {
    vec<float, 8> x[4];
    UNROLL for (int i = 0; i < 4; i++)
      x[i] = __builtin_shufflevector((load<float, 4>(from + i * row)), (load<float, 4>(from + (i + 4) * row)), 0, 1, 2, 3, 4, 5, 6, 7);
    const vec<float, 8> p = __builtin_shufflevector(x[0], x[1], 0, 8, 1, 9, 4, 12, 5, 13);
    const vec<float, 8> q = __builtin_shufflevector(x[0], x[1], 2, 10, 3, 11, 6, 14, 7, 15);
    const vec<float, 8> r = __builtin_shufflevector(x[2], x[3], 0, 8, 1, 9, 4, 12, 5, 13);
    const vec<float, 8> s = __builtin_shufflevector(x[2], x[3], 2, 10, 3, 11, 6, 14, 7, 15);
    to[0] = __builtin_shufflevector(p, r, 0, 1, 8, 9, 4, 5, 12, 13);
    to[1] = __builtin_shufflevector(p, r, 2, 3, 10, 11, 6, 7, 14, 15);
    to[2] = __builtin_shufflevector(q, s, 0, 1, 8, 9, 4, 5, 12, 13);
    to[3] = __builtin_shufflevector(q, s, 2, 3, 10, 11, 6, 7, 14, 15);
  }
}

// The memory of a call, in pieces that begin at cache lines.
class Memory {
  static constexpr int64_t LINE = 64;
  char *start, *next;

public:
  explicit Memory(int64_t bytes, int64_t pieces)
      : start((char *)__builtin_malloc(bytes + (pieces + 1) * LINE)), next(start) {}
  ~Memory() { __builtin_free(start); }
  explicit operator bool() const { return start; }
  template <class T> T *take(int64_t count) {
    next += -(uintptr_t)next % LINE;
    T *piece = (T *)next;
    next += count * sizeof(T);
    return piece;
  }
};
