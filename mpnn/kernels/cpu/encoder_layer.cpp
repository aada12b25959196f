// A transformer layer in one call: attention within documents, residuals, norms and the feed-forward network.
//
//     z = norm_1(x + attend(x)),       y = norm_2(z + ffn(z))              post-norm
//     z = x + attend(norm_1(x)),       y = z + ffn(norm_2(z))              pre-norm
//     attend(x)_i = W_o [softmax_j(scale q_i k_j) v_j] + b_o,    ffn(z) = W_2 act(W_1 z + b_1) + b_2
//
// or, gated, ffn(z) = W_2 (act(W_3 z + b_3) (W_1 z + b_1)) + b_2. A node attends to its document, or, if this is causal,
// to the nodes up to itself. Queries and keys may turn by angles, and several heads of queries share a head of keys.
//
// Weights are packed once (panels.h). Documents pass a layer in groups, so that queries, keys and
// values of a group stay in the cache: products write them as [head][row][width of a head], which attention reads. A
// block of rows then passes the output map, the norms and the feed-forward network, in slices of its hidden columns,
// without leaving L2.
// A result depends on its document alone: neither on the others of a batch nor on the number of threads, to the bit. In
// a causal document it depends on the nodes up to its own alone.
#include "panels.h"
#include "threads.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace encoder_layer {
namespace {

using panels::COLUMNS;
using panels::Finish;
using panels::LANES;
using panels::Target;
using panels::Tile;
using panels::V;
using panels::Weight;
using threads::Crew;
using threads::share;

constexpr int64_t BLOCK = 96;   // rows that pass through the second half of a layer together
constexpr int64_t GROUP = 512;  // rows of documents, for each thread, that pass a layer together
constexpr int64_t FEW = 12;     // rows a thread, below which threads share columns instead of rows
constexpr int64_t QUERIES = 4 * STEP;
constexpr int64_t ROWS_TO_COMPARE = 4096;  // rows of a call that compares all weights: 1 % of its time

struct Document {  // `rows` rows from `first` on attend to `keys` of them, from the row `first_key` of the document on
  int64_t first, rows, first_key, keys;
};

enum { QUERY, KEY, VALUE, OUT, UP, DOWN, GATE, MAPS };

struct EncoderLayer {  // mpnn/kernels/encoder_layer.py has the same fields in the same order
  int64_t width, heads, kv_heads, head_width, hidden, pre_norm, rms_norm, gated, activation;
  double scale, epsilon[2];
  const float *weight[MAPS];           // [out, in]
  int64_t row[MAPS], column[MAPS];     // how far numbers of the next output and of the next input are; one is 1
  const float *bias[MAPS];             // each may be null
  const float *norm_weight[2], *norm_bias[2];
  float *packed;
  int64_t calls;  // decides which numbers are compared
  const float *x;
  float *y;                // [rows, width]
  const float *cos, *sin;  // of the angles, [rows, head_width], or null
  float *keys, *values;    // where each document's are written, [kv_heads, rows, head_width]; or null
  const Document *documents;
  int64_t count, causal;

  int64_t inner() const { return heads * head_width; }
  int64_t all_heads() const { return heads + 2 * kv_heads; }
  int64_t depth() const { return panels::depth_of(width, hidden, inner()); }
  int64_t rows() const { return count ? documents[count - 1].first + documents[count - 1].rows : 0; }
  int64_t maps() const { return gated ? MAPS : GATE; }
  int64_t map_width(int m) const {
    return m == QUERY ? inner() : m < OUT ? kv_heads * head_width : m == UP || m == GATE ? hidden : width;
  }
  int64_t map_depth(int m) const { return m == OUT ? inner() : m == DOWN ? hidden : width; }
  // The number of floats of the maps before map m.
  int64_t numbers(int m) const { return m ? numbers(m - 1) + map_width(m - 1) * map_depth(m - 1) : 0; }
  Weight map(int m) const {
    return {packed + numbers(m), map_width(m), map_depth(m), depth(), weight[m], row[m], column[m]};
  }
};

// ------------------------------------------------------------------------------------------------------- weights

void pack(const EncoderLayer &p, const Crew &crew) {
  for (int m = 0; m < p.maps(); m++) {
    const Weight weight = p.map(m);
    share(crew, weight.width / COLUMNS, [&](int64_t panel, int64_t) {
      for (int64_t k = 0; k < weight.depth; k += weight.panel_depth)
        panels::pack(weight, k, panel);
    });
  }
}

// Whether the packed weights are still the weights, by bits, as far as this call compares them. torch counts most changes
// of a tensor, but not those through `.data`. A call compares a number of every COLUMNS rows, so that a change of all
// numbers shows at once, and whole panels in proportion to its work; the next call compares others.
bool is_current(const EncoderLayer &p) {
  int64_t all = 0, number = 0;
  for (int m = 0; m < p.maps(); m++) all += p.map_width(m) / COLUMNS;
  const int64_t whole = least(all, divide_up(all * p.rows(), ROWS_TO_COMPARE)), first_whole = p.calls * whole % all;
  for (int m = 0; m < p.maps(); m++) {
    const Weight weight = p.map(m);
    const int64_t k = p.calls * 61 % weight.depth, in_panel = k % weight.panel_depth;
    for (int64_t panel = 0; panel < weight.width / COLUMNS; panel++, number++) {
      const int64_t c = (p.calls + panel) % COLUMNS;
      const float *number_now = weight.raw + (panel * COLUMNS + c) * weight.row + k * weight.column;
      if (__builtin_memcmp(number_now, weight.panel(k - in_panel, panel) + in_panel * COLUMNS + c, sizeof(float))) return false;
      const bool in_turn = (number >= first_whole ? number : number + all) < first_whole + whole;
      for (int64_t from = 0; in_turn && from < weight.depth; from += weight.panel_depth)
        if (!panels::is_packed(weight, from, panel)) return false;
    }
  }
  return true;
}

// --------------------------------------------------------------------------------------------------------- norms

// The norm of rows: of their deviations from the mean, or, if it is a norm of root mean squares, of their numbers.
NOINLINE void layer_norm(const float *x, float *y, int64_t rows, const EncoderLayer &p, int norm) {
  const int64_t width = p.width;
  const float *weight = p.norm_weight[norm], *bias = p.norm_bias[norm];
  for (int64_t r = 0; r < rows; r++, x += width, y += width) {
    V s0{}, s1{}, v0{}, v1{};
    for (int64_t k = 0; k < width && !p.rms_norm; k += COLUMNS) {
      s0 += load<float, LANES>(x + k);
      s1 += load<float, LANES>(x + k + LANES);
    }
    const float mean = sum<float, LANES>(s0 + s1) / (float)width;
    for (int64_t k = 0; k < width; k += COLUMNS) {
      const V d0 = load<float, LANES>(x + k) - mean, d1 = load<float, LANES>(x + k + LANES) - mean;
      v0 += d0 * d0;
      v1 += d1 * d1;
    }
    const float variance = sum<float, LANES>(v0 + v1) / (float)width;
    const float inverse = 1 / __builtin_sqrtf(variance + (float)p.epsilon[norm]);
    for (int64_t k = 0; k < width; k += LANES) {
      V d = (load<float, LANES>(x + k) - mean) * inverse;
      if (weight) d *= load<float, LANES>(weight + k);
      if (bias) d += load<float, LANES>(bias + k);
      store<float, LANES>(y + k, d);
    }
  }
}

// ----------------------------------------------------------------------------------------------------- attention

int64_t attention_floats(int64_t keys, int64_t width) { return (width + QUERIES) * (divide_up(keys, COLUMNS) * COLUMNS); }

// Keys [keys, width] as panels [width][COLUMNS] of logits' columns; zeros behind the last key.
void turn_keys(const float *key, int64_t keys, int64_t width, float *turned) {
  for (int64_t c = 0; c < divide_up(keys, COLUMNS) * COLUMNS; c += 8)
    for (int64_t d = 0; d < width; d += 8) {
      vec<float, 8> x[8];
      UNROLL for (int i = 0; i < 8; i++) x[i] = c + i < keys ? load<float, 8>(key + (c + i) * width + d) : vec<float, 8>{};
      transpose<float>(x);
      float *to = turned + c / COLUMNS * COLUMNS * width + d * COLUMNS + c % COLUMNS;
      UNROLL for (int i = 0; i < 8; i++) store<float, 8>(to + i * COLUMNS, x[i]);
    }
}

// Turns a row of logits into exp(scale (logit - the largest)) and returns the reciprocal of their sum.
NOINLINE float weigh(float *row, int64_t keys, float scale) {
  const int64_t padded = divide_up(keys, COLUMNS) * COLUMNS;
  for (int64_t c = keys; c < padded; c++) row[c] = -infinity<float>();
  V m0 = load<float, LANES>(row), m1 = load<float, LANES>(row + LANES);
  for (int64_t c = COLUMNS; c < padded; c += COLUMNS) {
    m0 = larger(load<float, LANES>(row + c), m0);
    m1 = larger(load<float, LANES>(row + c + LANES), m1);
  }
  m0 = larger(m1, m0);
  float largest = m0[0];
  for (int k = 1; k < LANES; k++) largest = m0[k] > largest ? m0[k] : largest;
  const float factor = scale * LOG2_E<float>, shift = largest * factor;
  V s0{}, s1{};
  for (int64_t c = 0; c < padded; c += COLUMNS) {
    const V e0 = exp2_below<float, LANES>(load<float, LANES>(row + c) * factor - shift);
    const V e1 = exp2_below<float, LANES>(load<float, LANES>(row + c + LANES) * factor - shift);
    store<float, LANES>(row + c, e0);
    store<float, LANES>(row + c + LANES, e1);
    s0 += e0;
    s1 += e1;
  }
  return 1 / sum<float, LANES>(s0 + s1);
}

// Adds what is left of weighted sums, of keys behind the first `common`, and scales them: row r has `seen + r` keys, at
// most `keys`. A sum goes on in the order in which it began, so its bits do not depend on which rows a tile had.
void add_last_keys(const float *weights, int64_t row, const float *value, int64_t width, int64_t common, int64_t seen,
                   int64_t keys, int64_t rows, const float *inverse, float *out, int64_t out_row) {
  for (int64_t r = 0; r < rows; r++, weights += row, out += out_row) {
    V c0 = load<float, LANES>(out), c1 = load<float, LANES>(out + LANES);
    for (int64_t k = common; k < least(keys, seen + r); k++) {
      V x;
      BROADCAST(x, weights[k]);
      const V v0 = load<float, LANES>(value + k * width), v1 = load<float, LANES>(value + k * width + LANES);
      ADD_PRODUCT(c0, x, v0);
      ADD_PRODUCT(c1, x, v1);
    }
    store<float, LANES>(out, c0 * inverse[r]);
    store<float, LANES>(out + LANES, c1 * inverse[r]);
  }
}

// Attention of one head of a document: query [rows, width], key and value [keys, width] -> out [rows, out_row]. Row i
// attends to all keys, or, if this is causal, to the first i + 1.
void attend(const float *query, const float *key, const float *value, int64_t rows, int64_t keys, int64_t width,
            bool causal, float scale, float *out, int64_t out_row, float *scratch) {
  const int64_t padded = divide_up(keys, COLUMNS) * COLUMNS;
  const auto seen = [&](int64_t row) { return causal ? least(keys, row + 1) : keys; };
  float *turned = scratch, *logits = scratch + width * padded, inverse[QUERIES];
  turn_keys(key, keys, width, turned);
  for (int64_t first = 0, count; first < rows; first += count) {
    int64_t sizes[4], tiles = 0;
    for (count = 0; tiles < 4 && first + count < rows; tiles++) count += sizes[tiles] = panels::next_rows(rows - first - count);
    for (int64_t c = 0; c < seen(first + count - 1); c += COLUMNS) {
      Tile t{query + first * width, width, turned + c * width, COLUMNS, width, logits + c, padded, nullptr, {}};
      for (int64_t i = 0; i < tiles; t.a += sizes[i] * width, t.c += sizes[i] * padded, i++) panels::tile_of<0>(sizes[i], t);
    }
    for (int64_t r = 0; r < count; r++) inverse[r] = weigh(logits + r * padded, seen(first + r), scale);
    for (int64_t d = 0; d < width; d += COLUMNS) {
      Tile t{logits, padded, value + d, width, keys, out + first * out_row + d, out_row, nullptr, {}};
      for (int64_t i = 0, r = 0; i < tiles; t.a += sizes[i] * padded, t.c += sizes[i] * out_row, r += sizes[i], i++) {
        if (causal) t.depth = seen(first + r);
        else t.finish.scale = inverse + r;
        panels::tile_of<0>(sizes[i], t);
        if (causal)
          add_last_keys(t.a, padded, value + d, width, t.depth, first + r + 1, keys, sizes[i], inverse + r, t.c, out_row);
      }
    }
  }
}

// Turns the pairs (k, k + width / 2) of rows [rows, width] by the angles of each.
void turn(float *x, const float *cos, const float *sin, int64_t rows, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t r = 0; r < rows; r++, x += width, cos += width, sin += width)
    for (int64_t k = 0; k < half; k += LANES) {
      const V a = load<float, LANES>(x + k), b = load<float, LANES>(x + half + k);
      store<float, LANES>(x + k, a * load<float, LANES>(cos + k) - b * load<float, LANES>(sin + k));
      store<float, LANES>(x + half + k, b * load<float, LANES>(cos + half + k) + a * load<float, LANES>(sin + half + k));
    }
}

// ------------------------------------------------------------------------------------------------------ the layer

// Rows in blocks of about the same size, as many for each thread; all but the last are multiples of STEP.
struct Blocks {
  int64_t rows, size, count;
  Blocks(int64_t rows, int64_t members) : rows(rows) {
    count = divide_up(divide_up(rows, BLOCK), members) * members;
    size = divide_up(divide_up(rows, count), STEP) * STEP;
    count = divide_up(rows, size);
  }
  int64_t first(int64_t i) const { return i * size; }
  int64_t length(int64_t i) const { return least(size, rows - i * size); }
};

struct Buffers {
  float *heads;    // queries, keys and values [heads][rows][width of a head]
  float *message;  // [rows, all heads' width]; null: they lie where the states of the rows will be
  float *few;      // [rows, 2 width + 2 hidden], for few rows
  float *scratch;  // for each thread
  int64_t scratch_floats;
};

// What becomes of the output map of attention and of the feed-forward network: bias and residual.
Finish residual(const float *bias, const float *x, int64_t width) { return {false, bias, 0, x, width, nullptr}; }
Finish activated(const EncoderLayer &p) { return {false, p.bias[UP], p.gated ? 0 : p.activation, nullptr, 0, nullptr}; }
Finish gating(const EncoderLayer &p, const float *hidden, int64_t row) {
  return {false, p.bias[GATE], p.activation, nullptr, 0, nullptr, hidden, row};
}

// Queries, keys and values of rows [r, r + n) of a group, panels [p0, p1) of the three maps.
void project(const EncoderLayer &p, const float *x, const Buffers &b, int64_t group_rows, int64_t r, int64_t n, int64_t p0, int64_t p1) {
  const int64_t D = p.head_width;
  float *to = b.heads + r * D;
  for (int m = QUERY; m < OUT; m++) {
    const Weight weight = p.map(m);
    const int64_t all = weight.width / COLUMNS, from = p0 > 0 ? p0 : 0, end = least(p1, all);
    const Target target{to, D, D / COLUMNS, group_rows * D};
    if (from < end) panels::product(x, p.width, weight, n, from, end, target, {false, p.bias[m], 0, nullptr, 0, nullptr});
    p0 -= all, p1 -= all, to += weight.width * group_rows;
  }
}

// Everything behind attention, for n rows: message, x -> y.
void update(const EncoderLayer &p, const float *message, const float *x, float *y, int64_t n, float *scratch) {
  const int64_t H = p.width, all = H / COLUMNS, depth = p.depth();
  float *z = scratch, *read = p.pre_norm ? z + n * H : z, *hidden = read + n * H, *gate = hidden + n * depth;
  panels::product(message, p.inner(), p.map(OUT), n, 0, all, {z, H}, residual(p.bias[OUT], x, H));
  layer_norm(z, read, n, p, p.pre_norm);
  const Weight up = p.map(UP), down = p.map(DOWN), gates = p.map(GATE);
  for (int64_t f = 0; f < p.hidden; f += depth) {  // a slice of hidden columns
    const int64_t first = f / COLUMNS, end = (f + depth) / COLUMNS;
    panels::product(read, H, up, n, first, end, {hidden - f, depth}, activated(p));
    if (p.gated) panels::product(read, H, gates, n, first, end, {gate - f, depth}, gating(p, hidden - f, depth));
    Finish finish{};
    if (f + depth == p.hidden) finish = residual(p.bias[DOWN], z, H);
    finish.more = f > 0;
    panels::slice(p.gated ? gate : hidden, depth, down, f, n, 0, all, {y, H}, finish);
  }
  if (!p.pre_norm) layer_norm(y, y, n, p, 1);
}

// The same for all rows of a group, with the columns shared by threads.
void update_few(const EncoderLayer &p, const Crew &crew, const float *message, const float *x, float *y, int64_t n, float *few) {
  const int64_t H = p.width, members = crew.count;
  float *z = few, *read = p.pre_norm ? z + n * H : z, *hidden = z + 2 * n * H, *gate = hidden + n * p.hidden;
  const auto columns = [&](const float *a, int m, float *to, const Finish &finish) {
    const Weight weight = p.map(m);
    const int64_t all = weight.width / COLUMNS;
    share(crew, members, [&](int64_t s, int64_t) {
      panels::product(a, weight.depth, weight, n, all * s / members, all * (s + 1) / members, {to, weight.width}, finish);
    });
  };
  columns(message, OUT, z, residual(p.bias[OUT], x, H));
  layer_norm(z, read, n, p, p.pre_norm);
  columns(read, UP, hidden, activated(p));
  if (p.gated) columns(read, GATE, gate, gating(p, hidden, p.hidden));
  columns(p.gated ? gate : hidden, DOWN, y, residual(p.bias[DOWN], z, H));
  if (!p.pre_norm) layer_norm(y, y, n, p, 1);
}

// The documents [d0, d1).
void run_group(const EncoderLayer &p, const Crew &crew, const Buffers &b, int64_t d0, int64_t d1) {
  const int64_t H = p.width, D = p.head_width, I = p.inner(), all = p.all_heads() * D / COLUMNS;
  const int64_t first = p.documents[d0].first, rows = p.documents[d1 - 1].first + p.documents[d1 - 1].rows - first;
  const float *x = p.x + first * H;
  float *y = p.y + first * H, *message = b.message ? b.message : y;
  const bool few = crew.count > 1 && rows < FEW * crew.count;
  const Blocks blocks(rows, few ? 1 : crew.count);
  const int64_t slices = few ? crew.count : 1;
  const float *read = x;
  if (few && p.pre_norm) layer_norm(x, b.few, rows, p, 0), read = b.few;
  share(crew, blocks.count * slices, [&](int64_t i, int64_t member) {
    const int64_t r = blocks.first(i / slices), n = blocks.length(i / slices), s = i % slices;
    const float *from = read + r * H;
    float *normed = b.scratch + member * b.scratch_floats;
    if (!few && p.pre_norm) layer_norm(from, normed, n, p, 0), from = normed;
    project(p, from, b, rows, r, n, all * s / slices, all * (s + 1) / slices);
  });
  if (p.cos)
    share(crew, p.heads + p.kv_heads, [&](int64_t h, int64_t) {
      turn(b.heads + h * rows * D, p.cos + first * D, p.sin + first * D, rows, D);
    });
  share(crew, (d1 - d0) * p.heads, [&](int64_t i, int64_t member) {
    const Document &document = p.documents[d0 + i / p.heads];
    const int64_t h = i % p.heads, shared = p.heads / p.kv_heads, r = document.first - first;
    const float *query = b.heads + (h * rows + r) * D, *key = b.heads + ((p.heads + h / shared) * rows + r) * D;
    const float *value = key + p.kv_heads * rows * D;
    float *out = message + r * I + h * D;
    if (p.keys && h % shared == 0) {
      const int64_t to = (document.first * p.kv_heads + h / shared * document.rows) * D;
      __builtin_memcpy(p.keys + to, key, document.rows * D * sizeof(float));
      __builtin_memcpy(p.values + to, value, document.rows * D * sizeof(float));
    }
    const int64_t before = p.causal ? document.first_key : 0, skipped = document.first_key * D;
    for (int64_t row = 0; row < before; row++)  // which attend to nothing
      __builtin_memset(out + row * I, 0, D * sizeof(float));
    attend(query + before * D, key + skipped, value + skipped, document.rows - before, document.keys, D, p.causal,
           (float)p.scale, out + before * I, I, b.scratch + member * b.scratch_floats);
  });
  if (few) return update_few(p, crew, message, x, y, rows, b.few);
  share(crew, blocks.count, [&](int64_t i, int64_t member) {
    const int64_t r = blocks.first(i);
    update(p, message + r * I, x + r * H, y + r * H, blocks.length(i), b.scratch + member * b.scratch_floats);
  });
}

// The first document behind d0 that is not in its group.
int64_t end_of_group(const EncoderLayer &p, const Crew &crew, int64_t d0) {
  const int64_t most = p.documents[d0].first + GROUP * crew.count;
  int64_t d1 = d0 + 1;
  while (d1 < p.count && p.documents[d1].first + p.documents[d1].rows <= most) d1++;
  return d1;
}

bool run(const EncoderLayer &p, const Crew &crew) {
  const int64_t H = p.width, rows = least(p.rows(), 1 << 30);
  int64_t longest = 0, keys = 0;
  for (int64_t d = 0; d < p.count; d++) {
    if (p.documents[d].rows > longest) longest = p.documents[d].rows;
    if (p.documents[d].keys > keys) keys = p.documents[d].keys;
  }
  const int64_t limit = GROUP * crew.count, group = least(rows, longest > limit ? longest : limit);
  const int64_t few = crew.count > 1 ? FEW * crew.count * (2 * H + 2 * p.hidden) : 0;
  const int64_t in_heads = p.all_heads() * p.head_width, apart = p.inner() == H ? 0 : p.inner();
  const int64_t attention = attention_floats(keys, p.head_width), block = (BLOCK + STEP) * (2 * H + 2 * p.depth());
  Buffers b;
  b.scratch_floats = divide_up(attention > block ? attention : block, 16) * 16;
  Memory memory((group * (in_heads + apart) + few + crew.count * b.scratch_floats) * (int64_t)sizeof(float), 4);
  if (!memory) return false;
  b.heads = memory.take<float>(group * in_heads);
  b.message = apart ? memory.take<float>(group * apart) : nullptr;
  b.few = memory.take<float>(few);
  b.scratch = memory.take<float>(crew.count * b.scratch_floats);
  for (int64_t d0 = 0, d1; d0 < p.count; d0 = d1) {
    d1 = end_of_group(p, crew, d0);
    run_group(p, crew, b, d0, d1);
  }
  return true;
}

}  // namespace
}  // namespace encoder_layer

extern "C" int64_t encoder_layer_size() { return sizeof(encoder_layer::EncoderLayer); }

// The number of floats of the packed weights; 0 if there is no kernel for these sizes.
extern "C" int64_t encoder_layer_numbers(const encoder_layer::EncoderLayer *p) {
  const bool fits = p->kv_heads > 0 && p->heads % p->kv_heads == 0 && p->head_width > 0;
  return fits && p->head_width % encoder_layer::COLUMNS == 0 && p->depth() ? p->numbers(p->maps()) : 0;
}

extern "C" void encoder_layer_pack(const encoder_layer::EncoderLayer *p, void *team, int64_t forks, int64_t threads) {
#if defined(__linux__)
  // The weights are read in whole from memory: with large pages, fewer addresses are looked up.
  constexpr int64_t PAGE = 4096;
  const int64_t first = divide_up((int64_t)p->packed, PAGE) * PAGE, end = (int64_t)(p->packed + p->numbers(p->maps())) / PAGE * PAGE;
  if (end > first) madvise((void *)first, end - first, MADV_HUGEPAGE);
#endif
  encoder_layer::pack(*p, {team, forks, threads});
}

// 0: done. 1: there was no memory. 2: the packed weights are not the weights.
extern "C" int64_t encoder_layer_run(const encoder_layer::EncoderLayer *p, void *team, int64_t forks, int64_t threads) {
  if (!encoder_layer::is_current(*p)) return 2;
  return encoder_layer::run(*p, {team, forks, team ? threads : 1}) ? 0 : 1;
}
