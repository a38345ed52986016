"""Multimodal targets, their taps and positions against transformers', in float32; and which ones are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
from sglang.srt.managers.mm_utils import init_mm_embedding_cache
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor
from transformers import AutoProcessor

from sglang_dflash.checkpoint.target_class import language_model
from sglang_dflash.drafter.vocabulary import BorrowedVocabulary
from sglang_dflash.round.opened import Round
from sglang_dflash.round.prefill import rope_deltas
from sglang_dflash.round.state import RequestState
from sglang_dflash.round.target import TargetRows
from tests.unit.decoders import MASK
from tests.unit.drafters import TARGET, save_random, speculators_config, zlab_config
from tests.unit.kimi import PICTURE, write_kimi
from tests.unit.tapped import Target
from tests.unit.wrappers import FIRST_SPECIAL, VOCABULARY, WRAPPERS, clip, picture, write_wrapper

WIDTH, TAPS = 4, (-1, 0, 2, 4)
NOISE = (
    1e-4  # of float32 after several layers and a tower; a wrong tap or position is off by about 1
)

pytestmark = pytest.mark.usefixtures("one_rank", "eager")


@pytest.fixture(autouse=True)
def nothing_embedded() -> None:
    """Pictures' embeddings are kept by what the pictures are, whatever the model."""
    init_mm_embedding_cache(1 << 20)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {**TARGET, "head_dim": 16, "vocab_size": VOCABULARY}
    taps = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
    raw = zlab_config(dflash_config=taps, **sizes)
    return save_random(tmp_path_factory.mktemp("drafter"), speculators_config(raw, "target"))


class Asked:
    """A prompt with pictures and videos as a server keeps it."""

    def __init__(self, model: torch.nn.Module, config: Any, inputs: dict[str, torch.Tensor]):
        ids, items = inputs["input_ids"], []
        # Frames of GLM's videos have the tokens of pictures.
        frames = config.image_token_id if "glm" in config.model_type else config.video_token_id
        for modality, token, pixels, grid in (
            (Modality.IMAGE, config.image_token_id, "pixel_values", "image_grid_thw"),
            (Modality.VIDEO, frames, "pixel_values_videos", "video_grid_thw"),
        ):
            if pixels in inputs:
                item = MultimodalDataItem(
                    modality=modality,
                    feature=inputs[pixels],
                    offsets=BaseMultimodalProcessor.get_mm_items_offset(ids[0], token),
                    model_specific_data={grid: inputs[grid]},
                )
                item.set_pad_value()
                items.append(item)
        positions, delta = rope_index(config, inputs)
        self.inputs = MultimodalInputs(
            mm_items=items,
            im_token_id=config.image_token_id,
            video_token_id=frames,
            mrope_position_delta=delta,
        )
        self.positions = positions.squeeze(1)  # [3, tokens]
        self.ids = torch.tensor(model.pad_input_ids(ids[0].tolist(), self.inputs))

    def part(self, first: int, last: int) -> dict[str, Any]:
        return {"mm_inputs": [self.inputs], "mrope_positions": self.positions[:, first:last]}


def rope_index(config: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [3, 1, tokens] of a prompt, and how much fewer than tokens they are, as the release's processors ask
    for them."""
    ids = inputs["input_ids"]
    grids = {name: inputs.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    if "glm4v" in config.model_type:
        return MRotaryEmbedding.get_rope_index_glm4v(ids, config, attention_mask=None, **grids)
    return MRotaryEmbedding.get_rope_index(
        spatial_merge_size=config.vision_config.spatial_merge_size,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        vision_start_token_id=config.vision_start_token_id,
        model_type=config.model_type,
        tokens_per_second=getattr(config.vision_config, "tokens_per_second", None),
        input_ids=ids,
        second_per_grid_ts=inputs.get("second_per_grid_ts"),
        **grids,
    )


class Worded:
    """A prompt without pictures, or where they change no positions."""

    def __init__(self, mrope: bool, inputs: dict[str, torch.Tensor]):
        self.ids, self.inputs, self._mrope = inputs["input_ids"][0], None, mrope

    def part(self, first: int, last: int) -> dict[str, Any]:
        positions = torch.arange(first, last).expand(3, -1)
        given = {"mm_inputs": [self.inputs]} if self.inputs else {}
        return given | {"mrope_positions": positions if self._mrope else None}


MROPE = [n for n, w in WRAPPERS.items() if "mrope_section" in w.text.get("rope_parameters", {})]
# Frames of a video see each other in the release's tower and not in transformers', so the release's is taken for both.
FRAMES_MEET = "Qwen2.5-VL"
# What each is shown: GLM takes pictures or videos.
SHOWN = [
    *((name, "") for name in WRAPPERS),
    *((name, shown) for name in MROPE for shown in ("picture", "video")),
    *((name, "picture and video") for name in MROPE if "GLM" not in name),
]


@pytest.mark.parametrize(("name", "shown"), SHOWN)
@torch.no_grad()
def test_taps(name: str, shown: str, drafter: Path, tmp_path: Path) -> None:
    """Of a prompt in two pieces, the first of which ends in a picture or a video, and of the block behind it."""
    reference, processor = (
        write_wrapper(tmp_path, name),
        AutoProcessor.from_pretrained(tmp_path),
    )
    given, text = {}, "Ben has"
    if "picture" in shown:
        given["images"] = [picture(0, 112, 84)]
        text += WRAPPERS[name].picture
    if "video" in shown:
        given["videos"] = [np.stack(clip(0, 4, 84, 56))]
        told = {"fps": 2.0, "total_num_frames": 4, "duration": 2.0, "frames_indices": [*range(4)]}
        given |= {"video_metadata": [told], "do_sample_frames": False}
        text += WRAPPERS[name].video
    inputs = dict(processor(text=[text + " many marbles"], return_tensors="pt", **given))
    block = torch.randint(4, 700, (WIDTH,))
    whole = inputs | {"input_ids": torch.cat([inputs["input_ids"], block[None]], dim=1)}
    for kind in whole.keys() & {"mm_token_type_ids", "attention_mask"}:
        whole[kind] = torch.cat([whole[kind], whole[kind][:, -1:].expand(-1, WIDTH)], dim=1)
    target = Target(tmp_path, drafter)
    mrope = name in MROPE
    if shown:
        asked = Asked(target.model, reference.config, inputs)
    else:
        asked = Worded(mrope, inputs)
    if shown:  # transformers 5.3 would have its own idea of a lone picture's time
        after = asked.positions[:, -1:] + 1 + torch.arange(WIDTH)
        whole["position_ids"] = torch.cat([asked.positions, after], dim=1)[:, None]
    if name == FRAMES_MEET and "video" in shown:
        at = whole.pop("input_ids") == reference.config.video_token_id
        del whole["pixel_values_videos"], whole["video_grid_thw"]
        embeddings = reference.get_input_embeddings()(
            torch.cat([inputs["input_ids"], block[None]], 1)
        )
        embeddings[at] = target.model.get_video_feature(asked.inputs.mm_items[-1:])
        whole["inputs_embeds"] = embeddings
    expected = reference(**whole, output_hidden_states=True)
    compare(target, asked, block, expected, mrope)


@pytest.mark.parametrize("pictured", [False, True])
@torch.no_grad()
def test_taps_of_kimi(pictured: bool, drafter: Path, tmp_path: Path) -> None:
    """Beside its language model alone, which gets what the release's tower makes of a picture."""
    reference = write_kimi(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path, trust_remote_code=True)
    medium = {"type": "image", "image": picture(0, 112, 84)}
    tokens = processor.media_processor.media_tokens_calculator(medium) * pictured
    text = ["Ben has" + PICTURE * tokens + " many marbles"]
    inputs = processor(text=text, medias=[medium] * pictured)
    target, ids = Target(tmp_path, drafter), inputs["input_ids"]
    block = torch.randint(4, 700, (WIDTH,))
    embeddings = reference.get_input_embeddings()(torch.cat([ids[0], block]))
    asked = Worded(False, inputs)
    if pictured:
        at = (ids[0] == FIRST_SPECIAL).nonzero().flatten()
        item = MultimodalDataItem(
            modality=Modality.IMAGE,
            feature=inputs["pixel_values"],
            offsets=[(int(at[0]), int(at[-1]))],
            model_specific_data={"grid_thws": inputs["grid_thws"]},
        )
        item.set_pad_value()
        embeddings[at] = target.model.get_image_feature([item])
        asked.inputs = MultimodalInputs(mm_items=[item], im_token_id=FIRST_SPECIAL)
        asked.ids = torch.tensor(target.model.pad_input_ids(ids[0].tolist(), asked.inputs))
    expected = reference(inputs_embeds=embeddings[None], output_hidden_states=True)
    compare(target, asked, block, expected, mrope=False)


def compare(target: Target, asked: Any, block: torch.Tensor, expected: Any, mrope: bool) -> None:
    """Taps of a prompt in two pieces and of the block behind it, and the block's logits, with transformers'."""
    length = len(asked.ids)
    taps = torch.cat([expected.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)
    made = []
    for first, last in ((0, length // 2), (length // 2, length)):
        part = asked.ids[first:last].clone()
        output = target.run(part, first, ForwardMode.EXTEND, **asked.part(first, last))
        made.append(output.taps)
    rows = verified(target, asked, block, length, mrope)
    assert isinstance(rows, TargetRows)
    assert (torch.cat([*made, rows.taps]) - taps).norm() < NOISE * taps.norm()
    logits, expected_logits = (
        rows.logits(slice(None)).next_token_logits,
        expected.logits[0, length:],
    )
    assert (logits - expected_logits).norm() < NOISE * expected_logits.norm()
    likeliest = BorrowedVocabulary(language_model(target.model)).argmax(rows.hidden_states)
    assert torch.equal(likeliest, expected_logits.argmax(-1))


def verified(target: Target, asked: Any, block: torch.Tensor, length: int, mrope: bool) -> Any:
    """The block as a round has it, whose bonus token follows the prompt; the round's positions stay what they are."""
    state, row = RequestState(2, "cpu", mrope), torch.tensor([0])
    batch = SimpleNamespace(multimodal_inputs=[asked.inputs], reqs=[object()], input_ids=asked.ids)
    deltas = rope_deltas(SimpleNamespace(state=state), batch)
    state.start(row, block[:1], torch.tensor([length]), rope_deltas=deltas)
    table = torch.arange(1, 65)[None].int()
    round = Round.open(state, row, torch.tensor([length]), WIDTH, table, 1024)
    runner = SimpleNamespace(
        model=target.model,
        model_is_mrope=mrope,
        token_to_kv_pool=target.pool,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        attn_backend=target.backend,
        spec_algorithm=None,
    )
    batch = round.forward_batch(runner, block, CaptureHiddenMode.FULL)
    target.backend.init_forward_metadata(batch)
    rows = target.model(block, batch.positions, batch)
    assert torch.equal(round.positions, length + torch.arange(WIDTH))
    return rows
