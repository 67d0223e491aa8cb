// Paged attention with an online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022), straight from the blocks.
//
// A query head's row of one token is a "row". The rows of one KV head see the same keys and share a pass over them.
// Few rows (decodes) lie one after another, scores [row][position]; many (prompt chunks) are the columns of
// scores [position][row], so that the maximum and the sum over positions need no exchange within a vector, and both
// products run with operands as they lie in memory.

#include <algorithm>
#include <cmath>
#include <omp.h>
#include <vector>

#include "kernels.h"
#include "simd.h"
#include "tiles.h"

using namespace simd;

namespace {

constexpr int TILE = 96;                  // positions of one step of the online softmax; a multiple of ROWS and W
constexpr int FEW_TILE = 64;              // the same where rows are few, and how far ahead memory is fetched
constexpr int LINE = 16;                  // floats of a cache line
constexpr int COLUMNS = PANEL * W;        // rows of a work item
constexpr int FEW = 4;                    // rows up to which they lie one after another
constexpr float LOWEST = -1e30f;          // a maximum over nothing: finite, so that its difference to -inf is no NaN
constexpr int64_t WORTH_A_THREAD = 1 << 18;  // products below which waking a thread takes longer than the work

struct Item {
    int sequence, head_begin, head_end;
    int row_begin, row_end;  // of a KV head: token * group + query head
    int sinks;               // first positions that it sees beside
    int begin, end;          // positions
    int part;                // of the workspace, or -1: the whole context
};

// Where the keys and values of a tile's positions are.
struct Places {
    int count;
    int64_t vectors[TILE];  // of the first head
    const float *keys[TILE], *values[TILE];  // of the first head, in float32; else of unpacked ones

    void find(const Attention &a, const Item &item, int begin, int end, int tile) {
        const int32_t *table = a.block_tables + item.sequence * a.table_stride;
        int size = int(a.block_size), block = begin / size, within = begin % size;
        int64_t vector = table[block] * a.block_stride + within * a.token_stride;
        count = std::min(tile, end - begin);
        for (int k = 0; k < tile; k++) {
            vectors[k] = vector;
            if (k >= count - 1) continue;  // what is behind the last is computed and thrown away
            vector += a.token_stride;
            if (++within == size) within = 0, vector = table[++block] * a.block_stride;
        }
        if (a.kv_format != kv::FLOAT32) return;
        for (int k = 0; k < tile; k++) {
            keys[k] = static_cast<const float *>(a.keys) + vectors[k] * a.head_dim;
            values[k] = static_cast<const float *>(a.values) + vectors[k] * a.head_dim;
        }
    }
    // Asks memory for `size` floats of the keys and the values of some positions, at `offset` behind the first head.
    void fetch(int begin, int end, int offset, int size) const {
        for (int k = begin; k < end; k++)
            for (int d = offset; d < offset + size; d += LINE) {
                __builtin_prefetch(keys[k] + d, 0, 2);
                __builtin_prefetch(values[k] + d, 0, 2);
            }
    }
};

// The rows of one KV head in a work item, and what is known of them so far.
struct Rows {
    int count, width;       // width: padded to vectors
    int positions[COLUMNS];
    float slopes[COLUMNS];
    float *queries;         // few: [row][padded dim], many: [dim][width]; times scale * log2 e
    float most[COLUMNS], total[COLUMNS];
    float *output;          // [row][padded value_dim], before it is divided by the total
};

void begin_rows(const Attention &a, const Item &item, int head, bool few, Rows &rows) {
    int group = a.group(), dim = int(a.head_dim), padded = (dim + W - 1) / W * W;
    int start = a.query_start[item.sequence], past = a.past(item.sequence);
    rows.count = item.row_end - item.row_begin;
    rows.width = (rows.count + W - 1) / W * W;
    for (int r = 0; r < rows.width; r++) {
        int row = std::min(item.row_begin + r, item.row_end - 1);
        int query_head = head * group + row % group;
        const float *query = a.query + ((start + row / group) * a.num_heads + query_head) * dim;
        rows.positions[r] = past + row / group;
        rows.slopes[r] = a.slopes ? a.slopes[query_head] * LOG2E : 0.0f;
        rows.most[r] = LOWEST, rows.total[r] = 0.0f;
        if (few && r < rows.count)
            for (int d = 0; d < padded; d++)
                rows.queries[r * padded + d] = d < dim ? query[d] * (a.scale * LOG2E) : 0.0f;
        if (!few)
            for (int d = 0; d < dim; d++) rows.queries[d * rows.width + r] = query[d] * (a.scale * LOG2E);
    }
    std::memset(rows.output, 0, rows.count * a.padded_value_dim() * sizeof(float));
}

void attend_few(const Attention &a, Rows &rows, const Places &here, const Places *ahead, int offset, int begin,
                float *scores) {
    const float *const *keys = here.keys;
    int count = here.count;
    int padded = int((a.head_dim + W - 1) / W * W), dim = int(a.head_dim), out_dim = a.padded_value_dim();
    for (int r = 0; r < rows.count;) {
        int left = rows.count - r, now = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        const float *queries = rows.queries + r * padded;
        float *to = scores + r * TILE;
        for (int k = 0; k < count; k += W / now) {
            if (r == 0 && ahead) ahead->fetch(k, k + W / now, offset, dim);
            if (now == 4) score_rows<4>(keys + k, offset, dim, queries, padded, to + k, TILE);
            else if (now == 2) score_rows<2>(keys + k, offset, dim, queries, padded, to + k, TILE);
            else score_rows<1>(keys + k, offset, dim, queries, padded, to + k, TILE);
        }
        r += now;
    }
    int whole = (count + W - 1) / W * W;
    for (int r = 0; r < rows.count; r++) {
        float *score = scores + r * TILE;
        int position = rows.positions[r];
        if (a.soft_cap != 0.0f)
            for (int k = 0; k < whole; k += W) store(score + k, soft_capped(load(score + k), a.soft_cap * LOG2E));
        if (a.slopes)
            for (int k = 0; k < count; k++) score[k] += rows.slopes[r] * float(begin + k - position);
        int first = std::max(0, a.first_visible(position) - begin), last = std::min(count, position + 1 - begin);
        for (int k = std::max(0, int(a.sink_tokens) - begin); k < std::min(first, count); k++) score[k] = -INFINITY;
        for (int k = std::max(0, last); k < whole; k++) score[k] = -INFINITY;
        vec high = all(rows.most[r]);
        for (int k = 0; k < whole; k += W) high = larger(high, load(score + k));
        float most = largest(high), fade = exp2_of_negative(all(rows.most[r] - most))[0];
        vec total = {};
        for (int k = 0; k < whole; k += W) {
            vec weight = exp2_of_negative(load(score + k) - most);
            total += weight;
            store(score + k, weight);
        }
        if (most != rows.most[r])
            for (int d = 0; d < out_dim; d++) rows.output[r * out_dim + d] *= fade;
        rows.total[r] = rows.total[r] * fade + sum(total);
        rows.most[r] = most;
    }
    weigh_values(scores, rows.count, TILE, 1, here.values, offset, int(a.value_dim), count, rows.output, out_dim);
}

void attend_many(const Attention &a, Rows &rows, const Places &here, const Places *ahead, int offset, int begin,
                 float *scores) {
    const float *const *keys = here.keys;
    int count = here.count;
    int width = rows.width, dim = int(a.head_dim), out_dim = a.padded_value_dim();
    for (int k = 0; k < count; k += ROWS) {
        if (ahead) ahead->fetch(k, k + ROWS, offset, dim);
        switch (width / W) {
            case 4: score_columns<4>(keys + k, offset, dim, rows.queries, width, scores + k * width); break;
            case 3: score_columns<3>(keys + k, offset, dim, rows.queries, width, scores + k * width); break;
            case 2: score_columns<2>(keys + k, offset, dim, rows.queries, width, scores + k * width); break;
            default: score_columns<1>(keys + k, offset, dim, rows.queries, width, scores + k * width);
        }
    }
    bool masked = begin + count - 1 > rows.positions[0] || a.first_visible(rows.positions[rows.count - 1]) > begin;
    for (int c = 0; c < width; c += W) {
        ivec position;
        std::memcpy(&position, rows.positions + c, sizeof position);
        if (a.soft_cap != 0.0f)
            for (int k = 0; k < count; k++) {
                float *at = scores + k * width + c;
                store(at, soft_capped(load(at), a.soft_cap * LOG2E));
            }
        if (a.slopes) {
            vec slope = load(rows.slopes + c);
            for (int k = 0; k < count; k++) {
                float *at = scores + k * width + c;
                store(at, load(at) + slope * __builtin_convertvector(begin + k - position, vec));
            }
        }
        if (masked)
            for (int k = 0; k < count; k++) {
                float *at = scores + k * width + c;
                vec score = begin + k > position ? all(-INFINITY) : load(at);
                if (a.window && begin + k >= a.sink_tokens)
                    score = begin + k <= position - int32_t(a.window) ? all(-INFINITY) : score;
                store(at, score);
            }
        vec before = load(rows.most + c), most = before, total = {};
        for (int k = 0; k < count; k++) most = larger(most, load(scores + k * width + c));
        for (int k = 0; k < count; k++) {
            float *at = scores + k * width + c;
            vec weight = exp2_of_negative(load(at) - most);
            total += weight;
            store(at, weight);
        }
        vec fade = exp2_of_negative(before - most);
        store(rows.total + c, load(rows.total + c) * fade + total);
        store(rows.most + c, most);
        for (int r = c; r < std::min(c + W, rows.count); r++)
            if (fade[r - c] != 1.0f)
                for (int d = 0; d < out_dim; d += W)
                    store(rows.output + r * out_dim + d, load(rows.output + r * out_dim + d) * fade[r - c]);
    }
    weigh_values(scores, rows.count, 1, width, here.values, offset, int(a.value_dim), count, rows.output, out_dim);
}

// What a row's weights are divided by: their sum, and the share of the head's sink, if there is one.
inline float normaliser(const Attention &a, int query_head, float most, float total) {
    return a.sinks ? total + std::exp2(a.sinks[query_head] * LOG2E - most) : total;
}

// A tile's keys and values of one head, in float32, where `to` points. Asks memory for those of the tile `ahead`.
void unpack(const Attention &a, const Places &here, const Places &ahead, int head, Places &to) {
    const int64_t bytes = kv::code_bytes(a.kv_format, a.head_dim), groups = kv::num_groups(a.kv_format, a.head_dim);
    const int64_t first = head * a.head_stride;
    auto plane = [&](const void *codes, const float *scales, const float *const *target) {
        const char *from = static_cast<const char *>(codes);
        for (int k = 0; k < here.count; k++) {
            const int64_t vector = here.vectors[k] + first, next = ahead.vectors[k] + first;
            for (int64_t b = 0; b < bytes; b += LINE * 4) __builtin_prefetch(from + next * bytes + b, 0, 2);
            __builtin_prefetch(scales + next * groups, 0, 2);
            kv::unpack(a.kv_format, from + vector * bytes, scales + vector * groups, int(a.head_dim),
                       const_cast<float *>(target[k]));
        }
    };
    plane(a.keys, a.key_scales, to.keys);
    if (a.values != a.keys) plane(a.values, a.value_scales, to.values);
    to.count = here.count;
}

void end_rows(const Attention &a, const Item &item, int head, const Rows &rows) {
    int group = a.group(), dim = int(a.value_dim), padded = a.padded_value_dim();
    for (int r = 0; r < rows.count; r++) {
        int row = item.row_begin + r, query_head = head * group + row % group;
        int token = row / group;
        const float *from = rows.output + r * padded;
        if (item.part < 0) {
            float *to = a.output + ((a.query_start[item.sequence] + token) * a.num_heads + query_head) * dim;
            float factor = 1.0f / normaliser(a, query_head, rows.most[r], rows.total[r]);
            for (int d = 0; d < dim; d++) to[d] = from[d] * factor;
        } else {
            float *to = a.workspace + ((item.part + token) * a.num_heads + query_head) * (dim + 2);
            std::memcpy(to, from, dim * sizeof(float));
            to[dim] = rows.most[r], to[dim + 1] = rows.total[r];
        }
    }
}

// Room of one thread, kept from call to call.
struct Room {
    std::vector<Rows> rows;
    std::vector<float> queries, outputs, scores, unpacked_vectors;
    Places unpacked;  // of a quantised tile

    void fit(const Attention &a, bool few) {
        int64_t dim = (a.head_dim + W - 1) / W * W, heads = few ? a.num_kv_heads : 1, count = few ? FEW : COLUMNS;
        grow(rows, heads), grow(queries, heads * count * dim);
        grow(outputs, heads * count * a.padded_value_dim()), grow(scores, TILE * COLUMNS);
        if (a.kv_format != kv::FLOAT32) {
            grow(unpacked_vectors, 2 * TILE * dim);
            for (int k = 0; k < TILE; k++) {
                unpacked.keys[k] = unpacked_vectors.data() + k * dim;
                unpacked.values[k] = unpacked.keys[k] + (a.values == a.keys ? 0 : TILE * dim);
            }
        }
        for (int64_t head = 0; head < heads; head++) {
            rows[head].queries = queries.data() + head * count * dim;
            rows[head].output = outputs.data() + head * count * a.padded_value_dim();
        }
    }
    template <typename T> static void grow(std::vector<T> &room, int64_t size) {
        if (int64_t(room.size()) < size) room.resize(size);
    }
};

void attend_positions(const Attention &a, const Item &item, bool few, Room &room, int first, int end) {
    const int tile = few ? FEW_TILE : TILE;
    Places here, ahead;
    here.find(a, item, first, end, tile);
    const bool quantised = a.kv_format != kv::FLOAT32;
    const int apart = int(a.head_stride * a.head_dim);  // floats between two heads
    for (int head = item.head_begin; head < item.head_end && !quantised; head++)
        here.fetch(0, std::min(here.count, FEW_TILE), head * apart, int(a.head_dim));
    for (int begin = first; begin < end; begin += tile, std::swap(here, ahead)) {
        ahead.find(a, item, std::min(begin + tile, end - 1), end, tile);
        for (int head = item.head_begin; head < item.head_end; head++) {
            Rows &rows = room.rows[head - item.head_begin];
            if (quantised) unpack(a, here, ahead, head, room.unpacked);
            const Places &tile_places = quantised ? room.unpacked : here, *next = quantised ? nullptr : &ahead;
            const int offset = quantised ? 0 : head * apart;
            if (few) attend_few(a, rows, tile_places, next, offset, begin, room.scores.data());
            else attend_many(a, rows, tile_places, next, offset, begin, room.scores.data());
        }
    }
}

void attend_item(const Attention &a, const Item &item) {
    thread_local Room room;
    bool few = a.tokens(item.sequence) * a.group() <= FEW;
    room.fit(a, few);
    for (int head = item.head_begin; head < item.head_end; head++)
        begin_rows(a, item, head, few, room.rows[head - item.head_begin]);
    if (item.sinks) attend_positions(a, item, few, room, 0, item.sinks);
    if (item.begin < item.end) attend_positions(a, item, few, room, item.begin, item.end);
    for (int head = item.head_begin; head < item.head_end; head++)
        end_rows(a, item, head, room.rows[head - item.head_begin]);
}

// The longest first: chunks by their last rows, and the later sequences, which the engine sorts by context.
void make_items(const Attention &a, int threads, std::vector<Item> &items) {
    int group = a.group(), heads = int(a.num_kv_heads), singles = 0, part = 0;
    for (int s = 0; s < a.num_sequences; s++) singles += a.tokens(s) * group <= FEW ? a.parts(s) : 0;
    // All heads together look a block up once; apart, they give every thread something to do.
    int shares = std::min(heads, std::max(1, (4 * threads + singles - 1) / std::max(1, singles)));
    items.clear();
    for (int s = int(a.num_sequences) - 1; s >= 0; s--) {
        int tokens = a.tokens(s), context = a.contexts[s], past = a.past(s), parts = a.parts(s);
        if (!context) continue;
        bool few = tokens * group <= FEW;
        int first = a.first_visible(past);
        for (int p = 0; p < parts; p++) {
            int begin = parts == 1 ? first : first + p * SPLIT, end = parts == 1 ? context : std::min(begin + SPLIT, context);
            int place = parts == 1 ? -1 : part + p * tokens;
            for (int h = 0; few && h < shares; h++)
                items.push_back({s, heads * h / shares, heads * (h + 1) / shares, 0, tokens * group,
                                 p ? 0 : a.visible_sinks(past), begin, end, place});
            for (int row = (tokens * group - 1) / COLUMNS * COLUMNS; !few && row >= 0; row -= COLUMNS) {
                int row_end = std::min(row + COLUMNS, tokens * group);
                int from = std::max(begin, a.first_visible(past + row / group));
                int to = std::min(end, past + (row_end - 1) / group + 1);
                int sinks = p ? 0 : a.visible_sinks(past + row / group);
                for (int h = 0; h < heads; h++) items.push_back({s, h, h + 1, row, row_end, sinks, from, to, place});
            }
        }
        part += parts == 1 ? 0 : parts * tokens;
    }
}

// Puts the parts of a sequence together; `part` is the place of the first.
void join_parts(const Attention &a, int sequence, int part) {
    int64_t dim = a.value_dim, tokens = a.tokens(sequence), parts = a.parts(sequence);
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < a.num_heads; head++) {
            const float *first = a.workspace + ((part + token) * a.num_heads + head) * (dim + 2);
            int64_t step = tokens * a.num_heads * (dim + 2);
            float *to = a.output + ((a.query_start[sequence] + token) * a.num_heads + head) * dim;
            float most = LOWEST, total = 0.0f;
            for (int64_t p = 0; p < parts; p++) most = std::max(most, first[p * step + dim]);
            std::fill(to, to + dim, 0.0f);
            for (int64_t p = 0; p < parts; p++) {
                const float *from = first + p * step;
                float share = exp2_of_negative(all(from[dim] - most))[0];
                total += share * from[dim + 1];
                for (int64_t d = 0; d < dim; d++) to[d] += share * from[d];
            }
            total = normaliser(a, int(head), most, total);
            for (int64_t d = 0; d < dim; d++) to[d] /= total;
        }
}

}  // namespace

extern "C" void sojourn_attend(Attention *attention) {
    thread_local std::vector<Item> kept_items;
    thread_local std::vector<float> workspace;
    std::vector<Item> &items = kept_items;  // this thread's, for all of the team
    int64_t products = 0, parts = 0;
    Attention &a = *attention;
    for (int s = 0; s < a.num_sequences; s++) {
        products += int64_t(a.tokens(s)) * (a.contexts[s] - a.first_visible(a.past(s)));
        parts += a.parts(s) == 1 ? 0 : a.parts(s) * a.tokens(s);
        if (!a.contexts[s])  // a padding row
            std::memset(a.output + a.query_start[s] * a.num_heads * a.value_dim, 0,
                        a.tokens(s) * a.num_heads * a.value_dim * sizeof(float));
    }
    Room::grow(workspace, parts * a.num_heads * (a.value_dim + 2));
    a.workspace = workspace.data();
    products *= a.num_heads * (a.head_dim + a.value_dim);
    int threads = products < WORTH_A_THREAD ? 1 : omp_get_max_threads();
    make_items(a, threads, items);
    int count = int(items.size());
    if (threads == 1) {
        for (int i = 0; i < count; i++) attend_item(a, items[i]);
    } else {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
        for (int i = 0; i < count; i++) attend_item(a, items[i]);
    }
    int part = 0;
    for (int s = int(a.num_sequences) - 1; s >= 0; s--)
        if (a.contexts[s] && a.parts(s) > 1) {
            join_parts(a, s, part);
            part += a.parts(s) * a.tokens(s);
        }
}
