/* Weights that are an FP4 (e2m1) code times a power of two per 32 values of K, as DeepSeek V4 stores its experts.
 *
 * Kept as codes they are a quarter of the bytes of bf16, and decode waits for bytes. Unpacked they are the same bf16
 * values bit for bit, but that zeros are positive, which changes no sum that starts at zero. Source: spec 2.3.
 *
 * Layout, in the order of reading: [N / 128][K / 128][8 blocks of 16 columns][4 groups of 32 k], the last ones of N and K
 * may have fewer. Codes of a group: [4][32 words], nibble i of word 2 c + h of quarter q is column c at k = 8 q + 2 i + h.
 * Exponents of a group: [16], how far below 2^125 the power of two is.
 */
#ifndef DSV4_FP4_H
#define DSV4_FP4_H

#include "common.h"

enum { FP4_GROUP = 32, FP4_BLOCKS = 8, FP4_K = 128 };
enum { FP4_AHEAD_BYTES = 6144 }; /* as AHEAD_BYTES of gemm.c */

/* bf16 bits of 0, 0.5, 1, 1.5, 2, 3, 4, 6 times 2^125; codes from 8 on are negative. */
static const uint16_t fp4_magnitudes[8] = {0, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40};

/* Groups of one column block to out [groups * 32 / 2][16][2] bf16. */
INLINE void unpack_fp4(const uint8_t *codes, const uint8_t *exponents, long groups, uint16_t *out) {
    const __m128i half = _mm_loadu_si128((const __m128i *)fp4_magnitudes);
    const __m128i sign = _mm_slli_epi16(_mm_cmpgt_epi16(half, _mm_setzero_si128()), 15);
    const __m256i all = _mm256_set_m128i(_mm_or_si128(half, sign), half);
    const __m512i table = _mm512_broadcast_i64x4(all); /* twice: the fifth bit of an index is another code's */
    for (long g = 0; g < groups; g++) {
        __m512i e = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(exponents + g * LANES))), 7);
        e = _mm512_mask_blend_epi16(0xaaaaaaaa, e, _mm512_slli_epi32(e, 16));
        UNROLL for (int q = 0; q < 4; q++) {
            const uint8_t *at = codes + (g * 4 + q) * 64;
            _mm_prefetch((bytes_t)at + FP4_AHEAD_BYTES, _MM_HINT_T0);
            __m512i c = _mm512_loadu_si512(at);
            UNROLL for (int i = 0; i < 4; i++) {
                __m512i v = _mm512_permutexvar_epi16(_mm512_srli_epi16(c, 4 * i), table);
                /* In the exponent field; zero stays zero. */
                _mm512_storeu_si512(out + ((g * 4 + q) * 4 + i) * 2 * LANES, _mm512_subs_epu16(v, e));
            }
        }
    }
}

#endif
