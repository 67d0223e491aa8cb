// All layers of a decoder in one call: between its kernels stands no Python.

#include <chrono>

#include "kernels.h"
#include "lora.h"

extern "C" {
void sojourn_rms_norm(const float *x, const float *weight, float *output, int64_t rows, int64_t size, float eps,
                      float shift);
void sojourn_add_rms_norm(const float *x, float *residual, const float *weight, float *output, int64_t rows,
                          int64_t size, float eps, float shift);
void sojourn_write_heads(const Heads *heads);
void sojourn_attend(Attention *attention);
}

namespace {

// A packed matrix and its kernel: weight_formats.py. The floats have two parts, int8 has four, groups have six.
struct Linear {
    void *kernel;
    int64_t num_parts, out_features, in_features;
    const void *parts[6];

    template <class... Parts>
    void multiply(const float *x, float *y, int64_t rows, Parts... of) const {
        using Kernel = void (*)(const float *, float *, int64_t, int64_t, int64_t, Parts...);
        reinterpret_cast<Kernel>(kernel)(x, y, rows, out_features, in_features, of...);
    }

    void operator()(const float *x, float *y, int64_t rows) const {
        const void *const *p = parts;
        if (num_parts == 2) multiply(x, y, rows, p[0], p[1]);
        else if (num_parts == 4) multiply(x, y, rows, p[0], p[1], p[2], p[3]);
        else multiply(x, y, rows, p[0], p[1], p[2], p[3], p[4], p[5]);
    }
};

struct Layer {
    Linear qkv, o, gate_up, down;
    const float *post_norm, *next_norm;  // the latter of the layer behind, or the last of all
    const float *q_norm, *k_norm;        // or null
    const float *attention_norm, *mlp_norm;  // of what each of them gives, or null
    const float *cos, *sin;              // [max_len][head_dim], or null
    void *keys, *values;
    float *key_scales, *value_scales;  // or null
    int64_t window;  // 0: none
    const LoraLinear *adapters[4];  // of the matrices; null: none
};

// Python's time.monotonic_ns
int64_t monotonic_ns() {
    auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

}  // namespace

// As engine/compute/layers_cpp.py lays it out.
struct Layers {
    const Layer *layers;
    int64_t num_layers, hidden_size, intermediate_size;
    void (*gate)(const float *gate_up, float *output, int64_t rows, int64_t size);
    float *residual;  // [num_tokens][hidden_size], in and out
    float *normed;    // the same: of the residual by the first layer's norm, and at last by the final one
    float *room;      // [num_tokens][what the largest layer needs]
    Heads heads;      // what all layers share
    Attention attention;
    float eps, shift;
    const LoraStep *adapters;  // null: no token of the step uses one
    int64_t *marks;  // [1 + 9 * num_layers] readings of the clock, before and after every part; null: none
};

extern "C" void sojourn_layers(Layers *arguments) {
    Layers &all = *arguments;
    Heads &heads = all.heads;
    const int64_t rows = heads.num_tokens, query_size = heads.num_heads * heads.head_dim;
    float *query = all.room, *x = query + rows * query_size, *attended = x + rows * all.hidden_size;
    // Queries, keys and values are done with when the feed-forward part begins.
    float *qkv = attended + rows * query_size, *gate_up = qkv, *gated = gate_up + rows * 2 * all.intermediate_size;
    heads.qkv = qkv, heads.query = query;
    all.attention.query = query, all.attention.output = attended;
    auto mark = [marks = all.marks]() mutable {
        if (marks) *marks++ = monotonic_ns();
    };
    auto add_norm = [&](const float *output_norm, const float *weight) {
        if (output_norm) sojourn_rms_norm(x, output_norm, x, rows, all.hidden_size, all.eps, all.shift);
        sojourn_add_rms_norm(x, all.residual, weight, all.normed, rows, all.hidden_size, all.eps, all.shift);
    };
    auto add = [step = all.adapters](const LoraLinear *adapters, const float *x, float *y) {
        if (step && adapters) sojourn_lora(adapters, step, x, y);
    };
    mark();
    for (const Layer *layer = all.layers; layer != all.layers + all.num_layers; layer++) {
        layer->qkv(all.normed, qkv, rows);
        add(layer->adapters[0], all.normed, qkv);
        mark();
        heads.q_norm = layer->q_norm, heads.k_norm = layer->k_norm;
        heads.keys = layer->keys, heads.values = layer->values;
        heads.cos = layer->cos, heads.sin = layer->sin;
        heads.key_scales = layer->key_scales, heads.value_scales = layer->value_scales;
        sojourn_write_heads(&heads);
        mark();
        all.attention.keys = layer->keys, all.attention.values = layer->values;
        all.attention.key_scales = layer->key_scales, all.attention.value_scales = layer->value_scales;
        all.attention.window = layer->window;
        sojourn_attend(&all.attention);
        mark();
        layer->o(attended, x, rows);
        add(layer->adapters[1], attended, x);
        mark();
        add_norm(layer->attention_norm, layer->post_norm);
        mark();
        layer->gate_up(all.normed, gate_up, rows);
        add(layer->adapters[2], all.normed, gate_up);
        mark();
        all.gate(gate_up, gated, rows, all.intermediate_size);
        mark();
        layer->down(gated, x, rows);
        add(layer->adapters[3], gated, x);
        mark();
        add_norm(layer->mlp_norm, layer->next_norm);
        mark();
    }
}
