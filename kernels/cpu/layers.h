/* Attention alone, and whole decoder layers one after the other in one team of threads: a step then starts its threads once.
 * A layer is what workers/models/decoder.py composes; every operation is the one that exists alone, so results are the same. */

typedef struct { /* one layer; null: there is none */
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    const uint8_t *qkv, *o, *gate_up, *down;
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;
    float *keys, *values; /* [blocks, size, kv_heads, d] */
    const int64_t *slots, *tables; /* of the step's tokens and requests, in this layer's group */
    int64_t window;
} Layer;

typedef struct { /* a step; t tokens */
    const Layer *layers;
    const float *table; /* of rope [positions, rotary] */
    const int64_t *positions, *spans;
    float *x, *stream;                     /* [t, hidden]: what comes in, and goes out before the last addition; the residual stream */
    float *normed, *qkv, *query, *attended; /* [t, ...] */
    float *gate_up, *gated;
    uint8_t *rounded; /* t rows of rounded.h, of the most inputs */
    int64_t num_layers, t, hidden, wide, heads, kv_heads, d, rotary, size, stride, num_spans;
    int64_t act; /* 0 silu, 1 gelu, 2 gelu by tanh */
    double scale, eps;
} Step;

enum { SILU, GELU };

static void each_layer_attention(const Step *s, const Layer *layer, float *memory, long lines) {
    each_rope_cache(s->qkv, s->positions, layer->slots, s->table, layer->q_norm, layer->k_norm, (float)s->eps, s->query, layer->keys,
                    layer->values, s->t, s->heads, s->kv_heads, s->d, s->rotary);
#pragma omp barrier
    Attention a = {.query = s->query, .keys = layer->keys, .values = layer->values, .tables = layer->tables};
    a.positions = s->positions, a.spans = s->spans, a.out = s->attended, a.num_spans = s->num_spans;
    a.heads = s->heads, a.kv_heads = s->kv_heads, a.d = s->d, a.size = s->size, a.stride = s->stride;
    a.scale = (float)s->scale, a.window = layer->window;
    each_attention(&a, memory, lines);
}

static void each_layer(const Step *s, const Layer *layer, int first, float *memory, long lines) {
    long t = s->t, hidden = s->hidden, inner = s->heads * s->d, width = inner + 2 * s->kv_heads * s->d;
    float eps = (float)s->eps;
    each_rms_norm(first ? 0 : s->x, s->stream, layer->input_norm, s->normed, t, hidden, eps);
#pragma omp barrier
    each_linear(s->normed, layer->qkv, layer->qkv_bias, s->qkv, s->rounded, t, width, hidden);
#pragma omp barrier
    each_layer_attention(s, layer, memory, lines);
#pragma omp barrier
    each_linear(s->attended, layer->o, layer->o_bias, s->x, s->rounded, t, hidden, inner);
#pragma omp barrier
    each_rms_norm(s->x, s->stream, layer->post_norm, s->normed, t, hidden, eps);
#pragma omp barrier
    each_linear(s->normed, layer->gate_up, layer->gate_up_bias, s->gate_up, s->rounded, t, 2 * s->wide, hidden);
#pragma omp barrier
    if (s->act == SILU)
        each_silu_mul(s->gate_up, s->gated, t, s->wide);
    else
        each_gelu_mul(s->gate_up, s->gated, t, s->wide, s->act != GELU);
#pragma omp barrier
    each_linear(s->gated, layer->down, layer->down_bias, s->x, s->rounded, t, hidden, s->wide);
#pragma omp barrier
}

/* The workspace of one thread in a step of one token. */
typedef struct {
    float *stream, *row; /* [hidden], [the most inputs of a product] */
    uint8_t *rounded;
} ThreadWorkspace;

static void product_of_row(const float *row, const uint8_t *packed, const float *bias, float *out, ThreadWorkspace own, long n, long k) {
    if (rounds(packed)) round_row(row, own.rounded, k);
    each_product(row, packed, bias, out, own.rounded, 1, n, k);
#pragma omp barrier
}

/* The same for one token: what is little work (norms, the gate, rounding) each thread does for itself instead of waiting for another, so
 * that a layer has 6 barriers and not 13. */
static void each_layer_of_one(const Step *s, const Layer *layer, int first, float *memory, long lines, ThreadWorkspace own) {
    long hidden = s->hidden, inner = s->heads * s->d, width = inner + 2 * s->kv_heads * s->d, wide = s->wide;
    float eps = (float)s->eps;
    rms_norm(first ? 0 : s->x, own.stream, layer->input_norm, own.row, hidden, eps);
    product_of_row(own.row, layer->qkv, layer->qkv_bias, s->qkv, own, width, hidden);
    each_layer_attention(s, layer, memory, lines);
#pragma omp barrier
    product_of_row(s->attended, layer->o, layer->o_bias, s->x, own, hidden, inner);
    rms_norm(s->x, own.stream, layer->post_norm, own.row, hidden, eps);
    product_of_row(own.row, layer->gate_up, layer->gate_up_bias, s->gate_up, own, 2 * wide, hidden);
    silu_mul_part(s->gate_up, s->gate_up + wide, own.row, 0, wide);
    product_of_row(own.row, layer->down, layer->down_bias, s->x, own, hidden, wide);
}

/* All layers; the stream holds the embeddings at first. At the end stream + x is the result. Returns 0, or 1 without memory. */
int meshlm_layers(const Step *s) {
    Attention a = {.spans = s->spans, .num_spans = s->num_spans, .heads = s->heads, .kv_heads = s->kv_heads};
    long lines = most_lines(&a), inner = s->heads * s->d, most = s->hidden > s->wide ? s->hidden : s->wide;
    if (inner > most) most = inner;
    int failed = 0, of_one = s->t == 1 && s->act == SILU;
#pragma omp parallel
    {
        float *memory = malloc(sizeof(float) * scratch_floats(lines, s->d));
        ThreadWorkspace own = {.stream = malloc(sizeof(float) * (s->hidden + most)), .rounded = malloc(rounded_bytes(most))};
        if (!memory || !own.stream || !own.rounded) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (of_one && !failed) {
            own.row = own.stream + s->hidden;
            memcpy(own.stream, s->stream, sizeof(float) * s->hidden);
        }
        for (long i = 0; i < s->num_layers && !failed; i++) {
            if (of_one)
                each_layer_of_one(s, s->layers + i, i == 0, memory, lines, own);
            else
                each_layer(s, s->layers + i, i == 0, memory, lines);
        }
        if (of_one && !failed) {
#pragma omp single nowait
            memcpy(s->stream, own.stream, sizeof(float) * s->hidden);
        }
        free(memory), free(own.stream), free(own.rounded);
    }
    return failed;
}

/* Attention of all spans; see attention.h. Returns 0, or 1 without memory. */
int meshlm_attention(const float *query, const float *keys, const float *values, const int64_t *tables, const int64_t *positions,
                     const int64_t *spans, float *out, long num_spans, long heads, long kv_heads, long d, long size, long stride,
                     float scale, float cap, long window, long chunk, const float *sinks,
                     const float *slopes) {
    Attention a = {.query = query, .keys = keys, .values = values, .tables = tables, .positions = positions, .spans = spans};
    a.out = out, a.num_spans = num_spans, a.heads = heads, a.kv_heads = kv_heads, a.d = d, a.size = size, a.stride = stride;
    a.scale = scale, a.cap = cap, a.window = window, a.chunk = chunk, a.sinks = sinks, a.slopes = slopes;
    long lines = most_lines(&a);
    int failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        float *memory = malloc(sizeof(float) * scratch_floats(lines, d));
        failed = !memory;
        if (memory) each_attention(&a, memory, lines);
        free(memory);
    }
    return failed;
}
