"""Indices as sums: a constant and multiples of what cannot be taken apart further."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from .terms import Term


@dataclass(frozen=True, slots=True)
class LinearForm:
    """`constant` + the sum of factor * term; terms are told apart by their text."""

    terms: dict[str, tuple[Term, int]]
    constant: int = 0

    @staticmethod
    def of(term: Term) -> LinearForm:
        """A single term."""
        return LinearForm({term.text: (term, 1)})

    def plus(self, other: LinearForm, factor: int = 1) -> LinearForm:
        """The sum of both, `other` multiplied."""
        terms = dict(self.terms)
        for text, (term, times) in other.terms.items():
            total = terms[text][1] + factor * times if text in terms else factor * times
            if total:
                terms[text] = (term, total)
            else:
                del terms[text]
        return LinearForm(terms, self.constant + factor * other.constant)

    def times(self, factor: int) -> LinearForm:
        """A multiple."""
        if factor == 0:
            return LinearForm({})
        return LinearForm(
            {t: (term, n * factor) for t, (term, n) in self.terms.items()}, self.constant * factor
        )

    def multiple(self) -> int:
        """The greatest number that provably divides the value; 0 divides only 0."""
        return gcd(self.constant, *(factor for _, factor in self.terms.values()))

    def products(self) -> Iterator[tuple[int, int]]:
        """The least and the greatest value of each factor * term."""
        for term, factor in self.terms.values():
            low, high = term.bounds
            yield (factor * low, factor * high) if factor > 0 else (factor * high, factor * low)

    def bounds(self) -> tuple[int, int]:
        """The least and the greatest value of the sum."""
        products = list(self.products())
        return self.constant + sum(p[0] for p in products), self.constant + sum(p[1] for p in products)
