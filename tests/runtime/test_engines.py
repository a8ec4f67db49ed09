"""What ONNX Runtime says, for users: without its source code, and in whole sentences."""

from __future__ import annotations

import pytest

from honed.runtime.engines import message_of

_SOURCE = "/onnxruntime_src/onnxruntime/core"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Mul node. Name:'' "
            f"Status Message: {_SOURCE}/providers/cpu/math/element_wise_ops.h:563 void onnxruntime::"
            "BroadcastIterator::Init(ptrdiff_t, ptrdiff_t) axis == 1 || axis == largest was false. "
            "Attempting to broadcast an axis by a dimension other than 1. 3 by 5\n",
            "Non-zero status code returned while running Mul node. Attempting to broadcast an axis by a "
            "dimension other than 1. 3 by 5",
        ),
        (
            f"[ONNXRuntimeError] : 1 : FAIL : {_SOURCE}/graph/model.cc:256 onnxruntime::Model::Model("
            "onnx::ModelProto&&, const onnxruntime::PathString&) Unsupported model IR version: 99",
            "Unsupported model IR version: 99",
        ),
        (
            f"{_SOURCE}/x.h:12 onnxruntime::common::Status onnxruntime::A::B(int (*)(char)) const "
            "[with T = float; int N = 3] It must be 2.",
            "It must be 2.",
        ),
        ("Status Message: matmul_helper.h:59 Compute MatMul dimension mismatch", "MatMul dimension mismatch"),
        (f"{_SOURCE}/x.cc:30 operator() it failed", "it failed"),
        ("Load model from /tmp/a.onnx failed:This is an invalid model.", "This is an invalid model."),
        ("It is short. " + "It is long " * 40 + ".", "It is short"),
        ("", "RuntimeError"),
    ],
)
def test_a_message_in_words_alone(text: str, shown: str) -> None:
    assert message_of(RuntimeError(text)) == shown


def test_a_sentence_without_end_ends_with_a_word() -> None:
    assert message_of(RuntimeError("word " * 100)).endswith("word ...")
