"""Row-complete Latin squares: every ordered pair of symbols stands side by side in exactly one row."""

from __future__ import annotations

from functools import lru_cache

Square = tuple[tuple[int, ...], ...]


def zigzag(m: int) -> tuple[int, ...]:
    """0, 1, -1, 2, -2, … modulo m, all m residues. For even m its steps are all the differences 1..m-1, each once."""
    return tuple((i + 1) // 2 % m if i % 2 else -(i // 2) % m for i in range(m))


@lru_cache(maxsize=64)
def row_complete_latin_square(m: int) -> Square:
    """A Latin square of order m (even, or 1) in which every ordered pair of symbols is adjacent in exactly one row.

    Row k is the zigzag shifted by k: since its steps are all different, so are the m shifts of each (Williams 1949).
    TASP section 3.1.3 reads the rows as Hamiltonian paths of K*_m. Every column holds each symbol once, the first and
    the last too: every vertex starts exactly one path and ends exactly one.

    Odd orders: of 3 and 5 there is none (it would cut K*_4 or K*_6 into Hamiltonian cycles); of other primes none is
    known; of composite order they exist (Higham 1998) but not from cyclic groups, and are not built here, since
    `hamiltonian.hamiltonian_paths` has what rings need of them for every odd order from 7 on.

    Raises:
        ValueError: m is odd and above 1, or below 1.
    """
    if m < 1 or (m % 2 and m > 1):
        nearest = f"{m - 1} or {m + 1}" if m > 2 else "1 or 2"
        raise ValueError(
            f"m={m}: expected an even order (or 1) of a row-complete Latin square. Nearest: {nearest}; "
            f"hamiltonian_paths gives paths for odd m too."
        )
    return tuple(tuple((k + step) % m for step in zigzag(m)) for k in range(m))
