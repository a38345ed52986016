"""The target as rounds need it: taps, the embedding among them, and sums over ranks."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers import communicator
from sglang.srt.layers.communicator import LayerCommunicator
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from torch import nn

from sglang_dflash.round.target import (
    EMBEDDING,
    LayerTaps,
    TappedOutput,
    TargetHead,
    TargetRows,
    sum_at_once,
)
from sglang_dflash.round.verify_input import DFlashVerifyInput

HIDDEN, VOCABULARY = 4, 9


class Processor(nn.Module):
    """Logits of the rows that it is given; hidden states only if it is given those of the taps."""

    def forward(self, ids, hidden_states, lm_head, batch, aux, *rest, **more):
        assert aux is None
        return LogitsProcessorOutput(next_token_logits=lm_head(hidden_states))


@pytest.fixture
def model() -> nn.Module:
    made = nn.Module()
    made.model = nn.Module()
    made.model.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
    made.lm_head = nn.Linear(HIDDEN, VOCABULARY)
    made.logits_processor = Processor()
    return made


def head_of(model: nn.Module, taps_embedding: bool) -> TargetHead:
    names = [name for name, _ in model.named_parameters()]
    model.logits_processor = TargetHead(model, taps_embedding)
    assert [name for name, _ in model.named_parameters()] == names  # weights keep their names
    return model.logits_processor


def run(head: TargetHead, model: nn.Module, batch: SimpleNamespace, layers: int = 2):
    ids = batch.input_ids
    x = torch.arange(len(ids) * HIDDEN).view(-1, HIDDEN).float()
    return head(ids, x, model.lm_head, batch, [x + 100 * i for i in range(1, layers + 1)])


@torch.no_grad()
@pytest.mark.parametrize("taps_embedding", [False, True])
def test_of_a_block_there_are_rows(model: nn.Module, taps_embedding: bool) -> None:
    """No logits, until somebody wants those of some rows."""
    ids = torch.tensor([1, 2, 3, 4])
    batch = SimpleNamespace(input_ids=ids, spec_info=DFlashVerifyInput(2, ids, None))
    rows = run(head_of(model, taps_embedding), model, batch)
    assert isinstance(rows, TargetRows)
    assert rows.taps.shape == (4, (2 + taps_embedding) * HIDDEN)
    if taps_embedding:
        assert torch.equal(rows.taps[:, :HIDDEN], model.model.embed_tokens(ids))
    part = rows.logits(slice(1, 3)).next_token_logits
    assert torch.equal(part, model.lm_head(rows.hidden_states[1:3]))


@torch.no_grad()
def test_after_a_prefill_there_are_logits_and_taps(model: nn.Module) -> None:
    model.lm_head.weight[:] = 1
    model.lm_head.bias[:] = 0
    batch = SimpleNamespace(input_ids=torch.tensor([1, 2]), spec_info=None, input_embeds=None)
    output = run(head_of(model, False), model, batch)
    assert isinstance(output, TappedOutput)
    assert output.next_token_logits.shape == (2, VOCABULARY) and output.hidden_states is None
    assert output.taps.shape == (2, 2 * HIDDEN) and output.not_finite.tolist() == [False, False]


@torch.no_grad()
def test_a_prompt_of_embeddings_has_no_ids(model: nn.Module) -> None:
    """Where a request brings embeddings, those are what the first layer reads."""
    embeds = torch.full((2, HIDDEN), 7.0)
    batch = SimpleNamespace(input_ids=torch.tensor([0, 0]), spec_info=None, input_embeds=embeds)
    output = run(head_of(model, True), model, batch)
    assert torch.equal(output.taps[:, :HIDDEN], embeds)


class LateSum(nn.Module):
    """A layer whose output the release takes before the next layer's norm."""

    def __init__(self, last: bool):
        super().__init__()
        self.layer_communicator = object.__new__(LayerCommunicator)
        self.layer_communicator.is_last_layer = last
        self.layer_communicator._context = SimpleNamespace(tp_size=2)
        self.layer_communicator._speculative_algo = None

    def forward(self, positions, hidden_states, forward_batch, residual): ...


class CapturesSum(LateSum):
    """A layer that hands out what came into it, after its norm."""

    def forward(
        self, positions, hidden_states, forward_batch, residual, captured_last_layer_outputs=None
    ): ...


@pytest.mark.parametrize(
    ("kind", "hooked", "tapped_fuse"),
    [(LateSum, False, False), (CapturesSum, False, True), (CapturesSum, True, False)],
)
def test_a_tapped_layer_is_summed_over_the_ranks(
    kind: type, hooked: bool, tapped_fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere the sum stays fused with the norm that follows; SGLang's own decision is asked."""
    monkeypatch.setattr(communicator, "apply_flashinfer_allreduce_fusion", lambda n: True)
    monkeypatch.setattr(communicator, "is_dp_attention_enabled", lambda: False)
    context = SimpleNamespace(input_scattered=False)
    monkeypatch.setattr(communicator, "get_attn_tp_context", lambda: context)
    body = nn.Module()
    body.layers = nn.ModuleList(kind(last=i == 5) for i in range(6))
    batch = SimpleNamespace(input_ids=torch.zeros(3))
    sum_at_once(body, [1, 3], hooked)
    fuses = [
        layer.layer_communicator.should_fuse_mlp_allreduce_with_next_layer(batch)
        for layer in body.layers
    ]
    assert fuses == [True, tapped_fuse, True, tapped_fuse, True, False]


class Layer(nn.Module):
    """A decoder layer that adds to what it reads in place, as norms do on a GPU, and to its residual."""

    def forward(self, positions, hidden_states, residual):
        return hidden_states.add_(1), residual + 10


@pytest.mark.parametrize(("sums_later", "outputs"), [(False, [6, 7]), (True, [16, 27])])
def test_hooks_keep_what_layers_read_and_return(sums_later: bool, outputs: list[int]) -> None:
    layers = nn.ModuleList(Layer() for _ in range(3))
    kept = LayerTaps(layers, [EMBEDDING, 0, 1], sums_later)
    for keywords in (False, True):
        x, residual, returned = torch.full((2, HIDDEN), 5.0), torch.zeros(2, HIDDEN), []
        for layer in layers:
            read = (None, x.clone(), residual)
            if keywords and layer is layers[0]:
                x, residual = layer(None, hidden_states=x, residual=residual)
            else:
                x, residual = layer(*read)
            returned.append(weakref.ref(x))
        taps = kept.take()
        assert [tap[0, 0].item() for tap in taps] == [5, *outputs]
        del x, read
        assert not any(each() is not None for each in returned)  # after the head nothing is kept
