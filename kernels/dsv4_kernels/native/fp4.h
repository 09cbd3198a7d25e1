/* Weights that are an FP4 (e2m1) code times a power of two per 32 values of K, as DeepSeek V4 stores its experts.
 *
 * Kept as codes they are a quarter of the bytes of bf16, and decode waits for bytes. Unpacked they are the same bf16
 * values bit for bit. Layout: codes [N / 16][K / 32][4][32 words], nibble i of word 2 c + h of quarter q is column c at
 * k = 8 q + 2 i + h of the group; exponents [N / 16][K / 32][16]. Source: spec 2.2.
 */
#ifndef DSV4_FP4_H
#define DSV4_FP4_H

#include "common.h"

enum { FP4_GROUP = 32, FP4_AHEAD_BYTES = 1024 };

/* bf16 bits of 0, 0.5, 1, 1.5, 2, 3, 4, 6; codes from 8 on are negative. */
#define FP4_MAGNITUDES 0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0

/* Groups of one column block to out [groups * 32 / 2][16][2] bf16. */
INLINE void unpack_fp4(const uint8_t *codes, const int8_t *exponents, long groups, uint16_t *out) {
    static const int16_t magnitudes[8] = {FP4_MAGNITUDES};
    const __m128i half = _mm_loadu_si128((const __m128i *)magnitudes), sign = _mm_set1_epi16((short)0x8000);
    const __m256i all = _mm256_set_m128i(_mm_or_si128(half, sign), half);
    const __m512i table = _mm512_broadcast_i64x4(all); /* twice: the fifth bit of an index is another code's */
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    for (long g = 0; g < groups; g++) {
        __m512i e = _mm512_slli_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(exponents + g * LANES))), 7);
        e = _mm512_mask_blend_epi16(0xaaaaaaaa, e, _mm512_slli_epi32(e, 16));
        UNROLL for (int q = 0; q < 4; q++) {
            const uint8_t *at = codes + (g * 4 + q) * 64;
            _mm_prefetch((bytes_t)at + FP4_AHEAD_BYTES, _MM_HINT_T0);
            __m512i c = _mm512_loadu_si512(at);
            UNROLL for (int i = 0; i < 4; i++) {
                __m512i v = _mm512_permutexvar_epi16(_mm512_srli_epi16(c, 4 * i), table);
                v = _mm512_mask_add_epi16(v, _mm512_test_epi16_mask(v, magnitude), v, e); /* zero has no exponent */
                _mm512_storeu_si512(out + ((g * 4 + q) * 4 + i) * 2 * LANES, v);
            }
        }
    }
}

#endif
