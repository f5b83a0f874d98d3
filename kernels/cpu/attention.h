/* Paged attention with grouped queries: softmax(q k^T * scale [soft cap]) v over the keys (position - window, position] of each row, or
 * over those of its own chunk up to itself, where chunks begin at multiples of `chunk`.
 * A sink is one more logit of a head, which takes part in the sum only: the running maximum begins with it, and the sum with one.
 *
 * Decode rows and the rows of a prompt go through the same code: keys in blocks of 64 that begin at multiples of 64, an online softmax
 * from block to block (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1), every score and every output one chain of fused
 * multiply-adds (tile.h). What a row may not see has weight exactly 0 and adds nothing, so a row's result does not depend on the rows
 * that share its tile. */

#define KEYS 64  /* of a block */
#define LINES 96 /* query vectors that share a block's keys, about */

typedef struct {
    const float *query; /* [t, heads, d] */
    const float *keys;  /* [blocks, size, kv_heads, d]; values too */
    const float *values;
    const int64_t *tables; /* [n, stride] */
    const int64_t *positions; /* [t] */
    const int64_t *spans;     /* [num_spans, 3]: request, first row, rows; at most what `meshlm_span_rows` says */
    float *out;               /* [t, heads, d] */
    long num_spans;
    long heads, kv_heads, d, size, stride, window, chunk; /* window or chunk 0: none */
    float scale;
    float cap; /* scores s become cap tanh(s / cap); 0: they stay */
    const float *sinks; /* [heads], or 0 */
    const float *slopes; /* [heads], or 0: a score has its head's slope times (key - position) added */
} Attention;

/* One thread's memory, in floats: d8 and d16 are d rounded up. */
typedef struct {
    float *queries; /* [lines][d] */
    float *keys;    /* [KEYS / 16][d][16] */
    float *values;  /* [d16 / 16][KEYS][16] */
    float *weights; /* [lines][KEYS] */
    float *sums;    /* [lines][d16] */
    float *most, *total; /* [lines] */
} Scratch;

static const float nothing[1024]; /* what stands for a key or value that no row of a tile sees */

static inline long rounded(long n, long to) { return (n + to - 1) / to * to; }

/* Rows of a request that are computed together. */
long meshlm_span_rows(long heads, long kv_heads) {
    long rows = LINES / (heads / kv_heads);
    return rows ? rows : 1;
}

static long scratch_floats(long lines, long d) {
    return lines * (d + KEYS + rounded(d, WIDTH) + 2) + KEYS * (d + rounded(d, WIDTH));
}

static Scratch divide(float *memory, long lines, long d) {
    Scratch s;
    s.queries = memory;
    s.keys = s.queries + lines * d;
    s.values = s.keys + KEYS * d;
    s.weights = s.values + KEYS * rounded(d, WIDTH);
    s.sums = s.weights + lines * KEYS;
    s.most = s.sums + lines * rounded(d, WIDTH);
    s.total = s.most + lines;
    return s;
}

/* Eight rows of eight floats -> columns. */
static inline void transpose8(const float *const rows[8], long at, float *to, long to_stride) {
#ifdef __AVX2__
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(rows[i] + at);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) { /* pairs of rows, then fours, then eight */
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
#else
    for (long e = 0; e < 8; e++)
        for (long i = 0; i < 8; i++) to[e * to_stride + i] = rows[i][at + e];
#endif
}

/* Positions begin to end (of the 64 from `first` on) of one head: keys as panels [d][16]; where the values are. */
static void gather(const Attention *a, const Scratch *s, const int64_t *table, long h, long first, long begin, long end,
                   const float *values[KEYS]) {
    const float *keys[KEYS];
    long d = a->d, used = rounded(end, WIDTH);
    for (long j = 0; j < used; j++) {
        long at = first + j;
        int seen = j >= begin && j < end;
        long line = seen ? ((table[at / a->size] * a->size + at % a->size) * a->kv_heads + h) * d : 0;
        keys[j] = seen ? a->keys + line : nothing;
        values[j] = seen ? a->values + line : nothing;
        for (long e = 0; e < d; e += 16) __builtin_prefetch(values[j] + e);
    }
    for (long j = 0; j < used; j += LANES) {
        float *to = s->keys + j / WIDTH * d * WIDTH + j % WIDTH;
        long e = 0;
        for (; e + LANES <= d; e += LANES) transpose8(keys + j, e, to + e * WIDTH, WIDTH);
        for (; e < d; e++)
            for (long i = 0; i < LANES; i++) to[e * WIDTH + i] = keys[j + i][e];
    }
}

/* Values [end] as panels [64][16]. */
static void gather_values(const Scratch *s, const float *const values[KEYS], long end, long d) {
    for (long j = 0; j < end; j++) {
        long e = 0;
        for (; e + WIDTH <= d; e += WIDTH) {
            float *to = s->values + (e * KEYS) + j * WIDTH;
            store(to, load(values[j] + e));
            store(to + LANES, load(values[j] + e + LANES));
        }
        for (long i = e; i < rounded(d, WIDTH); i++) s->values[e * KEYS + j * WIDTH + i - e] = i < d ? values[j][i] : 0.0f;
    }
}

/* For few lines, as decode has: outputs of LINES lines (+)= weights times values where these lie, 8 * VECS columns at once. The chains
 * are tile.h's. */
#define SUM_FEW(LINES, VECS)                                                                                                   \
    static void sum_few_##LINES(const Scratch *s, const float *const values[KEYS], long end, long d) {                         \
        for (long e = 0; e < d; e += VECS * LANES) {                                                                           \
            vec sums[LINES][VECS];                                                                                             \
            for (int l = 0; l < LINES; l++)                                                                                    \
                for (int c = 0; c < VECS; c++) sums[l][c] = load(s->sums + l * d + e + c * LANES);                             \
            for (long j = 0; j < end; j++)                                                                                     \
                for (int l = 0; l < LINES; l++)                                                                                \
                    for (int c = 0; c < VECS; c++)                                                                             \
                        sums[l][c] = fma8(splat(s->weights[l * KEYS + j]), load(values[j] + e + c * LANES), sums[l][c]);       \
            for (int l = 0; l < LINES; l++)                                                                                    \
                for (int c = 0; c < VECS; c++) store(s->sums + l * d + e + c * LANES, sums[l][c]);                             \
        }                                                                                                                      \
    }
#define FEW 6
SUM_FEW(1, 4) SUM_FEW(2, 4) SUM_FEW(3, 4) SUM_FEW(4, 2) SUM_FEW(5, 2) SUM_FEW(6, 2)

/* Outputs of all lines (+)= weights times values. */
static void sum_values(const Scratch *s, const float *const values[KEYS], long lines, long end, long d) {
    static void (*const few[])(const Scratch *, const float *const *, long, long) = {0,         sum_few_1, sum_few_2, sum_few_3,
                                                                                     sum_few_4, sum_few_5, sum_few_6};
    if (lines <= FEW && d % (4 * LANES) == 0) {
        few[lines](s, values, end, d);
        return;
    }
    gather_values(s, values, end, d);
    long d16 = rounded(d, WIDTH);
    Tile sums = {.x = s->weights, .x_stride = KEYS, .panel = s->values, .k = end, .out = s->sums, .out_stride = d16, .more = 1};
    tile_panels(sums, lines, d16 / WIDTH, KEYS * WIDTH);
}

/* Scores [used] -> cap tanh(score / cap), where tanh(x) = 1 - 2 / (e^2x + 1). */
static void soft_cap(float *scores, long used, float cap) {
    for (long j = 0; j < used; j += LANES) {
        vec e = exp8(load(scores + j) * splat(2.0f / cap));
        store(scores + j, splat(cap) - splat(2.0f * cap) / (e + splat(1.0f)));
    }
}

/* Scores [used] of one line -> weights e^(score - most); the running maximum, sum and outputs follow. */
static void soften(const Attention *a, const Scratch *s, long line, long begin, long end, long used) {
    float *w = s->weights + line * KEYS, before = s->most[line];
    for (long j = 0; j < begin && j < used; j++) w[j] = -INFINITY;
    for (long j = end > 0 ? end : 0; j < used; j++) w[j] = -INFINITY;
    vec most = splat(before);
    for (long j = 0; j < used; j += LANES) most = max8(load(w + j), most);
    float now = most8(most);
    if (now == -INFINITY) { /* nothing seen yet */
        memset(w, 0, used * sizeof(float));
        return;
    }
    vec sum = splat(0.0f);
    for (long j = 0; j < used; j += LANES) {
        vec e = exp8(load(w + j) - splat(now));
        store(w + j, e);
        sum += e;
    }
    if (now != before) {
        long d16 = rounded(a->d, WIDTH);
        vec fade = exp8(splat(before - now));
        for (long e = 0; e < d16; e += LANES) store(s->sums + line * d16 + e, load(s->sums + line * d16 + e) * fade);
        s->total[line] *= fade[0];
    }
    s->most[line] = now;
    s->total[line] += sum8(sum);
}

/* The first key that a row at this position sees; it may be below 0. */
static inline long first_seen(const Attention *a, long position) {
    if (a->chunk) return position / a->chunk * a->chunk;
    return a->window ? position + 1 - a->window : 0;
}

/* Rows `row` to `row + rows` of one request, the heads that share KV head h. */
static void attend(const Attention *a, const Scratch *s, const int64_t *span, long h) {
    long d = a->d, d16 = rounded(d, WIDTH), group = a->heads / a->kv_heads, rows = span[2], lines = rows * group;
    const int64_t *table = a->tables + span[0] * a->stride, *positions = a->positions + span[1];
    for (long l = 0; l < lines; l++) {
        const float *q = a->query + ((span[1] + l / group) * a->heads + h * group + l % group) * d;
        for (long e = 0; e < d; e++) s->queries[l * d + e] = q[e] * a->scale;
        s->most[l] = a->sinks ? a->sinks[h * group + l % group] : -INFINITY;
        s->total[l] = a->sinks ? 1.0f : 0.0f;
    }
    memset(s->sums, 0, lines * d16 * sizeof(float));
    long last = positions[rows - 1] + 1, lowest = first_seen(a, positions[0]);
    if (lowest < 0) lowest = 0;
    for (long first = lowest / KEYS * KEYS; first < last; first += KEYS) {
        long begin = lowest > first ? lowest - first : 0, end = last - first < KEYS ? last - first : KEYS;
        long used = rounded(end, WIDTH);
        const float *values[KEYS];
        gather(a, s, table, h, first, begin, end, values);
        Tile scores = {.x = s->queries, .x_stride = d, .panel = s->keys, .k = d, .out = s->weights, .out_stride = KEYS};
        tile_panels(scores, lines, used / WIDTH, d * WIDTH);
        for (long l = 0; l < lines; l++) {
            long at = positions[l / group];
            if (a->cap) soft_cap(s->weights + l * KEYS, used, a->cap);
            if (a->slopes) {
                float slope = a->slopes[h * group + l % group];
                for (long j = 0; j < used; j++) s->weights[l * KEYS + j] += slope * (float)(first + j - at);
            }
            soften(a, s, l, first_seen(a, at) - first, at + 1 - first, used);
        }
        sum_values(s, values, lines, end, d);
    }
    for (long l = 0; l < lines; l++) {
        float *out = a->out + ((span[1] + l / group) * a->heads + h * group + l % group) * d;
        for (long e = 0; e < d; e++) out[e] = s->sums[l * d16 + e] / s->total[l];
    }
}

/* Query vectors of the longest span: what a thread's memory must have room for. */
static long most_lines(const Attention *a) {
    long most = 0;
    for (long i = 0; i < a->num_spans; i++) most = a->spans[3 * i + 2] > most ? a->spans[3 * i + 2] : most;
    return most * (a->heads / a->kv_heads);
}

/* All spans. memory: this thread's own, scratch_floats of these lines. */
static void each_attention(const Attention *a, float *memory, long lines) {
    Scratch s = divide(memory, lines, a->d);
#pragma omp for schedule(dynamic, 1) nowait
    for (long i = 0; i < a->num_spans * a->kv_heads; i++) { /* a prompt's last rows first: they take longest */
        long at = a->num_spans * a->kv_heads - 1 - i;
        attend(a, &s, a->spans + 3 * (at / a->kv_heads), at % a->kv_heads);
    }
}
