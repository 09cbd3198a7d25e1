/* Hyper-connections and normalisation of rows, all sums in fp32. Source: spec 3.1, 3.3, 4.2. */
#include "common.h"

#include <math.h>
#include <omp.h>

enum { STREAMS = 4, MIXES = 24, FEW_TOKENS = 8 };

INLINE float sum_of_squares(const void *x, long first, long n, const int dtype) {
    __m512 acc = _mm512_setzero_ps();
    for (long i = 0; i < n; i += LANES) {
        __m512 v = load16(x, first + i, dtype);
        acc = _mm512_fmadd_ps(v, v, acc);
    }
    return _mm512_reduce_add_ps(acc);
}

INLINE void mix_tile(const int dtype, const int tokens, const void *x, long first, long width, const float *fn,
                     const int outputs, float *out, long ldo) {
    __m512 acc[4][6];
    UNROLL for (int t = 0; t < tokens; t++) UNROLL for (int o = 0; o < outputs; o++) acc[t][o] = _mm512_setzero_ps();
    for (long i = 0; i < width; i += LANES) {
        __m512 v[4];
        UNROLL for (int t = 0; t < tokens; t++) v[t] = load16(x, first + t * width + i, dtype);
        UNROLL for (int o = 0; o < outputs; o++) {
            __m512 f = _mm512_loadu_ps(fn + o * width + i);
            UNROLL for (int t = 0; t < tokens; t++) acc[t][o] = _mm512_fmadd_ps(v[t], f, acc[t][o]);
        }
    }
    UNROLL for (int t = 0; t < tokens; t++) UNROLL for (int o = 0; o < outputs; o++)
        out[t * ldo + o] = _mm512_reduce_add_ps(acc[t][o]);
}

/* mix[t][o] = x_t . fn_o for output rows [from, to) of the `outputs` (4 or 24) of fn, whole groups of 4 or 6. */
INLINE void mix_rows(const int dtype, const void *x, long first, long tokens, long width, const float *fn, int outputs,
                     int from, int to, float *mix) {
    for (int o = from; o < to; o += outputs == MIXES ? 6 : 4) {
        const float *rows = fn + (long)o * width;
        if (outputs == MIXES) {
            if (tokens == 4) mix_tile(dtype, 4, x, first, width, rows, 6, mix + o, MIXES);
            else for (long t = 0; t < tokens; t++)
                mix_tile(dtype, 1, x, first + t * width, width, rows, 6, mix + t * MIXES + o, MIXES);
        } else {
            for (long t = 0; t < tokens; t++)
                mix_tile(dtype, 1, x, first + t * width, width, rows, 4, mix + t * MIXES + o, MIXES);
        }
    }
}

INLINE float sigmoid1(float x) { return 1.0f / (1.0f + expf(-x)); }

static void sinkhorn(float *c, int iters, float eps) {
    for (int j = 0; j < STREAMS; j++) {
        float top = c[4 * j], sum = 0;
        for (int k = 1; k < STREAMS; k++) top = fmaxf(top, c[4 * j + k]);
        for (int k = 0; k < STREAMS; k++) sum += c[4 * j + k] = expf(c[4 * j + k] - top);
        for (int k = 0; k < STREAMS; k++) c[4 * j + k] = c[4 * j + k] / sum + eps;
    }
    __m128 r[4], e = _mm_set1_ps(eps);
    for (int j = 0; j < 4; j++) r[j] = _mm_loadu_ps(c + 4 * j);
    for (int i = 0; i < iters; i++) {
        if (i) { /* rows: as columns of the transpose */
            _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
            __m128 s = _mm_add_ps(_mm_add_ps(_mm_add_ps(_mm_add_ps(r[0], r[1]), r[2]), r[3]), e);
            for (int j = 0; j < 4; j++) r[j] = _mm_div_ps(r[j], s);
            _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
        }
        __m128 s = _mm_add_ps(_mm_add_ps(_mm_add_ps(_mm_add_ps(r[0], r[1]), r[2]), r[3]), e);
        for (int j = 0; j < 4; j++) r[j] = _mm_div_ps(r[j], s);
    }
    for (int j = 0; j < 4; j++) _mm_storeu_ps(c + 4 * j, r[j]);
}

INLINE void normalise(void *y, long n, float scale, const float *weight, const int dtype) {
    __m512 s = _mm512_set1_ps(scale);
    for (long i = 0; i < n; i += LANES) {
        __m512 v = _mm512_mul_ps(load16(y, i, dtype), s);
        if (weight) v = _mm512_mul_ps(v, _mm512_loadu_ps(weight + i));
        store16(y, i, v, dtype);
    }
}

INLINE void collapse(const void *x, long first, long dim, const float *pre, void *y, long y_first, const int dtype) {
    __m512 p[4];
    for (int j = 0; j < 4; j++) p[j] = _mm512_set1_ps(pre[j]);
    for (long i = 0; i < dim; i += LANES) {
        __m512 v = _mm512_mul_ps(p[0], load16(x, first + i, dtype));
        for (int j = 1; j < 4; j++) v = _mm512_fmadd_ps(p[j], load16(x, first + j * dim + i, dtype), v);
        store16(y, y_first + i, v, dtype);
    }
}

/* mix: [tokens][24], x . fn of the tokens. */
INLINE void pre_tokens(const int dtype, const void *x, long first, long tokens, long dim, float *mix, const float *scale,
                       const float *base, const float *weight, int iters, float eps, float norm_eps, void *y, float *post,
                       float *comb) {
    long width = STREAMS * dim;
    int outputs = post ? MIXES : STREAMS;
    for (long t = 0; t < tokens; t++) {
        float *m = mix + t * MIXES, pre[STREAMS];
        float r = 1.0f / sqrtf(sum_of_squares(x, (first + t) * width, width, dtype) / width + norm_eps);
        for (int o = 0; o < outputs; o++) m[o] *= r;
        for (int j = 0; j < STREAMS; j++) pre[j] = sigmoid1(m[j] * scale[0] + base[j]) + eps;
        if (post) {
            float *c = comb + (first + t) * 16;
            for (int j = 0; j < STREAMS; j++) post[(first + t) * 4 + j] = 2 * sigmoid1(m[4 + j] * scale[1] + base[4 + j]);
            for (int j = 0; j < 16; j++) c[j] = m[8 + j] * scale[2] + base[8 + j];
            sinkhorn(c, iters, eps);
        }
        long row = (first + t) * dim;
        collapse(x, (first + t) * width, dim, pre, y, row, dtype);
        if (weight)
            normalise((char *)y + row * size_of(dtype), dim,
                      1.0f / sqrtf(sum_of_squares(y, row, dim, dtype) / dim + norm_eps), weight, dtype);
    }
}

/* Streams x [T, 4, dim] to a sub-layer's input y [T, dim], normed when weight is given; post [T, 4] and comb [T, 4, 4]
 * unless post is NULL (the head's form, fn with 4 rows). */
EXPORT void dsv4_hc_pre(int dtype, const void *x, long num_tokens, long dim, const float *fn, const float *scale,
                        const float *base, const float *weight, int iters, float eps, float norm_eps, void *y, float *post,
                        float *comb) {
    int outputs = post ? MIXES : STREAMS, group = post ? 6 : 4;
    long width = STREAMS * dim;
    if (num_tokens <= FEW_TOKENS) { /* all threads work on the tokens of a tile, as fn is what has to be read */
        float mix[FEW_TOKENS * MIXES];
#pragma omp parallel if (num_tokens * dim * 96 > PARALLEL_WORK / 2)
        {
#pragma omp for schedule(static)
            for (int o = 0; o < outputs; o += group)
                for (long first = 0; first < num_tokens; first += 4) {
                    long tokens = num_tokens - first < 4 ? num_tokens - first : 4;
                    if (dtype == BF16) mix_rows(BF16, x, first * width, tokens, width, fn, outputs, o, o + group, mix + first * MIXES);
                    else mix_rows(F32, x, first * width, tokens, width, fn, outputs, o, o + group, mix + first * MIXES);
                }
#pragma omp for schedule(static)
            for (long t = 0; t < num_tokens; t++) {
                float *m = mix + t * MIXES;
                if (dtype == BF16) pre_tokens(BF16, x, t, 1, dim, m, scale, base, weight, iters, eps, norm_eps, y, post, comb);
                else pre_tokens(F32, x, t, 1, dim, m, scale, base, weight, iters, eps, norm_eps, y, post, comb);
            }
        }
        return;
    }
#pragma omp parallel for schedule(static)
    for (long first = 0; first < num_tokens; first += 4) {
        float mix[4 * MIXES];
        long tokens = num_tokens - first < 4 ? num_tokens - first : 4;
        if (dtype == BF16) {
            mix_rows(BF16, x, first * width, tokens, width, fn, outputs, 0, outputs, mix);
            pre_tokens(BF16, x, first, tokens, dim, mix, scale, base, weight, iters, eps, norm_eps, y, post, comb);
        } else {
            mix_rows(F32, x, first * width, tokens, width, fn, outputs, 0, outputs, mix);
            pre_tokens(F32, x, first, tokens, dim, mix, scale, base, weight, iters, eps, norm_eps, y, post, comb);
        }
    }
}

INLINE void post_token(const int dtype, const void *y, const void *x, const float *post, const float *comb, long dim,
                       long token, void *out) {
    long first = token * STREAMS * dim;
    const float *p = post + token * 4, *c = comb + token * 16;
    for (long i = 0; i < dim; i += LANES) {
        __m512 added = load16(y, token * dim + i, dtype), v[4];
        for (int j = 0; j < 4; j++) v[j] = load16(x, first + j * dim + i, dtype);
        for (int k = 0; k < 4; k++) {
            __m512 s = _mm512_mul_ps(_mm512_set1_ps(p[k]), added);
            for (int j = 0; j < 4; j++) s = _mm512_fmadd_ps(_mm512_set1_ps(c[4 * j + k]), v[j], s);
            store16(out, first + k * dim + i, s, dtype);
        }
    }
}

/* out[k] = post[k] * y + sum_j comb[j][k] * x[j]. */
EXPORT void dsv4_hc_post(int dtype, const void *y, const void *x, const float *post, const float *comb, long num_tokens,
                         long dim, void *out) {
#pragma omp parallel for schedule(static) if (num_tokens * dim * 20 > PARALLEL_WORK * 4)
    for (long t = 0; t < num_tokens; t++) {
        if (dtype == BF16) post_token(BF16, y, x, post, comb, dim, t, out);
        else post_token(F32, y, x, post, comb, dim, t, out);
    }
}

INLINE void rotate(void *tail, long pairs, const float *cis, float sign, const int dtype) {
    for (long i = 0; i < pairs; i++) {
        float a = load1(tail, 2 * i, dtype), b = load1(tail, 2 * i + 1, dtype), re = cis[2 * i], im = sign * cis[2 * i + 1];
        store1(tail, 2 * i, a * re - b * im, dtype);
        store1(tail, 2 * i + 1, a * im + b * re, dtype);
    }
}

INLINE void norm_rope_row(const int dtype, const void *x, void *out, long row, long dim, const float *weight, float eps,
                          const float *cis, long pairs, float sign) {
    char *to = (char *)out + row * dim * size_of(dtype);
    if (eps >= 0) {
        float scale = 1.0f / sqrtf(sum_of_squares(x, row * dim, dim, dtype) / dim + eps);
        __m512 s = _mm512_set1_ps(scale);
        for (long i = 0; i < dim; i += LANES) {
            __m512 v = _mm512_mul_ps(load16(x, row * dim + i, dtype), s);
            if (weight) v = _mm512_mul_ps(v, _mm512_loadu_ps(weight + i));
            store16(to, i, v, dtype);
        }
    }
    if (cis) rotate(to + (dim - 2 * pairs) * size_of(dtype), pairs, cis, sign, dtype);
}

/* RMS norm of every row (eps >= 0), then rotation of the trailing 2 * pairs dims by cis[row / rows_per_token]. x may be out;
 * with eps < 0 rows are only rotated, in place. */
EXPORT void dsv4_norm_rope(int dtype, const void *x, void *out, long num_rows, long dim, const float *weight, float eps,
                           const float *cis, long pairs, long rows_per_token, int inverse) {
    float sign = inverse ? -1.0f : 1.0f;
#pragma omp parallel for schedule(static) if (num_rows * dim * 4 > PARALLEL_WORK * 4)
    for (long row = 0; row < num_rows; row++) {
        const float *turn = cis ? cis + row / rows_per_token * 2 * pairs : 0;
        if (dtype == BF16) norm_rope_row(BF16, x, out, row, dim, weight, eps, turn, pairs, sign);
        else norm_rope_row(F32, x, out, row, dim, weight, eps, turn, pairs, sign);
    }
}

/* Row i to row slots[i] of the pool, a negative slot = nowhere. Returns a slot that is no row of the pool, or -1; then
 * nothing was written. */
EXPORT long dsv4_store_rows(char *pool, long num_rows, const char *rows, const int64_t *slots, long n, long row_bytes) {
    for (long i = 0; i < n; i++)
        if (slots[i] >= num_rows) return slots[i];
    for (long i = 0; i < n; i++)
        if (slots[i] >= 0) __builtin_memcpy(pool + slots[i] * row_bytes, rows + i * row_bytes, row_bytes);
    return -1;
}
