/* The tensors of a GGUF file -> packed weights (packed.h), codes and scales as they are. Block layouts: ggml-common.h of llama.cpp. */

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 }; /* ggml's numbers */

#define LONGEST 256 /* inputs of a K-quant's block */

/* A block of one row: what goes into LONGEST / f.block records at most. Scales are bits of float16, or of float32 where the form is wide. */
typedef struct {
    uint8_t codes[LONGEST]; /* without sign: minus the form's offset */
    uint32_t scales[LONGEST / 16], minima[LONGEST / 16];
} Block;

typedef struct {
    int form, inputs, bytes; /* of a block */
    void (*decode)(const uint8_t *from, Block *to);
} Type;

static inline uint16_t half_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

static inline uint32_t bits_of(float value) {
    union {
        float value;
        uint32_t bits;
    } same = {value};
    return same.bits;
}

/* 16 bytes: inputs 0 to 15 in the low halves, 16 to 31 in the high ones. */
static inline void nibbles(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < 16; i++) codes[i] = from[i] & 15, codes[i + 16] = from[i] >> 4;
}

static void decode_4_0(const uint8_t *from, Block *to) {
    to->scales[0] = half_at(from);
    nibbles(from + 2, to->codes);
}

static void decode_4_1(const uint8_t *from, Block *to) {
    to->scales[0] = half_at(from), to->minima[0] = half_at(from + 2);
    nibbles(from + 4, to->codes);
}

/* The fifth bits: four bytes, then the nibbles. */
static inline void five(const uint8_t *from, uint8_t *codes) {
    nibbles(from + 4, codes);
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((from[i / 8] >> i % 8 & 1) << 4);
}

static void decode_5_0(const uint8_t *from, Block *to) {
    to->scales[0] = half_at(from);
    five(from + 2, to->codes);
}

static void decode_5_1(const uint8_t *from, Block *to) {
    to->scales[0] = half_at(from), to->minima[0] = half_at(from + 2);
    five(from + 4, to->codes);
}

static void decode_8_0(const uint8_t *from, Block *to) {
    to->scales[0] = half_at(from);
    for (int i = 0; i < 32; i++) to->codes[i] = from[2 + i] ^ 128;
}

/* Scales and minima of eight times 32 inputs: 6 bits each in 12 bytes, times one float16 for all scales and one for all minima. */
static inline void scales_k(const uint8_t *from, Block *to) {
    float scale = half(half_at(from)), minimum = half(half_at(from + 2));
    const uint8_t *s = from + 4;
    for (int i = 0; i < 8; i++) {
        int a = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | (s[i - 4] >> 6) << 4;
        int b = i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | (s[i] >> 6) << 4;
        to->scales[i] = bits_of(scale * (float)a), to->minima[i] = bits_of(-(minimum * (float)b));
    }
}

static void decode_4_k(const uint8_t *from, Block *to) {
    scales_k(from, to);
    for (int i = 0; i < 256; i++) to->codes[i] = from[16 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
}

static void decode_5_k(const uint8_t *from, Block *to) {
    scales_k(from, to);
    for (int i = 0; i < 256; i++) {
        int low = from[48 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15, high = from[16 + i % 32] >> i / 32 & 1;
        to->codes[i] = (uint8_t)(low | high << 4);
    }
}

static void decode_6_k(const uint8_t *from, Block *to) {
    const uint8_t *low = from, *high = from + 128;
    float scale = half(half_at(from + 208));
    for (int i = 0; i < 16; i++) to->scales[i] = bits_of(scale * (float)(int8_t)from[192 + i]);
    for (int i = 0; i < 256; i++) {
        int four = low[i / 128 * 64 + i % 64] >> i / 64 % 2 * 4 & 15, two = high[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
        to->codes[i] = (uint8_t)(four | two << 4);
    }
}

static const Type types[] = {
    [Q4_0] = {FOUR_0, 32, 18, decode_4_0},   [Q4_1] = {FOUR_1, 32, 20, decode_4_1},    [Q5_0] = {FIVE_0, 32, 22, decode_5_0},
    [Q5_1] = {EIGHT_1, 32, 24, decode_5_1},  [Q8_0] = {EIGHT_0, 32, 34, decode_8_0},   [Q4_K] = {FOUR_K, 256, 144, decode_4_k},
    [Q5_K] = {EIGHT_K, 256, 176, decode_5_k}, [Q6_K] = {EIGHT_16, 256, 210, decode_6_k},
};

/* The form that keeps a tensor of ggml's type `type`; -1 if there is none. */
long meshlm_form(long type) {
    return type < 0 || type >= (long)(sizeof types / sizeof *types) || !types[type].decode ? -1 : types[type].form;
}

/* One record's part of a block, of output `lane`. */
static inline void put(uint8_t *record, const Form f, long lane, const Block *block, long nth) {
    const uint8_t *codes = block->codes + nth * f.block;
    for (int m = 0; m <= f.minima; m++, record += scale_bytes(f)) {
        uint32_t bits = m ? block->minima[nth] : block->scales[nth];
        if (f.wide)
            ((uint32_t *)record)[lane] = bits;
        else
            ((uint16_t *)record)[lane] = (uint16_t)bits;
    }
    uint32_t words[8] = {0};
    for (long i = 0; i < f.block; i++) words[spot(f, i).word] |= (uint32_t)codes[i] << spot(f, i).shift;
    for (long w = 0; w < f.block * f.bits / 32; w++) ((uint32_t *)record)[w * WIDTH + lane] = words[w];
}

/* Rows of a tensor, row_bytes from one to the next -> outputs `first` (a multiple of 16) to first + count of a packed weight with k
 * inputs, whose table is written. Output first + i comes from row order[i], or i if order is null. Lanes after the last become zeros. */
void meshlm_repack(const uint8_t *from, long row_bytes, long type, const int64_t *order, uint8_t *packed, long first, long count,
                   long k) {
    const Type t = types[type];
    const Form f = forms[t.form];
#pragma omp parallel for schedule(static)
    for (long p = 0; p < (count + WIDTH - 1) / WIDTH; p++) {
        uint8_t *record = (uint8_t *)panel_of(packed, first / WIDTH + p).records;
        for (long b = 0; b < k / t.inputs; b++, record += t.inputs / f.block * record_bytes(f))
            for (long lane = 0; lane < WIDTH; lane++) {
                Block block = {0};
                long row = p * WIDTH + lane;
                if (row < count) t.decode(from + (order ? order[row] : row) * row_bytes + b * t.bytes, &block);
                for (long nth = 0; nth < t.inputs / f.block; nth++) put(record + nth * record_bytes(f), f, lane, &block, nth);
            }
    }
}
