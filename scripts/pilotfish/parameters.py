# SPDX-License-Identifier: Apache-2.0
"""How many parameters a drafter has, from its constants alone.

H is the hidden size, n the number of conditioning layers, V and Vd the target's and the draft vocabulary, A and K the
heads and the key-value heads of size D, and `width` the MLP's.
"""

from pilotfish.constants import Constants


def trainable(made: Constants, width: int) -> int:
    """Parameters that training moves: those of the checkpoint, without what is the target's.

    EAGLE-3's embedding is the target's, as are DFlash's embedding and its head, whole or reduced.
    """
    ends = {"eagle3": made.draft_vocab_size, "dflash": 0}[made.algorithm]
    return ends * made.hidden_size + _between(made, width)


def stored(made: Constants, width: int) -> int:
    """Parameters of a checkpoint in speculators' format.

    EAGLE-3's has embedding V x H and head Vd x H; DFlash's no embedding, and a head only of a reduced vocabulary.
    """
    reduced = made.draft_vocab_size != made.target_vocab_size
    rows = {
        "eagle3": made.target_vocab_size + made.draft_vocab_size,
        "dflash": made.draft_vocab_size if reduced else 0,
    }[made.algorithm]
    return rows * made.hidden_size + _between(made, width)


def _between(made: Constants, width: int) -> int:
    """Parameters between embedding and head: the projection H x nH, the layers, and the norms outside them."""
    hidden = made.hidden_size
    layer = {"eagle3": _eagle3_layer, "dflash": _dflash_layer}[made.algorithm](made, width)
    # DFlash norms the projected states too; EAGLE-3 has only the last norm outside its layer.
    norms = {"eagle3": 1, "dflash": 2}[made.algorithm]
    return len(made.capture_layers) * hidden * hidden + made.draft_layers * layer + norms * hidden


def _attention(made: Constants, given: int) -> int:
    """Queries, keys and values from a state of `given` channels, given x (A + 2K) D, and back, A D x H."""
    query, keys = made.heads * made.head_dim, made.kv_heads * made.head_dim
    return given * (query + 2 * keys) + query * made.hidden_size


def _eagle3_layer(made: Constants, width: int) -> int:
    """Attention over twice the hidden size, the MLP's three, 3 H x width, and three norms of H."""
    return _attention(made, 2 * made.hidden_size) + 3 * made.hidden_size * width + 3 * made.hidden_size


def _dflash_layer(made: Constants, width: int) -> int:
    """Qwen3's: attention with norms of D on queries and keys, the MLP's three, 3 H x width, and two norms of H."""
    return _attention(made, made.hidden_size) + 2 * made.head_dim + 3 * made.hidden_size * width + 2 * made.hidden_size
