// A few nodes of any recurrence of scan.h, one after the other, as decoding needs it: the state is read where it lies and
// written once, and chunks would compute products of whole matrices for one row.
//
//     e = v - k (gate S)      u = beta e, or v      S = gate S + k^T u      out = scale q S
//
//     for each head of a batch entry          side by side
//         for each node                       in order
//             for each eight vectors of columns of S
//                 for each row of S           twice with beta: k S is needed before S changes
//
// Called by `mpnn/kernels/recurrent/scan.py:_run`, for at most three nodes and without gradients.
#include "scan.h"

namespace scan {
namespace {

// Columns [d, d + L N) of one node, or fewer: N vectors of L, of which the last may be cut off at `width`.
template <int L, int N, class T>
INLINE void step_columns(const T *from, T *to, int64_t row, int64_t d, int64_t width, const T *q, const T *k, const T *v,
                         const T *gates, const T *beta, int64_t F, T *out) {
  const auto each = [&](auto function) { UNROLL for (int n = 0; n < N; n++) function(n, d + L * n, width - d - L * n); };
  vec<T, L> u[N], o[N] = {};
  each([&](int n, int64_t at, int64_t left) { u[n] = load_first<T, L>(v + at, left); });
  if (beta) {
    if (from)
      for (int64_t f = 0; f < F; f++)
        each([&](int n, int64_t at, int64_t left) { u[n] -= k[f] * gates[f] * load_first<T, L>(from + f * row + at, left); });
    each([&](int n, int64_t, int64_t) { u[n] *= *beta; });
  }
  for (int64_t f = 0; f < F; f++)
    each([&](int n, int64_t at, int64_t left) {
      vec<T, L> s = k[f] * u[n];
      if (from) s += gates[f] * load_first<T, L>(from + f * row + at, left);
      store_first<T, L>(to + f * row + at, s, left);
      o[n] += q[f] * s;
    });
  each([&](int n, int64_t at, int64_t left) { store_first<T, L>(out + at, o[n], left); });
}

template <class T> struct Steps {
  const Scan<T> &p;
  int64_t b, g, copy;
  Memory memory{(3 * stride<T>(p.width) + stride<T>(p.value_width)) * (int64_t)sizeof(T), 4};
  T *q, *k, *v, *gates;
  static constexpr int L = VECTOR_BYTES / sizeof(T) > 8 ? VECTOR_BYTES / sizeof(T) : 8;

  explicit Steps(const Scan<T> &p) : p(p) {
    if (!memory) return;
    q = memory.take<T>(stride<T>(p.width)), k = memory.take<T>(stride<T>(p.width));
    gates = memory.take<T>(stride<T>(p.width)), v = memory.take<T>(stride<T>(p.value_width));
  }
  void head() {
    const int64_t F = p.width, D = p.value_width;
    const T *from = state_of(p, p.state, b, g);
    T *to = state_of(p, p.last, b, g);
    for (int64_t node = 0; node < p.num_dst; node++, from = to) {
      const int64_t at = (b * p.num_dst + node) * p.groups + g;
      pack(p.query, p.query.at(b, g, node), 1, 1, F, T(1), q);
      pack(p.key, p.key.at(b, g, node), 1, 1, F, T(1), k);
      finish(p, q, 1, T(p.scale));
      finish(p, k, 1, T(1));
      pack(p.value, p.value.at(b, g, node), 1, 1, D, T(1), v);
      const bool by_feature = p.by_feature;
      for (int64_t f = 0; f < F; f++)
        gates[f] = !p.log_gate ? 1 : by_feature ? exp1<T>(p.log_gate[at * F + f]) : f ? gates[0] : exp1<T>(p.log_gate[at]);
      const T *beta = p.beta ? p.beta + at : nullptr;
      int64_t d = 0;
      for (; d + 8 * L <= D; d += 8 * L) step_columns<L, 8>(from, to, D, d, D, q, k, v, gates, beta, F, p.out + at * D);
      for (; d + 4 * L <= D; d += 4 * L) step_columns<L, 4>(from, to, D, d, D, q, k, v, gates, beta, F, p.out + at * D);
      for (; d < D; d += 8) step_columns<8, 1>(from, to, D, d, D, q, k, v, gates, beta, F, p.out + at * D);
    }
  }
};

}  // namespace
}  // namespace scan

KERNEL(recurrence_steps_f32, scan::Scan<float>, scan::each_head<scan::Steps<float>>(*p, b, part, parts))
KERNEL(recurrence_steps_f64, scan::Scan<double>, scan::each_head<scan::Steps<double>>(*p, b, part, parts))
