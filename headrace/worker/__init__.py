# SPDX-License-Identifier: Apache-2.0
"""The data plane: one worker per device carries out plans."""
