/* Products of packed weights with rounded activations, in integers.
 *
 * 32 inputs of a row share a scale s = max |x| / 32512, and x becomes the code round(x / s), to the nearest and to even, in 16 bits. A
 * record of weights (packed.h) adds to an output
 *
 *     (sum of (code of the weight + offset) * code of x) * (scale * s)  [+ minimum * (s * sum of codes of x)]
 *
 * to which those of a panel are added up in order, each by one fused multiply-add of float32. The sums in parentheses are exact in
 * 32 bits. So a result is the same on every processor that fuses, and does not depend on the rows beside it.
 *
 * Instructions multiply bytes by bytes (VNNI) or 16 bits by 16 bits (AVX2). For the former a code is 256 * high + low of 8 bits each with
 * sign, and there are two products; for the latter the bytes of a word of weights are taken two by two. */

#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define BY_BYTES /* a test defines it elsewhere too */
#endif

typedef struct { /* 32 inputs of a row */
    int32_t codes[2][2][4]; /* of each 16 inputs, word by word as the weights have them (packed.h): the high bytes, then the low ones; or
                               the codes of a word's bytes 0 and 2, then 1 and 3 */
    float scale, sum;       /* sum: of the inputs as they are rounded */
    int32_t sums[3];        /* of the codes: of the first 16, of the others, of all */
} RoundedBlock;

/* Bytes of a row of k inputs. */
static inline long rounded_bytes(long k) { return (k + 31) / 32 * (long)sizeof(RoundedBlock); }
long meshlm_rounded_bytes(long k) { return rounded_bytes(k); }

/* Whether integer products are faster than those of float32 here. */
int meshlm_can_round(void) {
#ifdef __AVX2__
    return 1;
#else
    return 0;
#endif
}

/* Inputs 0 to 7 and 8 to 15, whose words take them a fourth apart: input w, 4 + w, 8 + w, 12 + w. */
static inline void put_codes(ivec first, ivec second, int32_t to[2][4]) {
#ifdef BY_BYTES
    ivec high[2] = {(first + 128) >> 8, (second + 128) >> 8};
    ivec bytes[2] = {(high[0] & 255) | (high[1] & 255) << 16, (first & 255) | (second & 255) << 16}; /* low: code - 256 * high */
    for (int i = 0; i < 2; i++)
        for (int w = 0; w < 4; w++) to[i][w] = bytes[i][w] | (int32_t)((uint32_t)bytes[i][4 + w] << 8);
#else
    *(ivec *)to[0] = (first & 0xFFFF) | second << 16;
#endif
}

/* NaN and infinity become the scale, and so every output of the row. Numbers below 2^-100 become zeros. */
static inline void round_block(const float *x, RoundedBlock *to) {
    ivec most = {0};
    for (int i = 0; i < 32; i += LANES) {
        ivec bits = *(const ivec *)(x + i) & 0x7FFFFFFF; /* are ordered as the numbers are, NaN above all */
        most = (ivec)select8(bits > most, (vec)bits, (vec)most);
    }
    int32_t top = 0;
    for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
    float largest;
    memcpy(&largest, &top, sizeof largest);
    if (!(largest > 0x1p-100f && largest < INFINITY)) {
        *to = (RoundedBlock){.scale = largest};
        return;
    }
    to->scale = largest / 32512.0f;
    vec inverse = splat(32512.0f / largest);
    vec magic = splat(12582912.0f); /* 1.5 * 2^23: the sum's lowest bits are the rounded number */
    for (int half = 0; half < 2; half++) {
        ivec codes[2];
        for (int i = 0; i < 2; i++) {
            codes[i] = (ivec)(load(x + 16 * half + LANES * i) * inverse + magic) - (ivec)magic;
        }
        ivec both = codes[0] + codes[1];
        int32_t sum = 0;
        for (int i = 0; i < LANES; i++) sum += both[i];
        to->sums[half] = sum;
        put_codes(codes[0], codes[1], to->codes[half]);
    }
    to->sums[2] = to->sums[0] + to->sums[1];
    to->sum = to->scale * (float)to->sums[2];
}

/* x [k] -> a row of rounded blocks. */
static void round_row(const float *x, uint8_t *rounded, long k) {
    for (long i = 0; i < k / 32; i++) round_block(x + i * 32, (RoundedBlock *)rounded + i);
}

/* x [m, k] -> m rows of rounded blocks. Called by all threads of a team. */
static void each_round(const float *x, uint8_t *rounded, long m, long k) {
    long blocks = k / 32;
#pragma omp for schedule(static) nowait
    for (long i = 0; i < m * blocks; i++) round_block(x + i * 32, (RoundedBlock *)rounded + i);
}

/* The outputs that a register of sums holds. */
#if defined(BY_BYTES) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define AT_ONCE 16
typedef __m512i words;
typedef __m512 numbers;
#define WORDS_OF(X) _mm512_set1_epi32(X)
#define NUMBERS_OF(X) _mm512_set1_ps(X)
#define LOAD_WORDS(P) _mm512_loadu_si512(P)
#define AND_WORDS(A, B) _mm512_and_si512(A, B)
#define OR_WORDS(A, B) _mm512_or_si512(A, B)
#define UP_4(A) _mm512_srli_epi32(A, 4)
#define TO_NUMBERS(A) _mm512_cvtepi32_ps(A)
#define FUSED(A, B, C) _mm512_fmadd_ps(A, B, C)
#define TIMES_NUMBERS(A, B) _mm512_mul_ps(A, B)
#define LOAD_NUMBERS(P) _mm512_loadu_ps(P)
#define LOAD_SMALL(P) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(P))))
#define LOAD_HALVES(P) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(P)))
#define STORE_NUMBERS(P, A) _mm512_storeu_ps(P, A)
#define TIMES_BYTES(SUMS, CODES, X) _mm512_dpbusd_epi32(SUMS, CODES, WORDS_OF(X))
#define HIGH_AND_LOW(A, B) _mm512_add_epi32(_mm512_slli_epi32(A, 8), B)
#else
#define AT_ONCE 8
typedef ivec words;
typedef vec numbers;
#define WORDS_OF(X) ((ivec){X, X, X, X, X, X, X, X})
#define NUMBERS_OF(X) splat(X)
#define LOAD_WORDS(P) (*(const ivec *)(P))
#define AND_WORDS(A, B) ((A) & (B))
#define OR_WORDS(A, B) ((A) | (B))
#define UP_4(A) ((A) >> 4)
#define TO_NUMBERS(A) __builtin_convertvector(A, vec)
#define FUSED(A, B, C) fma8(A, B, C)
#define TIMES_NUMBERS(A, B) ((A) * (B))
#define LOAD_NUMBERS(P) load(P)
#define LOAD_SMALL(P) small8(P)
#define LOAD_HALVES(P) scales8(P, 0, 0)
#define STORE_NUMBERS(P, A) store(P, A)
#if defined(__AVXVNNI__)
#define TIMES_BYTES(SUMS, CODES, X) (words) _mm256_dpbusd_avx_epi32((__m256i)(SUMS), (__m256i)(CODES), _mm256_set1_epi32(X))
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define TIMES_BYTES(SUMS, CODES, X) (words) _mm256_dpbusd_epi32((__m256i)(SUMS), (__m256i)(CODES), _mm256_set1_epi32(X))
#elif defined(BY_BYTES)
/* sums[c] += the four bytes of codes[c], without sign, times those of x, with sign: what the instruction does. */
static inline words TIMES_BYTES(words sums, words codes, int32_t x) {
    for (int c = 0; c < LANES; c++)
        for (int b = 0; b < 4; b++) sums[c] += (int32_t)((uint32_t)codes[c] >> 8 * b & 255) * (int8_t)((uint32_t)x >> 8 * b);
    return sums;
}
#endif
#define HIGH_AND_LOW(A, B) (((A) << 8) + (B))
#endif

/* Bits move up, or down where `up` is negative; zeros follow. */
typedef uint32_t plain_words __attribute__((vector_size(sizeof(words)), may_alias));
#define SHIFTED(A, UP) ((UP) > 0 ? (words)((plain_words)(A) << (UP)) : (words)((plain_words)(A) >> -(UP)))

/* Sums of products that add_products begins with zeros and go on to be added up by sum_of; and four bytes of each output's codes. */
typedef struct {
    words first, second;
} Two;
#ifdef BY_BYTES
typedef words Codes;
static inline Codes codes_of(words w) { return w; }
static inline Two add_products(Two sums, Codes codes, const int32_t *x) {
    return (Two){TIMES_BYTES(sums.first, codes, x[0]), TIMES_BYTES(sums.second, codes, x[4])};
}
static inline words sum_of(Two sums) { return HIGH_AND_LOW(sums.first, sums.second); }
#else
typedef Two Codes;
static inline words times_pairs(words codes, int32_t x) {
#ifdef __AVX2__
    return (words)_mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(x));
#else
    for (int c = 0; c < LANES; c++)
        codes[c] = (codes[c] & 0xFFFF) * (int16_t)x + (codes[c] >> 16) * (int16_t)((uint32_t)x >> 16);
    return codes;
#endif
}
static inline Codes codes_of(words w) {
#ifdef __AVX2__
    return (Codes){w & 0x00FF00FF, (words)_mm256_srli_epi16((__m256i)w, 8)};
#else
    return (Codes){w & 0x00FF00FF, (w >> 8) & 0x00FF00FF};
#endif
}
static inline Two add_products(Two sums, Codes codes, const int32_t *x) {
    return (Two){sums.first + times_pairs(codes.first, x[0]), sums.second + times_pairs(codes.second, x[4])};
}
static inline words sum_of(Two sums) { return sums.first + sums.second; }
#endif

typedef struct {
    const RoundedBlock *x;
    long stride; /* blocks from a row to the next */
    const uint8_t *records;
    Form form;
    long k;
    float *out; /* [rows][16] */
} RoundedTile;

/* Four inputs of each output, of 32 whose codes begin here: group g of eight. bits is a constant. */
static inline __attribute__((always_inline)) words group_of(const uint8_t *codes, const int g, const int bits) {
    words low = LOAD_WORDS(codes + (bits == 8 ? g : g % 4) * WIDTH * 4);
    if (bits == 8) return low;
    low = AND_WORDS(g < 4 ? low : UP_4(low), WORDS_OF(0x0F0F0F0F));
    if (bits == 5) return OR_WORDS(low, AND_WORDS(SHIFTED(LOAD_WORDS(codes + 4 * WIDTH * 4), 4 - g), WORDS_OF(0x10101010)));
    if (bits == 6)
        return OR_WORDS(low, AND_WORDS(SHIFTED(LOAD_WORDS(codes + (4 + g / 4) * WIDTH * 4), 4 - g % 4 * 2), WORDS_OF(0x30303030)));
    return low;
}

/* `rows` rows over AT_ONCE outputs, from `lane` on, of a panel. rows, bits and nested are constants where it is used. */
static inline __attribute__((always_inline)) void rounded_tile(const RoundedTile *t, int lane, const int rows, const int bits,
                                                               const int nested) {
    const int minima = t->form.minima, offset = t->form.offset, parts = nested ? 32 / nested : 1, groups = 8 / parts;
    numbers sums[8], scales = NUMBERS_OF(0.0f), all_minima = NUMBERS_OF(0.0f); /* of a record with nested ones */
    for (int r = 0; r < rows; r++) sums[r] = NUMBERS_OF(0.0f);
    const uint8_t *from = t->records;
    const RoundedBlock *x = t->x;
    for (long at = 0; at < t->k; at += 32, x++) {
        if (!nested || at % 256 == 0) {
            scales = LOAD_HALVES(from + 2 * lane), from += 2 * WIDTH;
            if (minima) all_minima = LOAD_HALVES(from + 2 * lane), from += 2 * WIDTH;
        }
        numbers scale[2] = {scales, scales}, minimum = all_minima;
        for (int part = 0; nested && part < parts; part++, from += WIDTH) scale[part] = TIMES_NUMBERS(scales, LOAD_SMALL(from + lane));
        if (nested && minima) minimum = TIMES_NUMBERS(all_minima, LOAD_SMALL(from + lane)), from += WIDTH;
        Codes codes[8];
        for (int line = 0; line <= bits; line++) __builtin_prefetch(from + AHEAD + 64 * line);
        for (int g = 0; g < 8; g++) codes[g] = codes_of(group_of(from + 4 * lane, g, bits));
        from += 4 * WIDTH * bits;
        for (int r = 0; r < rows; r++) {
            const RoundedBlock *row = x + r * t->stride;
            for (int part = 0; part < parts; part++) {
                Two products = {WORDS_OF(0), WORDS_OF(row->sums[parts == 1 ? 2 : part] * offset)};
                for (int g = groups * part; g < groups * (part + 1); g++)
                    products = add_products(products, codes[g], row->codes[g / 4][0] + g % 4);
                sums[r] = FUSED(TO_NUMBERS(sum_of(products)), TIMES_NUMBERS(scale[part], NUMBERS_OF(row->scale)), sums[r]);
            }
            if (minima) sums[r] = FUSED(minimum, NUMBERS_OF(row->sum), sums[r]);
        }
    }
    for (int r = 0; r < rows; r++) STORE_NUMBERS(t->out + r * WIDTH + lane, sums[r]);
}

#define ROUNDED_TILE(ROWS)                                                                                                     \
    static void rounded_##ROWS(const RoundedTile *t) {                                                                         \
        for (int lane = 0; lane < WIDTH; lane += AT_ONCE) {                                                                    \
            switch (t->form.bits + t->form.nested) {                                                                           \
            case 4: rounded_tile(t, lane, ROWS, 4, 0); break;                                                                  \
            case 5: rounded_tile(t, lane, ROWS, 5, 0); break;                                                                  \
            case 8: rounded_tile(t, lane, ROWS, 8, 0); break;                                                                  \
            case 4 + 32: rounded_tile(t, lane, ROWS, 4, 32); break;                                                            \
            case 5 + 32: rounded_tile(t, lane, ROWS, 5, 32); break;                                                            \
            case 6 + 16: rounded_tile(t, lane, ROWS, 6, 16); break;                                                            \
            }                                                                                                                  \
        }                                                                                                                      \
    }
ROUNDED_TILE(1)
ROUNDED_TILE(2)
ROUNDED_TILE(4)
ROUNDED_TILE(8)

/* `rows` rounded rows over one panel: sums[r][16]. */
static void rounded_sums(const uint8_t *rounded, Panel p, float *sums, long rows, long k) {
    RoundedTile t = {.x = (const RoundedBlock *)rounded, .stride = k / 32, .records = p.records, .form = forms[p.form], .k = k};
    for (long r = 0, here; r < rows; r += here) {
        long left = rows - r;
        here = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        t.out = sums + r * WIDTH;
        (here == 8 ? rounded_8 : here == 4 ? rounded_4 : here == 2 ? rounded_2 : rounded_1)(&t);
        t.x += here * t.stride;
    }
}
