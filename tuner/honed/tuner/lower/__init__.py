"""Lowering: a Relax module to a compiled model.

`module` is the way in. `program`, `plan` and `barriers` are free of TVM and imported without it.
"""
