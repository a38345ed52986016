"""What a round hands to the models: tokens, positions, slots."""

from types import SimpleNamespace

import torch

from sglang_dflash.round.accept import accept
from sglang_dflash.round.opened import Round
from sglang_dflash.round.prefill import extend_positions
from sglang_dflash.round.propose import block_tokens
from sglang_dflash.round.state import RequestState, ends_of

WIDTH, CONTEXT = 4, 12


def table() -> torch.Tensor:
    """A table of 3 requests whose slot at row r, column c is 100 * (r + 1) + c."""
    rows, columns = torch.arange(1, 4)[:, None], torch.arange(CONTEXT + WIDTH)
    return (100 * rows + columns).to(torch.int32)


def state(lengths: dict[int, int]) -> RequestState:
    made = RequestState(3, "cpu")
    rows = torch.tensor(list(lengths))
    made.start(rows, rows + 50, torch.tensor(list(lengths.values())))
    return made


def open_round(state: RequestState, rows: list[int]) -> Round:
    rows = torch.tensor(rows)
    return Round.open(state, rows, state.lengths[rows], WIDTH, table(), CONTEXT)


def test_block_tokens() -> None:
    tokens = block_tokens(torch.tensor([7, 8]), mask_token_id=3, width=4)
    assert tokens.tolist() == [7, 3, 3, 3, 8, 3, 3, 3]
    assert tokens.dtype == torch.int64


def test_round_starts_after_the_committed_tokens() -> None:
    round = open_round(state({2: 5, 0: 1}), [2, 0])
    assert round.bonus_tokens.tolist() == [52, 50]
    assert round.positions.tolist() == [5, 6, 7, 8, 1, 2, 3, 4]
    assert round.slots.tolist() == [305, 306, 307, 308, 101, 102, 103, 104]


def test_positions_stay_inside_the_context() -> None:
    round = open_round(state({1: CONTEXT - 2}), [1])
    assert round.positions.tolist() == [10, 11, 11, 11]
    assert round.slots.tolist() == [210, 211, 212, 213]


def test_a_round_in_vain_past_the_end() -> None:
    """The length of a request that has ended may pass the longest context by a block."""
    round = open_round(state({1: CONTEXT + WIDTH - 1}), [1])
    assert round.slots.tolist() == [212, 213, 214, 215]


def test_padding_requests_touch_only_slot_0() -> None:
    made = state({1: 5})
    round = open_round(made, [1, made.padding_row])
    assert round.slots.tolist() == [205, 206, 207, 208, 0, 0, 0, 0]


def test_a_round_moves_its_requests_and_no_others() -> None:
    made = state({0: 5, 1: 6, 2: 7})
    accepted = accept(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 9], [4, 5]]))
    made.advance(torch.tensor([2, 0]), accepted.tokens, accepted.lengths, accepted.bonus_tokens)
    assert made.lengths.tolist() == [8, 6, 9, 0]
    assert made.bonus_tokens.tolist() == [6, 51, 2, 0]
    rows = torch.tensor([made.padding_row, 1])
    made.advance(rows, accepted.tokens, accepted.lengths, accepted.bonus_tokens)
    assert made.lengths.tolist() == [8, 9, 9, 0]


def test_extend_positions_follow_the_cached_prefix() -> None:
    batch = SimpleNamespace(
        extend_prefix_lens=[0, 7], extend_seq_lens=[3, 2], input_ids=torch.zeros(5)
    )
    assert extend_positions(batch).tolist() == [0, 1, 2, 7, 8]


def test_what_ends_requests() -> None:
    """At most so many tokens each, none where the end is ignored, and the length at which the limit is reached.

    What pads a batch has always ended.
    """
    tokenizer = SimpleNamespace(eos_token_id=7, additional_stop_token_ids={8})

    def asked(stop: set[int] | None, ignore: bool, tokenizer: object) -> SimpleNamespace:
        params = SimpleNamespace(stop_token_ids=stop, ignore_eos=ignore, max_new_tokens=10)
        ids = {"origin_input_ids": [1, 2, 3], "eos_token_ids": {7}}
        return SimpleNamespace(sampling_params=params, tokenizer=tokenizer, **ids)

    reqs = [asked({3}, False, tokenizer), asked({3}, True, tokenizer), asked(None, False, None)]
    reqs.append(asked({1, 2, 3, 4, 5}, False, None))
    assert [row[:-1].tolist() for row in ends_of(reqs)] == [
        [3, 7, 8, -100],
        [-100] * 4,
        [7, -100, -100, -100],
        [1, 2, 3, 4],
    ]
    assert {int(row[-1]) for row in ends_of(reqs)} == {12}
    made = RequestState(4, "cpu")
    made.start(torch.arange(4), torch.tensor([9, 7, 7, 9]), torch.full((4,), 3), ends_of(reqs))
    assert made.ended.tolist() == [0, 0, 1, 0, 1]
    accepted = accept(torch.full((4, 3), 9), torch.full((4, 2), 9))
    for _ in range(3):  # a first token and three rounds of three are ten
        assert made.ended.tolist() == [0, 0, 1, 0, 1]
        made.advance(torch.arange(4), accepted.tokens, accepted.lengths, accepted.bonus_tokens)
    assert made.ended.tolist() == [1, 1, 1, 1, 1]
