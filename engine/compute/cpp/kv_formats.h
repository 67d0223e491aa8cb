// Vectors of keys and values between float32 and the formats of engine/compute/kv_formats.py, which says what they are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "simd.h"

namespace kv {

using namespace simd;

enum Format : int64_t { FLOAT32, FP8, INT8, INT4 };

constexpr int GROUP = 32;  // numbers of an int4 vector that share a scale
constexpr float SMALLEST = 1e-30f, HALF_STEP = 1.0f / 256, INT4_LEVELS = 15.0f;

typedef int8_t bytes __attribute__((vector_size(W)));

// The compiler's own conversions of vectors take each number apart; and it calls intrinsics' parameters uninitialised.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
inline ivec widened(bytes codes) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtepi8_epi32((__m128i)codes);
#elif defined(__AVX2__)
    return (ivec)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)codes));
#else
    return __builtin_convertvector(codes, ivec);
#endif
}
inline bytes narrowed(ivec numbers) {
#if defined(__AVX512F__)
    return (bytes)_mm512_cvtepi32_epi8((__m512i)numbers);
#else
    return __builtin_convertvector(numbers, bytes);
#endif
}
#pragma GCC diagnostic pop

// Bytes of a vector's codes, and 4-byte scales of a vector.
inline int64_t code_bytes(int64_t format, int64_t dim) { return format == FLOAT32 ? 4 * dim : format == INT4 ? dim / 2 : dim; }
inline int64_t num_groups(int64_t format, int64_t dim) { return format == INT4 ? (dim + GROUP - 1) / GROUP : 1; }

inline float from_bfloat16(uint32_t bits) {
    bits <<= 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline uint32_t to_bfloat16(float x) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline vec rounded(vec x) { return (x + ROUNDER) - ROUNDER; }

// e4m3: bits of a float32 whose exponent is less by 120. Below the smallest normal number the mantissa has no leading 1.
inline vec from_fp8(bytes codes) {
    ivec bits = widened(codes);  // the sign is in the upper bits, too
    vec size = (vec)(((bits & 0x7f) << 20) + (120 << 23));
    size = (bits & 0x78) == 0 ? (size - 0.0078125f) * 2.0f : size;
    return (vec)((ivec)size | (bits & 0x80000000));
}
inline bytes to_fp8(vec x) {  // |x| <= 448, to the nearest, ties to even
    ivec bits = (ivec)x, sign = (bits >> 24) & 0x80;
    bits &= 0x7fffffff;
    ivec small = (ivec)((vec)bits + 16384.0f) - (141 << 23);  // the sum's last bit is worth 2^-9
    ivec usual = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    return narrowed((bits < (121 << 23) ? small : usual) | sign);
}

inline float largest_of(const float *x, int dim) {  // NaN where one of them is no number
    float most = 0.0f, bad = 0.0f;
    for (int i = 0; i < dim; i++) most = std::max(most, std::fabs(x[i])), bad += x[i] - x[i];
    return most + bad;
}

template <typename Encode> inline float pack_by_one(const float *x, int dim, float limit, int8_t *codes, Encode encode) {
    float most = largest_of(x, dim), scale = most >= SMALLEST || most != most ? most / limit : 1.0f;
    for (int d = 0; d < dim; d += W) {
        int count = std::min(W, dim - d);
        vec part = (count == W ? load(x + d) : load_part(x + d, count)) / scale;
        bytes code = encode(part);
        std::memcpy(codes + d, &code, count);
    }
    return scale;
}

inline void pack_int4(const float *x, int dim, uint8_t *codes, uint32_t *scales) {
    const int half = dim / 2;
    for (int begin = 0; begin < half; begin += GROUP / 2) {
        const int end = std::min(begin + GROUP / 2, half);
        float low = x[begin], high = low, bad = 0.0f;
        for (const float *part : {x, x + half})
            for (int i = begin; i < end; i++)
                low = std::min(low, part[i]), high = std::max(high, part[i]), bad += part[i] - part[i];
        const uint32_t low_bits = to_bfloat16(low - std::fabs(low) * HALF_STEP);
        const float least = from_bfloat16(low_bits), step = (high - least) / INT4_LEVELS + bad;
        const bool usable = step == step;
        const uint32_t scale_bits = to_bfloat16(step >= SMALLEST || !usable ? step * (1 + HALF_STEP) : 1.0f);
        const float scale = from_bfloat16(scale_bits);
        scales[begin / (GROUP / 2)] = scale_bits | low_bits << 16;
        auto code = [&](float number) { return usable ? int(std::nearbyint((number - least) / scale)) : 0; };
        for (int i = begin; i < end; i++) codes[i] = uint8_t(code(x[i]) | code(x[half + i]) << 4);
    }
}

// x [dim] → codes and scales of one vector.
inline void pack(int64_t format, const float *x, int dim, void *codes, void *scales) {
    int8_t *to = static_cast<int8_t *>(codes);
    if (format == FLOAT32) std::memcpy(codes, x, dim * sizeof(float));
    else if (format == FP8) *static_cast<float *>(scales) = pack_by_one(x, dim, 448.0f, to, to_fp8);
    else if (format == INT8)
        *static_cast<float *>(scales) = pack_by_one(x, dim, 127.0f, to, [](vec part) {
            part = part == part ? rounded(part) : vec{};
            return narrowed(__builtin_convertvector(part, ivec));
        });
    else pack_int4(x, dim, static_cast<uint8_t *>(codes), static_cast<uint32_t *>(scales));
}

template <typename Decode> inline void unpack_by_one(const int8_t *codes, float scale, int dim, float *to, Decode decode) {
    int d = 0;
    for (; d + W <= dim; d += W) {
        bytes code;
        std::memcpy(&code, codes + d, W);
        store(to + d, decode(code) * scale);
    }
    if (d < dim) {
        bytes code = {};
        std::memcpy(&code, codes + d, dim - d);
        store_part(to + d, decode(code) * scale, dim - d);
    }
}

inline void unpack_int4(const uint8_t *codes, const uint32_t *scales, int dim, float *to) {
    const int half = dim / 2;
    for (int i = 0; i < half; i += W) {
        const uint32_t both = scales[i / (GROUP / 2)];
        const float scale = from_bfloat16(both & 0xffff), least = from_bfloat16(both >> 16);
        const int count = std::min(W, half - i);
        bytes code = {};
        if (count == W) std::memcpy(&code, codes + i, W);
        else std::memcpy(&code, codes + i, count);
        const ivec wide = widened(code);
        const vec first = __builtin_convertvector(wide & 15, vec) * scale + least;
        const vec second = __builtin_convertvector((wide >> 4) & 15, vec) * scale + least;
        if (count == W) store(to + i, first), store(to + half + i, second);
        else store_part(to + i, first, count), store_part(to + half + i, second, count);
    }
}

// The inverse of `pack`, of a quantised vector.
inline void unpack(int64_t format, const void *codes, const void *scales, int dim, float *to) {
    const int8_t *from = static_cast<const int8_t *>(codes);
    if (format == FP8) unpack_by_one(from, *static_cast<const float *>(scales), dim, to, from_fp8);
    else if (format == INT8)
        unpack_by_one(from, *static_cast<const float *>(scales), dim, to, [](bytes code) {
            return __builtin_convertvector(widened(code), vec);
        });
    else unpack_int4(static_cast<const uint8_t *>(codes), static_cast<const uint32_t *>(scales), dim, to);
}

}  // namespace kv
