/* Packed weights: panels of 16 outputs, each in one of the forms below, and how a panel's numbers come out of them.
 *
 * A packed weight begins with a table, int64 [panels][2]: where each panel begins, in bytes from the table, and its form. A panel is a
 * line of records, one for each block of inputs: the scales of the 16 outputs, their minima if the form has some, the codes. A weight is
 * scale * code + minimum, in float32. In every form scale * code fits into float32's 24 bits, so that it is rounded once at most:
 * the same number, to the last bit, as a decoder has that multiplies and adds one after the other.
 *
 * 4-bit codes: words [4][16 outputs]; bits 4j to 4j + 3 of word w are input 4j + w. 8-bit codes: [block][16 outputs], signed. */

enum { FLOATS, FOUR_0, FOUR_1, FOUR_K, EIGHT_0, EIGHT_1, EIGHT_K, EIGHT_16, FORMS };

typedef struct {
    int bits, block; /* of a code; inputs of a record */
    int wide;        /* scales are float32, not float16 */
    int minima;      /* are stored; if not, a minimum is offset * scale */
    float offset;
} Form;

static const Form forms[FORMS] = {
    [FLOATS] = {.bits = 32, .block = 1},
    [FOUR_0] = {.bits = 4, .block = 32, .offset = -8.0f},
    [FOUR_1] = {.bits = 4, .block = 32, .minima = 1},
    [FOUR_K] = {.bits = 4, .block = 32, .minima = 1, .wide = 1},
    [EIGHT_0] = {.bits = 8, .block = 32},
    [EIGHT_1] = {.bits = 8, .block = 32, .minima = 1},
    [EIGHT_K] = {.bits = 8, .block = 32, .minima = 1, .wide = 1},
    [EIGHT_16] = {.bits = 8, .block = 16, .wide = 1},
};

typedef struct {
    const uint8_t *records;
    int form;
} Panel;

static inline Panel panel_of(const uint8_t *packed, long p) {
    const int64_t *table = (const int64_t *)packed;
    return (Panel){packed + table[2 * p], (int)table[2 * p + 1]};
}

static inline long scale_bytes(Form f) { return f.bits == 32 ? 0 : WIDTH * (f.wide ? 4 : 2); }
static inline long record_bytes(Form f) { return scale_bytes(f) * (1 + f.minima) + f.block * WIDTH * f.bits / 8; }

/* Bytes of a panel of k inputs. */
long meshlm_panel_bytes(long form, long k) { return k / forms[form].block * record_bytes(forms[form]); }

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

/* Eight signed bytes as floats. */
static inline vec bytes8(const uint8_t *from) {
#ifdef __AVX2__
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    vec found;
    for (int i = 0; i < LANES; i++) found[i] = (float)((const int8_t *)from)[i];
    return found;
#endif
}

/* The weights of one record -> [block][16]. */
static inline __attribute__((always_inline)) void unpack_record(const uint8_t *record, const Form f, float *to) {
    const uint8_t *codes = record + scale_bytes(f) * (1 + f.minima);
#pragma GCC unroll 2
    for (long half_panel = 0; half_panel < WIDTH; half_panel += LANES) {
        vec scale = scales8(record, f.wide, half_panel);
        vec minimum = scale * splat(f.offset);
        if (f.minima) minimum = scales8(record + scale_bytes(f), f.wide, half_panel);
        float *out = to + half_panel;
        if (f.bits == 8) {
            for (long i = 0; i < f.block; i++) store(out + i * WIDTH, fma8(bytes8(codes + i * WIDTH + half_panel), scale, minimum));
            continue;
        }
        const ivec *words = (const ivec *)(codes + half_panel * 4);
        vec finer = scale; /* a code is used where it stands in its word: times 16^j */
#pragma GCC unroll 8
        for (int j = 0; j < 7; j++) {
#pragma GCC unroll 4
            for (int w = 0; w < 4; w++)
                store(out + (4 * j + w) * WIDTH, fma8(__builtin_convertvector(words[2 * w] & (15 << 4 * j), vec), finer, minimum));
            finer *= splat(0.0625f);
        }
#pragma GCC unroll 4
        for (int w = 0; w < 4; w++) /* the highest has the word's sign */
            store(out + (28 + w) * WIDTH, fma8(__builtin_convertvector(words[2 * w] >> 28 & 15, vec), scale, minimum));
    }
}

#define UNPACK(FORM)                                                                                                           \
    case FORM:                                                                                                                 \
        for (; count > 0; count -= forms[FORM].block) {                                                                        \
            unpack_record(from, forms[FORM], to);                                                                              \
            from += record_bytes(forms[FORM]);                                                                                 \
            to += forms[FORM].block * WIDTH;                                                                                   \
        }                                                                                                                      \
        break;

/* Inputs begin to begin + count of a panel -> [count][16]. Both at borders of records; not for FLOATS, which are what they are. */
static void unpack(Panel p, long begin, long count, float *to) {
    const uint8_t *from = p.records + meshlm_panel_bytes(p.form, begin);
    switch (p.form) {
        UNPACK(FOUR_0)
        UNPACK(FOUR_1)
        UNPACK(FOUR_K)
        UNPACK(EIGHT_0)
        UNPACK(EIGHT_1)
        UNPACK(EIGHT_K)
        UNPACK(EIGHT_16)
    }
}

/* The weights of one output. */
static void unpack_row(Panel p, long lane, long k, float *to) {
    const Form f = forms[p.form];
    if (p.form == FLOATS) {
        for (long i = 0; i < k; i++) to[i] = ((const float *)p.records)[i * WIDTH + lane];
        return;
    }
    const uint8_t *record = p.records;
    for (long b = 0; b < k; b += f.block, record += record_bytes(f)) {
        const uint8_t *minima = record + scale_bytes(f), *codes = minima + scale_bytes(f) * f.minima;
        float scale = f.wide ? ((const float *)record)[lane] : half(((const uint16_t *)record)[lane]);
        float minimum = f.wide ? ((const float *)minima)[lane] : half(((const uint16_t *)minima)[lane]);
        if (!f.minima) minimum = scale * f.offset;
        for (long i = 0; i < f.block; i++) {
            int code;
            if (f.bits == 4)
                code = (int)(((const uint32_t *)codes)[i % 4 * WIDTH + lane] >> i / 4 * 4 & 15);
            else
                code = ((const int8_t *)codes)[i * WIDTH + lane];
            to[b + i] = (float)code * scale + minimum;
        }
    }
}

/* out[t, k] = the rows `ids` of a packed weight. */
void meshlm_rows(const uint8_t *packed, const int64_t *ids, float *out, long t, long k) {
#pragma omp parallel for schedule(static) if (t * k > 16384)
    for (long i = 0; i < t; i++) unpack_row(panel_of(packed, ids[i] / WIDTH), ids[i] % WIDTH, k, out + i * k);
}
