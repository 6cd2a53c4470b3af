"""The memory of the GPUs that this process can see, read through NVIDIA's management library when the page is."""

import logging
import math
from functools import partial
from typing import Any

from encserve_server.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)


def watch_gpus(metrics: Metrics) -> None:
    """Puts every GPU on the metrics page; nothing where there is none, or no nvidia-ml-py (the extra `gpu` brings it).

    GPUs are numbered as nvidia-smi does, which knows nothing of CUDA_VISIBLE_DEVICES; in a container they are those
    that it was given. May take a second: the driver wakes the GPUs.
    """
    try:
        import pynvml as nvml
    except ModuleNotFoundError:
        return
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        totals = [nvml.nvmlDeviceGetMemoryInfo(handle).total for handle in handles]
    except nvml.NVMLError as error:  # no driver, most of all
        logger.info("no GPU memory on the metrics page", extra={"reason": str(error)})
        return
    for i, (handle, total) in enumerate(zip(handles, totals, strict=True)):
        metrics.gpu_memory_total_bytes.labels(str(i)).set(total)
        metrics.gpu_memory_used_bytes.labels(str(i)).set_function(partial(_used_bytes, nvml, handle))


def _used_bytes(nvml: Any, handle: Any) -> float:
    """The bytes in use on one GPU; NaN while the driver does not say: a lost GPU must not take the page along."""
    try:
        return float(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    except nvml.NVMLError:
        return math.nan
