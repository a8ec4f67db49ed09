"""Tests of the features of the service."""
