# SPDX-License-Identifier: Apache-2.0
"""The one error class whose message is meant for the person at the terminal."""


class UserError(Exception):
    """What is wrong, in which file and row or key, and what to do about it; shown without a traceback."""
