"""Relax operators to fused PrimFuncs."""

from __future__ import annotations

import tvm
from tvm import relax, topi
from tvm.ir import IRModule
from tvm.target import Target

# Data-dependent loops that are poor on a GPU and that TVM leaves to its own C runtime: run on the host.
HOST_OPERATORS = ("relax.sort", "relax.argsort", "relax.topk", "relax.cumsum", "relax.cumprod")


def legalize(module: IRModule, target: Target) -> IRModule:
    """`main` as calls of fused PrimFuncs, and of HOST_OPERATORS.

    Constants are not folded here: TVM's FoldConstant compiles every operator it folds, the frontend has
    folded them before.
    """
    with target:
        return tvm.transform.Sequential(
            [
                relax.transform.DecomposeOpsForInference(),
                relax.transform.CanonicalizeBindings(),
                relax.transform.EliminateCommonSubexpr(),
                relax.transform.LegalizeOps({"relax.erf": _erf}, skip_ops=list(HOST_OPERATORS)),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
                relax.transform.DeadCodeElimination(),
            ]
        )(module)


def _erf(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Erf as a rational function of basic operations, but for doubles.

    Drivers' own erf is slow and TVM does not vectorise calls of it. Absolute error at most 4.5e-7, measured
    over [-6, 6] (the coefficients are Eigen's, in topi.fast_erf).
    """
    argument = call.args[0]
    return builder.call_te(topi.erf if str(argument.ty.dtype) == "float64" else topi.fast_erf, argument)
