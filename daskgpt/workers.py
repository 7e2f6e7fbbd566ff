"""What a worker process does once before its first task."""

from __future__ import annotations

from typing import Any

import numpy as np
from distributed import WorkerPlugin
from threadpoolctl import threadpool_limits

from daskgpt.allocator import keep_memory
from daskgpt.kernels._jit import compile_all


class PrepareWorker(WorkerPlugin):
    """One BLAS thread a task (only a nanny sets that by itself), and kernels compiled before tasks wait for them."""

    name = "daskgpt"

    def setup(self, worker: Any) -> None:
        self.limits = threadpool_limits(limits=1, user_api="blas")
        compile_all(np.float32)
        keep_memory()

    def teardown(self, worker: Any) -> None:
        self.limits.restore_original_limits()
