"""The outputs of a sequence. Each kind of output has a class, which checks requests and computes sizes and arrays."""

from encserve_server.outputs.kind import Kind
from encserve_server.outputs.loading import OpenHead
from encserve_server.outputs.model import ModelOutputs
from encserve_server.outputs.plan import OutputPlan
from encserve_server.outputs.rows import HasOutputs
from encserve_server.outputs.sparse import static_weights
from encserve_server.outputs.spec import (
    FLOAT_TYPES,
    MAX_OUTPUTS,
    MAX_POOLED_VECTORS,
    SPAN_POOLINGS,
    OutputSpec,
    check_output_count,
)

__all__ = [
    "FLOAT_TYPES",
    "MAX_OUTPUTS",
    "MAX_POOLED_VECTORS",
    "SPAN_POOLINGS",
    "HasOutputs",
    "Kind",
    "ModelOutputs",
    "OpenHead",
    "OutputPlan",
    "OutputSpec",
    "check_output_count",
    "static_weights",
]
