/* The one inner loop of products and attention: rows times a panel of 16 columns.
 *
 * out[r, c] (+)= sum over i < k of x[r, i] * panel[i, c], as one chain of fused multiply-adds in the order of i. The chain of an element
 * is the same in every tile height, and `more` continues it, so results do not depend on how rows are grouped. One row alone takes four panels at once: eight independent chains instead of two hide the latency. */

#define WIDTH 16
#define HEIGHT 6 /* rows of the tallest tile: 12 accumulators of AVX2's 16 registers */
#define SIDE 4   /* panels that one row takes at once */

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

/* One row and four panels, `apart` floats from one to the next; out [4 * 16]. */
static void tile_side(const Tile *t, long apart) {
    const float *x = t->x, *panel = t->panel;
    const long k = t->k;
    vec sums[2 * SIDE];
    for (int c = 0; c < 2 * SIDE; c++) sums[c] = t->more ? load(t->out + c * LANES) : splat(0.0f);
    for (long i = 0; i < k; i++) {
        vec s = splat(x[i]);
        for (int c = 0; c < 2 * SIDE; c++)
            sums[c] = fma8(s, load(panel + c / 2 * apart + i * WIDTH + c % 2 * LANES), sums[c]);
    }
    for (int c = 0; c < 2 * SIDE; c++) store(t->out + c * LANES, sums[c]);
}

/* Rows of the next tile when `left` are left: tiles of nearly equal height. */
static inline long tile_rows(long left) { return left <= HEIGHT ? left : left < 2 * HEIGHT ? (left + 1) / 2 : HEIGHT; }

/* All rows over one panel. next_step is that of one tile; each tile fetches its own share. */
static inline void tiles(Tile t, long rows) {
    static void (*const by_rows[])(const Tile *) = {0, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};
    for (long r = 0, here; r < rows; r += here) {
        here = tile_rows(rows - r);
        by_rows[here](&t);
        t.x += here * t.x_stride;
        t.out += here * t.out_stride;
        t.next += t.k * t.next_step;
    }
}

/* All rows over `panels` panels, `apart` floats from one to the next; out has their columns side by side. */
static inline void tile_panels(Tile t, long rows, long panels, long apart) {
    t.next = t.panel, t.next_step = 0;
    for (long p = 0; p < panels;) {
        long wide = rows == 1 && panels - p >= SIDE ? SIDE : 1;
        if (wide == SIDE)
            tile_side(&t, apart);
        else
            tiles(t, rows);
        t.panel += wide * apart;
        t.out += wide * WIDTH;
        p += wide;
    }
}
