"""Where ops that run in chunks cut rows and columns."""

# Kernels of a few rows sum in another order, so that the bits would differ from eager's.
LEAST_ROWS = 32


def largest_block(n: int, chunks: int) -> int:
    """No block of `n` rows, or fewer, has more rows; it never falls where `n` grows."""
    return min(n, max(-(-n // chunks), LEAST_ROWS))


def blocks(n: int, chunks: int, multiple: int = 1) -> list[tuple[int, int]]:
    """At most `chunks` ranges of 0..n - 1: of a multiple of `multiple` each, but for the last; or
    of nearly equal lengths, as the last one would else be short at some `n`."""
    if multiple > 1:
        step = max(-(-n // (chunks * multiple)) * multiple, 1)
        return [(a, min(a + step, n)) for a in range(0, n, step)]
    count = -(-n // max(largest_block(n, chunks), 1))
    return [(i * n // count, (i + 1) * n // count) for i in range(count)]
