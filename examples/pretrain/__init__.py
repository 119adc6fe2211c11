# SPDX-License-Identifier: Apache-2.0
"""Parts of examples/pretrain.py: models, experts, data, the loop, the profile and the plot."""
