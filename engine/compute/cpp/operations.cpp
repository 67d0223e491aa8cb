// The small operations of a decoder layer, each in one pass over its rows. float32.

#include <cmath>
#include <omp.h>
#include <vector>

#include "kernels.h"
#include "simd.h"

using namespace simd;

namespace {

constexpr int64_t WORTH_A_THREAD = 1 << 18;  // elements below which waking a thread takes longer than the work

// Calls work(row) for all rows, on several threads where it pays. Rows know nothing of each other.
template <typename Work> inline void for_rows(int64_t rows, int64_t elements, const Work &work) {
    if (rows == 1 || elements < WORTH_A_THREAD) {
        for (int64_t row = 0; row < rows; row++) work(row);
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) work(row);
}

// to[i] = from[i] * factor * (weight[i] + shift)
inline void scale(const float *from, const float *weight, float factor, float shift, int64_t size, float *to) {
    int64_t i = 0;
    for (; i + W <= size; i += W) store(to + i, load(from + i) * factor * (load(weight + i) + shift));
    for (; i < size; i++) to[i] = from[i] * factor * (weight[i] + shift);
}

inline float inverse_rms(float squares, int64_t size, float eps) {
    return 1.0f / std::sqrt(squares / float(size) + eps);
}

inline float sum_of_squares(const float *x, int64_t size) {
    vec total[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= size; i += 4 * W)
        for (int v = 0; v < 4; v++) {
            vec part = load(x + i + v * W);
            total[v] += part * part;
        }
    for (; i + W <= size; i += W) total[0] += load(x + i) * load(x + i);
    if (i < size) {
        vec part = load_part(x + i, int(size - i));
        total[1] += part * part;
    }
    return sum((total[0] + total[1]) + (total[2] + total[3]));
}

// One head: its norm if there is one, its rotation if there are angles, to where it belongs; `from` may be `to`.
inline void place_head(const float *from, const float *norm, float eps, float shift, const float *cos, const float *sin,
                       int64_t dim, float *to) {
    if (norm) {
        scale(from, norm, inverse_rms(sum_of_squares(from, dim), dim, eps), shift, dim, to);
        from = to;
    }
    if (!cos) {
        if (from != to) std::memcpy(to, from, dim * sizeof(float));
        return;
    }
    int64_t half = dim / 2, i = 0;
    for (; i + W <= half; i += W) {
        vec first = load(from + i), second = load(from + half + i);
        store(to + i, first * load(cos + i) - second * load(sin + i));
        store(to + half + i, second * load(cos + half + i) + first * load(sin + half + i));
    }
    for (; i < half; i++) {
        float first = from[i], second = from[half + i];
        to[i] = first * cos[i] - second * sin[i];
        to[half + i] = second * cos[half + i] + first * sin[half + i];
    }
}

// Memory of this thread, kept from call to call.
inline float *thread_room(int64_t size) {
    thread_local std::vector<float> room;
    if (int64_t(room.size()) < size) room.resize(size);
    return room.data();
}

inline vec silu(vec x) { return x / (1.0f + simd::exp(-x)); }

// The tanh approximation: 0.5 * (1 + tanh z) = 1 / (1 + e^-2z)
inline vec gelu(vec x) {
    vec twice = 1.5957691216f * (x + 0.044715f * x * x * x);
    return x / (1.0f + simd::exp(-twice));
}

template <typename Activation>
inline void gate(const float *gate_up, float *output, int64_t rows, int64_t size, const Activation &activation) {
    for_rows(rows, rows * size * 4, [=](int64_t row) {
        const float *first = gate_up + row * 2 * size, *second = first + size;
        float *to = output + row * size;
        int64_t i = 0;
        for (; i + W <= size; i += W) store(to + i, activation(load(first + i), load(second + i)));
        if (i < size) {
            int left = int(size - i);
            store_part(to + i, activation(load_part(first + i, left), load_part(second + i, left)), left);
        }
    });
}

}  // namespace

extern "C" void sojourn_rms_norm(const float *x, const float *weight, float *output, int64_t rows, int64_t size,
                                 float eps, float shift) {
    for_rows(rows, rows * size, [=](int64_t row) {
        const float *from = x + row * size;
        scale(from, weight, inverse_rms(sum_of_squares(from, size), size, eps), shift, size, output + row * size);
    });
}

// residual += x; output = norm(residual)
extern "C" void sojourn_add_rms_norm(const float *x, float *residual, const float *weight, float *output, int64_t rows,
                                     int64_t size, float eps, float shift) {
    for_rows(rows, rows * size * 2, [=](int64_t row) {
        const float *from = x + row * size;
        float *total = residual + row * size;
        int64_t i = 0;
        for (; i + W <= size; i += W) store(total + i, load(total + i) + load(from + i));
        for (; i < size; i++) total[i] += from[i];
        scale(total, weight, inverse_rms(sum_of_squares(total, size), size, eps), shift, size, output + row * size);
    });
}

extern "C" void sojourn_silu_gate(const float *gate_up, float *output, int64_t rows, int64_t size) {
    gate(gate_up, output, rows, size, [](vec x, vec up) { return silu(x) * up; });
}

extern "C" void sojourn_gelu_gate(const float *gate_up, float *output, int64_t rows, int64_t size) {
    gate(gate_up, output, rows, size, [](vec x, vec up) { return gelu(x) * up; });
}

// gpt-oss; NaN stays NaN.
extern "C" void sojourn_clamped_swish_gate(const float *gate_up, float *output, int64_t rows, int64_t size) {
    constexpr float LIMIT = 7.0f, GAIN = 1.702f;
    gate(gate_up, output, rows, size, [](vec x, vec up) {
        x = x > LIMIT ? all(LIMIT) : x;
        up = up > LIMIT ? all(LIMIT) : up;
        up = up < -LIMIT ? all(-LIMIT) : up;
        return x / (1.0f + simd::exp(-GAIN * x)) * (up + 1.0f);
    });
}

extern "C" void sojourn_write_heads(const Heads *arguments) {
    const Heads &h = *arguments;
    int64_t dim = h.head_dim, width = (h.num_heads + 2 * h.num_kv_heads) * dim;
    for_rows(h.num_tokens, h.num_tokens * width, [=](int64_t token) {
        const float *from = h.qkv + token * width;
        const float *cos = h.cos ? h.cos + h.positions[token] * dim : nullptr;
        const float *sin = h.cos ? h.sin + h.positions[token] * dim : nullptr;
        float *query = h.query + token * h.num_heads * dim;
        for (int64_t head = 0; head < h.num_heads; head++)
            place_head(from + head * dim, h.q_norm, h.eps, h.norm_shift, cos, sin, dim, query + head * dim);
        if (h.slots[token] < 0) return;
        from += h.num_heads * dim;
        const int64_t format = h.kv_format, groups = kv::num_groups(format, dim), bytes = kv::code_bytes(format, dim);
        float *const unpacked = format == kv::FLOAT32 ? nullptr : thread_room(dim);
        for (int64_t head = 0; head < h.num_kv_heads; head++) {
            const int64_t vector = h.places.of(h.slots[token]) + head * h.places.head_stride;
            char *key = static_cast<char *>(h.keys) + vector * bytes, *value = static_cast<char *>(h.values) + vector * bytes;
            float *to = unpacked ? unpacked : reinterpret_cast<float *>(key);
            place_head(from + head * dim, h.k_norm, h.eps, h.norm_shift, cos, sin, dim, to);
            if (unpacked) kv::pack(format, to, int(dim), key, h.key_scales + vector * groups);
            kv::pack(format, from + (h.num_kv_heads + head) * dim, int(dim), value, h.value_scales + vector * groups);
        }
    });
}

// rows [num_tokens][num_heads][dim] → a plane of the KV cache at `slots`
extern "C" void sojourn_write_rows(const float *rows, const int64_t *slots, char *to, float *scales, int64_t num_tokens,
                                   int64_t num_heads, int64_t dim, int64_t format, const Slots *places) {
    const int64_t groups = kv::num_groups(format, dim), bytes = kv::code_bytes(format, dim);
    for_rows(num_tokens, num_tokens * num_heads * dim, [=](int64_t token) {
        if (slots[token] < 0) return;
        const float *from = rows + token * num_heads * dim;
        for (int64_t head = 0; head < num_heads; head++) {
            const int64_t vector = places->of(slots[token]) + head * places->head_stride;
            kv::pack(format, from + head * dim, int(dim), to + vector * bytes, scales + vector * groups);
        }
    });
}

// The place of each row's largest number, the first of equals: ids [rows]. Rows that hold NaN give any place.
extern "C" void sojourn_argmax(const float *x, int64_t *ids, int64_t rows, int64_t size) {
    for_rows(rows, rows * size, [=](int64_t row) {
        const float *from = x + row * size;
        constexpr int LANES = 4;  // of vectors, so that no comparison waits for the one before
        vec best[LANES];
        ivec place[LANES], next[LANES];
        for (int v = 0; v < LANES; v++)
            for (int i = 0; i < W; i++) best[v][i] = -INFINITY, place[v][i] = next[v][i] = v * W + i;
        int64_t at = 0;
        for (; at + LANES * W <= size; at += LANES * W)
            for (int v = 0; v < LANES; v++) {
                vec here = load(from + at + v * W);
                place[v] = here > best[v] ? next[v] : place[v];
                best[v] = here > best[v] ? here : best[v];
                next[v] += LANES * W;
            }
        float most = -INFINITY;
        int64_t id = 0;
        for (int v = 0; v < LANES; v++)
            for (int i = 0; i < W; i++)
                if (best[v][i] > most || (best[v][i] == most && place[v][i] < id && most > -INFINITY))
                    most = best[v][i], id = place[v][i];
        for (; at < size; at++)
            if (from[at] > most) most = from[at], id = at;
        ids[row] = id;
    });
}
