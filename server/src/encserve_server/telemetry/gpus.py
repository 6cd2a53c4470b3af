"""The memory of the GPUs. NVIDIA's management library reads the values whenever the metrics page is read."""

import logging
import math
from functools import partial
from typing import Any

from encserve_server.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)


def watch_gpus(metrics: Metrics) -> None:
    """Add every GPU to the metrics page. Without a GPU or nvidia-ml-py (of the extra `gpu`), do nothing.

    The label `gpu` is nvidia-smi's index of the GPU, which ignores CUDA_VISIBLE_DEVICES. In a container, only the
    container's GPUs are visible. The call may take a second, because the driver wakes the GPUs.
    """
    try:
        import pynvml as nvml
    except ModuleNotFoundError:
        return
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        totals = [nvml.nvmlDeviceGetMemoryInfo(handle).total for handle in handles]
    except nvml.NVMLError as error:  # usually, no driver is installed
        logger.info("no GPU memory on the metrics page", extra={"reason": str(error)})
        return
    for i, (handle, total) in enumerate(zip(handles, totals, strict=True)):
        metrics.gpu_memory_total_bytes.labels(str(i)).set(total)
        metrics.gpu_memory_used_bytes.labels(str(i)).set_function(partial(_used_bytes, nvml, handle))


def _used_bytes(nvml: Any, handle: Any) -> float:
    """Return the bytes in use on a GPU, or NaN if the driver fails. A lost GPU must not break the page."""
    try:
        return float(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    except nvml.NVMLError:
        return math.nan
