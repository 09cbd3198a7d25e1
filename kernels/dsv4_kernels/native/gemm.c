/* y = x W^T with packed weights; bf16 inputs with fp32 sums, or fp32.
 *
 * A packed weight holds 16 output columns side by side: bf16 [N / 16][K / 2][16][2], fp32 [N / 16][K][16]. The sum over
 * K runs in order for every output element, whatever the tile: the tile only decides how many elements share a load.
 */
#include "gemm.h"

#include <omp.h>
#include <sys/mman.h>

enum { AHEAD_BYTES = 1024 }; /* how far weights are fetched ahead: decode waits for memory, not for products */

INLINE void tile(const int dtype, const int MR, const int NR, const void *x, long ldx, const void *w, long k_size,
                 void *out, long ldo, const int out_dtype) {
    __m512 acc[8][8];
    UNROLL for (int i = 0; i < MR; i++) UNROLL for (int j = 0; j < NR; j++) acc[i][j] = _mm512_setzero_ps();
    if (dtype == BF16) {
        const uint16_t *xs = x, *ws = w;
        for (long k = 0; k < k_size; k += 2) {
            __m512bh b[8];
            UNROLL for (int j = 0; j < NR; j++) {
                const uint16_t *at = ws + j * k_size * LANES + k * LANES;
                if (MR > 1) _mm_prefetch((bytes_t)at + AHEAD_BYTES, _MM_HINT_T0);
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

typedef void (*tile_fn)(const void *, long, const void *, long, void *, long, int);

#define TILE(D, M, N)                                                                                             \
    static void tile_##D##_##M##_##N(const void *x, long ldx, const void *w, long k, void *out, long ldo, int o) { \
        if (o == BF16) tile(D, M, N, x, ldx, w, k, out, ldo, BF16);                                                \
        else tile(D, M, N, x, ldx, w, k, out, ldo, F32);                                                           \
    }
#define TILES(D) TILE(D, 1, 8) TILE(D, 2, 8) TILE(D, 4, 4) TILE(D, 6, 4) TILE(D, 8, 3) TILE(D, 1, 1) TILE(D, 2, 1) TILE(D, 4, 1) TILE(D, 6, 1) TILE(D, 8, 1)
TILES(0)
TILES(1)
#define WIDE(D) {tile_##D##_1_8, tile_##D##_2_8, tile_##D##_4_4, tile_##D##_6_4, tile_##D##_8_3}
#define NARROW(D) {tile_##D##_1_1, tile_##D##_2_1, tile_##D##_4_1, tile_##D##_6_1, tile_##D##_8_1}
static const tile_fn wide[2][5] = {WIDE(0), WIDE(1)}, narrow[2][5] = {NARROW(0), NARROW(1)};
static const int tile_rows[5] = {1, 2, 4, 6, 8}, tile_blocks[5] = {8, 8, 4, 4, 3};

static int shape_for(long rows) { return rows == 8 ? 4 : rows >= 6 ? 3 : rows >= 4 ? 2 : rows >= 2 ? 1 : 0; }

void gemm_block(int dtype, const void *x, long ldx, long m, const void *w, long first_block, long end_block, long k,
                void *out, long ldo, int out_dtype) {
    for (long row = 0; row < m;) {
        int shape = shape_for(m - row);
        bytes_t xs = (bytes_t)x + row * ldx * size_of(dtype);
        char *os = (char *)out + row * ldo * size_of(out_dtype);
        for (long block = first_block; block < end_block;) {
            int is_wide = end_block - block >= tile_blocks[shape];
            tile_fn fn = is_wide ? wide[dtype][shape] : narrow[dtype][shape];
            fn(xs, ldx, (bytes_t)w + block * LANES * k * size_of(dtype), k, os + block * LANES * size_of(out_dtype), ldo,
               out_dtype);
            block += is_wide ? tile_blocks[shape] : 1;
        }
        row += tile_rows[shape];
    }
}

enum { PANEL_ROWS = 96, GROUP_BLOCKS = 24 }; /* rows and column blocks per task: multiples of every tile shape */

/* x [m, k] with row stride ldx, w packed [n / 16], out [m, n] with row stride ldo. */
EXPORT void dsv4_gemm(int dtype, const void *x, long ldx, long m, const void *w, long n, long k, void *out, long ldo,
                      int out_dtype) {
    long blocks = n / LANES, panels = (m + PANEL_ROWS - 1) / PANEL_ROWS, groups = (blocks + GROUP_BLOCKS - 1) / GROUP_BLOCKS;
#pragma omp parallel for schedule(dynamic) if (m * n * k > PARALLEL_WORK)
    for (long task = 0; task < panels * groups; task++) {
        long row = task / groups * PANEL_ROWS, block = task % groups * GROUP_BLOCKS;
        long rows = m - row < PANEL_ROWS ? m - row : PANEL_ROWS;
        long end = blocks < block + GROUP_BLOCKS ? blocks : block + GROUP_BLOCKS;
        long step = rows > 8 ? 8 : GROUP_BLOCKS;
        /* Few columns at a time, so that they stay in the first cache while the panel's rows pass. */
        for (long b = block; b < end; b += step)
            gemm_block(dtype, (bytes_t)x + row * ldx * size_of(dtype), ldx, rows, w, b, end < b + step ? end : b + step, k,
                       (char *)out + row * ldo * size_of(out_dtype), ldo, out_dtype);
    }
}

/* The same per group g: x columns [g * k, (g + 1) * k) times w[g] give out columns [g * n, (g + 1) * n). */
EXPORT void dsv4_grouped_gemm(int dtype, const void *x, long m, const void *w, long groups, long n, long k, void *out) {
    for (long g = 0; g < groups; g++)
        dsv4_gemm(dtype, (bytes_t)x + g * k * size_of(dtype), groups * k, m, (bytes_t)w + g * n * k * size_of(dtype), n, k,
                  (char *)out + g * n * size_of(dtype), groups * n, dtype);
}

/* Ask for 2 MiB pages before memory is first written: a step walks through all weights, and 4 KiB pages overflow the TLB. */
EXPORT void dsv4_advise_huge(void *memory, long num_bytes) {
    uintptr_t page = 2 << 20, first = ((uintptr_t)memory + page - 1) / page * page, end = (uintptr_t)memory + num_bytes;
    if (end > first + page) madvise((void *)first, (end - first) / page * page, MADV_HUGEPAGE);
}
