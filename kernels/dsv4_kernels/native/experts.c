/* Mixture of experts: rows of tokens grouped by expert, SwiGLU in two passes over packed weights, sums. Source: spec 4.7.
 *
 * The routed and the shared expert of a step are one list of tasks, so that all threads are busy until the end of a pass.
 */
#include "gemm.h"

#include <math.h>
#include <omp.h>
#include <string.h>

INLINE __m512 swiglu16(__m512 gate, __m512 up, __m512 limit) {
    gate = _mm512_min_ps(gate, limit);
    up = _mm512_max_ps(_mm512_min_ps(up, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
    return _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid16(gate)), up);
}

enum { ROWS = 48, BLOCKS = 8 }; /* rows and column blocks of a task */

/* Experts of one shape: w1 (gate), w3 (up) [num, inter, hidden] and w2 (down) [num, hidden, inter], packed. */
typedef struct {
    matrix_t w1, w2, w3;
    long num, inter;
    float limit;
} experts_t;

/* Rows sorted by expert on their way through a set of experts. */
typedef struct {
    const experts_t *set;
    const void *x;        /* [rows, hidden] */
    const float *weights; /* [rows], NULL = 1 */
    void *mid;            /* [rows, inter] */
    float *y;             /* [rows, hidden] */
} rows_t;

typedef struct { const rows_t *in; long expert, row, rows, block; } task_t;

/* Tasks over all (expert, row panel, column group), behind the first n; returns their number with those. */
static long add_tasks(task_t *tasks, long n, const rows_t *in, const int64_t *counts, long columns) {
    long first = 0;
    for (long e = 0; e < in->set->num; first += counts[e], e++)
        for (long row = 0; row < counts[e]; row += ROWS)
            for (long block = 0; block < columns / LANES; block += BLOCKS)
                tasks[n++] = (task_t){in, e, first + row, counts[e] - row < ROWS ? counts[e] - row : ROWS, block};
    return n;
}

/* The gate and the up product of a panel in fp32, then the activation, rounded as the input of w2. */
INLINE void up_task(const int dtype, const task_t *t, long hidden) {
    float gate[ROWS * BLOCKS * LANES], up[ROWS * BLOCKS * LANES];
    const rows_t *in = t->in;
    long inter = in->set->inter, blocks = inter / LANES - t->block < BLOCKS ? inter / LANES - t->block : BLOCKS;
    long column = t->expert * inter + t->block * LANES, ld = BLOCKS * LANES;
    bytes_t x = (bytes_t)in->x + t->row * hidden * size_of(dtype);
    gemm_block(dtype, x, hidden, t->rows, from_column(in->set->w1, column, hidden, dtype), blocks, hidden, gate, ld, F32);
    gemm_block(dtype, x, hidden, t->rows, from_column(in->set->w3, column, hidden, dtype), blocks, hidden, up, ld, F32);
    for (long r = 0; r < t->rows; r++)
        for (long c = 0; c < blocks * LANES; c += LANES) {
            /* Both products are rounded to the compute dtype first, as separate linear layers would. */
            __m512 g = round_to(_mm512_loadu_ps(gate + r * ld + c), dtype), u = round_to(_mm512_loadu_ps(up + r * ld + c), dtype);
            __m512 a = swiglu16(g, u, _mm512_set1_ps(in->set->limit));
            if (in->weights) a = _mm512_mul_ps(a, _mm512_set1_ps(in->weights[t->row + r]));
            store16(in->mid, (t->row + r) * inter + t->block * LANES + c, a, dtype);
        }
}

static void down_task(const int dtype, const task_t *t, long hidden) {
    const rows_t *in = t->in;
    long inter = in->set->inter, blocks = hidden / LANES - t->block < BLOCKS ? hidden / LANES - t->block : BLOCKS;
    gemm_block(dtype, (bytes_t)in->mid + t->row * inter * size_of(dtype), inter, t->rows,
               from_column(in->set->w2, t->expert * hidden + t->block * LANES, inter, dtype), blocks, inter,
               in->y + t->row * hidden + t->block * LANES, hidden, F32);
}

/* Row of every (token, choice) pair when pairs are sorted by expert, choices of one expert in token order; -1 = the
 * expert is not in [first, first + num). Writes counts [num]. Returns the number of rows. */
static long sort_pairs(const int64_t *ids, long pairs, long first, long num, int64_t *counts, int64_t *pair_rows) {
    long total = 0;
    for (long e = 0; e < num; e++) counts[e] = 0;
    for (long p = 0; p < pairs; p++) {
        int64_t e = ids[p] - first;
        pair_rows[p] = e >= 0 && e < num ? counts[e]++ : -1;
    }
    for (long e = 0; e < num; e++) total += counts[e], counts[e] = total - counts[e]; /* first rows; sizes again below */
    for (long p = 0; p < pairs; p++)
        if (pair_rows[p] >= 0) pair_rows[p] += counts[ids[p] - first];
    for (long e = 0; e < num; e++) counts[e] = (e + 1 < num ? counts[e + 1] : total) - counts[e];
    return total;
}

/* out[d] = sum over choices of y[pair_rows[choice]], in order of choice, plus the shared row. */
INLINE void combine_row(const int64_t *pair_rows, long topk, const float *y, const float *shared, long hidden, void *out,
                        long at, const int dtype) {
    for (long d = 0; d < hidden; d += LANES) {
        __m512 sum = _mm512_setzero_ps();
        for (long c = 0; c < topk; c++)
            if (pair_rows[c] >= 0) sum = _mm512_add_ps(sum, _mm512_loadu_ps(y + pair_rows[c] * hidden + d));
        if (shared) sum = _mm512_add_ps(sum, _mm512_loadu_ps(shared + d));
        store16(out, at + d, sum, dtype);
    }
}

/* Memory of one mixture, on multiples of 64 bytes. */
typedef struct {
    int64_t *counts, *pair_rows; /* [experts], [pairs] */
    task_t *tasks;
    void *xs;      /* [pairs, hidden] sorted by expert */
    float *sorted; /* [pairs] */
    void *mid, *shared_mid;
    float *y, *shared_y;
    long num_bytes;
} scratch_t;

/* The next `num_bytes` of it; with memory NULL only the place is counted. */
static void *carve(char *memory, long *used, long num_bytes) {
    void *at = memory ? memory + *used : 0;
    *used += (num_bytes + 63) / 64 * 64;
    return at;
}

static long widest_of(long hidden, long inter, long shared_inter) {
    long widest = hidden > inter ? hidden : inter;
    return widest > shared_inter ? widest : shared_inter;
}

/* inter, shared_inter: 0 = no routed, no shared expert. */
static scratch_t lay_out(char *memory, int dtype, long num_tokens, long hidden, long topk, long num, long inter, long shared_inter) {
    long pairs = num_tokens * topk, size = size_of(dtype), shared_rows = shared_inter ? num_tokens : 0;
    long panels = (pairs + num_tokens) / ROWS + num + 1, blocks = widest_of(hidden, inter, shared_inter) / LANES;
    long groups = (blocks + BLOCKS - 1) / BLOCKS;
    scratch_t s = {0};
    s.counts = carve(memory, &s.num_bytes, num * sizeof(int64_t));
    s.pair_rows = carve(memory, &s.num_bytes, pairs * sizeof(int64_t));
    s.tasks = carve(memory, &s.num_bytes, panels * groups * sizeof(task_t));
    s.xs = carve(memory, &s.num_bytes, pairs * hidden * size);
    s.sorted = carve(memory, &s.num_bytes, pairs * sizeof(float));
    s.mid = carve(memory, &s.num_bytes, pairs * inter * size);
    s.y = carve(memory, &s.num_bytes, pairs * hidden * sizeof(float));
    s.shared_mid = carve(memory, &s.num_bytes, shared_rows * shared_inter * size);
    s.shared_y = carve(memory, &s.num_bytes, shared_rows * hidden * sizeof(float));
    return s;
}

EXPORT long dsv4_moe_scratch_bytes(int dtype, long num_tokens, long hidden, long topk, long num, long inter, long shared_inter) {
    return lay_out(0, dtype, num_tokens, hidden, topk, num, inter, shared_inter).num_bytes;
}

/* x [T, hidden] through the chosen experts of `routed`, of which ids [T, topk] (global) name those from `first` on, with
 * weights [T, topk], and through the one expert of `shared`; each may be NULL, then topk = 0. out [T, hidden]. scratch: on a
 * multiple of 64, of dsv4_moe_scratch_bytes. */
EXPORT void dsv4_moe(int dtype, const void *x, long num_tokens, long hidden, const int64_t *ids, const float *weights, long topk,
                     long first, const experts_t *routed, const experts_t *shared, void *out, int out_dtype, char *scratch) {
    long num = routed ? routed->num : 0, inter = routed ? routed->inter : 0, shared_inter = shared ? shared->inter : 0;
    const scratch_t s = lay_out(scratch, dtype, num_tokens, hidden, topk, num, inter, shared_inter);
    int64_t *counts = s.counts, *pair_rows = s.pair_rows;
    task_t *tasks = s.tasks;
    long pairs = num_tokens * topk, row_bytes = hidden * size_of(dtype), widest = widest_of(hidden, inter, shared_inter);
    const rows_t in = {routed, s.xs, s.sorted, s.mid, s.y}, everyone = {shared, x, 0, s.shared_mid, s.shared_y};
    long total = sort_pairs(ids, pairs, first, num, counts, pair_rows), everywhere = num_tokens;
#pragma omp parallel if ((total + num_tokens) * hidden * widest > PARALLEL_WORK)
    {
        long num_up = 0, num_down = 0;
#pragma omp for schedule(static)
        for (long p = 0; p < pairs; p++) {
            if (pair_rows[p] < 0) continue;
            memcpy((char *)s.xs + pair_rows[p] * row_bytes, (bytes_t)x + p / topk * row_bytes, row_bytes);
            s.sorted[pair_rows[p]] = weights[p];
        }
#pragma omp single copyprivate(num_up)
        {
            if (routed) num_up = add_tasks(tasks, num_up, &in, counts, routed->inter);
            if (shared) num_up = add_tasks(tasks, num_up, &everyone, &everywhere, shared->inter);
        }
#pragma omp for schedule(dynamic)
        for (long i = 0; i < num_up; i++) {
            if (dtype == BF16) up_task(BF16, tasks + i, hidden);
            else up_task(F32, tasks + i, hidden);
        }
#pragma omp single copyprivate(num_down)
        {
            if (routed) num_down = add_tasks(tasks, num_down, &in, counts, hidden);
            if (shared) num_down = add_tasks(tasks, num_down, &everyone, &everywhere, hidden);
        }
#pragma omp for schedule(dynamic)
        for (long i = 0; i < num_down; i++) down_task(dtype, tasks + i, hidden);
#pragma omp for schedule(static)
        for (long t = 0; t < num_tokens; t++) {
            const float *row = shared ? everyone.y + t * hidden : 0;
            if (out_dtype == BF16) combine_row(pair_rows + t * topk, routed ? topk : 0, in.y, row, hidden, out, t * hidden, BF16);
            else combine_row(pair_rows + t * topk, routed ? topk : 0, in.y, row, hidden, out, t * hidden, F32);
        }
    }
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
