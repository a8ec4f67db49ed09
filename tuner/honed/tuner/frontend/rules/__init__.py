"""Rewriting rules, one file for each family of operators: every ONNX operator that is compiled has one here,
or a function body in ONNX itself.

A rule gets a call with resolved inputs and emits nodes of the core set (`core.CORE`) at TARGET_OPSET,
which are the only ones the Relax importer knows.
"""

from __future__ import annotations

from . import arithmetic as arithmetic
from . import convolution as convolution
from . import indexing as indexing
from . import layout as layout
from . import linear as linear
from . import normalisation as normalisation
from . import pooling as pooling
from . import reduction as reduction
from . import sequences as sequences
from . import resize as resize
