/* float32 inference kernels for the CPU. Compiled by build.py with the user's own compiler, for the user's own processor.
 *
 * Every function takes dense row-major float32 and splits its work over OpenMP threads. Weights are packed once into panels of
 * 16 outputs, [N/16][K][16], so that one pass over memory serves any number of rows (Goto and van de Geijn 2008, section 4).
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define WIDTH 16 /* outputs of a panel */
typedef float vec __attribute__((vector_size(32), aligned(4)));

static inline vec load(const float *p) { return *(const vec *)p; }
static inline vec splat(float x) { return (vec){x, x, x, x, x, x, x, x}; }

void meshlm_pack(const float *w, float *packed, long n, long k) {
    long panels = (n + WIDTH - 1) / WIDTH;
#pragma omp parallel for schedule(static)
    for (long p = 0; p < panels; p++)
        for (long i = 0; i < k; i++)
            for (long j = 0; j < WIDTH; j++) {
                long row = p * WIDTH + j;
                packed[(p * k + i) * WIDTH + j] = row < n ? w[row * k + i] : 0.0f;
            }
}

/* out[r, 0..16) = x[r, :] . panel, for ROWS rows: two vectors of accumulators a row stay in registers. */
#define TILE(ROWS)                                                                                                             \
    static void tile_##ROWS(const float *x, const float *panel, long k, float *out /* [ROWS][16] */, const float *next) {      \
        vec low[ROWS], high[ROWS];                                                                                             \
        for (int r = 0; r < ROWS; r++) low[r] = high[r] = splat(0.0f);                                                         \
        for (long i = 0; i < k; i++) {                                                                                         \
            vec a = load(panel + i * WIDTH), b = load(panel + i * WIDTH + 8);                                                  \
            __builtin_prefetch(next + i * WIDTH, 0, 2);                                                                        \
            for (int r = 0; r < ROWS; r++) {                                                                                   \
                vec s = splat(x[r * k + i]);                                                                                   \
                low[r] += s * a;                                                                                               \
                high[r] += s * b;                                                                                              \
            }                                                                                                                  \
        }                                                                                                                      \
        for (int r = 0; r < ROWS; r++) {                                                                                       \
            *(vec *)(out + r * WIDTH) = low[r];                                                                                \
            *(vec *)(out + r * WIDTH + 8) = high[r];                                                                           \
        }                                                                                                                      \
    }
TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)

/* One row: the sum is split over four chains, or the latency of the addition is what is waited for. */
static void tile_1(const float *x, const float *panel, long k, float *out, const float *next) {
    (void)next; /* one row reads as fast as memory gives */
    vec low[4], high[4];
    for (int c = 0; c < 4; c++) low[c] = high[c] = splat(0.0f);
    long i = 0;
    for (; i + 4 <= k; i += 4)
        for (int c = 0; c < 4; c++) {
            vec s = splat(x[i + c]);
            low[c] += s * load(panel + (i + c) * WIDTH);
            high[c] += s * load(panel + (i + c) * WIDTH + 8);
        }
    for (; i < k; i++) {
        vec s = splat(x[i]);
        low[0] += s * load(panel + i * WIDTH);
        high[0] += s * load(panel + i * WIDTH + 8);
    }
    *(vec *)out = (low[0] + low[1]) + (low[2] + low[3]);
    *(vec *)(out + 8) = (high[0] + high[1]) + (high[2] + high[3]);
}

/* out[m, n] = x[m, k] . w[n, k]^T + bias[n] (bias may be null); w packed. */
void meshlm_linear(const float *x, const float *packed, const float *bias, float *out, long m, long n, long k) {
    static void (*const tiles[])(const float *, const float *, long, float *, const float *) = {0,      tile_1, tile_2, tile_3,
                                                                                 tile_4, tile_5, tile_6};
    long panels = (n + WIDTH - 1) / WIDTH;
#pragma omp parallel for schedule(static)
    for (long p = 0; p < panels; p++) {
        const float *panel = packed + p * k * WIDTH;
        long first = p * WIDTH, wide = n - first < WIDTH ? n - first : WIDTH;
        float tile[6 * WIDTH];
        for (long r = 0; r < m;) {
            long rows = m - r;
            if (rows > 6) rows = rows < 12 ? (rows + 1) / 2 : 6;
            /* While the last rows meet this panel, the next one comes into the cache. */
            tiles[rows](x + r * k, panel, k, tile, r + rows >= m ? panel + k * WIDTH : panel);
            for (long i = 0; i < rows; i++) {
                float *to = out + (r + i) * n + first;
                for (long j = 0; j < wide; j++) to[j] = tile[i * WIDTH + j] + (bias ? bias[first + j] : 0.0f);
            }
            r += rows;
        }
    }
}

/* residual += x (unless x is null); out = residual / rms(residual) * weight. */
void meshlm_rms_norm(const float *x, float *residual, const float *weight, float *out, long m, long n, float eps) {
#pragma omp parallel for schedule(static) if (m * n > 16384)
    for (long r = 0; r < m; r++) {
        float *line = residual + r * n;
        float sum = 0.0f;
        if (x)
            for (long i = 0; i < n; i++) line[i] += x[r * n + i];
        for (long i = 0; i < n; i++) sum += line[i] * line[i];
        float scale = 1.0f / sqrtf(sum / (float)n + eps);
        for (long i = 0; i < n; i++) out[r * n + i] = line[i] * scale * weight[i];
    }
}

/* out[m, n] = silu(gate) * up, gate_up [m, 2n]. */
void meshlm_silu_mul(const float *gate_up, float *out, long m, long n) {
#pragma omp parallel for schedule(static) if (m * n > 4096)
    for (long r = 0; r < m; r++) {
        const float *gate = gate_up + 2 * r * n, *up = gate + n;
        for (long i = 0; i < n; i++) out[r * n + i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    }
}

static void head(const float *from, float *to, const float *norm, const float *table, long d, long rotary, float eps) {
    float line[1024];
    memcpy(line, from, d * sizeof(float));
    if (norm) {
        float sum = 0.0f;
        for (long i = 0; i < d; i++) sum += line[i] * line[i];
        float scale = 1.0f / sqrtf(sum / (float)d + eps);
        for (long i = 0; i < d; i++) line[i] *= scale * norm[i];
    }
    long half = rotary / 2;
    for (long i = 0; i < half; i++) {
        float c = table[i], s = table[half + i], a = line[i], b = line[half + i];
        to[i] = a * c - b * s;
        to[half + i] = b * c + a * s;
    }
    memcpy(to + rotary, line + rotary, (d - rotary) * sizeof(float));
}

/* qkv [t, (heads + 2 kv_heads) d] -> query [t, heads, d]; keys and values go to their slots of the cache. d <= 1024. */
void meshlm_rope_cache(const float *qkv, const int64_t *positions, const int64_t *slots, const float *table, const float *q_norm,
                       const float *k_norm, float eps, float *query, float *keys, float *values, long t, long heads,
                       long kv_heads, long d, long rotary) {
    long width = (heads + 2 * kv_heads) * d;
#pragma omp parallel for schedule(static) if (t > 8)
    for (long i = 0; i < t; i++) {
        const float *line = qkv + i * width, *angles = table + positions[i] * rotary;
        float *key = keys + slots[i] * kv_heads * d, *value = values + slots[i] * kv_heads * d;
        for (long h = 0; h < heads; h++) head(line + h * d, query + (i * heads + h) * d, q_norm, angles, d, rotary, eps);
        for (long h = 0; h < kv_heads; h++) head(line + (heads + h) * d, key + h * d, k_norm, angles, d, rotary, eps);
        memcpy(value, line + (heads + kv_heads) * d, kv_heads * d * sizeof(float));
    }
}

/* One query token a request over its paged context. query, out [n, heads, d]; keys, values [blocks, size, kv_heads, d];
 * tables [n, stride]. Two passes: scores of a whole context, then their weighted sum of values. Returns 0, or 1 without memory. */
int meshlm_paged_decode(const float *query, const float *keys, const float *values, const int64_t *tables, const int64_t *lens,
                        float *out, long n, long heads, long kv_heads, long d, long size, long stride, float scale,
                        long window) {
    long group = heads / kv_heads;
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (long r = 0; r < n; r++)
        for (long h = 0; h < kv_heads; h++) {
            long len = lens[r], begin = window && len > window ? len - window : 0, count = len - begin;
            float *scores = malloc(sizeof(float) * group * count);
            if (!scores) {
                failed = 1;
                continue;
            }
            const float *q = query + (r * heads + h * group) * d;
            float *o = out + (r * heads + h * group) * d;
            const int64_t *table = tables + r * stride;
            for (long i = 0; i < count;) { /* a block at a time: one division for all of its keys */
                long at = begin + i, within = at % size, here = size - within < count - i ? size - within : count - i;
                const float *key = keys + ((table[at / size] * size + within) * kv_heads + h) * d;
                for (long j = 0; j < here; j++, key += kv_heads * d)
                    for (long g = 0; g < group; g++) {
                        float sum = 0.0f;
                        for (long e = 0; e < d; e++) sum += q[g * d + e] * key[e];
                        scores[g * count + i + j] = sum * scale;
                    }
                i += here;
            }
            for (long g = 0; g < group; g++) {
                float *line = scores + g * count, most = line[0], sum = 0.0f;
                for (long i = 1; i < count; i++) most = line[i] > most ? line[i] : most;
                for (long i = 0; i < count; i++) line[i] = expf(line[i] - most);
                for (long i = 0; i < count; i++) sum += line[i];
                for (long i = 0; i < count; i++) line[i] /= sum;
            }
            memset(o, 0, sizeof(float) * group * d);
            for (long i = 0; i < count;) {
                long at = begin + i, within = at % size, here = size - within < count - i ? size - within : count - i;
                const float *value = values + ((table[at / size] * size + within) * kv_heads + h) * d;
                for (long j = 0; j < here; j++, value += kv_heads * d)
                    for (long g = 0; g < group; g++) {
                        float weight = scores[g * count + i + j];
                        for (long e = 0; e < d; e++) o[g * d + e] += weight * value[e];
                    }
                i += here;
            }
            free(scores);
        }
    return failed;
}
