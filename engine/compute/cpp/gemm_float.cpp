// Matrix products in float32 arithmetic, whose weights stay as small as they were stored: float32, bfloat16 or float16.
// A 16-bit weight becomes a float32 in a register, which is exact, so that reading half as much costs no accuracy.
//
// Weights lie in panels of 64 output channels, [N/64][K][64]. An output is a sum of blocks of K, each of them one chain of
// fused multiply-adds, whatever the tile and the number of rows and threads: a token's numbers do not depend on the
// tokens that it is computed with.

#if defined(__AVX512F__) && defined(__AVX512BW__)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t PANEL = 64;        // output channels
constexpr int ROWS = 6;              // of activations that a tile holds in registers: 6 x 4 of 32 are sums
constexpr int64_t CHUNK = 16 * ROWS; // rows that one work item covers
constexpr int64_t DEPTH = 512;       // of K in one chain: longer ones round more

// Below both, some 20 microseconds of work: waking a second thread takes 10.
constexpr int64_t FEW_BYTES = 1 << 19, FEW_PRODUCTS = 1 << 20;

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

inline __m512 load(const float* w) { return _mm512_loadu_ps(w); }
inline __m512 load(const Float16* w) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)w)); }
inline __m512 load(const BFloat16* w) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)w)), 16));
}

// A mask of as many of 16 lanes as are left.
inline __mmask16 first_lanes(int64_t left) { return left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0; }

// The intrinsic leaves gcc 12 room to spill half of the sums at every step.
inline void add_product(__m512& sum, __m512 a, __m512 b) { asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }

// R rows of y [R][n], from `column` on, += x [R][depth] (k apart) @ w [depth][64]; the first block begins with the bias.
template <int R, class W>
void tile(const float* x, int64_t k, int64_t depth, const W* w, float* y, int64_t n, int64_t column, const float* bias,
          bool first) {
    __m512 sums[R][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) sums[r][c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < depth; i++, w += PANEL) {
        __m512 b[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) b[c] = load(w + c * 16);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const __m512 a = _mm512_set1_ps(x[r * k + i]);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) add_product(sums[r][c], a, b[c]);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const int64_t begin = column + c * 16;
        const __mmask16 mask = first_lanes(n - begin);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            float* out = y + r * n + begin;
            __m512 before = _mm512_setzero_ps();
            if (!first || bias) before = _mm512_maskz_loadu_ps(mask, first ? bias + begin : out);
            _mm512_mask_storeu_ps(out, mask, _mm512_add_ps(before, sums[r][c]));
        }
    }
}

template <class W>
using Tile = void (*)(const float*, int64_t, int64_t, const W*, float*, int64_t, int64_t, const float*, bool);
template <class W>
constexpr Tile<W> TILES[ROWS + 1] = {nullptr, tile<1, W>, tile<2, W>, tile<3, W>, tile<4, W>, tile<5, W>, tile<6, W>};

template <class W>
void linear(const float* x, float* y, int64_t m, int64_t n, int64_t k, const W* weights, const float* bias) {
    const int64_t panels = (n + PANEL - 1) / PANEL, chunks = (m + CHUNK - 1) / CHUNK;
    const bool few = n * k * (int64_t)sizeof(W) < FEW_BYTES && n * k * m < FEW_PRODUCTS;
#pragma omp parallel for schedule(dynamic) if (!few)
    for (int64_t item = 0; item < panels * chunks; item++) {
        const int64_t panel = item / chunks, begin = item % chunks * CHUNK, end = std::min(m, begin + CHUNK);
        const int64_t tiles = (end - begin + ROWS - 1) / ROWS;
        for (int64_t i = 0; i < k; i += DEPTH) {
            const W* w = weights + (panel * k + i) * PANEL;
            for (int64_t t = 0, row = begin; t < tiles; t++) {
                const int64_t count = (end - row + tiles - t - 1) / (tiles - t);
                TILES<W>[count](x + row * k + i, k, std::min(DEPTH, k - i), w, y + row * n, n, panel * PANEL, bias,
                                i == 0);
                row += count;
            }
        }
    }
}

}  // namespace

// y [m, n] = x [m, k] @ weights.T + bias; x and y are contiguous, bias [n] or null.
extern "C" void linear_float32(const float* x, float* y, int64_t m, int64_t n, int64_t k, const float* weights,
                               const float* bias) {
    linear(x, y, m, n, k, weights, bias);
}

extern "C" void linear_bfloat16(const float* x, float* y, int64_t m, int64_t n, int64_t k, const BFloat16* weights,
                                const float* bias) {
    linear(x, y, m, n, k, weights, bias);
}

extern "C" void linear_float16(const float* x, float* y, int64_t m, int64_t n, int64_t k, const Float16* weights,
                               const float* bias) {
    linear(x, y, m, n, k, weights, bias);
}

#endif
