/* The layers of an encoder with norms behind its sums (BERT) in one team of threads:
 *     x = norm(x + o(attention(qkv(x)))); x = norm(x + down(act(up(x)))).
 * Attention is attention.h's: keys and values are pages of one token, and each row sees up to the last position of its prompt. */

typedef struct { /* one layer */
    const uint8_t *qkv, *o, *up, *down;
    const float *qkv_bias, *o_bias, *up_bias, *down_bias;
    const float *attention_norm, *attention_shift, *mlp_norm, *mlp_shift;
} EncoderLayer;

typedef struct { /* a step; t tokens; hidden, and so wide lines, are multiples of 8 */
    const EncoderLayer *layers;
    const int64_t *positions, *tables, *spans;
    float *x; /* [t, hidden]: embeddings, and at the end the states */
    float *qkv, *query, *keys, *values, *attended, *sum, *wide; /* [t, ...] */
    uint8_t *rounded; /* t rows of rounded.h, of the most inputs */
    int64_t num_layers, t, hidden, inner, heads, d, stride, num_spans;
    int64_t act; /* 1 gelu, 2 gelu by tanh, 3 relu */
    double scale, eps;
} EncoderStep;

/* erf by formula 7.1.26 of Abramowitz and Stegun, within 1.5e-7; 1 + erf(-z) is computed without a difference. */
static inline vec gelu8(vec x) {
    vec z = max8(x, -x) * splat(0.70710678f);
    vec t = splat(1.0f) / fma8(z, splat(0.3275911f), splat(1.0f));
    vec p = fma8(t, splat(1.061405429f), splat(-1.453152027f));
    p = fma8(p, t, splat(1.421413741f));
    p = fma8(p, t, splat(-0.284496736f));
    p = fma8(p, t, splat(0.254829592f)) * t * exp8(-z * z);
    return splat(0.5f) * x * select8(x < splat(0.0f), p, splat(2.0f) - p);
}

/* By tanh(u) = 1 - 2 / (e^2u + 1). */
static inline vec gelu_tanh8(vec x) {
    vec u = splat(1.5957691216f) * fma8(x * x * x, splat(0.044715f), x);
    return x - x / (exp8(u) + splat(1.0f));
}

static void each_act(float *x, long count, long act) {
#pragma omp for schedule(static) nowait
    for (long i = 0; i < count; i += LANES) {
        vec v = load(x + i);
        store(x + i, act == 1 ? gelu8(v) : act == 2 ? gelu_tanh8(v) : max8(v, splat(0.0f)));
    }
}

/* x = layer norm of x + y. */
static void each_add_layer_norm(const float *y, float *x, const float *weight, const float *shift, long m, long n, float eps) {
#pragma omp for schedule(static) nowait
    for (long r = 0; r < m; r++) {
        float *line = x + r * n;
        const float *more = y + r * n;
        vec sum = splat(0.0f), spread = splat(0.0f);
        for (long i = 0; i < n; i += LANES) {
            vec v = load(line + i) + load(more + i);
            store(line + i, v);
            sum += v;
        }
        vec mean = splat(sum8(sum) / (float)n);
        for (long i = 0; i < n; i += LANES) {
            vec v = load(line + i) - mean;
            spread = fma8(v, v, spread);
        }
        vec scale = splat(1.0f / sqrtf(sum8(spread) / (float)n + eps));
        for (long i = 0; i < n; i += LANES)
            store(line + i, fma8((load(line + i) - mean) * scale, load(weight + i), load(shift + i)));
    }
}

/* The lines of qkv [t, 3 width] to query, keys and values [t, width] each. */
static void each_split(const float *qkv, float *query, float *keys, float *values, long t, long width) {
#pragma omp for schedule(static) nowait
    for (long r = 0; r < t; r++) {
        memcpy(query + r * width, qkv + 3 * r * width, width * sizeof(float));
        memcpy(keys + r * width, qkv + (3 * r + 1) * width, width * sizeof(float));
        memcpy(values + r * width, qkv + (3 * r + 2) * width, width * sizeof(float));
    }
}

static void each_encoder_layer(const EncoderStep *s, const EncoderLayer *layer, float *memory, long lines) {
    long t = s->t, hidden = s->hidden, width = s->heads * s->d;
    float eps = (float)s->eps;
    each_linear(s->x, layer->qkv, layer->qkv_bias, s->qkv, s->rounded, t, 3 * width, hidden);
#pragma omp barrier
    each_split(s->qkv, s->query, s->keys, s->values, t, width);
#pragma omp barrier
    Attention a = {.query = s->query, .keys = s->keys, .values = s->values, .tables = s->tables};
    a.positions = s->positions, a.spans = s->spans, a.out = s->attended, a.num_spans = s->num_spans;
    a.heads = a.kv_heads = s->heads, a.d = s->d, a.size = 1, a.stride = s->stride, a.scale = (float)s->scale;
    each_attention(&a, memory, lines);
#pragma omp barrier
    each_linear(s->attended, layer->o, layer->o_bias, s->sum, s->rounded, t, hidden, width);
#pragma omp barrier
    each_add_layer_norm(s->sum, s->x, layer->attention_norm, layer->attention_shift, t, hidden, eps);
#pragma omp barrier
    each_linear(s->x, layer->up, layer->up_bias, s->wide, s->rounded, t, s->inner, hidden);
#pragma omp barrier
    each_act(s->wide, t * s->inner, s->act);
#pragma omp barrier
    each_linear(s->wide, layer->down, layer->down_bias, s->sum, s->rounded, t, hidden, s->inner);
#pragma omp barrier
    each_add_layer_norm(s->sum, s->x, layer->mlp_norm, layer->mlp_shift, t, hidden, eps);
#pragma omp barrier
}

/* All layers. Returns 0, or 1 without memory. */
int meshlm_encoder(const EncoderStep *s) {
    Attention a = {.spans = s->spans, .num_spans = s->num_spans, .heads = s->heads, .kv_heads = s->heads};
    long lines = most_lines(&a);
    int failed = 0;
#pragma omp parallel
    {
        float *memory = malloc(sizeof(float) * scratch_floats(lines, s->d));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        for (long i = 0; i < s->num_layers && !failed; i++) each_encoder_layer(s, s->layers + i, memory, lines);
        free(memory);
    }
    return failed;
}
