"""Notebook 02: solutions and known wrong answers."""

from __future__ import annotations

from minikv.lessons.engine import Mistake


def _row(shape):
    if "kv_lora_rank" in shape:
        return shape["kv_lora_rank"] + shape["rope_dim"]
    return 2 * shape["kv_heads"] * shape["head_dim"]


def kv_bytes(shape, tokens):
    return shape["layers"] * _row(shape) * shape["bytes"] * tokens


def _forgets_v(shape, tokens):
    row = _row(shape) if "kv_lora_rank" in shape else _row(shape) // 2
    return shape["layers"] * row * shape["bytes"] * tokens


def _two_latents(shape, tokens):
    row = 2 * _row(shape) if "kv_lora_rank" in shape else _row(shape)
    return shape["layers"] * row * shape["bytes"] * tokens


def _always_two_bytes(shape, tokens):
    return shape["layers"] * _row(shape) * 2 * tokens


def _one_layer(shape, tokens):
    return _row(shape) * shape["bytes"] * tokens


def _no_rope(shape, tokens):
    row = shape["kv_lora_rank"] if "kv_lora_rank" in shape else _row(shape)
    return shape["layers"] * row * shape["bytes"] * tokens


def largest_batch(memory, weights, token_bytes, tokens, page_size):
    return max(0, (memory - weights) // (token_bytes * page_size) - 1) // -(-tokens // page_size)


def _uses_page_0(memory, weights, token_bytes, tokens, page_size):
    return max(0, (memory - weights) // (token_bytes * page_size)) // -(-tokens // page_size)


def _counts_tokens(memory, weights, token_bytes, tokens, page_size):
    return max(0, (memory - weights) // token_bytes - page_size) // tokens


def _forgets_weights(memory, weights, token_bytes, tokens, page_size):
    return max(0, memory // (token_bytes * page_size) - 1) // -(-tokens // page_size)


def _goes_below_zero(memory, weights, token_bytes, tokens, page_size):
    return ((memory - weights) // (token_bytes * page_size) - 1) // -(-tokens // page_size)


SOLUTIONS = {"02-kv-bytes": kv_bytes, "02-largest-batch": largest_batch}
MISTAKES = {
    "02-kv-bytes": [
        Mistake("K and V are two vectors per head", _forgets_v),
        Mistake("MLA stores one latent row, from which both K and V are read", _two_latents),
        Mistake("the bytes per number are given; they are not always 2", _always_two_bytes),
        Mistake("every layer has a cache of its own", _one_layer),
        Mistake("the rotary part of an MLA row is stored too", _no_rope),
    ],
    "02-largest-batch": [
        Mistake("page 0 is reserved for padding and holds no request", _uses_page_0),
        Mistake("requests take whole pages, so room must be counted in pages", _counts_tokens),
        Mistake("the weights take their share of memory first", _forgets_weights),
        Mistake("without room for the weights the answer is 0, not less", _goes_below_zero),
    ],
}
