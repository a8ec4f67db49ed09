"""Generates tokens with a language model: `python3 generate.py MODEL TOKEN ...`.

Tokens are numbers of the model's tokenizer (package `tokenizers`); the program prints those that it adds. The
service keeps the model's keys and values.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from honed.runtime import Client


def draw(logits: NDArray[np.float32], temperature: float) -> int:
    """Return a token by the softmax of the logits over a temperature."""
    weights = np.exp((logits - logits.max()) / temperature)
    return int(np.random.choice(weights.size, p=weights / weights.sum()))


def generate(
    model: str, tokens: NDArray[np.int64], end: int, length: int, temperature: float
) -> NDArray[np.int64]:
    """Return `tokens`, of shape [1, n], with those that follow: up to `end`, or to `length` tokens in all."""
    with Client() as client, client.sequence(model) as sequence:
        new = tokens
        while new[0, -1] != end and (left := length - tokens.shape[1]) > 0:
            if temperature == 0:  # The service takes the likeliest tokens, several at a time
                new = sequence.generate({"input_ids": new}, min(16, left), stop=[end])
            else:
                logits = sequence.infer({"input_ids": new}, last_token=True)["logits"]
                new = np.array([[draw(logits[0, 0].astype(np.float32), temperature)]])
            tokens = np.concatenate([tokens, new], axis=1)
            new = new[:, -1:]
    return tokens


def main() -> None:
    """Print the tokens that follow those of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("tokens", nargs="+", type=int)
    parser.add_argument("--end", type=int, default=2, help="the tokenizer's end of text")
    parser.add_argument("--length", type=int, default=200, help="tokens in all")
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    prompt = np.array([arguments.tokens])
    tokens = generate(arguments.model, prompt, arguments.end, arguments.length, arguments.temperature)
    print(*tokens[0, prompt.shape[1] :])


if __name__ == "__main__":
    main()
