# SPDX-License-Identifier: Apache-2.0
"""The control plane: what runs next and where its KV lives, decided with integers (no torch)."""
