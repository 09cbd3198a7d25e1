#ifndef DSV4_GEMM_H
#define DSV4_GEMM_H

#include "common.h"

/* A packed weight: bf16 or fp32 as in gemm.c, or FP4 codes (fp4.h) when there are exponents. */
typedef struct {
    const void *data;
    const uint8_t *exponents;
} matrix_t;

/* The matrix from output column `first` on, a multiple of 16, in FP4 of 128 or the start of one in a stack. */
INLINE matrix_t from_column(matrix_t w, long first, long k, int dtype) {
    if (w.exponents) return (matrix_t){(bytes_t)w.data + first * k / 2, w.exponents + first * k / 32};
    return (matrix_t){(bytes_t)w.data + first * k * size_of(dtype), 0};
}

/* The first `blocks` * 16 columns of all m rows, on the calling thread. FP4 weights have fp32 results. */
void gemm_block(int dtype, const void *x, long ldx, long m, matrix_t w, long blocks, long k, void *out, long ldo,
                int out_dtype);

#endif
