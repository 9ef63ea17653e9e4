"""The awkward shapes that every attention is held to."""

from tests.kernels.cases import Case


def _edges() -> list[Case]:
    """One row; lengths at a block's edges; queries from one token to the whole row."""
    cases = []
    for block_size in (4, 16, 128):
        for seq_len in (1, block_size - 1, block_size, block_size + 1, 2 * block_size + 1):
            for query_len in sorted({1, min(3, seq_len), min(seq_len, 37)}):
                cases.append(Case(rows=((query_len, seq_len),), block_size=block_size, num_heads=2))
    return cases


def _heads() -> list[Case]:
    cases = []
    for ratio, num_kv_heads in ((1, 3), (3, 3), (4, 1), (8, 2), (7, 1), (24, 1)):
        for head_dim in (64, 80, 128):
            cases.append(
                Case(
                    rows=((1, 23), (5, 19), (1, 1)),
                    num_heads=ratio * num_kv_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                )
            )
    cases += [Case(rows=((1, 9), (3, 17)), head_dim=head_dim) for head_dim in (8, 96, 192, 256)]
    return cases


def _windows() -> list[Case]:
    cases = []
    for block_size in (8, 16):
        for window in (1, block_size - 1, block_size, block_size + 1, 2 * block_size, 100):
            for rows in (((1, 41), (1, 3)), ((11, 41), (40, 40))):
                cases.append(Case(rows=rows, block_size=block_size, window=window, num_heads=2))
    return cases


def _splits() -> list[Case]:
    """Around the interpreter's split of 64 keys and turns of 32, with and without a window."""
    cases = [Case(rows=((1, n), (1, 5)), block_size=32) for n in (31, 33, 63, 64, 65, 127, 129)]
    cases += [Case(rows=((1, 150), (2, 90)), window=w) for w in (31, 33, 63, 64, 65, 66, 128)]
    cases += [Case(rows=((1, 1100),), block_size=64, num_heads=2)]  # more than one turn to join
    return cases


def _mixed() -> list[Case]:
    rows = ((1, 17), (7, 7), (1, 1), (13, 29), (1, 64), (2, 33), (1, 47))
    cases = []
    for window in (0, 9):
        for softcap in (0.0, 5.0):
            for sinks in (False, True):
                case = Case(rows=rows, num_heads=6, window=window, softcap=softcap, sinks=sinks)
                cases.append(case)
    cases += [
        Case(rows=((5, 5), (1, 0), (0, 0), (1, 8), (1, 0)), extra_tokens=4),
        Case(rows=((1, 0),)),
        Case(rows=()),
        Case(rows=(), extra_tokens=3),
        Case(rows=((1, 0), (1, 31)), sinks=True),
        Case(rows=tuple((1, n) for n in (1, 2, 3, 5, 7, 11, 13, 61)), block_size=4),
        Case(rows=tuple((n, n) for n in (2, 3, 5, 7, 11, 13)), block_size=4),
        Case(rows=((1, 120), *((1, n) for n in range(1, 7))), block_size=8),
        Case(rows=((31, 97), (1, 97)), block_size=32, sinks=True, softcap=30.0),
    ]
    return cases


def _large() -> list[Case]:
    """Window, cap and sinks together at large head dims, in small, middle and large blocks.

    Windows begin within a block; of two cases the first has a decode past its window beside a
    prompt, the second a chunk over a prefix longer than the window.
    """
    cases = []
    for head_dim in (96, 128, 192, 256):
        for block_size in (4, 64, 128):
            for rows, window in ((((1, 71), (6, 6)), 67), (((5, 33), (1, 1)), 18)):
                cases.append(
                    Case(
                        rows=rows,
                        num_kv_heads=1,
                        num_heads=3,
                        head_dim=head_dim,
                        block_size=block_size,
                        window=window,
                        softcap=5.0,
                        sinks=True,
                    )
                )
    return cases


CASES = [*_edges(), *_heads(), *_windows(), *_splits(), *_mixed(), *_large()]
assert len(CASES) >= 100

# One of each kind, for the interpreter's quick run.
QUICK = [
    Case(rows=((1, 17),), num_heads=2),
    Case(rows=((3, 5),), block_size=4, num_heads=2),
    Case(rows=((1, 23), (5, 19)), num_heads=3, num_kv_heads=1, head_dim=80),
    Case(rows=((1, 1), (9, 17)), num_heads=8, num_kv_heads=1, head_dim=128, block_size=8),
    Case(rows=((1, 41),), window=15, num_heads=2),
    Case(rows=((11, 41),), window=17, num_heads=2, softcap=5.0),
    Case(rows=((1, 150),), window=65, num_kv_heads=1, num_heads=2, block_size=32),
    Case(rows=((1, 129), (1, 0)), num_kv_heads=1, num_heads=2, sinks=True),
    Case(rows=((1, 17), (7, 7), (0, 0), (1, 64)), num_kv_heads=1, sinks=True, extra_tokens=2),
    Case(rows=()),
]
