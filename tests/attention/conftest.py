# SPDX-License-Identifier: Apache-2.0
"""Without a GPU, Triton runs in its interpreter, which is chosen where a kernel is defined: so before any import."""

import os

if not os.path.exists("/dev/nvidia0"):
    os.environ["TRITON_INTERPRET"] = "1"
