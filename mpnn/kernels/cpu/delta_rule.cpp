// The delta rule with a gate a head (Yang et al. 2024, arXiv:2406.06484 and 2412.06464): a node stores what the state does
// not predict yet, and only a part beta of it.
//
//     e_i = v_i - k_i S_i           S_i = gate_i S_{i-1} before node i stores          u_i = beta_i e_i
//     out_i = scale q_i (S_i + k_i^T u_i)
//
// Chunks of nodes, one after the other. Within a chunk this is a triangular system, B_ij = -decay_ij <k_i, k_j> for j < i:
//
//     E = (1 - B beta)^-1 (V - before K S)      out = scale (before Q S + (tril(Q K^T) * decay) U)
//     S = whole S + (after K)^T U
//
// One thread needs no second system for the state (the WY form), because the state is known when the chunk is solved.
//
//     for each head of a batch entry          side by side
//         for each document
//             for each chunk of CHUNK nodes   in order; backward: once more from the last to the first
//
// Called by `mpnn/kernels/recurrent/scan.py:recurrence`, with beta and at most a gate a head.
#include "scan.h"

namespace scan {
namespace {

template <class T> struct Delta {
  const Scan<T> &p;
  const int64_t F = stride<T>(p.width), D = stride<T>(p.value_width), C = stride<T>(CHUNK);
  const int64_t wide = up(p.width, 8), deep = up(p.value_width, 8);
  int64_t b, g, copy;
  Decays<T> decays;
  T beta[CHUNK];

  explicit Delta(const Scan<T> &p) : p(p) {}

  int64_t gate(int64_t node) const { return (b * p.num_dst + node) * p.groups + g; }

  // The keys of a chunk, as rows and as columns; gates and beta.
  void read(int64_t node, int64_t n, T *k, T *k_transposed) {
    decays.read(p.log_gate ? p.log_gate + gate(node) : nullptr, p.groups, n);
    for (int64_t i = 0; i < CHUNK; i++) beta[i] = i < n ? p.beta[gate(node + i)] : 0;
    pack_chunk(p.key, p.key.at(b, g, node), n, p.width, T(1), k);
    finish(p, k, n, T(1));
    transposed(k, CHUNK, p.width, k_transposed);
  }

  // Turns tril(K K^T) * decay into B beta (its columns are multiplied) or beta B (its rows are).
  void strictly_lower(T *A, bool columns) {
    for (int64_t i = 0; i < CHUNK; i++) {
      for (int64_t j = 0; j < i; j += 8)
        store<T, 8>(A + i * C + j, load<T, 8>(A + i * C + j) * (columns ? -load<T, 8>(beta + j) : splat<T, 8>(-beta[i])));
      A[i * C + i] = 0;
    }
  }

  // E = (1 - B beta)^-1 (V - before K S) for KS [CHUNK, D], in e.
  void unpredicted(int64_t node, int64_t n, const T *KS, const T *A, T *e) {
    pack_chunk(p.value, p.value.at(b, g, node), n, p.value_width, T(1), e);
    for (int64_t i = 0; i < n; i++)
      for (int64_t d = 0; d < deep; d += 8)
        store<T, 8>(e + i * D + d, load<T, 8>(e + i * D + d) - decays.before[i] * load<T, 8>(KS + i * D + d));
    solve<CHUNK, false>(A, e, p.value_width);
  }

  // S = whole S + (after K)^T U; k is overwritten.
  void advance(T *S, T *k, const T *u, int64_t n) {
    for (int64_t f = 0; f < p.width; f++) scale_row(S + f * D, deep, decays.whole);
    scale_rows(k, n, p.width, decays.after);
    product<STEP, true, T>({k, 1, F}, {u, D}, {S, D}, up(p.width, STEP), n, deep);
  }
};

template <class T> struct DeltaForward : Delta<T> {
  using Delta<T>::p, Delta<T>::F, Delta<T>::D, Delta<T>::C, Delta<T>::deep, Delta<T>::decays, Delta<T>::b, Delta<T>::g;
  Memory memory{(CHUNK * (2 * F + 3 * D + 2 * C) + F * (C + D)) * (int64_t)sizeof(T), 8};
  T *k, *q, *u, *predicted, *o, *k_transposed, *A, *P, *S;

  explicit DeltaForward(const Scan<T> &p) : Delta<T>(p) {
    if (!memory) return;
    k = memory.take<T>(2 * CHUNK * F), q = k + CHUNK * F;  // one matrix, for one product with S
    predicted = memory.take<T>(2 * CHUNK * D), o = predicted + CHUNK * D;
    u = memory.take<T>(CHUNK * D), k_transposed = memory.take<T>(F * C);
    A = memory.take<T>(CHUNK * C), P = memory.take<T>(CHUNK * C), S = memory.take<T>(F * D);
  }

  void chunk(int64_t node, int64_t n) {
    this->read(node, n, k, k_transposed);
    pack_chunk(p.query, p.query.at(b, g, node), n, p.width, T(1), q);
    finish(p, q, n, T(p.scale));
    product<STEP, false, T>({k, F}, {S, D}, {predicted, D}, 2 * CHUNK, p.width, deep);
    lower_logits(A, k, F, k_transposed, p.width, &decays);
    lower_logits(P, q, F, k_transposed, p.width, &decays);
    this->strictly_lower(A, true);
    this->unpredicted(node, n, predicted, A, u);
    scale_rows(u, n, p.value_width, this->beta);
    scale_rows(o, n, p.value_width, decays.before);
    add_lower(P, u, o, p.value_width);
    for (int64_t i = 0; i < n; i++)
      __builtin_memcpy(p.out + this->gate(node + i) * p.value_width, o + i * D, p.value_width * sizeof(T));
    this->advance(S, k, u, n);
  }

  void head() {
    for (const Block *block = p.blocks; block < p.blocks + p.num_blocks; block++) {
      const T *first = block == p.blocks ? state_of(p, p.state, b, g) : nullptr;
      read_state(S, first, p.value_width, p.width, p.value_width);
      for (int64_t node = block->first; node < block->last; node += CHUNK)
        chunk(node, least(CHUNK, block->last - node));
    }
    if (p.last) write_state(state_of(p, p.last, b, g), p.value_width, S, p.width, p.value_width);
  }
};

// The gradients, by `there_and_back`: E of a document and the states are kept on the way forwards; on the way back, Z is the
// gradient of S (q includes the scale, all triangles their decays):
//
//     dU = tril(Q K^T)^T dO + after (K Z)      dR = (1 - (beta B)^T)^-1 dU      dV = dE = beta dR      dbeta_i = <dR_i, e_i>
//     X = tril(dO U^T)      Y = -tril(dE U^T, -1)                         the gradients of <q_i, k_j> and of <k_i, k_j>
//     dQ = before (dO S^T) + X K
//     dK as a reader = Y K - before (dE S^T)      as a writer = X^T Q + Y^T K + after (U Z^T)
//     Z = whole Z + (before Q)^T dO - (before K)^T dE
//
// log_gate as in scan.cpp: <S, Z> at the first node of a chunk, then <k_i, dk_i as a writer> enters the sum, <q_i, dq_i> and
// <k_i, dk_i as a reader> leave it, without the edge i -> i.
template <class T> struct DeltaBackward : Delta<T> {
  using Delta<T>::p, Delta<T>::F, Delta<T>::D, Delta<T>::C, Delta<T>::wide, Delta<T>::deep, Delta<T>::decays;
  using Delta<T>::b, Delta<T>::g, Delta<T>::beta, Delta<T>::copy;
  const int64_t chunks = most_chunks(p, CHUNK);
  Memory memory{(CHUNK * (5 * F + 4 * D + 4 * C) + (F + D) * C + F * D + D * F + chunks * CHUNK * D + states_kept(chunks) * F * D) *
                    (int64_t)sizeof(T), 20};
  T *k, *q, *dq, *read_k, *write_k, *u, *o, *dr, *predicted, *k_transposed, *u_transposed, *A, *P, *X, *Y, *Z, *turned, *es, *states;

  explicit DeltaBackward(const Scan<T> &p) : Delta<T>(p) {
    if (!memory) return;
    k = memory.take<T>(CHUNK * F), q = memory.take<T>(CHUNK * F), write_k = memory.take<T>(CHUNK * F);
    dq = memory.take<T>(2 * CHUNK * F), read_k = dq + CHUNK * F;  // one matrix, as o and dr are
    o = memory.take<T>(2 * CHUNK * D), dr = o + CHUNK * D;
    u = memory.take<T>(CHUNK * D), predicted = memory.take<T>(CHUNK * D);
    k_transposed = memory.take<T>(F * C), u_transposed = memory.take<T>(D * C);
    A = memory.take<T>(CHUNK * C), P = memory.take<T>(CHUNK * C), X = memory.take<T>(CHUNK * C), Y = memory.take<T>(CHUNK * C);
    Z = memory.take<T>(F * D), turned = memory.take<T>(D * F);
    es = memory.take<T>(chunks * CHUNK * D), states = memory.take<T>(states_kept(chunks) * F * D);
  }

  void forwards(int64_t node, int64_t n, T *S, T *e) {
    this->read(node, n, k, k_transposed);
    product<STEP, false, T>({k, F}, {S, D}, {predicted, D}, CHUNK, p.width, deep);
    lower_logits(A, k, F, k_transposed, p.width, &decays);
    this->strictly_lower(A, true);
    this->unpredicted(node, n, predicted, A, e);
    times_beta(e);
    this->advance(S, k, u, n);
  }
  void again(int64_t node, int64_t n, T *S, const T *e) {
    this->read(node, n, k, k_transposed);
    times_beta(e);
    this->advance(S, k, u, n);
  }
  // u = beta e
  void times_beta(const T *e) {
    for (int64_t i = 0; i < CHUNK; i++)
      for (int64_t d = 0; d < deep; d += 8) store<T, 8>(u + i * D + d, load<T, 8>(e + i * D + d) * beta[i]);
  }

  void backwards(int64_t node, int64_t n, const T *S, const T *e) {
    this->read(node, n, k, k_transposed);
    pack_chunk(p.query, p.query.at(b, g, node), n, p.width, T(p.scale), q);
    pack_chunk(p.d_out, p.d_out.at(b, g, node), n, p.value_width, T(1), o);
    times_beta(e);
    transposed(u, CHUNK, p.value_width, u_transposed);
    lower_logits(A, k, F, k_transposed, p.width, &decays);
    lower_logits(P, q, F, k_transposed, p.width, &decays);
    lower_logits(X, o, D, u_transposed, p.value_width, &decays);
    this->strictly_lower(A, false);
    T own[CHUNK], dL[CHUNK];
    for (int64_t i = 0; i < CHUNK; i++) own[i] = X[i * C + i], X[i * C + i] = 0;

    product<STEP, false, T>({k, F}, {Z, D}, {dr, D}, CHUNK, p.width, deep);
    scale_rows(dr, CHUNK, p.value_width, decays.after);
    add_lower_transposed(P, o, dr, p.value_width);
    solve<CHUNK, true>(A, dr, p.value_width);
    for (int64_t i = 0; i < n; i++) p.d_beta[this->gate(node + i)] = dot(dr + i * D, e + i * D, deep);
    scale_rows(dr, CHUNK, p.value_width, beta);
    add_rows(p.d_value, p, copy, b, g, node, n, p.value_width, T(1), dr);
    lower_logits(Y, dr, D, u_transposed, p.value_width, &decays);
    for (int64_t i = 0; i < CHUNK; i++) scale_row(Y + i * C, CHUNK, T(-1)), Y[i * C + i] = 0;

    transposed(S, p.width, p.value_width, turned);
    product<STEP, false, T>({o, D}, {turned, F}, {dq, F}, 2 * CHUNK, p.value_width, wide);
    transposed(Z, p.width, p.value_width, turned);
    product<STEP, false, T>({u, D}, {turned, F}, {write_k, F}, CHUNK, p.value_width, wide);
    for (int64_t i = 0; i < CHUNK; i++) {
      scale_row(dq + i * F, wide, decays.before[i]);
      scale_row(read_k + i * F, wide, -decays.before[i]);
      scale_row(write_k + i * F, wide, decays.after[i]);
    }
    add_lower(X, k, dq, p.width);
    add_lower(Y, k, read_k, p.width);
    add_lower_transposed(X, q, write_k, p.width);
    add_lower_transposed(Y, k, write_k, p.width);
    for (int64_t i = 0; i < n; i++) {
      const T *qi = q + i * F, *ki = k + i * F;
      dL[i] = dot(qi, dq + i * F, wide) + dot(ki, read_k + i * F, wide) - dot(ki, write_k + i * F, wide);
      for (int64_t f = 0; f < wide; f += 8) {
        const vec<T, 8> key = load<T, 8>(ki + f), query = load<T, 8>(qi + f);
        store<T, 8>(dq + i * F + f, load<T, 8>(dq + i * F + f) + own[i] * key);
        store<T, 8>(write_k + i * F + f, load<T, 8>(write_k + i * F + f) + load<T, 8>(read_k + i * F + f) + own[i] * query);
      }
    }
    add_rows(p.d_query, p, copy, b, g, node, n, p.width, T(p.scale), dq);
    add_rows(p.d_key, p, copy, b, g, node, n, p.width, T(1), write_k);

    const double behind = inner(S + F * D, Z, p.width, D, deep);
    for (int64_t f = 0; f < p.width; f++) scale_row(Z + f * D, deep, decays.whole);
    for (int64_t i = 0; i < n; i++) {
      scale_row(q + i * F, wide, decays.before[i]);
      scale_row(k + i * F, wide, -decays.before[i]);
    }
    product<STEP, true, T>({q, 1, F}, {o, D}, {Z, D}, up(p.width, STEP), n, deep);
    product<STEP, true, T>({k, 1, F}, {dr, D}, {Z, D}, up(p.width, STEP), n, deep);
    if (p.d_log_gate) add_up(inner(S, Z, p.width, D, deep), behind, dL, 1, n, p.d_log_gate + this->gate(node), p.groups);
  }

  void head() { there_and_back<CHUNK>(*this); }
};

}  // namespace
}  // namespace scan

KERNEL(delta_rule_f32, scan::Scan<float>, scan::each_head<scan::DeltaForward<float>>(*p, b, part, parts))
KERNEL(delta_rule_f64, scan::Scan<double>, scan::each_head<scan::DeltaForward<double>>(*p, b, part, parts))
KERNEL(delta_rule_backward_f32, scan::Scan<float>, scan::each_head<scan::DeltaBackward<float>>(*p, b, part, parts))
KERNEL(delta_rule_backward_f64, scan::Scan<double>, scan::each_head<scan::DeltaBackward<double>>(*p, b, part, parts))
