/* Shared by the CPU kernels: element types, loads, stores, reductions in a fixed order.
 *
 * Every kernel here computes an output element with an order of operations that depends on nothing but the element's
 * own inputs: never on the number of rows, on their position in a batch or on the thread count. Equal inputs give
 * equal bits, alone or in any batch.
 */
#ifndef DSV4_COMMON_H
#define DSV4_COMMON_H

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 8")

enum { F32 = 0, BF16 = 1 };
enum { LANES = 16, PARALLEL_WORK = 1 << 17 }; /* multiply-adds below which one thread is quicker than two */

typedef const char *bytes_t;

INLINE long size_of(int dtype) { return dtype == BF16 ? 2 : 4; }

INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

INLINE __m512 load16(const void *base, long index, const int dtype) {
    if (dtype == BF16) return widen(_mm256_loadu_si256((const __m256i *)((const uint16_t *)base + index)));
    return _mm512_loadu_ps((const float *)base + index);
}

INLINE void store16(void *base, long index, __m512 x, const int dtype) {
    if (dtype == BF16)
        _mm256_storeu_si256((__m256i *)((uint16_t *)base + index), (__m256i)_mm512_cvtneps_pbh(x));
    else
        _mm512_storeu_ps((float *)base + index, x);
}

INLINE __m512 round_to(__m512 x, const int dtype) {
    return dtype == BF16 ? widen((__m256i)_mm512_cvtneps_pbh(x)) : x;
}

INLINE float widen1(uint16_t x) {
    union { uint32_t u; float f; } v = {(uint32_t)x << 16};
    return v.f;
}

INLINE uint16_t narrow1(float x) {
    __m128bh v = _mm_cvtneps_pbh(_mm_set_ss(x));
    return (uint16_t)_mm_extract_epi16((__m128i)v, 0);
}

INLINE float load1(const void *base, long index, const int dtype) {
    return dtype == BF16 ? widen1(((const uint16_t *)base)[index]) : ((const float *)base)[index];
}

INLINE void store1(void *base, long index, float x, const int dtype) {
    if (dtype == BF16) ((uint16_t *)base)[index] = narrow1(x);
    else ((float *)base)[index] = x;
}

/* exp for any finite x and -inf; relative error below 2e-7. Cody-Waite reduction and a degree-6 polynomial. */
INLINE __m512 exp16(__m512 x) {
    const __m512 log2e = _mm512_set1_ps(1.44269504088896341f);
    __m512 clipped = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.3762626647949f)), _mm512_set1_ps(-87.33654f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clipped, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clipped);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.3981999507e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    p = _mm512_scalef_ps(p, n);
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.33654f), _CMP_GE_OQ), p);
}

INLINE __m512 sigmoid16(__m512 x) {
    __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), x));
    return _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

#endif
