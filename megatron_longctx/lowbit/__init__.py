"""Flash Communication: sums over ranks in low-bit integers, and the policies that say which sums."""
