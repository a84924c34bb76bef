# SPDX-License-Identifier: Apache-2.0
"""Model architectures, each the difference from a neighbour, and how their weights are read."""
