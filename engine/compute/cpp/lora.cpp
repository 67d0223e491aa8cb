// Low-rank deltas of the adapters of a batch: y += scale * B(A x), with the matrices of the slot of each tile of tokens.
//
// A sum of A x is one chain of fused multiply-adds for each lane of a vector, and one of B h for each output, whatever the
// number of rows and threads: a token's numbers do not depend on the tokens beside it.

#include "lora.h"

#include <algorithm>

#include "simd.h"

namespace {

using namespace simd;

constexpr int64_t OUTPUTS = 64;    // of a panel of B
constexpr int64_t LONGEST = 256;   // rank
constexpr int V = OUTPUTS / W;     // vectors of a panel's row
constexpr int64_t FEW_PRODUCTS = 1 << 17;  // some microseconds: waking a second thread takes longer

typedef uint16_t half_vec __attribute__((vector_size(W * 2)));

struct BFloat16 {
    uint16_t bits;
};

inline vec widened(const float *p) { return load(p); }
inline vec widened(const BFloat16 *p) {
    half_vec bits;
    std::memcpy(&bits, p, sizeof bits);
    return (vec)(__builtin_convertvector(bits, ivec) << 16);
}

// h [R][LONGEST], from `rank` on, K of them = x [R] (in_features apart) times A's rows
template <int R, int K, class T>
void shrink(const float *x, int64_t size, const T *a, int64_t padded, float scale, float *h) {
    vec sums[R][K];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) sums[r][k] = vec{};
    for (int64_t i = 0; i < size; i += W) {
        vec rows[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
            rows[r] = size - i >= W ? load(x + r * size + i) : load_part(x + r * size + i, int(size - i));
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) {
            const vec weight = widened(a + k * padded + i);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r][k] += rows[r] * weight;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) h[r * LONGEST + k] = sum(sums[r][k]) * scale;
}

template <int R, class T>
void shrink_all(const float *x, int64_t size, const LoraPart &part, float *h) {
    const int64_t padded = (size + 15) / 16 * 16;
    constexpr int K = R == 1 ? 8 : R == 2 ? 8 : 4;
    const T *a = static_cast<const T *>(part.a);
    int64_t k = 0;
    for (; k + K <= part.rank; k += K) shrink<R, K>(x, size, a + k * padded, padded, part.scale, h + k);
    for (; k < part.rank; k++) shrink<R, 1>(x, size, a + k * padded, padded, part.scale, h + k);
}

// y [R] (stride apart) += h [R] @ B
template <int R, class T>
void expand(const float *h, const LoraPart &part, float *y, int64_t stride) {
    const T *b = static_cast<const T *>(part.b);
    for (int64_t begin = 0; begin < part.out_features; begin += OUTPUTS) {
        vec sums[R][V];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[r][v] = vec{};
        for (int64_t k = 0; k < part.rank; k++, b += OUTPUTS) {
            vec row[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) row[v] = widened(b + v * W);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) sums[r][v] += h[r * LONGEST + k] * row[v];
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) {
                float *out = y + r * stride + begin + v * W;
                const int64_t left = part.out_features - begin - v * W;
                if (left >= W) store(out, load(out) + sums[r][v]);
                else if (left > 0)
                    store_part(out, load_part(out, int(left)) + sums[r][v], int(left));
            }
    }
}

template <int R, class T>
void add_rows(const LoraPart &part, const float *x, int64_t in_features, float *y, int64_t out_features) {
    alignas(64) float h[R * LONGEST];
    shrink_all<R, T>(x, in_features, part, h);
    expand<R, T>(h, part, y + part.begin, out_features);
}

template <class T>
void add_tile(const LoraPart &part, const LoraLinear &linear, const float *x, float *y, int64_t rows) {
    const int64_t in = linear.in_features, out = linear.out_features;
    for (; rows >= 4; rows -= 4, x += 4 * in, y += 4 * out) add_rows<4, T>(part, x, in, y, out);
    if (rows & 2) add_rows<2, T>(part, x, in, y, out), x += 2 * in, y += 2 * out;
    if (rows & 1) add_rows<1, T>(part, x, in, y, out);
}

}  // namespace

// y [num_tokens][out_features] += the deltas of x [num_tokens][in_features]. A thread has whole tiles.
extern "C" void sojourn_lora(const LoraLinear *linear, const LoraStep *step, const float *x, float *y) {
    int64_t products = 0;
    for (int64_t t = 0; t < step->num_tiles && products < FEW_PRODUCTS; t++) {
        const LoraSlot &slot = linear->slots[step->tiles[t].slot];
        for (int64_t p = 0; p < slot.num_parts; p++)
            products += step->tiles[t].count * slot.parts[p].rank * (linear->in_features + slot.parts[p].out_features);
    }
    if (products == 0) return;
#pragma omp parallel for schedule(dynamic) if (step->num_tiles > 1 && products >= FEW_PRODUCTS)
    for (int64_t t = 0; t < step->num_tiles; t++) {
        const LoraTile &tile = step->tiles[t];
        const LoraSlot &slot = linear->slots[tile.slot];
        const float *rows = x + tile.begin * linear->in_features;
        float *out = y + tile.begin * linear->out_features;
        for (int64_t p = 0; p < slot.num_parts; p++) {
            if (slot.parts[p].is_bfloat16) add_tile<BFloat16>(slot.parts[p], *linear, rows, out, tile.count);
            else add_tile<float>(slot.parts[p], *linear, rows, out, tile.count);
        }
    }
}
