"""Times of the kernels of an eviction round. Needs torch and triton, nothing else."""
