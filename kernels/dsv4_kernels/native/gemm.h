#ifndef DSV4_GEMM_H
#define DSV4_GEMM_H

#include "common.h"

/* Columns [first_block * 16, end_block * 16) of all m rows, on the calling thread. */
void gemm_block(int dtype, const void *x, long ldx, long m, const void *w, long first_block, long end_block, long k,
                void *out, long ldo, int out_dtype);

#endif
