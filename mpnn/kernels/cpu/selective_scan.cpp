// The selective scan of Mamba-1 (Gu and Dao 2023, arXiv:2312.00752): each channel c has states s of its own, and each state
// a gate of its own at each node.
//
//     h_tcs = exp(dt_tc A_cs) h_(t-1)cs + dt_tc x_tc B_ts               y_tc = sum_s C_ts h_tcs
//
// Channels are the lanes of vectors, the states of a block of 16 are 16 vectors. A document begins with states of 0, the first one
// with `state`. A pass without gradients also computes what a layer of Mamba does around the scan:
//
//     dt = softplus(dt' + b)       out = (y + D x) silu(z)
//
// The backward pass keeps the states before every chunk, computes those of a chunk again, and then, with
// g_t = dy_t C_t + gate_(t+1) g_(t+1), the gradient of h_t,
//
//     dC_ts = sum_c dy h       dB_ts = sum_c g dt x       dx = dt sum_s g B       d(dt A) = g h_(t-1) gate
//
//     for each 8 channels or more of a batch entry    side by side
//         for each block of STATES states
//             for each document
//                 for each node                       in order; backward: chunks of STEPS nodes from the last to the first
//
// Called by `mpnn/kernels/recurrent/selective.py`.
#include "products.h"

namespace selective_scan {
namespace {

constexpr int64_t STATES = 16, STEPS = 32;  // states of a block; nodes of a chunk of the backward pass

template <class T> struct SelectiveScan {  // kernels/recurrent/selective.py has the same fields in the same order
  int64_t batch, nodes, channels, states;  // channels are a multiple of 8, states one of 16
  const T *x, *dt;                         // [B, N, channels], of which rows may lie apart
  int64_t x_batch, x_node, dt_batch, dt_node;
  const T *A;                              // [states, channels]
  const T *B, *C;                          // [B, N, states]
  const T *state;                          // [B, states, channels], or null
  T *y, *last;
  const int64_t *starts;  // the first node of each document, and the number of nodes
  int64_t documents;
  int64_t softplus;     // of a layer, without gradients: whether dt is softplus(dt' + bias)
  const T *bias, *D;    // [channels], or null
  const T *z;           // [B, N, channels], or null
  int64_t z_batch, z_node;
  const T *d_y, *d_last;
  T *d_x, *d_dt;
  T *d_A;         // [B, states, channels]
  T *d_B, *d_C;   // [parts, B, N, states], added to
  T *d_state;
};

template <class T> using V = vec<T, 8>;

// The gate of each state, and the next states; calls `each(s, gate, before, after)`.
template <class T, class Each> INLINE void step(V<T> *h, const V<T> *A, V<T> dt, V<T> dx, const T *B, Each each) {
  const V<T> power = dt * LOG2_E<T>;
  UNROLL for (int s = 0; s < STATES; s++) {
    const V<T> gate = exp2_up_to<T, 8>(power * A[s]), before = h[s];
    h[s] = gate * before + dx * B[s];
    each(s, gate, before, h[s]);
  }
}
template <class T> void copy(V<T> *to, const T *from, int64_t row) {
  for (int s = 0; s < STATES; s++) to[s] = from ? load<T, 8>(from + s * row) : V<T>{};
}
template <class T> void write(T *to, int64_t row, const V<T> *from) {
  for (int s = 0; s < STATES; s++) store<T, 8>(to + s * row, from[s]);
}

// The blocks of 8 channels of one part.
template <class T> struct Range { int64_t first, last; };
template <class T> Range<T> channels_of(const SelectiveScan<T> &p, int64_t part, int64_t parts) {
  const int64_t blocks = p.channels / 8;
  return {blocks * part / parts * 8, blocks * (part + 1) / parts * 8};
}

// log(1 + exp(x)) = max(x, 0) + log(1 + e), e = exp(-|x|), and log(1 + e) = 2 artanh(e / (2 + e)) by its series.
template <class T, int N> vec<T, N> softplus(vec<T, N> x) {
  constexpr int TERMS = sizeof(T) == 4 ? 8 : 17;
  const vec<T, N> e = exp_below<T, N>(x < 0 ? x : -x), r = e / (2 + e), square = r * r;
  vec<T, N> series = {};
  UNROLL for (int k = TERMS; k > 0; k--) series = series * square + T(1) / (2 * k - 1);
  return (x > 0 ? x : vec<T, N>{}) + 2 * r * series;
}

// The states s0 .. s0 + STATES of N channels from c on, through all nodes.
// `GROWS`: some gate may exceed 1.
template <int N, bool GROWS, class T> void channels(const SelectiveScan<T> &p, int64_t b, int64_t c, int64_t s0) {
  using W = vec<T, N>;
  const bool is_last = s0 + STATES == p.states;
  const int64_t matrix = (b * p.states + s0) * p.channels + c;
  W A[STATES], h[STATES];
  for (int s = 0; s < STATES; s++) {
    A[s] = load<T, N>(p.A + (s0 + s) * p.channels + c) ;
    h[s] = p.state ? load<T, N>(p.state + matrix + s * p.channels) : W{};
  }
  const W bias = p.bias ? load<T, N>(p.bias + c) : W{}, D = p.D ? load<T, N>(p.D + c) : W{};
  for (int64_t d = 0; d < p.documents; d++) {
    if (d) UNROLL for (int s = 0; s < STATES; s++) h[s] = W{};
    for (int64_t t = p.starts[d]; t < p.starts[d + 1]; t++) {
      const W x = load<T, N>(p.x + b * p.x_batch + t * p.x_node + c);
      W dt = load<T, N>(p.dt + b * p.dt_batch + t * p.dt_node + c) + bias;
      if (p.softplus) dt = softplus<T, N>(dt);
      const W dx = dt * x, power = dt * LOG2_E<T>;
      const T *B = p.B + (b * p.nodes + t) * p.states + s0, *C = p.C + (b * p.nodes + t) * p.states + s0;
      T *out = p.y + (b * p.nodes + t) * p.channels + c;
      W y[4] = {s0 ? load<T, N>(out) : W{}};
      UNROLL for (int s = 0; s < STATES; s++) {
        h[s] = (GROWS ? exp2_up_to<T, N>(power * A[s]) : exp2_below<T, N>(power * A[s])) * h[s] + dx * B[s];
        y[s % 4] += h[s] * C[s];
      }
      y[0] = (y[0] + y[1]) + (y[2] + y[3]);
      if (is_last) {
        y[0] += D * x;
        if (p.z) {
          const W z = load<T, N>(p.z + b * p.z_batch + t * p.z_node + c);
          y[0] *= z * sigmoid<T, N>(z);
        }
      }
      store<T, N>(out, y[0]);
    }
  }
  for (int s = 0; s < STATES; s++) store<T, N>(p.last + matrix + s * p.channels, h[s]);
}

template <bool GROWS, class T> void forward(const SelectiveScan<T> &p, int64_t b, Range<T> range) {
  constexpr int64_t MOST = VECTOR_BYTES / sizeof(T) > 8 ? VECTOR_BYTES / sizeof(T) : 8;
  int64_t c = range.first;
  for (; c + MOST <= range.last; c += MOST)
    for (int64_t s0 = 0; s0 < p.states; s0 += STATES) channels<MOST, GROWS>(p, b, c, s0);
  for (; c < range.last; c += 8)
    for (int64_t s0 = 0; s0 < p.states; s0 += STATES) channels<8, GROWS>(p, b, c, s0);
}

template <class T> bool forward(const SelectiveScan<T> &p, int64_t b, int64_t part, int64_t parts) {
  const Range<T> range = channels_of(p, part, parts);
  bool grows = !p.softplus;
  for (int64_t s = 0; s < p.states; s++)
    for (int64_t c = range.first; c < range.last; c++) grows |= !(p.A[s * p.channels + c] <= 0);
  grows ? forward<true>(p, b, range) : forward<false>(p, b, range);
  return true;
}

// The number of chunks of all documents.
template <class T> int64_t num_chunks(const SelectiveScan<T> &p) {
  int64_t count = 0;
  for (int64_t d = 0; d < p.documents; d++) count += divide_up(p.starts[d + 1] - p.starts[d], STEPS);
  return count;
}

template <class T> struct Backward {
  const SelectiveScan<T> &p;
  int64_t b, c, s0, copy_of;
  V<T> A[STATES], dA[STATES], g[STATES], gates[STEPS][STATES], h[STEPS + 1][STATES];

  // The states after the nodes of a chunk, from those before it, h[0].
  void again(int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      const int64_t node = b * p.nodes + t, at = node * p.channels + c, k = t - first;
      const V<T> dt = load<T, 8>(p.dt + at);
      for (int s = 0; s < STATES; s++) h[k + 1][s] = h[k][s];
      step<T>(h[k + 1], A, dt, dt * load<T, 8>(p.x + at), p.B + node * p.states + s0,
              [&](int s, V<T> gate, V<T>, V<T>) { gates[k][s] = gate; });
    }
  }

  void back(int64_t first, int64_t last) {
    for (int64_t t = last - 1; t >= first; t--) {
      const int64_t node = b * p.nodes + t, at = node * p.channels + c, k = t - first;
      const int64_t shared = ((copy_of * p.batch + b) * p.nodes + t) * p.states + s0;
      const V<T> dt = load<T, 8>(p.dt + at), x = load<T, 8>(p.x + at), dy = load<T, 8>(p.d_y + at), dx = dt * x;
      const T *B = p.B + node * p.states + s0, *C = p.C + node * p.states + s0;
      V<T> of_x = {}, of_dt = {}, to_B[STATES], to_C[STATES];
      UNROLL for (int s = 0; s < STATES; s++) {
        g[s] += dy * C[s];
        to_C[s] = dy * h[k + 1][s];
        to_B[s] = g[s] * dx;
        of_x += g[s] * B[s];
        const V<T> of_exponent = g[s] * h[k][s] * gates[k][s];
        of_dt += of_exponent * A[s];
        dA[s] += of_exponent * dt;
        g[s] *= gates[k][s];
      }
      for (int s = 0; s < STATES; s += 8) {
        store<T, 8>(p.d_B + shared + s, load<T, 8>(p.d_B + shared + s) + sums_of_eight<T>(to_B + s));
        store<T, 8>(p.d_C + shared + s, load<T, 8>(p.d_C + shared + s) + sums_of_eight<T>(to_C + s));
      }
      const V<T> earlier_x = s0 ? load<T, 8>(p.d_x + at) : V<T>{}, earlier_dt = s0 ? load<T, 8>(p.d_dt + at) : V<T>{};
      store<T, 8>(p.d_x + at, earlier_x + of_x * dt);
      store<T, 8>(p.d_dt + at, earlier_dt + of_dt + of_x * x);
    }
  }

  // `kept` [chunks, STATES]: the states before each chunk.
  void run(V<T> *kept) {
    const int64_t matrix = (b * p.states + s0) * p.channels + c;
    copy(A, p.A + s0 * p.channels + c, p.channels), copy<T>(dA, nullptr, 0);
    copy(h[0], p.state ? p.state + matrix : nullptr, p.channels);
    V<T> *chunk = kept;
    for (int64_t d = 0; d < p.documents; d++) {
      if (d) copy<T>(h[0], nullptr, 0);
      for (int64_t t = p.starts[d]; t < p.starts[d + 1]; t += STEPS, chunk += STATES) {
        const int64_t last = least(t + STEPS, p.starts[d + 1]);
        for (int s = 0; s < STATES; s++) chunk[s] = h[0][s];
        if (last < p.starts[d + 1]) again(t, last);
        for (int s = 0; s < STATES; s++) h[0][s] = h[last - t][s];
      }
    }
    copy(g, p.d_last ? p.d_last + matrix : nullptr, p.channels);
    for (int64_t d = p.documents - 1; d >= 0; d--) {
      const int64_t first = p.starts[d], length = p.starts[d + 1] - first;
      for (int64_t n = divide_up(length, STEPS) - 1; n >= 0; n--) {
        chunk -= STATES;
        for (int s = 0; s < STATES; s++) h[0][s] = chunk[s];
        const int64_t t = first + n * STEPS, last = least(t + STEPS, first + length);
        again(t, last);
        back(t, last);
      }
      if (d) copy<T>(g, nullptr, 0);
    }
    write(p.d_A + matrix, p.channels, dA);
    if (p.d_state) write(p.d_state + matrix, p.channels, g);
  }
};

template <class T> bool backward(const SelectiveScan<T> &p, int64_t b, int64_t part, int64_t parts) {
  Memory memory(num_chunks(p) * STATES * sizeof(V<T>) + sizeof(Backward<T>), 2);
  if (!memory) return false;
  V<T> *kept = memory.take<V<T>>(num_chunks(p) * STATES);
  const Range<T> range = channels_of(p, part, parts);
  Backward<T> pass{p};
  pass.b = b, pass.copy_of = part;
  for (pass.c = range.first; pass.c < range.last; pass.c += 8)
    for (pass.s0 = 0; pass.s0 < p.states; pass.s0 += STATES) pass.run(kept);
  return true;
}

}  // namespace
}  // namespace selective_scan

extern "C" int64_t selective_scan_size() { return sizeof(selective_scan::SelectiveScan<float>); }
KERNEL(selective_scan_f32, selective_scan::SelectiveScan<float>, selective_scan::forward(*p, b, part, parts))
KERNEL(selective_scan_f64, selective_scan::SelectiveScan<double>, selective_scan::forward(*p, b, part, parts))
KERNEL(selective_scan_backward_f32, selective_scan::SelectiveScan<float>, selective_scan::backward(*p, b, part, parts))
KERNEL(selective_scan_backward_f64, selective_scan::SelectiveScan<double>, selective_scan::backward(*p, b, part, parts))
