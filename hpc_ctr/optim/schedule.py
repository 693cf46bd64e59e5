"""When workers merge: a function of the global step alone, so that nothing about it has to be saved or agreed on."""


def window(step: int, k: int, k_start: int = 0, grow_steps: int = 0, warmup: int = 0) -> int:
    """k as it is at global ``step`` (counted from 1).

    The first ``warmup`` steps have k = 1. After them k is constant; or, with ``grow_steps``, begins with ``k_start`` and
    doubles every ``grow_steps`` steps until it has grown to ``k``.
    """
    if step <= warmup:
        return 1
    if not grow_steps:
        return k
    doublings = min((step - warmup - 1) // grow_steps, k.bit_length())
    return min(k, k_start << doublings)


def merge_is_due(step: int, k: int, k_start: int = 0, grow_steps: int = 0, warmup: int = 0) -> bool:
    """Whether a merge follows global ``step``: when it is a multiple of what k is then."""
    return step % window(step, k, k_start, grow_steps, warmup) == 0
