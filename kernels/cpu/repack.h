/* The tensors of a GGUF file -> packed weights (packed.h), codes and scales as they are. Block layouts: ggml-common.h of llama.cpp. */

enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 }; /* ggml's numbers */

#define LONGEST 256 /* inputs of a K-quant's block */

/* A block of one row. Of a K-quant the float16s are times the bytes, of which there is one for each 32 or 16 inputs. */
typedef struct {
    uint8_t codes[LONGEST]; /* without sign: minus the form's offset */
    uint16_t scale, minimum;
    int8_t scales[LONGEST / 16], minima[LONGEST / 32];
} Block;

typedef struct {
    int form, tight, inputs, bytes; /* tight: the form of products that round; of a block */
    void (*decode)(const uint8_t *from, Block *to);
} Type;

static inline uint16_t half_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* 16 bytes: inputs 0 to 15 in the low halves, 16 to 31 in the high ones. */
static inline void nibbles(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < 16; i++) codes[i] = from[i] & 15, codes[i + 16] = from[i] >> 4;
}

static void decode_4_0(const uint8_t *from, Block *to) {
    to->scale = half_at(from);
    nibbles(from + 2, to->codes);
}

static void decode_4_1(const uint8_t *from, Block *to) {
    to->scale = half_at(from), to->minimum = half_at(from + 2);
    nibbles(from + 4, to->codes);
}

/* The fifth bits: four bytes, then the nibbles. */
static inline void five(const uint8_t *from, uint8_t *codes) {
    nibbles(from + 4, codes);
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((from[i / 8] >> i % 8 & 1) << 4);
}

static void decode_5_0(const uint8_t *from, Block *to) {
    to->scale = half_at(from);
    five(from + 2, to->codes);
}

static void decode_5_1(const uint8_t *from, Block *to) {
    to->scale = half_at(from), to->minimum = half_at(from + 2);
    five(from + 4, to->codes);
}

static void decode_8_0(const uint8_t *from, Block *to) {
    to->scale = half_at(from);
    for (int i = 0; i < 32; i++) to->codes[i] = from[2 + i] ^ 128;
}

/* Scales and minima of eight times 32 inputs: 6 bits each in 12 bytes, times one float16 for all scales and one for all minima, which are taken off. */
static inline void scales_k(const uint8_t *from, Block *to) {
    to->scale = half_at(from), to->minimum = half_at(from + 2) ^ 0x8000;
    const uint8_t *s = from + 4;
    for (int i = 0; i < 8; i++) {
        to->scales[i] = (int8_t)(i < 4 ? s[i] & 63 : (s[i + 4] & 15) | (s[i - 4] >> 6) << 4);
        to->minima[i] = (int8_t)(i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | (s[i] >> 6) << 4);
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
    to->scale = half_at(from + 208);
    memcpy(to->scales, from + 192, 16);
    for (int i = 0; i < 256; i++) {
        int four = low[i / 128 * 64 + i % 64] >> i / 64 % 2 * 4 & 15, two = high[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
        to->codes[i] = (uint8_t)(four | two << 4);
    }
}

static const Type types[] = {
    [Q4_0] = {FOUR_0, FOUR_0, 32, 18, decode_4_0},       [Q4_1] = {FOUR_1, FOUR_1, 32, 20, decode_4_1},
    [Q5_0] = {FIVE_0, TIGHT_5_0, 32, 22, decode_5_0},    [Q5_1] = {EIGHT_1, TIGHT_5_1, 32, 24, decode_5_1},
    [Q8_0] = {EIGHT_0, EIGHT_0, 32, 34, decode_8_0},     [Q4_K] = {FOUR_K, TIGHT_4_K, 256, 144, decode_4_k},
    [Q5_K] = {EIGHT_K, TIGHT_5_K, 256, 176, decode_5_k}, [Q6_K] = {EIGHT_16, TIGHT_6_K, 256, 210, decode_6_k},
};

/* The form that keeps a tensor of ggml's type `type`, for products that round or do not; -1 if there is none. */
long meshlm_form(long type, long rounded) {
    if (type < 0 || type >= (long)(sizeof types / sizeof *types) || !types[type].decode) return -1;
    return rounded ? types[type].tight : types[type].form;
}

/* The codes of `count` inputs, up to 32, of output `lane`. */
static inline void put_output(uint8_t *to, const Form f, long lane, const uint8_t *codes, long count) {
    uint32_t words[8] = {0};
    for (long i = 0; i < count; i++) {
        uint32_t code = codes[i];
        if (has_high_bits(f)) words[high_spot(f, i).word] |= (code >> 4) << high_spot(f, i).shift, code &= 15;
        words[spot(f, i).word] |= code << spot(f, i).shift;
    }
    for (long w = 0; w < count * f.bits / 32; w++) ((uint32_t *)to)[w * WIDTH + lane] = words[w];
}

/* Record `nth` of a block, of output `lane`. */
static inline void put(uint8_t *record, const Form f, long lane, const Block *block, long nth) {
    if (f.wide)
        ((float *)record)[lane] = half(block->scale) * (float)block->scales[nth];
    else
        ((uint16_t *)record)[lane] = block->scale;
    record += scale_bytes(f);
    if (f.minima && f.wide)
        ((float *)record)[lane] = half(block->minimum) * (float)block->minima[nth];
    else if (f.minima)
        ((uint16_t *)record)[lane] = block->minimum;
    put_output(record + f.minima * scale_bytes(f), f, lane, block->codes + nth * f.block, f.block);
}

/* The record of a block with nested scales. */
static inline void put_nested(uint8_t *record, const Form f, long lane, const Block *block) {
    const int parts = 32 / f.nested;
    ((uint16_t *)record)[lane] = block->scale;
    if (f.minima) ((uint16_t *)record)[WIDTH + lane] = block->minimum;
    record += 2 * WIDTH * (1 + f.minima);
    for (int part = 0; part < f.block / 32; part++, record += 4 * WIDTH * f.bits) {
        for (int i = 0; i < parts; i++, record += WIDTH) record[lane] = (uint8_t)block->scales[parts * part + i];
        if (f.minima) record[lane] = (uint8_t)block->minima[part], record += WIDTH;
        put_output(record, f, lane, block->codes + 32 * part, 32);
    }
}

/* Rows of a tensor, row_bytes from one to the next -> outputs `first` (a multiple of 16) to first + count of a packed weight with k
 * inputs, whose table is written, with a form of this type. Output first + i comes from row order[i], or i if order is null. Lanes after the last become zeros. */
void meshlm_repack(const uint8_t *from, long row_bytes, long type, const int64_t *order, uint8_t *packed, long first, long count,
                   long k) {
    const Type t = types[type];
    const Form f = forms[panel_of(packed, first / WIDTH).form];
#pragma omp parallel for schedule(static)
    for (long p = 0; p < (count + WIDTH - 1) / WIDTH; p++) {
        uint8_t *record = (uint8_t *)panel_of(packed, first / WIDTH + p).records;
        for (long b = 0; b < k / t.inputs; b++, record += t.inputs / f.block * record_bytes(f))
            for (long lane = 0; lane < WIDTH; lane++) {
                Block block = {0};
                long row = p * WIDTH + lane;
                if (row < count) t.decode(from + (order ? order[row] : row) * row_bytes + b * t.bytes, &block);
                if (f.nested) put_nested(record, f, lane, &block);
                for (long nth = 0; !f.nested && nth < t.inputs / f.block; nth++) put(record + nth * record_bytes(f), f, lane, &block, nth);
            }
    }
}
