// One step of the package's decoder on a CPU: the next token of running sequences and pieces of prompts, through all
// layers, to logits; and the draw of the next tokens. Called through ctypes by kernel.py, which owns all memory.
//
// Every number is computed in an order that depends on its own row alone: products add up their terms one after the
// other, attention goes through a sequence in blocks of BLOCK positions. So the logits of a token are the same to the
// bit whatever else is in its step, however its prompt was cut into pieces and however many threads there are.
//
// Layouts:
// - A matrix [out, in] is packed into panels [out / PANEL][in][PANEL], the last one filled up with zeros. A product
//   reads a panel from front to back, once for up to ROWS tokens. In the panels of gate and up, one half of each is
//   gate and the other half up, so that whoever computes a panel has both.
// - Rows of intermediate results are as long as their panels, so that whole vectors are stored.
// - Keys and values of a token are at slot + layer * layer_stride + head * head_stride + position * head_dim, first the
//   heads of keys, then those of values.
//
// A small model's rows are shared out among threads, which then never wait for each other, except where tokens of one
// prompt may be on two of them. A larger one's panels are, with a barrier after each product.
//
// Names: T tokens of the step; a tile is a few tokens whose queries read the same keys.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16, VECTORS = 4;  // 24 sums, 4 of the panel and a token's number: 29 of 32 registers
#else
constexpr int LANES = 8, VECTORS = 2;  // 15 of 16
#endif
constexpr int ROWS = 6;
constexpr int PANEL = VECTORS * LANES, HALF = PANEL / 2;
constexpr int BLOCK = 64;
constexpr int TILE_QUERIES = 96;
constexpr int DRAW_BLOCK = 256;

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));  // anywhere in memory
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

struct Bfloat16 {
  uint16_t bits;
};

struct Layer {
  const float *attention_norm, *qkv_bias, *q_norm, *k_norm, *output_bias, *mlp_norm;  // biases and head norms may be null
  const void *qkv, *output, *gate_up, *down;                                          // panels
};

struct Model {
  int64_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, max_positions, bfloat16;
  double norm_eps;
  const float *embedding, *rotary, *final_norm;  // rotary: per position, cosines [head_dim], then signed sines
  const void *head;
  const Layer *layer;
};

struct Step {
  int64_t tokens, wanted, threads, by_rows, has_pieces;
  const int64_t *ids, *positions;                     // [tokens]
  float *const *slots;                                // [tokens]
  const int64_t *layer_strides, *head_strides;        // [tokens], in floats
  const int64_t *groups, *shared;                     // [tokens]: neighbours of one group >= 0 share that many positions
  const int64_t *wanted_tokens, *targets;             // [wanted], ascending tokens; the row of logits that each gets
  float *logits;                                      // [.., logits_stride]
  int64_t logits_stride;
  float *work;
};

struct Draw {
  int64_t rows, vocab, stride, threads;
  const float *logits, *temperatures;
  const uint8_t *greedy;
  const uint64_t *seeds, *counts;
  int64_t *tokens;
  float *logprobs;
};

// ---------------------------------------------------------------------------------------------------------- vectors

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline Vec load(const float *p) { return *(const Loose *)p; }
inline Vec load(const Bfloat16 *p) { return (Vec)(__builtin_convertvector(*(const Shorts *)p, Bits) << 16); }
inline void store(float *p, Vec v) { *(Loose *)p = v; }
inline Vec splat(float x) { return x - (Vec){}; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// Memory that is read soon: slots are scattered, and processors do not guess where the next one begins.
inline void fetch(const float *p, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(p + i, 0, 2);
}

inline float sum_of(Vec v) {
  float part[LANES];
  memcpy(part, &v, sizeof v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) part[i] += part[i + width];
  return part[0];
}

inline float largest_of(Vec v) {
  float most = v[0];
  for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
  return most;
}

// e^x to about 1e-7, by Cephes' polynomial; 0 below -87, and what it is at 88 above that. NaN stays NaN.
inline Vec exponential(Vec x) {
  const Vec most = splat(88.f), least = splat(-87.f), whole = splat(12582912.f);  // 1.5 * 2^23: adding it rounds
  Ints vanishes = x < least;
  x = x > most ? most : vanishes ? least : x;
  Vec n = (x * splat(1.44269504f) + whole) - whole;
  Vec r = x - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.f);
  Vec power = (Vec)((__builtin_convertvector(n, Ints) + 127) << 23);
  return vanishes ? (Vec){} : p * power;
}

inline void store(Bfloat16 *p, Vec v) {  // to the nearest, ties to even; a NaN stays one
  Bits bits = (Bits)v, nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  *(Shorts *)p = __builtin_convertvector(v != v ? bits >> 16 | 0x40 : nearest, Shorts);
}

inline float through_bfloat16(float x) {
  Bfloat16 one[LANES];
  store(one, splat(x));
  return load(one)[0];
}

// One stage of a transposition: trades the blocks beside the diagonal of 2 D x 2 D squares, in two rows D apart.
template <int D, std::size_t... LANE>
inline void trade(Vec &upper, Vec &lower, std::index_sequence<LANE...>) {
  Vec a = upper, b = lower;
  upper = __builtin_shufflevector(a, b, (LANE & D ? LANE - D + LANES : LANE)...);
  lower = __builtin_shufflevector(a, b, (LANE & D ? LANE + LANES : LANE + D)...);
}

template <int D>
inline __attribute__((always_inline)) void trade_all(Vec (&square)[LANES]) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++)
    if (!(i & D)) trade<D>(square[i], square[i + D], std::make_index_sequence<LANES>());
  if constexpr (D > 1) trade_all<D / 2>(square);
}

// to[c][r] = from[r][c]; rows up to a multiple of LANES are filled up with zeros.
template <typename W>
void transpose(const float *from, int64_t from_stride, int64_t rows, int64_t columns, W *to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; r += LANES)
    for (int64_t c = 0; c < columns; c += LANES) {
      const int64_t high = rows - r < LANES ? rows - r : LANES, wide = columns - c < LANES ? columns - c : LANES;
      Vec square[LANES] = {};
      if (high == LANES && wide == LANES)
        for (int i = 0; i < LANES; i++) square[i] = load(from + (r + i) * from_stride + c);
      else
        for (int64_t i = 0; i < high; i++) memcpy(&square[i], from + (r + i) * from_stride + c, wide * sizeof(float));
      trade_all<LANES / 2>(square);
      for (int64_t i = 0; i < wide; i++) store(to + (c + i) * to_stride + r, square[i]);
    }
}

// --------------------------------------------------------------------------------------------------------- products

// Calls f with the number m in [1, MOST] as a constant.
template <int MOST, typename F>
inline void with_constant(int64_t m, F f) {
  if constexpr (MOST > 0) {
    if (m == MOST)
      f(std::integral_constant<int, MOST>());
    else
      with_constant<MOST - 1>(m, f);
  }
}

// M rows of x times N vectors of columns; `done` gets each row's number and its N sums.
template <int M, int N, typename W, typename Done>
inline __attribute__((always_inline)) void micro(const float *x, int64_t x_stride, const W *w, int64_t w_stride, int64_t in,
                                                 Done done) {
  Vec sums[M][N] = {};
  for (int64_t i = 0; i < in; i++) {
    Vec column[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) column[n] = load(w + i * w_stride + n * LANES);
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      Vec number = splat(x[m * x_stride + i]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sums[m][n] += number * column[n];
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; m++) done(m, sums[m]);
}

struct Share {
  int64_t first, end;    // rows
  int64_t index, count;  // this share of their panels
};

// x [rows, in] times the transpose of a packed matrix; `done` gets (row, panel, sums).
template <typename W, typename Done>
void product(const Share &share, const float *x, int64_t x_stride, const void *panels, int64_t in, int64_t panel_count,
             Done done) {
  const int64_t rows = share.end - share.first, blocks = (rows + ROWS - 1) / ROWS, units = panel_count * blocks;
  const int64_t last = units * (share.index + 1) / share.count;
  for (int64_t unit = units * share.index / share.count; unit < last; unit++) {
    const int64_t panel = unit / blocks, block = unit % blocks;
    const int64_t row = share.first + rows * block / blocks, size = share.first + rows * (block + 1) / blocks - row;
    const W *w = (const W *)panels + panel * in * PANEL;
    with_constant<ROWS>(size, [&](auto m) {
      micro<m.value, VECTORS>(x + row * x_stride, x_stride, w, PANEL, in,
                              [&](int64_t each, const Vec *sums) { done(row + each, panel, sums); });
    });
  }
}

// ----------------------------------------------------------------------------------------------------- rows of tokens

inline void normalise(const float *x, const float *weight, float *y, int64_t size, float eps) {
  float squares = 0.f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < size; i++) squares += x[i] * x[i];
  const float scale = 1.f / std::sqrt(squares / (float)size + eps);
#pragma omp simd
  for (int64_t i = 0; i < size; i++) y[i] = x[i] * scale * weight[i];
}

inline void rotate(float *x, const float *cosines, const float *sines, int64_t size) {
  const int64_t half = size / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosines[i] + b * sines[i];
    x[i + half] = b * cosines[i + half] + a * sines[i + half];
  }
}

// The rows of a step's intermediate results, and the scratch of each thread.
struct Sizes {
  int64_t hidden, qkv, mixed, gated, tile_tokens, queries, head, scratch, row;

  explicit Sizes(const Model &m) {
    const int64_t group = m.heads / m.kv_heads;
    hidden = padded(m.hidden, PANEL);
    qkv = padded((m.heads + 2 * m.kv_heads) * m.head_dim, PANEL);
    mixed = m.heads * m.head_dim;
    gated = padded(m.intermediate, HALF);
    tile_tokens = group < TILE_QUERIES ? TILE_QUERIES / group : 1;
    queries = tile_tokens * group;
    head = padded(m.head_dim, LANES);
    scratch = padded(queries * (m.head_dim + head + BLOCK + 2) + BLOCK * (m.head_dim + head), LANES);
    row = 3 * hidden + qkv + mixed + gated;
  }

  int64_t work(int64_t tokens, int64_t threads) const { return tokens * row + threads * scratch; }
};

// -------------------------------------------------------------------------------------------------------- attention

struct Tile {
  int64_t first, count;  // tokens
  int64_t together;      // positions that all of them read in the slot of the first
  int64_t row;           // where the results of the first go; those of the others follow
};

// Tokens from `first` to `end`, in tiles: neighbours of one prompt, neighbours that share a prefix, or single tokens.
// The result of a token goes to the row that is `shift` after its number.
void cut_into_tiles(const Step &s, int64_t first, int64_t end, int64_t shift, int64_t most, std::vector<Tile> &tiles) {
  while (first < end) {
    int64_t last = first + 1, together = 0;
    const int64_t limit = end - first < most ? end : first + most;
    if (last < limit && s.slots[last] == s.slots[first]) {
      while (last < limit && s.slots[last] == s.slots[first]) last++;
      together = s.positions[last - 1] + 1;
    } else if (s.groups[first] >= 0) {
      while (last < limit && s.groups[last] == s.groups[first]) last++;
      together = last - first > 1 ? s.shared[first] / BLOCK * BLOCK : 0;
    }
    tiles.push_back({first, last - first, together, first + shift});
    first = last;
  }
}

// Attention of one tile's queries on one key-value head. Each query keeps the largest score so far, the sum of
// exponentials relative to it and their mix of values, and corrects these when a block has a larger one.
struct Attention {
  const Model &m;
  const Step &s;
  const Sizes &size;
  int64_t group, head_dim;
  float *queries, *mix, *scores, *keys, *values, *tops, *totals;

  Attention(const Model &m, const Step &s, const Sizes &size, float *scratch)
      : m(m), s(s), size(size), group(m.heads / m.kv_heads), head_dim(m.head_dim) {
    queries = scratch;
    mix = queries + size.queries * head_dim;
    scores = mix + size.queries * size.head;
    keys = scores + size.queries * BLOCK;
    values = keys + BLOCK * head_dim;
    tops = values + BLOCK * size.head;
    totals = tops + size.queries;
  }

  const float *keys_of(int64_t token, int64_t layer, int64_t head) const {
    return s.slots[token] + layer * s.layer_strides[token] + head * s.head_strides[token];
  }

  // The first block that a token reads.
  void fetch_keys(int64_t token, int64_t layer, int64_t head) const {
    const int64_t length = s.positions[token] + 1;
    fetch(keys_of(token, layer, head), (length < BLOCK ? length : BLOCK) * head_dim);
  }

  void attend(const Tile &tile, int64_t layer, int64_t head, const float *qkv, float *mixed) {
    const int64_t count = tile.count * group, width = group * head_dim;
    const float scale = 1.f / std::sqrt((float)head_dim);
    for (int64_t t = 0; t < tile.count; t++) {
      const float *q = qkv + (tile.first + t) * size.qkv + head * width;
      for (int64_t i = 0; i < width; i++) queries[t * width + i] = q[i] * scale;
    }
    memset(mix, 0, count * size.head * sizeof(float));
    for (int64_t q = 0; q < count; q++) tops[q] = -INFINITY, totals[q] = 0.f;
    read(tile.first, 0, count, layer, head, 0, tile.together, s.positions + tile.first);
    for (int64_t t = 0; t < tile.count; t++) {
      const int64_t token = tile.first + t, length = s.positions[token] + 1;
      read(token, t * group, group, layer, head, tile.together, length, s.positions + token);
      for (int64_t g = 0; g < group; g++) {
        const int64_t q = t * group + g;
        const float share = 1.f / totals[q], *from = mix + q * size.head;
        float *to = mixed + (tile.row + t) * size.mixed + head * width + g * head_dim;
        for (int64_t i = 0; i < head_dim; i++) to[i] = from[i] * share;
      }
    }
  }

  // Queries from number `first` on, over the positions of a token's slot from `start` to `end`.
  void read(int64_t token, int64_t first, int64_t count, int64_t layer, int64_t head, int64_t start, int64_t end,
            const int64_t *positions) {
    const float *k = keys_of(token, layer, head), *v = keys_of(token, layer, m.kv_heads + head);
    for (; start < end; start += BLOCK) {
      const int64_t length = end - start < BLOCK ? end - start : BLOCK, next = end - start - length;
      fetch(v + start * head_dim, length * head_dim);
      fetch(k + (start + BLOCK) * head_dim, (next < BLOCK ? next : BLOCK) * head_dim);
      score(first, count, k + start * head_dim, length);
      for (int64_t q = 0; q < count; q++) weigh(first + q, positions[q / group] + 1 - start);
      add_values(first, count, v + start * head_dim, length);
    }
  }

  void score(int64_t first, int64_t count, const float *k, int64_t length) {
    for (int64_t panel = 0; panel * PANEL < BLOCK; panel++) {
      const int64_t at = panel * PANEL, here = length - at < PANEL ? length - at : PANEL;
      if (here <= 0) break;
      transpose(k + at * head_dim, head_dim, here, head_dim, keys, PANEL);
      for (int64_t q = first; q < first + count; q += ROWS)
        with_constant<ROWS>(first + count - q < ROWS ? first + count - q : ROWS, [&](auto rows) {
          micro<rows.value, VECTORS>(queries + q * head_dim, head_dim, keys, PANEL, head_dim,
                                     [&](int64_t each, const Vec *sums) {
                                       for (int n = 0; n < VECTORS; n++)
                                         store(scores + (q + each) * BLOCK + at + n * LANES, sums[n]);
                                     });
        });
    }
  }

  // Turns the scores of the first `known` positions of a block into exponentials, those of the others into 0.
  void weigh(int64_t q, int64_t known) {
    float *row = scores + q * BLOCK;
    if (known <= 0) {
      memset(row, 0, BLOCK * sizeof(float));
      return;
    }
    for (int64_t i = known; i < BLOCK; i++) row[i] = -INFINITY;
    Vec most = load(row);
    for (int i = LANES; i < BLOCK; i += LANES) most = larger(load(row + i), most);
    const float top = largest_of(most), before = tops[q];
    const float highest = top > before ? top : before;
    Vec sum = {};
    for (int i = 0; i < BLOCK; i += LANES) {
      Vec weight = exponential(load(row + i) - splat(highest));
      store(row + i, weight);
      sum += weight;
    }
    if (highest != before) {
      const float correction = std::exp(before - highest);
      totals[q] *= correction;
      float *row_mix = mix + q * size.head;
      for (int64_t i = 0; i < size.head; i += LANES) store(row_mix + i, load(row_mix + i) * splat(correction));
    }
    tops[q] = highest;
    totals[q] += sum_of(sum);
  }

  void add_values(int64_t first, int64_t count, const float *v, int64_t length) {
    int64_t stride = head_dim;
    if (head_dim != size.head) {  // whole vectors must not reach beyond a slot
      for (int64_t t = 0; t < length; t++) memcpy(values + t * size.head, v + t * head_dim, head_dim * sizeof(float));
      v = values, stride = size.head;
    }
    for (int64_t column = 0; column < size.head; column += PANEL) {
      const int64_t vectors = (size.head - column < PANEL ? size.head - column : PANEL) / LANES;
      with_constant<VECTORS>(vectors, [&](auto wide) {
        for (int64_t q = first; q < first + count; q += ROWS)
          with_constant<ROWS>(first + count - q < ROWS ? first + count - q : ROWS, [&](auto rows) {
            micro<rows.value, wide.value>(scores + q * BLOCK, BLOCK, v + column, stride, length,
                                          [&](int64_t each, const Vec *sums) {
                                            float *to = mix + (q + each) * size.head + column;
                                            for (int n = 0; n < wide.value; n++)
                                              store(to + n * LANES, load(to + n * LANES) + sums[n]);
                                          });
          });
      });
    }
  }
};

// ------------------------------------------------------------------------------------------------------------- step

// What one thread computes of a step. W: what panels hold.
template <typename W>
struct Pass {
  const Model &m;
  const Step &s;
  const Sizes size;
  const int64_t thread, threads;
  Share rows;      // whose row-wise work is this thread's
  Share products;  // this thread's part of products
  int64_t shift;   // the logits that are wanted as number a are those of row a + shift; known at the end
  float *hidden, *wanted, *normed, *qkv, *mixed, *gated;
  Attention attention;
  std::vector<Tile> tiles;

  Pass(const Model &m, const Step &s, int64_t thread, int64_t threads)
      : m(m), s(s), size(m), thread(thread), threads(threads),
        rows{s.tokens * thread / threads, s.tokens * (thread + 1) / threads, 0, 1},
        products(s.by_rows ? rows : Share{0, s.tokens, thread, threads}), shift(0), hidden(s.work),
        wanted(hidden + s.tokens * size.hidden), normed(wanted + s.tokens * size.hidden), qkv(normed + s.tokens * size.hidden), mixed(qkv + s.tokens * size.qkv),
        gated(mixed + s.tokens * size.mixed),
        attention(m, s, size, gated + s.tokens * size.gated + thread * size.scratch) {
    cut_into_tiles(s, products.first, products.end, 0, size.tile_tokens, tiles);
  }

  void wait() const {
    if (!s.by_rows) {
#pragma omp barrier
    }
  }

  void wait_for_keys() const {
    if (!s.by_rows || s.has_pieces) {
#pragma omp barrier
    }
  }

  void run() {
    for (int64_t t = rows.first; t < rows.end; t++) embed(t);
    for (int64_t l = 0; l < m.layers; l++) {
      const Layer &layer = m.layer[l];
      for (int64_t t = rows.first; t < rows.end; t++) norm(t, layer.attention_norm);
      wait();
      multiply(normed, size.hidden, layer.qkv, m.hidden, layer.qkv_bias, qkv, size.qkv, false);
      wait();
      for (int64_t t = rows.first; t < rows.end; t++) keep_keys(layer, l, t);
      wait_for_keys();
      if (l == m.layers - 1) narrow();
      attend(l);
      wait();
      multiply(mixed, size.mixed, layer.output, size.mixed, layer.output_bias, hidden, size.hidden, true);
      wait();
      for (int64_t t = rows.first; t < rows.end; t++) norm(t, layer.mlp_norm);
      wait();
      gate(layer);
      wait();
      multiply(gated, size.gated, layer.down, m.intermediate, nullptr, hidden, size.hidden, true);
      wait();
    }
    if (m.layers == 0) narrow();
    head();
  }

  // Nobody reads what the last layer makes of other tokens than the wanted ones: of a prompt, all but the last. From its
  // keys on only these are computed, in rows that follow each other.
  void narrow() {
    if (s.wanted == s.tokens) return;
    int64_t first = 0, end = s.wanted;  // those of this thread's rows are neighbours
    while (first < end && s.wanted_tokens[first] < rows.first) first++;
    while (first < end && s.wanted_tokens[end - 1] >= rows.end) end--;
    shift = s.by_rows ? rows.first - first : 0;  // a thread that does not wait for others writes to its own rows only
    for (int64_t a = first; a < end; a++)
      memcpy(wanted + (a + shift) * size.hidden, hidden + s.wanted_tokens[a] * size.hidden, m.hidden * sizeof(float));
    hidden = wanted;
    rows.first = first + shift, rows.end = end + shift;
    products = s.by_rows ? rows : Share{0, s.wanted, thread, threads};
    tiles.clear();
    for (int64_t a = products.first - shift, next; a < products.end - shift; a = next) {
      for (next = a + 1; next < products.end - shift && s.wanted_tokens[next] == s.wanted_tokens[next - 1] + 1;) next++;
      const int64_t token = s.wanted_tokens[a];
      cut_into_tiles(s, token, token + next - a, a + shift - token, size.tile_tokens, tiles);
    }
  }

  void embed(int64_t t) const {
    const float *from = m.embedding + s.ids[t] * m.hidden;
    float *to = hidden + t * size.hidden;
    memcpy(to, from, m.hidden * sizeof(float));
    if (std::is_same_v<W, Bfloat16>)
      for (int64_t i = 0; i < m.hidden; i++) to[i] = through_bfloat16(to[i]);
  }

  void norm(int64_t t, const float *weight) const {
    normalise(hidden + t * size.hidden, weight, normed + t * size.hidden, m.hidden, (float)m.norm_eps);
  }

  // y (+)= x times the packed matrix, plus the bias. `out` is the length of y's rows.
  void multiply(const float *x, int64_t x_stride, const void *panels, int64_t in, const float *bias, float *y, int64_t out,
                bool add) const {
    product<W>(products, x, x_stride, panels, in, out / PANEL, [=](int64_t row, int64_t panel, const Vec *sums) {
      float *to = y + row * out + panel * PANEL;
      for (int n = 0; n < VECTORS; n++) {
        Vec sum = sums[n];
        if (bias) sum += load(bias + panel * PANEL + n * LANES);
        if (add) sum += load(to + n * LANES);
        store(to + n * LANES, sum);
      }
    });
  }

  // Norms and rotates a token's queries and keys; keys and values go to its slot.
  void keep_keys(const Layer &layer, int64_t l, int64_t t) const {
    const int64_t size_of = m.head_dim, position = s.positions[t];
    float *x = qkv + t * size.qkv, *slot = s.slots[t] + l * s.layer_strides[t];
    const float *cosines = m.rotary + position * 2 * size_of;
    for (int64_t i = 0; i < m.heads + m.kv_heads; i++) {
      float *head = x + i * size_of;
      if (layer.q_norm) normalise(head, i < m.heads ? layer.q_norm : layer.k_norm, head, size_of, (float)m.norm_eps);
      rotate(head, cosines, cosines + size_of, size_of);
    }
    for (int64_t k = 0; k < 2 * m.kv_heads; k++)
      memcpy(slot + k * s.head_strides[t] + position * size_of, x + (m.heads + k) * size_of, size_of * sizeof(float));
  }

  void attend(int64_t l) {
    const int64_t items = (int64_t)tiles.size() * m.kv_heads;
    for (int64_t item = products.index; item < items; item += products.count) {
      const int64_t next = item + products.count;
      if (next < items) attention.fetch_keys(tiles[next / m.kv_heads].first, l, next % m.kv_heads);
      attention.attend(tiles[item / m.kv_heads], l, item % m.kv_heads, qkv, mixed);
    }
  }

  void gate(const Layer &layer) const {
    const int64_t panels = size.gated / HALF;
    product<W>(products, normed, size.hidden, layer.gate_up, m.hidden, panels,
               [=](int64_t row, int64_t panel, const Vec *sums) {
                 float *to = gated + row * size.gated + panel * HALF;
                 for (int n = 0; n < VECTORS / 2; n++) {
                   const Vec x = sums[n];
                   store(to + n * LANES, x / (splat(1.f) + exponential(-x)) * sums[n + VECTORS / 2]);
                 }
               });
  }

  void head() const {
    for (int64_t row = rows.first; row < rows.end; row++) norm(row, m.final_norm);
    wait();
    product<W>(products, normed, size.hidden, m.head, m.hidden, padded(m.vocab, PANEL) / PANEL,
               [=](int64_t row, int64_t panel, const Vec *sums) {
                 float *to = s.logits + s.targets[row - shift] * s.logits_stride + panel * PANEL;
                 for (int n = 0; n < VECTORS; n++) store(to + n * LANES, sums[n]);
               });
  }
};

template <typename W>
void run_step(const Model &m, const Step &s) {
#pragma omp parallel num_threads((int)s.threads) if (s.threads > 1)
  Pass<W>(m, s, omp_get_thread_num(), omp_get_num_threads()).run();
}

// ------------------------------------------------------------------------------------------------------------- draw

// The count-th number in [0, 1) of a seed's stream, as in sampler.py: 24 bits of splitmix64.
inline float uniform(uint64_t seed, uint64_t count) {
  uint64_t x = seed + (count + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  x = x ^ x >> 31;
  return (float)(x >> 40) * 0x1p-24f;
}

// A row of logits; what is beyond its end is -inf.
struct Logits {
  const float *row;
  int64_t size;
  float temperature;

  Vec at(int64_t i) const {
    Vec v = splat(-INFINITY);
    if (i + LANES <= size)
      v = load(row + i);
    else if (i < size)
      memcpy(&v, row + i, (size - i) * sizeof(float));
    return v;
  }

  // Relative to the largest, which costs no digits, and by the temperature.
  Vec scaled(int64_t i, float top) const {
    const Vec v = at(i) - splat(top);
    return temperature == 1.f ? v : v / splat(temperature);
  }
};

// The token at which the cumulative probability passes u, or the likeliest, and its log-prob: NaN if none can be drawn.
// `sums` has room for one number for each DRAW_BLOCK logits.
void draw_row(const Logits &logits, bool greedy, float u, std::vector<double> &sums, int64_t &token, float &logprob) {
  Vec most = logits.at(0);
  for (int64_t i = LANES; i < logits.size; i += LANES) most = larger(logits.at(i), most);
  const float top = largest_of(most);
  const int64_t blocks = (int64_t)sums.size();
  double total = 0;
  for (int64_t b = 0; b < blocks; b++) {
    Vec sum = {};
    for (int64_t i = b * DRAW_BLOCK; i < (b + 1) * DRAW_BLOCK; i += LANES) sum += exponential(logits.scaled(i, top));
    total += sums[b] = sum_of(sum);
  }
  token = 0, logprob = NAN;
  if (!(total > 0 && total < INFINITY)) return;
  double before = 0;
  const double point = u * total;
  int64_t block = 0;
  while (!greedy && block < blocks - 1 && before + sums[block] <= point) before += sums[block++];
  bool found = false;
  for (int64_t i = block * DRAW_BLOCK; i < logits.size && !found; i += LANES) {
    const Vec value = logits.at(i), weight = exponential(logits.scaled(i, top));
    for (int j = 0; j < LANES && i + j < logits.size && !found; j++) {
      before += weight[j];
      found = greedy ? value[j] == top : before > point;
      if (weight[j] > 0) token = i + j;  // the last of these, where rounding leaves the sum short of the point
    }
  }
  logprob = (float)(logits.scaled(token, top)[0] - std::log(total));
}

}  // namespace

extern "C" {

int64_t areal_panel() { return PANEL; }
int64_t areal_size_of(int64_t which) {
  const int64_t sizes[] = {sizeof(Layer), sizeof(Model), sizeof(Step), sizeof(Draw)};
  return sizes[which];
}
int64_t areal_work(const Model *m, int64_t tokens, int64_t threads) { return Sizes(*m).work(tokens, threads); }

// Puts a matrix [out, in] into `width` columns of each panel from column `offset` on.
void areal_pack(const float *w, int64_t out, int64_t in, void *panels, int64_t width, int64_t offset, int64_t bfloat16,
                int64_t threads) {
  const int64_t count = (out + width - 1) / width;
#pragma omp parallel for num_threads((int)threads) if (threads > 1)
  for (int64_t p = 0; p < count; p++) {
    const float *from = w + p * width * in;
    const int64_t at = p * in * PANEL + offset, rows = out - p * width < width ? out - p * width : width;
    if (bfloat16)
      transpose(from, in, rows, in, (Bfloat16 *)panels + at, PANEL);
    else
      transpose(from, in, rows, in, (float *)panels + at, PANEL);
  }
}

// 0, or the number, from 1, of the first token whose id or position the model does not have: then nothing is computed.
int64_t areal_step(const Model *m, const Step *s) {
  for (int64_t t = 0; t < s->tokens; t++)
    if (s->ids[t] < 0 || s->ids[t] >= m->vocab || s->positions[t] < 0 || s->positions[t] >= m->max_positions) return t + 1;
  if (s->tokens == 0) return 0;
  if (m->bfloat16)
    run_step<Bfloat16>(*m, *s);
  else
    run_step<float>(*m, *s);
  return 0;
}

void areal_draw(const Draw *d) {
#pragma omp parallel num_threads((int)d->threads) if (d->threads > 1)
  {
    std::vector<double> sums((d->vocab + DRAW_BLOCK - 1) / DRAW_BLOCK);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < d->rows; r++)
      draw_row({d->logits + r * d->stride, d->vocab, d->temperatures[r]}, d->greedy[r], uniform(d->seeds[r], d->counts[r]),
               sums, d->tokens[r], d->logprobs[r]);
  }
}
}
