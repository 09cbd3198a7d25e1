"""Every implementation that this machine can run is tested; the C kernels need AVX-512 BF16 and a C compiler.

Without them there is nothing of theirs to collect, and `test_dispatch.py` checks that the references run instead.
"""

import torch

from dsv4_kernels.native.library import is_available

collect_ignore = [] if is_available(torch.device("cpu"), torch.float32) else ["test_native.py"]
