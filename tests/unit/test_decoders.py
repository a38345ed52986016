"""Taps of targets of many architectures against the hidden states of transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from transformers import LlamaForCausalLM, PreTrainedModel

from sglang_dflash.drafter.vocabulary import BorrowedVocabulary
from sglang_dflash.round.target import TargetRows
from tests.unit.decoders import ARCHITECTURES, MASK, SIZES, write_target
from tests.unit.drafters import TARGET, save_random, speculators_config, zlab_config
from tests.unit.sliding import write_mimo
from tests.unit.tapped import Target

PROMPT, WIDTH, TAPS = 21, 4, (-1, 0, 2, 4)
NOISE = 1e-5  # of float32 after several layers; a wrong tap is off by about 1


pytestmark = pytest.mark.usefixtures("one_rank", "eager")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {name: SIZES[name] for name in TARGET}
    raw = zlab_config(
        dflash_config={"mask_token_id": MASK, "target_layer_ids": list(TAPS)}, **sizes
    )
    return save_random(tmp_path_factory.mktemp("drafter"), speculators_config(raw, "target"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_taps(name: str, drafter: Path, tmp_path: Path) -> None:
    """Of a prompt in two pieces and of a block, each tap beside the other; and the head that rounds use."""
    check(write_target(tmp_path, name), tmp_path, drafter)


def test_taps_of_mimo(drafter: Path, tmp_path: Path) -> None:
    """With full layers alone, of which all are as large, MiMo-V2-Flash is a Llama."""
    alike = dict(hybrid_layer_pattern=[0] * 6, v_head_dim=16, rms_norm_eps=1e-5)
    write_mimo(tmp_path, **alike)
    reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    check(reference, tmp_path, drafter)


def check(reference: PreTrainedModel, folder: Path, drafter: Path) -> None:
    ids = torch.randint(4, SIZES["vocab_size"], (PROMPT + WIDTH,))
    with torch.no_grad():
        expected = reference(ids[None], output_hidden_states=True)
    reference_logits = expected.logits[0, PROMPT:]
    taps = torch.cat([expected.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)
    target = Target(folder, drafter)
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
