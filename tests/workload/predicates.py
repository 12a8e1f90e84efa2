"""The fourteen definitions of the mask pages, written again for one cell (i, j) at a time.

Nothing here is shared with workload/: plain loops over plain integers. i is a row's *position*
(row + kv_len - q_len); a row at a negative position sees nothing, except under `full`.
"""


def owner(lengths, x):
    """(index, start, length) of the document that holds token x."""
    start = 0
    for index, length in enumerate(lengths):
        if start <= x < start + length:
            return index, start, length
        start += length
    raise IndexError(x)


def full(i, j):
    return True


def causal(i, j):
    return j <= i


def full_document(i, j, lengths):
    return owner(lengths, i)[0] == owner(lengths, j)[0]


def causal_document(i, j, lengths):
    return owner(lengths, i)[0] == owner(lengths, j)[0] and j <= i


def full_sliding_window(i, j, window):
    return abs(i - j) <= window


def causal_sliding_window(i, j, window):
    return 0 <= i - j <= window


def shared_question(i, j, groups):
    segments = [(g, part) for g, group in enumerate(groups) for part in range(len(group))]
    lengths = [n for group in groups for n in group]
    own, other = segments[owner(lengths, i)[0]], segments[owner(lengths, j)[0]]
    return j <= i and (own == other or other == (own[0], 0))


def global_sliding_window(i, j, global_tokens, window):
    return i < global_tokens or j < global_tokens or abs(i - j) <= window


def causal_blockwise(i, j, blocks):
    """The last block is the last that holds a token."""
    last = max(n for n, length in enumerate(blocks) if length)
    return j <= i and (owner(blocks, i)[0] == owner(blocks, j)[0] or owner(blocks, i)[0] == last)


def prefix_lm_causal(i, j, prefix):
    return j <= i or j < prefix


def prefix_lm_document(i, j, lengths, prefixes):
    (index, start, _), (other, _, _) = owner(lengths, i), owner(lengths, j)
    return index == other and (j <= i or j - start < prefixes[index])


def block_causal_document(i, j, lengths, block):
    (index, start, _), (other, _, _) = owner(lengths, i), owner(lengths, j)
    return index == other and (j - start) // block <= (i - start) // block


def picture(name, q_len, kv_len, parameters):
    """The element mask of a static pattern, as lists of bools, cell by cell."""
    rule = globals()[name]
    shift = kv_len - q_len
    return [
        [(i + shift >= 0 or name == "full") and rule(i + shift, j, **parameters) for j in range(kv_len)]
        for i in range(q_len)
    ]
