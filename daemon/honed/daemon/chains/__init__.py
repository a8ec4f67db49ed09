"""Chains of models, which apps use as one model (docs/serving.md, "Chains")."""
