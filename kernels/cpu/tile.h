/* The one inner loop of products and attention: rows times a panel of 16 columns.
 *
 * out[r, c] (+)= sum over i < k of x[r, i] * panel[i, c], as one chain of fused multiply-adds in the order of i. The chain of an element
 * is the same in every tile height, and `more` continues it, so results do not depend on how rows are grouped. Few rows take several panels
 * at once: eight or twelve independent chains hide the latency. */

#define WIDTH 16
#define HEIGHT 6 /* rows of the tallest tile: 12 accumulators of AVX2's 16 registers */
#define SIDE 4   /* panels that one row takes at once */
#define AHEAD 4096 /* bytes from weights that are used to those that are fetched: what processors fetch by themselves ends with a page */

typedef struct {
    const float *x; /* [rows][x_stride] */
    long x_stride;
    const float *panel; /* [k][16] */
    long k;
    float *out; /* [rows][out_stride] */
    long out_stride;
    int more;          /* go on from what is in out */
    const float *next; /* fetched meanwhile, next_step floats per i */
    long next_step;
} Tile;

#define TILE(ROWS)                                                                                                             \
    static void tile_##ROWS(const Tile *t) {                                                                                   \
        const float *x = t->x, *panel = t->panel, *next = t->next;                                                             \
        const long k = t->k, x_stride = t->x_stride, next_step = t->next_step;                                                 \
        vec low[ROWS], high[ROWS];                                                                                             \
        for (int r = 0; r < ROWS; r++) {                                                                                       \
            low[r] = t->more ? load(t->out + r * t->out_stride) : splat(0.0f);                                                 \
            high[r] = t->more ? load(t->out + r * t->out_stride + LANES) : splat(0.0f);                                        \
        }                                                                                                                      \
        for (long i = 0; i < k; i++) {                                                                                         \
            vec a = load(panel + i * WIDTH), b = load(panel + i * WIDTH + LANES);                                              \
            __builtin_prefetch(next, 0, 2);                                                                                    \
            next += next_step;                                                                                                 \
            for (int r = 0; r < ROWS; r++) {                                                                                   \
                vec s = splat(x[r * x_stride + i]);                                                                            \
                low[r] = fma8(s, a, low[r]);                                                                                   \
                high[r] = fma8(s, b, high[r]);                                                                                 \
            }                                                                                                                  \
        }                                                                                                                      \
        for (int r = 0; r < ROWS; r++) {                                                                                       \
            store(t->out + r * t->out_stride, low[r]);                                                                         \
            store(t->out + r * t->out_stride + LANES, high[r]);                                                                \
        }                                                                                                                      \
    }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)

/* Few rows and several panels, `apart` floats from one to the next; out [ROWS][PANELS * 16]. */
#define WIDE_TILE(NAME, ROWS, PANELS)                                                                                          \
    static void NAME(const Tile *t, long apart) {                                                                              \
        const float *x = t->x, *panel = t->panel;                                                                              \
        const long k = t->k, x_stride = t->x_stride, out_stride = t->out_stride;                                               \
        vec sums[ROWS][2 * PANELS];                                                                                            \
        for (int r = 0; r < ROWS; r++)                                                                                         \
            for (int c = 0; c < 2 * PANELS; c++)                                                                               \
                sums[r][c] = t->more ? load(t->out + r * out_stride + c * LANES) : splat(0.0f);                                \
        for (long i = 0; i < k; i++)                                                                                           \
            for (int r = 0; r < ROWS; r++)                                                                                     \
                for (int c = 0; c < 2 * PANELS; c++)                                                                           \
                    sums[r][c] = fma8(splat(x[r * x_stride + i]), load(panel + c / 2 * apart + i * WIDTH + c % 2 * LANES),     \
                                      sums[r][c]);                                                                             \
        for (int r = 0; r < ROWS; r++)                                                                                         \
            for (int c = 0; c < 2 * PANELS; c++) store(t->out + r * out_stride + c * LANES, sums[r][c]);                       \
    }
WIDE_TILE(tile_side, 1, SIDE) WIDE_TILE(tile_pair_2, 2, 2) WIDE_TILE(tile_pair_3, 3, 2)

#ifdef __AVX512F__
/* Twelve rows with registers of 16 floats. Each element's chain is that of the other tiles. It fetches the shares of two of those. */
#define TALL 12
static void tile_tall(const Tile *t) {
    const float *x = t->x, *panel = t->panel, *next = t->next, *second = next + t->k * t->next_step;
    const long k = t->k, x_stride = t->x_stride, next_step = t->next_step;
    __m512 sums[TALL];
    for (int r = 0; r < TALL; r++) sums[r] = t->more ? _mm512_loadu_ps(t->out + r * t->out_stride) : _mm512_setzero_ps();
    for (long i = 0; i < k; i++) {
        __m512 a = _mm512_loadu_ps(panel + i * WIDTH);
        __builtin_prefetch(next, 0, 2);
        __builtin_prefetch(second, 0, 2);
        next += next_step, second += next_step;
#pragma GCC unroll 12
        for (int r = 0; r < TALL; r++) sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(x[r * x_stride + i]), a, sums[r]);
    }
    for (int r = 0; r < TALL; r++) _mm512_storeu_ps(t->out + r * t->out_stride, sums[r]);
}
#endif

/* Rows of the next tile when `left` are left: tiles of nearly equal height. */
static inline long tile_rows(long left) { return left <= HEIGHT ? left : left < 2 * HEIGHT ? (left + 1) / 2 : HEIGHT; }

/* All rows over one panel. next_step is that of one tile; each tile fetches its own share. */
static inline void tiles(Tile t, long rows) {
    static void (*const by_rows[])(const Tile *) = {0, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};
    for (long r = 0, here; r < rows; r += here) {
#ifdef __AVX512F__
        if (rows - r >= TALL) {
            tile_tall(&t);
            t.next += t.k * t.next_step;
            here = TALL;
        } else
#endif
        {
            here = tile_rows(rows - r);
            by_rows[here](&t);
        }
        t.x += here * t.x_stride;
        t.out += here * t.out_stride;
        t.next += t.k * t.next_step;
    }
}

/* All rows over `panels` panels, `apart` floats from one to the next; out has their columns side by side. */
static inline void tile_panels(Tile t, long rows, long panels, long apart) {
    static void (*const wider[])(const Tile *, long) = {0, tile_side, tile_pair_2, tile_pair_3};
    static const long by_rows[] = {1, SIDE, 2, 2};
    t.next = t.panel, t.next_step = 0;
    for (long p = 0; p < panels;) {
        long wide = rows <= 3 && panels - p >= by_rows[rows] ? by_rows[rows] : 1;
        if (wide > 1)
            wider[rows](&t, apart);
        else
            tiles(t, rows);
        t.panel += wide * apart;
        t.out += wide * WIDTH;
        p += wide;
    }
}
