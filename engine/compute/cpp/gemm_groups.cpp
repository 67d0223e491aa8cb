// Matrix products with quantised weights of 4 or 8 bits, whose scales and zeros are of groups of inputs:
// weight = (code - zero) * scale. Activations become int8 by token and group, so that a token's numbers do not depend on
// the tokens that it is computed with.
//
// Weights lie in panels of 64 output channels, in steps of four inputs: 64 bytes are 16 channels times four inputs, the
// unsigned operand of VPDPBUSD. Of 4 bits, a step is 128 bytes: the low halves are channels 0 to 15 and 32 to 47, the
// high halves those behind. The sum of a group is integer arithmetic, and groups are added up in their order: no
// blocking and no number of threads can change a bit.

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

// As engine/compute/quantisation/cpu_groups.py lays it out.
struct GroupForm {
    int64_t group;        // inputs of one scale: a multiple of four
    int64_t bits;         // of a code: 4 or 8
    int64_t half_scales;  // whether scales and zeros are float16
    int64_t zero;         // of all groups, where there is no table of zeros
};

namespace {

constexpr int64_t PANEL = 64;        // output channels
constexpr int ROWS = 6;              // of activations that a tile holds in registers: 6 x 4 of 32 are sums
constexpr int64_t CHUNK = 16 * ROWS; // rows that one work item covers
constexpr int64_t AHEAD = 4096;      // bytes: a page, which the machine's own prefetch does not look beyond

// Below both, some 20 microseconds of work: waking a second thread takes 10.
constexpr int64_t FEW_WEIGHTS = 1 << 19, FEW_PRODUCTS = 1 << 22;

struct Layer {
    int64_t n, k, groups;
    const uint8_t *codes;  // [panels][groups][group / 4][64][4], of 4 bits half as many bytes
    const void *scales;    // [panels][groups][64], float32 or float16
    const void *zeros;     // the same, or null
    const int32_t *order;  // [groups * group]: the input that a code belongs to; null: that at its own place
    const float *bias;     // [n] or null
    GroupForm form;

    int64_t stride() const { return groups * form.group; }  // bytes of a row of activations
};

// What a row of activations has besides its bytes: of each group.
struct Activations {
    const uint8_t *bytes;  // [rows][stride]
    const float *scales;    // [rows][groups]
    const int32_t *sums;    // [rows][groups] of the bytes
};

// A mask of as many of 16 lanes as are left.
inline __mmask16 first_lanes(int64_t left) { return left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0; }

inline __m512 load(const float *from) { return _mm512_loadu_ps(from); }
inline __m512 load(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }

// The intrinsic leaves gcc 12 room to spill half of the sums at every step.
inline void add_products(__m512i &sum, __m512i a, __m512i b) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }

// A group of a row as signed bytes: value = scale * byte, symmetric. A scale of NaN where a value is not finite.
void quantize_group(const float *x, const int32_t *order, int64_t count, int64_t padded, int8_t *out, float &scale,
                    int32_t &sum) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    auto values = [=](int64_t i) {
        const __mmask16 inside = first_lanes(count - i);
        if (!order) return _mm512_maskz_loadu_ps(inside, x + i);
        return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), inside, _mm512_maskz_loadu_epi32(inside, order + i), x, 4);
    };
    // As integers, magnitudes of floats are ordered, infinity and NaN above all others.
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 16)
        largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_castps_si512(values(i)), magnitude));
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    float most;
    std::memcpy(&most, &bits, 4);
    sum = 0;
    if (bits >= 0x7f800000 || most < 1e-30f) {  // the reciprocal of the latter would overflow
        std::memset(out, 0, padded);
        scale = bits >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
        return;
    }
    scale = most / 127.0f;
    const __m512 inverse = _mm512_set1_ps(127.0f / most);
    __m512i total = _mm512_setzero_si512();
    for (int64_t i = 0; i < padded; i += 16) {
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(values(i), inverse));
        total = _mm512_add_epi32(total, rounded);
        _mm512_mask_cvtsepi32_storeu_epi8(out + i, first_lanes(padded - i), rounded);
    }
    sum = _mm512_reduce_add_epi32(total);
}

// The four operands of a step. Of 4 bits, the even ones are whole bytes, 16 * high + low, and the odd ones 16 * high:
// one operation for two vectors, whose sums `split` takes apart.
template <int BITS>
inline void operands(const uint8_t *codes, __m512i w[4]) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        if (BITS == 8) w[c] = _mm512_loadu_si512(codes + c * 64);
        else if (c % 2 == 0) w[c] = _mm512_loadu_si512(codes + c * 32);
        else w[c] = _mm512_and_si512(w[c - 1], _mm512_set1_epi8((char)0xf0));
    }
}

// R rows of y, of the 64 channels of a panel.
template <int R, int BITS, class S, bool ZEROS>
void tile(const Layer &layer, int64_t panel, const Activations &x, int64_t row, float *y) {
    const int64_t stride = layer.stride(), steps = layer.form.group / 4;
    const uint8_t *bytes = x.bytes + row * stride, *codes = layer.codes + panel * stride * PANEL * BITS / 8;
    const S *scales = (const S *)layer.scales + panel * layer.groups * PANEL;
    const S *zeros = ZEROS ? (const S *)layer.zeros + panel * layer.groups * PANEL : nullptr;
    __m512 totals[R][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) totals[r][c] = _mm512_setzero_ps();
    for (int64_t g = 0; g < layer.groups; g++, scales += PANEL, zeros += ZEROS ? PANEL : 0) {
        __m512i sums[R][4];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const int32_t first = ZEROS ? 0 : -(int32_t)layer.form.zero * x.sums[(row + r) * layer.groups + g];
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) sums[r][c] = _mm512_set1_epi32(BITS == 8 ? first : c % 2 ? 16 * first : 17 * first);
        }
        for (int64_t step = 0; step < steps; step++, codes += PANEL * BITS / 2, bytes += 4) {
            __m512i w[4];
#pragma GCC unroll 4
            for (int c = 0; c < 4; c += 8 / BITS) _mm_prefetch((const char *)codes + AHEAD + c * 8 * BITS, _MM_HINT_T0);
            operands<BITS>(codes, w);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                int32_t four;
                std::memcpy(&four, bytes + r * stride, 4);
                const __m512i a = _mm512_set1_epi32(four);
#pragma GCC unroll 4
                for (int c = 0; c < 4; c++) add_products(sums[r][c], w[c], a);
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            const __m512 scale = load(scales + c * 16);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const int64_t at = (row + r) * layer.groups + g;
                __m512i whole = sums[r][c];
                if (BITS == 4) whole = c % 2 ? _mm512_srai_epi32(whole, 4) : _mm512_sub_epi32(whole, sums[r][c + 1]);
                __m512 sum = _mm512_cvtepi32_ps(whole);
                if constexpr (ZEROS)  // exact where zeros are whole: products and sums stay below 2^24
                    sum = _mm512_fnmadd_ps(load(zeros + c * 16), _mm512_set1_ps((float)x.sums[at]), sum);
                const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[at]));
                totals[r][c] = _mm512_fmadd_ps(sum, factor, totals[r][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const int64_t column = panel * PANEL + c * 16;
        const __mmask16 mask = first_lanes(layer.n - column);
        const __m512 bias = layer.bias ? _mm512_maskz_loadu_ps(mask, layer.bias + column) : _mm512_setzero_ps();
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
            _mm512_mask_storeu_ps(y + (row + r) * layer.n + column, mask, _mm512_add_ps(totals[r][c], bias));
    }
}

using Tile = void (*)(const Layer &, int64_t, const Activations &, int64_t, float *);
template <int BITS, class S, bool Z>
constexpr Tile TILES[ROWS + 1] = {nullptr,          tile<1, BITS, S, Z>, tile<2, BITS, S, Z>, tile<3, BITS, S, Z>,
                                  tile<4, BITS, S, Z>, tile<5, BITS, S, Z>, tile<6, BITS, S, Z>};

template <int BITS, class S>
const Tile *tiles_of(const Layer &layer) {
    return layer.zeros ? TILES<BITS, S, true> : TILES<BITS, S, false>;
}

const Tile *tiles_of(const Layer &layer) {
    if (layer.form.bits == 4) return layer.form.half_scales ? tiles_of<4, uint16_t>(layer) : tiles_of<4, float>(layer);
    return layer.form.half_scales ? tiles_of<8, uint16_t>(layer) : tiles_of<8, float>(layer);
}

}  // namespace

// y [m, n] = x [m, k] @ weights.T + bias; x and y are contiguous.
extern "C" void linear_groups(const float *x, float *y, int64_t m, int64_t n, int64_t k, const uint8_t *codes,
                              const void *scale_table, const void *zeros, const int32_t *order, const float *bias,
                              const GroupForm *form) {
    const int64_t group = form->group;
    const Layer layer{n, k, (k + group - 1) / group, codes, scale_table, zeros, order, bias, *form};
    const int64_t stride = layer.stride(), panels = (n + PANEL - 1) / PANEL, chunks = (m + CHUNK - 1) / CHUNK;
    static thread_local std::vector<uint8_t> bytes;
    static thread_local std::vector<float> scales;
    static thread_local std::vector<int32_t> sums;
    if ((int64_t)bytes.size() < m * stride) bytes.resize(m * stride);
    if ((int64_t)scales.size() < m * layer.groups) scales.resize(m * layer.groups), sums.resize(m * layer.groups);
    const Activations activations{bytes.data(), scales.data(), sums.data()};
    uint8_t *to = bytes.data();
    float *to_scales = scales.data();
    int32_t *to_sums = sums.data();
    const Tile *tiles_by_rows = tiles_of(layer);
    auto quantize_row = [&](int64_t row) {
        for (int64_t g = 0, i = 0; g < layer.groups; g++, i += group) {
            const float *from = x + row * k;
            const int64_t at = row * layer.groups + g;
            quantize_group(order ? from : from + i, order ? order + i : nullptr, std::min(group, k - i), group,
                           (int8_t *)to + row * stride + i, to_scales[at], to_sums[at]);
        }
    };
    const bool few = n * k < FEW_WEIGHTS && n * k * m < FEW_PRODUCTS;
    // A barrier costs more than a few rows do.
    const bool alone = few || m * k <= 1 << 14;
    if (alone)
        for (int64_t r = 0; r < m; r++) quantize_row(r);
#pragma omp parallel if (!few)
    {
        if (!alone) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < m; r++) quantize_row(r);
        }
#pragma omp for schedule(dynamic) nowait
        for (int64_t item = 0; item < panels * chunks; item++) {
            const int64_t panel = item / chunks, begin = item % chunks * CHUNK, end = std::min(m, begin + CHUNK);
            const int64_t tiles = (end - begin + ROWS - 1) / ROWS;
            for (int64_t t = 0, row = begin; t < tiles; t++) {
                const int64_t count = (end - row + tiles - t - 1) / (tiles - t);
                tiles_by_rows[count](layer, panel, activations, row, y);
                row += count;
            }
        }
    }
}

#endif
