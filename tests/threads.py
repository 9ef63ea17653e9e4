"""How many threads a test may compute with: one where another pytest process runs beside it.

Two processes with two OpenMP threads each on two cores wait for one another at every barrier.
"""

import os

IS_PARALLEL = "PYTEST_XDIST_WORKER" in os.environ
NUM_THREADS = 1 if IS_PARALLEL else 2
