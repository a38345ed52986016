"""Taps of targets of many architectures against the hidden states of transformers, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator
from sglang.srt.models.registry import ModelRegistry
from transformers import AutoConfig

from sglang_dflash.drafter.vocabulary import BorrowedVocabulary
from sglang_dflash.round.target import TargetRows, tap_target
from sglang_dflash.round.verify_input import DFlashVerifyInput
from tests.unit.decoders import ARCHITECTURES, MASK, SIZES, write_target
from tests.unit.drafters import TARGET, save_random, speculators_config, zlab_config

PROMPT, WIDTH, TAPS = 21, 4, (-1, 0, 2, 4)
NOISE = 1e-5  # of float32 after several layers; a wrong tap is off by about 1


pytestmark = pytest.mark.usefixtures("one_rank", "eager")


@pytest.fixture(scope="module")
def eager() -> Iterator[None]:
    """As on a server on a CPU."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {name: SIZES[name] for name in TARGET}
    raw = zlab_config(
        dflash_config={"mask_token_id": MASK, "target_layer_ids": list(TAPS)}, **sizes
    )
    return save_random(tmp_path_factory.mktemp("drafter"), speculators_config(raw, "target"))


class Target:
    """A target as the release loads it, tapped, with a pool of KV slots."""

    def __init__(self, folder: Path, drafter: Path):
        config = AutoConfig.from_pretrained(folder)
        model_class, _ = ModelRegistry.resolve_model_cls(config.architectures)
        self.model = model_class(config).eval()
        files = [str(file) for file in folder.glob("*.safetensors")]
        self.model.load_weights(safetensors_weights_iterator(files, disable_mmap=True))
        args = SimpleNamespace(
            model_path=str(folder),
            speculative_draft_model_path=str(drafter),
            speculative_draft_model_revision=None,
        )
        tap_target(SimpleNamespace(server_args=args, model=self.model))
        attention = next(m for m in self.model.modules() if hasattr(m, "tp_k_head_num"))
        self.pool = MHATokenToKVPool(
            size=64,
            page_size=1,
            dtype=torch.float32,
            head_num=attention.tp_k_head_num,
            head_dim=attention.head_dim,
            layer_num=SIZES["num_hidden_layers"],
            device="cpu",
            enable_memory_saver=False,
        )

    @torch.no_grad()
    def run(self, ids: torch.Tensor, start: int, mode: ForwardMode):
        """Tokens of one request from position `start` on: a prompt, a piece of one, or a block."""
        positions, end = torch.arange(start, start + len(ids)), start + len(ids)
        verifies = mode == ForwardMode.TARGET_VERIFY
        block = DFlashVerifyInput(len(ids), positions, CaptureHiddenMode.FULL)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=1,
            input_ids=ids,
            req_pool_indices=torch.tensor([0]),
            seq_lens=torch.tensor([start if verifies else end]),
            seq_lens_sum=end,
            extend_prefix_lens=torch.tensor([start]),
            extend_seq_lens=torch.tensor([len(ids)]),
            out_cache_loc=1 + positions,
            positions=positions,
            spec_info=block if verifies else None,
            attn_backend=TorchNativeAttnBackend(SimpleNamespace(device="cpu")),
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(1, 65)[None].int()),
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        return self.model(ids, positions, batch)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_taps(name: str, drafter: Path, tmp_path: Path) -> None:
    """Of a prompt in two pieces and of a block, each tap beside the other; and the head that rounds use."""
    reference = write_target(tmp_path, name)
    ids = torch.randint(4, SIZES["vocab_size"], (PROMPT + WIDTH,))
    with torch.no_grad():
        expected = reference(ids[None], output_hidden_states=True)
    reference_logits = expected.logits[0, PROMPT:]
    taps = torch.cat([expected.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)
    target = Target(tmp_path, drafter)
    made = []
    for first, last in ((0, 8), (8, PROMPT)):
        made.append(target.run(ids[first:last], first, ForwardMode.EXTEND).taps)
    rows = target.run(ids[PROMPT:], PROMPT, ForwardMode.TARGET_VERIFY)
    assert isinstance(rows, TargetRows)
    assert (torch.cat([*made, rows.taps]) - taps).norm() < NOISE * taps.norm()
    logits = rows.logits(slice(None)).next_token_logits
    assert (logits - reference_logits).norm() < NOISE * reference_logits.norm()
    likeliest = BorrowedVocabulary(target.model).argmax(rows.hidden_states)
    assert torch.equal(likeliest, reference_logits.argmax(-1))
