// The two products of attention in register tiles: scores of queries and keys, and values weighed by them.
//
// Keys and values are given by a pointer for each position, and `offset` is the head's place behind it.
#pragma once

#include "simd.h"

namespace {

using namespace simd;

// out[r][0..vectors) (+)= sum over k of weights[r * row_stride + k * step] * values[k][0..vectors)
template <int R, int V>
inline void weigh(const float *weights, int row_stride, int step, const float *const *values, int offset, int count,
                  float *out, int out_stride) {
    vec total[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) total[r][v] = load(out + r * out_stride + v * W);
    for (int k = 0; k < count; k++) {
        const float *value = values[k] + offset;
        vec row[V];
        for (int v = 0; v < V; v++) row[v] = load(value + v * W);
        for (int r = 0; r < R; r++) {
            float weight = weights[r * row_stride + k * step];
            for (int v = 0; v < V; v++) total[r][v] += weight * row[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(out + r * out_stride + v * W, total[r][v]);
}

template <int V>
void weigh_rows(const float *weights, int rows, int row_stride, int step, const float *const *values, int offset,
                int count, float *out, int out_stride) {
    while (rows > 0) {
        int now = rows >= ROWS ? ROWS : rows;
        switch (now) {
            case 6: weigh<6, V>(weights, row_stride, step, values, offset, count, out, out_stride); break;
            case 5: weigh<5, V>(weights, row_stride, step, values, offset, count, out, out_stride); break;
            case 4: weigh<4, V>(weights, row_stride, step, values, offset, count, out, out_stride); break;
            case 3: weigh<3, V>(weights, row_stride, step, values, offset, count, out, out_stride); break;
            case 2: weigh<2, V>(weights, row_stride, step, values, offset, count, out, out_stride); break;
            default: weigh<1, V>(weights, row_stride, step, values, offset, count, out, out_stride);
        }
        rows -= now, weights += now * row_stride, out += now * out_stride;
    }
}

// out [rows][padded_dim] += weights * values [count][dim]
void weigh_values(const float *weights, int rows, int row_stride, int step, const float *const *values, int offset,
                  int dim, int count, float *out, int out_stride) {
    int d = 0;
    for (; d + PANEL * W <= dim; d += PANEL * W)
        weigh_rows<PANEL>(weights, rows, row_stride, step, values, offset + d, count, out + d, out_stride);
    for (; d + W <= dim; d += W) weigh_rows<1>(weights, rows, row_stride, step, values, offset + d, count, out + d, out_stride);
    for (int k = 0; d < dim && k < count; k++) {  // what is left of a dim that is no multiple of a vector
        vec row = load_part(values[k] + offset + d, dim - d);
        for (int r = 0; r < rows; r++) {
            float *to = out + r * out_stride + d;
            store(to, load(to) + weights[r * row_stride + k * step] * row);
        }
    }
}

// scores[k][0..V) of ROWS positions = sum over d of keys[k][d] * columns[d][0..V)
template <int V>
inline void score_columns(const float *const *keys, int offset, int dim, const float *columns, int width, float *out) {
    vec total[ROWS][V];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) total[r][v] = vec{};
    const float *row[ROWS];
    for (int r = 0; r < ROWS; r++) row[r] = keys[r] + offset;
    for (int d = 0; d < dim; d++) {
        vec column[V];
        for (int v = 0; v < V; v++) column[v] = load(columns + d * width + v * W);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < V; v++) total[r][v] += row[r][d] * column[v];
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < V; v++) store(out + r * width + v * W, total[r][v]);
}

inline vec pair_sums(vec a, vec b) {  // sums of neighbours, those of a first
    ivec even, odd;
    for (int i = 0; i < W; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

// scores[r][p] of R rows and W / R positions: dot products, whose W partial sums are folded together.
template <int R>
inline void score_rows(const float *const *keys, int offset, int dim, const float *rows, int row_stride, float *out,
                       int out_stride) {
    constexpr int P = W / R;
    vec total[W];
    for (int i = 0; i < W; i++) total[i] = vec{};
    int d = 0;
    for (; d + W <= dim; d += W) {
        vec row[R];
        for (int r = 0; r < R; r++) row[r] = load(rows + r * row_stride + d);
        for (int p = 0; p < P; p++) {
            vec key = load(keys[p] + offset + d);
            for (int r = 0; r < R; r++) total[r * P + p] += row[r] * key;
        }
    }
    if (d < dim)
        for (int p = 0; p < P; p++) {
            vec key = load_part(keys[p] + offset + d, dim - d);
            for (int r = 0; r < R; r++) total[r * P + p] += load(rows + r * row_stride + d) * key;
        }
    for (int width = W; width > 1; width /= 2)
        for (int i = 0; i < width / 2; i++) total[i] = pair_sums(total[2 * i], total[2 * i + 1]);
    for (int r = 0; r < R; r++)
        std::memcpy(out + r * out_stride, reinterpret_cast<float *>(total) + r * P, P * sizeof(float));
}

}  // namespace
