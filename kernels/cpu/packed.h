/* Packed weights: panels of 16 outputs, each in one of the forms below, and how a panel's numbers come out of them.
 *
 * A packed weight begins with a table, int64 [panels][2]: where each panel begins, in bytes from the table, and its form, plus ROUNDED
 * where products are those of rounded.h. A panel is a line of records, one for each block of inputs: the scales of the 16 outputs, their
 * minima if the form has some, the codes. A weight is scale * code + minimum, in float32. In every form scale * code and scale * offset
 * fit into float32's 24 bits, so that a weight is rounded once at most: the same number, to the last bit, as a decoder has that
 * multiplies and adds one after the other.
 *
 * Codes have no sign and stand in words [block * bits / 32][16 outputs]. A word has codes of 16 inputs, a fourth apart: byte b of the
 * 4-bit word w is the inputs 4b + w (low half) and 16 + 4b + w; byte b of the 8-bit word 4q + w is the input 16q + 4b + w.
 *
 * Tight forms take as many bits as the file's, for products that round. Their codes of 5 and 6 bits are 4-bit words of 32 inputs each,
 * behind which are words of the high bits: bit 4q + w of byte b is that of the input 16q + 4b + w; of two high bits there is a word for
 * each q, with those of w from bit 2w on. Nested scales and minima are bytes for each `nested` inputs, times float16s of a record of
 * 256 inputs:
 *
 *     scales, minima if any: float16 [16 outputs]
 *     8 times: scales [32 / nested][16], minima if any [16]; codes of 32 inputs */

enum {
    FLOATS, FOUR_0, FOUR_1, FOUR_K, FIVE_0, EIGHT_0, EIGHT_1, EIGHT_K, EIGHT_16,
    TIGHT_4_K, TIGHT_5_0, TIGHT_5_1, TIGHT_5_K, TIGHT_6_K, BF16, FP16, FORMS
};

#define ROUNDED 256

typedef struct {
    int bits, block; /* of a code; inputs of a record */
    int wide;        /* scales are float32, not float16 */
    int nested;      /* inputs of a byte of scales; 0: scales are no bytes */
    int minima;      /* are stored; if not, a minimum is offset * scale */
    int offset;
} Form;

static const Form forms[FORMS] = {
    [FLOATS] = {.bits = 32, .block = 1},
    [BF16] = {.bits = 16, .block = 1}, /* narrow.h */
    [FP16] = {.bits = 16, .block = 1},
    [FOUR_0] = {.bits = 4, .block = 32, .offset = -8},
    [FOUR_1] = {.bits = 4, .block = 32, .minima = 1},
    [FOUR_K] = {.bits = 4, .block = 32, .minima = 1, .wide = 1},
    [FIVE_0] = {.bits = 8, .block = 32, .offset = -16},
    [EIGHT_0] = {.bits = 8, .block = 32, .offset = -128},
    [EIGHT_1] = {.bits = 8, .block = 32, .minima = 1},
    [EIGHT_K] = {.bits = 8, .block = 32, .minima = 1, .wide = 1},
    [EIGHT_16] = {.bits = 8, .block = 16, .wide = 1, .offset = -32},
    [TIGHT_4_K] = {.bits = 4, .block = 256, .nested = 32, .minima = 1},
    [TIGHT_5_0] = {.bits = 5, .block = 32, .offset = -16},
    [TIGHT_5_1] = {.bits = 5, .block = 32, .minima = 1},
    [TIGHT_5_K] = {.bits = 5, .block = 256, .nested = 32, .minima = 1},
    [TIGHT_6_K] = {.bits = 6, .block = 256, .nested = 16, .offset = -32},
};

typedef struct {
    const uint8_t *records;
    int form, rounded;
} Panel;

static inline Panel panel_of(const uint8_t *packed, long p) {
    const int64_t *table = (const int64_t *)packed;
    int form = (int)table[2 * p + 1];
    return (Panel){packed + table[2 * p], form % ROUNDED, form / ROUNDED};
}

static inline long scale_bytes(Form f) {
    return f.bits >= 16 ? 0 : f.nested ? WIDTH * (2 + f.block / f.nested) : WIDTH * (f.wide ? 4 : 2);
}
static inline long record_bytes(Form f) { return scale_bytes(f) * (1 + f.minima) + f.block * WIDTH * f.bits / 8; }

/* Bytes of a panel of k inputs. */
long meshlm_panel_bytes(long form, long k) { return k / forms[form].block * record_bytes(forms[form]); }

/* The place of a code, or of its bits above the fourth, among those of 32 inputs: its word and its lowest bit. */
typedef struct {
    int word, shift;
} Spot;

static inline Spot spot(Form f, long i) {
    int byte = (int)(i % 16 / 4), w = (int)(i % 4), sixteenth = (int)(i / 16);
    return f.bits == 8 ? (Spot){4 * sixteenth + w, 8 * byte} : (Spot){w, 8 * byte + 4 * sixteenth};
}

static inline Spot high_spot(Form f, long i) {
    int byte = (int)(i % 16 / 4), w = (int)(i % 4), sixteenth = (int)(i / 16);
    return f.bits == 5 ? (Spot){4, 8 * byte + 4 * sixteenth + w} : (Spot){4 + sixteenth, 8 * byte + 2 * w};
}

static inline int has_high_bits(Form f) { return f.bits == 5 || f.bits == 6; }

/* The code of input i of 32, of an output, whose codes begin here. */
static inline uint32_t code_at(const uint8_t *codes, Form f, long i, long lane) {
    const uint32_t *words = (const uint32_t *)codes + lane;
    Spot at = spot(f, i), high = high_spot(f, i);
    if (!has_high_bits(f)) return words[at.word * WIDTH] >> at.shift & ((1u << f.bits) - 1);
    return (words[at.word * WIDTH] >> at.shift & 15) | (words[high.word * WIDTH] >> high.shift & ((1u << (f.bits - 4)) - 1)) << 4;
}

/* float16, any but infinity and NaN, as float32. */
static inline float half(uint16_t bits) {
    union {
        uint32_t bits;
        float value;
    } wide = {.bits = (uint32_t)(bits & 0x7FFF) << 13};
    wide.value *= 0x1p112f;
    wide.bits |= (uint32_t)(bits & 0x8000) << 16;
    return wide.value;
}

/* Eight scales from number `at` on. */
static inline vec scales8(const uint8_t *from, int wide, long at) {
    if (wide) return load((const float *)from + at);
    const uint16_t *halves = (const uint16_t *)from + at;
#ifdef __F16C__
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
#else
    vec found;
    for (int i = 0; i < LANES; i++) found[i] = half(halves[i]);
    return found;
#endif
}

/* Eight bytes with sign. */
static inline vec small8(const uint8_t *from) {
#ifdef __AVX2__
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    vec found;
    for (int i = 0; i < LANES; i++) found[i] = (float)(int8_t)from[i];
    return found;
#endif
}

/* Rows times weights while these come out of their records: ROWS rows (0 to 4: more do not fit into the registers beside scales and codes)
 * over PANELS panels. out[r][16 * panel + c] (+)= sum over `count` inputs of x[r][i] * weight, the chain of tile.h. With one panel the weights
 * are left in `kept` [count][16] (unless null) for the rows that follow. */
typedef struct {
    const float *x;
    long x_stride;
    const uint8_t *records[2];
    Form form;
    long count;
    float *out;
    long out_stride;
    int more;
    float *kept;
} Unpacking;

#define UNPACK(NAME, ROWS, PANELS, BITS)                                                                                       \
    static void NAME(const Unpacking *u) {                                                                                     \
        const float *x = u->x;                                                                                                 \
        const long x_stride = u->x_stride, scale_size = scale_bytes(u->form), record_size = record_bytes(u->form);             \
        float *kept = u->kept;                                                                                                 \
        vec sums[ROWS][2 * PANELS], whole[2 * PANELS], scale[2 * PANELS], minimum[2 * PANELS];                                 \
        for (int r = 0; r < ROWS; r++)                                                                                         \
            for (int c = 0; c < 2 * PANELS; c++)                                                                               \
                sums[r][c] = u->more ? load(u->out + r * u->out_stride + c * LANES) : splat(0.0f);                             \
        const uint8_t *record[PANELS];                                                                                         \
        for (int p = 0; p < PANELS; p++) record[p] = u->records[p];                                                            \
        for (long at = 0; at < u->count; at += u->form.block) {                                                                \
            const uint8_t *codes[PANELS];                                                                                      \
            for (int p = 0; p < PANELS; p++) {                                                                                 \
                for (long line = 0; BITS == 8 && line < record_size; line += 64) __builtin_prefetch(record[p] + AHEAD + line); \
                codes[p] = record[p] + scale_size * (1 + u->form.minima);                                                      \
                scales_of(record[p], &u->form, whole + 2 * p, minimum + 2 * p);                                                \
                record[p] += record_size;                                                                                      \
            }                                                                                                                  \
            TIMES(PANELS, 1.0f)                                                                                                \
            UNPACK_##BITS(ROWS, PANELS)                                                                                        \
        }                                                                                                                      \
        for (int r = 0; r < ROWS; r++)                                                                                         \
            for (int c = 0; c < 2 * PANELS; c++) store(u->out + r * u->out_stride + c * LANES, sums[r][c]);                    \
    }

/* One input: its weights meet the rows. */
#define MEET(ROWS, PANELS, CODE)                                                                                               \
    {                                                                                                                          \
        vec w[2 * PANELS];                                                                                                     \
        for (int c = 0; c < 2 * PANELS; c++) w[c] = fma8(CODE, scale[c], minimum[c]);                                          \
        if (PANELS == 1 && kept) store(kept, w[0]), store(kept + LANES, w[1]), kept += WIDTH;                                  \
        for (int r = 0; r < ROWS; r++)                                                                                         \
            for (int c = 0; c < 2 * PANELS; c++) sums[r][c] = fma8(splat(x[r * x_stride]), w[c], sums[r][c]);                  \
        x++;                                                                                                                   \
    }

/* A code is used where it stands in its word, with a finer scale; the highest has the word's sign and is shifted down. */
#define WORDS(I, C) ((const ivec *)codes[(C) / 2])[2 * (I) + (C) % 2]
#define TIMES(PANELS, FACTOR) for (int c = 0; c < 2 * PANELS; c++) scale[c] = whole[c] * splat(FACTOR);
#define BYTES(ROWS, PANELS, COUNT, FIRST)                                                                                      \
    _Pragma("GCC unroll 1") for (int b = 0; b < COUNT; b++) {                                                                  \
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)                                                                    \
            MEET(ROWS, PANELS, __builtin_convertvector(WORDS(FIRST + i, c) & mask, vec))                                       \
        for (int c = 0; c < 2 * PANELS; c++) scale[c] *= splat(0x1p-8f);                                                       \
        mask <<= 8;                                                                                                            \
    }
#define HIGHEST(ROWS, PANELS, FIRST, BITS)                                                                                     \
    TIMES(PANELS, 1.0f)                                                                                                        \
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)                                                                        \
        MEET(ROWS, PANELS, __builtin_convertvector(WORDS(FIRST + i, c) >> (32 - BITS) & ((1 << BITS) - 1), vec))

#define UNPACK_4(ROWS, PANELS)                                                                                                 \
    ivec mask = (ivec){} + 15;                                                                                                 \
    BYTES(ROWS, PANELS, 4, 0)                                                                                                  \
    TIMES(PANELS, 0.0625f)                                                                                                     \
    mask = (ivec){} + 0xF0;                                                                                                    \
    BYTES(ROWS, PANELS, 3, 0)                                                                                                  \
    HIGHEST(ROWS, PANELS, 0, 4)

#define UNPACK_8(ROWS, PANELS)                                                                                                 \
    for (int q = 0; q < u->form.block / 16; q++) {                                                                             \
        ivec mask = (ivec){} + 255;                                                                                            \
        BYTES(ROWS, PANELS, 3, 4 * q)                                                                                          \
        HIGHEST(ROWS, PANELS, 4 * q, 8)                                                                                        \
    }

static inline void scales_of(const uint8_t *record, const Form *f, vec scale[2], vec minimum[2]) {
    for (int c = 0; c < 2; c++) {
        scale[c] = scales8(record, f->wide, c * LANES);
        minimum[c] = scale[c] * splat((float)f->offset);
        if (f->minima) minimum[c] = scales8(record + scale_bytes(*f), f->wide, c * LANES);
    }
}

UNPACK(four_0, 0, 1, 4)
UNPACK(four_1, 1, 1, 4)
UNPACK(four_2, 2, 1, 4)
UNPACK(four_3, 3, 1, 4)
UNPACK(four_4, 4, 1, 4)
UNPACK(four_side, 1, 2, 4)
UNPACK(eight_0, 0, 1, 8)
UNPACK(eight_1, 1, 1, 8)
UNPACK(eight_2, 2, 1, 8)
UNPACK(eight_3, 3, 1, 8)
UNPACK(eight_4, 4, 1, 8)
UNPACK(eight_side, 1, 2, 8)

/* The weights of one output in a record with nested scales. */
static void unpack_nested(const uint8_t *record, Form f, long lane, float *to) {
    const uint16_t *whole = (const uint16_t *)record + lane;
    const uint8_t *at = record + 2 * WIDTH * (1 + f.minima);
    float scales = half(whole[0]), minima = f.minima ? half(whole[WIDTH]) : 0.0f;
    const int parts = 32 / f.nested;
    for (long b = 0; b < f.block; b += 32, at += 4 * WIDTH * f.bits) {
        const uint8_t *scale_at = at + lane;
        at += WIDTH * (parts + f.minima);
        for (long i = 0; i < 32; i++) {
            float scale = scales * (float)(int8_t)scale_at[i / f.nested * WIDTH];
            float minimum = f.minima ? minima * (float)scale_at[parts * WIDTH] : scale * (float)f.offset;
            to[b + i] = (float)code_at(at, f, i, lane) * scale + minimum;
        }
    }
}

/* The weights of one output. */
static void unpack_row(Panel p, long lane, long k, float *to) {
    const Form f = forms[p.form];
    if (p.form == FLOATS) {
        for (long i = 0; i < k; i++) to[i] = ((const float *)p.records)[i * WIDTH + lane];
        return;
    }
    if (f.bits == 16) {
        for (long i = 0; i < k; i++) {
            uint16_t bits = ((const uint16_t *)p.records)[i * WIDTH + lane];
            uint32_t wide = (uint32_t)bits << 16;
            if (p.form == FP16)
                to[i] = half(bits);
            else
                memcpy(to + i, &wide, sizeof wide);
        }
        return;
    }
    if (f.nested) {
        for (long b = 0; b < k; b += f.block) unpack_nested(p.records + b / f.block * record_bytes(f), f, lane, to + b);
        return;
    }
    const uint8_t *record = p.records;
    for (long b = 0; b < k; b += f.block, record += record_bytes(f)) {
        const uint8_t *minima = record + scale_bytes(f), *codes = minima + scale_bytes(f) * f.minima;
        float scale = f.wide ? ((const float *)record)[lane] : half(((const uint16_t *)record)[lane]);
        float minimum = f.wide ? ((const float *)minima)[lane] : half(((const uint16_t *)minima)[lane]);
        if (!f.minima) minimum = scale * (float)f.offset;
        for (long i = 0; i < f.block; i++) to[b + i] = (float)code_at(codes, f, i, lane) * scale + minimum;
    }
}

/* out[t, k] = the rows `ids` of a packed weight. */
void meshlm_rows(const uint8_t *packed, const int64_t *ids, float *out, long t, long k) {
#pragma omp parallel for schedule(static) if (t * k > 16384)
    for (long i = 0; i < t; i++) unpack_row(panel_of(packed, ids[i] / WIDTH), ids[i] % WIDTH, k, out + i * k);
}
