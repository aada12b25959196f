// Dropout of features: which elements are dropped is a hash of (row, column), so that the backward pass draws it again.
//
//     out[r, c] = x[r, c] * growth if word(r) * word(c) reaches the threshold as a signed number, else 0
//
//     for each block of columns
//         the words of its columns
//         for each row                        rows side by side
//             for each vector of columns
//
// Called by `mpnn/kernels/dense/feature_dropout.py:FeatureDropout`, forward and backward.
#include "simd.h"

namespace feature_dropout {

template <class T> struct FeatureDropout {  // kernels/dense/feature_dropout.py has the same fields in the same order
  const T *x;                              // [rows, width]
  T *out;
  const uint32_t *keys;                    // [3]: of rows, of columns, and the stream's word
  int64_t rows, width, threshold;
  double growth;
};

constexpr int64_t COLUMNS = 1024;  // whose words are kept while rows pass by

template <class T, int N> INLINE vec<T, N> drop(vec<T, N> x, uint32_t row, const uint32_t *words, int32_t least, T growth) {
  const auto drawn = (vec<int32_t, N>)(load<uint32_t, N>(words) * row) >= least;
  return __builtin_convertvector(drawn, vec<typename bits_of<T>::type, N>) ? x * growth : vec<T, N>{};
}

template <class T> bool run(const FeatureDropout<T> &p, int64_t part, int64_t parts) {
  constexpr int N = VECTOR_BYTES / sizeof(T);
  const int32_t least = p.threshold;
  const T growth = p.growth;
  uint32_t words[COLUMNS];
  for (int64_t first = 0; first < p.width; first += COLUMNS) {
    const int64_t count = p.width - first < COLUMNS ? p.width - first : COLUMNS;
    for (int64_t c = 0; c < count; c++) words[c] = dropout_word(p.keys[1], uint32_t(first + c));
    for (int64_t r = p.rows * part / parts; r < p.rows * (part + 1) / parts; r++) {
      const uint32_t row = p.keys[2] * dropout_word(p.keys[0], uint32_t(r));
      const T *x = p.x + r * p.width + first;
      T *out = p.out + r * p.width + first;
      int64_t c = 0;
      for (; c + N <= count; c += N) store<T, N>(out + c, drop<T, N>(load<T, N>(x + c), row, words + c, least, growth));
      for (; c < count; c++) store<T, 1>(out + c, drop<T, 1>(load<T, 1>(x + c), row, words + c, least, growth));
    }
  }
  return true;
}

}  // namespace feature_dropout

extern "C" int64_t feature_dropout_size() { return sizeof(feature_dropout::FeatureDropout<float>); }
KERNEL(feature_dropout_f32, feature_dropout::FeatureDropout<float>, feature_dropout::run(*p, part, parts))
KERNEL(feature_dropout_f64, feature_dropout::FeatureDropout<double>, feature_dropout::run(*p, part, parts))
