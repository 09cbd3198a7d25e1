"""The E4M3 table of the CPU reference."""

import torch

from dsv4_kernels.quant.reference import decode_e4m3


def test_every_e4m3_code_decodes_exactly():
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.float8_e4m3fn)

    decoded = decode_e4m3(codes)

    assert torch.equal(decoded.view(torch.int32), codes.float().view(torch.int32))  # the two NaN codes included


def test_strided_e4m3_values_keep_their_order():
    codes = torch.arange(64, dtype=torch.uint8).view(8, 8).t().view(torch.float8_e4m3fn)

    assert torch.equal(decode_e4m3(codes), codes.float())
