// What the kernels are given, as Python lays it out.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kv_formats.h"
#include "simd.h"

inline constexpr int SPLIT = 512;        // positions of one part of a long context
inline constexpr int SPLIT_TOKENS = 16;  // sequences with more new tokens have enough work items without parts

// Where the heads of a slot stand in the KV cache: vectors between blocks, between the tokens of a block, and its heads.
struct Slots {
    int64_t block_size, block_stride, token_stride, head_stride;

    int64_t of(int64_t slot) const { return slot / block_size * block_stride + slot % block_size * token_stride; }
};

// As engine/compute/operations/cpp_backend.py and layers_cpp.py lay it out.
struct Heads {
    const float *qkv;  // [num_tokens][(num_heads + 2 * num_kv_heads) * head_dim]
    float *query;      // [num_tokens][num_heads][head_dim]
    void *keys, *values;               // see Slots and KVFormat
    float *key_scales, *value_scales;  // ... of quantised vectors, 4 bytes a group
    const int64_t *slots, *positions;
    const float *q_norm, *k_norm, *cos, *sin;  // null: none; cos and sin [max_len][head_dim]
    int64_t num_tokens, num_heads, num_kv_heads, head_dim;
    Slots places;
    int64_t kv_format;
    float eps, norm_shift;  // norm_shift is added to the weights of the norms
};

// As engine/compute/attention/cpp_backend.py and layers_cpp.py lay it out.
struct Attention {
    const float *query;  // [num_tokens][num_heads][head_dim]
    const void *keys, *values;  // by block, token and head, with the strides below: vectors of kv_format
    const float *key_scales, *value_scales;  // of quantised vectors, 4 bytes a group
    float *output;  // [num_tokens][num_heads][value_dim]
    const int32_t *query_start, *contexts, *block_tables;
    const float *slopes;  // [num_heads], or null
    const float *sinks;   // the same: logits that take their share of the softmax and have no value
    int64_t block_stride, token_stride, head_stride;  // in vectors
    int64_t table_stride, num_sequences, num_heads, num_kv_heads;
    int64_t head_dim, value_dim, block_size, window;  // window 0: none
    int64_t sink_tokens;  // with a window, so many first keys are seen from everywhere
    int64_t kv_format;
    float scale, soft_cap;  // soft_cap 0: none
    float *workspace;  // [parts][num_heads][value_dim + 2], ours

    int group() const { return int(num_heads / num_kv_heads); }
    int padded_value_dim() const { return int((value_dim + simd::W - 1) / simd::W * simd::W); }
    int tokens(int sequence) const { return query_start[sequence + 1] - query_start[sequence]; }
    int past(int sequence) const { return contexts[sequence] - tokens(sequence); }
    int first_visible(int position) const { return window ? std::max(0, position - int(window) + 1) : 0; }  // but sinks
    int visible_sinks(int position) const { return std::min(int(sink_tokens), first_visible(position)); }
    // Of the sequence alone, so that its results depend neither on its company nor on the number of threads.
    int parts(int sequence) const {
        int visible = contexts[sequence] - first_visible(past(sequence));
        return tokens(sequence) > SPLIT_TOKENS ? 1 : std::max(1, (visible + SPLIT - 1) / SPLIT);
    }
};
