"""The table of operators says what the code does."""

from __future__ import annotations

import inspect

import onnx
import pytest

from honed.onnxfile.contrib_schemas import RUNTIMES_OWN
from honed.tuner.frontend.builder import TARGET_OPSET, schema
from honed.tuner.frontend.importing import CORE
from honed.tuner.frontend.rules import RULES
from honed.tuner.frontend.walk import PART_OP
from tests.tuner.backend import table

pytestmark = pytest.mark.tvm


def test_the_table_is_up_to_date() -> None:
    assert table.TARGET.read_text() == table.text(), "run python -m tests.tuner.backend.table"


def test_every_rule_is_for_an_operator_that_exists_and_is_described() -> None:
    for (domain, op), rule in RULES.items():
        assert inspect.getdoc(rule), op
        if not domain and op not in RUNTIMES_OWN:
            assert any(s.name == op for s in onnx.defs.get_all_schemas_with_history()), op


def test_the_core_set_is_onnx() -> None:
    for op in CORE.keys() - {PART_OP, *RUNTIMES_OWN}:
        assert schema(op, TARGET_OPSET) is not None, op
