// Matrix products with int8 weights: one scale an output channel, one scale a row of activations (a token), so that a
// token's numbers do not depend on the tokens that it is computed with.
//
// Weights lie in panels of 64 output channels, [N/64][K/4][64][4]: 64 bytes are 16 channels times 4 of K, the operand of
// VPDPBUSD. Its other operand is unsigned: activations are stored plus a zero point, and that times the sum of a channel's
// weights is taken off the integer result. Everything up to the epilogue is integer arithmetic, so that no order of
// summation, and with it no blocking and no number of threads, can change a bit.

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t PANEL = 64;        // output channels
constexpr int ROWS = 6;              // of activations that a tile holds in registers: 6 x 4 of 32 are sums
constexpr int64_t CHUNK = 16 * ROWS; // rows that one work item covers

// Below both, some 20 microseconds of work: waking a second thread takes 10.
constexpr int64_t FEW_BYTES = 1 << 19, FEW_PRODUCTS = 1 << 22;

// A mask of as many of 16 lanes as are left.
inline __mmask16 first_lanes(int64_t left) { return left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0; }

// A row of activations as bytes: value = scale * (byte - zero). Scale and zero span its range and 0 (asymmetric, since
// that costs nothing and a row seldom reaches as far below 0 as above it). A scale of NaN where a value is not finite.
struct RowScale {
    float scale;
    int32_t zero;
};

RowScale quantize_row(const float* x, int64_t k, int64_t padded_k, uint8_t* out) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i largest = _mm512_setzero_si512();
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
    for (int64_t i = 0; i < k; i += 16) {
        const __m512 value = _mm512_maskz_loadu_ps(first_lanes(k - i), x + i);
        low = _mm512_min_ps(low, value);
        high = _mm512_max_ps(high, value);
        // As integers, magnitudes of floats are ordered, infinity and NaN above all others.
        largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_castps_si512(value), magnitude));
    }
    if (_mm512_reduce_max_epi32(largest) >= 0x7f800000) {
        std::memset(out, 0, padded_k);
        return {std::numeric_limits<float>::quiet_NaN(), 0};
    }
    const float least = _mm512_reduce_min_ps(low), range = _mm512_reduce_max_ps(high) - least;
    if (range < 1e-30f) {  // its reciprocal would overflow
        std::memset(out, 0, padded_k);
        return {0, 0};
    }
    const __m512 inverse = _mm512_set1_ps(255.0f / range);
    const int32_t zero = (int32_t)(-least * (255.0f / range) + 0.5f);
    const __m512i offset = _mm512_set1_epi32(zero);
    for (int64_t i = 0; i < padded_k; i += 16) {
        const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(first_lanes(k - i), x + i), inverse);
        const __m512i rounded = _mm512_add_epi32(_mm512_cvtps_epi32(scaled), offset);  // from 0 to 256
        _mm512_mask_cvtusepi32_storeu_epi8(out + i, first_lanes(padded_k - i), rounded);
    }
    return {range / 255.0f, zero};
}

struct Layer {
    int64_t n, k;             // as the model has them
    int64_t groups;           // of four of K
    const int8_t* weights;    // [panels][groups][64][4]
    const float* scales;      // [panels * 64]
    const int32_t* totals;    // [panels * 64]: the sum of a channel's weights
    const float* bias;        // [n] or null
};

// The intrinsic leaves gcc 12 room to spill half of the sums at every step.
inline void add_products(__m512i& sum, __m512i a, __m512i b) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }

template <int R>
void tile(const Layer& layer, int64_t panel, const uint8_t* rows, const RowScale* row_scales, float* y) {
    __m512i sums[R][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) sums[r][c] = _mm512_setzero_si512();
    const int64_t stride = layer.groups * 4;
    const int8_t* w = layer.weights + panel * layer.groups * PANEL * 4;
    for (int64_t g = 0; g < layer.groups; g++, w += PANEL * 4) {
        __m512i b[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) b[c] = _mm512_loadu_si512(w + c * 64);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            int32_t four;
            std::memcpy(&four, rows + r * stride + g * 4, 4);
            const __m512i a = _mm512_set1_epi32(four);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) add_products(sums[r][c], a, b[c]);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const int64_t column = panel * PANEL + c * 16;
        const __mmask16 mask = first_lanes(layer.n - column);
        const __m512 scale = _mm512_loadu_ps(layer.scales + column);
        const __m512i total = _mm512_loadu_si512(layer.totals + column);
        const __m512 bias = layer.bias ? _mm512_maskz_loadu_ps(mask, layer.bias + column) : _mm512_setzero_ps();
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const __m512i offset = _mm512_mullo_epi32(total, _mm512_set1_epi32(row_scales[r].zero));
            const __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r][c], offset));
            const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(row_scales[r].scale));
            _mm512_mask_storeu_ps(y + r * layer.n + column, mask, _mm512_fmadd_ps(sum, factor, bias));
        }
    }
}

using Tile = void (*)(const Layer&, int64_t, const uint8_t*, const RowScale*, float*);
constexpr Tile TILES[ROWS + 1] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

}  // namespace

// y [m, n] = x [m, k] @ weights.T + bias; x and y are contiguous.
extern "C" void linear_int8(const float* x, float* y, int64_t m, int64_t n, int64_t k, const int8_t* weights,
                            const float* scales, const int32_t* totals, const float* bias) {
    const Layer layer{n, k, (k + 3) / 4, weights, scales, totals, bias};
    const int64_t stride = layer.groups * 4, panels = (n + PANEL - 1) / PANEL;
    const int64_t chunks = (m + CHUNK - 1) / CHUNK;
    static thread_local std::vector<uint8_t> bytes;
    static thread_local std::vector<RowScale> factors;
    if ((int64_t)bytes.size() < m * stride) bytes.resize(m * stride);
    if ((int64_t)factors.size() < m) factors.resize(m);
    uint8_t* rows = bytes.data();
    RowScale* row_scales = factors.data();
    const bool few = n * k < FEW_BYTES && n * k * m < FEW_PRODUCTS;
    // A barrier costs more than a few rows do.
    const bool alone = few || m * k <= 1 << 14;
    if (alone)
        for (int64_t r = 0; r < m; r++) row_scales[r] = quantize_row(x + r * k, k, stride, rows + r * stride);
#pragma omp parallel if (!few)
    {
        if (!alone) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < m; r++) row_scales[r] = quantize_row(x + r * k, k, stride, rows + r * stride);
        }
#pragma omp for schedule(dynamic) nowait
        for (int64_t item = 0; item < panels * chunks; item++) {
            const int64_t panel = item / chunks, begin = item % chunks * CHUNK, end = std::min(m, begin + CHUNK);
            const int64_t tiles = (end - begin + ROWS - 1) / ROWS;
            for (int64_t t = 0, row = begin; t < tiles; t++) {
                const int64_t count = (end - row + tiles - t - 1) / (tiles - t);
                TILES[count](layer, panel, rows + row * stride, row_scales + row, y + row * n);
                row += count;
            }
        }
    }
}

#endif
