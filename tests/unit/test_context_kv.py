"""Context K/V of all layers at once against each layer computed alone."""

import torch
import torch.nn.functional as F

from sglang_dflash.drafter.context_kv import context_kv, rms_norm_heads, rotate

LAYERS, HIDDEN, KV_HEADS, DIM, TOKENS, EPS = 3, 24, 2, 8, 7, 1e-6


def cos_sin(positions: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """[n, rotary_dim], cosines then sines, as SGLang caches them."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = positions[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotated_by_pairs(x: torch.Tensor, position: int, rotary_dim: int) -> torch.Tensor:
    """One head at one position, pair (i, i + half) turned by its angle as a complex number."""
    half = rotary_dim // 2
    angles = position * 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    turned = torch.complex(x[:half], x[half:rotary_dim]) * torch.polar(torch.ones(half), angles)
    return torch.cat([turned.real, turned.imag, x[rotary_dim:]])


def test_rotate() -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(5, 2, DIM), torch.tensor([0, 1, 5, 100, 2047])
    for rotary_dim in (DIM, DIM // 2):
        result = rotate(x, cos_sin(positions, rotary_dim))
        for i, position in enumerate(positions.tolist()):
            for head in range(2):
                expected = rotated_by_pairs(x[i, head], position, rotary_dim)
                torch.testing.assert_close(result[i, head], expected, atol=1e-5, rtol=1e-4)


def test_norm_is_each_layers_own() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(LAYERS, TOKENS, KV_HEADS, DIM), torch.randn(LAYERS, DIM)
    result = rms_norm_heads(x, weight, EPS)
    for layer in range(LAYERS):
        expected = F.rms_norm(x[layer], (DIM,), weight[layer], EPS)
        torch.testing.assert_close(result[layer], expected)


def test_context_kv() -> None:
    torch.manual_seed(0)
    features, positions = torch.randn(TOKENS, HIDDEN), torch.randint(0, 500, (TOKENS,))
    k_weights = torch.randn(LAYERS, KV_HEADS * DIM, HIDDEN)
    v_weights = torch.randn(LAYERS, KV_HEADS * DIM, HIDDEN)
    norms = torch.randn(LAYERS, DIM)
    stacked = torch.cat([torch.cat([k_weights[i], v_weights[i]]) for i in range(LAYERS)])
    kv = features @ stacked.T
    keys, values = context_kv(kv, norms, EPS, cos_sin(positions, DIM), KV_HEADS, LAYERS)
    assert keys.shape == values.shape == (LAYERS, TOKENS, KV_HEADS, DIM)
    assert keys.is_contiguous() and values.is_contiguous()
    for layer in range(LAYERS):
        k = (features @ k_weights[layer].T).view(TOKENS, KV_HEADS, DIM)
        k = F.rms_norm(k, (DIM,), norms[layer], EPS)
        v = (features @ v_weights[layer].T).view(TOKENS, KV_HEADS, DIM)
        torch.testing.assert_close(values[layer], v)
        for i, position in enumerate(positions.tolist()):
            for head in range(KV_HEADS):
                expected = rotated_by_pairs(k[i, head], position, DIM)
                torch.testing.assert_close(keys[layer, i, head], expected, atol=1e-4, rtol=1e-3)
