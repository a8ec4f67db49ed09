"""A step of a chain of models, as it is given, kept and shown."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStep:
    """A run of `model`, called `name` within its chain, "": as the model.

    `inputs` are all of the model's, each with where it comes from: "STEP:OUTPUT", or the name of an input of
    the chain.
    """

    model: str
    name: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
