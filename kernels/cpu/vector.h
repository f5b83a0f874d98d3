/* Eight floats at a time, and the functions whose result must not depend on the place in a vector. Compiled without contraction and
 * reassociation: an operation is fused, and a sum is ordered, exactly where and as it is written here. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX__ /* AVX2, FMA and F16C are used one by one: there are processors with any of them */
#include <immintrin.h>
#endif

#define LANES 8
typedef float vec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(32), aligned(4), may_alias));

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec v) { *(vec *)p = v; }
static inline vec splat(float x) { return (vec){x, x, x, x, x, x, x, x}; }

/* a * b + c, rounded once where the processor can. */
static inline vec fma8(vec a, vec b, vec c) {
#if defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

static inline vec select8(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
static inline vec max8(vec a, vec b) { return select8(a > b, a, b); }

static inline float sum8(vec v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

static inline float most8(vec v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* The first `count` of eight floats, zeros after them. */
static inline vec load_part(const float *p, long count) {
    float line[LANES] = {0};
    memcpy(line, p, count * sizeof(float));
    return load(line);
}

static inline void store_part(float *p, vec v, long count) {
    float line[LANES];
    store(line, v);
    memcpy(p, line, count * sizeof(float));
}

/* e^x within 2 ulp: x = n ln 2 + r, a polynomial in r (Cephes' expf), times 2^n. exp8(0) = 1; 0 below -87, e^88 above 88. */
static inline vec exp8(vec x) {
    ivec tiny = x < splat(-87.0f);
    vec high = splat(88.0f), round = splat(12582912.0f); /* 1.5 * 2^23 */
    x = select8(x > high, high, x);
    vec n = fma8(x, splat(1.44269504088896341f), round) - round;
    vec r = fma8(n, splat(-0.693359375f), x);
    r = fma8(n, splat(2.12194440e-4f), r);
    vec p = splat(1.9875691500e-4f);
    p = fma8(p, r, splat(1.3981999507e-3f));
    p = fma8(p, r, splat(8.3334519073e-3f));
    p = fma8(p, r, splat(4.1665795894e-2f));
    p = fma8(p, r, splat(1.6666665459e-1f));
    p = fma8(p, r, splat(5.0000001201e-1f));
    p = fma8(p, r * r, r) + splat(1.0f);
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return select8(tiny, splat(0.0f), p * (vec)power);
}

/* The sum of squares of n floats. */
static inline float squares(const float *x, long n) {
    vec even = splat(0.0f), odd = splat(0.0f);
    long i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        vec a = load(x + i), b = load(x + i + LANES);
        even = fma8(a, a, even);
        odd = fma8(b, b, odd);
    }
    for (; i < n; i += LANES) {
        vec a = n - i < LANES ? load_part(x + i, n - i) : load(x + i);
        even = fma8(a, a, even);
    }
    return sum8(even + odd);
}
