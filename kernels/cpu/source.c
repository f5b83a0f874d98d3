/* Inference kernels for the CPU, computing in float32, or with weights that say so in integers (rounded.h). Compiled by build.py with the user's own compiler, for the user's own processor.
 *
 * Every function takes dense row-major float32 and splits its work over OpenMP threads. Weights are packed once into panels of
 * 16 outputs, as float32 (or 16 bits, where these are enough) or as codes of 4 to 8 bits (packed.h), so that one pass over memory serves any
 * number of rows (Goto and van de Geijn 2008, section 4).
 *
 * Batch-invariant: each row of a result takes the same operations in the same order whatever rows are computed beside it, however a
 * prompt was cut, and with any number of threads. A thread computes whole elements; no sum is split between threads. So a request that
 * is computed again in one prefill has, to the last bit, the logits that decoding gave it. Keep it so: no sum whose order depends on
 * the number of rows, and no flag in build.py that lets the compiler order sums.
 */

#include <omp.h>

#include "vector.h"

#include "tile.h"

#include "packed.h"

#include "narrow.h"

#include "repack.h"

#include "rounded.h"

#include "attention.h"

#define ROWS 96   /* rows of x that stay in the second-level cache while the panels pass */
#define CHUNK 256 /* inputs of a panel that become float32 at once: 16 KiB */

/* w [n, k] -> the panels, of form FLOATS, BF16 or FP16, of a packed weight whose table is written. */
void meshlm_pack(const float *w, uint8_t *packed, long n, long k) {
    long panels = (n + WIDTH - 1) / WIDTH;
#pragma omp parallel for schedule(static)
    for (long p = 0; p < panels; p++) {
        Panel to = panel_of(packed, p);
        for (long i = 0; i < k; i++)
            for (long j = 0; j < WIDTH; j++) {
                float value = p * WIDTH + j < n ? w[(p * WIDTH + j) * k + i] : 0.0f;
                if (to.form == FLOATS)
                    ((float *)to.records)[i * WIDTH + j] = value;
                else
                    ((uint16_t *)to.records)[i * WIDTH + j] = narrowed(value, to.form);
            }
    }
}

/* The functions named each_* are called by all threads of a team, and do not wait for the others at their end. */

/* One to ROWS rows over one panel: sums[r][j]. */
static void panel_sums(const float *x, Panel p, float *sums, long rows, long k) {
    Tile t = {.x = x, .x_stride = k, .panel = (const float *)p.records, .k = k, .out = sums, .out_stride = WIDTH};
    long passes = (rows + HEIGHT - 1) / HEIGHT;
    t.next = t.panel + k * WIDTH, t.next_step = (WIDTH + passes - 1) / passes; /* comes into the cache while the rows meet this one */
    tiles(t, rows);
}

/* The same where the panel is not float32: the first few rows, or none, unpack it into the first-level cache, chunk by chunk, for the
 * rest. What has 16 bits is widened there for all rows. */
static void codes_sums(const float *x, Panel p, float *sums, long rows, long k) {
    static void (*const unpack[2][5])(const Unpacking *) = {
        {four_0, four_1, four_2, four_3, four_4}, {eight_0, eight_1, eight_2, eight_3, eight_4}};
    float chunk[CHUNK * WIDTH] __attribute__((aligned(64)));
    Unpacking u = {.x_stride = k, .form = forms[p.form], .out = sums, .out_stride = WIDTH};
    int narrow = u.form.bits == 16;
    long over = rows % HEIGHT, first = over <= 4 && !narrow ? over : 0; /* then come whole tiles */
    u.kept = rows > first ? chunk : 0;
    for (long i = 0; i < k; i += CHUNK) {
        u.count = k - i < CHUNK ? k - i : CHUNK, u.x = x + i, u.more = i > 0;
        u.records[0] = p.records + meshlm_panel_bytes(p.form, i);
        if (narrow)
            widen(u.records[0], p.form, chunk, u.count);
        else
            unpack[u.form.bits == 8][first](&u);
        Tile t = {.x = u.x + first * k, .x_stride = k, .panel = chunk, .k = u.count, .out = sums + first * WIDTH, .out_stride = WIDTH};
        t.more = u.more, t.next = (const float *)(u.records[0] + meshlm_panel_bytes(p.form, u.count)), t.next_step = 1;
        tiles(t, rows - first);
    }
}

/* One row over SIDE panels that lie side by side: sums[SIDE * 16]. */
static void side_sums(const float *x, const Panel *p, float *sums, long k) {
    if (p->form == FLOATS) {
        Tile t = {.x = x, .panel = (const float *)p->records, .k = k, .out = sums};
        tile_side(&t, k * WIDTH);
        return;
    }
    if (forms[p->form].bits == 16) {
        narrow_side(x, p, sums, k);
        return;
    }
    Unpacking u = {.x = x, .form = forms[p->form], .count = k};
    for (int c = 0; c < SIDE; c += 2) {
        u.records[0] = p[c].records, u.records[1] = p[c + 1].records, u.out = sums + c * WIDTH;
        (u.form.bits == 8 ? eight_side : four_side)(&u);
    }
}

/* Panels that a thread takes at once: its weights follow one another, and a thread that is late leaves half of its share to the others. */
static inline long taken_at_once(long panels) {
    long half = panels / (2 * omp_get_num_threads());
    return half ? half : 1;
}

/* All panels of a weight are multiplied in one way. */
static inline int rounds(const uint8_t *packed) { return panel_of(packed, 0).rounded; }

/* out[m, n] = x[m, k] . w[n, k]^T + bias[n] (bias may be null). rounded: of x, of a weight that rounds. */
static void each_product(const float *x, const uint8_t *packed, const float *bias, float *out, const uint8_t *rounded, long m, long n,
                         long k) {
    int integers = rounds(packed);
    long panels = (n + WIDTH - 1) / WIDTH, at_once = m == 1 && !integers ? SIDE : 1;
    long share = integers ? taken_at_once(panels) : 2;
    float sums[ROWS * WIDTH] __attribute__((aligned(64)));
    for (long r = 0; r < m; r += ROWS) {
        long rows = m - r < ROWS ? m - r : ROWS;
#pragma omp for schedule(dynamic, share) nowait
        for (long first = 0; first < panels; first += at_once) {
            long here = panels - first < at_once ? panels - first : at_once, left = n - first * WIDTH;
            long wide = left < here * WIDTH ? left : here * WIDTH;
            Panel p[SIDE];
            int alike = here == SIDE;
            for (long c = 0; c < here; c++) {
                p[c] = panel_of(packed, first + c);
                alike = alike && p[c].form == p[0].form;
            }
            if (integers)
                for (long c = 0; c < here; c++) rounded_sums(rounded + r * rounded_bytes(k), p[c], sums + c * WIDTH, rows, k);
            else if (alike)
                side_sums(x, p, sums, k);
            else
                for (long c = 0; c < here; c++)
                    (p[c].form == FLOATS ? panel_sums : codes_sums)(x + r * k, p[c], sums + c * WIDTH, rows, k);
            float *to = out + r * n + first * WIDTH;
            const float *b = bias ? bias + first * WIDTH : 0;
            for (long i = 0; i < rows; i++)
                for (long j = 0; j < wide; j++) to[i * n + j] = sums[i * WIDTH + j] + (b ? b[j] : 0.0f);
        }
    }
}

/* The same behind the rounding. rounded: m * rounded_bytes(k) bytes, of a weight that rounds. */
static void each_linear(const float *x, const uint8_t *packed, const float *bias, float *out, uint8_t *rounded, long m, long n,
                        long k) {
    if (rounds(packed)) {
        each_round(x, rounded, m, k);
#pragma omp barrier
    }
    each_product(x, packed, bias, out, rounded, m, n, k);
}

/* Memory for the rounded rows of a product, if its weight rounds. Returns 1 if there is none. */
static int round_room(const uint8_t *packed, long m, long k, uint8_t **rounded) {
    *rounded = rounds(packed) ? malloc(m * rounded_bytes(k) + 1) : 0;
    return rounds(packed) && !*rounded;
}

/* Returns 0, or 1 without memory. */
int meshlm_linear(const float *x, const uint8_t *packed, const float *bias, float *out, long m, long n, long k) {
    uint8_t *rounded;
    if (round_room(packed, m, k, &rounded)) return 1;
#pragma omp parallel
    each_linear(x, packed, bias, out, rounded, m, n, k);
    free(rounded);
    return 0;
}

/* residual += x (unless x is null); out = residual / rms(residual) * weight, of one row. */
static void rms_norm(const float *x, float *residual, const float *weight, float *out, long n, float eps) {
    if (x)
        for (long i = 0; i < n; i++) residual[i] += x[i];
    float scale = 1.0f / sqrtf(squares(residual, n) / (float)n + eps);
    for (long i = 0; i < n; i++) out[i] = residual[i] * scale * weight[i];
}

static void each_rms_norm(const float *x, float *residual, const float *weight, float *out, long m, long n, float eps) {
#pragma omp for schedule(static) nowait
    for (long r = 0; r < m; r++) rms_norm(x ? x + r * n : 0, residual + r * n, weight, out + r * n, n, eps);
}

void meshlm_rms_norm(const float *x, float *residual, const float *weight, float *out, long m, long n, float eps) {
#pragma omp parallel if (m * n > 16384)
    each_rms_norm(x, residual, weight, out, m, n, eps);
}

static inline vec silu_mul(vec gate, vec up) { return gate / (splat(1.0f) + exp8(-gate)) * up; }

/* Numbers i to end of a row: out = silu(gate) * up. */
static void silu_mul_part(const float *gate, const float *up, float *out, long i, long end) {
    for (; i + LANES <= end; i += LANES) store(out + i, silu_mul(load(gate + i), load(up + i)));
    if (i < end) store_part(out + i, silu_mul(load_part(gate + i, end - i), load_part(up + i, end - i)), end - i);
}

/* out[m, n] = silu(gate) * up, gate_up [m, 2n]. */
static void each_silu_mul(const float *gate_up, float *out, long m, long n) {
    long parts = (n + 255) / 256;
#pragma omp for schedule(static) nowait
    for (long p = 0; p < m * parts; p++) {
        long r = p / parts, i = p % parts * 256, end = i + 256 < n ? i + 256 : n;
        const float *gate = gate_up + 2 * r * n;
        silu_mul_part(gate, gate + n, out + r * n, i, end);
    }
}

void meshlm_silu_mul(const float *gate_up, float *out, long m, long n) {
#pragma omp parallel if (m * n > 4096)
    each_silu_mul(gate_up, out, m, n);
}

/* out[m, n] = gelu(gate) * up (Hendrycks and Gimpel 2016), exact or by tanh. One by one: torch's vectors and its tails differ. */
static void each_gelu_mul(const float *gate_up, float *out, long m, long n, int by_tanh) {
    long parts = (n + 255) / 256;
#pragma omp for schedule(static) nowait
    for (long p = 0; p < m * parts; p++) {
        long r = p / parts, i = p % parts * 256, end = i + 256 < n ? i + 256 : n;
        const float *gate = gate_up + 2 * r * n, *up = gate + n;
        for (; i < end; i++) {
            float g = gate[i];
            float bent = by_tanh ? tanhf(0.79788456f * (g + 0.044715f * g * g * g)) : erff(g * 0.70710678f);
            out[r * n + i] = 0.5f * g * (1.0f + bent) * up[i];
        }
    }
}

void meshlm_gelu_mul(const float *gate_up, float *out, long m, long n, long by_tanh) {
#pragma omp parallel if (m * n > 1024)
    each_gelu_mul(gate_up, out, m, n, (int)by_tanh);
}

/* The norm, the product and the gate in one go: out = rms_norm(residual + x) . w^T + bias, and unless gated is null silu_mul of that. normed [m, k].
 * Returns 0, or 1 without memory. */
int meshlm_norm_linear(const float *x, float *residual, const float *weight, float eps, float *normed, const uint8_t *packed,
                       const float *bias, float *out, float *gated, long m, long n, long k) {
    uint8_t *rounded;
    if (round_room(packed, m, k, &rounded)) return 1;
#pragma omp parallel
    {
        each_rms_norm(x, residual, weight, normed, m, k, eps);
#pragma omp barrier
        each_linear(normed, packed, bias, out, rounded, m, n, k);
        if (gated) {
#pragma omp barrier
            each_silu_mul(out, gated, m, n / 2);
        }
    }
    free(rounded);
    return 0;
}

static void head(const float *from, float *to, const float *norm, const float *table, long d, long rotary, float eps) {
    float line[1024];
    memcpy(line, from, d * sizeof(float));
    if (norm) {
        float scale = 1.0f / sqrtf(squares(line, d) / (float)d + eps);
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
static void each_rope_cache(const float *qkv, const int64_t *positions, const int64_t *slots, const float *table,
                            const float *q_norm, const float *k_norm, float eps, float *query, float *keys, float *values, long t,
                            long heads, long kv_heads, long d, long rotary) {
    long width = (heads + 2 * kv_heads) * d;
#pragma omp for schedule(static) nowait
    for (long i = 0; i < t; i++) {
        const float *line = qkv + i * width, *angles = table + positions[i] * rotary;
        float *key = keys + slots[i] * kv_heads * d, *value = values + slots[i] * kv_heads * d;
        for (long h = 0; h < heads; h++) head(line + h * d, query + (i * heads + h) * d, q_norm, angles, d, rotary, eps);
        for (long h = 0; h < kv_heads; h++) head(line + (heads + h) * d, key + h * d, k_norm, angles, d, rotary, eps);
        memcpy(value, line + (heads + kv_heads) * d, kv_heads * d * sizeof(float));
    }
}

void meshlm_rope_cache(const float *qkv, const int64_t *positions, const int64_t *slots, const float *table, const float *q_norm,
                       const float *k_norm, float eps, float *query, float *keys, float *values, long t, long heads,
                       long kv_heads, long d, long rotary) {
#pragma omp parallel if (t > 8)
    each_rope_cache(qkv, positions, slots, table, q_norm, k_norm, eps, query, keys, values, t, heads, kv_heads, d, rotary);
}

#include "layers.h"

#include "encoder.h"
