// A transformer layer in one call: attention within documents, residuals, norms and the feed-forward network.
//
//     z = norm_1(x + attend(x)),       y = norm_2(z + ffn(z))              post-norm
//     z = x + attend(norm_1(x)),       y = z + ffn(norm_2(z))              pre-norm
//     attend(x)_i = W_o [softmax_j(scale q_i k_j) v_j] + b_o,    ffn(z) = W_2 act(W_1 z + b_1) + b_2
//
// Weights are packed once (panels.h). Documents pass a layer in groups, so that queries, keys and values of a group stay
// in the cache: one product writes them as [head][row][width of a head], which attention reads. A block of rows then
// passes the output map, the norms and the feed-forward network, in slices of its hidden columns, without leaving L2.
// A result depends on its document alone: neither on the others of a batch nor on the number of threads, to the bit.
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

enum { QUERY, KEY, VALUE, OUT, UP, DOWN, MAPS };

struct EncoderLayer {  // mpnn/kernels/encoder_layer.py has the same fields in the same order
  int64_t width, heads, hidden, pre_norm, activation;
  double scale, epsilon[2];
  const float *weight[MAPS];  // as torch has them, [out, in]
  const float *bias[MAPS];    // each may be null
  const float *norm_weight[2], *norm_bias[2];
  float *packed;
  int64_t calls;  // decides which numbers are compared
  const float *x;
  float *y;  // [rows, width]
  const Document *documents;
  int64_t count;

  int64_t depth() const { return panels::depth_of(width, hidden); }
  int64_t rows() const { return count ? documents[count - 1].first + documents[count - 1].rows : 0; }
  int64_t head_width() const { return width / heads; }
  Weight qkv() const { return {packed, 3 * width, width, depth()}; }
  Weight out() const { return {packed + 3 * width * width, width, width, depth()}; }
  Weight up() const { return {packed + 4 * width * width, hidden, width, depth()}; }
  Weight down() const { return {packed + 4 * width * width + width * hidden, width, hidden, depth()}; }
  int64_t numbers() const { return 4 * width * width + 2 * width * hidden; }
  // The packed weight that holds map m, and its first column in it.
  Weight holder(int m, int64_t &first) const {
    first = m < OUT ? m * width : 0;
    return m < OUT ? qkv() : m == OUT ? out() : m == UP ? up() : down();
  }
  int64_t map_width(int m) const { return m == UP ? hidden : width; }
  int64_t map_depth(int m) const { return m == DOWN ? hidden : width; }
};

// ------------------------------------------------------------------------------------------------------- weights

void pack(const EncoderLayer &p, const Crew &crew) {
  for (int m = 0; m < MAPS; m++) {
    int64_t first;
    const Weight weight = p.holder(m, first);
    const int64_t depth = p.map_depth(m);
    share(crew, p.map_width(m) / COLUMNS, [&](int64_t panel, int64_t) {
      panels::pack(weight, p.weight[m] + panel * COLUMNS * depth, depth, first / COLUMNS + panel);
    });
  }
}

// Whether the packed weights are still the weights, by bits, as far as this call compares them. torch counts most changes
// of a tensor, but not those through `.data`. A call compares a number of every COLUMNS rows, so that a change of all
// numbers shows at once, and whole panels in proportion to its work; the next call compares others.
bool is_current(const EncoderLayer &p) {
  int64_t all = 0, number = 0;
  for (int m = 0; m < MAPS; m++) all += p.map_width(m) / COLUMNS;
  const int64_t whole = least(all, divide_up(all * p.rows(), ROWS_TO_COMPARE)), first_whole = p.calls * whole % all;
  for (int m = 0; m < MAPS; m++) {
    int64_t first;
    const Weight weight = p.holder(m, first);
    const int64_t depth = p.map_depth(m), k = p.calls * 61 % depth, in_panel = k % weight.panel_depth;
    for (int64_t panel = 0; panel < p.map_width(m) / COLUMNS; panel++, number++) {
      const float *from = p.weight[m] + panel * COLUMNS * depth;
      const int64_t packed = first / COLUMNS + panel, c = (p.calls + panel) % COLUMNS;
      const float *line = weight.panel(k - in_panel, packed) + in_panel * COLUMNS;
      if (__builtin_memcmp(from + c * depth + k, line + c, sizeof(float))) return false;
      const bool in_turn = (number >= first_whole ? number : number + all) < first_whole + whole;
      if (in_turn && !panels::is_packed(weight, from, depth, packed)) return false;
    }
  }
  return true;
}

// --------------------------------------------------------------------------------------------------------- norms

NOINLINE void layer_norm(const float *x, float *y, int64_t rows, const EncoderLayer &p, int norm) {
  const int64_t width = p.width;
  const float *weight = p.norm_weight[norm], *bias = p.norm_bias[norm];
  for (int64_t r = 0; r < rows; r++, x += width, y += width) {
    V s0{}, s1{}, v0{}, v1{};
    for (int64_t k = 0; k < width; k += COLUMNS) {
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

// Attention of one head of a document: query [rows, width], key and value [keys, width] -> out [rows, out_row].
void attend(const float *query, const float *key, const float *value, int64_t rows, int64_t keys, int64_t width,
            float scale, float *out, int64_t out_row, float *scratch) {
  const int64_t padded = divide_up(keys, COLUMNS) * COLUMNS;
  float *turned = scratch, *logits = scratch + width * padded, inverse[QUERIES];
  turn_keys(key, keys, width, turned);
  for (int64_t first = 0, count; first < rows; first += count) {
    int64_t sizes[4], tiles = 0;
    for (count = 0; tiles < 4 && first + count < rows; tiles++) count += sizes[tiles] = panels::next_rows(rows - first - count);
    for (int64_t c = 0; c < padded; c += COLUMNS) {
      Tile t{query + first * width, width, turned + c * width, COLUMNS, width, logits + c, padded, nullptr, {}};
      for (int64_t i = 0; i < tiles; t.a += sizes[i] * width, t.c += sizes[i] * padded, i++) panels::tile_of<0>(sizes[i], t);
    }
    for (int64_t r = 0; r < count; r++) inverse[r] = weigh(logits + r * padded, keys, scale);
    for (int64_t d = 0; d < width; d += COLUMNS) {
      Tile t{logits, padded, value + d, width, keys, out + first * out_row + d, out_row, nullptr, {}};
      t.finish.scale = inverse;
      for (int64_t i = 0; i < tiles; t.a += sizes[i] * padded, t.c += sizes[i] * out_row, t.finish.scale += sizes[i], i++)
        panels::tile_of<0>(sizes[i], t);
    }
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
  float *heads;    // queries, keys and values [3 heads][rows][width of a head]
  float *message;  // [rows, width]
  float *few;      // [rows, 2 width + hidden], for few rows
  float *scratch;  // for each thread
  int64_t scratch_floats;
};

// What becomes of the output map of attention and of the feed-forward network: bias and residual.
Finish residual(const float *bias, const float *x, int64_t width) { return {false, bias, 0, x, width, nullptr}; }
Finish activated(const EncoderLayer &p) { return {false, p.bias[UP], p.activation, nullptr, 0, nullptr}; }

// Queries, keys and values of rows [r, r + n) of a group, panels [p0, p1).
void project(const EncoderLayer &p, const float *x, const Buffers &b, int64_t group_rows, int64_t r, int64_t n, int64_t p0, int64_t p1) {
  const int64_t D = p.head_width(), of_map = p.width / COLUMNS;
  const Target target{b.heads + r * D, D, D / COLUMNS, group_rows * D};
  for (int64_t m = p0 / of_map; m * of_map < p1; m++) {
    const float *bias = p.bias[m] ? p.bias[m] - m * p.width : nullptr;  // columns count from the first of the queries
    const int64_t from = p0 > m * of_map ? p0 : m * of_map;
    panels::product(x, p.width, p.qkv(), n, from, least(p1, (m + 1) * of_map), target, {false, bias, 0, nullptr, 0, nullptr});
  }
}

// Everything behind attention, for n rows: message, x -> y.
void update(const EncoderLayer &p, const float *message, const float *x, float *y, int64_t n, float *scratch) {
  const int64_t H = p.width, all = H / COLUMNS, depth = p.depth();
  float *z = scratch, *read = p.pre_norm ? z + n * H : z, *hidden = read + n * H;
  panels::product(message, H, p.out(), n, 0, all, {z, H}, residual(p.bias[OUT], x, H));
  layer_norm(z, read, n, p, p.pre_norm);
  const Weight down = p.down();
  for (int64_t f = 0; f < p.hidden; f += depth) {  // a slice of hidden columns
    panels::product(read, H, p.up(), n, f / COLUMNS, (f + depth) / COLUMNS, {hidden - f, depth}, activated(p));
    Finish finish{};
    if (f + depth == p.hidden) finish = residual(p.bias[DOWN], z, H);
    finish.more = f > 0;
    panels::slice(hidden, depth, down, f, n, 0, all, {y, H}, finish);
  }
  if (!p.pre_norm) layer_norm(y, y, n, p, 1);
}

// The same for all rows of a group, with the columns shared by threads.
void update_few(const EncoderLayer &p, const Crew &crew, const float *message, const float *x, float *y, int64_t n, float *few) {
  const int64_t H = p.width, members = crew.count;
  float *z = few, *read = p.pre_norm ? z + n * H : z, *hidden = z + 2 * n * H;
  const auto columns = [&](const float *a, const Weight &weight, float *to, const Finish &finish) {
    const int64_t all = weight.width / COLUMNS;
    share(crew, members, [&](int64_t s, int64_t) {
      panels::product(a, weight.depth, weight, n, all * s / members, all * (s + 1) / members, {to, weight.width}, finish);
    });
  };
  columns(message, p.out(), z, residual(p.bias[OUT], x, H));
  layer_norm(z, read, n, p, p.pre_norm);
  columns(read, p.up(), hidden, activated(p));
  columns(hidden, p.down(), y, residual(p.bias[DOWN], z, H));
  if (!p.pre_norm) layer_norm(y, y, n, p, 1);
}

// The documents [d0, d1).
void run_group(const EncoderLayer &p, const Crew &crew, const Buffers &b, int64_t d0, int64_t d1) {
  const int64_t H = p.width, D = p.head_width(), all = 3 * H / COLUMNS;
  const int64_t first = p.documents[d0].first, rows = p.documents[d1 - 1].first + p.documents[d1 - 1].rows - first;
  const float *x = p.x + first * H;
  float *y = p.y + first * H;
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
  share(crew, (d1 - d0) * p.heads, [&](int64_t i, int64_t member) {
    const Document &document = p.documents[d0 + i / p.heads];
    const int64_t h = i % p.heads, r = document.first - first, keys = r + document.first_key;
    const auto head = [&](int m, int64_t row) { return b.heads + ((m * p.heads + h) * rows + row) * D; };
    attend(head(QUERY, r), head(KEY, keys), head(VALUE, keys), document.rows, document.keys, D, (float)p.scale,
           b.message + r * H + h * D, H, b.scratch + member * b.scratch_floats);
  });
  if (few) return update_few(p, crew, b.message, x, y, rows, b.few);
  share(crew, blocks.count, [&](int64_t i, int64_t member) {
    const int64_t r = blocks.first(i) * H;
    update(p, b.message + r, x + r, y + r, blocks.length(i), b.scratch + member * b.scratch_floats);
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
  const int64_t few = crew.count > 1 ? FEW * crew.count * (2 * H + p.hidden) : 0;
  const int64_t attention = attention_floats(keys, p.head_width()), block = (BLOCK + STEP) * (2 * H + p.depth());
  Buffers b;
  b.scratch_floats = divide_up(attention > block ? attention : block, 16) * 16;
  Memory memory((4 * group * H + few + crew.count * b.scratch_floats) * (int64_t)sizeof(float), 4);
  if (!memory) return false;
  b.heads = memory.take<float>(3 * group * H);
  b.message = memory.take<float>(group * H);
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
  const bool fits = p->heads > 0 && p->width % p->heads == 0 && p->head_width() % encoder_layer::COLUMNS == 0;
  return fits && p->depth() ? p->numbers() : 0;
}

extern "C" void encoder_layer_pack(const encoder_layer::EncoderLayer *p, void *team, int64_t forks, int64_t threads) {
#if defined(__linux__)
  // The weights are read in whole from memory: with large pages, fewer addresses are looked up.
  constexpr int64_t PAGE = 4096;
  const int64_t first = divide_up((int64_t)p->packed, PAGE) * PAGE, end = (int64_t)(p->packed + p->numbers()) / PAGE * PAGE;
  if (end > first) madvise((void *)first, end - first, MADV_HUGEPAGE);
#endif
  encoder_layer::pack(*p, {team, forks, threads});
}

// 0: done. 1: there was no memory. 2: the packed weights are not the weights.
extern "C" int64_t encoder_layer_run(const encoder_layer::EncoderLayer *p, void *team, int64_t forks, int64_t threads) {
  if (!encoder_layer::is_current(*p)) return 2;
  return encoder_layer::run(*p, {team, forks, team ? threads : 1}) ? 0 : 1;
}
