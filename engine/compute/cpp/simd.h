// Vectors of float32 as wide as the machine's registers, by the compiler's own vector types.
#pragma once

#include <cstdint>
#include <cstring>

namespace simd {

#ifdef __AVX512F__
constexpr int W = 16;  // floats of a vector
constexpr int PANEL = 4;  // vectors of a register tile's row: 6 rows of them fit into the registers
#else
constexpr int W = 8;
constexpr int PANEL = 2;
#endif
constexpr int ROWS = 6;  // of a register tile

typedef float vec __attribute__((vector_size(W * 4)));
typedef int32_t ivec __attribute__((vector_size(W * 4)));
typedef float loose __attribute__((vector_size(W * 4), aligned(4), may_alias));

inline vec load(const float *p) { return *reinterpret_cast<const loose *>(p); }
inline void store(float *p, vec v) { *reinterpret_cast<loose *>(p) = v; }
inline vec load_part(const float *p, int count) {
    vec v = {};
    std::memcpy(&v, p, count * sizeof(float));
    return v;
}
inline void store_part(float *p, vec v, int count) { std::memcpy(p, &v, count * sizeof(float)); }
inline vec all(float x) { return vec{} + x; }
// Of a number and NaN, `b` is chosen: a NaN that stands there stays.
inline vec larger(vec a, vec b) { return a > b ? a : b; }

// The vector turned by some places.
template <int places> inline vec turned(vec v) {
    ivec from;
    for (int i = 0; i < W; i++) from[i] = (i + places) % W;
    return __builtin_shuffle(v, from);
}

template <int width = W / 2> inline float sum(vec v) {
    if constexpr (width == 0) return v[0];
    else return sum<width / 2>(v + turned<width>(v));
}

template <int width = W / 2> inline float largest(vec v) {
    if constexpr (width == 0) return v[0];
    else return largest<width / 2>(larger(v, turned<width>(v)));
}

// 2^whole * 2^part for a part within half of 0, by the Taylor series of degree 7: 1 ulp. NaN stays NaN.
inline vec scaled_power(vec whole, vec part) {
    vec y = all(1.5252734e-5f);
    y = y * part + 1.5403530e-4f;
    y = y * part + 1.3333558e-3f;
    y = y * part + 9.6181291e-3f;
    y = y * part + 5.5504109e-2f;
    y = y * part + 2.4022651e-1f;
    y = y * part + 6.9314718e-1f;
    y = y * part + 1.0f;
    ivec bits = (__builtin_convertvector(whole, ivec) + 127) << 23;
    return y * (vec)bits;
}

constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
constexpr float LOG2E = 1.44269504f;

// 2^x for x <= 0; 0 below 2^-126. NaN stays NaN.
inline vec exp2_of_negative(vec x) {
    vec safe = x < -126.0f ? all(-126.0f) : x;
    vec whole = (safe + ROUNDER) - ROUNDER;
    vec y = scaled_power(whole, safe - whole);
    return x < -126.0f ? vec{} : y;
}

// e^x, x clipped to [-87, 88]; 2 ulp. NaN stays NaN.
inline vec exp(vec x) {
    x = x < -87.0f ? all(-87.0f) : x;
    x = x > 88.0f ? all(88.0f) : x;
    vec whole = (x * LOG2E + ROUNDER) - ROUNDER;
    vec rest = x - whole * 0.693359375f;  // ln 2 in two parts, of which the first times a whole number is exact
    rest = rest + whole * 2.12194440e-4f;
    return scaled_power(whole, rest * LOG2E);
}

// cap * tanh(x / cap), both in units of log2 e as scores are: tanh z = 1 - 2 / (e^2z + 1). NaN stays NaN.
inline vec soft_capped(vec x, float cap) {
    vec power = exp(x * (2.0f / cap));
    return cap - (2.0f * cap) / (power + 1.0f);
}

}  // namespace simd
