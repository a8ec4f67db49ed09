"""Verifies compiled forms: fresh inputs, an independent reference, a stated tolerance.

`inputs` makes inputs that keep to what a model allows, `evaluator` runs the original ONNX model without TVM
or the frontend, `tolerance` says how far an answer may be off, `locate` finds the first node that differs.
"""
