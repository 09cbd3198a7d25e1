/* Softmax over the rows that one or two pools hold for a query, one latent row being key and value. Source: spec 4.3.
 *
 * Queries come in blocks that share their key lists: `row_ids[s][block][column]` is a row of source s or negative. Column c
 * of source 0 is position window_first[block] + c, visible to the query at position t when t - window < position <= t; column c
 * of source 1 is visible when c < num_visible. Hidden columns get probability 0, which changes no sum, so a query's result does
 * not depend on its block as long as window_first is a multiple of 16 and source 1 lists its rows in the same order.
 */
#include "common.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const void *base[2];   /* [rows, dim] */
    const int64_t *ids[2]; /* [blocks, columns[s]] */
    long columns[2];       /* multiples of 16 */
    long block_stride[2];  /* 0: all blocks share one list */
} sources_t;

static const char zero_row[4096] __attribute__((aligned(64)));

/* 4 queries x 4 keys, each product summed over dim in 16 (fp32) or 16 pair (bf16) lanes, then across lanes. */
INLINE void scores_tile(const int dtype, const int queries, const void *q, const void *const *keys, long dim, float scale,
                        float *out, long ldo) {
    __m512 acc[4][4];
    UNROLL for (int i = 0; i < queries; i++) UNROLL for (int j = 0; j < 4; j++) acc[i][j] = _mm512_setzero_ps();
    for (long d = 0; d < dim; d += dtype == BF16 ? 32 : 16) {
        if (dtype == BF16) {
            __m512bh k[4];
            UNROLL for (int j = 0; j < 4; j++) k[j] = (__m512bh)_mm512_loadu_si512((const uint16_t *)keys[j] + d);
            UNROLL for (int i = 0; i < queries; i++) {
                __m512bh a = (__m512bh)_mm512_loadu_si512((const uint16_t *)q + i * dim + d);
                UNROLL for (int j = 0; j < 4; j++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], a, k[j]);
            }
        } else {
            __m512 k[4];
            UNROLL for (int j = 0; j < 4; j++) k[j] = _mm512_loadu_ps((const float *)keys[j] + d);
            UNROLL for (int i = 0; i < queries; i++) {
                __m512 a = _mm512_loadu_ps((const float *)q + i * dim + d);
                UNROLL for (int j = 0; j < 4; j++) acc[i][j] = _mm512_fmadd_ps(a, k[j], acc[i][j]);
            }
        }
    }
    UNROLL for (int i = 0; i < queries; i++) UNROLL for (int j = 0; j < 4; j++)
        out[i * ldo + j] = _mm512_reduce_add_ps(acc[i][j]) * scale;
}

/* out[row] (+)= sum_c p[row][c] * value[c] over dims [d, d + 32). */
INLINE void values_tile(const int dtype, const int rows, const float *p, long ldp, const uint16_t *p16,
                        const void *const *keys, long columns, long d, __m512 acc[8][2]) {
    if (dtype == BF16) {
        const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                             5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for (long c = 0; c < columns; c += 2) {
            __m512i a = _mm512_loadu_si512((const uint16_t *)keys[c] + d);
            __m512i b = _mm512_loadu_si512((const uint16_t *)keys[c + 1] + d);
            __m512bh v0 = (__m512bh)_mm512_permutex2var_epi16(a, low, b), v1 = (__m512bh)_mm512_permutex2var_epi16(a, high, b);
            UNROLL for (int i = 0; i < rows; i++) {
                __m512bh w = (__m512bh)_mm512_set1_epi32(*(const int *)(p16 + i * ldp + c));
                acc[i][0] = _mm512_dpbf16_ps(acc[i][0], w, v0);
                acc[i][1] = _mm512_dpbf16_ps(acc[i][1], w, v1);
            }
        }
    } else {
        for (long c = 0; c < columns; c++) {
            __m512 v0 = _mm512_loadu_ps((const float *)keys[c] + d), v1 = _mm512_loadu_ps((const float *)keys[c] + d + 16);
            UNROLL for (int i = 0; i < rows; i++) {
                __m512 w = _mm512_set1_ps(p[i * ldp + c]);
                acc[i][0] = _mm512_fmadd_ps(w, v0, acc[i][0]);
                acc[i][1] = _mm512_fmadd_ps(w, v1, acc[i][1]);
            }
        }
    }
}

/* Numerators in place of the logits, in bf16 too where values are; returns the denominator. Hidden columns become 0. */
INLINE float softmax_row(float *logits, uint16_t *p16, const int64_t *ids0, const int64_t *ids1, long n0, long n1,
                         long first, long last, long visible, const float *sink, const int dtype) {
    float top = sink ? *sink : -INFINITY;
    for (long c = 0; c < n0 + n1; c++) {
        int seen = c < n0 ? c >= first && c <= last && ids0[c] >= 0 : c - n0 < visible && ids1[c - n0] >= 0;
        if (!seen) logits[c] = -INFINITY;
        else if (logits[c] > top) top = logits[c];
    }
    if (top == -INFINITY) top = 0;
    __m512 sum = _mm512_setzero_ps(), t = _mm512_set1_ps(top);
    for (long c = 0; c < n0 + n1; c += LANES) {
        __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(logits + c), t));
        sum = _mm512_add_ps(sum, e);
        if (dtype == BF16) store16(p16, c, e, BF16);
        else _mm512_storeu_ps(logits + c, e);
    }
    float denominator = _mm512_reduce_add_ps(sum);
    if (sink) denominator += _mm_cvtss_f32(_mm512_castps512_ps128(exp16(_mm512_set1_ps(*sink - top))));
    return denominator > 0 ? denominator : 1.0f;
}

static void attend_tokens(const int dtype, const char *q, char *out, long tokens, const int64_t *positions,
                          const int64_t *visible, long heads, long dim, const sources_t *src, long block, long window_first,
                          long window, const float *sink, float scale, const void **keys, float *logits, uint16_t *p16,
                          float *denominators) {
    long n0 = src->columns[0], n1 = 0, rows = tokens * heads, row_bytes = dim * size_of(dtype);
    for (long t = 0; src->columns[1] && t < tokens; t++)
        if (visible[t] > n1) n1 = visible[t];
    n1 = (n1 + LANES - 1) / LANES * LANES;
    if (n1 > src->columns[1]) n1 = src->columns[1];
    long n = n0 + n1;
    const int64_t *ids0 = src->ids[0] + block * src->block_stride[0];
    const int64_t *ids1 = n1 ? src->ids[1] + block * src->block_stride[1] : 0;
    for (long c = 0; c < n; c++) {
        int s = c >= n0;
        int64_t id = s ? ids1[c - n0] : ids0[c];
        keys[c] = id < 0 ? zero_row : (const char *)src->base[s] + id * row_bytes;
    }
    for (long c = 0; c < n; c += 4)
        for (long r = 0; r < rows; r += 4) {
            if (rows - r >= 4) scores_tile(dtype, 4, q + r * row_bytes, keys + c, dim, scale, logits + r * n + c, n);
            else for (long i = r; i < rows; i++)
                scores_tile(dtype, 1, q + i * row_bytes, keys + c, dim, scale, logits + i * n + c, n);
        }
    for (long r = 0; r < rows; r++) {
        long t = positions[r / heads] - window_first;
        denominators[r] = softmax_row(logits + r * n, p16 + r * n, ids0, ids1, n0, n1, t - window + 1, t,
                                      visible ? visible[r / heads] : 0, sink ? sink + r % heads : 0, dtype);
    }
    for (long d = 0; d < dim; d += 32)
        for (long r = 0; r < rows; r += rows - r >= 8 ? 8 : 1) {
            const int count = rows - r >= 8 ? 8 : 1;
            __m512 acc[8][2];
            for (int i = 0; i < count; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
            if (count == 8) values_tile(dtype, 8, logits + r * n, n, p16 + r * n, keys, n, d, acc);
            else values_tile(dtype, 1, logits + r * n, n, p16 + r * n, keys, n, d, acc);
            for (int i = 0; i < count; i++) {
                __m512 scale_out = _mm512_set1_ps(denominators[r + i]);
                store16(out + (r + i) * row_bytes, d, _mm512_div_ps(acc[i][0], scale_out), dtype);
                store16(out + (r + i) * row_bytes, d + 16, _mm512_div_ps(acc[i][1], scale_out), dtype);
            }
        }
}

/* q, out [T, heads, dim], dim a multiple of 32. Block b holds tokens [b * block_tokens, ...) of T. positions, visible: [T].
 * Returns 0, or 1 when memory ran out. */
EXPORT int dsv4_attention(int dtype, const void *q, void *out, long num_tokens, long block_tokens, const int64_t *positions,
                          const int64_t *visible, long heads, long dim, const void *base0, const int64_t *ids0, long columns0,
                          const void *base1, const int64_t *ids1, long columns1, long stride1, const int64_t *window_first,
                          long window, const float *sink, float scale) {
    const sources_t src = {{base0, base1}, {ids0, ids1}, {columns0, columns1}, {columns0, stride1}};
    long blocks = (num_tokens + block_tokens - 1) / block_tokens, n = columns0 + columns1, row_bytes = heads * dim * size_of(dtype);
    int failed = 0;
#pragma omp parallel if (num_tokens * heads * n * dim > PARALLEL_WORK)
    {
        long rows = block_tokens * heads;
        const void **keys = malloc(n * sizeof(void *));
        float *logits = malloc(rows * n * sizeof(float)), *denominators = malloc(rows * sizeof(float));
        uint16_t *p16 = malloc(rows * n * sizeof(uint16_t));
        if (!keys || !logits || !denominators || !p16) failed = 1;
#pragma omp for schedule(dynamic)
        for (long block = 0; block < blocks; block++) {
            long first = block * block_tokens, tokens = num_tokens - first < block_tokens ? num_tokens - first : block_tokens;
            const char *from = (const char *)q + first * row_bytes;
            char *to = (char *)out + first * row_bytes;
            const int64_t *seen = visible ? visible + first : 0;
            if (failed) continue;
            if (dtype == BF16)
                attend_tokens(BF16, from, to, tokens, positions + first, seen, heads, dim, &src, block, window_first[block],
                              window, sink, scale, keys, logits, p16, denominators);
            else
                attend_tokens(F32, from, to, tokens, positions + first, seen, heads, dim, &src, block, window_first[block],
                              window, sink, scale, keys, logits, p16, denominators);
        }
        free(keys), free(logits), free(denominators), free(p16);
    }
    return failed;
}

/* Entry e, channel d = sum over slots of softmax(gate) * kv. kv, gate: [N] fp32 rows `stride` apart; rows: [E, slots],
 * -1 = none.
 * overlap: the first half of the slots reads channels [0, dim), the other half [dim, 2 * dim). Source: spec 4.4. */
EXPORT void dsv4_pool(const float *kv, const float *gate, const int64_t *rows, long entries, long slots, long stride,
                      long dim, int overlap, float *out) {
#pragma omp parallel for schedule(static) if (entries * slots * dim * 8 > PARALLEL_WORK * 4)
    for (long e = 0; e < entries; e++) {
        const int64_t *list = rows + e * slots;
        for (long d = 0; d < dim; d += LANES) {
            __m512 top = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), acc = _mm512_setzero_ps();
            for (long s = 0; s < slots; s++) {
                long shift = overlap && s >= slots / 2 ? dim : 0;
                if (list[s] >= 0) top = _mm512_max_ps(top, _mm512_loadu_ps(gate + list[s] * stride + shift + d));
            }
            for (long s = 0; s < slots; s++) {
                long shift = overlap && s >= slots / 2 ? dim : 0;
                if (list[s] < 0) continue;
                long at = list[s] * stride + shift + d;
                __m512 w = exp16(_mm512_sub_ps(_mm512_loadu_ps(gate + at), top));
                sum = _mm512_add_ps(sum, w);
                acc = _mm512_fmadd_ps(w, _mm512_loadu_ps(kv + at), acc);
            }
            _mm512_storeu_ps(out + e * dim + d, _mm512_div_ps(acc, sum));
        }
    }
}

INLINE void index_tokens(const int dtype, const char *q, const char *keys, const float *weights, long heads, long n, long dim,
                         long first, long last, float *out) {
    long row_bytes = dim * size_of(dtype);
    for (long c = first; c < last; c += 4) {
        const void *rows[4];
        float dots[4][4], sums[4] = {0, 0, 0, 0};
        for (int j = 0; j < 4; j++) rows[j] = c + j < n ? keys + (c + j) * row_bytes : zero_row;
        for (long h = 0; h < heads; h += heads - h >= 4 ? 4 : 1) {
            const int count = heads - h >= 4 ? 4 : 1;
            if (count == 4) scores_tile(dtype, 4, q + h * row_bytes, rows, dim, 1.0f, dots[0], 4);
            else scores_tile(dtype, 1, q + h * row_bytes, rows, dim, 1.0f, dots[0], 4);
            for (int i = 0; i < count; i++)
                for (int j = 0; j < 4; j++) sums[j] += weights[h + i] * (dots[i][j] > 0 ? dots[i][j] : 0);
        }
        for (int j = 0; j < 4 && c + j < n; j++) out[c + j] = sums[j];
    }
}

enum { INDEX_KEYS = 512 }; /* keys per task */

/* out[t][n] = sum_h weights[t][h] * relu(q[t][h] . keys[n]), heads in order. Source: spec 4.5. */
EXPORT void dsv4_index_scores(int dtype, const void *q, const void *keys, const float *weights, long num_tokens, long heads,
                              long n, long dim, float *out) {
    long parts = (n + INDEX_KEYS - 1) / INDEX_KEYS, row_bytes = heads * dim * size_of(dtype);
#pragma omp parallel for schedule(dynamic) if (num_tokens * heads * n * dim > PARALLEL_WORK)
    for (long task = 0; task < num_tokens * parts; task++) {
        long t = task / parts, first = task % parts * INDEX_KEYS, last = first + INDEX_KEYS < n ? first + INDEX_KEYS : n;
        const char *row = (const char *)q + t * row_bytes;
        if (dtype == BF16) index_tokens(BF16, row, keys, weights + t * heads, heads, n, dim, first, last, out + t * n);
        else index_tokens(F32, row, keys, weights + t * heads, heads, n, dim, first, last, out + t * n);
    }
}
