"""Small helpers of all benchmarks."""
