"""The decoder on disk: whole, or as LoRA on its base."""

from __future__ import annotations

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from safetensors.torch import load_file, save_file

from animegamer.checkpoint import CheckpointError
from animegamer.config import LoraConfig
from animegamer.models.decoder import AnimationDecoder
from animegamer.models.decoder_files import add_lora, load_decoder, save_decoder
from animegamer.training import select_trainable

TRAINABLE = ("decoder.lora", "decoder.norm1", "decoder.norm2", "decoder.ofs_embedding")


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    stock = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=8,
        num_layers=2,
        sample_width=4,
        sample_height=4,
        sample_frames=17,
        max_text_seq_length=3,
    )
    stock.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def trained(base):
    """A decoder with LoRA in which everything trainable has moved."""
    decoder = AnimationDecoder.from_base(base, 3, True, 8)
    add_lora(decoder, LoraConfig(4, 1.0), base)
    holder = torch.nn.Module()
    holder.decoder = decoder
    select_trainable(holder, TRAINABLE)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return decoder


def predict(decoder):
    torch.manual_seed(2)
    inputs = torch.randn(2, 5, 4, 4, 4), torch.tensor([3, 700]), torch.randn(2, 3, 32)
    with torch.no_grad():
        return decoder.eval().predict(*inputs, torch.tensor([0.5, 15.0]))


def test_lora_saves_what_was_trained_and_loads_on_its_base(base, tmp_path):
    decoder = trained(base)
    save_decoder(decoder, tmp_path / "saved")
    again = load_decoder(tmp_path / "saved")
    torch.testing.assert_close(predict(again), predict(decoder), rtol=0, atol=0)
    adapter = load_file(tmp_path / "saved/adapter/adapter_model.safetensors")
    assert len(adapter) == 2 * 4 * 2 and all(".lora_" in name for name in adapter)
    whole = load_file(tmp_path / "saved/trained.safetensors")
    assert whole and all(
        any(part in name for part in ("norm1.", "norm2.", "ofs_embedding")) for name in whole
    )
    # Saved again by a process that only loaded it, as the assembly does, nothing is lost.
    again.requires_grad_(False)
    save_decoder(again, tmp_path / "copies/second")
    torch.testing.assert_close(predict(load_decoder(tmp_path / "copies/second")), predict(decoder))


def test_peft_reads_the_adapter(base, tmp_path):
    from peft import PeftModel

    decoder = trained(base)
    save_decoder(decoder, tmp_path / "saved")
    plain = AnimationDecoder.from_base(base, 3, True, 8)
    plain.load_state_dict(load_file(tmp_path / "saved/trained.safetensors"), strict=False)
    wrapped = PeftModel.from_pretrained(plain, tmp_path / "saved/adapter")
    torch.testing.assert_close(predict(wrapped.base_model.model), predict(decoder))


def test_whole_decoder_in_half_precision(base, tmp_path):
    decoder = AnimationDecoder.from_base(base, 3, True, 8)
    save_decoder(decoder, tmp_path / "saved", torch.float16)
    weights = load_file(tmp_path / "saved/diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    torch.testing.assert_close(
        predict(load_decoder(tmp_path / "saved")), predict(decoder), rtol=0.05, atol=0.05
    )


def test_bad_files_are_named(base, tmp_path):
    save_decoder(trained(base), tmp_path / "saved")
    adapter = tmp_path / "saved/adapter/adapter_model.safetensors"
    tensors = load_file(adapter)
    tensors.popitem()
    save_file(tensors, adapter)
    with pytest.raises(CheckpointError, match="is missing"):
        load_decoder(tmp_path / "saved")
    adapter.write_bytes(adapter.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not a whole saved decoder"):
        load_decoder(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="no CogVideoX"):
        load_decoder(save_again(base, tmp_path), base=tmp_path / "nowhere")


def save_again(base, tmp_path):
    save_decoder(trained(base), tmp_path / "other")
    return tmp_path / "other"
