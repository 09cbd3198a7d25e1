/* The best entries of every row of scores, exact and in ascending order. Source: spec 3.4.
 *
 * A score is compared as an integer that orders like it, -0 being 0 and NaN beyond infinity; equal ones go to the lower
 * entry. One pass finds the worst entry that is still selected, another lists what is at least as good.
 */
#include "common.h"

#include <omp.h>
#include <stdlib.h>

INLINE __m512i ordered16(const float *scores, __mmask16 lanes) {
    __m512i bits = _mm512_castps_si512(_mm512_add_ps(_mm512_maskz_loadu_ps(lanes, scores), _mm512_setzero_ps()));
    return _mm512_xor_si512(bits, _mm512_and_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(0x7fffffff)));
}

INLINE __mmask16 lanes_left(long n) { return n >= LANES ? 0xffff : (__mmask16)((1 << n) - 1); }

/* One integer per entry, score first, then the lower entry: no two are equal. */
INLINE int64_t key_of(int32_t ordered, long entry) { return (int64_t)ordered * (1ll << 32) + (int64_t)(0xffffffffu - (uint32_t)entry); }

/* Put `key` in place of the smallest of a heap. */
INLINE void replace_least(int64_t *heap, long n, long at, int64_t key) {
    for (long child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && heap[child + 1] < heap[child]) child++;
        if (key <= heap[child]) break;
        heap[at] = heap[child];
    }
    heap[at] = key;
}

/* The k-th largest key of n > k scores. heap: scratch [k]. */
static int64_t kth_key(const float *scores, long n, long k, int64_t *heap) {
    int32_t ordered[LANES];
    long filled = 0;
    for (long first = 0; first < n; first += LANES) {
        __mmask16 lanes = lanes_left(n - first);
        __m512i block = ordered16(scores + first, lanes);
        /* Later entries lose ties, so only better scores can come in. */
        if (filled == k) lanes = _mm512_mask_cmpgt_epi32_mask(lanes, block, _mm512_set1_epi32((int32_t)(heap[0] >> 32)));
        if (!lanes) continue;
        _mm512_storeu_si512(ordered, block);
        for (unsigned left = lanes; left; left &= left - 1) {
            int lane = __builtin_ctz(left);
            int64_t key = key_of(ordered[lane], first + lane);
            if (filled < k) {
                heap[filled++] = key;
                for (long at = k / 2; filled == k && at-- > 0;) replace_least(heap, k, at, heap[at]);
            } else if (key > heap[0]) {
                replace_least(heap, k, 0, key);
            }
        }
    }
    return heap[0];
}

INLINE void select_row(const float *scores, long visible, long k, int64_t *heap, int64_t *ids) {
    long found = 0;
    if (visible <= k) {
        for (; found < visible; found++) ids[found] = found;
    } else if (k) {
        int64_t least = kth_key(scores, visible, k, heap);
        __m512i worst = _mm512_set1_epi32((int32_t)(least >> 32));
        long last_equal = 0xffffffffu - (uint32_t)least;
        for (long first = 0; first < visible; first += LANES) {
            __mmask16 lanes = lanes_left(visible - first);
            __m512i block = ordered16(scores + first, lanes);
            unsigned chosen = _mm512_mask_cmpgt_epi32_mask(lanes, block, worst);
            if (first <= last_equal)
                chosen |= _mm512_mask_cmpeq_epi32_mask(lanes & lanes_left(last_equal + 1 - first), block, worst);
            for (; chosen; chosen &= chosen - 1) ids[found++] = first + __builtin_ctz(chosen);
        }
    }
    while (found < k) ids[found++] = -1;
}

/* scores [T, n], visible [T] -> ids [T, k] ascending, -1 behind them; k <= n. Returns 1 without memory. */
EXPORT int dsv4_select_topk(const float *scores, const int64_t *visible, long num_tokens, long n, long k, int64_t *ids) {
    int failed = 0;
#pragma omp parallel if (num_tokens > 1 && num_tokens * n > PARALLEL_WORK * 4)
    {
        int64_t *heap = malloc((k + 1) * sizeof(int64_t));
        if (!heap) failed = 1;
#pragma omp for schedule(dynamic)
        for (long t = 0; t < num_tokens; t++)
            if (heap) select_row(scores + t * n, visible[t] < n ? visible[t] : n, k, heap, ids + t * k);
        free(heap);
    }
    return failed;
}
