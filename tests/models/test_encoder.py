"""The action-aware encoder: Eq. 1, its ablation variants, and parity with the release."""

from __future__ import annotations

import json

import pytest
import torch

from animegamer.checkpoint import load_model
from animegamer.models.encoder import ActionAwareEncoder

SIZES = {"text_tokens": 3, "visual_tokens": 6, "text_width": 8, "image_width": 10, "width": 16}
VARIANTS = {"concat": 9, "linear": 9, "addition": 6, "cross_attention": 6}


def make(variant="concat", **sizes):
    torch.manual_seed(0)
    return ActionAwareEncoder(variant, **{**SIZES, **sizes})


def features(batch=2):
    return torch.randn(batch, 6, 10), torch.randn(batch, 3, 8)


@pytest.mark.parametrize(("variant", "tokens"), VARIANTS.items())
def test_shapes(variant, tokens):
    encoder = make(variant)
    s_a = encoder(*features())
    assert s_a.shape == (2, tokens, 16) and encoder.num_tokens == tokens
    assert encoder.null().shape == (tokens, 16)


def test_defaults_are_the_release():
    with torch.device("meta"):
        encoder = ActionAwareEncoder()
    assert encoder.num_tokens == 226
    assert sum(p.numel() for p in encoder.parameters()) == 16_727_040


def test_text_comes_first_and_every_token_is_normalised():
    encoder = make()
    f_v, f_md = features()
    s_a = encoder(f_v, f_md)
    torch.testing.assert_close(s_a.mean(-1), torch.zeros(2, 9), atol=1e-5, rtol=0)
    torch.testing.assert_close(s_a.var(-1, correction=0), torch.ones(2, 9), atol=1e-3, rtol=0)
    other = encoder(f_v, torch.randn_like(f_md))
    assert torch.equal(s_a[:, 3:], other[:, 3:]) and not torch.equal(s_a[:, :3], other[:, :3])


def test_equation_1():
    """s_a = Concat(LN(MLP(f_md)), LN(MLP(f_v))) by hand, with norms that are not the identity."""
    encoder = make()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weights = {k: v.detach() for k, v in encoder.state_dict().items()}

    def branch(name, x):
        def linear(i, x):
            return x @ weights[f"{name}.proj.{i}.weight"].T + weights[f"{name}.proj.{i}.bias"]

        h = linear(0, x)
        h = linear(2, 0.5 * h * (1 + torch.erf(h / 2**0.5)))
        h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return h * weights[f"{name}.norm.weight"] + weights[f"{name}.norm.bias"]

    f_v, f_md = features()
    expected = torch.cat([branch("text", f_md), branch("visual", f_v)], 1)
    torch.testing.assert_close(encoder(f_v, f_md), expected, atol=1e-5, rtol=1e-5)


def test_the_linear_variant_has_fewer_parameters():
    assert not any("proj.2" in name for name in make("linear").state_dict())


@pytest.mark.parametrize("variant", ["addition", "cross_attention"])
def test_joined_variants_depend_on_both(variant):
    encoder = make(variant)
    f_v, f_md = features()
    s_a = encoder(f_v, f_md)
    for other in (encoder(f_v + 1, f_md), encoder(f_v, torch.randn_like(f_md))):
        assert (other - s_a).abs().amax((0, 2)).min() > 1e-3  # every token


def test_unknown_variant():
    with pytest.raises(ValueError, match="unknown encoder variant 'sum'"):
        make("sum")


@pytest.mark.parametrize(
    ("f_v", "f_md", "message"),
    [
        ((2, 5, 10), (2, 3, 8), r"f_v is \(2, 5, 10\), expected \(B, 6, 10\).*other backbones"),
        ((2, 6, 12), (2, 3, 8), r"f_v is \(2, 6, 12\), expected \(B, 6, 10\)"),
        ((2, 6, 10), (2, 4, 8), r"f_md is \(2, 4, 8\), expected \(B, 3, 8\)"),
        ((2, 6, 10), (3, 8), r"f_md is \(3, 8\)"),
    ],
)
def test_features_of_another_shape_are_refused(f_v, f_md, message):
    with pytest.raises(ValueError, match=message):
        make()(torch.zeros(f_v), torch.zeros(f_md))


def test_null_is_the_output_for_zeros_and_not_zero():
    encoder = make()
    null = encoder.null()
    assert torch.equal(null, encoder(torch.zeros(1, 6, 10), torch.zeros(1, 3, 8))[0])
    assert null.abs().mean() > 0.3 and not null.requires_grad


# ---- positions of visual tokens


def test_positions_are_rows_then_columns():
    table = make(visual_grid=(2, 3)).positions.view(2, 3, 16)
    for half, same in ((table[..., :8], table[0, :, :8]), (table[..., 8:], table[:, :1, 8:])):
        torch.testing.assert_close(half, same.expand_as(half))
    assert len({tuple(row.tolist()) for row in table.flatten(0, 1)}) == 6


def test_positions_are_added_to_visual_tokens_alone():
    plain, placed = make(), make(visual_grid=(2, 3))
    placed.load_state_dict(plain.state_dict())
    assert "positions" not in placed.state_dict()
    f_v, f_md = features()
    difference = placed(f_v, f_md) - plain(f_v, f_md)
    assert difference[:, :3].abs().max() == 0
    torch.testing.assert_close(difference[0, 3:], placed.positions, atol=1e-5, rtol=0)


def test_a_grid_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="grid 2 x 4 holds 8 tokens, visual_tokens is 6"):
        make(visual_grid=(2, 4))


# ---- files


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("grid", [None, (2, 3)])
def test_saves_and_loads_exactly(tmp_path, variant, grid):
    encoder = make(variant, visual_grid=grid).eval()
    encoder.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["variant"] == variant
    again = load_model(ActionAwareEncoder, tmp_path)
    inputs = features()
    assert torch.equal(again(*inputs), encoder(*inputs))
    assert torch.equal(again.null(), encoder.null())
