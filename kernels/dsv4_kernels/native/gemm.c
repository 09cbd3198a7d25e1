/* y = x W^T with packed weights; bf16 inputs with fp32 sums, or fp32.
 *
 * A packed weight holds 16 output columns side by side: bf16 [N / 16][K / 2][16][2], fp32 [N / 16][K][16]. The sum over
 * K runs in order for every output element, whatever the tile: the tile only decides how many elements share a load.
 */
#include "gemm.h"
#include "fp4.h"

#include <omp.h>
#include <sys/mman.h>

enum { AHEAD_BYTES = 12288 }; /* of a tile's weights are fetched ahead: decode waits for memory, not for products */

INLINE void tile(const int dtype, const int MR, const int NR, const void *x, long ldx, const void *w, long k_size,
                 void *out, long ldo, const int out_dtype, const int adds) {
    __m512 acc[8][8];
    UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NR; j++)
        acc[i][j] = adds ? load16(out, i * ldo + j * LANES, out_dtype) : _mm512_setzero_ps();
    if (dtype == BF16) {
        const uint16_t *xs = x, *ws = w;
        for (long k = 0; k < k_size; k += 2) {
            __m512bh b[8];
            UNROLL for (int j = 0; j < NR; j++) {
                const uint16_t *at = ws + j * k_size * LANES + k * LANES;
                if (MR > 1) _mm_prefetch((bytes_t)at + AHEAD_BYTES / NR, _MM_HINT_T0);
                b[j] = (__m512bh)_mm512_loadu_si512(at);
            }
            UNROLL for (int i = 0; i < MR; i++) {
                __m512bh a = (__m512bh)_mm512_set1_epi32(*(const int *)(xs + i * ldx + k));
                UNROLL for (int j = 0; j < NR; j++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], a, b[j]);
            }
        }
    } else {
        const float *xs = x, *ws = w;
        for (long k = 0; k < k_size; k++) {
            __m512 b[8];
            UNROLL for (int j = 0; j < NR; j++) b[j] = _mm512_loadu_ps(ws + j * k_size * LANES + k * LANES);
            UNROLL for (int i = 0; i < MR; i++) {
                __m512 a = _mm512_set1_ps(xs[i * ldx + k]);
                UNROLL for (int j = 0; j < NR; j++) acc[i][j] = _mm512_fmadd_ps(a, b[j], acc[i][j]);
            }
        }
    }
    UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NR; j++)
        store16(out, i * ldo + j * LANES, acc[i][j], out_dtype);
}

typedef void (*tile_fn)(const void *, long, const void *, long, void *, long, int, int);

#define TILE(D, M, N)                                                                                                \
    static void tile_##D##_##M##_##N(const void *x, long ldx, const void *w, long k, void *out, long ldo, int o, int a) { \
        if (o == BF16) tile(D, M, N, x, ldx, w, k, out, ldo, BF16, 0);                                                \
        else tile(D, M, N, x, ldx, w, k, out, ldo, F32, a);                                                           \
    }
#define TILES(D) TILE(D, 1, 8) TILE(D, 2, 8) TILE(D, 4, 4) TILE(D, 6, 4) TILE(D, 8, 3) TILE(D, 1, 1) TILE(D, 2, 1) TILE(D, 4, 1) TILE(D, 6, 1) TILE(D, 8, 1)
TILES(0)
TILES(1)
#define WIDE(D) {tile_##D##_1_8, tile_##D##_2_8, tile_##D##_4_4, tile_##D##_6_4, tile_##D##_8_3}
#define NARROW(D) {tile_##D##_1_1, tile_##D##_2_1, tile_##D##_4_1, tile_##D##_6_1, tile_##D##_8_1}
static const tile_fn wide[2][5] = {WIDE(0), WIDE(1)}, narrow[2][5] = {NARROW(0), NARROW(1)};
static const int tile_rows[5] = {1, 2, 4, 6, 8}, tile_blocks[5] = {8, 8, 4, 4, 3};

static int shape_for(long rows) { return rows == 8 ? 4 : rows >= 6 ? 3 : rows >= 4 ? 2 : rows >= 2 ? 1 : 0; }

/* adds: to fp32 results that are there already, in the order that one longer sum would have. */
static void product(int dtype, const void *x, long ldx, long m, const void *w, long blocks, long k, void *out, long ldo,
                    int out_dtype, int adds) {
    for (long row = 0; row < m;) {
        int shape = shape_for(m - row);
        bytes_t xs = (bytes_t)x + row * ldx * size_of(dtype);
        char *os = (char *)out + row * ldo * size_of(out_dtype);
        for (long block = 0; block < blocks;) {
            int is_wide = blocks - block >= tile_blocks[shape];
            tile_fn fn = is_wide ? wide[dtype][shape] : narrow[dtype][shape];
            fn(xs, ldx, (bytes_t)w + block * LANES * k * size_of(dtype), k, os + block * LANES * size_of(out_dtype), ldo,
               out_dtype, adds);
            block += is_wide ? tile_blocks[shape] : 1;
        }
        row += tile_rows[shape];
    }
}

/* Unpacked are 8 blocks x 128 k at a time: 32 KiB, which stay in the first cache while all rows pass. */
static void product_fp4(const uint16_t *x, long ldx, long m, matrix_t w, long blocks, long k, float *out, long ldo) {
    uint16_t chunk[FP4_BLOCKS * FP4_K * LANES] __attribute__((aligned(64)));
    const uint8_t *codes = w.data, *exponents = w.exponents;
    for (long first = 0; first < blocks; first += FP4_BLOCKS) {
        long count = blocks - first < FP4_BLOCKS ? blocks - first : FP4_BLOCKS;
        for (long from = 0; from < k; from += FP4_K) {
            long size = k - from < FP4_K ? k - from : FP4_K, groups = count * size / FP4_GROUP;
            unpack_fp4(codes, exponents, groups, chunk);
            codes += groups * FP4_GROUP * LANES / 2, exponents += groups * LANES;
            product(BF16, x + from, ldx, m, chunk, count, size, out + first * LANES, ldo, F32, from > 0);
        }
    }
}

void gemm_block(int dtype, const void *x, long ldx, long m, matrix_t w, long blocks, long k, void *out, long ldo,
                int out_dtype) {
    if (w.exponents) product_fp4(x, ldx, m, w, blocks, k, out, ldo);
    else product(dtype, x, ldx, m, w.data, blocks, k, out, ldo, out_dtype, 0);
}

enum { PANEL_ROWS = 96, GROUP_BLOCKS = 24 }; /* rows and column blocks per task: multiples of every tile shape */

/* Column blocks per task: smaller for one narrow product of few rows, so that every thread gets some of it. */
static long group_blocks(long rows, long blocks) {
    if (rows > 8 || blocks >= 4 * GROUP_BLOCKS) return GROUP_BLOCKS;
    return tile_blocks[shape_for(rows)] == 3 ? 6 : 8;
}

/* x [m, k] with row stride ldx, w [num] packed [n / 16], out [m, n] with row stride ldo. Product i of num takes columns
 * [i * k, (i + 1) * k) of x and gives columns [i * n, (i + 1) * n) of out. */
EXPORT void dsv4_gemm(int dtype, const void *x, long ldx, long m, const void *w, long num, long n, long k, void *out, long ldo,
                      int out_dtype) {
    long blocks = n / LANES, panels = (m + PANEL_ROWS - 1) / PANEL_ROWS, per_task = group_blocks(m, blocks);
    long groups = (blocks + per_task - 1) / per_task, size = size_of(dtype);
#pragma omp parallel for schedule(dynamic) if (m * num * n * k > PARALLEL_WORK)
    for (long task = 0; task < num * panels * groups; task++) {
        long i = task / (panels * groups), row = task / groups % panels * PANEL_ROWS, block = task % groups * per_task;
        long rows = m - row < PANEL_ROWS ? m - row : PANEL_ROWS;
        long end = blocks < block + per_task ? blocks : block + per_task;
        long step = rows > 8 ? 8 : per_task;
        /* Few columns at a time, so that they stay in the first cache while the panel's rows pass. */
        for (long b = block; b < end; b += step)
            product(dtype, (bytes_t)x + (row * ldx + i * k) * size, ldx, rows, (bytes_t)w + (i * n + b * LANES) * k * size,
                    (end < b + step ? end : b + step) - b, k,
                    (char *)out + (row * ldo + i * n + b * LANES) * size_of(out_dtype), ldo, out_dtype, 0);
    }
}

/* Ask for 2 MiB pages before memory is first written: a step walks through all weights, and 4 KiB pages overflow the TLB. */
EXPORT void dsv4_advise_huge(void *memory, long num_bytes) {
    uintptr_t page = 2 << 20, first = ((uintptr_t)memory + page - 1) / page * page, end = (uintptr_t)memory + num_bytes;
    if (end > first + page) madvise((void *)first, (end - first) / page * page, MADV_HUGEPAGE);
}

static int find_code(int magnitude) {
    for (int code = 0; code < 8; code++)
        if (fp4_magnitudes[code] == magnitude) return code;
    return -1;
}

/* Where a group of 32 k of a row of [n, k] lies in the order of fp4.h, counted in groups of 16 columns. */
static long fp4_place(long row, long group, long n, long k) {
    long block = row / LANES, first = block / FP4_BLOCKS * FP4_BLOCKS, from = group * FP4_GROUP / FP4_K * FP4_K;
    long count = n / LANES - first < FP4_BLOCKS ? n / LANES - first : FP4_BLOCKS, size = k - from < FP4_K ? k - from : FP4_K;
    return (first * k + count * from + (block - first) * size) / FP4_GROUP + group - from / FP4_GROUP;
}

/* bf16 w [num, n, k] to the codes and exponents of fp4.h; codes are zero before. n % 16 = k % 32 = 0. Returns 1, or 0
 * when a weight is no code times the power of two of its group. */
EXPORT int dsv4_pack_fp4(const uint16_t *w, long num, long n, long k, uint16_t *codes, uint8_t *exponents) {
    int is_exact = 1;
#pragma omp parallel for schedule(static)
    for (long row = 0; row < num * n; row++)
        for (long group = 0; is_exact && group < k / FP4_GROUP; group++) {
            const uint16_t *values = w + row * k + group * FP4_GROUP;
            int top = 0, lane = row % LANES;
            for (int i = 0; i < FP4_GROUP; i++)
                if ((values[i] & 0x7fff) > top) top = values[i] & 0x7fff;
            int below = top ? (fp4_magnitudes[6] >> 7) - (top >> 7) : 0; /* the largest value becomes 4 or 6 */
            if (below < 0) is_exact = 0;
            long at = row / n * (n / LANES) * (k / FP4_GROUP) + fp4_place(row % n, group, n, k);
            exponents[at * LANES + lane] = (uint8_t)below;
            for (int i = 0; i < FP4_GROUP; i++) {
                int magnitude = values[i] & 0x7fff, code = find_code(magnitude ? magnitude + below * 128 : 0);
                if (code < 0 || (code == 0 && magnitude)) is_exact = 0;
                else codes[(at * 4 + i / 8) * 32 + 2 * lane + i % 2] |= (code | (values[i] >> 15) << 3) << i % 8 / 2 * 4;
            }
        }
    return is_exact;
}
