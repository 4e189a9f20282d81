# SPDX-License-Identifier: Apache-2.0
"""Random operators on tensors of our class: always the values of one device, bit by bit."""

from vescale.dtensor.random.operators import HANDLERS


def _ours(handler):
    return lambda func, args, kwargs, ref: handler(func, args, kwargs)


RANDOM = {operator: _ours(handler) for operator, handler in HANDLERS.items()}
