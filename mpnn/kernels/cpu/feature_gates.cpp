// Gates of each feature: gated linear attention (Yang et al. 2023, arXiv:2312.06635) and, with `beta`, Kimi's delta rule
// (KDA, arXiv:2510.26692). As in delta_rule.cpp, where a gate now multiplies row f of the state:
//
//     B_ij = -sum_f k_if k_jf decay_ijf  (j < i)       P_ij = scale sum_f q_if k_jf decay_ijf  (j <= i)
//     E = (1 - B beta)^-1 (V - (before * K) S), U = beta E; without beta, U = V
//     out = (before * Q) S + P U                        S_f = whole_f S_f + ((after * K)^T U)_f
//
// There is no exponential of a difference, which overflows: key j is multiplied by gate_i while i advances, and meets k_i and
// q_i. Every factor is a gate, so gates of 0 are exact, too. At the end of the chunk the keys are decayed as S takes them.
//
//     for each head of a batch entry          side by side
//         for each document
//             for each chunk of SHORT nodes   in order; backward: once more from the last to the first
//
// Called by `mpnn/kernels/recurrent/scan.py:recurrence`, with a gate a feature.
#include "scan.h"

namespace scan {
namespace {

constexpr int64_t SHORT = 24;  // nodes of a chunk: keys are decayed by pairs of nodes
static_assert(SHORT % STEP == 0 && SHORT == ROWS, "");

// Row i of B and P: keys [F, SHORT] are columns, of which the first i are multiplied by the gates of node i.
template <int M, class T>
INLINE void meet(T *keys, const T *gates, const T *k, const T *q, int64_t width, int64_t i, T *B, T *P) {
  constexpr int64_t ROW = stride<T>(SHORT);
  vec<T, 8> b[M] = {}, p[M] = {};
  vec<T, 8> lane;
  UNROLL for (int l = 0; l < 8; l++) lane[l] = (T)((M - 1) * 8 + l);
  const auto before = lane < (T)i;
  for (int64_t f = 0; f < width; f++, keys += ROW) {
    UNROLL for (int m = 0; m < M; m++) {
      const vec<T, 8> gate = splat<T, 8>(gates[f]);
      const vec<T, 8> key = load<T, 8>(keys + m * 8) * (m < M - 1 ? gate : before ? gate : splat<T, 8>(1));
      store<T, 8>(keys + m * 8, key);
      b[m] -= key * k[f];
      p[m] += key * q[f];
    }
  }
  UNROLL for (int m = 0; m < M; m++) store<T, 8>(B + m * 8, b[m]), store<T, 8>(P + m * 8, p[m]);
  for (int64_t j = i; j < SHORT; j++) B[j] = 0;
  for (int64_t j = i + 1; j < SHORT; j++) P[j] = 0;
}

template <class T> struct ByFeature {
  const Scan<T> &p;
  const int64_t F = stride<T>(p.width), D = stride<T>(p.value_width), C = stride<T>(SHORT);
  const int64_t wide = up(p.width, 8), deep = up(p.value_width, 8);
  int64_t b, g, copy;
  T beta[SHORT];
  T *k, *q, *gates, *before, *keys, *B, *P;  // k and q are one matrix; before [SHORT, F]: products from the first node on

  explicit ByFeature(const Scan<T> &p) : p(p) {}
  int64_t size() const { return SHORT * (4 * F + 2 * C) + F * C; }
  void take(Memory &memory) {
    k = memory.take<T>(2 * SHORT * F), q = k + SHORT * F;
    gates = memory.take<T>(SHORT * F), before = memory.take<T>(SHORT * F), keys = memory.take<T>(F * C);
    B = memory.take<T>(SHORT * C), P = memory.take<T>(SHORT * C);
  }
  int64_t gate(int64_t node) const { return (b * p.num_dst + node) * p.groups + g; }

  // Keys, gates and beta of a chunk.
  void read_keys(int64_t node, int64_t n) {
    pack_chunk<SHORT>(p.key, p.key.at(b, g, node), n, p.width, T(1), k);
    finish(p, k, n, T(1));
    for (int64_t i = 0; i < SHORT; i++) {
      beta[i] = i >= n ? 0 : p.beta ? p.beta[gate(node + i)] : 1;
      for (int64_t f = 0; f < wide; f += 8) {
        const T *from = p.log_gate + gate(node + i) * p.width + f;
        const vec<T, 8> one = splat<T, 8>(1);
        const vec<T, 8> x = i < n ? exp<T, 8>(load_first<T, 8>(from, p.width - f)) : one;
        const vec<T, 8> all = i ? load<T, 8>(before + (i - 1) * F + f) * x : x;
        store<T, 8>(gates + i * F + f, x);
        store<T, 8>(before + i * F + f, all < (T)1e-30 ? vec<T, 8>{} : all);
      }
    }
  }
  void read(int64_t node, int64_t n) {
    read_keys(node, n);
    pack_chunk<SHORT>(p.query, p.query.at(b, g, node), n, p.width, T(1), q);
    finish(p, q, n, T(p.scale));
    transposed(k, SHORT, p.width, keys);
    for (int64_t i = 0; i < SHORT; i++) {
      const T *rows[] = {gates + i * F, k + i * F, q + i * F};
      if (i < 8) meet<1>(keys, rows[0], rows[1], rows[2], p.width, i, B + i * C, P + i * C);
      else if (i < 16) meet<2>(keys, rows[0], rows[1], rows[2], p.width, i, B + i * C, P + i * C);
      else meet<3>(keys, rows[0], rows[1], rows[2], p.width, i, B + i * C, P + i * C);
    }
  }
  void times_before(T *x) {  // [SHORT, F]
    for (int64_t at = 0; at < SHORT * F; at += F)
      for (int64_t f = 0; f < wide; f += 8) store<T, 8>(x + at + f, load<T, 8>(x + at + f) * load<T, 8>(before + at + f));
  }
  // x [n, F] as it is at the end of the chunk.
  void times_after(T *x, int64_t n) {
    for (int64_t f = 0; f < wide; f += 8) {
      vec<T, 8> after = splat<T, 8>(1);
      for (int64_t at = (n - 1) * F + f; at >= 0; at -= F) {
        store<T, 8>(x + at, load<T, 8>(x + at) * after);
        after *= load<T, 8>(gates + at);
        after = after < (T)1e-30 ? vec<T, 8>{} : after;
      }
    }
  }
  // E for KS [SHORT, D], in e; the columns of B are multiplied by beta.
  void unpredicted(int64_t node, int64_t n, const T *KS, T *e) {
    pack_chunk<SHORT>(p.value, p.value.at(b, g, node), n, p.value_width, T(1), e);
    if (!p.beta) return;
    for (int64_t i = 0; i < SHORT; i++)
      for (int64_t j = 0; j < SHORT; j += 8) store<T, 8>(B + i * C + j, load<T, 8>(B + i * C + j) * load<T, 8>(beta + j));
    for (int64_t at = 0; at < n * D; at += D)
      for (int64_t d = 0; d < deep; d += 8) store<T, 8>(e + at + d, load<T, 8>(e + at + d) - load<T, 8>(KS + at + d));
    solve<SHORT, false>(B, e, p.value_width);
  }
  void scale_state(T *S) {
    for (int64_t f = 0; f < p.width; f++) scale_row(S + f * D, deep, before[(SHORT - 1) * F + f]);
  }
  void advance(T *S, const T *u, int64_t n) {
    scale_state(S);
    product<STEP, true, T>({keys, C}, {u, D}, {S, D}, p.width, n, deep);
  }
};

template <class T> struct ByFeatureForward : ByFeature<T> {
  using Base = ByFeature<T>;
  using Base::p, Base::F, Base::D, Base::C, Base::deep, Base::b, Base::g, Base::k, Base::q, Base::P;
  Memory memory{(Base::size() + 3 * SHORT * D + F * D) * (int64_t)sizeof(T), 12};
  T *u, *predicted, *o, *S;

  explicit ByFeatureForward(const Scan<T> &p) : Base(p) {
    if (!memory) return;
    this->take(memory);
    predicted = memory.take<T>(2 * SHORT * D), o = predicted + SHORT * D;
    u = memory.take<T>(SHORT * D), S = memory.take<T>(F * D);
  }
  void chunk(int64_t node, int64_t n) {
    this->read(node, n);
    this->times_before(k), this->times_before(q);
    product<STEP, false, T>({k, F}, {S, D}, {predicted, D}, 2 * SHORT, p.width, deep);
    this->unpredicted(node, n, predicted, u);
    if (p.beta) scale_rows(u, n, p.value_width, this->beta);
    add_lower<SHORT>(P, u, o, p.value_width);
    for (int64_t i = 0; i < n; i++)
      __builtin_memcpy(p.out + this->gate(node + i) * p.value_width, o + i * D, p.value_width * sizeof(T));
    this->advance(S, u, n);
  }
  void head() {
    for (const Block *block = p.blocks; block < p.blocks + p.num_blocks; block++) {
      const T *first = block == p.blocks ? state_of(p, p.state, b, g) : nullptr;
      read_state(S, first, p.value_width, p.width, p.value_width);
      for (int64_t node = block->first; node < block->last; node += SHORT)
        chunk(node, least(SHORT, block->last - node));
    }
    if (p.last) write_state(state_of(p, p.last, b, g), p.value_width, S, p.width, p.value_width);
  }
};

// The gradients, as in delta_rule.cpp. Where that multiplies X = tril(dO U^T) and Y = -tril(dE U^T, -1) by the decays, here
// are Horner's sums, in which every factor is a gate:
//
//     sum_{j < i} X_ij k_j decay_ij = ((X_i0 k_0 gate_1 + X_i1 k_1) gate_2 + ...) gate_i
template <class T> struct ByFeatureBackward : ByFeature<T> {
  using Base = ByFeature<T>;
  using Base::p, Base::F, Base::D, Base::C, Base::wide, Base::deep, Base::b, Base::g, Base::copy, Base::k, Base::q;
  using Base::P, Base::B, Base::beta, Base::gates, Base::before, Base::keys;
  const int64_t chunks = most_chunks(p, SHORT);
  Memory memory{(Base::size() + SHORT * (5 * F + 4 * D + 2 * C) + (F + D) * C + 2 * F * D + chunks * SHORT * D +
                 states_kept(chunks) * F * D + F) * (int64_t)sizeof(T), 28};
  T *dq, *read_k, *write_k, *ends, *dL, *u, *o, *dr, *predicted, *u_transposed, *X, *Y, *Z, *turned, *es, *states, *behind;

  explicit ByFeatureBackward(const Scan<T> &p) : Base(p) {
    if (!memory) return;
    this->take(memory);
    dq = memory.take<T>(2 * SHORT * F), read_k = dq + SHORT * F;
    write_k = memory.take<T>(SHORT * F), ends = memory.take<T>(SHORT * F), dL = memory.take<T>(SHORT * F);
    o = memory.take<T>(2 * SHORT * D), dr = o + SHORT * D;
    u = memory.take<T>(SHORT * D), predicted = memory.take<T>(SHORT * D), u_transposed = memory.take<T>(D * C);
    X = memory.take<T>(SHORT * C), Y = memory.take<T>(SHORT * C);
    Z = memory.take<T>(F * D), turned = memory.take<T>(D * F), behind = memory.take<T>(F);
    es = memory.take<T>(chunks * SHORT * D), states = memory.take<T>(states_kept(chunks) * F * D);
  }

  void times_beta(const T *e) {  // u = beta e
    for (int64_t i = 0; i < SHORT; i++)
      for (int64_t d = 0; d < deep; d += 8) store<T, 8>(u + i * D + d, load<T, 8>(e + i * D + d) * beta[i]);
  }
  void forwards(int64_t node, int64_t n, T *S, T *e) {
    this->read(node, n);
    if (p.beta) {
      this->times_before(k);
      product<STEP, false, T>({k, F}, {S, D}, {predicted, D}, SHORT, p.width, deep);
    }
    this->unpredicted(node, n, predicted, e);
    times_beta(e);
    this->advance(S, u, n);
  }
  void again(int64_t node, int64_t n, T *S, const T *e) {
    this->read_keys(node, n);
    times_beta(e);
    this->times_after(k, n);
    this->scale_state(S);
    product<STEP, true, T>({k, 1, F}, {u, D}, {S, D}, up(p.width, STEP), n, deep);
  }

  // to [SHORT, SHORT] = factor * (A [SHORT, D] U^T) below the diagonal, which goes to `own`.
  void strictly_lower(T *to, const T *A, T factor, T *own) {
    product<STEP, false, T>({A, D}, {u_transposed, C}, {to, C}, SHORT, p.value_width, SHORT);
    for (int64_t i = 0; i < SHORT; i++) {
      own[i] = to[i * C + i];
      scale_row(to + i * C, SHORT, factor);
      for (int64_t j = i; j < SHORT; j++) to[i * C + j] = 0;
    }
  }

  // What nodes of the chunk give each other, in 8 features from f on.
  void add_own_chunk(int64_t f) {
    using V = vec<T, 8>;
    const auto at = [&](const T *x, int64_t i) { return load<T, 8>(x + i * F + f); };
    for (int64_t i = 1; i < SHORT; i++) {
      V x = {}, y = {};
      for (int64_t j = 0; j < i; j++) {
        const V key = at(k, j), gate = at(gates, j + 1);
        x = (x + X[i * C + j] * key) * gate;
        y = (y + Y[i * C + j] * key) * gate;
      }
      store<T, 8>(dq + i * F + f, at(dq, i) + x);
      store<T, 8>(read_k + i * F + f, at(read_k, i) + y);
    }
    for (int64_t i = 0; i < SHORT - 1; i++) {
      V x = {};
      for (int64_t j = SHORT - 1; j > i; j--) x = (x + X[j * C + i] * at(q, j) + Y[j * C + i] * at(k, j)) * at(gates, j);
      store<T, 8>(write_k + i * F + f, at(write_k, i) + x);
    }
  }

  void backwards(int64_t node, int64_t n, const T *S, const T *e) {
    this->read(node, n);
    pack_chunk<SHORT>(p.d_out, p.d_out.at(b, g, node), n, p.value_width, T(1), o);
    times_beta(e);
    transposed(u, SHORT, p.value_width, u_transposed);
    __builtin_memcpy(ends, k, SHORT * F * sizeof(T));
    this->times_after(ends, n);
    product<STEP, false, T>({ends, F}, {Z, D}, {dr, D}, SHORT, p.width, deep);
    add_lower_transposed<SHORT>(P, o, dr, p.value_width);
    if (p.beta) {
      for (int64_t i = 0; i < SHORT; i++) scale_row(B + i * C, SHORT, beta[i]);
      solve<SHORT, true>(B, dr, p.value_width);
      for (int64_t i = 0; i < n; i++) p.d_beta[this->gate(node + i)] = dot(dr + i * D, e + i * D, deep);
      scale_rows(dr, SHORT, p.value_width, beta);
    }
    add_rows(p.d_value, p, copy, b, g, node, n, p.value_width, T(1), dr);
    T own[SHORT], none[SHORT];
    strictly_lower(X, o, T(1), own);
    strictly_lower(Y, dr, T(p.beta ? -1 : 0), none);

    transposed(S, p.width, p.value_width, turned);
    product<STEP, false, T>({o, D}, {turned, F}, {dq, F}, 2 * SHORT, p.value_width, wide);
    for (int64_t at = 0; at < SHORT * F; at += F) scale_row(read_k + at, wide, T(p.beta ? -1 : 0));
    this->times_before(dq), this->times_before(read_k);
    transposed(Z, p.width, p.value_width, turned);
    product<STEP, false, T>({u, D}, {turned, F}, {write_k, F}, SHORT, p.value_width, wide);
    this->times_after(write_k, n);
    for (int64_t f = 0; f < wide; f += 8) {
      add_own_chunk(f);
      for (int64_t i = 0; i < n; i++) {
        const auto at = [&](T *x) { return load<T, 8>(x + i * F + f); };
        store<T, 8>(dL + i * F + f, at(q) * at(dq) + at(k) * at(read_k) - at(k) * at(write_k));
        store<T, 8>(dq + i * F + f, at(dq) + own[i] * at(k));
        store<T, 8>(write_k + i * F + f, at(write_k) + at(read_k) + own[i] * at(q));
      }
    }
    add_rows(p.d_query, p, copy, b, g, node, n, p.width, T(p.scale), dq);
    add_rows(p.d_key, p, copy, b, g, node, n, p.width, T(1), write_k);

    for (int64_t f = 0; f < p.width; f++) behind[f] = dot(S + (F + f) * D, Z + f * D, deep);
    this->scale_state(Z);
    this->times_before(q);
    product<STEP, true, T>({q, 1, F}, {o, D}, {Z, D}, up(p.width, STEP), n, deep);
    if (p.beta) {
      this->times_before(k);
      for (int64_t at = 0; at < n * F; at += F) scale_row(k + at, wide, T(-1));
      product<STEP, true, T>({k, 1, F}, {dr, D}, {Z, D}, up(p.width, STEP), n, deep);
    }
    T *const d_log_gate = p.d_log_gate + this->gate(node) * p.width;
    for (int64_t f = 0; f < p.width; f++)
      add_up(dot(S + f * D, Z + f * D, deep), behind[f], dL + f, F, n, d_log_gate + f, p.groups * p.width);
  }

  void head() { there_and_back<SHORT>(*this); }
};

}  // namespace
}  // namespace scan

KERNEL(feature_gates_f32, scan::Scan<float>, scan::each_head<scan::ByFeatureForward<float>>(*p, b, part, parts))
KERNEL(feature_gates_f64, scan::Scan<double>, scan::each_head<scan::ByFeatureForward<double>>(*p, b, part, parts))
KERNEL(feature_gates_backward_f32, scan::Scan<float>, scan::each_head<scan::ByFeatureBackward<float>>(*p, b, part, parts))
KERNEL(feature_gates_backward_f64, scan::Scan<double>, scan::each_head<scan::ByFeatureBackward<double>>(*p, b, part, parts))
