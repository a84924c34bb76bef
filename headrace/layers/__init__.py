# SPDX-License-Identifier: Apache-2.0
"""The parts that models are built of."""
