/* SwiGLU experts over rows sorted by expert, in two passes over packed weights. Source: spec 4.7. */
#include "gemm.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>

INLINE __m512 swiglu16(__m512 gate, __m512 up, __m512 limit) {
    gate = _mm512_min_ps(gate, limit);
    up = _mm512_max_ps(_mm512_min_ps(up, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
    return _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid16(gate)), up);
}

enum { ROWS = 48, BLOCKS = 8 }; /* rows and column blocks of a task */

typedef struct { long expert, row, rows, block; } task_t;

/* Tasks over all (expert, row panel, column group); returns their number. */
static long make_tasks(task_t *tasks, const int64_t *counts, long experts, long blocks) {
    long n = 0, first = 0;
    for (long e = 0; e < experts; first += counts[e], e++)
        for (long row = 0; row < counts[e]; row += ROWS)
            for (long block = 0; block < blocks; block += BLOCKS)
                tasks[n++] = (task_t){e, first + row, counts[e] - row < ROWS ? counts[e] - row : ROWS, block};
    return n;
}

/* The gate and the up product of a panel in fp32, then the activation, rounded as the input of w2. */
INLINE void up_task(const int dtype, task_t t, const void *x, const float *weights, const void *w1, const void *w3,
                    long inter, long hidden, float limit, void *mid) {
    float gate[ROWS * BLOCKS * LANES], up[ROWS * BLOCKS * LANES];
    long end = t.block + BLOCKS < inter / LANES ? t.block + BLOCKS : inter / LANES, ld = BLOCKS * LANES;
    bytes_t xs = (bytes_t)x + t.row * hidden * size_of(dtype);
    long shift = (t.expert * inter + t.block * LANES) * hidden * size_of(dtype);
    gemm_block(dtype, xs, hidden, t.rows, (bytes_t)w1 + shift, 0, end - t.block, hidden, gate, ld, F32);
    gemm_block(dtype, xs, hidden, t.rows, (bytes_t)w3 + shift, 0, end - t.block, hidden, up, ld, F32);
    for (long r = 0; r < t.rows; r++)
        for (long c = 0; c < (end - t.block) * LANES; c += LANES) {
            /* Both products are rounded to the compute dtype first, as separate linear layers would. */
            __m512 g = round_to(_mm512_loadu_ps(gate + r * ld + c), dtype), u = round_to(_mm512_loadu_ps(up + r * ld + c), dtype);
            __m512 a = swiglu16(g, u, _mm512_set1_ps(limit));
            if (weights) a = _mm512_mul_ps(a, _mm512_set1_ps(weights[t.row + r]));
            store16(mid, (t.row + r) * inter + t.block * LANES + c, a, dtype);
        }
}

/* x [N, hidden] sorted by expert, weights [N] or NULL, counts [experts] -> out [N, hidden] fp32. mid: scratch [N, inter].
 * w1, w3: packed [experts, inter / 16, hidden, 16]; w2: packed [experts, hidden / 16, inter, 16]. Returns 1 without memory. */
EXPORT int dsv4_experts(int dtype, const void *x, const float *weights, const int64_t *counts, long experts, const void *w1,
                        const void *w2, const void *w3, long hidden, long inter, float limit, void *mid, float *out) {
    long rows = 0, panels = 0;
    for (long e = 0; e < experts; e++) rows += counts[e], panels += (counts[e] + ROWS - 1) / ROWS;
    long widest = (hidden > inter ? hidden : inter) / LANES;
    task_t *tasks = malloc((panels * ((widest + BLOCKS - 1) / BLOCKS) + 1) * sizeof(task_t));
    if (!tasks) return 1;
    long num_up = make_tasks(tasks, counts, experts, inter / LANES);
#pragma omp parallel for schedule(dynamic) if (rows * hidden * inter > PARALLEL_WORK)
    for (long i = 0; i < num_up; i++) {
        if (dtype == BF16) up_task(BF16, tasks[i], x, weights, w1, w3, inter, hidden, limit, mid);
        else up_task(F32, tasks[i], x, weights, w1, w3, inter, hidden, limit, mid);
    }
    long num_down = make_tasks(tasks, counts, experts, hidden / LANES);
#pragma omp parallel for schedule(dynamic) if (rows * hidden * inter > PARALLEL_WORK)
    for (long i = 0; i < num_down; i++) {
        task_t t = tasks[i];
        long end = t.block + BLOCKS < hidden / LANES ? BLOCKS : hidden / LANES - t.block;
        gemm_block(dtype, (bytes_t)mid + t.row * inter * size_of(dtype), inter, t.rows,
                   (bytes_t)w2 + (t.expert * hidden + t.block * LANES) * inter * size_of(dtype), 0, end, inter,
                   out + t.row * hidden + t.block * LANES, hidden, F32);
    }
    free(tasks);
    return 0;
}

/* out [T, hidden] = sum over choices of y[pair_row[t][choice]], in order of choice, plus the shared row. */
EXPORT void dsv4_combine(int dtype, const float *y, const int64_t *pair_rows, const float *shared, long num_tokens, long topk,
                         long hidden, void *out) {
#pragma omp parallel for schedule(static) if (num_tokens * topk * hidden > PARALLEL_WORK * 4)
    for (long t = 0; t < num_tokens; t++)
        for (long d = 0; d < hidden; d += LANES) {
            __m512 sum = _mm512_setzero_ps();
            for (long c = 0; c < topk; c++) {
                int64_t row = pair_rows[t * topk + c];
                if (row >= 0) sum = _mm512_add_ps(sum, _mm512_loadu_ps(y + row * hidden + d));
            }
            if (shared) sum = _mm512_add_ps(sum, _mm512_loadu_ps(shared + t * hidden + d));
            store16(out, t * hidden + d, sum, dtype);
        }
}

/* Rows of tokens grouped by expert, choices of one expert in token order. ids: [T, topk] global; experts [first, first + n).
 * Writes x_out [N, hidden], weights_out [N], counts [n], pair_rows [T, topk] (-1 = not here). Returns N. */
EXPORT long dsv4_dispatch(int dtype, const void *x, const int64_t *ids, const float *weights, long num_tokens, long topk,
                          long hidden, long first, long experts, void *x_out, float *weights_out, int64_t *counts,
                          int64_t *pair_rows) {
    long pairs = num_tokens * topk, row_bytes = hidden * size_of(dtype), total = 0;
    for (long e = 0; e < experts; e++) counts[e] = 0;
    for (long p = 0; p < pairs; p++) {
        int64_t e = ids[p] - first;
        pair_rows[p] = -1;
        if (e >= 0 && e < experts) pair_rows[p] = counts[e]++, total++;
    }
    int64_t *starts = malloc(experts * sizeof(int64_t));
    if (!starts) return -1;
    for (long e = 0, row = 0; e < experts; row += counts[e], e++) starts[e] = row;
    for (long p = 0; p < pairs; p++)
        if (pair_rows[p] >= 0) pair_rows[p] += starts[ids[p] - first];
    free(starts);
#pragma omp parallel for schedule(static) if (total * hidden > PARALLEL_WORK * 4)
    for (long p = 0; p < pairs; p++) {
        int64_t row = pair_rows[p];
        if (row < 0) continue;
        __builtin_memcpy((char *)x_out + row * row_bytes, (bytes_t)x + p / topk * row_bytes, row_bytes);
        weights_out[row] = weights[p];
    }
    return total;
}

INLINE float sqrt_softplus1(float z) { return sqrtf((z > 0 ? z : 0) + log1pf(expf(-fabsf(z)))); }

/* Experts of every token: the best `topk` by score plus bias, ties to the lower expert, or those of `fixed` [T, topk].
 * logits: [T, experts]. scores: scratch of the same size. Writes ids and weights [T, topk], the scores without the bias. */
EXPORT void dsv4_route(const float *logits, const float *bias, const int64_t *fixed, long num_tokens, long experts, long topk,
                       int renormalise, float scaling, float *scores, int64_t *ids, float *weights) {
#pragma omp parallel for schedule(static) if (num_tokens * experts * 64 > PARALLEL_WORK * 4)
    for (long t = 0; t < num_tokens; t++) {
        float *s = scores + t * experts, *w = weights + t * topk, sum = 0;
        int64_t *chosen = ids + t * topk;
        for (long e = 0; e < experts; e++) s[e] = sqrt_softplus1(logits[t * experts + e]);
        for (long c = 0; c < topk; c++) {
            if (fixed) {
                chosen[c] = fixed[t * topk + c];
                continue;
            }
            long best = -1;
            for (long e = 0; e < experts; e++) {
                int taken = 0;
                for (long d = 0; d < c; d++) taken |= chosen[d] == e;
                if (!taken && (best < 0 || s[e] + bias[e] > s[best] + bias[best])) best = e;
            }
            chosen[c] = best;
        }
        for (long c = 0; c < topk; c++) sum += w[c] = s[chosen[c]];
        for (long c = 0; c < topk; c++) w[c] = (renormalise ? w[c] / (sum + 1e-20f) : w[c]) * scaling;
    }
}
