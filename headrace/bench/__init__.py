# SPDX-License-Identifier: Apache-2.0
"""Measures throughput and latency, of an engine loaded here or of a server, as a share of what the hardware allows."""
