"""Turns a PyTorch encoder checkpoint into a verified model bundle.

The command line is `encserve-export`; from Python, `export_hf`, `export_checkpoint`, `export_onnx`, `export_init`
and `export_encoder` do the same.
"""

from encserve_export.config import EncoderConfig
from encserve_export.encoder import Encoder
from encserve_export.errors import ExportError
from encserve_export.export import Exported, Target, export_checkpoint, export_encoder, export_init
from encserve_export.hf_export import export_hf
from encserve_export.manifest import Source
from encserve_export.onnx_export import OnnxOptions, export_onnx

__all__ = [
    "Encoder",
    "EncoderConfig",
    "ExportError",
    "Exported",
    "OnnxOptions",
    "Source",
    "Target",
    "export_checkpoint",
    "export_encoder",
    "export_hf",
    "export_init",
    "export_onnx",
]
