// A transformer layer in one call: attention within documents, residuals, norms and the feed-forward network.
//
//     z = norm_1(x + attend(x)),       y = norm_2(z + ffn(z))              post-norm
//     z = x + attend(norm_1(x)),       y = z + ffn(norm_2(z))              pre-norm
//     attend(x)_i = W_o [softmax_j(scale q_i k_j) v_j] + b_o,    ffn(z) = W_2 act(W_1 z + b_1) + b_2
//
// or, gated, ffn(z) = W_2 (act(W_3 z + b_3) (W_1 z + b_1)) + b_2. A node attends to its document, or, if this is causal,
// to the nodes up to itself. Queries and keys may turn by angles, and several heads of queries share a head of keys.
//
// Weights are read where they lie, in each call (maps.h). Documents pass a layer in groups, so that queries, keys and
// values of a group stay in the cache: products write them as [head][row][width of a head], which attention reads. A
// block of rows then passes the output map, the norms and the feed-forward network without leaving L2.
// A result depends on its document alone: neither on the others of a batch nor on the number of threads, to the bit. In
// a causal document it depends on the nodes up to its own alone.
#include "maps.h"
#include "threads.h"

namespace encoder_layer {
namespace {

using maps::Destination;
using maps::Rows;
using maps::Weight;
using panels::COLUMNS;
using panels::Finish;
using panels::LANES;
using panels::Target;
using panels::Tile;
using panels::V;
using threads::Crew;
using threads::share;

constexpr int64_t BLOCK = 96;   // rows that pass through the maps of a layer together: whole panels of rows
constexpr int64_t GROUP = 512;  // rows of documents, for each thread, that pass a layer together
constexpr int64_t FEW = COLUMNS;  // rows a thread, below which threads share outputs instead of rows
constexpr int64_t QUERIES = 4 * STEP;
const Crew ALONE{nullptr, 0, 1};

struct Document {  // `rows` rows from `first` on attend to `keys` of them, from the row `first_key` of the document on
  int64_t first, rows, first_key, keys;
};

enum { QUERY, KEY, VALUE, OUT, UP, DOWN, GATE, MAPS };

struct EncoderLayer {  // mpnn/kernels/layers/encoder_layer.py has the same fields in the same order
  int64_t width, heads, kv_heads, head_width, hidden, pre_norm, rms_norm, gated, activation;
  double scale, epsilon[2];
  const float *weight[MAPS];           // [out, in]
  int64_t row[MAPS], column[MAPS];     // how far numbers of the next output and of the next input are; one is 1
  const float *bias[MAPS];             // each may be null
  const float *norm_weight[2], *norm_bias[2];
  const float *x;
  float *y;                // [rows, width]
  const float *cos, *sin;  // of the angles, [rows, head_width], or null
  float *keys, *values;    // where each document's are written, [kv_heads, rows, head_width]; or null
  const Document *documents;
  int64_t count, causal;

  int64_t inner() const { return heads * head_width; }
  int64_t all_heads() const { return heads + 2 * kv_heads; }
  int64_t slice() const { return panels::slice_of(width, hidden, inner()); }
  int64_t rows() const { return count ? documents[count - 1].first + documents[count - 1].rows : 0; }
  int64_t maps() const { return gated ? MAPS : GATE; }
  int64_t map_width(int m) const {
    return m == QUERY ? inner() : m < OUT ? kv_heads * head_width : m == UP || m == GATE ? hidden : width;
  }
  int64_t map_depth(int m) const { return m == OUT ? inner() : m == DOWN ? hidden : width; }
  Weight map(int m) const { return {weight[m], row[m], column[m], map_width(m), map_depth(m), slice()}; }
};

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
  const float factor = scale * LOG2_E<float>;
  const float shift = largest > -infinity<float>() ? largest : 0;  // -inf - -inf would be NaN
  V s0{}, s1{};
  for (int64_t c = 0; c < padded; c += COLUMNS) {
    const V e0 = exp2_below<float, LANES>((load<float, LANES>(row + c) - shift) * factor);
    const V e1 = exp2_below<float, LANES>((load<float, LANES>(row + c + LANES) - shift) * factor);
    store<float, LANES>(row + c, e0);
    store<float, LANES>(row + c + LANES, e1);
    s0 += e0;
    s1 += e1;
  }
  const float total = sum<float, LANES>(s0 + s1);
  return total > 0 ? 1 / total : 0;  // a row of -inf has no weights, as for every backend
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
  for (int64_t c = 0; c < keys; c += COLUMNS)
    maps::turn_panel<2>(key + c * width, width, keys - c, width, turned + c * width);
  for (int64_t first = 0, count; first < rows; first += count) {
    int64_t sizes[4], tiles = 0;
    for (count = 0; tiles < 4 && first + count < rows; tiles++) count += sizes[tiles] = panels::next_rows(rows - first - count);
    for (int64_t c = 0; c < seen(first + count - 1); c += COLUMNS) {
      Tile t{query + first * width, width, turned + c * width, COLUMNS, width, logits + c, padded, {}};
      for (int64_t i = 0; i < tiles; t.a += sizes[i] * width, t.c += sizes[i] * padded, i++) panels::tile_of<false>(sizes[i], t);
    }
    for (int64_t r = 0; r < count; r++) inverse[r] = weigh(logits + r * padded, seen(first + r), scale);
    for (int64_t d = 0; d < width; d += COLUMNS) {
      Tile t{logits, padded, value + d, width, keys, out + first * out_row + d, out_row, {}};
      for (int64_t i = 0, r = 0; i < tiles; t.a += sizes[i] * padded, t.c += sizes[i] * out_row, r += sizes[i], i++) {
        if (causal) t.depth = seen(first + r);
        else t.finish.scale = inverse + r;
        panels::tile_of<false>(sizes[i], t);
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

// Rows in blocks of about the same size, as many for each thread; all but the last are whole panels.
struct Blocks {
  int64_t rows, size, count;
  Blocks(int64_t rows, int64_t members) : rows(rows) {
    count = divide_up(divide_up(rows, BLOCK), members) * members;
    size = divide_up(divide_up(rows, count), COLUMNS) * COLUMNS;
    count = divide_up(rows, size);
  }
  int64_t first(int64_t i) const { return i * size; }
  int64_t length(int64_t i) const { return least(size, rows - i * size); }
};

struct Buffers {
  float *heads;    // queries, keys and values [heads][rows][width of a head]
  float *message;  // [rows, all heads' width]; null: they lie where the states of the rows will be
  float *few;      // the intermediate results of `update` for few rows, which all threads share
  float *scratch;  // the same for a block of rows, for each thread; or those of attention
  int64_t scratch_floats;
};

// The number of floats that `project` and `update` need for so many rows.
int64_t update_floats(const EncoderLayer &p, int64_t rows) {
  const int64_t widest = p.hidden > p.inner() ? p.hidden : p.inner(), read = p.width > widest ? p.width : widest;
  return maps::padded(rows) * (2 * p.width + (p.gated ? 2 : 1) * p.hidden + read);
}

// What becomes of the output map of attention and of the feed-forward network: bias and residual.
Finish residual(const float *bias, const float *x, int64_t width) { return {false, bias, 0, x, width, nullptr}; }
Finish activated(const EncoderLayer &p) { return {false, p.bias[UP], p.gated ? 0 : p.activation, nullptr, 0, nullptr}; }
Finish gating(const EncoderLayer &p, const float *hidden, int64_t row) {
  return {false, p.bias[GATE], p.activation, nullptr, 0, nullptr, hidden, row};
}

// Rows as maps [first, end) read them; `turned` is where they are turned if one of the maps needs this.
Rows rows_for(const EncoderLayer &p, int first, int end, const float *x, int64_t depth, int64_t count, float *turned) {
  bool turns = false;
  for (int m = first; m < end; m++) turns |= p.map(m).by_output();
  if (turns) maps::turn(x, depth, count, depth, turned);
  return {x, depth, count, depth, turned};
}

// Calls product(n0, n1) for ranges of `outputs`, one for each thread.
template <class F> void share_outputs(const Crew &crew, int64_t outputs, F product) {
  const int64_t all = outputs / COLUMNS, parts = crew.count;
  share(crew, parts, [&](int64_t i, int64_t) {
    const int64_t n0 = all * i / parts * COLUMNS, n1 = all * (i + 1) / parts * COLUMNS;
    if (n0 < n1) product(n0, n1);
  });
}

// Queries, keys and values of rows [r, r + n) of a group.
void project(const EncoderLayer &p, const Crew &crew, const float *x, const Buffers &b, int64_t group_rows, int64_t r, int64_t n, float *scratch) {
  const int64_t H = p.width, D = p.head_width;
  float *normed = scratch, *turned = scratch + n * H;
  if (p.pre_norm) layer_norm(x, normed, n, p, 0), x = normed;
  const Rows rows = rows_for(p, QUERY, OUT, x, H, n, turned);
  share_outputs(crew, p.all_heads() * D, [&](int64_t n0, int64_t n1) {
    float *to = b.heads + r * D;
    for (int m = QUERY; m < OUT; m++) {
      const Weight weight = p.map(m);
      const int64_t from = n0 > 0 ? n0 : 0, end = least(n1, weight.width);
      const Target target{to, D, D / COLUMNS, group_rows * D};
      if (from < end) maps::product(rows, weight, from, end, {target, nullptr}, {false, p.bias[m], 0, nullptr, 0, nullptr});
      n0 -= weight.width, n1 -= weight.width, to += weight.width * group_rows;
    }
  });
}

// Everything behind attention, for n rows: message, x -> y.
void update(const EncoderLayer &p, const Crew &crew, const float *message, const float *x, float *y, int64_t n, float *scratch) {
  const int64_t H = p.width, F = p.hidden, room = maps::padded(n);
  float *z = scratch, *read = p.pre_norm ? z + n * H : z, *hidden = scratch + 2 * room * H, *turned = hidden + room * F;
  float *gate = turned;
  if (p.gated) turned += room * F;
  const auto product = [&](const Rows &rows, int m, const Destination &to, const Finish &finish) {
    const Weight weight = p.map(m);
    share_outputs(crew, weight.width, [&](int64_t n0, int64_t n1) { maps::product(rows, weight, n0, n1, to, finish); });
  };
  product(rows_for(p, OUT, OUT + 1, message, p.inner(), n, turned), OUT, {{z, H}, nullptr}, residual(p.bias[OUT], x, H));
  layer_norm(z, read, n, p, p.pre_norm);
  // Hidden columns that are made of turned rows and read turned need not be turned in between.
  bool stay = n > maps::FEW_ROWS && p.map(UP).by_output() && p.map(DOWN).by_output();
  if (p.gated) stay &= p.map(GATE).by_output();
  const auto to = [&](float *columns) { return Destination{{columns, F}, stay ? columns : nullptr}; };
  const Rows rows = rows_for(p, UP, UP + 1, read, H, n, turned);
  product(rows, UP, to(hidden), activated(p));
  if (p.gated) {
    const bool is_turned = p.map(UP).by_output();
    product(is_turned ? rows : rows_for(p, GATE, GATE + 1, read, H, n, turned), GATE, to(gate), gating(p, hidden, F));
  }
  const float *result = p.gated ? gate : hidden;
  const Rows down = stay ? Rows{nullptr, 0, n, F, result} : rows_for(p, DOWN, DOWN + 1, result, F, n, turned);
  product(down, DOWN, {{y, H}, nullptr}, residual(p.bias[DOWN], z, H));
  if (!p.pre_norm) layer_norm(y, y, n, p, 1);
}

// The documents [d0, d1).
void run_group(const EncoderLayer &p, const Crew &crew, const Buffers &b, int64_t d0, int64_t d1) {
  const int64_t H = p.width, D = p.head_width, I = p.inner();
  const int64_t first = p.documents[d0].first, rows = p.documents[d1 - 1].first + p.documents[d1 - 1].rows - first;
  const float *x = p.x + first * H;
  float *y = p.y + first * H, *message = b.message ? b.message : y;
  const bool few = crew.count > 1 && rows < FEW * crew.count;
  const Blocks blocks(rows, crew.count);
  if (few) project(p, crew, x, b, rows, 0, rows, b.few);
  else
    share(crew, blocks.count, [&](int64_t i, int64_t member) {
      const int64_t r = blocks.first(i);
      project(p, ALONE, x + r * H, b, rows, r, blocks.length(i), b.scratch + member * b.scratch_floats);
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
  if (few) return update(p, crew, message, x, y, rows, b.few);
  share(crew, blocks.count, [&](int64_t i, int64_t member) {
    const int64_t r = blocks.first(i);
    update(p, ALONE, message + r * I, x + r * H, y + r * H, blocks.length(i), b.scratch + member * b.scratch_floats);
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
  const int64_t few = crew.count > 1 ? update_floats(p, least(rows, FEW * crew.count)) : 0;
  const int64_t in_heads = p.all_heads() * p.head_width, apart = p.inner() == H ? 0 : p.inner();
  const int64_t attention = attention_floats(keys, p.head_width), block = update_floats(p, least(rows, BLOCK));
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

// Whether there is a kernel for these sizes.
extern "C" int64_t encoder_layer_fits(const encoder_layer::EncoderLayer *p) {
  const bool fits = p->kv_heads > 0 && p->heads % p->kv_heads == 0 && p->head_width > 0;
  return fits && p->head_width % encoder_layer::COLUMNS == 0 && p->slice();
}

// Returns whether there was memory for intermediate results.
extern "C" int64_t encoder_layer_run(const encoder_layer::EncoderLayer *p, void *team, int64_t forks, int64_t threads) {
  return encoder_layer::run(*p, {team, forks, team ? threads : 1});
}
