/* Weights of which 16 bits are enough: panels [k][16] of bfloat16 or float16 instead of float32, to the last bit the same numbers, so that
 * a row reads half the memory. The chains are tile.h's. */

/* Eight of them. bf16 is a constant where it is used. */
static inline vec narrow8(const uint16_t *from, const int bf16) {
#ifdef __AVX2__
    if (bf16) return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#endif
    if (!bf16) return scales8((const uint8_t *)from, 0, 0);
    ivec bits;
    for (int i = 0; i < LANES; i++) bits[i] = (int32_t)((uint32_t)from[i] << 16);
    return (vec)bits;
}

static inline __attribute__((always_inline)) void narrow_side_of(const float *x, const Panel *p, float *out, long k, const int bf16) {
    vec sums[2 * SIDE];
    for (int c = 0; c < 2 * SIDE; c++) sums[c] = splat(0.0f);
    for (long i = 0; i < k; i++)
        for (int c = 0; c < 2 * SIDE; c++) {
            const uint16_t *from = (const uint16_t *)p[c / 2].records + i * WIDTH + c % 2 * LANES;
            sums[c] = fma8(splat(x[i]), narrow8(from, bf16), sums[c]);
        }
    for (int c = 0; c < 2 * SIDE; c++) store(out + c * LANES, sums[c]);
}

/* One row over SIDE panels of one form: out[SIDE * 16]. */
static void narrow_side(const float *x, const Panel *p, float *out, long k) {
    if (p->form == BF16)
        narrow_side_of(x, p, out, k, 1);
    else
        narrow_side_of(x, p, out, k, 0);
}

/* `count` inputs of a panel become float32. */
static void widen(const uint8_t *records, int form, float *to, long count) {
    const uint16_t *from = (const uint16_t *)records;
    for (long i = 0; i < count * WIDTH; i += 2 * WIDTH) { /* 64 bytes */
        __builtin_prefetch(records + 2 * i + AHEAD);
        for (long c = i; c < i + 2 * WIDTH && c < count * WIDTH; c += LANES)
            store(to + c, form == BF16 ? narrow8(from + c, 1) : narrow8(from + c, 0));
    }
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* What 16 bits keep of a number of which they are enough. FP16: on processors with F16C alone. */
static inline uint16_t narrowed(float value, int form) {
#ifdef __F16C__
    if (form == FP16) return (uint16_t)_cvtss_sh(value, 0);
#endif
    return (uint16_t)(bits_of(value) >> 16);
}

/* The form that keeps all of these numbers as they are in as few bits as may be. */
long meshlm_narrowest(const float *w, long count) {
    int bf16 = 1, fp16 = 0;
#ifdef __F16C__
    fp16 = 1;
#endif
#pragma omp parallel for schedule(static) reduction(& : bf16, fp16)
    for (long first = 0; first < count; first += 4096) {
        long end = first + 4096 < count ? first + 4096 : count;
        for (long i = first; (bf16 || fp16) && i < end; i++) {
            bf16 &= !(bits_of(w[i]) & 0xFFFF);
#ifdef __F16C__
            if (fp16) fp16 &= bits_of(_cvtsh_ss((uint16_t)_cvtss_sh(w[i], 0))) == bits_of(w[i]);
#endif
        }
    }
    return bf16 ? BF16 : fp16 ? FP16 : FLOATS;
}
