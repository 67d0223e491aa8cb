// The LoRA adapters of a step, as engine/compute/lora/cpp_backend.py lays them out.
#pragma once

#include <cstdint>

// The matrices of one module behind a part of a linear layer's outputs.
struct LoraPart {
    const void *a;  // [rank][in_features, rounded up to 16]
    const void *b;  // panels [out_features / 64][rank][64]
    int64_t rank, begin, out_features;
    float scale;
    int32_t is_bfloat16;  // else both are float32
};

struct LoraSlot {
    int64_t num_parts;
    LoraPart parts[4];
};

// All slots of one linear layer.
struct LoraLinear {
    const LoraSlot *slots;
    int64_t in_features, out_features;
};

struct LoraTile {
    int64_t slot, begin, count;
};

struct LoraStep {
    const LoraTile *tiles;
    int64_t num_tiles;
};

extern "C" void sojourn_lora(const LoraLinear *linear, const LoraStep *step, const float *x, float *y);
